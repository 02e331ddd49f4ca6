"""Points in time on the host and in its streams. CUDA's are in cuda.py."""

from __future__ import annotations

import time
from functools import partial
from typing import Any, Protocol

__all__ = ["Clock", "HostClock"]


class Clock(Protocol):
    """Marks points in time, to be read when all streams are done."""

    def start(self) -> None:
        """Make now zero. Blocks the host until all streams are done."""

    def mark(self, stream: Any) -> Any:
        """Queue a mark on `stream`."""

    def now(self) -> Any:
        """Return a mark of the host's own time."""

    def read_ms(self, mark: Any) -> float:
        """Return when `mark` was passed."""


class HostClock:
    """Clock of the host runtime: a stream's thread notes the time when it gets there."""

    def __init__(self) -> None:
        self._zero = 0.0

    def start(self) -> None:
        """Make now zero."""
        self._zero = time.perf_counter()

    def mark(self, stream: Any) -> list[float]:
        """Queue a mark on `stream`; the caller's own stream passes it at once."""
        passed: list[float] = []
        stream.submit(partial(self._note, passed))
        return passed

    def now(self) -> list[float]:
        """Return a mark of now."""
        return [time.perf_counter()]

    def read_ms(self, mark: list[float]) -> float:
        """Return when `mark` was passed."""
        return (mark[0] - self._zero) * 1e3

    def _note(self, passed: list[float]) -> None:
        passed.append(time.perf_counter())
