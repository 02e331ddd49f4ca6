"""The law: every shard holds the reduced gradient, whatever the buckets and the order."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from strategies import FLOATS, INTEGERS, Workload, bits, interval, numpy_dtype, workloads

from cupynccl_reduce import ParamSpec, Reducer, Registry, run_local

if TYPE_CHECKING:
    from collections.abc import Callable

    from cupynccl_reduce import World

POLICIES = ("planned", "arrival")
ROUNDING = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-24, "float64": 2**-53}
SMALLEST = {"float16": 2**-24, "bfloat16": 2**-133, "float32": 2**-149, "float64": 2**-1074}


@given(workloads(policy="planned"))
def test_planned_shards_hold_the_exact_result(workload: Workload) -> None:
    workload.check()


@given(workloads(policy="arrival"))
def test_arrival_shards_hold_the_exact_result(workload: Workload) -> None:
    workload.check()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("world_size", "op"),
    [(1, "mean"), (2, "mean"), (3, "sum"), (4, "mean"), (5, "sum"), (8, "mean"), (8, "sum")],
)
def test_every_dtype_triple_is_exact(world_size: int, op: str, policy: str) -> None:
    params = [
        ParamSpec(f"{dtype} {wire} {shard}", (5, 3), dtype, reduce_dtype=wire, shard_dtype=shard)
        for dtype, wire, shard in product(FLOATS, FLOATS, FLOATS)
    ]
    if op == "sum":
        params += [ParamSpec(dtype, (5, 3), dtype) for dtype in INTEGERS]
    Workload(
        world_size=world_size,
        params=tuple(params),
        options={"op": op, "policy": policy},
        backwards=(2, 1),
        bucket_bytes=100,
        seed=world_size,
    ).check()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_parameters_longer_than_a_tile_are_exact(world_size: int, policy: str) -> None:
    params = (
        ParamSpec("flat", (100_003,), "float32"),
        ParamSpec("matrix", (257, 389), "bfloat16", uses="many"),
        ParamSpec("narrow", (40_000, 2), "float16", reduce_dtype="float16"),
        ParamSpec("edge", (world_size * (1 << 15),), "int32"),
    )
    for seed in range(4):  # each seed lays the gradients out in memory otherwise
        Workload(
            world_size=world_size,
            params=params,
            options={"op": "sum", "policy": policy},
            backwards=(2,),
            brought=("matrix",) if seed % 2 else (),
            seed=seed,
        ).check()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_one_rank_gets_its_gradient_back_bit_for_bit(dtype: str, policy: str) -> None:
    """Also minus zero, NaN, infinities and the smallest numbers."""
    grad = np.array(
        [-0.0, np.nan, np.inf, -np.inf, SMALLEST[dtype], 1 / 3, -1e4], numpy_dtype(dtype)
    )

    def reduce(world: World) -> np.ndarray:
        registry = Registry([ParamSpec("p", grad.shape, dtype, shard_dtype=dtype)], world)
        with Reducer(registry, policy=policy) as reducer:
            with reducer.backward():
                reducer.reduce_grad("p", grad)
            return reducer.wait()["p"].copy()

    assert bits(run_local(1, reduce)[0]) == bits(grad)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "dtypes",
    [
        *((dtype, dtype, dtype) for dtype in FLOATS),
        ("float32", "float16", "float32"),  # too large for the wire
        ("float64", "float64", "bfloat16"),  # too large for the shard
    ],
)
def test_what_is_not_finite_travels_as_a_value(
    reduce_cycle: Callable[..., Any], dtypes: tuple[str, str, str], world_size: int, policy: str
) -> None:
    """An overflowing step is the caller's to skip: no warning, no broken world."""
    dtype, wire, shard = dtypes
    largest = float(ml_dtypes.finfo(numpy_dtype(dtype)).max)
    first = np.array([np.inf, np.nan, largest, np.inf, 1.0], numpy_dtype(dtype))
    second = np.array([np.inf, 1.0, largest, -np.inf, 2.0], numpy_dtype(dtype))
    spec = ParamSpec("p", (5,), dtype, reduce_dtype=wire, shard_dtype=shard)

    def reduce(world: World) -> np.ndarray:
        backwards = [{"p": first}, {"p": second}]
        if world.rank:
            backwards.reverse()
        return reduce_cycle(world, [spec], *backwards, op="sum", policy=policy)["p"]

    for result in run_local(world_size, reduce):
        expected = [np.inf, np.nan, np.inf, np.nan, 3 * world_size]
        np.testing.assert_array_equal(result.astype("f8"), expected)


