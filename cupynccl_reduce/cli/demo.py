"""The demo: train a small GPT on several ranks, then compare it with one process."""

from __future__ import annotations

import hashlib
import os
import platform
import struct
import sys
import time
from dataclasses import KW_ONLY, dataclass, field
from math import fsum
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.utils.dlpack import from_dlpack

from cupynccl_reduce import __version__, connect
from cupynccl_reduce.launcher import find_launcher
from cupynccl_reduce.torch import attach

from .gpt import BLOCKS, CONTEXT, WIDTH, Gpt, draw_batches, load_text, loss_of
from .threads import limit_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from cupynccl_reduce import BucketLayout, World

__all__ = ["run_demo"]

BATCH = 12  # rows of a step, rounded up to equal shares
BUCKET_BYTES = 512 << 10
LIMIT = 5e-4  # of max_error
RATE = 1e-3
WARM_UP = 10
# AdamW divides a gradient by its own size, so a gradient near zero steps as far as a large one, in
# a direction that rounding decides. This epsilon is far above rounding, far below real gradients.
EPSILON = 1e-6


@dataclass(slots=True)
class Progress:
    """How far a training run is: a bar that is redrawn, or a line for every tenth."""

    label: str
    steps: int
    _: KW_ONLY
    shown: bool
    redraw: bool
    losses: list[float] = field(default_factory=list)

    def due(self, step: int) -> bool:
        """Return whether the loss is looked at after `step`: the first, and every tenth."""
        return step == 0 or (step + 1) * 10 // self.steps > step * 10 // self.steps

    def show(self, step: int) -> None:
        """Draw the bar after `step`, if it is this process's to draw."""
        done = step + 1
        if not self.shown or not (self.redraw or self.due(step)):
            return
        filled = 30 * done // self.steps
        text = (
            f"{self.label:12} [{'#' * filled:30}] {done:4}/{self.steps}  loss {self.losses[-1]:.4f}"
        )
        again = self.redraw and done < self.steps
        print(f"\r{text}" if self.redraw else text, end="" if again else "\n", flush=True)


def run_demo(*, steps: int, share_gpu: bool) -> int:
    """Train on this rank's share, compare on rank 0, print there; return the exit code.

    Collective, blocks the host.
    """
    with connect(share_gpu=share_gpu) as world:
        limit_threads()
        return _run(world, steps)


def _run(world: World, steps: int) -> int:
    batch = -(-BATCH // world.world_size) * world.world_size
    device = from_dlpack(world.runtime.allocate(1)).device
    text, vocabulary = load_text()

    def batches() -> Iterator[torch.Tensor]:
        return (rows.to(device) for rows in draw_batches(text, batch, steps))

    model = _new_model(vocabulary, device)
    numel = sum(parameter.numel() for parameter in model.parameters())
    _say(world, _describe(world, len(text), numel, batch, steps))
    buckets, losses = _train_sharded(world, model, batches(), steps)

    digest = hashlib.blake2b(b"".join(_bytes(p) for p in model.parameters())).digest()
    alike = len(set(world.control.all_gather(digest))) == 1
    max_error = 0.0
    if world.rank == 0:
        alone = _new_model(vocabulary, device)
        _train_alone(alone, batches(), steps)
        max_error = _max_error(model, alone)

    result = (
        f"world={world.world_size} runtime={world.runtime.kind} params={numel} "
        f"buckets={buckets} max_error={max_error:.1e}"
    )
    faults = []
    if not alike:
        faults.append("the ranks' parameters differ")
    if not losses[-1] < losses[0]:
        faults.append("the loss did not fall")
    if not max_error <= LIMIT:  # a NaN is a fault too
        faults.append(f"max_error is above {LIMIT}")
    _say(world, f"demo: FAILED {result}: {'; '.join(faults)}" if faults else f"demo: OK {result}")
    # Here the others have waited for rank 0; a rank that leaves with an error ends the world.
    return int(any(world.control.all_gather(b"x" if faults else b"")))


def _train_sharded(
    world: World, model: Gpt, batches: Iterator[torch.Tensor], steps: int
) -> tuple[int, list[float]]:
    """Train on this rank's rows of each batch; return the number of buckets and the losses."""
    shares = (rows.chunk(world.world_size)[world.rank] for rows in batches)
    with attach(model, world, bucket_bytes=BUCKET_BYTES) as sharded:
        buckets = sharded.registry.buckets
        _say(world, _table(buckets))
        optimizer = _new_optimizer(sharded.parameters())

        def update(loss: torch.Tensor) -> None:
            sharded.backward(loss)
            sharded.step(optimizer)

        def mean(loss: float) -> float:
            everyone = world.control.all_gather(struct.pack("d", loss))
            return fsum(struct.unpack("d", each)[0] for each in everyone) / world.world_size

        progress = Progress("all ranks", steps, shown=world.rank == 0, redraw=_redraws())
        started = time.perf_counter()
        _train(model, optimizer, shares, update=update, progress=progress, mean=mean)
        elapsed_s = time.perf_counter() - started
        sent_bytes = sharded.reducer.statistics().sent_bytes // steps
    losses = progress.losses
    _say(world, f"loss: {losses[0]:.4f} -> {losses[-1]:.4f} in {elapsed_s:.1f} s")
    _say(world, f"sent: {sent_bytes:,} bytes a step from each rank, by reduce_scatter")
    return len(buckets), losses


def _new_model(vocabulary: int, device: torch.device) -> Gpt:
    torch.manual_seed(0)
    return Gpt(vocabulary).to(device)


def _new_optimizer(params: Iterable[torch.Tensor]) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, betas=(0.9, 0.95), eps=EPSILON, weight_decay=0.1)


