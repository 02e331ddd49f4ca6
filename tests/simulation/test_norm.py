"""norm() and clip() in the simulator: no report, whatever the order; each planted bug is found."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from simulation.mutations import (
    COMMUNICATION,
    COPY,
    around,
    asked_by,
    skip_waits,
    stream_named,
)
from simulation.planted import CAST, FLOATS
from simulation.workloads import SCHEDULES, Cycle, Workload, draw, simulate

from cupynccl_reduce import MismatchError, ParamSpec, Reducer, Registry
from cupynccl_reduce.norm import Norms
from cupynccl_reduce.pipeline import Pipeline
from cupynccl_reduce.testing import RaceError, Simulation, explore
from cupynccl_reduce.testing.device import SimEvent, SimStream
from cupynccl_reduce.testing.kernels import SimNorm

if TYPE_CHECKING:
    from collections.abc import Callable

    from cupynccl_reduce import World
    from cupynccl_reduce.testing import SimulationResult

BASE = Workload(
    world_size=2,
    params=(*FLOATS[:3], *CAST[3:]),
    bucket_bytes=36,
    cycles=(
        Cycle(readers=2, backwards=2, norms=("norm", "norm", "clip")),
        Cycle(readers=1, late=True, norms=("norm",)),
        Cycle(readers=2, late=True, norms=("clip",)),
        Cycle(readers=1, norms=("norm", "clip"), gather="out"),
    ),
    producers=2,
    brought=("p1",),
)
RUNS = 240
CHUNKS = 8


def draw_measured(seed: int) -> Workload:
    """Draw a workload whose cycles ask for norms and clip."""
    rng = random.Random(f"norms {seed}")
    work = draw(seed)
    cycles = []
    for cycle in work.cycles:
        norms = ["norm"] * rng.randint(0, 2) + ["clip"] * rng.randint(0, 1)
        cycles.append(replace(cycle, norms=tuple(norms)))
    return replace(work, cycles=tuple(cycles))


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_the_correct_engine_gives_no_report(chunk: int) -> None:
    for seed in range(chunk, RUNS, CHUNKS):
        work = draw_measured(seed)
        try:
            simulate(work, seed=seed, schedule=SCHEDULES[seed // CHUNKS % len(SCHEDULES)])
        except BaseException as error:
            error.add_note(f"draw_measured({seed}) is {work}")
            raise


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("policy", ["planned", "arrival"])
def test_kernels_touch_what_they_declare(world_size: int, policy: str) -> None:
    work = replace(BASE, world_size=world_size, options={"policy": policy})
    simulate(work, check_declarations=True)


def test_every_schedule_of_a_small_program_gives_the_norm() -> None:
    def work(world: World) -> list[Any]:
        runtime: Any = world.runtime
        registry = Registry([ParamSpec("p", (4,), "float32")], world)
        readings = []
        with Reducer(registry, op="sum") as reducer:
            for value in (1.0, 2.0):
                with reducer.backward():
                    grad = runtime.produce(np.full(4, value), "float32")
                    reducer.reduce_grad("p", grad)
                    del grad
                readings.append(runtime.consume(reducer.clip(None, loss_scale=2.0)))
                readings.append(runtime.consume(reducer.wait()["p"]))
            runtime.adopt(None).synchronize()
        return readings

    def check(result: SimulationResult) -> None:
        for readings in result.values:
            first, _, second, shard = (reading.value for reading in readings)
            assert (first, second, set(shard.tolist())) == (2.0, 4.0, {2.0})

    assert explore(work, 2, check=check).exhausted


# --- planted bugs ------------------------------------------------------------------------------


def measure_on_the_copy_stream(patch: pytest.MonkeyPatch) -> None:
    def measure(original: Any, self: SimNorm, out: Any, *, start: float, stream: Any) -> None:
        original(self, out, start=start, stream=stream_named(COPY, stream))

    around(patch, SimNorm, "measure", measure)


def scale_on_the_copy_stream(patch: pytest.MonkeyPatch) -> None:
    def scale(original: Any, self: SimNorm, factor: Any, *, stream: Any) -> None:
        original(self, factor, stream=stream_named(COPY, stream))

    around(patch, SimNorm, "scale", scale)


def scale_after_the_event_of_wait(patch: pytest.MonkeyPatch) -> None:
    late: dict[int, list[Callable[[], None]]] = {}

    def scale(original: Any, self: SimNorm, factor: Any, *, stream: Any) -> None:
        work = late.setdefault(stream.rank, [])
        work.append(lambda: original(self, factor, stream=stream))

    def wait(original: Any, self: Pipeline, stream: Any) -> None:
        original(self, stream)
        for work in late.pop(stream.rank, []):
            work()

    around(patch, SimNorm, "scale", scale)
    around(patch, Pipeline, "wait", wait)


def scratch_reused_while_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Norms, "hold_back", lambda *_, **__: None)


def readers_of_norms_forgotten(patch: pytest.MonkeyPatch) -> None:
    def measure(original: Any, self: Norms, *args: Any, **how: Any) -> Any:
        result = original(self, *args, **how)
        self._readers.clear()
        return result

    around(patch, Norms, "measure", measure)


def result_in_the_parts(patch: pytest.MonkeyPatch) -> None:
    """Let the norm overwrite, on a stream of its own, what is being gathered."""

    def finish(original: Any, self: SimNorm, *args: Any, stream: Any, **fields: Any) -> None:
        original(self, *args, stream=stream_named(COPY, stream), **fields)

    around(patch, SimNorm, "finish", finish)


def forget_the_producer(patch: pytest.MonkeyPatch) -> None:
    for producer in ("side stream 1", "side stream 2"):
        skip_waits(patch, "measure", on=producer)


RACES = {
    "the norm reads on the copy stream": measure_on_the_copy_stream,
    "the norm ends on the copy stream": result_in_the_parts,
    "shards are scaled on the copy stream": scale_on_the_copy_stream,
    "shards are scaled after the event of wait()": scale_after_the_event_of_wait,
    "the next norm does not wait for who reads this one": scratch_reused_while_read,
    "who reads a norm is no reader": readers_of_norms_forgotten,
    "nobody waits for the norm": lambda p: skip_waits(p, "measure", on="side"),
    "the loss scale is not waited for": lambda p: skip_waits(p, "measure", on=COMMUNICATION),
    "the loss scale's memory is used again at once": forget_the_producer,
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("plant", RACES.values(), ids=RACES)
def test_planted_race_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(BASE, schedule=schedule, seed=1)
    plant(monkeypatch)
    with pytest.raises(RaceError, match=r"never waited|given back"):
        simulate(BASE, schedule=schedule, seed=1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_loss_scale_of_an_unknown_stream_is_waited_for_by_the_host(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = replace(BASE, habits=("foreign",))
    simulate(work, schedule=schedule, seed=1)

    def synchronize(original: Any, event: SimEvent) -> None:
        if not asked_by("measure"):
            original(event)

    around(monkeypatch, SimEvent, "synchronize", synchronize)
    with pytest.raises(RaceError, match=r"given back|never waited"):
        simulate(work, schedule=schedule, seed=1)


def test_every_wait_of_a_norm_is_needed() -> None:
    found: dict[str, bool] = {}
    for number, wait in enumerate(simulate(BASE, schedule="lazy").waits):
        site = wait.site.engine if wait.site.in_engine else ""
        if site.startswith("norm.py") and not wait.known:
            try:
                simulate(BASE, schedule="lazy", drop_wait=number)
            except RaceError:
                found[site] = True
            else:
                found.setdefault(site, False)
    assert len(found) == 4  # A, C, D, F
    assert all(found.values()), found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_cycle_that_launched_nothing_is_not_scaled_under_its_last_readers(schedule: str) -> None:
    """Of two parameters, one rank has packed one when both ranks learn that the step has failed."""

    def work(world: World) -> list[Any]:
        runtime: Any = world.runtime
        registry = Registry([ParamSpec(name, (4,), "float32") for name in "pq"], world)
        side = runtime.stream()
        readings = []
        with Reducer(registry, op="sum", policy="arrival", missing="error") as reducer:
            for fails in (False, True, False):
                names = "pq" if not fails else "p" if world.rank else ""
                try:
                    with reducer.backward():
                        for name in names:
                            reducer.reduce_grad(name, runtime.produce(np.ones(4), "float32"))
                except MismatchError:
                    readings.append(runtime.consume(reducer.clip(1.0)))
                    reducer.discard()
                else:
                    readings.append(runtime.consume(reducer.clip(None, loss_scale=2.0)))
                    with runtime.use(side):  # reads while the next cycle fails
                        readings += map(runtime.consume, reducer.wait().values())
            runtime.adopt(None).synchronize()
        side.synchronize()
        return readings

    for readings in Simulation(2, schedule=schedule).run(work).values:
        norm, p, q, failed, *again = (np.asarray(reading.value) for reading in readings)
        assert norm == np.sqrt(8)
        assert p.tolist() == q.tolist() == [1.0] * 2
        assert np.isnan(failed)
        assert [value.tolist() for value in again] == [norm.tolist(), p.tolist(), q.tolist()]


def test_a_norm_on_some_ranks_only_is_a_mismatch() -> None:
    def work(world: World) -> None:
        registry = Registry(FLOATS, world)
        with Reducer(registry) as reducer:
            for _ in range(2):
                with reducer.backward():
                    pass
                if world.rank:
                    reducer.norm()
            reducer.wait()

    with pytest.raises(MismatchError, match="all_gather of 1 float64"):
        Simulation(2).run(work)


def test_a_scratch_dropped_while_queued_work_uses_it_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measure(original: Any, self: Norms, *args: Any, **how: Any) -> Any:
        original(self, *args, **how)
        self.close()  # and the next norm makes another
        return np.zeros(())

    around(monkeypatch, Norms, "measure", measure)

    def work(world: World) -> None:
        runtime: Any = world.runtime
        registry = Registry(FLOATS, world)
        with Reducer(registry) as reducer:
            with reducer.backward():
                pass
            reducer.norm(stream=runtime.stream())  # not the one that it was allocated on
            reducer.wait()

    with pytest.raises(RaceError, match=r"given back|never waited"):
        Simulation(2).run(work)


def read_while_the_reducer_closes(world: World) -> None:
    """Let a side stream read a norm whose reducer is closed, and build another."""
    runtime: Any = world.runtime
    side = runtime.stream()
    registry = Registry(FLOATS, world)
    for _ in range(2):
        with Reducer(registry) as reducer:
            with reducer.backward():
                pass
            norm = reducer.norm(stream=side)
            with runtime.use(side):
                runtime.consume(norm)
            del norm
            reducer.wait()
    side.synchronize()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_closed_reducer_gives_its_scratch_back_when_the_norm_has_been_read(
    world_size: int, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = Simulation(world_size, schedule=schedule)
    simulation.run(read_while_the_reducer_closes)
    skip_waits(monkeypatch, "hold_back")
    with pytest.raises(RaceError, match="free of device memory"):
        simulation.run(read_while_the_reducer_closes)


def test_a_norm_never_blocks_the_host() -> None:
    """On a device, where the caller's stream waits by itself; the first one allocates."""

    def run(world: World) -> None:
        runtime: Any = world.runtime
        reducer = Reducer(Registry(FLOATS, world, bucket_bytes=36))

        def refuse(*_: object) -> None:
            pytest.fail("the host is blocked")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SimEvent, "synchronize", refuse)
            patch.setattr(SimStream, "synchronize", refuse)
            patch.setattr(world.control, "all_gather", refuse)
            for _ in range(3):
                with reducer.backward():
                    for spec in FLOATS:
                        grad = runtime.produce(np.ones(spec.shape), "float32")
                        reducer.reduce_grad(spec.name, grad)
                reducer.norm()
                scale = runtime.produce(np.ones(1), "float32")
                reducer.clip(1.0, loss_scale=scale)
                del scale
                reducer.wait()
        reducer.close()

    for world_size in (1, 2):
        Simulation(world_size, schedule="lazy").run(run)
