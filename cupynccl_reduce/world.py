"""Join a world: the one place that picks a runtime, a communicator and a side channel."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from .agreement import agree
from .control.local import LocalControl
from .errors import CommunicationError, LayoutError, ReduceError, check_integer
from .gpus import check_places, claim_hosts, count_gpus, load_cuda
from .launcher import Launcher, check_world, device_index, find_launcher
from .meeting import Meeting
from .membership import World, join
from .survivors import keep
from .watching import check_watch, leave_safely

if TYPE_CHECKING:
    from collections.abc import Callable

    from .protocols import Control
    from .watching import Check

__all__ = ["connect", "run_local"]

T = TypeVar("T")


def connect(
    runtime: Literal["auto", "cuda", "host"] = "auto",
    *,
    share_gpu: bool = False,
    timeout_s: float = 60.0,
    check: Check = "heartbeat",
) -> World:
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
        timeout_s: how long one launch may run, or a rank that this one waits for be silent, before
            that is a fault; a week at most. A slow backward is none.
        check: "heartbeat" watches all ranks through a channel of its own, and turns a rank that
            dies, stops, fails, leaves or differs into a CommunicationError that names it, on every
            other rank. "sync" also compares every launch before it is queued, which blocks the
            host. "off" does neither: a fault may hang. One rank alone is not watched.

    Raises:
        LayoutError: what is missing or cannot work, with what to install or set.
        MismatchError: ranks that would run on different runtimes, or share a GPU unasked.
        CommunicationError: NCCL could not be started.
    """
    launcher = find_launcher(os.environ)
    control = _connect_control(launcher)
    watched = check != "off" and launcher.world_size > 1
    refused: ReduceError | None = None
    backend = _Backend("none")
    try:
        check_watch(timeout_s, check)
        backend = _choose_backend(launcher, runtime, share_gpu=share_gpu)
    except ReduceError as error:
        refused = error
    try:
        entries = [f"runtime {backend.kind}", f"{share_gpu=}", f"{timeout_s=}", f"{check=}"]
        agree(control, "what to connect with", entries, refused=refused)
    except ReduceError:
        control.close()  # every rank is here
        raise
    if watched:
        control = _open_channel(control, launcher, timeout_s)
    try:
        world = _build(launcher, backend, control, share_gpu=share_gpu)
    except BaseException:
        control.abort()
        control.close()
        raise
    world.status.compares = check == "sync"
    if watched:
        keep(world, control, timeout_s)  # type: ignore[arg-type]  # a Channel
    if launcher.world_size > 1:
        leave_safely(world)
    return world


def run_local(
    world_size: int,
    function: Callable[[World], T],
    *,
    timeout_s: float = 60.0,
    check: Check = "off",
) -> list[T]:
    """Run `function(world)` on `world_size` threads, each a rank on the host runtime.

    Blocks until all have returned; returns their results in rank order. If one raises, the others
    are freed with a CommunicationError and the first failure is raised, with its rank as a note.
    `timeout_s` and `check` are as in connect(); here watching is off unless asked for.
    """
    from .communicators.local import LocalCommunicator
    from .runtimes.host import HostRuntime

    check_integer("world_size", world_size, 1)
    check_watch(timeout_s, check)
    data, side = Meeting(world_size), Meeting(world_size)
    results: list[Any] = [None] * world_size
    failures: list[BaseException] = []
    ended = [threading.Event() for _ in range(world_size)]

    def run(rank: int) -> None:
        try:
            place = rank, world_size, rank
            communicator, control = LocalCommunicator(data, rank), LocalControl(side, rank)
            with join(place, HostRuntime(), communicator, control) as world:
                world.status.compares = check == "sync"
                if check != "off" and world_size > 1:
                    keep(world, control, timeout_s, alone=False)
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
        data.end()
        side.end()
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


@dataclass(frozen=True, slots=True)
class _Backend:
    """What a rank runs on: the modules of its runtime and of NCCL, and its GPU."""

    kind: Literal["none", "host", "cuda"]
    device: int = 0
    cuda: Any = None
    nccl: Any = None


def _choose_backend(launcher: Launcher, runtime: str, *, share_gpu: bool) -> _Backend:
    """Return this rank's backend; LayoutError says what is missing."""
    if runtime not in ("auto", "cuda", "host"):
        msg = f"runtime must be 'auto', 'cuda' or 'host', not {runtime!r}"
        raise LayoutError(msg)
    gpus = 0 if runtime == "host" else count_gpus()
    if runtime == "cuda" or gpus:
        device = device_index(launcher, gpus, share_gpu=share_gpu)
        if share_gpu and launcher.world_size > 1:
            claim_hosts(launcher.rank)
        return _Backend("cuda", device, *load_cuda())
    if share_gpu:
        msg = "share_gpu=True, but this rank sees no GPU; leave it out, or make one visible"
        raise LayoutError(msg)
    if launcher.name != "none":
        from .communicators.mpi import check_thread_level

        check_thread_level()
    return _Backend("host")


def _build(launcher: Launcher, backend: _Backend, control: Control, *, share_gpu: bool) -> World:
    """Make communicator and runtime, and join them. Collective, blocks the host."""
    if backend.kind == "host":
        return _connect_host(launcher, control)
    # The bus id of a GPU says which of a host's GPUs an index means.
    check_places(control, backend.cuda.bus_id(backend.device), share_gpu=share_gpu)
    nccl, alone = backend.nccl, launcher.world_size == 1
    first = b"" if launcher.rank or alone else nccl.unique_id()
    token = control.all_gather(first)[0]
    where = launcher.world_size, token, launcher.rank, backend.device
    communicator = nccl.NcclCommunicator(*where)
    if any(name in os.environ for name in ("CUPYNCCL_SANITIZE", "CUPYNCCL_DELAY_SEED")):
        return _join_sanitized(launcher, backend.device, communicator, control)
    return join(launcher.place, backend.cuda.CudaRuntime(backend.device), communicator, control)


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


def _open_channel(control: Control, launcher: Launcher, timeout_s: float) -> Control:
    """Return a channel in place of `control`, which introduced the ranks and is closed."""
    try:
        from .control.channel import Channel

        channel = Channel.meet(control, launcher.rank, launcher.world_size, timeout_s=timeout_s)
    finally:
        control.close()
    return channel


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
    return join(launcher.place, HostRuntime(), communicator, control)


def _join_sanitized(launcher: Launcher, device: int, communicator: Any, control: Control) -> World:
    """Join with the race detector (CUPYNCCL_SANITIZE=1), operations held back by a seed."""
    from .runtimes.sanitizer import SanitizedCommunicator, SanitizedRuntime

    text = os.environ.get("CUPYNCCL_DELAY_SEED")
    if os.environ.get("CUPYNCCL_SANITIZE", "1") != "1" or not (text is None or text.isdecimal()):
        msg = "CUPYNCCL_SANITIZE must be 1 and CUPYNCCL_DELAY_SEED an integer >= 0, or neither set"
        raise LayoutError(msg)
    runtime = SanitizedRuntime(device, delay_seed=None if text is None else int(text))
    return join(launcher.place, runtime, SanitizedCommunicator(communicator, runtime), control)
