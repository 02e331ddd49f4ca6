"""Who runs next: ranks are threads of which exactly one runs, and a seed decides. No arrays."""

from __future__ import annotations

import gc
import random
import threading
from typing import TYPE_CHECKING, Any, Literal, Protocol

from cupynccl_reduce.detector import Detector, Operation
from cupynccl_reduce.errors import ProtocolError

from .findings import DeadlockError, tell_deadlock
from .sites import Wait, call_site

if TYPE_CHECKING:
    from collections.abc import Callable

    from .sites import Site

__all__ = ["Cancelled", "Host", "Lane", "Schedule", "Scheduler"]

Schedule = Literal["lazy", "eager", "random", "pct"]
MAX_POLLS = 50
PCT_STEPS = 400  # change points fall within so many steps
STEP, SWITCH = 0.4, 0.05  # how often "random" runs device work, and other hosts, at a step


class Cancelled(BaseException):
    """Ends a rank's thread after something was found; no Exception, so nothing swallows it."""


class Lane(Protocol):
    """A device stream, as the scheduler sees it."""

    def ready(self) -> bool:
        """Whether there is a first piece of work and it may run."""

    def run(self) -> None:
        """Run the first piece of work."""

    def waits_for(self) -> str:
        """Return what the first piece of work waits for; "" if there is none."""


class Host:
    """One rank's thread."""

    def __init__(self, rank: int, lane: int) -> None:
        self.rank = rank
        self.lane = lane
        self.turn = threading.Lock()  # held until this thread may go on
        self.turn.acquire()
        self.until: Callable[[], bool] | None = None
        self.waits_for = ""
        self.done = False

    def ready(self) -> bool:
        """Whether this thread may go on."""
        return not self.done and (self.until is None or self.until())