def _train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[torch.Tensor],
    *,
    update: Callable[[torch.Tensor], None],
    progress: Progress,
    mean: Callable[[float], float],
) -> None:
    """Run the steps of one training, the same for all ranks together and for one process."""
    for step, rows in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / WARM_UP) * (1 - step / progress.steps)
        loss = loss_of(model, rows)
        update(loss)
        if progress.due(step):
            progress.losses.append(mean(loss.item()))
        progress.show(step)


def _train_alone(model: Gpt, batches: Iterator[torch.Tensor], steps: int) -> None:
    """Train on whole batches, as one process does without this library."""
    optimizer = _new_optimizer(model.parameters())

    def update(loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        optimizer.zero_grad()

    progress = Progress("one process", steps, shown=True, redraw=_redraws())
    _train(model, optimizer, batches, update=update, progress=progress, mean=float)


def _max_error(model: Gpt, reference: Gpt) -> float:
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    errors = torch.stack([(ours - theirs).detach().abs().max() for ours, theirs in pairs])
    return errors.max().item()  # a NaN stays one


def _bytes(parameter: torch.Tensor) -> bytes:
    return parameter.detach().cpu().numpy().tobytes()


def _redraws() -> bool:
    """Return whether the user sees stdout on a terminal."""
    if not sys.stdout.isatty():
        return False
    if find_launcher(os.environ).name == "none":
        return True
    try:
        # Open MPI gives every rank a terminal of its own, whatever mpirun itself writes to.
        terminal = Path(f"/proc/{os.getppid()}/fd/1").readlink()
    except OSError:
        return False
    return str(terminal).startswith(("/dev/pts/", "/dev/tty"))


def _say(world: World, text: str) -> None:
    if world.rank == 0:
        print(text, flush=True)


def _describe(world: World, characters: int, numel: int, batch: int, steps: int) -> str:
    ranks = "1 rank" if world.world_size == 1 else f"{world.world_size} ranks"
    if world.runtime.kind == "cuda":
        where = f"cuda (CuPy and NCCL), {torch.cuda.get_device_name()}"
    else:
        where = f"host (NumPy and MPI), torch threads: {torch.get_num_threads()} a rank"
    return (
        f"cupynccl_reduce {__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}\n"
        f"{ranks} on {where}\n"
        f"model: GPT, {BLOCKS} blocks of width {WIDTH}, {numel:,} parameters in fp32\n"
        f"text: {characters:,} characters of Python's own help\n"
        f"training: {steps} steps of AdamW on the shards, {batch} x {CONTEXT} characters each"
    )


def _table(buckets: Sequence[BucketLayout]) -> str:
    lines = ["bucket  gradient bytes  padding  parameters"]
    for bucket in buckets:
        padding = bucket.send_bytes - bucket.gradient_bytes  # fp32 on both sides
        names = f"{len(bucket.names)}: {bucket.names[0]} to {bucket.names[-1]}"
        lines.append(f"{bucket.index:6}  {bucket.gradient_bytes:14,}  {padding:7,}  {names}")
    return "\n".join(lines)
