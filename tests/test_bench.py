"""The bench: the form of what it tells, on the host. Never how fast anything is."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
from mpi.launch import Result, environment, mpirun, run

from cupynccl_reduce import ParamSpec, Reducer, Registry, run_local
from cupynccl_reduce.cli import main
from cupynccl_reduce.cli.bench.arguments import EXTRA_ROWS, ROWS
from cupynccl_reduce.cli.bench.clocks import HostClock
from cupynccl_reduce.cli.bench.exposure import expose
from cupynccl_reduce.cli.bench.measure import Sample, median_ratio, spread
from cupynccl_reduce.cli.bench.report import format_bytes
from cupynccl_reduce.cli.bench.trace import COMMUNICATION, COMPUTE, COPY, Span, watch
from cupynccl_reduce.cli.models import load_params, shrink
from cupynccl_reduce.layout import plan_buckets

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cupynccl_reduce import World

MODEL = [["a", [33, 7], "float32"], ["b", [50], "float32"], ["c", [64, 5], "float32"]]
SMALL = ("--rounds", "2", "--repeats", "1", "--bucket-bytes", "1000", "2KiB")
POSITIVE = ("host_us_per_grad", "total_ms", "ratio_to_limit", "samples")
PROGRAM = "import sys; from cupynccl_reduce.cli import main; sys.exit(main(sys.argv[1:]))\n"
TORCH = find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not TORCH, reason="torch is not installed")
needs_matplotlib = pytest.mark.skipif(
    find_spec("matplotlib") is None, reason="matplotlib is not installed"
)


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(MODEL))
    return str(path)


def bench(tmp_path: Path, world_size: int, *arguments: str) -> Result:
    """Run the command on some ranks; 0 is without a launcher."""
    if world_size == 0:
        command = [sys.executable, "-m", "cupynccl_reduce", "bench", *arguments]
        return run(command, environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""))
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    return mpirun(world_size, str(program), "bench", "--runtime", "host", *arguments)


def told(result: Result) -> dict[str, Any]:
    """Return the one JSON object that stdout is."""
    result.check()
    (line,) = result.stdout.splitlines()
    told: dict[str, Any] = json.loads(line)
    for name in ("library", "runtime", "world_size", "cpus", "python"):
        assert told["machine"][name]
    return told


@pytest.mark.parametrize("world_size", [0, 2])
def test_every_row_is_there_at_every_bucket_size(
    world_size: int, tmp_path: Path, model: str
) -> None:
    extra = ("--rows", *ROWS, *EXTRA_ROWS) if world_size else ()
    result = told(bench(tmp_path, world_size, "--json", "--model", model, *SMALL, *extra))
    names = [*ROWS, *(EXTRA_ROWS if world_size else ())]
    expected = [(nbytes, name) for nbytes in (1000, 2048) for name in names]
    assert [(row["bucket_bytes"], row["name"]) for row in result["rows"]] == expected
    assert result["machine"]["world_size"] == max(1, world_size)
    assert result["workload"]["elements"] == 33 * 7 + 50 + 64 * 5
    torch_rows = () if TORCH else ("backward", "attached", "ddp", "fsdp2")
    for row in result["rows"]:
        if row["name"] in ("deepcompile", *torch_rows):
            assert row["skipped"]
            continue
        assert "skipped" not in row, row
        assert all(row[key] > 0 for key in POSITIVE), row
        low, high = row["total_ms_quartiles"]
        assert low <= row["total_ms"] <= high
        assert row["peak_extra_bytes"] >= 0
        moves = world_size > 1 and row["name"] != "backward"
        assert (row["bus_gb_per_s"] > 0) == moves
        if row["name"] == "limit":
            assert row["ratio_to_limit"] == 1


def test_the_table_shows_what_was_asked_for(tmp_path: Path) -> None:
    arguments = ("--model", "resnet", "--max-elements", "2000", "--shard-dtype", "float32")
    result = bench(tmp_path, 2, *SMALL, *arguments, "--rounds", "1", "--rows", "arrival", "planned")
    result.check()
    lines = [line.split() for line in result.stdout.splitlines()]
    assert "runtime host" in result.stdout
    assert "shard_dtype float32" in result.stdout
    assert sum("planned" in line for line in lines) == 2
    assert [line[2] for line in lines if line[1:2] == ["B"]] == ["limit", "arrival", "planned"] * 2


def test_what_watching_costs(tmp_path: Path, model: str) -> None:
    arguments = ("--watchdog", "--rounds", "2", "--repeats", "1", "--model", model)
    result = told(bench(tmp_path, 3, "--json", *arguments))
    names = [row["name"] for row in result["rows"]]
    assert names == ["limit", "unwatched", "planned", "compared"]
    costs = result["watchdog"]
    assert [name.rpartition(",")[0] or name for name in costs] == [
        *["microseconds of a launch"] * 2,
        *["idle, percent of a core"] * 2,
        "step with check='heartbeat'",
        "step with check='sync'",
    ]
    assert min(costs.values()) > 0
    alone = bench(tmp_path, 1, *arguments)
    assert alone.returncode
    assert "--watchdog needs two ranks or more" in alone.stderr


def test_without_torch_its_rows_say_what_to_install(
    run_python: Callable[..., Any], model: str
) -> None:
    source = (
        "import sys; sys.modules['torch'] = None; from cupynccl_reduce.cli import main; "
        f"sys.exit(main(['bench', '--runtime', 'host', '--json', '--model', {model!r}, "
        "'--rounds', '1', '--repeats', '1']))"
    )
    result = run_python(source)
    assert result.returncode == 0, result.stderr
    skipped = {row["name"]: row.get("skipped", "") for row in json.loads(result.stdout)["rows"]}
    assert not any(skipped[name] for name in ("limit", "limit_buckets", "planned", "arrival"))
    for name in ("backward", "attached", "ddp", "fsdp2"):
        assert "pip install 'cupynccl-reduce[torch]'" in skipped[name]


@needs_torch
@pytest.mark.parametrize("world_size", [0, 2])
def test_steps_of_a_model(world_size: int, tmp_path: Path) -> None:
    arguments = ("--steps", "1", "--rounds", "2", "--batch", "1", "--dtype", "float32")
    result = told(bench(tmp_path, world_size, "--json", *arguments, "--bucket-bytes", "1MiB"))
    assert [row["name"] for row in result["rows"]] == ["none", "attached", "ddp", "fsdp2"]
    for row in result["rows"]:
        assert row["gradients_ms"] > 0
        assert row["gradients_ms_quartiles"][0] < row["step_ms_quartiles"][1]
        assert row["ratio_to_none"] > 0
    assert [each["bucket"] for each in result["exposed"]] == list(range(len(result["exposed"])))
    assert len(result["exposed"]) > 3
    for each in result["exposed"]:
        assert each["bytes"] > 0
        assert each["launch_to_landed_ms"] > 0
        assert each["waited_for_pack_ms"] >= 0
        assert each["waited_for_landing_ms"] >= 0


@needs_torch
@needs_matplotlib
@pytest.mark.parametrize("steps", [False, True])
def test_the_plot_is_a_picture(tmp_path: Path, model: str, *, steps: bool) -> None:
    path = tmp_path / "plot.png"
    what = ("--steps", "1", "--batch", "1") if steps else ("--rows", "planned", "--model", model)
    arguments = ("--dtype", "float32", "--rounds", "1", "--repeats", "1", "--plot", str(path))
    result = bench(tmp_path, 0, *what, *arguments)
    result.check()
    assert path.read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--bucket-bytes", "12XB"], "'12XB' is no number of bytes"),
        (["--bucket-bytes", "0"], "'0' is no number of bytes"),
        (["--rows", "nonsense"], "invalid choice: 'nonsense'"),
        (["--rounds", "0"], "0 is too few"),
        (["--rounds", "x"], "invalid count value: 'x'"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
    ],
)
def test_wrong_usage_is_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text", "words"),
    [
        (("--model", "nothing"), "", "no model and no file 'nothing'"),
        ((), '[["i", [3], "int32"]]', "'i' is int32"),
        ((), '[["e", [0, 3], "float32"]]', "no elements"),
        (("--plot", "/nowhere/at/all.png"), '[["w", [3], "float32"]]', "no folder /nowhere/at"),
        (("--plot", "/"), '[["w", [3], "float32"]]', "that is a folder"),
        (("--steps", "1", "--rows", "planned"), "", "leave out --rows"),
        (("--steps", "1", "--bucket-bytes", "1MiB", "2MiB"), "", "a sweep"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    arguments: tuple[str, ...], text: str, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.json"
    path.write_text(text)
    result = bench(tmp_path, 0, "--model", str(path), *arguments)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("cupynccl-reduce: error: ")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_without_matplotlib_the_plot_says_what_to_install(run_python: Callable[..., Any]) -> None:
    source = (
        "import sys; sys.modules['matplotlib'] = None; from cupynccl_reduce.cli import main; "
        "sys.exit(main(['bench', '--plot', 'x.png']))"
    )
    result = run_python(source)
    assert result.returncode == 1
    assert result.stderr == (
        "cupynccl-reduce: error: --plot needs matplotlib, which is not installed; "
        "pip install 'cupynccl-reduce[plot]'\n"
    )


def test_help_names_every_row_and_needs_no_optional_library(run_python: Callable[..., Any]) -> None:
    result = run_python(
        "import sys; from cupynccl_reduce.cli import main; assert main(['bench', '--help']) == 0; "
        "assert not {'cupy', 'mpi4py', 'numpy', 'torch'} & set(sys.modules)"
    )
    assert result.returncode == 0, result.stderr
    assert all(f"  {name} " in result.stdout for name in {**ROWS, **EXTRA_ROWS})


def test_models_have_the_parameters_of_their_namesakes() -> None:
    count = {
        name: (len(params), sum(spec.numel for spec in params))
        for name in ("gpt2", "resnet", "moe")
        for params in [load_params(name, dtype="bfloat16")]
    }
    assert count["gpt2"] == (289, 310_697_984)
    assert count["resnet"] == (161, 25_557_032)  # torchvision's resnet50
    assert count["moe"] == (185, 176_234_496)


def test_shrinking_keeps_names_and_cut() -> None:
    params = load_params("gpt2", dtype="float32")
    small, sizes = shrink(params, (1 << 20, 64 << 20), 100_000)
    assert [spec.name for spec in small] == [spec.name for spec in params]
    assert 90_000 < sum(spec.numel for spec in small) < 110_000
    assert sizes[1] // sizes[0] == 64
    cuts = [
        len(plan_buckets(some, world_size=2, bucket_bytes=nbytes))
        for some, nbytes in ((params, 64 << 20), (small, sizes[1]))
    ]
    assert abs(cuts[0] - cuts[1]) <= 2


def test_spread_and_ratio() -> None:
    assert spread([3.0]).median == 3
    five = spread([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (five.low, five.median, five.high) == (2, 3, 4)
    # The second round was ten times slower for both: the ratio does not see it.
    ours = [Sample(0, 0, 2), Sample(0, 0, 2), Sample(1, 0, 20)]
    limit = [Sample(0, 0, 1), Sample(0, 0, 1), Sample(1, 0, 10)]
    assert median_ratio(ours, limit) == 2


def test_bytes_are_told_in_their_largest_unit() -> None:
    assert [format_bytes(n) for n in (674, 1024, 1 << 26, 3 << 29)] == [
        "674 B",
        "1 KiB",
        "64 MiB",
        "1.5 GiB",
    ]


def test_a_wait_for_landing_is_shared_out_among_the_buckets() -> None:
    params = [ParamSpec(name, (256,), "float32") for name in "ba"]
    buckets = plan_buckets(params, world_size=2, bucket_bytes=1024)
    spans = [
        Span(COPY, "pack", "bucket 0", 1, 2),
        Span(COMMUNICATION, "reduce_scatter", "bucket 0", 2, 8),
        Span(COPY, "pack", "bucket 1", 4, 5),
        Span(COMMUNICATION, "reduce_scatter", "bucket 1", 8, 11),
        Span(COMPUTE, "wait", f"{COPY}: bucket 0", 1.5, 2),
        Span(COMPUTE, "wait", f"{COMMUNICATION}: bucket 1", 6, 11),
        Span(COMPUTE, "wait", f"{COMMUNICATION}: gather of bucket 0", 12, 20),
    ]
    first, second = expose(spans, buckets)
    assert first["launch_to_landed_ms"] == 7
    assert (first["waited_for_pack_ms"], first["waited_for_landing_ms"]) == (0.5, 2)
    assert (second["waited_for_pack_ms"], second["waited_for_landing_ms"]) == (0, 3)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_watched_world_reduces_the_same_and_shows_every_bucket(world_size: int) -> None:
    np = pytest.importorskip("numpy")
    params = [ParamSpec(f"p{i}", (100,), "float32") for i in range(4)]

    def work(world: World) -> tuple[list[Span], float]:
        watched, observer = watch(world, HostClock())
        registry = Registry(params, watched, bucket_bytes=400)
        with Reducer(registry) as reducer:
            observer.start()
            with reducer.backward():
                for spec in reversed(params):
                    reducer.reduce_grad(spec.name, np.full(100, world.rank + 1, np.float32))
            shards = reducer.wait()
            return observer.stop(), float(shards["p0"][0])

    for spans, value in run_local(world_size, work):
        assert value == (world_size + 1) / 2
        kinds = ["pack", "reduce_scatter"] if world_size > 1 else ["pack"]
        for kind in kinds:
            assert [s.label for s in spans if s.kind == kind] == [f"bucket {i}" for i in range(4)]
        waits = [span for span in spans if span.kind == "wait"]
        assert waits[-1].label == f"{COMMUNICATION}: bucket 3"
        assert all(span.lane == COMPUTE for span in waits)
        assert all(span.stop_ms >= span.start_ms >= 0 for span in spans)
