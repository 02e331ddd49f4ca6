"""Users' cases about buckets: sizes, boundaries, the last one, and what goes over the wire."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from strategies import bits

from cupynccl_reduce import ParamSpec, ProtocolError, Reducer, Registry, run_local

if TYPE_CHECKING:
    from collections.abc import Callable

    from cupynccl_reduce import World

POLICIES = ("planned", "arrival")
MEBIBYTE = 1 << 20


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a7_the_bucket_size_is_never_visible_in_the_result(
    make_params: Callable[..., Any], reduce_cycle: Callable[..., Any], world_size: int, policy: str
) -> None:
    """The smaller the bucket, the worse the training; the smallest gives NaN."""
    params = make_params(*range(1, 13))

    def reduce(world: World) -> list[dict[str, Any]]:
        rng = np.random.default_rng(world.rank)
        grads = {p.name: rng.integers(-99, 99, p.shape).astype("f4") for p in params}
        return [
            reduce_cycle(
                world,
                params,
                grads,
                bucket_bytes=4 * elements,
                op="sum",
                policy=policy,
                max_buffers=max_buffers,
            )
            for elements, max_buffers in product((1, 2, 5, 7, 13, 78, 10**6), (1, 2))
        ]

    totals = [0] * len(params)
    for rank in range(world_size):
        rng = np.random.default_rng(rank)
        totals = [t + rng.integers(-99, 99, p.shape) for t, p in zip(totals, params, strict=True)]
    for results in run_local(world_size, reduce):
        for result in results:
            for spec, total in zip(params, totals, strict=True):
                assert bits(result[spec.name]) == bits(total.astype("f4"))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_b1_a_bucket_larger_than_the_model_costs_no_memory(
    make_params: Callable[..., Any], world_size: int, policy: str
) -> None:
    """A bucket larger than the whole model crashes in the epilogue."""

    def reduce(world: World) -> tuple[np.ndarray, int]:
        registry = Registry(make_params(3), world, bucket_bytes=4 * 10**9)
        with Reducer(registry, policy=policy) as reducer:
            with reducer.backward():
                reducer.reduce_grad("p0", np.arange(3, dtype="f4"))
            statistics = reducer.statistics()
            full = registry.gather(reducer.wait())["p0"]
            return full, statistics.shard_bytes + statistics.buffer_bytes

    for full, nbytes in run_local(world_size, reduce):
        assert bits(full) == bits(np.arange(3, dtype="f4"))
        assert nbytes < MEBIBYTE


@pytest.mark.parametrize("policy", POLICIES)
def test_b1_padding_does_not_multiply_the_bucket(
    make_params: Callable[..., Any], policy: str
) -> None:
    """A tiny parameter that is used many times may fill a bucket only with its padding."""

    def measure(world: World) -> int:
        registry = Registry(make_params((), uses="many"), world, bucket_bytes=MEBIBYTE)
        with Reducer(registry, policy=policy, max_buffers=1) as reducer:
            return reducer.statistics().buffer_bytes

    for nbytes in run_local(4, measure):
        assert nbytes <= 2 * MEBIBYTE


@pytest.mark.parametrize("policy", POLICIES)
def test_b3_every_step_launches_its_buckets_and_no_more(
    make_params: Callable[..., Any], policy: str
) -> None:
    """After the first flush every later parameter makes its own collective."""
    params = make_params(*[10] * 10)

    def count(world: World) -> list[tuple[int, int]]:
        registry = Registry(params, world, bucket_bytes=4 * 50)
        with Reducer(registry, policy=policy) as reducer:
            counts = []
            for _ in range(2):
                with reducer.backward():
                    for spec in params:
                        reducer.reduce_grad(spec.name, np.ones(10, "f4"))
                reducer.wait()
                statistics = reducer.statistics()
                counts.append((statistics.launches, statistics.collectives))
            return counts

    # The reference algorithm groups one collective per gradient; the launches are the same.
    calls = 2 if policy == "planned" else 10
    assert run_local(2, count) == [[(2, calls), (4, 2 * calls)]] * 2


@pytest.mark.parametrize("policy", POLICIES)
def test_b5_a_parameter_of_exactly_the_bucket_size_is_reduced_once(
    make_params: Callable[..., Any], policy: str
) -> None:
    """A parameter whose size is exactly the bucket size is never reduced."""
    params = make_params(5, 6, 7, 12, 6)

    def reduce(world: World) -> tuple[dict[str, Any], list[str]]:
        registry = Registry(params, world, bucket_bytes=4 * 6)
        with Reducer(registry, policy=policy) as reducer:
            packed: list[str] = []
            run = reducer._pipeline.run

            def spy(launches: Any, *args: Any) -> None:
                def seen() -> Any:
                    for launch in launches:
                        packed.extend(name for part in launch.pack for name in part.layout.names)
                        yield launch

                run(seen(), *args)

            reducer._pipeline.run = spy
            with reducer.backward():
                for spec in params:
                    grad = (world.rank + 1) * np.arange(1, spec.numel + 1, dtype="f4")
                    reducer.reduce_grad(spec.name, grad)
            return registry.gather(reducer.wait()), packed

    for full, packed in run_local(2, reduce):
        assert sorted(packed) == [spec.name for spec in params]
        for spec in params:
            assert bits(full[spec.name]) == bits(1.5 * np.arange(1, spec.numel + 1, dtype="f4"))


@pytest.mark.parametrize("policy", POLICIES)
def test_b7_the_end_of_backward_reduces_the_last_bucket(
    make_params: Callable[..., Any], policy: str
) -> None:
    """The last, part-filled bucket is not reduced at the end of the step."""

    def reduce(world: World) -> dict[str, Any]:
        registry = Registry(make_params(3, 2), world, bucket_bytes=4 * 100)
        with Reducer(registry, policy=policy) as reducer:
            with reducer.backward():
                reducer.reduce_grad("p0", np.full(3, 1 + world.rank, "f4"))
                assert reducer.statistics().launches == 0
                with pytest.raises(ProtocolError, match=r"wait\(\) inside backward\(\)"):
                    reducer.wait()
            assert reducer.statistics().launches == 1
            return registry.gather(reducer.wait())

    for full in run_local(2, reduce):
        assert bits(full["p0"]) == bits(np.full(3, 1.5, "f4"))


@pytest.mark.parametrize("policy", POLICIES)
def test_b7_flushing_an_empty_bucket_does_nothing(
    make_params: Callable[..., Any], policy: str
) -> None:
    """A second flush, or one with nothing in the bucket, hangs the other ranks."""

    def reduce(world: World) -> tuple[list[int], dict[str, Any]]:
        registry = Registry(make_params(3), world)
        with Reducer(registry, policy=policy) as reducer:
            counts = []
            reducer.flush()
            with reducer.backward():
                if policy == "arrival":
                    reducer.flush()
                counts.append(reducer.statistics().collectives)
                reducer.reduce_grad("p0", np.full(3, 1 + world.rank, "f4"))
                for _ in range(2):
                    reducer.flush()
                    counts.append(reducer.statistics().collectives)
            counts.append(reducer.statistics().collectives)
            reducer.flush()
            shards = reducer.wait()
            reducer.flush()
            counts.append(reducer.statistics().collectives)
            return counts, registry.gather(shards)

    for counts, full in run_local(2, reduce):
        assert counts == [0, 1, 1, 1, 1]
        assert bits(full["p0"]) == bits(np.full(3, 1.5, "f4"))


class Spy:
    """A communicator that notes what is asked of another."""

    direct_bytes = 0

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator
        self.sent: list[tuple[str, int]] = []  # method, elements of send

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._communicator, name)
        if name in ("group", "abort", "close"):
            return method

        def call(send: np.ndarray, *args: Any) -> None:
            self.sent.append((name, send.size))
            method(send, *args)

        return call


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world_size", [2, 4])
def test_b9_only_reduce_scatters_are_sent(world_size: int, policy: str) -> None:
    """The option says reduce-scatter, the wire shows all-reduce: double traffic."""
    params = [ParamSpec(f"p{i}", (64,), "float32") for i in range(10)]

    def reduce(world: World) -> tuple[list[tuple[str, int]], int]:
        spy = Spy(world.communicator)
        registry = Registry(params, replace(world, communicator=spy), bucket_bytes=4 * 128)
        with Reducer(registry, policy=policy) as reducer:
            with reducer.backward():
                for spec in params:
                    reducer.reduce_grad(spec.name, np.ones(64, "f4"))
            reducer.wait()
            return spy.sent, reducer.statistics().sent_bytes

    for sent, nbytes in run_local(world_size, reduce):
        assert {name for name, _ in sent} == {"reduce_scatter"}
        assert sum(elements for _, elements in sent) == 640
        assert nbytes == 4 * 640 * (world_size - 1) // world_size
