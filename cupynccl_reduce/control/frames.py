"""The messages of the channel, as bytes: fixed headers, strict reading. No sockets."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from cupynccl_reduce.errors import LayoutError
from cupynccl_reduce.peers import Peer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cupynccl_reduce.peers import Link

__all__ = [
    "MAX_GATHER_BYTES",
    "MAX_NOTICE_BYTES",
    "MAX_STATE_BYTES",
    "Frame",
    "Invitation",
    "Kind",
    "Row",
    "check_length",
]

MAX_STATE_BYTES = 256
MAX_NOTICE_BYTES = 64 << 10
MAX_GATHER_BYTES = 64 << 20
LINKS: tuple[Link, ...] = ("up", "silent", "lost", "left")

_HEADER = struct.Struct("=4sBIQQ")  # magic, kind, rank of origin, number, turn
_ROW = struct.Struct("=BdQH")  # link, age, turns, length of the state that follows
_LENGTH = struct.Struct("=I")
_INVITATION = struct.Struct("=4sH40s40s40s")
_MAGIC = b"CNR1"


class Kind(IntEnum):
    """What a message is."""

    BEAT = 1  # to rank 0: the newest state, and the newest turn whose payloads came
    TABLE = 2  # from rank 0: every rank's row
    GATHER = 3  # to rank 0: one rank's payload of a turn
    GATHERED = 4  # from rank 0: all payloads of a turn
    NOTICE = 5  # to rank 0, which passes it on under its origin's rank
    GOODBYE = 6  # to rank 0, with the last state; from rank 0 to all when it leaves itself
    ABORT = 7  # to rank 0, which passes it on: its origin comes to no all_gather any more


LIMITS = {
    Kind.BEAT: MAX_STATE_BYTES,
    Kind.TABLE: 1 << 30,
    Kind.GATHER: MAX_GATHER_BYTES,
    Kind.GATHERED: 1 << 40,
    Kind.NOTICE: MAX_NOTICE_BYTES,
    Kind.GOODBYE: MAX_STATE_BYTES,
    Kind.ABORT: MAX_STATE_BYTES,
}
_NAMES = {Kind.BEAT: "a state", Kind.NOTICE: "a notice", Kind.GATHER: "a payload of all_gather"}


def check_length(kind: Kind, body: bytes) -> None:
    """Raise LayoutError if a state (BEAT), notice or payload (GATHER) is too long, on any path."""
    if len(body) > LIMITS[kind]:
        msg = f"{_NAMES[kind]} has at most {LIMITS[kind]} bytes, not {len(body)}"
        raise LayoutError(msg)


@dataclass(frozen=True, slots=True)
class Row:
    """One rank in rank 0's table; `turns` counts the all_gathers that it has come to."""

    link: Link = "up"
    age_s: float = 0.0
    turns: int = 0
    state: bytes = b""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message. `number` grows with every message of a sender: an old one is a replay."""

    kind: Kind
    rank: int
    number: int
    turn: int = 0
    body: bytes = b""

    def encode(self) -> bytes:
        """Return the message as bytes."""
        return _HEADER.pack(_MAGIC, self.kind, self.rank, self.number, self.turn) + self.body

    @classmethod
    def decode(cls, data: bytes) -> Frame | None:
        """Return the message, or None if `data` is none."""
        if len(data) < _HEADER.size:
            return None
        magic, kind, rank, number, turn = _HEADER.unpack_from(data)
        if magic != _MAGIC or kind not in set(Kind):
            return None
        body = data[_HEADER.size :]
        if len(body) > LIMITS[Kind(kind)]:
            return None
        return cls(Kind(kind), rank, number, turn, body)


def encode_rows(rows: Sequence[Row]) -> bytes:
    """Return a table as bytes."""
    return b"".join(
        _ROW.pack(LINKS.index(row.link), row.age_s, row.turns, len(row.state)) + row.state
        for row in rows
    )


def decode_rows(body: bytes, world_size: int) -> list[Row] | None:
    """Return a table of `world_size` ranks, or None if `body` is none."""
    rows, offset = [], 0
    for _ in range(world_size):
        if offset + _ROW.size > len(body):
            return None
        link, age_s, turns, length = _ROW.unpack_from(body, offset)
        offset += _ROW.size
        state = body[offset : offset + length]
        offset += length
        if link >= len(LINKS) or not age_s >= 0 or length > MAX_STATE_BYTES:
            return None
        rows.append(Row(LINKS[link], age_s, turns, state))
    return rows if offset == len(body) else None


def encode_payloads(payloads: Sequence[bytes]) -> bytes:
    """Return the payloads of a turn as bytes."""
    return b"".join(_LENGTH.pack(len(payload)) + payload for payload in payloads)


def decode_payloads(body: bytes, world_size: int) -> list[bytes] | None:
    """Return `world_size` payloads, or None if `body` does not hold them."""
    payloads, offset = [], 0
    for _ in range(world_size):
        if offset + _LENGTH.size > len(body):
            return None
        (length,) = _LENGTH.unpack_from(body, offset)
        offset += _LENGTH.size
        payloads.append(body[offset : offset + length])
        offset += length
    return payloads if offset == len(body) else None


@dataclass(frozen=True, slots=True, repr=False)
class Invitation:
    """Where rank 0 listens, and the keys that let a rank in. A secret: no repr shows it."""

    host: str
    port: int
    server_key: bytes
    public_key: bytes
    secret_key: bytes

    def encode(self) -> bytes:
        """Return the invitation as bytes, for the other ranks only."""
        keys = self.server_key, self.public_key, self.secret_key
        return _INVITATION.pack(_MAGIC, self.port, *keys) + self.host.encode()

    @classmethod
    def decode(cls, data: bytes) -> Invitation | None:
        """Return the invitation, or None if `data` is none."""
        if len(data) <= _INVITATION.size or data[: len(_MAGIC)] != _MAGIC:
            return None
        _, port, *keys = _INVITATION.unpack_from(data)
        try:
            host = data[_INVITATION.size :].decode()
        except UnicodeDecodeError:
            return None
        return cls(host, port, *keys)


def peers_of(rows: Sequence[Row], later_s: float = 0.0) -> list[Peer]:
    """Return a table, `later_s` after it was made, as what a rank knows of the others."""
    return [Peer(r, row.state, row.age_s + later_s, row.link) for r, row in enumerate(rows)]
