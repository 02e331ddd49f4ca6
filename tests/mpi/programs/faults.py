"""One rank fails, in one way, at one point: every other rank must say so, with rank and reason.

Arguments: kind, point, rank that fails, runtime, an empty folder. Each rank that goes on writes
what it was told into a file there.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import cupynccl_reduce as cr

if TYPE_CHECKING:
    from collections.abc import Callable

COUNT, LENGTH, STEPS, TIMEOUT_S = 6, 1000, 4, 3.0


def swap(reducer: Any) -> None:
    buckets = reducer._policy._buckets
    buckets[0], buckets[1] = buckets[1], buckets[0]


def leave(world: cr.World) -> None:
    world.close()
    sys.exit(0)


def fail(kind: str, world: cr.World, reducer: cr.Reducer | None) -> None:
    kinds: dict[str, Callable[[], object]] = {
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "segfault": lambda: ctypes.string_at(0),
        "_exit": lambda: os._exit(3),
        "gil": lambda: ctypes.PyDLL(None).sleep(60),
        "sleep": lambda: time.sleep(60),
        "slow": lambda: time.sleep(1.0),
        "leave": lambda: leave(world),
        "swap": lambda: swap(reducer),
    }
    if kind == "raise":
        raise ValueError("planted")
    kinds[kind]()


def work(world: cr.World, kind: str, point: str, bad: int) -> None:
    here = world.rank == bad
    specs = [cr.ParamSpec(f"p{i}", (LENGTH,), "float32") for i in range(COUNT)]
    if here and point == "registry":
        fail(kind, world, None)
    registry = cr.Registry(specs, world, bucket_bytes=2 * 4 * LENGTH)
    reducer = cr.Reducer(registry, missing="error" if point == "missing" else "zero")
    if world.runtime.kind == "cuda":
        import cupy as arrays
    else:
        arrays = np
    # Ranks hear of each other five times a second.
    steps, pause_s = (40, 0.05) if kind == "swap" else (STEPS, 0.0)
    for step in range(steps):
        time.sleep(pause_s)
        now = here and step == STEPS // 2
        if now and point in ("between", "missing"):
            fail(kind, world, reducer)
        with reducer.backward():
            for i in range(COUNT):
                if now and point == "backward" and i == COUNT // 2:
                    fail(kind, world, reducer)
                reducer.reduce_grad(f"p{i}", arrays.full(LENGTH, float(i), np.float32))
        if now and point == "wait":
            fail(kind, world, reducer)
        shards = reducer.wait()
        reducer.synchronize()
        if now and point == "gather":
            fail(kind, world, reducer)
        registry.gather(shards)
    world.control.all_gather(b"")  # nobody leaves before all are done


def go_on(world: cr.World) -> str:
    """Return how the survivors get on: on cuda with exact sums, on MPI with a refusal."""
    try:
        survivors = world.shrink()
    except cr.LayoutError as error:
        return f", {world.runtime.kind}: {error}"
    with survivors:
        import cupy

        specs = [cr.ParamSpec(f"p{i}", (LENGTH,), "float32") for i in range(COUNT)]
        registry = cr.Registry(specs, survivors, bucket_bytes=2 * 4 * LENGTH)
        with cr.Reducer(registry, op="sum") as reducer:
            for step in range(STEPS):
                with reducer.backward():
                    for i in range(COUNT):
                        grad = cupy.full(LENGTH, float(i + step + survivors.rank), np.float32)
                        reducer.reduce_grad(f"p{i}", grad)
                full = registry.gather(reducer.wait())
                ranks = range(survivors.world_size)
                for i in range(COUNT):
                    assert (full[f"p{i}"] == sum(i + step + rank for rank in ranks)).all()
    return f", {survivors.world_size} went on"


def main() -> None:
    kind, point, bad, runtime = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    tempfile.tempdir = sys.argv[5]
    options: Any = {"share_gpu": True} if runtime == "cuda" else {}
    world = cr.connect(runtime, timeout_s=TIMEOUT_S, **options)  # type: ignore[arg-type]
    rank = world.rank
    try:
        work(world, kind, point, bad)
    except cr.CommunicationError as error:
        report = error.report
        told = f"{report.reason} {','.join(map(str, report.ranks))}" if report else "unknown"
        print(error, flush=True)
        try:
            cr.Registry([cr.ParamSpec("p", (4,), "float32")], world)
        except cr.CommunicationError as later:
            told += " and later too" if later.report is report else ""
        # The launcher ends the others when one has ended with an error.
        told += go_on(world) if kind not in ("raise", "leave") else ""
        # Files, as lines of several ranks may run into each other.
        meeting, expected = Path(sys.argv[5]) / "named", world.world_size - (kind != "swap")
        meeting.mkdir(exist_ok=True)
        whole = meeting.with_name(f"told-{rank}")
        whole.write_text(told)
        whole.rename(meeting / str(rank))
        until = time.monotonic() + 20
        while len(list(meeting.iterdir())) < expected and time.monotonic() < until:
            time.sleep(0.01)
        if world.status.shrunk:
            os._exit(74)  # the code of SystemExit would be lost
        raise SystemExit(74) from None
    print(f"FINE {rank}", flush=True)
    world.close()


if __name__ == "__main__":
    main()
