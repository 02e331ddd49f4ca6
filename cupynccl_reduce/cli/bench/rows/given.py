"""A torch module whose backward computes nothing: every parameter's gradient is given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from cupynccl_reduce.layout import plan_buckets

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .setup import Setup

__all__ = ["GivenGradients", "build_given"]


class _Give(torch.autograd.Function):
    """Passes a scalar on; in backward, hands one parameter its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        carry: torch.Tensor,
        param: torch.Tensor,  # noqa: ARG004  # so that it has a place in the graph
        grad: torch.Tensor,
    ) -> torch.Tensor:
        ctx.grad = grad
        return carry.view_as(carry)

    @staticmethod
    def backward(ctx: Any, carry: torch.Tensor) -> Any:
        # Another tensor over the same memory: torch takes it as it is, and would copy ctx.grad.
        return carry, ctx.grad.detach(), None


class _Chunk(nn.Module):
    """The parameters of one bucket, and their gradients."""

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self.params = nn.ParameterList(nn.Parameter(data) for data, _ in pairs)
        self.grads = [grad for _, grad in pairs]

    def forward(self, carry: torch.Tensor) -> torch.Tensor:
        for param, grad in zip(self.params, self.grads, strict=True):
            carry = _Give.apply(carry, param, grad)  # type: ignore[no-untyped-call]  # torch's
        return carry.clone()


class GivenGradients(nn.Module):
    """One chunk for each bucket, last bucket first, as a model's layers would be."""

    def __init__(self, chunks: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]]) -> None:
        super().__init__()
        self.chunks = nn.ModuleList(_Chunk(pairs) for pairs in chunks)

    def forward(self, carry: torch.Tensor) -> torch.Tensor:
        """Return `carry`; its backward gives all gradients, one by one, in reverse order."""
        for chunk in self.chunks:
            carry = chunk(carry)
        return carry


def build_given(setup: Setup) -> GivenGradients:
    """Return the module of `setup`. Its parameters are uninitialised memory of their own."""
    grads = dict(zip([spec.name for spec in setup.params], setup.gradients, strict=True))
    plan = plan_buckets(setup.params, world_size=1, bucket_bytes=setup.bucket_bytes)
    chunks = [
        [(torch.zeros_like(grads[name]), grads[name]) for name in reversed(bucket.names)]
        for bucket in reversed(plan)
    ]
    return GivenGradients(chunks)
