"""The seams: what the engine asks of a device, a communicator and a side channel. No behaviour.

Names are CuPy's own (`record`, `wait_event`, `synchronize`), so CuPy's streams and events are used
as they are. Everything that takes a stream only queues work there and returns at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from .dlpack import View
    from .layout import Matrix

__all__ = [
    "Array",
    "Communicator",
    "Control",
    "Event",
    "Fill",
    "Memory",
    "NormKernel",
    "Op",
    "PackKernel",
    "Runtime",
    "Stream",
    "UnpackKernel",
]

Fill = Literal["zero", "nan"]
Memory = Literal["device", "pinned"]
Op = Literal["sum", "avg"]
Array = Any  # a runtime's own array: cupy.ndarray or numpy.ndarray, one-dimensional, contiguous


class Event(Protocol):
    """A point in a stream. Recording again moves it; earlier waits keep what they saw."""

    @property
    def done(self) -> bool:
        """Whether the recorded point has passed. Does not block."""

    def record(self, stream: Any) -> None:
        """Mark the present end of `stream`."""

    def synchronize(self) -> None:
        """Block the host until the recorded point has passed."""


class Stream(Protocol):
    """An in-order queue of device work."""

    def wait_event(self, event: Any) -> None:
        """Hold back later work of this stream until `event`'s recorded point has passed."""

    def synchronize(self) -> None:
        """Block the host until everything queued here is done."""


class PackKernel(Protocol):
    """Copies flat arrays into a matrix: sum of a segment's sources, division, cast, padding."""

    def __call__(
        self, sources: Sequence[Sequence[View]], target: Array, *, fill: Fill, stream: Any
    ) -> None:
        """Queue the pack on `stream`; `target` is the matrix, flat.

        `sources[i]` are the flat arrays of segment i, summed; a segment without any is filled with
        zero or NaN. Non-contiguous sources give their logical values. Sources are read when the
        stream gets there: the caller keeps them alive until then.
        """


class UnpackKernel(Protocol):
    """Copies a matrix out into flat arrays: cast, and added where asked."""

    def __call__(
        self, source: Array, targets: Sequence[View], *, accumulate: bool, stream: Any
    ) -> None:
        """Queue the unpack of `source` (the matrix, flat) into `targets`, one per segment."""


class NormKernel(Protocol):
    """Measures fixed flat arrays, in float64 and always in the same order, and scales them.

    Arrays of results are float64. Each call is queued on the stream that the call before it was.
    """

    def measure(self, out: Array, *, start: float, stream: Any) -> None:
        """Queue: `out` (1 element) becomes `start` plus the sum of |x|**p over all arrays.

        For p=inf the largest of `start` and all |x|; a NaN is larger than anything.
        """

    def finish(
        self,
        parts: Array,
        out: Array,
        *,
        max_norm: float | None,
        loss_scale: float | View,
        stream: Any,
    ) -> None:
        """Queue: `out` (2 elements) becomes the norm, and the factor that undoes and clips.

        `parts` are what all ranks have measured. The norm is that of gradients divided by
        `loss_scale` (a number, or one float32 or float64 element), the factor
        min(1, max_norm / (norm + 1e-6)) / loss_scale, without the first part where `max_norm` is
        None: as torch.nn.utils.clip_grad_norm_ has it.
        """

    def scale(self, factor: Array, *, stream: Any) -> None:
        """Queue: every element becomes its product with `factor` (1 element), rounded once.

        Exactly 1 leaves the arrays unread.
        """


