"""Who has the turn: hosts are threads of which exactly one runs. What goes next, others decide."""

from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING, Any, Protocol

from cupynccl_reduce.detector import Detector, Operation
from cupynccl_reduce.errors import ProtocolError

from .findings import DeadlockError, tell_deadlock
from .hosts import Host
from .sites import Wait, call_site, in_library

if TYPE_CHECKING:
    from collections.abc import Callable

    from .device import Point
    from .memory import MemoryCheck
    from .schedules import Schedule
    from .sites import Site

__all__ = ["Cancelled", "Lane", "Scheduler"]


class Cancelled(BaseException):
    """Ends a host's thread after something was found; no Exception, so nothing swallows it."""


class Lane(Protocol):
    """A device stream, as the scheduler sees it."""

    work: Any  # what is queued and has not run

    def ready(self) -> bool:
        """Whether there is a first piece of work and it may run."""

    def run(self) -> None:
        """Run the first piece of work."""

    def waits_for(self) -> str:
        """Return what the first piece of work waits for; "" if there is none."""


class Scheduler:
    """Hands the one turn around between hosts and streams, as a schedule decides."""

    def __init__(self, world_size: int, schedule: Schedule) -> None:
        self.detector = Detector()
        self.hosts: list[Host] = []
        for rank in range(world_size):
            self._add_host(rank, [])
        self.streams: list[Any] = []
        self.finding: BaseException | None = None
        self.steps = 0
        self.overlaps = 0
        self._kinds: dict[tuple[int, bool], list[Operation]] = {}
        self.waits: list[Wait] = []
        self.polls = 0  # queries in a row that answered "not done"
        self.broken = False  # a world was given up: what its ranks drop then is no finding
        self.dropped_wait: int | None = None
        self.check: MemoryCheck | None = None
        self._schedule = schedule
        self._threads: list[threading.Thread] = []
        self._finished = threading.Lock()
        self._finished.acquire()
        self._cancelled = False
        self._local = threading.local()

    @property
    def host(self) -> Host:
        """The host whose thread this is."""
        host: Host | None = getattr(self._local, "host", None)
        if host is None:
            msg = (
                "a simulated rank is one thread: call the library from the function that it runs, "
                "or from threads of runtime.spawn()"
            )
            raise ProtocolError(msg)
        return host

    @property
    def running(self) -> bool:
        """Whether this thread is a host of a simulation that goes on."""
        return not self._cancelled and getattr(self._local, "host", None) is not None

    def run(self, bodies: list[Callable[[], None]]) -> None:
        """Run one body per rank to its end."""
        # A collector that runs at a time of its own would free cycles at another point each time.
        collecting = gc.isenabled()
        gc.disable()
        try:
            ranks = self.hosts[:]
            for host, body in zip(ranks, bodies, strict=True):
                self._start(host, body)
            self._schedule.first(ranks).turn.release()
            self._finished.acquire()
            for thread in self._threads:
                thread.join()
        finally:
            if collecting:
                gc.enable()

    def spawn(self, body: Callable[[], None]) -> Host:
        """Start another thread of this rank; it knows what this one has done so far."""
        parent = self.host
        host = self._add_host(parent.rank, parent.siblings)
        self.detector.follow(host.lane, parent.lane)
        self._start(host, body)
        return host

    def report(self, finding: BaseException) -> None:
        """Note what was found first; every host ends at its next step."""
        if self.finding is None:
            self.finding = finding
        self._cancelled = True

    def step(self) -> None:
        """Let device work run after something was queued. Called by the running host.

        Ranks meet only in collectives and in the side channel, so another order of what they queue
        changes nothing that can be seen: they mostly keep the turn here, and pass it on in `pause`.
        """
        if self._cancelled:
            raise Cancelled
        if self._schedule.step(self):
            self.pause()
        elif self._cancelled:
            raise Cancelled

    def pause(
        self,
        until: Callable[[], bool] | None = None,
        waits_for: str = "",
        *,
        point: Point | None = None,
    ) -> None:
        """Let others run; come back when chosen and `until` holds. Called by the running host.

        `point`: where `until` is that it has passed.
        """
        host = self.host
        if self._cancelled:
            raise Cancelled
        host.until, host.waits_for, host.point = until, waits_for, point
        host.inside = len(host.siblings) > 1 and in_library()
        self._pass_on(host)
        host.until, host.waits_for, host.point = None, "", None
        host.inside = False
        if self._cancelled:
            raise Cancelled

    def query(self, point: Point, told: str) -> bool:
        """Return whether `point` has passed; the schedule may insist that it has, and wait."""
        if self._schedule.insists(self, point):
            self.pause(point.passed, told, point=point)
        return point.passed()

    def ready_hosts(self, host: Host) -> list[Host]:
        """Return the hosts that may go on, `host` first."""
        hosts = self.hosts
        return [h for h in hosts[host.number :] + hosts[: host.number] if h.ready()]

    def ready_streams(self) -> list[Lane]:
        """Return the streams whose first piece of work may run."""
        return [stream for stream in self.streams if stream.work and stream.ready()]

    def ready_stream(self) -> Lane | None:
        """Return the first of these."""
        return next((stream for stream in self.streams if stream.work and stream.ready()), None)

    def run_work(self, stream: Lane) -> None:
        """Run one piece of device work; what it raises is found, and belongs to no host."""
        try:
            stream.run()
        except Exception as error:  # noqa: BLE001  # raised again by Simulation.run
            self.report(error)

    def count_overlaps(self, rank: int, what: Operation) -> None:
        """Count the packs (or collectives) before `what` that its lane knows nothing of."""
        packs = what.kind.startswith("pack")
        if not packs and what.kind != "reduce_scatter":
            return
        others = self._kinds.setdefault((rank, not packs), [])
        self.overlaps += sum(not self.detector.knows(what.lane, other) for other in others)
        self._kinds.setdefault((rank, packs), []).append(what)

    def takes_wait(self, recorded: Site | None, *, known: bool) -> bool:
        """Note a wait; return whether it is to be honoured (edge deletion drops one)."""
        self.waits.append(Wait(call_site(), recorded, known))
        return len(self.waits) - 1 != self.dropped_wait

    def _add_host(self, rank: int, siblings: list[Host]) -> Host:
        number = len(siblings)
        name = f"thread {number} of rank {rank}" if number else f"host of rank {rank}"
        host = Host(rank, len(self.hosts), name, self.detector.lane(name), siblings)
        self.hosts.append(host)
        return host

    def _start(self, host: Host, body: Callable[[], None]) -> None:
        thread = threading.Thread(target=self._serve, args=(host, body), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self, host: Host, body: Callable[[], None]) -> None:
        self._local.host = host
        host.turn.acquire()
        try:
            if not self._cancelled:
                body()
        finally:
            host.done = True
            self._leave(host)

    def _pass_on(self, host: Host) -> None:
        """Run device work until a host is chosen; give it the turn and wait for ours."""
        while not self._cancelled:
            chosen = self._choose(host)
            if chosen is host:
                return
            if chosen is None:
                self.report(DeadlockError(tell_deadlock(self._who_waits())))
            elif isinstance(chosen, Host):
                chosen.turn.release()
                host.turn.acquire()
                return
            else:
                self.run_work(chosen)

    def _leave(self, host: Host) -> None:
        """Give the turn to whoever is left; the last one out runs the rest of the device work."""
        while not self._cancelled:
            chosen = self._choose(host)
            if chosen is None:
                if all(h.done for h in self.hosts) and not any(s.waits_for() for s in self.streams):
                    break
                self.report(DeadlockError(tell_deadlock(self._who_waits())))
            elif isinstance(chosen, Host):
                chosen.turn.release()
                return
            else:
                self.run_work(chosen)
        # Whoever is within the library first: it holds locks that others may ask for on their way.
        left = sorted((h for h in self.hosts if not h.done), key=lambda h: not h.inside)
        if left:
            left[0].turn.release()
        else:
            self._finished.release()

    def _choose(self, host: Host) -> Any:
        self.steps += 1
        return self._schedule.choose(self, host)

    def _who_waits(self) -> list[str]:
        told = [f"rank {h.rank} has returned" for h in self.hosts if h.returned]
        told += [
            f"{h.name} waits for {h.waits_for or 'its turn'}" for h in self.hosts if not h.done
        ]
        return told + [waits for s in self.streams if (waits := s.waits_for())]
