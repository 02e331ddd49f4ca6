"""What one rank knows of another, whatever channel told it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Container

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
    """The part of a side channel that tells how the other ranks are. All but regroup is quick."""

    def publish(self, state: bytes) -> None:
        """Set what the others see of this rank: at most 256 bytes, sent with the next beat."""

    def peers(self) -> list[Peer]:
        """Return all ranks as last heard of, in rank order; this one included."""

    def tell(self, notice: bytes) -> None:
        """Send a notice of at most 64 KiB to every other rank at once."""

    def notices(self) -> list[tuple[int, bytes]]:
        """Return the notices that have come since the last call, each with its rank."""

    def regroup(self, blamed: Container[int], limit_s: float) -> tuple[list[int], Self]:
        """Return the ranks that survived, in order, and a side channel between them.

        Collective among them, blocks the host: until all ranks that answer have come, for
        `limit_s` at most. `blamed` are those that the fault is known to have taken.

        Raises:
            CommunicationError: the survivors went on without this rank, or some are gone since.
        """
