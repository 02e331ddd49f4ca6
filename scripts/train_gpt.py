"""Train a GPT-2-shaped model on real text, with gradients, optimizer or parameters sharded.

mpirun -n 2 python -m mpi4py scripts/train_gpt.py --zero 3 --steps 50 --compare fsdp2 ddp

The text is the help of Python's standard library, character by character. `--compare` trains the
same model on the same batches with torch's own FSDP2 or DistributedDataParallel, in the same
process, and tells how far losses and parameters are apart, and what a step costs. Float32, with
torch's deterministic algorithms.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.dlpack import from_dlpack

import cupynccl_reduce as cr
from cupynccl_reduce.cli.bench.distributed import join_group, make_mesh
from cupynccl_reduce.cli.bench.memory import CudaMeter, HostMeter
from cupynccl_reduce.cli.gpt import Gpt, Shape, draw_batches, load_text, loss_of
from cupynccl_reduce.cli.progress import draw
from cupynccl_reduce.cli.threads import limit_threads
from cupynccl_reduce.torch import attach

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SIZES = {
    "tiny": Shape(),
    "small": Shape(width=768, blocks=12, heads=12, context=256),
    "medium": Shape(width=1024, blocks=24, heads=16, context=512),
}
BUCKET_BYTES = {"tiny": 256 << 10, "small": 32 << 20, "medium": 64 << 20}
RATE = {"tiny": 1e-3, "small": 3e-4, "medium": 2e-4}  # larger ones double rounding at every step
WARM_UP, MAX_NORM = 10, 1.0
# Far above rounding: AdamW divides a gradient by its own size, so that one near zero would step as
# far as a large one, in a direction that rounding decides.
EPSILON = 1e-6


@dataclass(slots=True)
class Run:
    """What one training has to tell, on every rank alike but for the memory."""

    name: str
    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained: the same for every way to train it."""

    world: cr.World
    options: argparse.Namespace
    device: torch.device
    text: torch.Tensor
    vocabulary: int

    @property
    def shape(self) -> Shape:
        """The model's sizes."""
        return SIZES[self.options.size]

    def new_model(self) -> Gpt:
        """Return the model, alike on all ranks."""
        torch.manual_seed(0)
        return Gpt(self.vocabulary, self.shape).to(self.device)

    def batches(self, start: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield each step from `start` on with this rank's rows."""
        world, steps = self.world, self.options.steps
        whole = self.options.batch * world.world_size
        drawn = draw_batches(self.text, whole, steps, context=self.shape.context)
        for step, rows in enumerate(drawn):
            if step >= start:
                yield step, rows.chunk(world.world_size)[world.rank].to(self.device)

    def mean(self, value: float) -> float:
        """Return the mean over ranks. Collective, blocks the host."""
        everyone = self.world.control.all_gather(struct.pack("d", value))
        return sum(struct.unpack("d", one)[0] for one in everyone) / len(everyone)

    def synchronize(self) -> None:
        """Block the host until the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def new_optimizer(params: Iterator[torch.nn.Parameter]) -> torch.optim.AdamW:
    """Return AdamW over shards or whole parameters."""
    return torch.optim.AdamW(params, betas=(0.9, 0.95), eps=EPSILON, weight_decay=0.1)


def train(
    task: Task,
    run: Run,
    optimizer: torch.optim.Optimizer,
    forward: torch.nn.Module,
    update: Callable[[torch.Tensor], None],
    *,
    start: int = 0,
) -> None:
    """Run the steps; `update` takes a loss to the next parameters. Collective."""
    for step, rows in task.batches(start):
        for group in optimizer.param_groups:
            group["lr"] = RATE[task.options.size] * min(1, (step + 1) / WARM_UP)
        task.world.control.all_gather(b"")  # ranks start together
        began = time.perf_counter()
        loss = loss_of(forward, rows)
        update(loss)
        task.synchronize()
        run.step_s.append(time.perf_counter() - began)
        run.losses.append(task.mean(loss.item()))
        if task.world.rank == 0:
            draw(run.name, step + 1, task.options.steps)
    if task.world.rank == 0:
        draw("", 0, 0)


def train_sharded(task: Task) -> Run:
    """Train with this library."""
    options, world = task.options, task.world
    run, meter = Run(f"zero={options.zero}"), new_meter(task)
    meter.start()
    model = task.new_model()
    with attach(
        model, world, zero=options.zero, bucket_bytes=BUCKET_BYTES[options.size]
    ) as sharded:
        shards = dict(sharded.named_parameters())
        optimizer = new_optimizer(iter(shards.values()))
        start = resume(task, sharded, shards, optimizer, run) if options.resume else 0

        def update(loss: torch.Tensor) -> None:
            sharded.backward(loss)
            sharded.step(optimizer, max_norm=MAX_NORM)

        train(task, run, optimizer, model, update, start=start)
        taken = sharded.reducer.statistics()
        own = taken.shard_bytes + taken.buffer_bytes if task.device.type == "cuda" else 0
        run.peak_bytes = meter.read(own)
        if options.checkpoint:
            save(task, sharded, shards, optimizer, run)
    run.parameters = {name: param.detach().clone() for name, param in model.named_parameters()}
    return run


def train_peer(task: Task, name: str) -> Run:
    """Train with torch's FSDP2 or DistributedDataParallel."""
    run, meter = Run(name), new_meter(task)
    meter.start()
    model = task.new_model()
    if name == "fsdp2":
        mesh = make_mesh(task.device.type)
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
    forward = model if name == "fsdp2" else DistributedDataParallel(model)
    optimizer = new_optimizer(model.parameters())

    def update(loss: torch.Tensor) -> None:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    train(task, run, optimizer, forward, update)
    run.peak_bytes = meter.read(0)
    for key, param in model.named_parameters():
        whole = param.full_tensor() if name == "fsdp2" else param
        run.parameters[key] = whole.detach().clone()
    return run


def states_of(
    shards: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, torch.Tensor]]:
    """Return what a checkpoint holds: shards, and AdamW's two moments of each."""
    states = {"param": {name: shard.detach() for name, shard in shards.items()}}
    for moment in ("exp_avg", "exp_avg_sq"):
        states[moment] = {name: optimizer.state[shard][moment] for name, shard in shards.items()}
    return states


