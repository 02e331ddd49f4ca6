"""All-gather of per-parameter shards into full arrays, bucketed by the plan. No gradients here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .agreement import agree
from .dtypes import DTYPES
from .errors import LayoutError, ReduceError
from .layout import ALIGN_BYTES, BucketLayout, Matrix

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .dlpack import View
    from .layout import ParamSpec
    from .protocols import Array, PackKernel, UnpackKernel, World

__all__ = ["ShardGather", "check_writable"]


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


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """One all-gather: the matrix it fills, and the kernels around it."""

    names: tuple[str, ...]
    dtype: str
    matrix: Matrix
    pack: PackKernel
    unpack: UnpackKernel


class ShardGather:
    """Puts shards of any dtype together again; prepared once per set of names and dtypes."""

    def __init__(
        self, world: World, buckets: Sequence[BucketLayout], specs: Mapping[str, ParamSpec]
    ) -> None:
        self._world = world
        self._buckets = buckets
        self._specs = specs
        self._plans: dict[tuple[tuple[str, str], ...], tuple[_Step, ...]] = {}
        self._scratch: Array = None
        self._before = world.runtime.event()
        self._after = world.runtime.event()

    def __call__(
        self, shards: Mapping[str, Any], out: Mapping[str, Any] | None, stream: Any
    ) -> dict[str, Any]:
        """Queue the gather; see Registry.gather."""
        world = self._world
        caller = world.runtime.adopt(stream)
        refused: ReduceError | None = None
        try:
            sources = self._read_shards(shards)
            targets = None if out is None else self._read_out(out, sources)
            key = tuple((name, sources[name].dtype) for name in self._specs if name in sources)
        except ReduceError as error:
            refused, key = error, ()
        if refused is not None or key not in self._plans:
            # New to this rank: compare before anything is queued, so that nobody hangs.
            agree(world.control, "what to gather", [repr(pair) for pair in key], refused=refused)
            self._plans[key] = self._plan(dict(key))
        arrays = dict(out) if out is not None else self._allocate(sources)
        if targets is None:
            targets = {name: world.runtime.read(a, caller) for name, a in arrays.items()}
        # The caller's stream produced the shards and may still read what `out` held.
        self._before.record(caller)
        world.stream.wait_event(self._before)
        for view in sources.values():
            if view.stream is not None and view.stream is not caller:
                self._before.record(view.stream)
                world.stream.wait_event(self._before)
        for step in self._plans[key]:
            self._run(step, sources, targets)
        # The full arrays may be read, and the shards overwritten, once all of it is done.
        self._after.record(world.stream)
        caller.wait_event(self._after)
        return arrays

    def _run(self, step: _Step, sources: Mapping[str, View], targets: Mapping[str, View]) -> None:
        world = self._world
        view, columns = world.runtime.view, step.matrix.columns
        full = view(self._scratch, 0, step.matrix.numel, step.dtype)
        own = view(
            self._scratch,
            world.rank * columns * DTYPES[step.dtype].itemsize,
            columns,
            step.dtype,
        )
        # One stream for all three: the scratch is reused by the next step in stream order.
        step.pack([[sources[n]] for n in step.names], own, fill="zero", stream=world.stream)
        if world.world_size > 1:
            world.communicator.all_gather(own, full, step.dtype, world.stream)
        step.unpack(full, [targets[n] for n in step.names], accumulate=False, stream=world.stream)

    def _plan(self, dtypes: Mapping[str, str]) -> tuple[_Step, ...]:
        world = self._world
        steps = []
        for bucket in self._buckets:
            for dtype in dict.fromkeys(dtypes[n] for n in bucket.names if n in dtypes):
                segments = [s for s in bucket.matrix.segments if dtypes.get(s.name) == dtype]
                matrix = Matrix.of(
                    ((s.name, s.numel, s.width) for s in segments),
                    world.world_size,
                    ALIGN_BYTES // DTYPES[dtype].itemsize,
                    f"gather of {bucket.matrix.label}",
                )
                if matrix.numel:
                    row = matrix.row(world.rank)
                    pack = world.runtime.pack_kernel(row, dtype, dtype)
                    unpack = world.runtime.unpack_kernel(matrix, dtype, dtype)
                    names = tuple(s.name for s in segments)
                    steps.append(_Step(names, dtype, matrix, pack, unpack))
        nbytes = max((s.matrix.numel * DTYPES[s.dtype].itemsize for s in steps), default=0)
        if self._scratch is None or self._scratch.size < nbytes:
            # The old scratch may still be read by queued work.
            world.stream.synchronize()
            self._scratch = world.runtime.allocate(nbytes)
        return tuple(steps)

    def _read_shards(self, shards: Mapping[str, Any]) -> dict[str, View]:
        views = {}
        widths = {s.name: s for bucket in self._buckets for s in bucket.matrix.segments}
        for name, array in shards.items():
            if name not in self._specs:
                msg = f"gather: no parameter {name!r} in this registry"
                raise LayoutError(msg)
            view = self._read(name, array, "shard")
            start, stop = widths[name].interval(self._world.rank)
            if view.shape != (stop - start,):
                msg = (
                    f"gather: shard {name!r} has shape {view.shape}, but rank {self._world.rank} "
                    f"holds elements {start} to {stop}: give a flat array of {stop - start}"
                )
                raise LayoutError(msg)
            views[name] = view
        return views

    def _read_out(self, out: Mapping[str, Any], sources: Mapping[str, View]) -> dict[str, View]:
        if set(out) != set(sources):
            odd = ", ".join(sorted(map(repr, set(out) ^ set(sources))))
            msg = f"gather: out and shards must hold the same names; only one has {odd}"
            raise LayoutError(msg)
        views = {}
        for name, array in out.items():
            view = self._read(name, array, "out")
            spec = self._specs[name]
            check_writable(f"gather: out {name!r}", view, spec.shape, sources[name].dtype)
            views[name] = view
        return views

    def _read(self, name: str, array: Any, what: str) -> View:
        try:
            return self._world.runtime.read(array, self._world.stream)
        except ReduceError as error:
            msg = f"gather: {what} {name!r}: {error}"
            raise LayoutError(msg) from error

    def _allocate(self, sources: Mapping[str, View]) -> dict[str, Any]:
        runtime = self._world.runtime
        arrays = {}
        for name, view in sources.items():
            spec = self._specs[name]
            block = runtime.allocate(spec.numel * DTYPES[view.dtype].itemsize)
            arrays[name] = runtime.view(block, 0, spec.numel, view.dtype).reshape(spec.shape)
        return arrays
