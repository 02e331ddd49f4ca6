"""scripts/train_gpt.py: every mode trains as FSDP2 does, and goes on from a checkpoint."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from mpi.launch import environment, mpirun, run

pytest.importorskip("torch")

SCRIPT = Path(__file__).parents[1] / "scripts" / "train_gpt.py"
LOSS, PARAMETER = 1e-5, 5e-4  # the most that rounding may do to them


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # or ranks fight for the cores


def train(ranks: int, *arguments: object) -> dict[str, Any]:
    """Return the JSON object; 0 ranks is without a launcher."""
    words = [str(SCRIPT), "--json", *map(str, arguments)]
    result = mpirun(ranks, *words) if ranks else run([sys.executable, *words], environment())
    result.check()
    (line,) = result.stdout.splitlines()
    told: dict[str, Any] = json.loads(line)
    return told


@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_losses_and_parameters_are_those_of_fsdp2(zero: int, ranks: int) -> None:
    steps = 50 if (zero, ranks) == (3, 2) else 12
    told = train(ranks, "--zero", zero, "--steps", steps, "--batch", 2, "--compare", "fsdp2", "ddp")
    assert len(told["loss"]) == steps
    assert told["loss"][-1] < told["loss"][0] - 0.5
    assert [one["name"] for one in told["compared"]] == ["fsdp2", "ddp"]
    for peer in told["compared"]:
        assert len(peer["loss"]) == steps
        assert 0 <= peer["max_loss_difference"] < LOSS, peer["name"]
        assert 0 <= peer["max_parameter_difference"] < PARAMETER, peer["name"]
    assert all(told[name] > 0 for name in ("step_ms", "tokens_per_s", "peak_bytes"))


@pytest.mark.parametrize("zero", [1, 3])
def test_it_goes_on_where_it_was_on_another_number_of_ranks(zero: int, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    whole = train(2, "--zero", zero, "--steps", 8, "--batch", 3)
    first = train(2, "--zero", zero, "--steps", 5, "--batch", 3, "--checkpoint", path)
    assert first["loss"] == whole["loss"][:5]
    rest = train(3, "--zero", zero, "--steps", 8, "--batch", 2, "--checkpoint", path, "--resume")
    assert rest["loss"][:5] == first["loss"]
    assert rest["loss"] == pytest.approx(whole["loss"], abs=LOSS)


def test_the_table_and_the_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    words = ["--steps", "3", "--compare", "ddp", "--plot", str(path)]
    result = mpirun(2, str(SCRIPT), *words)
    result.check()
    assert "zero=2" in result.stdout
    assert "differs by at most" in result.stdout
    assert path.read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--zero", "4"], "invalid choice"),
        (["--steps", "0"], "numbers from 1 on"),
        (["--resume"], "--resume needs --checkpoint"),
        (["--resume", "--checkpoint", "x", "--compare", "ddp"], "leave out --resume"),
        (["--plot", "/nowhere/x.png"], "there is no folder /nowhere"),
        (["--resume", "--checkpoint", "/nowhere"], "/nowhere"),
    ],
)
def test_bad_arguments_say_why(arguments: list[str], told: str) -> None:
    result = run([sys.executable, str(SCRIPT), *arguments], environment())
    assert result.returncode
    assert told in result.stderr
