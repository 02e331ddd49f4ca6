"""The watchdog on a virtual clock: what is a fault is found on every rank, what is none is not."""

from __future__ import annotations

import heapq
import itertools
import json
import random
import threading
from typing import TYPE_CHECKING, Any

import pytest
from watched import TIMEOUT_S, Beats, Board, Event, Ranks, make_error

from cupynccl_reduce import CommunicationError
from cupynccl_reduce import watchdog as watchdog_module
from cupynccl_reduce.flight import Flight, State, encode_notice
from cupynccl_reduce.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable

    from cupynccl_reduce.report import Report

LIMIT_S = 60.0  # for what hangs


class Day:
    """A schedule of launches in which no launch runs for as long as the limit."""

    def __init__(self, world_size: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.ranks = Ranks(world_size, seed)
        self.agenda: list[tuple[float, int, Callable[[], object]]] = []
        self.numbers = itertools.count()
        self.longest = 0.0  # that any rank saw a launch run
        self.steps = 0

    def at(self, when: float, action: Callable[[], object]) -> None:
        heapq.heappush(self.agenda, (when, next(self.numbers), action))

    def look(self, when: float, rank: int) -> None:

        def tick() -> None:
            self.ranks.dogs[rank].tick()
            self.longest = max(self.longest, self.ranks.flights[rank].running()[1])

        self.at(when, tick)

    def launch(self, rank: int, bucket: int, enter: float, leave: float) -> dict[str, Event]:
        """Plan one launch; return what will hold its events."""
        events: dict[str, Event] = {}
        stream: list[Event] = self.ranks.streams[rank]
        context = self.ranks.enter(rank, bucket)

        def begin() -> None:
            context.__enter__()
            events["started"] = stream.pop()

        def end() -> None:
            context.__exit__(None, None, None)
            events["done"] = stream.pop()

        self.at(enter, begin)
        self.at(leave, end)
        return events

    def some(self, most: float) -> float:
        """Return a time up to the most, its ends more often than others."""
        return self.rng.choice([0.0, most, self.rng.uniform(0, most)])

    def step(self, now: float) -> float:
        """Plan a backward and three buckets after it; return when all are done."""
        rng, world_size = self.rng, self.ranks.world_size
        self.steps += 1
        now += rng.choice([0.1, 1.0, 30.0, 900.0]) * rng.random()
        gpu = rng.choice([0.0, 0.0, 0.0, 600.0]) * rng.random()  # by which streams lag behind
        spread = rng.choice([0.01, 0.35]) * TIMEOUT_S
        hosts = [now + self.some(spread) for _ in range(world_size)]
        done = now
        for bucket in range(3):
            starts, events = [], []
            for rank in range(world_size):
                hold = rng.choice([0.0, 0.0, 0.05]) * TIMEOUT_S
                enter = hosts[rank] + self.some(spread)
                hosts[rank] = enter + hold
                events.append(self.launch(rank, bucket, enter, hosts[rank]))
                starts.append(max(done, hosts[rank] + gpu) + self.some(0.05 * TIMEOUT_S))
                self.at(starts[-1], lambda e=events[-1]: setattr(e["started"], "done", True))
                for when in (enter, hosts[rank], starts[-1]):
                    self.look(
                        when + rng.uniform(0, 0.5), rng.choice([rank, rng.randrange(world_size)])
                    )
            done = max(starts) + self.some(0.14 * TIMEOUT_S)
            assert done - min(starts) < TIMEOUT_S
            for rank, event in enumerate(events):
                self.look(done - 0.01, rank)
                self.at(done, lambda e=event: setattr(e["done"], "done", True))
        return done + 0.1

    def run(self) -> None:
        while self.agenda:
            self.ranks.now, _, action = heapq.heappop(self.agenda)
            action()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_day_of_stalls_below_the_limit_is_no_fault(world_size: int) -> None:
    day = Day(world_size, world_size)
    ranks, now = day.ranks, 0.0
    while now < 24 * 3600:
        now = day.step(now)
        day.run()
        ranks.now = now
    assert day.steps > 300
    assert 0.8 * TIMEOUT_S < day.longest < TIMEOUT_S
    assert all(flight.state().queued == 3 * day.steps for flight in ranks.flights)
    for rank in range(world_size):  # all leave, one after the other
        ranks.dogs[rank].stop()
        ranks.link(rank, "left")
        ranks.drift(2 * TIMEOUT_S, day.rng)
    assert ranks.errors == [[]] * world_size


CHANGES: list[dict[str, Any]] = [
    {"nbytes": 2048},
    {"dtype": "float64"},
    {"bucket": 7},
    {"calls": 2},
    {"what": "gather"},
]
PLANTED = {  # what is planted, and the reason that is to be found
    "died": "died",
    "died inside a launch": "died",
    "transport, then lost": "died",
    "silent": "stopped",
    "silent with its launch queued": "stopped",
    "does not call": "did not call",
    "does not start": "did not start",
    "left": "left",
    "another launch": "mismatch",
    "swapped": "mismatch",
    "raised": "raised",
    "transport": "asynchronous error",
    "query": "asynchronous error",
    "fabric": "fabric",
}
# It launches no more.
ABSENT = {"died", "died inside a launch", "silent", "does not call", "left", "raised"}
HELD = {"silent with its launch queued", "does not start"}  # its stream stays behind
ENDLESS = {"fabric", "query", "transport, then lost"}  # every launch starts, and none ends
COMPLETE = {"another launch", "swapped"}  # every launch ends
HERE = {"does not call", "does not start", "transport", "query", "fabric", *COMPLETE}  # it looks on
NUMBERED = {"silent", "does not call", "fabric", *HELD}  # the launch that waits is the planted one
PER_KIND = 72  # times 14 kinds: a thousand


class Lost(Event):
    """The event of a device that is lost."""

    done = property(lambda _: 1 // 0)  # type: ignore[assignment]

    def __init__(self) -> None:
        pass


def launches(kind: str, at: int, rng: random.Random) -> list[dict[str, Any]]:
    """Return what the rank launches that the fault is planted in."""
    planned: list[dict[str, Any]] = [{"bucket": bucket} for bucket in range(3)]
    if kind == "another launch":
        planned[at] |= rng.choice(CHANGES)
    if kind == "swapped":
        planned[at - 1], planned[at] = planned[at], planned[at - 1]
    return planned[:at] if kind in ABSENT else planned


def plant(ranks: Ranks, kind: str, bad: int, at: int, rng: random.Random) -> None:
    """Launch three buckets, the fault at one of them."""
    planned = launches(kind, at, rng)
    for bucket in range(3):
        for rank in rng.sample(range(ranks.world_size), ranks.world_size):
            if rank != bad:
                ranks.launch(rank, bucket)
            elif bucket < len(planned):
                ranks.launch(rank, **planned[bucket])
            elif kind == "died inside a launch" and bucket == at:
                ranks.inside.append(ranks.enter(rank, bucket))
                ranks.inside[-1].__enter__()
        if bucket < at or kind in COMPLETE:
            ranks.run_collectives()
    if kind in ENDLESS:
        for stream in ranks.streams:
            stream[0].done = True
    else:
        ranks.run_collectives(held={bad} if kind in HELD else set())
    if rng.random() < 0.5:
        ranks.drift(0.4, rng)


def strike(ranks: Ranks, kind: str, bad: int, rng: random.Random) -> None:
    """Do what becomes of the rank itself."""
    if kind.startswith("transport"):
        at = (bad + 1) % ranks.world_size if "lost" in kind else bad
        ranks.async_errors[at] = CommunicationError("NCCL's own")
    if "lost" in kind:
        ranks.drift(rng.uniform(0, 0.9), rng)
    if PLANTED[kind] == "died":
        ranks.link(bad, "lost")
    elif kind == "raised":
        ranks.dogs[bad].raised(ValueError("planted"))
    elif kind == "left":
        ranks.dogs[bad].stop()
        ranks.link(bad, "left")
    elif kind == "query":
        for launched in ranks.flights[bad]._flying:
            launched.done = Lost()
    if kind not in HERE:
        ranks.frozen.add(bad)


@pytest.mark.parametrize("kind", PLANTED)
def test_planted_faults_are_found_and_named_on_every_rank(kind: str) -> None:
    for seed in range(PER_KIND):
        rng = random.Random(f"{kind}, {seed}")
        ranks = Ranks(rng.choice([2, 3, 4]), seed)
        bad, at = rng.randrange(ranks.world_size), rng.randrange(3)
        for _ in range(rng.randrange(3)):
            ranks.step(rng)
            ranks.drift(0.3, rng)
        first = min(at, (at - 1) % 3) if kind == "swapped" else at
        number = ranks.flights[bad].state().queued + 1 + first
        plant(ranks, kind, bad, at, rng)
        strike(ranks, kind, bad, rng)
        gone = set() if kind in HERE else {bad}
        until = ranks.now + TIMEOUT_S + 4.0
        while ranks.now < until and not all(
            errors for rank, errors in enumerate(ranks.errors) if rank not in gone
        ):
            ranks.drift(0.5, rng)
        ranks.drift(3.0, rng)
        blamed: tuple[int, ...] = () if kind == "fabric" else (bad,)
        if PLANTED[kind] == "mismatch" and ranks.world_size == 2:
            blamed = (0, 1)  # one against one
        reports = ranks.reports(but=gone)
        assert [report.rank for report in reports] == sorted(set(range(ranks.world_size)) - gone)
        for report in reports:
            assert (report.reason, report.ranks) == (PLANTED[kind], blamed), (seed, report)
            check_details(report, kind, bad, number)
        assert not any(ranks.errors[rank] for rank in gone)


def check_details(report: Report, kind: str, bad: int, number: int) -> None:
    if kind in NUMBERED and report.rank != bad:
        assert report.launch is not None
        assert report.launch["number"] == number
    if PLANTED[kind] == "mismatch":
        assert report.detail.startswith(f"at launch {number}, rank ")
    said = {"raised": "ValueError: planted", "transport": "NCCL's own", "query": "ZeroDivision"}
    assert said.get(kind, "") in report.detail
    named = "waits for the fabric" if kind == "fabric" else f"{bad}"
    assert named in report.text.splitlines()[0]
    assert [state.rank for state in report.states] == list(range(len(report.states)))


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
    for number in range(900):
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


@pytest.mark.parametrize("after", [False, True])
def test_garbage_changes_nothing(after: bool) -> None:
    """Neither before a fault, nor to what is found of one."""
    ranks = Ranks(3)
    rng = random.Random(1)
    ranks.step()
    ranks.tick(0.3)
    impossible = State(queued=1, called=1, started=9)
    states = [impossible.encode(), State(running_s=float("nan")).encode()]
    states += [rng.randbytes(rng.randrange(80)) for _ in range(300)]
    states += [flip(rng, State().encode()[:4]) + rng.randbytes(52) for _ in range(100)]
    notices = [rng.randbytes(rng.randrange(60)) for _ in range(300)]
    notices += [flip(rng, encode_notice(reason="died", ranks=[9], text="x")) for _ in range(300)]
    notices += [b"[" * 60_000, b"null", b"[]", b"{}", b"1" * 5_000, b"\xff"]
    good = {"reason": "died", "ranks": [1], "text": "x", "number": 1, "record": []}
    for key, values in BAD_FIELDS.items():
        notices += [encode_notice(**good | {key: value}) for value in values]
    if after:
        ranks.link(1, "lost")
        ranks.dogs[0].tick()  # it waits for rank 2's record
    for state in states:
        assert State.decode(state) is None
        ranks.board.states[1 + after] = state
        ranks.dogs[0].tick()
    for notice in notices:
        ranks.board.inboxes[0].append((0.0, 2, notice))
        ranks.dogs[0].tick()
    assert ranks.errors == [[], [], []]
    ranks.tick(3.0)
    if not after:
        assert ranks.errors == [[], [], []]
        return
    for report in ranks.reports(but={1}):
        assert (report.reason, report.ranks) == ("died", (1,))
        assert [len(report.records[rank]) for rank in (0, 2)] == [3, 3]


BAD_FIELDS: dict[str, list[Any]] = {
    "reason": ["bored", "", None, 1, [], {}],
    "ranks": [None, "1", 1, {}, [99], [-1], [True], [1.0], ["1"], [[1]], [1, 3], []],
    "text": [None, 3, [], {}],
    "number": [-1, 1.5, True, "1", None, [], float("nan")],
}


def flip(rng: random.Random, data: bytes) -> bytes:
    """Return it with a byte in it that is none of ASCII."""
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] | 128]) + data[at + 1 :]


