"""Linear regression with AdamW on shards, without a framework: NumPy on the host, CuPy on GPUs.

mpirun -n 2 python -m mpi4py scripts/example_arrays.py
"""

import sys
from importlib import import_module

import cupynccl_reduce as cr

STEPS = 300
ROWS = 64  # of data on each rank in each step
RATE, BETAS, EPSILON, DECAY = 0.3, (0.9, 0.95), 1e-8, 1e-7
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
        # This rank's slices of the parameters, and of AdamW's two moments.
        shards = {name: xp.zeros(p.stop - p.start, "float32") for name, p in registry.items()}
        first, second = ({name: xp.zeros_like(s) for name, s in shards.items()} for _ in "ab")
        data = xp.random.default_rng(world.rank)

        with cr.Reducer(registry) as reducer:
            for step in range(1, STEPS + 1):
                full = registry.gather(shards)
                x = data.standard_normal((ROWS, 7), dtype="float32")
                error = x @ (full["weight"] - truth["weight"]) + full["bias"] - truth["bias"]
                with reducer.backward():
                    reducer.reduce_grad("bias", 2 * error.mean(0))
                    reducer.reduce_grad("weight", 2 / ROWS * x.T @ error)
                for name, grad in reducer.wait().items():
                    first[name] += (1 - BETAS[0]) * (grad - first[name])
                    second[name] += (1 - BETAS[1]) * (grad * grad - second[name])
                    mean = first[name] / (1 - BETAS[0] ** step)
                    size = xp.sqrt(second[name] / (1 - BETAS[1] ** step)) + EPSILON
                    rate = RATE * (1 - step / STEPS) ** 3
                    shards[name] -= rate * (mean / size + DECAY * shards[name])

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
