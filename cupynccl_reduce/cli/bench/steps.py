"""Training steps of a real model: without communication, and under each way to reduce gradients."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from cupynccl_reduce.agreement import gather_complaints
from cupynccl_reduce.cli.progress import draw
from cupynccl_reduce.errors import LayoutError

from .compare import take_device
from .exposure import expose
from .machine import describe_machine
from .measure import Sample, gather_slowest, median_ratio, spread
from .report import Report
from .timeline import make_clock
from .trace import COMPUTE, watch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cupynccl_reduce.membership import World

    from .arguments import Settings
    from .arms import Arm, Workload
    from .clocks import Clock
    from .trace import Span

__all__ = ["measure_steps"]

ARMS = ("none", "attached", "ddp", "fsdp2")
WARM_UPS = 3
TRACED = 3  # steps of which the middle one, by time, is shown


def measure_steps(world: World, settings: Settings) -> Report:
    """Measure steps of every arm in rounds, then watch some of this library's own.

    Collective, blocks the host.
    """
    torch, no_torch, synchronize = take_device(world)
    if torch is None:
        msg = f"--steps trains a torch model: {no_torch}"
        raise LayoutError(msg)
    from .arms import Workload
    from .distributed import join_group

    clock = make_clock(world)
    workload = Workload.of(world, settings)
    wanted = list(ARMS)
    arms: dict[str, Arm] = {}
    skipped: dict[str, str] = {}
    with ExitStack() as stack:
        if {"ddp", "fsdp2"} & set(wanted):
            skipped |= dict.fromkeys(("ddp", "fsdp2"), join_group(world, stack))
        for name in wanted:
            if skipped.get(name):
                continue
            arm, skipped[name] = _build(name, workload, world)
            if arm is not None:
                arms[name] = arm
        samples = _take_turns(arms, workload, world, clock, synchronize)
        for arm in arms.values():
            arm.close()
    rows = [
        {"name": name, "skipped": skipped[name]}
        if skipped[name]
        else _row(name, samples[name], samples["none"])
        for name in wanted
    ]
    exposed, spans = _watch(workload, world, clock, synchronize)
    described = workload.describe() | {"rounds": settings.rounds, "steps": settings.steps}
    return Report(describe_machine(world), described, rows, exposed, trace=spans)


def _build(name: str, workload: Workload, world: World) -> tuple[Arm | None, str]:
    """Build an arm and run it until it is warm, or say why it is left out on every rank."""
    from .arms import build_arm

    arm: Arm | None = None
    complaint = ""
    try:
        arm = build_arm(name, workload, world)
        for _ in range(WARM_UPS):
            arm.reduce(next(workload.batches))
            arm.update()
    except Exception as error:  # what torch raises is its own
        if name in ("none", "attached"):
            raise
        complaint = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    told = gather_complaints(world.control, complaint)
    if told and arm is not None:
        with suppress(Exception):
            arm.close()
    return None if told else arm, told


def _take_turns(
    arms: dict[str, Arm],
    workload: Workload,
    world: World,
    clock: Clock,
    synchronize: Callable[[], None],
) -> dict[str, list[Sample]]:
    """Run `steps` steps of every arm in each round, in the opposite order every second time."""
    settings = workload.settings
    samples: dict[str, list[Sample]] = {name: [] for name in arms}
    for number in range(settings.rounds):
        for name in list(arms)[:: -1 if number % 2 else 1]:
            if world.rank == 0:
                draw(f"round {number + 1}", len(samples[name]), settings.rounds * settings.steps)
            times = _time_steps(arms[name], workload, world, clock, synchronize)
            samples[name] += [Sample(number, *times[at : at + 2]) for at in range(0, len(times), 2)]
    if world.rank == 0:
        draw("", 0, 0)
    return samples


def _time_steps(
    arm: Arm, workload: Workload, world: World, clock: Clock, synchronize: Callable[[], None]
) -> list[float]:
    """Return, step after step, seconds to the gradients and to the end, on the slowest rank."""
    stream = _compute_stream(workload, world)
    synchronize()
    world.control.all_gather(b"")  # ranks start together
    clock.start()
    marks = []
    for _ in range(workload.settings.steps):
        started = clock.mark(stream)
        arm.reduce(next(workload.batches))
        reduced = clock.mark(stream)
        arm.update()
        marks.append((started, reduced, clock.mark(stream)))
    synchronize()
    times = []
    for started_reduced_updated in marks:
        start, reduced, updated = map(clock.read_ms, started_reduced_updated)
        times += [(reduced - start) / 1e3, (updated - start) / 1e3]
    return gather_slowest(world.control, times)


def _compute_stream(workload: Workload, world: World) -> Any:
    from cupynccl_reduce.torch.tensors import current_stream

    return world.runtime.adopt(current_stream(workload.device))


def _row(name: str, samples: Sequence[Sample], none: Sequence[Sample]) -> dict[str, Any]:
    gradients = spread([sample.issue_s * 1e3 for sample in samples])
    step = spread([sample.total_s * 1e3 for sample in samples])
    return {
        "name": name,
        "gradients_ms": gradients.median,
        "gradients_ms_quartiles": [gradients.low, gradients.high],
        "step_ms": step.median,
        "step_ms_quartiles": [step.low, step.high],
        "ratio_to_none": median_ratio(samples, none),
        "samples": len(samples),
    }


def _watch(
    workload: Workload, world: World, clock: Clock, synchronize: Callable[[], None]
) -> tuple[list[dict[str, Any]], list[Span]]:
    """Return what this rank's compute waited for in one step, and that step's time-line."""
    from cupynccl_reduce.cli.gpt import loss_of

    from .arms import Attached

    watched, observer = watch(world, clock)
    arm = Attached(workload, watched)
    stream = _compute_stream(workload, world)
    traces = []
    for number in range(WARM_UPS + TRACED):
        rows = next(workload.batches)
        synchronize()
        world.control.all_gather(b"")
        observer.start()
        with observer.span(COMPUTE, "forward", "", stream), observer.host_span("forward"):
            loss = loss_of(arm.model, rows)
        with observer.span(COMPUTE, "backward", "", stream), observer.host_span("backward"):
            arm.backward(loss)
        with observer.host_span("wait"):
            arm.wait()
        with observer.span(COMPUTE, "update", "", stream), observer.host_span("update"):
            arm.update()
        synchronize()
        if number >= WARM_UPS:
            traces.append(observer.stop())
    buckets = arm.sharded.registry.buckets
    arm.close()
    traces.sort(key=lambda spans: max(span.stop_ms for span in spans))
    spans = traces[len(traces) // 2]
    return expose(spans, buckets), spans
