"""The reducer: full gradients in, reduced shards out, while backward runs. No streams here."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self

from .agreement import agree_on_launch, gather_complaints
from .cycle import Cycle
from .errors import MismatchError, ProtocolError, ReduceError
from .intake import Intake
from .options import Options
from .pipeline import Pipeline
from .statistics import take_statistics

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .layout import BucketLayout, Launch
    from .protocols import Fill, Memory
    from .registry import Registry
    from .statistics import Statistics

__all__ = ["Reducer"]


class Reducer:
    """Reduces gradients into the shards of a registry.

    Collective, blocks the host: every rank must give the same options.

    Args:
        registry: one reducer at a time writes its shards.
        op: "mean" divides by world_size (in fp32, before the sum); "sum" does not. Integers: "sum".
        policy: "planned" launches fixed buckets in index order, in any arrival order; "arrival"
            buckets gradients as they come, which must be in the same order on every rank: that is
            compared before each launch and at the end of backward, which blocks the host.
        pre_divide: only with policy="arrival" and op="mean": False lets the collective average.
        max_buffers: send buffers (of each wire dtype with "arrival"); from 2 on packing overlaps
            collectives.
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
        world = registry.world
        options = Options.agreed(
            registry,
            op=op,
            policy=policy,
            pre_divide=pre_divide,
            max_buffers=max_buffers,
            missing=missing,
            memory=memory,
        )
        self._registry, self._world, self._status = registry, world, world.status
        self._missing = missing
        self._policy = options.build_policy(registry)
        self._pipeline = Pipeline(registry, self._policy, options)
        # Only then can a failed rank fill what is left with NaN and stay in step with its peers.
        # Buckets that fill in arrival order need the same order everywhere, so it is compared.
        in_order = (policy == "arrival" or world.status.compares) and world.world_size > 1
        self._compare = partial(agree_on_launch, world.control) if in_order else None
        self._can_fill = policy == "planned" and all(s.is_float for s in registry.params)
        self._intake = Intake(registry.params, self._pipeline.reader)
        self._cycle = Cycle(f"rank {world.rank} of {world.world_size}")
        self._lock = threading.RLock()  # hooks run on any thread, and a launch is queued whole
        registry.claim(self)

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
        except BaseException as error:
            self._end(error)
            raise
        self._end(None)

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
            adopted = self._world.runtime.adopt(stream)
            if self._cycle.land():
                self._run(self._policy.untouched())
            self._world.guard(self._pipeline.wait, adopted)
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
                    self._pipeline.synchronize()
            finally:
                self._pipeline.close()
                self._registry.release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.close()

    def __repr__(self) -> str:
        step, state = self._cycle.step, self._cycle.name
        return f"<Reducer step {step} {state}, {self._intake.count} gradients>"

    def _begin(self) -> None:
        with self._lock:
            self._check()
            status = self._world.status
            with status.lock:
                if status.open_backward not in (None, self):
                    msg = "backward() while another reducer of this world has one open"
                    raise ProtocolError(self._cycle.where(msg))
                accumulate = self._cycle.begin()
                if status.flight is not None:
                    status.flight.step = self._cycle.step
                status.open_backward = self
            self._policy.begin(accumulate=accumulate)

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            try:
                if error is not None and not self._can_fill:
                    self._world.fail(error)
                if self._world.usable:
                    self._finish(error)
            finally:
                self._intake.clear()
                self._cycle.end()
                self._world.status.open_backward = None

    def _finish(self, error: BaseException | None) -> None:
        absent = ""
        if self._missing == "error":
            # A failed rank takes part: its peers wait here.
            names = ", ".join(map(repr, self._policy.missing()))
            mine = names if error is None else f"backward failed: {error!r}"
            absent = self._world.guard(gather_complaints, self._world.control, mine)
        msg = f"missing='error', and gradients are missing: {absent}; skip_grad() allows it"
        told = MismatchError(self._cycle.where(msg))
        if absent and self._compare is not None:
            # Ranks that differ would launch different collectives: none of them launches more.
            self._cycle.fail()
            raise told
        if error is not None:
            self._intake.clear()  # NaN for what has arrived too: nobody is to use this step
        self._run(self._policy.finish(), fill="zero" if error is None else "nan")
        if self._compare is not None:
            self._world.guard(self._compare, None)
        self._pipeline.release_read()
        if error is not None or absent:
            self._cycle.fail()
        if error is None and absent:
            raise told

    def _launch_due(self, complete: BucketLayout) -> None:
        self._pipeline.mark(complete, self._intake.held(complete))
        self._run(self._policy.due())

    def _run(self, launches: Iterator[Launch], fill: Fill = "zero") -> None:
        self._world.guard(self._pipeline.run, launches, self._intake.take, fill, self._compare)

    def _check(self) -> None:
        self._cycle.check()
        self._world.check()

    def _check_open(self, name: str) -> None:
        self._intake.check_name(name)
        self._cycle.check_inside()
        self._world.check()

    def _told(self, error: ReduceError, name: str) -> ReduceError:
        return type(error)(self._cycle.where(f"{self._intake.describe(name)}: {error}"))
