"""Gatherer in the simulator: exact and without a race, whatever the order; each planted bug found.

Blocks are acquired on several streams, forward and then backward; an optimizer writes the shards on
a stream of its own between passes; the caller's memory is written to as soon as it is free.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from simulation.mutations import (
    COMMUNICATION,
    COPY,
    redirect_records,
    skip_records,
    skip_waits,
)
from simulation.workloads import SCHEDULES, simulate

from cupynccl_reduce import Gatherer, ParamSpec, Registry
from cupynccl_reduce.errors import RaceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from cupynccl_reduce import World

RUNS, CHUNKS, PASSES = 120, 4, 4


@dataclass
class Passes:
    """What one rank does; the numbers are drawn from `seed`, alike on all ranks."""

    seed: int
    world_size: int = 2
    bring: bool = False  # memory of the caller's
    prefetch: int = 1
    persistent: int = 0
    stream: Any = None  # that calls the gatherer
    readings: list[tuple[str, Any, np.ndarray]] = field(default_factory=list)

    def run(self, world: World) -> Passes:
        one = Passes(self.seed, self.world_size, self.bring, self.prefetch, self.persistent)
        one.work(world)
        return one

    def work(self, world: World) -> None:
        rng, runtime = random.Random(self.seed), world.runtime  # type: Any, Any
        specs = [
            ParamSpec(f"p{i}", rng.choice([(5,), (2, 3), (), (0, 2), (7,)]), dtype)
            for i, dtype in enumerate(rng.choices(["float32", "float16"], k=6))
        ]
        registry = Registry(specs, world, bucket_bytes=rng.choice([16, 40]))
        names = [spec.name for spec in specs]
        blocks = [names[at : at + 2] for at in range(0, len(names), 2)]
        optimizer, readers = runtime.stream(), [runtime.stream() for _ in range(2)]
        free: dict[str, Any] = {}

        def allocate(name: str) -> Any:
            if name not in free:
                spec = registry[name].spec
                free[name] = runtime.produce(np.zeros(spec.shape), spec.dtype)
            return free[name]

        def junk(name: str) -> None:
            with runtime.use(self.stream):
                runtime.overwrite(free[name], np.full(registry[name].spec.shape, -1))

        with runtime.use(optimizer):
            shards = {
                n: runtime.produce(own(registry, n, 0), registry[n].spec.shard_dtype) for n in names
            }
            options: Any = {"prefetch": self.prefetch, "persistent": self.persistent}
            if self.bring:
                options |= {"allocate": allocate, "free": junk}
            gatherer = Gatherer(registry, shards, **options)
        event = runtime.event()
        with gatherer:
            for number in range(PASSES):
                for block in [*blocks, *reversed(blocks)]:
                    self.stream = rng.choice(readers)
                    with runtime.use(self.stream):
                        arrays = gatherer.acquire(block)
                        for name, array in arrays.items():
                            what = f"{name} in pass {number}"
                            seen = runtime.consume(array)
                            self.readings.append((what, seen, full(registry, name, number)))
                        gatherer.release(block)
                # The user's own order: who released last comes before who writes.
                event.record(self.stream)
                optimizer.wait_event(event)
                with runtime.use(optimizer):
                    for name, shard in shards.items():
                        runtime.overwrite(shard, own(registry, name, number + 1))
                    self.stream = optimizer
                    gatherer.changed()


def full(registry: Registry, name: str, number: int) -> np.ndarray:
    """Return a parameter in one of the passes."""
    spec = registry[name].spec
    return np.arange(spec.numel).reshape(spec.shape) + 3 * number + int(name[1:])


def own(registry: Registry, name: str, number: int) -> np.ndarray:
    """Return this rank's shard of it."""
    place = registry[name]
    return full(registry, name, number).reshape(-1)[place.start : place.stop]


def draw(seed: int) -> Passes:
    rng = random.Random(f"gatherer {seed}")
    return Passes(
        seed,
        world_size=rng.choice([1, 2, 3]),
        bring=rng.random() < 0.5,
        prefetch=rng.choice([0, 1, 2]),
        persistent=rng.choice([0, 3]),
    )


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_the_correct_gatherer_gives_no_report(chunk: int) -> None:
    for seed in range(chunk, RUNS, CHUNKS):
        work: Any = draw(seed)
        try:
            simulate(work, seed=seed, schedule=SCHEDULES[seed // CHUNKS % len(SCHEDULES)])
        except BaseException as error:
            error.add_note(f"draw({seed}) is {work}")
            raise


PLANTED: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], bool]] = {
    "A, F: a gather waits for nobody": (partial(skip_waits, method="_follow"), False),
    "A, F: a gather waits for nobody, the caller's memory": (
        partial(skip_waits, method="_follow"),
        True,
    ),
    "C: who acquires does not wait": (partial(skip_waits, method="_follow_unit"), False),
    "C: a bucket is ready before it is there": (
        partial(skip_records, method="_queue", on=COMMUNICATION),
        False,
    ),
    "C: ready is recorded on the copy stream": (
        partial(redirect_records, method="_queue", on=COMMUNICATION, to=COPY),
        False,
    ),
    "D: shards are written while a prefetch reads them": (
        partial(skip_waits, method="release"),
        False,
    ),
    "D: what was prefetched last is not noted": (
        partial(skip_records, method="_gather", on=COMMUNICATION),
        False,
    ),
    "F: memory is freed while others read it, or it is being filled": (
        partial(skip_waits, method="_drop"),
        True,
    ),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_bug_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, bring = PLANTED[what]
    work: Any = Passes(5, bring=bring)
    simulate(work, seed=1)
    plant(monkeypatch)
    for schedule in SCHEDULES:
        with pytest.raises(RaceError, match=r"never waited|given back"):
            simulate(work, schedule=schedule, seed=1)
