"""A checkpoint of 2 real processes, read by other numbers of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from mpi.launch import mpirun

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("safetensors")


def told(world_size: int, what: str, path: Path) -> list[str]:
    """Return what each rank says of a save or load."""
    result = mpirun(world_size, "checkpoints.py", what, str(path))
    result.check()
    lines = sorted(result.lines("rank "))
    assert len(lines) == world_size, result
    return [line.partition(": ")[2] for line in lines]


def test_what_2_ranks_save_1_2_and_3_load_or_hear_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "c"
    assert told(2, "save", path) == ["saved"] * 2
    for world_size in (1, 3):
        assert told(world_size, "load", path) == ["meta [('step', 7)]"] * world_size
    own = [f"meta [('rank', {rank}), ('step', 7)]" for rank in range(2)]
    assert told(2, "load", path) == own
    (file,) = path.glob("save-*/rank-00001-*")
    file.unlink()
    first, *others = told(3, "load", path)
    assert others == [first] * 2
    assert first.startswith(f"refused: load from {path}: rank ")
    assert f"{file} is missing" in first
