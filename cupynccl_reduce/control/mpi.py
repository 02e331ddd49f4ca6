"""The side channel over MPI: small messages, host-blocking, no pickle."""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING

from mpi4py import MPI

from cupynccl_reduce.errors import CommunicationError

from .frames import Kind, check_length

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MpiControl"]

DATA_TAG, ABORT_TAG = 0, 1
PAUSE_S = 5e-5


class MpiControl:
    """protocols.Control over a duplicate of `comm`. Making one is collective."""

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm.Dup()
        self._rank: int = comm.Get_rank()
        self._world_size: int = comm.Get_size()
        self._aborted = False
        self._closed = False

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Collective, blocks the host: return every rank's payload, in rank order.

        Raises:
            CommunicationError: a rank left, or aborted.
            LayoutError: over 64 MiB.
        """
        check_length(Kind.GATHER, payload)
        self._check()
        sends = self._send_all(payload, DATA_TAG)
        try:
            everyone = [
                payload if rank == self._rank else self._receive(rank)
                for rank in range(self._world_size)
            ]
            for rank, send in sends.items():
                self._wait(rank, send.Test)
        except BaseException:
            # MPI goes on reading the payload until MPI_Finalize, when Python's own objects are
            # gone: these stay for ever.
            for send in sends.values():
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(send))
            raise
        return everyone

    def close(self) -> None:
        """Free the duplicate (collective after success). Idempotent."""
        if not self._closed:
            self._closed = True
            if not self._aborted and not MPI.Is_finalized():
                self._comm.Free()

    def abort(self) -> None:
        """Free this rank, and those that wait for it here. Idempotent."""
        if not self._aborted and not self._closed:
            self._aborted = True
            if not MPI.Is_finalized():
                self._send_all(b"", ABORT_TAG)

    def _send_all(self, payload: bytes, tag: int) -> dict[int, MPI.Request]:
        return {
            rank: self._comm.Isend([payload, MPI.BYTE], rank, tag)
            for rank in range(self._world_size)
            if rank != self._rank
        }

    def _receive(self, rank: int) -> bytes:
        status = MPI.Status()
        self._wait(rank, lambda: self._comm.Iprobe(rank, DATA_TAG, status))
        payload = bytearray(status.Get_count(MPI.BYTE))
        self._comm.Recv([payload, MPI.BYTE], rank, DATA_TAG)
        return bytes(payload)

    def _wait(self, rank: int, ready: Callable[[], bool]) -> None:
        """Poll until `ready`: blocking MPI calls spin. Raise if `rank`, or this one, has left."""
        while not ready():
            # A rank may leave right after an all_gather that it completed: look once more.
            if self._comm.Iprobe(rank, ABORT_TAG) and not ready():
                raise _left(rank)
            self._check()
            time.sleep(PAUSE_S)

    def _check(self) -> None:
        if self._aborted:
            raise _left(self._rank)


def _left(rank: int) -> CommunicationError:
    return CommunicationError(f"rank {rank} left this world after a failure")
