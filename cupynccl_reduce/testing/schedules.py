"""Which host or stream goes next, as a seed decides. No threads here."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .device import Point
    from .hosts import Host
    from .scheduler import Scheduler

__all__ = ["SCHEDULES", "Schedule", "ScheduleName", "make_schedule"]

ScheduleName = Literal["lazy", "eager", "random", "pct"]
MAX_POLLS = 50
PCT_STEPS = 400  # change points fall within so many steps
STEP, SWITCH = 0.4, 0.05  # how often "random" runs device work, and other hosts, at a step


class Schedule(Protocol):
    """Decides for a Scheduler."""

    def first(self, hosts: Sequence[Host]) -> Host:
        """Return the host that starts."""

    def step(self, scheduler: Scheduler) -> bool:
        """Let device work run after something was queued; return whether hosts may change too."""

    def insists(self, scheduler: Scheduler, point: Point) -> bool:
        """Whether a query waits until `point` has passed, so that its answer is yes."""

    def choose(self, scheduler: Scheduler, host: Host) -> Any:
        """Return the Host or stream that goes next, or None if nothing can.

        `host` is the one that gives up its turn.
        """


class _Seeded:
    """What a seed decides under every schedule: who starts. Queries take what they find."""

    def __init__(self, seed: int, depth: int) -> None:
        name = type(self).__name__.strip("_").lower()
        self._random = random.Random(f"{seed} {name}")  # noqa: S311  # a schedule is no secret
        self._changes = {self._random.randrange(PCT_STEPS) for _ in range(depth - 1)}

    def first(self, hosts: Sequence[Host]) -> Host:
        return hosts[self._random.randrange(len(hosts))]

    def insists(self, _scheduler: Scheduler, _point: Point) -> bool:
        return False


class _Lazy(_Seeded):
    """Device work only when every host waits."""

    def step(self, _scheduler: Scheduler) -> bool:
        return False

    def choose(self, scheduler: Scheduler, host: Host) -> Any:
        hosts = scheduler.ready_hosts(host)
        # "Not done" answered this often: a host that polls has to meet the end some time.
        if not hosts or scheduler.polls > MAX_POLLS:
            work = scheduler.ready_stream()
            if work is not None:
                scheduler.polls = 0
                return work
        return hosts[0] if hosts else None


class _Eager(_Seeded):
    """Device work as soon as it may run."""

    def step(self, scheduler: Scheduler) -> bool:
        while (stream := scheduler.ready_stream()) is not None:
            scheduler.steps += 1
            scheduler.run_work(stream)
        return False

    def choose(self, scheduler: Scheduler, host: Host) -> Any:
        stream = scheduler.ready_stream()
        if stream is not None:
            return stream
        hosts = scheduler.ready_hosts(host)
        return hosts[0] if hosts else None


class _Random(_Seeded):
    """One of all that may run."""

    def step(self, scheduler: Scheduler) -> bool:
        """Mostly keep the turn; see Scheduler.step for why that hides nothing."""
        chance = self._random.random()
        if SWITCH <= chance < STEP:
            scheduler.steps += 1
            ready = scheduler.ready_streams()
            if ready:
                scheduler.run_work(ready[int(self._random.random() * len(ready))])
        return chance < SWITCH

    def choose(self, scheduler: Scheduler, host: Host) -> Any:
        ready = [*scheduler.ready_hosts(host), *scheduler.ready_streams()]
        return ready[int(self._random.random() * len(ready))] if ready else None


class _Pct(_Seeded):
    """Random priorities that change at `depth - 1` random steps.

    Probabilistic concurrency testing: Burckhardt, Kothari, Musuvathi, Nagarakatti, ASPLOS 2010.
    """

    def __init__(self, seed: int, depth: int) -> None:
        super().__init__(seed, depth)
        self._priorities: dict[Any, float] = {}

    def step(self, _scheduler: Scheduler) -> bool:
        return True

    def choose(self, scheduler: Scheduler, host: Host) -> Any:
        ready = [*scheduler.ready_hosts(host), *scheduler.ready_streams()]
        if not ready:
            return None
        for lane in ready:
            if lane not in self._priorities:
                self._priorities[lane] = self._random.random()
        chosen = max(ready, key=self._priorities.__getitem__)
        if scheduler.steps in self._changes:
            self._priorities[chosen] = -scheduler.steps
            chosen = max(ready, key=self._priorities.__getitem__)
        return chosen


_KINDS: dict[str, Callable[[int, int], Schedule]] = {
    "lazy": _Lazy,
    "eager": _Eager,
    "random": _Random,
    "pct": _Pct,
}
SCHEDULES = tuple(_KINDS)


def make_schedule(name: ScheduleName, seed: int, depth: int) -> Schedule:
    """Return the schedule of that name; `depth` is of "pct"."""
    return _KINDS[name](seed, depth)
