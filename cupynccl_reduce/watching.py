"""Watch a world, act on what its watchdog finds, leave the process safely. No verdicts here."""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Literal, get_args

from .errors import CommunicationError, LayoutError
from .flight import Flight
from .sentinel import STUCK, Sentinel
from .watchdog import Watchdog

if TYPE_CHECKING:
    from .membership import World
    from .peers import Beats
    from .report import Report

__all__ = ["ABORTED", "Check", "check_watch", "leave_safely", "watch"]

Check = Literal["heartbeat", "sync", "off"]
ABORTED = 74  # exit code of a process whose world broke
ABORT_S = 10.0
PATIENCE = 10  # times the timeout, until a process that holds its GIL is ended
# poll() counts milliseconds in 32 bits: a wait of over 24 days would wrap, and end at any time.
LONGEST_S = 7 * 24 * 3600

_joined: list[World] = []  # under a launcher: all that have not ended well, and the last


def check_watch(timeout_s: float, check: Check) -> None:
    """Raise LayoutError unless both can be what `connect` takes."""
    if check not in get_args(Check):
        msg = f"check must be one of {', '.join(map(repr, get_args(Check)))}, not {check!r}"
        raise LayoutError(msg)
    number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if not number or not 0 < timeout_s <= LONGEST_S:
        most = f"at most a week ({LONGEST_S:,})"
        msg = f"timeout_s must be a number of seconds > 0, {most}, not {timeout_s!r:.80}"
        raise LayoutError(msg)


def watch(world: World, beats: Beats, timeout_s: float, *, alone: bool = True) -> None:
    """Start the watchdog of a world: from now on every fault is a named error on all ranks.

    `alone` in its process, a rank whose GIL is held for ten timeouts ends it with code 75: the
    others have given it up by then, and the launcher would wait for it.
    """
    status = world.status
    status.flight = Flight(world.runtime.watched_event)
    status.watchdog = Watchdog(
        world.rank,
        status.flight,
        beats,
        timeout_s=timeout_s,
        make_error=_make_error,
        on_fault=lambda error: _abort(world, error),
        check_async=world.communicator.check,
        sentinel=_sentinel(world.rank, PATIENCE * timeout_s) if alone else None,
    )
    status.watchdog.start()


def leave_safely(world: World) -> None:
    """At interpreter exit, do not wait for the peers of a world that broke or was not closed.

    Where a world broke and a later one ended well, its ranks are all there: nothing is special. Not
    so where its survivors went on without the others.
    """
    if not _joined:
        atexit.register(_leave, os.getpid())
    ended_well = [one for one in _joined if one.status.closed and one.status.fault is None]
    _joined[:] = [one for one in _joined if one not in ended_well]
    _joined.append(world)


def _sentinel(rank: int, limit_s: float) -> Sentinel | None:
    told = f"cupynccl_reduce: rank {rank} let no Python thread run for {limit_s:g} s (something "
    told += f"holds its GIL, or it was stopped); the process ends with exit code {STUCK}"
    try:
        return Sentinel(limit_s, told)
    except (OSError, AttributeError):  # no more timers, or none at all: the rest works without
        return None


def _make_error(report: Report) -> CommunicationError:
    """Return the error that later calls raise; the file it names holds every rank's launches."""
    told = report.text
    with suppress(OSError):
        handle, path = tempfile.mkstemp(f"-rank{report.rank}.json", "cupynccl_reduce-")
        os.close(handle)
        report.write(path)
        told = f"{told}\n  The last launches of all ranks are in {path}"
    error = CommunicationError(told)
    error.report, error.ranks = report, report.ranks
    return error


def _abort(world: World, error: CommunicationError) -> None:
    """Break the world from the watchdog's thread; end the process if its transport does not let go.

    (A communicator inside a live CUDA graph blocks its own abort for ever.)
    """
    aborting = threading.Thread(target=world.fail, args=(error,), daemon=True)
    aborting.start()
    aborting.join(ABORT_S)
    if aborting.is_alive():
        _end(f"{error}\n  The communicator did not abort within {ABORT_S:g} s.")


def _end(told: str, code: int = ABORTED) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    if told:
        with suppress(Exception):
            os.write(2, f"cupynccl_reduce: {told}\n".encode())
    os._exit(code)


def _leave(process: int) -> None:
    """MPI_Finalize waits for every rank, so that one which broke its world must not get there."""
    if os.getpid() != process:
        return  # a forked child: nothing here is its own
    last = _joined[-1]
    left = [world for world in _joined if world.status.fault is None and not world.status.closed]
    for world in left:
        told = f"rank {world.rank} ends without world.close(): its peers see it leave"
        with suppress(Exception):
            os.write(2, f"cupynccl_reduce: {told}\n".encode())
        closing = threading.Thread(target=_close, args=(world,), daemon=True)
        closing.start()
        closing.join(ABORT_S / 2)
    if last.status.fault is not None:
        _end(f"rank {last.rank} ends with a broken world; exit code {ABORTED}")
    if any(world.status.shrunk for world in _joined):
        unhandled = getattr(sys, "last_value", None) is not None
        _end("", code=int(unhandled))


def _close(world: World) -> None:
    with suppress(Exception):
        if world.status.watchdog is not None:
            unhandled = getattr(sys, "last_value", None)
            if unhandled is not None:
                world.status.watchdog.raised(unhandled)
            world.status.watchdog.stop()
        world.communicator.abort()
        world.control.close()
