"""Rank 1 holds its GIL for ever, and the others wait after they were told: the sentinel ends it."""

from __future__ import annotations

import ctypes
import time

import cupynccl_reduce as cr


def main() -> None:
    world = cr.connect("host", timeout_s=0.5)
    world.control.all_gather(b"")
    if world.rank == 1:
        ctypes.PyDLL(None).sleep(300)
    try:
        world.agree("nothing", [])
    except cr.CommunicationError as error:
        print(f"TOLD {error.ranks}", flush=True)
    time.sleep(300)


if __name__ == "__main__":
    main()
