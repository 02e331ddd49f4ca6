"""Simulated collectives and side channel: a collective runs when every rank has come to it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cupynccl_reduce.communicators.fold import fold
from cupynccl_reduce.errors import CommunicationError, MismatchError

from .device import Point
from .findings import DeclarationError
from .memory import range_of, still
from .sites import operation

if TYPE_CHECKING:
    from collections.abc import Callable

    from cupynccl_reduce.detector import Operation
    from cupynccl_reduce.protocols import Array, Op

    from .device import SimStream, Work
    from .scheduler import Scheduler

__all__ = ["Exchange", "SimCommunicator", "SimControl"]


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """One rank's part in one collective."""

    what: Operation
    signature: str
    carries: str  # the bucket and parameters that were packed, or ""
    send: Array
    recv: Array
    before: Point  # its place in its stream
    work: Work


@dataclass(slots=True, eq=False)
class _Collective:
    """What all ranks queued as number k: it runs once, when every stream has come to it."""

    parts: dict[int, _Part] = field(default_factory=dict)
    done: bool = False


class Exchange:
    """What all ranks' communicators of one group share: collective k of every rank is the same."""

    def __init__(self, scheduler: Scheduler, world_size: int) -> None:
        self.scheduler = scheduler
        self.world_size = world_size
        self.aborted = False
        self.payloads: list[list[bytes]] = [[] for _ in range(world_size)]
        self._queued: list[list[_Collective]] = [[] for _ in range(world_size)]

    def next(self, rank: int) -> _Collective:
        """Return the collective that `rank` queues next."""
        number = len(self._queued[rank])
        others = (queued[number] for queued in self._queued if len(queued) > number)
        collective = next(others, None) or _Collective()
        self._queued[rank].append(collective)
        return collective

    def add(self, collective: _Collective, rank: int, part: _Part) -> None:
        """Add a rank's part; the last one to come says what the collective comes after."""
        parts = collective.parts
        parts[rank] = part
        if len(parts) < self.world_size:
            return
        after = [one.before for one in parts.values()]
        for former in self._queued[rank][-2:-1]:
            # One after the other, also where a rank's are on several streams.
            ends = [(former.parts[r].before, now.before.stream) for r, now in parts.items()]
            after += [Point(p.stream, p.position + 1) for p, now in ends if p.stream is not now]
        for one in parts.values():
            one.work.after = tuple(after)

    def run(self, collective: _Collective, run: Callable[[list[_Part]], None]) -> None:
        """Run a collective for all ranks, unless a rank has; they must have queued the same."""
        if collective.done:
            return
        collective.done = True
        parts = [collective.parts[rank] for rank in range(self.world_size)]
        carried = {part.carries for part in parts} - {""}
        if len({part.signature for part in parts}) > 1 or len(carried) > 1:
            told = "\n  ".join(
                f"rank {rank}: {part.what.kind} {part.what.label}, at {part.what.site}"
                for rank, part in enumerate(parts)
            )
            error = MismatchError(f"ranks queued different collectives:\n  {told}")
            self.scheduler.report(error)
            raise error
        check = self.scheduler.check
        if check is None:
            run(parts)
            return
        reads, writes = ([range_of(getattr(p, name)) for p in parts] for name in ("send", "recv"))
        check.wrap(parts[0].what, lambda: run(parts), reads, writes)()