def test_a_fabric_has_nobody_to_blame_and_every_other_reason_has() -> None:
    ranks = Ranks(2)
    ranks.dogs[1]._tell(reason="fabric", ranks=[1], text="x", number=0)
    ranks.dogs[1]._tell(reason="died", ranks=[], text="x", number=0)
    ranks.tick(3.0)
    assert ranks.errors == [[], []]


def test_what_is_malformed_in_a_record_is_left_out() -> None:
    deep: Any = []
    for _ in range(900):
        deep = [deep]
    ranks = Ranks(2)
    ranks.step()
    good = ranks.flights[1].record()
    bad: list[Any] = [None, 7, [], {}, "x", good[0] | {"number": "1"}, good[0] | {"names": deep}]
    bad += [{key: value for key, value in good[0].items() if key != "digest"}]
    bad += [good[0] | {"more": deep}, good[0] | {"names": [1]}, good[0] | {"bucket": None}]
    for record, kept in ((bad + good, good), (good * 30, (good * 30)[:64]), ({}, []), (7, [])):
        ranks = Ranks(2)
        ranks.step()
        fields = {"reason": "raised", "ranks": [1], "text": "x"}
        ranks.board.inboxes[0].append((0.0, 1, encode_notice(record=record, **fields)))
        ranks.frozen.add(1)
        ranks.tick(3.0)
        (report,) = ranks.reports(but={1})
        assert report.records[1] == kept
        json.dumps(report.as_json())


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