class Scheduler:
    """Hands the one turn around between hosts and streams.

    "lazy" runs device work only when every host waits; "eager" as soon as it may; "random" chooses
    among all; "pct" follows random priorities with `depth - 1` changes (probabilistic concurrency
    testing: Burckhardt, Kothari, Musuvathi, Nagarakatti, ASPLOS 2010).
    """

    def __init__(self, world_size: int, seed: int, schedule: Schedule, depth: int = 3) -> None:
        self.detector = Detector()
        self.hosts = [Host(r, self.detector.lane(f"host of rank {r}")) for r in range(world_size)]
        self.streams: list[Any] = []
        self.finding: BaseException | None = None
        self.steps = 0
        self.overlaps = 0
        self._kinds: dict[tuple[int, bool], list[Operation]] = {}
        self.waits: list[Wait] = []
        self.polls = 0  # queries in a row that answered "not done"
        self.broken = False  # a world was given up: what its ranks drop then is no finding
        self.dropped_wait: int | None = None
        # Set by a check that wants to run every operation itself: (what, run, reads, writes) -> run
        self.wrap: Callable[..., Callable[[], None]] | None = None
        self._schedule = schedule
        self._random = random.Random(f"{seed} {schedule}")  # noqa: S311  # a schedule is no secret
        self._priorities: dict[Any, float] = {}
        self._changes = {self._random.randrange(PCT_STEPS) for _ in range(depth - 1)}
        self._finished = threading.Lock()
        self._finished.acquire()
        self._cancelled = False
        self._local = threading.local()

    @property
    def host(self) -> Host:
        """The rank whose thread this is."""
        host: Host | None = getattr(self._local, "host", None)
        if host is None:
            msg = "a simulated rank is one thread: call the library from the function that it runs"
            raise ProtocolError(msg)
        return host

    @property
    def running(self) -> bool:
        """Whether this thread is a rank of a simulation that goes on."""
        return not self._cancelled and getattr(self._local, "host", None) is not None

    def run(self, bodies: list[Callable[[], None]]) -> None:
        """Run one body per rank to its end."""
        threads = [
            threading.Thread(target=self._serve, args=(host, body), daemon=True)
            for host, body in zip(self.hosts, bodies, strict=True)
        ]
        # A collector that runs at a time of its own would free cycles at another point each time.
        collecting = gc.isenabled()
        gc.disable()
        try:
            for thread in threads:
                thread.start()
            self.hosts[self._random.randrange(len(self.hosts))].turn.release()
            self._finished.acquire()
            for thread in threads:
                thread.join()
        finally:
            if collecting:
                gc.enable()

    def report(self, finding: BaseException) -> None:
        """Note what was found first; every rank ends at its next step."""
        if self.finding is None:
            self.finding = finding
        self._cancelled = True

    def step(self) -> None:
        """Let device work run after something was queued. Called by the running rank.

        Ranks meet only in collectives and in the side channel, so another order of what they queue
        changes nothing that can be seen: they mostly keep the turn here, and pass it on in `pause`.
        """
        if self._cancelled:
            raise Cancelled
        chance = self._random.random() if self._schedule == "random" else 0.0
        if self._schedule == "random":
            if chance >= STEP:
                return
            if chance >= SWITCH:
                self.steps += 1
                ready = [stream for stream in self.streams if stream.work and stream.ready()]
                if ready:
                    self._run_work(ready[int(self._random.random() * len(ready))])
        elif self._schedule == "eager":
            while chosen := next((s for s in self.streams if s.work and s.ready()), None):
                self.steps += 1
                self._run_work(chosen)
        if self._cancelled:
            raise Cancelled
        if self._schedule == "pct" or (self._schedule == "random" and chance < SWITCH):
            self.pause()

    def pause(self, until: Callable[[], bool] | None = None, waits_for: str = "") -> None:
        """Let others run; come back when chosen and `until` holds. Called by the running rank."""
        host = self.host
        if self._cancelled:
            raise Cancelled
        host.until, host.waits_for = until, waits_for
        self._pass_on(host)
        host.until, host.waits_for = None, ""
        if self._cancelled:
            raise Cancelled

    def count_overlaps(self, rank: int, what: Operation) -> None:
        """Count the packs (or collectives) before `what` that its lane knows nothing of."""
        packs = what.kind.startswith("pack")
        if not packs and what.kind != "reduce_scatter":
            return
        others = self._kinds.setdefault((rank, not packs), [])
        self.overlaps += sum(not self.detector.knows(what.lane, other) for other in others)
        self._kinds.setdefault((rank, packs), []).append(what)

    def takes_wait(self, recorded: Site, *, known: bool) -> bool:
        """Note a wait; return whether it is to be honoured (edge deletion drops one)."""
        self.waits.append(Wait(call_site(), recorded, known))
        return len(self.waits) - 1 != self.dropped_wait

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
                self._run_work(chosen)

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
                self._run_work(chosen)
        left = [h for h in self.hosts if not h.done]
        if left:
            left[0].turn.release()
        else:
            self._finished.release()

    def _run_work(self, stream: Lane) -> None:
        """Run one piece of device work; what it raises is found, and belongs to no host."""
        try:
            stream.run()
        except Exception as error:  # noqa: BLE001  # raised again by Simulation.run
            self.report(error)

    def _choose(self, host: Host) -> Any:
        """Return the host or stream that goes next, or None if nothing can."""
        self.steps += 1
        streams: list[Any] = []
        if self._schedule != "lazy":
            streams = [s for s in self.streams if s.work and s.ready()]
        if self._schedule == "eager" and streams:
            return streams[0]
        hosts = [h for h in self.hosts[host.rank :] + self.hosts[: host.rank] if h.ready()]
        if self._schedule in ("lazy", "eager"):
            work = next((s for s in self.streams if s.work and s.ready()), None)
            # "Not done" answered this often: a host that polls has to meet the end some time.
            if work is not None and (not hosts or self.polls > MAX_POLLS):
                self.polls = 0
                return work
            return hosts[0] if hosts else None
        ready = hosts + streams
        if not ready:
            return None
        if self._schedule == "random":
            return ready[int(self._random.random() * len(ready))]
        for lane in ready:
            if lane not in self._priorities:
                self._priorities[lane] = self._random.random()
        chosen = max(ready, key=self._priorities.__getitem__)
        if self.steps in self._changes:
            self._priorities[chosen] = -self.steps
            chosen = max(ready, key=self._priorities.__getitem__)
        return chosen

    def _who_waits(self) -> list[str]:
        told = [
            f"host of rank {h.rank} waits for {h.waits_for or 'its turn'}"
            for h in self.hosts
            if not h.done
        ]
        return told + [waits for s in self.streams if (waits := s.waits_for())]
