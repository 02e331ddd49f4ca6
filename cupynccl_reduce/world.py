"""Join a world: the one place that picks a runtime, a communicator and a side channel."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from .agreement import agree
from .control.local import LocalControl
from .errors import CommunicationError, LayoutError, MismatchError, ReduceError, check_integer
from .launcher import Launcher, check_world, device_index, find_launcher
from .meeting import Meeting
from .protocols import World

if TYPE_CHECKING:
    from collections.abc import Callable

    from .protocols import Control

__all__ = ["connect", "count_gpus", "run_local"]

T = TypeVar("T")


def connect(runtime: Literal["auto", "cuda", "host"] = "auto", *, share_gpu: bool = False) -> World:
    """Join the world that the launcher started, and return it; collective, blocks the host.

    "auto" is CUDA with NCCL if this rank sees a GPU, else NumPy with MPI; "cuda" and "host" insist.
    Without a launcher the world is this process alone. There is no silent fallback: a visible GPU
    with a missing or broken CuPy or NCCL is an error, and so are ranks that would differ.

    Args:
        runtime: which kind of device the gradients lie on.
        share_gpu: let several ranks of one host use one GPU. NCCL refuses that unless every rank
            claims another host and talks over sockets, which this arranges through NCCL_HOSTID,
            NCCL_SOCKET_IFNAME and NCCL_NET; NCCL reads them once per process, so no NCCL
            communicator may exist in it before. One host only.

    Raises:
        LayoutError: what is missing or cannot work, with what to install or set.
        MismatchError: ranks that would run on different runtimes, or share a GPU unasked.
        CommunicationError: NCCL could not be started.
    """
    launcher = find_launcher(os.environ)
    control = _connect_control(launcher)
    refused: ReduceError | None = None
    entries: list[str] = []
    gpus = 0
    try:
        if runtime not in ("auto", "cuda", "host"):
            msg = f"runtime must be 'auto', 'cuda' or 'host', not {runtime!r}"
            raise LayoutError(msg)
        gpus = 0 if runtime == "host" else count_gpus()
        if runtime == "cuda" or gpus:
            device = device_index(launcher, gpus, share_gpu=share_gpu)
            if share_gpu and launcher.world_size > 1:
                _claim_hosts(launcher.rank)
            cuda, nccl = _load_cuda()
            entries = ["runtime cuda"]
        elif share_gpu:
            msg = "share_gpu=True, but this rank sees no GPU; leave it out, or make one visible"
            raise LayoutError(msg)
        else:
            if launcher.name != "none":
                from .communicators.mpi import check_thread_level

                check_thread_level()
            entries = ["runtime host"]
    except ReduceError as error:
        refused = error
    try:
        agree(control, "what to connect with", [*entries, f"{share_gpu=}"], refused=refused)
    except ReduceError:
        control.close()  # every rank is here
        raise
    if entries == ["runtime cuda"]:
        # The bus id of a GPU says which of a host's GPUs an index means.
        _check_places(control, cuda.bus_id(device), share_gpu=share_gpu)
        first = nccl.unique_id() if launcher.rank == 0 and launcher.world_size > 1 else b""
        token = control.all_gather(first)[0]
        communicator = nccl.NcclCommunicator(launcher.world_size, token, launcher.rank, device)
        if any(name in os.environ for name in ("CUPYNCCL_SANITIZE", "CUPYNCCL_DELAY_SEED")):
            return _join_sanitized(launcher, device, communicator, control)
        return _join(launcher.place, cuda.CudaRuntime(device), communicator, control)
    return _connect_host(launcher, control)


def run_local(world_size: int, function: Callable[[World], T]) -> list[T]:
    """Run `function(world)` on `world_size` threads, each a rank on the host runtime.

    Blocks until all have returned; returns their results in rank order. If one raises, the others
    are freed with a CommunicationError and the first failure is raised, with its rank as a note.
    """
    from .communicators.local import LocalCommunicator
    from .runtimes.host import HostRuntime

    check_integer("world_size", world_size, 1)
    data, side = Meeting(world_size), Meeting(world_size)
    results: list[Any] = [None] * world_size
    failures: list[BaseException] = []
    ended = [threading.Event() for _ in range(world_size)]

    def run(rank: int) -> None:
        try:
            place = rank, world_size, rank
            communicator, control = LocalCommunicator(data, rank), LocalControl(side, rank)
            with _join(place, HostRuntime(), communicator, control) as world:
                results[rank] = function(world)
        except BaseException as error:  # noqa: BLE001  # raised again in the caller's thread
            error.add_note(f"on rank {rank} of {world_size} (run_local)")
            failures.append(error)
        finally:
            ended[rank].set()

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank-{rank}", daemon=True)
        for rank in range(world_size)
    ]
    try:
        for thread in threads:
            thread.start()
        for event in ended:
            event.wait()  # a join that Ctrl-C interrupts takes the thread for ended (CPython 3.11)
    except BaseException:  # Ctrl-C: no rank may go on behind the caller's back
        data.abort()
        side.abort()
        raise
    finally:
        for thread in threads:
            if thread.ident is not None:  # else it was not started yet
                thread.join()
    if failures:
        # Whoever was freed by another's failure is a consequence, not the cause.
        causes = [e for e in failures if not isinstance(e, CommunicationError)]
        raise (causes or failures)[0]
    return results


def _connect_control(launcher: Launcher) -> Control:
    if launcher.name == "none":
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is not None and mpi.Is_initialized():
            check_world(launcher, mpi.COMM_WORLD.Get_size(), mpi.COMM_WORLD.Get_rank())
        return LocalControl(Meeting(1), 0)
    try:
        from mpi4py import MPI
    except ImportError as error:
        msg = (
            f"{launcher.name} started rank {launcher.rank} of {launcher.world_size}, but mpi4py "
            f"does not load ({error}); pip install 'cupynccl-reduce[mpi]'"
        )
        raise LayoutError(msg) from error
    from .control.mpi import MpiControl

    check_world(launcher, MPI.COMM_WORLD.Get_size(), MPI.COMM_WORLD.Get_rank())
    return MpiControl(MPI.COMM_WORLD)


def _connect_host(launcher: Launcher, control: Control) -> World:
    from .runtimes.host import HostRuntime

    communicator: Any
    if launcher.name == "none":
        from .communicators.local import LocalCommunicator

        communicator = LocalCommunicator(Meeting(1), 0)
    else:
        from mpi4py import MPI

        from .communicators.mpi import MpiCommunicator

        communicator = MpiCommunicator(MPI.COMM_WORLD)
    return _join(launcher.place, HostRuntime(), communicator, control)


def _join(place: tuple[int, int, int], runtime: Any, communicator: Any, control: Control) -> World:
    """Join the parts of a world at `place` (rank, world_size, local_rank), with new streams."""
    stream = runtime.stream()
    copy_stream = runtime.stream() if place[1] > 1 else stream
    return World(*place, runtime, communicator, control, stream, copy_stream)


def _join_sanitized(launcher: Launcher, device: int, communicator: Any, control: Control) -> World:
    """Join with the race detector (CUPYNCCL_SANITIZE=1), operations held back by a seed."""
    from .runtimes.sanitizer import SanitizedCommunicator, SanitizedRuntime

    text = os.environ.get("CUPYNCCL_DELAY_SEED")
    if os.environ.get("CUPYNCCL_SANITIZE", "1") != "1" or not (text is None or text.isdecimal()):
        msg = "CUPYNCCL_SANITIZE must be 1 and CUPYNCCL_DELAY_SEED an integer >= 0, or neither set"
        raise LayoutError(msg)
    runtime = SanitizedRuntime(device, delay_seed=None if text is None else int(text))
    return _join(launcher.place, runtime, SanitizedCommunicator(communicator, runtime), control)


def _claim_hosts(rank: int) -> None:
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


def _check_places(control: Control, bus: str, *, share_gpu: bool) -> None:
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


def _load_cuda() -> tuple[Any, Any]:
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
