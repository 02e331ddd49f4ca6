"""Compare the rows at each bucket size: build, warm up, check one value, measure in rounds."""

from __future__ import annotations

import gc
import math
from contextlib import ExitStack, suppress
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from cupynccl_reduce.agreement import gather_complaints
from cupynccl_reduce.cli.models import shrink
from cupynccl_reduce.cli.progress import draw
from cupynccl_reduce.errors import ReduceError

from .arguments import ROWS, Settings
from .machine import describe_machine
from .measure import Row, take_samples
from .memory import CudaMeter, HostMeter, Meter
from .report import Report, Result
from .rows import MODULE_ROWS, PEERS, Setup, build_row, find_torch, make_gradients
from .timeline import trace_loop
from .watchdog import WATCHDOG_ROWS, check_watched, measure_watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cupynccl_reduce.layout import ParamSpec
    from cupynccl_reduce.membership import World

__all__ = ["compare", "take_device"]

HOST_ELEMENTS = 8 << 20
WARM_UPS = 3  # DistributedDataParallel makes new buckets after its first step
TOLERANCE = 0.02  # of a mean in 16 bits


def compare(world: World, settings: Settings, params: Sequence[ParamSpec]) -> Report:
    """Measure every row at every bucket size. Collective, blocks the host."""
    if settings.watchdog:
        check_watched(world)
    torch, no_torch, synchronize = take_device(world)
    wanted = settings.max_elements or (HOST_ELEMENTS if world.runtime.kind == "host" else 0)
    sizes: Sequence[int] = settings.bucket_bytes
    if wanted:
        params, sizes = shrink(params, sizes, wanted)
    params = [_with_shards(spec, settings.shard_dtype) for spec in params]
    gradients = make_gradients(world, params, torch)
    wanted_rows = settings.rows or (WATCHDOG_ROWS if settings.watchdog else ROWS)
    names = list(dict.fromkeys(["limit", *wanted_rows]))
    rows: list[dict[str, Any]] = []
    results: list[Result] = []
    setup = Setup(
        world=world,
        params=tuple(params),
        gradients=gradients,
        bucket_bytes=0,
        max_buffers=settings.max_buffers,
    )
    with ExitStack() as stack:
        refusals = {name: no_torch for name in (*MODULE_ROWS, *PEERS) if no_torch}
        if torch is not None and any(name in PEERS for name in names):
            from .distributed import join_group

            refusals |= dict.fromkeys(PEERS, join_group(world, stack))
        for bucket_bytes in sizes:
            one = replace(setup, bucket_bytes=bucket_bytes)
            results = _measure(
                one,
                names,
                refusals=refusals,
                settings=settings,
                synchronize=synchronize,
                rehearse=bucket_bytes == sizes[0],
                meter=CudaMeter(torch) if world.runtime.kind == "cuda" else HostMeter(),
            )
            (limit,) = (result for result in results if result.name == "limit")
            rows += [
                result.as_json(
                    limit.samples,
                    gradients=len(params),
                    wire_bytes=setup.wire_bytes,
                    world_size=world.world_size,
                )
                for result in results
            ]
    workload = {
        "model": settings.model,
        "parameters": len(params),
        "elements": sum(spec.numel for spec in params),
        "dtype": ", ".join(sorted({spec.dtype for spec in params})),
        "wire_dtype": ", ".join(sorted({spec.reduce_dtype for spec in params})),
        "shard_dtype": ", ".join(sorted({spec.shard_dtype for spec in params})),
        "max_buffers": settings.max_buffers,
        "gradients_of": "torch" if torch is not None else "numpy or cupy",
        "rounds": settings.rounds,
        "repeats": settings.repeats,
    }
    trace = []
    if settings.plot:
        last = replace(setup, bucket_bytes=sizes[-1])
        trace = trace_loop(lambda watched: replace(last, world=watched), world, synchronize)
    samples = {result.name: result.samples for result in results}  # of the last bucket size
    watchdog = measure_watchdog(world, samples) if settings.watchdog else {}
    return Report(describe_machine(world), workload, rows, watchdog=watchdog, trace=trace)


