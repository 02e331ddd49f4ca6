"""The command line: exit codes, error lines, and the demo on 1 and 2 ranks. Host runtime only."""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, Any

import pytest
from mpi.launch import environment, mpirun, run

from cupynccl_reduce import __version__
from cupynccl_reduce.cli import main
from cupynccl_reduce.pipeline import Pipeline

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LAST_LINE = re.compile(
    r"demo: OK world=(\d+) runtime=host params=\d{7} buckets=(\d+) max_error=\d\.\de[-+]\d\d"
)
DEMO = """\
import sys
from cupynccl_reduce.cli import demo, main
{patch}
sys.exit(main(["demo", "--steps", "3"]))
"""
FAILURE = """\
import sys, time
from cupynccl_reduce import LayoutError, cli, connect
def fail(args):
    with connect("host") as world:
        if world.rank == 1:
            raise {error}("on purpose")
        time.sleep(1000)  # where nothing tells it that rank 1 is gone
cli._demo = fail
sys.exit(cli.main(["demo"]))
"""


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_no_command_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "demo" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"cupynccl-reduce {__version__}"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["demo", "--nonsense"], "unrecognized arguments: --nonsense"),
        (["demo", "--steps", "many"], "--steps: invalid"),
        (["demo", "--steps", "1"], "from 2 on the loss can fall"),
    ],
)
def test_wrong_usage_is_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


def test_help_needs_no_optional_library(run_python: Callable[..., Any]) -> None:
    result = run_python(
        "import sys; from cupynccl_reduce.cli import main; assert main(['demo', '--help']) == 0; "
        "assert not {'cupy', 'mpi4py', 'numpy', 'torch'} & set(sys.modules)"
    )
    assert result.returncode == 0, result.stderr
    assert "--share-gpu" in result.stdout


def test_without_torch_the_demo_says_what_to_install(run_python: Callable[..., Any]) -> None:
    result = run_python(
        "import sys; sys.modules['torch'] = None; from cupynccl_reduce.cli import main; "
        "sys.exit(main(['demo']))"
    )
    assert result.returncode == 1
    assert result.stderr == (
        "cupynccl-reduce: error: the demo needs torch, which is not installed; "
        "pip install 'cupynccl-reduce[torch]'\n"
    )


def test_an_error_of_the_package_is_one_line() -> None:
    command = [sys.executable, "-m", "cupynccl_reduce", "demo", "--share-gpu"]
    result = run(command, environment())
    assert result.returncode == 1
    assert result.stderr.startswith("cupynccl-reduce: error: share_gpu=True")
    assert result.stderr.count("\n") == 1


def test_demo_alone() -> None:
    command = [sys.executable, "-m", "cupynccl_reduce", "demo", "--steps", "3"]
    result = run(command, environment(OMP_NUM_THREADS="1"))
    result.check()
    assert "1 rank on host" in result.stdout
    last = LAST_LINE.fullmatch(result.stdout.splitlines()[-1])
    assert last is not None, result
    assert last[1] == "1"
    assert int(last[2]) > 1


