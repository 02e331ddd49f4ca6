"""The main law on 1 to 4 real processes."""

from __future__ import annotations

import pytest
from mpi.launch import mpirun


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_shard_holds_the_reduced_gradient(world_size: int) -> None:
    result = mpirun(world_size, "main_law.py")
    result.check()
    assert result.lines("main law:") == [f"main law: {world_size} ranks"]
