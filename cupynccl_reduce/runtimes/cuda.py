"""The CUDA runtime: CuPy memory and streams, and the kernels beside it. Nothing about ranks."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, Literal

import cupy
import ml_dtypes
import numpy as np

from cupynccl_reduce import dlpack
from cupynccl_reduce.dtypes import DTYPES
from cupynccl_reduce.errors import GradientError, GradientTypeError, ProtocolError
from cupynccl_reduce.reading import make_reader

from .cuda_norm import CudaNorm
from .events import CudaEvent, Handle, WatchedEvent
from .kernels import CudaPack, CudaUnpack, read_source
from .pools import Pools

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cupynccl_reduce.dlpack import View
    from cupynccl_reduce.layout import Matrix
    from cupynccl_reduce.protocols import Array, Memory

__all__ = ["CudaRuntime", "bus_id"]

# Handles in DLPack's and CUDA's own numbering: the null stream, and each thread's default stream.
LEGACY_STREAM, PER_THREAD_STREAM = 1, 2

NAMES = {
    np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name): name for name in DTYPES
}  # NumPy's dtype -> name


def bus_id(device: int) -> str:
    """Return the PCI bus id of a GPU: the same for every process of the host that uses it."""
    return str(cupy.cuda.runtime.deviceGetPCIBusId(device))


class CudaRuntime:
    """Memory, streams and kernels of one GPU.

    Args:
        device: index of the GPU among those this process sees.
    """

    kind: Literal["cuda", "host"] = "cuda"

    def __init__(self, device: int) -> None:
        self.device = device
        # Entered around all work: the caller may be another thread (torch's autograd has its own),
        # whose current device is not this one.
        self.current = cupy.cuda.Device(device)
        self._pools = Pools(device)
        self._functions: dict[str, Any] = {}
        null, per_thread = cupy.cuda.Stream.null, cupy.cuda.Stream.ptds
        self._streams: dict[int, Any] = {
            0: null,
            LEGACY_STREAM: null,
            PER_THREAD_STREAM: per_thread,
        }
        self._closed = False
        with self.current:
            self._own = cupy.cuda.Stream(non_blocking=True)
            self.multiprocessors: int = self.current.attributes["MultiProcessorCount"]
            self._dtypes = {name: dtype for dtype, name in NAMES.items()}
            try:
                cupy.ndarray((0,), self._dtypes["bfloat16"])
            except (TypeError, ValueError):  # a CuPy without bfloat16: kernels see pointers only
                self._dtypes["bfloat16"] = np.dtype("uint16")

    def allocate(self, nbytes: int, *, memory: Memory = "device") -> Array:
        """Return zeroed bytes from this runtime's own pools. Blocks the host until zeroed."""
        if self._closed:
            msg = "this runtime is closed"
            raise ProtocolError(msg)
        with self.current, self._own:
            # The block may have been dropped while queued work of any stream still uses it: the
            # pool knows the stream that a block was made on, not those that used it.
            self.current.synchronize()
            if memory == "pinned":
                owner = self._pools.take_pinned(nbytes)
                block = cupy.cuda.UnownedMemory(owner.ptr, nbytes, owner, self.device)
                pointer = cupy.cuda.MemoryPointer(block, 0)
            else:
                pointer = self._pools.take(nbytes)
            if nbytes:
                pointer.memset_async(0, nbytes, self._own)
                self._own.synchronize()
            return cupy.ndarray((nbytes,), np.uint8, pointer)

    def view(self, array: Array, offset: int, numel: int, dtype: str) -> Array:
        """Return `numel` elements of `dtype` that start at byte `offset` of `array`.

        A bfloat16 view is uint16 where CuPy has no bfloat16.
        """
        stop = offset + numel * DTYPES[dtype].itemsize
        return array[offset:stop].view(self._dtypes[dtype])

    def array(self, view: View) -> Array:
        """Return the memory of a contiguous view as a flat array."""
        numel, dtype = math.prod(view.shape), self._dtypes[view.dtype]
        memory = cupy.cuda.UnownedMemory(view.pointer, numel * dtype.itemsize, None, self.device)
        return cupy.ndarray((numel,), dtype, cupy.cuda.MemoryPointer(memory, 0))

    def read(self, source: Any, stream: Any) -> View:
        """Describe any array of this GPU without copying it."""
        if isinstance(source, cupy.ndarray):
            view = self._describe(source)
        else:
            view = dlpack.read(source, stream=stream.ptr or LEGACY_STREAM)
            if view.stream is not None:
                view.stream = self._streams.get(view.stream) or self.adopt(view.stream)
        if view.stream is not None and view.stream.ptr == PER_THREAD_STREAM:
            # Another stream in every thread: only this thread can order it, so now.
            event = self.event()
            event.record(view.stream)
            stream.wait_event(event)
            view.stream = None
        if view.device_id != self.device or view.device != "cuda":
            remedy = (
                "copy it to the GPU, or use connect('host')"
                if view.device == "cpu"
                else "copy it there, or choose this rank's GPU before making gradients"
            )
            msg = (
                f"it lies on {view.device}:{view.device_id}, but this rank works on "
                f"cuda:{self.device}; {remedy}"
            )
            raise GradientError(msg)
        if view.pointer % DTYPES[view.dtype].itemsize:
            # A kernel that met it would end the whole CUDA context.
            msg = (
                f"its address {view.pointer:#x} is not a multiple of the itemsize of {view.dtype}; "
                "copy it into an array of its own"
            )
            raise GradientError(msg)
        return view

    def reader(self, shape: tuple[int, ...], dtype: str, stream: Any) -> Callable[[Any], View]:
        """Return `read` for gradients of one shape and dtype."""
        return make_reader(lambda a: self.read(a, stream), shape, dtype, self._follow_torch)

    def stream(self) -> Any:
        """Return a new stream, which does not synchronise with the null stream either."""
        with self.current:
            return cupy.cuda.Stream(non_blocking=True)

    def event(self) -> Any:
        """Return a new event, not recorded."""
        with self.current:
            return CudaEvent()

    def watched_event(self) -> Any:
        """Return a new event for another thread to query."""
        with self.current:
            return WatchedEvent()

    def adopt(self, stream: Any) -> Any:
        """Return the CuPy Stream of a caller's stream; None is this thread's current one.

        Takes CuPy's and torch's streams, objects with `__cuda_stream__`, and raw handles (0 and 1
        are the null stream, 2 the calling thread's default stream: hand gradients over under it
        from any thread, but call wait() and start the next backward on one).
        """
        if stream is None:
            return cupy.cuda.get_current_stream(self.device)
        if isinstance(stream, (cupy.cuda.Stream, cupy.cuda.ExternalStream)):
            return stream
        if isinstance(stream, int):
            handle = stream
        elif hasattr(stream, "__cuda_stream__"):
            handle = stream.__cuda_stream__()[1]
        elif hasattr(stream, "cuda_stream"):
            handle = stream.cuda_stream
        else:
            msg = f"{stream!r} is no CUDA stream; hand over one of CuPy or torch, or a raw handle"
            raise ProtocolError(msg)
        adopted = self._streams.get(handle)
        if adopted is None:
            adopted = cupy.cuda.Stream.from_external(Handle(handle, stream))
            self._streams[handle] = adopted
        return adopted

    def capturing(self, stream: Any) -> bool:
        """Whether what is queued on `stream` becomes part of a CUDA graph."""
        return bool(stream.is_capturing())

    def pack_kernel(
        self, matrix: Matrix, source_dtype: str, dtype: str, *, divisor: int = 1
    ) -> CudaPack:
        """Build the kernel that packs `source_dtype` arrays into a `dtype` matrix.

        Sums and divides in fp64 if either dtype is float64, else in fp32, and rounds once. Blocks
        the host: compiles where no earlier kernel had these dtypes.
        """
        return CudaPack(self, matrix, source_dtype, dtype, divisor)

    def unpack_kernel(self, matrix: Matrix, dtype: str, target_dtype: str) -> CudaUnpack:
        """Build the kernel that unpacks a `dtype` matrix into `target_dtype` arrays.

        Adds in fp64 if either dtype is float64, else in fp32, and rounds once. Blocks the host.
        """
        return CudaUnpack(self, matrix, dtype, target_dtype)

    def norm_kernel(self, arrays: Sequence[View], p: float) -> CudaNorm:
        """Build the kernel that measures and scales these arrays. Blocks the host: compiles."""
        return CudaNorm(self, arrays, p)

    def close(self) -> None:
        """Give back the pools' memory. Idempotent."""
        self._closed = True
        with self.current:
            self._pools.free_idle()

    def function(self, name: str) -> Any:
        """Return the kernel with this C++ name, compiled unless a cache has it."""
        if name not in self._functions:
            with self.current:
                module = cupy.RawModule(
                    code=read_source(), options=("-std=c++17",), name_expressions=(name,)
                )
                # The function itself: its RawKernel would look it up again at every launch.
                self._functions[name] = module.get_function(name).kernel
        return self._functions[name]

    def upload(self, table: np.ndarray[Any, Any]) -> Array:
        """Return a copy of `table` on the device. Blocks the host until it is there."""
        block = self.allocate(table.nbytes)
        with self.current:
            block.set(table.view(np.uint8).reshape(-1), self._own)
            # Launches of every stream read it, and none waits for this one.
            self._own.synchronize()
        return block

    def scratch(self, numel: int, dtype: str, stream: Any) -> Array:
        """Return uninitialised memory for work on `stream` only.

        It may be dropped as soon as that work is queued: the pool gives it out again to `stream`
        alone, whose order then keeps new work behind the old.
        """
        if stream.is_capturing():
            # A graph would go on writing there at every replay.
            msg = (
                "a CUDA graph cannot keep temporary memory: while capturing, hand over contiguous "
                "arrays, and fewer than 496 for one parameter"
            )
            raise ProtocolError(msg)
        bits = np.dtype(f"u{DTYPES[dtype].itemsize}")
        with stream:
            return cupy.ndarray((numel,), bits, self._pools.take(numel * bits.itemsize))

    def flatten(self, view: View, stream: Any) -> Array:
        """Queue a contiguous copy of a strided array, as bits; return it (see `scratch`)."""
        itemsize = DTYPES[view.dtype].itemsize
        flat = self.scratch(math.prod(view.shape), view.dtype, stream)
        memory = cupy.cuda.UnownedMemory(view.pointer, itemsize, view.owner, self.device)
        strides = tuple(stride * itemsize for stride in view.strides or ())
        with stream:
            pointer = cupy.cuda.MemoryPointer(memory, 0)
            strided = cupy.ndarray(view.shape, flat.dtype, pointer, strides)
            flat.reshape(view.shape)[...] = strided
        return flat

    def _follow_torch(self) -> Callable[[], Any]:
        """Return a function that gives torch's current stream, if it was seen before."""
        handle_of = sys.modules["torch"]._C._cuda_getCurrentRawStream  # noqa: SLF001  # Triton's way
        known, device = self._streams, self.device

        def current() -> Any:
            handle = handle_of(device)
            return known.get(handle) if handle != PER_THREAD_STREAM else None

        return current

    def _describe(self, source: Any) -> View:
        name = NAMES.get(source.dtype)
        if name is None:
            msg = (
                f"cupy.ndarray has unsupported dtype {source.dtype}; cast it to one of "
                f"{', '.join(DTYPES)}"
            )
            raise GradientTypeError(msg)
        strides = None
        if not source.flags.c_contiguous:
            strides = tuple(stride // source.itemsize for stride in source.strides)
        device = source.data.device_id
        stream = cupy.cuda.get_current_stream(device)
        pointer = source.data.ptr
        return dlpack.View(pointer, name, source.shape, strides, "cuda", device, stream, source)
