"""What the tests save: full arrays of random bits, their shards, and saves and loads of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from strategies import bits, interval, numpy_dtype

import cupynccl_reduce as cr

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from cupynccl_reduce import ParamSpec, Registry, World

__all__ = ["PARAMS", "Full", "check", "load_on", "make_full", "make_out", "make_shards", "save_on"]

Full = dict[str, dict[str, np.ndarray]]  # state -> name -> array of the full shape

PARAMS = (
    cr.ParamSpec("embed.weight", (5, 7), "bfloat16"),
    cr.ParamSpec("scale", (), "float32"),
    cr.ParamSpec("none", (0, 3), "float32"),
    cr.ParamSpec("head/bias", (3,), "float16"),
)


def make_full(params: Sequence[ParamSpec], dtypes: Mapping[str, str], seed: int = 0) -> Full:
    """Return arrays of random bits (NaN among them) for every state, of one dtype each."""
    rng = np.random.default_rng(seed)
    full: Full = {}
    for state, dtype in dtypes.items():
        full[state] = {}
        for spec in params:
            data = rng.bytes(spec.numel * numpy_dtype(dtype).itemsize)
            full[state][spec.name] = np.frombuffer(data, numpy_dtype(dtype)).reshape(spec.shape)
    return full


def make_shards(full: Full, registry: Registry) -> dict[str, dict[str, Any]]:
    world = registry.world
    return {
        state: {n: interval(a, world.rank, world.world_size).copy() for n, a in of.items()}
        for state, of in full.items()
    }


def make_out(full: Full, registry: Registry) -> dict[str, dict[str, Any]]:
    """Return arrays of ones to load into."""
    shards = make_shards(full, registry)
    return {s: {n: np.ones_like(a) for n, a in of.items()} for s, of in shards.items()}


def save_on(world: World, path: Path, params: Sequence[ParamSpec], full: Full, *args: Any) -> None:
    registry = cr.Registry(params, world)
    cr.save(path, registry, make_shards(full, registry), *args)


def load_on(
    world: World,
    path: Path,
    params: Sequence[ParamSpec],
    full: Full,
    bucket_bytes: int = 1 << 20,
) -> dict[str, Any]:
    """Load into new arrays, and compare them with `full`, bit for bit; return the meta."""
    registry = cr.Registry(params, world, bucket_bytes=bucket_bytes)
    out = make_out(full, registry)
    meta = cr.load(path, registry, out)
    check(out, make_shards(full, registry))
    return meta


def check(out: Mapping[str, Mapping[str, Any]], shards: Mapping[str, Mapping[str, Any]]) -> None:
    for state, of in shards.items():
        for name, array in of.items():
            assert bits(out[state][name]) == bits(array), (state, name)
