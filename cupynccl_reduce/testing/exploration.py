"""All schedules of a small program, one after the other. How one runs is not told here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cupynccl_reduce.errors import check_integer

from .choices import Chosen, ImpossibleAnswerError
from .simulation import Simulation, SimulationResult, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from cupynccl_reduce.membership import World

__all__ = ["Exploration", "explore"]


@dataclass(frozen=True, slots=True)
class Exploration:
    """What `explore` has run without finding anything.

    Attributes:
        runs: distinct schedules that were run to their end.
        exhausted: whether there are no more within the bounds.
    """

    runs: int
    exhausted: bool


def explore(
    function: Callable[[World], Any],
    world_size: int,
    *,
    check: Callable[[SimulationResult], None] | None = None,
    max_runs: int = 10_000,
    max_preemptions: int = 2,
) -> Exploration:
    """Run `function(world)` under every schedule that can make a difference; blocks.

    For small programs: a few buckets and ranks, one cycle. Depth first by what is chosen; each run
    starts from the beginning, so `function` must do the same each time.

    These are chosen: what a query (`Event.done`) answers, no at once or yes when that is so; whose
    wait ends first, when all hosts wait and other ranks take part in what each waits for; and,
    where a rank has several threads (`runtime.spawn`), which of them goes on wherever one could
    lose its turn.

    These are not, because they change nothing that can be seen: the order of device work, since a
    run without a race gives the same bytes in any, so it runs only when a host waits for it, and no
    more of it than that; and the order in which ranks go on, which share no memory and meet only in
    collectives and the side channel: none of them makes an event pass that another asks about.
    (What is chosen are persistent sets, as in Godefroid, LNCS 1032, 1996.)

    These bounds cut something off: one record answers no at most twice, so that polling ends, and
    one run takes the turn from a thread that could go on at most `max_preemptions` times (context
    bounding: Musuvathi and Qadeer, PLDI 2007); without `spawn` there is no such switch.

    Args:
        function: one rank's part, as for `Simulation.run`.
        world_size: ranks.
        check: called with the result of each run, when readings have their values; raises if wrong.
        max_runs: where to give up; runs that meet an impossible answer count too.
        max_preemptions: see above.

    Raises:
        LayoutError: a bound that cannot work.
        Whatever `Simulation.run` and `check` raise, with `Simulation(..., schedule=(...))`, the
        line that replays it.
    """
    check_integer("max_runs", max_runs, 1)
    check_integer("max_preemptions", max_preemptions, 0)
    runs = 0
    following: tuple[int, ...] | None = ()
    for _ in range(max_runs):
        if following is None:
            break
        choices = following
        simulation = Simulation(world_size, schedule=choices)
        chosen = Chosen(choices, max_preemptions)
        try:
            result = run_ranks(simulation, function, chosen)
        except ImpossibleAnswerError:
            pass
        else:
            runs += 1
            if check is not None:
                _check(check, result, simulation)
        following = _following(chosen.trace)
    return Exploration(runs, exhausted=following is None)


def _check(
    check: Callable[[SimulationResult], None], result: SimulationResult, simulation: Simulation
) -> None:
    try:
        check(result)
    except Exception as error:
        error.add_note(f"replay: {simulation!r}.run(...)")
        raise


def _following(trace: list[tuple[int, int]]) -> tuple[int, ...] | None:
    """Return the choices of the next run, depth first; None after the last."""
    for number in reversed(range(len(trace))):
        chosen, options = trace[number]
        if chosen + 1 < options:
            return (*(before for before, _ in trace[:number]), chosen + 1)
    return None
