"""The simulator itself: what it tells, that it tells it again, and what it refuses."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from simulation.mutations import around, skip_waits
from simulation.planted import BASE, WORKLOADS
from simulation.workloads import SCHEDULES, Boom, draw, simulate

from cupynccl_reduce import LayoutError, ParamSpec, Reducer, Registry
from cupynccl_reduce.errors import (
    DeadlockError,
    DeclarationError,
    GradientError,
    MismatchError,
    ProtocolError,
    RaceError,
    ReduceError,
)
from cupynccl_reduce.pipeline import Pipeline
from cupynccl_reduce.runtimes.host import HostPack, HostUnpack
from cupynccl_reduce.testing import Simulation

if TYPE_CHECKING:
    from cupynccl_reduce import World


def one_step(world: World, *, numel: int = 8, backwards: int = 1) -> Any:
    runtime: Any = world.runtime
    registry = Registry([ParamSpec("p", (numel,), "float32")], world)
    with Reducer(registry, op="sum") as reducer:
        for _ in range(backwards):
            with reducer.backward():
                reducer.reduce_grad("p", runtime.produce(np.ones(numel), "float32"))
        return runtime.consume(reducer.wait()["p"])


def text_of(work: Any, kind: type[ReduceError] = ReduceError, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        Simulation(**options).run(work)
    return str(caught.value)


def test_results_are_read_after_the_run() -> None:
    result = Simulation(2).run(one_step)
    assert [list(reading.value) for reading in result.values] == [[2.0] * 4] * 2


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_same_arguments_give_the_same_run(schedule: str) -> None:
    for seed in range(3):
        first, again = (simulate(draw(seed + 40), seed=seed, schedule=schedule) for _ in "ab")
        assert first.steps == again.steps
        assert first.overlaps == again.overlaps
        assert list(map(str, first.waits)) == list(map(str, again.waits))


def test_another_seed_gives_another_run() -> None:
    steps = {simulate(BASE, seed=seed, schedule="random").steps for seed in range(6)}
    assert len(steps) > 1


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_replay_line_gives_the_same_text(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_waits(monkeypatch, "_send")
    text = text_of(BASE.run, RaceError, world_size=2, seed=5, schedule=schedule)
    line = text.splitlines()[-1]
    assert line.startswith("  replay: Simulation(")
    call = line.removeprefix("  replay: ").removesuffix(".run(...)")
    with pytest.raises(RaceError) as again:
        eval(call, {"Simulation": Simulation}).run(BASE.run)  # noqa: S307  # our own text
    assert str(again.value) == text


def test_a_race_shows_operations_sites_bytes_bucket_and_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    skip_waits(monkeypatch, "_send")
    text = text_of(one_step, RaceError, world_size=2, schedule="eager")
    lines = text.splitlines()
    assert lines[0].startswith("race on bytes 0 to 32 of device memory ")
    assert "earlier write: pack of bucket 0 (p) on copy stream of rank" in lines[1]
    assert "pipeline.py:" in lines[1]
    assert "called from test_simulator.py:" in lines[1]
    assert "later   read : reduce_scatter sum of 4 float32 with bucket 0 (p) on" in lines[2]
    assert "communication stream of rank" in lines[3]
    assert "never waited for that point of copy stream" in lines[3]


def test_a_race_tells_whose_gradient_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(world: World) -> None:
        runtime: Any = world.runtime
        registry = Registry([ParamSpec(n, (4,), "float32") for n in "pqr"], world)
        both = runtime.produce(np.ones(8), "float32")
        side, produced = runtime.stream(), runtime.event()
        produced.record(runtime.adopt(None))
        side.wait_event(produced)
        with Reducer(registry) as reducer:
            with reducer.backward():
                reducer.reduce_grad("r", runtime.produce(np.ones(4), "float32"))
                reducer.reduce_grad("q", both[:4])
                reducer.reduce_grad("p", both[4:])
            with runtime.use(side):
                runtime.overwrite(both[4:], np.zeros(4))  # the pack may still read it

    text = text_of(work, RaceError, world_size=2, schedule="lazy")
    head, earlier, later, *_ = text.splitlines()
    assert head.startswith("race on bytes 16 to 32 of a gradient ")
    assert head.endswith(" (32 bytes): p")
    assert "read : pack of bucket 0 (r, q, p) on copy stream" in earlier
    assert "write: user's write of an array on side stream" in later
    skip_waits(monkeypatch, "_follow")
    assert text_of(one_step, RaceError, world_size=1).splitlines()[0].endswith(" (32 bytes): p")


def test_a_rank_that_misses_a_backward_is_a_deadlock_that_says_who_waits() -> None:
    def work(world: World) -> None:
        one_step(world, backwards=2 - world.rank)

    text = text_of(work, DeadlockError, world_size=2, schedule="lazy")
    assert text.startswith("deadlock: nothing can run")
    assert "rank 1 has returned" in text
    assert "rank 0 has" not in text
    assert "host of rank 0 waits for the event recorded at pipeline.py:" in text
    assert "communication stream of rank 0 waits with reduce_scatter sum of 4 float32" in text
    assert "with bucket 0 (p), asked for at pipeline.py:" in text
    assert "replay: Simulation(world_size=2" in text


def test_a_deadlock_names_the_rank_that_has_returned() -> None:
    def work(world: World) -> None:
        if world.rank != 1:
            world.control.all_gather(b"")

    for schedule in SCHEDULES:
        lines = text_of(work, DeadlockError, world_size=3, schedule=schedule).splitlines()
        assert [line for line in lines if "returned" in line] == ["  rank 1 has returned"]

    kept = []

    def close(world: World) -> None:  # returns, and then waits for its collective
        if world.rank == 0:
            kept.append(memory := world.runtime.allocate(2))
            world.communicator.all_reduce(memory, memory, "uint8", "sum", world.stream)

    lines = text_of(close, DeadlockError, world_size=2, schedule="lazy").splitlines()
    assert lines[1:3] == ["  rank 0 has returned", "  rank 1 has returned"]
    assert "host of rank 0 waits for the event recorded at membership.py:" in lines[3]


def test_hosts_that_wait_for_each_other_are_a_deadlock() -> None:
    def work(world: World) -> None:
        if world.rank:
            world.control.all_gather(b"")

    text = text_of(work, DeadlockError, world_size=3, schedule="lazy")
    assert "host of rank 1 waits for all ranks in side-channel call 1" in text
    assert "host of rank 2 waits for all ranks in side-channel call 1" in text


def test_buckets_of_equal_size_in_another_order_are_a_mismatch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(original: Any, self: Pipeline, launches: Any, *args: Any) -> None:
        launches = list(launches)
        original(self, launches[:: -1 if self._world.rank else 1], *args)

    def work(world: World) -> None:
        params = [ParamSpec(n, (4,), "float32", uses="many") for n in ("p", "q")]
        registry = Registry(params, world, bucket_bytes=16)
        with Reducer(registry) as reducer, reducer.backward():
            pass

    around(monkeypatch, Pipeline, "run", run)
    for schedule in SCHEDULES:
        text = text_of(work, MismatchError, world_size=2, schedule=schedule)
        assert "ranks queued different collectives" in text
        assert "rank 0: reduce_scatter sum of 4 float32 with bucket 0 (q), at pipeline.py" in text
        assert "rank 1: reduce_scatter sum of 4 float32 with bucket 1 (p), at pipeline.py" in text
        assert "replay: " in text


def test_a_gather_against_a_reduction_is_a_mismatch() -> None:
    def work(world: World) -> None:
        runtime: Any = world.runtime
        send, recv = runtime.allocate(16), runtime.allocate(8)
        if world.rank:
            world.communicator.all_gather(recv, send, "uint8", world.stream)
        else:
            world.communicator.reduce_scatter(send, recv, "uint8", "sum", world.stream)
        world.stream.synchronize()

    text = text_of(work, MismatchError, world_size=2)
    assert "rank 0: reduce_scatter sum of 8 uint8, at test_simulator.py:" in text
    assert "rank 1: all_gather of 8 uint8, at test_simulator.py:" in text


def test_all_collectives_give_their_result() -> None:
    def work(world: World) -> list[Any]:
        runtime: Any = world.runtime
        comm, stream = world.communicator, world.stream
        with runtime.use(stream):
            mine = runtime.produce([world.rank + 1, 10], "int32")
            both = runtime.produce([0, 0], "int32")
            every = runtime.produce([0] * 4, "int32")
            comm.all_reduce(mine, both, "int32", "sum", stream)
            comm.all_gather(mine, every, "int32", stream)
            comm.broadcast(mine, 1, "int32", stream)
            return [runtime.consume(a) for a in (both, every, mine)]

    for schedule in SCHEDULES:
        for values in Simulation(2, schedule=schedule).run(work).values:
            assert [list(v.value) for v in values] == [[3, 20], [1, 10, 2, 10], [2, 10]]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_what_user_code_raises_is_raised_with_its_rank(schedule: str, rank: int) -> None:
    def work(world: World) -> None:
        one_step(world)
        if world.rank == rank:
            raise Boom
        one_step(world)

    with pytest.raises(Boom) as caught:
        Simulation(3, schedule=schedule).run(work)
    assert caught.value.__notes__[0].startswith(f"on rank {rank} of Simulation(world_size=3")


def test_a_kernel_that_raises_ends_the_run_wherever_it_runs() -> None:
    def work(world: World) -> None:
        runtime: Any = world.runtime
        array = runtime.produce(np.ones(3), "float32")
        runtime.overwrite(array, np.ones(4))  # runs when every host has left

    for schedule in SCHEDULES:
        with pytest.raises(ValueError, match="reshape"):
            Simulation(2, schedule=schedule).run(work)


def test_arrays_of_other_ranks_and_of_the_host_are_no_gradients() -> None:
    shared: dict[int, Any] = {}

    def work(world: World) -> None:
        runtime: Any = world.runtime
        registry = Registry([ParamSpec("p", (4,), "float32")], world)
        shared[world.rank] = runtime.produce(np.ones(4), "float32")
        world.control.all_gather(b"")
        with Reducer(registry) as reducer, reducer.backward():
            for bad in (np.ones(4, np.float32), shared[1 - world.rank]):
                with pytest.raises(GradientError, match="no memory of rank"):
                    reducer.reduce_grad("p", bad)
        world.control.all_gather(b"")

    Simulation(2, schedule="lazy").run(work)


def test_a_stream_must_be_a_simulated_one() -> None:
    def work(world: World) -> None:
        with pytest.raises(ProtocolError, match="no simulated stream"):
            world.runtime.adopt(3)

    Simulation(1).run(work)


def test_waits_for_what_was_never_recorded_are_listed() -> None:
    def work(world: World) -> None:
        runtime: Any = world.runtime
        one_step(world)
        event, stream = runtime.event(), runtime.adopt(None)
        stream.wait_event(event)  # too early
        event.record(stream)
        stream.wait_event(event)

    for schedule in SCHEDULES:
        result = Simulation(2, schedule=schedule).run(work)
        mine = [wait for wait in result.unrecorded if not wait.site.in_engine]
        assert len(mine) == 2  # one on each rank
        assert all("test_simulator.py:" in str(wait.site) and wait.known for wait in mine)
        assert sum(not wait.site.in_engine for wait in result.waits) == 4
        numbers = [number for number, wait in enumerate(result.waits) if wait in mine]
        for number in numbers:  # dropping one changes nothing
            again = Simulation(2, schedule=schedule, drop_wait=number).run(work)
            assert list(map(str, again.waits)) == list(map(str, result.waits))


def test_host_accesses_need_a_synchronize() -> None:
    def work(world: World, *, wait: bool) -> Any:
        runtime: Any = world.runtime
        array = runtime.allocate(4, memory="pinned")
        runtime.poke(array, 1)
        runtime.overwrite(array, np.full(4, 7))
        if wait:
            runtime.adopt(None).synchronize()
        return runtime.peek(array).tolist()

    assert Simulation(1).run(lambda w: work(w, wait=True)).values == [[7] * 4]
    text = text_of(lambda w: work(w, wait=False), RaceError, world_size=1)
    assert "later   read : host's read of an array on host of rank 0" in text


def test_a_query_orders_the_host_only_when_it_says_yes() -> None:
    answers = set()

    def work(world: World) -> None:
        runtime: Any = world.runtime
        array = runtime.produce([1], "int32")
        event = runtime.event()
        event.record(runtime.adopt(None))
        answers.add(done := event.done)
        if done:
            runtime.peek(array)
        else:
            with pytest.raises(RaceError):
                runtime.peek(array)
            raise Boom

    for schedule in SCHEDULES:
        for seed in range(8):
            try:
                Simulation(1, seed=seed, schedule=schedule).run(work)
            except (Boom, RaceError):
                assert schedule != "eager"
    assert answers == {True, False}


@pytest.mark.parametrize(
    "arguments",
    [
        {"world_size": 0},
        {"world_size": True},
        {"world_size": 1.0},
        {"world_size": 1, "schedule": "fast"},
        {"world_size": 1, "schedule": (0, -1)},
        {"world_size": 1, "schedule": ("lazy",)},
        {"world_size": 1, "schedule": [0]},
        {"world_size": 1, "depth": 0},
        {"world_size": 1, "drop_wait": -1},
        {"world_size": 1, "drop_wait": "first"},
        {"world_size": 1, "seed": None},
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(LayoutError, match="must be"):
        Simulation(**arguments)


# --- declarations ------------------------------------------------------------------------------


@pytest.mark.parametrize("workload", ["planned", "arrival", "cast", "one rank", "many", "brought"])
def test_the_correct_engine_declares_what_it_touches(workload: str) -> None:
    simulate(WORKLOADS[workload], schedule="random", check_declarations=True)


def test_one_element_too_many_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(original: Any, self: HostPack, sources: Any, target: Any, fill: Any) -> None:
        original(self, sources, target, fill)
        memory = (ctypes.c_uint8 * 4).from_address(target.ctypes.data + target.nbytes)
        np.ctypeslib.as_array(memory)[...] = 1

    around(monkeypatch, HostPack, "run", run)
    text = text_of(
        WORKLOADS["arrival"].run, DeclarationError, world_size=2, check_declarations=True
    )
    assert "pack of bucket" in text
    assert "writes bytes that it does not declare" in text


def test_a_read_of_padding_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(original: Any, self: HostUnpack, source: Any, targets: Any, accumulate: Any) -> None:
        original(self, source, targets, accumulate)
        if source.ctypes.data % 64:
            before = (ctypes.c_float * 1).from_address(source.ctypes.data - 4)
            out = (ctypes.c_double * 1).from_address(targets[0].pointer)
            out[0] += before[0]

    around(monkeypatch, HostUnpack, "run", run)
    text = text_of(WORKLOADS["cast"].run, DeclarationError, world_size=2, check_declarations=True)
    assert "unpack of bucket" in text
    assert "reads bytes that it does not declare" in text


def test_a_users_kernel_is_held_to_what_it_declares() -> None:
    def work(world: World, *, reads: int, writes: int, kernel: Any) -> Any:
        runtime: Any = world.runtime
        source, target = runtime.produce([1, 2, 3], "int32"), runtime.produce([7, 7, 7], "int32")

        def run(*_: Any) -> Any:
            return kernel(source, target)

        reading = runtime.queue("kernel", run, reads=[source[:reads]], writes=[target[:writes]])
        runtime.adopt(None).synchronize()
        return reading.value, runtime.peek(target).tolist()

    def double(source: Any, target: Any) -> None:
        np.multiply(source, 2, out=target)

    def total(source: Any, target: Any) -> Any:
        return source.sum()

    def run(kernel: Any, reads: int, writes: int) -> Any:
        simulation = Simulation(1, schedule="eager", check_declarations=True)
        return simulation.run(lambda w: work(w, reads=reads, writes=writes, kernel=kernel)).values[
            0
        ]

    assert run(double, 3, 3) == (None, [2, 4, 6])
    assert run(total, 3, 0) == (6, [7, 7, 7])
    for kernel, reads, writes, verb in (
        (double, 2, 3, "reads"),
        (double, 3, 2, "writes"),
        (total, 2, 0, "reads"),
    ):
        with pytest.raises(DeclarationError, match=f"user's kernel, at .*, {verb} bytes that it"):
            run(kernel, reads, writes)


def test_a_users_kernel_keeps_nothing_alive() -> None:
    def work(world: World) -> Any:
        runtime: Any = world.runtime
        array = runtime.produce([1, 2], "int32")
        reading = runtime.queue("sum", lambda a: int(a.sum()), reads=[array])
        del array
        assert runtime.alive("a gradient") == 0
        return reading

    assert [r.value for r in Simulation(1, schedule="lazy").run(work).values] == [3]


def test_collectives_are_held_to_what_they_declare(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(world: World) -> Any:
        runtime: Any = world.runtime
        with runtime.use(world.stream):
            send, recv = runtime.produce([1, 2, 3, 4], "int32"), runtime.produce([5, 6, 7], "int32")
            world.communicator.reduce_scatter(send, recv[:2], "int32", "sum", world.stream)
            return runtime.consume(recv)

    def fold(sends: Any, out: Any, *_: Any) -> None:
        out[...] = sum(sends)
        memory = (ctypes.c_int32 * 1).from_address(sends[0].ctypes.data)
        memory[0] += 1  # a send buffer is only read

    values = Simulation(2, check_declarations=True).run(work).values
    assert [v.value.tolist() for v in values] == [[2, 4, 7], [6, 8, 7]]
    monkeypatch.setattr("cupynccl_reduce.testing.transport.fold", fold)
    text = text_of(work, DeclarationError, world_size=2, check_declarations=True)
    assert "reduce_scatter sum of 2 int32, at test_simulator.py:" in text
    assert "writes bytes that it does not declare" in text
