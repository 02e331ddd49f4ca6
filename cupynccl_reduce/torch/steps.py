"""The optimizers' steps on the gradients of one cycle: clipped, unscaled, skipped. No shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch

from cupynccl_reduce.errors import ProtocolError

from .tensors import as_tensor

if TYPE_CHECKING:
    from cupynccl_reduce.reducer import Reducer

__all__ = ["Steps"]


class Steps:
    """Clips the gradients of a reducer once per cycle, and steps optimizers as a scaler allows.

    A torch GradScaler looks for what is not finite in the gradients of an optimizer, which are this
    rank's shards: ranks would differ. It is shown one gradient instead, the norm of all of them,
    which is the same on every rank, and not finite if any gradient is not.
    """

    def __init__(self, reducer: Reducer, device: torch.device) -> None:
        self._reducer = reducer
        self._device = device
        self._stepped: list[torch.optim.Optimizer] = []
        self._asked: tuple[float | None, Any] | None = None  # in this cycle: max_norm, scaler
        self._norm: torch.Tensor | None = None
        # Kept, because a scaler knows optimizers by their id() until its update().
        self._norm_optimizers: WeakKeyDictionary[torch.optim.Optimizer, _NormOptimizer] = (
            WeakKeyDictionary()
        )

    def clear(self) -> None:
        """Begin a cycle."""
        self._stepped.clear()
        self._asked = self._norm = None

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ProtocolError if this optimizer has stepped on these gradients."""
        if optimizer in self._stepped:
            msg = "step(): this optimizer used these gradients already; call backward() first"
            raise ProtocolError(msg)

    def clip(self, max_norm: float | None, scaler: Any, stream: Any) -> torch.Tensor | None:
        """Clip and unscale, unless a step on these gradients has; return their norm if asked to.

        Raises:
            ProtocolError: another step on these gradients asked for something else.
        """
        asked = max_norm, scaler
        if self._asked is None and asked != (None, None):
            loss_scale: Any = 1.0
            if scaler is not None:
                # get_scale() would block the host.
                loss_scale = scaler.scale(torch.ones((), device=self._device))
            norm = self._reducer.clip(max_norm, loss_scale=loss_scale, stream=stream)
            # The next norm overwrites the reducer's.
            self._norm = as_tensor(norm, "float64").clone()
        elif self._asked not in (None, asked):
            msg = (
                "step(): another optimizer's step on the same gradients gave another max_norm or "
                "scaler; give the same to all"
            )
            raise ProtocolError(msg)
        self._asked = asked
        return self._norm

    def step(self, optimizer: torch.optim.Optimizer, scaler: Any) -> bool:
        """Step; return whether the optimizer did, and was not skipped: alike on all ranks."""
        if scaler is None:
            optimizer.step()
            self._stepped.append(optimizer)
            return True
        assert self._norm is not None
        if optimizer not in self._norm_optimizers:
            self._norm_optimizers[optimizer] = _NormOptimizer(optimizer, self._device)
        stands_in = self._norm_optimizers[optimizer]
        stands_in.show(self._norm)
        scaler.step(stands_in)
        self._stepped.append(optimizer)
        return stands_in.stepped


class _NormOptimizer(torch.optim.Optimizer):
    """Stands for an optimizer before a GradScaler: its one gradient is the norm of all."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        norm = torch.nn.Parameter(torch.zeros((), dtype=torch.float64, device=device))
        super().__init__([norm], {})
        self._param = norm
        self._optimizer = ref(optimizer)
        self.stepped = False

    def show(self, norm: torch.Tensor) -> None:
        """Take a norm as the gradient: a copy, for the scaler divides it."""
        self._param.grad = norm.clone()
        self.stepped = False

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closures here
        """Step the optimizer that this one stands for."""
        optimizer = self._optimizer()
        assert optimizer is not None
        optimizer.step(closure)
        self.stepped = True
