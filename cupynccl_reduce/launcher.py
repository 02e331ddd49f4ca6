"""Who started this process, as which rank, and on which GPU. Numbers from a mapping; no MPI here.

The innermost launcher wins, because only its variables describe this process:

1. torchrun (`TORCHELASTIC_RUN_ID`) is refused: its ranks are no MPI world, whoever started it.
2. Open MPI (`OMPI_COMM_WORLD_RANK`), also inside a SLURM allocation.
3. MPICH and its kin (`PMI_RANK` with `MPI_LOCALRANKID`), also inside a SLURM allocation.
4. A SLURM step: `SLURM_STEP_ID` and `SLURM_PROCID`. `sbatch` sets `SLURM_PROCID=0` and
   `SLURM_NTASKS` for its script, and `salloc` sets `SLURM_NTASKS`, though neither started ranks:
   only a step has an id or a rank above 0, and `SLURM_STEP_NUM_TASKS` counts its tasks (1 in
   salloc's interactive step). `srun` with PMI-2 also sets `PMI_RANK`, but no local rank: that is a
   SLURM step too. Where a site hides the step's variables, `SLURM_NTASKS` has to do.
5. `RANK`, `WORLD_SIZE` and `MASTER_ADDR` with none of the above are refused like torchrun.
6. None of them: one process, rank 0 of 1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Launcher", "check_world", "device_index", "find_launcher"]

_OPEN_MPI = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
_MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR")


@dataclass(frozen=True, slots=True)
class Launcher:
    """What the launcher says about this process.

    `local_size` counts this host's ranks; where SLURM does not tell, those up to this one.
    """

    name: Literal["Open MPI", "MPICH", "SLURM", "none"]
    rank: int
    world_size: int
    local_rank: int
    local_size: int

    def __post_init__(self) -> None:
        _check_position("rank", self.rank, "world_size", self.world_size)
        _check_position("local_rank", self.local_rank, "local_size", self.local_size)

    @property
    def place(self) -> tuple[int, int, int]:
        """`(rank, world_size, local_rank)`."""
        return self.rank, self.world_size, self.local_rank


def find_launcher(environ: Mapping[str, str]) -> Launcher:
    """Return the innermost launcher that `environ` (such as `os.environ`) tells of."""
    if "TORCHELASTIC_RUN_ID" in environ:
        raise _refuse_torchrun(environ, "TORCHELASTIC_RUN_ID")
    if "OMPI_COMM_WORLD_RANK" in environ:
        return Launcher("Open MPI", *_positions(environ, *_OPEN_MPI))
    in_step = "SLURM_PROCID" in environ and (
        "SLURM_STEP_ID" in environ or environ["SLURM_PROCID"] != "0"
    )
    if "PMI_RANK" in environ and ("MPI_LOCALRANKID" in environ or not in_step):
        return Launcher("MPICH", *_positions(environ, *_MPICH))
    if in_step:
        return _find_slurm(environ)
    if all(name in environ for name in _TORCH):
        raise _refuse_torchrun(environ, ", ".join(_TORCH))
    return Launcher("none", 0, 1, 0, 1)


def check_world(launcher: Launcher, mpi_size: int, mpi_rank: int) -> None:
    """Raise LayoutError unless MPI's world is the launcher's.

    Under a launcher that MPI's library does not know, every process is rank 0 of an MPI world of 1.
    """
    if (launcher.rank, launcher.world_size) == (mpi_rank, mpi_size):
        return
    if launcher.name == "none":
        started = "no known launcher started this process (rank 0 of 1)"
    else:
        position = f"rank {launcher.rank} of {launcher.world_size}"
        started = f"{launcher.name} started this process as {position}"
    msg = (
        f"{started}, but MPI says rank {mpi_rank} of {mpi_size}. The launcher must be the one of "
        "mpi4py's MPI library (mpi4py.MPI.Get_library_version() names it): "
        f"{_command(max(launcher.world_size, mpi_size))}"
    )
    if launcher.name == "SLURM":
        msg += " inside the allocation, or srun --mpi=pmix where that library supports it"
    raise LayoutError(msg)


def device_index(launcher: Launcher, visible_devices: int, *, share_gpu: bool = False) -> int:
    """Return the index of this rank's GPU among those this process sees.

    One visible GPU belongs to this rank, whatever its local rank: the launcher has hidden the rest.
    Otherwise the local rank is the index, and every rank of the host needs one: a modulo would put
    two ranks on one GPU unasked. Only `share_gpu=True` counts round.
    """
    if visible_devices < 1:
        msg = (
            f"local rank {launcher.local_rank} sees no GPU; make one visible "
            '(CUDA_VISIBLE_DEVICES), or choose connect("host")'
        )
        raise LayoutError(msg)
    if visible_devices == 1 or share_gpu:
        return launcher.local_rank % visible_devices
    if visible_devices < launcher.local_size:
        msg = (
            f"local rank {launcher.local_rank} of {launcher.local_size} on this host sees "
            f"{visible_devices} GPUs; start at most {visible_devices} ranks on this host, let each "
            "rank see only its own GPU, or put several ranks on one with share_gpu=True"
        )
        raise LayoutError(msg)
    return launcher.local_rank


def _find_slurm(environ: Mapping[str, str]) -> Launcher:
    rank = _integer(environ, "SLURM_PROCID")
    tasks_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    world_size = _integer(environ, tasks_name)
    _check_position("SLURM_PROCID", rank, tasks_name, world_size)
    local_rank = _integer(environ, "SLURM_LOCALID")
    if "SLURM_STEP_TASKS_PER_NODE" not in environ:
        return Launcher("SLURM", rank, world_size, local_rank, local_rank + 1)
    tasks = _tasks_per_node(environ, "SLURM_STEP_TASKS_PER_NODE")
    node = _integer(environ, "SLURM_NODEID")
    _check_position("SLURM_NODEID", node, "nodes in SLURM_STEP_TASKS_PER_NODE", len(tasks))
    _check_position("SLURM_LOCALID", local_rank, "tasks of this node", tasks[node])
    return Launcher("SLURM", rank, world_size, local_rank, tasks[node])


def _tasks_per_node(environ: Mapping[str, str], name: str) -> list[int]:
    # SLURM writes runs: "2(x3),1" is 2, 2, 2, 1.
    tasks: list[int] = []
    for run in _text(environ, name).split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", run)
        if match is None:
            msg = f"{name}={environ[name]!r} is no list like 2(x3),1; {_REPAIR}"
            raise LayoutError(msg)
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def _positions(
    environ: Mapping[str, str], rank: str, world_size: str, local_rank: str, local_size: str
) -> tuple[int, int, int, int]:
    values = tuple(_integer(environ, name) for name in (rank, world_size, local_rank, local_size))
    _check_position(rank, values[0], world_size, values[1])
    _check_position(local_rank, values[2], local_size, values[3])
    return values[0], values[1], values[2], values[3]


def _check_position(name: str, value: int, limit_name: str, limit: int) -> None:
    if not 0 <= value < limit:
        msg = f"{name}={value} must be at least 0 and less than {limit_name}={limit}; {_REPAIR}"
        raise LayoutError(msg)


def _integer(environ: Mapping[str, str], name: str) -> int:
    text = _text(environ, name)
    if not re.fullmatch(r"-?[0-9]+", text):
        msg = f"{name}={text!r} is not an integer; {_REPAIR}"
        raise LayoutError(msg)
    return int(text)


def _text(environ: Mapping[str, str], name: str) -> str:
    if name not in environ:
        msg = f"{name} is not set, though other variables of its launcher are; {_REPAIR}"
        raise LayoutError(msg)
    return environ[name]


def _refuse_torchrun(environ: Mapping[str, str], names: str) -> LayoutError:
    told = environ.get("WORLD_SIZE", "")
    world_size = int(told) if re.fullmatch(r"[1-9][0-9]*", told) else 1
    return LayoutError(
        f"torchrun's variables are set ({names}), and its ranks are no MPI world; start with "
        f"{_command(world_size)} (or unset them, if they are left over from another program)"
    )


def _command(world_size: int) -> str:
    return f"mpirun -n {world_size} python -m mpi4py your_script.py"


_REPAIR = f"unset what is left over from another launcher, or start with {_command(4)}"
