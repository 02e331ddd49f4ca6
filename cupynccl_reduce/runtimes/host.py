"""The host runtime: NumPy arrays, threads as streams. No GPU and no MPI."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cupynccl_reduce import dlpack
from cupynccl_reduce.dtypes import DTYPES
from cupynccl_reduce.errors import GradientError, LayoutError, ProtocolError
from cupynccl_reduce.reading import make_reader

from .flat import apply, flat_array, narrow, numpy_dtype
from .host_norm import HostNorm
from .queues import CallerStream, HostEvent, HostStream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from cupynccl_reduce.dlpack import View
    from cupynccl_reduce.layout import Matrix, Segment
    from cupynccl_reduce.protocols import Array, Fill, Memory

__all__ = ["HostPack", "HostRuntime", "HostUnpack"]

TILE = 1 << 16  # elements summed at a time, where a parameter has several gradients


def _compute_dtype(source: str, target: str) -> np.dtype[Any]:
    """Return what is computed in: fp64 where one side is, else fp32; integers as they are."""
    if not DTYPES[source].is_float:
        return numpy_dtype(source)
    return np.dtype("float64" if "float64" in (source, target) else "float32")


class HostRuntime:
    """Memory, streams and kernels on the host."""

    kind: Literal["cuda", "host"] = "host"

    def __init__(self) -> None:
        self._caller = CallerStream()
        self._streams: list[HostStream] = []
        self._lock = threading.Lock()
        self._closed = False

    def allocate(self, nbytes: int, *, memory: Memory = "device") -> Array:
        """Return zeroed bytes that start on a 64-byte boundary."""
        if memory != "device":
            msg = f"memory={memory!r} needs a GPU; the host runtime has only memory='device'"
            raise LayoutError(msg)
        try:
            block = np.zeros(nbytes + 64, np.uint8)
        except (MemoryError, ValueError) as error:  # NumPy's, for more than an address can reach
            msg = f"no memory for {nbytes} bytes ({error}); lower bucket_bytes or max_buffers"
            raise LayoutError(msg) from error
        start = -block.ctypes.data % 64
        return block[start : start + nbytes]

    def view(self, array: Array, offset: int, numel: int, dtype: str) -> Array:
        """Return `numel` elements of `dtype` that start at byte `offset` of `array`."""
        return np.ndarray(numel, numpy_dtype(dtype), array, offset)

    def array(self, view: View) -> Array:
        """Return the memory of a contiguous view as a flat array."""
        return flat_array(view)

    def read(self, source: Any, stream: Any) -> View:  # noqa: ARG002  # the host is always ordered
        """Describe any host array without copying it."""
        view = dlpack.read(source)
        if view.device != "cpu":
            msg = (
                f"it lies on {view.device}:{view.device_id}, but this world's runtime is 'host'; "
                "use connect('cuda'), or copy it to the host"
            )
            raise GradientError(msg)
        view.stream = self._caller
        return view

    def reader(self, shape: tuple[int, ...], dtype: str, stream: Any) -> Callable[[Any], View]:
        """Return `read` for gradients of one shape and dtype."""
        caller = self._caller
        return make_reader(lambda a: self.read(a, stream), shape, dtype, lambda: lambda: caller)

    def stream(self) -> HostStream:
        """Return a new queue with a thread of its own."""
        with self._lock:
            if self._closed:
                msg = "this runtime is closed"
                raise ProtocolError(msg)
            stream = HostStream(f"host-stream-{len(self._streams)}")
            self._streams.append(stream)
        return stream

    def event(self) -> HostEvent:
        """Return a new event, not recorded."""
        return HostEvent()

    watched_event = event

    def adopt(self, stream: Any) -> Any:
        """Return the caller's stream: program order, unless a HostStream is given."""
        if stream is None:
            return self._caller
        if isinstance(stream, HostStream | CallerStream):
            return stream
        msg = f"the host runtime has no stream {stream!r}; leave stream out"
        raise ProtocolError(msg)

    def capturing(self, stream: Any) -> bool:  # noqa: ARG002  # there are no graphs here
        """Return False."""
        return False

    def pack_kernel(
        self, matrix: Matrix, source_dtype: str, dtype: str, *, divisor: int = 1
    ) -> HostPack:
        """Build the kernel that packs `source_dtype` arrays into a `dtype` matrix."""
        return HostPack(matrix, source_dtype, dtype, divisor)

    def unpack_kernel(self, matrix: Matrix, dtype: str, target_dtype: str) -> HostUnpack:
        """Build the kernel that unpacks a `dtype` matrix into `target_dtype` arrays."""
        return HostUnpack(matrix, dtype, target_dtype)

    def norm_kernel(self, arrays: Sequence[View], p: float) -> HostNorm:
        """Build the kernel that measures and scales these arrays."""
        return HostNorm(arrays, p)

    def close(self) -> None:
        """End the streams' threads once their work is done. Idempotent."""
        with self._lock:
            self._closed = True
        for stream in self._streams:
            stream.close()


