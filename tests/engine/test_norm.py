"""Reducer.norm and clip: one number for all ranks, over every element once, before wait()."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from contract.model import rounded
from hypothesis import given
from hypothesis import strategies as st
from strategies import Workload, bits, interval, numpy_dtype, workloads

from cupynccl_reduce import ParamSpec, Reducer, Registry, run_local

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from cupynccl_reduce import World

ORDERS = (1, 2, 3, math.inf)
WORLDS = pytest.mark.parametrize("world_size", [1, 2, 3, 4])
POLICIES = pytest.mark.parametrize("policy", ["planned", "arrival"])


def hand_over(reducer: Reducer, gradients: Mapping[str, Any]) -> None:
    with reducer.backward():
        for name, grad in gradients.items():
            reducer.reduce_grad(name, grad)


def on_ranks(
    world_size: int,
    params: list[ParamSpec],
    use: Callable[[Reducer, World], Any],
    **options: Any,
) -> list[Any]:
    """Run `use(reducer, world)` on every rank."""
    check, bucket_bytes = options.pop("check", "off"), options.pop("bucket_bytes", 1 << 20)

    def run(world: World) -> Any:
        registry = Registry(params, world, bucket_bytes=bucket_bytes)
        with Reducer(registry, **options) as reducer:
            return use(reducer, world)

    return run_local(world_size, run, check=check)


def norm_of(arrays: Any, p: float) -> float:
    """Return the norm by its definition; exact for the small integers of workloads."""
    flat = np.concatenate([np.zeros(1), *(a.astype("f8").reshape(-1) for a in arrays)])
    return float(np.linalg.norm(flat, p))


# --- the law -----------------------------------------------------------------------------------


def run_measured(work: Workload, world: World, clip: dict[str, Any] | None) -> Iterator[Any]:
    """Run one rank's part of a workload; yield the norms and the shards of each cycle."""
    brought = work.bring(world.rank)
    registry = Registry(work.params, world, bucket_bytes=work.bucket_bytes, shards=brought)
    with Reducer(registry, **work.options) as reducer:
        for cycle, backwards in enumerate(work.backwards):
            for backward in range(backwards):
                with reducer.backward():
                    for name, grad in work.gradients(world.rank, cycle, backward):
                        if grad is None:
                            reducer.skip_grad(name)
                        else:
                            reducer.reduce_grad(name, grad)
            norms = [float(reducer.norm(p)) for p in ORDERS]
            if clip is not None:
                norms.append(float(reducer.clip(**clip)))
            yield norms, {name: a.copy() for name, a in reducer.wait().items()}


def check_measured(work: Workload, clip: dict[str, Any] | None) -> None:
    """Run a workload on threads, and compare its norms and clipped shards with the model's."""
    everyone = run_local(work.world_size, lambda world: list(run_measured(work, world, clip)))
    for cycle, expected in enumerate(work.expected):
        arrays = [expected[spec.name] for spec in work.params if spec.is_float]
        wanted = [norm_of(arrays, p) for p in ORDERS]
        factor = 1.0
        if clip is not None:
            wanted.append(norm_of(arrays, clip["p"]) / clip["loss_scale"])
            if clip["max_norm"] is not None:
                factor = min(1.0, clip["max_norm"] / (wanted[-1] + 1e-6))
            factor /= clip["loss_scale"]
        for rank, cycles in enumerate(everyone):
            norms, shards = cycles[cycle]
            assert norms == pytest.approx(wanted, rel=1e-14)
            assert norms == everyone[0][cycle][0]
            for spec in work.params:
                mine = interval(expected[spec.name], rank, work.world_size)
                check_scaled(shards[spec.name], mine, spec, factor)


