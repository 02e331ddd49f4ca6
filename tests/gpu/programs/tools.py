"""What the GPU programs share: a spin kernel, gradients of every dtype, checks by name."""

from __future__ import annotations

import sys
import traceback
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np
import torch

import cupynccl_reduce as cr

if TYPE_CHECKING:
    from collections.abc import Callable

TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
TORCH |= {"float64": torch.float64, "int32": torch.int32, "int64": torch.int64}

_SPIN = cupy.RawKernel(
    r"""extern "C" __global__ void spin(long long cycles) {
        long long start = clock64();
        while (clock64() - start < cycles) {}
    }""",
    "spin",
)
CHECKS: list[Callable[[cr.World], None]] = []


def spin(stream: Any, milliseconds: float = 20.0) -> None:
    """Keep `stream` busy: what is queued behind it without a wait elsewhere runs too early."""
    with stream:
        _SPIN((1,), (1,), (np.int64(int(milliseconds * 1.9e6)),))


def check(function: Callable[[cr.World], None]) -> Callable[[cr.World], None]:
    CHECKS.append(function)
    return function


def gradient(values: np.ndarray, dtype: str) -> torch.Tensor:
    return torch.from_numpy(np.array(values, np.float64)).to(TORCH[dtype]).cuda()


def to_numpy(array: Any) -> np.ndarray:
    """Return any array of the library as float64 (bfloat16 too)."""
    if array.dtype.name == "bfloat16":
        bits = cupy.asnumpy(array.view(cupy.uint16)).astype(np.uint32) << 16
        return bits.view(np.float32).astype(np.float64)
    return cupy.asnumpy(array).astype(np.float64)


def bits(shards: Any) -> bytes:
    return b"".join(cupy.asnumpy(a.view(cupy.uint8)).tobytes() for a in shards.values())


def integers(key: tuple[int, ...], shape: tuple[int, ...], top: int = 8) -> np.ndarray:
    return np.random.default_rng(key).integers(-top, top, shape).astype(np.float64)


def main(*, share_gpu: bool) -> None:
    """Run every check, or those named; print a line each. A failure ends the job (-m mpi4py).

    All run on one world, but a check that breaks it is followed by one on a new world.
    """
    names = sys.argv[1:]
    wanted = [function for function in CHECKS if not names or function.__name__ in names]
    while wanted:
        with cr.connect("cuda", share_gpu=share_gpu) as world:
            while wanted and world.usable:
                _run(wanted.pop(0), world)
    print(f"ALL OK rank {world.rank} of {world.world_size}", flush=True)


def _run(function: Callable[[cr.World], None], world: cr.World) -> None:
    try:
        function(world)
    except BaseException:
        print(f"FAIL {function.__name__} rank {world.rank}", flush=True)
        traceback.print_exc()
        raise
    print(f"OK {function.__name__} rank {world.rank}", flush=True)
