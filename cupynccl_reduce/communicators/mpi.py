"""Collectives on NumPy arrays over MPI. Queued on a stream's thread, polled, never spinning."""

from __future__ import annotations

import ctypes
import threading
import time
from contextlib import contextmanager
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from cupynccl_reduce.errors import CommunicationError, LayoutError

from .fold import DIRECT_ROW_BYTES, fold

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from cupynccl_reduce.protocols import Array, Op

    _Call = Generator[Sequence[Array], None, None]
    _Requests = dict[int, list[MPI.Request]]  # by peer

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
        self.direct_bytes = DIRECT_ROW_BYTES * self.world_size
        self.regroup = None  # a dead rank leaves no MPI library in a state that works
        self._comm = comm.Dup()
        self._max_call_bytes = max_call_bytes
        self._scratch = np.empty(0, np.uint8)
        self._held = threading.local()  # .calls: those of the group that a thread has open
        self._aborted = False
        self._closed = False

    def reduce_scatter(self, send: Array, recv: Array, dtype: str, op: Op, stream: Any) -> None:
        """Queue: `recv` becomes row `rank` of the sum over ranks of `send`."""
        rows = send.reshape(self.world_size, recv.size)
        self._queue(self._reduce_scatter(rows, recv, dtype, op), stream)

    def all_gather(self, send: Array, recv: Array, dtype: str, stream: Any) -> None:  # noqa: ARG002
        """Queue: row r of `recv` becomes rank r's `send`."""
        rows = recv.reshape(self.world_size, send.size)
        self._queue(self._all_gather(send, rows), stream)

    def all_reduce(self, send: Array, recv: Array, dtype: str, op: Op, stream: Any) -> None:
        """Queue: `recv` becomes the sum over ranks of `send`."""
        self._queue(self._all_reduce(send, recv, dtype, op), stream)

    def broadcast(self, array: Array, root: int, dtype: str, stream: Any) -> None:  # noqa: ARG002
        """Queue: `array` becomes rank `root`'s."""
        self._queue(self._broadcast(array, root), stream)

    @contextmanager
    def group(self) -> Iterator[None]:
        """Hold back the collectives of this thread, then queue them as one piece of work.

        All their sends start before the first of them waits for a peer. If the body raises, none
        of them is queued.
        """
        calls: list[tuple[Any, _Call]] = []
        self._held.calls = calls
        try:
            yield
        finally:
            del self._held.calls
        for stream, group in groupby(calls, key=itemgetter(0)):
            stream.submit(partial(self._run, [call for _, call in group]))

    def check(self) -> None:
        """Find nothing: what fails here raises on the stream."""

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

    def _queue(self, call: _Call, stream: Any) -> None:
        calls = getattr(self._held, "calls", None)
        if calls is None:
            stream.submit(partial(self._run, [call]))
        else:
            calls.append((stream, call))

    def _run(self, calls: Sequence[_Call]) -> None:
        """Do collectives: start the sends of all, then receive, then see that peers have too."""
        self._check()
        requests: _Requests = {peer: [] for peer in range(self.world_size)}
        try:
            for call in calls:
                for peer, array in self._peers(next(call)):
                    for piece in self._pieces(array):
                        requests[peer].append(self._comm.Isend(piece, peer, DATA_TAG))
            for call in calls:
                next(call, None)
            self._finish(requests)
        except BaseException:
            _leave(requests)
            raise

    # A collective: it yields what goes to each peer, and receives from them when it is resumed.

    def _reduce_scatter(self, rows: Array, recv: Array, dtype: str, op: Op) -> _Call:
        yield rows
        # No peer reads this row of `rows`, so `recv` may be that row.
        self._sum(rows[self.rank], recv, dtype, op)

    def _all_gather(self, send: Array, rows: Array) -> _Call:
        if rows[self.rank].ctypes.data != send.ctypes.data:
            rows[self.rank][...] = send
        yield [send] * self.world_size
        self._receive(rows)

    def _all_reduce(self, send: Array, recv: Array, dtype: str, op: Op) -> _Call:
        # A copy: peers read it while `recv` is written, and that may be `send`.
        own = send.copy()
        yield [own] * self.world_size
        self._sum(own, recv, dtype, op)

    def _broadcast(self, array: Array, root: int) -> _Call:
        nothing = array[:0]
        yield [array if self.rank == root else nothing] * self.world_size
        ranks = range(self.world_size)
        self._receive([array if rank == root != self.rank else nothing for rank in ranks])

    def _sum(self, own: Array, recv: Array, dtype: str, op: Op) -> None:
        """Write the sum over ranks of what they send to this one into `recv`, piece by piece."""
        step = max(1, self._max_call_bytes // own.itemsize)
        peers = self._scratch_for(own[:step])
        for start in range(0, own.size, step):
            mine = own[start : start + step]
            rows = [row[: mine.size] for row in peers]
            rows.insert(self.rank, mine)
            self._receive(rows)
            fold(rows, recv[start : start + step], dtype, op)

    def _scratch_for(self, piece: Array) -> Array:
        """Return a row like `piece` for each peer."""
        nbytes = piece.nbytes * (self.world_size - 1)
        if self._scratch.size < nbytes:
            self._scratch = np.empty(nbytes, np.uint8)
        return self._scratch[:nbytes].view(piece.dtype).reshape(self.world_size - 1, piece.size)

    def _receive(self, rows: Sequence[Array]) -> None:
        """Receive `rows[p]` from each peer p; return when all are there."""
        requests: _Requests = {peer: [] for peer in range(self.world_size)}
        try:
            for peer, array in self._peers(rows):
                for piece in self._pieces(array):
                    requests[peer].append(self._comm.Irecv(piece, peer, DATA_TAG))
            self._finish(requests)
        except BaseException:
            _leave(requests)
            raise

    def _peers(self, rows: Sequence[Array]) -> Iterator[tuple[int, Array]]:
        """Yield each peer with its row, the next rank first: not all ranks begin with rank 0."""
        for distance in range(1, self.world_size):
            peer = (self.rank + distance) % self.world_size
            yield peer, rows[peer]

    def _pieces(self, array: Array) -> Iterator[list[Any]]:
        step = max(1, self._max_call_bytes // array.itemsize)
        for start in range(0, array.size, step):
            yield [array[start : start + step].view(np.uint8), MPI.BYTE]

    def _finish(self, requests: _Requests) -> None:
        """Return when all messages are done; raise if their peer, or this rank, has left."""
        for peer, pending in requests.items():
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


def _leave(requests: _Requests) -> None:
    """Keep what unfinished messages use for ever.

    MPI goes on using their memory until MPI_Finalize, when Python's own objects are gone.
    """
    for request in chain.from_iterable(requests.values()):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(request))


def _left(rank: int) -> CommunicationError:
    return CommunicationError(f"rank {rank} left this world after a failure")
