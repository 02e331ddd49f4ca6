"""Hand-written programs of one rank, for what random workloads do not do."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynccl_reduce import ParamSpec, Reducer, Registry

if TYPE_CHECKING:
    from collections.abc import Callable

    from cupynccl_reduce import World

__all__ = [
    "Program",
    "eight_buckets",
    "gather_for_another_stream",
    "growing_gather",
    "hooks",
    "host_reads",
    "reader_of_a_closed_reducer",
]


@dataclass(frozen=True)
class Program:
    """A function of one rank's world, run like a Workload; it raises what is wrong by itself."""

    function: Callable[[World], Any]
    world_size: int = 2
    readings: tuple[Any, ...] = field(default=())

    def run(self, world: World) -> Any:
        """Run one rank."""
        self.function(world)
        return self


def _params(*numels: int) -> list[ParamSpec]:
    return [ParamSpec(f"p{i}", (numel,), "float32") for i, numel in enumerate(numels)]


def _backward(reducer: Reducer, registry: Registry, *, value: float = 1.0) -> None:
    runtime: Any = registry.world.runtime
    with reducer.backward():
        for name in reversed(registry):
            shape = registry[name].spec.shape
            reducer.reduce_grad(name, runtime.produce(np.full(shape, value), "float32"))


def host_reads(world: World) -> None:
    """Read shards from the host after synchronize(), which orders it and nothing else does."""
    registry = Registry(_params(4, 4), world, bucket_bytes=16)
    with Reducer(registry) as reducer:
        _backward(reducer, registry, value=3)
        reducer.synchronize()
        runtime: Any = world.runtime
        for array in reducer.wait().values():
            assert (runtime.peek(array) == 3).all(), "bytes"


def growing_gather(world: World) -> None:
    """Gather more than before for another stream than the one that allocates."""
    runtime: Any = world.runtime
    registry = Registry(_params(2, 9), world, bucket_bytes=8)
    side = runtime.stream()
    with runtime.use(side):
        own = {
            n: runtime.produce(np.ones(p.stop - p.start), "float32") for n, p in registry.items()
        }
        out = {n: runtime.produce(np.zeros(p.spec.shape), "float32") for n, p in registry.items()}
        for array in (*own.values(), *out.values()):
            runtime.consume(array)
    side.synchronize()
    registry.gather({"p0": own["p0"]}, out={"p0": out["p0"]})
    with runtime.use(side):  # the stream that the scratch was allocated on waits for nothing here
        registry.gather({"p0": own["p0"]}, out={"p0": out["p0"]})
        registry.gather(own, out=out)
    side.synchronize()


def gather_for_another_stream(world: World) -> None:
    """Gather what the current stream has just written, for another stream to read."""
    runtime: Any = world.runtime
    registry = Registry(_params(9), world)
    side = runtime.stream()
    own = {n: runtime.produce(np.ones(p.stop - p.start), "float32") for n, p in registry.items()}
    full = registry.gather(own, stream=side)
    with runtime.use(side):
        for array in full.values():
            runtime.consume(array)
    side.synchronize()


def eight_buckets(world: World) -> None:
    """Hand over equal buckets; the library may hold the gradients of two in flight and of one."""
    runtime: Any = world.runtime
    registry = Registry(_params(*[4] * 8), world, bucket_bytes=16)
    with Reducer(registry, max_buffers=2) as reducer:
        for _ in range(2):
            with reducer.backward():
                for name in reversed(registry):
                    reducer.reduce_grad(name, runtime.produce(np.ones(4), "float32"))
                    alive = runtime.alive("a gradient")
                    assert alive <= 3, f"memory: {alive} gradients are alive"
            reducer.wait()


def hooks(world: World, *, threads: int = 1) -> None:
    """Hand gradients over on other threads, as torch's autograd does; with 0, on this one."""
    runtime: Any = world.runtime
    registry = Registry(_params(*[4] * 6), world, bucket_bytes=16)
    names = list(reversed(registry))
    with Reducer(registry, op="sum") as reducer:

        def hand_over(first: int) -> None:
            for name in names[first :: max(threads, 1)]:
                reducer.reduce_grad(name, runtime.produce(np.full(4, world.rank + 1), "float32"))

        for _ in range(2):
            with reducer.backward():
                others = [runtime.spawn(partial(hand_over, first)) for first in range(threads)]
                if not threads:
                    hand_over(0)
                for other in others:
                    other.join()
            for shard in reducer.wait().values():
                runtime.adopt(None).synchronize()
                total = world.world_size * (world.world_size + 1) // 2
                assert (runtime.peek(shard) == total).all(), "bytes"


def reader_of_a_closed_reducer(world: World) -> None:
    """Let a side stream read shards that the next reducer of the same registry writes again."""
    runtime: Any = world.runtime
    registry = Registry(_params(4, 4), world, bucket_bytes=16)
    side = runtime.stream()
    for _ in range(2):
        with Reducer(registry) as reducer:
            _backward(reducer, registry)
            with runtime.use(side):
                for array in reducer.wait().values():
                    runtime.consume(array)
    side.synchronize()
