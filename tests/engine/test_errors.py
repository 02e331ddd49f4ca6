"""Bad input: a typed error that says what to do, no change of state, and an exact step after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from producers import CUDA, Producer
from strategies import bits

from cupynccl_reduce import (
    GradientError,
    GradientTypeError,
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
PARAMS = [
    ParamSpec("given", (3,), "float32"),
    ParamSpec("skipped", (2,), "float32"),
    ParamSpec("absent", (2, 3), "float32"),
    ParamSpec("many", (2,), "float32", uses="many"),
]


def array(*shape: int, dtype: Any = "f4") -> np.ndarray:
    return np.ones(shape, dtype)


def sparse() -> Any:
    import torch

    return torch.ones(2, 3).to_sparse()


def requires_grad() -> Any:
    import torch

    return torch.ones(2, 3, requires_grad=True)


def on_no_device() -> Any:
    import torch

    return torch.ones(2, 3, device="meta")


def nested_backward(reducer: Reducer) -> None:
    with reducer.backward():
        pass


def other_reducer(reducer: Reducer) -> None:
    other = Reducer(Registry(PARAMS, reducer._world))
    try:
        nested_backward(other)
    finally:
        other.close()


INSIDE: list[Any] = [
    # what is done inside backward, the error's type, and what its text must hold
    pytest.param(
        lambda r: r.reduce_grad("nobody", array(3)),
        GradientError,
        ["'nobody'", "build a new registry"],
        id="unknown-name",
    ),
    pytest.param(lambda r: r.skip_grad("nobody"), GradientError, ["'nobody'"], id="unknown-skip"),
    pytest.param(
        lambda r: r.reduce_grad(array(2, 3), "absent"),
        GradientError,
        [],
        id="name-and-gradient-swapped",
    ),
    pytest.param(lambda r: r.reduce_grad(["absent"], array(2, 3)), GradientError, [], id="a-list"),
    pytest.param(
        lambda r: r.reduce_grad("absent", array(3, 2)),
        GradientError,
        ["'absent' float32 (2, 3)", "float32 (3, 2)"],
        id="transposed",
    ),
    pytest.param(
        lambda r: r.reduce_grad("absent", array(6)),
        GradientError,
        ["'absent' float32 (2, 3)", "(6,)"],
        id="flat",
    ),
    pytest.param(
        lambda r: r.reduce_grad("absent", array(0)), GradientError, ["(0,)"], id="no-elements"
    ),
    pytest.param(
        lambda r: r.reduce_grad("absent", array(2, 3, dtype="f8")),
        GradientError,
        ["'absent' float32 (2, 3)", "float64 (2, 3)"],
        id="float64",
    ),
    pytest.param(
        lambda r: r.reduce_grad("absent", array(2, 3, dtype="i4")),
        GradientError,
        ["int32 (2, 3)"],
        id="integers",
    ),
    pytest.param(
        lambda r: r.reduce_grad("absent", array(2, 3, dtype=ml_dtypes.bfloat16)),
        GradientError,
        ["bfloat16 (2, 3)"],
        id="bfloat16",
    ),
    pytest.param(
        lambda r: r.reduce_grad("absent", Producer(array(2, 3), device_type=CUDA)),
        GradientError,
        ["cuda:0", "connect('cuda')"],
        id="on-a-gpu",
    ),
    pytest.param(
        lambda r: r.reduce_grad("absent", Producer(array(2, 3), device_type=10)),
        GradientTypeError,
        ["device type 10"],
        id="on-an-unknown-device",
    ),
    pytest.param(
        lambda r: r.reduce_grad("absent", array(2, 3, dtype="c8")),
        GradientTypeError,
        ["complex64", "cast it to one of float16, bfloat16"],
        id="complex",
    ),
    pytest.param(
        lambda r: r.reduce_grad("absent", array(2, 3, dtype="?")),
        GradientTypeError,
        ["bool", "cast it to one of float16, bfloat16"],
        id="bool",
    ),
    pytest.param(
        lambda r: r.reduce_grad("absent", array(2, 3, dtype=object)),
        GradientTypeError,
        ["float16, bfloat16, float32"],
        id="objects",
    ),
    pytest.param(
        lambda r: r.reduce_grad("absent", array(2, 3, dtype=ml_dtypes.float8_e5m2)),
        GradientTypeError,
        ["float16, bfloat16, float32"],
        id="float8",
    ),
    pytest.param(
        lambda r: r.reduce_grad("absent", array(2, 3, dtype=">f4")),
        GradientTypeError,
        ["byte order"],
        id="big-endian",
    ),
    pytest.param(
        lambda r: r.reduce_grad("absent", sparse()), GradientTypeError, ["to_dense()"], id="sparse"
    ),
    pytest.param(
        lambda r: r.reduce_grad("absent", on_no_device()), GradientTypeError, ["meta"], id="meta"
    ),
    pytest.param(
        lambda r: r.reduce_grad("absent", requires_grad()),
        GradientError,
        ["requires grad", "detach()"],
        id="requires-grad",
    ),
    pytest.param(
        lambda r: r.reduce_grad("absent", 1.5), GradientTypeError, ["float", "0-dim"], id="a-float"
    ),
    pytest.param(
        lambda r: r.reduce_grad("absent", [[1.0] * 3] * 2),
        GradientTypeError,
        ["list"],
        id="a-nested-list",
    ),
    pytest.param(
        lambda r: r.reduce_grad("absent", None), GradientTypeError, ["NoneType"], id="none"
    ),
    pytest.param(
        lambda r: r.reduce_grad("given", array(3)),
        ProtocolError,
        ["'given' float32 (3,)", "twice", "uses='many'"],
        id="second-arrival",
    ),
    pytest.param(
        lambda r: r.reduce_grad("skipped", array(2)),
        ProtocolError,
        ["'skipped' float32 (2,)", "skip_grad()"],
        id="gradient-after-skip",
    ),
    pytest.param(
        lambda r: r.skip_grad("given"),
        ProtocolError,
        ["'given' float32 (3,)", "skip_grad()"],
        id="skip-after-gradient",
    ),
    pytest.param(
        lambda r: r.skip_grad("many"),
        ProtocolError,
        ["'many' float32 (2,)", "skip_grad()"],
        id="skip-after-one-of-many",
    ),
    pytest.param(lambda r: r.skip_grad("skipped"), ProtocolError, ["skip_grad()"], id="skip-twice"),
    pytest.param(Reducer.wait, ProtocolError, ["wait() inside backward()"], id="wait"),
    pytest.param(Reducer.discard, ProtocolError, ["inside backward()"], id="discard"),
    pytest.param(Reducer.close, ProtocolError, ["inside backward()"], id="close"),
    pytest.param(nested_backward, ProtocolError, ["backward() inside backward()"], id="nested"),
    pytest.param(other_reducer, ProtocolError, ["another reducer"], id="other-reducer"),
    pytest.param(
        lambda r: Reducer(r._registry), ProtocolError, ["has a reducer", "close()"], id="second"
    ),
]


def snapshot(reducer: Reducer) -> tuple[Any, ...]:
    """Return all that a refused call must leave as it is."""
    shards = {name: bits(array) for name, array in reducer._registry.shards.items()}
    return reducer.statistics(), reducer._intake.names, reducer._policy.missing(), shards


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("call", "kind", "words"), INSIDE)
def test_a_refused_call_inside_backward_changes_nothing(
    call: Callable[[Reducer], object],
    kind: type[ReduceError],
    words: list[str],
    policy: str,
    bucket_bytes: int,
) -> None:
    def run(world: World) -> tuple[ReduceError, dict[str, Any]]:
        registry = Registry(PARAMS, world, bucket_bytes=bucket_bytes)
        with Reducer(registry, op="sum", policy=policy) as reducer:
            for backward in range(2):
                with reducer.backward():
                    reducer.skip_grad("skipped")
                    reducer.reduce_grad("given", array(3))
                    reducer.reduce_grad("many", array(2))
                    if backward:
                        reducer.synchronize()  # so that what is in flight does not change by itself
                        before = snapshot(reducer)
                        with pytest.raises(ReduceError) as caught:
                            call(reducer)
                        assert snapshot(reducer) == before
                    reducer.reduce_grad("many", array(2))
                    reducer.reduce_grad("absent", array(2, 3))
            return caught.value, registry.gather(reducer.wait())

    for rank, (error, full) in enumerate(run_local(2, run)):
        assert type(error) is kind
        for word in words:
            assert word in str(error)
        if "this registry has a reducer" not in str(error):
            assert str(error).count(f"[rank {rank} of 2, step ") == 1
        assert {name: set(a.flat) for name, a in full.items()} == {
            "given": {4},
            "skipped": {0},
            "absent": {4},
            "many": {8},
        }


@pytest.mark.parametrize("policy", POLICIES)
def test_an_error_of_one_rank_alone_leaves_the_step_exact(policy: str) -> None:
    def run(world: World) -> dict[str, Any]:
        registry = Registry(PARAMS, world)
        with Reducer(registry, op="sum", policy=policy) as reducer:
            with reducer.backward():
                if world.rank == 1:
                    for grad in (array(4), 1.0, array(3, dtype="c8"), None):
                        with pytest.raises(GradientError, match="'given'"):
                            reducer.reduce_grad("given", grad)
                reducer.reduce_grad("given", array(3))
            return registry.gather(reducer.wait())

    for full in run_local(3, run):
        assert bits(full["given"]) == bits(np.full(3, 3, "f4"))


def test_skip_after_a_gradient_is_not_called_a_second_arrival() -> None:
    """The remedy of a second arrival, uses='many', would not help."""

    def run(world: World) -> None:
        with Reducer(Registry(PARAMS, world)) as reducer, reducer.backward():
            for name, numel in (("given", 3), ("many", 2)):
                reducer.reduce_grad(name, array(numel))
                with pytest.raises(ProtocolError) as caught:
                    reducer.skip_grad(name)
                assert "uses='many'" not in str(caught.value)

    run_local(1, run)


@pytest.mark.parametrize("call", ["reduce_grad", "skip_grad"])
@pytest.mark.parametrize("name", ["skipped", "absent"])
def test_what_comes_too_late_is_told_why(name: str, call: str) -> None:
    """skip_grad() or flush(): whichever it was."""

    def run(world: World) -> None:
        registry = Registry(PARAMS, world, bucket_bytes=1)
        with Reducer(registry) as reducer, reducer.backward():
            reducer.skip_grad("skipped")
            reducer.skip_grad("many")
            reducer.flush()
            grad = [array(*registry[name].spec.shape)] if call == "reduce_grad" else []
            with pytest.raises(ProtocolError) as caught:
                getattr(reducer, call)(name, *grad)
            culprit, other = "skip_grad()", "flush()"
            if name == "absent":
                culprit, other = other, culprit
            assert culprit in str(caught.value)
            assert other not in str(caught.value)

    run_local(1, run)


def test_a_gradient_used_many_times_that_comes_after_flush_is_told_so() -> None:
    def run(world: World) -> None:
        with Reducer(Registry(PARAMS, world)) as reducer, reducer.backward():
            reducer.reduce_grad("many", array(2))
            reducer.flush()
            with pytest.raises(ProtocolError, match=r"'many'.*flush\(\)"):
                reducer.reduce_grad("many", array(2))

    run_local(1, run)


OUTSIDE: list[Any] = [
    pytest.param(
        lambda r: r.reduce_grad("given", array(3)),
        ["'given' float32 (3,)", "outside backward()", "with reducer.backward():"],
        id="gradient",
    ),
    pytest.param(
        lambda r: r.skip_grad("given"), ["'given' float32 (3,)", "outside backward()"], id="skip"
    ),
    pytest.param(lambda r: r.wait(stream="mine"), ["stream", "'mine'"], id="stream"),
    pytest.param(lambda r: r.wait_packed(stream=7), ["stream", "7"], id="packed-stream"),
    pytest.param(lambda r: Reducer(r._registry), ["has a reducer"], id="second-reducer"),
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("call", "words"), OUTSIDE)
def test_a_refused_call_between_backwards_changes_nothing(
    call: Callable[[Reducer], object], words: list[str], policy: str
) -> None:
    def run(world: World) -> dict[str, Any]:
        registry = Registry(PARAMS, world)
        with Reducer(registry, op="sum", policy=policy) as reducer:
            for value in (1, 2):
                with reducer.backward():
                    reducer.reduce_grad("given", np.full(3, value, "f4"))
                if value == 1:
                    reducer.synchronize()
                    before = snapshot(reducer)
                    with pytest.raises(ProtocolError) as caught:
                        call(reducer)
                    for word in words:
                        assert word in str(caught.value)
                    assert snapshot(reducer) == before
            return registry.gather(reducer.wait())

    for full in run_local(2, run):
        assert bits(full["given"]) == bits(np.full(3, 6, "f4"))  # the second one accumulated


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda r: r.reduce_grad("given", array(3)), ["'given'", "closed", "build another"]),
        (lambda r: r.skip_grad("given"), ["'given'", "closed"]),
        (nested_backward, ["closed"]),
        (Reducer.wait, ["closed"]),
        (Reducer.wait_packed, ["closed"]),
        (Reducer.flush, ["closed"]),
        (Reducer.discard, ["closed"]),
        (Reducer.synchronize, ["closed"]),
    ],
)
def test_nothing_can_be_done_after_close(
    call: Callable[[Reducer], object], words: list[str]
) -> None:
    def run(world: World) -> None:
        registry = Registry(PARAMS, world)
        reducer = Reducer(registry)
        nested_backward(reducer)
        reducer.wait()
        reducer.close()
        reducer.close()
        with pytest.raises(ProtocolError) as caught:
            call(reducer)
        for word in words:
            assert word in str(caught.value)
        assert str(caught.value).count("[rank 0 of 1, step 1]") == 1
        assert "CLOSED" in repr(reducer)
        with Reducer(registry) as after:  # the registry is free again
            with after.backward():
                after.reduce_grad("given", array(3))
            assert after.wait()["given"].tolist() == [1, 1, 1]

    run_local(1, run)


def test_wait_needs_a_cycle() -> None:
    def run(world: World) -> None:
        with Reducer(Registry(PARAMS, world)) as reducer:
            with pytest.raises(ProtocolError, match=r"no backward .*\[rank 0 of 1, step 0\]"):
                reducer.wait()
            nested_backward(reducer)
            reducer.discard()
            with pytest.raises(ProtocolError, match=r"discarded \[rank 0 of 1, step 1\]"):
                reducer.wait()
            reducer.discard()  # again: nothing happens
            nested_backward(reducer)
            assert reducer.wait()["given"].tolist() == [0, 0, 0]

    run_local(1, run)


def test_wait_packed_says_which_gradients_are_not_launched() -> None:
    def run(world: World) -> None:
        with Reducer(Registry(PARAMS, world)) as reducer:
            reducer.wait_packed()
            with reducer.backward():
                reducer.wait_packed()
                reducer.reduce_grad("given", array(3))
                before = snapshot(reducer)
                with pytest.raises(ProtocolError, match=r"'given'.*flush\(\) first.*step 1\]"):
                    reducer.wait_packed()
                assert snapshot(reducer) == before
                reducer.flush()
                reducer.wait_packed()

    run_local(2, run)
