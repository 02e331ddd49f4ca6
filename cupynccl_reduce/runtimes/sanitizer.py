"""The CUDA runtime and NCCL, followed by the race detector while they really run. For tests.

The detector sees what the engine queues (packs, unpacks, collectives, events, waits) and what
CuPy's pools hand out and take back on this thread. It cannot see kernels of the user: a gradient
counts as written by its producer's stream when it is handed over for the first time. With a delay
seed, some operations are held back by a spinning kernel, so that a missing wait shows in the bytes.
"""

from __future__ import annotations

import random
import sys
import threading
from typing import TYPE_CHECKING, Any

import cupy

from cupynccl_reduce.detector import Block, Detector, Operation
from cupynccl_reduce.errors import RaceError
from cupynccl_reduce.reading import make_reader

from .cuda import CudaRuntime
from .followed import (
    FollowedEvent,
    FollowedNorm,
    FollowedStream,
    PoolHook,
    bytes_of,
    follow_pack,
    follow_unpack,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

    from cupynccl_reduce.dlpack import View
    from cupynccl_reduce.layout import Matrix
    from cupynccl_reduce.protocols import Array, Communicator, Control, Memory, Op

__all__ = ["SanitizedCommunicator", "SanitizedRuntime"]

Range = tuple[int, int]  # (address, nbytes)
POISON = 0xFF  # as a float of any width: NaN
DELAYED = 0.3  # of all operations
MAX_CYCLES = 400_000  # about 0.2 ms

SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
}
"""


class SanitizedRuntime(CudaRuntime):
    """CudaRuntime that raises RaceError for two accesses that nothing orders.

    Args:
        device: index of the GPU.
        delay_seed: which operations are held back, and for how long; None for none.
    """

    def __init__(self, device: int, *, delay_seed: int | None = None) -> None:
        self.detector = Detector()
        self._lanes: dict[tuple[int, int], FollowedStream] = {}
        self._hosts: dict[int, int] = {}
        self._arenas: dict[int, tuple[Block, FollowedStream]] = {}
        self._zeroed: set[int] = set()  # blocks of this runtime, zeroed before anyone has them
        self._found: RaceError | None = None
        self._mutex = threading.RLock()
        self.reseed(delay_seed)
        super().__init__(device)
        self._spin = cupy.RawKernel(SPIN, "spin")

    def reseed(self, delay_seed: int | None) -> None:
        """Hold back other operations from now on."""
        self._random = None if delay_seed is None else random.Random(delay_seed)  # noqa: S311

    def stream(self) -> Any:
        """Return a new stream, followed."""
        return self.adopt(super().stream())

    def event(self) -> Any:
        """Return a new event, followed."""
        with self.current:
            return FollowedEvent(self)

    def adopt(self, stream: Any) -> Any:
        """Return the followed stream of a caller's stream."""
        if isinstance(stream, FollowedStream):
            return stream
        plain = super().adopt(stream)
        # Handle 2 is another stream in every thread.
        thread = threading.get_ident() if plain.ptr == 2 else 0  # noqa: PLR2004
        with self._mutex:
            followed = self._lanes.get((plain.ptr, thread))
            if followed is None:
                followed = self._lanes[plain.ptr, thread] = FollowedStream(self, plain)
        return followed

    def read(self, source: Any, stream: Any) -> View:
        """Describe an array; the first time, its producer's stream counts as having written it."""
        view = super().read(source, stream)
        span = view.span
        with self._mutex:
            if view.stream is None:
                view_lane = self.adopt(stream)
            else:
                view_lane = view.stream = self.adopt(view.stream)
            block = self.detector.find(span[0])
            if block is None or block.base not in self._arenas:
                # Memory of another library: its reuse is not seen, so it is new each time.
                if block is not None:
                    self.detector.remove_block(block)
                block = self.detector.add_block(*span, "a gradient of another library")
            if block.base not in self._zeroed and not any(i.write for i in block.intervals):
                self.follow("producer's write of", "a gradient", view_lane, writes=[span])
        return view

    def reader(self, shape: tuple[int, ...], dtype: str, stream: Any) -> Callable[[Any], View]:
        """Return `read` for gradients of one shape and dtype: each is looked at."""
        return make_reader(lambda a: self.read(a, stream), shape, dtype)

    def allocate(self, nbytes: int, *, memory: Memory = "device") -> Array:
        """Return zeroed bytes; they may be given back by any thread."""
        self.hook()
        array = super().allocate(nbytes, memory=memory)
        self._zeroed.add(array.data.ptr)
        return array

    def pack_kernel(
        self, matrix: Matrix, source_dtype: str, dtype: str, *, divisor: int = 1
    ) -> Any:
        """Build the kernel, followed."""
        kernel = super().pack_kernel(matrix, source_dtype, dtype, divisor=divisor)
        return follow_pack(self, matrix.label, kernel)

    def unpack_kernel(self, matrix: Matrix, dtype: str, target_dtype: str) -> Any:
        """Build the kernel, followed."""
        return follow_unpack(self, matrix.label, super().unpack_kernel(matrix, dtype, target_dtype))

    def norm_kernel(self, arrays: Sequence[View], p: float) -> Any:
        """Build the kernel, followed."""
        return FollowedNorm(self, arrays, super().norm_kernel(arrays, p))

    def host_lane(self) -> int:
        """Return the lane of this thread."""
        thread = threading.get_ident()
        with self._mutex:
            if thread not in self._hosts:
                self._hosts[thread] = self.detector.lane(f"host thread {len(self._hosts)}")
            return self._hosts[thread]

    def hook(self) -> None:
        """See from now on what CuPy's pools hand out and take back on this thread."""
        if not any(
            isinstance(h, PoolHook) for h in cupy.cuda.memory_hook.get_memory_hooks().values()
        ):
            PoolHook(self).__enter__()

    def follow(
        self,
        kind: str,
        label: str,
        stream: FollowedStream,
        *,
        reads: Iterable[Range] = (),
        writes: Iterable[Range] = (),
    ) -> None:
        """Note an operation that is queued next; raise RaceError, or hold it back by chance."""
        with self._mutex:
            if self._found is not None:
                raise self._found
            self._note(Operation(kind, label, _site()), stream, reads, writes)
            if self._found is not None:
                raise self._found
            if self._random is not None and self._random.random() < DELAYED:
                cycles = self._random.randrange(MAX_CYCLES)
                with self.current, stream:
                    self._spin((1,), (1,), (cycles,))

    def took(self, address: int, nbytes: int) -> None:
        """Note that a pool handed memory out, on the current stream."""
        with self._mutex:
            self.gave_back(address, poison=False)
            while (block := self._overlapping(address, nbytes)) is not None:
                self.detector.remove_block(block)
            block = self.detector.add_block(address, nbytes, f"{nbytes} bytes of a pool")
            self._arenas[address] = block, self.adopt(None)

    def gave_back(self, address: int, *, poison: bool = True) -> None:
        """Note that memory goes back to a pool: its stream may write all of it from now on."""
        with self._mutex:
            known = self._arenas.pop(address, None)
            if known is None:
                return
            block, stream = known
            # The runtime's own blocks go out again only after the whole device has come to rest.
            own = address in self._zeroed
            self._zeroed.discard(address)
            if poison and not own:
                self._note(
                    Operation("free of", block.label, _site()),
                    stream,
                    (),
                    [(block.base, block.nbytes)],
                )
                cupy.cuda.runtime.memsetAsync(block.base, POISON, block.nbytes, stream.ptr)
            self.detector.remove_block(block)

    def _overlapping(self, address: int, nbytes: int) -> Block | None:
        return self.detector.find(address) or self.detector.find(address + max(nbytes, 1) - 1)

    def _note(
        self,
        what: Operation,
        stream: FollowedStream,
        reads: Iterable[Range],
        writes: Iterable[Range],
    ) -> None:
        detector = self.detector
        detector.follow(stream.lane, self.host_lane())
        detector.begin(what, stream.lane)
        for ranges, write in ((reads, False), (writes, True)):
            for address, nbytes in ranges:
                conflict = detector.access(what, address, nbytes, write=write)
                if conflict is not None and self._found is None:
                    self._found = RaceError(detector.tell(conflict))


