"""What torch's models and tensors are made of. No gradients, no ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.dlpack import from_dlpack

if TYPE_CHECKING:
    from collections.abc import Container

__all__ = ["as_bytes", "as_tensor", "current_stream", "distinct", "find_stray", "trainable"]


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that require grad, each under its first name."""
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def find_stray(model: torch.nn.Module, known: Container[torch.nn.Parameter]) -> str:
    """Return name and shape of a parameter that requires grad and is not known, or nothing."""
    modules = [model]
    for module in modules:  # model.parameters() would make every name: five times slower
        for param in module._parameters.values():  # noqa: SLF001  # where parameters() looks too
            if param not in known and param is not None and param.requires_grad:
                name = next(n for n, p in model.named_parameters() if p is param)
                return f"{name!r} {tuple(param.shape)}"
        modules += [child for child in module._modules.values() if child is not None]  # noqa: SLF001
    return ""


def as_tensor(array: Any, dtype: str) -> torch.Tensor:
    """Return a tensor over the memory of a runtime's array, whose dtype has this name."""
    if dtype == "bfloat16":  # few libraries export it; the bits travel as integers
        return from_dlpack(array.view("int16")).view(torch.bfloat16)
    return from_dlpack(array)


def distinct(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of an expanded tensor that repeats no memory; all of any other."""
    for dim in reversed(range(tensor.ndim)):
        if tensor.stride(dim) == 0:
            tensor = tensor.select(dim, 0)
    return tensor


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as a flat tensor of bytes over the same memory."""
    # reshape() keeps the stride of a single element, and view() then finds it not contiguous.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def current_stream(device: torch.device) -> Any:
    """Return the stream that torch works on; the host has none."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None
