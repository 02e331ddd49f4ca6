"""The norm of arrays on the host, and their scaling, in NumPy. No collectives."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from .flat import apply, flat_array

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cupynccl_reduce.dlpack import View
    from cupynccl_reduce.protocols import Array

__all__ = ["HostNorm"]

TILE = 1 << 16  # elements cast to float64 at a time
EPSILON = 1e-6  # torch's


class HostNorm:
    """protocols.NormKernel in NumPy.

    The `run_` methods do their work at once, on this thread.
    """

    def __init__(self, arrays: Sequence[View], p: float) -> None:
        self._arrays = tuple(arrays)
        self._p = p

    def measure(self, out: Array, *, start: float, stream: Any) -> None:
        """Queue: `out` becomes this rank's part of the norm."""
        stream.submit(partial(self.run_measure, out, start))

    def finish(
        self,
        parts: Array,
        out: Array,
        *,
        max_norm: float | None,
        loss_scale: float | View,
        stream: Any,
    ) -> None:
        """Queue: `out` becomes norm and factor."""
        stream.submit(partial(self.run_finish, parts, out, max_norm, loss_scale))

    def scale(self, factor: Array, *, stream: Any) -> None:
        """Queue: multiply every element."""
        stream.submit(partial(self.run_scale, factor))

    @np.errstate(all="ignore")  # infinities and overflow are values here, as on a GPU
    def run_measure(self, out: Array, start: float) -> None:
        """Measure now: tile by tile, in the order of the arrays."""
        total = np.float64(start)
        for view in self._arrays:
            flat = flat_array(view)
            for begin in range(0, flat.size, TILE):
                wide = np.abs(flat[begin : begin + TILE].astype(np.float64))
                total = self._join(total, wide if math.isinf(self._p) else wide**self._p)
        out[0] = total

    @np.errstate(all="ignore")
    def run_finish(
        self, parts: Array, out: Array, max_norm: float | None, loss_scale: float | View
    ) -> None:
        """Finish now."""
        scale = np.float64(
            loss_scale if isinstance(loss_scale, float) else flat_array(loss_scale)[0]
        )
        norm = self._root(self._join(np.float64(0), parts)) / scale
        factor = np.float64(1)
        if max_norm is not None:
            factor = np.minimum(max_norm / (norm + EPSILON), 1)  # a NaN stays
        out[0], out[1] = norm, factor / scale

    @np.errstate(all="ignore")
    def run_scale(self, factor: Array) -> None:
        """Scale now."""
        if factor[0] == 1:
            return
        for view in self._arrays:
            flat = flat_array(view)
            for begin in range(0, flat.size, TILE):
                part = flat[begin : begin + TILE]
                apply(np.multiply, part, factor[0], part, np.dtype(np.float64))

    def _root(self, total: Any) -> Any:
        if math.isinf(self._p):
            return total
        return np.sqrt(total) if self._p == 2 else total ** (1 / self._p)  # noqa: PLR2004  # the 2-norm

    def _join(self, total: Any, terms: Array) -> Any:
        """Return the sum of all, or the largest of all, of which a NaN is one."""
        if math.isinf(self._p):
            return np.maximum(total, np.max(terms, initial=0.0))
        return total + np.sum(terms)
