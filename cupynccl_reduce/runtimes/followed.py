"""CuPy's streams, events and pools, and kernels, each telling the race detector what it does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cupy

from cupynccl_reduce.dlpack import View

from .events import CudaEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cupynccl_reduce.protocols import Array, NormKernel, PackKernel, UnpackKernel

    from .sanitizer import SanitizedRuntime

__all__ = [
    "FollowedEvent",
    "FollowedNorm",
    "FollowedStream",
    "PoolHook",
    "bytes_of",
    "follow_pack",
    "follow_unpack",
]


class FollowedStream:
    """A CuPy stream whose waits are edges for the detector."""

    def __init__(self, runtime: SanitizedRuntime, plain: Any) -> None:
        self.ptr = plain.ptr
        self.plain = plain
        self.lane = runtime.detector.lane(f"stream {plain.ptr:#x}")
        self._runtime = runtime

    def wait_event(self, event: FollowedEvent) -> None:
        """Hold back later work of this stream, and note the edge."""
        self.plain.wait_event(event)
        detector = self._runtime.detector
        detector.follow(self.lane, self._runtime.host_lane())
        detector.join(self.lane, event.clock)

    def synchronize(self) -> None:
        """Block the host, and note the edge."""
        self.plain.synchronize()
        self._runtime.detector.follow(self._runtime.host_lane(), self.lane)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)  # all that is no edge

    def __enter__(self) -> Any:
        return self.plain.__enter__()

    def __exit__(self, *error: object) -> None:
        self.plain.__exit__(*error)


class FollowedEvent(CudaEvent):
    """A CuPy event that carries the clock of where it was recorded."""

    def __init__(self, runtime: SanitizedRuntime) -> None:
        super().__init__()
        self.clock: dict[int, int] = {}
        self._runtime = runtime

    @property
    def done(self) -> bool:
        """Whether the recorded point has passed; knowing it is an edge to the host."""
        passed = bool(super().done)
        if passed:
            self._runtime.detector.join(self._runtime.host_lane(), self.clock)
        return passed

    def record(self, stream: Any = None) -> None:
        """Mark the present end of `stream`."""
        followed = self._runtime.adopt(stream)
        super().record(followed)
        detector = self._runtime.detector
        detector.follow(followed.lane, self._runtime.host_lane())
        self.clock = detector.snapshot(followed.lane)

    def synchronize(self) -> None:
        """Block the host, and note the edge."""
        super().synchronize()
        self._runtime.detector.join(self._runtime.host_lane(), self.clock)


class PoolHook(cupy.cuda.MemoryHook):  # type: ignore[misc]  # CuPy is untyped
    """Tells the runtime what CuPy's pools do on this thread."""

    name = "cupynccl_reduce sanitizer"

    def __init__(self, runtime: SanitizedRuntime) -> None:
        self._runtime = runtime

    def malloc_postprocess(self, **what: Any) -> None:
        """Run by CuPy after a pool handed memory out."""
        self._runtime.took(what["mem_ptr"], what["mem_size"])

    def free_preprocess(self, **what: Any) -> None:
        """Run by CuPy before a pool takes memory back."""
        self._runtime.gave_back(what["mem_ptr"])


def bytes_of(array: Array) -> tuple[int, int]:
    """Return the address and bytes of a contiguous array."""
    return array.data.ptr, array.nbytes


def follow_pack(runtime: SanitizedRuntime, label: str, kernel: PackKernel) -> Callable[..., None]:
    """Return the kernel, followed."""

    def pack(sources: Sequence[Sequence[View]], target: Array, *, fill: Any, stream: Any) -> None:
        reads = [view.span for group in sources for view in group]
        runtime.follow("pack of", label, stream, reads=reads, writes=[bytes_of(target)])
        kernel(sources, target, fill=fill, stream=stream)

    return pack


def follow_unpack(
    runtime: SanitizedRuntime, label: str, kernel: UnpackKernel
) -> Callable[..., None]:
    """Return the kernel, followed."""

    def unpack(source: Array, targets: Sequence[View], *, accumulate: bool, stream: Any) -> None:
        spans = [view.span for view in targets]
        reads = [bytes_of(source), *(spans if accumulate else ())]
        runtime.follow("unpack of", label, stream, reads=reads, writes=spans)
        kernel(source, targets, accumulate=accumulate, stream=stream)

    return unpack


class FollowedNorm:
    """protocols.NormKernel around another one, followed."""

    def __init__(
        self, runtime: SanitizedRuntime, arrays: Sequence[View], kernel: NormKernel
    ) -> None:
        self._runtime = runtime
        self._spans = [view.span for view in arrays]
        self._kernel = kernel

    def measure(self, out: Array, *, start: float, stream: Any) -> None:
        """See protocols.NormKernel."""
        self._runtime.follow("norm of", "", stream, reads=self._spans, writes=[bytes_of(out)])
        self._kernel.measure(out, start=start, stream=stream)

    def finish(
        self,
        parts: Array,
        out: Array,
        *,
        max_norm: float | None,
        loss_scale: float | View,
        stream: Any,
    ) -> None:
        """See protocols.NormKernel."""
        reads = [bytes_of(parts), *([loss_scale.span] if isinstance(loss_scale, View) else ())]
        self._runtime.follow("end of a norm", "", stream, reads=reads, writes=[bytes_of(out)])
        self._kernel.finish(parts, out, max_norm=max_norm, loss_scale=loss_scale, stream=stream)

    def scale(self, factor: Array, *, stream: Any) -> None:
        """See protocols.NormKernel."""
        reads = [bytes_of(factor), *self._spans]
        self._runtime.follow("scaling of", "", stream, reads=reads, writes=self._spans)
        self._kernel.scale(factor, stream=stream)
