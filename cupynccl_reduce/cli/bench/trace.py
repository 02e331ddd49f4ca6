"""A world that is watched from outside: what its streams do, and when. The engine knows nothing.

Streams, events, kernels and the communicator are stood in for by objects that pass everything on
and mark the time before and after. A watched world serves for time-lines, not for timing steps.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cupynccl_reduce.dlpack import View
    from cupynccl_reduce.layout import Matrix
    from cupynccl_reduce.membership import World
    from cupynccl_reduce.protocols import Array, Op

    from .clocks import Clock

__all__ = ["COMMUNICATION", "COMPUTE", "COPY", "HOST", "Observer", "Span", "watch"]

HOST = "host"
COMPUTE = "compute stream"
COPY = "copy stream"
COMMUNICATION = "communication stream"


@dataclass(frozen=True, slots=True)
class Span:
    """One thing that took time: where, what kind, of which bucket, from when to when."""

    lane: str
    kind: str
    label: str
    start_ms: float
    stop_ms: float


class Observer:
    """Collects marks while `recording`; reads them once everything is done."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.recording = False
        self.label = ""  # of the last pack: what is queued next belongs to it
        self._marks: list[tuple[str, str, str, Any, Any]] = []

    def start(self) -> None:
        """Forget what was collected, and collect from now on."""
        self._marks.clear()
        self.clock.start()
        self.recording = True

    def stop(self) -> list[Span]:
        """Collect no more, and return the spans in order of time; all streams must be done."""
        self.recording = False
        read = self.clock.read_ms
        spans = [
            Span(lane, kind, label, read(start), read(stop))
            for lane, kind, label, start, stop in self._marks
        ]
        return sorted(spans, key=lambda span: (span.start_ms, span.stop_ms))

    @contextmanager
    def span(self, lane: str, kind: str, label: str, stream: Any) -> Iterator[None]:
        """Mark `stream` before and after what the body queues."""
        if not self.recording:
            yield
            return
        start = self.clock.mark(stream)
        yield
        self._marks.append((lane, kind, label, start, self.clock.mark(stream)))

    @contextmanager
    def host_span(self, kind: str) -> Iterator[None]:
        """Mark the host's time around the body."""
        start = self.clock.now()
        yield
        self._marks.append((HOST, kind, "", start, self.clock.now()))


class _Event:
    """An event that knows after what it was recorded."""

    def __init__(self, observer: Observer, plain: Any) -> None:
        self._observer, self.plain = observer, plain
        self.label = ""

    def record(self, stream: Any) -> None:
        self.label = self._observer.label
        if isinstance(stream, _Stream):
            self.label = f"{stream.lane}: {self.label}"
        self.plain.record(_plain(stream))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)


class _Stream:
    """A stream; on the caller's, every wait is a span."""

    def __init__(self, observer: Observer, plain: Any, lane: str) -> None:
        self._observer, self.plain, self.lane = observer, plain, lane

    def wait_event(self, event: Any) -> None:
        if self.lane == COMPUTE:
            with self._observer.span(COMPUTE, "wait", event.label, self.plain):
                self.plain.wait_event(_plain(event))
        else:
            self.plain.wait_event(_plain(event))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    def __enter__(self) -> Any:
        return self.plain.__enter__()

    def __exit__(self, *error: object) -> None:
        self.plain.__exit__(*error)


