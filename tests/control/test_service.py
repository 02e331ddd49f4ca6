"""The thread behind a channel: who gets in, and what it reads and sends before its end."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from cupynccl_reduce import CommunicationError
from cupynccl_reduce.control import pulse
from cupynccl_reduce.control import service as service_module
from cupynccl_reduce.control.channel import Channel
from cupynccl_reduce.control.frames import MAX_GATHER_BYTES, Frame, Kind
from cupynccl_reduce.control.sockets import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LIMIT_S = 60.0  # for what hangs


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.005)


def together(*works: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result(LIMIT_S) for future in [pool.submit(work) for work in works]]


def pair() -> tuple[Channel, Channel]:
    server = Server("127.0.0.1")
    zero, one = together(lambda: Channel(0, 2, server), lambda: Channel(1, 2, server.invitation))
    return zero, one


@contextmanager
def dealer(server: Server, keys: tuple[bytes, bytes] | None = None, name: bytes = b"r1") -> Any:
    """Give a socket that says it is rank 1, with the ranks' keys or others."""
    told = server.invitation
    with zmq.Context() as context, context.socket(zmq.DEALER) as end:
        end.identity, end.linger = name, 0
        end.curve_serverkey = told.server_key
        end.curve_publickey, end.curve_secretkey = keys or (told.public_key, told.secret_key)
        end.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        end.connect(f"tcp://{told.host}:{told.port}")
        yield end


@pytest.fixture
def blocked() -> Iterator[Callable[[Channel], threading.Event]]:
    """A function that holds up a channel's thread as it sends, until the event that it returns."""
    events = []

    def block(channel: Channel) -> threading.Event:
        transmit, came, go = channel._service._transmit, threading.Event(), threading.Event()

        def wait(messages: Any) -> None:
            came.set()
            assert go.wait(LIMIT_S)
            transmit(messages)

        channel._service._transmit = wait  # type: ignore[method-assign]
        events.append(go)
        assert came.wait(LIMIT_S)
        channel._service._transmit = transmit  # type: ignore[method-assign]
        return go

    yield block
    for event in events:
        event.set()


@pytest.mark.parametrize("known", [True, False])
def test_only_the_invitation_s_key_lets_a_rank_in(known: bool) -> None:
    server = Server("127.0.0.1")
    channel = Channel(0, 1, server)
    with dealer(server, None if known else zmq.curve_keypair()) as stranger:
        monitor = stranger.get_monitor_socket()
        assert monitor.poll(1000 * LIMIT_S)
        event, _ = struct.unpack("=Hi", monitor.recv_multipart()[0])
        monitor.close()
    assert (event == zmq.EVENT_HANDSHAKE_SUCCEEDED) == known
    channel.close()


def test_who_shows_no_key_cannot_fill_the_memory() -> None:
    server = Server("127.0.0.1")
    channel = Channel(0, 1, server)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
    with socket.create_connection(("127.0.0.1", server.invitation.port), LIMIT_S) as stranger:
        stranger.sendall(greeting + b"\x06" + struct.pack(">Q", 4 << 30))
        with pytest.raises(ConnectionError):
            stranger.sendall(bytes(256 << 20))
    assert channel.all_gather(b"x") == [b"x"]
    channel.close()


def test_rank_0_closes_when_the_largest_payload_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is still under way when its sockets close is lost: they do not linger here."""
    monkeypatch.setattr(service_module, "LINGER_MS", 0)
    zero, one = pair()
    payload = bytes(range(256)) * (MAX_GATHER_BYTES // 256)

    def gather_and_close() -> list[bytes]:
        everyone = zero.all_gather(b"")
        zero.close()
        return everyone

    assert together(gather_and_close, lambda: one.all_gather(payload)) == [[b"", payload]] * 2
    one.close()


def test_a_rank_0_that_is_gone_before_others_connect_has_died() -> None:
    server = Server("127.0.0.1")
    server.context.destroy(linger=0)
    with pytest.raises(CommunicationError, match="rank 0 died") as caught:
        Channel(1, 2, server.invitation, timeout_s=1000.0)
    assert caught.value.ranks == (0,)


def test_last_words_that_come_together_with_the_end_of_a_connection_do_not_hide_it(
    blocked: Callable[[Channel], threading.Event],
) -> None:
    server = Server("127.0.0.1")
    with dealer(server) as other:
        other.send(Frame(Kind.GATHER, 1, 1, 1).encode())
        channel = Channel(0, 2, server)
        until(lambda: len(channel.peers()) == 2)
        go = blocked(channel)
        other.send(Frame(Kind.BEAT, 1, 2, 0, b"last").encode())
        until(lambda: bool(channel._service._socket.poll(0)))
        other.get_monitor_socket().close()
    assert channel._service._monitor.poll(1000 * LIMIT_S)
    go.set()
    until(lambda: channel.peers()[1].state == b"last")
    until(lambda: channel.peers()[1].link == "lost")
    channel.close()


def test_who_stood_still_does_not_take_the_others_for_silent(
    blocked: Callable[[Channel], threading.Event],
) -> None:
    zero, one = pair()
    for still, other in ((zero, 1), (one, 0)):
        go = blocked(still)
        now, seen = still._service.clock._now, set()
        still._service.clock._now = lambda now=now: now() + 3600.0
        seen.add(still.peers()[other].link)
        take, beat, beats = still._service.node.take, still._service.node.beat, []

        def look(node: Any = still._service.node, seen: Any = seen, other: int = other) -> None:
            seen.add(node.peers()[other].link)

        def spy_take(*args: Any, take: Any = take, look: Any = look) -> Any:
            look()
            return take(*args)

        def spy_beat(beat: Any = beat, look: Any = look, beats: Any = beats) -> Any:
            look()
            beats.append(1)
            return beat()

        still._service.node.take, still._service.node.beat = spy_take, spy_beat
        go.set()
        until(lambda beats=beats: len(beats) > 3)
        assert seen == {"up"}
    one.close()
    zero.close()


def test_a_clock_leaves_out_the_time_without_turns() -> None:
    now = [100.0]
    clock = pulse.Clock(2, lambda: now[0])
    for _ in range(10):
        now[0] += pulse.BEAT_S
        clock.turn()
    assert clock() == pytest.approx(10 * pulse.BEAT_S)
    now[0] += 3600.0
    assert clock() == pytest.approx(12 * pulse.BEAT_S)
    clock.turn()
    assert clock() == pytest.approx(12 * pulse.BEAT_S)
    now[0] += pulse.BEAT_S
    assert clock() == pytest.approx(13 * pulse.BEAT_S)


def test_a_pulse_sends_news_at_once_and_the_rest_now_and_then() -> None:
    beats = pulse.Pulse()
    assert beats.due("a", 0.0)
    assert not beats.due("a", 0.9 * pulse.QUIET_S)
    assert beats.due("b", 0.9 * pulse.QUIET_S)
    assert not beats.due("b", 1.8 * pulse.QUIET_S)
    assert beats.due("b", 2.0 * pulse.QUIET_S)


def test_a_channel_needs_no_asyncio() -> None:
    program = "import sys, cupynccl_reduce.control.channel; sys.exit('asyncio' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
