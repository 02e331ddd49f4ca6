"""Where the engine, and the code that called it, asked for something. Told only when needed."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cupynccl_reduce.detector import Operation

if TYPE_CHECKING:
    from types import CodeType, FrameType

__all__ = ["Site", "Wait", "call_site", "in_library", "operation"]

PACKAGE = __name__.partition(".")[0]
TESTING = f"{PACKAGE}.testing"
NO_CALLER = ("contextlib", "threading", "weakref")  # they call the engine for somebody else
_layers: dict[CodeType, int] = {}  # code -> 0 simulator, 1 engine, 2 in between, 3 caller


class Site:
    """Two places in source files: of the engine, and of its caller."""

    __slots__ = ("_caller", "_engine")

    def __init__(
        self, engine: tuple[CodeType, int] | None, caller: tuple[CodeType, int] | None
    ) -> None:
        self._engine = engine
        self._caller = caller

    @property
    def in_engine(self) -> bool:
        """Whether the engine asked for it, not its caller."""
        return self._engine is not None

    @property
    def engine(self) -> str:
        """The place in the engine; the caller's where the engine takes no part."""
        place = self._engine or self._caller
        return f"{_told(place)} {place[0].co_name}" if place else "?"

    def __str__(self) -> str:
        if self._engine is None:
            return _told(self._caller) if self._caller else "?"
        return self.engine + (f" (called from {_told(self._caller)})" if self._caller else "")

    __repr__ = __str__


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait_event: where it was asked for, and where its event was recorded.

    `recorded` is None where the event had not been recorded by then: that waits for nothing, as in
    CUDA. It may be meant (the first use of a buffer), or a record that comes too late.
    `known`: the stream knew that point already, so that leaving this wait out changes nothing.
    """

    site: Site
    recorded: Site | None
    known: bool


def call_site() -> Site:
    """Return where the engine, and the code that called it, asked for something."""
    frame = sys._getframe(1)  # noqa: SLF001  # inspect.stack() reads source files
    engine = None
    while frame is not None:
        code = frame.f_code
        layer = _layers.get(code)
        if layer is None:
            layer = _learn(frame)
        if layer == 3:  # noqa: PLR2004  # the caller
            return Site(engine, (code, frame.f_lineno))
        if layer == 1 and engine is None:
            engine = code, frame.f_lineno
        if frame.f_back is None:
            break
        frame = frame.f_back
    return Site(engine, None)


def in_library() -> bool:
    """Whether this thread is within a call of the engine."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  # as above
    while frame is not None:
        layer = _layers.get(frame.f_code)
        if (_learn(frame) if layer is None else layer) == 1:
            return True
        frame = frame.f_back
    return False


def operation(kind: str, label: str) -> Operation:
    """Return a new operation that is asked for here."""
    return Operation(kind, label, call_site())


def _learn(frame: FrameType) -> int:
    layer = _layers[frame.f_code] = _layer(frame.f_globals.get("__name__", ""))
    return layer


def _layer(module: str) -> int:
    if module == TESTING or module.startswith(f"{TESTING}."):
        return 0
    if module == PACKAGE or module.startswith(f"{PACKAGE}."):
        return 1
    return 2 if module in NO_CALLER else 3


def _told(place: tuple[CodeType, int]) -> str:
    return f"{place[0].co_filename.rpartition('/')[2]}:{place[1]}"
