"""torch.distributed from the ranks that MPI started: one process group, for rows of torch's own."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from cupynccl_reduce.agreement import gather_complaints

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cupynccl_reduce.membership import World

__all__ = ["join_group", "make_mesh"]

LIMIT = timedelta(seconds=120)  # for a rank that is lost in a collective


def join_group(world: World, stack: ExitStack) -> str:
    """Initialise torch.distributed until `stack` ends: gloo on host, nccl on cuda.

    Collective, blocks the host. Returns why it failed, on every rank, or nothing.
    """
    complaint = ""
    try:
        store = _meet(world)
        stack.enter_context(_group(world, store))
    except Exception as error:  # noqa: BLE001  # of sockets, or of a torch without this backend
        complaint = f"torch.distributed: {type(error).__name__}: {error}"
    return gather_complaints(world.control, complaint)


def make_mesh(device_type: str) -> DeviceMesh:
    """Return the mesh of all ranks, for fully_shard. Only in a group."""
    group = distributed.group.WORLD
    assert group is not None
    return DeviceMesh.from_group(group, device_type)


def _meet(world: World) -> Any:
    """Return a store that rank 0 serves, on a port that its system picked."""
    host = socket.gethostname()
    if len(set(world.control.all_gather(host.encode()))) == 1:
        host = "127.0.0.1"
        # Containers do not always know their own host's name, which gloo would look up.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store: Any = None
    address = failure = ""
    if world.rank == 0:
        try:
            store = _store(world, host, 0)
            address = f"{host} {store.port}"
        except Exception as error:  # noqa: BLE001  # the others wait: they hear of it first
            failure = str(error)
    address = world.control.all_gather(address.encode())[0].decode()
    if not address:
        raise ConnectionError(failure or "rank 0 serves no store")
    host, port = address.split()
    return store or _store(world, host, int(port))


def _store(world: World, host: str, port: int) -> Any:
    return distributed.TCPStore(  # type: ignore[attr-defined]  # torch's __init__ imports all
        host,
        port,
        world.world_size,
        is_master=world.rank == 0,
        timeout=LIMIT,
        wait_for_workers=False,
    )


@contextmanager
def _group(world: World, store: Any) -> Iterator[None]:
    distributed.init_process_group(
        "nccl" if world.runtime.kind == "cuda" else "gloo",
        store=store,
        rank=world.rank,
        world_size=world.world_size,
        timeout=LIMIT,
    )
    try:
        yield
    finally:
        distributed.destroy_process_group()
