"""The main law on real processes: every shard holds the reduced gradient, bit for bit."""

from __future__ import annotations

from itertools import cycle, product
from typing import TYPE_CHECKING

import numpy as np
from strategies import Workload, bits, interval, numpy_dtype

import cupynccl_reduce as cr
from cupynccl_reduce import ParamSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

FLOATS = (
    ParamSpec("matrix", (7, 3), "bfloat16"),
    ParamSpec("vector", (5,), "float32", reduce_dtype="bfloat16"),
    ParamSpec("scalar", (), "float32"),
    ParamSpec("empty", (0, 4), "float32"),
    ParamSpec("single", (1,), "float16"),
    ParamSpec("wide", (300,), "float64", shard_dtype="float32"),
    ParamSpec("tied", (11,), "bfloat16", uses="many"),
    ParamSpec("last", (40_001,), "float32"),
)
INTEGERS = (ParamSpec("count", (9,), "int32"), ParamSpec("bytes", (31,), "uint8", uses="many"))


def workloads(world_size: int) -> Iterator[Workload]:
    ops = ("sum", "mean") if world_size != 3 else ("sum",)  # a third is not exact
    brought = cycle([(), ("vector", "tied"), tuple(spec.name for spec in FLOATS)])
    missing, buffers = cycle(["zero", "error", "zero"]), cycle([2, 1, 3])
    cases = product(("planned", "arrival"), ops, (1, 64, 400, 1 << 20))
    for seed, (policy, op, bucket_bytes) in enumerate(cases):
        options = {"policy": policy, "op": op, "max_buffers": next(buffers)}
        yield Workload(
            world_size=world_size,
            params=FLOATS + (INTEGERS if op == "sum" else ()),
            bucket_bytes=bucket_bytes,
            options={**options, "missing": next(missing)},
            backwards=(1, 3),
            brought=next(brought),
            seed=seed,
        )


def check(workload: Workload, world: cr.World) -> None:
    results = workload.run_rank(world)
    for (shards, full), expected in zip(results, workload.expected, strict=True):
        for name, array in expected.items():
            mine = interval(array, world.rank, world.world_size)
            assert bits(shards[name]) == bits(mine), f"{workload}: {name}"
            assert bits(full[name]) == bits(array), f"{workload}: {name}"


def check_gather(world: cr.World) -> None:
    """Any shards come together, with and without `out`, and for some of the parameters only."""
    rng = np.random.default_rng(0)
    params = FLOATS + INTEGERS
    whole = {s.name: rng.normal(size=s.shape) * 100 for s in params}
    for dtypes, bucket_bytes in product((None, "bfloat16", "int64"), (1, 1 << 20)):
        registry = cr.Registry(params, world, bucket_bytes=bucket_bytes)
        for names in ([s.name for s in params], ["last", "scalar"]):
            full = {
                n: np.asarray(whole[n]).astype(numpy_dtype(dtypes or registry[n].spec.dtype))
                for n in names
            }
            shards = {n: interval(a, world.rank, world.world_size).copy() for n, a in full.items()}
            out = {n: np.full_like(a, 77) for n, a in full.items()}
            gathered = registry.gather(shards)
            given = registry.gather(shards, out=out)
            for name, array in full.items():
                assert given[name] is out[name]
                assert bits(gathered[name]) == bits(out[name]) == bits(array), name


def check_norm(world: cr.World) -> None:
    """All ranks get one norm, and skip a step alike; clip() undoes a loss scale."""
    registry = cr.Registry(FLOATS + INTEGERS, world, bucket_bytes=400)
    numel = sum(spec.numel for spec in FLOATS)
    with cr.Reducer(registry, op="sum") as reducer:
        for bad in (None, np.inf, np.nan):
            with reducer.backward():
                for name, place in registry.items():
                    grad = np.full(place.spec.shape, 3, numpy_dtype(place.spec.dtype))
                    if bad is not None and name == "scalar" and world.rank == world.world_size - 1:
                        grad[...] = bad
                    reducer.reduce_grad(name, grad)
            norm = reducer.clip(None, loss_scale=float(world.world_size))
            assert len(set(world.control.all_gather(norm.tobytes()))) == 1
            if bad is not None:
                assert not np.isfinite(norm)
                reducer.discard()
                continue
            assert abs(float(norm) / (3 * numel**0.5) - 1) < 1e-14
            for name, full in registry.gather(reducer.wait()).items():
                left = 3 if registry[name].spec.is_float else 3 * world.world_size
                assert (full == left).all(), name


def main() -> None:
    with cr.connect("host") as world:
        for workload in workloads(world.world_size):
            check(workload, world)
        check_gather(world)
        check_norm(world)
        everyone = world.control.all_gather(b"held")
        if world.rank == 0:
            print(f"main law: {len(everyone)} ranks", flush=True)


main()
