"""Simulated streams and events: work is queued, and run when the scheduler says. No arrays."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .findings import RaceError
from .sites import Site, call_site

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from cupynccl_reduce.detector import Conflict, Operation

    from .scheduler import Scheduler

__all__ = ["Range", "SimEvent", "SimStream", "Work", "check_accesses", "refuse"]

Range = tuple[int, int]  # (address, nbytes)


@dataclass(slots=True, eq=False)
class Work:
    """One piece of queued work: what it does, and when it may."""

    told: Callable[[], str]
    run: Callable[[], None]
    ready: Callable[[], bool]


@dataclass(slots=True, eq=False)
class _Marker:
    """One record of an event."""

    clock: dict[int, int]
    site: Site
    done: bool = False

    def passed(self) -> bool:
        return self.done


def _always() -> bool:
    return True


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
        scheduler.streams.append(self)

    def ready(self) -> bool:
        """Whether there is a first piece of work and it may run."""
        work = self.work
        return bool(work) and (work[0].ready is _always or work[0].ready())

    def run(self) -> None:
        """Run the first piece of work."""
        self.work.popleft().run()

    def waits_for(self) -> str:
        """Return what the first piece of work waits for."""
        return f"{self.name} waits with {self.work[0].told()}" if self.work else ""

    def queue(  # one declaration, written in one place
        self,
        what: Operation,
        run: Callable[[], None],
        *,
        reads: Iterable[Range] = (),
        writes: Iterable[Range] = (),
        ready: Callable[[], bool] = _always,
    ) -> Work:
        """Queue an operation that touches just these bytes; report a race with what came before.

        The caller lets others run afterwards (`Scheduler.step`), where it may be interrupted.
        """
        detector, scheduler = self.scheduler.detector, self.scheduler
        detector.follow(self.lane, scheduler.host.lane)  # refuses a thread that is no rank
        detector.begin(what, self.lane)
        check_accesses(scheduler, what, reads, writes)
        scheduler.count_overlaps(self.rank, what)
        if scheduler.wrap is not None:
            run = scheduler.wrap(what, run, tuple(reads), tuple(writes))
        work = Work(lambda: f"{what.kind} {what.label}, asked for at {what.site}", run, ready)
        self.work.append(work)
        return work

    def wait_event(self, event: SimEvent) -> None:
        """Hold back later work until `event`'s present record has passed."""
        scheduler, marker = self.scheduler, event.marker
        # Never recorded: a no-op, which nobody misses.
        if marker is None:
            return
        detector = scheduler.detector
        detector.follow(self.lane, scheduler.hosts[self.rank].lane)
        known = detector.covers(self.lane, marker.clock)
        if scheduler.takes_wait(marker.site, known=known):
            detector.join(self.lane, marker.clock)
            self.work.append(Work(lambda: f"a wait for {_told(marker)}", _nothing, marker.passed))
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
        self._scheduler.pause()
        if self.marker is not None and self.marker.done:
            self._scheduler.detector.join(self._scheduler.host.lane, self.marker.clock)
        passed = self.marker is None or self.marker.done
        self._scheduler.polls = 0 if passed else self._scheduler.polls + 1
        return passed

    def record(self, stream: SimStream) -> None:
        """Mark the present end of `stream`."""
        detector = self._scheduler.detector
        detector.follow(stream.lane, self._scheduler.hosts[stream.rank].lane)
        marker = self.marker = _Marker(detector.snapshot(stream.lane), call_site())

        def pass_() -> None:
            marker.done = True

        stream.work.append(Work(lambda: f"the record of {_told(marker)}", pass_, _always))
        self._scheduler.step()

    def synchronize(self) -> None:
        """Block the host until the recorded point has passed."""
        marker = self.marker
        if marker is None:
            return
        self._scheduler.pause(marker.passed, _told(marker))
        self._scheduler.detector.join(self._scheduler.host.lane, marker.clock)


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
