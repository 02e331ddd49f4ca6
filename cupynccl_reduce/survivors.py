"""After a fault: join the ranks that are left into a world of their own, in the same processes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from .errors import CommunicationError
from .membership import join
from .watching import leave_safely, watch

if TYPE_CHECKING:
    from .control.channel import Channel
    from .control.local import LocalControl
    from .membership import World

__all__ = ["keep"]


def keep(
    world: World, beats: Channel | LocalControl, timeout_s: float, *, alone: bool = True
) -> None:
    """Watch a world, and let its survivors shrink it. `alone`: no other rank in this process."""
    watch(world, beats, timeout_s, alone=alone)
    if world.communicator.regroup is not None:
        world.status.rejoin = partial(_rejoin, beats=beats, timeout_s=timeout_s, alone=alone)


def _rejoin(world: World, *, beats: Channel | LocalControl, timeout_s: float, alone: bool) -> World:
    """Return the survivors' world. Collective among them, blocks the host."""
    fault, regroup = world.status.fault, world.communicator.regroup
    assert regroup is not None
    report = getattr(fault, "report", None)
    blamed = () if report is None else report.ranks
    if report is not None and report.reason in ("died", "stopped") and world.rank in blamed:
        msg = f"rank {world.rank}: the others take this rank for gone ({report.reason})"
        raise CommunicationError(msg) from fault
    ranks, control = beats.regroup(blamed, timeout_s)
    try:
        _check_majority(world, len(ranks))
        place = ranks.index(world.rank), len(ranks), world.local_rank
        survivors = join(place, world.runtime, regroup(control, ranks), control)
    except BaseException:
        control.abort()
        control.close()
        raise
    survivors.status.kept.append(world)  # its queued work may still use what it holds
    survivors.status.compares = world.status.compares
    _retire(world)
    keep(survivors, control, timeout_s, alone=alone)
    if alone:
        leave_safely(survivors)
    return survivors


def _check_majority(world: World, left: int) -> None:
    if 2 * left < world.world_size:
        msg = (
            f"rank {world.rank}: {left} of {world.world_size} ranks are left, too few to go on; "
            "start the job again from its last checkpoint"
        )
        raise CommunicationError(msg) from world.status.fault


def _retire(world: World) -> None:
    """Close a world, but for its runtime, with which the survivors go on."""
    world.status.closed = True
    if world.status.watchdog is not None:
        world.status.watchdog.stop()
    world.control.close()
