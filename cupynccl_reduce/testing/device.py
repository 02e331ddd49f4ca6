"""Simulated streams and events: work is queued, and run when the scheduler says. No arrays."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .findings import RaceError
from .sites import Site, call_site

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from cupynccl_reduce.detector import Conflict, Operation

    from .scheduler import Scheduler

__all__ = ["Point", "Range", "SimEvent", "SimStream", "Work", "check_accesses", "refuse"]

Range = tuple[int, int]  # (address, nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """A place in a stream: behind its first `position` pieces of work."""

    stream: SimStream
    position: int

    def passed(self) -> bool:
        """Whether the stream has come so far."""
        return self.stream.ran >= self.position


@dataclass(slots=True, eq=False)
class Work:
    """One piece of queued work: what it does, and what comes before it on other streams."""

    told: Callable[[], str]
    run: Callable[[], Any]
    after: tuple[Point, ...] | None = ()  # None: not all of that is queued yet


@dataclass(frozen=True, slots=True, eq=False)
class _Marker:
    """One record of an event."""

    clock: dict[int, int]
    site: Site
    point: Point


def _nothing() -> None:
    return


class SimStream:
    """An in-order queue of one rank's device work."""

    def __init__(self, scheduler: Scheduler, rank: int, name: str) -> None:
        self.name = f"{name} of rank {rank}"
        self.rank = rank
        self.scheduler = scheduler
        self.lane = scheduler.detector.lane(self.name)
        self.work: deque[Work] = deque()
        self.ran = 0  # pieces of work
        scheduler.streams.append(self)

    @property
    def end(self) -> Point:
        """The point behind everything that is queued so far."""
        return Point(self, self.ran + len(self.work))

    def ready(self) -> bool:
        """Whether there is a first piece of work and it may run."""
        if not self.work:
            return False
        after = self.work[0].after
        if not after:
            return after is not None
        return all(point.stream.ran >= point.position for point in after)

    def run(self) -> None:
        """Run the first piece of work."""
        work = self.work.popleft()
        self.ran += 1
        work.run()

    def waits_for(self) -> str:
        """Return what the first piece of work waits for."""
        return f"{self.name} waits with {self.work[0].told()}" if self.work else ""

    def queue(  # one declaration, written in one place
        self,
        what: Operation,
        run: Callable[[], Any],
        *,
        reads: Iterable[Range] = (),
        writes: Iterable[Range] = (),
        checked: bool = True,
    ) -> Work:
        """Queue an operation that touches just these bytes; report a race with what came before.

        `checked`: what it really touches is compared with that, where the simulation does so. What
        `run` returns is part of its result. The caller lets others run afterwards
        (`Scheduler.step`), where it may be interrupted.
        """
        detector, scheduler = self.scheduler.detector, self.scheduler
        detector.follow(self.lane, scheduler.host.lane)  # refuses a thread that is no rank
        detector.begin(what, self.lane)
        check_accesses(scheduler, what, reads, writes)
        scheduler.count_overlaps(self.rank, what)
        if checked and scheduler.check is not None:
            run = scheduler.check.wrap(what, run, tuple(reads), tuple(writes))
        work = Work(lambda: f"{what.kind} {what.label}, asked for at {what.site}", run)
        self.work.append(work)
        return work

    def wait_event(self, event: SimEvent) -> None:
        """Hold back later work until `event`'s present record has passed."""
        scheduler, marker = self.scheduler, event.marker
        if marker is None:
            scheduler.takes_wait(None, known=True)
            return
        detector = scheduler.detector
        detector.follow(self.lane, scheduler.host.lane)
        known = detector.covers(self.lane, marker.clock)
        if scheduler.takes_wait(marker.site, known=known):
            detector.join(self.lane, marker.clock)
            self.work.append(Work(lambda: f"a wait for {_told(marker)}", _nothing, (marker.point,)))
        scheduler.step()

    def synchronize(self) -> None:
        """Block the host until everything queued so far is done."""
        event = SimEvent(self.scheduler)
        event.record(self)
        event.synchronize()

    def __repr__(self) -> str:
        return f"<SimStream {self.name}, {len(self.work)} queued>"


class SimEvent:
    """A point in a SimStream. Recording again moves it; earlier waits keep what they saw."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.marker: _Marker | None = None

    @property
    def done(self) -> bool:
        """Whether the recorded point has passed; knowing that it has is an edge to the host."""
        scheduler = self._scheduler
        scheduler.pause()
        marker = self.marker
        passed = marker is None or scheduler.query(marker.point, _told(marker))
        if passed and marker is not None:
            scheduler.detector.join(scheduler.host.lane, marker.clock)
        scheduler.polls = 0 if passed else scheduler.polls + 1
        return passed

    def record(self, stream: SimStream) -> None:
        """Mark the present end of `stream`."""
        scheduler = self._scheduler
        detector = scheduler.detector
        detector.follow(stream.lane, scheduler.host.lane)
        site = call_site()
        stream.work.append(Work(lambda: f"the record of the event recorded at {site}", _nothing))
        self.marker = _Marker(detector.snapshot(stream.lane), site, stream.end)
        scheduler.step()

    def synchronize(self) -> None:
        """Block the host until the recorded point has passed."""
        marker, scheduler = self.marker, self._scheduler
        if marker is None:
            return
        scheduler.pause(marker.point.passed, _told(marker), point=marker.point)
        scheduler.detector.join(scheduler.host.lane, marker.clock)


def check_accesses(
    scheduler: Scheduler,
    what: Operation,
    reads: Iterable[Range],
    writes: Iterable[Range],
) -> None:
    """Report and raise a race of `what` with anything before it."""
    for ranges, write in ((reads, False), (writes, True)):
        for address, nbytes in ranges:
            conflict = scheduler.detector.access(what, address, nbytes, write=write)
            if conflict is not None:
                refuse(scheduler, conflict)


def refuse(scheduler: Scheduler, conflict: Conflict) -> None:
    """Report a race and raise it."""
    error = RaceError(scheduler.detector.tell(conflict))
    scheduler.report(error)
    raise error


def _told(marker: _Marker) -> str:
    return f"the event recorded at {marker.site}"
