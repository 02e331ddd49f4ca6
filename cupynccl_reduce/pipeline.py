"""Order and lifetime: which stream waits for what, and what is kept alive until when.

Streams and the edges between them (letters are used in the comments below)::

    producers --A--> copy stream: --B--> communication stream: --C--> readers
        ^            pack                collectives, unpack             |
        |              |  ^                  |      ^                    |
        '------D-------'  '--------E---------'      '---------F----------'

    A  a gradient is written before the pack reads it
    B  a matrix is packed before the collective sends it
    C  shards are complete before a stream that called wait() reads them
    D  a source's memory is not reused before the pack has read it; K buckets are held at most
    E  a send buffer is not packed again before its last collective has read it
    F  shards are not written again before the streams that called wait() have read them

No policy, no names' meaning, no arithmetic here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from .dlpack import View
    from .layout import BucketLayout, Launch, Part
    from .options import Options
    from .policies import Policy
    from .protocols import Array, Fill, PackKernel, UnpackKernel
    from .registry import Registry

__all__ = ["Pipeline"]


@dataclass(slots=True, eq=False)
class _Prepared:
    """What one layout needs at every launch, made once."""

    pack: PackKernel
    unpack: UnpackKernel
    targets: list[View]
    row: Array  # the shards' memory, where a row may be received straight into it
    ready: list[Any] = field(default_factory=list)  # events of edge A
    marked: int = 0  # how many of them the next pack waits for


@dataclass(slots=True, eq=False)
class _SendBuffer:
    """One send buffer: idle, filling, or in flight until `sent` has passed."""

    array: Array
    packed: Any  # event on the copy stream, after the last pack
    sent: Any  # event on the communication stream, after the last reader of `array`
    filling: bool = False
    sources: list[Sequence[View]] = field(default_factory=list)
    views: dict[tuple[BucketLayout, int], tuple[Array, Array]] = field(default_factory=dict)


class Pipeline:
    """Runs launches. Every method only queues work, but `synchronize` and `close`."""

    def __init__(
        self,
        registry: Registry,
        policy: Policy,
        options: Options,
    ) -> None:
        world, runtime = registry.world, registry.world.runtime
        divisor = world.world_size if options.pack_divides else 1
        self._world = world
        self._runtime = runtime
        self._op = options.collective_op
        self._copy = world.copy_stream
        self._prepared: dict[BucketLayout, _Prepared] = {}
        for layout in policy.layouts:
            if layout.matrix.numel:
                wire = layout.reduce_dtype
                matrix, targets = registry.targets(layout)
                self._prepared[layout] = _Prepared(
                    runtime.pack_kernel(layout.matrix, layout.dtype, wire, divisor=divisor),
                    runtime.unpack_kernel(matrix, wire, layout.shard_dtype),
                    targets,
                    registry.row(layout) if registry.owns(layout) else None,
                )
        self._buffers = [
            _SendBuffer(
                runtime.allocate(nbytes, memory=options.memory), runtime.event(), runtime.event()
            )
            for nbytes in policy.buffer_bytes
        ]
        self._landed = runtime.event()
        self._readers = registry.readers  # stream -> event of edge F
        self._free_events: list[Any] = []
        self.buffer_bytes = sum(policy.buffer_bytes)
        self.shard_bytes = registry.arena_bytes
        self.launches = 0
        self.collectives = 0
        self.sent_bytes = 0

    def read(self, source: Any) -> View:
        """Describe a gradient; its producer is ordered before the copy stream, now or by `mark`."""
        return self._runtime.read(source, self._copy)

    def mark(self, layout: BucketLayout, groups: Iterable[Sequence[View]]) -> None:
        """Note the present end of the producers' streams: all of a bucket's gradients are there.

        Marking when the last gradient arrives, not at the launch, keeps a bucket that must queue
        behind an earlier one from waiting for backward work that came later.
        """
        prepared = self._prepared.get(layout)
        if prepared is None:
            return
        streams = {view.stream: None for group in groups for view in group}
        streams.pop(None, None)
        for stream in streams:
            if prepared.marked == len(prepared.ready):
                prepared.ready.append(self._runtime.event())
            prepared.ready[prepared.marked].record(stream)
            prepared.marked += 1

    def run(
        self,
        launches: Iterable[Launch],
        take: Callable[[BucketLayout], list[Sequence[View]]],
        fill: Fill,
        check: Callable[[Launch], None] | None = None,
    ) -> None:
        """Queue launches; `take` gives up the sources of each layout that is packed.

        `check` may refuse a launch before anything of it is queued.
        """
        for launch in launches:
            if check is not None:
                check(launch)
            buffer = self._buffers[launch.buffer]
            self._hold_back_writers()
            if not buffer.filling:
                self._reuse(buffer)
            for part in launch.pack:
                self._pack(buffer, part, take(part.layout), fill)
            if launch.last:
                self._send(buffer, launch)
            else:
                # More packs follow, but wait_packed() may ask for those so far.
                buffer.packed.record(self._copy)

    def wait(self, stream: Any) -> None:
        """Make `stream` wait until every launch so far has landed in the shards."""
        self.release_sources()
        self._landed.record(self._world.stream)
        # C: the caller's later reads come after the collectives and unpacks.
        stream.wait_event(self._landed)
        if stream not in self._readers:
            self._readers[stream] = self._take_event()

    def wait_packed(self, stream: Any) -> None:
        """Make `stream` wait until every gradient handed over and launched has been read."""
        for buffer in self._buffers:
            # D, asked for by the caller: it is about to overwrite the gradients itself.
            stream.wait_event(buffer.packed)

    def release_sources(self) -> None:
        """Drop the gradients of all launched buffers; their producers wait for the packs."""
        for buffer in self._buffers:
            if not buffer.filling:
                self._release(buffer)

    def release_read(self) -> None:
        """Drop the gradients whose packs are known to be done; nobody waits."""
        for buffer in self._buffers:
            if buffer.sources and not buffer.filling and buffer.packed.done:
                buffer.sources.clear()

    def synchronize(self) -> None:
        """Block the host until everything queued is done; raise what failed."""
        self._landed.record(self._world.stream)
        self._landed.synchronize()

    def close(self) -> None:
        """Drop buffers and references. Nothing may be in flight on a working world.

        On a broken one, packs and collectives may still use them, and nobody can wait for that:
        the world keeps them for as long as it lives.
        """
        if not self._world.usable:
            self._world.status.kept.append((self._buffers[:], dict(self._prepared)))
        self._buffers.clear()
        self._prepared.clear()

    @property
    def in_flight(self) -> int:
        """Send buffers launched whose last reader is not done yet."""
        return sum(not (buffer.filling or buffer.sent.done) for buffer in self._buffers)

    def _hold_back_writers(self) -> None:
        for stream, event in self._readers.items():
            # F: whatever writes shards comes after what the readers have queued by now. Packs that
            # write shards (one rank) run on the communication stream too.
            event.record(stream)
            self._world.stream.wait_event(event)
            self._free_events.append(event)
        self._readers.clear()

    def _reuse(self, buffer: _SendBuffer) -> None:
        self._release(buffer)
        # E: the collective of K launches ago may still be reading this buffer.
        self._copy.wait_event(buffer.sent)
        buffer.filling = True

    def _release(self, buffer: _SendBuffer) -> None:
        if not buffer.sources:
            return
        streams = {view.stream: None for group in buffer.sources for view in group}
        if None in streams:
            # Its memory may be used again on a stream that nobody told us of.
            del streams[None]
            if not buffer.packed.done:
                buffer.packed.synchronize()
        for stream in streams:
            # D: dropping a source lets its producer's allocator hand the memory out again at once,
            # on this stream. A host that runs ahead so holds K buckets of sources and no more.
            stream.wait_event(buffer.packed)
        buffer.sources.clear()

    def _pack(
        self, buffer: _SendBuffer, part: Part, groups: Sequence[Sequence[View]], fill: Fill
    ) -> None:
        prepared = self._prepared[part.layout]
        if not prepared.marked:
            self.mark(part.layout, groups)
        for event in prepared.ready[: prepared.marked]:
            # A: on every stream that produced one of the gradients.
            self._copy.wait_event(event)
        prepared.marked = 0
        alone = self._world.world_size == 1
        target = prepared.row if alone and part.straight else self._views(buffer, part)[0]
        # Referenced until the pack has read them: no allocator here knows of the copy stream.
        buffer.sources.extend(group for group in groups if group)
        prepared.pack(groups, target, fill=fill, stream=self._copy)

    def _send(self, buffer: _SendBuffer, launch: Launch) -> None:
        stream, world = self._world.stream, self._world
        buffer.packed.record(self._copy)
        # B: after the last pack of the buffer.
        stream.wait_event(buffer.packed)
        if launch.calls:
            calls = [(part, *self._views(buffer, part)) for part in launch.calls]
            with world.communicator.group():
                for part, matrix, own in calls:
                    recv = self._prepared[part.layout].row if part.straight else own
                    world.communicator.reduce_scatter(
                        matrix, recv, part.layout.reduce_dtype, self._op, stream
                    )
        for part in launch.unpack:
            prepared = self._prepared[part.layout]
            # In stream order after the collective that received the row, before the next one.
            prepared.unpack(
                self._views(buffer, part)[1],
                prepared.targets,
                accumulate=part.accumulate,
                stream=stream,
            )
        # After the unpack too: it is the last reader of a row received in place.
        buffer.sent.record(stream)
        buffer.filling = False
        self._count(launch)

    def _views(self, buffer: _SendBuffer, part: Part) -> tuple[Array, Array]:
        """Return `part`'s matrix in `buffer`, and this rank's row of it."""
        layout = part.layout
        views = buffer.views.get((layout, part.offset))
        if views is None:
            dtype, columns = layout.reduce_dtype, layout.matrix.columns
            row = part.offset + self._world.rank * columns * DTYPES[dtype].itemsize
            view = self._runtime.view
            views = (
                view(buffer.array, part.offset, layout.matrix.numel, dtype),
                view(buffer.array, row, columns, dtype),
            )
            if part.offset == 0:  # where every planned matrix starts; others may start anywhere
                buffer.views[layout, 0] = views
        return views

    def _take_event(self) -> Any:
        return self._free_events.pop() if self._free_events else self._runtime.event()

    def _count(self, launch: Launch) -> None:
        self.launches += 1
        self.collectives += len(launch.calls)
        for part in launch.calls:
            bytes_all = part.layout.send_bytes
            self.sent_bytes += bytes_all - bytes_all // self._world.world_size
