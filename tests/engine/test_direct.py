"""Large gradients sent from where they lie: the bits of packing, one more call each, no copy."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

from cupynccl_reduce import LayoutError, MismatchError, ParamSpec, Reducer, Registry, run_local
from cupynccl_reduce.layout import plan_buckets

if TYPE_CHECKING:
    from collections.abc import Callable

    from cupynccl_reduce import World

# Of which two divide evenly by 2, 3 and 4 ranks, in whole 16-byte words.
NUMELS = {"small": 5, "large": 96, "odd": 97, "larger": 192}


def params_of(dtype: str, shard_dtype: str) -> list[ParamSpec]:
    return [
        ParamSpec(name, (numel,), dtype, shard_dtype=shard_dtype) for name, numel in NUMELS.items()
    ]


def numpy_dtype(name: str) -> Any:
    return ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)


def aligned(values: np.ndarray) -> np.ndarray:
    """Return a copy that starts on a 16-byte boundary."""
    room = np.empty(values.nbytes + 16, np.uint8)
    start = -room.ctypes.data % 16
    array = room[start : start + values.nbytes].view(values.dtype)
    array[...] = values
    return array


def gradients(rank: int, backward: int, dtype: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([rank, backward])
    return {
        n: aligned(rng.standard_normal(k).astype(numpy_dtype(dtype))) for n, k in NUMELS.items()
    }


class Spy:
    """A communicator that notes the address and op of every reduce_scatter."""

    def __init__(self, communicator: Any, direct_bytes: int) -> None:
        self._communicator = communicator
        self.direct_bytes = direct_bytes
        self.calls: list[tuple[int, str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._communicator, name)

    def reduce_scatter(self, send: np.ndarray, recv: Any, dtype: str, op: Any, stream: Any) -> None:
        self.calls.append((send.ctypes.data, op))
        self._communicator.reduce_scatter(send, recv, dtype, op, stream)


def spied(world: World, direct_bytes: int = 64) -> tuple[World, Spy]:
    from dataclasses import replace

    spy = Spy(world.communicator, direct_bytes)
    return replace(world, communicator=spy), spy  # type: ignore[arg-type]


@pytest.mark.parametrize("bucket_bytes", [1 << 20, 300])
@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "dtypes", [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]
)
def test_the_bits_are_those_of_packing(
    reduce_cycle: Callable[..., Any],
    world_size: int,
    op: str,
    dtypes: tuple[str, str],
    bucket_bytes: int,
) -> None:
    def run(world: World, direct_bytes: int) -> dict[str, np.ndarray]:
        world, spy = spied(world, direct_bytes)
        backwards = [gradients(world.rank, b, dtypes[0]) for b in range(2)]
        if world.rank == 1:
            backwards[0]["large"] = np.repeat(backwards[0]["large"], 2)[::2]  # strided: packed
            del backwards[1]["larger"]  # missing: zeros are packed
        before = {n: a.tobytes() for grads in backwards for n, a in grads.items()}
        full = reduce_cycle(world, params_of(*dtypes), *backwards, bucket_bytes=bucket_bytes, op=op)
        assert before == {n: a.tobytes() for grads in backwards for n, a in grads.items()}
        lie = {a.ctypes.data for grads in backwards for a in grads.values()}
        sent = sum(address in lie for address, _ in spy.calls)
        allowed = direct_bytes and world_size > 1 and (op == "sum" or world_size != 3)
        assert sent == ((2 if world.rank == 1 else 4) if allowed else 0)
        return full

    packed = run_local(world_size, lambda world: run(world, 0))
    direct = run_local(world_size, lambda world: run(world, 64))
    for one, other in zip(packed, direct, strict=True):
        for name in NUMELS:
            assert one[name].tobytes() == other[name].tobytes(), name


def test_one_collective_for_all_that_is_packed_and_one_for_each_direct_gradient() -> None:
    def run(world: World) -> None:
        world, spy = spied(world)
        registry = Registry(params_of("float32", "float32"), world)
        assert [b.direct for b in registry.buckets] == [2]
        assert registry.buckets[0].names[-2:] == ("larger", "large")
        with Reducer(registry) as reducer:
            for step in range(3):
                grads = gradients(world.rank, step, "float32")
                with reducer.backward():
                    for name, grad in grads.items():
                        reducer.reduce_grad(name, grad)
                reducer.wait()
                assert reducer.statistics().launches == step + 1
                assert reducer.statistics().collectives == 3 * (step + 1)
                assert [op for _, op in spy.calls[-3:]] == ["sum", "avg", "avg"]
                assert [a for a, _ in spy.calls[-2:]] == [
                    grads[n].ctypes.data for n in ("larger", "large")
                ]

    run_local(2, run)


def test_a_failed_backward_sends_nan_in_place_of_what_had_arrived() -> None:
    def run(world: World) -> bool:
        world, _ = spied(world)
        registry = Registry(params_of("float32", "float32"), world)
        with Reducer(registry) as reducer:
            try:
                with reducer.backward():
                    for name, grad in gradients(0, 0, "float32").items():
                        if world.rank == 0 and name == "larger":
                            raise ZeroDivisionError
                        reducer.reduce_grad(name, grad)
            except ZeroDivisionError:
                reducer.synchronize()
                reducer.discard()
                return True
            shards = reducer.wait()
            return all(np.isnan(shard).all() for shard in shards.values())

    assert run_local(2, run) == [True, True]


def test_the_source_is_held_until_its_collective_is_done_and_wait_packed_waits_for_that() -> None:
    def run(world: World) -> None:
        world, _ = spied(world)
        registry = Registry([ParamSpec("p", (96,), "float32")], world)
        with Reducer(registry) as reducer:
            gate = threading.Event()
            world.stream.submit(gate.wait)  # the collective is queued behind it
            grad = gradients(world.rank, 0, "float32")["large"]
            alive = weakref.ref(grad)
            with reducer.backward():
                reducer.reduce_grad("p", grad)
            del grad
            world.copy_stream.synchronize()
            assert alive() is not None
            stream = world.runtime.stream()
            reducer.wait_packed(stream=stream)
            behind: list[bool] = []
            stream.submit(lambda: behind.append(gate.is_set()))
            world.copy_stream.synchronize()  # the packs are done, and the gate is shut
            gate.set()
            stream.synchronize()
            assert behind == [True]
            reducer.wait()

    run_local(2, run)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_a_mean_of_the_largest_numbers_is_no_overflow(
    reduce_cycle: Callable[..., Any], dtype: str
) -> None:
    largest = ml_dtypes.finfo(numpy_dtype(dtype)).max
    specs = [ParamSpec("p", (96,), dtype, shard_dtype=dtype)]

    def run(world: World) -> None:
        grad = aligned(np.full(96, largest, numpy_dtype(dtype)))
        full = reduce_cycle(spied(world)[0], specs, {"p": grad})
        assert (full["p"] == largest).all()

    run_local(2, run)


def test_what_is_padded_cast_or_summed_is_packed_and_so_is_all_on_one_rank() -> None:
    def count(world_size: int, **fields: Any) -> int:
        spec = ParamSpec("p", fields.pop("shape", (64,)), "float32", **fields)
        (bucket,) = plan_buckets([spec], world_size=world_size, bucket_bytes=1, direct_bytes=1)
        return bucket.direct

    assert count(2) == 1
    assert count(1) == 0
    assert count(2, shape=(66,)) == 0
    assert count(2, shape=(0,)) == 0
    assert count(2, reduce_dtype="float64") == 0
    assert count(2, uses="many") == 0


def test_direct_bytes_is_checked_and_compared() -> None:
    def bad(world: World) -> None:
        with pytest.raises(LayoutError, match="direct_bytes"):
            Registry([ParamSpec("p", (64,), "float32")], spied(world, -1)[0])

    def differ(world: World) -> None:
        with pytest.raises(MismatchError, match="direct_bytes=0; rank 1: direct_bytes=8"):
            Registry([ParamSpec("p", (64,), "float32")], spied(world, 8 * world.rank)[0])

    run_local(2, bad)
    run_local(2, differ)


def test_beside_direct_gradients_nothing_but_empty_ones(reduce_cycle: Callable[..., Any]) -> None:
    specs = [ParamSpec("empty", (0, 3), "float32"), ParamSpec("large", (96,), "float32")]

    def run(world: World) -> None:
        grads = {"empty": np.zeros((0, 3), "f4"), "large": np.full(96, world.rank, "f4")}
        full = reduce_cycle(spied(world)[0], specs, grads, op="sum")
        assert full["large"].tolist() == [1.0] * 96
        assert full["empty"].shape == (0, 3)

    run_local(2, run)
