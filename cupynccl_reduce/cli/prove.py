"""The prover: run a bucket plan through the simulator, under every schedule, and give a verdict."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynccl_reduce.dtypes import DTYPES
from cupynccl_reduce.errors import ReduceError
from cupynccl_reduce.layout import plan_buckets
from cupynccl_reduce.reducer import Reducer
from cupynccl_reduce.registry import Registry
from cupynccl_reduce.testing import Simulation

from .models import load_params

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cupynccl_reduce.layout import ParamSpec
    from cupynccl_reduce.protocols import World

__all__ = ["run_prove"]

SCHEDULES = ("lazy", "eager", "random", "pct")
ELEMENTS = 20_000  # of all parameters together: order depends on the plan, not on its bytes


@dataclass(frozen=True, slots=True)
class _Workload:
    """One run's gradients: who hands over what, when and on which stream, as `seed` decides."""

    params: tuple[ParamSpec, ...]
    bucket_bytes: int
    seed: int

    def __call__(self, world: World) -> None:
        """Run two cycles on one rank, and compare every shard with the sum."""
        common = random.Random(self.seed)  # noqa: S311  # what all ranks do alike
        own = random.Random(f"{self.seed} {world.rank}")  # noqa: S311  # what they need not
        policy = "planned" if common.random() < 0.7 else "arrival"  # noqa: PLR2004
        registry = Registry(self.params, world, bucket_bytes=self.bucket_bytes)
        runtime: Any = world.runtime
        streams = [runtime.adopt(None), runtime.stream(), runtime.stream()]
        options = {"op": "sum", "policy": policy, "max_buffers": common.choice((1, 2, 2, 3))}
        with Reducer(registry, **options) as reducer:  # type: ignore[arg-type]  # drawn above
            for _ in range(2):
                expected = dict.fromkeys(registry, 0)
                for _ in range(common.choice((1, 1, 2))):
                    missing = {spec.name for spec in self.params if common.random() < 0.1}  # noqa: PLR2004
                    order = [spec for spec in reversed(self.params) if spec.name not in missing]
                    (common if policy == "arrival" else own).shuffle(order)
                    with reducer.backward():
                        for spec in order:
                            with runtime.use(own.choice(streams)):
                                values = np.full(spec.shape, world.rank + 1)
                                grad = runtime.produce(values, spec.dtype)
                                reducer.reduce_grad(spec.name, grad)
                                del grad  # free at once: the pool may hand it out again
                    for spec in order:
                        expected[spec.name] += world.world_size * (world.world_size + 1) // 2
                stream = own.choice(streams)
                shards = reducer.wait(stream=stream)
                with runtime.use(stream):
                    readings = {name: runtime.consume(shard) for name, shard in shards.items()}
                stream.synchronize()
                for name, reading in readings.items():
                    if not bool((reading.value == expected[name]).all()):
                        msg = f"wrong values in the shard of {name!r}: {reading.value}"
                        raise ReduceError(msg)


def run_prove(*, model: str, dtype: str, world_size: int, runs: int, bucket_bytes: int) -> int:
    """Run `runs` simulations, spread over the schedules; print a line each and a verdict.

    Returns 0 only if nothing was found.
    """
    params = load_params(model, dtype=dtype)
    plan = plan_buckets(params, world_size=world_size, bucket_bytes=bucket_bytes)
    small, small_bytes = _shrink(params, bucket_bytes)
    cut = plan_buckets(small, world_size=world_size, bucket_bytes=small_bytes)
    print(
        f"prove: {len(params)} parameters in {len(plan)} buckets on {world_size} ranks; "
        f"simulated with {sum(s.numel for s in small)} elements in {len(cut)} buckets"
    )
    found = 0
    for number, schedule in enumerate(SCHEDULES):
        seeds = range(number, runs, len(SCHEDULES))
        steps = overlaps = 0
        reports: list[str] = []
        for done, seed in enumerate(seeds):
            _draw(schedule, done, len(seeds))
            workload = _Workload(tuple(small), small_bytes, seed)
            simulation = Simulation(world_size, seed=seed, schedule=schedule)  # type: ignore[arg-type]
            try:
                result = simulation.run(workload)
            except ReduceError as error:
                reports.append(str(error))
                break  # the first is the one to mend
            steps += result.steps
            overlaps += result.overlaps
        _draw("", 0, 0)
        verdict = "FOUND" if reports else "clean"
        print(f"{schedule:8} {verdict}  {len(seeds)} runs, {steps} steps, {overlaps} overlaps")
        for report in reports:
            print(report)
        found += len(reports)
    print(f"prove: {'FAILED' if found else 'OK'} world={world_size} runs={runs} reports={found}")
    return 1 if found else 0


def _shrink(params: Sequence[ParamSpec], bucket_bytes: int) -> tuple[list[ParamSpec], int]:
    """Return flat parameters of the same names, dtypes and proportions, and buckets in proportion.

    Rounding may move a parameter to a neighbouring bucket; small models stay as they are.
    """
    factor = max(1.0, sum(spec.numel for spec in params) / ELEMENTS)
    if factor == 1.0:
        return list(params), bucket_bytes
    small = [replace(s, shape=(-(-s.numel // int(factor)) if s.numel else 0,)) for s in params]
    itemsize = max(DTYPES[spec.dtype].itemsize for spec in params)
    return small, max(itemsize, int(bucket_bytes / factor))


def _draw(label: str, done: int, total: int) -> None:
    """Redraw the progress bar on a terminal; `total` 0 wipes it."""
    if not sys.stderr.isatty():
        return
    bar = "#" * (30 * done // total) if total else ""
    text = f"{label:8} [{bar:30}] {done}/{total}" if total else ""
    print(f"\r{text:60}", end="" if total else "\r", file=sys.stderr, flush=True)
