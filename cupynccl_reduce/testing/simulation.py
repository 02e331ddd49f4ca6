"""Any number of ranks of the real engine in one process, in an order that a seed picks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from cupynccl_reduce.errors import CommunicationError, LayoutError, check_integer
from cupynccl_reduce.membership import World

from .choices import Chosen
from .device import SimStream
from .memory import MemoryCheck
from .runtime import SimRuntime
from .scheduler import Cancelled, Scheduler
from .schedules import SCHEDULES, Schedule, ScheduleName, make_schedule
from .transport import Exchange, SimCommunicator, SimControl

if TYPE_CHECKING:
    from collections.abc import Callable

    from .sites import Wait

__all__ = ["Simulation", "SimulationResult", "run_ranks"]


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

    @property
    def unrecorded(self) -> tuple[Wait, ...]:
        """The waits for events that had not been recorded by then: in CUDA too they are no-ops.

        One that is not meant is a record that comes too late; `site` says who asked.
        """
        return tuple(wait for wait in self.waits if wait.recorded is None)


@dataclass(frozen=True, slots=True)
class Simulation:
    """One run of `world_size` ranks; the same arguments give the same run.

    Args:
        world_size: ranks, each a thread of which exactly one runs at a time.
        seed: decides whatever `schedule` leaves open.
        schedule: "lazy" runs device work as late as possible, "eager" as early, "random" chooses
            among all that may run, "pct" follows random priorities with `depth - 1` changes. A
            tuple of integers replays what `explore` found.
        depth: of "pct".
        drop_wait: leave out the wait_event with this number: an edge that is needed is then found.
        check_declarations: run every operation a second time on memory that is scrambled wherever
            it declares no access, and compare. Slow; for small workloads.

    Raises:
        LayoutError: an argument that cannot work.
    """

    world_size: int
    seed: int = 0
    schedule: ScheduleName | tuple[int, ...] = "random"
    depth: int = 3
    drop_wait: int | None = None
    check_declarations: bool = False

    def __post_init__(self) -> None:
        for name, least in (("world_size", 1), ("seed", None), ("depth", 1), ("drop_wait", 0)):
            value = getattr(self, name)
            if name == "drop_wait" and value is None:
                continue
            check_integer(name, value, least)
        if isinstance(self.schedule, tuple):
            known = all(isinstance(choice, int) and choice >= 0 for choice in self.schedule)
        else:
            known = self.schedule in SCHEDULES
        if not known:
            msg = (
                f"schedule must be one of {SCHEDULES} or a tuple of integers >= 0, not "
                f"{self.schedule!r}"
            )
            raise LayoutError(msg)

    def run(self, function: Callable[[World], Any]) -> SimulationResult:
        """Run `function(world)` once per rank to the end; blocks.

        Make arrays with `world.runtime.produce`, read results with `world.runtime.consume`, queue
        kernels of your own with `world.runtime.queue`, start threads with `world.runtime.spawn`.

        Raises:
            RaceError, DeadlockError, MismatchError: what was found, with a line that replays it.
            DeclarationError: an operation that touches bytes which it does not declare.
            Whatever `function` raised first, otherwise.
        """
        if isinstance(self.schedule, tuple):
            return run_ranks(self, function, Chosen(self.schedule))
        return run_ranks(self, function, make_schedule(self.schedule, self.seed, self.depth))


def run_ranks(
    simulation: Simulation, function: Callable[[World], Any], schedule: Schedule
) -> SimulationResult:
    """Run `function(world)` once per rank, in the order that `schedule` decides; blocks."""
    world_size = simulation.world_size
    scheduler = Scheduler(world_size, schedule)
    scheduler.dropped_wait = simulation.drop_wait
    scheduler.check = MemoryCheck() if simulation.check_declarations else None
    exchange = Exchange(scheduler, world_size)
    values: list[Any] = [None] * world_size
    causes: list[BaseException] = []
    freed: list[BaseException] = []

    def body(rank: int) -> None:
        try:
            runtime = SimRuntime(scheduler, rank)
            stream = SimStream(scheduler, rank, "communication stream")
            with World(
                rank,
                world_size,
                rank,
                runtime,
                SimCommunicator(exchange, rank),
                SimControl(exchange, rank),
                stream,
                stream if world_size == 1 else SimStream(scheduler, rank, "copy stream"),
            ) as world:
                values[rank] = function(world)
                runtime.join_all()
                scheduler.host.returned = True
        except Cancelled:
            pass  # after a finding, or another rank's failure
        except BaseException as error:  # noqa: BLE001  # raised again in the caller's thread
            # Whoever meets what is found already, or is freed by another, is a consequence.
            if scheduler.finding is None and not isinstance(error, CommunicationError):
                error.add_note(f"on rank {rank} of {simulation!r}")
                causes.append(error)
            else:
                freed.append(error)

    scheduler.run([partial(body, rank) for rank in range(world_size)])
    if causes:
        raise causes[0]
    if scheduler.finding is not None:
        told = f"{scheduler.finding}\n  replay: {simulation!r}.run(...)"
        scheduler.finding.args = (told,)
        raise scheduler.finding
    if freed:
        raise freed[0]
    return SimulationResult(
        values=values,
        steps=scheduler.steps,
        waits=tuple(scheduler.waits),
        overlaps=scheduler.overlaps,
    )
