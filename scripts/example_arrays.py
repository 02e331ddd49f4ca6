"""Linear regression with SGD on shards, without a framework: NumPy on the host, CuPy on GPUs.

mpirun -n 2 python -m mpi4py scripts/example_arrays.py
"""

import sys
from importlib import import_module

import cupynccl_reduce as cr

STEPS = 200
ROWS = 64  # of data on each rank in each step
RATE = 0.1
LIMIT = 1e-5


def main() -> None:
    """Fit a known line from noiseless data; print how close it came."""
    with cr.connect() as world:
        xp = import_module("cupy" if world.runtime.kind == "cuda" else "numpy")
        truth = {
            "weight": xp.arange(21, dtype="float32").reshape(7, 3) / 10,
            "bias": xp.array([1, -2, 3], "float32"),
        }
        registry = cr.Registry(
            [cr.ParamSpec(name, array.shape, "float32") for name, array in truth.items()], world
        )
        # This rank's slices of the parameters. An optimizer's state would have the same shapes.
        shards = {name: xp.zeros(p.stop - p.start, "float32") for name, p in registry.items()}
        data = xp.random.default_rng(world.rank)

        with cr.Reducer(registry) as reducer:
            for _ in range(STEPS):
                full = registry.gather(shards)
                x = data.standard_normal((ROWS, 7), dtype="float32")
                error = x @ (full["weight"] - truth["weight"]) + full["bias"] - truth["bias"]
                with reducer.backward():
                    reducer.reduce_grad("bias", 2 * error.mean(0))
                    reducer.reduce_grad("weight", 2 / ROWS * x.T @ error)
                for name, grad in reducer.wait().items():
                    shards[name] -= RATE * grad

        full = registry.gather(shards)
        max_error = max(float(abs(full[name] - truth[name]).max()) for name in truth)
        verdict = "OK" if max_error < LIMIT else "FAILED"
        if world.rank == 0:
            print(
                f"example_arrays: {verdict} world={world.world_size} "
                f"runtime={world.runtime.kind} max_error={max_error:.1e}"
            )
    if verdict != "OK":
        sys.exit(1)


if __name__ == "__main__":
    main()
