"""A model whose gradients are reduced into shards: its backward and its step. No broadcast here.

The hot path is `_arrived`, one hook per parameter, on whatever thread autograd runs it.
"""

from __future__ import annotations

from contextlib import contextmanager
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch

from cupynccl_reduce.errors import LayoutError, ProtocolError

from .tensors import as_tensor, current_stream, find_stray, trainable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from cupynccl_reduce.reducer import Reducer
    from cupynccl_reduce.registry import Registry

__all__ = ["Sharded"]


class _Mode(Enum):
    """What a hook does with a gradient: refuse it, leave it in p.grad, or hand it over."""

    OUTSIDE = auto()
    LOCAL = auto()
    REDUCING = auto()


class Sharded:
    """A model whose gradients are reduced into shards; `attach` makes it.

    A context manager: leaving it detaches. After a backward that failed, on any rank, every rank
    calls `discard()`.
    """

    def __init__(self, model: torch.nn.Module, registry: Registry, reducer: Reducer) -> None:
        self._model, self._registry, self._reducer = model, registry, reducer
        self._params = trainable(model)
        self._names = {param: name for name, param in self._params.items()}
        self._shards: dict[str, torch.nn.Parameter] = {}
        self._reduced: dict[str, torch.Tensor] = {}
        for name, param in self._params.items():
            place = registry[name]
            reduced = as_tensor(registry.shards[name], place.spec.shard_dtype)
            flat = param.detach().reshape(-1)[place.start : place.stop]
            self._shards[name] = torch.nn.Parameter(flat.to(reduced.dtype, copy=True))
            self._reduced[name] = reduced
        self._mode = _Mode.OUTSIDE
        self._local = False  # p.grad holds gradients of no_sync() backwards
        self._spoiled = False  # some of those were lost
        self._stepped: list[torch.optim.Optimizer] = []
        self._detached = False
        self._hooks = [
            param.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]  # torch's
                partial(self._arrived, name)
            )
            for name, param in self._params.items()
        ]

    @property
    def registry(self) -> Registry:
        """The registry: name -> spec (with the full shape) and this rank's interval."""
        return self._registry

    @property
    def reducer(self) -> Reducer:
        """The reducer, for its statistics and `synchronize`."""
        return self._reducer

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield `(name, shard)` in the model's order: flat parameters, for an optimizer.

        A shard is this rank's interval of the parameter, in the registry's shard dtype. It is empty
        where the parameter has fewer elements than ranks, so that optimizers of all ranks are
        alike. All are one-dimensional: choose by name, or by `registry[name].spec.shape`.
        """
        yield from self._shards.items()

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yield the shards of `named_parameters`."""
        yield from self._shards.values()

    def backward(
        self,
        loss: torch.Tensor,
        *,
        gradient: torch.Tensor | None = None,
        retain_graph: bool = False,
    ) -> None:
        """Run `loss.backward()` and hand every gradient over as it comes; p.grad is dropped.

        Collective, except inside `no_sync()`; the host is not blocked (unless missing="error" or
        policy="arrival"). Gradients that earlier `no_sync()` backwards left in p.grad go along,
        those of parameters that this backward does not touch too.

        Raises:
            ProtocolError: a parameter requires grad now and did not in attach(), before anything
                starts. GradientError: a gradient that the reducer refuses.
        """
        self._check()
        stray = find_stray(self._model, self._names)
        if stray:
            msg = (
                f"parameter {stray} requires grad, but did not in attach(): its gradient would "
                "stay on this rank. Call detach() and attach() again on every rank"
            )
            raise ProtocolError(msg)
        if self._mode is _Mode.LOCAL:
            torch.autograd.backward(loss, gradient, retain_graph=retain_graph)
            return
        with self._reducer.backward():
            self._mode = _Mode.REDUCING
            try:
                for name, param in self._params.items():
                    if not param.requires_grad and param.grad is None:
                        self._reducer.skip_grad(name)  # frozen since: its bucket need not wait
                torch.autograd.backward(loss, gradient, retain_graph=retain_graph)
                for name, param in self._params.items():
                    if param.grad is not None:  # of no_sync(), and untouched by this backward
                        self._arrived(name, param)
            finally:
                self._mode = _Mode.OUTSIDE
        self._local = False
        self._stepped.clear()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context whose backwards add up in p.grad, as torch does. Not collective.

        The next backward outside of it hands the sums over. Does not block the host.
        """
        self._check()
        before, self._mode = self._mode, _Mode.LOCAL
        try:
            yield
        finally:
            self._mode = before

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step `optimizer` on the reduced shards, and gather them into the model's parameters.

        Collective: every rank's optimizer holds the same parameters' shards, all or some of them.
        Blocks the host until every rank is here, to compare names, but on cuda not for the result;
        everything is ordered on torch's current stream. Each shard's grad is a view of the
        registry's memory, valid until the next backward; of a parameter that no longer requires
        grad it is None, of an unused one zero. Parameters are written in place: load no checkpoint
        into the model between attach() and step(), the shards would overwrite it; load it into
        the shards, and call gather().

        Raises:
            LayoutError: the optimizer holds one of the model's own parameters, or no shard.
            ProtocolError: no backward since this optimizer's last step, or only in `no_sync()`.
        """
        self._check()
        names = self._held(optimizer)
        if self._local:
            msg = "step(): gradients of no_sync() are not handed over; run a backward outside it"
            raise ProtocolError(msg)
        if optimizer in self._stepped:
            msg = "step(): this optimizer used these gradients already; call backward() first"
            raise ProtocolError(msg)
        stream = current_stream(next(iter(self._names)).device)
        self._reducer.wait(stream=stream)
        for name in names:
            trains = self._params[name].requires_grad
            self._shards[name].grad = self._reduced[name] if trains else None
        optimizer.step()
        self._stepped.append(optimizer)
        self._write_back(names, stream)

    def gather(self) -> None:
        """Gather all shards into the model's parameters: after a checkpoint was loaded into them.

        Collective, and blocks the host as step() does. ProtocolError inside backward.
        """
        self._check()
        self._write_back(self._names.values(), current_stream(next(iter(self._names)).device))

    def discard(self) -> None:
        """Drop the gradients of a step that is skipped or failed, local ones too.

        Not collective by itself, but every rank must discard the same steps. Does not block.
        """
        self._reducer.discard()
        self._drop_grads()
        self._local = self._spoiled = False
        self._stepped.clear()

    def detach(self) -> None:
        """Remove all hooks, close the reducer and drop all gradients; blocks the host. Idempotent.

        The model's parameters keep their values. attach() may be called again.
        """
        if self._detached:
            return
        if self._mode is _Mode.REDUCING:
            msg = "detach() inside backward(); call it afterwards"
            raise ProtocolError(msg)
        self._reducer.close()  # refuses inside a backward; nothing has changed then
        self._detached = True
        for hook in self._hooks:
            hook.remove()
        self._stepped.clear()
        self._drop_grads()
        for shard in self._shards.values():
            shard.grad = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.detach()

    def __repr__(self) -> str:
        state = "DETACHED" if self._detached else self._mode.name
        return f"<Sharded {len(self._params)} parameters {state}, {self._reducer!r}>"

    def _arrived(self, name: str, param: torch.Tensor) -> None:
        """Run as the hook: torch gives it the parameter, whose gradient is complete in p.grad."""
        if self._mode is _Mode.REDUCING:
            self._reducer.reduce_grad(name, param.grad)
            param.grad = None  # the library holds it until it is packed, and no longer
        elif self._mode is _Mode.LOCAL:
            self._local = True
        else:
            # Left in p.grad, it would be counted again by the backward that repeats this one.
            param.grad = None
            self._spoiled |= self._local
            msg = (
                f"a gradient of parameter {name!r} outside sharded.backward(): call that instead "
                "of loss.backward(), and detach() a model before it is attached again"
            )
            raise ProtocolError(msg)

    def _drop_grads(self) -> None:
        for param in self._params.values():
            param.grad = None

    def _check(self) -> None:
        if self._detached:
            msg = "this model is detached; attach() it again"
            raise ProtocolError(msg)
        if self._spoiled:
            msg = (
                "gradients of no_sync() were lost to a backward outside sharded.backward(); every "
                "rank calls discard() and begins the step again"
            )
            raise ProtocolError(msg)

    def _held(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Return the names whose shards `optimizer` holds, in the model's order."""
        held = {param for group in optimizer.param_groups for param in group["params"]}
        for name, param in self._params.items():
            if param in held:
                msg = (
                    f"the optimizer holds the full parameter {name!r} {tuple(param.shape)}, which "
                    "gets no gradient; build it from sharded.parameters()"
                )
                raise LayoutError(msg)
        names = [name for name, shard in self._shards.items() if shard in held]
        if not names:
            msg = "the optimizer holds none of the shards; build it from sharded.parameters()"
            raise LayoutError(msg)
        return names

    def _write_back(self, names: Iterable[str], stream: Any) -> None:
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
        torch.autograd.graph.increment_version(params.values())
