"""Simulated memory and kernels: real bytes in NumPy, every access declared. No collectives."""

from __future__ import annotations

import weakref
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

import ml_dtypes
import numpy as np

from cupynccl_reduce import dlpack
from cupynccl_reduce.dtypes import DTYPES
from cupynccl_reduce.errors import GradientError, ProtocolError
from cupynccl_reduce.runtimes.host import HostPack, HostUnpack

from .device import Range, SimEvent, SimStream, check_accesses, refuse
from .findings import RaceError
from .memory import range_of, still
from .sites import operation

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cupynccl_reduce.detector import Block
    from cupynccl_reduce.dlpack import View
    from cupynccl_reduce.layout import Matrix
    from cupynccl_reduce.protocols import Array, Fill, Memory

    from .memory import MemoryCheck
    from .scheduler import Scheduler

__all__ = ["Foreign", "Reading", "SimRuntime"]

POISON = 0xFF  # as a float of any width: NaN


class Reading:
    """What a queued read of device memory will have seen, once it has run."""

    def __init__(self) -> None:
        self.value: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class Foreign:
    """An array of a library that tells nobody its stream, but makes the reader's stream wait."""

    array: Array


@dataclass(slots=True, eq=False)
class _Memory:
    """One allocation: its bytes outlive its free, because queued work may still touch them."""

    store: Any
    block: Block


class SimRuntime:
    """One rank's device: memory, streams and kernels; and the user's own kernels, for workloads."""

    kind: Literal["cuda", "host"] = "cuda"
    device = 0

    def __init__(self, scheduler: Scheduler, rank: int, check: MemoryCheck | None = None) -> None:
        self.scheduler = scheduler
        self.rank = rank
        self._memory: list[_Memory] = []
        self._check = check
        self._numbers = count(1)
        self._current = SimStream(scheduler, rank, "caller's stream")

    def allocate(self, nbytes: int, *, memory: Memory = "device") -> Array:
        """Return zeroed bytes. Freeing them (dropping the last view) writes to all of them."""
        return self._allocate(nbytes, f"{memory} memory")

    def view(self, array: Array, offset: int, numel: int, dtype: str) -> Array:
        """Return `numel` elements of `dtype` that start at byte `offset` of `array`."""
        stop = offset + numel * DTYPES[dtype].itemsize
        return array[offset:stop].view(_numpy_dtype(dtype))

    def read(self, source: Any, stream: Any) -> View:
        """Describe an array of this device; a Foreign one makes `stream` wait by itself."""
        foreign = isinstance(source, Foreign)
        view = dlpack.read(source.array if foreign else source)
        if view.shape and 0 not in view.shape and not self._is_mine(view.pointer):
            msg = f"it is no memory of rank {self.rank}'s device; make it with runtime.produce()"
            raise GradientError(msg)
        view.stream = None if foreign else self._current
        if foreign:
            ready = self.event()
            ready.record(self._current)
            stream.wait_event(ready)
        return view

    def stream(self) -> SimStream:
        """Return a new stream."""
        return SimStream(self.scheduler, self.rank, f"side stream {next(self._numbers)}")

    def event(self) -> SimEvent:
        """Return a new event, not recorded."""
        return SimEvent(self.scheduler)

    def adopt(self, stream: Any) -> Any:
        """Return the caller's current stream for None."""
        if stream is None:
            return self._current
        if isinstance(stream, SimStream):
            return stream
        msg = f"{stream!r} is no simulated stream"
        raise ProtocolError(msg)

    def pack_kernel(
        self, matrix: Matrix, source_dtype: str, dtype: str, *, divisor: int = 1
    ) -> SimPack:
        """Build the kernel that packs `source_dtype` arrays into a `dtype` matrix."""
        return SimPack(matrix, HostPack(matrix, source_dtype, dtype, divisor))

    def unpack_kernel(self, matrix: Matrix, dtype: str, target_dtype: str) -> SimUnpack:
        """Build the kernel that unpacks a `dtype` matrix into `target_dtype` arrays."""
        return SimUnpack(matrix, HostUnpack(matrix, dtype, target_dtype))

    def close(self) -> None:
        """Nothing is owned."""

    @contextmanager
    def use(self, stream: SimStream) -> Iterator[None]:
        """Make `stream` the caller's current one in this context, as CuPy's and torch's do."""
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def produce(self, values: Any, dtype: str) -> Array:
        """Queue a kernel of the user on the current stream that writes a new array; return it."""
        values = np.asarray(values)
        nbytes = values.size * DTYPES[dtype].itemsize
        block = self._allocate(nbytes, "a gradient")
        array = self.view(block, 0, values.size, dtype).reshape(values.shape)
        self.overwrite(array, values)
        return array

    def overwrite(self, array: Array, values: Any) -> None:
        """Queue a kernel of the user on the current stream that writes all of `array`."""
        target, values = still(array), np.array(values)

        def run() -> None:
            target[...] = values.astype(target.dtype).reshape(target.shape)

        what = operation("user's write of", "an array")
        self._current.queue(what, run, writes=[self._range(array)])
        self.scheduler.step()

    def consume(self, array: Array) -> Reading:
        """Queue a kernel of the user on the current stream that reads all of `array`."""
        reading, source = Reading(), still(array)

        def run() -> None:
            reading.value = source.copy()

        self._current.queue(
            operation("user's read of", "an array"), run, reads=[self._range(array)]
        )
        self.scheduler.step()
        return reading

    def peek(self, array: Array) -> Any:
        """Read `array` from the host now, as for pinned memory: nothing but a synchronize helps."""
        what = operation("host's read of", "an array")
        self._access_from_host(what, reads=[self._range(array)])
        return still(array).copy()

    def poke(self, array: Array, values: Any) -> None:
        """Write `array` from the host now, as for pinned memory."""
        what = operation("host's write of", "an array")
        self._access_from_host(what, writes=[self._range(array)])
        still(array)[...] = values

    def alive(self, label: str) -> int:
        """Return how many blocks whose label starts so are not given back: "a gradient"."""
        blocks = (memory.block for memory in self._memory)
        return sum(block.freed is None and block.label.startswith(label) for block in blocks)

    def _access_from_host(self, what: Any, **ranges: list[Range]) -> None:
        scheduler = self.scheduler
        scheduler.pause()
        scheduler.detector.begin(what, scheduler.host.lane)
        check_accesses(scheduler, what, ranges.get("reads", ()), ranges.get("writes", ()))

    def _allocate(self, nbytes: int, label: str) -> Array:
        store = np.zeros(nbytes + 64, np.uint8)
        start = -store.ctypes.data % 64
        store = store[start : start + nbytes]
        number = len(self._memory)
        told = f"{label} {number} of rank {self.rank} ({nbytes} bytes)"
        memory = _Memory(store, self.scheduler.detector.add_block(store.ctypes.data, nbytes, told))
        self._memory.append(memory)
        if self._check is not None:
            self._check.watch(store)
        # What the caller holds is a view of its own, so that dropping the last one can be seen.
        handle = np.frombuffer(store.data, np.uint8)
        weakref.finalize(handle, self._free, memory, self._current).atexit = False
        return handle

    def _free(self, memory: _Memory, arena: SimStream) -> None:
        """Write over a dropped block, in the order of the stream that it was allocated on.

        That is what a stream-ordered pool may do: hand it out again at that stream's present end.
        """
        if not self.scheduler.running or self.scheduler.broken or not memory.block.nbytes:
            return
        store = memory.store

        def run() -> None:
            store[...] = POISON

        what = operation("free of", memory.block.label)
        arena.queue(what, run)
        conflict = self.scheduler.detector.free(what, memory.block)
        if conflict is not None:
            # A finalizer cannot raise, so the rank ends at its next step.
            with suppress(RaceError):
                refuse(self.scheduler, conflict)

    def _range(self, array: Array) -> Range:
        if array.size and not self._is_mine(array.ctypes.data):
            msg = f"this array is no memory of rank {self.rank}'s device; make it with produce()"
            raise GradientError(msg)
        return range_of(array)

    def _is_mine(self, pointer: int) -> bool:
        block = self.scheduler.detector.find(pointer)
        return block is not None and f" of rank {self.rank} " in block.label


