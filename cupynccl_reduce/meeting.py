"""Where the threads of one process meet. Nothing about arrays."""

from __future__ import annotations

import threading
import time
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
        self._came: set[int] = set()  # to survivors()
        self._survivors: list[int] = []
        self._successor: Meeting | None = None

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

    def survivors(self, rank: int, limit_s: float) -> list[int]:
        """Block until every rank is here or gone, for `limit_s` at most; return who is here.

        Raises:
            CommunicationError: the others went on without this rank.
        """

        def complete() -> bool:
            gone = {r for r, (_, _, ended) in enumerate(self.shown) if ended}
            return bool(self._survivors) or len(self._came | gone) == self.world_size

        ends = time.monotonic() + limit_s
        with self._condition:
            self._came.add(rank)
            self._condition.notify_all()
            while not complete() and time.monotonic() < ends:
                self._condition.wait(0.05)  # a rank that leaves wakes nobody
            self._survivors = self._survivors or sorted(self._came)
            if rank not in self._survivors:
                msg = f"rank {rank}: the survivors went on without this rank"
                raise CommunicationError(msg)
            return list(self._survivors)

    def successor(self, world_size: int) -> Meeting:
        """Return the meeting of the survivors, the same for all of them."""
        with self._condition:
            if self._successor is None:
                self._successor = Meeting(world_size)
            return self._successor

    def end(self) -> None:
        """Abort this meeting and all that succeed it. Idempotent."""
        self.abort()
        if self._successor is not None:
            self._successor.end()

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
