"""The caller's own streams: what they may read, and what waits for them. Order, never time."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cupynccl_reduce import ParamSpec, Reducer, Registry, run_local

if TYPE_CHECKING:
    from collections.abc import Callable

    from cupynccl_reduce import World

POLICIES = ("planned", "arrival")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("shard_dtype", ["float32", "float64"])
def test_shards_are_not_overwritten_before_a_stream_that_waited_has_read_them(
    world_size: int, policy: str, shard_dtype: str
) -> None:
    """The optimizer of step 1 is still to run when the gradients of step 2 go out."""
    spec = ParamSpec("p", (6,), "float32", shard_dtype=shard_dtype)

    def run(world: World) -> tuple[list[float], list[float]]:
        optimizer = world.runtime.stream()
        gate = threading.Event()
        read: list[np.ndarray] = []
        with Reducer(Registry([spec], world), op="sum", policy=policy) as reducer:
            with reducer.backward():
                reducer.reduce_grad("p", np.full(6, 1, "f4"))
            shards = reducer.wait(stream=optimizer)
            optimizer.submit(gate.wait)
            optimizer.submit(lambda: read.append(shards["p"].copy()))
            with reducer.backward():
                reducer.reduce_grad("p", np.full(6, 10, "f4"))
            gate.set()
            second = reducer.wait()["p"].copy()
            optimizer.synchronize()
            return read[0].tolist(), second.tolist()

    for first, second in run_local(world_size, run):
        assert set(first) == {world_size}
        assert set(second) == {10 * world_size}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_stream_that_waited_reads_complete_shards(policy: str) -> None:
    """Collectives are still queued when wait() returns."""
    spec = ParamSpec("p", (6,), "float32")

    def run(world: World) -> list[float]:
        optimizer = world.runtime.stream()
        gate = threading.Event()
        read: list[np.ndarray] = []
        with Reducer(Registry([spec], world), op="sum", policy=policy) as reducer:
            world.stream.submit(gate.wait)
            with reducer.backward():
                reducer.reduce_grad("p", np.ones(6, "f4"))
            shards = reducer.wait(stream=optimizer)
            optimizer.submit(lambda: read.append(shards["p"].copy()))
            gate.set()
            optimizer.synchronize()
            return read[0].tolist()

    for read in run_local(2, run):
        assert set(read) == {2}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("max_buffers", [1, 2])
def test_the_padding_on_the_wire_is_always_zero(max_buffers: int, policy: str) -> None:
    """Uneven parameters send garbage in the padding: a buffer still holds another bucket's data."""
    params = [ParamSpec(f"p{n}", (n,), "float32") for n in (1, 64, 7, 3, 30, 2)]

    class Spy:
        direct_bytes = 0

        def __init__(self, communicator: Any) -> None:
            self.group = communicator.group
            self.abort = communicator.abort
            self.not_zero: list[int] = []
            self._reduce_scatter: Callable[..., None] = communicator.reduce_scatter

        def reduce_scatter(self, send: np.ndarray, *args: Any) -> None:
            *_, stream = args
            stream.submit(lambda: self.not_zero.append(np.count_nonzero(send)))
            self._reduce_scatter(send, *args)

    def run(world: World) -> int:
        spy = Spy(world.communicator)
        registry = Registry(params, replace(world, communicator=spy), bucket_bytes=40)
        with Reducer(registry, policy=policy, max_buffers=max_buffers) as reducer:
            for _ in range(3):
                with reducer.backward():
                    for spec in params:
                        reducer.reduce_grad(spec.name, np.full(spec.shape, np.nan, "f4"))
            reducer.wait()
        return sum(spy.not_zero)

    assert run_local(3, run) == [3 * sum(spec.numel for spec in params)] * 3
