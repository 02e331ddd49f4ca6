"""Any number of ranks of the real engine in one process, in an order that a seed picks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cupynccl_reduce.errors import CommunicationError, LayoutError
from cupynccl_reduce.protocols import World

from .device import SimStream
from .memory import MemoryCheck
from .runtime import SimRuntime
from .scheduler import Cancelled, Schedule, Scheduler
from .transport import Exchange, SimCommunicator, SimControl

if TYPE_CHECKING:
    from collections.abc import Callable

    from .sites import Wait

__all__ = ["Simulation", "SimulationResult"]

SCHEDULES = ("lazy", "eager", "random", "pct")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """What a simulation that found nothing has done.

    Attributes:
        values: what the function returned on each rank; a Reading has its value by now.
        steps: scheduling decisions.
        waits: every wait_event, in order; `drop_wait` is an index into them.
        overlaps: pairs of a pack and a collective of one rank that nothing orders.
    """

    values: list[Any]
    steps: int
    waits: tuple[Wait, ...]
    overlaps: int


@dataclass(frozen=True, slots=True)
class Simulation:
    """One run of `world_size` ranks; the same arguments give the same run.

    Args:
        world_size: ranks, each a thread of which exactly one runs at a time.
        seed: decides whatever `schedule` leaves open.
        schedule: "lazy" runs device work as late as possible, "eager" as early, "random" chooses
            among all that may run, "pct" follows random priorities with `depth - 1` changes.
        depth: of "pct".
        drop_wait: leave out the wait_event with this number: an edge that is needed is then found.
        check_declarations: run every pack and unpack a second time on memory that is scrambled
            wherever it declares no access, and compare. Slow; for small workloads.

    Raises:
        LayoutError: an argument that cannot work.
    """

    world_size: int
    seed: int = 0
    schedule: Schedule = "random"
    depth: int = 3
    drop_wait: int | None = None
    check_declarations: bool = False

    def __post_init__(self) -> None:
        for name, least in (("world_size", 1), ("seed", None), ("depth", 1), ("drop_wait", 0)):
            value = getattr(self, name)
            if name == "drop_wait" and value is None:
                continue
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not whole or (least is not None and value < least):
                at_least = "" if least is None else f" >= {least}"
                msg = f"{name} must be an integer{at_least}, not {value!r}"
                raise LayoutError(msg)
        if self.schedule not in SCHEDULES:
            msg = f"schedule must be one of {SCHEDULES}, not {self.schedule!r}"
            raise LayoutError(msg)

    def run(self, function: Callable[[World], Any]) -> SimulationResult:
        """Run `function(world)` once per rank to the end; blocks.

        Make arrays with `world.runtime.produce`, read results with `world.runtime.consume`.

        Raises:
            RaceError, DeadlockError, MismatchError: what was found, with a line that replays it.
            DeclarationError: an operation that touches bytes which it does not declare.
            Whatever `function` raised first, otherwise.
        """
        scheduler = Scheduler(self.world_size, self.seed, self.schedule, self.depth)
        scheduler.dropped_wait = self.drop_wait
        memory = MemoryCheck(scheduler) if self.check_declarations else None
        exchange = Exchange(scheduler, self.world_size)
        values: list[Any] = [None] * self.world_size
        causes: list[BaseException] = []
        freed: list[BaseException] = []

        def body(rank: int) -> None:
            try:
                runtime = SimRuntime(scheduler, rank, memory)
                stream = SimStream(scheduler, rank, "communication stream")
                alone = self.world_size == 1
                with World(
                    rank,
                    self.world_size,
                    rank,
                    runtime,
                    SimCommunicator(exchange, rank),
                    SimControl(exchange, rank),
                    stream,
                    stream if alone else SimStream(scheduler, rank, "copy stream"),
                ) as world:
                    values[rank] = function(world)
            except Cancelled:
                pass  # after a finding, or another rank's failure
            except BaseException as error:  # noqa: BLE001  # raised again in the caller's thread
                # Whoever meets what is found already, or is freed by another, is a consequence.
                if scheduler.finding is None and not isinstance(error, CommunicationError):
                    error.add_note(f"on rank {rank} of {self!r}")
                    causes.append(error)
                else:
                    freed.append(error)

        scheduler.run([lambda rank=rank: body(rank) for rank in range(self.world_size)])  # type: ignore[misc]
        if causes:
            raise causes[0]
        if scheduler.finding is not None:
            scheduler.finding.args = (f"{scheduler.finding}\n  replay: {self!r}.run(...)",)
            raise scheduler.finding
        if freed:
            raise freed[0]
        return SimulationResult(
            values=values,
            steps=scheduler.steps,
            waits=tuple(scheduler.waits),
            overlaps=scheduler.overlaps,
        )
