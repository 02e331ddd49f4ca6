"""Jobs that fail, and jobs that start in odd ways: all ranks hear of it, and nothing hangs."""

from __future__ import annotations

import sys

import pytest
from mpi.launch import Result, environment, mpirun, run

RUNNERS = {"python -m mpi4py": ("-m", "mpi4py"), "python": ()}
END_S = 30.0  # a job with a failed rank must have ended by then; it takes one or two
FORGED = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
CONNECT = "import cupynccl_reduce as cr; print(cr.connect({}))"


def told(result: Result, world_size: int, what: str) -> list[str]:
    """Return what each rank has told of `what`; every rank must have, once."""
    texts = []
    for rank in range(world_size):
        lines = result.lines(f"rank {rank}: {what}")
        assert len(lines) == 1, f"rank {rank}, {what!r}: {lines}\n{result}"
        texts += lines
    return texts


def python(source: str, **changes: str) -> Result:
    return run([sys.executable, "-W", "error", "-c", source], environment(**changes), END_S)


@pytest.mark.parametrize("world_size", [2, 4])
def test_large_gradients_are_sent_from_where_they_lie(world_size: int) -> None:
    result = mpirun(world_size, "cases.py", "direct", limit_s=END_S)
    result.check()
    told(result, world_size, "direct")


@pytest.mark.parametrize("world_size", [2, 3])
def test_h1_ranks_that_differ_all_say_so_and_end(world_size: int) -> None:
    result = mpirun(world_size, "cases.py", "mismatch", limit_s=END_S)
    assert result.returncode != 0
    assert "MismatchError" in result.stderr
    for what, values in {
        "shape": ("'p'", "(4,)", "(8,)"),
        "dtype": ("'p'", "float32", "float16"),
        "count": ("'q'", "(nothing)"),
        "bucket": ("bucket_bytes=64", "bucket_bytes=128"),
        "op": ("op='mean'", "op='sum'"),
        "policy": ("policy='planned'", "policy='arrival'"),
    }.items():
        for text in told(result, world_size, f"{what} MismatchError"):
            assert all(value in text for value in (*values, "rank 1")), text
    invalid = told(result, world_size, "invalid ")
    assert "LayoutError" in invalid[1]
    assert all("MismatchError" in t and "bucket_bytes" in t for t in (invalid[0], *invalid[2:]))


def test_h3_a_missing_gradient_is_named_on_all_ranks() -> None:
    result = mpirun(2, "cases.py", "missing", limit_s=END_S)
    result.check()
    for policy in ("planned", "arrival"):
        for text in told(result, 2, f"{policy} MismatchError"):
            assert all(word in text for word in ("rank 0:", "rank 1:", "'q'")), text
            assert "'p'" not in text


@pytest.mark.parametrize(
    ("where", "runner"),
    [
        ("a_collective", "python"),
        ("a_collective", "python -m mpi4py"),
        ("backward", "python"),
        ("control", "python"),
    ],
)
def test_j1_an_exception_on_one_rank_ends_the_job(where: str, runner: str) -> None:
    result = mpirun(3, "cases.py", f"alone_in_{where}", runner=RUNNERS[runner], limit_s=END_S)
    assert result.returncode != 0
    assert "ValueError: planted" in result.stderr
    assert "Segmentation" not in result.stderr


@pytest.mark.parametrize("runner", RUNNERS)
def test_abort_frees_ranks_that_wait(runner: str) -> None:
    result = mpirun(3, "cases.py", "abort", runner=RUNNERS[runner], limit_s=END_S)
    assert result.returncode == 74, result  # a broken world never gets to MPI_Finalize
    told(result, 3, "ends")
    told(result, 3, "late: rank")
    for rank in (1, 2):
        assert len(result.lines(f"rank {rank}: freed: ")) == 2


@pytest.mark.parametrize(
    ("case", "world_size"),
    [("again", 1), ("again", 2), ("rejoin", 3), ("user_initialised", 2), ("worker", 2)],
)
def test_it_goes_well(case: str, world_size: int) -> None:
    result = mpirun(world_size, "cases.py", case)
    result.check()
    told(result, world_size, case.partition("_")[0])


def test_mpi_without_threads_is_refused_on_all_ranks() -> None:
    runner = ("-m", "mpi4py", "-rc", "thread_level=serialized")
    result = mpirun(2, "cases.py", "refused", runner=runner, limit_s=END_S)
    result.check()
    assert all("THREAD_MULTIPLE" in text for text in told(result, 2, "LayoutError"))


def test_a_world_that_is_not_the_launchers_is_refused() -> None:
    result = python(CONNECT.format("'host'"), **FORGED)
    assert result.returncode != 0
    (last,) = result.stderr.strip().splitlines()[-1:]
    assert "LayoutError" in last
    for text in ("rank 0 of 2", "rank 0 of 1", "mpirun -n 2"):
        assert text in last


def test_torchrun_is_refused_with_the_command_to_use() -> None:
    variables = {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "h"}
    result = python(CONNECT.format("'host'"), **variables)
    assert result.returncode != 0
    assert "LayoutError" in result.stderr
    assert "mpirun -n 4 python -m mpi4py" in result.stderr


def test_without_a_launcher_the_world_is_one_rank_and_needs_no_mpi() -> None:
    result = python(
        "import sys; sys.modules['mpi4py'] = None\n" + CONNECT.format("'host'"),
    )
    result.check()
    assert "rank 0 of 1" in result.stdout


def test_without_a_launcher_a_user_may_have_initialised_mpi() -> None:
    result = python("from mpi4py import MPI\n" + CONNECT.format("'host'"))
    result.check()
    assert "rank 0 of 1" in result.stdout


def test_a_launcher_without_mpi4py_says_what_to_install() -> None:
    result = python(
        "import sys; sys.modules['mpi4py'] = None\n" + CONNECT.format("'host'"), **FORGED
    )
    assert result.returncode != 0
    assert "pip install 'cupynccl-reduce[mpi]'" in result.stderr
