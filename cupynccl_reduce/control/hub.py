"""The two kinds of end that a channel has, as plain state: what a message changes and sends.

No sockets, no threads: the caller holds a lock, and sends what is returned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cupynccl_reduce.peers import Link, Peer

from .frames import (
    MAX_NOTICE_BYTES,
    Frame,
    Kind,
    Row,
    decode_payloads,
    decode_rows,
    encode_payloads,
    encode_rows,
    peers_of,
)
from .pulse import Pulse, pace

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable

__all__ = ["Hub", "Leaf"]

SILENT_S = 2.0
GRACE_S = 0.5  # a connection that comes back within it was not lost

Messages = list[tuple[bytes, bytes]]  # (receiver's identity, or b"" for rank 0; message)


class _Known:
    """What is known of one rank."""

    def __init__(self, now: float, world_size: int) -> None:
        self.state = b""
        self.seen = now
        self.silent_s = SILENT_S * pace(world_size)
        self.number = -1  # of the last message
        self.turns = 0
        self.got = 0  # the newest turn whose payloads it has
        self.fd = -1
        self.dropped: float | None = None
        self.left = False

    def link(self, now: float) -> Link:
        if self.left:
            return "left"
        if self.dropped is not None and now - self.dropped > GRACE_S:
            return "lost"
        return "silent" if now - self.seen > self.silent_s else "up"


class Hub:
    """Rank 0: collects states and payloads, and tells everyone."""

    def __init__(self, world_size: int, clock: Callable[[], float]) -> None:
        self._world_size = world_size
        self._clock = clock
        self._ranks = [_Known(clock(), world_size) for _ in range(world_size)]
        self._identities = {b"r%d" % rank: rank for rank in range(1, world_size)}
        self._gathers: dict[int, dict[int, bytes]] = {}
        self._number = 0
        self._pulse = Pulse()
        self.state = b""
        self.aborted: int | None = None  # the first rank that did

    def peers(self) -> list[Peer]:
        """Return all ranks as last heard of."""
        return peers_of(self._rows())

    def turns(self) -> list[int]:
        """Return how many all_gathers each rank has come to."""
        return [known.turns for known in self._ranks]

    def dropped(self, fd: int) -> None:
        """Note that a connection closed."""
        for known in self._ranks[1:]:
            if known.fd == fd and not known.left:
                known.fd, known.dropped = -1, self._clock()

    def settled(self) -> bool:
        """Whether every rank that answers has the payloads of all turns that all came to."""
        now, given = self._clock(), min(known.turns for known in self._ranks)
        return all(known.link(now) != "up" or known.got >= given for known in self._ranks[1:])

    def beat(self) -> Messages:
        """Return the table, for every rank; or nothing, where that is neither new nor due."""
        now, rows = self._clock(), self._rows()
        news = [
            (row.link, row.turns, row.state, known.dropped is None)
            for row, known in zip(rows, self._ranks, strict=True)
        ]
        return self._table(rows) if self._pulse.due(news, now) else []

    def take(
        self,
        sender: bytes,
        frame: Frame,
        fd: int,
        notices: deque[tuple[int, bytes]],
        gathered: dict[int, list[bytes]],
    ) -> Messages:
        """Note one message; return what it makes rank 0 send. A stranger's changes nothing."""
        rank = self._identities.get(sender)
        if rank is None or frame.rank != rank:
            return []
        known = self._ranks[rank]
        replayed = frame.number <= known.number or known.left
        skips = frame.kind is Kind.GATHER and frame.turn != known.turns + 1
        if replayed or skips or frame.kind in (Kind.TABLE, Kind.GATHERED):
            return []
        known.number, known.seen, known.fd, known.dropped = frame.number, self._clock(), fd, None
        if frame.kind is Kind.BEAT:
            known.state, known.got = frame.body, frame.turn
        elif frame.kind is Kind.GATHER:
            return self._gather(rank, frame.turn, frame.body, gathered)
        elif frame.kind is Kind.NOTICE:
            notices.append((rank, frame.body))
            return self._to_all(Kind.NOTICE, frame.body, origin=rank)
        elif frame.kind is Kind.ABORT:
            if self.aborted is None:
                self.aborted = rank
                return self._to_all(Kind.ABORT, b"", origin=rank)
        else:
            known.left, known.state = True, frame.body
        return []

    def own(self, kind: Kind, turn: int, body: bytes, gathered: dict[int, list[bytes]]) -> Messages:
        """Return what rank 0's own message makes it send."""
        if kind is Kind.GATHER:
            return self._gather(0, turn, body, gathered)
        if kind is Kind.GOODBYE:
            self._ranks[0].left = True
            return [*self._table(self._rows()), *self._to_all(kind, body)]
        return self._to_all(kind, body)

    def _gather(
        self, rank: int, turn: int, body: bytes, gathered: dict[int, list[bytes]]
    ) -> Messages:
        self._ranks[rank].turns = turn
        payloads = self._gathers.setdefault(turn, {})
        payloads[rank] = body
        if len(payloads) < self._world_size:
            return []
        del self._gathers[turn]
        everyone = [payloads[rank] for rank in range(self._world_size)]
        gathered[turn] = everyone
        return self._to_all(Kind.GATHERED, encode_payloads(everyone), turn=turn)

    def _rows(self) -> list[Row]:
        now = self._clock()
        own = self._ranks[0]
        own.seen, own.state = now, self.state
        return [Row(k.link(now), now - k.seen, k.turns, k.state) for k in self._ranks]

    def _table(self, rows: list[Row]) -> Messages:
        return self._to_all(Kind.TABLE, encode_rows(rows))

    def _to_all(self, kind: Kind, body: bytes, *, origin: int = 0, turn: int = 0) -> Messages:
        self._number += 1
        data = Frame(kind, origin, self._number, turn, body).encode()
        return [
            (identity, data)
            for identity, rank in self._identities.items()
            if rank != origin and not self._ranks[rank].left
        ]


