"""Faults of ranks that share one GPU: each is named on every other rank, and every job ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from mpi.test_faults import start_and_check

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.gpu

POINTS = ("between", "backward", "wait", "gather", "registry")
CASES = [
    *(
        (kind, point, ranks, bad)
        for kind in ("kill", "stop")
        for point in POINTS
        for ranks, bad in ((2, 0), (2, 1), (3, 0), (4, 2))
    ),
    *(
        (kind, point, 3, 1)
        for kind in ("raise", "segfault", "gil", "_exit", "leave", "sleep", "slow")
        for point in ("between",)
    ),
    ("swap", "between", 3, 1),
    ("raise", "backward", 2, 0),
]


@pytest.mark.limit(120)
@pytest.mark.parametrize(("kind", "point", "ranks", "bad"), CASES)
def test_a_fault_is_named_on_every_other_rank(
    kind: str, point: str, ranks: int, bad: int, tmp_path: Path
) -> None:
    start_and_check((kind, point, ranks, bad), "cuda", tmp_path)
