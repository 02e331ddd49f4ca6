"""How often a channel beats, and what its seconds are."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BEAT_S", "Clock", "Pulse", "pace"]

BEAT_S = 0.2  # what is new is sent that often
QUIET_S = 0.5  # what is not, every so often


def pace(world_size: int) -> float:
    """Return how many times slower than usual a world beats: a table goes to every rank."""
    return max(1.0, world_size / 64)


class Clock:
    """Seconds, but for those in which this process stood still: they make nobody else silent."""

    def __init__(self, world_size: int, now: Callable[[], float] = time.monotonic) -> None:
        self._most_s = 2 * BEAT_S * pace(world_size)  # from one turn to the next
        self._now = now
        self._turned = now()
        self._seconds = 0.0

    def turn(self) -> None:
        """Note that the channel's thread runs; it does so before it reads what has come."""
        self._seconds, self._turned = self(), self._now()

    def __call__(self) -> float:
        """Return the time, which stops soon after the channel's thread does."""
        return self._seconds + min(self._now() - self._turned, self._most_s)


class Pulse:
    """Says when a beat is due: at once for what is new, else every QUIET_S."""

    def __init__(self) -> None:
        self._last: tuple[object, float] | None = None

    def due(self, news: object, now: float) -> bool:
        """Return whether to send `news` at `now`: if so, this was the last time."""
        if self._last is not None and self._last[0] == news and now - self._last[1] < QUIET_S:
            return False
        self._last = news, now
        return True
