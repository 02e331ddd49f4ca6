"""The planted bugs: a small change of the engine, a workload that exercises it, and who finds it.

Not planted, because what they break does not exist in this engine:

- pinned shards on a stream of their own: no wait before the device-to-host copy, pinned buffer
  reused;
- an oversize gradient reduced where it lies, then overwritten by the user;
- a second communicator: two of them in different orders;
- abort and retry: a retry returns stale bytes;
- a captured graph whose tables are rewritten.

They belong to those features. Of the list's temporaries the engine has one, the gather's scratch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from simulation.mutations import (
    CALLER,
    COMMUNICATION,
    COPY,
    around,
    asked_by,
    redirect_records,
    redirect_waits,
    skip_records,
    skip_waits,
    stream_named,
)
from simulation.programs import (
    Program,
    eight_buckets,
    growing_gather,
    hooks,
    host_reads,
    reader_of_a_closed_reducer,
)
from simulation.workloads import Cycle, Workload

from cupynccl_reduce import ParamSpec, Reducer
from cupynccl_reduce.buffers import SendBuffer
from cupynccl_reduce.intake import Intake
from cupynccl_reduce.pipeline import Pipeline
from cupynccl_reduce.policies import Arrival, Planned
from cupynccl_reduce.registry import Registry
from cupynccl_reduce.runtimes import host
from cupynccl_reduce.testing.device import SimEvent, SimStream
from cupynccl_reduce.testing.memory import range_of
from cupynccl_reduce.testing.runtime import SimPack, SimRuntime
from cupynccl_reduce.testing.sites import operation
from cupynccl_reduce.testing.transport import SimCommunicator

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

__all__ = ["PLANTED", "WORKLOADS", "Planted"]

FLOATS = tuple(ParamSpec(f"p{i}", (n,), "float32") for i, n in enumerate((3, 4, 5, 6, 7, 2)))
LARGE = tuple(ParamSpec(f"p{i}", (n,), "float32") for i, n in enumerate((8, 3, 16, 24)))
CAST = tuple(replace(spec, shard_dtype="float64") for spec in FLOATS)
MANY = tuple(replace(spec, uses="many") for spec in FLOATS)
SIDE = (Cycle(readers=2, backwards=2), Cycle(readers=1, late=True), Cycle(readers=1))

BASE = Workload(world_size=2, params=FLOATS, bucket_bytes=36, cycles=SIDE, producers=2)
ARRIVAL = {"policy": "arrival", "max_buffers": 2}
WORKLOADS: dict[str, Workload | Program] = {
    "planned": BASE,
    "arrival": replace(BASE, options=ARRIVAL),
    "cast": replace(BASE, params=CAST),
    "direct": replace(BASE, params=LARGE, bucket_bytes=80, direct_bytes=32),
    "direct, cast": replace(
        BASE,
        params=tuple(replace(spec, shard_dtype="float64") for spec in LARGE),
        bucket_bytes=80,
        direct_bytes=32,
    ),
    "direct, reuse": replace(
        BASE, params=LARGE, bucket_bytes=80, direct_bytes=32, habits=("reuse",)
    ),
    "one rank": replace(BASE, world_size=1),
    "one producer": replace(BASE, producers=0),
    "many": replace(BASE, params=MANY),
    "nothing arrives": replace(BASE, absent=1.0, cycles=(Cycle(), Cycle())),
    "reuse": replace(BASE, habits=("reuse",), bucket_bytes=64),
    "foreign": replace(BASE, habits=("foreign",)),
    "failing": replace(BASE, bucket_bytes=64, cycles=(Cycle(), Cycle(failing_rank=1), Cycle())),
    "brought": replace(BASE, brought=("p0", "p3"), absent=1.0),
    "gather": replace(BASE, cycles=tuple(Cycle(gather="out") for _ in range(3))),
    "gather parameters": replace(BASE, cycles=tuple(Cycle(gather="parameters") for _ in "ab")),
    "closing": replace(BASE, cycles=(Cycle(after="close"), Cycle(after="rebuild"), Cycle())),
    "host reads": Program(host_reads),
    "hooks": Program(hooks),
    "growing gather": Program(growing_gather),
    "eight buckets": Program(eight_buckets),
    "reader of a closed reducer": Program(reader_of_a_closed_reducer),
}


@dataclass(frozen=True, slots=True)
class Planted:
    """One bug: what it is called, what it does to the engine, where it shows and who finds it."""

    name: str
    plant: Callable[[pytest.MonkeyPatch], None]
    workload: str
    found: str  # race, deadlock, mismatch, declaration, bytes, overlap, memory
    # Only where the host's query "is it packed?" is answered with no; a yes orders the host.
    needs_no: bool = False

    def __str__(self) -> str:
        return f"{self.name} ({self.workload})"


def _before(owner: Any, name: str, first: Callable[..., Any]) -> Callable[..., None]:
    """Do something more, before a method."""

    def both(original: Any, *args: Any, **kwargs: Any) -> Any:
        first(*args)
        return original(*args, **kwargs)

    return lambda patch: around(patch, owner, name, both)


def _after(owner: Any, name: str, then: Callable[..., Any]) -> Callable[..., None]:
    """Do something more, after a method."""

    def both(original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        then(*args)
        return result

    return lambda patch: around(patch, owner, name, both)


def _instead(owner: Any, name: str, other: Callable[..., Any]) -> Callable[..., None]:
    return lambda patch: patch.setattr(owner, name, other)


def _all(*plants: Callable[..., None]) -> Callable[..., None]:
    return lambda patch: [plant(patch) for plant in plants]


# --- missing edges -----------------------------------------------------------------------------


def _mark_only(pick: Callable[[list[Any], SimStream], Any]) -> Callable[..., None]:
    """Note one stream as the producer of a whole bucket."""

    def mark(original: Any, self: Pipeline, layout: Any, groups: Any) -> None:
        groups = [list(group) for group in groups]
        views = [view for group in groups for view in group]
        if views:
            stream = pick(views, views[0].stream)
            original(self, layout, [[replace(views[0], stream=stream)]])

    return lambda patch: around(patch, Pipeline, "mark", mark)


def _scale_late(self: Pipeline, buffer: Any, launch: Any) -> None:
    what = operation("scaling of", "a bucket")
    self._copy.queue(what, lambda: None, writes=[range_of(buffer.array)])


def _wait_before_record(patch: pytest.MonkeyPatch) -> None:
    stale: dict[SimEvent, Any] = {}

    def record(original: Any, event: SimEvent, stream: SimStream) -> None:
        if asked_by("_send"):
            stale[event] = event.marker
        original(event, stream)

    def wait_event(original: Any, stream: SimStream, event: SimEvent) -> None:
        if not asked_by("_send"):
            original(stream, event)
            return
        new, event.marker = event.marker, stale[event]
        original(stream, event)
        event.marker = new

    around(patch, SimEvent, "record", record)
    around(patch, SimStream, "wait_event", wait_event)


def _hold_back_last_reader(self: Pipeline) -> None:
    event = self._runtime.event()
    for stream in self._readers:
        event.record(stream)
    for _ in self._readers:
        self._world.stream.wait_event(event)
    self._readers.clear()


def _forget_readers(self: Reducer, *_: Any) -> None:
    if not self._intake.names:
        self._pipeline._readers.clear()


def _unpack_elsewhere(patch: pytest.MonkeyPatch) -> None:
    def build(original: Any, self: Pipeline, *args: Any) -> None:
        original(self, *args)
        for prepared in self._prepared.values():
            prepared.unpack = _on_copy_stream(prepared.unpack)

    def _on_copy_stream(unpack: Any) -> Any:
        return lambda *a, stream, **k: unpack(*a, stream=stream_named(COPY, stream), **k)

    around(patch, Pipeline, "__init__", build)


def _table_in_memory(patch: pytest.MonkeyPatch) -> None:
    """Keep the pointer table in memory that the host rewrites for each launch."""
    tables: dict[SimPack, Any] = {}
    runtimes: dict[int, SimRuntime] = {}

    def build(original: Any, self: SimRuntime, scheduler: Any, rank: int, *args: Any) -> None:
        original(self, scheduler, rank, *args)
        runtimes[rank] = self

    def call(original: Any, self: SimPack, sources: Any, target: Any, **how: Any) -> None:
        runtime = runtimes[how["stream"].rank]
        if self not in tables:
            tables[self] = runtime.allocate(64, memory="pinned")
        table = tables[self]
        runtime.poke(table, 1)
        original(self, sources, target, **how)
        what = operation("pack's read of", "its table")
        how["stream"].queue(what, lambda: None, reads=[range_of(table)])

    around(patch, SimRuntime, "__init__", build)
    around(patch, SimPack, "__call__", call)


def _gather_packs_elsewhere(patch: pytest.MonkeyPatch) -> None:
    def queue(original: Any, self: SimPack, *args: Any, stream: SimStream, **how: Any) -> None:
        if asked_by("run"):
            stream = stream_named(CALLER, stream)
        original(self, *args, stream=stream, **how)

    around(patch, SimPack, "__call__", queue)


def _count_packed_as_read(_: Pipeline, buffer: SendBuffer, *_more: Any) -> None:
    buffer.read = buffer.packed


def _rows_overlap(patch: pytest.MonkeyPatch) -> None:
    def row(original: Any, self: SendBuffer, part: Any) -> Any:
        return original(self, replace(part, row=part.row - 16) if part.direct else part)

    around(patch, SendBuffer, "row", row)


EDGES = [
    Planted("no producer->copy wait", lambda p: skip_waits(p, "_follow"), "planned", "race"),
    Planted("no producer->copy wait", lambda p: skip_waits(p, "_follow"), "arrival", "race"),
    Planted("no producer->copy wait", lambda p: skip_waits(p, "_follow"), "one rank", "race"),
    Planted("no producer->copy wait", lambda p: skip_waits(p, "_follow"), "hooks", "race"),
    Planted("no producer->copy wait", lambda p: skip_waits(p, "_follow"), "direct", "race"),
    Planted("no pack->collective wait", lambda p: skip_waits(p, "_send"), "direct", "race"),
    Planted(
        "row of a direct gradient received where the next lies",
        _rows_overlap,
        "direct, cast",
        "bytes",
    ),
    Planted(
        "a direct gradient written again once the packs are done",
        _after(Pipeline, "_send", _count_packed_as_read),
        "direct, reuse",
        "race",
    ),
    Planted(
        "one of two producers waited", _mark_only(lambda v, s: v[-1].stream), "planned", "race"
    ),
    Planted(
        "the default stream waited",
        _mark_only(lambda _, s: stream_named(CALLER, s)),
        "planned",
        "race",
    ),
    Planted(
        "producer wait on the communication stream",
        lambda p: redirect_waits(p, "_follow", COMMUNICATION),
        "planned",
        "race",
    ),
    Planted("no pack->collective wait", lambda p: skip_waits(p, "_send"), "planned", "race"),
    Planted(
        "event recorded before the last pack",
        _all(
            _before(Pipeline, "_pack", lambda self, buffer, *_: buffer.packed.record(self._copy)),
            lambda p: skip_records(p, "_send", on=COPY),
            lambda p: skip_records(p, "run", on=COPY),
        ),
        "arrival",
        "race",
    ),
    Planted(
        "scaling after the bucket's event",
        _after(Pipeline, "_send", _scale_late),
        "planned",
        "race",
    ),
    Planted(
        "send buffer reused without waiting", lambda p: skip_waits(p, "_reuse"), "planned", "race"
    ),
    Planted(
        "send buffer reused without waiting", lambda p: skip_waits(p, "_reuse"), "arrival", "race"
    ),
    Planted(
        "buffer wait on the wrong stream",
        lambda p: redirect_waits(p, "_reuse", COMMUNICATION),
        "planned",
        "race",
    ),
    Planted(
        "free-event recorded before the collective",
        _all(
            _before(Pipeline, "_send", lambda self, b, _: b.sent.record(self._world.stream)),
            lambda p: skip_records(p, "_send", on=COMMUNICATION),
        ),
        "planned",
        "race",
    ),
    Planted(
        "free-event on the copy stream",
        lambda p: redirect_records(p, "_send", on=COMMUNICATION, to=COPY),
        "planned",
        "race",
    ),
    Planted(
        "the gather's scratch filled on another stream", _gather_packs_elsewhere, "gather", "race"
    ),
    Planted("no collective->unpack order", _unpack_elsewhere, "cast", "race"),
    Planted(
        "shard write does not wait for a reader",
        lambda p: skip_waits(p, "_hold_back_writers"),
        "planned",
        "race",
    ),
    Planted(
        "shard write does not wait for a reader",
        lambda p: skip_waits(p, "_hold_back_writers"),
        "one rank",
        "race",
    ),
    Planted(
        "next accumulate does not wait for the consumer",
        lambda p: skip_waits(p, "_hold_back_writers"),
        "cast",
        "race",
    ),
    Planted(
        "shard write of a bucket without arrival does not wait",
        _before(Reducer, "_finish", _forget_readers),
        "nothing arrives",
        "race",
    ),
    Planted("pointer table rewritten under a queued launch", _table_in_memory, "planned", "race"),
    Planted("compute not held back", lambda p: skip_waits(p, "_release"), "planned", "race"),
    Planted(
        "ready-event recorded before unpack",
        _all(
            _before(Pipeline, "_send", lambda self, *_: self._landed.record(self._world.stream)),
            lambda p: skip_records(p, "wait", on=COMMUNICATION),
        ),
        "cast",
        "race",
    ),
    Planted("consumer does not wait", lambda p: skip_waits(p, "wait"), "planned", "race"),
    Planted(
        "host reads without synchronising",
        _instead(Pipeline, "synchronize", lambda self: None),
        "host reads",
        "race",
    ),
    Planted(
        "event re-recorded before its waiter is queued",
        _instead(Pipeline, "_hold_back_writers", _hold_back_last_reader),
        "planned",
        "race",
    ),
    Planted("wait queued before the record", _wait_before_record, "planned", "race"),
    Planted(
        "wait_packed() waits for nothing",
        lambda p: skip_waits(p, "wait_packed"),
        "reuse",
        "race",
        needs_no=True,
    ),
    Planted(
        "brought shards not waited for", lambda p: skip_waits(p, "_prepare"), "brought", "race"
    ),
    Planted(
        "gather does not wait for the caller",
        lambda p: skip_waits(p, "_queue", on=COMMUNICATION),
        "gather parameters",
        "race",
    ),
    Planted(
        "nobody waits for the gather",
        lambda p: skip_waits(p, "_queue", on="side"),
        "gather",
        "race",
    ),
]


# --- lifetime ----------------------------------------------------------------------------------


def _drop_packed(self: Pipeline, buffer: Any, *_: Any) -> None:
    buffer.sources.clear()


def _release_unread(self: Pipeline) -> None:
    for buffer in self._buffers:
        if not buffer.filling:
            buffer.sources.clear()


def _release_produced(self: Pipeline, buffer: Any) -> None:
    for group in buffer.sources:
        for view in group:
            produced = self._runtime.event()
            produced.record(view.stream)
            view.stream.wait_event(produced)
    buffer.sources.clear()


def _replace_bucket(self: Pipeline, buffer: Any) -> None:
    buffer.array = self._runtime.allocate(buffer.array.nbytes)
    buffer.views.clear()


def _release_for_this_thread(patch: pytest.MonkeyPatch) -> None:
    """Let the thread that drops a source wait, not the stream whose arena takes it back."""
    runtimes: list[SimRuntime] = []

    def release(original: Any, self: Pipeline, buffer: Any) -> None:
        runtimes.append(self._runtime)
        original(self, buffer)
        runtimes.pop()

    def wait_event(original: Any, stream: SimStream, event: SimEvent) -> None:
        original(runtimes[-1].adopt(None) if asked_by("_release") else stream, event)

    around(patch, Pipeline, "_release", release)
    around(patch, SimStream, "wait_event", wait_event)


def _drop_on_exception(self: Reducer, error: Any) -> None:
    if error is not None:
        _release_unread(self._pipeline)


def _drop_scratch(patch: pytest.MonkeyPatch) -> None:
    """Let the gather drop a scratch that is too small at once."""

    def synchronize(original: Any, stream: SimStream) -> None:
        if not asked_by("_plan"):
            original(stream)

    around(patch, SimStream, "synchronize", synchronize)


LIFETIME = [
    Planted(
        "gradient freed after enqueue", _after(Pipeline, "_pack", _drop_packed), "planned", "race"
    ),
    Planted(
        "gradient freed after enqueue", _after(Pipeline, "_pack", _drop_packed), "arrival", "race"
    ),
    Planted(
        "gradient freed after enqueue", _after(Pipeline, "_pack", _drop_packed), "one rank", "race"
    ),
    Planted(
        "direct gradient freed after the packs of its bucket",
        _after(Pipeline, "_send", _count_packed_as_read),
        "direct",
        "race",
    ),
    Planted(
        "gradient freed after its producer's event",
        _instead(Pipeline, "_release", _release_produced),
        "planned",
        "race",
    ),
    Planted(
        "a query's result ignored",
        _instead(Pipeline, "release_read", _release_unread),
        "planned",
        "race",
    ),
    Planted(
        "host does not wait for foreign memory",
        _instead(SimEvent, "synchronize", lambda self: None),
        "foreign",
        "race",
    ),
    Planted(
        "bucket replaced in flight", _before(Pipeline, "_reuse", _replace_bucket), "planned", "race"
    ),
    Planted(
        "close() frees in flight",
        _instead(Pipeline, "synchronize", lambda self: None),
        "closing",
        "race",
    ),
    Planted(
        "reference dropped by an exception path",
        _after(Reducer, "_end", _drop_on_exception),
        "failing",
        "race",
        needs_no=True,
    ),
    Planted(
        "free on another stream's arena",
        lambda p: redirect_waits(p, "_release", CALLER),
        "planned",
        "race",
    ),
    Planted(
        "free on another thread's arena", _release_for_this_thread, "hooks", "race", needs_no=True
    ),
    Planted(
        "the gather's scratch replaced in flight",
        _drop_scratch,
        "growing gather",
        "race",
    ),
    Planted(
        "sources pile up",
        _all(
            _instead(Pipeline, "_release", lambda self, buffer: None),
            _instead(Pipeline, "release_read", lambda self: None),
        ),
        "eight buckets",
        "memory",
    ),
]


# --- too strong --------------------------------------------------------------------------------


def _wait_for_latest(self: Pipeline, buffer: Any, *_: Any) -> None:
    for other in self._buffers:
        self._copy.wait_event(other.sent)


def _copy_is_communication(self: Pipeline, *_: Any) -> None:
    self._copy = self._world.stream


TOO_STRONG = [
    Planted(
        "wait on the later buffer",
        _after(Pipeline, "_reuse", _wait_for_latest),
        "planned",
        "overlap",
    ),
    Planted(
        "a device synchronisation per flush",
        _after(Pipeline, "_send", lambda self, *_: self.synchronize()),
        "planned",
        "overlap",
    ),
    Planted(
        "pack waits for the previous collective",
        _before(Pipeline, "_pack", _wait_for_latest),
        "arrival",
        "overlap",
    ),
    Planted(
        "one stream for everything",
        _after(Pipeline, "__init__", _copy_is_communication),
        "planned",
        "overlap",
    ),
    Planted(
        "buffer index reset each flush",
        _after(Arrival, "_flush", lambda self, group: setattr(group, "turn", 0)),
        "arrival",
        "overlap",
    ),
    Planted(
        "one buffer is enough",
        _after(
            Planned,
            "__init__",
            lambda self, *_: [
                setattr(b, which, replace(getattr(b, which), buffer=0))
                for b in self._buckets
                for which in ("first", "more")
            ],
        ),
        "planned",
        "overlap",
    ),
]


# --- protocol ----------------------------------------------------------------------------------


def _off_by_one(patch: pytest.MonkeyPatch) -> None:
    def shard(original: Any, self: Registry, name: str) -> Any:
        array = original(self, name)
        start = array.ctypes.data - self._arena.ctypes.data + array.itemsize
        return self._arena[start : start + array.nbytes].view(array.dtype)

    around(patch, Registry, "_shard", shard)


def _row_off_by_one(patch: pytest.MonkeyPatch) -> None:
    def row(original: Any, self: SendBuffer, part: Any) -> Any:
        own = original(self, part)
        start = own.ctypes.data - self.array.ctypes.data - (own.itemsize if self.rank else 0)
        return self.array[start : start + own.nbytes].view(own.dtype)

    around(patch, SendBuffer, "row", row)


def _by_rank(patch: pytest.MonkeyPatch) -> None:
    def run(original: Any, self: Pipeline, launches: Any, *args: Any) -> None:
        launches = list(launches)
        original(self, launches[:: -1 if self._world.rank else 1], *args)

    around(patch, Pipeline, "run", run)


def _other_size(patch: pytest.MonkeyPatch) -> None:
    def scatter(original: Any, self: Any, send: Any, recv: Any, *args: Any) -> None:
        if self.rank == 1:
            send, recv = send[: -self.world_size], recv[:-1]
        original(self, send, recv, *args)

    around(patch, SimCommunicator, "reduce_scatter", scatter)


def _skip_last_flush(patch: pytest.MonkeyPatch) -> None:
    def finish(original: Any, self: Reducer, error: Any) -> None:
        if self._world.rank != 1 or self._cycle.step == 1:
            original(self, error)

    around(patch, Reducer, "_finish", finish)


PROTOCOL = [
    Planted("offset off by one", _off_by_one, "planned", "bytes"),
    Planted("row offset off by one", _row_off_by_one, "cast", "declaration"),
    Planted(
        "padding not zeroed",
        _instead(host, "_zero_padding", lambda *_: None),
        "planned",
        "declaration",
    ),
    Planted("flush order depends on the rank", _by_rank, "many", "mismatch"),
    Planted("one rank, one other size", _other_size, "nothing arrives", "mismatch"),
    Planted("last flush skipped on one rank", _skip_last_flush, "many", "deadlock"),
    Planted(
        "a second arrival neither summed nor refused",
        _instead(Intake, "hold", lambda self, name, view: self._held.update({name: [view]})),
        "many",
        "bytes",
    ),
]

PLANTED = [*EDGES, *LIFETIME, *TOO_STRONG, *PROTOCOL]