class SimPack:
    """protocols.PackKernel: HostPack, queued, with its accesses declared."""

    def __init__(self, matrix: Matrix, kernel: HostPack) -> None:
        self._kernel = kernel
        self._label = _label(matrix)

    def __call__(
        self, sources: Sequence[Sequence[View]], target: Array, *, fill: Fill, stream: Any
    ) -> None:
        """Queue the pack. It keeps nothing alive: that is the engine's business."""
        bare = [[replace(view, owner=None) for view in group] for group in sources]
        out = still(target)
        stream.queue(
            operation("pack of", self._label),
            lambda: self._kernel.run(bare, out, fill),
            reads=[view.span for group in bare for view in group],
            writes=[range_of(target)],
        )
        stream.scheduler.step()


class SimUnpack:
    """protocols.UnpackKernel: HostUnpack, queued, with its accesses declared."""

    def __init__(self, matrix: Matrix, kernel: HostUnpack) -> None:
        self._kernel = kernel
        self._label = _label(matrix)

    def __call__(
        self, source: Array, targets: Sequence[View], *, accumulate: bool, stream: Any
    ) -> None:
        """Queue the unpack. It keeps nothing alive."""
        bare = [replace(view, owner=None) for view in targets]
        row = still(source)
        spans = [view.span for view in bare]
        stream.queue(
            operation("unpack of", self._label),
            lambda: self._kernel.run(row, bare, accumulate),
            reads=[range_of(source), *(spans if accumulate else ())],
            writes=spans,
        )
        stream.scheduler.step()


def _label(matrix: Matrix) -> str:
    names = [segment.name for segment in matrix.segments if segment.name]
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""  # noqa: PLR2004  # enough to see
    return f"{matrix.label} ({', '.join(names[:5])}{more})" if names else matrix.label


def _numpy_dtype(name: str) -> Any:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)
