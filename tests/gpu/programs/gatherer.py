"""Gatherer on CUDA and NCCL, at any number of ranks: exact bits, whatever stream uses them.

Run as `mpirun -n N python -m mpi4py gatherer.py`; each check prints `OK name rank r`.
"""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
from tools import check, main, spin

import cupynccl_reduce as cr

SHAPES = [(3,), (100, 70), (), (0, 8), (1,), (64, 64), (100_003,)]
SPECS = [
    cr.ParamSpec(f"{dtype}-{i}", shape, dtype)
    for dtype in ("float32", "float16")
    for i, shape in enumerate(SHAPES)
]


def full(registry: cr.Registry, name: str, number: int) -> cupy.ndarray:
    """Return a parameter in one of the passes: small integers."""
    spec = registry[name].spec
    values = (cupy.arange(spec.numel) + len(name) + number) % 97
    return values.reshape(spec.shape).astype(spec.dtype)


def own(registry: cr.Registry, name: str, number: int) -> cupy.ndarray:
    """Return this rank's shard of it."""
    place = registry[name]
    flat = full(registry, name, number).reshape(-1)[place.start : place.stop]
    return flat.astype(place.spec.shard_dtype)


def passes(world: cr.World, **options: Any) -> None:
    """Forward and backward over blocks on two streams, an optimizer on a third."""
    registry = cr.Registry(SPECS, world, bucket_bytes=20_000)
    names = list(registry)
    blocks = [names[at : at + 3] for at in range(0, len(names), 3)]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    optimizer = cupy.cuda.Stream(non_blocking=True)
    event, wrong = cupy.cuda.Event(), []
    with optimizer:
        shards = {name: own(registry, name, 0) for name in names}
        gatherer = cr.Gatherer(registry, shards, **options)
    for number in range(4):
        for at, block in enumerate([*blocks, *reversed(blocks)]):
            stream = streams[at % 2]
            with stream:
                for name, array in gatherer.acquire(block).items():
                    spin(stream)
                    wrong.append((array != full(registry, name, number)).any())
                gatherer.release(block)
        event.record(stream)
        optimizer.wait_event(event)
        with optimizer:
            for name, shard in shards.items():
                shard[...] = own(registry, name, number + 1)
            gatherer.changed()
    cupy.cuda.Device().synchronize()
    assert not any(bool(one) for one in wrong)
    gatherer.close()


@check
def full_parameters_are_exact(world: cr.World) -> None:
    for options in ({}, {"prefetch": 0}, {"prefetch": 3, "persistent": 100}):
        passes(world, **options)


@check
def the_caller_s_memory_is_filled(world: cr.World) -> None:
    arrays: dict[str, cupy.ndarray] = {}
    specs = {spec.name: spec for spec in SPECS}

    def allocate(name: str) -> cupy.ndarray:
        if name not in arrays:
            arrays[name] = cupy.empty(specs[name].shape, specs[name].dtype)
        return arrays[name]

    def free(name: str) -> None:
        arrays[name][...] = np.nan

    passes(world, allocate=allocate, free=free)


@check
def gathers_come_between_launches(world: cr.World) -> None:
    registry = cr.Registry(SPECS, world, bucket_bytes=20_000)
    shards = {name: own(registry, name, 0) for name in registry}
    with cr.Gatherer(registry, shards) as gatherer, cr.Reducer(registry, op="sum") as reducer:
        for _ in range(3):
            with reducer.backward():
                for name in reversed(registry):
                    array = gatherer.acquire([name])[name]
                    reducer.reduce_grad(name, array * 2)
                    gatherer.release([name])
            for name, shard in reducer.wait().items():
                assert bool((shard == own(registry, name, 0) * 2 * world.world_size).all()), name


if __name__ == "__main__":
    main(share_gpu=True)
