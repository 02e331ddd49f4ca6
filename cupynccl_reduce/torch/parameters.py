"""The model's own parameters between steps: whole on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.autograd.graph import increment_version

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

    from cupynccl_reduce.registry import Registry

__all__ = ["Whole"]


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
