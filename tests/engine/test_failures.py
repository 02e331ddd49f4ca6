"""A rank that fails inside backward: nobody hangs, nobody uses the step unnoticed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from strategies import bits, numpy_dtype

from cupynccl_reduce import (
    CommunicationError,
    MismatchError,
    ParamSpec,
    ProtocolError,
    ReduceError,
    Reducer,
    Registry,
    World,
    run_local,
)

if TYPE_CHECKING:
    from collections.abc import Callable

POLICIES = ("planned", "arrival")
FOUR = [ParamSpec(f"p{i}", (5,), "float32") for i in range(4)]
ORDER = ["p3", "p2", "p1", "p0"]  # the order of their buckets
FAILING = 1


class FaultError(Exception):
    """What the user's backward raises in these tests."""


def give(reducer: Reducer, rank: int, *, names: list[str] = ORDER, value: float = 1) -> None:
    for name in names:
        reducer.reduce_grad(name, np.full(5, value * (rank + 1), "f4"))


def backward(reducer: Reducer, world: World, *, fails_after: int | None = None) -> None:
    """Run one backward; on the failing rank it raises after that many gradients."""
    if fails_after is None or world.rank != FAILING:
        with reducer.backward():
            give(reducer, world.rank)
        return
    with pytest.raises(FaultError), reducer.backward():  # noqa: PT012  # raised by the user
        give(reducer, world.rank, names=ORDER[:fails_after])
        raise FaultError


@pytest.mark.parametrize("max_buffers", [1, 2])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("fails_after", range(5))
def test_peers_see_nan_in_what_was_not_launched_and_the_next_cycle_is_exact(
    fails_after: int, world_size: int, max_buffers: int
) -> None:
    def run(world: World) -> dict[str, Any]:
        registry = Registry(FOUR, world, bucket_bytes=1)
        with Reducer(registry, op="sum", max_buffers=max_buffers) as reducer:
            backward(reducer, world, fails_after=fails_after)
            if world.rank == FAILING:
                for refused in (reducer.wait, reducer.backward().__enter__):
                    with pytest.raises(ProtocolError, match=r"failed.*discard\(\)"):
                        refused()
                shards = {name: array.copy() for name, array in registry.shards.items()}
            else:
                shards = {name: array.copy() for name, array in reducer.wait().items()}
            reducer.synchronize()
            reducer.discard()
            for _ in range(2):
                backward(reducer, world)
            return shards | {"next": registry.gather(reducer.wait())}

    total = world_size * (world_size + 1) / 2
    for rank, shards in enumerate(run_local(world_size, run)):
        for index, name in enumerate(ORDER):
            if rank != FAILING:
                expected = total if index < fails_after else np.nan
                np.testing.assert_array_equal(shards[name], expected)
            assert bits(shards["next"][name]) == bits(np.full(5, 2 * total, "f4"))


def test_a_bucket_that_was_half_full_is_nan_as_a_whole() -> None:
    """What has arrived in it too, of every rank: nobody is to use this step."""

    def run(world: World) -> None:
        with Reducer(Registry(FOUR, world)) as reducer:
            backward(reducer, world, fails_after=3)
            if world.rank != FAILING:
                assert all(np.isnan(array).all() for array in reducer.wait().values())
            reducer.discard()

    run_local(2, run)


def test_a_failed_second_backward_spoils_the_cycle_that_it_adds_to() -> None:
    def run(world: World) -> None:
        registry = Registry(FOUR, world, bucket_bytes=1)
        with Reducer(registry, op="sum") as reducer:
            backward(reducer, world)
            backward(reducer, world, fails_after=1)
            if world.rank != FAILING:
                shards = reducer.wait()
                np.testing.assert_array_equal(shards["p3"], 6)
                assert all(np.isnan(shards[name]).all() for name in ORDER[1:])
            reducer.discard()
            backward(reducer, world)
            for array in registry.gather(reducer.wait()).values():
                assert bits(array) == bits(np.full(5, 3, "f4"))

    run_local(2, run)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_nan_reaches_shards_of_every_dtype(dtype: str) -> None:
    def run(world: World) -> None:
        params = [ParamSpec("p", (5,), dtype, shard_dtype=s) for s in (dtype,)]
        with Reducer(Registry(params, world)) as reducer:
            if world.rank == FAILING:
                with pytest.raises(FaultError), reducer.backward():
                    raise FaultError
            else:
                with reducer.backward():
                    reducer.reduce_grad("p", np.ones(5, numpy_dtype(dtype)))
                assert np.isnan(reducer.wait()["p"].astype("f4")).all()
            reducer.discard()

    run_local(2, run)


def test_one_rank_alone_fails_and_goes_on() -> None:
    def run(world: World) -> None:
        with Reducer(Registry(FOUR, world)) as reducer:
            with pytest.raises(FaultError), reducer.backward():
                raise FaultError
            with pytest.raises(ProtocolError, match=r"discard\(\)"):
                reducer.wait()
            reducer.discard()
            backward(reducer, world)
            assert reducer.wait()["p0"].tolist() == [1] * 5

    run_local(1, run)


