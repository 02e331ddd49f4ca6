"""Users' cases about scaling, absent gradients, accumulation and the step boundary."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from strategies import FLOATS, bits, numpy_dtype

from cupynccl_reduce import ParamSpec, ProtocolError, Reducer, Registry, run_local

if TYPE_CHECKING:
    from collections.abc import Callable

    from cupynccl_reduce import World

POLICIES = ("planned", "arrival")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("wire", "mean_of"),
    [
        ("default", {20000.0: 20000.0, 2.0**-24: 2.0**-24}),
        ("float16", {20000.0: 20000.0, 2.0**-24: 0.0}),  # divided first: the known loss
    ],
)
def test_e3_float16_neither_overflows_nor_vanishes(
    make_params: Callable[..., Any],
    reduce_cycle: Callable[..., Any],
    wire: str,
    mean_of: dict[float, float],
    policy: str,
) -> None:
    """float16: to sum first overflows, to divide first underflows."""
    params = make_params(2, dtype="float16", reduce_dtype=wire)

    def reduce(world: World) -> dict[str, Any]:
        return reduce_cycle(world, params, {"p0": np.array([*mean_of], "f2")}, policy=policy)

    for full in run_local(4, reduce):
        assert bits(full["p0"]) == bits(np.array([*mean_of.values()], "f4"))


@pytest.mark.parametrize("skip", [False, True])
def test_e7_an_absent_gradient_counts_as_zero(
    make_params: Callable[..., Any], reduce_cycle: Callable[..., Any], skip: bool
) -> None:
    """One rank has no gradient for a parameter: sizes differ and all ranks hang."""
    params = make_params(3, 2)

    def reduce(world: World) -> dict[str, Any]:
        grads = {"p0": np.full(3, 4, "f4")} if world.rank == 0 else {"p0": None} if skip else {}
        return reduce_cycle(world, params, grads)

    for full in run_local(2, reduce):
        assert bits(full["p0"]) == bits(np.full(3, 2, "f4"))  # the divisor is the world size
        assert bits(full["p1"]) == bits(np.zeros(2, "f4"))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_e7_what_no_rank_gives_is_zero_after_a_step_that_was_not(
    make_params: Callable[..., Any], world_size: int, policy: str
) -> None:
    """Old values stay in the shard of a parameter that gets no gradient."""

    def reduce(world: World) -> dict[str, Any]:
        registry = Registry(make_params(3, 2), world)
        with Reducer(registry, policy=policy) as reducer:
            for names in (("p0", "p1"), ("p0",), ()):
                with reducer.backward():
                    for name in names:
                        reducer.reduce_grad(name, np.full(registry[name].spec.shape, 8, "f4"))
                full = registry.gather(reducer.wait())
                for name in registry:
                    assert set(full[name].tolist()) == {8.0 if name in names else 0.0}
            return full

    run_local(world_size, reduce)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_f1_every_backward_of_a_step_counts(
    make_params: Callable[..., Any], world_size: int, policy: str
) -> None:
    """Every backward was taken as a boundary: only the last micro-batch's gradient survived."""

    def reduce(world: World) -> list[np.ndarray]:
        registry = Registry(make_params(3), world)
        with Reducer(registry, policy=policy) as reducer:
            steps = []
            for micro_batches in ((1, 10, 100), (5,), (2, 20)):  # never told in advance
                for value in micro_batches:
                    with reducer.backward():
                        reducer.reduce_grad("p0", np.full(3, value, "f4"))
                steps.append(registry.gather(reducer.wait())["p0"])
            return steps

    for steps in run_local(world_size, reduce):
        for step, total in zip(steps, (111, 5, 22), strict=True):
            assert bits(step) == bits(np.full(3, total, "f4"))