def test_a_transports_error_alone_is_told_after_a_second() -> None:
    ranks = Ranks(2)
    ranks.async_errors[0] = CommunicationError("NCCL's own")
    ranks.tick(0.9)
    assert ranks.errors == [[], []]
    ranks.link(1, "lost")
    ranks.tick(0.1)
    assert ranks.dogs[0]._cause is not None
    assert ranks.dogs[0]._cause[0] == "died"


def test_the_first_cause_of_a_rank_stays() -> None:
    ranks = Ranks(4)
    ranks.link(3, "lost")
    ranks.dogs[0].tick()  # it has found that
    ranks.dogs[2].raised(ValueError("later"))
    ranks.frozen.add(2)
    ranks.tick(3.0)
    assert [(r.reason, r.ranks) for r in ranks.reports(but={2, 3})] == [("died", (3,))] * 2
    ranks.link(0, "lost")
    ranks.async_errors[1] = CommunicationError("a consequence")
    ranks.tick(3.0)
    assert len(ranks.errors[1]) == 1


def test_two_that_find_different_causes_at_once_agree_on_the_first() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        ranks = Ranks(4)
        ranks.step(rng)
        ranks.tick(0.2)
        first, second = rng.sample(range(4), 2)
        ranks.async_errors[first] = CommunicationError("first")
        ranks.dogs[first].tick()
        ranks.now += 0.05
        ranks.async_errors[second] = CommunicationError("second")
        ranks.tick(4.0)
        for report in ranks.reports():
            assert (report.reason, report.ranks) == ("asynchronous error", (first,))
            assert "first" in report.detail


