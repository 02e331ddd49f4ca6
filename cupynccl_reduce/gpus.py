"""Which GPUs there are, what works on them, and who shares one. CuPy by load_cuda only."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from typing import TYPE_CHECKING, Any

from .errors import LayoutError, MismatchError

if TYPE_CHECKING:
    from .protocols import Control

__all__ = ["check_places", "claim_hosts", "count_gpus", "load_cuda"]


def claim_hosts(rank: int) -> None:
    """Let this rank's NCCL claim a host of its own. NCCL reads this once per process."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        msg = (
            "share_gpu=True, but torch.distributed is initialised and may have started NCCL; "
            "connect() first"
        )
        raise LayoutError(msg)
    ours = {
        "NCCL_HOSTID": f"cupynccl-reduce-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_NET": "Socket",
    }
    for name, value in ours.items():
        if os.environ.setdefault(name, value) != value:
            msg = f"share_gpu=True sets {name}={value}, but it is {os.environ[name]!r}; unset it"
            raise LayoutError(msg)


def check_places(control: Control, bus: str, *, share_gpu: bool) -> None:
    """Raise on every rank if two ranks are on one GPU unasked, or share GPUs across hosts."""
    places = [p.decode() for p in control.all_gather(f"{socket.gethostname()} {bus}".encode())]
    if share_gpu:
        hosts = sorted({place.split()[0] for place in places})
        if len(hosts) > 1:
            msg = f"share_gpu=True works on one host only; these ranks are on {', '.join(hosts)}"
            raise LayoutError(msg)
        return
    by_place: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        by_place.setdefault(place, []).append(rank)
    for place, ranks in by_place.items():
        if len(ranks) > 1:
            host, gpu = place.split()
            msg = (
                f"ranks {', '.join(map(str, ranks))} are all on GPU {gpu} of {host}; start at most "
                "one rank per GPU, or put several on one with connect(share_gpu=True)"
            )
            raise MismatchError(msg)


def count_gpus() -> int:
    """Return how many GPUs the driver shows this process (CUDA_VISIBLE_DEVICES counts)."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0  # no driver, so no GPU
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def load_cuda() -> tuple[Any, Any]:
    """Return the modules of the cuda runtime and of NCCL; say what to install if they fail."""
    try:
        from .communicators import nccl
        from .runtimes import cuda

        nccl.check_usable()
    except LayoutError:
        raise
    except Exception as error:  # a broken CuPy raises ImportError, RuntimeError, CUDA's errors
        msg = (
            f"this rank sees a GPU, but CuPy does not work ({type(error).__name__}: {error}); "
            "pip install 'cupynccl-reduce[cuda12]' (or [cuda13], as the driver needs), or choose "
            "connect('host')"
        )
        raise LayoutError(msg) from error
    return cuda, nccl
