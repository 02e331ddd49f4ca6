"""The third oracle: packs and collectives that nothing orders. It alone sees a wait too many."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulation.planted import BASE, FLOATS
from simulation.workloads import SCHEDULES, Cycle, Workload, draw, simulate

ONE = (Cycle(readers=1),)


def buckets(work: Workload) -> int:
    """Count planned buckets of one dtype that hold an element."""
    filled = total = 0
    for spec in reversed(work.params):
        if spec.numel and (not total or filled + spec.nbytes > work.bucket_bytes):
            total, filled = total + 1, 0
        filled += spec.nbytes
    return total


@pytest.mark.parametrize("policy", ["planned", "arrival"])
@pytest.mark.parametrize("max_buffers", [1, 2, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_buffers_overlap_and_one_does_not(policy: str, max_buffers: int, schedule: str) -> None:
    for world_size in (2, 3, 4):
        for bucket_bytes in (8, 24, 36, 60):
            work = replace(
                BASE,
                world_size=world_size,
                bucket_bytes=bucket_bytes,
                options={"policy": policy, "max_buffers": max_buffers, "op": "sum"},
                cycles=ONE,
            )
            overlaps = simulate(work, schedule=schedule).overlaps
            assert (overlaps > 0) == (max_buffers > 1), (world_size, bucket_bytes)


def test_random_workloads_overlap_where_they_have_two_buckets() -> None:
    seen = 0
    for seed in range(900):
        work = draw(seed)
        dtypes = {(s.dtype, s.reduce_dtype, s.shard_dtype, s.uses) for s in work.params}
        if work.world_size == 1 or len(dtypes) > 1 or work.absent:
            continue
        several = buckets(work) > 1
        accumulates = any(cycle.backwards > 1 for cycle in work.cycles)
        if several or not (accumulates or len(work.cycles) > 1):
            work = replace(work, habits=("keep",))
            overlaps = simulate(work, schedule="lazy").overlaps
            enough = work.options["max_buffers"] > 1
            if several or not enough:
                assert (overlaps > 0) == (enough and several), (seed, work, overlaps)
                seen += 1
    assert seen > 10


def test_pairs_are_as_many_as_two_buffers_allow() -> None:
    # Bucket k packs while k-1 is sent, and no more: one pair for each bucket but the first.
    for count in (2, 3, 6):
        work = replace(BASE, params=FLOATS[:count], bucket_bytes=1, cycles=ONE)
        assert simulate(work, schedule="lazy").overlaps == 2 * (count - 1)
