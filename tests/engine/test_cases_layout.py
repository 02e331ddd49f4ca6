"""Users' cases about odd sizes, memory layouts and dtypes of one gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from strategies import bits, numpy_dtype

from cupynccl_reduce import GradientTypeError, ParamSpec, Reducer, Registry, plan_buckets, run_local

if TYPE_CHECKING:
    from collections.abc import Callable

    from cupynccl_reduce import World

POLICIES = ("planned", "arrival")
BFLOAT16 = numpy_dtype("bfloat16")


@pytest.mark.parametrize("policy", POLICIES)
def test_c1_fewer_elements_than_ranks(make_params: Callable[..., Any], policy: str) -> None:
    """Some ranks have an empty part, and crash."""

    def reduce(world: World) -> tuple[np.ndarray, np.ndarray]:
        registry = Registry(make_params(2), world)
        with Reducer(registry, policy=policy) as reducer:
            for _ in range(2):
                with reducer.backward():
                    reducer.reduce_grad("p0", np.array([world.rank, 10 * world.rank], "f4"))
                shards = reducer.wait()
            reducer.wait_packed()
            reducer.synchronize()
            return shards["p0"].copy(), registry.gather(shards)["p0"]

    results = run_local(4, reduce)
    assert [shard.size for shard, _ in results] == [1, 1, 0, 0]
    for shard, full in results:
        assert shard.dtype == np.float32
        assert bits(full) == bits(np.array([1.5, 15], "f4"))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_c3_zero_elements_keep_their_shape(
    make_params: Callable[..., Any], reduce_cycle: Callable[..., Any], world_size: int, policy: str
) -> None:
    """(0, 8) becomes (0,) after flatten and unflatten; the next forward fails."""
    shapes = [(0, 8), (8, 0), (2, 0, 3), (0,), (3,)]
    params = make_params(*shapes)

    def reduce(world: World) -> dict[str, Any]:
        grads = {spec.name: np.ones(spec.shape, "f4") for spec in params}
        return reduce_cycle(world, params, grads, grads, bucket_bytes=1, policy=policy, op="sum")

    for full in run_local(world_size, reduce):
        assert [array.shape for array in full.values()] == shapes
        assert bits(full["p4"]) == bits(np.full(3, 2 * world_size, "f4"))


@pytest.mark.parametrize("policy", POLICIES)
def test_c3_a_model_of_zero_elements_needs_no_collective(
    make_params: Callable[..., Any], policy: str
) -> None:
    """A parameter of no elements is never marked as gathered."""

    def reduce(world: World) -> tuple[int, tuple[int, ...]]:
        registry = Registry(make_params((0, 8)), world)
        with Reducer(registry, policy=policy) as reducer:
            with reducer.backward():
                reducer.reduce_grad("p0", np.ones((0, 8), "f4"))
            full = registry.gather(reducer.wait())
            return reducer.statistics().collectives, full["p0"].shape

    assert run_local(2, reduce) == [(0, (0, 8))] * 2


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_c5_a_parameter_without_dimensions(
    make_params: Callable[..., Any], world_size: int, policy: str
) -> None:
    """0-dim parameters fail, early or late: sharding on the first dimension needs one."""

    def reduce(world: World) -> tuple[int, np.ndarray]:
        registry = Registry(make_params(()), world)
        with Reducer(registry, policy=policy) as reducer:
            with reducer.backward():
                with pytest.raises(GradientTypeError, match=r"'p0'.*float is not an array.*0-dim"):
                    reducer.reduce_grad("p0", world.rank + 1.0)
                reducer.reduce_grad("p0", np.array(world.rank + 1, "f4"))
            shards = reducer.wait()
            return shards["p0"].size, registry.gather(shards)["p0"]

    results = run_local(world_size, reduce)
    assert [numel for numel, _ in results] == [1] + [0] * (world_size - 1)
    for _, full in results:
        assert bits(full) == bits(np.array((world_size + 1) / 2, "f4"))


def test_c7_a_short_first_dimension_is_shared_by_all_ranks(make_params: Callable[..., Any]) -> None:
    """Shape (2, N) on 8 ranks: two ranks hold everything."""
    (bucket,) = plan_buckets(make_params((2, 1000)), world_size=4, bucket_bytes=1)
    (segment,) = bucket.matrix.segments
    assert [segment.interval(rank) for rank in range(4)] == [
        (0, 500),
        (500, 1000),
        (1000, 1500),
        (1500, 2000),
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_c9_a_whole_gradient_is_whole_on_every_rank(
    make_params: Callable[..., Any], policy: str
) -> None:
    """An optimizer that needs the whole matrix sees a half-reduced one."""

    def reduce(world: World) -> tuple[np.ndarray, np.ndarray]:
        registry = Registry(make_params((3, 3)), world)
        with Reducer(registry, policy=policy) as reducer:
            with reducer.backward():
                reducer.reduce_grad("p0", (world.rank + 1) * np.eye(3, dtype="f4"))
            shards = reducer.wait()
            return shards["p0"].copy(), registry.gather(shards)["p0"]

    results = run_local(2, reduce)
    assert [shard.shape for shard, _ in results] == [(5,), (4,)]
    for _, full in results:
        assert bits(full) == bits(1.5 * np.eye(3, dtype="f4"))


@pytest.mark.parametrize("policy", POLICIES)
def test_d1_an_expanded_gradient_gives_its_logical_values(
    make_params: Callable[..., Any], reduce_cycle: Callable[..., Any], policy: str
) -> None:
    """A stride-0 gradient (of a sum) goes through DLPack and gives wrong values."""
    sources = [np.full(1, 2 + 2 * rank, "f4") for rank in range(2)]

    def reduce(world: World) -> dict[str, Any]:
        grad = np.broadcast_to(sources[world.rank].reshape(()), (3, 4))
        return reduce_cycle(world, make_params((3, 4)), {"p0": grad}, policy=policy)

    for full in run_local(2, reduce):
        assert bits(full["p0"]) == bits(np.full((3, 4), 3, "f4"))
    assert [source.tolist() for source in sources] == [[2], [4]]  # never written


@pytest.mark.parametrize("policy", POLICIES)
def test_d1_torch_expands_the_gradient_of_a_sum(
    make_params: Callable[..., Any], reduce_cycle: Callable[..., Any], policy: str
) -> None:
    """The same, from torch itself."""
    import torch

    p = torch.zeros(3, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(p.sum(), p)

    def reduce(world: World) -> dict[str, Any]:
        return reduce_cycle(world, make_params((3, 4)), {"p0": grad}, policy=policy)

    for full in run_local(2, reduce):
        assert bits(full["p0"]) == bits(np.ones((3, 4), "f4"))


D5 = """
import numpy as np
from cupynccl_reduce import ParamSpec, Reducer, Registry, run_local
from producers import Producer