def check_scaled(shard: np.ndarray, before: np.ndarray, spec: ParamSpec, factor: float) -> None:
    """Compare a shard with what it was, times a factor that may differ in its last digits."""
    if factor == 1 or not spec.is_float:
        assert bits(shard) == bits(before)
        return
    ends = [
        rounded(before.astype("f8") * (factor * (1 + error)), spec.shard_dtype)
        for error in (-1e-14, 1e-14)
    ]
    assert (np.minimum(*ends) <= shard).all()
    assert (shard <= np.maximum(*ends)).all()


clips = st.none() | st.fixed_dictionaries(
    {
        "max_norm": st.none() | st.sampled_from([0.0, 0.5, 3.0, 1e6, math.inf]),
        "p": st.sampled_from(ORDERS),
        "loss_scale": st.sampled_from([1.0, 0.25, 3.0, 65536.0]),
    }
)
small = (1, 2, 3, 4)


@given(workloads(policy="planned", world_sizes=small), clips)
def test_the_norm_is_that_of_the_full_gradients(workload: Workload, clip: Any) -> None:
    check_measured(workload, clip)


@given(workloads(policy="arrival", world_sizes=small), clips)
def test_so_it_is_in_arrival_order(workload: Workload, clip: Any) -> None:
    check_measured(workload, clip)


@WORLDS
def test_norms_of_real_floats_are_those_of_float64_in_every_run(world_size: int) -> None:
    rng = np.random.default_rng(3)
    shapes = [(3,), (257, 129), (70_001,), (1,), (0, 4)]
    params = [ParamSpec(f"p{i}", shape, "float32") for i, shape in enumerate(shapes)]
    grads = [{s.name: rng.standard_normal(s.shape).astype("f4") for s in params} for _ in range(4)]

    def use(reducer: Reducer, world: World) -> Any:
        hand_over(reducer, grads[world.rank])
        norms = [reducer.norm(p).tobytes() for p in ORDERS]
        return norms, reducer._registry.gather(reducer.wait())

    first = on_ranks(world_size, params, use, bucket_bytes=1000)
    again = on_ranks(world_size, params, use, bucket_bytes=1000)
    for norms, full in first:
        for p, raw in zip(ORDERS, norms, strict=True):
            wanted = norm_of(full.values(), p)
            assert np.frombuffer(raw)[0] == pytest.approx(wanted, rel=1e-12)
        assert norms == first[0][0]
    assert [norms for norms, _ in again] == [norms for norms, _ in first]


# --- cases M1 to M7 ----------------------------------------------------------------------------


@WORLDS
@POLICIES
def test_norm_and_clip_of_three_and_four(world_size: int, policy: str) -> None:
    def use(reducer: Reducer, world: World) -> Any:
        grad = {"p": np.array([3, 4], "f4")}
        hand_over(reducer, grad)
        norms = [float(reducer.norm(p)) for p in ORDERS]
        assert norms == pytest.approx([7.0, 5.0, 91 ** (1 / 3), 4.0], rel=1e-15)
        assert float(reducer.clip(1.0)) == 5.0
        assert float(reducer.norm()) == pytest.approx(1.0, abs=1e-6)
        full = reducer._registry.gather(reducer.wait())["p"]
        np.testing.assert_allclose(full, [0.6, 0.8], atol=1e-6)
        hand_over(reducer, grad)  # nothing of it lasts
        assert float(reducer.norm()) == 5.0
        assert reducer._registry.gather(reducer.wait())["p"].tolist() == [3.0, 4.0]

    on_ranks(world_size, [ParamSpec("p", (2,), "float32")], use, policy=policy)


@pytest.mark.parametrize("shape", [(1,), (0,), (2,)])
def test_ranks_without_elements_take_part(shape: tuple[int, ...]) -> None:
    def use(reducer: Reducer, world: World) -> None:
        hand_over(reducer, {"p": np.full(shape, 2.0, "f4")})
        for p in ORDERS:
            assert float(reducer.norm(p)) == norm_of([np.full(shape, 2.0)], p)
        reducer.clip(1.0)
        assert all(shard.dtype == np.float32 for shard in reducer.wait().values())

    on_ranks(4, [ParamSpec("p", shape, "float32")], use)


