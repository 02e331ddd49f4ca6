"""Hooks run on any thread: gradients handed over from several at once."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest
from strategies import bits

from cupynccl_reduce import ParamSpec, ProtocolError, Reducer, Registry, run_local

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cupynccl_reduce import World

THREADS = 4


@pytest.fixture(autouse=True)
def switch() -> Iterator[None]:
    """Let threads take turns as often as Python can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("bucket_bytes", [1, 64, 1 << 20])
def test_gradients_from_several_threads_are_all_reduced(bucket_bytes: int, world_size: int) -> None:
    params = [ParamSpec(f"p{i}", (i % 5,), "float32") for i in range(40)]
    params.append(ParamSpec("many", (3,), "float32", uses="many"))

    def reduce(world: World) -> list[dict[str, np.ndarray]]:
        registry = Registry(params, world, bucket_bytes=bucket_bytes)
        steps = []
        with Reducer(registry, op="sum") as reducer, ThreadPoolExecutor(THREADS) as threads:

            def give(first: int) -> None:
                for index in range(first, 40, THREADS):
                    reducer.reduce_grad(f"p{index}", np.full(index % 5, index, "f4"))
                    reducer.statistics()
                reducer.reduce_grad("many", np.ones(3, "f4"))

            for _ in range(5):
                with reducer.backward():
                    list(threads.map(give, range(THREADS)))
                steps.append(registry.gather(reducer.wait()))
        return steps

    for steps in run_local(world_size, reduce):
        for full in steps:
            for index in range(40):
                expected = np.full(index % 5, world_size * index, "f4")
                assert bits(full[f"p{index}"]) == bits(expected)
            assert bits(full["many"]) == bits(np.full(3, world_size * THREADS, "f4"))


@pytest.mark.parametrize("policy", ["planned", "arrival"])
def test_of_two_threads_with_one_gradient_exactly_one_is_refused(policy: str) -> None:
    params = [ParamSpec(f"p{i}", (3,), "float32") for i in range(20)]

    def reduce(world: World) -> None:
        registry = Registry(params, world, bucket_bytes=24)
        with Reducer(registry, policy=policy) as reducer, ThreadPoolExecutor(2) as threads:

            def give(_: int) -> int:
                refused = 0
                for spec in params:
                    try:
                        reducer.reduce_grad(spec.name, np.ones(3, "f4"))
                    except ProtocolError:
                        refused += 1
                return refused

            for _ in range(5):
                with reducer.backward():
                    assert sum(threads.map(give, range(2))) == len(params)
                for array in reducer.wait().values():
                    assert array.tolist() == [1, 1, 1]

    run_local(1, reduce)
