"""Users' cases about putting shards together: wrong buffers, ranks that differ, stale copies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from strategies import bits, interval

from cupynccl_reduce import LayoutError, ReduceError, Reducer, Registry, run_local

if TYPE_CHECKING:
    from collections.abc import Callable

    from cupynccl_reduce import World

POLICIES = ("planned", "arrival")


def ones(numel: int, value: float = 1) -> np.ndarray:
    return np.full(numel, value, "f4")


@pytest.mark.parametrize(
    ("out", "words"),
    [
        pytest.param(np.zeros((14,), "f4")[::2], ["not contiguous", "'p0'"], id="strided"),
        pytest.param(np.zeros((7,), "f8"), ["float64", "'p0'", "float32 (7,)"], id="dtype"),
        pytest.param(np.zeros((8,), "f4"), ["(8,)", "'p0'", "(7,)"], id="shape"),
        pytest.param(np.zeros((7, 1), "f4"), ["(7, 1)", "'p0'", "(7,)"], id="dimensions"),
        pytest.param([0.0] * 7, ["list", "'p0'"], id="a-list"),
        pytest.param(np.broadcast_to(np.float32(0), 7), ["'p0'"], id="expanded"),
        pytest.param(np.frombuffer(bytes(28), "f4"), ["not writable", "'p0'"], id="read-only"),
        pytest.param(None, ["same names", "'p0'"], id="no-name"),
    ],
)
def test_n7_a_wrong_out_is_refused_before_any_collective(
    make_params: Callable[..., Any], out: Any, words: list[str]
) -> None:
    """All-gather into a buffer that does not fit: a temporary is filled and dropped."""

    def gather(world: World) -> None:
        registry = Registry(make_params(7), world)
        shards = {"p0": interval(np.arange(7, dtype="f4"), world.rank, 3)}
        with pytest.raises(LayoutError) as caught:
            registry.gather(shards, out={} if out is None else {"p0": out})
        for word in words:
            assert word in str(caught.value)
        right = np.full(7, np.nan, "f4")
        full = registry.gather(shards, out={"p0": right})
        assert full["p0"] is right
        assert right.tolist() == list(range(7))

    run_local(3, gather)


@pytest.mark.limit(10)
@pytest.mark.parametrize("gathered_before", [False, True])
def test_n7_a_rank_that_is_refused_does_not_leave_its_peers_hanging(
    make_params: Callable[..., Any], gathered_before: bool
) -> None:
    """One rank's buffer does not fit; the others wait for it in the collective."""
    errors: dict[int, ReduceError] = {}

    def gather(world: World) -> None:
        registry = Registry(make_params(4), world)
        shards = {"p0": ones(2)}
        if gathered_before:
            registry.gather(shards)
        out = {"p0": ones(5 if world.rank == 1 else 4)}
        try:
            registry.gather(shards, out=out)
        except ReduceError as error:
            errors[world.rank] = error
            raise

    with pytest.raises(ReduceError):
        run_local(2, gather)
    assert type(errors[1]) is LayoutError
    assert sorted(errors) == [0, 1]


@pytest.mark.limit(10)
@pytest.mark.parametrize("gathered_before", [False, True])
def test_n7_other_names_on_one_rank_are_an_error_on_all(
    make_params: Callable[..., Any], gathered_before: bool
) -> None:
    """One rank gathers a parameter that the others do not."""
    errors: dict[int, ReduceError] = {}

    def gather(world: World) -> None:
        registry = Registry(make_params(4, 4), world)
        shards = {"p0": ones(2), "p1": ones(2)}
        if gathered_before:
            registry.gather(shards)
        if world.rank == 1:
            del shards["p0"]
        try:
            registry.gather(shards)
        except ReduceError as error:
            errors[world.rank] = error
            raise

    with pytest.raises(ReduceError):
        run_local(2, gather)
    assert sorted(errors) == [0, 1]


@pytest.mark.parametrize("policy", POLICIES)
def test_n7_a_step_on_shards_gathers_to_the_same_parameters_everywhere(
    make_params: Callable[..., Any], policy: str
) -> None:
    """In-place edits of gathered parameters are lost; the next gather has the shards' values."""
    start = np.arange(7, dtype="f4")

    def train(world: World) -> np.ndarray:
        registry = Registry(make_params(7), world)
        mine = interval(start, world.rank, 3).copy()
        with Reducer(registry, policy=policy, op="sum") as reducer:
            for _ in range(3):
                with reducer.backward():
                    reducer.reduce_grad("p0", ones(7, world.rank + 1))
                mine -= 0.5 * reducer.wait()["p0"]
                full = registry.gather({"p0": mine})["p0"]
                kept = full.copy()
                full[:] = np.nan
        again = registry.gather({"p0": mine})["p0"]
        assert bits(again) == bits(kept)
        return again

    for full in run_local(3, train):
        assert bits(full) == bits(start - 9)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int8"])
def test_n7_shards_of_any_dtype_are_gathered(make_params: Callable[..., Any], dtype: str) -> None:
    """Any shards of the registered intervals will do, in any order and for some names only."""

    def gather(world: World) -> None:
        registry = Registry(make_params(7, (2, 3), 1), world, bucket_bytes=1)
        wholes = {"p2": np.arange(1), "p0": np.arange(7), "p1": np.arange(6)}
        for names in (["p2", "p0"], ["p1"], ["p2", "p0", "p1"], []):
            shards = {
                n: interval(wholes[n], world.rank, world.world_size).astype(dtype) for n in names
            }
            full = registry.gather(shards)
            assert set(full) == set(names)
            for name in names:
                expected = wholes[name].reshape(registry[name].spec.shape).astype(dtype)
                assert bits(full[name]) == bits(expected)

    for world_size in (1, 3):
        run_local(world_size, gather)
