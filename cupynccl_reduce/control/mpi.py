"""The side channel over MPI: small messages, host-blocking, no pickle."""

from __future__ import annotations

from array import array

from mpi4py import MPI

__all__ = ["MpiControl"]


class MpiControl:
    """protocols.Control over a duplicate of `comm`, apart from the collectives'."""

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm.Dup()
        self._aborted = False
        self._closed = False

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Collective, blocks the host: return every rank's payload, in rank order."""
        lengths = array("i", bytes(4 * self._comm.Get_size()))
        self._comm.Allgather(array("i", [len(payload)]), lengths)
        received = bytearray(sum(lengths))
        self._comm.Allgatherv([payload, MPI.BYTE], [received, (lengths, None), MPI.BYTE])
        everyone = []
        start = 0
        for length in lengths:
            everyone.append(bytes(received[start : start + length]))
            start += length
        return everyone

    def close(self) -> None:
        """Free the duplicate (collective after success). Idempotent."""
        if not self._closed:
            self._closed = True
            if not self._aborted and not MPI.Is_finalized():
                self._comm.Free()

    def abort(self) -> None:
        """Keep `close` from waiting for ranks that are gone. Idempotent."""
        self._aborted = True