def test_demo_on_two_ranks(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(DEMO.format(patch=""))
    result = mpirun(2, str(program))
    result.check()
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    last = LAST_LINE.fullmatch(lines[-1])
    assert last is not None, result
    assert last[1] == "2"
    # The table has a line for each bucket, and both trainings show the same loss at the end.
    assert sum(bool(re.match(r" +\d+ +[\d,]{5,} ", line)) for line in lines) == int(last[2])
    ends = [line.split()[-1] for line in lines if re.search(r" 3/3  loss \d\.\d{4}$", line)]
    assert len(ends) == 2
    assert float(ends[0]) == pytest.approx(float(ends[1]), abs=2e-4)
    assert re.search(r"^sent: [1-9][\d,]+ bytes a step", result.stdout, re.MULTILINE)


@pytest.mark.parametrize("runner", [("-m", "mpi4py"), ()], ids=["mpi4py", "plain"])
@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("LayoutError", "cupynccl-reduce: error: on purpose"),
        ("RuntimeError", "RuntimeError: on purpose"),
    ],
)
def test_a_rank_that_fails_ends_the_world(
    error: str, words: str, runner: tuple[str, ...], tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(FAILURE.format(error=error))
    result = mpirun(2, str(program), runner=runner)
    assert result.returncode != 0
    assert words in result.stderr


def test_a_wrong_result_ends_all_ranks(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(DEMO.format(patch="demo.RATE = -demo.RATE; demo.LIMIT = -1"))
    result = mpirun(2, str(program))
    assert result.returncode == 1
    assert result.lines("demo: FAILED world=2")
    assert "the loss did not fall; max_error is above -1" in result.stdout
    assert not result.lines("demo: OK")


@pytest.mark.parametrize("redraw", [True, False])
def test_progress_is_a_bar_or_lines(*, redraw: bool, capsys: pytest.CaptureFixture[str]) -> None:
    from cupynccl_reduce.cli.demo import Progress

    progress = Progress("ranks", 40, shown=True, redraw=redraw)
    for step in range(40):
        if progress.due(step):
            progress.losses.append(40.0 - step)
        progress.show(step)
    out = capsys.readouterr().out
    assert out.endswith("40/40  loss 1.0000\n")
    assert out.count("\r") == (40 if redraw else 0)
    assert out.count("\n") == (1 if redraw else 11)
    assert progress.losses == [40.0, *range(37, 0, -4)]


def test_other_ranks_draw_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    from cupynccl_reduce.cli.demo import Progress

    Progress("ranks", 3, shown=False, redraw=True, losses=[1.0]).show(2)
    assert capsys.readouterr().out == ""


def prove(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["prove", *arguments])
    return code, capsys.readouterr().out


def test_prove_finds_nothing_in_odd_models(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = tmp_path / "model.json"
    params = [["i", [30], "int8"], ["z", [], "float32"], ["e", [0, 3], "float32"]]
    model.write_text(json.dumps([*params, ["f\u00e4\n", [9], "bfloat16"]]))
    code, out = prove(capsys, "--model", str(model), "--world-size", "12", "--runs", "4")
    assert code == 0, out
    assert out.splitlines()[-1] == "prove: OK world=12 runs=4 reports=0"
    assert out.count("clean") == 4


def test_prove_tells_only_of_schedules_that_ran(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = tmp_path / "model.json"
    model.write_text('[["w", [3, 4], "float32"]]')
    arguments = ("--model", str(model), "--runs", "1", "--schedule", "pct", "--seed", "5")
    code, out = prove(capsys, *arguments)
    assert code == 0, out
    assert [line.split()[0] for line in out.splitlines()[1:-1]] == ["pct"]


def test_prove_finds_a_reader_that_is_not_waited_for_and_replays_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pipeline, "_hold_back_writers", lambda self: self._readers.clear())
    model = tmp_path / "model.json"
    model.write_text('[["w", [30, 4], "float32"], ["b", [4], "float32"]]')
    code, out = prove(capsys, "--model", str(model), "--bucket-bytes", "64", "--runs", "8")
    assert code == 1
    assert out.splitlines()[-1].startswith("prove: FAILED world=2 runs=8 reports=")
    (replay, *_) = [line for line in out.splitlines() if "replay: cupynccl-reduce" in line]
    code, again = prove(capsys, *replay.split()[3:])
    assert code == 1
    assert again.splitlines()[2] in out.splitlines()


@pytest.mark.parametrize(
    "text", ["", "{}", '[["w", 3]]', '[["w", [3], "floaty"]]', '[["w", [-1], "float32"]]', "[]"]
)
def test_prove_refuses_a_bad_model_file(
    text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = tmp_path / "model.json"
    model.write_text(text)
    assert main(["prove", "--model", str(model)]) == 1
    assert capsys.readouterr().err.startswith("cupynccl-reduce: error: ")
