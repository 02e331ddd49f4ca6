"""What a simulation can find, and how it is told. No scheduling here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cupynccl_reduce.errors import DeadlockError, DeclarationError, RaceError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "DeadlockError",
    "DeclarationError",
    "RaceError",
    "tell_deadlock",
]


def tell_deadlock(waiting: Iterable[str]) -> str:
    """Return the text of a deadlock: who waits for what."""
    return "\n  ".join(["deadlock: nothing can run", *waiting])
