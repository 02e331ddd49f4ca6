"""Ranks that do valid steps and misuse, one call after another, and are compared with a model."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from engine.model import LOSS_SCALE, Model
from strategies import bits, in_memory, interval, numpy_dtype

from cupynccl_reduce import (
    CommunicationError,
    MismatchError,
    Reducer,
    Registry,
    World,
    run_local,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Misuse", "PlantedError", "Seat", "Session"]

WALL_S = 60.0  # for what hangs


class PlantedError(Exception):
    """What the user's backward raises."""


@dataclass
class Seat:
    """What one rank has at hand."""

    world: World
    registry: Any = None
    reducer: Any = None
    backward: Any = None
    names: tuple[str, ...] = ()  # of the parameters that a misuse is about: see Model.subjects


@dataclass(frozen=True)
class Misuse:
    """One bad call; `about` says which parameters `seat.names` are to hold."""

    when: str
    call: Callable[[Seat], object]
    kind: type[Exception]
    words: tuple[str, ...]
    about: str = ""


class Ranks:
    """A world of threads that do what they are told, one call after another, all the same."""

    def __init__(self, world_size: int) -> None:
        self._orders: list[Any] = [queue.SimpleQueue() for _ in range(world_size)]
        self._answers: list[Any] = [queue.SimpleQueue() for _ in range(world_size)]
        arguments = (world_size, self._serve)
        self._thread = threading.Thread(target=run_local, args=arguments, daemon=True)
        self._thread.start()

    def _serve(self, world: World) -> None:
        seat = Seat(world)
        while (call := self._orders[world.rank].get()) is not None:
            try:
                answer = call(seat), None
            except BaseException as error:  # noqa: BLE001  # raised again where it was told
                answer = None, error
                world.fail(error)  # the others are not to wait for this rank
            self._answers[world.rank].put(answer)
            del call, answer  # of which the errors hold frames

    def do(self, call: Callable[[Seat], Any]) -> list[Any]:
        """Let every rank do `call`; return what they return."""
        for orders in self._orders:
            orders.put(call)
        answers = [answers.get(timeout=WALL_S) for answers in self._answers]
        errors = [error for _, error in answers if error is not None]
        for error in sorted(errors, key=lambda one: isinstance(one, CommunicationError)):
            raise error
        return [value for value, _ in answers]

    def end(self) -> None:
        for orders in self._orders:
            orders.put(None)
        self._thread.join(WALL_S)
        assert not self._thread.is_alive()


def state_of(seat: Seat, *, settled: bool) -> tuple[Any, ...]:
    """Return all that a refused call must leave as it is on one rank."""
    status, registry, reducer = seat.world.status, seat.registry, seat.reducer
    told: tuple[Any, ...] = (repr(seat.world), status.fault, status.closed, status.open_backward)
    if registry is not None:
        told += (repr(registry), registry._reducer, tuple(registry.shards))
        if settled:
            told += tuple(bits(array) for array in registry.shards.values())
    if reducer is not None:
        counts = reducer.statistics()
        kept = {f: getattr(counts, f) for f in counts.__slots__ if settled or f != "in_flight"}
        told += (repr(reducer), vars(reducer._cycle).copy(), kept)
        told += (reducer._intake.names, reducer._policy.missing())
    return told


