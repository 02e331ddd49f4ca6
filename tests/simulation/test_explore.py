"""Exploration: it runs all that can make a difference, and finds what few schedules show."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from simulation.mutations import around, skip_waits
from simulation.workloads import SCHEDULES, Boom

from cupynccl_reduce import ParamSpec, Reducer, Registry
from cupynccl_reduce.errors import DeadlockError, LayoutError, MismatchError, RaceError
from cupynccl_reduce.pipeline import Pipeline
from cupynccl_reduce.testing import Simulation, explore

if TYPE_CHECKING:
    from collections.abc import Callable

    from cupynccl_reduce import World
    from cupynccl_reduce.testing import SimulationResult


def one_cycle(world: World, **options: Any) -> Any:
    """Reduce two buckets once."""
    runtime: Any = world.runtime
    registry = Registry([ParamSpec(n, (4,), "float32") for n in "pq"], world, bucket_bytes=16)
    with Reducer(registry, op="sum", **options) as reducer:
        with reducer.backward():
            for name in "qp":
                reducer.reduce_grad(name, runtime.produce(np.full(4, world.rank + 1), "float32"))
        return [runtime.consume(shard) for shard in reducer.wait().values()]


def check_sum(result: SimulationResult) -> None:
    total = sum(range(len(result.values) + 1))
    for readings in result.values:
        right = all((reading.value == total).all() for reading in readings)
        assert right, "bytes"


@pytest.mark.parametrize("policy", ["planned", "arrival"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_one_cycle_of_two_buckets_is_explored_to_the_end(world_size: int, policy: str) -> None:
    def work(world: World) -> Any:
        return one_cycle(world, policy=policy)

    seen = explore(work, world_size, check=check_sum, max_runs=1000)
    assert seen.exhausted
    # Each rank asks once whether each of its packs is done: four answers.
    assert seen.runs >= 4**world_size


# --- nothing that can be seen is left out ------------------------------------------------------


class Player:
    """One rank: it does what a few words say, such as "query a", and notes what queries answer."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.runtime: Any = world.runtime
        self.streams = {"main": world.stream, "side": self.runtime.stream()}
        self.events: dict[str, Any] = {}
        self.memory = self.runtime.allocate(2)

    def play(self, script: str) -> str:
        answers = ""
        for step in filter(None, script.split("; ")):
            kind, event, stream = (*step.split(), "", "")[:3]
            what = self.events.setdefault(event, self.runtime.event())
            if kind == "record":
                what.record(self.streams[stream])
            elif kind == "wait":
                self.streams[stream].wait_event(what)
            elif kind == "query":
                answers += "ny"[what.done]
            elif kind == "synchronize":
                what.synchronize()
            elif kind == "reduce":
                comm, memory = self.world.communicator, self.memory
                comm.all_reduce(memory, memory, "uint8", "sum", self.world.stream)
            else:
                self.world.control.all_gather(b"")
        return answers


def outcomes(scripts: tuple[str, ...], *, threads: bool) -> tuple[Any, set[Any]]:
    """Return a program, and all that its ranks (or the threads of one rank) have seen."""

    def work(world: World) -> Any:
        player = Player(world)
        if threads:
            before, mine, others = scripts
            player.play(before)
            other = world.runtime.spawn(lambda: player.play(others))
            answers: Any = player.play(mine), other.join()
        else:
            answers = player.play(scripts[world.rank])
        world.stream.synchronize()
        return answers

    seen: set[Any] = set()

    def note(result: SimulationResult) -> None:
        seen.add(result.values[0] if threads else tuple(result.values))

    ranks = 1 if threads else len(scripts)
    assert explore(work, ranks, check=note, max_preemptions=20).exhausted
    return work, seen


EITHER = {("n", "n"), ("n", "y"), ("y", "n"), ("y", "y")}
ONCE = {("nn", ""), ("ny", ""), ("yy", "")}
RANKS = [
    # What is done stays done, and so does what comes before it.
    (("record a main; query a; query a", ""), ONCE),
    (("record a main; record b main; query b; query a", ""), ONCE),
    (("record a main; wait a side; record b side; query b; query a", ""), ONCE),
    (("record a main; query a", "record a main; query a"), EITHER),
    # Rank 0's wait runs rank 1's stream as far as the collective; rank 1 may have asked before.
    (
        (
            "reduce; record a main; synchronize a",
            "record a main; reduce; record b side; synchronize b; query a",
        ),
        {("", "n"), ("", "y")},
    ),
    # It cannot be done: rank 1 comes to its part later.
    (("reduce; record a main; query a; meet", "meet; reduce"), {("n", "")}),
]
# An event that was never recorded counts as done: so a query sees who came first.
AMID = {("", "nn"), ("", "ny"), ("", "yn"), ("", "yy")}
THREADS = [
    (("", "record c main", "query c; query c"), AMID),
    (("record a main", "record b main; record c main", "synchronize a; query c; query c"), AMID),
    (
        (
            "record a main; record b side",
            "synchronize a; record c main",
            "synchronize b; query c; query c",
        ),
        AMID,
    ),
    (("", "record a main; query a", "record b main; query b"), EITHER),
]