@pytest.mark.parametrize("policy", POLICIES)
def test_f3_the_last_micro_batch_of_every_rank_counts(
    reduce_cycle: Callable[..., Any], policy: str
) -> None:
    """The last micro-batch was added after the reduce over ranks; those of other ranks are lost."""
    params = [
        ParamSpec(f"{dtype} {shard}", (3,), dtype, shard_dtype=shard)
        for dtype, shard in product(FLOATS, FLOATS)
    ]

    def reduce(world: World) -> dict[str, Any]:
        backwards = [
            {s.name: np.full(3, 10 * world.rank + k, numpy_dtype(s.dtype)) for s in params}
            for k in (1, 2)
        ]
        return reduce_cycle(world, params, *backwards, policy=policy)

    for full in run_local(2, reduce):
        for spec in params:
            assert bits(full[spec.name]) == bits(np.full(3, 13, numpy_dtype(spec.shard_dtype)))


@pytest.mark.parametrize("policy", POLICIES)
def test_f5_a_parameter_of_an_early_micro_batch_alone_is_reduced(
    make_params: Callable[..., Any], reduce_cycle: Callable[..., Any], policy: str
) -> None:
    """Used in an early micro-step but not in the last one, it is never reduced; ranks diverge."""
    params = make_params(3, 2)

    def reduce(world: World) -> dict[str, Any]:
        early = {"p0": np.full(3, 1, "f4"), "p1": np.full(2, 6 if world.rank else 2, "f4")}
        return reduce_cycle(world, params, early, {"p0": np.full(3, 2, "f4")}, policy=policy)

    for full in run_local(2, reduce):
        assert bits(full["p0"]) == bits(np.full(3, 3, "f4"))
        assert bits(full["p1"]) == bits(np.full(2, 4, "f4"))


@pytest.mark.parametrize("policy", POLICIES)
def test_f7_nothing_of_a_discarded_step_remains(
    make_params: Callable[..., Any], policy: str
) -> None:
    """Counts were carried over from a skipped step."""

    def reduce(world: World) -> np.ndarray:
        registry = Registry(make_params(3), world)
        with Reducer(registry, policy=policy) as reducer:
            for _ in range(2):
                with reducer.backward():
                    reducer.reduce_grad("p0", np.full(3, 100, "f4"))
            reducer.discard()
            with pytest.raises(ProtocolError, match="discarded"):
                reducer.wait()
            for value in (1, 2):
                with reducer.backward():
                    reducer.reduce_grad("p0", np.full(3, value, "f4"))
            return registry.gather(reducer.wait())["p0"]

    for full in run_local(2, reduce):
        assert bits(full) == bits(np.full(3, 3, "f4"))


@pytest.mark.parametrize("policy", POLICIES)
def test_f7_two_reducers_step_at_their_own_pace(
    make_params: Callable[..., Any], policy: str
) -> None:
    """A fixed number of passes per step fails with two optimizers."""

    def reduce(world: World) -> list[list[float]]:
        registries = [Registry(make_params(3), world), Registry(make_params(2), world)]
        one, two = (Reducer(registry, policy=policy) for registry in registries)

        def backward(reducer: Reducer, numel: int, value: int) -> None:
            with reducer.backward():
                reducer.reduce_grad("p0", np.full(numel, value, "f4"))

        results = []
        for step in range(2):
            backward(one, 3, 1)
            backward(two, 2, 10)
            backward(one, 3, 2)
            if step:
                backward(two, 2, 20)
            results += [registries[0].gather(one.wait())["p0"].tolist()]
            results += [registries[1].gather(two.wait())["p0"].tolist()]
        one.close()
        two.close()
        return results

    for results in run_local(2, reduce):
        assert results == [[3] * 3, [10] * 2, [3] * 3, [30] * 2]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_second_wait_returns_the_same_shards(
    make_params: Callable[..., Any], policy: str
) -> None:
    def reduce(world: World) -> None:
        registry = Registry(make_params(3), world)
        with Reducer(registry, policy=policy) as reducer:
            with reducer.backward():
                reducer.reduce_grad("p0", np.full(3, 5, "f4"))
            first = reducer.wait()["p0"]
            before = bits(first), reducer.statistics()
            again = reducer.wait()["p0"]
            assert again is first
            assert (bits(again), reducer.statistics()) == before

    run_local(2, reduce)
