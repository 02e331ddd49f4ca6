"""Real streams under the race detector, with delays from 200 seeds and poison on free.

Run with CUPYNCCL_SANITIZE=1.
"""

from __future__ import annotations

import cupy
import numpy as np
from tools import bits, check, main, spin

import cupynccl_reduce as cr

SEEDS = 200
SHAPES = [(1000,), (333,), (64, 65), (7,), (4096,), (2, 3, 5)]


def workload(world: cr.World, seed: int) -> bytes:
    """Two cycles of two backwards over several producer streams; return the shards' bits."""
    rng = np.random.default_rng(5)
    values = [[rng.integers(-8, 8, s).astype(np.float32) for s in SHAPES] for _ in range(4)]
    order = np.random.default_rng(seed)
    specs = [cr.ParamSpec(f"p{i}", shape, "float32") for i, shape in enumerate(SHAPES)]
    registry = cr.Registry(specs, world, bucket_bytes=20000)
    producers = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    result = b""
    sources = []  # they are read on other streams than their own, so the program keeps them
    with cr.Reducer(registry, op="sum") as reducer:
        for cycle in range(2):
            for micro_batch in range(2):
                with reducer.backward():
                    for i in order.permutation(len(SHAPES)):
                        stream = producers[int(order.integers(2))]
                        host = values[2 * cycle + micro_batch][i] * (world.rank + 1)
                        source = cupy.asarray(host)
                        sources.append(source)
                        cupy.cuda.get_current_stream().synchronize()
                        with stream:
                            grad = cupy.empty_like(source)
                            if order.random() < 0.3:
                                spin(stream, float(order.random()))
                            grad[...] = source
                            reducer.reduce_grad(f"p{i}", grad)
                            del grad
                            trash = cupy.full(SHAPES[i], cupy.nan, cupy.float32)
                            del trash
            reader = producers[int(order.integers(2))]
            shards = reducer.wait(stream=reader)
            with reader:
                spin(reader, 0.2)
                copies = {name: array.copy() for name, array in shards.items()}
            reader.synchronize()
            result += bits(copies)
    return result


@check
def two_hundred_delay_seeds_give_equal_bits(world: cr.World) -> None:
    expected = workload(world, 0)
    for seed in range(SEEDS):
        world.runtime.reseed(seed)
        assert workload(world, seed) == expected, seed
    world.runtime.reseed(None)


if __name__ == "__main__":
    main(share_gpu=True)
