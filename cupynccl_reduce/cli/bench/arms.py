"""What `--steps` compares: one model and optimizer under each way to reduce gradients. No timing.

A step has two halves: `reduce` runs forward and backward and makes the caller's stream wait for the
reduced gradients; `update` steps AdamW on them and leaves what the next forward needs. Alone and
DDP step whole parameters; this library and FSDP2 step shards, and gather the parameters (FSDP2 in
its next forward and backward, which counts there).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.dlpack import from_dlpack

from cupynccl_reduce.cli.gpt import Gpt, Shape, draw_batches, load_text, loss_of
from cupynccl_reduce.torch import attach
from cupynccl_reduce.torch.tensors import current_stream

from .distributed import make_mesh

if TYPE_CHECKING:
    from cupynccl_reduce.membership import World

    from .arguments import Settings

__all__ = ["Arm", "Attached", "Workload", "build_arm"]

SHAPES = {
    "small": Shape(),
    "medium": Shape(width=512, blocks=8, heads=8, context=256),
    "large": Shape(width=1024, blocks=24, heads=16, context=512),
}
BATCHES = 8  # different ones; then they come again


class Arm(Protocol):
    """A model in training."""

    def reduce(self, rows: torch.Tensor) -> None:
        """Run forward and backward; the caller's stream waits for the reduced gradients."""

    def update(self) -> None:
        """Step the optimizer."""

    def close(self) -> None:
        """Give memory back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What all arms train: on one rank, with batches of its own."""

    settings: Settings
    vocabulary: int
    device: torch.device
    dtype: torch.dtype
    batches: cycle[torch.Tensor]

    @classmethod
    def of(cls, world: World, settings: Settings) -> Workload:
        """Return the workload of this rank."""
        device = from_dlpack(world.runtime.allocate(1)).device
        text, vocabulary = load_text()
        context = SHAPES[settings.size].context
        whole = settings.batch * world.world_size
        drawn = draw_batches(text, whole, BATCHES, context=context)
        mine = [rows.chunk(world.world_size)[world.rank].to(device) for rows in drawn]
        return cls(
            settings=settings,
            vocabulary=vocabulary,
            device=device,
            dtype=getattr(torch, settings.dtype),
            batches=cycle(mine),
        )

    def new_model(self) -> Gpt:
        """Return the model, alike on all ranks and for all arms."""
        torch.manual_seed(0)
        model = Gpt(self.vocabulary, SHAPES[self.settings.size])
        return model.to(device=self.device, dtype=self.dtype)

    def describe(self) -> dict[str, Any]:
        """Return what a reader of the numbers has to know of it."""
        shape = SHAPES[self.settings.size]
        return {
            "model": f"gpt {self.settings.size}: {shape.blocks} blocks of width {shape.width}",
            "elements": sum(parameter.numel() for parameter in self.new_model().parameters()),
            "dtype": self.settings.dtype,
            "batch": f"{self.settings.batch} x {shape.context} characters a rank",
            "bucket_bytes": self.settings.bucket_bytes[0],
            "shard_dtype": self.settings.shard_dtype,
        }


class Alone:
    """The model without communication, and whatever torch wraps around it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._optimizer = torch.optim.AdamW(model.parameters())

    def reduce(self, rows: torch.Tensor) -> None:
        """Run forward and backward."""
        loss_of(self._model, rows).backward()  # type: ignore[no-untyped-call]  # torch's

    def update(self) -> None:
        """Step AdamW and drop the gradients."""
        self._optimizer.step()
        self._optimizer.zero_grad()

    def close(self) -> None:
        """Drop the optimizer's state."""
        self._optimizer.state.clear()


class Attached:
    """The model under this library's hooks."""

    def __init__(self, workload: Workload, world: World) -> None:
        self._device = workload.device
        settings = workload.settings
        wire = settings.shard_dtype == "wire"
        self.model = workload.new_model()
        self.sharded = attach(
            self.model,
            world,
            bucket_bytes=settings.bucket_bytes[0],
            max_buffers=settings.max_buffers,
            shard_dtype=settings.dtype if wire else settings.shard_dtype,
        )
        self._optimizer = torch.optim.AdamW(self.sharded.parameters())

    def reduce(self, rows: torch.Tensor) -> None:
        """Run forward and backward, and close the cycle."""
        self.backward(loss_of(self.model, rows))
        self.wait()

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward; hooks hand the gradients over."""
        self.sharded.backward(loss)

    def wait(self) -> None:
        """Make the caller's stream wait for the shards."""
        self.sharded.reducer.wait(stream=current_stream(self._device))

    def update(self) -> None:
        """Step AdamW on the shards, and gather the parameters."""
        self.sharded.step(self._optimizer)

    def close(self) -> None:
        """Remove the hooks, and drop the optimizer's state."""
        self.sharded.detach()
        self._optimizer.state.clear()


def build_arm(name: str, workload: Workload, world: World) -> Arm:
    """Build an arm; collective for all but "none"."""
    if name == "attached":
        return Attached(workload, world)
    model = workload.new_model()
    if name == "ddp":
        return Alone(
            DistributedDataParallel(
                model,
                bucket_cap_mb=workload.settings.bucket_bytes[0] / 2**20,
                gradient_as_bucket_view=True,
            )
        )
    if name == "fsdp2":
        mesh = make_mesh(workload.device.type)
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
    return Alone(model)