class Session:
    """Ranks and their model, in step: each method is one valid step, checked."""

    steps = 0  # of all sessions

    def __init__(self, world_size: int, **options: Any) -> None:
        self.model = Model(world_size, options)
        self.ranks = Ranks(world_size)
        self.build_registry()

    @property
    def buckets(self) -> tuple[Any, ...]:
        return self._buckets

    def count(self) -> None:
        Session.steps += 1

    # Of worlds, registries and reducers.

    def build_registry(self) -> None:
        model = self.model

        def build(seat: Seat) -> Any:
            nbytes = model.options["bucket_bytes"]
            seat.registry = Registry(list(model.params.values()), seat.world, bucket_bytes=nbytes)
            return seat.registry.buckets

        self._buckets = self.ranks.do(build)[0]
        self.model.new_registry()
        self.build_reducer()

    def build_reducer(self) -> None:
        names = ("op", "policy", "missing", "max_buffers")
        options = {name: self.model.options[name] for name in names}

        def build(seat: Seat) -> None:
            seat.reducer = Reducer(seat.registry, **options)

        self.ranks.do(build)
        self.model.new_reducer()
        self.count()

    def close_reducer(self) -> None:
        self.ranks.do(lambda seat: seat.reducer.close())
        self.model.ready = False
        self.check_shards()

    def leave(self) -> None:
        self.ranks.do(lambda seat: seat.world.close())
        self.model.world = "left"
        self.count()

    def join(self) -> None:
        self.ranks.end()
        self.ranks = Ranks(self.model.world_size)
        self.model.world = "usable"
        self.build_registry()

    def end(self) -> None:
        """End the world, also in the middle of a backward."""
        if self.model.open:
            self.break_world()
        self.ranks.end()

    def break_world(self) -> None:
        self.ranks.do(lambda seat: seat.world.fail(PlantedError("planted")))
        self.model.world = "broken"

    # Of a cycle.

    def begin(self) -> None:
        def enter(seat: Seat) -> None:
            seat.backward = seat.reducer.backward()
            seat.backward.__enter__()

        self.ranks.do(enter)
        self.model.begin()
        self.count()

    def give(self, name: str, value: int = 1, layout: str = "plain") -> None:
        """Hand over a gradient of small integers, which is another on every rank."""
        spec = self.model.params[name]

        def seen(rank: int) -> np.ndarray:
            values = ((np.arange(spec.numel) + value) % 5 - 2.0) * (rank + 1)
            plain = values.reshape(spec.shape).astype(numpy_dtype(spec.dtype))
            return in_memory(plain, layout)

        self.ranks.do(lambda seat: seat.reducer.reduce_grad(name, seen(seat.world.rank)))
        model = self.model
        total = sum(seen(rank).astype("f8") for rank in range(model.world_size))
        model.arrived.setdefault(name, []).append(np.asarray(total / model.divisor))
        model.gradients += 1
        model.advance(self.buckets)
        self.count()

    def skip(self, name: str) -> None:
        self.ranks.do(lambda seat: seat.reducer.skip_grad(name))
        self.model.skipped.add(name)
        self.model.advance(self.buckets)
        self.count()

    def flush(self) -> None:
        self.ranks.do(lambda seat: seat.reducer.flush())
        if self.model.open:
            self.model.flush(self.buckets)
        self.count()

    def leave_backward(self) -> None:
        """Leave it well, or with what missing="error" says of absent gradients."""
        model = self.model
        told = model.absent() if model.options["missing"] == "error" else []

        def leave(seat: Seat) -> None:
            if not told:
                seat.backward.__exit__(None, None, None)
                return
            with pytest.raises(MismatchError) as caught:
                seat.backward.__exit__(None, None, None)
            assert all(repr(name) in str(caught.value) for name in told)

        self.ranks.do(leave)
        model.end(self.buckets, failed=False)
        if told:
            model.state = "failed"
        self.count()

    def fail(self, kind: type[BaseException]) -> None:
        """Raise inside backward."""

        def leave(seat: Seat) -> None:
            error = kind("planted")
            assert not seat.backward.__exit__(kind, error, None)  # so that `error` goes on

        self.ranks.do(leave)
        model = self.model
        model.end(self.buckets, failed=True)
        model.state = "failed"
        if not model.can_fill:
            model.world = "broken"
        self.count()

    def clip(self) -> None:
        self.ranks.do(lambda seat: seat.reducer.clip(None, loss_scale=LOSS_SCALE))
        self.model.clip()
        self.count()

    def wait(self) -> None:
        def wait(seat: Seat) -> None:
            assert seat.reducer.wait() is seat.registry.shards

        self.ranks.do(wait)
        self.model.state, self.model.known = "landed", True
        self.check_shards()

    def synchronize(self) -> None:
        self.ranks.do(lambda seat: seat.reducer.synchronize())
        self.count()

    def wait_packed(self) -> None:
        self.ranks.do(lambda seat: seat.reducer.wait_packed())
        self.count()

    def discard(self) -> None:
        self.ranks.do(lambda seat: seat.reducer.discard())
        self.model.state = "discarded"
        self.count()

    def gather(self, names: Sequence[str], *, out: bool = False) -> None:
        model = self.model

        def gather(seat: Seat) -> None:
            shards = {name: seat.registry.shards[name] for name in names}
            specs = {name: model.params[name] for name in names}
            room = {n: np.ones(s.shape, numpy_dtype(s.shard_dtype)) for n, s in specs.items()}
            full = seat.registry.gather(shards, out=room if out else None)
            assert set(full) == set(names)
            for name, array in full.items():
                assert array is room[name] or not out
                expected = model.shards[name].astype(array.dtype)
                np.testing.assert_array_equal(array, expected, strict=True)

        self.ranks.do(gather)
        self.count()

    # Checks.

    def check_shards(self) -> None:
        """Every shard holds what the model says, bit for bit but for the bits of NaN."""
        model = self.model

        def check(seat: Seat) -> None:
            seat.world.stream.synchronize()
            for name, array in seat.registry.shards.items():
                mine = interval(model.shards[name], seat.world.rank, model.world_size)
                np.testing.assert_array_equal(array, mine.astype(array.dtype), strict=True)

        if model.known:
            self.ranks.do(check)
        self.count()

    def check_counts(self) -> None:
        model, buckets = self.model, len(self.buckets)

        def check(seat: Seat) -> None:
            told = seat.reducer.statistics()
            counted = (told.step, told.backwards, told.gradients)
            assert counted == (model.step, model.backwards, model.gradients)
            if model.planned and model.world == "usable":
                now = model.launched if model.open else 0
                assert told.launches == model.backwards * buckets + now
                assert bool(told.waiting) == (model.open and now < buckets)

        self.ranks.do(check)

    def misuse(self, one: Misuse, *, settled: bool = True) -> None:
        """Do what must be refused: the words are there, and all is as it was, bit for bit."""
        subjects = self.model.subjects(one.about) if one.about else ()
        settled = settled and "ready" in self.model.situations()

        def do(seat: Seat) -> None:
            seat.names = subjects
            if settled:
                seat.reducer.synchronize()
            before = state_of(seat, settled=settled)
            with pytest.raises(Exception) as caught:  # noqa: PT011  # compared below
                one.call(seat)
            assert type(caught.value) is one.kind, repr(caught.value)
            for word in one.words:
                assert word in str(caught.value)
            assert state_of(seat, settled=settled) == before

        self.ranks.do(do)
        self.count()
