"""The streams that made a bucket's gradients: where they stand, and whether a graph records them.

Edge A of the pipeline begins here; the pipeline queues the waits.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from .errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .dlpack import View
    from .layout import BucketLayout, Launch
    from .protocols import Runtime

__all__ = ["EventPool", "Producers"]


class EventPool:
    """Events to record, wait for and give back; recording one again leaves earlier waits alone."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._free: list[Any] = []

    def recorded(self, stream: Any) -> Any:
        """Return an event at the present end of `stream`."""
        event = self._free.pop() if self._free else self._runtime.event()
        event.record(stream)
        return event

    def give_back(self, event: Any) -> None:
        """Take an event that nobody will wait for again."""
        self._free.append(event)


class Producers:
    """Of each bucket whose gradients are all there: their streams, each with an event of its end.

    The stream None has ordered itself and has no event.
    """

    def __init__(self, runtime: Runtime, events: EventPool) -> None:
        self._runtime = runtime
        self._events = events
        self._marked: dict[int, dict[Any, Any]] = {}
        self.captured = False  # whether what is queued now becomes part of a CUDA graph

    def mark(self, layout: BucketLayout, groups: Iterable[Sequence[View]]) -> None:
        """Note the present end of the streams that made the gradients of a bucket."""
        if not layout.matrix.numel:
            return
        producers: dict[Any, Any] = {}
        last: Any = self  # no stream
        for group in groups:
            for view in group:
                if view.stream is last:  # as nearly always, and hashing a stream takes longer
                    continue
                last = view.stream
                if last not in producers:
                    producers[last] = None if last is None else self._events.recorded(last)
        self._marked[layout.index] = producers

    def take(
        self, launch: Launch, groups: Sequence[Sequence[Sequence[View]]], *, idle: bool
    ) -> dict[Any, Any]:
        """Return the streams of what `launch` packs; follow them into a CUDA graph, or refuse.

        Inside a graph nothing outside it may be waited for, so that the buffers have to be `idle`.
        A bucket without gradients goes where those before it went.

        Raises:
            ProtocolError: a graph that does not hold whole cycles.
        """
        if not launch.pack:
            return {}
        layout = launch.pack[0].layout
        if layout.index not in self._marked:
            self.mark(layout, chain.from_iterable(groups))
        producers = self._marked.pop(layout.index)
        streams = [stream for stream in producers if stream is not None]
        captured = any(map(self._runtime.capturing, streams))
        if captured and not self.captured and not idle:
            msg = (
                "a CUDA graph holds whole cycles: call synchronize() before the capture, and hand "
                "over a gradient of the first bucket on the capturing stream"
            )
            raise ProtocolError(msg)
        if streams and self.captured and not captured:
            msg = "a CUDA graph was captured without the wait() that ends its cycle"
            raise ProtocolError(msg)
        self.captured |= captured
        return producers
