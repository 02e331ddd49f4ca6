"""Rows that run one torch module's backward: alone, under this library, and under torch's own."""

from __future__ import annotations

from math import nan
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from cupynccl_reduce.cli.bench.distributed import make_mesh
from cupynccl_reduce.torch import attach
from cupynccl_reduce.torch.tensors import current_stream

from .setup import first_of

if TYPE_CHECKING:
    from .given import GivenGradients
    from .setup import Setup

__all__ = ["Attached", "Backward", "Ddp", "Fsdp2"]


class Backward:
    """The module's backward, and nothing else. Forward is not measured."""

    own_bytes = 0

    def __init__(self, given: GivenGradients) -> None:
        self._module: Any = given
        self._params = list(given.parameters())
        self._device = self._params[0].device
        numels = [param.numel() for param in self._params]
        self._largest = numels.index(max(numels))  # names differ from the setup's
        self._loss = torch.zeros(())

    def prepare(self) -> None:
        """Drop the gradients of the step before, and run forward."""
        for param in self._params:
            param.grad = None
        carry = torch.zeros((), device=self._device, requires_grad=True)
        self._loss = self._module(carry)

    def issue(self) -> None:
        """Run backward."""
        self._loss.backward()  # type: ignore[no-untyped-call]  # torch's

    def land(self) -> None:
        """Block the host until the device has done everything."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def value(self) -> float:
        """Return an element of the largest gradient, or NaN where this rank has none of it."""
        grad: Any = self._params[self._largest].grad
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        return float(local.flatten()[0]) if local.numel() else nan

    def close(self) -> None:
        """Drop the gradients."""
        for param in self._params:
            param.grad = None


class Attached(Backward):
    """The module under this library's hooks."""

    def __init__(self, setup: Setup, given: GivenGradients) -> None:
        super().__init__(given)
        first = setup.params[0]
        alike = all(spec.dtype == first.dtype for spec in setup.params)
        self._sharded = attach(
            given,
            setup.world,
            bucket_bytes=setup.bucket_bytes,
            max_buffers=setup.max_buffers,
            reduce_dtype=first.reduce_dtype if alike else "default",
            shard_dtype=first.shard_dtype if alike else "default",
        )
        taken = self._sharded.reducer.statistics()
        self.own_bytes = taken.shard_bytes + taken.buffer_bytes

    def issue(self) -> None:
        """Run backward; hooks hand the gradients over, leaving it flushes."""
        self._sharded.backward(self._loss)

    def land(self) -> None:
        """Close the cycle and block the host until the shards are there."""
        self._sharded.reducer.wait(stream=current_stream(self._device))
        super().land()

    def value(self) -> float:
        """Return an element of this rank's shard."""
        name = list(self._sharded.registry)[self._largest]
        registry = self._sharded.registry
        return first_of(registry.shards[name], registry[name].spec.shard_dtype)

    def close(self) -> None:
        """Remove the hooks and give the memory back."""
        self._sharded.detach()


class Ddp(Backward):
    """The module under DistributedDataParallel, its buckets as large as this library's."""

    def __init__(self, setup: Setup, given: GivenGradients) -> None:
        super().__init__(given)
        self._module = DistributedDataParallel(
            given, bucket_cap_mb=setup.bucket_bytes / 2**20, gradient_as_bucket_view=True
        )


class Fsdp2(Backward):
    """The module under fully_shard; parameters stay gathered from forward to backward."""

    def __init__(self, given: GivenGradients) -> None:
        super().__init__(given)
        mesh = make_mesh(self._device.type)
        for module in (*given.chunks, given):
            fully_shard(module, mesh=mesh, reshard_after_forward=False)
        self._params = list(given.parameters())
