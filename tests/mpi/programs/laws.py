"""Every law of communicators in one job. Arguments: host or cuda, then any of default and cut."""

from __future__ import annotations

import sys
from dataclasses import replace

from contract.laws import laws

import cupynccl_reduce as cr

CALL_BYTES = 5001  # no multiple of an itemsize


def main(runtime: str, *sizes: str) -> None:
    with cr.connect(runtime, share_gpu=runtime == "cuda") as world:
        for size in sizes:
            joined = world
            if size == "cut":
                from mpi4py import MPI

                from cupynccl_reduce.communicators.mpi import MpiCommunicator

                # Every larger message is cut into calls, as one over 2**31 bytes must be.
                cut = MpiCommunicator(MPI.COMM_WORLD, max_call_bytes=CALL_BYTES)
                joined = replace(world, communicator=cut)
            for name, law in laws(host=runtime == "host").items():
                law(joined)
                world.control.all_gather(b"")
                if world.rank == 0:
                    print(f"law {size}: {name}", flush=True)
            for _ in range(2):
                joined.communicator.close()


main(*sys.argv[1:])
