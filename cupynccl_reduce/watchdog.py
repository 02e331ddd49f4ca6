"""Turns a hang into a report: which rank, what launch, and why. Frees nothing and aborts nothing.

A thread looks ten times a second; whoever made it acts on the report. Only the time for which a
launch runs counts, so that a slow backward is no fault.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast, get_args

from .errors import Reason
from .flight import State, decode_notice, encode_notice, parse_record
from .report import RankState, Report, first_difference

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .errors import CommunicationError
    from .flight import Flight
    from .peers import Beats, Peer
    from .sentinel import Sentinel

__all__ = ["Watchdog"]

TICK_S = 0.1
COLLECT_S = 1.0  # for the other ranks' records, and for the reason behind a transport's error
SILENT = "nothing comes from it: stopped, or something holds its GIL"
MAX_TOLD = 4000  # characters of an error that travel


class Watchdog:
    """Looks at this rank's flight and at the other ranks, and reports the first fault, once.

    Args:
        rank: of this process.
        flight: what this rank launches.
        beats: how the other ranks are.
        timeout_s: how long one launch may run.
        make_error: makes what this rank is to raise of the report.
        on_fault: called with that error, in the watchdog's thread.
        check_async: raises if the transport has met an error.
        sentinel: ends the process when this one's thread does not get to run.
        clock: gives seconds.
    """

    def __init__(
        self,
        rank: int,
        flight: Flight,
        beats: Beats,
        *,
        timeout_s: float,
        make_error: Callable[[Report], CommunicationError],
        on_fault: Callable[[CommunicationError], None],
        check_async: Callable[[], object] = lambda: None,
        sentinel: Sentinel | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank = rank
        self._flight = flight
        self._beats = beats
        self._world_size = len(beats.peers())
        self._timeout_s = timeout_s
        self._make_error = make_error
        self._on_fault = on_fault
        self._check_async = check_async
        self._sentinel = sentinel
        self._clock = clock
        self._cause: tuple[Reason, tuple[int, ...], str, int] | None = None
        self._due = 0.0  # when the report is made, whoever has answered by then
        self._records: dict[int, list[dict[str, Any]]] = {}
        self._error: BaseException | None = None  # of the transport, whose reason may yet come
        self._error_due = 0.0
        self._asked: CommunicationError | None = None  # of which the caller wants to know why
        self._asked_due = 0.0
        self._told: CommunicationError | None = None
        self._reported = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Look from now on, in a daemon thread."""
        if self._sentinel is not None:
            self._sentinel.feed()  # the thread may never get to run
        self._thread = threading.Thread(target=self._run, name="cupynccl-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no more. Blocks for one look at most; from on_fault it returns at once."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with suppress(Exception):  # a fault now is nobody's
            self._flight.poll()
        self._beats.publish(self._flight.state().encode())  # which the goodbye carries

    def raised(self, error: BaseException) -> None:
        """Tell the other ranks that this one has failed. Does not block the host."""
        told = f"{type(error).__name__}: {error}"[:MAX_TOLD]
        self._tell(reason="raised", ranks=[self._rank], text=told)

    def explain(
        self, error: CommunicationError, timeout_s: float = 4.0 * COLLECT_S
    ) -> CommunicationError | None:
        """Block until the fault behind a transport's error is known; return it, if it is."""
        if self._asked is None:
            self._asked_due = self._clock() + COLLECT_S
            self._asked = error
        if threading.current_thread() is not self._thread:
            self._reported.wait(timeout_s)
        return self._told

    def tick(self) -> None:
        """Look once. Does not block the host, but for on_fault."""
        now = self._clock()
        try:
            self._flight.poll()
            self._check_async()
        except Exception as error:  # noqa: BLE001  # whatever a transport raises is a fault
            self._note(error)
        self._beats.publish(self._flight.state().encode())
        self._take_notices(now)
        peers = self._beats.peers()
        if self._cause is None:
            self._look(peers, now)
        elif not self._reported.is_set() and self._complete(peers, now):
            self._report(peers)

    def _run(self) -> None:
        while not self._stop.wait(TICK_S):
            if self._sentinel is not None:
                self._sentinel.feed()
            try:
                self.tick()
            except Exception as error:  # noqa: BLE001  # looking must go on, and be heard of
                self._note(error)
        if self._sentinel is not None:
            self._sentinel.stop()

    def _note(self, error: Exception) -> None:
        if self._error is None:
            self._error, self._error_due = error, self._clock() + COLLECT_S

    def _look(self, peers: Sequence[Peer], now: float) -> None:
        """Find the first fault, if there is one."""
        states = {peer.rank: State.decode(peer.state) or State() for peer in peers}
        others = [peer for peer in peers if peer.rank != self._rank]
        lost = [peer.rank for peer in others if peer.link == "lost"]
        if lost:
            self._find("died", lost, "its connection closed without a goodbye", now)
            return
        if any(self._look_at(peer, states[peer.rank], now) for peer in others):
            return
        asked = self._asked
        silent = [peer.rank for peer in others if peer.link == "silent"]
        if asked is not None and silent:
            self._find("stopped", silent, SILENT, now)
        elif asked is not None and now >= self._asked_due and asked.ranks:
            self._find("did not call", asked.ranks, str(asked), now)
        elif asked is not None and now >= self._asked_due:
            self._find("asynchronous error", [self._rank], str(asked), now)
        elif self._error is not None and now >= self._error_due:
            told = f"{type(self._error).__name__}: {self._error}"
            self._find("asynchronous error", [self._rank], told, now)
        else:
            launched, seconds = self._flight.running()
            if launched is not None and seconds > self._timeout_s:
                self._blame(launched.number, others, states, now)

    def _look_at(self, peer: Peer, state: State, now: float) -> bool:
        """Find what another rank by itself shows; return whether that is a fault."""
        queued = self._flight.state().queued
        waits = self._asked is not None or self._error is not None or self._flight.running()[0]
        ours = self._flight.digest(state.queued)
        if peer.link == "left" and waits and (self._asked is not None or state.done < queued):
            told = f"it closed its world after {state.done} launches"
            self._find("left", [peer.rank], told, now)
        elif ours is not None and ours != state.digest:
            self._find("mismatch", sorted([peer.rank, self._rank]), "", now, number=state.queued)
        return self._cause is not None

    def _blame(
        self, number: int, others: Sequence[Peer], states: dict[int, State], now: float
    ) -> None:
        """Say whom a launch that runs for too long waits for."""
        silent = [peer.rank for peer in others if peer.link == "silent"]
        absent = [peer.rank for peer in others if states[peer.rank].called < number]
        waiting = [peer.rank for peer in others if states[peer.rank].started < number]
        stopped = [rank for rank in silent if rank in waiting] or ([] if waiting else silent)
        if stopped:
            self._find("stopped", stopped, SILENT, now, number=number)
        elif absent:
            self._find("did not call", absent, "it has not launched this", now, number=number)
        elif waiting and number <= self._flight.state().started:
            told = "it has launched this, and its stream has not got there"
            self._find("did not start", waiting, told, now, number=number)
        else:
            told = "every rank has launched it, and it does not end"
            self._find("fabric", [], told, now, number=number)

    def _find(
        self, reason: Reason, ranks: Sequence[int], told: str, now: float, *, number: int = 0
    ) -> None:
        told = told[:MAX_TOLD]
        self._cause = reason, tuple(ranks), told, number
        self._due = now + COLLECT_S
        self._tell(reason=reason, ranks=list(ranks), text=told, number=number)

    def _tell(self, **fields: Any) -> None:
        record = self._flight.record()
        while len(data := encode_notice(record=record, **fields)) > 60_000 and record:  # noqa: PLR2004
            record = record[len(record) // 2 + 1 :]
        self._beats.tell(data)

    def _take_notices(self, now: float) -> None:
        for rank, data in self._beats.notices():
            fields = decode_notice(data)
            reason, ranks, told = fields.get("reason"), fields.get("ranks"), fields.get("text")
            number = fields.get("number", 0)
            known = reason in get_args(Reason) and type(number) is int and number >= 0
            if not known or not isinstance(ranks, list) or not isinstance(told, str):
                continue
            named = all(type(one) is int and 0 <= one < self._world_size for one in ranks)
            if not named or (reason == "fabric") != (not ranks):
                continue
            self._records[rank] = parse_record(fields.get("record"))
            if self._cause is None:
                # The first cause wins. Who told it is aborting, so this rank has to as well.
                self._cause = cast("Reason", reason), tuple(ranks), told[:MAX_TOLD], number
                self._due = now + COLLECT_S
                self._tell(reason=reason, ranks=ranks, text=told[:MAX_TOLD], number=number)

    def _complete(self, peers: Sequence[Peer], now: float) -> bool:
        """Whether there is nothing more to wait for: all that can answer have."""
        assert self._cause is not None
        answering = {peer.rank for peer in peers if peer.link == "up"} - {self._rank}
        return now >= self._due or answering <= self._records.keys()

    def _report(self, peers: Sequence[Peer]) -> None:
        assert self._cause is not None
        reason, ranks, told, number = self._cause
        if reason == "mismatch":
            records = {**self._records, self._rank: self._flight.record()}
            ranks, number, told = first_difference(records) or (
                *(ranks, number),
                f"they differ by launch {number} at the latest",
            )
        launched, seconds = self._flight.running()
        found = self._flight.find(number) or launched
        rows = []
        for peer in peers:
            state = State.decode(peer.state) or State()
            rows.append(
                RankState(
                    *(peer.rank, peer.link, peer.age_s),
                    *(state.step, state.queued, state.started, state.done),
                )
            )
        self._told = self._make_error(
            Report(
                reason=reason,
                ranks=ranks,
                detail=told,
                rank=self._rank,
                launch=found.as_json() if found is not None else None,
                launch_text=found.describe() if found is not None else "",
                running_s=seconds,
                timeout_s=self._timeout_s,
                states=tuple(rows),
                records={**self._records, self._rank: self._flight.record()},
            )
        )
        self._reported.set()
        self._on_fault(self._told)
