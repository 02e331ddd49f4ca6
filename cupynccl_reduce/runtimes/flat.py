"""Flat NumPy arrays over any host memory, and arithmetic on them that rounds once. No streams."""

from __future__ import annotations

import ctypes
import math
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from cupynccl_reduce.dlpack import View
    from cupynccl_reduce.protocols import Array

__all__ = ["apply", "flat_array", "narrow", "numpy_dtype"]

# The address space as one buffer, from which NumPy takes any array by its address.
MEMORY = memoryview((ctypes.c_char * sys.maxsize).from_address(0)).cast("B")


@cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return NumPy's dtype of this name."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def apply(ufunc: np.ufunc, first: Array, second: Any, out: Array, dtype: np.dtype[Any]) -> None:
    """Write `ufunc(first, second)`, computed in `dtype` and then rounded once, into `out`."""
    if dtype == np.float64 and out.dtype.kind == "V":
        out[...] = narrow(ufunc(first, second, dtype=dtype), out.dtype)
    else:
        ufunc(first, second, out=out, dtype=dtype, casting="unsafe")


def narrow(values: Array, dtype: np.dtype[Any]) -> Array:
    """Return values whose cast to `dtype` rounds only once.

    ml_dtypes takes float64 to bfloat16 through float32. Rounding to odd there keeps the second
    rounding right (Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums", 2008).
    """
    if values.dtype != np.float64 or dtype.kind != "V":
        return values
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
    wide = single.astype(np.float64)
    bits = single.view(np.uint32)
    bits -= (np.abs(wide) > np.abs(values)).astype(np.uint32)  # towards zero
    bits |= (wide != values).astype(np.uint32)
    return single


def flat_array(view: View) -> Array:
    """Return the logical elements of `view` in order: a view where contiguous, else a copy."""
    dtype = numpy_dtype(view.dtype)
    if 0 in view.shape:
        return np.empty(0, dtype)
    if view.strides is None:
        return np.frombuffer(MEMORY, dtype, math.prod(view.shape), view.pointer)
    start, nbytes = view.span
    memory = np.frombuffer(MEMORY, np.uint8, nbytes, start)
    strides = tuple(stride * dtype.itemsize for stride in view.strides)
    return np.ndarray(view.shape, dtype, memory, view.pointer - start, strides).reshape(-1)
