"""The model's own parameters between steps: whole on every rank, or without memory while unused."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.autograd.graph import increment_version, register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from cupynccl_reduce.errors import LayoutError
from cupynccl_reduce.gatherer import Gatherer

from .tensors import current_stream

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from cupynccl_reduce.registry import Registry

__all__ = ["Gathered", "Parameters", "Whole", "check_gatherable", "default_blocks"]


class Parameters(Protocol):
    """What a step does with the model's own parameters."""

    def write(self, names: Iterable[str], stream: Any) -> None:
        """Let the shards of `names` be what the model computes with. Collective."""

    def end_backward(self) -> None:
        """Note that a backward is over, whatever came of it."""

    def full(self) -> AbstractContextManager[None]:
        """Return a context in which all parameters have their values. Collective."""

    def close(self, *, whole: bool) -> None:
        """Remove hooks; leave the model with `whole` parameters, collective where they were not."""


class Whole:
    """Every rank has all parameters, written after each step (ZeRO-1 and 2)."""

    def __init__(
        self,
        registry: Registry,
        params: Mapping[str, torch.nn.Parameter],
        shards: Mapping[str, torch.nn.Parameter],
    ) -> None:
        self._registry, self._params, self._shards = registry, params, shards

    def write(self, names: Iterable[str], stream: Any) -> None:
        """Gather the shards of `names` into the model's parameters, in place."""
        shards, out, params = {}, {}, {}
        for name in names:
            param = params[name] = self._params[name].detach()
            shards[name] = self._shards[name].detach().to(param.dtype)
            # The logical order travels; a channels_last parameter gets it through a copy.
            out[name] = param.contiguous()
        self._registry.gather(shards, out=out, stream=stream)
        for name, param in params.items():
            if out[name] is not param:
                param.copy_(out[name])
        # Written behind torch's back: a backward through an older graph must be an error still.
        increment_version(params.values())

    def end_backward(self) -> None:
        """Do nothing."""

    @contextmanager
    def full(self) -> Iterator[None]:
        """Do nothing: they have their values."""
        yield

    def close(self, *, whole: bool) -> None:
        """Do nothing."""


@dataclass(slots=True, eq=False)
class _Block:
    """A module whose parameters are gathered and released together."""

    names: tuple[str, ...]
    whole_backward: bool  # kept until the end of backward: nothing tells when it needs them no more


@dataclass(slots=True, eq=False)
class _Use:
    """One forward of a block, which its backward comes back to."""

    block: _Block
    entered: bool = field(default=False)


class Gathered:
    """Parameters have memory only while a block's forward or backward uses them (ZeRO-3).

    A forward hook of each block acquires its parameters and releases them; so do hooks on what the
    forward returned and took, in backward. What autograd saved of a parameter is its storage, which
    is emptied and filled again.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        blocks: Sequence[torch.nn.Module],
        registry: Registry,
        params: Mapping[str, torch.nn.Parameter],
        shards: Mapping[str, torch.nn.Parameter],
        *,
        prefetch: int,
    ) -> None:
        self._params = params
        self._device = next(iter(params.values())).device
        self._nbytes = {name: param.untyped_storage().nbytes() for name, param in params.items()}
        self._gatherer = Gatherer(
            registry,
            {name: shard.detach() for name, shard in shards.items()},
            dtypes={name: str(p.dtype).removeprefix("torch.") for name, p in params.items()},
            allocate=self._allocate,
            free=self._free,
            prefetch=prefetch,
        )
        self._entered: list[_Use] = []
        self._hooks: list[Any] = []
        for module, block in _divide(model, blocks, params):
            if block.names:
                before, after = partial(self._before, block), partial(self._after, block)
                self._hooks += [
                    module.register_forward_pre_hook(before),
                    module.register_forward_hook(after, with_kwargs=True, always_call=True),
                ]
        for name in params:
            self._free(name)

    def write(self, names: Iterable[str], stream: Any) -> None:  # noqa: ARG002  # all are gathered anew
        """Forget what was gathered: the next forward gathers the new values."""
        self._gatherer.changed()
        increment_version(self._params.values())  # as above

    def end_backward(self) -> None:
        """Release what no hook has."""
        for use in list(self._entered):
            self._leave(use)

    @contextmanager
    def full(self) -> Iterator[None]:
        """Gather all parameters, and release them at the end."""
        names = tuple(self._params)
        self._acquire(names)
        try:
            yield
        finally:
            self._release(names)

    def close(self, *, whole: bool) -> None:
        """Remove the hooks, and gather all parameters for good if they are to be `whole`."""
        for hook in self._hooks:
            hook.remove()
        if whole:
            self._acquire(tuple(self._params))
        self._gatherer.close()

    def _before(self, block: _Block, *_: Any) -> None:
        self._acquire(block.names)

    def _after(self, block: _Block, _module: Any, args: Any, kwargs: Any, output: Any) -> None:
        returned = _differentiable(output)
        if torch.is_grad_enabled() and returned:
            use = _Use(block)
            register_multi_grad_hook(returned, lambda _: self._enter(use), mode="any")
            taken = _differentiable((args, kwargs))
            if taken and not block.whole_backward:
                register_multi_grad_hook(taken, lambda _: self._leave(use))
        self._release(block.names)

    def _enter(self, use: _Use) -> None:
        if not use.entered:
            use.entered = True
            self._entered.append(use)
            self._acquire(use.block.names)

    def _leave(self, use: _Use) -> None:
        if use.entered:
            use.entered = False
            self._entered.remove(use)
            self._release(use.block.names)

    def _acquire(self, names: tuple[str, ...]) -> None:
        self._gatherer.acquire(names, stream=current_stream(self._device))

    def _release(self, names: tuple[str, ...]) -> None:
        self._gatherer.release(names, stream=current_stream(self._device))

    def _allocate(self, name: str) -> torch.Tensor:
        param = self._params[name]
        param.untyped_storage().resize_(self._nbytes[name])
        return param.detach()

    def _free(self, name: str) -> None:
        self._params[name].untyped_storage().resize_(0)


def default_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the members of the outermost ModuleLists and Sequentials: the usual layers."""
    blocks: list[torch.nn.Module] = []
    modules = [model]
    for module in modules:
        listed = isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential))
        (blocks if listed else modules).extend(module.children())
    return blocks


def check_gatherable(params: Mapping[str, torch.nn.Parameter]) -> None:
    """Raise LayoutError for a parameter whose memory cannot come and go."""
    for name, param in params.items():
        whole = param.untyped_storage().nbytes() == param.numel() * param.element_size()
        if not (whole and param.is_contiguous()):
            msg = (
                f"zero=3: parameter {name!r} {tuple(param.shape)} must be contiguous, with memory "
                "of its own; use zero=2"
            )
            raise LayoutError(msg)


def _divide(
    model: torch.nn.Module,
    blocks: Sequence[torch.nn.Module],
    params: Mapping[str, torch.nn.Parameter],
) -> Iterator[tuple[torch.nn.Module, _Block]]:
    """Yield the model and each block with the parameters that no inner block has."""
    names = {param: name for name, param in params.items()}
    members = set(blocks)
    for root in (model, *(block for block in blocks if block is not model)):
        modules = [root]
        for module in modules:
            modules += [child for child in module.children() if child not in members]
        own = (param for module in modules for param in module.parameters(recurse=False))
        found = tuple(dict.fromkeys(names[param] for param in own if param in names))
        yield root, _Block(found, root is model)


def _differentiable(tree: Any) -> list[torch.Tensor]:
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [leaf for leaf in leaves if leaf.requires_grad]
