"""Cases that users of such libraries hit, where stream order decides. Named after the case."""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from simulation.mutations import around
from simulation.workloads import SCHEDULES
from strategies import interval

from cupynccl_reduce import ParamSpec, Reducer, Registry
from cupynccl_reduce.errors import ProtocolError
from cupynccl_reduce.testing import Simulation
from cupynccl_reduce.testing.device import SimEvent, SimStream
from cupynccl_reduce.testing.transport import SimCommunicator, SimControl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from cupynccl_reduce import World

every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


def specs(*numels: int, **fields: Any) -> list[ParamSpec]:
    return [ParamSpec(f"p{i}", (n,), "float32", **fields) for i, n in enumerate(numels)]


def consume(world: World, shards: Mapping[str, Any]) -> dict[str, Any]:
    runtime: Any = world.runtime
    return {name: runtime.consume(array) for name, array in shards.items()}


def check(values: list[Any], expected: Mapping[str, Any]) -> None:
    """Compare every rank's readings of its shards with full arrays."""
    for rank, readings in enumerate(values):
        for name, reading in readings.items():
            mine = interval(np.asarray(expected[name]), rank, len(values))
            assert reading.value.tolist() == mine.tolist(), f"{name} on rank {rank}"


def step(
    world: World,
    reducer: Reducer,
    gradient: Callable[[int, int], float],
    *,
    order: Iterator[str] | list[str] | None = None,
) -> None:
    """Run one backward: gradient(i, rank) fills parameter i."""
    runtime: Any = world.runtime
    registry = reducer._registry
    with reducer.backward():
        for name in order or reversed(registry):
            shape = registry[name].spec.shape
            value = gradient(int(name[1:]), world.rank)
            reducer.reduce_grad(name, runtime.produce(np.full(shape, value), "float32"))


@pytest.mark.parametrize("policy", ["planned", "arrival"])
@every_schedule
def test_case_a1(schedule: str, policy: str) -> None:
    def work(world: World) -> Any:
        registry = Registry(specs(*[4] * 6), world, bucket_bytes=16)
        with Reducer(registry, max_buffers=2, policy=policy) as reducer:
            step(world, reducer, lambda i, rank: (i + 1) * (rank + 1))
            return consume(world, reducer.wait())

    result = Simulation(2, schedule=schedule).run(work)
    check(result.values, {f"p{i}": np.full(4, 1.5 * (i + 1)) for i in range(6)})
    assert result.overlaps > 0


@pytest.mark.parametrize("world_size", [1, 2])
@every_schedule
def test_case_a3(schedule: str, world_size: int) -> None:
    def work(world: World) -> Any:
        runtime: Any = world.runtime
        registry = Registry(specs(4, 4), world)
        with Reducer(registry) as reducer, reducer.backward():
            for number, name in enumerate(registry, 1):
                with runtime.use(runtime.stream()):
                    old = runtime.produce(np.full(4, np.nan), "float32")
                    runtime.overwrite(old, np.full(4, number))
                    reducer.reduce_grad(name, old)
                    del old
        reducer = Reducer(registry)
        step(world, reducer, lambda i, rank: i + 1)
        return consume(world, reducer.wait())

    result = Simulation(world_size, schedule=schedule).run(work)
    check(result.values, {"p0": np.ones(4), "p1": np.full(4, 2)})


@every_schedule
def test_case_a5(schedule: str) -> None:
    def work(world: World) -> Any:
        runtime: Any = world.runtime
        registry = Registry(specs(4), world)
        readings = []
        with Reducer(registry) as reducer:
            for _ in range(50):
                with reducer.backward():
                    grad = runtime.produce(np.full(4, world.rank + 1), "float32")
                    reducer.reduce_grad("p0", grad)
                    del grad
                    runtime.produce(np.full(4, np.nan), "float32")
                readings.append(consume(world, reducer.wait()))
        return readings

    result = Simulation(2, schedule=schedule).run(work)
    for rank, readings in enumerate(result.values):
        assert len(readings) == 50
        for reading in readings:
            assert reading["p0"].value.tolist() == [1.5, 1.5], rank


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_case_a7(world_size: int) -> None:
    params = specs(*range(1, 13))
    expected = {
        f"p{i}": np.full(i + 1, sum((i + 1) * (r + 2) for r in range(world_size)))
        for i in range(12)
    }
    for number, elements in enumerate((1, 2, 5, 7, 13, 78, 10**6)):
        for max_buffers in (1, 2):

            def work(world: World, elements: int = elements, buffers: int = max_buffers) -> Any:
                registry = Registry(params, world, bucket_bytes=4 * elements)
                with Reducer(registry, op="sum", max_buffers=buffers) as reducer:
                    step(world, reducer, lambda i, rank: (i + 1) * (rank + 2))
                    return consume(world, reducer.wait())

            result = Simulation(world_size, schedule=SCHEDULES[number % 4]).run(work)
            check(result.values, expected)


