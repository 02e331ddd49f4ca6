"""CuPy's memory pools of one runtime, and what is said when memory is out."""

from __future__ import annotations

from typing import Any

import cupy

from cupynccl_reduce.errors import LayoutError

__all__ = ["Pools"]


class Pools:
    """Device and pinned host memory, apart from CuPy's default pools."""

    def __init__(self, device: int) -> None:
        self._device = device
        self.memory = cupy.cuda.MemoryPool()
        self._pinned = cupy.cuda.PinnedMemoryPool()

    def take(self, nbytes: int) -> Any:
        """Return device memory, in the arena of CuPy's current stream."""
        return self._take(self.memory, nbytes, "device")

    def take_pinned(self, nbytes: int) -> Any:
        """Return page-locked host memory."""
        return self._take(self._pinned, nbytes, "pinned host")

    def free_idle(self) -> None:
        """Give back what nobody holds."""
        self.memory.free_all_blocks()
        self._pinned.free_all_blocks()

    def _take(self, pool: Any, nbytes: int, kind: str) -> Any:
        """Allocate from `pool`; where memory is out, once more without what lies idle here."""
        failures = (cupy.cuda.memory.OutOfMemoryError, cupy.cuda.runtime.CUDARuntimeError)
        try:
            return pool.malloc(nbytes)
        except failures:
            self.free_idle()
        try:
            return pool.malloc(nbytes)
        except failures as error:
            own, default = self.memory, cupy.get_default_memory_pool()
            msg = (
                f"no {kind} memory for {nbytes} bytes on cuda:{self._device} ({error}); "
                f"this library's pool holds {own.total_bytes()} bytes ({own.used_bytes()} used) "
                f"and CuPy's default pool {default.total_bytes()} ({default.used_bytes()} used). "
                "Free the latter with cupy.get_default_memory_pool().free_all_blocks() (torch: "
                "torch.cuda.empty_cache()), or lower bucket_bytes or max_buffers"
            )
            raise LayoutError(msg) from error