@pytest.mark.parametrize(("scripts", "expected"), RANKS)
def test_all_that_ranks_can_see_is_explored(scripts: Any, expected: set[Any]) -> None:
    assert outcomes(scripts, threads=False)[1] == expected


@pytest.mark.parametrize(("scripts", "expected"), THREADS)
def test_all_that_threads_of_a_rank_can_see_is_explored(scripts: Any, expected: set[Any]) -> None:
    assert outcomes(scripts, threads=True)[1] == expected


def draw(seed: int, *, threads: bool) -> tuple[str, ...]:
    rng = random.Random(f"explore {seed}")
    kinds = ["record", "record", "wait", "query", "query", "synchronize"]
    scripts = []
    for _ in range(2):
        steps = [
            f"{rng.choice(kinds)} {rng.choice('ab')} {rng.choice(('main', 'side'))}"
            for _ in range(3 if threads else 5)
        ]
        # One record is asked about twice at most: that is the bound.
        queries = [step for step in steps if step.startswith("query")]
        scripts.append([s for s in steps if s not in queries[1 if threads else 2 :]])
    for kind in ("reduce", "meet") if not threads else ():
        for steps in scripts:
            steps.insert(rng.randrange(len(steps) + 1), kind)
    return ("",) * threads + tuple(map("; ".join, scripts))


@pytest.mark.parametrize("threads", [False, True])
def test_random_schedules_see_nothing_that_exploration_does_not(threads: bool) -> None:
    several = 0
    for seed in range(16):
        scripts = draw(seed, threads=threads)
        work, explored = outcomes(scripts, threads=threads)
        results = [
            Simulation(1 if threads else 2, seed=n, schedule=schedule).run(work).values
            for schedule in SCHEDULES
            for n in range(20)
        ]
        drawn = {values[0] if threads else tuple(values) for values in results}
        assert drawn <= explored, scripts
        several += len(drawn) > 1
    assert several > 4  # the programs are of both kinds


def test_preemptions_bound_what_threads_do() -> None:
    def work(world: World) -> Any:
        runtime: Any = world.runtime
        order: list[str] = []

        def run(name: str) -> None:
            for _ in range(3):
                order.append(name)
                runtime.queue("kernel", lambda: None)

        first, second = (runtime.spawn(lambda n=n: run(n)) for n in "ab")
        first.join()
        second.join()
        return "".join(order)

    orders: dict[int, set[str]] = {}
    for bound in (0, 1, 20):
        orders[bound] = set()

        def note(result: SimulationResult, seen: set[str] = orders[bound]) -> None:
            seen.update(result.values)

        assert explore(work, 1, check=note, max_preemptions=bound).exhausted
    assert orders[0] == {"aaabbb", "bbbaaa"}
    assert orders[0] < orders[1] < orders[20]
    assert len(orders[20]) == 20  # six steps, three of each


def test_without_preemptions_threads_still_wake_in_any_order() -> None:
    def work(world: World) -> Any:
        runtime: Any = world.runtime
        order: list[str] = []

        def synchronize() -> None:
            event = runtime.event()
            event.record(runtime.adopt(None))
            event.synchronize()

        def first() -> None:
            order.append("a")
            synchronize()
            order.append("A")

        def second() -> None:
            synchronize()
            order.append("b")

        threads = [runtime.spawn(function) for function in (first, second)]
        for thread in threads:
            thread.join()
        return "".join(order)

    orders: set[str] = set()
    explore(work, 1, check=lambda result: orders.update(result.values), max_preemptions=0)
    assert orders == {"aAb", "abA", "baA"}


# --- what it finds -----------------------------------------------------------------------------


def lies_by_answer(patch: pytest.MonkeyPatch, lie: Callable[[Pipeline, bool, bool], None]) -> None:
    """Let the end of backward ask after both packs, and do something that depends on it."""

    def release_read(original: Any, self: Pipeline) -> None:
        first, second = (buffer.packed.done for buffer in self._buffers)
        lie(self, first, second)
        original(self)

    around(patch, Pipeline, "release_read", release_read)


def wrong_bytes(self: Pipeline, first: bool, second: bool) -> None:
    if first and not second:  # neither a machine that is always late nor one that never is
        self.wait(self._runtime.adopt(None))
        row = next(iter(self._prepared.values())).row
        self._runtime.overwrite(row, np.zeros(row.shape))


def lost_collective(self: Pipeline, first: bool, second: bool) -> None:
    if not first or second:
        send = self._buffers[0].array[:16]
        self._world.communicator.all_reduce(send, send, "uint8", "sum", self._world.stream)


