"""Every planted bug is found: missing edges and lifetimes by the detector, in a single run."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import pytest
from simulation.planted import PLANTED, WORKLOADS, Planted
from simulation.workloads import SCHEDULES, simulate

from cupynccl_reduce.errors import DeadlockError, DeclarationError, MismatchError, RaceError

if TYPE_CHECKING:
    from cupynccl_reduce.testing import SimulationResult

FOUND = {
    "race": RaceError,
    "deadlock": DeadlockError,
    "mismatch": MismatchError,
    "declaration": DeclarationError,
    "bytes": AssertionError,
    "memory": AssertionError,
}


@cache
def correct(workload: str, schedule: str) -> SimulationResult:
    return simulate(WORKLOADS[workload], schedule=schedule, seed=1)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("workload", list(WORKLOADS))
def test_the_correct_engine_gives_no_report(workload: str, schedule: str) -> None:
    correct(workload, schedule)


@pytest.mark.parametrize("planted", PLANTED, ids=str)
def test_planted_bug_is_found(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    work = WORKLOADS[planted.workload]
    if planted.found == "overlap":
        before = correct(planted.workload, "lazy").overlaps
        assert before > 0
        planted.plant(monkeypatch)
        assert simulate(work, schedule="lazy", seed=1).overlaps == 0
        return
    planted.plant(monkeypatch)
    # A race is found in whatever order things run: "eager" is the quiet machine that hides bugs.
    for schedule in ("lazy",) if planted.needs_no else SCHEDULES:
        with pytest.raises(FOUND[planted.found]) as caught:
            simulate(
                work,
                schedule=schedule,
                seed=1,
                check_declarations=planted.found == "declaration",
            )
        text = str(caught.value)
        if planted.found == "race":
            assert "earlier" in text
            assert "never waited" in text or "given back" in text
        elif planted.found in ("bytes", "memory"):
            assert text.startswith(planted.found)
