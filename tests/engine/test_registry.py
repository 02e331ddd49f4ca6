"""The registry as a mapping: what it tells about each parameter, on every rank."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import bucket_sizes, interval, params

from cupynccl_reduce import ParamSpec, Reducer, Registry, World, plan_buckets, run_local
from cupynccl_reduce.runtimes.host import HostRuntime


@given(params(), bucket_sizes, st.integers(1, 4))
def test_placements_say_what_each_rank_keeps(
    specs: tuple[ParamSpec, ...], bucket_bytes: int, world_size: int
) -> None:
    plan = plan_buckets(specs, world_size=world_size, bucket_bytes=bucket_bytes)

    def look(world: World) -> None:
        registry = Registry(specs, world, bucket_bytes=bucket_bytes)
        assert list(registry) == [spec.name for spec in specs]  # in the order given
        assert len(registry) == len(specs)
        assert "nobody" not in registry
        assert list(map(repr, registry.buckets)) == list(map(repr, plan))
        for spec in specs:
            place = registry[spec.name]
            assert place.spec == spec
            assert place.segment in plan[place.bucket].matrix.segments
            assert place.segment.name == spec.name
            mine = interval(np.arange(spec.numel), world.rank, world_size)
            assert list(mine) == list(range(place.start, place.stop))
            assert registry.shards[spec.name].shape == mine.shape
            assert not registry.shards[spec.name].any()  # zero before the first step

    run_local(world_size, look)


def test_neither_names_nor_shards_can_be_changed() -> None:
    def change(world: World) -> None:
        registry = Registry([ParamSpec("p", (3,), "float32")], world)
        with pytest.raises(TypeError):
            registry["q"] = registry["p"]
        with pytest.raises(TypeError):
            registry.shards["p"] = np.zeros(3)
        with pytest.raises(KeyError):
            registry["q"]

    run_local(1, change)


def test_a_repr_shows_the_state() -> None:
    def look(world: World) -> list[str]:
        registry = Registry([ParamSpec("p", (3,), "float32")], world)
        reducer = Reducer(registry)
        shown = [repr(world), repr(registry), repr(reducer)]
        with reducer.backward():
            reducer.reduce_grad("p", np.ones(3, "f4"))
            shown.append(repr(reducer))
        reducer.wait()
        return [*shown, repr(reducer)]

    assert run_local(2, look)[1] == [
        "<World host rank 1 of 2 OPEN>",
        "<Registry 1 parameters in 1 buckets, rank 1 of 2>",
        "<Reducer step 0 NEW, 0 gradients>",
        "<Reducer step 1 OPEN, 1 gradients>",
        "<Reducer step 1 LANDED, 1 gradients>",
    ]


def test_statistics_count_what_was_done() -> None:
    specs = [ParamSpec(f"p{i}", (4,), "float32") for i in range(3)]

    def count(world: World) -> None:
        with Reducer(Registry(specs, world, bucket_bytes=16), op="sum") as reducer:
            for backward in range(2):
                with reducer.backward():
                    reducer.reduce_grad("p1", np.ones(4, "f4"))
                    waiting = reducer.statistics().waiting
                    assert waiting == {0: ("p2",), 1: (), 2: ("p0",)}  # p1 is behind p2
                    reducer.skip_grad("p2")
                    assert reducer.statistics().waiting == {2: ("p0",)}
                    reducer.reduce_grad("p0", np.ones(4, "f4"))
                assert reducer.statistics().waiting == {}
                assert reducer.statistics().backwards == backward + 1
            reducer.wait()
            statistics = reducer.statistics()
            assert (statistics.step, statistics.gradients) == (1, 4)
            assert statistics.launches == statistics.collectives == 6
            assert statistics.sent_bytes == 6 * 16  # a row of 2 elements, padded to 4
            assert statistics.in_flight == 0

    run_local(2, count)


class Weighed(HostRuntime):
    """Counts the bytes of arenas and send buffers: those grow with padding, as they must."""

    allocated = 0

    def allocate(self, nbytes: int, **options: Any) -> Any:
        array = super().allocate(nbytes, **options)
        self.allocated += array.base.nbytes
        return array


class Peers:
    """Communicator and side channel of one rank whose peers all do as it does."""

    direct_bytes = 0

    def __init__(self, world_size: int) -> None:
        self.rank, self.world_size = world_size - 1, world_size
        self.sent: list[int] = []

    def all_gather(self, payload: bytes) -> list[bytes]:
        self.sent.append(len(payload))
        return [payload] * self.world_size

    def close(self) -> None:
        pass


def build(specs: list[ParamSpec], world_size: int) -> tuple[int, list[int]]:
    """Build a registry and a reducer as the last of `world_size` ranks.

    Return the peak of Python's memory, without arena and send buffers, and the bytes of each
    message to the peers.
    """
    runtime, peers = Weighed(), Peers(world_size)
    streams = runtime.stream(), runtime.stream()
    with World(peers.rank, world_size, 0, runtime, peers, peers, *streams) as world:
        tracemalloc.start()
        try:
            registry = Registry(specs, world, bucket_bytes=1 << 20)
            with Reducer(registry, op="sum"):
                peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert len(registry) == len(specs)
    return peak - runtime.allocated, peers.sent


def test_a_registry_of_many_parameters_is_small_in_a_world_of_any_size() -> None:
    shapes = [(64, 64), (64,), (3, 5), (4096,)]
    specs = [ParamSpec(f"layer.{i}.weight", shapes[i % 4], "bfloat16") for i in range(10_000)]
    build(specs[:10], 2)  # what is made once in a process
    (few, messages), (many, same) = (build(specs, world_size) for world_size in (8, 4096))
    assert few < 3_000 * len(specs)  # so 100,000 parameters take less than 300 MB
    assert many < 1.02 * few
    assert messages == same == [16, 16]  # digests of the parameters and of the options
