"""Arrays on any runtime, from NumPy and back. The one place of this suite that knows devices."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from cupynccl_reduce.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable

    from cupynccl_reduce.dlpack import View

__all__ = ["FLOATS", "INTEGERS", "Buffer", "empty", "hold", "numpy_dtype", "put", "source"]

FLOATS = tuple(dtype.name for dtype in DTYPES.values() if dtype.is_float)
INTEGERS = tuple(dtype.name for dtype in DTYPES.values() if not dtype.is_float)
GUARD = 64  # bytes on either side that nobody may write
GARBAGE = 0xA5
HOLD_LIMIT_S = 30  # a held stream goes on by itself then, so that a failed test ends


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype called `name`."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """`array` is flat and on the runtime, amid guard bytes; all of it starts as garbage."""

    runtime: Any
    memory: Any
    array: Any
    dtype: str
    inside: slice

    def get(self) -> np.ndarray:
        """Return the values; the guard bytes must be untouched. Nothing may be queued on it."""
        raw = _to_numpy(self.runtime, self.memory)
        assert (raw[: self.inside.start] == GARBAGE).all(), "written before the start"
        assert (raw[self.inside.stop :] == GARBAGE).all(), "written past the end"
        return raw[self.inside].view(numpy_dtype(self.dtype))

    def set(self, values: np.ndarray) -> None:
        """Overwrite the values from the host, and block until they are there."""
        raw = np.full(self.memory.size, GARBAGE, np.uint8)
        raw[self.inside] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        _from_numpy(self.runtime, raw, self.memory)

    def view(self, stream: Any) -> View:
        """Return the array as a kernel's argument."""
        return self.runtime.read(self.array, stream)


def empty(runtime: Any, numel: int, dtype: str, *, shift: int = 0) -> Buffer:
    """Return a buffer of `numel` elements of garbage, `shift` elements past a 64-byte boundary."""
    itemsize = numpy_dtype(dtype).itemsize
    start = GUARD + shift * itemsize
    stop = start + numel * itemsize
    memory = runtime.allocate(stop + GUARD)
    _from_numpy(runtime, np.full(memory.size, GARBAGE, np.uint8), memory)
    return Buffer(
        runtime, memory, runtime.view(memory, start, numel, dtype), dtype, slice(start, stop)
    )


def put(runtime: Any, values: np.ndarray, dtype: str, *, shift: int = 0) -> Buffer:
    """Return a buffer that holds the flat `values`."""
    buffer = empty(runtime, values.size, dtype, shift=shift)
    buffer.set(values)
    return buffer


def source(runtime: Any, values: np.ndarray, dtype: str, stream: Any) -> View:
    """Return a view of an array on the runtime that lies as `values` does: strides, alignment."""
    if runtime.kind == "host":
        return runtime.read(values, stream)
    import cupy

    kind = np.dtype(np.float16) if dtype == "bfloat16" else numpy_dtype(dtype)
    if not values.size:
        return replace(runtime.read(cupy.empty(values.shape, kind), stream), dtype=dtype)
    low, high = np.lib.array_utils.byte_bounds(values)
    raw = np.zeros(low % 16 + high - low, np.uint8)
    raw[low % 16 :] = np.frombuffer((ctypes.c_ubyte * (high - low)).from_address(low), np.uint8)
    memory = runtime.allocate(raw.size)
    _from_numpy(runtime, raw, memory)
    pointer = memory.data + (values.__array_interface__["data"][0] - low + low % 16)
    strided = cupy.ndarray(values.shape, kind, pointer, values.strides)
    return replace(runtime.read(strided, stream), dtype=dtype)


def hold(stream: Any) -> Callable[[], None]:
    """Make `stream` stand still until the returned function is called."""
    if hasattr(stream, "submit"):
        gate = threading.Event()
        stream.submit(lambda: gate.wait(HOLD_LIMIT_S))
        return gate.set
    import cupy

    kernel = cupy.RawKernel(
        r"""extern "C" __global__ void hold(volatile int* gate, unsigned long long limit_ns) {
            unsigned long long start, now;
            asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
            do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
            while (!*gate && now - start < limit_ns);
        }""",
        "hold",
    )
    memory = cupy.cuda.alloc_pinned_memory(4)
    gate = np.frombuffer(memory, np.int32, 1)
    gate[0] = 0
    with stream:
        kernel((1,), (1,), (np.uint64(memory.ptr), np.uint64(HOLD_LIMIT_S * 10**9)))

    def release() -> None:
        gate[0] = 1

    return release


def _from_numpy(runtime: Any, raw: np.ndarray, memory: Any) -> None:
    if runtime.kind == "host":
        memory[...] = raw
        return
    import cupy

    memory.set(raw)
    cupy.cuda.get_current_stream().synchronize()


def _to_numpy(runtime: Any, memory: Any) -> np.ndarray:
    if runtime.kind == "host":
        return np.array(memory)
    import cupy

    return cupy.asnumpy(memory)
