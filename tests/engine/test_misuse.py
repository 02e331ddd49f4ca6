"""Valid steps and misuse in any order: a refused call changes nothing, and the next step is exact.

Every rank does the same. What shards must hold comes from a model in plain NumPy. A seeded sample
runs by default; with TEST_MISUSE=all, more than 5,000 steps and every misuse in every world.
"""

from __future__ import annotations

import os
import random
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from engine.misuse_calls import CALLS
from engine.misuse_values import VALUES
from engine.model import FLOATS
from engine.session import PlantedError, Seat, Session
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from strategies import MEMORY, interval

from cupynccl_reduce import (
    MismatchError,
    ProtocolError,
    ReduceError,
    Registry,
    World,
    run_local,
)

if TYPE_CHECKING:
    from collections.abc import Callable

ALL = os.environ.get("TEST_MISUSE") == "all"
MISUSES = CALLS | VALUES
TABLE = np.arange(6, dtype="f4") + 1
RAISED = (PlantedError, KeyboardInterrupt, SystemExit, GeneratorExit, StopIteration, ProtocolError)


class Machine(RuleBasedStateMachine):
    """Any order of valid steps and misuse, on ranks that all do the same."""

    world_size = 1

    def __init__(self) -> None:
        super().__init__()
        self.session: Session | None = None

    @property
    def now(self) -> set[str]:
        return set() if self.session is None else self.session.model.situations()

    @property
    def model(self) -> Any:
        assert self.session is not None
        return self.session.model

    @initialize(
        op=st.sampled_from(["sum", "mean"]),
        policy=st.sampled_from(["planned", "planned", "arrival"]),
        missing=st.sampled_from(["zero", "zero", "error"]),
        max_buffers=st.integers(1, 3) | st.just(1 << 10),
        bucket_bytes=st.sampled_from([1, 24, 1 << 20, 1 << 80]),
        integers=st.booleans(),
    )
    def start(self, **options: Any) -> None:
        if options["integers"]:
            options["op"] = "sum"
        self.session = Session(self.world_size, **options)

    @precondition(
        lambda self: {"ready", "outside"} <= self.now and not self.now & {"failed", "clipped"}
    )
    @rule()
    def begin(self) -> None:
        self.session.begin()

    @precondition(lambda self: {"ready", "inside"} <= self.now)
    @rule(data=st.data())
    def give(self, data: Any) -> None:
        names = self.model.takes()
        if names:
            for name in data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True)):
                value, layout = data.draw(st.integers(0, 4)), data.draw(st.sampled_from(MEMORY))
                self.session.give(name, value, layout)

    @precondition(lambda self: {"ready", "inside"} <= self.now)
    @rule(data=st.data())
    def skip(self, data: Any) -> None:
        names = self.model.lets_skip()
        if names:
            self.session.skip(data.draw(st.sampled_from(names)))

    @precondition(lambda self: "ready" in self.now)
    @rule()
    def flush(self) -> None:
        self.session.flush()

    @precondition(lambda self: {"ready", "inside"} <= self.now)
    @rule()
    def leave_backward(self) -> None:
        self.session.leave_backward()

    @precondition(lambda self: {"ready", "inside"} <= self.now)
    @rule(kind=st.sampled_from(RAISED))
    def fail(self, kind: type[BaseException]) -> None:
        self.session.fail(kind)

    @precondition(lambda self: "reduced" in self.now)
    @rule()
    def clip(self) -> None:
        self.session.clip()

    @precondition(
        lambda self: self.now & {"reduced", "clipped", "landed"} and "outside" in self.now
    )
    @rule()
    def wait(self) -> None:
        self.session.wait()

    @precondition(lambda self: "ready" in self.now)
    @rule()
    def synchronize(self) -> None:
        self.session.synchronize()

    @precondition(lambda self: "outside" in self.now)
    @rule()
    def wait_packed(self) -> None:
        self.session.wait_packed()

    @precondition(lambda self: "outside" in self.now)
    @rule()
    def discard(self) -> None:
        self.session.discard()

    @precondition(lambda self: {"outside", "landed"} <= self.now)
    @rule(data=st.data(), out=st.booleans())
    def gather(self, data: Any, out: bool) -> None:
        names = data.draw(st.permutations(list(self.model.params)))
        self.session.gather(names[: data.draw(st.integers(0, len(names)))], out=out)

    @precondition(lambda self: "outside" in self.now)
    @rule()
    def close(self) -> None:
        self.session.close_reducer()

    @precondition(lambda self: "closed" in self.now)
    @rule(registry=st.booleans())
    def reopen(self, registry: bool) -> None:
        if registry:
            self.session.build_registry()
        else:
            self.session.build_reducer()

    @precondition(lambda self: self.now & {"closed", "landed"} and "inside" not in self.now)
    @rule()
    def leave(self) -> None:
        self.session.leave()

    @precondition(lambda self: self.now & {"left", "broken"})
    @rule()
    def join(self) -> None:
        self.session.join()

    @precondition(lambda self: self.session is not None)
    @rule(data=st.data(), times=st.integers(1, 4), settled=st.booleans())
    def misuse(self, data: Any, times: int, settled: bool) -> None:
        now = self.now
        names = [name for name, one in MISUSES.items() if not one.when or one.when in now]
        for _ in range(times):
            self.session.misuse(MISUSES[data.draw(st.sampled_from(names))], settled=settled)

    def teardown(self) -> None:
        if self.session is not None:
            if "usable" in self.now:
                self.session.check_counts()
            self.session.end()


