"""Ctrl-C at seeded instants of the engine: it comes out, and never leaves half a step behind.

A seeded sample runs by default, all 1,000 with TEST_INTERRUPTS=all.
"""

from __future__ import annotations

import os
import random
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from engine.interrupts import Interrupt, Watched

from cupynccl_reduce import (
    CommunicationError,
    MismatchError,
    ParamSpec,
    Reducer,
    Registry,
    World,
    run_local,
)

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

WALL_S = 30.0  # for what hangs
ALL, SAMPLE = 1000, 300
PHASES = ("backward", "clip", "wait", "gather", "agree")
DRAWN = ("backward", "backward", "backward", "gradients", "clip", "wait", "gather", "agree")
LOSS_SCALE = 0.5  # of clip(), which so doubles what shards hold
SMALL = [ParamSpec(f"p{i}", (5 + i,), "float32") for i in range(4)]
LARGE = [ParamSpec(f"q{i}", (64,), "float32") for i in range(2)]
MANY = [ParamSpec("many", (3,), "float32", uses="many")]
INTEGERS = [ParamSpec("count", (4,), "int32")]
# Parameters, bucket_bytes and options of a reducer. With LARGE ones, two ranks send them from where
# they lie: a launch is a group of collectives, as it is in arrival order.
CASES: dict[str, tuple[list[ParamSpec], int, dict[str, Any]]] = {
    "planned": (SMALL + MANY, 48, {}),
    "direct": (SMALL + LARGE, 1 << 10, {}),
    "error": (SMALL + MANY, 48, {"missing": "error"}),
    "integers": (SMALL + INTEGERS, 48, {}),
    "arrival": (SMALL + MANY, 48, {"policy": "arrival"}),
    "arrival-error": (SMALL, 1 << 10, {"policy": "arrival", "missing": "error", "max_buffers": 1}),
}


@dataclass(frozen=True)
class Plan:
    """Which rank is interrupted, in what, and when."""

    case: str
    world_size: int
    phase: str
    bad: int
    at: float
    caught: bool = True  # by the caller, who goes on where that is allowed


@dataclass
class Told:
    """What the interrupted rank tells the others, beside the engine."""

    after: dict[str, str] = field(default_factory=dict)  # phase -> "fine", "again" or "over"
    phases: dict[str, threading.Event] = field(
        default_factory=lambda: {name: threading.Event() for name in PHASES}
    )
    interrupt: Interrupt | None = None
    came_out: bool = False

    def post(self, phase: str, what: str) -> None:
        self.after[phase] = what
        self.phases[phase].set()

    def hear(self, phase: str) -> str:
        assert self.phases[phase].wait(WALL_S)
        return self.after[phase]


