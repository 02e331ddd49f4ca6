"""A flight counts, keeps and digests launches; what other ranks send of theirs is checked."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from watched import Event

from cupynccl_reduce import flight as flight_module
from cupynccl_reduce.flight import Flight, State, decode_notice, encode_notice, parse_record

FIELDS: dict[str, Any] = {
    "what": "reduce",
    "bucket": 0,
    "dtype": "float32",
    "nbytes": 1024,
    "calls": 1,
    "names": ("a",),
}


class Rank:
    """A flight on a clock that stands, with one stream."""

    def __init__(self) -> None:
        self.now = 0.0
        self.stream: list[Any] = []
        self.made: list[Event] = []
        self.flight = Flight(self._make, lambda: self.now)

    def _make(self) -> Event:
        self.made.append(Event())
        return self.made[-1]

    def launch(self, **changes: Any) -> None:
        with self.flight.launch(self.stream, **FIELDS | changes):
            pass

    def run(self, events: int) -> State:
        """Let that many events pass, and look."""
        for event in self.stream[:events]:
            event.done = True
        del self.stream[:events]
        self.flight.poll()
        return self.flight.state()


def counts(state: State) -> tuple[int, int, int, int]:
    return state.called, state.queued, state.started, state.done


def test_launches_are_counted_as_they_are_called_queued_started_and_done() -> None:
    rank = Rank()
    rank.flight.step = 5
    assert counts(rank.flight.state()) == (0, 0, 0, 0)
    with rank.flight.launch(rank.stream, **FIELDS):
        assert counts(rank.flight.state()) == (1, 0, 0, 0)
        assert len(rank.stream) == 1  # the start is recorded before what the block queues
    assert counts(rank.flight.state()) == (1, 1, 0, 0)
    rank.launch(bucket=1)
    assert counts(rank.run(0)) == (2, 2, 0, 0)
    assert counts(rank.run(1)) == (2, 2, 1, 0)
    assert counts(rank.run(1)) == (2, 2, 1, 1)
    assert counts(rank.run(2)) == (2, 2, 2, 2)
    assert rank.flight.state().step == 5


def test_a_launch_is_done_only_after_those_before_it() -> None:
    rank = Rank()
    for bucket in range(3):
        rank.launch(bucket=bucket)
    for event in rank.stream[2:]:
        event.done = True  # whatever an event says: one queue has one order
    rank.flight.poll()
    assert counts(rank.flight.state()) == (3, 3, 0, 0)
    assert counts(rank.run(2)) == (3, 3, 3, 3)


def test_only_the_time_counts_for_which_a_launch_runs() -> None:
    rank = Rank()
    rank.launch(bucket=0)
    rank.launch(bucket=1)
    rank.now = 500.0
    rank.flight.poll()
    launched, seconds = rank.flight.running()
    assert launched is not None
    assert (launched.number, seconds) == (1, 0.0)
    rank.run(1)
    rank.now = 507.0
    assert rank.flight.running()[1] == 7.0
    assert rank.flight.state().running_s == 7.0
    assert rank.run(1).running_s == 0.0
    rank.run(1)
    rank.now = 510.0
    assert rank.flight.running()[1] == 3.0
    rank.run(1)
    assert rank.flight.running() == (None, 0.0)
    first, second = rank.flight.record()
    assert (first["queued_s"], first["started_s"], first["done_s"]) == (0.0, 500.0, 507.0)
    assert (second["queued_s"], second["started_s"], second["done_s"]) == (0.0, 507.0, 510.0)


def test_a_launch_that_the_host_is_inside_of_runs_once_all_before_it_are_done() -> None:
    rank = Rank()
    rank.launch(bucket=0)
    with rank.flight.launch(rank.stream, **FIELDS | {"bucket": 1}):
        rank.now = 4.0
        launched, seconds = rank.flight.running()
        assert launched is not None
        assert (launched.number, seconds) == (1, 0.0)
        rank.run(2)
        launched, seconds = rank.flight.running()
        assert launched is not None
        assert (launched.number, seconds) == (2, 4.0)
        assert rank.flight.find(2) is None  # not queued yet
    assert rank.flight.running()[1] == 0.0


def test_the_last_64_are_kept_and_every_event_is_used_again() -> None:
    rank = Rank()
    for number in range(70):
        rank.launch(bucket=number)
    assert [entry["number"] for entry in rank.flight.record()] == list(range(7, 71))
    assert rank.flight.find(6) is None
    assert rank.flight.find(70) is not None
    assert len(rank.made) == 140
    state = rank.run(140)
    assert (*counts(state), state.running_s) == (70, 70, 70, 70, 0.0)
    for number in range(500):
        rank.launch(bucket=number)
        rank.run(2)
    assert len(rank.made) == 140
    for number in range(70):
        rank.launch(bucket=number)
    assert len(rank.made) == len({id(event) for event in rank.stream}) == 140  # none twice at once


def test_an_event_that_has_not_passed_is_not_recorded_again() -> None:
    rank, rng = Rank(), random.Random(4)
    for _ in range(2000):
        rank.launch()
        assert len({id(event) for event in rank.stream}) == len(rank.stream)
        rank.run(rng.randrange(5))


def test_digests_tell_all_launches_so_far_and_their_order() -> None:
    def digests(*launches: dict[str, Any]) -> list[bytes]:
        rank = Rank()
        for launch in launches:
            rank.launch(**launch)
        kept = [rank.flight.digest(number) for number in range(len(launches) + 1)]
        assert rank.flight.digest(len(launches) + 1) is None
        assert rank.flight.digest(-1) is None
        assert kept[-1] == rank.flight.state().digest
        return [digest for digest in kept if digest is not None]

    a, b = {"bucket": 0}, {"bucket": 1}
    assert digests()[0] == bytes(8) == State().digest
    assert digests(a, b) == digests(a, b)
    assert digests(a, b, a)[:3] == digests(a, b)
    assert digests(a, b)[2] != digests(b, a)[2]
    assert digests(a)[1] != digests(a, a)[2]
    assert digests(a) == digests(a | {"names": ("other",)})  # layouts are compared elsewhere
    changes = ({"what": "gather"}, {"bucket": 9}, {"dtype": "int32"}, {"nbytes": 1}, {"calls": 7})
    for change in changes:
        different = digests(a | change, b)
        assert different[0] == digests(a, b)[0]
        assert all(x != y for x, y in zip(different[1:], digests(a, b)[1:], strict=True))


def test_digests_are_kept_as_far_as_ranks_may_be_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    told = 4 * flight_module.DIGESTS
    rank = Rank()
    for number in range(told):  # ever new launches: what is remembered of them is bounded
        rank.launch(bucket=number)
        rank.run(2)
    flight = rank.flight
    assert len(flight._told) <= flight_module.DIGESTS
    first = told - flight_module.DIGESTS + 1
    assert flight.digest(first - 1) is None
    kept = [flight.digest(number) for number in range(first, told + 1)]
    assert all(x is not None and x != y for x, y in pairwise(kept))


@pytest.mark.parametrize("at", ["block", "first record", "last record", "event"])
def test_an_exception_while_launching_notes_nothing(at: str) -> None:
    class Stream(list[Any]):
        fails: int | None = None  # at which record

        def append(self, event: Any) -> None:
            if self.fails is not None and len(self) >= self.fails:
                raise KeyError("planted")
            super().append(event)

    rank = Rank()
    rank.launch()
    rank.run(2)
    rank.launch()
    before, digest = rank.flight.state(), rank.flight.digest(2)
    stream = Stream()
    stream.fails = {"first record": 0, "last record": 1}.get(at)
    if at == "event":
        rank.flight._make_event = lambda: {}["planted"]
        rank.flight._events.clear()

    def launch() -> None:
        with rank.flight.launch(stream, **FIELDS):
            if at == "block":
                raise KeyError("planted")

    with pytest.raises(KeyError, match="planted"):
        launch()
    rank.now = 100.0
    assert rank.flight.state() == before
    assert rank.flight.digest(2) == digest
    assert rank.flight.digest(3) is None
    assert [entry["number"] for entry in rank.flight.record()] == [1, 2]
    rank.flight._make_event = rank._make
    rank.launch()
    assert counts(rank.run(4)) == (3, 3, 3, 3)


@pytest.mark.parametrize("which", ["started", "done"])
def test_what_a_query_raises_is_raised_and_counts_nothing(which: str) -> None:
    rank = Rank()
    rank.launch(bucket=0)
    rank.launch(bucket=1)
    rank.run(2)

    class Lost:
        @property
        def done(self) -> bool:
            raise RuntimeError("device lost")

    launched = rank.flight._flying[0]
    event = getattr(launched, which)
    setattr(launched, which, Lost())
    for event_of_stream in rank.stream:
        event_of_stream.done = True
    for _ in range(3):
        with pytest.raises(RuntimeError, match="device lost"):
            rank.flight.poll()
        assert counts(rank.flight.state()) == (2, 2, 1 + (which == "done"), 1)
    setattr(launched, which, event)
    assert counts(rank.run(2)) == (2, 2, 2, 2)


def test_a_launch_says_what_it_is_and_names_five() -> None:
    rank = Rank()
    rank.launch(bucket=3, nbytes=1234567, calls=2, names=[f"p{i}" for i in range(7)])
    rank.launch(names=("only",))
    first, second = (rank.flight.find(number) for number in (1, 2))
    assert first is not None
    assert second is not None
    assert first.describe() == (
        "launch 1 (reduce of bucket 3: 'p0', 'p1', 'p2', 'p3', 'p4' and 2 more; "
        "1,234,567 bytes of float32 in 2 calls)"
    )
    assert ": 'only'; " in second.describe()
    entry = rank.flight.record()[0]
    assert (entry["names"], entry["parameters"]) == ([f"p{i}" for i in range(5)], 7)
    assert entry["digest"] == first.digest.hex()


def test_a_state_survives_its_bytes_and_nothing_else_is_one() -> None:
    rng = random.Random(5)
    for _ in range(200):
        four = sorted(rng.randrange(1 << 63) for _ in range(4))
        done, started, queued, called = four
        step, ran = rng.randrange(1 << 63), float(rng.randrange(1 << 20))
        state = State(step, called, queued, started, done, ran, rng.randbytes(8))
        data = state.encode()
        assert len(data) <= 256
        assert State.decode(data) == state
        assert State.decode(data[:-1]) is None
        assert State.decode(data + b"\0") is None
        assert State.decode(b"X" + data[1:]) is None
        assert State.decode(rng.randbytes(len(data))) is None
    disordered = [
        State(called=1, queued=2),
        State(called=2, queued=1, started=2),
        State(called=2, queued=2, started=1, done=2),
    ]
    endless = [State(running_s=ran) for ran in (-1.0, float("inf"), float("nan"))]
    for state in disordered + endless:
        assert State.decode(state.encode()) is None
    assert State.decode(b"") is None


def test_a_notice_survives_its_bytes_and_garbage_is_none() -> None:
    fields = {"reason": "died", "ranks": [1], "text": "\u00fc\ud800\n", "record": []}
    assert decode_notice(encode_notice(**fields)) == fields
    for data in (b"", b"{", b"[]", b"3", b"null", b"\xff\xfe", b"[" * 60_000, b'{"a":' * 20_000):
        assert decode_notice(data) == {}
    assert decode_notice(b"1" * 60_000) == {}  # more digits than Python reads


def test_a_record_of_another_rank_is_read_back_without_what_is_malformed() -> None:
    rank = Rank()
    for number in range(3):
        rank.launch(bucket=number)
    record = rank.flight.record()
    notice = decode_notice(encode_notice(record=[None, *record, 7, {"number": 1}]))
    assert parse_record(notice["record"]) == record
    assert parse_record(record * 40) == (record * 40)[: flight_module.KEEP]
    for data in (None, 3, "x", {}, [[]], [{}]):
        assert parse_record(data) == []
    for key, value in (("number", "1"), ("what", None), ("digest", 3), ("names", [[1]])):
        assert parse_record([record[0] | {key: value}]) == []
