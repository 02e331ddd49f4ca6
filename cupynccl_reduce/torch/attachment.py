"""attach(): check a model, give every rank rank 0's, and hook it up. Nothing of a training step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch.nn.parameter import is_lazy

from cupynccl_reduce.errors import LayoutError, ReduceError
from cupynccl_reduce.layout import ParamSpec
from cupynccl_reduce.reducer import Reducer
from cupynccl_reduce.registry import Registry

from .parameters import check_gatherable, default_blocks
from .sharded import Sharded
from .tensors import as_bytes, as_tensor, current_stream, distinct, trainable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from cupynccl_reduce.membership import World
    from cupynccl_reduce.protocols import Memory

__all__ = ["attach"]

BROADCAST_BYTES = 16 << 20  # the most that one broadcast carries


def attach(
    model: torch.nn.Module,
    world: World,
    *,
    zero: Literal[1, 2, 3] = 2,
    blocks: Sequence[torch.nn.Module] | None = None,
    prefetch: int = 1,
    bucket_bytes: int = 64 << 20,
    op: Literal["mean", "sum"] = "mean",
    policy: Literal["planned", "arrival"] = "planned",
    pre_divide: bool = True,
    max_buffers: int = 2,
    missing: Literal["zero", "error"] = "zero",
    memory: Memory = "device",
    reduce_dtype: str = "default",
    shard_dtype: str = "default",
    uses_many: Iterable[str] = (),
) -> Sharded:
    """Give every rank rank 0's model, and hook its trainable parameters up to a new reducer.

    Collective, blocks the host. Parameters and buffers are broadcast once, bit for bit; load a
    checkpoint before, not after. Tied parameters are one, under their first name. Parameters that
    do not require grad are not registered and cost no memory.

    Args:
        model: on this world's device; every rank's has the same parameters and buffers.
        world: from `connect()` or `run_local()`.
        zero: what is sharded beside the optimizer's state. 1: nothing; gradients add up in p.grad,
            and step() reduces them once. 2: gradients, reduced in every backward. 3: parameters
            too, which have memory only while a block computes with them.
        blocks: with zero=3, the modules whose parameters come and go together; by default the
            members of the outermost ModuleLists and Sequentials. What is in none is gathered for
            the whole forward and backward.
        prefetch: with zero=3, how many buckets are gathered ahead of the block that needs them.
        bucket_bytes: see Registry.
        op: see Reducer, as for the five that follow.
        policy: see Reducer.
        pre_divide: see Reducer.
        max_buffers: see Reducer.
        missing: see Reducer.
        memory: see Reducer.
        reduce_dtype: see ParamSpec; one for all parameters.
        shard_dtype: see ParamSpec; one for all. "default" keeps float32 master copies of 16-bit
            parameters.
        uses_many: names of parameters that get several gradients in one backward, as two
            re-entrant checkpoints over one module give.

    Raises:
        LayoutError: a model or option that cannot work. MismatchError: ranks that differ.
    """
    world.check()
    device = as_tensor(world.runtime.allocate(1), "uint8").device
    refused: ReduceError | None = None
    entries: list[str] = []
    try:
        for name, tensor in _tensors(model):
            _check(name, tensor, device)
            trains = " requires grad" if tensor.requires_grad else ""
            entries.append(f"{name!r} {tensor.dtype} {tuple(tensor.shape)}{trains}")
        if isinstance(uses_many, str):
            msg = f"uses_many must be a list of names; write [{uses_many!r}]"
            raise LayoutError(msg)
        _check_zero(model, zero, blocks)
        specs = _specs(model, reduce_dtype, shard_dtype, frozenset(uses_many))
    except ReduceError as error:
        refused = error
    entries += [f"{zero=}", f"{prefetch=}"]
    world.agree("the model", entries, refused=refused)
    registry = Registry(specs, world, bucket_bytes=bucket_bytes)
    reducer = Reducer(
        registry,
        op=op,
        policy=policy,
        pre_divide=pre_divide,
        max_buffers=max_buffers,
        missing=missing,
        memory=memory,
    )
    if world.world_size > 1:
        full = [tensor.detach() for _, tensor in _tensors(model) if tensor.numel()]
        _broadcast(full, world, device)
    return Sharded(
        model,
        registry,
        reducer,
        zero=zero,
        blocks=default_blocks(model) if blocks is None else blocks,
        prefetch=prefetch,
    )


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter and buffer once, by its first name."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raise LayoutError for a tensor that cannot be broadcast."""
    msg = ""
    if is_lazy(tensor):
        msg = f"{name!r} has no shape yet; run one forward before attach()"
    elif tensor.device != device:
        msg = (
            f"{name!r} is on {tensor.device}, but this world works on {device}; move the model "
            "there before attach()"
        )
    elif tensor.layout is not torch.strided:
        msg = f"{name!r} {tuple(tensor.shape)} is {tensor.layout}; only dense tensors work"
    if msg:
        raise LayoutError(msg)