class Leaf:
    """Any other rank: knows of the others what rank 0's last table says."""

    def __init__(self, rank: int, world_size: int, clock: Callable[[], float]) -> None:
        self._rank = rank
        self._world_size = world_size
        self._clock = clock
        self._rows = [Row() for _ in range(world_size)]
        self._rank_0 = _Known(clock(), world_size)
        self._number = 0
        self._own_turns = 0
        self._got = 0
        self._pulse = Pulse()
        self.state = b""
        self.aborted: int | None = None  # the first rank that did, as far as is known here

    def peers(self) -> list[Peer]:
        """Return all ranks as last heard of; through a rank 0 that is gone, as they were then."""
        now = self._clock()
        peers = peers_of(self._rows, now - self._rank_0.seen)
        link = self._rank_0.link(now)
        peers[0] = Peer(0, self._rows[0].state, now - self._rank_0.seen, link)
        peers[self._rank] = Peer(self._rank, self.state)
        return peers

    def turns(self) -> list[int]:
        """Return how many all_gathers each rank had come to at the last table."""
        turns = [row.turns for row in self._rows]
        turns[self._rank] = self._own_turns
        return turns

    def dropped(self, fd: int) -> None:
        """Note that a connection to rank 0 closed, or did not come about."""
        known = self._rank_0
        if known.fd in (fd, -1) and known.dropped is None and not known.left:
            known.fd, known.dropped = -1, self._clock()

    def settled(self) -> bool:
        """Whether this rank may go: always, since rank 0 has what all_gather has returned."""
        return True

    def beat(self) -> Messages:
        """Return this rank's state, for rank 0; or nothing, where that is neither new nor due."""
        news = self.state, self._got, self._rank_0.dropped is None
        if not self._pulse.due(news, self._clock()):
            return []
        return self._message(Kind.BEAT, self.state, self._got)

    def take(
        self,
        sender: bytes,  # noqa: ARG002  # one connection, to rank 0, which the keys prove
        frame: Frame,
        fd: int,
        notices: deque[tuple[int, bytes]],
        gathered: dict[int, list[bytes]],
    ) -> Messages:
        """Note one message of rank 0; a replayed or malformed one changes nothing."""
        known = self._rank_0
        if frame.number <= known.number or frame.rank >= self._world_size or known.left:
            return []
        if frame.kind is Kind.TABLE:
            rows = decode_rows(frame.body, self._world_size)
            if rows is None:
                return []
            self._rows = rows
        elif frame.kind is Kind.GATHERED:
            payloads = decode_payloads(frame.body, self._world_size)
            if payloads is None or frame.turn != self._own_turns or frame.turn in gathered:
                return []
            gathered[frame.turn] = payloads
            self._got = frame.turn
        elif frame.kind is Kind.NOTICE:
            if len(frame.body) > MAX_NOTICE_BYTES:
                return []
            notices.append((frame.rank, frame.body))
        elif frame.kind is Kind.ABORT:
            self.aborted = frame.rank if self.aborted is None else self.aborted
        elif frame.kind is Kind.GOODBYE:
            known.left = True
        else:
            return []
        known.number, known.seen, known.fd, known.dropped = frame.number, self._clock(), fd, None
        # Rank 0 may be waiting to close until everybody has these.
        return self.beat() if frame.kind is Kind.GATHERED else []

    def own(
        self,
        kind: Kind,
        turn: int,
        body: bytes,
        gathered: dict[int, list[bytes]],  # noqa: ARG002  # rank 0 answers
    ) -> Messages:
        """Return what this rank's own message sends."""
        if kind is Kind.GATHER:
            self._own_turns = turn
        if kind is Kind.GOODBYE:
            body = self.state
        return self._message(kind, body, turn)

    def _message(self, kind: Kind, body: bytes, turn: int = 0) -> Messages:
        self._number += 1
        return [(b"", Frame(kind, self._rank, self._number, turn, body).encode())]
