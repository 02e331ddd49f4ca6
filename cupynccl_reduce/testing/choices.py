"""The schedule that a tuple of choices picks, for `explore` and what it replays. No seed."""

from __future__ import annotations

import math
from collections import Counter, deque
from itertools import islice
from typing import TYPE_CHECKING, Any

from cupynccl_reduce.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .device import Point, SimStream
    from .hosts import Host
    from .scheduler import Scheduler

__all__ = ["Chosen", "ImpossibleAnswerError", "way_to"]

MAX_NO = 2  # how often one record answers "not done": a host that polls has to meet the end


class ImpossibleAnswerError(LayoutError):
    """A choice that lets a query answer yes which no run can answer so."""


class Chosen:
    """Asks for a choice where one can matter; see `explore` for where that is and why.

    `choices[n]` is the n-th choice, 0 where there are no more. `trace` has what was chosen, and out
    of how many.
    """

    def __init__(self, choices: Sequence[int], max_preemptions: float = math.inf) -> None:
        self.trace: list[tuple[int, int]] = []
        self._choices = choices
        self._preemptions = max_preemptions  # left
        self._noes: Counter[Point] = Counter()
        self._hoped: set[Point] = set()  # what queries wait for because a choice says yes
        self._chosen: Host | None = None
        self._way: deque[SimStream] = deque()  # to the point that it waits for

    def first(self, hosts: Sequence[Host]) -> Host:
        """Return any: nothing depends on it."""
        return hosts[0]

    def step(self, scheduler: Scheduler) -> bool:
        """Run nothing; return whether this rank has other threads, which may see the order."""
        return len(scheduler.host.siblings) > 1

    def insists(self, scheduler: Scheduler, point: Point) -> bool:
        """Choose an answer: no at once, or yes when that is so."""
        if point.passed():
            return False
        if self._noes[point] == MAX_NO:
            return True
        if self._pick(scheduler, 2):
            self._hoped.add(point)
            return True
        self._noes[point] += 1
        return False

    def choose(self, scheduler: Scheduler, host: Host) -> Any:
        """Return who goes on: a host, or first the device work that it waits for."""
        if self._chosen is None:
            ready = scheduler.ready_hosts(host)
            if ready:
                first = ready[0]
                hosts = [first, *(h for h in first.siblings if h is not first)]
            else:
                hosts = scheduler.hosts
            options = [(h, way) for h in hosts if (way := _way_of(h)) is not None]
            if not options:
                return self._end(scheduler)
            if not ready:
                # What no other host can notice comes first: it takes no answer away from anyone.
                options = [option for option in options if _is_apart(*option)][:1] or options
            goes_on = bool(ready) and ready[0] is host and host.until is None
            number = self._pick(scheduler, len(options), bounded=goes_on and not self._preemptions)
            self._preemptions -= goes_on and number > 0
            self._chosen, way = options[number]
            self._way.extend(way)
        if self._way:
            return self._way.popleft()
        chosen, self._chosen = self._chosen, None
        return chosen

    def _end(self, scheduler: Scheduler) -> Any:
        """Return the device work that no host waits for; None if hosts wait, and nothing helps."""
        if any(h.point in self._hoped for h in scheduler.hosts):
            msg = f"schedule {tuple(self._choices)}: a query that is to answer yes never can"
            scheduler.report(ImpossibleAnswerError(msg))
        return scheduler.ready_stream() if all(h.done for h in scheduler.hosts) else None

    def _pick(self, scheduler: Scheduler, options: int, *, bounded: bool = False) -> int:
        if options == 1:
            return 0
        number = len(self.trace)
        chosen = self._choices[number] if number < len(self._choices) else 0
        if chosen >= options:
            msg = f"choice {number} of the schedule is {chosen}, but only {options} may go on"
            scheduler.report(LayoutError(msg))
            return 0
        # A bound takes options away, not the choice: so a replay needs not know of it.
        self.trace.append((chosen, 1 if bounded else options))
        return chosen


def _way_of(host: Host) -> list[SimStream] | None:
    """Return the device work that lets a host go on; None if that is not for a host to say."""
    if host.ready():
        return []
    return way_to(host.point) if host.free() and host.point is not None else None


def _is_apart(host: Host, way: list[SimStream]) -> bool:
    """Whether work on these streams passes no event that another host may ask about."""
    alone = all(other.done for other in host.siblings if other is not host)
    return alone and all(stream.rank == host.rank for stream in way)


def way_to(point: Point) -> list[SimStream] | None:
    """Return the streams to run, a piece of work each, so that `point` passes and nothing more.

    None if that cannot be yet.
    """
    stops: dict[SimStream, int] = {}
    todo = [point]
    while todo:
        at = todo.pop()
        stream, start = at.stream, max(stops.get(at.stream, 0), at.stream.ran)
        if at.position <= start:
            continue
        stops[stream] = at.position
        for work in islice(stream.work, start - stream.ran, at.position - stream.ran):
            if work.after is None:
                return None
            todo.extend(work.after)
    # In an order in which each piece may run.
    ran = {stream: stream.ran for stream in stops}
    way: list[SimStream] = []
    before = -1
    while before < len(way):
        before = len(way)
        for stream, stop in stops.items():
            while ran[stream] < stop and all(
                ran.get(at.stream, at.stream.ran) >= at.position
                for at in stream.work[ran[stream] - stream.ran].after or ()
            ):
                way.append(stream)
                ran[stream] += 1
    return way if ran == stops else None
