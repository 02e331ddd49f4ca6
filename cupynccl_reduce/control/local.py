"""The side channel between threads of one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cupynccl_reduce.meeting import Meeting

__all__ = ["LocalControl"]


class LocalControl:
    """protocols.Control over a meeting of its own, apart from the collectives'."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self._rank = rank

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Collective, blocks the host: return every rank's payload, in rank order."""
        everyone: list[bytes] = []
        self._meeting.exchange(self._rank, payload, everyone.extend)
        return everyone

    def close(self) -> None:
        """Free ranks that would wait for this one for ever. Idempotent."""
        self._meeting.abort()

    def abort(self) -> None:
        """Free every rank that waits here. Idempotent."""
        self._meeting.abort()
