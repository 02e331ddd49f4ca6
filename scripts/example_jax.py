"""A small network trained with jax.grad and SGD on shards, on CPUs or GPUs.

mpirun -n 2 python -m mpi4py scripts/example_jax.py

The tree of gradients goes in as it is: leaves are named by their paths. Shards come back as copies.
"""

import os
import sys

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave memory to the library

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_flatten_with_path, tree_map_with_path

import cupynccl_reduce as cr

STEPS, ROWS, RATE = 300, 64, 0.05


def loss_of(params: dict, x: jax.Array) -> jax.Array:
    """Return how far the network is from the sum of each row's squares."""
    hidden = jnp.tanh(x @ params["hidden"]["weight"] + params["hidden"]["bias"])
    return jnp.mean((hidden @ params["out"] - jnp.sum(x * x, 1)) ** 2)


def copy_of(array: object) -> jax.Array:
    """Return a copy that is there: JAX copies when it likes, and the library writes again soon."""
    return jnp.array(jnp.from_dlpack(array)).block_until_ready()


def main() -> None:
    """Train on other rows on every rank; print the loss before and after."""
    with cr.connect() as world:
        keys = jax.random.split(jax.random.key(0), 2)
        hidden = {"weight": jax.random.normal(keys[0], (3, 32)), "bias": jnp.zeros(32)}
        params = {"hidden": hidden, "out": jax.random.normal(keys[1], (32,)) / 32}
        leaves = [(keystr(path), leaf) for path, leaf in tree_flatten_with_path(params)[0]]
        specs = [cr.ParamSpec(name, leaf.shape, str(leaf.dtype)) for name, leaf in leaves]
        registry = cr.Registry(specs, world)
        shards = {n: leaf.reshape(-1)[registry[n].start : registry[n].stop] for n, leaf in leaves}
        test = jax.random.normal(jax.random.key(1), (ROWS, 3))
        gradient, first = jax.jit(jax.grad(loss_of)), float(loss_of(params, test))

        with cr.Reducer(registry) as reducer:
            for step in range(STEPS):
                key = jax.random.key(2 + step * world.world_size + world.rank)
                grads = gradient(params, jax.random.normal(key, (ROWS, 3)))
                with reducer.backward():
                    for path, grad in reversed(tree_flatten_with_path(grads)[0]):
                        reducer.reduce_grad(keystr(path), grad)
                for name, reduced in reducer.wait().items():
                    shards[name] = shards[name] - RATE * copy_of(reduced)
                full = registry.gather(shards)
                params = tree_map_with_path(lambda path, _: copy_of(full[keystr(path)]), params)  # noqa: B023

        last = float(loss_of(params, test))
        verdict = "OK" if last < first / 4 else "FAILED"
        if world.rank == 0:
            print(
                f"example_jax: {verdict} world={world.world_size} "
                f"runtime={world.runtime.kind} loss={first:.2f} to {last:.2f}"
            )
    if verdict != "OK":
        sys.exit(1)


if __name__ == "__main__":
    main()
