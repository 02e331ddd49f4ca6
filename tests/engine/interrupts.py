"""Ctrl-C at one instant of the engine, and a communicator that sees what it leaves half way."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import cupynccl_reduce

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["Interrupt", "Watched"]

ENGINE = str(Path(cupynccl_reduce.__file__).parent) + os.sep


class Interrupt:
    """Raise KeyboardInterrupt on this thread at the `at`-th instant from now on.

    An instant is where CPython itself looks for a signal: at the start of a function and after a
    call of a C function, in the engine and in the contexts that it uses; and a lock that is waited
    for. Not inside `threading`: a Condition is not safe against Ctrl-C (python/cpython#74174).
    """

    def __init__(self, at: float) -> None:
        self.at = at
        self.seen = 0
        self.where = ""  # nothing was interrupted, yet
        self.instants: dict[tuple[Any, ...], list[int]] = {}  # by what they are in

    def __enter__(self) -> Self:
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        engine = code.co_filename.startswith(ENGINE) or code.co_filename == contextlib.__file__
        waits = event == "c_call" and getattr(arg, "__name__", "") == "acquire"
        if waits:
            here = engine or (code.co_filename == threading.__file__ and code.co_name == "wait")
        elif event == "call":  # a generator that goes on would not see what is raised here
            here = engine and not code.co_flags & inspect.CO_GENERATOR
        else:
            here = engine and event == "c_return"
        if not here:
            return
        self.seen += 1
        caller = frame.f_back.f_lineno if frame.f_back is not None else 0
        key = event, code.co_filename, frame.f_lineno, caller
        self.instants.setdefault(key, []).append(self.seen)
        if self.seen == self.at:
            self.where = f"{event} at {code.co_filename}:{frame.f_lineno} ({code.co_qualname})"
            raise KeyboardInterrupt


class Watched:
    """A communicator that counts what is called, and notes a group that was left half way."""

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator
        self.direct_bytes = 256 if communicator.world_size > 1 else 0
        self.grouped = 0  # groups that were left well
        self.in_group = self.partial = False
        self.reduced = self.gathered = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._communicator, name)

    def group(self) -> Self:
        return self

    def __enter__(self) -> None:
        assert not self.in_group
        self.in_group = True

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.in_group = False
        if error is None:
            self.grouped += 1
        else:
            self.partial = True

    def reduce_scatter(self, *args: Any) -> None:
        self._communicator.reduce_scatter(*args)
        self.reduced += 1

    def all_gather(self, *args: Any) -> None:
        self._communicator.all_gather(*args)
        self.gathered += 1
