"""Full parameters from shards, bucket by bucket, only while somebody uses them. No gradients here.

Streams and the edges between them, of the kinds that pipeline.py has, with the same letters::

    who writes shards --A--> communication stream:    --C--> who acquired
                    ^        pack, all_gather, unpack          |
                    '----------D------'     ^                  |
                                            '-------F----------'

    A  shards are written before they are packed
    C  a bucket is complete before a stream that acquired it reads it
    D  shards are not written again before they have been packed
    F  memory is not written before the streams that acquired from it have read it
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Self

from cupynccl_reduce.errors import LayoutError, ProtocolError, ReduceError, check_integer
from cupynccl_reduce.gather import plan_steps

from .memory import FullMemory, full_dtypes
from .statistics import GathererStatistics
from .units import Order, Unit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from cupynccl_reduce.dlpack import View
    from cupynccl_reduce.layout import BucketLayout
    from cupynccl_reduce.protocols import Array
    from cupynccl_reduce.registry import Registry

__all__ = ["Gatherer"]


class Gatherer:
    """Gathers full parameters when they are acquired, and frees them some time after release.

    Collective, blocks the host: every rank gives the same names, dtypes and options. It is the
    parameter side of ZeRO-3 (Rajbhandari et al., 2020, section 5.3).

    The unit is the registry's bucket: acquiring one parameter gathers all of its bucket. Buckets
    are gathered on the world's communication stream, by its one communicator, in the order in
    which they are acquired, so that they have one order with the launches of a reducer: a gather
    may come inside `backward()`. Ranks must acquire the same parameters in the same order between
    the same launches; where they do not, the watchdog finds it.

    Args:
        registry: what is sharded, and how.
        shards: name -> this rank's flat shard of a parameter, contiguous. Only these names can be
            acquired. They are read at every gather; call `changed()` after writing to them.
        dtypes: name -> dtype of the full parameter; the spec's `dtype` where left out. The cast is
            part of the pack.
        allocate: name -> contiguous, writable array of the parameter's shape and dtype, called
            when it is to be gathered. By default the runtime's memory.
        free: name -> None, called when that array is not used any more; what it does on the stream
            of the acquire() or changed() that frees is ordered after all use.
        prefetch: how many buckets to gather ahead: those that followed when the same two buckets
            were acquired one after the other before.
        persistent: parameters of at most so many elements stay gathered until `changed()`.

    Raises:
        LayoutError: values that cannot work. MismatchError: ranks that differ.
    """

    def __init__(
        self,
        registry: Registry,
        shards: Mapping[str, Any],
        *,
        dtypes: Mapping[str, str] | None = None,
        allocate: Callable[[str], Any] | None = None,
        free: Callable[[str], None] | None = None,
        prefetch: int = 1,
        persistent: int = 0,
    ) -> None:
        world = registry.world
        world.check()
        self._registry, self._world, self._runtime = registry, world, world.runtime
        self._prefetch = prefetch
        refused: ReduceError | None = None
        entries: list[str] = []
        try:
            check_integer("prefetch", prefetch, 0)
            check_integer("persistent", persistent, 0)
            self._sources = registry.read_shards(shards, "Gatherer")
            self._dtypes = full_dtypes(registry, self._sources, dtypes)
            entries = [
                f"{prefetch=} {persistent=}",
                *(f"{n!r} {v.dtype} -> {self._dtypes[n]}" for n, v in self._sources.items()),
            ]
        except ReduceError as error:
            refused = error
        world.agree("what to gather", entries, refused=refused)
        self._memory = FullMemory(registry, self._dtypes, allocate, free)
        self._kept = dict(shards)  # their memory is read at every gather
        self._units = [u for b in registry.buckets for u in self._divide(b, persistent)]
        self._unit_of = {name: unit for unit in self._units for name in unit.names}
        self._users = dict.fromkeys(self._sources, 0)
        steps = [step for unit in self._units for step in unit.steps]
        self._scratch_bytes = max((step.nbytes for step in steps), default=0)
        self._scratch: Array = world.runtime.allocate(self._scratch_bytes)
        self._event = world.runtime.event()
        self._after = world.runtime.event()  # of the last gather
        self._readers: dict[Any, None] = {}  # streams that acquired, in order
        self._order = Order()
        self._counts = dict.fromkeys(("gathers", "prefetches", "hits", "received_bytes"), 0)
        self._closed = False
        self._lock = threading.RLock()
        self._follow({view.stream: None for view in self._sources.values()})

    def acquire(self, names: Iterable[str], *, stream: Any = None) -> dict[str, Any]:
        """Return name -> full parameter, which `stream` waits for; each is used once more.

        Collective; does not block the host. Then the next buckets are prefetched, and the memory
        of buckets that nobody uses is freed, those of the last release included. The arrays belong
        to the gatherer: what is written to them is lost.

        Args:
            names: parameters; a bucket is gathered once, however many of them it has.
            stream: the caller's stream; its current one when left out.

        Raises:
            LayoutError: an unknown name. ProtocolError: closed. CommunicationError: `allocate`
                raised, or gave what does not fit: the other ranks have gone on, the world breaks.
        """
        with self._lock:
            names = self._check(names, "acquire")
            caller = self._runtime.adopt(stream)
            units = list(dict.fromkeys(self._unit_of[name] for name in names))
            for unit in units:
                self._order.note(unit)
            coming = self._order.expect(self._prefetch)
            self._drop((u for u in self._units if u not in units and u not in coming), caller)
            self._gather(units, coming, caller)
            for unit in units:
                self._world.guard(self._follow_unit, unit, caller)
            for name in names:
                self._users[name] += 1
                self._unit_of[name].users += 1
            self._readers[caller] = None
            return {name: self._unit_of[name].arrays[name] for name in names}

    def release(self, names: Iterable[str], *, stream: Any = None) -> None:
        """Use each parameter once less; `stream` has queued all that reads it. Never blocks.

        Its memory stays until another bucket is acquired. Where nothing is in use any more,
        `stream` waits for what is still being gathered ahead, so that it may write the shards.

        Raises:
            LayoutError: an unknown name. ProtocolError: not acquired, or closed.
        """
        with self._lock:
            names = self._check(names, "release")
            for name in names:
                if names.count(name) > self._users[name]:
                    msg = f"release: {name!r} is not acquired"
                    raise ProtocolError(msg)
            caller = self._runtime.adopt(stream)
            for name in names:
                self._users[name] -= 1
                self._unit_of[name].users -= 1
            self._readers[caller] = None
            if not any(self._users.values()):
                caller.wait_event(self._after)  # D

    def changed(self, *, stream: Any = None) -> None:
        """Forget everything gathered, because the shards were written on `stream`. Never blocks.

        Every rank calls it at the same place: what is gathered afterwards differs otherwise.

        Raises:
            ProtocolError: a parameter is still acquired, or closed.
        """
        with self._lock:
            self._check((), "changed")
            used = [name for name, users in self._users.items() if users]
            if used:
                msg = f"changed(): {used[0]!r} is still acquired; release() it first"
                raise ProtocolError(msg)
            caller = self._runtime.adopt(stream)
            self._drop(self._units, caller, all_of_them=True)
            self._follow({caller: None})

    def statistics(self) -> GathererStatistics:
        """Return what was done so far. Does not block."""
        with self._lock:
            full = (n for u in self._units if u.arrays for n in u.names)
            return GathererStatistics(
                **self._counts,
                full_bytes=sum(self._memory.nbytes(name) for name in full),
                scratch_bytes=self._scratch_bytes,
            )

    def close(self) -> None:
        """Free what is not in use, and take no more calls; blocks the host. Idempotent.

        Arrays that are still acquired keep their values, and become the caller's own.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if not self._world.usable:
                self._world.status.kept.append((self._scratch, self._kept, self._memory))
                return
            self._drop(self._units, self._runtime.adopt(None), all_of_them=True)
            self._follow(self._readers)  # the spare memory is given back
            self._world.guard(self._world.stream.synchronize)
            self._memory.clear()
            self._scratch, self._kept = None, {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.close()

    def _check(self, names: Iterable[str], call: str) -> tuple[str, ...]:
        self._world.check()
        if self._closed:
            msg = f"{call}(): this gatherer is closed"
            raise ProtocolError(msg)
        if isinstance(names, str):
            msg = f"{call}() takes a list of names; write [{names!r}]"
            raise LayoutError(msg)
        names = tuple(names)
        for name in names:
            if name not in self._sources:
                msg = f"{call}: no shard {name!r} was given to this gatherer"
                raise LayoutError(msg)
        return names

    def _divide(self, bucket: BucketLayout, persistent: int) -> Iterable[Unit]:
        """Yield what of a bucket stays once it is gathered, and what does not."""
        for stays in (True, False):
            names = tuple(
                name
                for name in bucket.names
                if name in self._sources
                and (self._registry[name].spec.numel <= persistent) == stays
            )
            if names:
                dtypes = {n: (self._sources[n].dtype, self._dtypes[n]) for n in names}
                steps = plan_steps(self._world, bucket, dtypes)
                yield Unit(bucket.index, names, steps, stays, self._runtime.event())

    def _gather(self, units: Sequence[Unit], coming: Sequence[Unit], caller: Any) -> None:
        wanted = [unit for unit in dict.fromkeys((*units, *coming)) if not unit.arrays]
        if not wanted:
            return
        # The other ranks go on: one that cannot breaks the world.
        made = {unit: self._world.guard(self._memory.make, unit) for unit in wanted}
        targets = self._world.guard(self._memory.read, made.values())
        # A: what `allocate` did is done. F: so is what was read from that memory.
        self._follow(self._readers | {caller: None})
        for unit in wanted:
            self._world.guard(self._queue, unit, targets)
            unit.arrays, unit.prefetched = made[unit], unit not in units
            self._counts["gathers"] += 1
            self._counts["prefetches"] += unit.prefetched
        self._after.record(self._world.stream)

    def _queue(self, unit: Unit, targets: Mapping[str, View]) -> None:
        for step in unit.steps:
            step.run(self._world, unit.index, self._scratch, self._sources, targets)
            self._counts["received_bytes"] += step.nbytes - step.nbytes // self._world.world_size
        unit.ready.record(self._world.stream)

    def _follow_unit(self, unit: Unit, caller: Any) -> None:
        caller.wait_event(unit.ready)  # C: the parameters are read after they are there
        self._counts["hits"] += unit.prefetched
        unit.prefetched = False

    def _follow(self, streams: Iterable[Any]) -> None:
        """Let the communication stream wait for the present end of other streams."""
        for stream in tuple(streams):
            if stream is not None:
                self._event.record(stream)
                self._world.stream.wait_event(self._event)

    def _drop(self, units: Iterable[Unit], caller: Any, *, all_of_them: bool = False) -> None:
        """Free the units that nobody uses, on the stream `caller`."""
        idle = [u for u in units if u.arrays and not u.users and (all_of_them or not u.persistent)]
        if not idle:
            return
        for reader in self._readers:
            if reader is not caller:
                # F: the memory may be used again on this stream.
                self._event.record(reader)
                caller.wait_event(self._event)
        for unit in idle:
            caller.wait_event(unit.ready)  # of one that was never acquired
            self._memory.give_back(unit, unit.arrays)
            unit.arrays, unit.prefetched = {}, False
