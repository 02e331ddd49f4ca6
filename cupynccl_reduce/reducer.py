"""The reducer: full gradients in, reduced shards out, while backward runs. No streams here."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, Self

from .engine import Engine
from .errors import ProtocolError, ReduceError
from .norm import Request
from .options import Options
from .statistics import take_statistics

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .protocols import Memory
    from .registry import Registry
    from .statistics import Statistics

__all__ = ["Reducer"]


class Reducer(Engine):
    """Reduces gradients into the shards of a registry.

    Collective, blocks the host: every rank must give the same options.

    Args:
        registry: one reducer at a time writes its shards.
        op: "mean" divides by world_size (in fp32, before the sum); "sum" does not. Integers: "sum".
        policy: "planned" launches fixed buckets in index order, in any arrival order; "arrival"
            buckets gradients as they come, which must be in the same order on every rank: that is
            compared before each launch and at the end of backward, which blocks the host.
        pre_divide: only with policy="arrival" and op="mean": False lets the collective average.
        max_buffers: send buffers (with "arrival" of each wire dtype, 1024 at most); from 2 on
            packing overlaps collectives.
        missing: what an absent gradient is at the end of backward: "zero" (the divisor stays
            world_size), or "error" on all ranks, which blocks the host to compare.
        memory: of the send buffers: "device", or "pinned" for page-locked host memory.

    Raises:
        LayoutError: an option that cannot work. MismatchError: ranks that differ.
        ProtocolError: the registry has a reducer already.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        op: Literal["mean", "sum"] = "mean",
        policy: Literal["planned", "arrival"] = "planned",
        pre_divide: bool = True,
        max_buffers: int = 2,
        missing: Literal["zero", "error"] = "zero",
        memory: Memory = "device",
    ) -> None:
        options = Options.agreed(
            registry,
            op=op,
            policy=policy,
            pre_divide=pre_divide,
            max_buffers=max_buffers,
            missing=missing,
            memory=memory,
        )
        super().__init__(registry, options)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Return the context in which gradients are handed over; leaving it flushes.

        Does not block the host (unless missing="error" or policy="arrival"). If an exception leaves
        it, what is not launched goes out as NaN: no peer hangs, and every rank calls `discard()`.
        (Where all was launched, peers hold a complete step.) Where NaN cannot help
        (policy="arrival", integers) the world is broken.
        """
        self._begin()
        try:
            yield
            self._end(None)
        except BaseException as error:
            if self._cycle.open:  # else _end() raised it, and has ended the backward
                self._end(error)
            raise

    def reduce_grad(self, name: str, grad: Any) -> None:
        """Hand over this rank's full gradient of one parameter.

        Does not block the host, unless policy="arrival" launches a bucket (see `policy`).

        Any array with DLPack, of the registered shape and dtype, on this rank's device. It belongs
        to the library until it has been read: see `wait_packed`. A refused call changes nothing.

        Raises:
            GradientError: unknown name, wrong shape, dtype or device. GradientTypeError: no array,
                sparse, complex or requires grad. ProtocolError: outside backward, or a second one.
        """
        with self._lock:
            try:
                if not self._cycle.open or self._status.fault is not None:
                    self._check_open(name)
                view = self._intake.reader(name)(grad)
                complete = self._policy.arrive(name)
            except ReduceError as error:
                raise self._told(error, name) from error.__cause__
            self._intake.hold(name, view)
            if complete is not None:
                self._launch_due(complete)

    def skip_grad(self, name: str) -> None:
        """Say that no gradient of `name` will come in this backward: it counts as zero.

        Its bucket, and those behind it, then need not wait for the end. Another rank may hand one
        over all the same. Does not block the host.
        """
        with self._lock:
            try:
                self._check_open(name)
                complete = self._policy.skip(name)
            except ReduceError as error:
                raise self._told(error, name) from error.__cause__
            if complete is not None:
                self._launch_due(complete)

    def flush(self) -> None:
        """Launch what is not yet launched in the open backward, if anything; absent ones are zero.

        Collective within a backward. Does not block the host.
        """
        with self._lock:
            self._check()
            if self._cycle.open:
                self._run(self._policy.finish())

    def norm(self, p: float = 2, *, stream: Any = None) -> Any:
        """Return the p-norm of all reduced gradients of this cycle, over all ranks.

        Collective; any number of times between the cycle's last backward and `wait()`. Queued on
        the communication stream: does not block the host on cuda, except the first time (it
        compiles); on the host runtime it blocks, as `wait()` does. The caller's stream waits, so
        that float(norm) there blocks until the value is right.

        Squares are summed in fp64, padding is left out, each element counts once and in the same
        order in every run; all ranks get the same bits. Integer parameters do not count. A NaN or
        an infinity in any gradient makes the norm not finite on every rank. So does, with a NaN, a
        rank whose backward failed: there norm() is allowed too, because its peers take part.

        Args:
            p: a positive number, or math.inf for the largest absolute value.
            stream: the caller's stream, as in `wait()`.

        Returns:
            A 0-d float64 array of the runtime. The next norm() or clip() overwrites it: copy what
            is to be kept.

        Raises:
            LayoutError: a bad p. ProtocolError: inside backward, before any, after `wait()` or
                `discard()`; in a CUDA graph, where nothing was measured before the capture.
        """
        with self._lock:
            self._check_norm("norm()", clips=False)
            return self._measure(Request.norm(p), self._world.runtime.adopt(stream))

    def clip(
        self,
        max_norm: float | None,
        *,
        p: float = 2,
        loss_scale: Any = 1.0,
        stream: Any = None,
    ) -> Any:
        """Divide the reduced gradients by `loss_scale`, clip them to `max_norm`; return their norm.

        Collective, as `norm()` is, with the same rules and errors; once per cycle, and no backward
        may follow in it. The norm is that of the divided gradients, before clipping. Every element
        is multiplied in place by min(1, max_norm / (norm + 1e-6)) / loss_scale, in fp64, and
        rounded once: the formula of torch.nn.utils.clip_grad_norm_. (A factor of 1 costs no pass.)
        A norm that is not finite leaves gradients that are no use: skip the step, on all ranks
        alike.

        Args:
            max_norm: at least 0; None only divides.
            p: see `norm()`.
            loss_scale: what the loss was multiplied by: a positive number, or one float32 or
                float64 element on this device, which is read on the device. The same everywhere.
            stream: see `norm()`.

        Raises:
            LayoutError: a bad max_norm, p or loss_scale. ProtocolError: as `norm()`, or twice.
        """
        with self._lock:
            self._check_norm("clip()", clips=True)
            world = self._world
            request = Request.clip(world.runtime, world.stream, p, max_norm, loss_scale)
            return self._measure(request, world.runtime.adopt(stream))

    def wait(self, *, stream: Any = None) -> Mapping[str, Any]:
        """Close the cycle: make the caller's stream wait; return name -> this rank's flat shard.

        Does not block the host on cuda; on the host runtime the caller is its own stream and
        blocks. Again without new gradients: the same shards. They stay valid until the next
        backward begins to launch, which waits for what this stream has queued by then.

        Args:
            stream: the caller's stream (CuPy, torch, or a raw handle); CuPy's current one when
                left out.

        Raises:
            ProtocolError: inside backward, before any, or after a failed or discarded one.
        """
        with self._lock:
            self._check()
            self._cycle.check_wait()
            self._world.guard(self._land, self._world.runtime.adopt(stream))
            return self._registry.shards

    def wait_packed(self, *, stream: Any = None) -> None:
        """Make the caller's stream wait until every gradient handed over has been read.

        For gradients in memory that is written again. Call it after backward() (or flush()).
        """
        with self._lock:
            self._check()
            if self._intake.names:
                held = ", ".join(map(repr, self._intake.names[:5]))
                msg = (
                    f"wait_packed(): {held} and their buckets are not launched yet; call it after "
                    "backward(), or flush() first"
                )
                raise ProtocolError(self._cycle.where(msg))
            self._world.guard(self._pipeline.wait_packed, self._world.runtime.adopt(stream))

    def synchronize(self) -> None:
        """Block the host until everything queued is done; raise CommunicationError if it failed."""
        with self._lock:
            self._check()
            self._world.guard(self._pipeline.synchronize)

    def discard(self) -> None:
        """Close a cycle whose step is skipped, on every rank; the next gradients overwrite."""
        with self._lock:
            self._check()
            self._cycle.discard()

    def statistics(self) -> Statistics:
        """Return a snapshot of counts and memory; blocks nobody."""
        with self._lock:
            return take_statistics(self._cycle, self._intake, self._policy, self._pipeline)

    def close(self) -> None:
        """Finish queued work (blocks the host), free buffers and registry. Idempotent."""
        with self._lock:
            if self._cycle.closed:
                return
            self._cycle.check_outside("close()")
            self._cycle.closed = True
            try:
                if self._world.usable:
                    self._norms.hold_back(captured=False)
                    self._pipeline.synchronize()
            finally:
                self._pipeline.close()
                self._norms.close()
                self._registry.release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.close()

    def __repr__(self) -> str:
        step, state = self._cycle.step, self._cycle.name
        return f"<Reducer step {step} {state}, {self._intake.count} gradients>"
