"""A channel's ranks, one of them in a process of its own: what tests of its faults share."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cupynccl_reduce.control.channel import Channel
from cupynccl_reduce.control.frames import Invitation
from cupynccl_reduce.control.sockets import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WALL_S = 60.0  # for what hangs
SILENT_S = 1.5  # more than what is between two beats
PROGRAM = """
import ctypes, os, signal, sys
from cupynccl_reduce.control import hub
from cupynccl_reduce.control.channel import Channel
from cupynccl_reduce.control.frames import Invitation, Kind
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
    elif command == "mute":  # it gathers, and never answers
        node = channel._service.node
        to_all = node._to_all
        node._to_all = lambda kind, *rest, **more: (
            [] if kind == Kind.GATHERED else to_all(kind, *rest, **more)
        )
    elif command == "leave a child":
        child = os.fork()
        if not child:
            signal.pause()
        print(child, flush=True)
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