def test_a_rank_that_comes_back_is_told_what_became_of_it() -> None:
    ranks = Ranks(3)
    for rank in (0, 2):
        ranks.launch(rank, 0)
        ranks.streams[rank][0].done = True
    ranks.tick(0.2)
    ranks.frozen.add(1)
    ranks.tick(TIMEOUT_S + 3.0)
    ranks.frozen.clear()
    ranks.tick(3.0)
    assert {(r.reason, r.ranks) for r in ranks.reports()} == {("stopped", (1,))}


def test_an_errors_text_travels_however_long_it_is() -> None:
    for error in ("x" * 100_000, "\U0001f600" * 100_000):
        ranks = Ranks(3)
        ranks.step()
        ranks.async_errors[1] = CommunicationError(error)
        ranks.tick(4.0)
        for report in ranks.reports():
            assert (report.reason, report.ranks) == ("asynchronous error", (1,))
            assert error[:100] in report.detail
        ranks = Ranks(2)
        ranks.launch(1, 0, names=[error] * 9)
        ranks.dogs[1].raised(ValueError(error))
        ranks.tick(0.1)
        ranks.tick(2.0)
        assert {r.ranks for r in ranks.reports()} == {(1,)}


@pytest.mark.parametrize(
    ("silent", "ranks_named", "expected"),
    [
        (True, (), ("stopped", (1,))),
        (False, (1,), ("did not call", (1,))),
        (False, (), ("asynchronous error", (0,))),
    ],
)
def test_what_is_behind_a_transports_error(
    silent: bool, ranks_named: tuple[int, ...], expected: Any
) -> None:
    ranks = Ranks(2)
    ranks.tick(0.2)
    if silent:
        ranks.link(1, "silent")
    asked = CommunicationError("it does not answer")
    asked.ranks = ranks_named
    assert ranks.dogs[0].explain(asked, timeout_s=0.0) is None
    ranks.tick(4.0)
    assert ranks.dogs[0].explain(asked, timeout_s=0.0) is ranks.errors[0][0]
    for report in ranks.reports(but={1} if silent else set()):
        assert (report.reason, report.ranks) == expected


