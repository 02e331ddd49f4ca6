"""Workloads for the simulator, drawn from a seed, and the model of what they must give.

Gradients are small integers, so that sums and halves are exact in every dtype, in whatever order.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from strategies import interval

from cupynccl_reduce import MismatchError, ParamSpec, Reducer, Registry
from cupynccl_reduce.testing import Simulation
from cupynccl_reduce.testing.runtime import Foreign

if TYPE_CHECKING:
    from cupynccl_reduce import World
    from cupynccl_reduce.testing import SimulationResult

__all__ = ["SCHEDULES", "Boom", "Cycle", "Workload", "draw", "simulate"]

SCHEDULES = ("lazy", "eager", "random", "pct")
DTYPES = (
    {"dtype": "float32"},
    {"dtype": "float32"},
    {"dtype": "float32", "shard_dtype": "float64"},
    {"dtype": "bfloat16"},
    {"dtype": "float16", "reduce_dtype": "float16", "shard_dtype": "float16"},
    {"dtype": "float64"},
)
LOSS_SCALE = 2.0
INTEGERS = ({"dtype": "int32"}, {"dtype": "int64"})


class Boom(Exception):  # noqa: N818  # what the user's own code raises
    """Raised by a workload in the middle of a backward."""


@dataclass(frozen=True, kw_only=True)
class Cycle:
    """One cycle: how many backwards, who fails in the last of them, and what follows."""

    backwards: int = 1
    failing_rank: int | None = None
    readers: int = 1  # side streams that call wait() and read; 0: the caller's stream reads
    late: bool = False  # the side streams read only when the next cycle begins
    norms: tuple[str, ...] = ()  # "norm", and "clip" as the last: by its readers, in turn
    gather: str = ""  # "", "new", "out" or "parameters"
    after: str = ""  # "", "close" (another reducer) or "rebuild" (another registry)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What every rank does, as plain values. `run` is one rank's part."""

    world_size: int
    params: tuple[ParamSpec, ...]
    bucket_bytes: int = 1 << 20
    options: dict[str, Any] = field(default_factory=dict)
    cycles: tuple[Cycle, ...] = (Cycle(),)
    producers: int = 0  # streams beside the caller's
    habits: tuple[str, ...] = ("drop",)  # drop, keep, reuse, foreign: chosen by parameter
    brought: tuple[str, ...] = ()
    absent: float = 0.0  # how likely a gradient is missing or skipped
    flushes: bool = False
    direct_bytes: int = 0
    seed: int = 0

    @property
    def arrival(self) -> bool:
        """Whether ranks must hand over the same gradients in the same order."""
        return self.options.get("policy") == "arrival"

    def script(self, rank: int, cycle: int, backward: int) -> list[tuple[str, Any]]:
        """Return what `rank` does in one backward: (name, values), or (name, None) to skip it."""
        whose = 0 if self.arrival else rank
        order = random.Random(f"{self.seed} {whose} {cycle} {backward}")
        handed: list[tuple[ParamSpec, bool]] = []
        for spec in self.params:
            if order.random() < self.absent:
                if order.random() < 0.5 or self.options.get("missing") == "error":
                    handed.append((spec, False))
                continue
            handed += [(spec, True)] * (1 if spec.uses == "once" else order.randint(1, 3))
        if order.random() < 0.5:
            order.shuffle(handed)
        else:
            handed.reverse()
        values = np.random.default_rng([self.seed, rank, cycle, backward])
        return [
            (spec.name, values.integers(-3, 4, spec.shape) if given else None)
            for spec, given in handed
        ]

    @cached_property
    def expected(self) -> list[dict[str, np.ndarray]]:
        """The reduced gradients of each cycle, in float64."""
        divisor = 1 if self.options.get("op") == "sum" else self.world_size
        totals = []
        for index, cycle in enumerate(self.cycles):
            total = {spec.name: np.zeros(spec.shape) for spec in self.params}
            for rank in range(self.world_size):
                for backward in range(cycle.backwards):
                    for name, grad in self.script(rank, index, backward):
                        if grad is not None:
                            total[name] = total[name] + grad
            floats = {spec.name for spec in self.params if spec.is_float}
            scale = LOSS_SCALE if "clip" in cycle.norms else 1
            totals.append(
                {n: g / divisor / (scale if n in floats else 1) for n, g in total.items()}
            )
        return totals

    def run(self, world: World) -> _Rank:
        """Run one rank; its readings are filled once the simulation is over."""
        rank = _Rank(self, world)
        rank.run()
        return rank


