"""Small ways to break the engine's ordering: by which method asks for a wait or a record."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from cupynccl_reduce.testing.device import SimEvent, SimStream

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

__all__ = [
    "around",
    "asked_by",
    "redirect_records",
    "redirect_waits",
    "skip_records",
    "skip_waits",
    "stream_named",
]

CALLER, COPY, COMMUNICATION = "caller's stream", "copy stream", "communication stream"


def asked_by(method: str) -> bool:
    """Whether the innermost method of the engine in the present call is `method`."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("cupynccl_reduce.") and ".testing." not in module:
            return frame.f_code.co_name == method
        frame = frame.f_back
    return False


def stream_named(name: str, like: SimStream) -> SimStream:
    """Return the stream of the same rank with this name."""
    wanted = f"{name} of rank {like.rank}"
    return next(stream for stream in like.scheduler.streams if stream.name == wanted)


def around(patch: pytest.MonkeyPatch, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a method by `wrapper(original, self, ...)`."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))


def skip_waits(patch: pytest.MonkeyPatch, method: str, *, on: str = "") -> None:
    """Leave out every wait that `method` asks for (on streams whose name starts so)."""

    def wait_event(original: Any, stream: SimStream, event: SimEvent) -> None:
        if not (asked_by(method) and stream.name.startswith(on)):
            original(stream, event)

    around(patch, SimStream, "wait_event", wait_event)


def redirect_waits(patch: pytest.MonkeyPatch, method: str, to: str) -> None:
    """Put every wait that `method` asks for on another stream."""

    def wait_event(original: Any, stream: SimStream, event: SimEvent) -> None:
        original(stream_named(to, stream) if asked_by(method) else stream, event)

    around(patch, SimStream, "wait_event", wait_event)


def skip_records(patch: pytest.MonkeyPatch, method: str, *, on: str) -> None:
    """Leave out every record that `method` asks for on a stream."""

    def record(original: Any, event: SimEvent, stream: SimStream) -> None:
        if not (asked_by(method) and stream.name.startswith(on)):
            original(event, stream)

    around(patch, SimEvent, "record", record)


def redirect_records(patch: pytest.MonkeyPatch, method: str, *, on: str, to: str) -> None:
    """Record on another stream what `method` records on a stream."""

    def record(original: Any, event: SimEvent, stream: SimStream) -> None:
        if asked_by(method) and stream.name.startswith(on):
            stream = stream_named(to, stream)
        original(event, stream)

    around(patch, SimEvent, "record", record)
