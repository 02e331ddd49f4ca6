"""The prover: run a bucket plan through the simulator, under every schedule, and give a verdict."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynccl_reduce.errors import ReduceError
from cupynccl_reduce.layout import plan_buckets
from cupynccl_reduce.reducer import Reducer
from cupynccl_reduce.registry import Registry
from cupynccl_reduce.testing import Simulation

from .models import load_params, shrink
from .progress import draw

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cupynccl_reduce.layout import ParamSpec
    from cupynccl_reduce.membership import World

__all__ = ["run_prove"]

SCHEDULES = ("lazy", "eager", "random", "pct")
ELEMENTS = 20_000  # of all parameters together: order depends on the plan, not on its bytes


@dataclass(frozen=True, slots=True)
class _Workload:
    """One run's gradients: who hands over what, when and on which stream, as `seed` decides."""

    params: tuple[ParamSpec, ...]
    bucket_bytes: int
    seed: int

    def __call__(self, world: World) -> list[tuple[str, Any, int]]:
        """Run three cycles on one rank; return what was read of each shard, and its sum."""
        common = random.Random(self.seed)  # noqa: S311  # what all ranks do alike
        own = random.Random(f"{self.seed} {world.rank}")  # noqa: S311  # what they need not
        policy = "planned" if common.random() < 0.7 else "arrival"  # noqa: PLR2004
        registry = Registry(self.params, world, bucket_bytes=self.bucket_bytes)
        runtime: Any = world.runtime
        streams = [runtime.adopt(None), runtime.stream(), runtime.stream()]
        options = {"op": "sum", "policy": policy, "max_buffers": common.choice((1, 2, 2, 3))}
        readings, kept = [], []
        with Reducer(registry, **options) as reducer:  # type: ignore[arg-type]  # drawn above
            for _ in range(3):
                expected = dict.fromkeys(registry, 0)
                for _ in range(common.choice((1, 1, 2))):
                    with reducer.backward():
                        given = self._hand_over(reducer, runtime, streams, (common, own), policy)
                    if common.random() < 0.3:  # noqa: PLR2004
                        reducer.wait_packed(stream=own.choice(streams))
                    for name in given:
                        expected[name] += world.world_size * (world.world_size + 1) // 2
                # Read late, on side streams, and nobody synchronises: the next cycle has to wait.
                for stream in own.sample(streams, 2):
                    with runtime.use(stream):
                        for name, shard in reducer.wait(stream=stream).items():
                            readings.append((name, runtime.consume(shard), expected[name]))
                if common.random() < 0.5:  # noqa: PLR2004
                    stream = own.choice(streams)
                    full = registry.gather(reducer.wait(stream=stream), stream=stream)
                    kept.append(full)  # read on a stream that it was not allocated on
                    with runtime.use(stream):
                        for name, array in full.items():
                            readings.append((name, runtime.consume(array), expected[name]))
            for stream in streams:
                stream.synchronize()  # only here: what was read goes away with this function
        return readings

    def _hand_over(
        self,
        reducer: Reducer,
        runtime: Any,
        streams: Sequence[Any],
        draws: tuple[random.Random, random.Random],
        policy: str,
    ) -> list[str]:
        """Hand over most gradients, each on some stream; skip or leave out the rest."""
        common, own = draws
        missing = {spec.name for spec in self.params if common.random() < 0.1}  # noqa: PLR2004
        order = [spec for spec in reversed(self.params) if spec.name not in missing]
        (common if policy == "arrival" else own).shuffle(order)
        for spec in order:
            with runtime.use(own.choice(streams)):
                grad = runtime.produce(np.full(spec.shape, runtime.rank + 1), spec.dtype)
                reducer.reduce_grad(spec.name, grad)
                del grad  # free at once: the pool may hand it out again
        for name in sorted(missing):
            if own.random() < 0.5:  # noqa: PLR2004
                reducer.skip_grad(name)
        return [spec.name for spec in order]


def _check(values: Sequence[Any]) -> None:
    """Raise ReduceError for a reading that is not the sum (integers wrap around, as they do)."""
    for rank, readings in enumerate(values):
        for name, reading, total in readings:
            expected = np.array(total, np.int64).astype(reading.value.dtype)
            if not bool((reading.value == expected).all()):
                msg = f"rank {rank}: {name!r} holds {reading.value}, and the sum is {expected}"
                raise ReduceError(msg)


def run_prove(  # the command's own options
    *,
    model: str,
    dtype: str,
    world_size: int,
    runs: int,
    bucket_bytes: int,
    seed: int = 0,
    schedules: Sequence[str] = SCHEDULES,
) -> int:
    """Run `runs` simulations from `seed` on, spread over the schedules; print a line each.

    Returns 0 only if nothing was found.
    """
    params = load_params(model, dtype=dtype)
    plan = plan_buckets(params, world_size=world_size, bucket_bytes=bucket_bytes)
    small, (small_bytes,) = shrink(params, (bucket_bytes,), ELEMENTS)
    cut = plan_buckets(small, world_size=world_size, bucket_bytes=small_bytes)
    print(
        f"prove: {len(params)} parameters in {len(plan)} buckets on {world_size} ranks; "
        f"simulated with {sum(s.numel for s in small)} elements in {len(cut)} buckets"
    )
    found = 0
    for number, schedule in enumerate(schedules):
        seeds = range(seed + number, seed + runs, len(schedules))
        steps = overlaps = done = 0
        report = ""
        for one in seeds:
            draw(schedule, done, len(seeds))
            simulation = Simulation(world_size, seed=one, schedule=schedule)  # type: ignore[arg-type]
            done += 1
            try:
                result = simulation.run(_Workload(tuple(small), small_bytes, one))
                _check(result.values)
            except ReduceError as error:
                report = (
                    f"{type(error).__name__}: {error}\n  replay: cupynccl-reduce prove "
                    f"--model {model} --dtype {dtype} --world-size {world_size} --bucket-bytes "
                    f"{bucket_bytes} --schedule {schedule} --seed {one} --runs 1"
                )
                break  # the first is the one to mend
            steps += result.steps
            overlaps += result.overlaps
        draw("", 0, 0)
        if done:
            verdict = "FOUND" if report else "clean"
            print(f"{schedule:8} {verdict}  {done} runs, {steps} steps, {overlaps} overlaps")
        if report:
            found += 1
            print(report)
    print(f"prove: {'FAILED' if found else 'OK'} world={world_size} runs={runs} reports={found}")
    return 1 if found else 0
