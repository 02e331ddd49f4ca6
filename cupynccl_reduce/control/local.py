"""The side channel between threads of one process."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from cupynccl_reduce.peers import Peer

from .frames import Kind, check_length

if TYPE_CHECKING:
    from collections.abc import Container

    from cupynccl_reduce.meeting import Meeting

__all__ = ["LocalControl"]

SILENT_S = 2.0


class LocalControl:
    """protocols.Control and peers.Beats over a meeting of its own, apart from the collectives'."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self._rank = rank

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Collective, blocks the host: return every rank's payload, in rank order.

        Raises:
            CommunicationError: a rank left, or aborted.
            LayoutError: over 64 MiB.
        """
        check_length(Kind.GATHER, payload)
        everyone: list[bytes] = []
        self._meeting.exchange(self._rank, payload, everyone.extend)
        return everyone

    def publish(self, state: bytes) -> None:
        """Set what the others see of this rank: at most 256 bytes."""
        check_length(Kind.BEAT, state)
        gone = self._meeting.shown[self._rank][2]
        self._meeting.shown[self._rank] = (state, time.monotonic(), gone)

    def peers(self) -> list[Peer]:
        """Return all ranks as last heard of. A thread that ended without close() is "silent"."""
        now = time.monotonic()
        peers = []
        for rank, (state, when, gone) in enumerate(self._meeting.shown):
            age_s = now - when if when else 0.0
            peers.append(
                Peer(rank, state, age_s, "left" if gone else "silent" if age_s > SILENT_S else "up")
            )
        return peers

    def tell(self, notice: bytes) -> None:
        """Send a notice of at most 64 KiB to every other rank."""
        check_length(Kind.NOTICE, notice)
        for rank, inbox in enumerate(self._meeting.inboxes):
            if rank != self._rank:
                inbox.append((self._rank, notice))

    def notices(self) -> list[tuple[int, bytes]]:
        """Return the notices that have come since the last call."""
        inbox = self._meeting.inboxes[self._rank]
        return [inbox.popleft() for _ in range(len(inbox))]

    def regroup(self, blamed: Container[int], limit_s: float) -> tuple[list[int], LocalControl]:  # noqa: ARG002
        """Return the ranks that survived, and a side channel between them; see peers.Beats."""
        ranks = self._meeting.survivors(self._rank, limit_s)
        successor = self._meeting.successor(len(ranks))
        return ranks, LocalControl(successor, ranks.index(self._rank))

    def close(self) -> None:
        """Free ranks that would wait for this one for ever. Idempotent."""
        state, when, _ = self._meeting.shown[self._rank]
        self._meeting.shown[self._rank] = (state, when, True)
        self._meeting.abort()

    def abort(self) -> None:
        """Free every rank that waits here. Idempotent."""
        self._meeting.abort()