def take_device(world: World) -> tuple[Any, str, Callable[[], None]]:
    """Make this rank's device current; return torch or why there is none, and how to block."""
    torch, no_torch = find_torch(world)
    runtime: Any = world.runtime
    if runtime.kind == "cuda":
        from . import cuda

        cuda.choose_device(runtime.device)
        if torch is not None:
            torch.cuda.set_device(runtime.device)
        return torch, no_torch, cuda.synchronize
    if torch is not None:
        from cupynccl_reduce.cli.threads import limit_threads

        limit_threads()
    return torch, no_torch, world.stream.synchronize


def _with_shards(spec: ParamSpec, shard_dtype: str) -> ParamSpec:
    return replace(spec, shard_dtype=spec.reduce_dtype if shard_dtype == "wire" else shard_dtype)


def _measure(
    setup: Setup,
    names: Sequence[str],
    *,
    refusals: dict[str, str],
    settings: Settings,
    synchronize: Callable[[], None],
    meter: Meter,
    rehearse: bool,
) -> list[Result]:
    """Measure all rows at one bucket size, each built before for nothing if `rehearse`."""
    world = setup.world
    label = f"{setup.bucket_bytes:,} B"
    shown = world.rank == 0
    rows: dict[str, Row] = {}
    peaks: dict[str, int] = {}
    results = {}
    for number, name in enumerate(names):
        if shown:
            draw("warm-up", number, len(names))
        skipped = refusals.get(name, "") or _refuse(name, world)
        if not skipped:
            built = _build(name, setup, meter, synchronize, rehearse=rehearse)
            rows[name], peaks[name], skipped = built
        if skipped:
            rows.pop(name, None)
            results[name] = Result(name=name, bucket_bytes=setup.bucket_bytes, skipped=skipped)
    done = iter(range(1, settings.rounds * len(rows) + 1))

    def tick() -> None:
        if shown:
            draw(label, next(done), settings.rounds * len(rows))

    try:
        samples = take_samples(
            rows,
            world.control,
            synchronize,
            rounds=settings.rounds,
            repeats=settings.repeats,
            tick=tick,
        )
    finally:
        for row in rows.values():
            row.close()
        if shown:
            draw("", 0, 0)
    for name in rows:
        results[name] = Result(
            name=name,
            bucket_bytes=setup.bucket_bytes,
            samples=samples[name],
            peak_extra_bytes=peaks[name],
        )
    return [results[name] for name in names]


def _refuse(name: str, world: World) -> str:
    """Return why a row cannot be on this runtime at all."""
    if name == "deepcompile" and world.runtime.kind != "cuda":
        return "DeepCompile's operator works on cuda only"
    if name == "deepcompile" and find_spec("deepspeed") is None:
        return "deepspeed is not installed; pip install deepspeed"
    return ""


def _warm(row: Row) -> Row:
    for _ in range(WARM_UPS):
        row.prepare()
        row.issue()
        row.land()
    return row


def _build(
    name: str, setup: Setup, meter: Meter, synchronize: Callable[[], None], *, rehearse: bool
) -> tuple[Any, int, str]:
    """Build a row, run it until it is warm, and check what it gives.

    Collective: returns the row and its peak memory, or why it is left out on every rank.
    """
    row: Row | None = None
    peak, complaint = 0, ""
    gc.collect()  # rows of the bucket size before are not to go away in between
    try:
        if rehearse:  # what a library makes at its first use is not this row's memory
            row = _warm(build_row(name, setup, lambda: None))
            row.close()
        row = _warm(build_row(name, setup, meter.start))
        peak = meter.read(row.own_bytes)
        _check_value(name, row.value(), setup.world)
    except Exception as error:  # what other libraries raise is their own
        if name not in PEERS:
            raise
        reason = str(error).strip().partition("\n")[0]
        complaint = f"{type(error).__name__}: {reason}"
    told = gather_complaints(setup.world.control, complaint)
    if told and row is not None:
        with suppress(Exception):
            row.close()
    synchronize()
    return row, peak, told


def _check_value(name: str, value: float, world: World) -> None:
    """Raise unless a row that is measured also does its work."""
    mean = (world.world_size + 1) / 2
    expected = world.rank + 1 if name == "backward" else mean
    if not math.isnan(value) and abs(value - expected) > TOLERANCE * expected:
        msg = f"bench: row {name!r} gives {value} on rank {world.rank}, and {expected} is right"
        raise ReduceError(msg)
