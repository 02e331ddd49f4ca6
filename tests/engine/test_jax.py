"""Gradients of JAX: jitted or not, of any shape, computed or on their way; others are named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import cupynccl_reduce as cr

jax = pytest.importorskip("jax", reason="the test extra brings jax")
jnp = jax.numpy

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPES = {"scalar": (), "none": (0, 3), "row": (7,), "matrix": (5, 4)}


def loss_of(params: dict[str, Any], x: Any) -> Any:
    """Return a loss whose gradients are x, times small integers."""
    return sum((i + 1) * x * params[name].sum() for i, name in enumerate(SHAPES))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("wrap", [jax.jit, lambda function: function])
def test_a_tree_of_gradients(dtype: str, world_size: int, wrap: Callable[[Any], Any]) -> None:
    def work(world: cr.World) -> dict[str, Any]:
        params = {name: jnp.ones(shape, dtype) for name, shape in SHAPES.items()}
        specs = [cr.ParamSpec(name, p.shape, str(p.dtype)) for name, p in params.items()]
        registry = cr.Registry(specs, world, bucket_bytes=32)
        gradient = wrap(jax.grad(loss_of))
        with cr.Reducer(registry, op="sum") as reducer:
            for step in range(3):
                grads = gradient(params, jnp.asarray(step + world.rank, dtype))
                with reducer.backward():
                    for name, grad in grads.items():
                        reducer.reduce_grad(name, grad)
                full = registry.gather(reducer.wait())
            return full

    total = sum(2 + rank for rank in range(world_size))
    for full in cr.run_local(world_size, work):
        for i, (name, shape) in enumerate(SHAPES.items()):
            assert np.array_equal(full[name], np.full(shape, (i + 1) * total)), name


def test_work_that_jax_has_only_queued_is_waited_for() -> None:
    def work(world: cr.World) -> Any:
        registry = cr.Registry([cr.ParamSpec("p", (300, 300), "float32")], world)
        slow = jax.jit(lambda x: jax.lax.fori_loop(0, 30, lambda _, y: (y @ x) / 300, x))
        with cr.Reducer(registry, op="sum") as reducer:
            with reducer.backward():
                reducer.reduce_grad("p", slow(jnp.ones((300, 300))))
            return registry.gather(reducer.wait())["p"]

    for full in cr.run_local(2, work):
        np.testing.assert_allclose(full, 2.0, rtol=1e-4)


def deleted() -> Any:
    array = jnp.ones(7)
    array.delete()
    return array


def traced() -> Any:
    found: list[Any] = []
    jax.make_jaxpr(found.append)(jnp.ones(7))
    return found[0]


@pytest.mark.parametrize("make", [deleted, traced, lambda: jnp.ones(7, jnp.complex64)])
def test_what_is_no_gradient_is_refused_by_name(make: Callable[[], Any]) -> None:
    def work(world: cr.World) -> None:
        registry = cr.Registry([cr.ParamSpec("p", (7,), "float32")], world)
        with cr.Reducer(registry, op="sum") as reducer:
            with reducer.backward():
                with pytest.raises(cr.GradientError, match="parameter 'p'"):
                    reducer.reduce_grad("p", make())
                reducer.reduce_grad("p", jnp.ones(7))
            assert np.array_equal(registry.gather(reducer.wait())["p"], np.full(7, 2.0))

    cr.run_local(2, work)