class HostPack:
    """protocols.PackKernel in NumPy.

    Few and long calls, without temporaries: NumPy casts a few thousand elements at a time. Each
    call must take the GIL back, and a thread that runs Python gives it up after 5 ms only.
    """

    def __init__(self, matrix: Matrix, source_dtype: str, dtype: str, divisor: int) -> None:
        self._matrix = matrix
        self._divisor = divisor
        self._compute = _compute_dtype(source_dtype, dtype)

    def __call__(
        self, sources: Sequence[Sequence[View]], target: Array, *, fill: Fill, stream: Any
    ) -> None:
        """Queue the pack on `stream`; the queue holds the sources until it is done."""
        stream.submit(partial(self.run, tuple(sources), target, fill))

    @np.errstate(all="ignore")  # infinities and overflow are values here, as on a GPU
    def run(self, sources: Sequence[Sequence[View]], target: Array, fill: Fill) -> None:
        """Pack now, on this thread."""
        matrix = target.reshape(self._matrix.rows, self._matrix.columns)
        for segment, group in zip(self._matrix.segments, sources, strict=True):
            block = matrix[:, segment.column : segment.column + segment.columns]
            flats = [flat_array(view) for view in group]
            # Several are summed beside the matrix, tile by tile.
            most = TILE if len(flats) > 1 else segment.numel
            for start, stop, rows, columns in _tiles(segment, most):
                part = block[rows, columns]
                if flats:
                    self._reduce([flat[start:stop].reshape(part.shape) for flat in flats], part)
                else:
                    part[...] = np.nan if fill == "nan" else 0
            _zero_padding(segment, block)

    def _reduce(self, pieces: Sequence[Array], part: Array) -> None:
        total = pieces[0]
        if len(pieces) > 1:
            total = total.astype(self._compute)
            for piece in pieces[1:]:
                np.add(total, piece, out=total, dtype=self._compute)
        if self._divisor == 1:
            part[...] = narrow(total, part.dtype)
        else:
            apply(np.divide, total, self._divisor, part, self._compute)


class HostUnpack:
    """protocols.UnpackKernel in NumPy."""

    def __init__(self, matrix: Matrix, dtype: str, target_dtype: str) -> None:
        self._matrix = matrix
        self._compute = _compute_dtype(dtype, target_dtype)

    def __call__(
        self, source: Array, targets: Sequence[View], *, accumulate: bool, stream: Any
    ) -> None:
        """Queue the unpack on `stream`."""
        stream.submit(partial(self.run, source, tuple(targets), accumulate))

    @np.errstate(all="ignore")  # infinities and overflow are values here, as on a GPU
    def run(self, source: Array, targets: Sequence[View], accumulate: bool) -> None:  # noqa: FBT001
        """Unpack now, on this thread."""
        matrix = source.reshape(self._matrix.rows, self._matrix.columns)
        for segment, view in zip(self._matrix.segments, targets, strict=True):
            block = matrix[:, segment.column : segment.column + segment.columns]
            flat = flat_array(view)
            for start, stop, rows, columns in _tiles(segment, segment.numel):
                part = block[rows, columns]
                out = flat[start:stop].reshape(part.shape)
                if accumulate:
                    apply(np.add, out, part, out, self._compute)
                else:
                    out[...] = narrow(part, out.dtype)


def _tiles(segment: Segment, most: int) -> Iterator[tuple[int, int, slice, slice]]:
    """Cut a segment into `(start, stop)` of the flat array and the rows and columns they fill.

    Whole rows go together up to `most` elements; a longer row is cut, the last may be short.
    """
    width = segment.width
    if not segment.numel:
        return
    whole = segment.numel // width
    step = max(1, most // width)
    for row in range(0, whole if width <= most else 0, step):
        stop = min(row + step, whole)
        yield row * width, stop * width, slice(row, stop), slice(0, width)
    for row in range(0 if width > most else whole, -(-segment.numel // width)):
        begin, end = segment.interval(row)
        for start in range(begin, end, most):
            stop = min(start + most, end)
            columns = slice(start - begin, stop - begin)
            yield start, stop, slice(row, row + 1), columns


def _zero_padding(segment: Segment, block: Array) -> None:
    """Zero what no element fills: columns past the width, and rows past the last element."""
    if segment.columns > segment.width:
        block[:, segment.width :] = 0
    if segment.width:
        whole, rest = divmod(segment.numel, segment.width)
        if whole < len(block):
            block[whole, rest:] = 0
            block[whole + 1 :] = 0