def test_a_refused_gradient_that_nobody_catches_fails_the_backward() -> None:
    def run(world: World) -> None:
        with Reducer(Registry(FOUR, world), op="sum") as reducer:
            if world.rank == FAILING:
                with pytest.raises(ReduceError, match="'p0'"), reducer.backward():
                    reducer.reduce_grad("p0", np.ones(7, "f4"))
            else:
                backward(reducer, world)
                assert np.isnan(reducer.wait()["p0"]).all()
            reducer.discard()
            backward(reducer, world)
            assert set(reducer.wait()["p0"].tolist()) == {3}

    run_local(2, run)


def test_peers_are_told_which_rank_failed_where_missing_is_an_error() -> None:
    """They block at the end of backward anyway; the failed rank keeps its own error."""

    def run(world: World) -> str:
        registry = Registry(FOUR, world, bucket_bytes=1)
        with Reducer(registry, missing="error", op="sum") as reducer:
            told = ""
            if world.rank == FAILING:
                backward(reducer, world, fails_after=2)
            else:
                with pytest.raises(MismatchError) as caught:
                    backward(reducer, world)
                told = str(caught.value)
            with pytest.raises(ProtocolError, match=r"discard\(\)"):
                reducer.wait()
            reducer.discard()
            backward(reducer, world)
            for array in registry.gather(reducer.wait()).values():
                assert bits(array) == bits(np.full(5, 6, "f4"))
            return told

    told = run_local(3, run)
    for rank in (0, 2):
        assert "rank 1: backward failed: FaultError" in told[rank]
        assert f"[rank {rank} of 3, step 1]" in told[rank]


INTEGERS = [ParamSpec("i", (5,), "int32"), *FOUR]


@pytest.mark.limit(20)
@pytest.mark.parametrize("missing", ["zero", "error"])
@pytest.mark.parametrize(
    ("policy", "params"), [("arrival", FOUR), ("arrival", INTEGERS), ("planned", INTEGERS)]
)
def test_where_nan_cannot_help_the_world_is_broken_on_all_ranks(
    policy: str, params: list[ParamSpec], missing: str
) -> None:
    """Every later call raises the first cause, and nobody hangs."""

    def run(world: World) -> list[ReduceError]:
        registry = Registry(params, world, bucket_bytes=1)
        reducer = Reducer(registry, op="sum", policy=policy, missing=missing)
        if world.rank == FAILING:
            backward(reducer, world, fails_after=2)
        else:
            with pytest.raises(CommunicationError):  # noqa: PT012  # either call may notice
                backward(reducer, world)
                reducer.wait()
        return later_errors(world, registry, reducer)

    for rank, errors in enumerate(run_local(3, run)):
        causes = [error.__cause__ for error in errors]
        assert all(type(error) is CommunicationError for error in errors)
        assert all(cause is causes[0] and cause is not None for cause in causes)
        assert all(f"rank {rank}" in str(error) for error in errors)
        if rank == FAILING:
            assert isinstance(causes[0], FaultError)


def later_errors(world: World, registry: Registry, reducer: Reducer) -> list[ReduceError]:
    """Return what every call raises in a broken world."""
    calls: list[Callable[[], object]] = [
        reducer.backward().__enter__,
        reducer.wait,
        reducer.wait_packed,
        reducer.flush,
        reducer.discard,
        reducer.synchronize,
        lambda: registry.gather(registry.shards),
        lambda: Registry(FOUR, world),
        lambda: Reducer(registry),
    ]
    errors = []
    for call in calls:
        with pytest.raises(ReduceError) as caught:
            call()
        errors.append(caught.value)
    reducer.close()
    reducer.close()
    return errors


@pytest.mark.limit(20)
@pytest.mark.parametrize("missing", ["zero", "error"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("given", [1, 4])
def test_nobody_gets_shards_after_a_rank_has_left_the_world(
    given: int, policy: str, missing: str
) -> None:
    """A rank that raises outside backward ends its world: peers get an error, not old shards."""
    errors: list[ReduceError] = []

    def run(world: World) -> None:
        registry = Registry(FOUR, world)
        reducer = Reducer(registry, policy=policy, missing=missing)
        backward(reducer, world)
        reducer.wait()
        if world.rank == FAILING:
            msg = "gone"
            raise CommunicationError(msg)  # what rank 0 asserts is raised before this
        with pytest.raises(CommunicationError):  # noqa: PT012  # either call may notice
            with reducer.backward():
                give(reducer, world.rank, names=ORDER[:given])
            reducer.wait()
        errors.extend(later_errors(world, registry, reducer))

    with pytest.raises(CommunicationError, match="gone"):
        run_local(2, run)
    assert all(type(error) is CommunicationError for error in errors)
    assert len(errors) == 9


@pytest.mark.limit(20)
def test_the_first_failure_of_run_local_is_raised_with_its_rank() -> None:
    def run(world: World) -> None:
        if world.rank == FAILING:
            msg = "mine"
            raise FaultError(msg)
        with Reducer(Registry(FOUR, world)) as reducer:
            backward(reducer, world)
            reducer.wait()

    with pytest.raises(FaultError, match="mine") as caught:
        run_local(3, run)
    assert caught.value.__notes__ == ["on rank 1 of 3 (run_local)"]
