"""The GPU programs under mpirun, at several numbers of ranks on one GPU."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

PROGRAMS = Path(__file__).parent / "programs"
# Memcheck slows a program down many times: it is given more time.
PATIENCE = float(os.environ.get("TEST_PATIENCE", "1"))
LIMIT_S = 240


def start(
    ranks: int, *command: str, limit_s: int = LIMIT_S, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a command on `ranks` ranks; kill what it started if it takes too long."""
    mpirun = shutil.which("mpirun")
    assert mpirun, "the GPU suite starts its ranks with mpirun: put one on PATH"
    environment = os.environ | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMP_NUM_THREADS": "1",
        **environ,
    }
    process = subprocess.Popen(
        [mpirun, "-n", str(ranks), sys.executable, "-m", "mpi4py", *command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s * PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{command} on {ranks} ranks took over {limit_s} s:\n{output}")
    return subprocess.CompletedProcess(process.args, process.returncode, output)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("program", ["ranks", "train", "norm", "gatherer", "checkpoints"])
def test_every_check_holds_on_every_rank(program: str, ranks: int) -> None:
    if program == "checkpoints":
        pytest.importorskip("safetensors")
    path = PROGRAMS / f"{program}.py"
    result = start(ranks, str(path))
    print(result.stdout)
    assert result.returncode == 0, result.stdout
    checks = re.findall(r"@check\ndef (\w+)", path.read_text())
    assert len(checks) > 2
    for rank in range(ranks):
        assert f"ALL OK rank {rank} of {ranks}" in result.stdout
        for name in checks:
            assert f"OK {name} rank {rank}" in result.stdout


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_cuda_graph_holds_a_whole_step(ranks: int) -> None:
    result = start(ranks, str(PROGRAMS / "graphs.py"))
    print(result.stdout)
    assert result.returncode == 0, result.stdout
    for name in re.findall(r"@check\ndef (\w+)", (PROGRAMS / "graphs.py").read_text()):
        for rank in range(ranks):
            assert f"OK {name} rank {rank}" in result.stdout


def test_means_are_exact_at_8_ranks() -> None:
    result = start(8, str(PROGRAMS / "ranks.py"), "values_are_exact")
    print(result.stdout)
    assert result.returncode == 0, result.stdout
    for rank in range(8):
        assert f"OK values_are_exact rank {rank}" in result.stdout


def test_k3_two_ranks_on_one_gpu_are_refused_on_both_before_nccl_starts() -> None:
    program = (
        "import cupynccl_reduce as cr\n"
        "try:\n"
        "    cr.connect('cuda')\n"
        "except cr.ReduceError as error:\n"
        "    print('REFUSED', type(error).__name__, error, flush=True)\n"
    )
    result = start(2, "-c", program, limit_s=60, CUDA_VISIBLE_DEVICES="0")
    lines = [line for line in result.stdout.splitlines() if line.startswith("REFUSED")]
    assert len(lines) == 2, result.stdout
    for line in lines:
        assert "MismatchError" in line
        assert "ranks 0, 1" in line
        assert "share_gpu=True" in line


@pytest.mark.parametrize("order", ["library first", "torch first"])
def test_k5_the_library_and_torch_load_in_either_order(order: str) -> None:
    imports = ["import torch", "import cupynccl_reduce as cr; world = cr.connect('cuda')"]
    if order == "library first":
        imports.reverse()
    program = "; ".join(
        [*imports, "torch.ones(1, device='cuda')", "world.close()", "print('FINE')"]
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "FINE" in result.stdout


def test_k7_a_failed_start_of_nccl_tells_where_and_with_what() -> None:
    import cupy

    from cupynccl_reduce.communicators.nccl import NcclCommunicator
    from cupynccl_reduce.errors import CommunicationError

    class Broken:
        def __init__(self, *args: object) -> None:
            assert cupy.cuda.runtime.getDevice() == 0  # the device is set before NCCL starts
            raise cupy.cuda.nccl.NcclError(5)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cupy.cuda.nccl, "NcclCommunicator", Broken)
        patch.setenv("NCCL_DEBUG", "WARN")
        with pytest.raises(CommunicationError) as caught:
            NcclCommunicator(2, b"x" * 128, 1, 0)
    text = str(caught.value)
    for part in ("rank 1", "2", "NCCL_DEBUG=WARN", "cuda:0", cupy.cuda.Device(0).pci_bus_id):
        assert part in text, text


def test_a9_two_threads_on_their_default_streams_do_not_mix() -> None:
    result = subprocess.run(
        [sys.executable, str(PROGRAMS / "two_threads.py")],
        env=os.environ | {"CUPY_CUDA_PER_THREAD_DEFAULT_STREAM": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "UNMIXED" in result.stdout


@pytest.mark.parametrize("ranks", [1, 2])
def test_200_delay_seeds_with_poison_give_equal_bits_and_no_race(ranks: int) -> None:
    result = start(ranks, str(PROGRAMS / "hazards.py"), CUPYNCCL_SANITIZE="1")
    print(result.stdout)
    assert result.returncode == 0, result.stdout
    for rank in range(ranks):
        assert f"OK two_hundred_delay_seeds_give_equal_bits rank {rank}" in result.stdout


@pytest.mark.parametrize(
    ("program", "ranks"), [("ranks", 1), ("train", 1), ("train", 2), ("norm", 2), ("gatherer", 2)]
)
def test_the_engine_is_clean_under_the_race_detector(program: str, ranks: int) -> None:
    result = start(ranks, str(PROGRAMS / f"{program}.py"), CUPYNCCL_SANITIZE="1")
    print(result.stdout)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    "bug",
    [
        "send_buffer_reused_without_waiting",
        "gradients_dropped_after_enqueue",
        "no_producer_is_waited_for",
        "only_the_last_producer_is_waited_for",
    ],
)
def test_a_planted_bug_is_reported_on_real_streams(bug: str) -> None:
    result = start(2, str(PROGRAMS / "planted.py"), bug, limit_s=60, CUPYNCCL_SANITIZE="1")
    print(result.stdout)
    assert "SEEN by rank" in result.stdout, result.stdout
    assert "MISSED" not in result.stdout, result.stdout
