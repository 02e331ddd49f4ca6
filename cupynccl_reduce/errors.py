"""Every error of the package. Bad values and wrong order are told apart; all are a ReduceError."""

from __future__ import annotations

from typing import Any, Literal

__all__ = [
    "CheckpointError",
    "CommunicationError",
    "DeadlockError",
    "DeclarationError",
    "GradientError",
    "GradientTypeError",
    "LayoutError",
    "MismatchError",
    "ProtocolError",
    "RaceError",
    "Reason",
    "ReduceError",
    "check_integer",
]


Reason = Literal[
    "died",  # its connection closed without a goodbye
    "stopped",  # nothing comes from it: stopped, or its GIL is held
    "left",  # it closed its world while others still wait for it
    "did not call",  # it has not launched what others wait for
    "did not start",  # it has launched that, and its stream has not got there
    "raised",  # an exception broke its world
    "mismatch",  # it launches something else
    "asynchronous error",  # the transport reported one
    "fabric",  # everyone has launched it, and it does not end
]


class ReduceError(Exception):
    """The root of all errors that this package raises on purpose."""


class LayoutError(ReduceError, ValueError):
    """A parameter list, bucket size, environment or option that cannot work."""


class GradientError(ReduceError, ValueError):
    """A gradient whose name, shape, dtype, device or values' layout is not the registered one."""


class GradientTypeError(GradientError, TypeError):
    """A gradient that is not an array this package can read (no DLPack, sparse, complex)."""


class ProtocolError(ReduceError, RuntimeError):
    """A call at the wrong time: outside backward, twice, or after close."""


class MismatchError(ReduceError, RuntimeError):
    """Ranks that disagree. Raised on every rank, with each differing value."""


class CommunicationError(ReduceError, RuntimeError):
    """A collective failed, or the world was broken before.

    `__cause__` is the world's first fault, or what the transport raised because of it.
    `report` (a report.Report) holds what the watchdog found, if it did: reason, ranks to blame,
    the launch that waits, what every rank has done, and the last launches of all. `ranks` are those
    to blame, where they are known.
    """

    report: Any = None
    ranks: tuple[int, ...] = ()


class CheckpointError(ReduceError, RuntimeError):
    """A checkpoint's file that cannot be written, or is missing, cut off, damaged or another's."""


class RaceError(ReduceError, RuntimeError):
    """Two accesses of the same bytes, one of them a write, that nothing orders (testing)."""


class DeadlockError(ReduceError, RuntimeError):
    """Nothing can run any more, and not everything is done (testing)."""


class DeclarationError(ReduceError, RuntimeError):
    """An operation that reads or writes bytes which it does not declare (testing)."""


def check_integer(name: str, value: object, least: int | None = None) -> None:
    """Raise LayoutError unless an argument is an integer, no bool, and at least `least`."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or (least is not None and value < least):  # type: ignore[operator]  # whole
        at_least = "" if least is None else f" >= {least}"
        msg = f"{name} must be an integer{at_least}, not {value!r}"
        raise LayoutError(msg)
