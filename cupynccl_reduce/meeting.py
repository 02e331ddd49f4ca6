"""Where the threads of one process meet. Nothing about arrays."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from .errors import CommunicationError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Meeting"]


class Meeting:
    """Each rank lays something down, all look, all leave together."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._slots: list[Any] = [None] * world_size
        self._condition = threading.Condition()
        self._present = 0
        self._completed = 0  # how many times all have met
        self._aborted = False
        # What ranks tell each other without meeting: (state, when, whether gone), and notices.
        self.shown: list[tuple[bytes, float, bool]] = [(b"", 0.0, False)] * world_size
        self.inboxes: list[deque[tuple[int, bytes]]] = [deque() for _ in range(world_size)]

    def exchange(self, rank: int, payload: Any, use: Callable[[list[Any]], None]) -> None:
        """Block until every rank is here; call `use` with all payloads; leave together.

        The second meeting is why a rank may reuse its payload's memory afterwards: nobody still
        reads it.
        """
        self._slots[rank] = payload
        self._meet(rank)
        try:
            use(list(self._slots))
        except BaseException:
            with suppress(CommunicationError):  # what `use` raised is the cause
                self._meet(rank)
            raise
        self._meet(rank)
        self._slots[rank] = None

    def abort(self) -> None:
        """Free every rank that waits here, now and later, with an error. Idempotent."""
        with self._condition:
            self._aborted = True
            self._condition.notify_all()

    def _meet(self, rank: int) -> None:
        with self._condition:
            turn = self._completed
            self._present += 1
            if self._present == self.world_size and not self._aborted:
                self._present = 0
                self._completed += 1
                self._condition.notify_all()
            self._condition.wait_for(lambda: self._completed > turn or self._aborted)
            # All have met: whoever aborts afterwards does not undo that.
            if self._completed == turn:
                msg = f"rank {rank}: another rank of this process failed or left the world"
                raise CommunicationError(msg)
