"""Fixed buckets in a fixed order, whatever order gradients arrive in. Integers and names only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cupynccl_reduce.errors import ProtocolError
from cupynccl_reduce.layout import Launch, Part

from .base import ARRIVED, FLUSHED, SKIPPED, TWICE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from cupynccl_reduce.layout import BucketLayout

__all__ = ["Planned"]


@dataclass(slots=True)
class _Bucket:
    """One planned bucket in one backward."""

    layout: BucketLayout
    first: Launch
    more: Launch
    missing: set[str] = field(default_factory=set)
    launched: bool = False

    @property
    def ready(self) -> bool:
        # A parameter used many times may always get one more gradient: only the end closes it.
        return not self.missing and self.layout.uses == "once"


class Planned:
    """Fixed buckets, launched in index order on every rank."""

    def __init__(
        self,
        buckets: Sequence[BucketLayout],
        *,
        straight: Callable[[BucketLayout], bool],
        world_size: int,
        max_buffers: int,
    ) -> None:
        self.layouts = tuple(buckets)
        largest = max(layout.send_bytes for layout in self.layouts)
        self.buffer_bytes = (largest,) * min(max_buffers, len(self.layouts))
        self._buckets = [
            _Bucket(
                layout,
                self._launch(index, layout, straight=straight(layout), world_size=world_size),
                self._launch(index, layout, straight=False, world_size=world_size, more=True),
            )
            for index, layout in enumerate(self.layouts)
        ]
        self._of = {name: b for b in self._buckets for name in b.layout.names}
        self._arrived: set[str] = set()
        self._skipped: set[str] = set()
        self._accumulate = False
        self._next = 0

    def begin(self, *, accumulate: bool) -> None:
        """Start a backward: every bucket waits for all its parameters."""
        self._accumulate = accumulate
        self._arrived.clear()
        self._skipped.clear()
        self._next = 0
        for bucket in self._buckets:
            bucket.missing.update(bucket.layout.names)
            bucket.launched = False

    def arrive(self, name: str) -> BucketLayout | None:
        """Note one gradient; return its bucket if that is complete now."""
        bucket = self._of[name]
        if name in self._arrived and bucket.layout.uses == "once":
            raise ProtocolError(TWICE)
        if name in self._skipped:
            raise ProtocolError(SKIPPED)
        if bucket.launched:
            raise ProtocolError(FLUSHED)
        bucket.missing.discard(name)
        self._arrived.add(name)
        return bucket.layout if bucket.ready else None

    def skip(self, name: str) -> BucketLayout | None:
        """Note that no gradient will come; return its bucket if that is complete now."""
        bucket = self._of[name]
        if name in self._arrived:
            raise ProtocolError(ARRIVED)
        if name in self._skipped:
            raise ProtocolError(SKIPPED)
        if bucket.launched:
            raise ProtocolError(FLUSHED)
        bucket.missing.remove(name)
        self._skipped.add(name)
        return bucket.layout if bucket.ready else None

    def due(self) -> Iterator[Launch]:
        """Yield the buckets at the front that are complete."""
        while self._next < len(self._buckets) and self._buckets[self._next].ready:
            yield self._take()

    def finish(self) -> Iterator[Launch]:
        """Yield every bucket not yet launched."""
        while self._next < len(self._buckets):
            yield self._take()

    def missing(self) -> tuple[str, ...]:
        """Return the names that neither arrived nor were skipped, in plan order."""
        return tuple(n for b in self._buckets for n in b.layout.names if n in b.missing)

    def waiting(self) -> dict[int, tuple[str, ...]]:
        """Return, for each bucket not launched, the names it still waits for."""
        return {
            index: tuple(n for n in b.layout.names if n in b.missing)
            for index, b in enumerate(self._buckets)
            if not b.launched
        }

    def untouched(self) -> Iterator[Launch]:
        """Yield nothing: every backward writes every shard."""
        return iter(())

    def _take(self) -> Launch:
        bucket = self._buckets[self._next]
        bucket.launched = True
        self._next += 1
        return bucket.more if self._accumulate else bucket.first

    def _launch(
        self,
        index: int,
        layout: BucketLayout,
        *,
        straight: bool,
        world_size: int,
        more: bool = False,
    ) -> Launch:
        parts = (Part(layout, 0, straight, more),) if layout.matrix.numel else ()
        return Launch(
            buffer=index % len(self.buffer_bytes),
            pack=parts,
            calls=parts if world_size > 1 else (),
            unpack=() if straight else parts,
            last=True,
        )
