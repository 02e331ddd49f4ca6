"""One thread of a simulated rank, and whether it may go on. It hands no turn around by itself."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from .device import Point

__all__ = ["Host"]


class Host:
    """One thread of a rank."""

    def __init__(  # made in one place
        self, rank: int, number: int, name: str, lane: int, siblings: list[Host]
    ) -> None:
        self.rank = rank
        self.number = number  # among the hosts of all ranks
        self.name = name
        self.lane = lane
        self.siblings = siblings  # all threads of this rank, this one too
        siblings.append(self)
        self.turn = threading.Lock()  # held until this thread may go on
        self.turn.acquire()
        self.until: Callable[[], bool] | None = None
        self.point: Point | None = None  # where `until` is that this point has passed
        self.waits_for = ""
        self.inside = False  # gave up its turn within a call of the library
        self.returned = False
        self.done = False

    def ready(self) -> bool:
        """Whether this thread may go on."""
        return self.free() and (self.until is None or self.until())

    def free(self) -> bool:
        """Whether nothing but `until` keeps this thread from going on.

        The library's calls hold its locks. While another thread of this rank is within one, this
        thread could ask for the same lock, and would then keep the turn for ever.
        """
        return not self.done and (
            len(self.siblings) == 1 or not any(h.inside for h in self.siblings if h is not self)
        )