block = np.arange(6, dtype="f4")
grads = {
    "reversed": block[::-1],
    "both": block.reshape(2, 3)[::-1, ::-1],
    "empty": np.zeros((1, 0, 4), "f4"),
    "empty reversed": np.zeros((1, 0, 4), "f4")[::-1],
    "no strides": Producer(block.reshape(2, 3), strides=False),
    "no strides, empty": Producer(np.zeros((0, 3), "f4"), strides=False),
    "no strides, 0-dim": Producer(np.array(7, "f4"), strides=False),
}
shapes = [(6,), (2, 3), (1, 0, 4), (1, 0, 4), (2, 3), (0, 3), ()]
expected = [block[::-1], block[::-1].reshape(2, 3), None, None, block.reshape(2, 3), None, 7]

def reduce(world):
    params = [ParamSpec(name, shape, "float32") for name, shape in zip(grads, shapes)]
    registry = Registry(params, world)
    for policy in ("planned", "arrival"):
        with Reducer(registry, policy=policy) as reducer:
            with reducer.backward():
                for name, grad in grads.items():
                    reducer.reduce_grad(name, grad)
            full = registry.gather(reducer.wait())
        for array, shape, value in zip(full.values(), shapes, expected):
            assert array.shape == shape
            assert value is None or np.array_equal(array, value), (array, value)

