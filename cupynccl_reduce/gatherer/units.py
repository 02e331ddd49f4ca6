"""What is gathered together, and in which order it was used. No streams, no memory here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cupynccl_reduce.gather import Step

__all__ = ["Order", "Unit"]


@dataclass(slots=True, eq=False)
class Unit:
    """Parameters of one bucket that are gathered together."""

    index: int
    names: tuple[str, ...]
    steps: tuple[Step, ...]
    persistent: bool
    ready: Any  # event: all of it is there
    arrays: dict[str, Any] = field(default_factory=dict)  # while it is gathered
    users: int = 0
    prefetched: bool = False  # and not acquired since


class Order:
    """Remembers which unit was used after which two, and so what is likely to come next.

    Two, because a backward uses units in the opposite order of its forward.
    """

    def __init__(self) -> None:
        self._last: tuple[Unit | None, Unit | None] = (None, None)
        self._next: dict[tuple[Unit | None, Unit | None], Unit] = {}

    def note(self, unit: Unit) -> None:
        """Note that a unit is used now."""
        before, last = self._last
        if unit is not last and not unit.persistent:
            self._next[before, last] = unit
            self._last = last, unit

    def expect(self, most: int) -> list[Unit]:
        """Return the units that are likely to be used next, `most` of them at most."""
        before, last = self._last
        coming: list[Unit] = []
        while len(coming) < most and (unit := self._next.get((before, last))) is not None:
            coming.append(unit)
            before, last = last, unit
        return coming