class _Rank:
    """One rank's part of a workload, and what it has read: (what, reading, expected)."""

    def __init__(self, work: Workload, world: World) -> None:
        self.work, self.world = work, world
        self.runtime: Any = world.runtime
        self.readings: list[tuple[str, Any, np.ndarray]] = []
        caller = self.runtime.adopt(None)
        self.producers = [caller, *(self.runtime.stream() for _ in range(work.producers))]
        most = max(cycle.readers for cycle in work.cycles)
        self.readers = [self.runtime.stream() for _ in range(most)] or [caller]
        self.buffers: dict[str, Any] = {}
        self.kept: list[Any] = []
        self.kept_norms: list[Any] = []  # who reads one keeps it
        self.late: list[tuple[int, dict[str, Any]]] = []
        self.norms: list[tuple[Any, Any, str, float]] = []  # and who reads them

    def run(self) -> None:
        self.build()
        for index, cycle in enumerate(self.work.cycles):
            for late in self.late:
                self.read(*late)
            self.late.clear()
            self.read_norm()
            self.backwards(index, cycle)
            self.measure(index, cycle)
            if cycle.failing_rank is not None:
                self.reducer.discard()
                continue
            self.consume(index, cycle)
            if cycle.after:
                for late in self.late:
                    self.read(*late)
                self.late.clear()
                self.reducer.close()
                if cycle.after == "rebuild":
                    for reader in self.readers:
                        reader.synchronize()
                    self.build()
                else:
                    self.reducer = Reducer(self.registry, **self.work.options)
        for late in self.late:
            self.read(*late)
        self.read_norm()
        self.reducer.close()
        for stream in self.readers:
            stream.synchronize()

    def build(self) -> None:
        work = self.work
        brought = {}
        for spec in work.params:
            if spec.name in work.brought:
                mine = interval(np.full(spec.shape, 77), self.world.rank, work.world_size)
                brought[spec.name] = self.runtime.produce(mine, spec.shard_dtype)
        self.world.communicator.direct_bytes = work.direct_bytes
        self.registry = Registry(
            work.params, self.world, bucket_bytes=work.bucket_bytes, shards=brought
        )
        self.reducer = Reducer(self.registry, **work.options)
        self.full = {
            spec.name: self.runtime.produce(np.full(spec.shape, 88), spec.shard_dtype)
            for spec in work.params
        }
        for reader in self.readers:
            self.follow(reader, self.runtime.adopt(None))

    def follow(self, stream: Any, other: Any) -> None:
        event = self.runtime.event()
        event.record(other)
        stream.wait_event(event)

    def backwards(self, index: int, cycle: Cycle) -> None:
        for backward in range(cycle.backwards):
            last = backward == cycle.backwards - 1
            failing_rank = cycle.failing_rank if last else None
            try:
                with self.reducer.backward():
                    self.backward(index, backward, fails=failing_rank == self.world.rank)
            except (Boom, MismatchError):
                if failing_rank is None:
                    raise
            if "reuse" in self.work.habits:
                for stream in self.producers:
                    self.reducer.wait_packed(stream=stream)

    def backward(self, index: int, backward: int, *, fails: bool) -> None:
        script = self.work.script(self.world.rank, index, backward)
        for count, (name, grad) in enumerate(script):
            if fails and 2 * count > len(script):
                raise Boom
            self.hand(name, grad)
            if self.work.flushes and self.work.arrival and count == 1:
                self.reducer.flush()
        if fails:
            raise Boom
        if self.work.flushes:
            self.reducer.flush()
            self.reducer.statistics()

    def hand(self, name: str, values: Any) -> None:
        if values is None:
            self.reducer.skip_grad(name)
            return
        number = self.registry[name].bucket + len(name) + int(name[1:])
        habit = self.work.habits[number % len(self.work.habits)]
        dtype = self.registry[name].spec.dtype
        stream = self.producers[number % len(self.producers)]
        with self.runtime.use(stream):
            if habit != "reuse" or self.registry[name].spec.uses == "many":
                array = self.runtime.produce(values, dtype)
            elif name in self.buffers:
                array = self.buffers[name]
                self.runtime.overwrite(array, values)
            else:
                array = self.buffers[name] = self.runtime.produce(values, dtype)
            if habit == "keep":
                self.kept = [*self.kept[-3:], array]
            self.reducer.reduce_grad(name, Foreign(array) if habit == "foreign" else array)

    def measure(self, index: int, cycle: Cycle) -> None:
        """Ask for norms, each for another reader; the last is read late if the cycle says so."""
        failed = cycle.failing_rank is not None
        floats = [spec.name for spec in self.work.params if spec.is_float]
        for number, what in enumerate(cycle.norms):
            self.read_norm()
            reader = self.readers[number % len(self.readers)]
            p = (2, math.inf, 1)[(index + number) % 3]
            flats = [self.work.expected[index][name].reshape(-1) for name in floats]
            expected = math.nan if failed else np.linalg.norm(np.concatenate([*flats, [0]]), p)
            with self.runtime.use(self.producers[(index + number) % len(self.producers)]):
                if what == "clip":
                    scale = self.runtime.produce(LOSS_SCALE, "float32")
                    given = Foreign(scale) if "foreign" in self.work.habits else scale
                    norm = self.reducer.clip(None, p=p, loss_scale=given, stream=reader)
                    del scale, given
                else:
                    norm = self.reducer.norm(p, stream=reader)
                    expected = expected * (LOSS_SCALE if "clip" in cycle.norms else 1)
            self.kept_norms.append(norm)
            self.norms.append((reader, norm, f"{what} {p} of cycle {index}", expected))
            if not cycle.late:
                self.read_norm()

    def read_norm(self) -> None:
        for reader, norm, what, expected in self.norms:
            with self.runtime.use(reader):
                self.readings.append((what, self.runtime.consume(norm), np.array(expected)))
        self.norms.clear()

    def consume(self, index: int, cycle: Cycle) -> None:
        readers = self.readers[: cycle.readers] or [self.runtime.adopt(None)]
        for number, reader in enumerate(readers):
            with self.runtime.use(reader):
                shards = dict(self.reducer.wait())
                if cycle.late and cycle.readers:
                    self.late.append((number, {"index": index, **shards}))
                else:
                    self.check("shard", index, shards)
                if number == 0 and cycle.gather:
                    self.gather(index, cycle.gather, shards)

    def read(self, number: int, shards: dict[str, Any]) -> None:
        with self.runtime.use(self.readers[number]):
            index = shards.pop("index")
            self.check("late shard", index, shards)

    def gather(self, index: int, how: str, shards: dict[str, Any]) -> None:
        if how == "parameters":
            rank, size = self.world.rank, self.work.world_size
            shards = {
                name: self.runtime.produce(interval(full, rank, size), "float32")
                for name, full in self.work.expected[index].items()
            }
        out = self.full if how == "out" else None
        full = self.registry.gather(shards, out=out)
        for name, array in full.items():
            expected = self.work.expected[index][name]
            self.readings.append((f"full {name}", self.runtime.consume(array), expected))
        if how == "parameters":
            for array in shards.values():
                self.runtime.overwrite(array, np.full(array.shape, -1))

    def check(self, what: str, index: int, shards: dict[str, Any]) -> None:
        for name, array in shards.items():
            expected = interval(
                self.work.expected[index][name], self.world.rank, self.work.world_size
            )
            self.readings.append(
                (f"{what} {name} of cycle {index}", self.runtime.consume(array), expected)
            )


