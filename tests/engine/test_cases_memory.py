"""Users' cases about memory: how many buckets live at once, and what is kept of a gradient."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from strategies import bits

from cupynccl_reduce import ProtocolError, Reducer, Registry, run_local

if TYPE_CHECKING:
    from collections.abc import Callable

    from cupynccl_reduce import World

POLICIES = ("planned", "arrival")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("max_buffers", [1, 2, 4])
def test_o1_bucket_memory_does_not_grow_with_the_number_of_buckets(
    make_params: Callable[..., Any], max_buffers: int, policy: str
) -> None:
    """The buffers of all buckets are alive until the end: memory grows with the layers."""

    def reduce(world: World) -> list[int]:
        allocated: list[int] = []
        allocate = world.runtime.allocate

        def spy(nbytes: int, **options: Any) -> Any:
            allocated.append(nbytes)
            return allocate(nbytes, **options)

        world.runtime.allocate = spy  # not a frozen object: the host runtime
        sizes = []
        for num_buckets in (8, 80):
            params = make_params(*[64] * num_buckets)
            registry = Registry(params, world, bucket_bytes=256)
            allocated.clear()
            with Reducer(registry, policy=policy, max_buffers=max_buffers) as reducer:
                assert len(allocated) == max_buffers
                sizes.append(reducer.statistics().buffer_bytes)
                assert sum(allocated) == sizes[-1]
                for _ in range(2):
                    with reducer.backward():
                        for index, spec in enumerate(params):
                            grad = np.full(64, index * (world.rank + 1), "f4")
                            reducer.reduce_grad(spec.name, grad)
                            assert reducer.statistics().in_flight <= max_buffers
                    shards = reducer.wait()
                assert len(allocated) == max_buffers  # and nothing while it runs
                for index, spec in enumerate(params):
                    assert set(shards[spec.name].tolist()) == {1.5 * index}
        return sizes

    for few, many in run_local(2, reduce):
        assert few == many == 256 * max_buffers


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("max_buffers", [1, 2, 4])
def test_o1_a_host_that_runs_ahead_holds_no_more_gradients_than_buckets(
    make_params: Callable[..., Any], max_buffers: int, policy: str
) -> None:
    """Nothing bounds the gradients that wait for a slow wire."""
    params = make_params(*[64] * 40)

    def reduce(world: World) -> None:
        with Reducer(
            Registry(params, world, bucket_bytes=256), policy=policy, max_buffers=max_buffers
        ) as reducer:
            held: list[weakref.ref[Any]] = []
            with reducer.backward():
                for spec in reversed(params):
                    grad = np.ones(64, "f4")
                    held.append(weakref.ref(grad))
                    reducer.reduce_grad(spec.name, grad)
                    del grad
                    # "arrival" launches a bucket when the next gradient has come.
                    filling = policy == "arrival"
                    assert sum(ref() is not None for ref in held) <= max_buffers + filling
            reducer.wait()

    run_local(2, reduce)


@pytest.mark.parametrize("policy", POLICIES)
def test_o3_only_shards_and_send_buffers_are_kept(
    make_params: Callable[..., Any], policy: str
) -> None:
    """Gradient memory stays full size although it is sharded."""
    params = make_params(*[1000] * 20)

    def reduce(world: World) -> tuple[int, int]:
        registry = Registry(params, world, bucket_bytes=4 * 4000)
        with Reducer(registry, policy=policy, max_buffers=2) as reducer:
            for _ in range(2):
                gradients = []
                with reducer.backward():
                    for spec in params:
                        grad = np.ones(1000, "f4")
                        gradients.append(weakref.ref(grad))
                        reducer.reduce_grad(spec.name, grad)
                        del grad
                reducer.wait()
                assert [ref() for ref in gradients] == [None] * len(params)
            statistics = reducer.statistics()
            return statistics.shard_bytes, statistics.buffer_bytes

    for shard_bytes, buffer_bytes in run_local(4, reduce):
        assert 20 * 1000 <= shard_bytes <= 20 * 1000 + 20 * 16 + 5 * 256
        assert buffer_bytes <= 2 * (4 * 4000 + 4 * 4 * 16)


@pytest.mark.parametrize("policy", POLICIES)
def test_brought_shards_cost_no_arena(make_params: Callable[..., Any], policy: str) -> None:
    def reduce(world: World) -> int:
        params = make_params(10, 10)
        brought = {spec.name: np.full(5, np.nan, "f4") for spec in params}
        with Reducer(Registry(params, world, shards=brought), policy=policy) as reducer:
            with reducer.backward():
                for spec in params:
                    reducer.reduce_grad(spec.name, np.ones(10, "f4"))
            shards = reducer.wait()
            assert all(shards[name] is array for name, array in brought.items())
            assert all(array.tolist() == [1] * 5 for array in brought.values())
            return reducer.statistics().shard_bytes

    assert run_local(2, reduce) == [0, 0]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_gradient_may_be_overwritten_after_wait_packed(
    make_params: Callable[..., Any], world_size: int, policy: str
) -> None:
    """One gradient buffer is used for every parameter, with a wire that is held up."""
    params = make_params(3, 3, 3)

    def reduce(world: World) -> dict[str, Any]:
        registry = Registry(params, world, bucket_bytes=12)
        buffer = np.empty(3, "f4")
        gate = threading.Event()
        with Reducer(registry, policy=policy, op="sum", max_buffers=3) as reducer:
            reducer._pipeline._copy.submit(gate.wait)
            # Opened from outside: wait_packed() blocks the host until then, or refuses.
            timer = threading.Timer(0.2, gate.set)
            timer.start()
            with reducer.backward():
                for index, spec in enumerate(reversed(params)):
                    buffer[:] = 10**index
                    reducer.reduce_grad(spec.name, buffer)
                    try:
                        reducer.wait_packed()
                    except ProtocolError:
                        reducer.flush()
                        reducer.wait_packed()
                    buffer[:] = np.nan
            gate.set()
            timer.join()
            return registry.gather(reducer.wait())

    for full in run_local(world_size, reduce):
        for index, spec in enumerate(reversed(params)):
            assert bits(full[spec.name]) == bits(np.full(3, world_size * 10**index, "f4"))