class SanitizedCommunicator:
    """protocols.Communicator around another one, followed."""

    def __init__(self, inner: Communicator, runtime: SanitizedRuntime) -> None:
        self.rank, self.world_size = inner.rank, inner.world_size
        self.direct_bytes = inner.direct_bytes
        self._inner = inner
        self._runtime = runtime

    def reduce_scatter(self, send: Array, recv: Array, dtype: str, op: Op, stream: Any) -> None:
        """See protocols.Communicator."""
        self._follow("reduce_scatter", send, recv, stream)
        self._inner.reduce_scatter(send, recv, dtype, op, stream)

    def all_gather(self, send: Array, recv: Array, dtype: str, stream: Any) -> None:
        """See protocols.Communicator."""
        self._follow("all_gather", send, recv, stream)
        self._inner.all_gather(send, recv, dtype, stream)

    def all_reduce(self, send: Array, recv: Array, dtype: str, op: Op, stream: Any) -> None:
        """See protocols.Communicator."""
        self._follow("all_reduce", send, recv, stream)
        self._inner.all_reduce(send, recv, dtype, op, stream)

    def broadcast(self, array: Array, root: int, dtype: str, stream: Any) -> None:
        """See protocols.Communicator."""
        self._follow("broadcast", array, array, stream)
        self._inner.broadcast(array, root, dtype, stream)

    def group(self) -> AbstractContextManager[None]:
        """See protocols.Communicator."""
        return self._inner.group()

    def check(self) -> None:
        """See protocols.Communicator."""
        self._inner.check()

    @property
    def regroup(self) -> Callable[[Control, Sequence[int]], SanitizedCommunicator] | None:
        """See protocols.Communicator."""
        regroup = self._inner.regroup
        if regroup is None:
            return None
        return lambda control, ranks: SanitizedCommunicator(regroup(control, ranks), self._runtime)

    def close(self) -> None:
        """See protocols.Communicator."""
        self._inner.close()

    def abort(self) -> None:
        """See protocols.Communicator."""
        self._inner.abort()

    def _follow(self, kind: str, send: Array, recv: Array, stream: Any) -> None:
        reads, writes = [bytes_of(send)], [bytes_of(recv)]
        self._runtime.follow(kind, "", stream, reads=reads, writes=writes)


def _site() -> str:
    """Return the innermost frame outside this module."""
    frame = sys._getframe(1)  # noqa: SLF001  # inspect.stack() reads source files
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    name = frame.f_code.co_filename.rpartition("/")[2]
    return f"{name}:{frame.f_lineno} {frame.f_code.co_name}"
