"""Where any array lies: a pointer and what it points to. Nothing here reads one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .dtypes import DTYPES

__all__ = ["View"]


@dataclass(slots=True)
class View:
    """Where an array lies. Valid while `owner` is referenced.

    `strides` are in elements; None means C-contiguous (strides of size-1 dimensions ignored).
    `device` is "cpu" or "cuda". `stream` is the producer's stream (a runtime's Stream object, or a
    raw handle as an int), or None where the producer has ordered itself already. What is written
    to the memory reaches the array only where `writable`.
    """

    pointer: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    device: str
    device_id: int
    stream: Any
    owner: Any
    writable: bool = True

    @property
    def span(self) -> tuple[int, int]:
        """The address of the lowest byte of any element, and the bytes up to the last one's end."""
        itemsize = DTYPES[self.dtype].itemsize
        if self.strides is None or 0 in self.shape:
            return self.pointer, math.prod(self.shape) * itemsize
        reach = [(n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)]
        below = sum(r for r in reach if r < 0)
        return self.pointer + below * itemsize, (sum(map(abs, reach)) + 1) * itemsize
