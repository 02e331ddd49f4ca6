"""One rank in a process of its own, which is killed, stopped or held; the others here see it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from cupynccl_reduce import CommunicationError
from cupynccl_reduce.control import channel as channel_module
from cupynccl_reduce.control import hub
from cupynccl_reduce.control.channel import Channel
from cupynccl_reduce.control.frames import Invitation
from cupynccl_reduce.control.sockets import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WALL_S = 60.0  # for what hangs
SILENT_S = 0.5
PROGRAM = """
import ctypes, os, sys
from cupynccl_reduce.control import hub
from cupynccl_reduce.control.channel import Channel
from cupynccl_reduce.control.frames import Invitation
from cupynccl_reduce.control.sockets import Server
from cupynccl_reduce.errors import CommunicationError
hub.SILENT_S = float(sys.argv[3])
rank, world_size = int(sys.argv[1]), int(sys.argv[2])
source = Server("127.0.0.1") if rank == 0 else None
if source:
    print(source.invitation.encode().hex(), flush=True)
else:
    source = Invitation.decode(bytes.fromhex(sys.stdin.readline()))
channel = Channel(rank, world_size, source)
print("ready", flush=True)
for line in sys.stdin:
    command = line.strip()
    if command == "gather":
        print([one.decode() for one in channel.all_gather(b"%d" % rank)], flush=True)
    elif command == "hold":
        # A byte of its standard input ends it, never the time.
        ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)
        print("held", flush=True)
    elif command == "exit":
        sys.exit(3)
    elif command == "raise":
        raise ValueError("planted")
    elif command == "fork":
        child = os.fork()
        if not child:
            refused = 0
            try:
                channel.all_gather(b"")
            except CommunicationError as error:
                refused = "forked" in str(error)
            channel.close()
            sys.exit(7 if refused else 1)  # as a program ends, with its atexit functions
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Apart:
    """A rank in a process, which ends after WALL_S whatever happens."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(world_size), str(SILENT_S)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._wall = threading.Timer(WALL_S, self.process.kill)
        self._wall.daemon = True
        self._wall.start()

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self._wall.cancel()
        self.process.kill()
        self.process.communicate()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WALL_S
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.005)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "SILENT_S", SILENT_S)
    monkeypatch.setattr(channel_module, "LINGER_MS", 100)  # for a goodbye that nobody takes


@contextmanager
def world(apart: int, world_size: int = 3) -> Iterator[tuple[Apart, dict[int, Channel]]]:
    """Rank `apart` in a process, the others here."""
    process = Apart(apart, world_size)
    ends: dict[int, Channel] = {}
    try:
        sources: dict[int, Server | Invitation]
        if apart == 0:
            told = Invitation.decode(bytes.fromhex(process.hear()))
            assert told is not None
            sources = dict.fromkeys(range(1, world_size), told)
        else:
            server = Server("127.0.0.1")
            process.say(server.invitation.encode().hex())
            sources = {0: server}
            sources |= {r: server.invitation for r in range(1, world_size) if r != apart}
        with ThreadPoolExecutor(world_size) as pool:
            joining = {r: pool.submit(Channel, r, world_size, s) for r, s in sources.items()}
            ends = {rank: future.result(WALL_S) for rank, future in joining.items()}
        assert process.hear() == "ready"
        yield process, ends
    finally:
        process.end()
        for rank in sorted(ends, reverse=True):  # rank 0 last: it takes the others' goodbyes
            ends[rank].close()


def links(ends: dict[int, Channel], rank: int) -> set[str]:
    """Return what the ranks here say of `rank`."""
    return {end.peers()[rank].link for end in ends.values()}


def gather(process: Apart, ends: dict[int, Channel]) -> None:
    """All ranks meet, and have what all gave."""
    process.say("gather")
    everyone = [b"%d" % rank for rank in range(len(ends) + 1)]
    with ThreadPoolExecutor(len(ends)) as pool:
        met = [pool.submit(end.all_gather, b"%d" % rank) for rank, end in ends.items()]
        assert [future.result(WALL_S) for future in met] == [everyone] * len(ends)
    assert process.hear() == str([one.decode() for one in everyone])


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_lost_for_all_the_others_and_they_for_nobody(victim: int) -> None:
    with world(victim) as (process, ends):
        gather(process, ends)
        process.process.send_signal(signal.SIGKILL)
        until(lambda: links(ends, victim) == {"lost"})
        for other in ends:
            assert "lost" not in links(ends, other)
        for end in ends.values():
            with pytest.raises(CommunicationError, match=f"rank {victim} died") as caught:
                end.all_gather(b"")
            assert caught.value.ranks == (victim,)


def test_rank_0_that_dies_after_it_came_to_a_gather_frees_who_waits_there() -> None:
    """Rank 1 has not come: who waits for it waits for an answer that rank 0 never gives."""
    with world(0) as (process, ends), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ends[2].all_gather, b"")
        process.say("gather")
        until(lambda: ends[2]._node.turns() == [2, 1, 2])
        process.process.send_signal(signal.SIGKILL)
        try:
            with pytest.raises(CommunicationError, match="rank 0 died") as caught:
                waiting.result(10)
            assert caught.value.ranks == (0,)
            late = pool.submit(ends[1].all_gather, b"")
            with pytest.raises(CommunicationError, match="rank 0 died"):
                late.result(10)
        finally:
            for end in ends.values():
                end.abort()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_or_held_is_silent_and_never_lost(rank: int) -> None:
    seen: set[str] = set()

    def all_see(link: str) -> bool:
        now = links(ends, rank)
        seen.update(now)
        return now == {link}

    with world(rank) as (process, ends):
        process.process.send_signal(signal.SIGSTOP)
        until(lambda: all_see("silent"))
        process.process.send_signal(signal.SIGCONT)
        until(lambda: all_see("up"))
        process.say("hold")
        until(lambda: all_see("silent"))
        process.say("")
        until(lambda: all_see("up"))
        assert process.hear() == "held"
        gather(process, ends)
        assert seen == {"up", "silent"}


@pytest.mark.parametrize(("rank", "how", "code"), [(0, "raise", 1), (1, "exit", 3)])
def test_a_process_that_ends_without_close_ends_and_is_lost(rank: int, how: str, code: int) -> None:
    with world(rank, 2) as (process, ends):
        process.say(how)
        assert process.process.wait(WALL_S) == code
        until(lambda: links(ends, rank) == {"lost"})


@pytest.mark.parametrize("rank", [0, 1])
def test_a_forked_child_is_inert_and_its_parent_goes_on(rank: int) -> None:
    with world(rank, 2) as (process, ends):
        process.say("fork")
        assert process.hear() == "7"
        gather(process, ends)
        assert "lost" not in links(ends, rank)
        assert "left" not in links(ends, rank)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_what_a_forked_child_calls_never_waits_for_a_lock_that_nobody_holds_there() -> None:
    channel = Channel(0, 1, Server("127.0.0.1"))
    held, done = threading.Event(), threading.Event()

    def hold() -> None:  # as the channel's own thread does, again and again
        with channel._changed:
            held.set()
            assert done.wait(WALL_S)

    holder = threading.Thread(target=hold, daemon=True)
    holder.start()
    assert held.wait(WALL_S)
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        channel.abort()
        channel.close()
        os._exit(7)
    done.set()
    holder.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert channel.all_gather(b"x") == [b"x"]
    channel.close()
