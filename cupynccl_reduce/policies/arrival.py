"""Buckets filled in arrival order: the reference algorithm. Integers and names only.

One bucket per wire dtype is launched when the next gradient does not fit, with one reduce-scatter
per gradient: the launch points and grouping of DeepSpeed's DeepCompile for ZeRO-3 (its
`reduceGrad` and `flushReduceBucket`). Every rank must hand over the same gradients in one order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cupynccl_reduce.errors import ProtocolError
from cupynccl_reduce.layout import Launch, Part, send_bound

from .base import ARRIVED, SKIPPED, TWICE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from cupynccl_reduce.layout import BucketLayout

__all__ = ["Arrival"]


@dataclass(slots=True)
class _Group:
    """The buffers of one wire dtype: one fills, the others are in flight."""

    buffers: tuple[int, ...]
    capacity: int
    turn: int = 0
    filled: int = 0
    offset: int = 0
    parts: list[Part] = field(default_factory=list)


class Arrival:
    """One bucket per wire dtype, filled in arrival order: every rank needs the same order."""

    def __init__(
        self,
        buckets: Sequence[BucketLayout],
        *,
        straight: Callable[[BucketLayout], bool],
        world_size: int,
        max_buffers: int,
        bucket_bytes: int,
    ) -> None:
        self.layouts = tuple(single for layout in buckets for single in layout.split())
        self.packed = self.layouts
        self.direct: tuple[BucketLayout, ...] = ()
        self._of = {layout.names[0]: layout for layout in self.layouts}
        self._straight = straight
        self._world_size = world_size
        self._groups: dict[str, _Group] = {}
        sizes: list[int] = []
        for dtype in dict.fromkeys(layout.reduce_dtype for layout in self.layouts):
            members = [layout for layout in self.layouts if layout.reduce_dtype == dtype]
            buffers = tuple(range(len(sizes), len(sizes) + max_buffers))
            self._groups[dtype] = _Group(buffers, bucket_bytes)
            sizes += [send_bound(members, bucket_bytes)] * max_buffers
        self.buffer_bytes = tuple(sizes)
        self._missing: dict[str, BucketLayout] = {}
        self._skipped: set[str] = set()
        self._reduced: set[str] = set()
        self._queue: deque[BucketLayout] = deque()

    def begin(self, *, accumulate: bool) -> None:
        """Start a backward."""
        if not accumulate:
            self._reduced.clear()
        for group in self._groups.values():
            group.filled = group.offset = 0
            group.parts.clear()  # of a backward that ended without launching them
        self._skipped.clear()
        self._missing = self._of.copy()

    def arrive(self, name: str) -> BucketLayout | None:
        """Note one gradient, which is packed at once: its layout is complete."""
        layout = self._of[name]
        if self._missing.pop(name, None) is None:
            if name in self._skipped:
                raise ProtocolError(SKIPPED)
            if layout.uses == "once":
                raise ProtocolError(TWICE)
        self._queue.append(layout)
        return layout

    def skip(self, name: str) -> BucketLayout | None:
        """Note that no gradient will come."""
        if self._missing.pop(name, None) is None:
            raise ProtocolError(SKIPPED if name in self._skipped else ARRIVED)
        self._skipped.add(name)
        return None

    def due(self) -> Iterator[Launch]:
        """Yield the pack of what arrived, behind the launch of a bucket it does not fit in."""
        while self._queue:
            layout = self._queue.popleft()
            group = self._groups[layout.reduce_dtype]
            full = group.filled + layout.gradient_bytes > group.capacity
            # What repeats ("many") may fill a buffer with its padding first.
            full |= group.offset + layout.send_bytes > self.buffer_bytes[group.buffers[0]]
            if group.filled and full:
                yield self._flush(group)
            # A gradient larger than the bucket grows it, for good.
            group.capacity = max(group.capacity, layout.gradient_bytes)
            name = layout.names[0]
            accumulate = name in self._reduced
            self._reduced.add(name)
            if not layout.matrix.numel:
                continue
            straight = self._world_size > 1 and not accumulate and self._straight(layout)
            part = Part(layout, group.offset, straight, accumulate)
            group.parts.append(part)
            group.filled += layout.gradient_bytes
            group.offset += layout.send_bytes
            yield Launch(group.buffers[group.turn], (part,), (), (), last=False)

    def finish(self) -> Iterator[Launch]:
        """Yield the launch of every bucket that holds something."""
        yield from self.due()
        for group in self._groups.values():
            if group.parts:
                yield self._flush(group)

    def missing(self) -> tuple[str, ...]:
        """Return the names that neither arrived nor were skipped, in plan order."""
        return tuple(name for name in self._of if name in self._missing)

    def waiting(self) -> dict[int, tuple[str, ...]]:
        """Return nothing: a bucket waits for no parameter in particular."""
        return {}

    def untouched(self) -> Iterator[Launch]:
        """Yield a launch for each parameter that never arrived in this cycle."""
        for name, layout in self._of.items():
            if name not in self._reduced and layout.matrix.numel:
                group = self._groups[layout.reduce_dtype]
                parts = (Part(layout, 0, straight=False, accumulate=False),)
                yield Launch(group.buffers[group.turn], parts, (), parts, last=True)

    def _flush(self, group: _Group) -> Launch:
        parts = tuple(group.parts)
        launch = Launch(
            buffer=group.buffers[group.turn],
            pack=(),
            calls=parts if self._world_size > 1 else (),
            unpack=tuple(part for part in parts if not part.straight),
            last=True,
        )
        group.turn = (group.turn + 1) % len(group.buffers)
        group.filled = group.offset = 0
        group.parts.clear()
        return launch
