"""Laws of streams, events and memory, on every runtime. Order is shown by holding a stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from contract.arrays import Buffer, empty, hold, put

from cupynccl_reduce.dtypes import DTYPES
from cupynccl_reduce.errors import LayoutError, ProtocolError, ReduceError
from cupynccl_reduce.layout import Matrix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NUMEL = 1000


class Bench:
    """Three buffers (ones, twos, target) and a copy between two of them, all made beforehand.

    Allocating may block the host until the device is idle: never while a stream is held.
    """

    def __init__(self, runtime: Any) -> None:
        self._matrix = Matrix.of([("p", NUMEL, NUMEL)], 1, 1)
        self._kernel = runtime.pack_kernel(self._matrix, "float32", "float32")
        self.streams = [runtime.stream() for _ in range(3)]
        self.events = [runtime.event() for _ in range(3)]
        self.ones = put(runtime, np.full(NUMEL, 1, np.float32), "float32")
        self.twos = put(runtime, np.full(NUMEL, 2, np.float32), "float32")
        self.target, self.other = (empty(runtime, NUMEL, "float32") for _ in range(2))
        self._views = {b: b.view(self.streams[0]) for b in (self.ones, self.twos, self.target)}
        self.copy(self.ones, self.target, self.streams[0])  # what is compiled late is compiled now
        self.streams[0].synchronize()
        self.target.set(np.zeros(NUMEL, np.float32))
        self._releases: list[Callable[[], None]] = []

    def copy(self, source: Buffer, target: Buffer, stream: Any) -> None:
        self._kernel([[self._views[source]]], target.array, fill="zero", stream=stream)

    def hold(self, stream: Any) -> Callable[[], None]:
        self._releases.append(hold(stream))
        return self._releases[-1]

    def close(self) -> None:
        for release in self._releases:
            release()
        for stream in self.streams:
            stream.synchronize()


@pytest.fixture
def bench(runtime: Any) -> Iterator[Bench]:
    made = Bench(runtime)
    yield made
    made.close()


def value(buffer: Buffer) -> float:
    (found,) = set(buffer.get().tolist())
    return found


def test_a_stream_works_in_order_while_the_host_goes_on(bench: Bench) -> None:
    stream, event = bench.streams[0], bench.events[0]
    release = bench.hold(stream)
    bench.copy(bench.twos, bench.target, stream)
    bench.copy(bench.ones, bench.target, stream)
    event.record(stream)
    assert not event.done
    assert value(bench.target) == 0
    release()
    stream.synchronize()
    assert event.done
    assert value(bench.target) == 1


def test_an_event_holds_another_stream_back(bench: Bench) -> None:
    first, second, _ = bench.streams
    before, after, _ = bench.events
    release = bench.hold(first)
    bench.copy(bench.twos, bench.target, first)
    before.record(first)
    second.wait_event(before)
    bench.copy(bench.target, bench.other, second)
    after.record(second)
    assert not after.done
    release()
    second.synchronize()
    assert value(bench.other) == 2


def test_streams_do_not_wait_unasked(bench: Bench) -> None:
    first, second, _ = bench.streams
    bench.hold(first)
    bench.copy(bench.ones, bench.target, second)
    second.synchronize()
    assert value(bench.target) == 1


def test_recording_again_does_not_move_an_earlier_wait(bench: Bench) -> None:
    first, second, third = bench.streams
    event, after, _ = bench.events
    event.record(first)
    second.wait_event(event)
    release = bench.hold(third)
    event.record(third)
    second.synchronize()  # waits for the first record, which has passed
    assert not event.done

    first.wait_event(event)
    event.record(second)
    event.synchronize()  # the new record has passed
    after.record(first)
    assert not after.done  # the old wait still holds
    release()
    after.synchronize()
    assert after.done


def test_an_event_that_was_never_recorded_holds_nobody(runtime: Any, bench: Bench) -> None:
    event = bench.events[0]
    assert event.done
    event.synchronize()
    for stream in (bench.streams[0], runtime.adopt(None)):
        stream.wait_event(event)
        stream.synchronize()


def test_synchronize_blocks_the_host_until_the_record_has_passed(bench: Bench) -> None:
    first, second, _ = bench.streams
    event = bench.events[0]
    bench.copy(bench.ones, bench.target, first)
    event.record(first)
    bench.hold(first)  # behind the record: nobody waits for that
    event.synchronize()
    assert value(bench.target) == 1
    second.synchronize()


def test_the_callers_stream_joins_in(runtime: Any, bench: Bench) -> None:
    caller, stream = runtime.adopt(None), bench.streams[0]
    event = bench.events[0]
    event.record(caller)
    stream.wait_event(event)
    bench.copy(bench.ones, bench.target, stream)
    event.record(stream)
    caller.wait_event(event)
    caller.synchronize()
    assert value(bench.target) == 1


def test_the_callers_stream_is_one_and_the_same(runtime: Any, bench: Bench) -> None:
    assert runtime.adopt(None) == runtime.adopt(None)
    assert hash(runtime.adopt(None)) == hash(runtime.adopt(None))
    assert runtime.adopt(bench.streams[0]) == bench.streams[0]


def test_a_thousand_edges_between_three_streams(bench: Bench) -> None:
    # Each copy must see the one before it, which ran on another stream.
    event = bench.events[0]
    for step in range(333):
        for index, stream in enumerate(bench.streams):
            source = (bench.ones, bench.twos)[(step + index) % 2]
            stream.wait_event(event)
            bench.copy(source, bench.target, stream)
            event.record(stream)
    event.synchronize()
    assert value(bench.target) == 1 + (332 + 2) % 2


def test_what_is_no_stream_is_refused(runtime: Any) -> None:
    with pytest.raises(ProtocolError, match="stream"):
        runtime.adopt("main")


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_is_zeroed_and_views_share_it(runtime: Any, dtype: str) -> None:
    itemsize = DTYPES[dtype].itemsize
    memory = runtime.allocate(256 * itemsize)
    assert memory.size == 256 * itemsize
    view = runtime.view(memory, 16 * itemsize, 100, dtype)
    described = runtime.read(view, runtime.stream())
    whole = runtime.read(memory, runtime.stream())
    assert described.pointer == whole.pointer + 16 * itemsize
    assert (described.shape, described.strides, described.dtype) == ((100,), None, dtype)
    assert set(memory.tolist()) == {0}


def test_memory_may_be_of_no_bytes(runtime: Any) -> None:
    memory = runtime.allocate(0)
    assert memory.size == runtime.view(memory, 0, 0, "float64").size == 0


def test_pinned_memory_needs_a_device(runtime: Any) -> None:
    if runtime.kind == "cuda":
        assert set(runtime.allocate(100, memory="pinned").tolist()) == {0}
    else:
        with pytest.raises(LayoutError, match="pinned"):
            runtime.allocate(100, memory="pinned")


@pytest.mark.parametrize("bad", [1.5, None, "text", [1, 2], np.ones(3, complex), object()])
def test_what_is_no_array_is_refused(runtime: Any, bad: Any) -> None:
    with pytest.raises(ReduceError):
        runtime.read(bad, runtime.stream())