def _check_zero(
    model: torch.nn.Module, zero: int, blocks: Sequence[torch.nn.Module] | None
) -> None:
    if zero not in (1, 2, 3):
        msg = f"zero must be 1, 2 or 3, not {zero!r}"
        raise LayoutError(msg)
    if zero == 3:  # noqa: PLR2004  # the field's name for it
        check_gatherable(trainable(model))
    elif blocks is not None:
        msg = "blocks are for zero=3, which gathers their parameters"
        raise LayoutError(msg)
    known = set(model.modules())
    for block in blocks or ():
        if block not in known:
            msg = f"blocks: {type(block).__name__} is not a module of this model"
            raise LayoutError(msg)


def _specs(
    model: torch.nn.Module, reduce_dtype: str, shard_dtype: str, uses_many: frozenset[str]
) -> list[ParamSpec]:
    """Return the specs of the trainable parameters, in the model's order."""
    every = dict(model.named_parameters(remove_duplicate=False))
    for name in sorted(uses_many - set(every)):
        msg = f"uses_many: the model has no parameter {name!r}"
        raise LayoutError(msg)
    many = {every[name] for name in uses_many}
    specs = [
        ParamSpec(
            name,
            tuple(param.shape),
            _name(param.dtype),
            reduce_dtype=reduce_dtype,
            shard_dtype=shard_dtype,
            uses="many" if param in many else "once",
        )
        for name, param in trainable(model).items()
    ]
    if not specs:
        msg = "the model has no parameter that requires grad, so there is nothing to reduce"
        raise LayoutError(msg)
    return specs


def _broadcast(tensors: Sequence[torch.Tensor], world: World, device: torch.device) -> None:
    """Overwrite `tensors` with rank 0's, byte by byte, through a stage of the runtime's own."""
    nbytes = max(1, min(BROADCAST_BYTES, max((t.nbytes for t in tensors), default=0)))
    stage = world.runtime.allocate(nbytes)
    staged = as_tensor(stage, "uint8")
    caller = world.runtime.adopt(current_stream(device))
    event = world.runtime.event()
    for tensor in map(distinct, tensors):
        dense = tensor.contiguous()
        for piece in torch.split(as_bytes(dense), nbytes):
            mine = staged[: piece.numel()]
            mine.copy_(piece)
            # The stage is written before it is sent, and was read by then.
            event.record(caller)
            world.stream.wait_event(event)
            array = world.runtime.view(stage, 0, piece.numel(), "uint8")
            world.communicator.broadcast(array, 0, "uint8", world.stream)
            # It is received before it is copied out.
            event.record(world.stream)
            caller.wait_event(event)
            piece.copy_(mine)
        if dense is not tensor:
            tensor.copy_(dense)
    # The runtime may hand the stage's memory out again: nothing may still be reading it.
    event.record(caller)
    event.synchronize()
