"""What the numbers were taken on."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cupynccl_reduce import __version__
from cupynccl_reduce.launcher import find_launcher

if TYPE_CHECKING:
    from cupynccl_reduce.membership import World

__all__ = ["describe_machine"]

PACKAGES = ("numpy", "torch", "mpi4py", "deepspeed")


def describe_machine(world: World) -> dict[str, Any]:
    """Return what a reader of the numbers has to know of this rank's machine."""
    launcher = find_launcher(os.environ)
    machine = {
        "library": __version__,
        "runtime": world.runtime.kind,
        "world_size": world.world_size,
        "ranks_per_host": launcher.local_size,
        "launcher": launcher.name,
        "cpu": _cpu(),
        "cpus": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }
    for name in PACKAGES:
        try:
            machine[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if world.runtime.kind == "cuda":
        from .cuda import describe

        machine.update(describe())
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            machine["torch_cuda"] = torch.version.cuda
            machine["torch_nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return machine


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
