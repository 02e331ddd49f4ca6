"""One rank of two ends its process in one way, from one state; the other one waits for it.

Arguments: how the ranks are started ("mpi" or "plain"), way, state, the rank that ends, an empty
folder, and for "plain", which needs no MPI and no launcher, this process's rank. What each rank has
done and was told lies in the folder.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import cupynccl_reduce as cr

if TYPE_CHECKING:
    from collections.abc import Callable

LENGTH, TIMEOUT_S, WALL_S = 1000, 2.0, 60.0
SPECS = [cr.ParamSpec(f"p{i}", (LENGTH,), "float32") for i in range(3)]


class Files:
    """all_gather through files: introduces ranks that no launcher has started."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank, self._turn = folder, rank, 0

    def all_gather(self, payload: bytes) -> list[bytes]:
        self._turn += 1
        write(self._folder / f"meets-{self._turn}-{self._rank}", payload)
        paths = [self._folder / f"meets-{self._turn}-{rank}" for rank in range(2)]
        for path in paths:
            until(path.exists)
        return [path.read_bytes() for path in paths]


class Through:
    """protocols.Communicator of two ranks over a socket, on the stream's thread."""

    direct_bytes = 0
    world_size = 2
    regroup = None

    def __init__(self, files: Files, rank: int) -> None:
        self.rank = rank
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = files.all_gather(str(server.getsockname()[1]).encode())[0]
            if rank == 0:
                self._socket, _ = server.accept()
            else:
                self._socket = socket.create_connection(("127.0.0.1", int(port)))

    def reduce_scatter(self, send: Any, recv: Any, dtype: str, op: str, stream: Any) -> None:
        stream.submit(partial(self._reduce, send, recv))

    def all_gather(self, send: Any, recv: Any, dtype: str, stream: Any) -> None:
        stream.submit(partial(self._gather, send, recv.reshape(2, -1)))

    def check(self) -> None:
        """Find nothing: what fails here raises on the stream."""

    def close(self) -> None:
        self._socket.close()

    def abort(self) -> None:
        with suppress(OSError):  # the other rank has gone, or this one has closed it
            self._socket.shutdown(socket.SHUT_RDWR)

    def _receive(self, send: Any) -> np.ndarray:
        """Send an array; return the other rank's, which is as long."""
        self._socket.sendall(send.tobytes())
        payload = self._socket.recv(send.nbytes, socket.MSG_WAITALL)
        if len(payload) < send.nbytes:
            raise cr.CommunicationError("the other rank has gone")
        return np.frombuffer(payload, send.dtype)

    def _reduce(self, send: Any, recv: Any) -> None:
        recv[...] = (send + self._receive(send)).reshape(2, -1)[self.rank]

    def _gather(self, send: Any, recv: Any) -> None:
        recv[1 - self.rank] = self._receive(send)
        recv[self.rank] = send


def write(path: Path, data: bytes) -> None:
    """Write a file that is whole once it is there."""
    whole = path.with_name(f"{path.name}.new")
    whole.write_bytes(data)
    whole.rename(path)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WALL_S
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.002)


def join(how: str, folder: Path) -> cr.World:
    if how == "mpi":
        return cr.connect("host", timeout_s=TIMEOUT_S)
    from cupynccl_reduce.control.channel import Channel
    from cupynccl_reduce.membership import join as join_parts
    from cupynccl_reduce.runtimes.host import HostRuntime
    from cupynccl_reduce.watching import leave_safely, watch

    rank = int(sys.argv[6])
    files: Any = Files(folder, rank)
    control = Channel.meet(files, rank, 2, timeout_s=TIMEOUT_S)
    world = join_parts((rank, 2, rank), HostRuntime(), Through(files, rank), control)
    watch(world, control, TIMEOUT_S)
    leave_safely(world)
    return world


def end(way: str) -> None:
    """End this process, or return."""
    if way == "exit-0":
        sys.exit(0)
    if way == "exit-3":
        sys.exit(3)
    if way == "raise":
        raise ValueError("planted")
    if way == "os-exit-5":
        os._exit(5)
    if way in ("sigterm", "sigint"):
        os.kill(os.getpid(), getattr(signal, way.upper()))
        time.sleep(WALL_S)


def fork(folder: Path) -> None:
    """Leave a child behind that lives for as long as this process."""
    alive, kept = os.pipe()
    if not os.fork():
        os.close(kept)
        os.read(alive, 1)
        write(folder / "child", b"ended")
        os._exit(0)
    os.close(alive)


def backward(reducer: cr.Reducer) -> None:
    with reducer.backward():
        for spec in SPECS:
            reducer.reduce_grad(spec.name, np.ones(LENGTH, np.float32))


def bring(world: cr.World, reducer: cr.Reducer, state: str, folder: Path) -> None:
    """Bring the rank that ends into its state."""
    if state == "forked":
        fork(folder)
    if state in ("flying", "alone"):
        backward(reducer)
    if state == "broken":
        try:
            raise KeyError("planted before")
        except KeyError as error:
            world.fail(error)


def tell_end(world: cr.World, folder: Path) -> None:
    sys.stdout.write("kept until the end\n")  # and not flushed
    write(folder / f"ends-{world.rank}", str(os.getpid()).encode())


def meet(world: cr.World) -> None:
    """Wait for the other rank: one that ends at once after it may be told of here already."""
    world.agree("that both are here", [])


def wait_for_it(world: cr.World, registry: cr.Registry, reducer: cr.Reducer, state: str) -> None:
    """Wait for the rank that ends, which must be told of."""
    if state == "closed":
        return
    if state == "flying":
        backward(reducer)
    if state == "alone":
        try:
            until(lambda: not world.usable)
        finally:
            world.check()
    registry.gather(registry.shards)
    # It went on for one more: a rank that leaves well has been here.
    registry.gather(registry.shards)


def work(world: cr.World, way: str, state: str, bad: int, folder: Path) -> None:
    registry = cr.Registry(SPECS, world, bucket_bytes=4 * LENGTH)
    reducer = cr.Reducer(registry, op="sum")
    backward(reducer)
    full = registry.gather(reducer.wait())
    assert all(set(array.tolist()) == {2} for array in full.values())
    if world.rank == bad:
        meet(world)
        bring(world, reducer, state, folder)
        if state != "closed":
            tell_end(world, folder)
            end(way)
    else:
        try:
            meet(world)
            wait_for_it(world, registry, reducer, state)
        except cr.CommunicationError as error:
            write(folder / f"told-{world.rank}", str(error).encode())
            tell_end(world, folder)
            raise


def main() -> None:
    how, way, state, bad, folder = *sys.argv[1:4], int(sys.argv[4]), Path(sys.argv[5])
    tempfile.tempdir = str(folder)
    world = join(how, folder)
    write(folder / f"wrote-{world.rank}", b"before the end")
    if state == "open":
        work(world, way, state, bad, folder)
        return
    with world:
        work(world, way, state, bad, folder)
    if state == "closed":
        tell_end(world, folder)
        if world.rank == bad:
            end(way)


if __name__ == "__main__":
    main()