class SimCommunicator:
    """protocols.Communicator: queues parts; the last rank to come to one runs it for all."""

    direct_bytes = 0
    regroup = None  # the end of a simulated rank ends its simulation

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self.rank = rank
        self.world_size = exchange.world_size
        self._exchange = exchange

    def reduce_scatter(self, send: Array, recv: Array, dtype: str, op: Op, stream: Any) -> None:
        """Queue: `recv` becomes row `rank` of the sum over ranks of `send`."""

        def run(parts: list[_Part]) -> None:
            # Results first: a row received in place is part of what another rank still reads.
            results = []
            for rank, part in enumerate(parts):
                row = slice(rank * part.recv.size, (rank + 1) * part.recv.size)
                result = part.recv.copy()
                fold([peer.send[row] for peer in parts], result, dtype, op)
                results.append(result)
            for part, result in zip(parts, results, strict=True):
                part.recv[...] = result

        self._queue("reduce_scatter", f"{op} of {recv.size} {dtype}", send, recv, run, stream)

    def all_gather(self, send: Array, recv: Array, dtype: str, stream: Any) -> None:
        """Queue: row r of `recv` becomes rank r's `send`."""

        def run(parts: list[_Part]) -> None:
            rows = [part.send.copy() for part in parts]
            for part in parts:
                for row, source in zip(part.recv.reshape(len(parts), -1), rows, strict=True):
                    row[...] = source

        self._queue("all_gather", f"of {send.size} {dtype}", send, recv, run, stream)

    def all_reduce(self, send: Array, recv: Array, dtype: str, op: Op, stream: Any) -> None:
        """Queue: `recv` becomes the sum over ranks of `send`."""

        def run(parts: list[_Part]) -> None:
            total = parts[0].recv.copy()
            fold([part.send for part in parts], total, dtype, op)
            for part in parts:
                part.recv[...] = total

        self._queue("all_reduce", f"{op} of {send.size} {dtype}", send, recv, run, stream)

    def broadcast(self, array: Array, root: int, dtype: str, stream: Any) -> None:
        """Queue: `array` becomes rank `root`'s."""

        def run(parts: list[_Part]) -> None:
            source = parts[root].send.copy()
            for part in parts:
                part.recv[...] = source

        self._queue("broadcast", f"from {root} of {array.size} {dtype}", array, array, run, stream)

    def group(self) -> AbstractContextManager[None]:
        """Return a context that does nothing: one stream keeps the order by itself."""
        return nullcontext()

    def check(self) -> None:
        """Find nothing: the scheduler reports what fails."""

    def close(self) -> None:
        """Nothing is owned."""

    def abort(self) -> None:
        """Free the hosts that wait in the side channel of this world."""
        self._exchange.aborted = self._exchange.scheduler.broken = True

    def _check_in_place(self, kind: str, send: Array, recv: Array) -> None:
        """Raise unless the arrays are apart, or in place as NCCL has it: one is a row, or all."""
        (start, nbytes), (other, other_nbytes) = range_of(send), range_of(recv)
        if start + nbytes <= other or other + other_nbytes <= start:
            return
        row = min(nbytes, other_nbytes) * self.rank
        expected = {"reduce_scatter": start + row, "all_gather": start - row}.get(kind, start)
        if other != expected:
            msg = f"{kind}: recv overlaps send, but does not lie where NCCL works in place"
            error = DeclarationError(msg)
            self._exchange.scheduler.report(error)
            raise error

    def _queue(  # noqa: PLR0917  # one declaration, written in one place
        self,
        kind: str,
        label: str,
        send: Array,
        recv: Array,
        run: Callable[[list[_Part]], None],
        stream: SimStream,
    ) -> None:
        exchange = self._exchange
        self._check_in_place(kind, send, recv)
        # What it carries is part of what ranks must agree on: sizes of two buckets may be equal.
        packed = exchange.scheduler.detector.written_by(send.ctypes.data) if send.size else None
        # (A gradient sent from where it lies has no name here, and may meet packed ones.)
        carries = packed.label if packed is not None and packed.kind.startswith("pack") else ""
        what = operation(kind, f"{label} with {carries}" if carries else label)
        before = stream.end
        collective = exchange.next(self.rank)
        work = stream.queue(
            what,
            lambda: exchange.run(collective, run),
            reads=[range_of(send)],
            writes=[range_of(recv)],
            checked=False,  # not alone: `run` checks the parts of all ranks together
        )
        work.after = None
        part = _Part(what, f"{kind} {label}", carries, still(send), still(recv), before, work)
        exchange.add(collective, self.rank, part)
        exchange.scheduler.step()


class SimControl:
    """protocols.Control between simulated ranks: blocks a host until all have come."""

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self._exchange = exchange
        self._rank = rank

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Collective, blocks the host: return every rank's payload, in rank order."""
        payloads = self._exchange.payloads
        payloads[self._rank].append(payload)
        turn = len(payloads[self._rank])

        def everyone_is_here() -> bool:
            return self._exchange.aborted or all(len(posts) >= turn for posts in payloads)

        self._exchange.scheduler.pause(everyone_is_here, f"all ranks in side-channel call {turn}")
        if any(len(posts) < turn for posts in payloads):
            msg = f"rank {self._rank}: another rank failed or left the world"
            raise CommunicationError(msg)
        return [posts[turn - 1] for posts in payloads]

    def close(self) -> None:
        """Nothing is owned."""

    def abort(self) -> None:
        """Free the hosts that wait here."""
        self._exchange.aborted = self._exchange.scheduler.broken = True
