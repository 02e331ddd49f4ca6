"""When norm() and clip() may be called, what is refused, what they cost, and what a graph holds."""

from __future__ import annotations

import gc
import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np
import pytest
from engine.test_capture import Capture
from engine.test_norm import hand_over, on_ranks

from cupynccl_reduce import (
    CommunicationError,
    LayoutError,
    MismatchError,
    ParamSpec,
    ProtocolError,
    Reducer,
    Registry,
    run_local,
)
from cupynccl_reduce.norm import Norms, Request
from cupynccl_reduce.runtimes.host import HostRuntime
from cupynccl_reduce.runtimes.host_norm import HostNorm
from cupynccl_reduce.runtimes.queues import HostEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cupynccl_reduce import World

PARAMS = [ParamSpec("p", (4,), "float32")]
GRAD = {"p": np.ones(4, "f4")}


def before(reducer: Reducer) -> None:
    pass


def after_wait(reducer: Reducer) -> None:
    hand_over(reducer, GRAD)
    reducer.wait()


def after_discard(reducer: Reducer) -> None:
    hand_over(reducer, GRAD)
    reducer.discard()


def after_close(reducer: Reducer) -> None:
    reducer.close()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("call", [Reducer.norm, lambda r: r.clip(1.0)], ids=["norm", "clip"])
@pytest.mark.parametrize(
    ("prepare", "text"),
    [
        (before, r"nothing yet: no backward has run; call it (once )?between .*\[rank 0 of"),
        (after_wait, r"the last cycle; call it (once )?between the cycle's last backward\(\) and"),
        (after_discard, "the last cycle was discarded"),
        (after_close, "closed; build another one"),
    ],
)
def test_a_call_at_the_wrong_time_changes_nothing(
    prepare: Callable[[Reducer], None], text: str, call: Callable[[Reducer], Any], world_size: int
) -> None:
    def use(reducer: Reducer, world: World) -> None:
        prepare(reducer)
        with pytest.raises(ProtocolError, match=text.replace("rank 0", f"rank {world.rank}")):
            call(reducer)
        if prepare is not after_close:
            hand_over(reducer, GRAD)
            assert float(reducer.norm()) == 2.0

    on_ranks(world_size, PARAMS, use)


def test_inside_backward_it_is_refused_and_the_step_is_whole() -> None:
    def use(reducer: Reducer, world: World) -> None:
        with reducer.backward():
            for call in (reducer.norm, lambda: reducer.clip(1.0)):
                with pytest.raises(ProtocolError, match=r"inside backward\(\): leave the with"):
                    call()
            reducer.reduce_grad("p", GRAD["p"])
        assert float(reducer.clip(1.0)) == 2.0

    on_ranks(2, PARAMS, use)


def test_what_is_clipped_is_neither_clipped_again_nor_added_to() -> None:
    def use(reducer: Reducer, world: World) -> None:
        hand_over(reducer, GRAD)
        reducer.clip(None, loss_scale=2.0)
        with pytest.raises(ProtocolError, match=r"clip\(\) has scaled already; call it once"):
            reducer.clip(None, loss_scale=2.0)
        with pytest.raises(ProtocolError, match=r"scaled already; wait\(\) or discard\(\) first"):
            hand_over(reducer, GRAD)
        assert reducer._registry.gather(reducer.wait())["p"].tolist() == [0.5] * 4
        for close in (reducer.wait, reducer.discard):
            hand_over(reducer, GRAD)
            reducer.clip(1e9)
            close()
        hand_over(reducer, GRAD)
        assert float(reducer.norm()) == 2.0

    on_ranks(2, PARAMS, use)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda r: r.norm(-1), r"p must be a positive number, or math.inf, not -1"),
        (lambda r: r.norm("inf"), "p must be a number, not 'inf'"),
        (lambda r: r.norm(True), "p must be a number, not True"),
        (lambda r: r.norm(math.nan), "p must be a positive number, or math.inf, not nan"),
        (lambda r: r.norm(-math.inf), "p must be a positive number, or math.inf, not -inf"),
        (lambda r: r.clip(-1.0), "max_norm must be a number >= 0, or None, not -1.0"),
        (lambda r: r.clip(math.nan), "max_norm must be a number >= 0"),
        (lambda r: r.clip("1"), "max_norm must be a number, not '1'"),
        (lambda r: r.clip(1.0, p=0), "p must be a positive number, or math.inf, not 0"),
        (lambda r: r.clip(1.0, loss_scale=0), "loss_scale must be a positive number, not 0.0"),
        (lambda r: r.clip(1.0, loss_scale=math.inf), "must be a positive number, not inf"),
        (lambda r: r.clip(1.0, loss_scale=math.nan), "must be a positive number, not nan"),
        (lambda r: r.clip(1.0, loss_scale=True), "loss_scale must be a number, not True"),
        (lambda r: r.clip(1.0, loss_scale="8"), "a number or an array of one element: .*str"),
        (lambda r: r.clip(1.0, loss_scale=np.ones(2, "f4")), r"not float32 \(2,\)"),
        (lambda r: r.clip(1.0, loss_scale=np.ones(1, "f2")), r"not float16 \(1,\)"),
        (lambda r: r.clip(1.0, loss_scale=None), "NoneType"),
    ],
)
def test_a_bad_value_is_named_and_changes_nothing(
    call: Callable[[Reducer], Any], text: str
) -> None:
    def use(reducer: Reducer, world: World) -> None:
        hand_over(reducer, GRAD)
        with pytest.raises(LayoutError, match=text):
            call(reducer)
        assert float(reducer.clip(1e9)) == 2.0
        assert reducer._registry.gather(reducer.wait())["p"].tolist() == [1.0] * 4

    on_ranks(2, PARAMS, use)