@pytest.mark.parametrize("world_size", [1, 2])
def test_any_order_of_steps_and_misuse_is_what_the_model_says(world_size: int) -> None:
    class Sized(Machine):
        pass

    Sized.world_size = world_size
    before, wanted, examples = Session.steps, *((2600, 60) if ALL else (250, 8))
    run_state_machine_as_test(
        Sized,
        settings=settings(
            max_examples=examples, stateful_step_count=50, print_blob=True, derandomize=not ALL
        ),
    )
    assert Session.steps - before >= wanted


INSIDE = {"inside", "given", "skipped", "late"}
AFTER: dict[str, Callable[[Session], None]] = {
    "outside": Session.synchronize,
    "reduced": Session.synchronize,
    "clipped": Session.clip,
    "landed": Session.wait,
    "idle": Session.wait,
    "discarded": Session.discard,
    "closed": Session.close_reducer,
    "left": Session.leave,
    "broken": Session.break_world,
}


def reach(session: Session, when: str) -> None:
    """Bring a new session to where a misuse is to be tried."""
    if when in INSIDE:
        session.begin()
        session.give("once", 2)
        session.give("many", 3)
        session.skip("scalar")
        if when == "late":
            session.flush()
    elif when in AFTER or when == "failed":
        session.begin()
        session.give("table", 4)
        if when == "failed":
            session.fail(PlantedError)
        else:
            session.leave_backward()
            AFTER[when](session)


def go_on(session: Session) -> None:
    """Do a next valid step, and a whole cycle after it; all must be exact."""
    now = session.model.situations()
    if now & {"left", "broken"}:
        session.join()
    elif "closed" in now:
        session.build_reducer()
    elif "failed" in now:
        session.discard()
    elif "clipped" in now:
        session.wait()
    if not session.model.open:
        session.begin()
    for index, name in enumerate(session.model.takes()):
        session.give(name, index)
    session.leave_backward()
    session.wait()
    session.gather(list(session.model.params))
    session.check_counts()


def chosen() -> list[tuple[str, int, str]]:
    """Return every misuse in one of its worlds, or in all."""
    cases, rng = [], random.Random(7)
    for name, one in MISUSES.items():
        # In arrival order no gradient is late, as it is launched when it comes, and a backward
        # that fails breaks the world.
        policies = ("planned",) if one.when in ("late", "failed") else ("planned", "arrival")
        worlds = list(product([name], [1, 2], policies))
        cases += worlds if ALL else rng.sample(worlds, 1)
    return cases


@pytest.mark.limit(60)
@pytest.mark.parametrize(("name", "world_size", "policy"), chosen())
def test_a_named_misuse_changes_nothing_and_the_next_step_is_exact(
    name: str, world_size: int, policy: str
) -> None:
    one, session = MISUSES[name], Session(world_size, policy=policy)
    try:
        reach(session, one.when)
        assert not one.when or one.when in session.model.situations()
        session.misuse(one)
        session.misuse(one, settled=False)
        go_on(session)
    finally:
        session.end()


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("name", [name for name in VALUES if name.startswith("gather")])
def test_a_bad_gather_of_one_rank_is_refused_on_all(name: str, bad: int) -> None:
    """No rank waits for it, and the next gather is exact."""
    one = VALUES[name]

    def work(world: World) -> None:
        seat = Seat(world, Registry(FLOATS, world))
        seat.registry.shards["table"][...] = interval(TABLE, world.rank, world.world_size)
        if world.rank == bad:
            with pytest.raises(one.kind) as refused:
                one.call(seat)
            assert all(word in str(refused.value) for word in one.words)
        else:
            with pytest.raises(MismatchError, match=f"rank {bad}: refused: "):
                seat.registry.gather(seat.registry.shards)
        full = seat.registry.gather(seat.registry.shards)
        np.testing.assert_array_equal(full["table"].reshape(-1), TABLE, strict=True)

    run_local(2, work)


@pytest.mark.parametrize("check", ["off", "heartbeat", "sync"])
def test_the_longest_timeout_is_taken(check: Any) -> None:
    def work(world: World) -> int:
        world.agree("that it is there", [])
        return world.rank

    assert run_local(2, work, timeout_s=7 * 24 * 3600, check=check) == [0, 1]


def test_the_table_of_misuse_is_long_enough_and_covers_every_situation() -> None:
    """Every entry is a case of the test above by construction."""
    assert len(MISUSES) >= 60
    told = {one.when for one in MISUSES.values()}
    assert told == INSIDE | AFTER.keys() | {"", "usable", "ready", "new", "failed"}
    assert all(issubclass(one.kind, ReduceError) for one in MISUSES.values())
