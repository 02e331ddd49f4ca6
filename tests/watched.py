"""Ranks on a virtual clock, each with its watchdog, over a board in place of a side channel."""

from __future__ import annotations

import heapq
import random
from typing import TYPE_CHECKING, Any

from cupynccl_reduce import CommunicationError
from cupynccl_reduce.flight import Flight
from cupynccl_reduce.peers import Peer
from cupynccl_reduce.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Set as AbstractSet

    from cupynccl_reduce.peers import Link
    from cupynccl_reduce.report import Report

TIMEOUT_S = 10.0
TICK_S = 0.1
SILENT_S = 2.0
LATE_S = 0.2  # how long a notice may take, where notices take time


class Event:
    """Passes when it is told to."""

    def __init__(self) -> None:
        self.done = True

    def record(self, stream: list[Event]) -> None:
        self.done = False
        stream.append(self)


class Board:
    """What ranks tell each other, with nobody in between. Who publishes no more is silent."""

    def __init__(self, world_size: int, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.states = [b""] * world_size
        self.when = [0.0] * world_size
        self.gone: dict[int, Link] = {}
        self.inboxes: list[list[tuple[float, int, bytes]]] = [[] for _ in range(world_size)]
        self.delay: Callable[[], float] = lambda: 0.0


class Beats:
    def __init__(self, board: Board, rank: int) -> None:
        self.board, self.rank = board, rank

    def publish(self, state: bytes) -> None:
        assert len(state) <= 256
        self.board.states[self.rank], self.board.when[self.rank] = state, self.board.clock()

    def peers(self) -> list[Peer]:
        board, peers = self.board, []
        for rank, state in enumerate(board.states):
            age_s = board.clock() - board.when[rank]
            link = board.gone.get(rank, "silent" if age_s > SILENT_S else "up")
            peers.append(Peer(rank, state, age_s, link))
        return peers

    def tell(self, notice: bytes) -> None:
        assert len(notice) <= 64 << 10
        for rank, inbox in enumerate(self.board.inboxes):
            if rank != self.rank:
                inbox.append((self.board.clock() + self.board.delay(), self.rank, notice))

    def notices(self) -> list[tuple[int, bytes]]:
        inbox, now = self.board.inboxes[self.rank], self.board.clock()
        taken = [(origin, notice) for due, origin, notice in inbox if due <= now]
        inbox[:] = [entry for entry in inbox if entry[0] > now]
        return taken


class Ranks:
    """A world of flights whose collectives end when every rank has launched them.

    With a `seed`, no two ranks' clocks agree, and notices take their time.
    """

    def __init__(self, world_size: int, seed: int | None = None) -> None:
        self.now = 0.0
        self.world_size = world_size
        self.board = Board(world_size, lambda: self.now)
        self.offsets = [0.0] * world_size
        if seed is not None:
            rng = random.Random(seed)
            self.offsets = [rng.uniform(0, 1e6) for _ in range(world_size)]
            self.board.delay = lambda: rng.uniform(0, LATE_S)
        self.streams: list[list[Event]] = [[] for _ in range(world_size)]
        self.errors: list[list[CommunicationError]] = [[] for _ in range(world_size)]
        self.async_errors: list[Exception | None] = [None] * world_size
        self.flights: list[Flight] = []
        self.dogs = [self._watch(rank) for rank in range(world_size)]
        self.frozen: set[int] = set()
        self.inside: list[Any] = []  # launches that the host does not leave

    def _watch(self, rank: int) -> Watchdog:
        def clock() -> float:
            return self.now + self.offsets[rank]

        def check() -> None:
            error = self.async_errors[rank]
            if error is not None:
                raise error

        self.flights.append(Flight(Event, clock))
        return Watchdog(
            rank,
            self.flights[rank],
            Beats(self.board, rank),
            timeout_s=TIMEOUT_S,
            make_error=make_error,
            on_fault=self.errors[rank].append,
            check_async=check,
            clock=clock,
        )

    def enter(self, rank: int, bucket: int, **changes: Any) -> Any:
        """Return the context of one launch."""
        what: dict[str, Any] = {
            "what": "reduce",
            "bucket": bucket,
            "dtype": "float32",
            "nbytes": 1024,
            "calls": 1,
            "names": ("a", "b"),
        }
        return self.flights[rank].launch(self.streams[rank], **what | changes)

    def launch(self, rank: int, bucket: int, **changes: Any) -> None:
        with self.enter(rank, bucket, **changes):
            pass

    def run_collectives(self, *, held: AbstractSet[int] = frozenset()) -> None:
        """Let every launch start whose forerunners are done, and end those that all have.

        The streams of ranks that are `held` do not get that far.
        """
        while True:
            for rank, stream in enumerate(self.streams):
                if stream and rank not in held:
                    stream[0].done = True  # started
            if not all(len(stream) > 1 and stream[0].done for stream in self.streams):
                return
            for stream in self.streams:
                stream[1].done = True
                del stream[:2]

    def tick(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            for rank, dog in enumerate(self.dogs):
                if rank not in self.frozen:
                    dog.tick()

    def drift(self, seconds: float, rng: random.Random) -> None:
        """Tick every rank at a pace of its own."""
        end = self.now + seconds
        due = [(self.now + rng.uniform(0, 0.2), rank) for rank in range(self.world_size)]
        heapq.heapify(due)
        while due[0][0] < end:
            self.now, rank = due[0]
            if rank not in self.frozen:
                self.dogs[rank].tick()
            heapq.heapreplace(due, (self.now + rng.uniform(TICK_S, 0.3), rank))
        self.now = end

    def link(self, rank: int, link: Link) -> None:
        """Let a rank do nothing any more, and others see it so."""
        self.frozen.add(rank)
        if link == "silent":
            self.board.when[rank] = -1e9
        else:
            self.board.gone[rank] = link

    def reports(self, *, but: AbstractSet[int] = frozenset()) -> list[Report]:
        """Return each rank's one report."""
        others = [errors for rank, errors in enumerate(self.errors) if rank not in but]
        assert [len(errors) for errors in others] == [1] * len(others)
        return [errors[0].report for errors in others]

    def step(self, order: random.Random | None = None) -> None:
        """Launch three buckets on every rank."""
        ranks = list(range(self.world_size))
        for bucket in range(3):
            for rank in ranks if order is None else order.sample(ranks, len(ranks)):
                self.launch(rank, bucket)
        self.run_collectives()


def make_error(report: Report) -> CommunicationError:
    error = CommunicationError(report.text)
    error.report, error.ranks = report, report.ranks
    return error
