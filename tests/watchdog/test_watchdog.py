"""The watchdog on a virtual clock: what is a fault is found on every rank, what is none is not."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from cupynccl_reduce import CommunicationError
from cupynccl_reduce.flight import Flight, State
from cupynccl_reduce.peers import Peer
from cupynccl_reduce.watchdog import Watchdog

if TYPE_CHECKING:
    from cupynccl_reduce.report import Report

TIMEOUT_S = 10.0
TICK_S = 0.1


class Event:
    """Passes when it is told to."""

    def __init__(self) -> None:
        self.done = True

    def record(self, stream: list[Event]) -> None:
        self.done = False
        stream.append(self)


class Board:
    """What ranks tell each other, with nobody in between; links are set by the test."""

    def __init__(self, world_size: int) -> None:
        self.rows = [Peer(rank) for rank in range(world_size)]
        self.inboxes: list[list[tuple[int, bytes]]] = [[] for _ in range(world_size)]


class Beats:
    def __init__(self, board: Board, rank: int) -> None:
        self.board, self.rank = board, rank

    def publish(self, state: bytes) -> None:
        row = self.board.rows[self.rank]
        if row.link == "up":
            self.board.rows[self.rank] = replace(row, state=state)

    def peers(self) -> list[Peer]:
        return list(self.board.rows)

    def tell(self, notice: bytes) -> None:
        for rank, inbox in enumerate(self.board.inboxes):
            if rank != self.rank:
                inbox.append((self.rank, notice))

    def notices(self) -> list[tuple[int, bytes]]:
        inbox = self.board.inboxes[self.rank]
        taken = inbox[:]
        inbox.clear()
        return taken


class Ranks:
    """A world of flights whose collectives end when every rank has launched them."""

    def __init__(self, world_size: int) -> None:
        self.now = 0.0
        self.world_size = world_size
        self.board = Board(world_size)
        self.streams: list[list[Event]] = [[] for _ in range(world_size)]
        self.flights = [Flight(Event, self.clock) for _ in range(world_size)]
        self.errors: list[list[CommunicationError]] = [[] for _ in range(world_size)]
        self.async_errors: list[Exception | None] = [None] * world_size
        self.dogs = [self._watch(rank) for rank in range(world_size)]
        self.frozen: set[int] = set()

    def clock(self) -> float:
        return self.now

    def _watch(self, rank: int) -> Watchdog:
        def check() -> None:
            error = self.async_errors[rank]
            if error is not None:
                raise error

        def make_error(report: Report) -> CommunicationError:
            error = CommunicationError(report.text)
            error.report, error.ranks = report, report.ranks
            return error

        return Watchdog(
            rank,
            self.flights[rank],
            Beats(self.board, rank),
            timeout_s=TIMEOUT_S,
            make_error=make_error,
            on_fault=self.errors[rank].append,
            check_async=check,
            clock=self.clock,
        )

    def launch(self, rank: int, bucket: int, **changes: Any) -> None:
        what: dict[str, Any] = {
            "what": "reduce",
            "bucket": bucket,
            "dtype": "float32",
            "nbytes": 1024,
            "calls": 1,
            "names": ("a", "b"),
        }
        with self.flights[rank].launch(self.streams[rank], **what | changes):
            pass

    def run_collectives(self) -> None:
        """Let every launch start whose forerunners are done, and end those that all have."""
        while True:
            for stream in self.streams:
                if stream:
                    stream[0].done = True  # started
            if not all(len(stream) > 1 for stream in self.streams):
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

    def link(self, rank: int, link: Any) -> None:
        self.frozen.add(rank)
        self.board.rows[rank] = replace(self.board.rows[rank], link=link)

    def reports(self, *, but: set[int] = frozenset()) -> list[Report]:  # type: ignore[assignment]
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


def test_a_day_of_stalls_below_the_limit_is_no_fault() -> None:
    rng = random.Random(3)
    ranks = Ranks(3)
    hours = 24 * 3600
    while ranks.now < hours:
        # A slow backward first: nothing runs, however long it takes.
        ranks.now += rng.choice([0.1, 1.0, 500.0])
        for bucket in range(3):
            for rank in rng.sample(range(3), 3):
                ranks.launch(rank, bucket)
                ranks.run_collectives()
                if rng.random() < 0.1:
                    ranks.tick(TICK_S)
                    # The launch runs, and its peers come late.
                    ranks.now += rng.uniform(0, 0.3 * TIMEOUT_S)
            ranks.tick(TICK_S)
        if rng.random() < 0.05:
            rank = rng.randrange(3)
            row = ranks.board.rows[rank]
            ranks.board.rows[rank] = replace(row, link="silent")
            ranks.tick(0.5)
            ranks.board.rows[rank] = replace(row, link="up")
    assert ranks.errors == [[], [], []]


def plant(ranks: Ranks, kind: str, bad: int, rng: random.Random) -> set[int]:
    """Plant a fault; return the ranks that can no longer report."""
    others = [rank for rank in range(ranks.world_size) if rank != bad]
    at = rng.randrange(3)
    for bucket in range(3):
        if bucket == at and kind == "mismatch":
            change = rng.choice(
                [{"nbytes": 2048}, {"dtype": "float64"}, {"bucket": 7}, {"calls": 2}]
            )
            ranks.launch(bad, **{"bucket": bucket} | change)  # type: ignore[arg-type]
        elif bucket < at or kind in ("fabric", "mismatch", "asynchronous error", "raised"):
            ranks.launch(bad, bucket)
        for rank in others:
            ranks.launch(rank, bucket)
        if kind != "fabric":
            ranks.run_collectives()
    if kind == "fabric":
        for stream in ranks.streams:
            stream[0].done = True
    ranks.tick(0.2)
    return end(ranks, kind, bad)


def end(ranks: Ranks, kind: str, bad: int) -> set[int]:
    """Do what becomes of the rank itself; return the ranks that can no longer report."""
    if kind in ("died", "stopped", "left"):
        ranks.link(bad, {"died": "lost", "stopped": "silent", "left": "left"}[kind])
        return {bad}
    if kind == "raised":
        ranks.dogs[bad].raised(ValueError("planted"))
        ranks.frozen.add(bad)
        return {bad}
    if kind == "asynchronous error":
        ranks.async_errors[bad] = CommunicationError("NCCL's own")
    return set()


KINDS = ("died", "stopped", "left", "did not call", "raised", "mismatch", "asynchronous error")


@pytest.mark.parametrize("kind", [*KINDS, "fabric"])
def test_planted_faults_are_found_and_named_on_every_rank(kind: str) -> None:
    for seed in range(125):
        rng = random.Random(seed)
        ranks = Ranks(rng.choice([2, 3, 4]))
        bad = rng.randrange(ranks.world_size)
        for _ in range(rng.randrange(4)):
            ranks.step(rng)
            ranks.tick(0.3)
        gone = plant(ranks, kind, bad, rng)
        ranks.tick(TIMEOUT_S + 3.0)
        for report in ranks.reports(but=gone):
            assert report.reason == kind, (seed, report)
            blamed = () if kind == "fabric" else (bad,)
            if kind == "mismatch" and ranks.world_size == 2:
                blamed = (0, 1)  # one against one
            assert report.ranks == blamed, (seed, report)
            assert report.text


def test_a_transports_error_waits_for_the_reason_behind_it() -> None:
    ranks = Ranks(3)
    ranks.launch(0, 0)
    ranks.launch(1, 0)
    ranks.async_errors[0] = CommunicationError("NCCL's own")
    ranks.tick(0.5)
    ranks.link(2, "lost")
    ranks.tick(3.0)
    assert {(r.reason, r.ranks) for r in ranks.reports(but={2})} == {("died", (2,))}


def test_the_first_cause_is_everyones() -> None:
    ranks = Ranks(3)
    ranks.dogs[1].raised(ValueError("first"))
    ranks.tick(0.1)
    ranks.dogs[2].raised(ValueError("second"))
    ranks.tick(3.0)
    assert [(r.ranks, "first" in r.detail) for r in ranks.reports(but={1})] == [((1,), True)] * 2


def test_a_rank_that_leaves_when_all_is_done_is_no_fault() -> None:
    ranks = Ranks(2)
    ranks.step()
    ranks.tick(0.3)
    ranks.link(1, "left")
    ranks.tick(5.0)
    assert ranks.errors == [[], []]


def test_a_swap_of_equal_sizes_is_a_mismatch() -> None:
    ranks = Ranks(3)
    for rank in range(3):
        for bucket in (0, 1) if rank != 1 else (1, 0):
            ranks.launch(rank, bucket)
    ranks.run_collectives()
    ranks.tick(2.0)
    for report in ranks.reports():
        assert (report.reason, report.ranks) == ("mismatch", (1,))
        assert "at launch 1, rank 0, 2: what reduce, bucket 0" in report.detail
        assert "rank 1: what reduce, bucket 1" in report.detail


def test_two_that_differ_are_both_named_while_a_third_has_not_come() -> None:
    ranks = Ranks(3)
    for rank in range(3):
        ranks.launch(rank, 0)
    ranks.launch(0, 1)
    ranks.launch(1, 7)
    ranks.tick(2.0)
    for report in ranks.reports():
        assert (report.reason, report.ranks) == ("mismatch", (0, 1))
        assert "at launch 2, rank 0: what reduce, bucket 1" in report.detail


def test_a_difference_that_is_not_kept_any_more_names_both() -> None:
    ranks = Ranks(2)
    for number in range(100):
        ranks.launch(0, number)
        ranks.launch(1, 7 if number == 10 else number)
        ranks.run_collectives()
    ranks.tick(2.0)
    for report in ranks.reports():
        assert (report.reason, report.ranks) == ("mismatch", (0, 1))
        assert "before 37" in report.detail


def test_a_rank_far_ahead_is_compared_too() -> None:
    ranks = Ranks(2)
    for number in range(400):
        ranks.launch(0, number)
    for number in range(300):
        ranks.launch(1, 7 if number == 299 else number)
        ranks.run_collectives()
        if number == 298:
            ranks.tick(2.0)
            assert ranks.errors == [[], []]
    ranks.tick(2.0)
    for report in ranks.reports():
        assert (report.reason, report.ranks) == ("mismatch", (0, 1))


def test_a_host_that_stays_inside_a_launch_is_a_fault() -> None:
    ranks = Ranks(2)
    what: dict[str, Any] = {"what": "reduce", "bucket": 0, "dtype": "f", "nbytes": 1, "calls": 1}
    with ranks.flights[0].launch(ranks.streams[0], **what, names=("a",)):
        ranks.tick(TIMEOUT_S + 3.0)
    for report in ranks.reports():
        assert (report.reason, report.ranks) == ("did not call", (1,))
    assert ranks.errors[0][0].report.launch["number"] == 1


def test_a_stream_that_does_not_get_there_is_named() -> None:
    ranks = Ranks(3)
    for rank in range(3):
        ranks.launch(rank, 0)
    for rank in (0, 2):
        ranks.streams[rank][0].done = True
    ranks.tick(TIMEOUT_S + 3.0)
    for report in ranks.reports():
        assert (report.reason, report.ranks) == ("did not start", (1,))


def test_a_silent_rank_that_has_started_is_not_the_one_to_blame() -> None:
    ranks = Ranks(3)
    for rank in (0, 1):
        ranks.launch(rank, 0)
        ranks.streams[rank][0].done = True
    ranks.tick(0.2)
    ranks.link(1, "silent")
    ranks.tick(TIMEOUT_S + 3.0)
    for report in ranks.reports(but={1}):
        assert (report.reason, report.ranks) == ("did not call", (2,))


def test_all_that_died_are_named() -> None:
    ranks = Ranks(4)
    ranks.tick(0.2)
    ranks.link(2, "lost")
    ranks.link(3, "lost")
    ranks.tick(2.0)
    assert {r.ranks for r in ranks.reports(but={2, 3})} == {(2, 3)}


def test_a_goodbye_carries_what_was_done_by_then() -> None:
    ranks = Ranks(2)
    ranks.step()
    ranks.flights[0].poll()
    ranks.dogs[1].stop()  # it has not looked since
    ranks.link(1, "left")
    ranks.launch(0, 9)  # what comes later waits for it after all
    ranks.tick(3.0)
    assert [(r.reason, r.ranks) for r in ranks.reports(but={1})] == [("left", (1,))]
    assert "after 3 launches" in ranks.errors[0][0].report.detail


def test_garbage_changes_nothing() -> None:
    ranks = Ranks(2)
    rng = random.Random(1)
    for _ in range(500):
        ranks.board.rows[1] = replace(ranks.board.rows[1], state=rng.randbytes(rng.randrange(60)))
        ranks.board.inboxes[0].append((1, rng.randbytes(rng.randrange(60))))
        ranks.board.inboxes[0].append((1, b'{"reason":"died","ranks":"1","text":3,"number":-1}'))
        ranks.board.inboxes[0].append((1, b'{"reason":"bored","ranks":[1],"text":"x"}'))
        ranks.board.inboxes[0].append((1, b'{"reason":"died","ranks":[99,-1,true],"text":"x"}'))
        ranks.dogs[0].tick()
    ranks.board.inboxes[0].append((1, b"[" * 60_000))
    ranks.dogs[0].tick()
    impossible = State(queued=1, called=1, started=9)
    for state in (impossible, State(running_s=float("nan"))):
        assert State.decode(state.encode()) is None
        ranks.board.rows[1] = replace(ranks.board.rows[1], state=state.encode())
        ranks.dogs[0].tick()
    assert ranks.errors == [[], []]


def test_explain_gives_the_error_once_it_is_known() -> None:
    ranks = Ranks(2)
    asked = CommunicationError("the transport failed")
    assert ranks.dogs[0].explain(asked, timeout_s=0.0) is None
    ranks.tick(0.5)
    ranks.link(1, "left")
    ranks.tick(0.5)
    found = ranks.dogs[0].explain(asked, timeout_s=0.0)
    assert found is ranks.errors[0][0]
    assert found.report.reason == "left"


def test_a_flight_counts_and_keeps_64() -> None:
    ranks = Ranks(1)
    for number in range(70):
        ranks.launch(0, number)
    flight = ranks.flights[0]
    assert flight.state().queued == 70
    assert [entry["number"] for entry in flight.record()] == list(range(7, 71))
    assert flight.find(6) is None
    assert flight.find(70) is not None
    ranks.run_collectives()
    flight.poll()
    state = flight.state()
    assert (state.started, state.done, state.running_s) == (70, 70, 0.0)
    assert State.decode(state.encode()) == state
    assert State.decode(state.encode()[1:]) is None
    made = len({id(event) for event in flight._events})
    for number in range(70):
        ranks.launch(0, number)
    assert made == 140
    assert not flight._events  # all are used again


def test_an_exception_while_launching_notes_nothing() -> None:
    ranks = Ranks(1)
    before = ranks.flights[0].state()
    with (
        pytest.raises(ValueError, match="planted"),
        ranks.flights[0].launch(
            ranks.streams[0], what="reduce", bucket=0, dtype="f", nbytes=1, calls=1, names=()
        ),
    ):
        raise ValueError("planted")
    assert ranks.flights[0].state() == before
