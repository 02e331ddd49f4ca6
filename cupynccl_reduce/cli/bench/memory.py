"""How much memory a row takes at its peak, beyond what was there before it."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, Protocol

__all__ = ["CudaMeter", "HostMeter", "Meter"]

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Meter(Protocol):
    """Started before a row is built, read after its first steps."""

    def start(self) -> None:
        """Forget earlier peaks."""

    def read(self, own_bytes: int) -> int:
        """Return the peak since `start`, less what was in use then."""


class HostMeter:
    """Growth of the resident memory. Allocators and Python blur it by some MiB."""

    def __init__(self) -> None:
        self._before = 0

    def start(self) -> None:
        """Forget earlier peaks: memory that is free goes back to the system."""
        ctypes.CDLL(None).malloc_trim(0)
        CLEAR.write_text("5")  # the peak is the present from now on
        self._before = _status("VmRSS")

    def read(self, own_bytes: int) -> int:  # noqa: ARG002  # it is resident too
        """Return the growth."""
        return max(0, _status("VmHWM") - self._before)


class CudaMeter:
    """Torch's allocator, and what rows say of the library's own pools; not NCCL's buffers."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._before = 0

    def start(self) -> None:
        """Forget earlier peaks."""
        if self._torch is not None:
            self._torch.cuda.reset_peak_memory_stats()
            self._before = self._torch.cuda.memory_allocated()

    def read(self, own_bytes: int) -> int:
        """Return the growth."""
        if self._torch is None:
            return own_bytes
        return int(self._torch.cuda.max_memory_allocated()) - self._before + own_bytes


def _status(field: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    return 0