class Runtime(Protocol):
    """Memory, streams and kernels of one device kind."""

    kind: Literal["cuda", "host"]

    def allocate(self, nbytes: int, *, memory: Memory = "device") -> Array:
        """Return zeroed bytes (uint8) from the runtime's own pool. Blocks until zeroed."""

    def view(self, array: Array, offset: int, numel: int, dtype: str) -> Array:
        """Return `numel` elements of `dtype` that start at byte `offset` of `array`; no copy."""

    def array(self, view: View) -> Array:
        """Return the memory of a contiguous view as a flat array; no copy, and nothing kept."""

    def read(self, source: Any, stream: Any) -> View:
        """Describe any array of this device without copying it; raise GradientTypeError if unable.

        `view.stream` is the stream that produced it, or None where the producer itself made
        `stream` wait.
        """

    def reader(self, shape: tuple[int, ...], dtype: str, stream: Any) -> Callable[[Any], View]:
        """Return `read` for the gradients of one parameter; GradientError for other arrays."""

    def stream(self) -> Any:
        """Return a new stream that synchronises with no other."""

    def event(self) -> Any:
        """Return a new event, not recorded; waiting for it is a no-op."""

    def watched_event(self) -> Any:
        """Return an event that a watchdog's thread may query at any time, and nobody waits for."""

    def adopt(self, stream: Any) -> Any:
        """Return the Stream for a caller's stream object; None is the caller's current stream."""

    def capturing(self, stream: Any) -> bool:
        """Whether what is queued on `stream` becomes part of a CUDA graph and does not run."""

    def pack_kernel(
        self, matrix: Matrix, source_dtype: str, dtype: str, *, divisor: int = 1
    ) -> PackKernel:
        """Build the kernel that packs `source_dtype` arrays into a `dtype` matrix."""

    def unpack_kernel(self, matrix: Matrix, dtype: str, target_dtype: str) -> UnpackKernel:
        """Build the kernel that unpacks a `dtype` matrix into `target_dtype` arrays."""

    def norm_kernel(self, arrays: Sequence[View], p: float) -> NormKernel:
        """Build the kernel of the p-norm (0 < p <= inf) of contiguous floating-point arrays."""

    def close(self) -> None:
        """Give back streams and memory. Idempotent."""


class Communicator(Protocol):
    """Queues collectives of one group. Every method but `check`, `close` and `abort` is collective.

    Arrays are contiguous and flat; counts are the arrays' numel. Every rank must queue the same
    collectives in the same order.
    """

    rank: int
    world_size: int
    # From so many bytes on, a gradient is sent from where it lies instead of being packed; 0 is
    # never. A constant of the transport, alike on all ranks; read when a registry is built.
    direct_bytes: int

    def reduce_scatter(self, send: Array, recv: Array, dtype: str, op: Op, stream: Any) -> None:
        """Queue: `recv` becomes row `rank` of the sum over ranks of `send` (world_size rows).

        `recv` may be that row of `send` itself. "avg" divides by world_size: before the sum where
        that is a power of two.
        """

    def all_gather(self, send: Array, recv: Array, dtype: str, stream: Any) -> None:
        """Queue: row r of `recv` becomes rank r's `send`. `send` may be row `rank` of `recv`."""

    def all_reduce(self, send: Array, recv: Array, dtype: str, op: Op, stream: Any) -> None:
        """Queue: `recv` becomes the sum over ranks of `send`. They may be one array."""

    def broadcast(self, array: Array, root: int, dtype: str, stream: Any) -> None:
        """Queue: `array` becomes rank `root`'s."""

    def group(self) -> AbstractContextManager[None]:
        """Return a context in which collectives are held back, then queued together."""

    def check(self) -> None:
        """Raise CommunicationError if the transport has met an error. Does not block."""

    @property
    def regroup(self) -> Callable[[Control, Sequence[int]], Communicator] | None:
        """Returns a new one among the given ranks, the survivors, of which this is one.

        Collective among them, blocks the host; the side channel joins them already, in that order.
        None: this transport does not go on after a rank is gone.
        """

    def close(self) -> None:
        """Tear down after success. Idempotent."""

    def abort(self) -> None:
        """Tear down after failure; frees ranks that wait in a collective. Idempotent."""


class Control(Protocol):
    """The host-blocking side channel between ranks; never for gradients."""

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Collective, blocks the host: return every rank's payload, in rank order."""

    def close(self) -> None:
        """Tear down. Idempotent."""

    def abort(self) -> None:
        """Tear down after failure; frees ranks that wait here. Idempotent."""
