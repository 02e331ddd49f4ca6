"""What tests draw: parameters, arrival orders and whole workloads, with the model of their result.

A workload says what every rank hands over, from a seed, and what every shard must then hold. Its
gradients are small integers, so that sums are exact in every dtype, whatever their order.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from cupynccl_reduce import ParamSpec, Reducer, Registry, run_local

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cupynccl_reduce import World

__all__ = [
    "FLOATS",
    "INTEGERS",
    "MEMORY",
    "Workload",
    "bits",
    "bucket_sizes",
    "in_memory",
    "interval",
    "numpy_dtype",
    "params",
    "shapes",
    "workloads",
]

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "uint8", "int32", "uint32", "int64", "uint64")
MEMORY = ("plain", "reversed", "strided", "transposed", "shifted", "readonly", "expanded")
MOST_USES = 3  # arrivals of one parameter in one backward

shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple) | st.integers(0, 70).map(lambda n: (n,))
bucket_sizes = st.integers(1, 600) | st.just(1 << 14)  # the last holds all that is drawn here


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype called `name`."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def bits(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Return what must be equal for two arrays to be the same bit for bit."""
    array = np.asarray(array)
    return str(array.dtype), array.shape, array.tobytes()


def interval(array: np.ndarray, rank: int, world_size: int) -> np.ndarray:
    """Return the flat interval of a parameter that `rank` keeps."""
    width = -(-array.size // world_size)
    return array.reshape(-1)[rank * width : (rank + 1) * width]


def in_memory(values: np.ndarray, layout: str) -> np.ndarray:
    """Return an array of the same values (of one of them, if "expanded") that lies otherwise."""
    if layout == "reversed" and values.ndim:
        return np.flip(np.flip(values).copy())
    if layout == "strided" and values.ndim:
        wide = np.zeros((*values.shape[:-1], 2 * values.shape[-1]), values.dtype)
        wide[..., ::2] = values
        return wide[..., ::2]
    if layout == "transposed":
        return values.copy(order="F")
    if layout == "shifted":
        block = np.zeros(values.size + 1, values.dtype)
        block[1:] = values.reshape(-1)
        return block[1:].reshape(values.shape)
    if layout == "expanded" and values.size:
        return np.broadcast_to(values.reshape(-1)[:1].reshape(()), values.shape)
    if layout == "readonly":
        values.flags.writeable = False
    return values


@st.composite
def params(draw: st.DrawFn, *, max_size: int = 7, integers: bool = True) -> tuple[ParamSpec, ...]:
    """Draw a parameter list: mixed shapes, dtypes on the way, and uses."""
    specs = []
    for index in range(draw(st.integers(1, max_size))):
        uses = draw(st.sampled_from(["once", "once", "many"]))
        name, shape = f"p{index}", draw(shapes)
        if integers and draw(st.integers(0, 3)) == 0:
            specs.append(ParamSpec(name, shape, draw(st.sampled_from(INTEGERS)), uses=uses))
            continue
        dtype, wire, shard = (draw(st.sampled_from(FLOATS)) for _ in range(3))
        specs.append(ParamSpec(name, shape, dtype, reduce_dtype=wire, shard_dtype=shard, uses=uses))
    return tuple(specs)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A world, a registry and a reducer, and all that its ranks hand over in some cycles."""

    world_size: int
    params: tuple[ParamSpec, ...]
    bucket_bytes: int = 1 << 20
    options: dict[str, Any] = field(default_factory=dict)  # of Reducer
    backwards: tuple[int, ...] = (1,)  # one entry a cycle
    brought: tuple[str, ...] = ()  # parameters whose shards the caller brings
    seed: int = 0

    def gradients(self, rank: int, cycle: int, backward: int) -> list[tuple[str, Any]]:
        """Return what `rank` does in one backward: hand over an array, or skip where None.

        Every rank has an order of its own; only policy="arrival" needs one order on all ranks.
        """
        arrival = self.options.get("policy") == "arrival"
        order = random.Random(repr((self.seed, cycle, backward, None if arrival else rank)))
        handed: list[tuple[ParamSpec, bool]] = []
        for spec in self.params:
            count = order.choice((0, 1, 1, 1) if spec.uses == "once" else range(MOST_USES + 1))
            absent = self.options.get("missing") == "error" or order.random() < 0.5
            handed += [(spec, True)] * count or [(spec, False)] * absent
        order.shuffle(handed)
        rng = np.random.default_rng([self.seed, rank, cycle, backward])
        return [(s.name, self._values(s, rng) if present else None) for s, present in handed]

    @cached_property
    def expected(self) -> list[dict[str, np.ndarray]]:
        """The reduced gradients of each cycle: the model, in float64 (integers: int64)."""
        divisor = 1 if self.options.get("op") == "sum" else self.world_size
        cycles = []
        for cycle, backwards in enumerate(self.backwards):
            totals = {s.name: np.zeros(s.shape, "f8" if s.is_float else "i8") for s in self.params}
            for rank, backward in product(range(self.world_size), range(backwards)):
                for name, grad in self.gradients(rank, cycle, backward):
                    if grad is not None:
                        totals[name] += grad.astype(totals[name].dtype)
            cycles.append(
                {
                    s.name: np.asarray(
                        totals[s.name] / divisor if divisor > 1 else totals[s.name]
                    ).astype(numpy_dtype(s.shard_dtype))
                    for s in self.params
                }
            )
        return cycles

    def bring(self, rank: int) -> dict[str, np.ndarray]:
        """Return the shards that the caller brings, full of NaN (of ones, if integers)."""
        shards = {}
        for spec in self.params:
            if spec.name in self.brought:
                numel = interval(np.empty(spec.shape), rank, self.world_size).size
                old = np.nan if spec.is_float else 1
                shards[spec.name] = np.full(numel, old, numpy_dtype(spec.shard_dtype))
        return shards

    def run(self) -> list[list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]]:
        """Run it on threads; return, for each rank and cycle, its shards and all put together."""
        return run_local(self.world_size, lambda world: list(self.run_rank(world)))

    def run_rank(
        self, world: World
    ) -> Iterator[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]:
        """Run one rank's part in `world`; yield its shards and all put together, by cycle."""
        brought = self.bring(world.rank)
        registry = Registry(self.params, world, bucket_bytes=self.bucket_bytes, shards=brought)
        with Reducer(registry, **self.options) as reducer:
            for cycle, backwards in enumerate(self.backwards):
                for backward in range(backwards):
                    with reducer.backward():
                        for name, grad in self.gradients(world.rank, cycle, backward):
                            if grad is None:
                                reducer.skip_grad(name)
                            else:
                                reducer.reduce_grad(name, grad)
                shards = reducer.wait()
                assert all(shards[name] is array for name, array in brought.items())
                yield {name: a.copy() for name, a in shards.items()}, registry.gather(shards)

    def check(self) -> None:
        """Run it, and compare every shard and every gathered array with the model, bit for bit."""
        for rank, cycles in enumerate(self.run()):
            for (shards, full), expected in zip(cycles, self.expected, strict=True):
                assert list(shards) == [spec.name for spec in self.params]
                for name, array in expected.items():
                    mine = interval(array, rank, self.world_size)
                    assert bits(shards[name]) == bits(mine), f"{name} on rank {rank}"
                    assert bits(full[name]) == bits(array), f"{name} on rank {rank}"

    def _values(self, spec: ParamSpec, rng: np.random.Generator) -> np.ndarray:
        # bfloat16 counts to 256 and int8 to 127: no sum over ranks, backwards and uses goes past.
        uses = MOST_USES if spec.uses == "many" else 1
        most = 127 if spec.dtype in ("int8", "uint8") else 256
        limit = most // (self.world_size * max(self.backwards) * uses)
        lowest = 0 if spec.dtype.startswith("uint") else -limit
        values = rng.integers(lowest, limit + 1, spec.shape)
        layout = MEMORY[rng.integers(len(MEMORY))]
        return in_memory(np.asarray(values).astype(numpy_dtype(spec.dtype)), layout)


@st.composite
def workloads(
    draw: st.DrawFn, *, policy: str, world_sizes: tuple[int, ...] = (1, 2, 3, 4, 5, 8)
) -> Workload:
    """Draw a workload with an exact result: means of floats, and over powers of two alone."""
    world_size = draw(st.sampled_from(world_sizes))
    options: dict[str, Any] = {
        "policy": policy,
        "op": draw(st.sampled_from(["sum", "mean"])) if world_size not in (3, 5) else "sum",
        "max_buffers": draw(st.integers(1, 3)),
        "missing": draw(st.sampled_from(["zero", "error"])),
    }
    if policy == "arrival" and options["op"] == "mean":
        options["pre_divide"] = draw(st.booleans())
    specs = draw(params(integers=options["op"] == "sum"))
    names = [spec.name for spec in specs]
    return Workload(
        world_size=world_size,
        params=specs,
        bucket_bytes=draw(bucket_sizes),
        options=options,
        backwards=tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))),
        brought=tuple(draw(st.sets(st.sampled_from(names)) | st.just(set(names)))),
        seed=draw(st.integers(0, 1 << 32)),
    )
