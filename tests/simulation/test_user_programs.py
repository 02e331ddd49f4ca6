"""What users write into a simulation: their mistakes are named, and their own errors come first."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import cupynccl_reduce as cr
from cupynccl_reduce import GradientError, LayoutError, MismatchError, ProtocolError
from cupynccl_reduce.testing import Simulation

if TYPE_CHECKING:
    from cupynccl_reduce import World

SCHEDULES = ("lazy", "eager", "random", "pct")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_polling_comes_to_an_end_under_every_schedule(schedule: Any) -> None:
    def work(world: World) -> None:
        runtime: Any = world.runtime
        runtime.produce(np.ones(8), "float32")
        event = runtime.event()
        event.record(runtime.adopt(None))
        while not event.done:
            pass

    Simulation(2, seed=1, schedule=schedule).run(work)


@pytest.mark.parametrize("call", ["consume", "overwrite", "peek", "poke"])
def test_arrays_that_are_not_whole_or_not_of_the_device_are_refused(call: str) -> None:
    def work(world: World) -> None:
        runtime: Any = world.runtime
        array = runtime.produce(np.arange(8.0), "float32")
        rest = [1.0] if call in ("overwrite", "poke") else []
        with pytest.raises(LayoutError, match="not contiguous"):
            getattr(runtime, call)(array[::2], *rest)
        with pytest.raises(GradientError, match=r"produce\(\)"):
            getattr(runtime, call)(np.full(4, 7.0), *rest)

    Simulation(1).run(work)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("policy", "dtype"), [("arrival", "float32"), ("planned", "int32")])
def test_the_users_own_error_is_raised_where_it_breaks_the_world(
    policy: Any, dtype: str, schedule: Any
) -> None:
    def work(world: World) -> None:
        specs = [cr.ParamSpec(f"p{i}", (4,), dtype) for i in range(4)]
        registry = cr.Registry(specs, world, bucket_bytes=16)
        with cr.Reducer(registry, op="sum", policy=policy) as reducer, reducer.backward():
            for i in range(4):
                if i == 3 and world.rank == 1:
                    raise ValueError("planted")
                runtime: Any = world.runtime
                reducer.reduce_grad(f"p{i}", runtime.produce(np.ones(4), dtype))

    with pytest.raises(ValueError, match="planted"):
        Simulation(2, seed=3, schedule=schedule).run(work)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ranks_that_differ_in_arrival_order_are_told_so(schedule: Any) -> None:
    def work(world: World) -> None:
        registry = cr.Registry([cr.ParamSpec(n, (4,), "float32") for n in "ab"], world)
        with cr.Reducer(registry, policy="arrival") as reducer, reducer.backward():
            for name in "ab" if world.rank else "ba":
                runtime: Any = world.runtime
                reducer.reduce_grad(name, runtime.produce(np.ones(4), "float32"))

    with pytest.raises(MismatchError, match="arrival"):
        Simulation(2, seed=3, schedule=schedule).run(work)


def test_a_second_thread_of_a_rank_is_refused_in_words() -> None:
    def work(world: World) -> list[str]:
        told: list[str] = []

        def produce() -> None:
            try:
                runtime: Any = world.runtime
                runtime.produce(np.ones(2), "float32")
            except ProtocolError as error:
                told.append(str(error))

        thread = threading.Thread(target=produce)
        thread.start()
        thread.join()
        return told

    (told,) = Simulation(1, schedule="random").run(work).values
    assert "one thread" in told[0]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_shard_that_is_dropped_after_gather_was_read_before(schedule: Any) -> None:
    """Produced on one stream, gathered for another: the first must not reuse it at once."""

    def work(world: World) -> Any:
        runtime: Any = world.runtime
        producer, caller = runtime.stream(), runtime.stream()
        registry = cr.Registry([cr.ParamSpec("p", (8,), "float32")], world)
        with runtime.use(producer):
            shard = runtime.produce(np.full(4, world.rank + 1), "float32")
            full = registry.gather({"p": shard}, stream=caller)
            del shard
        with runtime.use(caller):
            reading = runtime.consume(full["p"])
        for stream in (producer, caller):
            stream.synchronize()
        return reading

    for reading in Simulation(2, seed=2, schedule=schedule).run(work).values:
        assert reading.value.tolist() == [1.0] * 4 + [2.0] * 4
