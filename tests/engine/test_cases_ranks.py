"""Users' cases about ranks that differ: what they use, what they register, where they run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from producers import CUDA, Producer
from strategies import bits

from cupynccl_reduce import (
    CommunicationError,
    GradientError,
    LayoutError,
    MismatchError,
    ParamSpec,
    ProtocolError,
    ReduceError,
    Reducer,
    Registry,
    run_local,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from cupynccl_reduce import World

POLICIES = ("planned", "arrival")


def ones(numel: int, value: float = 1) -> np.ndarray:
    return np.full(numel, value, "f4")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_g1_a_parameter_used_many_times_is_summed_and_reduced_once(
    make_params: Callable[..., Any], world_size: int, policy: str
) -> None:
    """A weight used in two checkpointed blocks: the hook fires twice, and an assertion fails."""

    def reduce(world: World) -> tuple[int, np.ndarray]:
        registry = Registry(make_params(3, uses="many"), world)
        with Reducer(registry, policy=policy) as reducer:
            with reducer.backward():
                reducer.reduce_grad("p0", ones(3, 1))
                reducer.reduce_grad("p0", ones(3, 2))
            return reducer.statistics().launches, registry.gather(reducer.wait())["p0"]

    for launches, full in run_local(world_size, reduce):
        assert launches == 1
        assert bits(full) == bits(ones(3, 3))


@pytest.mark.parametrize("policy", POLICIES)
def test_g1_a_second_gradient_is_refused_with_the_remedy(
    make_params: Callable[..., Any], policy: str
) -> None:
    """By default a second arrival is a mistake: nothing of it is summed."""

    def reduce(world: World) -> np.ndarray:
        registry = Registry(make_params(3, 2), world)
        with Reducer(registry, policy=policy) as reducer:
            with reducer.backward():
                reducer.reduce_grad("p0", ones(3, 1))
                with pytest.raises(ProtocolError, match=r"'p0'.*twice.*uses='many'"):
                    reducer.reduce_grad("p0", ones(3, 2))
            return registry.gather(reducer.wait())["p0"]

    for full in run_local(2, reduce):
        assert bits(full) == bits(ones(3, 1))


def test_g7_ranks_may_use_different_parameters_a_different_number_of_times() -> None:
    """Ranks use different experts: sizes mismatch, or all hang."""
    params = [
        ParamSpec("A", (3,), "float32", uses="many"),
        ParamSpec("B", (2,), "float32"),
        ParamSpec("C", (2,), "float32"),
    ]

    def reduce(world: World) -> tuple[int, dict[str, Any]]:
        registry = Registry(params, world, bucket_bytes=1)
        with Reducer(registry) as reducer:
            with reducer.backward():
                if world.rank == 0:
                    reducer.reduce_grad("A", ones(3, 1))
                    reducer.reduce_grad("B", ones(2, 20))
                else:
                    reducer.reduce_grad("C", ones(2, 30))
                    for value in (2, 4, 9):
                        reducer.reduce_grad("A", ones(3, value))
            return reducer.statistics().collectives, registry.gather(reducer.wait())

    for collectives, full in run_local(2, reduce):
        assert collectives == len(params)
        assert {name: array[0] for name, array in full.items()} == {"A": 8, "B": 10, "C": 15}


def test_g7_buckets_launch_in_plan_order_whatever_arrives_first(
    make_params: Callable[..., Any], reduce_cycle: Callable[..., Any]
) -> None:
    """Collectives were launched on local readiness: ranks pair the wrong ones."""
    params = make_params(3, 3, 3, 3)  # alike, so that nothing but the order tells them apart

    def reduce(world: World) -> dict[str, Any]:
        order = ((0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0))[world.rank]
        grads = {f"p{i}": ones(3, 10**i) for i in order}
        return reduce_cycle(world, params, grads, bucket_bytes=1, op="sum")

    for full in run_local(3, reduce):
        assert [full[f"p{i}"][0] for i in range(4)] == [3, 30, 300, 3000]


@pytest.mark.limit(20)
@pytest.mark.parametrize(
    ("given", "numels"),
    [
        pytest.param({0: "ab", 1: "ba"}, (3, 3), id="swapped"),
        pytest.param({0: "ab", 1: "ba"}, (3, 4), id="swapped-padded-alike"),
        pytest.param({0: "ab", 1: "ba"}, (3, 40), id="swapped-unlike"),
        pytest.param({0: "ab", 1: "a"}, (3, 3), id="one-fewer"),
        pytest.param({0: "ab", 1: "b"}, (3, 3), id="the-first-fewer"),
    ],
)
def test_g7_policy_arrival_refuses_ranks_that_differ(
    given: dict[int, str], numels: tuple[int, int]
) -> None:
    """Ranks that bucket in arrival order mix up two parameters, or hang, and nobody is told."""
    params = [ParamSpec(name, (n,), "float32") for name, n in zip("ab", numels, strict=True)]
    shapes = {spec.name: spec.shape for spec in params}

    def step(reducer: Reducer, names: str) -> None:
        with reducer.backward():
            for name in names:
                reducer.reduce_grad(name, ones(*shapes[name]))
        reducer.wait()

    def reduce(world: World) -> ReduceError | None:
        reducer = Reducer(Registry(params, world), policy="arrival")
        try:
            step(reducer, given[world.rank])
            step(reducer, "ab")  # told now, at the latest
        except ReduceError as error:
            return error
        return None

    errors = run_local(2, reduce)
    assert all(isinstance(error, MismatchError | CommunicationError) for error in errors), errors


@pytest.mark.parametrize("policy", POLICIES)
def test_g11_an_unfrozen_parameter_needs_a_new_registry(
    make_params: Callable[..., Any], policy: str
) -> None:
    """Frozen at start, unfrozen later: it never learns, and there is no message."""

    def reduce(world: World) -> tuple[int, int, dict[str, Any]]:
        registry = Registry(make_params(3), world)
        with Reducer(registry, policy=policy) as reducer:
            for _ in range(2):
                with reducer.backward():
                    reducer.reduce_grad("p0", ones(3))
                reducer.wait()
            with reducer.backward():
                reducer.reduce_grad("p0", ones(3))
                with pytest.raises(GradientError, match=r"'p1'.*build a new registry"):
                    reducer.reduce_grad("p1", ones(2000, world.rank))
            frozen = reducer.statistics()
            assert registry.gather(reducer.wait())["p0"].tolist() == [1, 1, 1]
        registry = Registry(make_params(3, 2000), world)
        with Reducer(registry, policy=policy) as reducer:
            with reducer.backward():
                reducer.reduce_grad("p0", ones(3))
                reducer.reduce_grad("p1", ones(2000, world.rank))
            full = registry.gather(reducer.wait())
            with reducer.backward():
                reducer.reduce_grad("p0", ones(3))  # all ranks freeze p1 again
            again = registry.gather(reducer.wait())
            assert again["p1"].tolist() == [0] * 2000
            return frozen.shard_bytes, frozen.buffer_bytes, full

    for shard_bytes, buffer_bytes, full in run_local(2, reduce):
        assert shard_bytes + buffer_bytes < 1000  # no memory for what is frozen
        assert full["p1"].tolist() == [0.5] * 2000


BASE = [ParamSpec("p", (4,), "float32"), ParamSpec("q", (2,), "float32")]


def refusals(world_size: int, build: Callable[[World], object]) -> list[ReduceError]:
    """Return what each rank raises while it builds."""

    def run(world: World) -> ReduceError | None:
        try:
            build(world)
        except ReduceError as error:
            return error
        return None

    return run_local(world_size, run)


@pytest.mark.limit(10)
@pytest.mark.parametrize(
    ("params", "words"),
    [
        pytest.param(
            [ParamSpec("p", (8,), "float32"), BASE[1]], ["'p'", "(4,)", "(8,)"], id="shape"
        ),
        pytest.param(BASE[:1], ["'q'", "(nothing)"], id="one-fewer-at-the-end"),
        pytest.param(BASE[1:], ["'p'", "'q'"], id="one-fewer-at-the-start"),
        pytest.param([*BASE, ParamSpec("r", (1,), "int8")], ["'r'", "(nothing)"], id="one-more"),
        pytest.param(
            [ParamSpec("p", (4,), "bfloat16"), BASE[1]], ["'p'", "float32", "bfloat16"], id="dtype"
        ),
        pytest.param(
            [ParamSpec("p", (4,), "float32", uses="many"), BASE[1]],
            ["'p'", "uses='once'", "uses='many'"],
            id="uses",
        ),
        pytest.param(BASE[::-1], ["'p'", "'q'"], id="order"),
    ],
)
def test_h1_other_parameters_are_an_error_on_all_ranks(
    params: list[ParamSpec], words: list[str]
) -> None:
    """Ranks registered different numbers or shapes; only some report, the others hang."""
    errors = refusals(3, lambda w: Registry(params if w.rank == 1 else BASE, w, bucket_bytes=64))
    for error in errors:
        assert type(error) is MismatchError
        for word in [*words, "ranks 0, 2: ", "rank 1: "]:
            assert word in str(error)


@pytest.mark.limit(10)
def test_h1_another_bucket_size_is_an_error_on_all_ranks() -> None:
    """Ranks cut other buckets."""
    errors = refusals(3, lambda w: Registry(BASE, w, bucket_bytes=32 if w.rank == 1 else 64))
    for error in errors:
        assert type(error) is MismatchError
        assert "ranks 0, 2: bucket_bytes=64; rank 1: bucket_bytes=32" in str(error)


@pytest.mark.limit(10)
@pytest.mark.parametrize(
    ("option", "usual", "other"),
    [
        ("op", "mean", "sum"),
        ("policy", "planned", "arrival"),
        ("missing", "zero", "error"),
        ("max_buffers", 2, 3),
    ],
)
def test_h1_other_options_are_an_error_on_all_ranks(option: str, usual: Any, other: Any) -> None:
    """Ranks reduce in another way."""

    def build(world: World) -> None:
        registry = Registry(BASE, world)
        try:
            Reducer(registry, **{option: other if world.rank == 1 else usual})
        finally:
            Reducer(registry).close()  # a refused reducer leaves the registry free

    for error in refusals(3, build):
        assert type(error) is MismatchError
        for word in ("ranks 0, 2: ", "rank 1: ", f"{option}={usual!r}", f"{option}={other!r}"):
            assert word in str(error)


@pytest.mark.limit(10)
def test_h1_a_rank_that_is_refused_tells_its_peers() -> None:
    """One rank gives what cannot work: it has its own error, the others learn of it."""
    errors = refusals(3, lambda w: Registry(BASE, w, bucket_bytes=0 if w.rank == 1 else 64))
    assert type(errors[1]) is LayoutError
    for error in (errors[0], errors[2]):
        assert type(error) is MismatchError
        assert "rank 1: refused: bucket_bytes must be an integer >= 1, not 0" in str(error)


@pytest.mark.limit(10)
def test_h3_a_missing_gradient_is_an_error_on_all_ranks_if_asked(
    make_params: Callable[..., Any],
) -> None:
    """Different unused sets on ranks cause a late hang."""

    def reduce(world: World) -> tuple[str, dict[str, Any]]:
        registry = Registry(make_params(3, 2, 2), world)
        with Reducer(registry, missing="error") as reducer:
            with pytest.raises(MismatchError) as caught, reducer.backward():  # noqa: PT012
                reducer.reduce_grad("p0", ones(3))
                if world.rank == 0:
                    reducer.reduce_grad("p1", ones(2))
                reducer.skip_grad("p2")
            with pytest.raises(ProtocolError, match=r"discard\(\)"):
                reducer.wait()
            reducer.discard()
            with reducer.backward():
                reducer.reduce_grad("p0", ones(3))
                reducer.reduce_grad("p1", ones(2, 4 * world.rank))
                reducer.skip_grad("p2")
            return str(caught.value), registry.gather(reducer.wait())

    for rank, (text, full) in enumerate(run_local(2, reduce)):
        for word in ("rank 1: ", "'p1'", "skip_grad()", f"[rank {rank} of 2, step 1]"):
            assert word in text
        assert "'p2'" not in text
        assert "rank 0: " not in text
        assert [array[0] for array in full.values()] == [1, 2, 0]


@pytest.mark.parametrize("policy", POLICIES)
def test_k9_a_device_pointer_never_reaches_the_host_collectives(
    make_params: Callable[..., Any], policy: str
) -> None:
    """A GPU array given to an MPI that is not CUDA-aware: a crash, or random values."""

    def reduce(world: World) -> np.ndarray:
        registry = Registry(make_params(3), world)
        with Reducer(registry, policy=policy) as reducer:
            with reducer.backward():
                with pytest.raises(GradientError, match=r"'p0'.*cuda:0.*connect\('cuda'\)"):
                    reducer.reduce_grad("p0", Producer(ones(3), device_type=CUDA))
                reducer.reduce_grad("p0", ones(3))
            shards = reducer.wait()
            with pytest.raises(LayoutError, match=r"'p0'.*cuda:0.*connect\('cuda'\)"):
                registry.gather({"p0": Producer(shards["p0"], device_type=CUDA)})
            return registry.gather(shards)["p0"]

    for full in run_local(2, reduce):
        assert bits(full) == bits(ones(3))


K11 = """
import multiprocessing
import sys

def loaded(_):
    import cupynccl_reduce
    return sorted({"mpi4py", "cupy", "torch", "numpy"} & set(sys.modules))

if __name__ == "__main__":
    import cupynccl_reduce
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(loaded, [0]))
"""


def test_k11_a_spawned_worker_may_import_the_package(
    run_python: Callable[..., Any], tmp_path: Any
) -> None:
    """Spawned loader workers import the package again, which calls MPI_Init: abort."""
    (tmp_path / "train.py").write_text(K11)
    launched = {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }
    source = f"import runpy; runpy.run_path({str(tmp_path / 'train.py')!r}, run_name='__main__')"
    done = run_python(source, env=launched)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[[]]\n", "")
