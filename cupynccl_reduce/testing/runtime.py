"""One simulated rank's device, and the user's own kernels and threads. No collectives."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

import ml_dtypes
import numpy as np

from cupynccl_reduce import dlpack
from cupynccl_reduce.dtypes import DTYPES
from cupynccl_reduce.errors import GradientError, ProtocolError
from cupynccl_reduce.reading import make_reader
from cupynccl_reduce.runtimes.flat import flat_array
from cupynccl_reduce.runtimes.host import HostPack, HostUnpack

from .arena import Arena
from .device import Range, SimEvent, SimStream, check_accesses
from .kernels import SimNorm, SimPack, SimUnpack
from .memory import still
from .sites import operation
from .threads import SimThread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from cupynccl_reduce.dlpack import View
    from cupynccl_reduce.layout import Matrix
    from cupynccl_reduce.protocols import Array, Memory

    from .hosts import Host
    from .scheduler import Scheduler

__all__ = ["Foreign", "Reading", "SimRuntime"]


class Reading:
    """What a queued read of device memory will have seen, once it has run."""

    def __init__(self) -> None:
        self.value: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class Foreign:
    """An array of a library that tells nobody its stream, but makes the reader's stream wait."""

    array: Array


class SimRuntime:
    """One rank's device: memory, streams and kernels; and the user's own kernels, for workloads."""

    kind: Literal["cuda", "host"] = "cuda"
    device = 0

    def __init__(self, scheduler: Scheduler, rank: int) -> None:
        self.scheduler = scheduler
        self.rank = rank
        self._arena = Arena(scheduler, rank)
        self._numbers = count(1)
        self._threads: list[SimThread] = []
        caller = SimStream(scheduler, rank, "caller's stream")
        self._streams: dict[Host, SimStream] = {scheduler.host: caller}  # the current ones

    def allocate(self, nbytes: int, *, memory: Memory = "device") -> Array:
        """Return zeroed bytes. Freeing them (dropping the last view) writes to all of them."""
        return self._arena.allocate(nbytes, f"{memory} memory", self._current)

    def view(self, array: Array, offset: int, numel: int, dtype: str) -> Array:
        """Return `numel` elements of `dtype` that start at byte `offset` of `array`."""
        stop = offset + numel * DTYPES[dtype].itemsize
        return array[offset:stop].view(_numpy_dtype(dtype))

    def array(self, view: View) -> Array:
        """Return the memory of a contiguous view as a flat array."""
        return flat_array(view)

    def read(self, source: Any, stream: Any) -> View:
        """Describe an array of this device; a Foreign one makes `stream` wait by itself."""
        foreign = isinstance(source, Foreign)
        view = dlpack.read(source.array if foreign else source)
        if view.shape and 0 not in view.shape and not self._arena.holds(view.pointer):
            msg = f"it is no memory of rank {self.rank}'s device; make it with runtime.produce()"
            raise GradientError(msg)
        view.stream = None if foreign else self._current
        if foreign:
            ready = self.event()
            ready.record(self._current)
            stream.wait_event(ready)
        return view

    def reader(self, shape: tuple[int, ...], dtype: str, stream: Any) -> Callable[[Any], View]:
        """Return `read` for gradients of one shape and dtype."""
        return make_reader(lambda a: self.read(a, stream), shape, dtype)

    def stream(self) -> SimStream:
        """Return a new stream."""
        return SimStream(self.scheduler, self.rank, f"side stream {next(self._numbers)}")

    def event(self) -> SimEvent:
        """Return a new event, not recorded."""
        return SimEvent(self.scheduler)

    watched_event = event

    def adopt(self, stream: Any) -> Any:
        """Return the caller's current stream for None."""
        if stream is None:
            return self._current
        if isinstance(stream, SimStream):
            return stream
        msg = f"{stream!r} is no simulated stream"
        raise ProtocolError(msg)

    def capturing(self, stream: Any) -> bool:  # noqa: ARG002  # graphs are not simulated
        """Return False."""
        return False

    def pack_kernel(
        self, matrix: Matrix, source_dtype: str, dtype: str, *, divisor: int = 1
    ) -> SimPack:
        """Build the kernel that packs `source_dtype` arrays into a `dtype` matrix."""
        return SimPack(matrix, HostPack(matrix, source_dtype, dtype, divisor))

    def unpack_kernel(self, matrix: Matrix, dtype: str, target_dtype: str) -> SimUnpack:
        """Build the kernel that unpacks a `dtype` matrix into `target_dtype` arrays."""
        return SimUnpack(matrix, HostUnpack(matrix, dtype, target_dtype))

    def norm_kernel(self, arrays: Sequence[View], p: float) -> SimNorm:
        """Build the kernel that measures and scales these arrays."""
        return SimNorm(arrays, p)

    def close(self) -> None:
        """Nothing is owned."""

    @contextmanager
    def use(self, stream: SimStream) -> Iterator[None]:
        """Make `stream` the caller's current one in this context, as CuPy's and torch's do."""
        host, before = self.scheduler.host, self._current
        self._streams[host] = stream
        try:
            yield
        finally:
            self._streams[host] = before

    def spawn(self, function: Callable[[], Any]) -> SimThread:
        """Start another thread of this rank, such as one that runs hooks; it takes turns like all.

        What this thread has done comes before it, and it comes before what follows `join()`; the
        rank joins what it has not when its function returns. It has a current stream of its own, as
        with CUDA's per-thread default streams. Threads of a rank take turns wherever work is queued
        or the host waits, but not within a call of the library, which holds a lock; hold none of
        your own where the simulation may give the turn away.
        """
        thread = SimThread(self.scheduler, function)
        self._threads.append(thread)
        name = f"stream of thread {len(self._threads)}"
        self._streams[thread.host] = SimStream(self.scheduler, self.rank, name)
        self.scheduler.pause()
        return thread

    def join_all(self) -> None:
        """Join the threads that were not joined."""
        for thread in self._threads:
            if not thread.joined:
                thread.join()

    def produce(self, values: Any, dtype: str) -> Array:
        """Queue a kernel of the user on the current stream that writes a new array; return it."""
        values = np.asarray(values)
        nbytes = values.size * DTYPES[dtype].itemsize
        block = self._arena.allocate(nbytes, "a gradient", self._current)
        array = self.view(block, 0, values.size, dtype).reshape(values.shape)
        self.overwrite(array, values)
        return array

    def overwrite(self, array: Array, values: Any) -> None:
        """Queue a kernel of the user on the current stream that writes all of `array`."""
        values = np.array(values)

        def write(target: Array) -> None:
            target[...] = values.astype(target.dtype).reshape(target.shape)

        self.queue("write of an array", write, writes=[array])

    def consume(self, array: Array) -> Reading:
        """Queue a kernel of the user on the current stream that reads all of `array`."""
        return self.queue("read of an array", np.copy, reads=[array])

    def queue(
        self,
        label: str,
        kernel: Callable[..., Any],
        *,
        reads: Sequence[Array] = (),
        writes: Sequence[Array] = (),
    ) -> Reading:
        """Queue `kernel(*reads, *writes)` on the current stream; it touches just these arrays.

        The arrays are the same memory, but keep nothing alive. What the kernel returns is the value
        of the Reading that this returns. Under check_declarations it runs twice.
        """
        reading = Reading()
        ranges = [[self._arena.range(array) for array in arrays] for arrays in (reads, writes)]
        arrays = [still(array) for array in (*reads, *writes)]

        def run() -> Any:
            reading.value = kernel(*arrays)
            return reading.value

        what = operation("user's", label)
        self._current.queue(what, run, reads=ranges[0], writes=ranges[1])
        self.scheduler.step()
        return reading

    def peek(self, array: Array) -> Any:
        """Read `array` from the host now, as for pinned memory: nothing but a synchronize helps."""
        what = operation("host's read of", "an array")
        self._access_from_host(what, reads=[self._arena.range(array)])
        return still(array).copy()

    def poke(self, array: Array, values: Any) -> None:
        """Write `array` from the host now, as for pinned memory."""
        what = operation("host's write of", "an array")
        self._access_from_host(what, writes=[self._arena.range(array)])
        still(array)[...] = values

    def alive(self, label: str) -> int:
        """Return how many blocks whose label starts so are not given back: "a gradient"."""
        return self._arena.alive(label)

    def _access_from_host(self, what: Any, **ranges: list[Range]) -> None:
        scheduler = self.scheduler
        scheduler.pause()
        scheduler.detector.begin(what, scheduler.host.lane)
        check_accesses(scheduler, what, ranges.get("reads", ()), ranges.get("writes", ()))

    @property
    def _current(self) -> SimStream:
        return self._streams[self.scheduler.host]


def _numpy_dtype(name: str) -> Any:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)