def test_ranks_that_ask_for_something_else_are_told_with_check_sync() -> None:
    def use(reducer: Reducer, world: World) -> None:
        hand_over(reducer, GRAD)
        with pytest.raises(MismatchError, match=r"the norm.*rank 0: clip\(max_norm=1.0, p=2.0"):
            reducer.clip(1.0 + world.rank)
        assert float(reducer.clip(1.0, loss_scale=np.array(2.0))) == 1.0  # nothing has changed

    on_ranks(2, PARAMS, use, check="sync")


def test_a_norm_on_one_rank_alone_is_told_with_check_sync() -> None:
    def use(reducer: Reducer, world: World) -> None:
        hand_over(reducer, GRAD)
        if world.rank:
            hand_over(reducer, GRAD)
        else:
            reducer.norm()

    with pytest.raises((MismatchError, CommunicationError), match=r"ranks disagree|broken"):
        on_ranks(2, PARAMS, use, check="sync")


def test_a_flight_record_names_it() -> None:
    def use(reducer: Reducer, world: World) -> Any:
        hand_over(reducer, GRAD)
        reducer.norm()
        reducer.clip(1.0)
        assert world.status.flight is not None
        caller = world.runtime.adopt(None)
        # A graph's replays are nobody's launches.
        reducer._norms.measure(Request.norm(2), caller, failed=False, captured=True)
        return [(one["what"], one["nbytes"]) for one in world.status.flight.record()]

    for record in on_ranks(2, PARAMS, use, check="heartbeat"):
        assert record[1:] == [("norm", 16), ("clip", 16)]


@pytest.mark.parametrize("fails_after", [0, 1])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_whose_backward_failed_makes_every_norm_nan(failing: int, fails_after: int) -> None:
    """So that all ranks skip the step alike, even where all was launched before the failure."""

    def use(reducer: Reducer, world: World) -> None:
        try:
            with reducer.backward():
                if world.rank != failing or fails_after:
                    reducer.reduce_grad("p", GRAD["p"])
                if world.rank == failing:
                    raise RuntimeError
        except RuntimeError:
            assert world.rank == failing
        assert math.isnan(float(reducer.norm(math.inf)))
        assert math.isnan(float(reducer.clip(1.0)))
        reducer.discard()
        hand_over(reducer, GRAD)
        assert float(reducer.clip(1.0)) == 2.0
        reducer.wait()

    on_ranks(2, PARAMS, use)


def test_missing_gradients_that_are_an_error_make_every_norm_nan() -> None:
    def use(reducer: Reducer, world: World) -> None:
        with pytest.raises(MismatchError):
            hand_over(reducer, GRAD if world.rank else {})
        assert math.isnan(float(reducer.norm()))
        reducer.discard()
        hand_over(reducer, GRAD)
        assert float(reducer.norm()) == 2.0

    for policy in ("planned", "arrival"):
        on_ranks(2, PARAMS, use, missing="error", policy=policy)


# --- cost --------------------------------------------------------------------------------------


@pytest.fixture
def counts() -> Iterator[Counter[str]]:
    counted: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:

        def count(owner: type, method: str) -> None:
            original = getattr(owner, method)

            def call(*args: Any, **kwargs: Any) -> Any:
                counted[method] += 1
                return original(*args, **kwargs)

            patch.setattr(owner, method, call)

        for method in ("run_measure", "run_scale"):
            count(HostNorm, method)
        for method in ("allocate", "event", "stream", "norm_kernel"):
            count(HostRuntime, method)
        yield counted


