"""The race detector against brute force: all legal interleavings of small programs."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import pytest

from cupynccl_reduce.detector import Detector, Operation

NBYTES = 6
HOST = 0


@dataclass(frozen=True)
class Step:
    """What the one host does next: queue something on a stream, or something of its own."""

    kind: str  # access, record, wait, synchronize
    lane: int = HOST  # HOST: an access of the host itself
    event: int = 0
    start: int = 0
    stop: int = 0
    write: bool = False


def draw(seed: int) -> list[Step]:
    rng = random.Random(seed)
    streams, events = rng.randint(1, 3), rng.randint(1, 2)
    program = []
    for _ in range(rng.randint(3, 11)):
        kind = rng.choice(["access"] * 5 + ["record", "record", "wait", "wait", "synchronize"])
        start = rng.randrange(NBYTES)
        program.append(
            Step(
                kind,
                HOST if kind == "access" and rng.random() < 0.15 else rng.randint(1, streams),
                rng.randrange(events),
                start,
                rng.randint(start + 1, NBYTES),
                rng.random() < 0.5,
            )
        )
    return program


def races_by_brute_force(program: list[Step]) -> set[tuple[int, int]]:  # noqa: C901  # plainly
    """Return the pairs of conflicting accesses that legal interleavings run in both orders.

    Knows no clocks. A state is where the host and each stream are; an access is before another if
    some reachable state has run the first and not the second.
    """
    queues: dict[int, list[int]] = {}
    awaited: dict[int, int | None] = {}  # wait or synchronize -> the record that it saw
    last: dict[int, int] = {}
    for index, step in enumerate(program):
        if step.kind == "record":
            last[step.event] = index
        if step.kind in ("wait", "synchronize"):
            awaited[index] = last.get(step.event)
        if step.kind != "synchronize" and step.lane != HOST:
            queues.setdefault(step.lane, []).append(index)
    lanes = list(queues)

    def done(state: tuple[int, ...]) -> set[int]:
        ran = {i for lane, at in zip(lanes, state[1:], strict=True) for i in queues[lane][:at]}
        own = {
            i for i in range(state[0]) if program[i].kind == "synchronize" or not program[i].lane
        }
        return ran | own

    seen = {(0,) * (len(lanes) + 1)}
    todo = list(seen)
    before: set[tuple[int, int]] = set()
    accesses = [i for i, step in enumerate(program) if step.kind == "access"]
    while todo:
        state = todo.pop()
        ran = done(state)
        before.update((a, b) for a in accesses for b in accesses if a in ran and b not in ran)
        following = []
        if state[0] < len(program):
            step = program[state[0]]
            free = step.kind != "synchronize" or awaited[state[0]] in (None, *ran)
            if free:
                following.append((state[0] + 1, *state[1:]))
        for number, lane in enumerate(lanes, 1):
            queue, at = queues[lane], state[number]
            if at < len(queue) and queue[at] < state[0]:
                index = queue[at]
                if program[index].kind != "wait" or awaited[index] in (None, *ran):
                    following.append((*state[:number], at + 1, *state[number + 1 :]))
        for new in following:
            if new not in seen:
                seen.add(new)
                todo.append(new)
    return {
        (a, b)
        for a, b in combinations(accesses, 2)
        if (a, b) in before
        and (b, a) in before
        and (program[a].write or program[b].write)
        and program[a].start < program[b].stop
        and program[b].start < program[a].stop
    }


def races_by_detector(program: list[Step]) -> Any:
    detector = Detector()
    lanes = [detector.lane(name) for name in ("host", "stream 1", "stream 2", "stream 3")]
    detector.add_block(1000, NBYTES, "memory")
    clocks: dict[int, dict[int, int]] = {}
    for index, step in enumerate(program):
        lane = lanes[step.lane]
        if step.kind == "synchronize":
            detector.join(lanes[HOST], clocks.get(step.event, {}))
            continue
        detector.follow(lane, lanes[HOST])
        if step.kind == "record":
            clocks[step.event] = detector.snapshot(lane)
        elif step.kind == "wait":
            detector.join(lane, clocks.get(step.event, {}))
        else:
            what = Operation("access", str(index), "here")
            detector.begin(what, lane)
            address, nbytes = 1000 + step.start, step.stop - step.start
            conflict = detector.access(what, address, nbytes, write=step.write)
            if conflict is not None:
                return conflict
    return None


@pytest.mark.parametrize("chunk", range(10))
def test_a_race_is_reported_exactly_where_some_interleavings_differ(chunk: int) -> None:
    reported = 0
    for seed in range(chunk * 400, chunk * 400 + 400):
        program = draw(seed)
        conflict = races_by_detector(program)
        races = races_by_brute_force(program)
        assert (conflict is not None) == bool(races), (seed, program, races)
        if conflict is not None:
            reported += 1
            pair = int(conflict.earlier.label), int(conflict.later.label)
            assert pair in races, (seed, program)
            shared = range(
                max(program[pair[0]].start, program[pair[1]].start),
                min(program[pair[0]].stop, program[pair[1]].stop),
            )
            assert conflict.start in shared
            assert conflict.stop - 1 in shared
    assert 100 < reported < 350  # the programs are of both kinds


def lanes_and_block() -> tuple[Detector, int, int, Any]:
    detector = Detector()
    return detector, detector.lane("a"), detector.lane("b"), detector.add_block(64, 32, "block")


def begin(detector: Detector, lane: int, kind: str = "write of") -> Operation:
    what = Operation(kind, "x", "here.py:1")
    detector.begin(what, lane)
    return what


def test_the_text_shows_both_operations_sites_and_bytes() -> None:
    detector, one, two, _ = lanes_and_block()
    detector.access(begin(detector, one), 64, 16, write=True)
    conflict = detector.access(begin(detector, two, "read of"), 72, 16, write=False)
    assert conflict is not None
    assert detector.tell(conflict) == (
        "race on bytes 8 to 16 of block\n"
        "  earlier write: write of x on a, at here.py:1\n"
        "  later   read : read of x on b, at here.py:1\n"
        "  b never waited for that point of a"
    )


def test_the_text_names_the_bytes_that_both_touch() -> None:
    detector, one, two, block = lanes_and_block()
    detector.name(64, 8, "p")
    detector.name(72, 8, "q")
    detector.name(80, 16, "r")
    detector.name(72, 8, "s")  # the same bytes, used again
    detector.name(80, 0, "empty")
    detector.name(4096, 8, "nobody's")
    detector.access(begin(detector, one), 64, 32, write=True)
    for start, nbytes, names in ((68, 4, "p"), (68, 8, "p, s"), (79, 2, "s, r")):
        conflict = detector.access(begin(detector, two), start, nbytes, write=False)
        assert conflict is not None
        first = replace(conflict, start=start - 64, stop=start - 64 + nbytes)
        assert detector.tell(first).splitlines()[0].endswith(f" of block: {names}")
    assert block.names.keys() == {(0, 8), (8, 16), (16, 32)}


def test_memory_given_back_is_nobodys_even_in_order() -> None:
    detector, one, two, block = lanes_and_block()
    assert detector.free(begin(detector, one, "free of"), block) is None
    detector.follow(two, one)
    conflict = detector.access(begin(detector, two), 64, 4, write=False)
    assert conflict is not None
    assert "given back" in detector.tell(conflict)


def test_a_free_races_with_a_read_that_it_does_not_know() -> None:
    detector, one, two, block = lanes_and_block()
    detector.access(begin(detector, two, "read of"), 70, 4, write=False)
    conflict = detector.free(begin(detector, one, "free of"), block)
    assert conflict is not None
    assert (conflict.start, conflict.stop) == (6, 10)


def test_unknown_and_empty_memory_is_nobodys_business() -> None:
    detector, one, two, block = lanes_and_block()
    empty = detector.add_block(512, 0, "empty")
    for lane in (one, two):
        assert detector.access(begin(detector, lane), 4096, 8, write=True) is None
        assert detector.access(begin(detector, lane), 64, 0, write=True) is None
    detector.remove_block(empty)
    detector.remove_block(block)
    detector.remove_block(block)
    assert detector.find(64) is None
    assert detector.written_by(64) is None


def test_blocks_are_found_by_address() -> None:
    detector = Detector()
    blocks = {base: detector.add_block(base, 16, str(base)) for base in (96, 32, 64)}
    for base, block in blocks.items():
        assert detector.find(base) is block
        assert detector.find(base + 15) is block
        assert detector.find(base + 16) is blocks.get(base + 16)
    assert detector.find(0) is None
    one = detector.lane("a")
    what = begin(detector, one)
    detector.access(what, 68, 4, write=True)
    assert [detector.written_by(a) for a in (67, 68, 71, 72)] == [None, what, what, None]


def test_an_event_carries_what_its_lane_knew() -> None:
    detector, one, two, _ = lanes_and_block()
    first = begin(detector, one)
    clock = detector.snapshot(one)
    second = begin(detector, one)
    assert not detector.covers(two, clock)
    detector.join(two, clock)
    assert detector.covers(two, clock)
    assert detector.knows(two, first)
    assert not detector.knows(two, second)
