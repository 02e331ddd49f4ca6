"""Edge deletion: leave out each wait of a workload in turn. Each is found, or has its reason."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from simulation.planted import CAST, FLOATS, WORKLOADS
from simulation.programs import Program, eight_buckets, growing_gather
from simulation.workloads import Cycle, Workload, simulate

from cupynccl_reduce import ReduceError

if TYPE_CHECKING:
    from collections.abc import Iterator

RICH = Workload(
    world_size=2,
    params=(*FLOATS[:4], *CAST[4:]),
    bucket_bytes=36,
    cycles=(
        Cycle(readers=2, gather="out", backwards=2),
        Cycle(readers=1, late=True, gather="parameters"),
        Cycle(readers=1),
    ),
    producers=2,
    habits=("drop", "drop", "foreign"),
    brought=("p1",),
)
ARRIVAL = replace(RICH, options={"policy": "arrival"})
RUNS = {
    "planned, 2 ranks": RICH,
    "planned, 1 rank": replace(RICH, world_size=1),
    "arrival, 2 ranks": ARRIVAL,
    "arrival, 1 rank": replace(ARRIVAL, world_size=1),
    "reuse": WORKLOADS["reuse"],
    "brought": WORKLOADS["brought"],
}


def _engine(site: str) -> str:
    """Return "method" of "file.py:line method (called from ...) for the event ..."."""
    return site.split(" for the event")[0].split(" (called")[0].split()[1]
