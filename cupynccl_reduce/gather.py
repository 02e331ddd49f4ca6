"""All-gather of per-parameter shards into full arrays, bucketed by the plan. No gradients here."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from .dtypes import DTYPES
from .errors import LayoutError, ReduceError
from .layout import ALIGN_BYTES, BucketLayout, Matrix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .dlpack import View
    from .layout import ParamSpec
    from .membership import World
    from .protocols import Array, PackKernel, UnpackKernel

__all__ = ["ShardGather", "Step", "check_apart", "check_mapping", "check_writable", "plan_steps"]


def check_writable(what: str, view: View, shape: tuple[int, ...], dtype: str) -> None:
    """Raise LayoutError unless results can be written straight into the memory of `view`."""
    if view.shape == shape and view.dtype == dtype and view.strides is None and view.writable:
        return
    flaws = ["not contiguous"] * bool(view.strides) + ["not writable"] * (not view.writable)
    msg = (
        f"{what} is {' and '.join([f'{view.dtype} {view.shape}', *flaws])}; "
        f"give a contiguous, writable {dtype} {shape}"
    )
    raise LayoutError(msg)


def check_apart(what: str, views: Mapping[str, View]) -> None:
    """Raise LayoutError if two arrays that are to be written share memory."""
    spans = sorted((*view.span, name) for name, view in views.items() if view.span[1])
    for (start, nbytes, name), (next_start, _, other) in pairwise(spans):
        if start + nbytes > next_start:
            msg = f"{what}: {name!r} and {other!r} share memory; give each an array of its own"
            raise LayoutError(msg)


def check_mapping(what: str, values: object, of: str = "arrays") -> None:
    """Raise LayoutError unless `values` maps names to something."""
    if not isinstance(values, Mapping):
        msg = f"{what} must be a mapping of names to {of}, not {type(values).__name__}"
        raise LayoutError(msg)


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One all-gather: the matrix it fills, in the dtype that travels, and the kernels around it."""

    names: tuple[str, ...]
    dtype: str
    matrix: Matrix
    pack: PackKernel
    unpack: UnpackKernel

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix."""
        return self.matrix.numel * DTYPES[self.dtype].itemsize

    def run(
        self,
        world: World,
        bucket: int,
        scratch: Array,
        sources: Mapping[str, View],
        targets: Mapping[str, View],
    ) -> None:
        """Queue pack, all_gather and unpack; collective. `scratch` has room for the matrix."""
        view, columns, stream = world.runtime.view, self.matrix.columns, world.stream
        full = view(scratch, 0, self.matrix.numel, self.dtype)
        offset = world.rank * columns * DTYPES[self.dtype].itemsize
        own = view(scratch, offset, columns, self.dtype)
        # One stream for all three: the scratch is reused by the next step in stream order.
        self.pack([[sources[n]] for n in self.names], own, fill="zero", stream=stream)
        if world.world_size > 1:
            launched = world.launching(
                stream=stream,
                what="gather",
                bucket=bucket,
                dtype=self.dtype,
                nbytes=self.nbytes,
                calls=1,
                names=self.names,
            )
            with launched:
                world.communicator.all_gather(own, full, self.dtype, stream)
        self.unpack(full, [targets[n] for n in self.names], accumulate=False, stream=stream)


def plan_steps(
    world: World, bucket: BucketLayout, dtypes: Mapping[str, tuple[str, str]]
) -> tuple[Step, ...]:
    """Return the steps for parameters of a bucket: name -> dtypes of the shard and of the result.

    One for each pair of dtypes; the cast is part of the pack.
    """
    steps = []
    for pair in dict.fromkeys(dtypes[n] for n in bucket.names if n in dtypes):
        source, dtype = pair
        segments = [s for s in bucket.matrix.segments if dtypes.get(s.name) == pair]
        matrix = Matrix.of(
            ((s.name, s.numel, s.width) for s in segments),
            world.world_size,
            ALIGN_BYTES // DTYPES[dtype].itemsize,
            f"gather of {bucket.matrix.label}",
        )
        if matrix.numel:
            pack = world.runtime.pack_kernel(matrix.row(world.rank), source, dtype)
            unpack = world.runtime.unpack_kernel(matrix, dtype, dtype)
            steps.append(Step(tuple(s.name for s in segments), dtype, matrix, pack, unpack))
    return tuple(steps)


class ShardGather:
    """Puts shards of any dtype together again; prepared once per set of names and dtypes."""

    def __init__(
        self, world: World, buckets: Sequence[BucketLayout], specs: Mapping[str, ParamSpec]
    ) -> None:
        self._world = world
        self._buckets = buckets
        self._specs = specs
        self._plans: dict[tuple[tuple[str, str], ...], tuple[Step, ...]] = {}
        self._scratch: Array = None
        self._lock = threading.Lock()
        self._before = world.runtime.event()
        self._after = world.runtime.event()

    def __call__(
        self, shards: Mapping[str, Any], out: Mapping[str, Any] | None, stream: Any
    ) -> dict[str, Any]:
        """Queue the gather; see Registry.gather."""
        with self._lock:
            return self._gather(shards, out, stream)

    def _gather(
        self, shards: Mapping[str, Any], out: Mapping[str, Any] | None, stream: Any
    ) -> dict[str, Any]:
        world = self._world
        caller: Any = None
        refused: ReduceError | None = None
        try:
            caller = world.runtime.adopt(stream)
            sources = self.read_shards(shards)
            targets = None if out is None else self._read_out(out, sources)
            key = tuple((name, sources[name].dtype) for name in self._specs if name in sources)
        except ReduceError as error:
            refused, key = error, ()
        try:
            # Compared each time: one rank that differs must not hang all.
            world.agree("what to gather", [repr(pair) for pair in key], refused=refused)
            if key not in self._plans:
                self._plans[key] = self._plan(dict(key))
            arrays = dict(out) if out is not None else self._allocate(sources)
            if targets is None:
                targets = {name: world.runtime.read(a, caller) for name, a in arrays.items()}
            world.guard(self._queue, self._plans[key], sources, targets, caller)
        except BaseException as error:
            if not isinstance(error, Exception):
                world.fail(error)  # Ctrl-C: the others go on into a gather without this rank
            raise
        return arrays

    def _queue(
        self,
        steps: Sequence[Step],
        sources: Mapping[str, View],
        targets: Mapping[str, View],
        caller: Any,
    ) -> None:
        world = self._world
        producers = {view.stream: None for view in sources.values()} | {caller: None}
        unknown = None in producers
        producers.pop(None, None)
        for stream in producers:
            # A: the shards are written before they are packed. F: so is what `out` held read.
            self._before.record(stream)
            world.stream.wait_event(self._before)
        for number, step in enumerate(steps):
            step.run(world, number, self._scratch, sources, targets)
        self._after.record(world.stream)
        for stream in producers:
            # C: the full arrays are read, and D: the shards' memory is reused, after all of it.
            stream.wait_event(self._after)
        if unknown:
            self._after.synchronize()  # D, for shards of a stream that nobody told us of

    def _plan(self, dtypes: Mapping[str, str]) -> tuple[Step, ...]:
        world = self._world
        pairs = {name: (dtype, dtype) for name, dtype in dtypes.items()}
        steps = [step for bucket in self._buckets for step in plan_steps(world, bucket, pairs)]
        nbytes = max((step.nbytes for step in steps), default=0)
        if self._scratch is None or self._scratch.size < nbytes:
            # The old scratch may still be read by queued work.
            world.stream.synchronize()
            self._scratch = world.runtime.allocate(nbytes)
        return tuple(steps)

    def read_shards(self, shards: Mapping[str, Any], call: str = "gather") -> dict[str, View]:
        """Return this rank's shards of some parameters as views; LayoutError names a misfit."""
        check_mapping(f"{call}: shards", shards)
        views = {}
        widths = {s.name: s for bucket in self._buckets for s in bucket.matrix.segments}
        for name, array in shards.items():
            if name not in self._specs:
                msg = f"{call}: no parameter {name!r} in this registry"
                raise LayoutError(msg)
            view = self._read(name, array, f"{call}: shard")
            start, stop = widths[name].interval(self._world.rank)
            if view.shape != (stop - start,):
                msg = (
                    f"{call}: shard {name!r} has shape {view.shape}, but rank {self._world.rank} "
                    f"holds elements {start} to {stop}: give a flat array of {stop - start}"
                )
                raise LayoutError(msg)
            views[name] = view
        return views

    def _read_out(self, out: Mapping[str, Any], sources: Mapping[str, View]) -> dict[str, View]:
        check_mapping("gather: out", out)
        if set(out) != set(sources):
            odd = ", ".join(sorted(map(repr, set(out) ^ set(sources))))
            msg = f"gather: out and shards must hold the same names; only one has {odd}"
            raise LayoutError(msg)
        views = {}
        for name, array in out.items():
            view = self._read(name, array, "gather: out")
            spec = self._specs[name]
            check_writable(f"gather: out {name!r}", view, spec.shape, sources[name].dtype)
            views[name] = view
        check_apart("gather: out", views)
        return views

    def _read(self, name: str, array: Any, what: str) -> View:
        try:
            return self._world.runtime.read(array, self._world.stream)
        except ReduceError as error:
            msg = f"{what} {name!r}: {error}"
            raise LayoutError(msg) from error

    def _allocate(self, sources: Mapping[str, View]) -> dict[str, Any]:
        runtime = self._world.runtime
        offsets, nbytes = {}, 0
        for name, view in sources.items():
            offsets[name] = nbytes
            size = self._specs[name].numel * DTYPES[view.dtype].itemsize
            nbytes += -(-size // ALIGN_BYTES) * ALIGN_BYTES
        block = runtime.allocate(nbytes)  # one, because allocating blocks the host
        arrays = {}
        for name, view in sources.items():
            spec = self._specs[name]
            flat = runtime.view(block, offsets[name], spec.numel, view.dtype)
            arrays[name] = flat.reshape(spec.shape)
        return arrays
