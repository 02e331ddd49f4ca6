"""Bad options, parameters, shards and worlds: nothing is built, and all is as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from producers import CUDA, Producer

from cupynccl_reduce import (
    LayoutError,
    ParamSpec,
    ProtocolError,
    Reducer,
    Registry,
    connect,
    run_local,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from cupynccl_reduce import World

PARAMS = [ParamSpec("given", (3,), "float32"), ParamSpec("absent", (2, 3), "float32")]


def array(*shape: int, dtype: Any = "f4") -> np.ndarray:
    return np.ones(shape, dtype)


def empty_backward(reducer: Reducer) -> None:
    with reducer.backward():
        pass


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"op": "max"}, ["op", "'mean', 'sum'", "'max'"]),
        ({"op": None}, ["op", "None"]),
        ({"policy": "eager"}, ["policy", "'planned', 'arrival'", "'eager'"]),
        ({"missing": "ignore"}, ["missing", "'zero', 'error'", "'ignore'"]),
        ({"memory": "managed"}, ["memory", "'device', 'pinned'", "'managed'"]),
        ({"memory": "pinned"}, ["memory", "'pinned'", "needs a GPU"]),
        ({"pre_divide": "no"}, ["pre_divide", "'no'"]),
        ({"pre_divide": False}, ["pre_divide=False", "policy='arrival'"]),
        ({"pre_divide": False, "policy": "arrival", "op": "sum"}, ["op='mean'"]),
        ({"max_buffers": 0}, ["max_buffers", ">= 1", "0"]),
        ({"max_buffers": -1}, ["max_buffers", "-1"]),
        ({"max_buffers": 2.0}, ["max_buffers", "2.0"]),
        ({"max_buffers": True}, ["max_buffers", "True"]),
        ({"max_buffers": None}, ["max_buffers", "None"]),
    ],
)
def test_a_refused_option_leaves_the_registry_free(
    options: dict[str, Any], words: list[str]
) -> None:
    def run(world: World) -> None:
        registry = Registry(PARAMS, world)
        with pytest.raises(LayoutError) as caught:
            Reducer(registry, **options)
        for word in words:
            assert word in str(caught.value)
        with Reducer(registry) as reducer:
            with reducer.backward():
                reducer.reduce_grad("given", array(3))
            assert set(reducer.wait()["given"].tolist()) <= {1}

    run_local(2, run)


def test_integers_have_no_mean() -> None:
    def run(world: World) -> None:
        registry = Registry([ParamSpec("count", (3,), "int64")], world)
        with pytest.raises(LayoutError, match=r"'count'.*op='sum'"):
            Reducer(registry)
        with Reducer(registry, op="sum") as reducer:
            with reducer.backward():
                reducer.reduce_grad("count", np.full(3, 1 << 40))
            assert set(reducer.wait()["count"].tolist()) == {1 << 41}

    run_local(2, run)


@pytest.mark.parametrize("bucket_bytes", [0, -1, 64.0, True, None])
def test_a_wrong_bucket_size_builds_no_registry(bucket_bytes: Any) -> None:
    def run(world: World) -> None:
        with pytest.raises(LayoutError, match=f"bucket_bytes .*not {bucket_bytes!r}"):
            Registry(PARAMS, world, bucket_bytes=bucket_bytes)
        Registry(PARAMS, world)  # the world is as it was

    run_local(2, run)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ([], "no parameters"),
        ([PARAMS[0], PARAMS[0]], "'given' is given twice"),
        (["given"], "ParamSpec"),
    ],
)
def test_a_wrong_parameter_list_builds_no_registry(params: list[Any], words: str) -> None:
    def run(world: World) -> None:
        with pytest.raises(LayoutError, match=words):
            Registry(params, world)
        Registry(PARAMS, world)

    run_local(2, run)


@pytest.mark.parametrize(
    ("brought", "words"),
    [
        ({"given": array(3)}, ["'given'", "(3,)", "float32 (2,)"]),
        ({"given": array(2, 1)}, ["'given'", "(2, 1)", "float32 (2,)"]),
        ({"given": array(2, dtype="f8")}, ["'given'", "float64", "float32 (2,)"]),
        ({"given": array(4)[::2]}, ["'given'", "not contiguous"]),
        ({"given": np.broadcast_to(np.float32(1), 2)}, ["'given'", "not"]),
        ({"given": np.frombuffer(bytes(8), "f4")}, ["'given'", "not writable"]),
        ({"given": Producer(array(2), device_type=CUDA)}, ["'given'", "cuda:0"]),
        ({"given": [0.0, 0.0]}, ["'given'", "list"]),
        ({"nobody": array(2)}, ["'nobody'"]),
    ],
)
def test_wrong_shards_build_no_registry(brought: dict[str, Any], words: list[str]) -> None:
    params = [ParamSpec("given", (4,), "float32")]

    def run(world: World) -> None:
        with pytest.raises(LayoutError) as caught:
            Registry(params, world, shards=brought)
        for word in words:
            assert word in str(caught.value)
        Registry(params, world, shards={"given": array(2)})

    run_local(2, run)


def test_what_is_brought_and_not_writable_stays_as_it_is() -> None:
    """An immutable object of Python would change its value."""
    memory = bytes(8)

    def run(world: World) -> None:
        shards = {"given": np.frombuffer(memory, "f4")}
        with pytest.raises(LayoutError, match="not writable"):
            empty_backward(
                Reducer(Registry([ParamSpec("given", (2,), "float32")], world, shards=shards))
            )

    run_local(1, run)
    assert memory == bytes(8)


def test_a_wrong_shard_is_not_gathered() -> None:
    def run(world: World) -> None:
        registry = Registry([ParamSpec("p", (7,), "float32")], world)
        right = array(4 if world.rank == 0 else 3)
        for shard, words in (
            (array(7), ["'p'", "(7,)", f"rank {world.rank}", str(right.size)]),
            (right.astype("c8"), ["'p'", "complex64"]),
            ("p", ["'p'", "str"]),
        ):
            with pytest.raises(LayoutError) as caught:
                registry.gather({"p": shard})
            for word in words:
                assert word in str(caught.value)
        with pytest.raises(LayoutError, match="'q'"):
            registry.gather({"q": right})
        assert registry.gather({"p": right})["p"].tolist() == [1] * 7

    run_local(2, run)


@pytest.mark.parametrize("world_size", [0, -1, 2.0, True, None])
def test_a_world_has_at_least_one_rank(world_size: Any) -> None:
    with pytest.raises(LayoutError, match=f"world_size must be .*not {world_size!r}"):
        run_local(world_size, lambda world: world.rank)


@pytest.mark.parametrize(
    "build",
    [
        lambda world, _: Registry(PARAMS, world),
        lambda _, registry: Reducer(registry),
        lambda _, registry: registry.gather(registry.shards),
    ],
    ids=["registry", "reducer", "gather"],
)
def test_nothing_is_built_in_a_closed_world(build: Callable[[World, Registry], Any]) -> None:
    def run(world: World) -> None:
        registry = Registry(PARAMS, world)
        world.close()
        world.close()
        with pytest.raises(ProtocolError, match=rf"rank {world.rank}.*closed; connect\(\)"):
            build(world, registry)
        assert "CLOSED" in repr(world)

    run_local(2, run)


@pytest.mark.parametrize(
    "call", [empty_backward, Reducer.wait, Reducer.synchronize, Reducer.flush, Reducer.discard]
)
def test_a_reducer_of_a_closed_world_is_of_no_use(call: Callable[[Reducer], object]) -> None:
    def run(world: World) -> None:
        reducer = Reducer(Registry(PARAMS, world))
        empty_backward(reducer)
        world.close()
        with pytest.raises(ProtocolError, match="this world is closed"):
            call(reducer)
        reducer.close()

    run_local(2, run)


def test_a_world_of_one_needs_no_launcher() -> None:
    with connect("host") as world:
        assert (world.rank, world.world_size, world.local_rank) == (0, 1, 0)
        with Reducer(Registry(PARAMS, world)) as reducer:
            with reducer.backward():
                reducer.reduce_grad("given", array(3))
            assert reducer.wait()["given"].tolist() == [1, 1, 1]
    with pytest.raises(ProtocolError, match="closed"):
        Registry(PARAMS, world)


@pytest.mark.parametrize("runtime", ["gpu", None, "HOST"])
def test_an_unknown_runtime_is_refused(runtime: Any) -> None:
    with pytest.raises(LayoutError, match=rf"'auto', 'cuda' or 'host', not {runtime!r}"):
        connect(runtime)
