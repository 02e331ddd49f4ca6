"""What a CUDA graph may hold, on a runtime that only says that it captures; see tests/gpu."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cupynccl_reduce import CommunicationError, ParamSpec, Reducer, Registry, run_local
from cupynccl_reduce.runtimes.host import HostRuntime
from cupynccl_reduce.runtimes.queues import HostEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cupynccl_reduce import World

PARAMS = [ParamSpec(f"p{i}", (4,), "float32") for i in range(4)]


class Capture:
    """Whether streams capture now; queries of events while they do are refused, as CUDA's are."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.on = False
        patch.setattr(HostRuntime, "capturing", lambda *_: self.on)
        done = HostEvent.done.fget

        def ask(event: HostEvent) -> bool:
            assert not self.on, "a query ends a capture"
            return bool(done(event))  # type: ignore[misc]  # a property has one

        patch.setattr(HostEvent, "done", property(ask))

    def __enter__(self) -> None:
        self.on = True

    def __exit__(self, *_: object) -> None:
        self.on = False


@pytest.fixture
def capture() -> Iterator[Capture]:
    with pytest.MonkeyPatch.context() as patch:
        yield Capture(patch)


def on_one_rank(use: Callable[[Reducer], Any]) -> None:
    def run(world: World) -> None:
        registry = Registry(PARAMS, world, bucket_bytes=16)
        use(Reducer(registry, op="sum"))

    run_local(1, run)


def hand_over(reducer: Reducer, value: float = 1.0, *, absent: str = "") -> None:
    with reducer.backward():
        for spec in reversed(PARAMS):
            if spec.name != absent:
                reducer.reduce_grad(spec.name, np.full(4, value, "f4"))


def test_a_capture_holds_whole_cycles_and_work_goes_on_around_it(capture: Capture) -> None:
    def use(reducer: Reducer) -> None:
        hand_over(reducer)
        reducer.wait()
        reducer.synchronize()
        for value in (2.0, 3.0):
            with capture:
                hand_over(reducer, value, absent="p1")
                hand_over(reducer, value)
                shards = reducer.wait()
            assert shards["p0"].tolist() == [2 * value] * 4
            assert shards["p1"].tolist() == [value] * 4
            hand_over(reducer)
            reducer.wait_packed()
            assert reducer.wait()["p0"].tolist() == [1.0] * 4
            reducer.synchronize()
            assert reducer.statistics().in_flight == 0

    on_one_rank(use)


def test_a_capture_while_a_launch_may_be_in_flight_is_refused(capture: Capture) -> None:
    def use(reducer: Reducer) -> None:
        hand_over(reducer)
        reducer.wait()
        with capture, pytest.raises(CommunicationError, match=r"call synchronize\(\) before"):
            hand_over(reducer)

    on_one_rank(use)


def test_a_first_bucket_without_gradients_does_not_follow_into_a_capture(capture: Capture) -> None:
    def use(reducer: Reducer) -> None:
        with capture, pytest.raises(CommunicationError, match="a gradient of the first bucket"):
            hand_over(reducer, absent="p3")

    on_one_rank(use)


def test_a_capture_that_ends_before_wait_is_told(capture: Capture) -> None:
    def use(reducer: Reducer) -> None:
        with capture:
            hand_over(reducer)
        with pytest.raises(CommunicationError, match=r"without the wait\(\) that ends its cycle"):
            hand_over(reducer)

    on_one_rank(use)
