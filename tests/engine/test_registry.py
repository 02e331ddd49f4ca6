"""The registry as a mapping: what it tells about each parameter, on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import bucket_sizes, interval, params

from cupynccl_reduce import ParamSpec, Reducer, Registry, plan_buckets, run_local

if TYPE_CHECKING:
    from cupynccl_reduce import World


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
