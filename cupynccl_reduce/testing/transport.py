"""Simulated collectives and side channel: a collective runs when every rank has come to it."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cupynccl_reduce.communicators.fold import fold
from cupynccl_reduce.errors import CommunicationError, MismatchError

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


@dataclass(slots=True, eq=False)
class _Part:
    """One rank's part in one collective."""

    what: Operation
    signature: str
    send: Array
    recv: Array
    stream: SimStream
    work: Work | None = None
    done: bool = False

    @property
    def at_head(self) -> bool:
        """Whether nothing is left before it on its stream."""
        return bool(self.stream.work) and self.stream.work[0] is self.work


class Exchange:
    """What all ranks' communicators of one group share: collective k of every rank is the same."""

    def __init__(self, scheduler: Scheduler, world_size: int) -> None:
        self.scheduler = scheduler
        self.world_size = world_size
        self.aborted = False
        self.parts: list[deque[_Part]] = [deque() for _ in range(world_size)]
        self.payloads: list[list[bytes]] = [[] for _ in range(world_size)]

    def may_run(self) -> bool:
        """Whether every rank's next part is at the head of its stream."""
        return all(parts and parts[0].at_head for parts in self.parts)

    def take(self) -> list[_Part]:
        """Take the next collective; report and raise MismatchError unless all parts are of one."""
        parts = [parts.popleft() for parts in self.parts]
        for part in parts:
            part.done = True
        if len({part.signature for part in parts}) > 1:
            told = "\n  ".join(
                f"rank {rank}: {part.what.kind} {part.what.label}, at {part.what.site}"
                for rank, part in enumerate(parts)
            )
            error = MismatchError(f"ranks queued different collectives:\n  {told}")
            self.scheduler.report(error)
            raise error
        return parts


class SimCommunicator:
    """protocols.Communicator: queues parts; the last rank to come to one runs it for all."""

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
        if packed is not None and packed.kind.startswith("pack"):
            label = f"{label} with {packed.label}"
        what = operation(kind, label)
        part = _Part(what, f"{kind} {label}", still(send), still(recv), stream)

        def run_once() -> None:
            if not part.done:
                run(exchange.take())

        exchange.parts[self.rank].append(part)
        part.work = stream.queue(
            what,
            run_once,
            reads=[range_of(send)],
            writes=[range_of(recv)],
            ready=lambda: part.done or exchange.may_run(),
        )
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