run_local(1, reduce)
run_local(2, reduce)
print("right")
"""


def test_d5_edges_of_the_protocol_do_not_end_the_process(run_python: Callable[..., Any]) -> None:
    """Negative strides abort the process; no elements, or no strides, crash it."""
    done = run_python(D5)
    assert (done.returncode, done.stdout, done.stderr) == (0, "right\n", "")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("bucket_bytes", [1, 16, 1 << 30])
def test_d7_every_dtype_of_a_mixed_model_is_kept(
    reduce_cycle: Callable[..., Any], bucket_bytes: int, policy: str
) -> None:
    """Mixed dtypes in one model are taken for the first parameter's."""
    numels = {"float16": 5, "float32": 3, "bfloat16": 7, "float64": 2}
    params = [
        ParamSpec(f"{dtype} {i}", (numel,), dtype, shard_dtype=dtype)
        for i in range(3)
        for dtype, numel in numels.items()
    ]
    of = {spec.name: spec.dtype for spec in params}
    for bucket in plan_buckets(params, world_size=2, bucket_bytes=bucket_bytes):
        assert {of[name] for name in bucket.names} == {bucket.dtype}

    def reduce(world: World) -> dict[str, Any]:
        grads = {
            spec.name: (np.arange(spec.numel) * (2 * world.rank + 1)).astype(
                numpy_dtype(spec.dtype)
            )
            for spec in params
        }
        return reduce_cycle(world, params, grads, bucket_bytes=bucket_bytes, policy=policy)

    for full in run_local(2, reduce):
        for spec in params:
            expected = (2 * np.arange(spec.numel)).astype(numpy_dtype(spec.dtype))
            assert bits(full[spec.name]) == bits(expected)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_d9_bfloat16_from_numpy_and_torch(
    make_params: Callable[..., Any], reduce_cycle: Callable[..., Any], framework: str, policy: str
) -> None:
    """A bfloat16 tensor ends the process with some versions, and is a TypeError in others."""

    def gradient(value: float) -> Any:
        if framework == "numpy":
            return np.full((2, 3), value, BFLOAT16)
        import torch

        return torch.full((2, 3), value, dtype=torch.bfloat16)

    def reduce(world: World) -> dict[str, Any]:
        params = make_params((2, 3), dtype="bfloat16", shard_dtype="bfloat16")
        return reduce_cycle(world, params, {"p0": gradient(1.0 + world.rank)}, policy=policy)

    for full in run_local(2, reduce):
        assert bits(full["p0"]) == bits(np.full((2, 3), 1.5, BFLOAT16))


def test_d9_bfloat16_goes_back_to_torch(
    make_params: Callable[..., Any], reduce_cycle: Callable[..., Any]
) -> None:
    """The dtype of the result is bfloat16 again in torch."""
    import torch

    def reduce(world: World) -> Any:
        grad = torch.full((3,), 1.0 + world.rank, dtype=torch.bfloat16)
        params = make_params(3, dtype="bfloat16", shard_dtype="bfloat16")
        return reduce_cycle(world, params, {"p0": grad})["p0"]

    for full in run_local(2, reduce):
        tensor = torch.from_numpy(full.view(np.int16)).view(torch.bfloat16)
        assert torch.equal(tensor, torch.full((3,), 1.5, dtype=torch.bfloat16))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("shard_dtype", "total"), [("float32", 260.0), ("bfloat16", 256.0)])
def test_d11_backwards_accumulate_in_the_shard_dtype(
    make_params: Callable[..., Any],
    reduce_cycle: Callable[..., Any],
    shard_dtype: str,
    total: float,
    policy: str,
) -> None:
    """bfloat16 gradients were accumulated in bfloat16: 256 + 1 is 256 there, the known loss."""
    params = make_params(1, dtype="bfloat16", shard_dtype=shard_dtype)
    backwards = [{"p0": np.array([value], BFLOAT16)} for value in (256, 1, 1, 1, 1)]
    (full,) = run_local(1, lambda world: reduce_cycle(world, params, *backwards, policy=policy))
    assert bits(full["p0"]) == bits(np.array([total], numpy_dtype(shard_dtype)))


@pytest.mark.parametrize("policy", POLICIES)
def test_d11_ranks_are_summed_in_the_wire_dtype(
    make_params: Callable[..., Any], reduce_cycle: Callable[..., Any], policy: str
) -> None:
    """Users need bfloat16 gradients with a float32 sum over ranks."""
    params = make_params(1, dtype="bfloat16", reduce_dtype="float32")

    def reduce(world: World) -> dict[str, Any]:
        grad = np.array([1 if world.rank else 256], BFLOAT16)
        return reduce_cycle(world, params, {"p0": grad}, op="sum", policy=policy)

    for full in run_local(4, reduce):
        assert bits(full["p0"]) == bits(np.array([259], "f4"))


def test_d11_uses_of_one_backward_are_summed_in_float32() -> None:
    """The same loss, where one parameter is used many times."""

    def reduce(world: World) -> np.ndarray:
        registry = Registry([ParamSpec("p", (1,), "bfloat16", uses="many")], world)
        with Reducer(registry) as reducer:
            with reducer.backward():
                for value in (254, 1, 1, 1, 1):
                    reducer.reduce_grad("p", np.array([value], BFLOAT16))
            return reducer.wait()["p"].copy()

    (shard,) = run_local(1, reduce)
    assert bits(shard) == bits(np.array([258], "f4"))
