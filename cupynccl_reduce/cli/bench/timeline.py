"""One watched step of the plain loop, for the picture of a comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .clocks import HostClock
from .rows.ours import Looped
from .trace import watch

if TYPE_CHECKING:
    from collections.abc import Callable

    from cupynccl_reduce.membership import World

    from .clocks import Clock
    from .rows.setup import Setup
    from .trace import Span

__all__ = ["make_clock", "trace_loop"]

WARM_UPS = 2


def make_clock(world: World) -> Clock:
    """Return the clock of this world's device."""
    if world.runtime.kind == "host":
        return HostClock()
    from .cuda import CudaClock

    runtime: Any = world.runtime
    return CudaClock(runtime.device)


def trace_loop(
    build: Callable[[World], Setup], world: World, synchronize: Callable[[], None]
) -> list[Span]:
    """Return the time-line of one planned step on this rank. Collective, blocks the host.

    `build` returns the setup for the world that is given to it, a watched one.
    """
    watched, observer = watch(world, make_clock(world))
    row = Looped(build(watched), "planned")
    for _ in range(WARM_UPS + 1):
        synchronize()
        world.control.all_gather(b"")
        observer.start()
        with observer.host_span("reduce_grad"):
            row.issue()
        with observer.host_span("wait"):
            row.land()
        synchronize()
    spans = observer.stop()
    row.close()
    return spans
