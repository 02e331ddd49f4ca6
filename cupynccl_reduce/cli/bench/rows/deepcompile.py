"""DeepSpeed's own gradient path: DeepCompile's ZeRO-3 operator, built by DeepSpeed's builder.

Not through DeepSpeed's engine: the calls are those that its compiled graphs make.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from cupynccl_reduce.agreement import gather_complaints
from cupynccl_reduce.dtypes import DTYPES
from cupynccl_reduce.errors import LayoutError

if TYPE_CHECKING:
    from cupynccl_reduce.membership import World

    from .setup import Setup

__all__ = ["DeepCompile"]

GRAPH = 0  # the one graph that all parameters belong to


class DeepCompile:
    """start_backward, a reduce_grad for each gradient in reverse order, end_backward.

    One bucket of `bucket_bytes`, doubled, as DeepCompile does by default. The operator sends
    world_size * ceil(numel / world_size) elements whatever a gradient has; so that it does not read
    past uneven ones, they are handed over with the padding in place, which is not measured.
    """

    own_bytes = 0  # all of it is torch's

    def __init__(self, setup: Setup) -> None:
        world_size = setup.world.world_size
        itemsize = DTYPES[setup.params[0].dtype].itemsize
        self._native, config = _load(setup.world)
        self._native.init(distributed.group.WORLD, config, max(1, setup.bucket_bytes // itemsize))
        self._calls: list[tuple[Any, int]] = []
        self._shards = []
        for index, (spec, grad) in enumerate(zip(setup.params, setup.gradients, strict=True)):
            width = -(-spec.numel // world_size)
            padded = grad
            if width * world_size != spec.numel:
                padded = grad.new_zeros(width * world_size)
                padded[: spec.numel] = grad.flatten()
            shard_dtype = getattr(torch, spec.shard_dtype)
            shard = torch.zeros(width, dtype=shard_dtype, device=grad.device)
            # The parameter's own shard would be gathered in forward, which there is none of.
            kept = grad.new_empty(0)
            shape = list(padded.shape)
            self._native.register_z3_param(index, shape, kept, shard, False, None)  # noqa: FBT003
            self._calls.append((padded, index))
            self._shards.append(shard)
        self._native.register_graph_z3(GRAPH, [index for _, index in self._calls])
        self._calls.reverse()
        self._largest = [spec.name for spec in setup.params].index(setup.largest)
        self._operators = torch.ops.dc

    def prepare(self) -> None:
        """Do nothing."""

    @torch.no_grad()
    def issue(self) -> None:
        """Make the calls of one backward; the last one blocks the host for the collectives."""
        reduce_grad = self._operators.reduce_grad
        self._native.start_backward(True)  # noqa: FBT003  # the next step overwrites
        for grad, index in self._calls:
            reduce_grad(grad, GRAPH, index)
        self._operators.end_backward([grad], GRAPH, False)  # noqa: FBT003  # it keeps its buckets

    def land(self) -> None:
        """Block the host for the rest."""
        torch.cuda.synchronize()

    def value(self) -> float:
        """Return an element of this rank's shard."""
        return float(self._shards[self._largest][0])

    def close(self) -> None:
        """Give its communicator and buckets back."""
        self._native.cleanup()


def _load(world: World) -> tuple[Any, Any]:
    """Return the operator's module and its default configuration. Collective, blocks the host.

    Compiles, the first time, for about a minute. What fails is raised on every rank: nobody may go
    on to the operator's own collectives alone.
    """
    complaint = ""
    native = config = None
    try:
        from deepspeed.compile.config import CompileConfig
        from deepspeed.ops.op_builder.dc import DeepCompileBuilder

        native, config = DeepCompileBuilder().load(), CompileConfig()
    except Exception as error:  # noqa: BLE001  # of Python, ninja, nvcc: all are reasons
        complaint = f"{type(error).__name__}: {error}"
    told = gather_complaints(world.control, complaint)
    if told:
        msg = f"DeepCompile's operator does not load: {told}"
        raise LayoutError(msg)
    return native, config
