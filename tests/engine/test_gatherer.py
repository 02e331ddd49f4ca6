"""Gatherer: full parameters while they are acquired, exact in every dtype, and no longer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

import cupynccl_reduce as cr

if TYPE_CHECKING:
    from collections.abc import Callable

SPECS = [
    cr.ParamSpec("a", (5,), "float32"),
    cr.ParamSpec("b", (2, 3), "bfloat16"),
    cr.ParamSpec("c", (), "float64"),
    cr.ParamSpec("d", (0, 4), "float32"),
    cr.ParamSpec("e", (1,), "float16"),
    cr.ParamSpec("f", (33,), "bfloat16"),
    cr.ParamSpec("g", (4,), "int32"),
]
NAMES = [spec.name for spec in SPECS]


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def full(registry: cr.Registry, name: str, add: int = 0) -> np.ndarray:
    spec = registry[name].spec
    values = np.arange(spec.numel).reshape(spec.shape) + NAMES.index(name) + add
    return np.asarray(values, numpy_dtype(spec.dtype))


def own(registry: cr.Registry, name: str, add: int = 0) -> np.ndarray:
    place = registry[name]
    flat = full(registry, name, add).reshape(-1)[place.start : place.stop]
    return flat.astype(numpy_dtype(place.spec.shard_dtype))


class Rank:
    """A registry with shards, and a gatherer."""

    def __init__(self, world: cr.World, **options: Any) -> None:
        self.registry = cr.Registry(SPECS, world, bucket_bytes=16)
        self.shards = {name: own(self.registry, name) for name in NAMES}
        self.gatherer = cr.Gatherer(self.registry, self.shards, **options)

    def check(self, *names: str, add: int = 0) -> None:
        """Acquire, compare, release."""
        arrays = self.gatherer.acquire(names)
        assert list(arrays) == list(dict.fromkeys(names))
        for name, array in arrays.items():
            expected = full(self.registry, name, add)
            assert (array.shape, array.dtype) == (expected.shape, expected.dtype)
            assert array.tobytes() == expected.tobytes(), name
        self.gatherer.release(names)


def on(world_size: int, work: Callable[[Rank], Any], **options: Any) -> list[Any]:
    def rank(world: cr.World) -> Any:
        made = Rank(world, **options)
        with made.gatherer:
            return work(made)

    return cr.run_local(world_size, rank)


@pytest.mark.parametrize("options", [{}, {"prefetch": 0}, {"prefetch": 3, "persistent": 5}])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_values_are_exact_and_follow_the_shards(world_size: int, options: dict[str, Any]) -> None:
    def work(rank: Rank) -> None:
        for add in range(3):
            for names in (NAMES, NAMES[::-1]):
                for name in names:
                    rank.check(name, add=add)
            rank.check(*NAMES, add=add)
            for name, shard in rank.shards.items():
                shard[...] = own(rank.registry, name, add + 1)
            rank.gatherer.changed()

    on(world_size, work, **options)


def test_the_cast_is_to_the_dtype_that_is_asked_for() -> None:
    def work(world: cr.World) -> None:
        registry = cr.Registry([cr.ParamSpec("p", (5,), "float32")], world)
        place = registry["p"]
        values = np.array([1 + 2**-9, 1e-9, -3, math.inf, 2**24], np.float32)
        shards = {"p": values[place.start : place.stop].copy()}
        with cr.Gatherer(registry, shards, dtypes={"p": "bfloat16"}) as gatherer:
            array = gatherer.acquire(["p"])["p"]
            assert array.tobytes() == values.astype(ml_dtypes.bfloat16).tobytes()

    cr.run_local(2, work)


def test_uses_are_counted_and_what_is_in_use_is_gathered_once() -> None:
    def work(rank: Rank) -> None:
        gatherer = rank.gatherer
        first = gatherer.acquire(["f"])["f"]
        again = gatherer.acquire(["f", "f"])["f"]
        assert again is first
        gathers = gatherer.statistics().gathers
        gatherer.release(["f", "f"])
        for name in "abc":
            rank.check(name)  # others come and go
        assert first.tobytes() == full(rank.registry, "f").tobytes()
        with pytest.raises(cr.ProtocolError, match="'f' is still acquired"):
            gatherer.changed()
        gatherer.release(["f"])
        with pytest.raises(cr.ProtocolError, match="'f' is not acquired"):
            gatherer.release(["f"])
        gatherer.changed()
        rank.check("f")
        assert gatherer.statistics().gathers > gathers

    on(2, work)


def test_what_followed_before_is_gathered_ahead() -> None:
    order = [*NAMES, *NAMES[::-1]]

    def work(rank: Rank) -> list[tuple[int, int]]:
        counts = []
        for _ in range(3):
            before = rank.gatherer.statistics()
            for name in order:
                rank.check(name)
            after = rank.gatherer.statistics()
            counts.append((after.prefetches - before.prefetches, after.hits - before.hits))
        return counts

    first, *rest = on(3, work, prefetch=1)[0]
    assert first == (0, 0)
    for prefetches, hits in rest:
        assert prefetches > 5
        assert hits >= prefetches - 1
    assert on(2, work, prefetch=0)[0] == [(0, 0)] * 3


def test_persistent_parameters_are_gathered_once() -> None:
    def work(rank: Rank) -> None:
        for _ in range(3):
            rank.check("a", "c", "e")
            rank.check("f")
        assert rank.gatherer.statistics().gathers == len("ace") + 3 * len("f")
        kept = rank.gatherer.statistics().full_bytes
        assert kept >= 5 * 4 + 8 + 2
        rank.gatherer.changed()
        assert rank.gatherer.statistics().full_bytes == 0

    on(2, work, persistent=8, prefetch=0)


def test_the_caller_s_memory_is_allocated_and_freed_in_turn() -> None:
    def work(world: cr.World) -> None:
        arrays: dict[str, np.ndarray] = {}
        log: list[str] = []

        def allocate(name: str) -> np.ndarray:
            log.append(f"+{name}")
            assert name not in arrays
            spec = rank.registry[name].spec
            arrays[name] = np.full(spec.shape, 77, numpy_dtype(spec.dtype))
            return arrays[name]

        def free(name: str) -> None:
            log.append(f"-{name}")
            arrays.pop(name)[...] = 55  # an array that is in use would show it

        rank = Rank(world, allocate=allocate, free=free)
        for _ in range(3):
            for name in (*NAMES, *NAMES[::-1]):
                rank.check(name)
        held = rank.gatherer.acquire(["b"])["b"]
        assert held is arrays["b"]
        rank.gatherer.close()
        assert list(arrays) == [n for n in NAMES if n in arrays and n == "b"]
        assert held.tobytes() == full(rank.registry, "b").tobytes()
        assert log.count("+f") == log.count("-f") > 1

    cr.run_local(2, work)


def test_gathers_may_come_inside_backward() -> None:
    def work(rank: Rank) -> None:
        with cr.Reducer(rank.registry, op="sum") as reducer:
            for _ in range(3):
                with reducer.backward():
                    for name in reversed(NAMES):
                        rank.check(name)
                        reducer.reduce_grad(name, full(rank.registry, name))
                for name, shard in reducer.wait().items():
                    expected = own(rank.registry, name).astype(np.float64) * 2
                    assert np.array_equal(np.asarray(shard, np.float64), expected), name

    on(2, work)


REFUSED: dict[str, tuple[Callable[[Rank], Any], type[Exception], str]] = {
    "unknown": (lambda r: r.gatherer.acquire(["x"]), cr.LayoutError, "no shard 'x'"),
    "a string": (lambda r: r.gatherer.acquire("a"), cr.LayoutError, "write \\['a'\\]"),
    "release first": (lambda r: r.gatherer.release(["a"]), cr.ProtocolError, "not acquired"),
    "release unknown": (lambda r: r.gatherer.release(["x"]), cr.LayoutError, "no shard 'x'"),
    "shard's length": (
        lambda r: cr.Gatherer(r.registry, {"f": np.zeros(3, np.float32)}),
        *(cr.LayoutError, "shard 'f' has shape"),
    ),
    "shard's name": (
        lambda r: cr.Gatherer(r.registry, {"x": np.zeros(3)}),
        *(cr.LayoutError, "no parameter 'x'"),
    ),
    "dtype": (
        lambda r: cr.Gatherer(r.registry, r.shards, dtypes={"a": "int32"}),
        *(cr.LayoutError, "'a': a shard of float32 cannot become 'int32'"),
    ),
    "dtype's name": (
        lambda r: cr.Gatherer(r.registry, r.shards, dtypes={"x": "float32"}),
        *(cr.LayoutError, "no shard 'x'"),
    ),
    "prefetch": (
        lambda r: cr.Gatherer(r.registry, r.shards, prefetch=-1),
        *(cr.LayoutError, "prefetch must be an integer >= 0"),
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_refused_call_changes_nothing(what: str) -> None:
    call, kind, told = REFUSED[what]

    def work(rank: Rank) -> None:
        before = rank.gatherer.statistics()
        with pytest.raises(kind, match=told):
            call(rank)
        assert rank.gatherer.statistics() == before
        rank.check(*NAMES)

    on(2, work)


def test_ranks_that_differ_are_refused_alike() -> None:
    def work(world: cr.World) -> None:
        registry = cr.Registry(SPECS, world, bucket_bytes=16)
        shards = {name: own(registry, name) for name in NAMES[world.rank :]}
        with pytest.raises(cr.MismatchError, match="what to gather"):
            cr.Gatherer(registry, shards)

    cr.run_local(2, work)


@pytest.mark.parametrize("world_size", [1, 2])
def test_memory_that_does_not_fit_breaks_the_world_for_all(world_size: int) -> None:
    def work(world: cr.World) -> None:
        bad = world.rank == world.world_size - 1

        def allocate(name: str) -> np.ndarray:
            spec = SPECS[NAMES.index(name)]
            return np.zeros((1, *spec.shape) if bad else spec.shape, numpy_dtype(spec.dtype))

        rank = Rank(world, allocate=allocate)
        with pytest.raises(cr.CommunicationError, match="allocate" if bad else None):
            rank.check("a")
        with pytest.raises(cr.CommunicationError):
            rank.gatherer.acquire(["b"])
        rank.gatherer.close()

    cr.run_local(world_size, work)


def test_a_closed_one_takes_no_calls() -> None:
    def work(world: cr.World) -> None:
        rank = Rank(world)
        rank.check("a")
        rank.gatherer.close()
        rank.gatherer.close()
        for call in (rank.gatherer.acquire, rank.gatherer.release):
            with pytest.raises(cr.ProtocolError, match="closed"):
                call(["a"])
        with pytest.raises(cr.ProtocolError, match="closed"):
            rank.gatherer.changed()

    cr.run_local(2, work)
