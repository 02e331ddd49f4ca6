"""Failures and ends of host streams: nothing hangs, nothing is lost, nothing stays behind."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cupynccl_reduce import dlpack
from cupynccl_reduce.errors import CommunicationError, GradientError, ProtocolError
from cupynccl_reduce.layout import Matrix
from cupynccl_reduce.runtimes.host import HostRuntime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LIMIT_S = 20.0


@pytest.fixture
def runtime() -> Iterator[HostRuntime]:
    """Return a runtime of this test's own: what fails here must not fail others."""
    made = HostRuntime()
    yield made
    within_limit(made.close)


def within_limit(function: Callable[[], Any]) -> BaseException | None:
    """Run `function` on a thread; return what it raised. A hang fails the test, not the run."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001  # returned
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive(), "it hangs"
    return raised[0] if raised else None


def fail() -> None:
    msg = "planted"
    raise KeyError(msg)


def assert_failed(function: Callable[[], Any]) -> None:
    error = within_limit(function)
    assert isinstance(error, CommunicationError)
    assert "planted" in str(error)
    assert error.__cause__ is not None


def test_a_failure_surfaces_wherever_the_host_waits(runtime: HostRuntime) -> None:
    stream = runtime.stream()
    before, after = runtime.event(), runtime.event()
    before.record(stream)
    stream.submit(fail)
    after.record(stream)
    for _ in range(2):
        assert_failed(stream.synchronize)
        assert_failed(after.synchronize)
        assert_failed(lambda: runtime.adopt(None).wait_event(after))
    assert after.done
    assert within_limit(before.synchronize) is None
    assert "FAILED" in repr(stream)


def test_a_failure_reaches_streams_that_wait(runtime: HostRuntime) -> None:
    streams = [runtime.stream() for _ in range(3)]
    ran: list[int] = []
    streams[0].submit(fail)
    for index, stream in enumerate(streams[1:]):
        event = runtime.event()
        event.record(streams[index])
        stream.wait_event(event)
        stream.submit(lambda: ran.append(1))
    assert_failed(streams[2].synchronize)
    assert not ran


def test_a_failure_stays_where_nobody_waits_for_it(runtime: HostRuntime) -> None:
    failed, other = runtime.stream(), runtime.stream()
    failed.submit(fail)
    assert_failed(failed.synchronize)
    assert within_limit(other.synchronize) is None


def test_work_behind_a_failure_is_skipped(runtime: HostRuntime) -> None:
    stream = runtime.stream()
    ran: list[int] = []
    stream.submit(fail)
    stream.submit(lambda: ran.append(1))
    assert_failed(stream.synchronize)
    stream.submit(lambda: ran.append(2))
    assert_failed(stream.synchronize)
    assert not ran


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_a_failure_may_be_of_any_kind(runtime: HostRuntime, kind: type[BaseException]) -> None:
    def stop() -> None:
        msg = "planted"
        raise kind(msg)

    stream = runtime.stream()
    stream.submit(stop)
    assert_failed(stream.synchronize)


def test_a_kernel_that_cannot_run_fails_its_stream(runtime: HostRuntime) -> None:
    matrix = Matrix.of([("p", 4, 4)], 1, 4)
    stream = runtime.stream()
    short = np.zeros(3, np.float32)
    pack = runtime.pack_kernel(matrix, "float32", "float32")
    pack([[runtime.read(np.ones(4, np.float32), stream)]], short, fill="zero", stream=stream)
    assert isinstance(within_limit(stream.synchronize), CommunicationError)


def test_infinities_and_overflow_are_values_and_no_failure(runtime: HostRuntime) -> None:
    # On the stream's own thread; warnings are errors in this suite, and for some users too.
    matrix = Matrix.of([("p", 3, 3)], 1, 8)
    stream = runtime.stream()
    wide = np.array([np.inf, 1e30, np.nan], np.float32)
    target = np.zeros(8, np.float16)
    pack = runtime.pack_kernel(matrix, "float32", "float16", divisor=3)
    views = [runtime.read(wide, stream), runtime.read(-wide, stream), runtime.read(wide, stream)]
    pack([views], target, fill="zero", stream=stream)
    assert within_limit(stream.synchronize) is None
    assert np.isnan(target[0])
    assert target[1] == np.inf


def test_close_finishes_the_work_and_ends_the_threads() -> None:
    before = set(threading.enumerate())
    made = HostRuntime()
    streams = [made.stream() for _ in range(3)]
    event = made.event()
    ran: list[int] = []
    for stream in streams:
        stream.wait_event(event)
        stream.submit(lambda: ran.append(1))
        event.record(stream)
    streams[1].submit(fail)
    for _ in range(2):
        assert within_limit(made.close) is None
    assert len(ran) == 3
    assert set(threading.enumerate()) <= before
    assert event.done
    with pytest.raises(ProtocolError, match="closed"):
        made.stream()


def test_a_closed_stream_hangs_nobody(runtime: HostRuntime) -> None:
    stream, other = runtime.stream(), runtime.stream()
    stream.close()
    event = runtime.event()
    event.record(stream)
    other.wait_event(event)
    for function in (stream.synchronize, event.synchronize, other.synchronize):
        within_limit(function)


def test_gradients_are_dropped_once_they_were_read(runtime: HostRuntime) -> None:
    matrix = Matrix.of([("p", 4, 4)], 1, 4)
    stream = runtime.stream()
    grad = np.ones(4, np.float32)
    gone = weakref.ref(grad)
    pack = runtime.pack_kernel(matrix, "float32", "float32")
    target = np.zeros(4, np.float32)
    pack([[runtime.read(grad, stream)]], target, fill="zero", stream=stream)
    del grad
    stream.synchronize()
    # The marker passes before the thread lets go of the work before it; the next one is behind.
    stream.synchronize()
    gc.collect()
    assert gone() is None
    assert target.tolist() == [1, 1, 1, 1]


def test_a_gradient_stays_alive_until_it_was_read(runtime: HostRuntime) -> None:
    matrix = Matrix.of([("p", 1 << 16, 1 << 16)], 1, 4)
    stream, gate = runtime.stream(), threading.Event()
    stream.submit(lambda: gate.wait(LIMIT_S))
    pack = runtime.pack_kernel(matrix, "float32", "float32")
    target = np.zeros(1 << 16, np.float32)
    grad = np.full(1 << 16, 3, np.float32)
    gone = weakref.ref(grad)
    pack([[runtime.read(grad, stream)]], target, fill="zero", stream=stream)
    del grad
    gc.collect()
    assert gone() is not None
    gate.set()
    stream.synchronize()
    assert set(target.tolist()) == {3}


def test_a_gradient_on_a_gpu_is_refused_with_the_remedy(
    runtime: HostRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    # K9: a device pointer never reaches a host kernel, nor MPI.
    on_gpu = dlpack.View(0x7000, "float32", (3,), None, "cuda", 0, None, None)
    monkeypatch.setattr(dlpack, "read", lambda _: on_gpu)
    with pytest.raises(GradientError, match=r"cuda:0.*connect\('cuda'\)"):
        runtime.read(object(), runtime.stream())