@POLICIES
@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize(
    "places",
    [
        {0: math.inf},
        {3: math.inf},
        {0: math.nan},
        {3: -math.inf},
        {0: math.inf, 3: math.nan},
        {2: "opposite"},  # infinities of two ranks whose sum is NaN
    ],
    ids=str,
)
def test_what_is_not_finite_anywhere_shows_on_every_rank(
    places: dict[int, Any], p: float, policy: str
) -> None:
    def use(reducer: Reducer, world: World) -> Any:
        grad = np.ones(4, "f4")
        for at, bad in places.items():
            grad[at] = (math.inf if world.rank else -math.inf) if bad == "opposite" else bad
        hand_over(reducer, {"p": grad})
        first = reducer.norm(p).tobytes()
        second = float(reducer.clip(1.0, loss_scale=2.0))
        assert not math.isfinite(second)
        reducer.wait()
        reducer.discard()
        hand_over(reducer, {"p": np.ones(4, "f4")})
        assert float(reducer.norm(p)) == norm_of([np.full(4, 2.0)], p)
        return first

    params = [ParamSpec("p", (4,), "float32")]
    first, second = on_ranks(2, params, use, op="sum", policy=policy)
    assert first == second
    assert not np.isfinite(np.frombuffer(first))


@pytest.mark.parametrize("kind", ["float", "integer", "f4", "f8", "numpy", "torch"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_reduce_then_unscale_then_clip(world_size: int, kind: str) -> None:
    import torch

    scale = {
        "float": 4.0,
        "integer": 4,
        "f4": np.array(4.0, "f4"),
        "f8": np.array([4.0]),
        "numpy": np.float32(4.0),
        "torch": torch.tensor(4.0),
    }[kind]

    def use(reducer: Reducer, world: World) -> None:
        hand_over(reducer, {"p": np.array([12, 16], "f4")})
        assert float(reducer.clip(1.0, loss_scale=scale)) == 5.0
        full = reducer._registry.gather(reducer.wait())["p"]
        np.testing.assert_allclose(full, [0.6, 0.8], atol=1e-6)
        hand_over(reducer, {"p": np.array([12, 16], "f4")})
        assert float(reducer.clip(None, loss_scale=scale)) == 5.0
        assert reducer._registry.gather(reducer.wait())["p"].tolist() == [3.0, 4.0]

    on_ranks(world_size, [ParamSpec("p", (2,), "float32")], use)


def test_gradients_are_clipped_after_they_are_reduced() -> None:
    def use(reducer: Reducer, world: World) -> None:
        hand_over(reducer, {"p": np.array([[6, 0], [0, 8]][world.rank], "f4")})
        assert float(reducer.clip(1.0)) == 5.0
        full = reducer._registry.gather(reducer.wait())["p"]
        np.testing.assert_allclose(full, [0.6, 0.8], atol=1e-6)

    on_ranks(2, [ParamSpec("p", (2,), "float32")], use)


# --- what counts -------------------------------------------------------------------------------


def test_integer_parameters_neither_count_nor_are_scaled() -> None:
    params = [ParamSpec("count", (3,), "int32"), ParamSpec("p", (2,), "float32")]

    def use(reducer: Reducer, world: World) -> None:
        hand_over(reducer, {"count": np.full(3, 100, "i4"), "p": np.array([3, 4], "f4")})
        assert float(reducer.clip(1.0, loss_scale=2.0)) == 2.5 * world.world_size
        shards = reducer._registry.gather(reducer.wait())
        assert shards["count"].tolist() == [100 * world.world_size] * 3

    on_ranks(2, params, use, op="sum")


def test_a_registry_of_integers_alone_has_the_norm_zero() -> None:
    def use(reducer: Reducer, world: World) -> None:
        hand_over(reducer, {"count": np.full(3, 100, "i4")})
        assert float(reducer.norm()) == 0.0
        assert float(reducer.clip(1.0, loss_scale=2.0)) == 0.0
        full = reducer._registry.gather(reducer.wait())
        assert full["count"].tolist() == [100 * world.world_size] * 3

    for world_size in (1, 2):
        on_ranks(world_size, [ParamSpec("count", (3,), "int32")], use, op="sum")


def test_micro_batches_count_together_and_may_be_watched() -> None:
    def use(reducer: Reducer, world: World) -> list[float]:
        norms = []
        for _ in range(3):
            hand_over(reducer, {"p": np.array([3, 4], "f4")})
            norms.append(float(reducer.norm()))
        reducer.clip(3.0)
        norms.append(float(reducer.norm()))
        reducer.wait()
        return norms

    for policy in ("planned", "arrival"):
        params = [ParamSpec("p", (2,), "float32"), ParamSpec("never", (5,), "float32")]
        for norms in on_ranks(2, params, use, policy=policy):
            assert norms == pytest.approx([5.0, 10.0, 15.0, 3.0], abs=1e-5)


@POLICIES
def test_a_gradient_may_come_after_a_norm_that_counted_zero(policy: str) -> None:
    params = [ParamSpec(name, (4,), "float32") for name in "ab"]

    def use(reducer: Reducer, world: World) -> None:
        for _ in range(2):
            hand_over(reducer, {"a": np.ones(4, "f4")})
            assert float(reducer.norm()) == 2.0
            hand_over(reducer, {"b": np.full(4, 2, "f4")})
            assert float(reducer.norm(1)) == 12.0
            full = reducer._registry.gather(reducer.wait())
            assert [full[name][0] for name in "ab"] == [1.0, 2.0]

    on_ranks(2, params, use, policy=policy)


@pytest.mark.parametrize("brought", [("p0",), ("p0", "p1", "p2", "p3"), ()])
def test_neither_padding_nor_an_old_nan_counts(brought: tuple[str, ...]) -> None:
    """A step of NaN, clipped with NaN, leaves nothing in padding or in shards that are brought."""
    params = [ParamSpec(f"p{i}", (5,), "float32", shard_dtype="bfloat16") for i in range(4)]
    work = Workload(world_size=2, params=tuple(params), brought=brought)

    def run(world: World) -> None:
        shards = work.bring(world.rank)
        registry = Registry(params, world, bucket_bytes=40, shards=shards)
        with Reducer(registry) as reducer:
            for value in (math.nan, 1.0, math.inf, 2.0):
                hand_over(reducer, {s.name: np.full(5, value, "f4") for s in params})
                if math.isfinite(value):
                    assert float(reducer.norm(1)) == 20 * value
                assert math.isfinite(float(reducer.clip(100.0))) == math.isfinite(value)
                reducer.wait()
        if len(brought) < 4:
            arena = registry._arena.copy()
            for name, place in registry.items():
                if name not in brought:
                    start = registry.shards[name].ctypes.data - registry._arena.ctypes.data
                    arena[start : start + 2 * (place.stop - place.start)] = 0
            assert not arena.any()

    run_local(2, run)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_shards_are_measured_and_scaled(dtype: str) -> None:
    spec = ParamSpec("p", (300,), dtype, shard_dtype=dtype)

    def use(reducer: Reducer, world: World) -> None:
        hand_over(reducer, {"p": np.full(300, 200, numpy_dtype(dtype))})
        # 300 squares are 1.2e7: no float16 holds that, and bfloat16 would lose most terms.
        assert float(reducer.norm()) == pytest.approx(200 * math.sqrt(300), rel=1e-14)
        assert float(reducer.clip(None, loss_scale=16.0)) == pytest.approx(12.5 * math.sqrt(300))
        full = reducer._registry.gather(reducer.wait())["p"]
        assert full.astype("f8").tolist() == [12.5] * 300

    assert ml_dtypes.bfloat16(12.5) == 12.5
    on_ranks(2, [spec], use)
