"""The fault matrix: what one rank suffers is named on every other rank, and the job ends.

A seeded sample runs by default, all of it with TEST_FAULTS=all (about ten minutes).
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import pytest
from mpi.launch import mpirun

from cupynccl_reduce.sentinel import STUCK

if TYPE_CHECKING:
    from pathlib import Path

REASONS = {
    "kill": "died",
    "segfault": "died",
    "_exit": "died",
    "stop": "stopped",
    "gil": "stopped",
    "raise": "raised",
    "leave": "left",
    "sleep": "did not call",
    "swap": "mismatch",
    "slow": "",
}
POINTS = ("registry", "between", "backward", "wait", "gather", "missing")
# A rank that answers and does not come may still load its data; the swap needs launches after it;
# and what leaves backward() as an exception or a goodbye has a story of its own.
LEFT_OUT = {
    *(("sleep", point) for point in ("registry", "gather", "missing")),
    *(("swap", point) for point in ("registry", "backward", "wait", "gather")),
    ("leave", "backward"),
}
CASES = [
    (kind, point, ranks, bad)
    for kind in REASONS
    for point in POINTS
    for ranks in (2, 3, 4)
    for bad in {0, ranks - 1}
    # Of two, Open MPI 5 ends the other at once when one exits with a code, recovery or not.
    if (kind, point) not in LEFT_OUT and (kind, ranks) != ("_exit", 2)
]
SAMPLE = 16


def chosen() -> list[tuple[str, str, int, int]]:
    if os.environ.get("TEST_FAULTS") == "all":
        return CASES
    order = random.Random(7).sample(CASES, len(CASES))  # no secret
    kinds: dict[str, tuple[str, str, int, int]] = {}
    for case in order:
        kinds.setdefault(case[0], case)  # one of each kind, then others
    return [*kinds.values(), *[c for c in order if c not in kinds.values()]][:SAMPLE]


@pytest.mark.limit(90)
@pytest.mark.parametrize(("kind", "point", "ranks", "bad"), chosen())
def test_a_fault_is_named_on_every_other_rank(
    kind: str, point: str, ranks: int, bad: int, tmp_path: Path
) -> None:
    start_and_check((kind, point, ranks, bad), "host", tmp_path)


def test_a_killed_rank_ends_the_job(tmp_path: Path) -> None:
    result = mpirun(3, "faults.py", "kill", "wait", "1", "host", str(tmp_path), runner=())
    assert result.returncode != 0
    assert not result.lines("FINE")


def test_a_rank_that_holds_its_gil_for_ever_ends_with_code_75() -> None:
    result = mpirun(2, "stuck.py", runner=())
    assert result.returncode == STUCK, result
    assert result.lines("TOLD (1,)")
    assert "rank 1 let no Python thread run for 5 s" in result.stderr


def start_and_check(case: tuple[str, str, int, int], runtime: str, folder: Path) -> None:
    """Run the program; fail unless every rank but the one that failed names it, now and later."""
    kind, point, ranks, bad = case
    # Else the launcher ends the others a moment after a rank dies. With it, Open MPI 4 waits for a
    # rank that is stopped, and returns 0.
    dies = REASONS[kind] == "died"
    result = mpirun(
        *(ranks, "faults.py", kind, point, str(bad), runtime, str(folder)),
        runner=(),
        options=("--enable-recovery",) if dies else (),
        limit_s=60,
    )
    if not dies and kind != "slow":
        assert result.returncode != 0, result
    others = [rank for rank in range(ranks) if rank != bad]
    if kind == "slow":
        result.check()
        assert sorted(result.lines("FINE")) == [f"FINE {rank}" for rank in range(ranks)]
        return
    named = {file.name: file.read_text() for file in (folder / "named").glob("*")}
    blamed = "0,1" if kind == "swap" and ranks == 2 else bad  # one against one
    for rank in others:
        told = f"{REASONS[kind]} {blamed} and later too"
        if kind in ("raise", "leave"):
            pass  # the launcher ends the others soon
        elif runtime == "host":
            told += f", host: rank {rank}: shrink(): the survivors cannot go on: MPI does not go on"
            told += " after a rank is gone; start again from a checkpoint"
        else:
            told += f", {ranks if kind == 'swap' else len(others)} went on"
        assert named.get(str(rank)) == told, f"rank {rank}\n{result}"
