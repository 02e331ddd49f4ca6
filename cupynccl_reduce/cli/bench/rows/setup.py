"""What every row gets: the world, the parameters and their gradients. No row here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from cupynccl_reduce.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cupynccl_reduce.layout import ParamSpec
    from cupynccl_reduce.membership import World

__all__ = ["Setup", "fill", "find_torch", "first_of", "make_gradients"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One bucket size on one rank. `gradients` are in the order of `params`, all rank + 1."""

    world: World
    params: tuple[ParamSpec, ...]
    gradients: tuple[Any, ...]
    bucket_bytes: int
    max_buffers: int

    @property
    def wire_bytes(self) -> int:
        """Bytes of all gradients on the wire, padding not counted."""
        return sum(spec.numel * DTYPES[spec.reduce_dtype].itemsize for spec in self.params)

    @property
    def largest(self) -> str:
        """The parameter of most elements: every rank has a part of it."""
        return max(self.params, key=lambda spec: spec.numel).name


def find_torch(world: World) -> tuple[Any, str]:
    """Return torch, or None and why it cannot work on this world's device."""
    try:
        import torch
    except ImportError as error:
        return None, f"torch does not load ({error}); pip install 'cupynccl-reduce[torch]'"
    if world.runtime.kind == "cuda" and not torch.cuda.is_available():
        return None, f"torch {torch.__version__} sees no GPU; install a build for CUDA"
    return torch, ""


def make_gradients(world: World, params: Sequence[ParamSpec], torch: Any) -> tuple[Any, ...]:
    """Return one array of rank + 1 for each parameter: torch's where it works, else the runtime's.

    Blocks the host until they are written.
    """
    value = world.rank + 1
    if torch is not None:
        runtime: Any = world.runtime
        device = "cpu" if runtime.kind == "host" else f"cuda:{runtime.device}"
        grads = [
            torch.full(spec.shape, value, dtype=getattr(torch, spec.dtype), device=device)
            for spec in params
        ]
        if device != "cpu":
            torch.cuda.synchronize()
        return tuple(grads)
    grads = []
    for spec in params:
        block = world.runtime.allocate(spec.nbytes)
        grad = world.runtime.view(block, 0, spec.numel, spec.dtype)
        fill(grad, value, spec.dtype)
        grads.append(grad.reshape(spec.shape))
    world.runtime.adopt(None).synchronize()
    return tuple(grads)


def fill(array: Any, value: float, dtype: str) -> None:
    """Write one value into a runtime's array, as bits: CuPy computes little in bfloat16."""
    element = np.full(1, value, _numpy_dtype(dtype)).view(f"u{DTYPES[dtype].itemsize}")
    array.view(element.dtype)[...] = int(element[0])


def first_of(array: Any, dtype: str) -> float:
    """Return the first element of a runtime's flat array. Blocks the host."""
    element = array[:1].view(f"u{DTYPES[dtype].itemsize}")
    host = element.get() if hasattr(element, "get") else element
    return float(host.view(_numpy_dtype(dtype))[0])


def _numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
