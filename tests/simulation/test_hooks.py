"""Several threads of a rank: hooks that hand gradients over, and what orders threads."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from simulation.planted import PLANTED
from simulation.programs import hooks
from simulation.workloads import SCHEDULES, Boom

from cupynccl_reduce import ParamSpec, Reducer, Registry
from cupynccl_reduce.errors import DeadlockError, RaceError
from cupynccl_reduce.testing import Simulation, explore

if TYPE_CHECKING:
    from cupynccl_reduce import World

every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


@every_schedule
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_that_hand_over_at_once_neither_race_nor_hang(threads: int, schedule: str) -> None:
    for seed in range(6):
        Simulation(2, seed=seed, schedule=schedule).run(partial(hooks, threads=threads))


@every_schedule
def test_a_hook_that_waits_for_other_ranks_within_the_lock_does_not_hang(schedule: str) -> None:
    def work(world: World) -> Any:
        runtime: Any = world.runtime
        registry = Registry([ParamSpec(n, (4,), "float32") for n in "pq"], world, bucket_bytes=16)
        with Reducer(registry, policy="arrival") as reducer:

            def hand_over() -> None:
                for name in "qp":
                    reducer.reduce_grad(name, runtime.produce(np.ones(4), "float32"))

            with reducer.backward():
                thread = runtime.spawn(hand_over)
                for _ in range(4):
                    runtime.produce(np.ones(1), "float32")  # of its own, in between
                    reducer.statistics()
                thread.join()
            return [runtime.consume(shard) for shard in reducer.wait().values()]

    for seed in range(6):
        for readings in Simulation(2, seed=seed, schedule=schedule).run(work).values:
            assert [reading.value.tolist() for reading in readings] == [[1.0, 1.0]] * 2


def test_hooks_on_two_threads_are_explored() -> None:
    def work(world: World) -> None:
        runtime: Any = world.runtime
        registry = Registry([ParamSpec(n, (2,), "float32") for n in "pq"], world, bucket_bytes=8)
        with Reducer(registry) as reducer:

            def hand_over(name: str) -> None:
                reducer.reduce_grad(name, runtime.produce(np.ones(2), "float32"))

            with reducer.backward():
                others = [runtime.spawn(partial(hand_over, name)) for name in "pq"]
                for other in others:
                    other.join()
            reducer.wait()

    seen = explore(work, 1, max_preemptions=1)
    assert seen.exhausted
    assert seen.runs > 50


def test_the_bug_of_another_threads_arena_takes_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (planted,) = [bug for bug in PLANTED if bug.name == "free on another thread's arena"]
    planted.plant(monkeypatch)
    for schedule in SCHEDULES:
        Simulation(2, schedule=schedule).run(partial(hooks, threads=0))
    with pytest.raises(RaceError) as caught:
        Simulation(2, schedule="lazy").run(hooks)
    told = str(caught.value)
    assert "free of a gradient" in told
    assert "on stream of thread 1 of rank" in told


@every_schedule
def test_spawn_and_join_order_what_hosts_do(schedule: str) -> None:
    def work(world: World, *, join: bool) -> Any:
        runtime: Any = world.runtime
        memory = runtime.allocate(2, memory="pinned")
        runtime.poke(memory[:1], 1)
        thread = runtime.spawn(lambda: runtime.poke(memory[1:], runtime.peek(memory[:1]) + 1))
        if join:
            thread.join()
        return runtime.peek(memory).tolist()

    assert Simulation(1, schedule=schedule).run(partial(work, join=True)).values == [[1, 2]]
    with pytest.raises(RaceError, match=r"on thread 1 of rank 0"):
        Simulation(1, schedule=schedule).run(partial(work, join=False))


@every_schedule
def test_a_thread_has_a_current_stream_of_its_own(schedule: str) -> None:
    def work(world: World) -> Any:
        runtime: Any = world.runtime
        side = runtime.stream()
        with runtime.use(side):
            thread = runtime.spawn(lambda: runtime.adopt(None))
            other = thread.join()
            assert runtime.adopt(None) is side
        return other is not side and other is not runtime.adopt(None)

    assert Simulation(1, schedule=schedule).run(work).values == [True]


@every_schedule
def test_join_gives_what_the_function_returned_or_raised(schedule: str) -> None:
    def work(world: World) -> Any:
        runtime: Any = world.runtime

        def fail() -> None:
            raise Boom

        fails, works = runtime.spawn(fail), runtime.spawn(lambda: 7)
        with pytest.raises(Boom):
            fails.join()
        return works.join(), works.join()

    assert Simulation(1, schedule=schedule).run(work).values == [(7, 7)]


@every_schedule
def test_a_rank_joins_what_it_has_not(schedule: str) -> None:
    def work(world: World) -> None:
        runtime: Any = world.runtime

        def fail() -> None:
            for _ in range(5):
                runtime.produce(np.ones(1), "float32")
            raise Boom

        runtime.spawn(fail)

    with pytest.raises(Boom) as caught:
        Simulation(2, schedule=schedule).run(work)
    assert "of Simulation(world_size=2" in caught.value.__notes__[0]


@every_schedule
def test_an_error_of_a_hook_reaches_the_backward_that_joins_it(schedule: str) -> None:
    def work(world: World) -> Any:
        runtime: Any = world.runtime
        registry = Registry([ParamSpec(n, (4,), "float32") for n in "pq"], world, bucket_bytes=16)
        with Reducer(registry) as reducer:

            def hand_over(*, fails: bool) -> None:
                reducer.reduce_grad("q", runtime.produce(np.ones(4), "float32"))
                if fails:
                    raise Boom
                reducer.reduce_grad("p", runtime.produce(np.ones(4), "float32"))

            try:
                with reducer.backward():
                    runtime.spawn(partial(hand_over, fails=world.rank == 1)).join()
            except Boom:
                reducer.discard()
                return None
            return runtime.consume(reducer.wait()["p"])

    reading, nothing = Simulation(2, schedule=schedule).run(work).values
    assert np.isnan(reading.value).all()
    assert nothing is None


def test_a_deadlock_names_threads() -> None:
    def work(world: World) -> None:
        thread = world.runtime.spawn(lambda: world.control.all_gather(b""))
        if world.rank == 0:
            thread.join()

    def alone(world: World) -> None:
        if world.rank == 0:
            work(world)

    with pytest.raises(DeadlockError) as caught:
        Simulation(2).run(alone)
    told = str(caught.value)
    assert "host of rank 0 waits for thread 1 of rank 0 to end" in told
    assert "thread 1 of rank 0 waits for all ranks in side-channel call 1" in told
    assert "rank 1 has returned" in told


def test_what_is_found_ends_threads_that_are_within_the_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its lock is given back before the thread that needs it to end is woken."""

    def work(world: World) -> None:
        runtime: Any = world.runtime
        registry = Registry([ParamSpec("p", (4,), "float32")], world)
        with Reducer(registry, policy="arrival") as reducer, reducer.backward():

            def hand_over() -> None:
                reducer.reduce_grad("p", runtime.produce(np.ones(4), "float32"))
                reducer.flush()

            if world.rank == 0:
                runtime.spawn(hand_over).join()
            else:
                # Rank 0's thread has compared digests, and waits in the second exchange.
                world.control.all_gather(b"")
                runtime.peek(runtime.produce(np.ones(1), "float32"))

    for schedule in SCHEDULES:
        for seed in range(4):
            with pytest.raises(RaceError, match="host's read"):
                Simulation(2, seed=seed, schedule=schedule).run(work)
