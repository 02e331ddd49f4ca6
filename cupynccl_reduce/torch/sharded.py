"""A model whose gradients are reduced into shards: its backward and its step. No broadcast here."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Literal, Self

import torch

from cupynccl_reduce.errors import LayoutError, ProtocolError

from .gradients import Gradients, Mode
from .parameters import Gathered, Parameters, Whole
from .steps import Steps
from .tensors import as_tensor, current_stream, find_stray, trainable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from cupynccl_reduce.reducer import Reducer
    from cupynccl_reduce.registry import Registry

__all__ = ["Sharded"]


class Sharded:
    """A model whose gradients are reduced into shards; `attach` makes it.

    A context manager: leaving it detaches. After a backward that failed, on any rank, every rank
    calls `discard()`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        registry: Registry,
        reducer: Reducer,
        *,
        zero: Literal[1, 2, 3],
        blocks: Sequence[torch.nn.Module],
        prefetch: int,
    ) -> None:
        self._zero = zero
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
        self._parameters: Parameters = (
            Gathered(model, blocks, registry, self._params, self._shards, prefetch=prefetch)
            if zero == 3  # noqa: PLR2004  # the field's name for it
            else Whole(registry, self._params, self._shards)
        )
        self._gradients = Gradients(self._params, reducer)
        self._device = next(iter(self._names)).device
        self._steps = Steps(reducer, self._device)
        self._detached = False

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
        those of parameters that this backward does not touch too. With zero=1 every backward is as
        in `no_sync()`, and step() hands over.

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
        run = partial(torch.autograd.backward, loss, gradient, retain_graph=retain_graph)
        try:
            if self._zero == 1:
                with self.no_sync():
                    run()
            elif self._gradients.mode is Mode.LOCAL:
                run()
            else:
                self._reduce(run)
        finally:
            self._parameters.end_backward()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context whose backwards add up in p.grad, as torch does. Not collective.

        The next backward outside of it hands the sums over. Does not block the host.
        """
        self._check()
        with self._gradients.stay():
            yield

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        max_norm: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> torch.Tensor | None:
        """Step `optimizer` on the reduced shards, and gather them into the model's parameters.

        Collective: every rank's optimizer holds the same parameters' shards, all or some of them.
        Blocks the host until every rank is here, to compare names, but on cuda not for the result;
        everything is ordered on torch's current stream. Each shard's grad is a view of the
        registry's memory, valid until the next backward; of a parameter that no longer requires
        grad it is None, of an unused one zero. Parameters are written in place: load no checkpoint
        into the model between attach() and step(), the shards would overwrite it; load it into
        the shards, and call gather().

        Args:
            optimizer: holds shards of `parameters()`, and nothing else of the model.
            max_norm: clip all gradients of the model together, as clip_grad_norm_ does: see
                Reducer.clip.
            scaler: the one that scaled the loss: `sharded.backward(scaler.scale(loss))`. Gradients
                are unscaled before they are clipped, and where any of any rank is not finite every
                rank skips the step. Blocks the host for that, as GradScaler does. Leave its
                unscale_() alone, and call `scaler.update()` after the last step.

        Returns:
            The norm of all unscaled gradients before clipping, 0-d float64 on the device; None
            without max_norm and scaler. With scaler, the step was skipped where it is not finite.

        Raises:
            LayoutError: the optimizer holds one of the model's own parameters, or no shard.
            ProtocolError: no backward since this optimizer's last step, or only in `no_sync()`; two
                optimizers on the same gradients with different arguments.
        """
        self._check()
        names = self._held(optimizer)
        if self._gradients.local and self._zero == 1:
            self._reduce(lambda: None)
        if self._gradients.local:
            msg = "step(): gradients of no_sync() are not handed over; run a backward outside it"
            raise ProtocolError(msg)
        self._steps.check(optimizer)
        stream = current_stream(self._device)
        norm = self._steps.clip(max_norm, scaler, stream)
        self._reducer.wait(stream=stream)
        for name in names:
            trains = self._params[name].requires_grad
            self._shards[name].grad = self._reduced[name] if trains else None
        if self._steps.step(optimizer, scaler):
            self._parameters.write(names, stream)
        return norm

    def gather(self) -> None:
        """Gather all shards into the model's parameters: after a checkpoint was loaded into them.

        Collective, and blocks the host as step() does. ProtocolError inside backward.
        """
        self._check()
        self._parameters.write(self._shards, current_stream(self._device))

    def full_parameters(self) -> AbstractContextManager[None]:
        """Return a context in which the model's parameters have their values, to read them.

        Collective with zero=3, where they have no memory between steps; else nothing. What is
        written to them there is lost.
        """
        self._check()
        return self._parameters.full()

    def discard(self) -> None:
        """Drop the gradients of a step that is skipped or failed, local ones too.

        Not collective by itself, but every rank must discard the same steps. Does not block.
        """
        self._reducer.discard()
        self._gradients.drop()
        self._steps.clear()

    def detach(self) -> None:
        """Remove all hooks, close the reducer and drop all gradients; blocks the host. Idempotent.

        The model's parameters keep their values; with zero=3 they get them back, and this is
        collective. attach() may be called again.
        """
        self._detach(whole=True)

    def _detach(self, *, whole: bool) -> None:
        if self._detached:
            return
        if self._gradients.mode is Mode.REDUCING:
            msg = "detach() inside backward(); call it afterwards"
            raise ProtocolError(msg)
        self._reducer.close()  # refuses inside a backward; nothing has changed then
        self._detached = True
        self._parameters.close(whole=whole and self._registry.world.usable)
        self._gradients.remove()
        self._gradients.drop()
        self._steps.clear()
        for shard in self._shards.values():
            shard.grad = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._detach(whole=error is None)

    def __repr__(self) -> str:
        state = "DETACHED" if self._detached else self._gradients.mode.name
        return f"<Sharded {len(self._params)} parameters {state}, {self._reducer!r}>"

    def _reduce(self, run: Callable[[], None]) -> None:
        self._gradients.reduce(run)
        self._steps.clear()

    def _check(self) -> None:
        if self._detached:
            msg = "this model is detached; attach() it again"
            raise ProtocolError(msg)
        self._gradients.check()

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
