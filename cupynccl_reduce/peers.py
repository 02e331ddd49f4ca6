"""What one rank knows of another, whatever channel told it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

__all__ = ["Beats", "Link", "Peer"]

Link = Literal["up", "silent", "lost", "left"]


@dataclass(frozen=True, slots=True)
class Peer:
    """One rank as last heard of.

    `link` is "left" after a goodbye, "lost" when its connection closed without one (it died), and
    "silent" when the connection stands but nothing comes (it is stopped, or something holds its
    GIL).
    """

    rank: int
    state: bytes = b""  # the newest that it published
    age_s: float = 0.0  # seconds since then
    link: Link = "up"


class Beats(Protocol):
    """The part of a side channel that tells how the other ranks are. Nothing here blocks."""

    def publish(self, state: bytes) -> None:
        """Set what the others see of this rank: at most 256 bytes, sent with the next beat."""

    def peers(self) -> list[Peer]:
        """Return all ranks as last heard of, in rank order; this one included."""

    def tell(self, notice: bytes) -> None:
        """Send a notice of at most 64 KiB to every other rank at once."""

    def notices(self) -> list[tuple[int, bytes]]:
        """Return the notices that have come since the last call, each with its rank."""