class Counted:
    """A communicator that counts."""

    def __init__(self, communicator: Any, counts: Counter[str]) -> None:
        self._communicator, self._counts = communicator, counts
        self.direct_bytes = 0

    def __getattr__(self, name: str) -> Any:
        if name in ("reduce_scatter", "all_reduce", "all_gather", "broadcast"):
            self._counts[name] += 1
        return getattr(self._communicator, name)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_norm_is_one_pass_and_one_small_collective(counts: Counter[str], world_size: int) -> None:
    params = [ParamSpec(f"p{i}", (n,), "float32") for i, n in enumerate((32, 64, 3))]
    steps = 4

    def run(world: World) -> Counter[str]:
        world = replace(world, communicator=Counted(world.communicator, counts))  # type: ignore[arg-type]
        registry = Registry(params, world, bucket_bytes=200)
        with Reducer(registry) as reducer:
            before: Counter[str] = Counter()
            for step in range(steps + 2):
                if step == 2:  # warm
                    world.control.all_gather(b"")
                    before = counts.copy()
                    world.control.all_gather(b"")
                hand_over(reducer, {s.name: np.ones(s.shape, "f4") for s in params})
                reducer.norm()
                reducer.clip(1.0)
                reducer.wait()
            world.control.all_gather(b"")
            spent = counts - before
            world.control.all_gather(b"")
        return spent

    for spent in run_local(world_size, run):
        del spent["reduce_scatter"]
        each = steps * world_size
        wanted = Counter(run_measure=2 * each, run_scale=each)
        if world_size > 1:
            wanted["all_gather"] = 2 * each
        assert spent == wanted


def test_the_next_norm_overwrites_the_last_one() -> None:
    """As documented: a copy is the caller's."""

    def use(reducer: Reducer, world: World) -> None:
        hand_over(reducer, GRAD)
        first = reducer.norm(1)
        assert (first.shape, first.dtype, float(first)) == ((), np.float64, 4.0)
        copy = first.copy()
        assert float(reducer.norm(2)) == 2.0
        assert (float(first), float(copy)) == (2.0, 4.0)

    on_ranks(2, PARAMS, use)


# --- graphs ------------------------------------------------------------------------------------


def test_a_capture_holds_norm_and_clip_that_were_used_before() -> None:
    def use(reducer: Reducer, world: World) -> None:
        with pytest.MonkeyPatch.context() as patch:
            capture = Capture(patch)
            hand_over(reducer, GRAD)
            reducer.norm()
            reducer.wait()
            reducer.synchronize()
            with capture:
                hand_over(reducer, GRAD)
                assert float(reducer.norm()) == 2.0
                with pytest.raises(
                    ProtocolError, match=r"norm\(\) allocates .* before the capture"
                ):
                    reducer.norm(math.inf)
                assert float(reducer.clip(1.0, loss_scale=np.array(2.0))) == 1.0
                reducer.wait()
            hand_over(reducer, GRAD)
            assert float(reducer.norm(math.inf)) == 1.0

    on_ranks(1, PARAMS, use)


def test_a_graph_waits_only_for_readers_inside_it() -> None:
    """A graph cannot wait for what is outside it; who is, is waited for when the graph is made."""

    def run(world: World) -> None:
        norms = Norms(Registry(PARAMS, world))
        outside, inside = world.runtime.stream(), world.runtime.stream()
        waited: list[Any] = []
        record = HostEvent.record

        def note(event: HostEvent, stream: Any) -> None:
            waited.append(stream)
            record(event, stream)

        def measure(caller: Any, *, captured: bool) -> list[Any]:
            waited.clear()
            norms.measure(Request.norm(2), caller, failed=False, captured=captured)
            return [stream for stream in waited if stream is not world.stream]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HostEvent, "record", note)
            patch.setattr(HostRuntime, "capturing", lambda _, stream: stream is inside)
            assert measure(outside, captured=False) == []
            assert measure(inside, captured=True) == []
            assert measure(inside, captured=True) == [inside]
            assert measure(outside, captured=False) == [outside, inside]
            assert measure(inside, captured=False) == [outside]  # once is enough

    run_local(1, run)


def test_a_norm_that_fails_breaks_the_world() -> None:
    def run(world: World) -> None:
        reducer = Reducer(Registry(PARAMS, world))
        hand_over(reducer, GRAD)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(world.runtime, "norm_kernel", None)
            with pytest.raises(CommunicationError, match="not callable"):
                reducer.clip(1.0)
        with pytest.raises(CommunicationError, match="not callable"):
            reducer.wait()
        reducer.close()

    run_local(1, run)


@pytest.mark.parametrize("broken", [False, True])
def test_a_broken_world_keeps_what_queued_work_may_use(broken: bool) -> None:
    def run(world: World) -> None:
        reducer = Reducer(Registry(PARAMS, world))
        hand_over(reducer, GRAD)
        reducer.norm()
        kernel = ref(reducer._norms._kernels[2.0])
        reducer.wait()
        if broken:
            world.fail(RuntimeError("planted"))
        reducer.close()
        gc.collect()
        assert (kernel() is not None) == broken

    run_local(1, run)
