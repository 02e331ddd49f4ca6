"""Ends a process in which no Python thread has run for too long, as one that holds the GIL.

Two POSIX timers, which a thread sets back as long as it runs. They need no GIL, no child process
and no signal: where they expire, the C library starts a thread of its own that calls a C function.
"""

from __future__ import annotations

import ctypes
from typing import Any

__all__ = ["STUCK", "Sentinel"]

STUCK = 75  # exit code of a process that the sentinel ended
TOLD_S = 0.5  # from the message to the end

_CLOCK_MONOTONIC = 1
_SIGEV_THREAD = 2


class _SigEvent(ctypes.Structure):
    """struct sigevent of Linux; timer_create(2) tells what the fields mean."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("rest", ctypes.c_byte * 32),
    )


class _TimerSpec(ctypes.Structure):
    """struct itimerspec."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("seconds", ctypes.c_long),
        ("nanoseconds", ctypes.c_long),
    )


class Sentinel:
    """Ends this process with code 75, `limit_s` after the last feed(); stop() ends that.

    It is not armed before the first feed(). `told` goes to stderr before the end. A forked child
    has no timers. Time in which the whole machine sleeps does not count; time in which the process
    is stopped does.

    Raises:
        OSError: the system gives no more timers.
    """

    def __init__(self, limit_s: float, told: str) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        # One argument is all that a timer hands over, so warnx takes the text as its format.
        self._text = ctypes.create_string_buffer(told.replace("%", "%%").encode())
        self._timers: list[tuple[Any, _TimerSpec]] = []
        for function, value, after_s in (
            (self._libc.warnx, ctypes.addressof(self._text), limit_s),
            (self._libc._exit, STUCK, limit_s + TOLD_S),  # noqa: SLF001  # its name in C
        ):
            self._timers.append((self._make(function, value), _spec(after_s)))

    def feed(self) -> None:
        """Begin to wait anew. Does not block."""
        for timer, spec in self._timers:
            self._libc.timer_settime(timer, 0, ctypes.byref(spec), None)

    def stop(self) -> None:
        """End nothing any more. Idempotent."""
        timers, self._timers = self._timers, []
        for timer, _ in reversed(timers):
            self._libc.timer_delete(timer)

    def _make(self, function: Any, value: int) -> Any:
        event = _SigEvent(
            value=value,
            notify=_SIGEV_THREAD,
            function=ctypes.cast(function, ctypes.c_void_p).value,
        )
        timer = ctypes.c_void_p()
        made = self._libc.timer_create(_CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer))
        if made != 0:
            self.stop()
            raise OSError(ctypes.get_errno(), "timer_create failed")
        return timer


def _spec(seconds: float) -> _TimerSpec:
    whole = int(seconds)
    return _TimerSpec(seconds=whole, nanoseconds=int((seconds - whole) * 1e9))
