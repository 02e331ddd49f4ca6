"""Collectives on NumPy arrays over MPI. Queued on a stream's thread, polled, never spinning."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from cupynccl_reduce.errors import CommunicationError, LayoutError

from .fold import fold

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cupynccl_reduce.protocols import Array, Op

__all__ = ["MpiCommunicator"]

MAX_CALL_BYTES = 1 << 30  # MPI counts are C ints: every call stays well below 2**31
ALL_REDUCE_ELEMENTS = 1 << 20  # bounds the scratch of one all_reduce piece


class MpiCommunicator:
    """protocols.Communicator over a duplicate of `comm`.

    Rows travel by non-blocking send and receive, and each rank sums its own in rank order, 16-bit
    floats in fp32: MPI has no 16-bit float sum, and its order of summation is not fixed.
    Polling with short sleeps leaves the core to backward, where a blocking call would spin.
    """

    def __init__(self, comm: MPI.Comm, *, max_call_bytes: int = MAX_CALL_BYTES) -> None:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            msg = (
                "MPI was initialised without THREAD_MULTIPLE, which overlapping needs; let mpi4py "
                "initialise it (mpi4py.rc.thread_level = 'multiple' is its default)"
            )
            raise LayoutError(msg)
        self.rank: int = comm.Get_rank()
        self.world_size: int = comm.Get_size()
        self._comm = comm.Dup()
        self._max_call_bytes = max_call_bytes
        self._scratch = np.empty(0, np.uint8)
        self._aborted = False
        self._closed = False

    def reduce_scatter(self, send: Array, recv: Array, dtype: str, op: Op, stream: Any) -> None:
        """Queue: `recv` becomes row `rank` of the sum over ranks of `send`."""
        stream.submit(partial(self._reduce_scatter, send, recv, dtype, op))

    def all_gather(self, send: Array, recv: Array, dtype: str, stream: Any) -> None:  # noqa: ARG002
        """Queue: row r of `recv` becomes rank r's `send`."""
        stream.submit(partial(self._all_gather, send, recv))

    def all_reduce(self, send: Array, recv: Array, dtype: str, op: Op, stream: Any) -> None:
        """Queue: `recv` becomes the sum over ranks of `send`."""
        stream.submit(partial(self._all_reduce, send, recv, dtype, op))

    def broadcast(self, array: Array, root: int, dtype: str, stream: Any) -> None:  # noqa: ARG002
        """Queue: `array` becomes rank `root`'s."""
        stream.submit(partial(self._broadcast, array, root))

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
        """Let this rank's collectives end with an error. Idempotent."""
        self._aborted = True

    def _reduce_scatter(self, send: Array, recv: Array, dtype: str, op: Op) -> None:
        rows = send.reshape(self.world_size, recv.size)
        mine = self._gathered(rows[self.rank])
        self._exchange(list(rows), mine)
        fold(mine, recv, dtype, op)

    def _all_gather(self, send: Array, recv: Array) -> None:
        rows = list(recv.reshape(self.world_size, send.size))
        if rows[self.rank].ctypes.data != send.ctypes.data:
            rows[self.rank][...] = send
        self._exchange([send] * self.world_size, rows)

    def _all_reduce(self, send: Array, recv: Array, dtype: str, op: Op) -> None:
        for start in range(0, send.size, ALL_REDUCE_ELEMENTS):
            piece = slice(start, start + ALL_REDUCE_ELEMENTS)
            mine = self._gathered(send[piece])
            self._exchange([send[piece]] * self.world_size, mine)
            fold(mine, recv[piece], dtype, op)

    def _broadcast(self, array: Array, root: int) -> None:
        for piece in self._pieces(array):
            self._finish([self._comm.Ibcast([piece, MPI.BYTE], root)])

    def _gathered(self, own: Array) -> list[Array]:
        """Return a place for every rank's `own`: itself here, scratch for the peers'."""
        if self._scratch.size < own.nbytes * (self.world_size - 1):
            self._scratch = np.empty(own.nbytes * (self.world_size - 1), np.uint8)
        peers = iter(range(self.world_size - 1))
        return [
            own
            if rank == self.rank
            else self._scratch[next(peers) * own.nbytes :][: own.nbytes].view(own.dtype)
            for rank in range(self.world_size)
        ]

    def _exchange(self, sends: list[Array], recvs: list[Array]) -> None:
        """Send `sends[p]` to each peer p and receive `recvs[p]` from it."""
        requests = []
        for distance in range(1, self.world_size):
            source = (self.rank - distance) % self.world_size
            target = (self.rank + distance) % self.world_size
            for piece in self._pieces(recvs[source]):
                requests.append(self._comm.Irecv([piece, MPI.BYTE], source))
            for piece in self._pieces(sends[target]):
                requests.append(self._comm.Isend([piece, MPI.BYTE], target))
        self._finish(requests)

    def _pieces(self, array: Array) -> Iterator[Array]:
        flat = array.view(np.uint8)
        for start in range(0, flat.size, self._max_call_bytes):
            yield flat[start : start + self._max_call_bytes]

    def _finish(self, requests: list[Any]) -> None:
        pause = 0.0
        while not MPI.Request.Testall(requests):
            if self._aborted:
                msg = f"rank {self.rank}: aborted while a collective was under way"
                raise CommunicationError(msg)
            time.sleep(pause)
            pause = min(pause + 5e-6, 2e-4)
