"""Edge deletion: leave out each wait of a workload in turn. Each is found, or has its reason."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from simulation.planted import CAST, FLOATS, WORKLOADS
from simulation.programs import Program, gather_for_another_stream
from simulation.workloads import Cycle, Workload, simulate

from cupynccl_reduce import ReduceError

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
    "gather for another stream": Program(gather_for_another_stream),
}


# Where a wait may be left out in some workload, and nothing goes wrong there. Each of these sites
# is needed in another of RUNS.
UNNEEDED_SOMEWHERE = {
    "_prepare": "the first pack waits for the caller too, unless it hands over no gradient",
    "read_alike": "a later pack waits for that producer, whose marks come after this one",
    "wait": "this stream waits again, in gather() or in a second wait(), before it reads",
    "_hold_back_writers": "the gather has waited for that reader, or nothing is written again",
    "_release": "the producer's next wait comes before its allocator uses the memory",
    "wait_packed": "wait() makes the producers wait for the packs before they write again",
    "_queue": "that stream has done nothing to what this gather reads or writes, and does not next",
}
# One rank packs on the communication stream: what follows there is in order without an event.
ONE_STREAM = {"_send", "_reuse"}


def test_every_wait_is_needed_or_has_its_reason() -> None:
    found: dict[str, int] = defaultdict(int)
    sites = set()
    for work in RUNS.values():
        waits = simulate(work, schedule="lazy").waits
        for number, wait in enumerate(waits):
            if not wait.site.in_engine:
                continue
            site = wait.site.engine
            method = site.split()[1]
            sites.add(site)
            if wait.known:
                continue
            try:
                simulate(work, schedule="lazy", drop_wait=number)
            except (ReduceError, AssertionError):
                found[site] += 1
            else:
                assert method in UNNEEDED_SOMEWHERE, f"{number}: {wait.site} is not needed"
    assert {site for site in sites if not found[site]} == set()
    assert sum(found.values()) > 400


def test_only_one_rank_waits_on_its_own_stream() -> None:
    for policy in ("planned", "arrival"):
        work = replace(RICH, options={"policy": policy})
        for world_size in (1, 2):
            waits = simulate(replace(work, world_size=world_size), schedule="lazy").waits
            useful = {w.site.engine.split()[1] for w in waits if not w.known}
            assert ONE_STREAM.isdisjoint(useful) == (world_size == 1)
