"""One simulated rank's memory: real bytes in NumPy, and a free that is a write. No kernels."""

from __future__ import annotations

import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynccl_reduce.errors import GradientError

from .device import refuse
from .findings import RaceError
from .memory import range_of
from .sites import operation

if TYPE_CHECKING:
    from cupynccl_reduce.detector import Block
    from cupynccl_reduce.protocols import Array

    from .device import Range, SimStream
    from .scheduler import Scheduler

__all__ = ["Arena"]

POISON = 0xFF  # as a float of any width: NaN


@dataclass(frozen=True, slots=True, eq=False)
class _Memory:
    """One allocation: its bytes outlive its free, because queued work may still touch them."""

    store: Any
    block: Block


class Arena:
    """Gives out memory, and sees it dropped."""

    def __init__(self, scheduler: Scheduler, rank: int) -> None:
        self._scheduler = scheduler
        self._rank = rank
        self._memory: list[_Memory] = []

    def allocate(self, nbytes: int, label: str, stream: SimStream) -> Array:
        """Return zeroed bytes, which go back on `stream` when their last view is dropped."""
        scheduler = self._scheduler
        store = np.zeros(nbytes + 64, np.uint8)
        start = -store.ctypes.data % 64
        store = store[start : start + nbytes]
        told = f"{label} {len(self._memory)} of rank {self._rank} ({nbytes} bytes)"
        memory = _Memory(store, scheduler.detector.add_block(store.ctypes.data, nbytes, told))
        self._memory.append(memory)
        if scheduler.check is not None:
            scheduler.check.watch(store)
        # What the caller holds is a view of its own, so that dropping the last one can be seen.
        handle = np.frombuffer(store.data, np.uint8)
        weakref.finalize(handle, self._free, memory, stream).atexit = False
        return handle

    def alive(self, label: str) -> int:
        """Return how many blocks whose label starts so are not given back."""
        blocks = (memory.block for memory in self._memory)
        return sum(block.freed is None and block.label.startswith(label) for block in blocks)

    def holds(self, pointer: int) -> bool:
        """Return whether this is memory of this rank."""
        block = self._scheduler.detector.find(pointer)
        return block is not None and f" of rank {self._rank} " in block.label

    def range(self, array: Array) -> Range:
        """Return the bytes of a contiguous array of this rank; raise for another."""
        if array.size and not self.holds(array.ctypes.data):
            msg = f"this array is no memory of rank {self._rank}'s device; make it with produce()"
            raise GradientError(msg)
        return range_of(array)

    def _free(self, memory: _Memory, stream: SimStream) -> None:
        """Write over a dropped block, in the order of the stream that it was allocated on.

        That is what a stream-ordered pool may do: hand it out again at that stream's present end.
        """
        scheduler = self._scheduler
        if not scheduler.running or scheduler.broken or not memory.block.nbytes:
            return
        store = memory.store

        def run() -> None:
            store[...] = POISON

        what = operation("free of", memory.block.label)
        stream.queue(what, run, checked=False)
        conflict = scheduler.detector.free(what, memory.block)
        if conflict is not None:
            # A finalizer cannot raise, so the rank ends at its next step.
            with suppress(RaceError):
                refuse(scheduler, conflict)
