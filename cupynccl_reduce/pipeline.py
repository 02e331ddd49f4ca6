"""Order and lifetime: which stream waits for what, and what is kept alive until when.

Streams and the edges between them (letters are used in the comments below)::

    producers --A--> copy stream: --B--> communication stream: --C--> readers
        ^            pack                collectives, unpack             |
        |              |  ^                  |      ^                    |
        '------D-------'  '--------E---------'      '---------F----------'

    A  a gradient is written before the pack reads it
    B  a matrix is packed before the collective sends it
    C  shards are complete before a stream that called wait() reads them
    D  a source's memory is not reused before the pack (or the collective that sends it from where
       it lies) has read it; K buckets are held at most
    E  a send buffer is not packed again before its last collective has read it
    F  shards are not written again before the streams that called wait() have read them

A norm (norm.py) and a gather (gather.py) have edges of the same kinds, and the same letters.

No policy, no names' meaning, no arithmetic here.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from .buffers import SendBuffer, lies_ready, prepare
from .producers import EventPool, Producers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

    from .dlpack import View
    from .layout import BucketLayout, Launch, Part
    from .options import Options
    from .policies import Policy
    from .protocols import Array, Fill, Op
    from .registry import Registry

__all__ = ["Pipeline"]


class Pipeline:
    """Runs launches. Every method only queues work, but `synchronize` and `close`."""

    def __init__(self, registry: Registry, policy: Policy, options: Options) -> None:
        world, runtime = registry.world, registry.world.runtime
        divisor = world.world_size if options.pack_divides else 1
        self._world = world
        self._runtime = runtime
        self._op = options.collective_op
        self._direct_op = options.direct_op
        self._copy = world.copy_stream
        self._prepared = prepare(registry, policy, divisor)
        self._buffers = [
            SendBuffer(
                runtime,
                world.rank,
                runtime.allocate(nbytes, memory=options.memory),
                runtime.event(),
                runtime.event(),
            )
            for nbytes in policy.buffer_bytes
        ]
        self._events = EventPool(runtime)
        self._producers = Producers(runtime, self._events)
        self._landed = runtime.event()
        self._readers = registry.readers  # of edge F, in order
        self.buffer_bytes = sum(policy.buffer_bytes)
        self.shard_bytes = registry.arena_bytes
        self.launches = 0
        self.collectives = 0
        self.sent_bytes = 0

    def reader(self, shape: tuple[int, ...], dtype: str) -> Callable[[Any], View]:
        """Return what describes a gradient; `mark` orders its producer before the copy stream.

        (Or the producer has done that itself.)
        """
        return self._runtime.reader(shape, dtype, self._copy)

    def mark(self, layout: BucketLayout, groups: Iterable[Sequence[View]]) -> None:
        """Note the present end of the producers' streams: all of a bucket's gradients are there.

        Marking when the last gradient arrives, not at the launch, keeps a bucket that must queue
        behind an earlier one from waiting for backward work that came later.
        """
        self._producers.mark(layout, groups)

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
            groups = [take(part.layout) for part in launch.pack]
            idle = not any(b.flown or b.filling for b in self._buffers)
            producers = self._producers.take(launch, groups, idle=idle)
            self._hold_back_writers()
            if not buffer.filling:
                self._reuse(buffer)
            self._follow(producers)
            buffer.producers.update(producers)
            for part, sources in zip(launch.pack, groups, strict=True):
                self._pack(buffer, part, sources, fill)
            if launch.last:
                self._send(buffer, launch)
            else:
                # More packs follow, but wait_packed() may ask for those so far.
                buffer.packed.record(self._copy)
                buffer.read = buffer.packed

    def wait(self, stream: Any) -> None:
        """Make `stream` wait until every launch so far has landed in the shards."""
        self.release_sources()
        self._landed.record(self._world.stream)
        # C: the caller's later reads come after the collectives and unpacks.
        stream.wait_event(self._landed)
        self._readers[stream] = None
        if self._producers.captured:
            # Nothing later may wait for an event of the graph; replays order themselves.
            self._producers.captured = False
            self._set_idle()

    def wait_packed(self, stream: Any) -> None:
        """Make `stream` wait until every gradient handed over and launched has been read."""
        for buffer in self._buffers:
            if buffer.flown or buffer.filling:
                # D, asked for by the caller: it is about to overwrite the gradients itself.
                stream.wait_event(buffer.read)

    def release_sources(self) -> None:
        """Drop the gradients of all launched buffers; their producers wait until they are read."""
        for buffer in self._buffers:
            if not buffer.filling:
                self._release(buffer)

    def release_read(self) -> None:
        """Drop the gradients that are known to have been read; nobody waits."""
        if self._producers.captured:
            return  # a query would end the capture
        for buffer in self._buffers:
            if buffer.sources and not buffer.filling and buffer.read.done:
                buffer.sources.clear()
                buffer.producers.clear()

    def synchronize(self) -> None:
        """Block the host until everything queued is done; raise what failed."""
        self._landed.record(self._world.stream)
        self._landed.synchronize()
        self._set_idle()

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
        return sum(b.flown and not (b.filling or b.sent.done) for b in self._buffers)

    @property
    def captured(self) -> bool:
        """Whether what is queued now becomes part of a CUDA graph."""
        return self._producers.captured

    def _set_idle(self) -> None:
        for buffer in self._buffers:
            buffer.flown = False

    def _hold_back_writers(self) -> None:
        for stream in self._readers:
            # F: whatever writes shards comes after what the readers have queued by now. Packs that
            # write shards (one rank) run on the communication stream too.
            event = self._events.recorded(stream)
            self._world.stream.wait_event(event)
            self._events.give_back(event)
        self._readers.clear()

    def _reuse(self, buffer: SendBuffer) -> None:
        self._release(buffer)
        if buffer.flown:
            # E: the collective of K launches ago may still be reading this buffer.
            self._copy.wait_event(buffer.sent)
        buffer.filling = True

    def _release(self, buffer: SendBuffer) -> None:
        if not buffer.sources:
            return
        for stream in buffer.producers:
            # D: dropping a source lets its producer's allocator hand the memory out again at once,
            # on this stream. A host that runs ahead so holds K buckets of sources and no more.
            if stream is not None:
                stream.wait_event(buffer.read)
            elif not buffer.read.done:
                # Its memory may be used again on a stream that nobody told us of.
                buffer.read.synchronize()
        buffer.sources.clear()
        buffer.producers.clear()

    def _follow(self, producers: dict[Any, Any]) -> None:
        for stream, event in producers.items():
            if stream is not None:
                # A: on every stream that produced one of the gradients.
                self._copy.wait_event(event)
                self._events.give_back(event)

    def _pack(
        self, buffer: SendBuffer, part: Part, groups: Sequence[Sequence[View]], fill: Fill
    ) -> None:
        prepared = self._prepared[part.layout]
        # Referenced until they have been read: no allocator here knows of our streams.
        buffer.sources.extend(group for group in groups if group)
        if part.direct and fill == "zero" and lies_ready(groups[0]):
            buffer.direct[part.layout] = self._runtime.array(groups[0][0])
            return
        alone = self._world.world_size == 1
        target = prepared.row if alone and part.straight else buffer.matrix(part)
        prepared.pack(groups, target, fill=fill, stream=self._copy)

    def _call(self, buffer: SendBuffer, part: Part) -> tuple[Array, Array, str, Op]:
        layout = part.layout
        send = buffer.direct.get(layout)
        if send is None:
            send = buffer.matrix(part)
        recv = self._prepared[layout].row if part.straight else buffer.row(part)
        return send, recv, layout.reduce_dtype, self._direct_op if part.direct else self._op

    def _send(self, buffer: SendBuffer, launch: Launch) -> None:
        stream, world = self._world.stream, self._world
        buffer.packed.record(self._copy)
        # B: after the last pack of the buffer. Gradients sent from where they lie: the copy stream
        # has waited for their producers.
        stream.wait_event(buffer.packed)
        if launch.calls:
            calls = [self._call(buffer, part) for part in launch.calls]
            with self._noted(launch), world.communicator.group() if calls[1:] else nullcontext():
                for call in calls:
                    world.communicator.reduce_scatter(*call, stream)
        for part in launch.unpack:
            prepared = self._prepared[part.layout]
            # In stream order after the collective that received the row, before the next one.
            prepared.unpack(
                buffer.row(part), prepared.targets, accumulate=part.accumulate, stream=stream
            )
        # After the unpack too: it is the last reader of a row received in place.
        buffer.sent.record(stream)
        # What was sent from where it lies has been read only then.
        buffer.read = buffer.sent if buffer.direct else buffer.packed
        buffer.direct.clear()
        buffer.filling, buffer.flown = False, True
        self._count(launch)

    def _noted(self, launch: Launch) -> AbstractContextManager[None]:
        if self._producers.captured:
            return nullcontext()  # a graph's replays are nobody's launches
        return self._world.launching(stream=self._world.stream, **launch.summary())

    def _count(self, launch: Launch) -> None:
        self.launches += 1
        self.collectives += len(launch.calls)
        for part in launch.calls:
            bytes_all = part.layout.send_bytes
            self.sent_bytes += bytes_all - bytes_all // self._world.world_size
