"""What a simulation can find, and how it is told. No scheduling here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cupynccl_reduce.errors import ReduceError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cupynccl_reduce.detector import Conflict, Detector, Operation

__all__ = [
    "DeadlockError",
    "DeclarationError",
    "RaceError",
    "tell_deadlock",
    "tell_operation",
    "tell_race",
]


class RaceError(ReduceError, RuntimeError):
    """Two accesses of the same bytes, one of them a write, that nothing orders."""


class DeadlockError(ReduceError, RuntimeError):
    """Nothing can run any more, and not everything is done."""


class DeclarationError(ReduceError, RuntimeError):
    """An operation that reads or writes bytes which it does not declare."""


def tell_operation(operation: Operation, lane: str) -> str:
    """Return one line about an operation: what, on which stream, asked for where."""
    return f"{operation.kind} {operation.label} on {lane}, at {operation.site}"


def tell_race(conflict: Conflict, detector: Detector) -> str:
    """Return the text of a race: both operations, both call sites and the bytes."""
    lines = [f"race on bytes {conflict.start} to {conflict.stop} of {conflict.block.label}"]
    for when, operation, writes in (
        ("earlier", conflict.earlier, conflict.earlier_writes),
        ("later  ", conflict.later, conflict.later_writes),
    ):
        told = tell_operation(operation, detector.lanes[operation.lane])
        lines.append(f"  {when} {'write' if writes else 'read '}: {told}")
    earlier, later = (
        detector.lanes[operation.lane] for operation in (conflict.earlier, conflict.later)
    )
    lines.append(f"  {later} never waited for that point of {earlier}")
    return "\n".join(lines)


def tell_deadlock(waiting: Iterable[str]) -> str:
    """Return the text of a deadlock: who waits for what."""
    return "\n  ".join(["deadlock: nothing can run", *waiting])
