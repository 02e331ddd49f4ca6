"""Streams and events on the host: a thread that serves a queue. No arrays."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

from cupynccl_reduce.errors import CommunicationError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CallerStream", "HostEvent", "HostStream"]


class _Marker:
    """One record of an event: passed or not, and the failure of the stream that passed it."""

    __slots__ = ("error", "passed")

    def __init__(self) -> None:
        self.passed = threading.Event()
        self.error: BaseException | None = None

    def wait(self) -> None:
        self.passed.wait()
        if self.error is not None:
            msg = f"work queued before this point failed: {self.error}"
            raise CommunicationError(msg) from self.error


class HostStream:
    """An in-order queue of host work, served by one daemon thread.

    Once a piece of work raises, later work is skipped and later events carry the failure.
    """

    def __init__(self, name: str = "stream") -> None:
        self._name = name
        self._error: BaseException | None = None
        self._closed = False
        self._lock = threading.Lock()  # nothing is queued behind the end
        self._work: queue.SimpleQueue[Callable[[], None] | _Marker | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        """Queue `work`; returns at once."""
        with self._lock:
            if self._closed:
                msg = f"{self._name} is closed"
                raise CommunicationError(msg)
            self._work.put(work)

    def mark(self, marker: _Marker) -> None:
        """Queue a marker, which passes even after a failure: nobody may wait for ever."""
        with self._lock:
            if not self._closed:
                self._work.put(marker)
                return
        self._thread.join()
        marker.error = self._error
        marker.passed.set()

    def wait_event(self, event: HostEvent) -> None:
        """Hold back later work until `event`'s present record has passed."""
        if event.marker is not None:
            self.submit(event.marker.wait)

    def synchronize(self) -> None:
        """Block the host until everything queued so far is done; raise what failed."""
        event = HostEvent()
        event.record(self)
        event.synchronize()

    def close(self) -> None:
        """Let queued work finish, then end the thread. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._work.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            if isinstance(work, _Marker):
                work.error = self._error
                work.passed.set()
            elif self._error is None:
                try:
                    work()
                except BaseException as error:  # noqa: BLE001  # carried to whoever waits
                    self._error = error
            work = None  # a kept reference would keep a gradient alive

    def __repr__(self) -> str:
        return f"<HostStream {self._name} {'FAILED' if self._error else 'OK'}>"


class CallerStream:
    """The caller's own program order: work is done when the call returns."""

    def submit(self, work: Callable[[], None]) -> None:
        """Do `work` now."""
        work()

    def mark(self, marker: _Marker) -> None:
        """Pass the marker now."""
        marker.passed.set()

    def wait_event(self, event: HostEvent) -> None:
        """Block the host until `event`'s record has passed: the caller runs no queue."""
        event.synchronize()

    def synchronize(self) -> None:
        """Return at once: nothing is ever queued."""


class HostEvent:
    """A point in a HostStream. Recording again moves it; earlier waits keep what they saw."""

    __slots__ = ("marker",)

    def __init__(self) -> None:
        self.marker: _Marker | None = None

    @property
    def done(self) -> bool:
        """Whether the recorded point has passed; True when never recorded."""
        return self.marker is None or self.marker.passed.is_set()

    def record(self, stream: HostStream | CallerStream) -> None:
        """Mark the present end of `stream`."""
        self.marker = _Marker()
        stream.mark(self.marker)

    def synchronize(self) -> None:
        """Block the host until the recorded point has passed; raise what failed before it."""
        if self.marker is not None:
            self.marker.wait()
