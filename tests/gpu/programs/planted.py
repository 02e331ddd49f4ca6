"""Plant one bug in the engine, by name: the race detector must report it on real streams.

Run with CUPYNCCL_SANITIZE=1 on two ranks; every rank's own detector must see it.
"""

from __future__ import annotations

import sys
from typing import Any

from hazards import workload

import cupynccl_reduce as cr
from cupynccl_reduce.pipeline import Pipeline

ORIGINAL = {name: getattr(Pipeline, name) for name in ("_reuse", "mark")}


class Deaf:
    """A stream that ignores waits."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def wait_event(self, event: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def send_buffer_reused_without_waiting(self: Pipeline, buffer: Any) -> None:
    copy, self._copy = self._copy, Deaf(self._copy)
    ORIGINAL["_reuse"](self, buffer)
    self._copy = copy


def gradients_dropped_after_enqueue(self: Pipeline, buffer: Any) -> None:
    buffer.sources.clear()


def no_producer_is_waited_for(self: Pipeline, producers: Any) -> None:
    pass


def only_the_last_producer_is_waited_for(self: Pipeline, layout: Any, groups: Any) -> None:
    ORIGINAL["mark"](self, layout, [group for group in groups if group][-1:])


BUGS = {
    "send_buffer_reused_without_waiting": ("_reuse", send_buffer_reused_without_waiting),
    "gradients_dropped_after_enqueue": ("_release", gradients_dropped_after_enqueue),
    "no_producer_is_waited_for": ("_follow", no_producer_is_waited_for),
    "only_the_last_producer_is_waited_for": ("mark", only_the_last_producer_is_waited_for),
}

WORDS = {  # what the report must speak of
    "send_buffer_reused_without_waiting": ("earlier read : reduce_scatter", "later   write: pack"),
    "gradients_dropped_after_enqueue": ("earlier read : pack", "later   write: free"),
    "no_producer_is_waited_for": ("earlier write: producer's", "later   read : pack"),
    "only_the_last_producer_is_waited_for": ("earlier write: producer's", "later   read : pack"),
}


def main() -> None:
    method, bug = BUGS[sys.argv[1]]
    setattr(Pipeline, method, bug)
    try:
        with cr.connect("cuda", share_gpu=True) as world:
            workload(world, 1)
    except cr.ReduceError as error:
        told = f"{error} {error.__cause__}"
        verdict = "SEEN" if all(part in told for part in WORDS[sys.argv[1]]) else "OTHER"
        print(f"{verdict} by rank {world.rank}: {told}", flush=True)
        return
    print(f"MISSED by rank {world.rank}", flush=True)


if __name__ == "__main__":
    main()