class Rank:
    """One rank's part: a step, one that is interrupted, and one after it."""

    def __init__(self, world: World, plan: Plan, told: Told) -> None:
        self.communicator: Any = Watched(world.communicator)
        self.world = replace(world, communicator=self.communicator)
        self.plan, self.told = plan, told
        self.params, bucket_bytes, options = CASES[plan.case]
        self.registry = Registry(self.params, self.world, bucket_bytes=bucket_bytes)
        self.reducer = Reducer(self.registry, op="sum", **options)
        self.step = 0
        self.bad = world.rank == plan.bad

    def gradients(self, step: int, rank: int) -> dict[str, list[np.ndarray]]:
        grads = {}
        for index, spec in enumerate(self.params):
            uses = 2 if spec.uses == "many" else 1
            value = np.full(spec.shape, (step + index) * (rank + 1), spec.dtype)
            grads[spec.name] = [value] * uses
        if self.plan.case != "error" and step == 2:
            del grads["p1"]  # what is absent is zero, not what it was
        return grads

    def armed(self, *phases: str) -> AbstractContextManager[object]:
        """Return the context in which this rank is interrupted, once."""
        once = self.bad and self.step == 2 and self.told.interrupt is None
        if not once or self.plan.phase not in phases:
            return nullcontext()
        self.told.interrupt = Interrupt(self.plan.at)
        return self.told.interrupt

    def backward(self) -> None:
        grads = self.gradients(self.step, self.world.rank)
        with self.armed("backward"), self.reducer.backward():
            if "p1" not in grads:
                self.reducer.skip_grad("p1")
            with self.armed("gradients"):
                for name in reversed(self.params):
                    for grad in grads.get(name.name, ()):
                        self.reducer.reduce_grad(name.name, grad)

    def clip(self) -> None:
        with self.armed("clip"):
            self.reducer.clip(None, loss_scale=LOSS_SCALE)

    def wait(self) -> None:
        with self.armed("wait"):
            shards = self.reducer.wait()
            self.reducer.synchronize()
        for name, shard in shards.items():
            place = self.registry[name]
            full = self.expected(name).reshape(-1)
            np.testing.assert_array_equal(shard, full[place.start : place.stop], strict=True)

    def gather(self) -> None:
        with self.armed("gather"):
            full = self.registry.gather(self.registry.shards)
        for name, array in full.items():
            np.testing.assert_array_equal(array, self.expected(name), strict=True)

    def agree(self) -> None:
        with self.armed("agree"):
            self.world.agree("what it agrees on in this test", ["the same", "on every rank"])

    def expected(self, name: str) -> np.ndarray:
        place = self.registry[name].spec
        ranks = range(self.world.world_size)
        grads = [g for r in ranks for g in self.gradients(self.step, r).get(name, ())]
        total = sum(grads, np.zeros(place.shape, place.dtype))
        return (total / LOSS_SCALE).astype(place.dtype) if place.is_float else total

    def run(self) -> dict[str, int]:
        """Return the counts of what was launched, equal on all ranks of a world that goes on."""
        self.step = 1
        self.whole_step()
        self.step = 2
        goes_on = self.interrupted_step() if self.bad else self.step_beside_it()
        assert not self.communicator.in_group
        assert not (goes_on and self.communicator.partial)
        if not goes_on:
            self.check_broken()
            return {}
        self.step = 3
        self.whole_step()
        self.reducer.close()
        counts = self.reducer.statistics()
        return {
            "collectives": counts.collectives,
            "grouped": self.communicator.grouped,
            "reduced": self.communicator.reduced,
            "gathered": self.communicator.gathered,
        }

    def whole_step(self) -> None:
        for phase in PHASES:
            getattr(self, phase)()

    def interrupted_step(self) -> bool:
        """Return whether the world goes on; tell the others after each phase."""
        for phase in PHASES:
            what = "over"
            try:
                what = self.attempt(phase)
            finally:
                self.told.post(phase, what)
                for later in PHASES if what == "over" else ():
                    self.told.post(later, "over")
            if what == "over":
                return False
            if phase == "backward" and what == "again":
                self.clip()  # as the others do
                self.reducer.discard()
                return True
        return True

    def attempt(self, phase: str) -> str:
        """Do one phase; interrupted, say whether to do it again, or that the world is over."""
        gathered = self.communicator.gathered
        backwards = self.reducer.statistics().backwards
        try:
            getattr(self, phase)()
        except KeyboardInterrupt:
            self.told.came_out = True
            if not self.plan.caught:
                raise
        else:
            return "fine"
        # The traceback is gone by now, and all that it held.
        if not self.world.usable:
            return "over"
        if phase == "backward" and self.reducer.statistics().backwards == backwards:
            self.backward()  # it had not begun
            return "fine"
        if phase == "clip" and "CLIPPED" not in repr(self.reducer):
            self.clip()
        if phase == "wait":
            self.wait()
        if phase == "gather" and self.communicator.gathered == gathered:
            self.gather()
        if phase == "agree":
            self.agree()
        return "again"

    def step_beside_it(self) -> bool:
        """Return whether the world goes on; it must be over here too where it is for that rank."""
        over, shards, told = False, {}, f"rank {self.plan.bad}: backward failed: "
        try:
            self.backward()
            self.clip()
            shards = self.reducer.wait()
            self.reducer.synchronize()
        except CommunicationError:
            over = True
        except MismatchError as error:
            if told not in str(error):
                raise
            if self.told.hear("backward") == "over":  # it did not stay
                with pytest.raises(CommunicationError):
                    self.registry.gather(self.registry.shards)
                return False
            self.clip()
        if self.told.hear("backward") == "again":
            # As where backward raises anything else: complete on this rank, or NaN.
            assert not over
            for name, shard in shards.items():
                place = self.registry[name]
                full = self.expected(name).reshape(-1)[place.start : place.stop]
                assert np.isnan(shard).all() or np.array_equal(shard, full)
            self.reducer.discard()
            return True
        try:
            if not over:
                self.wait()
                self.gather()
                self.agree()
                # Of a rank that broke after all of it, the next meeting tells.
                if self.told.hear("agree") == "over":
                    self.agree()
        except CommunicationError:
            over = True
        assert over == (self.told.hear("agree") == "over")
        return not over

    def check_broken(self) -> None:
        """Every call says so, and nothing waits."""
        assert not self.world.usable
        for call in (
            self.reducer.backward().__enter__,
            self.reducer.norm,
            self.reducer.wait,
            self.reducer.discard,
            lambda: self.registry.gather(self.registry.shards),
        ):
            with pytest.raises(CommunicationError) as caught:
                call()
            # The latter where Ctrl-C came between the end of the block and that of backward().
            if self.bad:
                assert any(w in str(caught.value) for w in ("KeyboardInterrupt", "GeneratorExit"))
        self.reducer.close()


