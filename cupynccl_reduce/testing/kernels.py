"""Simulated kernels: the host runtime's, queued, with their accesses declared."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cupynccl_reduce.dlpack import View
from cupynccl_reduce.runtimes.host_norm import HostNorm

from .memory import range_of, still
from .sites import operation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cupynccl_reduce.layout import Matrix
    from cupynccl_reduce.protocols import Array, Fill
    from cupynccl_reduce.runtimes.host import HostPack, HostUnpack

__all__ = ["SimNorm", "SimPack", "SimUnpack"]

NAMED = 5  # parameters: enough to see


class SimPack:
    """protocols.PackKernel: HostPack, queued, with its accesses declared."""

    def __init__(self, matrix: Matrix, kernel: HostPack) -> None:
        self._kernel = kernel
        self._label = _label(matrix)
        self._names = [segment.name for segment in matrix.segments]

    def __call__(
        self, sources: Sequence[Sequence[View]], target: Array, *, fill: Fill, stream: Any
    ) -> None:
        """Queue the pack. It keeps nothing alive: that is the engine's business."""
        bare = [[replace(view, owner=None) for view in group] for group in sources]
        out = still(target)
        # From here on a race on these bytes is told with the parameter that they belong to.
        for name, group in zip(self._names, bare, strict=True):
            for view in group:
                stream.scheduler.detector.name(*view.span, name)
        stream.queue(
            operation("pack of", self._label),
            lambda: self._kernel.run(bare, out, fill),
            reads=[view.span for group in bare for view in group],
            writes=[range_of(target)],
        )
        stream.scheduler.step()


class SimUnpack:
    """protocols.UnpackKernel: HostUnpack, queued, with its accesses declared."""

    def __init__(self, matrix: Matrix, kernel: HostUnpack) -> None:
        self._kernel = kernel
        self._label = _label(matrix)

    def __call__(
        self, source: Array, targets: Sequence[View], *, accumulate: bool, stream: Any
    ) -> None:
        """Queue the unpack. It keeps nothing alive."""
        bare = [replace(view, owner=None) for view in targets]
        row = still(source)
        spans = [view.span for view in bare]
        stream.queue(
            operation("unpack of", self._label),
            lambda: self._kernel.run(row, bare, accumulate),
            reads=[range_of(source), *(spans if accumulate else ())],
            writes=spans,
        )
        stream.scheduler.step()


class SimNorm:
    """protocols.NormKernel: HostNorm, queued, with its accesses declared."""

    def __init__(self, arrays: Sequence[View], p: float) -> None:
        bare = [replace(view, owner=None) for view in arrays]
        self._kernel = HostNorm(bare, p)
        self._spans = [view.span for view in bare]

    def measure(self, out: Array, *, start: float, stream: Any) -> None:
        """Queue the measuring."""
        held = still(out)
        stream.queue(
            operation("norm of", "the shards"),
            lambda: self._kernel.run_measure(held, start),
            reads=self._spans,
            writes=[range_of(out)],
        )
        stream.scheduler.step()

    def finish(
        self,
        parts: Array,
        out: Array,
        *,
        max_norm: float | None,
        loss_scale: float | View,
        stream: Any,
    ) -> None:
        """Queue the end of the norm."""
        held, result, scale = still(parts), still(out), loss_scale
        reads = [range_of(parts)]
        if isinstance(scale, View):
            reads.append(scale.span)
            scale = replace(scale, owner=None)
        stream.queue(
            operation("end of the norm of", "all ranks' shards"),
            lambda: self._kernel.run_finish(held, result, max_norm, scale),
            reads=reads,
            writes=[range_of(out)],
        )
        stream.scheduler.step()

    def scale(self, factor: Array, *, stream: Any) -> None:
        """Queue the scaling."""
        held = still(factor)
        stream.queue(
            operation("scaling of", "the shards"),
            lambda: self._kernel.run_scale(held),
            reads=[range_of(factor), *self._spans],
            writes=self._spans,
        )
        stream.scheduler.step()


def _label(matrix: Matrix) -> str:
    names = [segment.name for segment in matrix.segments if segment.name]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{matrix.label} ({', '.join(names[:NAMED])}{more})" if names else matrix.label