def draw(seed: int, *, world_size: int = 0) -> Workload:
    """Draw a workload."""
    rng = random.Random(f"workload {seed}")
    size = world_size or rng.choice((1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 4, 8))
    policy = rng.choice(("planned", "arrival"))
    op = "sum" if size == 3 else rng.choice(("mean", "sum"))
    dtypes = [*DTYPES, *(INTEGERS if op == "sum" else ())]
    if rng.random() < 0.5:
        dtypes = [rng.choice(dtypes)]
    params = tuple(
        ParamSpec(
            f"p{i}",
            (rng.choice((0, 1, 2, 3, 4, 5, 7, 8, 12, 16, 24)),),
            uses=rng.choice(("once", "once", "once", "many")),
            **rng.choice(dtypes),
        )
        for i in range(rng.randint(1, 5 if size < 4 else 3))
    )
    planned = policy == "planned"
    floats = all(spec.is_float for spec in params)
    failing = planned and floats and rng.random() < 0.25
    cycles = []
    for _ in range(rng.randint(1, 3 if size < 4 else 2)):
        fails = failing and rng.random() < 0.5
        cycles.append(
            Cycle(
                backwards=rng.choice((1, 1, 2)),
                failing_rank=rng.randrange(size) if fails else None,
                readers=rng.randint(0, 2),
                late=rng.random() < 0.5,
                gather=rng.choice(("", "", "", "new", "out", "parameters")),
                after=rng.choice(("", "", "", "", "close", "rebuild")),
            )
        )
    options = {
        "op": op,
        "policy": policy,
        "max_buffers": rng.randint(1, 3),
        "missing": rng.choice(("zero", "zero", "error")),
    }
    if not planned and op == "mean":
        options["pre_divide"] = rng.random() < 0.5
    habits = rng.sample(("drop", "keep", "reuse", "foreign"), rng.randint(1, 3))
    return Workload(
        world_size=size,
        params=params,
        bucket_bytes=rng.choice((1, 8, 24, 24, 40, 64, 1 << 12)),
        options=options,
        cycles=tuple(cycles),
        producers=rng.choice((0, 1, 2)),
        habits=tuple(habits),
        brought=tuple(s.name for s in params if rng.random() < rng.choice((0.0, 0.0, 0.4))),
        absent=rng.choice((0.0, 0.2, 0.4)),
        flushes=rng.random() < 0.2,
        direct_bytes=rng.choice((0, 0, 16)),
        seed=seed,
    )


def simulate(work: Workload, **options: Any) -> SimulationResult:
    """Run a workload in a simulation, and compare every byte that was read with the model."""
    result = Simulation(work.world_size, **options).run(work.run)
    for number, rank in enumerate(result.values):
        for what, reading, expected in rank.readings:
            seen = np.asarray(reading.value).astype(np.float64)
            assert np.array_equal(seen, np.asarray(expected, np.float64), equal_nan=True), (
                f"bytes: {what} on rank {number} is {seen}, not {expected}"
            )
    return result
