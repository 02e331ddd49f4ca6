"""Collectives on NumPy arrays over MPI. Queued on a stream's thread, polled, never spinning."""

from __future__ import annotations

import ctypes
import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from cupynccl_reduce.errors import CommunicationError, LayoutError

from .fold import fold

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cupynccl_reduce.protocols import Array, Op

__all__ = ["MpiCommunicator", "check_thread_level"]

DATA_TAG, ABORT_TAG = 0, 1
MAX_CALL_BYTES = 4 << 20  # bounds the scratch of a sum; MPI counts are C ints, so 2**31 is the end
MAX_PAUSE_S = 2e-4


def check_thread_level() -> None:
    """Raise LayoutError unless MPI lets a stream's thread work beside the caller's."""
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        msg = (
            "MPI was initialised without THREAD_MULTIPLE, which overlapping needs; let mpi4py "
            "initialise it (mpi4py.rc.thread_level = 'multiple' is its default)"
        )
        raise LayoutError(msg)


class MpiCommunicator:
    """protocols.Communicator over a duplicate of `comm`. Making one is collective.

    Rows travel by non-blocking send and receive, and each rank sums its own in rank order, 16-bit
    floats in fp32: MPI has no 16-bit float sum, and its order of summation is not fixed.
    Polling with short sleeps leaves the core to backward, where a blocking call would spin.
    """

    def __init__(self, comm: MPI.Comm, *, max_call_bytes: int = MAX_CALL_BYTES) -> None:
        check_thread_level()
        self.rank: int = comm.Get_rank()
        self.world_size: int = comm.Get_size()
        self._comm = comm.Dup()
        self._max_call_bytes = max_call_bytes
        self._scratch = np.empty(0, np.uint8)
        self._aborted = False
        self._closed = False

    def reduce_scatter(self, send: Array, recv: Array, dtype: str, op: Op, stream: Any) -> None:
        """Queue: `recv` becomes row `rank` of the sum over ranks of `send`."""
        rows = send.reshape(self.world_size, recv.size)
        stream.submit(partial(self._sum, rows, recv, dtype, op))

    def all_gather(self, send: Array, recv: Array, dtype: str, stream: Any) -> None:  # noqa: ARG002
        """Queue: row r of `recv` becomes rank r's `send`."""
        rows = recv.reshape(self.world_size, send.size)
        stream.submit(partial(self._all_gather, send, rows))

    def all_reduce(self, send: Array, recv: Array, dtype: str, op: Op, stream: Any) -> None:
        """Queue: `recv` becomes the sum over ranks of `send`."""
        rows = [send] * self.world_size
        stream.submit(partial(self._sum, rows, recv, dtype, op))

    def broadcast(self, array: Array, root: int, dtype: str, stream: Any) -> None:  # noqa: ARG002
        """Queue: `array` becomes rank `root`'s."""
        sends = recvs = [array[:0]] * self.world_size
        if self.rank == root:
            sends = [array] * self.world_size
        else:
            recvs = [array if rank == root else array[:0] for rank in range(self.world_size)]
        stream.submit(partial(self._exchange, sends, recvs))

    def group(self) -> AbstractContextManager[None]:
        """Return a context that does nothing: one queue keeps the order by itself."""
        return nullcontext()

    def close(self) -> None:
        """Free the duplicate (collective after success). Idempotent."""
        if not self._closed:
            self._closed = True
            if not self._aborted and not MPI.Is_finalized():
                self._comm.Free()

    def abort(self) -> None:
        """End this rank's collectives, and those of ranks that wait for it. Idempotent."""
        if self._aborted or self._closed:
            return
        self._aborted = True
        if not MPI.Is_finalized():
            for peer in range(self.world_size):
                if peer != self.rank:
                    self._comm.Isend([b"", MPI.BYTE], peer, ABORT_TAG)

    def _sum(self, rows: Sequence[Array], recv: Array, dtype: str, op: Op) -> None:
        """Write the sum over ranks of each one's `rows[self.rank]` into `recv`, cut into calls."""
        step = max(1, self._max_call_bytes // recv.itemsize)
        for start in range(0, recv.size, step):
            sends = [row[start : start + step] for row in rows]
            mine = self._places(sends[self.rank])
            self._exchange(sends, mine)
            # Not before the peers have received, too: `recv` may be a part of `rows`.
            fold(mine, recv[start : start + step], dtype, op)

    def _all_gather(self, send: Array, rows: Array) -> None:
        if rows[self.rank].ctypes.data != send.ctypes.data:
            rows[self.rank][...] = send
        self._exchange([send] * self.world_size, rows)

    def _places(self, own: Array) -> list[Array]:
        """Return a place for every rank's `own`: itself here, scratch for the peers'."""
        nbytes = own.nbytes * (self.world_size - 1)
        if self._scratch.size < nbytes:
            self._scratch = np.empty(nbytes, np.uint8)
        peers = self._scratch[:nbytes].view(own.dtype).reshape(self.world_size - 1, own.size)
        return [*peers[: self.rank], own, *peers[self.rank :]]

    def _exchange(self, sends: Sequence[Array], recvs: Sequence[Array]) -> None:
        """Send `sends[p]` to each peer p, receive `recvs[p]` from it; return when it is done."""
        self._check()
        requests: dict[int, list[MPI.Request]] = {}
        for distance in range(1, self.world_size):
            source = (self.rank - distance) % self.world_size
            target = (self.rank + distance) % self.world_size
            for piece in self._pieces(recvs[source]):
                request = self._comm.Irecv(piece, source, DATA_TAG)
                requests.setdefault(source, []).append(request)
            for piece in self._pieces(sends[target]):
                request = self._comm.Isend(piece, target, DATA_TAG)
                requests.setdefault(target, []).append(request)
        try:
            for peer, pending in requests.items():
                self._finish(peer, pending)
        except BaseException:
            # MPI goes on using their memory until MPI_Finalize, when Python's own objects are
            # gone: these stay for ever.
            for request in chain.from_iterable(requests.values()):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(request))
            raise

    def _pieces(self, array: Array) -> Iterator[list[Any]]:
        flat = array.view(np.uint8)
        for start in range(0, flat.size, self._max_call_bytes):
            yield [flat[start : start + self._max_call_bytes], MPI.BYTE]

    def _finish(self, peer: int, pending: list[MPI.Request]) -> None:
        """Return when all messages from and to `peer` are done; raise if it, or this rank, left."""
        pause = 0.0
        while not MPI.Request.Testall(pending):
            # A peer may leave right after a collective that it completed: look once more.
            if self._comm.Iprobe(peer, ABORT_TAG) and not MPI.Request.Testall(pending):
                raise _left(peer)
            self._check()
            time.sleep(pause)
            pause = min(pause + 5e-6, MAX_PAUSE_S)

    def _check(self) -> None:
        if self._aborted:
            raise _left(self.rank)


def _left(rank: int) -> CommunicationError:
    return CommunicationError(f"rank {rank} left this world after a failure")
