"""The norm of all reduced gradients, and their scaling: requests, kernels, edges and scratch.

Everything is queued on the communication stream, in whose order it is: behind what writes the
shards, and each norm behind the one before it. Edges to other streams have the letters of
pipeline.py.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

from .dlpack import View
from .errors import LayoutError, ReduceError

if TYPE_CHECKING:
    from .protocols import Array, NormKernel, Runtime
    from .registry import Registry

__all__ = ["Norms", "Request"]

ITEMSIZE = 8  # of float64


@dataclass(frozen=True, slots=True)
class Request:
    """What norm() or clip() asks for, checked. Raises LayoutError for what cannot work."""

    call: str
    p: float
    clips: bool = False
    max_norm: float | None = None
    loss_scale: float | View = 1.0

    @classmethod
    def norm(cls, p: Any) -> Request:
        """Return the request of Reducer.norm."""
        return cls("norm()", _order(p))

    @classmethod
    def clip(cls, runtime: Runtime, stream: Any, p: Any, max_norm: Any, loss_scale: Any) -> Request:
        """Return the request of Reducer.clip; an array is read on `stream`."""
        if max_norm is not None:
            max_norm = _number("max_norm", max_norm)
            if not max_norm >= 0:
                msg = f"max_norm must be a number >= 0, or None, not {max_norm}"
                raise LayoutError(msg)
        if isinstance(loss_scale, Real):
            loss_scale = _number("loss_scale", loss_scale)
            if not 0 < loss_scale < math.inf:
                msg = f"loss_scale must be a positive number, not {loss_scale}"
                raise LayoutError(msg)
        else:
            loss_scale = _element("loss_scale", loss_scale, runtime, stream)
        return cls("clip()", _order(p), True, max_norm, loss_scale)  # noqa: FBT003  # its name

    @property
    def source(self) -> View | None:
        """The array that it reads beside the shards, if any."""
        return self.loss_scale if isinstance(self.loss_scale, View) else None

    def __str__(self) -> str:
        if not self.clips:
            return f"norm(p={self.p})"
        scale = "an array" if self.source is not None else self.loss_scale
        return f"clip(max_norm={self.max_norm}, p={self.p}, loss_scale={scale})"


class Norms:
    """Measures and scales the shards of a registry. Its scratch is made once, at first use."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._world = registry.world
        self._names = tuple(spec.name for spec in registry.params if spec.is_float)
        self._kernels: dict[float, NormKernel] = {}
        self._parts: Array = None  # what each rank has measured
        self._result: Array = None  # norm and factor
        self._before = self._world.runtime.event()
        self._after = self._world.runtime.event()
        self._readers: dict[Any, None] = {}  # of the result: streams, in order

    def ready(self, p: float) -> bool:
        """Whether nothing has to be allocated or compiled for this norm any more."""
        return p in self._kernels

    def measure(self, request: Request, caller: Any, *, failed: bool, captured: bool) -> Array:
        """Queue a request; return the norm, 0-d, which the stream `caller` waits for.

        A rank whose backward has `failed` contributes a NaN. `captured`: all of it becomes part of
        a CUDA graph. Blocks the host where this norm is not `ready`.
        """
        if not self.ready(request.p):
            self._prepare(request.p)
        stream, source = self._world.stream, request.source
        self.hold_back(captured=captured)
        if source is not None and source.stream is not None:
            # A: the loss scale is written before it is read.
            self._before.record(source.stream)
            stream.wait_event(self._before)
        self._queue(request, failed=failed, captured=captured)
        self._after.record(stream)
        # C: the caller reads the norm after it is there.
        caller.wait_event(self._after)
        self._readers[caller] = None
        if source is not None and source.stream is not None:
            # D: the loss scale's memory is not reused before it has been read.
            source.stream.wait_event(self._after)
        elif source is not None:
            self._after.synchronize()  # D: nobody told us of the stream that may reuse it
        return self._result[:1].reshape(())

    def hold_back(self, *, captured: bool) -> None:
        """Let the communication stream wait for who reads the last norm.

        Shards are nobody's now: a launch of this cycle has held back whatever writes them (F).
        """
        for reader in tuple(self._readers):
            # A graph cannot wait for what is outside it: its replays are the caller's to order.
            if not captured or self._world.runtime.capturing(reader):
                # F: the norm is overwritten, or its memory given back, after what its readers have
                # queued by now.
                self._before.record(reader)
                self._world.stream.wait_event(self._before)
                del self._readers[reader]

    def close(self) -> None:
        """Drop kernels and scratch, after `hold_back` and the end of the communication stream.

        A broken world keeps them, as queued work may use them.
        """
        if not self._world.usable:
            self._world.status.kept.append((self._kernels, self._parts, self._result))
        self._kernels = {}
        self._parts = self._result = None

    def _queue(self, request: Request, *, failed: bool, captured: bool) -> None:
        world, kernel, stream = self._world, self._kernels[request.p], self._world.stream
        own = self._parts[world.rank : world.rank + 1]
        kernel.measure(own, start=math.nan if failed else 0.0, stream=stream)
        if world.world_size > 1:
            noted = world.launching(
                stream=stream,
                what="clip" if request.clips else "norm",
                bucket=0,
                dtype="float64",
                nbytes=world.world_size * ITEMSIZE,
                calls=1,
                names=self._names,
            )
            # (A graph's replays are nobody's launches.)
            with nullcontext() if captured else noted:
                # Gathered, and folded by each rank in rank order: equal bits on all of them.
                world.communicator.all_gather(own, self._parts, "float64", stream)
        kernel.finish(
            self._parts,
            self._result,
            max_norm=request.max_norm,
            loss_scale=request.loss_scale,
            stream=stream,
        )
        if request.clips:
            kernel.scale(self._result[1:], stream=stream)

    def _prepare(self, p: float) -> None:
        runtime, world_size = self._world.runtime, self._world.world_size
        if self._parts is None:
            scratch = runtime.allocate((world_size + 2) * ITEMSIZE)
            self._parts = runtime.view(scratch, 0, world_size, "float64")
            self._result = runtime.view(scratch, world_size * ITEMSIZE, 2, "float64")
        self._kernels[p] = runtime.norm_kernel(self._registry.float_shards(), p)


def _order(p: Any) -> float:
    order = _number("p", p)
    if not order > 0:
        msg = f"p must be a positive number, or math.inf, not {p!r}"
        raise LayoutError(msg)
    return order


def _number(name: str, value: Any) -> float:
    if not isinstance(value, Real) or isinstance(value, bool):
        msg = f"{name} must be a number, not {value!r}"
        raise LayoutError(msg)
    try:
        return float(value)
    except OverflowError:
        msg = f"{name} must be a number that a float can hold, not {value!r}"
        raise LayoutError(msg) from None


def _element(name: str, array: Any, runtime: Runtime, stream: Any) -> View:
    """Return one element of a floating-point array of this device."""
    try:
        view = runtime.read(array, stream)
    except ReduceError as error:
        msg = f"{name} must be a number or an array of one element: {error}"
        raise LayoutError(msg) from error
    if math.prod(view.shape) != 1 or view.dtype not in ("float32", "float64"):
        msg = f"{name} must be one float32 or float64 element, not {view.dtype} {view.shape}"
        raise LayoutError(msg)
    return view