def watch(beats: Beats, on_fault: Callable[[Any], None], board: Board) -> Watchdog:
    return Watchdog(
        0,
        Flight(Event, board.clock),
        beats,
        timeout_s=TIMEOUT_S,
        make_error=make_error,
        on_fault=on_fault,
        clock=board.clock,
    )


def test_the_thread_looks_until_it_is_stopped_from_on_fault_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watchdog_module, "TICK_S", 0.001)
    board, called = Board(2, lambda: 1.0), threading.Event()
    errors: list[Any] = []

    def on_fault(error: CommunicationError) -> None:
        errors.append((error, threading.current_thread()))
        dog.stop()
        assert dog.explain(error) is error
        called.set()

    dog = watch(Beats(board, 0), on_fault, board)
    dog.start()
    board.gone[1] = "lost"
    assert called.wait(LIMIT_S)
    dog.stop()
    dog.stop()
    ((error, thread),) = errors
    assert error.report.reason == "died"
    assert thread.daemon
    assert thread is not threading.current_thread()
    assert not thread.is_alive()


def test_a_look_that_fails_does_not_end_the_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog_module, "TICK_S", 0.001)
    now, called = [1.0], threading.Event()
    failed = threading.Event()

    class Broken(Beats):
        def peers(self) -> Any:
            if threading.current_thread() is not threading.main_thread() and not failed.is_set():
                failed.set()
                raise OSError("planted")
            return super().peers()

    board = Board(2, lambda: now[0])
    errors: list[CommunicationError] = []
    dog = watch(Broken(board, 0), lambda error: (errors.append(error), called.set())[1], board)
    dog.start()
    assert failed.wait(LIMIT_S)
    while not called.wait(0.01) and now[0] < 1000:
        now[0] += 0.5
    dog.stop()
    assert [error.report.reason for error in errors] == ["asynchronous error"]
    assert "OSError: planted" in errors[0].report.detail