def other_collective(self: Pipeline, first: bool, second: bool) -> None:
    send = self._buffers[0].array[: 32 if first else 16]
    self._world.communicator.all_reduce(send, send, "uint8", "sum", self._world.stream)


@pytest.mark.parametrize(
    ("lie", "kind", "text"),
    [
        (wrong_bytes, AssertionError, "bytes"),
        (lost_collective, DeadlockError, "deadlock"),
        (other_collective, MismatchError, "different collectives"),
    ],
)
def test_what_depends_on_an_answer_is_found_and_replayed(
    lie: Any, kind: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lies_by_answer(monkeypatch, lie)
    for schedule in ("lazy", "eager"):  # no alone, and yes alone
        check_sum(Simulation(2, schedule=schedule).run(one_cycle))
    with pytest.raises(kind, match=text) as caught:
        explore(one_cycle, 2, check=check_sum)
    with pytest.raises(kind) as again:
        check_sum(replay(caught.value).run(one_cycle))
    assert str(again.value) == str(caught.value)


def replay(error: BaseException) -> Simulation:
    """Return the simulation that an error shows, in its text or in a note."""
    told = "\n".join([str(error), *getattr(error, "__notes__", ())])
    line = told.partition("replay: ")[2].partition(".run(...)")[0]
    assert "schedule=(" in line
    simulation: Simulation = eval(line, {"Simulation": Simulation})  # noqa: S307  # our own text
    return simulation


def test_what_takes_a_preemption_is_found_and_replayed_without_the_bound() -> None:
    def work(world: World) -> int:
        runtime: Any = world.runtime
        made: list[Any] = []

        def make_once() -> None:
            if not made:  # and the other thread has not either, by now
                made.append(runtime.produce(np.ones(1), "float32"))

        other = runtime.spawn(make_once)
        make_once()
        other.join()
        return len(made)

    def check(result: SimulationResult) -> None:
        assert result.values == [1, 1], "bytes"

    for schedule in ("lazy", "eager"):
        check(Simulation(2, schedule=schedule).run(work))
    assert explore(work, 2, check=check, max_preemptions=0).exhausted
    with pytest.raises(AssertionError, match="bytes") as caught:
        explore(work, 2, check=check, max_preemptions=1)
    assert 2 in replay(caught.value).run(work).values


def test_a_users_error_shows_the_schedule_too() -> None:
    def work(world: World) -> None:
        event = world.runtime.event()
        event.record(world.stream)
        if event.done:
            raise Boom

    with pytest.raises(Boom) as caught:
        explore(work, 2)
    (note,) = caught.value.__notes__
    assert note.startswith("on rank 1 of Simulation(world_size=2, seed=0, schedule=(0, 1)")


def test_a_race_is_found_in_the_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_waits(monkeypatch, "_send")
    with pytest.raises(RaceError, match=r"schedule=\(\)"):
        explore(one_cycle, 2)


# --- where it ends -----------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [{"max_runs": 0}, {"max_runs": "x"}, {"max_preemptions": -1}])
def test_a_bound_that_cannot_work_is_refused(bound: dict[str, Any]) -> None:
    with pytest.raises(LayoutError, match=next(iter(bound))):
        explore(lambda world: world.rank, 1, **bound)


def test_runs_have_a_bound() -> None:
    seen = explore(one_cycle, 2, max_runs=5)
    assert (seen.runs, seen.exhausted) == (5, False)


def test_polling_ends_and_is_no_deadlock() -> None:
    def work(world: World) -> int:
        event = world.runtime.event()
        event.record(world.stream)
        return len(list(iter(lambda: event.done, True)))

    counts = []
    seen = explore(work, 1, check=lambda result: counts.extend(result.values))
    assert sorted(counts) == [0, 1, 2]
    assert (seen.runs, seen.exhausted) == (3, True)


def test_an_answer_that_cannot_be_is_no_run() -> None:
    def work(world: World) -> bool:
        runtime: Any = world.runtime
        memory, event = runtime.allocate(1), runtime.event()
        if world.rank == 0:
            # Its collective cannot have run: rank 1 comes to that only after this answer.
            world.communicator.all_reduce(memory, memory, "uint8", "sum", world.stream)
            event.record(world.stream)
            assert not event.done
        world.control.all_gather(b"")
        if world.rank == 1:
            world.communicator.all_reduce(memory, memory, "uint8", "sum", world.stream)
        world.stream.synchronize()
        return True

    assert explore(work, 2).exhausted
    with pytest.raises(LayoutError, match="never can"):
        Simulation(2, schedule=(1,)).run(work)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_schedule_of_another_program_is_refused(world_size: int) -> None:
    with pytest.raises(LayoutError, match=r"choice 0 of the schedule is 7, but only 2"):
        Simulation(world_size, schedule=(7,)).run(one_cycle)
