"""Where a session must stand, and what its shards must hold: plain NumPy. No ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cupynccl_reduce import ParamSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FLOATS", "LOSS_SCALE", "Model"]

FLOATS = (
    ParamSpec("once", (3,), "float32"),
    ParamSpec("table", (2, 3), "float32"),
    ParamSpec("brain", (5,), "bfloat16"),
    ParamSpec("scalar", (), "float64"),
    ParamSpec("nothing", (0, 2), "float32"),
    ParamSpec("many", (7,), "float16", uses="many"),
)
INTEGERS = (*FLOATS, ParamSpec("count", (4,), "int32"))
LOSS_SCALE = 0.5  # of clip(), which so doubles what shards hold
OPTIONS = {
    "op": "sum",
    "policy": "planned",
    "missing": "zero",
    "max_buffers": 2,
    "bucket_bytes": 24,
    "integers": False,
}


class Model:
    """What a session must be in: where its cycle stands, and what every shard must hold."""

    def __init__(self, world_size: int, options: dict[str, Any]) -> None:
        self.world_size = world_size
        self.options = options = OPTIONS | options
        self.planned = options["policy"] == "planned"
        self.params = {s.name: s for s in (INTEGERS if options["integers"] else FLOATS)}
        self.divisor = world_size if options["op"] == "mean" else 1
        self.can_fill = self.planned and not options["integers"]
        self.world = "usable"
        self.new_registry()

    def new_registry(self) -> None:
        self.shards = {n: np.zeros(s.shape) for n, s in self.params.items()}
        self.known = True  # whether `shards` is what they hold, once all is done
        self.new_reducer()

    def new_reducer(self) -> None:
        self.ready = True
        self.state = "new"
        self.open = False
        self.step = self.backwards = self.gradients = 0
        self.arrived: dict[str, list[np.ndarray]] = {}
        self.skipped: set[str] = set()
        self.launched = 0  # buckets of the open backward
        self.flushed: set[str] = set()  # launched without, or for good

    def situations(self) -> set[str]:
        """Return all that can be said of where a call would come now."""
        if self.world != "usable":
            return {self.world}
        held = {"usable", "inside" if self.open else "idle"}
        if not self.ready:
            return held | {"closed"}
        held |= {"ready", self.state}
        if not self.open:
            return held | {"outside"} | ({"reduced"} if self.state == "reducing" else set())
        return held | {about for about in ("given", "skipped", "late") if self.subjects(about)}

    def subjects(self, about: str) -> tuple[str, ...]:
        """Return the parameters of which a second gradient, or any, must be refused."""
        if about == "given":
            return tuple(n for n in self.arrived if self.params[n].uses == "once")
        if about == "skipped":
            return tuple(sorted(self.skipped))
        return tuple(sorted(self.flushed))

    def takes(self) -> list[str]:
        """Return the parameters whose gradient may be handed over now."""
        return [
            name
            for name, spec in self.params.items()
            if name not in self.skipped | self.flushed
            and (spec.uses == "many" or name not in self.arrived)
        ]

    def lets_skip(self) -> list[str]:
        return [name for name in self.takes() if name not in self.arrived]

    def advance(self, buckets: Sequence[Any]) -> None:
        """Count the buckets at the front that nothing holds back."""
        while self.planned and self.launched < len(buckets):
            bucket = buckets[self.launched]
            if bucket.uses == "many" or any(
                name not in self.arrived and name not in self.skipped for name in bucket.names
            ):
                return
            self.launched += 1

    def flush(self, buckets: Sequence[Any]) -> None:
        if not self.planned:
            return
        for bucket in buckets[self.launched :]:
            many = bucket.uses == "many"
            absent = [n for n in bucket.names if n not in self.arrived and n not in self.skipped]
            self.flushed.update([n for n in bucket.names if n in self.arrived and many] + absent)
        self.launched = len(buckets)

    def begin(self) -> None:
        self.accumulates = self.state == "reducing"
        self.step += not self.accumulates
        self.state = "reducing"
        self.open = True
        self.arrived, self.skipped, self.flushed, self.launched = {}, set(), set(), 0

    def absent(self) -> list[str]:
        return [n for n in self.params if n not in self.arrived and n not in self.skipped]

    def end(self, buckets: Sequence[Any], *, failed: bool) -> None:
        """Put what has arrived into the shards: NaN in what a failed backward had not launched."""
        late = {n for b in buckets[self.launched :] for n in b.names} if failed else set()
        for name, spec in self.params.items():
            total = np.sum(self.arrived.get(name, []), axis=0) if name in self.arrived else 0.0
            before = self.shards[name] if self.accumulates else np.zeros(spec.shape)
            self.shards[name] = before + (np.nan if name in late else total)
        self.open = False
        self.backwards += 1
        self.known = self.planned  # in arrival order, wait() zeroes what never came

    def clip(self) -> None:
        self.state = "clipped"
        for name, spec in self.params.items():
            if spec.is_float:
                self.shards[name] = self.shards[name] / LOSS_SCALE
