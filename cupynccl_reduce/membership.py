"""The world that a process joined: its parts, how it breaks, how it ends. Nothing of devices."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, TypeVar

from .agreement import agree
from .errors import CommunicationError, LayoutError, MismatchError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from .errors import ReduceError
    from .flight import Flight
    from .protocols import Communicator, Control, Runtime
    from .watchdog import Watchdog

__all__ = ["Status", "World", "join"]

T = TypeVar("T")


class Status:
    """What may change in a world: its first fault, and which reducer has a backward open."""

    flight: Flight | None = None  # of what is launched, where somebody watches it
    watchdog: Watchdog | None = None
    compares = False  # whether every launch is compared before it is queued
    rejoin: Callable[[World], World] | None = None  # makes the world of the survivors

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.closed = False
        self.shrunk = False  # its survivors have another world, or tried to
        self.fault: BaseException | None = None
        self.open_backward: object | None = None
        self.kept: list[object] = []  # what queued work of a broken world may still use


@dataclass(frozen=True, slots=True, eq=False)
class World:
    """The runtime and communicator this process joined. Made by `connect()` or `run_local()`.

    `stream` is the communication stream: the one queue of all collectives of this world.
    `copy_stream` is that of packs; one rank alone has one stream for both, because it packs
    straight into its shards. A world is a context manager: leaving it closes it, or aborts it when
    an exception passes through.
    """

    rank: int
    world_size: int
    local_rank: int
    runtime: Runtime
    communicator: Communicator
    control: Control
    stream: Any
    copy_stream: Any
    status: Status = field(default_factory=Status)

    @property
    def usable(self) -> bool:
        """Whether this world is neither closed nor broken."""
        return self.status.fault is None and not self.status.closed

    def check(self) -> None:
        """Raise if this world is closed or broken; the first cause is chained."""
        if self.status.fault is not None:
            msg = (
                f"rank {self.rank}: this world is broken ({_tell(self.status.fault)}); "
                "shrink() it, or leave it and connect again"
            )
            raise self._like(msg) from self.status.fault
        if self.status.closed:
            msg = f"rank {self.rank}: this world is closed; connect() makes a new one"
            raise ProtocolError(msg)

    def fail(self, fault: BaseException) -> BaseException:
        """Mark the world broken by its first fault, free ranks that wait; return what to raise.

        A launch that stopped half way leaves the ranks out of step, so there is no way back. An
        error of the transport is a consequence: blocks the host, for two seconds at most, until
        the watchdog knows of what.
        """
        cause = fault
        watchdog = self.status.watchdog
        if watchdog is not None and self.usable:
            if isinstance(fault, CommunicationError):
                if fault.report is None:
                    cause = watchdog.explain(fault) or fault
            elif not isinstance(fault, MismatchError):  # which every rank raises
                watchdog.raised(fault)
        with self.status.lock:
            if self.status.fault is None:
                self.status.fault = cause
        self.communicator.abort()  # again and again: Ctrl-C may have cut the first time short
        self.control.abort()
        if isinstance(fault, MismatchError) or not isinstance(fault, Exception):
            return fault  # says all by itself; KeyboardInterrupt keeps its meaning
        return self._broken()

    def agree(
        self, what: str, entries: Sequence[str], *, refused: ReduceError | None = None
    ) -> None:
        """Compare `entries` between ranks: see agreement.agree. Ranks that differ break nothing.

        Collective, blocks the host. A rank that does not answer breaks the world.
        """
        try:
            agree(self.control, what, entries, refused=refused)
        except CommunicationError as error:
            raise self.fail(error) from error
        except BaseException as error:
            if not isinstance(error, Exception):
                self.fail(error)  # Ctrl-C: the others may wait for what this rank did not send
            raise

    def guard(self, action: Callable[..., T], *args: Any) -> T:
        """Do what queues work or waits for ranks; if it fails, break the world and say why.

        Raises CommunicationError too if the world broke meanwhile: what it waited for is garbage.
        """
        try:
            result = action(*args)
        except BaseException as error:
            failure = self.fail(error)
            if failure is error:
                raise
            raise failure from error
        if self.status.fault is not None:
            raise self._broken() from self.status.fault
        return result

    def shrink(self) -> World:
        """Return a world of the ranks that survived this one's fault, in their old order.

        Call it once, outside of backward(), when an error said that the world is broken. Collective
        among the survivors, blocks the host: until all ranks that still answer have called it, for
        connect()'s `timeout_s` at most. This world is closed by it. Its arrays stay readable, but
        the shards of the ranks that are gone are lost: build a new registry and reducer on the new
        world, and load parameters and optimizer state from a checkpoint. `world_size` is another,
        so a mean over ranks has another divisor.

        What started the ranks must let the others live when one dies: mpirun does with
        `--enable-recovery`. As MPI itself is lost by then, the process ends at exit without it,
        with code 0, 1 after an unhandled exception, or 74 if the new world broke, too.

        Raises:
            ProtocolError: this world is not broken, is closed, or was shrunk already.
            LayoutError: it was not watched (check="off"), or MPI carries its data, which does not
                go on after a rank is gone.
            CommunicationError: the others went on without this rank, or take it for gone; or fewer
                than half of the ranks are left, as after a split of the network.
        """
        status = self.status
        with status.lock:
            states = {
                "closed": status.closed,
                "shrunk already": status.shrunk,
                "whole": status.fault is None,
            }
            state = next((state for state, it_is in states.items() if it_is), "")
            if state:
                msg = f"rank {self.rank}: shrink() is for a world that broke; this one is {state}"
                raise ProtocolError(msg)
            if status.rejoin is None:
                told = (
                    "MPI does not go on after a rank is gone; start again from a checkpoint"
                    if self.communicator.regroup is None
                    else "nobody watched this world; connect(check='heartbeat')"
                )
                msg = f"rank {self.rank}: shrink(): the survivors cannot go on: {told}"
                raise LayoutError(msg)
            status.shrunk = True
        return status.rejoin(self)

    def launching(self, **what: Any) -> AbstractContextManager[None]:
        """Return a context that notes what it queues on `stream`, for the watchdog.

        Keywords are those of `Flight.launch`.
        """
        flight = self.status.flight
        return nullcontext() if flight is None else flight.launch(**what)

    def _broken(self) -> CommunicationError:
        fault = self.status.fault
        assert fault is not None
        return self._like(f"rank {self.rank}: the world is broken: {_tell(fault)}")

    def _like(self, message: str) -> CommunicationError:
        """Return an error that tells `message`, and has the first fault's fields."""
        fault, error = self.status.fault, CommunicationError(message)
        error.report, error.ranks = getattr(fault, "report", None), getattr(fault, "ranks", ())
        return error

    def close(self) -> None:
        """Finish queued work, then give everything back. Blocks the host. Idempotent.

        Raises ProtocolError inside backward.
        """
        if self.status.open_backward is not None and self.usable:
            msg = f"rank {self.rank}: close() inside backward(): leave the with block first"
            raise ProtocolError(msg)
        with self.status.lock:
            if self.status.closed:
                return
            self.status.closed = True
        try:
            if self.status.fault is None:
                self.guard(self.stream.synchronize)
        finally:
            if self.status.watchdog is not None:
                self.status.watchdog.stop()
            # Goodbye first: NCCL's teardown waits for peers, which are to know that this one left.
            self.control.close()
            self.communicator.close()
            self.runtime.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self.fail(error)
        self.close()

    def __repr__(self) -> str:
        state = "BROKEN" if self.status.fault else "CLOSED" if self.status.closed else "OPEN"
        return f"<World {self.runtime.kind} rank {self.rank} of {self.world_size} {state}>"


def join(place: tuple[int, int, int], runtime: Any, communicator: Any, control: Control) -> World:
    """Join the parts of a world at `place` (rank, world_size, local_rank), with new streams."""
    stream = runtime.stream()
    copy_stream = runtime.stream() if place[1] > 1 else stream
    return World(*place, runtime, communicator, control, stream, copy_stream)


def _tell(fault: BaseException) -> str:
    """Return what an exception says, or what it is: Ctrl-C says nothing."""
    return str(fault) or type(fault).__name__
