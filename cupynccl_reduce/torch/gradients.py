"""What becomes of a gradient that autograd has completed: handed over, or left in p.grad.

The hot path is `_arrived`, one hook per parameter, on whatever thread autograd runs it.
"""

from __future__ import annotations

from contextlib import contextmanager
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING

from cupynccl_reduce.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch

    from cupynccl_reduce.reducer import Reducer

__all__ = ["Gradients", "Mode"]


class Mode(Enum):
    """What a hook does with a gradient: refuse it, leave it in p.grad, or hand it over."""

    OUTSIDE = auto()
    LOCAL = auto()
    REDUCING = auto()


class Gradients:
    """Hooks on parameters, and what they do at present.

    Attributes:
        mode: of all hooks.
        local: whether p.grad holds gradients that no backward has handed over.
    """

    def __init__(self, params: Mapping[str, torch.nn.Parameter], reducer: Reducer) -> None:
        self._params, self._reducer = params, reducer
        self.mode = Mode.OUTSIDE
        self.local = False
        self._spoiled = False  # some of those were lost
        self._hooks = [
            param.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]  # torch's
                partial(self._arrived, name)
            )
            for name, param in params.items()
        ]

    def check(self) -> None:
        """Raise ProtocolError if gradients were lost."""
        if self._spoiled:
            msg = (
                "gradients of no_sync() were lost to a backward outside sharded.backward(); every "
                "rank calls discard() and begins the step again"
            )
            raise ProtocolError(msg)

    def reduce(self, run: Callable[[], None]) -> None:
        """Hand over what `run` computes, and what is in p.grad already."""
        with self._reducer.backward():
            self.mode = Mode.REDUCING
            try:
                for name, param in self._params.items():
                    if not param.requires_grad and param.grad is None:
                        self._reducer.skip_grad(name)  # frozen since: its bucket need not wait
                run()
                for name, param in self._params.items():
                    if param.grad is not None:  # of no_sync(), and untouched by this backward
                        self._arrived(name, param)
            finally:
                self.mode = Mode.OUTSIDE
        self.local = False

    @contextmanager
    def stay(self) -> Iterator[None]:
        """Return a context in which gradients add up in p.grad."""
        before, self.mode = self.mode, Mode.LOCAL
        try:
            yield
        finally:
            self.mode = before

    def drop(self) -> None:
        """Drop what is in p.grad, and forget that any was lost."""
        for param in self._params.values():
            param.grad = None
        self.local = self._spoiled = False

    def remove(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks:
            hook.remove()

    def _arrived(self, name: str, param: torch.Tensor) -> None:
        """Run as the hook: torch gives it the parameter, whose gradient is complete in p.grad."""
        if self.mode is Mode.REDUCING:
            self._reducer.reduce_grad(name, param.grad)
            param.grad = None  # the library holds it until it is packed, and no longer
        elif self.mode is Mode.LOCAL:
            self.local = True
        else:
            # Left in p.grad, it would be counted again by the backward that repeats this one.
            param.grad = None
            self._spoiled |= self.local
            msg = (
                f"a gradient of parameter {name!r} outside sharded.backward(): call that instead "
                "of loss.backward(), and detach() a model before it is attached again"
            )
            raise ProtocolError(msg)
