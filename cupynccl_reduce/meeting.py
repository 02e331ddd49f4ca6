"""Where the threads of one process meet. Nothing about arrays."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from .errors import CommunicationError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Meeting"]


class Meeting:
    """Each rank lays something down, all look, all leave together."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._barrier = threading.Barrier(world_size)
        self._slots: list[Any] = [None] * world_size

    def exchange(self, rank: int, payload: Any, use: Callable[[list[Any]], None]) -> None:
        """Block until every rank is here; call `use` with all payloads; leave together.

        The second meeting is why a rank may reuse its payload's memory afterwards: nobody still
        reads it.
        """
        try:
            self._slots[rank] = payload
            self._barrier.wait()
            try:
                use(list(self._slots))
            finally:
                self._barrier.wait()
                self._slots[rank] = None
        except threading.BrokenBarrierError as error:
            msg = f"rank {rank}: another rank of this process failed or left the world"
            raise CommunicationError(msg) from error

    def abort(self) -> None:
        """Free every rank that waits here, now and later, with an error. Idempotent."""
        self._barrier.abort()
