"""Fixed buckets in a fixed order, whatever order gradients arrive in. Integers and names only."""

from __future__ import annotations

from dataclasses import dataclass
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
    names: tuple[str, ...]
    once: bool
    missing: int = 0  # names that have neither arrived nor been skipped
    launched: bool = False

    @property
    def ready(self) -> bool:
        # A parameter used many times may always get one more gradient: only the end closes it.
        return not self.missing and self.once


class Planned:
    """Fixed buckets, launched in index order on every rank."""

    def __init__(
        self,
        buckets: Sequence[BucketLayout],
        *,
        straight: Callable[[BucketLayout], bool],
        world_size: int,
        max_buffers: int,
        direct: bool = True,
    ) -> None:
        self.layouts = tuple(buckets)
        self._pieces = {
            layout: layout.split_direct() if direct and layout.direct else ((layout,), ())
            for layout in self.layouts
        }
        self.packed = tuple(p for packed, _ in self._pieces.values() for p in packed)
        self.direct = tuple(d for _, apart in self._pieces.values() for d in apart)
        largest = max(map(self._buffer_bytes, self.layouts))
        self.buffer_bytes = (largest,) * min(max_buffers, len(self.layouts))
        self._buckets = [
            _Bucket(
                layout,
                self._launch(index, layout, straight=straight(layout), world_size=world_size),
                self._launch(index, layout, straight=False, world_size=world_size, more=True),
                layout.names,
                layout.uses == "once",
            )
            for index, layout in enumerate(self.layouts)
        ]
        self._of = {name: b for b in self._buckets for name in b.names}
        self._expected: dict[str, _Bucket] = {}  # what has not come, been skipped or been launched
        self._skipped: set[str] = set()
        self._absent: set[str] = set()  # launched without
        self._accumulate = False
        self._next = 0

    def begin(self, *, accumulate: bool) -> None:
        """Start a backward: every bucket waits for all its parameters."""
        self._accumulate = accumulate
        self._expected = self._of.copy()
        self._skipped.clear()
        self._absent.clear()
        self._next = 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.names)
            bucket.launched = False

    def arrive(self, name: str) -> BucketLayout | None:
        """Note one gradient; return its bucket if that is complete now."""
        bucket = self._expected.pop(name, None)
        if bucket is None:
            self._check_again(name)
            return None
        bucket.missing -= 1
        return None if bucket.missing or not bucket.once else bucket.layout

    def skip(self, name: str) -> BucketLayout | None:
        """Note that no gradient will come; return its bucket if that is complete now."""
        bucket = self._expected.pop(name, None)
        if bucket is None:
            unseen = SKIPPED if name in self._skipped else FLUSHED
            raise ProtocolError(unseen if name in self._skipped | self._absent else ARRIVED)
        bucket.missing -= 1
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
        absent = self._expected.keys() | self._absent
        return tuple(n for b in self._buckets for n in b.names if n in absent)

    def waiting(self) -> dict[int, tuple[str, ...]]:
        """Return, for each bucket not launched, the names it still waits for."""
        return {
            index: tuple(n for n in b.names if n in self._expected)
            for index, b in enumerate(self._buckets)
            if not b.launched
        }

    def untouched(self) -> Iterator[Launch]:
        """Yield nothing: every backward writes every shard."""
        return iter(())

    def _check_again(self, name: str) -> None:
        """Raise ProtocolError unless one more gradient of `name` may come."""
        if name in self._skipped:
            raise ProtocolError(SKIPPED)
        bucket = self._of[name]
        if bucket.launched and (name in self._absent or not bucket.once):
            raise ProtocolError(FLUSHED)
        if bucket.once:
            raise ProtocolError(TWICE)

    def _take(self) -> Launch:
        bucket = self._buckets[self._next]
        bucket.launched = True
        self._next += 1
        if bucket.missing:
            self._absent.update(n for n in bucket.names if self._expected.pop(n, None))
        return bucket.more if self._accumulate else bucket.first

    def _buffer_bytes(self, layout: BucketLayout) -> int:
        """Return the bytes of a bucket's matrices, and of the row beside them that joins them."""
        rows = layout.matrix.rows
        return layout.send_bytes + (layout.send_bytes // rows if self._pieces[layout][1] else 0)

    def _launch(
        self,
        index: int,
        layout: BucketLayout,
        *,
        straight: bool,
        world_size: int,
        more: bool = False,
    ) -> Launch:
        packed, direct = self._pieces[layout]
        whole: tuple[Part, ...] = ()
        if layout.matrix.numel:
            whole = (Part(layout, 0, straight, more),)
        parts = whole
        if direct:
            # Matrices one behind the other receive their rows side by side, so that one kernel
            # unpacks them all.
            offset, row = 0, layout.send_bytes
            whole = (Part(layout, 0, straight, more, row),)
            parts = ()
            for piece in (*packed, *direct):
                parts += (Part(piece, offset, straight, more, row, direct=piece in direct),)
                offset += piece.send_bytes
                row += piece.send_bytes // piece.matrix.rows
        return Launch(
            buffer=index % len(self.buffer_bytes),
            pack=parts,
            calls=parts if world_size > 1 else (),
            unpack=() if straight else whole,
            last=True,
        )
