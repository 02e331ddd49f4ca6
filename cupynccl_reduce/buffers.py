"""Send buffers, and what each layout needs at every launch. No streams are ordered here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .dtypes import DTYPES
from .layout import ALIGN_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .dlpack import View
    from .layout import BucketLayout, Part
    from .policies import Policy
    from .protocols import Array, Runtime
    from .registry import Registry

__all__ = ["Prepared", "SendBuffer", "lies_ready", "prepare"]

MAX_VIEWS = 1024  # kept of one buffer; arrival order may ask for ever new ones


@dataclass(slots=True, eq=False)
class Prepared:
    """What one layout needs at every launch, made once: kernels compiled, tables uploaded."""

    row: Array  # the shards' memory, where a row may be received straight into it
    pack: Any = None  # PackKernel of a layout that launches pack
    unpack: Any = None  # UnpackKernel of one that they unpack
    targets: Sequence[View] = ()


def prepare(registry: Registry, policy: Policy, divisor: int) -> dict[BucketLayout, Prepared]:
    """Return what launches of `policy` need; pack divides by `divisor`, where the sum does not."""
    runtime = registry.world.runtime
    prepared: dict[BucketLayout, Prepared] = {}

    def of(layout: BucketLayout) -> Prepared:
        if layout not in prepared:
            row = registry.row(layout) if registry.owns(layout) else None
            prepared[layout] = Prepared(row)
        return prepared[layout]

    for layouts, by in ((policy.packed, divisor), (policy.direct, 1)):
        for layout in layouts:
            if layout.matrix.numel:
                of(layout).pack = runtime.pack_kernel(
                    layout.matrix, layout.dtype, layout.reduce_dtype, divisor=by
                )
    for layout in policy.layouts:
        if layout.matrix.numel:
            matrix, targets = registry.targets(layout)
            of(layout).targets = targets
            of(layout).unpack = runtime.unpack_kernel(
                matrix, layout.reduce_dtype, layout.shard_dtype
            )
    return prepared


def lies_ready(group: Sequence[View]) -> bool:
    """Whether a gradient is one array, laid out and aligned as its matrix would be."""
    return len(group) == 1 and group[0].strides is None and not group[0].pointer % ALIGN_BYTES


@dataclass(slots=True, eq=False)
class SendBuffer:
    """One send buffer: idle, filling, or in flight until `sent` has passed."""

    runtime: Runtime
    rank: int
    array: Array
    packed: Any  # event on the copy stream, after the last pack
    sent: Any  # event on the communication stream, after the last reader of `array`
    filling: bool = False
    flown: bool = False  # launched since the host, or the end of a capture, knew it to be idle
    sources: list[Sequence[View]] = field(default_factory=list)
    # Their streams, in order; None is one that nobody told us of.
    producers: dict[Any, Any] = field(default_factory=dict)
    direct: dict[BucketLayout, Array] = field(default_factory=dict)  # sent from where they lie
    views: dict[tuple[int, int, str], Array] = field(default_factory=dict)
    read: Any = field(init=False)  # event after the last reader of `sources`

    def __post_init__(self) -> None:
        self.read = self.packed

    def matrix(self, part: Part) -> Array:
        """Return the memory of `part`'s matrix."""
        return self._view(part.offset, part.layout.matrix.numel, part.layout.reduce_dtype)

    def row(self, part: Part) -> Array:
        """Return the memory that this rank receives `part`'s row in."""
        dtype, columns = part.layout.reduce_dtype, part.layout.matrix.columns
        start = part.row
        if start is None:
            start = part.offset + self.rank * columns * DTYPES[dtype].itemsize
        return self._view(start, columns, dtype)

    def _view(self, offset: int, numel: int, dtype: str) -> Array:
        key = offset, numel, dtype
        view = self.views.get(key)
        if view is None:
            if len(self.views) >= MAX_VIEWS:
                self.views.clear()
            view = self.views[key] = self.runtime.view(self.array, offset, numel, dtype)
        return view
