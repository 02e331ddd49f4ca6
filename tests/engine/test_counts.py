"""What one bucket costs: packs, collectives, unpacks; nothing allocated, nobody blocked."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cupynccl_reduce import ParamSpec, Reducer, Registry, run_local
from cupynccl_reduce.runtimes.host import HostPack, HostRuntime, HostUnpack
from cupynccl_reduce.testing import Simulation
from cupynccl_reduce.testing.device import SimEvent, SimStream

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cupynccl_reduce import World

NUMELS = (32, 64, 8, 96, 3, 32)
BUCKETS = 3


class Counted:
    """A communicator that counts, and may ask for direct gradients."""

    def __init__(self, communicator: Any, counts: Counter[str], direct_bytes: int) -> None:
        self._communicator, self._counts = communicator, counts
        self.direct_bytes = direct_bytes

    def __getattr__(self, name: str) -> Any:
        if name in ("reduce_scatter", "all_reduce", "all_gather", "broadcast"):
            self._counts[name] += 1
        return getattr(self._communicator, name)


@pytest.fixture
def counts() -> Iterator[Counter[str]]:
    """Count over all ranks of this process, so at two ranks everything comes twice."""
    counted: Counter[str] = Counter()

    def count(patch: pytest.MonkeyPatch, owner: type, method: str) -> None:
        original = getattr(owner, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            counted[f"{owner.__name__}.{method}"] += 1
            return original(*args, **kwargs)

        patch.setattr(owner, method, call)

    with pytest.MonkeyPatch.context() as patch:
        for owner, method in (
            (HostPack, "__call__"),
            (HostUnpack, "__call__"),
            (HostRuntime, "allocate"),
            (HostRuntime, "event"),
            (HostRuntime, "stream"),
        ):
            count(patch, owner, method)
        yield counted


@pytest.mark.parametrize(
    ("world_size", "direct_bytes", "shard_dtype", "backwards", "per_step"),
    [
        # packs, reduce_scatters and unpacks of three buckets in a step, on each rank
        (1, 0, "float32", 1, (3, 0, 0)),
        (2, 0, "float32", 1, (3, 3, 0)),
        (2, 0, "float32", 2, (6, 6, 3)),  # the second backward is added
        (2, 0, "float64", 1, (3, 3, 3)),
        (2, 256, "float32", 1, (3, 5, 0)),  # one more call for each of 64 and 96 elements
        (2, 256, "float64", 2, (6, 10, 6)),
    ],
)
def test_a_bucket_costs_one_pack_one_collective_and_at_most_one_unpack(
    *,
    counts: Counter[str],
    world_size: int,
    direct_bytes: int,
    shard_dtype: str,
    backwards: int,
    per_step: tuple[int, int, int],
) -> None:
    specs = [
        ParamSpec(f"p{i}", (n,), "float32", shard_dtype=shard_dtype) for i, n in enumerate(NUMELS)
    ]
    grads = [np.ones(n + 4, np.float32) for n in NUMELS]
    grads = [a[-a.ctypes.data % 16 // 4 :][:n] for a, n in zip(grads, NUMELS, strict=True)]
    steps = 4

    def run(world: World) -> Counter[str]:
        world = replace(world, communicator=Counted(world.communicator, counts, direct_bytes))  # type: ignore[arg-type]
        registry = Registry(specs, world, bucket_bytes=416)
        assert len(registry.buckets) == BUCKETS
        with Reducer(registry, op="sum") as reducer:
            before: Counter[str] = Counter()
            for step in range(steps + 2):
                if step == 2:  # warm: each buffer and event was used once
                    world.control.all_gather(b"")
                    before = counts.copy()
                    world.control.all_gather(b"")
                for _ in range(backwards):
                    with reducer.backward():
                        for i in reversed(range(len(specs))):
                            reducer.reduce_grad(f"p{i}", grads[i])
                reducer.wait()
            world.control.all_gather(b"")
            spent = counts - before
            world.control.all_gather(b"")
        return spent

    packs, collectives, unpacks = (n * steps * world_size for n in per_step)
    expected = {
        "HostPack.__call__": packs,
        "reduce_scatter": collectives,
        "HostUnpack.__call__": unpacks,
    }
    for spent in run_local(world_size, run):
        assert spent == Counter({key: number for key, number in expected.items() if number})


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("direct_bytes", [0, 16])
def test_a_step_never_blocks_the_host(world_size: int, direct_bytes: int) -> None:
    """On a device, where the caller's stream is one that waits by itself."""

    def run(world: World) -> None:
        runtime: Any = world.runtime
        world.communicator.direct_bytes = direct_bytes
        specs = [ParamSpec(f"p{i}", (n,), "float32") for i, n in enumerate(NUMELS)]
        registry = Registry(specs, world, bucket_bytes=416)
        reducer = Reducer(registry)

        def refuse(*_: object) -> None:
            pytest.fail("the host is blocked")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SimEvent, "synchronize", refuse)
            patch.setattr(SimStream, "synchronize", refuse)
            patch.setattr(world.control, "all_gather", refuse)
            for _ in range(3):
                for _ in range(2):
                    with reducer.backward():
                        for spec in specs:
                            grad = runtime.produce(np.ones(spec.shape), "float32")
                            reducer.reduce_grad(spec.name, grad)
                    reducer.wait_packed()
                reducer.wait()
        reducer.close()

    Simulation(world_size, schedule="lazy").run(run)
