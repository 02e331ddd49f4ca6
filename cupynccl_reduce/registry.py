"""Which slice of which parameter this rank keeps, and the memory for it. No gradients here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .dtypes import DTYPES
from .errors import LayoutError, ProtocolError, ReduceError
from .gather import ShardGather, check_apart, check_mapping, check_writable
from .layout import BucketLayout, Matrix, ParamSpec, Segment, plan_buckets

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .dlpack import View
    from .membership import World
    from .protocols import Array

__all__ = ["Placement", "Registry"]


@dataclass(frozen=True, slots=True)
class Placement:
    """One parameter on this rank: it keeps elements `[start, stop)` of the flat parameter."""

    spec: ParamSpec
    bucket: int
    segment: Segment
    start: int
    stop: int


class Registry(Mapping[str, Placement]):
    """A read-only mapping: parameter name -> its spec, segment and this rank's interval.

    Collective, blocks the host: every rank must give the same parameters and `bucket_bytes`, and a
    difference is a MismatchError on all ranks. A parameter's interval is
    `[rank * width, min((rank + 1) * width, numel))` with `width = ceil(numel / world_size)`.

    Args:
        params: in the order of the model; backward is expected to produce gradients in reverse.
        world: from `connect()` or `run_local()`.
        bucket_bytes: gradient bytes of a bucket, padding not counted.
        shards: memory to use instead of the registry's own: name -> flat, contiguous, writable
            array of this rank's interval in the parameter's shard dtype. May name some only.

    Raises:
        LayoutError: values that cannot work. MismatchError: ranks that differ.
    """

    def __init__(
        self,
        params: Sequence[ParamSpec],
        world: World,
        *,
        bucket_bytes: int = 64 << 20,
        shards: Mapping[str, Any] | None = None,
    ) -> None:
        world.check()
        self.world = world
        self.bucket_bytes = bucket_bytes
        self._reducer: object | None = None
        # Streams that called wait(): whatever writes shards next waits for what they read, also
        # where that is another reducer.
        self.readers: dict[Any, None] = {}  # a set in order
        self._prepare(params, {} if shards is None else shards)
        self._gather = ShardGather(world, self.buckets, self._specs)

    def _prepare(self, params: Sequence[ParamSpec], brought: Mapping[str, Any]) -> None:
        world = self.world
        refused: ReduceError | None = None
        try:
            self.params = _listed(params, brought)
            self.buckets = plan_buckets(
                self.params,
                world_size=world.world_size,
                bucket_bytes=self.bucket_bytes,
                direct_bytes=world.communicator.direct_bytes,
            )
            self._specs = {spec.name: spec for spec in self.params}
            self._segments = {s.name: s for b in self.buckets for s in b.matrix.segments}
            self._bucket = {s.name: b.index for b in self.buckets for s in b.matrix.segments}
            views = {name: self._check_brought(name, array) for name, array in brought.items()}
            check_apart("shards", views)
            direct = f"direct_bytes={world.communicator.direct_bytes}"
            entries = [f"bucket_bytes={self.bucket_bytes}", direct, *map(repr, self.params)]
        except ReduceError as error:
            refused, entries = error, []
        world.agree("the registry", entries, refused=refused)
        self._brought = frozenset(brought)
        last = self.buckets[-1]
        self.arena_bytes = last.shard_offset + last.shard_bytes if len(brought) < len(self) else 0
        self._arena: Array = world.runtime.allocate(self.arena_bytes)
        for stream in {view.stream: None for view in views.values()}:
            # A: the caller may still be writing to (zeroing) the memory it brings.
            if stream is not None:
                event = world.runtime.event()
                event.record(stream)
                world.stream.wait_event(event)
        self.shards: Mapping[str, Any] = MappingProxyType(
            {name: brought[name] if name in brought else self._shard(name) for name in self}
        )
        # Read once: reading what the caller brought again would count as another write to it.
        self._views = {
            name: views[name] if name in brought else world.runtime.read(shard, world.stream)
            for name, shard in self.shards.items()
        }

    def _check_brought(self, name: str, array: Any) -> View:
        if name not in self._specs:
            msg = f"shards: no parameter {name!r} among those given"
            raise LayoutError(msg)
        try:
            view = self.world.runtime.read(array, self.world.stream)
        except ReduceError as error:
            msg = f"shards: {name!r}: {error}"
            raise LayoutError(msg) from error
        place = self[name]
        shape = (place.stop - place.start,)
        what = f"shards: {name!r} of rank {self.world.rank}"
        check_writable(what, view, shape, place.spec.shard_dtype)
        return view

    def _shard(self, name: str) -> Array:
        bucket, segment = self.buckets[self._bucket[name]], self._segments[name]
        start, stop = segment.interval(self.world.rank)
        offset = bucket.shard_offset + segment.column * DTYPES[bucket.shard_dtype].itemsize
        return self.world.runtime.view(self._arena, offset, stop - start, bucket.shard_dtype)

    def owns(self, layout: BucketLayout) -> bool:
        """Return whether all shards of `layout` lie in this registry's arena."""
        return self._brought.isdisjoint(layout.names)

    def row(self, layout: BucketLayout) -> Array:
        """Return the shard memory of one owned layout: `columns` elements of its shard dtype."""
        return self.world.runtime.view(
            self._arena, layout.shard_offset, layout.matrix.columns, layout.shard_dtype
        )

    def targets(self, layout: BucketLayout) -> tuple[Matrix, list[View]]:
        """Return the one-row matrix to unpack `layout`'s row with, and the arrays it fills.

        An owned row is one array: its columns are the arena's.
        """
        read, stream = self.world.runtime.read, self.world.stream
        columns = layout.matrix.columns
        if self.owns(layout):
            whole = Segment("", columns, columns, 0, columns)
            return Matrix(1, columns, (whole,), layout.matrix.label), [
                read(self.row(layout), stream)
            ]
        return layout.matrix.row(self.world.rank), [self._views[name] for name in layout.names]

    def float_shards(self) -> list[View]:
        """Return this rank's shards of all floating-point parameters, as kernels take them.

        They are what a norm is made of: without padding, and each element on one rank only.
        """
        return [self._views[spec.name] for spec in self.params if spec.is_float]

    def read_shards(self, shards: Mapping[str, Any], call: str) -> dict[str, View]:
        """Return this rank's shards of some parameters as views.

        Raises:
            LayoutError: an unknown name, or no flat contiguous array of the interval's length.
        """
        return self._gather.read_shards(shards, call)

    def gather(
        self,
        shards: Mapping[str, Any],
        *,
        out: Mapping[str, Any] | None = None,
        stream: Any = None,
    ) -> dict[str, Any]:
        """Put per-parameter shards together into full arrays: name -> array of its shape.

        Collective; every rank gives the same names and dtypes, outside backward. Blocks the host
        until every rank is here, to compare them; not for the result, which the caller's stream
        waits for. Any shards will do: gradients from `Reducer.wait()`, or a rank's own slices of
        parameters. Full arrays are copies: editing one changes no shard, and the next
        gather overwrites `out`.

        Args:
            shards: name -> flat array of this rank's interval, any supported dtype.
            out: name -> contiguous array of the parameter's shape and the shard's dtype.
            stream: the caller's stream; its current one when left out.

        Raises:
            LayoutError: a wrong name, shape or dtype, before anything is queued.
            MismatchError: ranks that give different names or dtypes, or of which one was refused.
            ProtocolError: inside backward, or what is no stream.
        """
        self.world.check()
        if self.world.status.open_backward is not None:
            msg = (
                "gather() inside backward(), where ranks launch at different times: leave it first"
            )
            raise ProtocolError(msg)
        return self._gather(shards, out, stream)

    def check_free(self) -> None:
        """Raise ProtocolError if a reducer writes these shards already."""
        if self._reducer is not None:
            msg = "this registry has a reducer already; close() it, or build another registry"
            raise ProtocolError(msg)

    def claim(self, reducer: object) -> None:
        """Bind the one reducer that may write these shards."""
        self.check_free()
        self._reducer = reducer

    def release(self, reducer: object) -> None:
        """Unbind a closed reducer. Idempotent."""
        if self._reducer is reducer:
            self._reducer = None

    def __getitem__(self, name: str) -> Placement:
        spec, segment = self._specs[name], self._segments[name]
        return Placement(spec, self._bucket[name], segment, *segment.interval(self.world.rank))

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __reversed__(self) -> Iterator[str]:
        return reversed(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    def __repr__(self) -> str:
        return (
            f"<Registry {len(self)} parameters in {len(self.buckets)} buckets, "
            f"rank {self.world.rank} of {self.world.world_size}>"
        )


def _listed(params: Sequence[ParamSpec], brought: Mapping[str, Any]) -> tuple[ParamSpec, ...]:
    check_mapping("shards", brought)
    try:
        return tuple(params)
    except TypeError:
        msg = f"params must be a list of ParamSpec, not {type(params).__name__}"
        raise LayoutError(msg) from None