@cache
def instants(case: str, world_size: int, phase: str, bad: int) -> list[list[int]]:
    """Return those of each place in the code, as called from one line.

    About: some depend on what other threads have done by then.
    """
    told = Told()
    plan = Plan(case, world_size, phase, bad, at=float("inf"))
    run_local(world_size, lambda world: Rank(world, plan, told).run())
    assert told.interrupt is not None
    return list(told.interrupt.instants.values())


def draw(seed: int) -> Plan:
    rng = random.Random(seed)
    world_size = rng.choice((1, 2, 2))
    what = rng.choice(list(CASES)), world_size, rng.choice(DRAWN), rng.randrange(world_size)
    # Of each place alike: most instants lie where gradients are read.
    at = rng.choice(rng.choice(instants(*what)))
    return Plan(*what, at=at, caught=rng.random() < 0.75)


def chosen() -> list[int]:
    everything = list(range(ALL))
    if os.environ.get("TEST_INTERRUPTS") == "all":
        return everything
    return sorted(random.Random(7).sample(everything, SAMPLE))


@pytest.mark.limit(20)
@pytest.mark.parametrize("seed", chosen())
def test_ctrl_c_comes_out_and_leaves_a_whole_step_or_a_world_that_says_it_is_broken(
    seed: int,
) -> None:
    plan, told = draw(seed), Told()
    counts: list[dict[str, int]] = []
    try:
        try:
            counts = run_local(plan.world_size, lambda world: Rank(world, plan, told).run())
        except KeyboardInterrupt as error:
            if plan.caught or f"on rank {plan.bad} of {plan.world_size}" not in str(
                error.__notes__
            ):
                raise
        assert all(one == counts[0] for one in counts)
        assert told.interrupt is not None
        assert told.came_out == bool(told.interrupt.where)
    except BaseException as error:
        where = told.interrupt.where if told.interrupt else ""
        error.add_note(f"{plan} was interrupted by {where or 'nothing'}")
        raise


def run_whole_steps(world_size: int, at: float) -> Interrupt:
    """Run ranks, and interrupt who waits for them; all must have ended after it."""
    interrupt = Interrupt(at)
    before = set(threading.enumerate())

    def work(world: World) -> None:
        rank = Rank(world, Plan("planned", world_size, "", -1, 0), Told())
        for _ in range(3):
            rank.whole_step()

    try:
        with interrupt:
            run_local(world_size, work)
    finally:
        # Not a join: one that was about to start cannot be joined yet.
        end = time.monotonic() + WALL_S
        while left := set(threading.enumerate()) - before:
            assert time.monotonic() < end, f"{left} go on"
            time.sleep(1e-4)
    return interrupt


@cache
def callers_instants(world_size: int) -> int:
    return run_whole_steps(world_size, float("inf")).seen


@pytest.mark.limit(20)
@pytest.mark.parametrize("seed", range(20))
def test_ctrl_c_of_who_called_run_local_comes_out_and_no_rank_goes_on(seed: int) -> None:
    rng = random.Random(seed)
    world_size = rng.choice((1, 2, 3))
    at = rng.randint(1, callers_instants(world_size))
    try:
        seen = run_whole_steps(world_size, at).seen
    except KeyboardInterrupt:
        return
    assert seen < at  # there were fewer this time