@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_sums_of_two_ranks_have_equal_bits_whatever_policy_and_bucket(
    reduce_cycle: Callable[..., Any], world_size: int, op: str
) -> None:
    """Real values: with at most two ranks no order of summing can show."""
    params = [
        ParamSpec(f"{dtype}{numel}", (numel,), dtype, reduce_dtype=wire)
        for numel in (1, 7, 64)
        for dtype, wire in (
            ("bfloat16", "bfloat16"),
            ("float16", "float16"),
            ("float32", "float32"),
        )
    ]

    def reduce(world: World) -> list[list[Any]]:
        backwards = [
            {
                spec.name: np.random.default_rng([world.rank, backward, index])
                .standard_normal(spec.shape)
                .astype(numpy_dtype(spec.dtype))
                for index, spec in enumerate(params)
            }
            for backward in range(2)
        ]
        return [
            sorted(
                (name, bits(array))
                for name, array in reduce_cycle(
                    world, params, *backwards, bucket_bytes=bucket_bytes, op=op, policy=policy
                ).items()
            )
            for bucket_bytes, policy in product((1, 40, 1000), POLICIES)
        ]

    for results in run_local(world_size, reduce):
        assert all(result == results[0] for result in results)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world_size", [1, 3, 4, 7])
@pytest.mark.parametrize(
    ("dtype", "wire", "shard"),
    [
        ("float16", "float32", "float32"),
        ("float16", "float16", "float16"),
        ("bfloat16", "bfloat16", "float32"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "float32"),
        ("float32", "float32", "float32"),
        ("float32", "bfloat16", "float32"),
        ("float64", "float64", "float64"),
    ],
)
def test_real_values_stay_within_the_stated_bound(
    dtype: str, wire: str, shard: str, world_size: int, policy: str
) -> None:
    """The bound, for B backwards on W ranks, with S the mean of the absolute gradients.

    A gradient is divided in c (fp32; fp64 for float64) and rounded to the wire; the sum over ranks
    is made in c and rounded to the wire; each backward is added to the shard in c and rounded:
    error <= S * ((1 + u_wire)^2 (1 + u_c)^(W + B) (1 + u_shard)^B - 1), where u is half the gap at
    1, plus the same number of roundings near zero, each at most the smallest number.
    """
    backwards = 3
    spec = ParamSpec("p", (1000,), dtype, reduce_dtype=wire, shard_dtype=shard)
    rng = np.random.default_rng(0)
    scales = 2.0 ** rng.integers(-12, 8, (world_size, backwards, 1000))
    grads = (rng.standard_normal(scales.shape) * scales).astype(numpy_dtype(dtype))

    def reduce(world: World) -> np.ndarray:
        registry = Registry([spec], world)
        with Reducer(registry, policy=policy) as reducer:
            for grad in grads[world.rank]:
                with reducer.backward():
                    reducer.reduce_grad("p", grad)
            return reducer.wait()["p"].copy()

    exact = grads.astype("f8").sum(axis=(0, 1)) / world_size
    absolute = np.abs(grads.astype("f8")).sum(axis=(0, 1)) / world_size
    compute = "float64" if dtype == "float64" else "float32"
    relative = (
        (1 + ROUNDING[wire]) ** 2
        * (1 + ROUNDING[compute]) ** (world_size + backwards)
        * (1 + ROUNDING[shard]) ** backwards
    ) - 1
    near_zero = backwards * ((world_size + 1) * SMALLEST[wire] + SMALLEST[shard])
    for rank, result in enumerate(run_local(world_size, reduce)):
        error = np.abs(result.astype("f8") - interval(exact, rank, world_size))
        bound = interval(absolute, rank, world_size) * relative + near_zero
        assert np.all(error <= bound + 1e-15 * interval(absolute, rank, world_size))