def save(task: Task, sharded: Any, shards: Any, optimizer: Any, run: Run) -> None:
    """Write a checkpoint. Collective."""
    meta = {"step": task.options.steps, "losses": run.losses}
    cr.save(task.options.checkpoint, sharded.registry, states_of(shards, optimizer), meta)


def resume(task: Task, sharded: Any, shards: Any, optimizer: Any, run: Run) -> int:
    """Fill shards and moments from a checkpoint; return the step to go on with. Collective."""
    for shard in shards.values():
        moments = {key: torch.zeros_like(shard) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[shard] = {"step": torch.zeros(()), **moments}
    out = states_of(shards, optimizer)
    meta = cr.load(task.options.checkpoint, sharded.registry, out)
    step = int(meta["step"])
    for shard in shards.values():
        optimizer.state[shard]["step"].fill_(step)
    sharded.gather()
    run.losses += meta["losses"]
    return step


def new_meter(task: Task) -> Any:
    """Return what measures the peak of memory."""
    return CudaMeter(torch) if task.device.type == "cuda" else HostMeter()


def told(task: Task, run: Run, reference: Run | None) -> dict[str, Any]:
    """Return a run as JSON; with a reference, how far it is from that."""
    steps = run.step_s[len(run.step_s) // 4 :]  # without the first, which allocate and compile
    step_s = task.mean(median(steps)) if steps else 0.0
    rows = task.options.batch * task.world.world_size
    answer: dict[str, Any] = {
        "name": run.name,
        "loss": run.losses,
        "step_ms": 1e3 * step_s,
        "tokens_per_s": rows * task.shape.context / step_s if steps else 0.0,
        "peak_bytes": task.mean(run.peak_bytes),
    }
    if reference is not None:
        pairs = zip(run.losses, reference.losses, strict=True)
        answer["max_loss_difference"] = max((abs(a - b) for a, b in pairs), default=0.0)
        answer["max_parameter_difference"] = max(
            float((param - reference.parameters[name]).abs().max())
            for name, param in run.parameters.items()
        )
    return answer


def print_table(answers: Sequence[dict[str, Any]]) -> None:
    """Print one line for each run."""
    print(f"{'':10} {'first loss':>10} {'last':>8} {'step ms':>9} {'tokens/s':>9} {'peak MiB':>9}")
    for one in answers:
        ends = f"{one['loss'][0]:10.4f} {one['loss'][-1]:8.4f}"
        print(
            f"{one['name']:10} {ends} {one['step_ms']:9.1f} {one['tokens_per_s']:9.0f} "
            f"{one['peak_bytes'] / 2**20:9.1f}"
        )
        if "max_loss_difference" in one:
            print(
                f"{'':10} differs by at most {one['max_loss_difference']:.1e} in a loss, "
                f"{one['max_parameter_difference']:.1e} in a parameter"
            )


def draw_plot(answers: Sequence[dict[str, Any]], path: str) -> None:
    """Write a PNG: loss over steps, tokens per second, memory. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  # few draw
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    loss, speed, memory = figure.subplots(1, 3)
    names = [one["name"] for one in answers]
    for one in answers:
        loss.plot(range(1, len(one["loss"]) + 1), one["loss"], label=one["name"])
    loss.set(xlabel="step", ylabel="loss")
    loss.legend()
    speed.bar(names, [one["tokens_per_s"] for one in answers])
    speed.set(ylabel="tokens per second")
    memory.bar(names, [one["peak_bytes"] / 2**20 for one in answers])
    memory.set(ylabel="peak memory of a rank, MiB")
    figure.savefig(path, format="png", dpi=120)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--zero", type=int, default=2, choices=(1, 2, 3), help="what is sharded (2)")
    add("--steps", type=int, default=50, metavar="N", help="in all, with those resumed from (50)")
    add("--size", default="tiny", choices=tuple(SIZES), help="of the model (tiny)")
    add("--batch", type=int, default=4, metavar="N", help="rows of a step on each rank (4)")
    add("--compare", nargs="+", default=[], choices=("fsdp2", "ddp"), help="with torch's own")
    add("--checkpoint", default="", metavar="DIR", help="written at the end")
    add("--resume", action="store_true", help="go on from --checkpoint")
    add("--share-gpu", action="store_true", help="let several ranks of this host use one GPU")
    add("--json", action="store_true", help="print one JSON object on rank 0, not a table")
    add("--plot", default="", metavar="PNG", help="draw loss, speed and memory (matplotlib)")
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.batch < 1:
        parser.error("--steps and --batch take numbers from 1 on")
    if options.resume and not options.checkpoint:
        parser.error("--resume needs --checkpoint DIR")
    if options.resume and options.compare:
        parser.error("--compare trains from the first step: leave out --resume")
    if options.plot and not Path(options.plot).absolute().parent.is_dir():
        parser.error(f"--plot: there is no folder {Path(options.plot).parent}")
    return options


def main() -> None:
    """Train, compare, tell."""
    options = parse(sys.argv[1:])
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True)
    with cr.connect(share_gpu=options.share_gpu) as world, ExitStack() as stack:
        limit_threads()
        device = from_dlpack(world.runtime.allocate(1)).device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        task = Task(world, options, device, *load_text())
        ours = train_sharded(task)
        answers = [told(task, ours, None)]
        if options.compare:
            refused = join_group(world, stack)
            if refused:
                sys.exit(f"--compare: {refused}")
        answers += [told(task, train_peer(task, name), ours) for name in options.compare]
        first = world.rank == 0
    if first:
        if options.json:
            print(json.dumps(answers[0] | {"compared": answers[1:]}), flush=True)
        else:
            print_table(answers)
        if options.plot:
            draw_plot(answers, options.plot)


if __name__ == "__main__":
    main()
