"""The example scripts run as they stand, alone and under mpirun, and stay short."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from mpi.launch import environment, mpirun, run

EXAMPLE = Path(__file__).parents[1] / "scripts" / "example_arrays.py"
LINE = re.compile(r"example_arrays: OK world=(\d) runtime=host max_error=\d\.\de[-+]\d\d\s*")


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 70


def test_the_example_alone() -> None:
    result = run([sys.executable, str(EXAMPLE)], environment())
    result.check()
    line = LINE.fullmatch(result.stdout)
    assert line is not None, result
    assert line[1] == "1"


def test_the_example_on_two_ranks() -> None:
    result = mpirun(2, str(EXAMPLE))
    result.check()
    line = LINE.fullmatch(result.stdout)
    assert line is not None, result
    assert line[1] == "2"


@pytest.mark.parametrize("ranks", [0, 2])
def test_the_example_of_jax(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jax", reason="the test extra brings jax")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    path = str(EXAMPLE.with_name("example_jax.py"))
    result = mpirun(ranks, path) if ranks else run([sys.executable, path], environment())
    result.check()
    assert f"example_jax: OK world={max(1, ranks)} runtime=host" in result.stdout
