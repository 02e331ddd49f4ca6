"""Launcher variables -> rank and device, as tables. No process is started here."""

from __future__ import annotations

import pytest

from cupynccl_reduce.errors import LayoutError
from cupynccl_reduce.launcher import Launcher, check_world, device_index, find_launcher

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_RANK": "5",
}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "3"}
SALLOC = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "4"}
SBATCH = SALLOC | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
SRUN = SALLOC | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "3",
    "SLURM_NODEID": "0",
}
SRUN_NODES = SRUN | {
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3",
}
INTERACTIVE = SBATCH | {
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}
TORCH = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost"}
TORCHRUN = TORCH | {"TORCHELASTIC_RUN_ID": "none"}
ALONE = Launcher("none", 0, 1, 0, 1)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param({}, ALONE, id="nothing"),
        pytest.param(OPEN_MPI, Launcher("Open MPI", 5, 8, 1, 4), id="open-mpi"),
        pytest.param(MPICH, Launcher("MPICH", 2, 3, 2, 3), id="mpich"),
        pytest.param({"PMIX_RANK": "3"}, ALONE, id="pmix-rank-alone"),
        pytest.param(SALLOC, ALONE, id="salloc-shell"),
        pytest.param(SBATCH, ALONE, id="sbatch-script"),
        pytest.param(INTERACTIVE, Launcher("SLURM", 0, 1, 0, 1), id="salloc-interactive-step"),
        pytest.param(SRUN, Launcher("SLURM", 3, 4, 3, 4), id="srun"),
        pytest.param(
            {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "3"},
            Launcher("SLURM", 3, 4, 3, 4),
            id="srun-without-step-variables",
        ),
        pytest.param(SRUN_NODES, Launcher("SLURM", 6, 7, 0, 1), id="srun-uneven-nodes"),
        pytest.param(
            SRUN | {"SLURM_NTASKS": "16"}, Launcher("SLURM", 3, 4, 3, 4), id="smaller-step"
        ),
        pytest.param(
            SRUN | {"PMI_RANK": "3", "PMI_SIZE": "4"},
            Launcher("SLURM", 3, 4, 3, 4),
            id="srun-pmi2",
        ),
        pytest.param(SRUN | OPEN_MPI, Launcher("Open MPI", 5, 8, 1, 4), id="open-mpi-in-srun"),
        pytest.param(SBATCH | MPICH, Launcher("MPICH", 2, 3, 2, 3), id="mpich-in-sbatch"),
        pytest.param(SRUN | MPICH, Launcher("MPICH", 2, 3, 2, 3), id="mpich-in-srun"),
        pytest.param(OPEN_MPI | TORCH, Launcher("Open MPI", 5, 8, 1, 4), id="mpirun-for-torch"),
        pytest.param(SRUN | TORCH, Launcher("SLURM", 3, 4, 3, 4), id="srun-for-torch"),
        pytest.param({"RANK": "1", "WORLD_SIZE": "2"}, ALONE, id="rank-without-master"),
    ],
)
def test_the_innermost_launcher_is_found(environ: dict[str, str], expected: Launcher) -> None:
    assert find_launcher(environ) == expected


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        pytest.param(TORCHRUN, ["TORCHELASTIC_RUN_ID", "mpirun -n 2 python"], id="torchrun"),
        pytest.param(SRUN | TORCHRUN, ["mpirun -n 2 python"], id="torchrun-in-srun"),
        pytest.param(OPEN_MPI | TORCHRUN, ["mpirun -n 2 python"], id="torchrun-in-mpirun"),
        pytest.param(TORCH, ["RANK, WORLD_SIZE, MASTER_ADDR", "mpirun -n 2"], id="by-hand"),
        pytest.param(TORCH | {"WORLD_SIZE": "x"}, ["mpirun -n 1 python"], id="torch-unreadable"),
        pytest.param(
            OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "five"},
            ["OMPI_COMM_WORLD_RANK='five'"],
            id="not-an-integer",
        ),
        pytest.param(MPICH | {"PMI_SIZE": "3.0"}, ["PMI_SIZE='3.0'"], id="a-float"),
        pytest.param(MPICH | {"PMI_SIZE": ""}, ["PMI_SIZE=''"], id="empty"),
        pytest.param(
            OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "8"},
            ["OMPI_COMM_WORLD_RANK=8", "OMPI_COMM_WORLD_SIZE=8"],
            id="rank-past-the-end",
        ),
        pytest.param(MPICH | {"PMI_RANK": "-1"}, ["PMI_RANK=-1", "PMI_SIZE=3"], id="negative"),
        pytest.param(
            MPICH | {"MPI_LOCALRANKID": "3"},
            ["MPI_LOCALRANKID=3", "MPI_LOCALNRANKS=3"],
            id="local-rank-past-the-end",
        ),
        pytest.param({"OMPI_COMM_WORLD_RANK": "0"}, ["OMPI_COMM_WORLD_SIZE is not set"], id="lone"),
        pytest.param({"PMI_RANK": "0", "PMI_SIZE": "1"}, ["MPI_LOCALRANKID is not set"], id="pmi"),
        pytest.param(SRUN | {"SLURM_LOCALID": "4"}, ["SLURM_LOCALID=4"], id="slurm-local-rank"),
        pytest.param(SRUN | {"SLURM_NODEID": "1"}, ["SLURM_NODEID=1"], id="slurm-node"),
        pytest.param(
            SRUN | {"SLURM_STEP_TASKS_PER_NODE": "4(x"},
            ["SLURM_STEP_TASKS_PER_NODE='4(x'"],
            id="slurm-tasks",
        ),
    ],
)
def test_a_wrong_environment_is_named(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(LayoutError) as caught:
        find_launcher(environ)
    for word in words:
        assert word in str(caught.value)


def test_a_wrong_launcher_cannot_exist() -> None:
    with pytest.raises(LayoutError, match="rank=4 must be at least 0 and less than world_size=4"):
        Launcher("Open MPI", 4, 4, 0, 4)
    with pytest.raises(LayoutError, match="local_rank=-1"):
        Launcher("Open MPI", 0, 4, -1, 4)


@pytest.mark.parametrize(
    ("local_rank", "local_size", "visible_devices", "share_gpu", "expected"),
    [
        (0, 1, 1, False, 0),
        (3, 4, 1, False, 0),  # the launcher hides the other GPUs from each rank
        (3, 4, 4, False, 3),
        (3, 4, 8, False, 3),
        (0, 1, 8, False, 0),
        (3, 4, 1, True, 0),
        (1, 4, 2, True, 1),
        (3, 4, 2, True, 1),
        (2, 3, 4, True, 2),
    ],
)
def test_k1_the_device_of_a_local_rank(
    local_rank: int, local_size: int, visible_devices: int, share_gpu: bool, expected: int
) -> None:
    launcher = Launcher("Open MPI", local_rank, local_size, local_rank, local_size)
    assert device_index(launcher, visible_devices, share_gpu=share_gpu) == expected


@pytest.mark.parametrize("local_rank", [0, 1, 2, 3])
def test_k1_too_few_devices_fail_on_every_rank(local_rank: int) -> None:
    launcher = Launcher("Open MPI", local_rank, 4, local_rank, 4)
    with pytest.raises(LayoutError, match=f"local rank {local_rank} of 4 .* sees 2 GPUs; .*share"):
        device_index(launcher, 2)


@pytest.mark.parametrize("share_gpu", [False, True])
def test_no_device_is_an_error(share_gpu: bool) -> None:
    with pytest.raises(LayoutError, match="local rank 0 sees no GPU"):
        device_index(ALONE, 0, share_gpu=share_gpu)


def test_equal_worlds_pass() -> None:
    check_world(ALONE, 1, 0)
    check_world(Launcher("SLURM", 3, 4, 1, 2), 4, 3)


@pytest.mark.parametrize(
    ("launcher", "mpi_size", "mpi_rank", "words"),
    [
        (Launcher("Open MPI", 2, 4, 2, 4), 1, 0, ["Open MPI", "rank 2 of 4", "rank 0 of 1"]),
        (Launcher("Open MPI", 2, 4, 2, 4), 4, 3, ["rank 2 of 4", "rank 3 of 4"]),
        (Launcher("SLURM", 1, 4, 1, 4), 1, 0, ["SLURM", "rank 1 of 4", "srun --mpi=pmix"]),
        (ALONE, 4, 2, ["no known launcher", "rank 2 of 4"]),
    ],
)
def test_other_worlds_are_refused(
    launcher: Launcher, mpi_size: int, mpi_rank: int, words: list[str]
) -> None:
    with pytest.raises(LayoutError) as caught:
        check_world(launcher, mpi_size, mpi_rank)
    for word in [*words, "mpirun -n 4 python -m mpi4py your_script.py"]:
        assert word in str(caught.value)
