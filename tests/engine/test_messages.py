"""G3: what users read. Every error about a parameter names it, shape, dtype, rank and step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from producers import CUDA, Producer
from strategies import numpy_dtype

from cupynccl_reduce import ParamSpec, ReduceError, Reducer, Registry, run_local

if TYPE_CHECKING:
    from collections.abc import Callable

    from cupynccl_reduce import World

PARAMS = [
    ParamSpec("wte", (4, 3), "float32"),
    ParamSpec("bias", (), "bfloat16"),
    ParamSpec("head", (2,), "float32"),
    ParamSpec("tied", (2,), "float16", uses="many"),
]
DTYPES = "float16, bfloat16, float32, float64, int8, uint8, int32, uint32, int64, uint64"
WTE = "parameter 'wte' float32 (4, 3): "
BIAS = "parameter 'bias' bfloat16 (): "
HEAD = "parameter 'head' float32 (2,): "
UNKNOWN = "parameter 'lm_head': "
PLACE = " [rank 1 of 2, step 2]"


def requires_grad(*shape: int) -> Any:
    import torch

    return torch.ones(shape, requires_grad=True)


MESSAGES: dict[str, tuple[Callable[[Reducer], object], str]] = {
    "unknown-name": (
        lambda r: r.reduce_grad("lm_head", np.ones(2, "f4")),
        UNKNOWN + "not among the 4 of the registry; "
        "build a new registry that holds it (one that was frozen before needs that too)",
    ),
    "shape": (
        lambda r: r.reduce_grad("wte", np.ones((3, 4), "f4")),
        WTE + "the gradient is float32 (3, 4); hand over what is registered",
    ),
    "dtype": (
        lambda r: r.reduce_grad("bias", np.array(1, "f2")),
        BIAS + "the gradient is float16 (); hand over what is registered",
    ),
    "device": (
        lambda r: r.reduce_grad("wte", Producer(np.ones((4, 3), "f4"), device_type=CUDA)),
        WTE + "it lies on cuda:0, but this world's runtime is 'host'; use connect('cuda'), "
        "or copy it to the host",
    ),
    "complex": (
        lambda r: r.reduce_grad("wte", np.ones((4, 3), "c8")),
        WTE + "numpy.ndarray has unsupported dtype complex64 (DLPack code 5, 64 bits, 1 lanes); "
        f"cast it to one of {DTYPES}",
    ),
    "a-float": (
        lambda r: r.reduce_grad("bias", 0.5),
        BIAS + "float is not an array: it has no __dlpack__; "
        "hand over an array, or for a number a 0-dim array",
    ),
    "requires-grad": (
        lambda r: r.reduce_grad("wte", requires_grad(4, 3)),
        WTE + "torch.Tensor requires grad, so it is no plain gradient; "
        "hand over p.grad of a parameter p, or .detach() of the tensor",
    ),
    "second-arrival": (
        lambda r: r.reduce_grad("head", np.ones(2, "f4")),
        HEAD + "it arrived twice in one backward; "
        "ParamSpec(uses='many') sums such gradients (torch: attach(uses_many=[...]))",
    ),
    "after-its-skip": (
        lambda r: (r.skip_grad("wte"), r.reduce_grad("wte", np.ones((4, 3), "f4"))),
        WTE + "skip_grad() said that none would come in this backward",
    ),
    "after-a-flush": (
        lambda r: (r.flush(), r.reduce_grad("wte", np.ones((4, 3), "f4"))),
        WTE + "its bucket was launched already; it must come before flush()",
    ),
}


@pytest.mark.parametrize(("call", "message"), MESSAGES.values(), ids=MESSAGES)
def test_g3_the_message_of_a_refused_gradient(
    call: Callable[[Reducer], object], message: str
) -> None:
    """The error shows an internal number."""

    def run(world: World) -> str:
        with Reducer(Registry(PARAMS, world)) as reducer:
            with reducer.backward():
                pass
            reducer.wait()
            with reducer.backward():
                reducer.reduce_grad("head", np.ones(2, "f4"))
                with pytest.raises(ReduceError) as caught:
                    call(reducer)
            return str(caught.value)

    assert run_local(2, run)[1] == message + PLACE


def test_g3_the_message_of_a_gradient_outside_backward() -> None:
    """It arrives in a hook, far from the mistake."""

    def run(world: World) -> str:
        with Reducer(Registry(PARAMS, world)) as reducer:
            for _ in range(2):
                with reducer.backward():
                    pass
                reducer.wait()
            with pytest.raises(ReduceError) as caught:
                reducer.reduce_grad("head", np.ones(2, "f4"))
            return str(caught.value)

    assert run_local(2, run)[1] == (
        HEAD
        + "a gradient outside backward(): hand it over inside `with reducer.backward():`"
        + PLACE
    )


def test_g3_the_message_of_missing_gradients() -> None:
    """Which ones, and on which rank."""

    def run(world: World) -> str:
        with Reducer(Registry(PARAMS, world), missing="error") as reducer:
            with pytest.raises(ReduceError) as caught, reducer.backward():  # noqa: PT012
                for name in ("wte", "head", "tied")[: 3 - world.rank]:
                    reducer.skip_grad(name)
                reducer.reduce_grad("bias", np.array(1, numpy_dtype("bfloat16")))
            return str(caught.value)

    assert run_local(3, run)[1] == (
        "missing='error', and gradients are missing: rank 1: 'tied'; rank 2: 'head', 'tied'; "
        "skip_grad() allows it [rank 1 of 3, step 1]"
    )
