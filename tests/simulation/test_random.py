"""The correct engine gives no report: random workloads, ranks, schedules, and the byte oracle.

`CUPYNCCL_SIMULATION_RUNS=100000 pytest tests/simulation/test_random.py` runs more of them.
"""

from __future__ import annotations

import os

import pytest
from simulation.workloads import SCHEDULES, draw, simulate

RUNS = int(os.environ.get("CUPYNCCL_SIMULATION_RUNS", "1200"))
CHUNKS = 24


@pytest.mark.limit(max(300.0, RUNS / 4))
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_the_correct_engine_gives_no_report(chunk: int) -> None:
    for seed in range(chunk, RUNS, CHUNKS):
        work = draw(seed)
        try:
            simulate(work, seed=seed, schedule=SCHEDULES[seed // CHUNKS % len(SCHEDULES)])
        except BaseException as error:
            error.add_note(f"simulation.workloads.draw({seed}) is {work}")
            raise


def test_what_is_drawn_has_all_that_is_claimed() -> None:
    works = [draw(seed) for seed in range(1200)]
    cycles = [cycle for work in works for cycle in work.cycles]
    assert {work.world_size for work in works} == {1, 2, 3, 4, 8}
    assert {work.options["policy"] for work in works} == {"planned", "arrival"}
    assert {work.options["max_buffers"] for work in works} == {1, 2, 3}
    assert {habit for work in works for habit in work.habits} == {
        "drop",
        "keep",
        "reuse",
        "foreign",
    }
    assert {cycle.after for cycle in cycles} == {"", "close", "rebuild"}
    assert {cycle.gather for cycle in cycles} == {"", "new", "out", "parameters"}
    assert sum(cycle.failing_rank is not None for cycle in cycles) > 50
    assert sum(cycle.late and cycle.readers > 0 for cycle in cycles) > 300
    assert sum(cycle.backwards > 1 for cycle in cycles) > 300
    assert sum(len(work.brought) > 0 for work in works) > 100
    assert sum(work.producers > 0 and work.absent > 0 for work in works) > 300
    assert sum(any(s.uses == "many" for s in work.params) for work in works) > 300