@pytest.mark.parametrize("policy", ["planned", "arrival"])
def test_case_b3(policy: str) -> None:
    def work(world: World) -> list[int]:
        registry = Registry(specs(*[10] * 10), world, bucket_bytes=200)
        counts = []
        with Reducer(registry, policy=policy) as reducer:
            for _ in range(2):
                step(world, reducer, lambda i, rank: 1)
                reducer.wait()
                counts.append(reducer.statistics().launches)
        return counts

    assert Simulation(2).run(work).values == [[2, 4]] * 2


@every_schedule
def test_case_b5(schedule: str) -> None:
    sizes = (5, 6, 7, 12, 6)

    def work(world: World) -> Any:
        runtime: Any = world.runtime
        registry = Registry(specs(*sizes), world, bucket_bytes=24)
        with Reducer(registry) as reducer:
            with reducer.backward():
                for name, place in registry.items():
                    values = (world.rank + 1) * np.arange(1, place.spec.numel + 1)
                    reducer.reduce_grad(name, runtime.produce(values, "float32"))
            assert reducer.statistics().collectives == len(registry.buckets)
            return consume(world, reducer.wait())

    result = Simulation(2, schedule=schedule).run(work)
    check(result.values, {f"p{i}": 1.5 * np.arange(1, n + 1) for i, n in enumerate(sizes)})


@every_schedule
def test_case_b7(schedule: str) -> None:
    def work(world: World) -> Any:
        registry = Registry(specs(3), world, bucket_bytes=400)
        with Reducer(registry) as reducer:
            with reducer.backward():
                runtime: Any = world.runtime
                reducer.reduce_grad("p0", runtime.produce(np.full(3, 2), "float32"))
                with pytest.raises(ProtocolError, match="backward"):
                    reducer.wait()
            launches = reducer.statistics().launches
            reducer.flush()
            reducer.flush()
            assert reducer.statistics().launches == launches == 1
            return consume(world, reducer.wait())

    check(Simulation(2, schedule=schedule).run(work).values, {"p0": np.full(3, 2)})


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[str]]:
    """Every collective and side-channel call of each rank, in order, with group borders."""
    log: dict[int, list[str]] = defaultdict(list)

    def queue(original: Any, self: SimCommunicator, kind: str, label: str, *args: Any) -> None:
        log[self.rank].append(f"{kind} {label}")
        original(self, kind, label, *args)

    @contextmanager
    def group(self: SimCommunicator) -> Iterator[None]:
        log[self.rank].append("(")
        yield
        log[self.rank].append(")")

    def control(original: Any, self: SimControl, payload: bytes) -> list[bytes]:
        log[self._rank].append("control")
        return original(self, payload)

    around(monkeypatch, SimCommunicator, "_queue", queue)
    monkeypatch.setattr(SimCommunicator, "group", group)
    around(monkeypatch, SimControl, "all_gather", control)
    return log


