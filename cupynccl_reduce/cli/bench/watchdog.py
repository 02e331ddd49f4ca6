"""What watching a world costs: the time of a launch, and of a core while nothing is launched."""

from __future__ import annotations

import gc
import time
from array import array
from statistics import median
from typing import TYPE_CHECKING, Any

from cupynccl_reduce.errors import LayoutError

from .measure import median_ratio

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cupynccl_reduce.membership import World

    from .measure import Sample

__all__ = ["WATCHDOG_ROWS", "check_watched", "measure_watchdog"]

WATCHDOG_ROWS = ("unwatched", "planned", "compared")
LAUNCHES, BATCHES = 64, 200  # a step has fewer: their events are used again in the next
IDLE_S = 5.0


def check_watched(world: World) -> None:
    """Raise LayoutError if this world has no watchdog."""
    if world.status.watchdog is None:
        msg = "--watchdog needs two ranks or more: one alone is not watched"
        raise LayoutError(msg)


def measure_watchdog(world: World, samples: Mapping[str, Sequence[Sample]]) -> dict[str, float]:
    """Return what rank 0 pays, which hears all ranks, and the most that another one does.

    Beside it how much longer a step takes, from `samples` of rows.

    Collective, blocks the host for some seconds.
    """
    mine = [_launch_us(world), _idle_percent(world)]
    payloads = world.control.all_gather(array("d", mine).tobytes())
    first, *others = (list(array("d", payload)) for payload in payloads)
    most = [max(one) for one in zip(*others, strict=True)]
    told = {
        "microseconds of a launch, rank 0": first[0],
        "microseconds of a launch, another rank at most": most[0],
        "idle, percent of a core, rank 0": first[1],
        "idle, percent of a core, another rank at most": most[1],
    }
    for name, check in (("planned", "heartbeat"), ("compared", "sync")):
        if name in samples and "unwatched" in samples:
            ratio = median_ratio(samples[name], samples["unwatched"])
            told[f"step with check={check!r}, times one that is not watched"] = ratio
    return told


def _launch_us(world: World) -> float:
    """Return the host time of noting a launch, of which nothing is queued."""
    what: dict[str, Any] = {
        "stream": world.stream,
        "what": "bench",
        "bucket": 0,
        "dtype": "float32",
        "nbytes": 0,
        "calls": 1,
        "names": ("nothing",),
    }
    flight = world.status.flight
    assert flight is not None
    batches = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(BATCHES):
            started = time.perf_counter()
            for _ in range(LAUNCHES):
                with world.launching(**what):
                    pass
            batches.append((time.perf_counter() - started) / LAUNCHES * 1e6)
            world.stream.synchronize()
            flight.poll()
    finally:
        gc.enable()
    return median(batches)


def _idle_percent(world: World) -> float:
    """Return how much of a core this process takes while its main thread sleeps."""
    world.control.all_gather(b"")
    wall, busy = time.perf_counter(), time.process_time()
    time.sleep(IDLE_S)
    return (time.process_time() - busy) / (time.perf_counter() - wall) * 100
