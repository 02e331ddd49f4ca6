"""Channels between threads, and between processes that are killed, stopped and held."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from cupynccl_reduce import CommunicationError, LayoutError
from cupynccl_reduce.control.channel import Channel
from cupynccl_reduce.control.frames import MAX_STATE_BYTES, Frame, Invitation, Kind
from cupynccl_reduce.control.sockets import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LIMIT_S = 30.0
_invitations: list[Invitation] = []
CHILD = """
import ctypes, sys, time
from cupynccl_reduce.control.channel import Channel
from cupynccl_reduce.control.frames import Invitation
rank, world_size = int(sys.argv[1]), int(sys.argv[2])
channel = Channel(rank, world_size, Invitation.decode(bytes.fromhex(sys.stdin.readline())))
channel.publish(b"state of %d" % rank)
print("READY", flush=True)
command = sys.stdin.readline().strip()
if command == "hold":
    ctypes.PyDLL(None).sleep(60)
elif command == "watch":
    while (peer := channel.peers()[int(sys.stdin.readline())]).link != "lost":
        time.sleep(0.01)
    print("LOST", peer.rank, flush=True)
elif command == "exit":
    sys.exit(0)
else:
    channel.close()
"""


def on_threads(world_size: int, work: Callable[[Channel, int], Any]) -> list[Any]:
    """Run `work(channel, rank)` on threads, each with a channel; raise what one raised."""
    server = Server("127.0.0.1")
    results: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        try:
            channel = Channel(rank, world_size, server if rank == 0 else server.invitation)
            try:
                results[rank] = work(channel, rank)
                channel.all_gather(b"")  # nobody leaves before all are done
            finally:
                channel.close()
        except BaseException as error:  # noqa: BLE001  # raised below
            results[rank] = error

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in threads)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.005)


@contextmanager
def processes(world_size: int) -> Iterator[tuple[Channel, list[subprocess.Popen[str]]]]:
    """Rank 0's channel, and processes with the others'."""
    server = Server("127.0.0.1")
    _invitations.append(server.invitation)
    told = server.invitation.encode().hex() + "\n"
    children = []
    for rank in range(1, world_size):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(rank), str(world_size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdin is not None
        child.stdin.write(told)
        child.stdin.flush()
        children.append(child)
    channel = Channel(0, world_size, server)
    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "READY\n"
        yield channel, children
    finally:
        channel.close()
        for child in children:
            child.kill()
            child.communicate()


def say(child: subprocess.Popen[str], *lines: str) -> None:
    assert child.stdin is not None
    child.stdin.write("".join(f"{line}\n" for line in lines))
    child.stdin.flush()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_gather_gives_everyones_payload_in_rank_order(world_size: int) -> None:
    def work(channel: Channel, rank: int) -> list[list[bytes]]:
        sizes = (0, 1, 1000, 3 << 20)
        return [channel.all_gather(bytes([rank]) * size) for size in sizes]

    for answers in on_threads(world_size, work):
        for size, answer in zip((0, 1, 1000, 3 << 20), answers, strict=True):
            assert answer == [bytes([rank]) * size for rank in range(world_size)]


def test_states_and_notices_reach_the_others() -> None:
    def work(channel: Channel, rank: int) -> list[tuple[int, bytes]]:
        channel.publish(b"state %d" % rank)
        until(lambda: [p.state for p in channel.peers()] == [b"state %d" % r for r in range(3)])
        for number in range(3):
            channel.tell(b"notice %d of %d" % (number, rank))
        notices: list[tuple[int, bytes]] = []
        until(lambda: notices.extend(channel.notices()) or len(notices) == 6)
        return notices

    for rank, notices in enumerate(on_threads(3, work)):
        for other in {0, 1, 2} - {rank}:
            mine = [notice for origin, notice in notices if origin == other]
            assert mine == [b"notice %d of %d" % (number, other) for number in range(3)]


def test_what_is_too_long_is_refused() -> None:
    def work(channel: Channel, rank: int) -> None:
        with pytest.raises(LayoutError, match="256"):
            channel.publish(b"x" * (MAX_STATE_BYTES + 1))
        with pytest.raises(LayoutError, match="65536"):
            channel.tell(b"x" * ((64 << 10) + 1))

    on_threads(1, work)


def test_a_rank_that_has_closed_has_left() -> None:
    with processes(2) as (channel, (child,)):
        say(child, "close")
        until(lambda: channel.peers()[1].link == "left")
        assert channel.peers()[1].state == b"state of 1"
        with pytest.raises(CommunicationError, match="rank 1 has left") as caught:
            channel.all_gather(b"")
        assert caught.value.ranks == (1,)


def test_abort_frees_who_waits_and_notices_still_go() -> None:
    with processes(2) as (channel, _children):
        freed = []

        def wait() -> None:
            try:
                channel.all_gather(b"")
            except CommunicationError as error:
                freed.append(error)

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        channel.abort()
        thread.join(LIMIT_S)
        assert len(freed) == 1
        channel.tell(b"still")


def test_a_killed_rank_is_lost_for_all() -> None:
    with processes(4) as (channel, children):
        for child in (children[0], children[2]):
            say(child, "watch", "2")
        children[1].send_signal(signal.SIGKILL)
        until(lambda: channel.peers()[2].link == "lost")
        for child in (children[0], children[2]):
            # It asks again and again which rank to look at.
            while child.poll() is None and channel.peers()[2].link == "lost":
                try:
                    say(child, *["2"] * 50)
                except BrokenPipeError:
                    break
                time.sleep(0.05)
            assert child.stdout is not None
            assert child.stdout.readline() == "LOST 2\n"
        with pytest.raises(CommunicationError, match="rank 2 died"):
            channel.all_gather(b"")


@pytest.mark.parametrize("how", ["stopped", "GIL held"])
def test_a_rank_that_says_nothing_is_silent_and_not_lost(how: str) -> None:
    with processes(2) as (channel, (child,)):
        if how == "stopped":
            child.send_signal(signal.SIGSTOP)
        else:
            say(child, "hold")
        until(lambda: channel.peers()[1].link == "silent")
        if how == "stopped":
            child.send_signal(signal.SIGCONT)
            until(lambda: channel.peers()[1].link == "up")


def test_a_process_that_does_not_close_ends() -> None:
    with processes(2) as (channel, (child,)):
        say(child, "exit")
        assert child.wait(LIMIT_S) == 0
        until(lambda: channel.peers()[1].link == "lost")


def test_a_rank_that_never_comes_is_named() -> None:
    with pytest.raises(CommunicationError, match="rank 1") as caught:
        Channel(0, 2, Server("127.0.0.1"), timeout_s=0.2)
    assert caught.value.ranks == (1,)


def test_a_wrong_key_does_not_get_in() -> None:
    server = Server("127.0.0.1")
    public, _ = zmq.curve_keypair()
    keys = zmq.curve_keypair()
    forged = Invitation(server.invitation.host, server.invitation.port, public, *keys)
    with pytest.raises(CommunicationError, match="rank 0"):
        Channel(1, 2, forged, timeout_s=0.2)
    assert not server.socket.poll(100)
    server.context.destroy(linger=0)


def test_a_stranger_with_the_key_changes_nothing() -> None:
    with processes(2) as (channel, _children):
        # A state comes with the next beat, and is to stay.
        until(lambda: channel.peers()[1].state == b"state of 1")
        before = [(p.rank, p.state, p.link) for p in channel.peers()]
        arrived = []
        take = channel._service.node.take

        def spy(sender: bytes, frame: Frame, *rest: Any) -> Any:
            if sender == b"r9":
                arrived.append(frame.number)
            return take(sender, frame, *rest)

        channel._service.node.take = spy
        told = _invitations[-1]
        context = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.identity = b"r9"
        stranger.curve_serverkey = told.server_key
        stranger.curve_publickey, stranger.curve_secretkey = told.public_key, told.secret_key
        stranger.connect(f"tcp://{told.host}:{told.port}")
        for number in range(200):
            stranger.send(Frame(Kind.NOTICE, 9, number, 0, b"lies").encode())
            stranger.send(b"garbage" * number)
        until(lambda: len(arrived) == 200)
        assert arrived == list(range(200))
        assert channel.notices() == []
        assert [(p.rank, p.state, p.link) for p in channel.peers()] == before
        context.destroy(linger=0)


def test_a_closed_channel_writes_into_nobodys_file() -> None:
    channel = Channel(0, 1, Server("127.0.0.1"))
    channel.close()
    pipes = [os.pipe() for _ in range(8)]  # they take over the numbers that are free now
    channel.tell(b"late")
    for read, write in pipes:
        os.close(write)
        assert os.read(read, 1) == b""
        os.close(read)