class _Runtime:
    """A runtime whose streams, events and kernels are watched."""

    def __init__(self, observer: Observer, plain: Any) -> None:
        self._observer, self.plain = observer, plain
        self._streams: dict[Any, _Stream] = {}

    def own(self, stream: Any, lane: str) -> _Stream:
        """Return the stand-in of a stream, always the same one."""
        if stream not in self._streams:
            self._streams[stream] = _Stream(self._observer, stream, lane)
        return self._streams[stream]

    def adopt(self, stream: Any) -> _Stream:
        return self.own(self.plain.adopt(_plain(stream)), COMPUTE)

    def event(self) -> _Event:
        return _Event(self._observer, self.plain.event())

    def read(self, source: Any, stream: Any) -> View:
        return self._follow(self.plain.read(source, _plain(stream)))

    def reader(self, shape: tuple[int, ...], dtype: str, stream: Any) -> Callable[[Any], View]:
        inner = self.plain.reader(shape, dtype, _plain(stream))
        return lambda source: self._follow(inner(source))

    def _follow(self, view: View) -> View:
        if view.stream is not None:
            view.stream = self.own(view.stream, COMPUTE)
        return view

    def pack_kernel(
        self, matrix: Matrix, source_dtype: str, dtype: str, *, divisor: int = 1
    ) -> Callable[..., None]:
        kernel = self.plain.pack_kernel(matrix, source_dtype, dtype, divisor=divisor)

        def pack(sources: Any, target: Array, *, fill: Any, stream: _Stream) -> None:
            self._observer.label = matrix.label
            with self._observer.span(stream.lane, "pack", matrix.label, stream.plain):
                kernel(sources, target, fill=fill, stream=stream.plain)

        return pack

    def unpack_kernel(self, matrix: Matrix, dtype: str, target_dtype: str) -> Callable[..., None]:
        kernel = self.plain.unpack_kernel(matrix, dtype, target_dtype)

        def unpack(source: Array, targets: Any, *, accumulate: bool, stream: _Stream) -> None:
            with self._observer.span(stream.lane, "unpack", matrix.label, stream.plain):
                kernel(source, targets, accumulate=accumulate, stream=stream.plain)

        return unpack

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)


class _Communicator:
    """A communicator whose collectives are spans; those of a group are one, as they start there."""

    def __init__(self, observer: Observer, plain: Any, stream: Any) -> None:
        self._observer, self.plain, self._stream = observer, plain, stream
        self._grouped = False

    def reduce_scatter(self, send: Array, recv: Array, dtype: str, op: Op, stream: Any) -> None:
        self._call("reduce_scatter", send, recv, dtype, op, stream)

    def all_gather(self, send: Array, recv: Array, dtype: str, stream: Any) -> None:
        self._call("all_gather", send, recv, dtype, stream)

    def all_reduce(self, send: Array, recv: Array, dtype: str, op: Op, stream: Any) -> None:
        self._call("all_reduce", send, recv, dtype, op, stream)

    def broadcast(self, array: Array, root: int, dtype: str, stream: Any) -> None:
        self._call("broadcast", array, root, dtype, stream)

    @contextmanager
    def group(self) -> Iterator[None]:
        label = self._observer.label
        with self._observer.span(COMMUNICATION, "reduce_scatter", label, self._stream):
            self._grouped = True
            try:
                with self.plain.group():
                    yield
            finally:
                self._grouped = False

    def _call(self, kind: str, *arguments: Any) -> None:
        *data, stream = arguments
        call, plain = getattr(self.plain, kind), _plain(stream)
        if self._grouped:
            call(*data, plain)
            return
        with self._observer.span(COMMUNICATION, kind, self._observer.label, plain):
            call(*data, plain)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)


def watch(world: World, clock: Clock) -> tuple[World, Observer]:
    """Return `world` with everything watched, and who watches. It must not be closed by itself."""
    observer = Observer(clock)
    runtime = _Runtime(observer, world.runtime)
    stream = runtime.own(world.stream, COMMUNICATION)
    copy_stream = runtime.own(world.copy_stream, COPY)
    parts: dict[str, Any] = {
        "runtime": runtime,
        "communicator": _Communicator(observer, world.communicator, world.stream),
        "stream": stream,
        "copy_stream": copy_stream,
    }
    return replace(world, **parts), observer


def _plain(watched: Any) -> Any:
    """Return what `watched` stands in for, or itself."""
    return watched.plain if isinstance(watched, _Event | _Stream) else watched