def test_case_b9(queued: dict[int, list[str]]) -> None:
    def work(world: World) -> int:
        registry = Registry(specs(1024, 2048), world, bucket_bytes=4096)
        with Reducer(registry) as reducer:
            step(world, reducer, lambda i, rank: 1)
            reducer.wait()
            return reducer.statistics().sent_bytes

    assert Simulation(4).run(work).values == [3072 * 3 // 4 * 4] * 4
    kinds = {entry.split()[0] for entries in queued.values() for entry in entries}
    assert kinds - {"(", ")"} == {"reduce_scatter", "control"}


@every_schedule
def test_case_l1(schedule: str, queued: dict[int, list[str]]) -> None:
    def work(world: World) -> Any:
        runtime: Any = world.runtime
        registry = Registry(specs(4, 5, 6, 7), world, bucket_bytes=24)
        side = runtime.stream()
        out = {n: runtime.produce(np.zeros(p.spec.shape), "float32") for n, p in registry.items()}
        event = runtime.event()
        event.record(runtime.adopt(None))
        side.wait_event(event)
        with Reducer(registry) as reducer:
            for number in range(4):
                order = list(registry)
                # Every rank has an arrival order of its own, in every step.
                order = order[(world.rank + number) % 4 :] + order[: (world.rank + number) % 4]
                step(world, reducer, lambda i, rank: 1, order=order)
                with runtime.use(side):
                    # Queued on its own stream: the next step's reductions do not wait for it.
                    full = registry.gather(reducer.wait(), out=out)
                    readings = consume(world, full)
        side.synchronize()
        return readings

    result = Simulation(3, schedule=schedule, seed=3).run(work)
    for readings in result.values:
        assert all((reading.value == 1).all() for reading in readings.values())
    collectives = [
        [entry for entry in queued[rank] if entry.startswith(("reduce", "all_gather"))]
        for rank in range(3)
    ]
    assert collectives[0] == collectives[1] == collectives[2]
    assert {entry.split()[0] for entry in collectives[0]} == {"reduce_scatter", "all_gather"}


@pytest.mark.parametrize("policy", ["planned", "arrival"])
def test_case_l5(policy: str, queued: dict[int, list[str]]) -> None:
    def work(world: World) -> None:
        registry = Registry(specs(4, 5, 6, 7), world, bucket_bytes=40)
        with Reducer(registry, policy=policy, missing="error") as reducer:
            for _ in range(3):
                step(world, reducer, lambda i, rank: 1)
                registry.gather(reducer.wait())

    Simulation(2, schedule="random").run(work)
    for entries in queued.values():
        text = "".join("(" if e == "(" else ")" if e == ")" else e[0] for e in entries)
        groups = [part.partition(")")[0] for part in text.split("(")[1:]]
        assert groups or policy == "planned"  # one collective needs no group
        assert set("".join(groups)) <= {"r"}, "control or another collective within a group"
        assert "c" in text


@pytest.mark.parametrize("buckets", [8, 80])
def test_case_o1(buckets: int) -> None:
    """A slow communication stream ("lazy") holds no more than max_buffers send buffers."""
    results, gradients = {}, {}
    for max_buffers in (1, 2, 4):

        def work(world: World, max_buffers: int = max_buffers) -> Any:
            runtime: Any = world.runtime
            registry = Registry(specs(*[4] * buckets), world, bucket_bytes=16)
            before = runtime.alive("device memory")
            most = 0
            with Reducer(registry, max_buffers=max_buffers) as reducer:
                with reducer.backward():
                    for name in reversed(registry):
                        grad = runtime.produce(np.full(4, int(name[1:])), "float32")
                        reducer.reduce_grad(name, grad)
                        del grad
                        assert runtime.alive("device memory") - before == max_buffers
                        most = max(most, runtime.alive("a gradient"))
                assert reducer.statistics().buffer_bytes == max_buffers * 32
                return most, consume(world, reducer.wait())

        values = Simulation(2, schedule="lazy").run(work).values
        gradients[max_buffers] = values[0][0]
        check([shards for _, shards in values], {f"p{i}": np.full(4, i) for i in range(buckets)})
        results[max_buffers] = [
            {name: reading.value.tolist() for name, reading in shards.items()}
            for _, shards in values
        ]
    assert results[1] == results[2] == results[4]
    # The sources of what is in flight, and no more: the memory of 8 buckets is that of 80.
    assert gradients == {1: 1, 2: 2, 4: 4}


EXPECTED = """\
copy stream: wait for caller's stream
copy stream: pack of bucket 0 (p1)
copy stream: record
communication stream: wait for copy stream
communication stream: reduce_scatter sum of 4 float32 with bucket 0 (p1)
communication stream: record
copy stream: wait for caller's stream
copy stream: pack of bucket 1 (p0)
copy stream: record
communication stream: wait for copy stream
communication stream: reduce_scatter sum of 4 float32 with bucket 1 (p0)
communication stream: record
caller's stream: wait for copy stream
caller's stream: wait for copy stream
communication stream: record
caller's stream: wait for communication stream"""


def test_two_buckets_on_two_ranks_queue_exactly_this(monkeypatch: pytest.MonkeyPatch) -> None:
    log: dict[int, list[str]] = defaultdict(list)
    recorded: dict[SimEvent, str] = {}

    def name(stream: SimStream) -> str:
        return stream.name.partition(" of rank")[0]

    def queue(original: Any, self: SimStream, what: Any, *args: Any, **kwargs: Any) -> Any:
        if not what.kind.startswith(("user", "free")):
            log[self.rank].append(f"{name(self)}: {what.kind} {what.label}")
        return original(self, what, *args, **kwargs)

    def record(original: Any, self: SimEvent, stream: SimStream) -> None:
        recorded[self] = name(stream)
        if name(stream) != "caller's stream":
            log[stream.rank].append(f"{name(stream)}: record")
        original(self, stream)

    def wait_event(original: Any, self: SimStream, event: SimEvent) -> None:
        if event in recorded:
            log[self.rank].append(f"{name(self)}: wait for {recorded[event]}")
        original(self, event)

    def work(world: World) -> None:
        registry = Registry(specs(8, 8), world, bucket_bytes=32)
        reducer = Reducer(registry)
        log[world.rank].clear()
        step(world, reducer, lambda i, rank: 1)
        reducer.wait()
        log[world.rank].append("end")
        reducer.close()

    around(monkeypatch, SimStream, "queue", queue)
    around(monkeypatch, SimEvent, "record", record)
    around(monkeypatch, SimStream, "wait_event", wait_event)
    Simulation(2, schedule="lazy").run(work)
    for rank in (0, 1):
        entries = log[rank]
        assert "\n".join(entries[: entries.index("end")]) == EXPECTED, rank
