"""What the calls of a reducer share: checks, launches, and how a backward begins and ends.

Nothing here is public, and no stream is ordered here.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from .agreement import agree_on_launch, gather_complaints
from .cycle import Cycle
from .errors import MismatchError, ProtocolError, ReduceError
from .intake import Intake
from .norm import Norms
from .pipeline import Pipeline

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .layout import BucketLayout, Launch
    from .norm import Request
    from .options import Options
    from .protocols import Fill
    from .registry import Registry

__all__ = ["Engine"]


class Engine:
    """The parts of a reducer, and what they do together.

    `_begin` and `_end` take the lock; the other methods are called under it.
    """

    def __init__(self, registry: Registry, options: Options) -> None:
        world = registry.world
        self._registry, self._world, self._status = registry, world, world.status
        self._missing = options.missing
        self._policy = options.build_policy(registry)
        self._pipeline = Pipeline(registry, self._policy, options)
        self._norms = Norms(registry)
        # Only then can a failed rank fill what is left with NaN and stay in step with its peers.
        # Buckets that fill in arrival order need the same order everywhere, so it is compared.
        planned = options.policy == "planned"
        in_order = (not planned or world.status.compares) and world.world_size > 1
        self._compare = partial(agree_on_launch, world.control) if in_order else None
        self._can_fill = planned and all(s.is_float for s in registry.params)
        self._intake = Intake(registry.params, self._pipeline.reader)
        self._cycle = Cycle(f"rank {world.rank} of {world.world_size}")
        self._lock = threading.RLock()  # hooks run on any thread, and a launch is queued whole
        registry.claim(self)

    def _begin(self) -> None:
        status, opened = self._status, False
        try:
            with self._lock:
                self._check()
                with status.lock:
                    self._check_other()
                    accumulate = self._cycle.begin()
                    opened = True
                    if status.flight is not None:
                        status.flight.step = self._cycle.step
                    status.open_backward = self
                self._policy.begin(accumulate=accumulate)
        except BaseException as error:
            if opened:
                self._give_up(error)
            raise

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            try:
                if error is not None and not self._can_fill:
                    self._world.fail(error)
                told = self._finish(error) if self._world.usable else None
                self._close_backward()
            except BaseException as failure:
                self._give_up(failure)
                raise
        if told is not None:
            raise told

    def _give_up(self, error: BaseException) -> None:
        """Break the world: `error` (Ctrl-C, most often) came out of half a beginning or end."""
        with self._lock:
            self._world.fail(error)
            self._close_backward()

    def _close_backward(self) -> None:
        self._intake.clear()
        self._cycle.end()
        self._status.open_backward = None

    def _finish(self, error: BaseException | None) -> MismatchError | None:
        """Launch what is left; return what missing="error" has to say."""
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
            return told
        if error is not None:
            self._intake.clear()  # NaN for what has arrived too: nobody is to use this step
        self._run(self._policy.finish(), fill="zero" if error is None else "nan")
        if self._compare is not None:
            self._world.guard(self._compare, None)
        self._pipeline.release_read()
        if error is not None or absent:
            self._cycle.fail()
        return told if error is None and absent else None

    def _launch_due(self, complete: BucketLayout) -> None:
        self._pipeline.mark(complete, self._intake.held(complete))
        self._run(self._policy.due())

    def _run(self, launches: Iterator[Launch], fill: Fill = "zero") -> None:
        self._world.guard(self._launch, launches, fill)

    def _launch(self, launches: Iterator[Launch], fill: Fill = "zero") -> None:
        self._pipeline.run(launches, self._intake.take, fill, self._compare)

    def _land(self, stream: Any) -> None:
        if self._cycle.land():
            self._launch(self._policy.untouched())
        self._pipeline.wait(stream)

    def _measure(self, request: Request, stream: Any) -> Any:
        """Queue what norm() or clip() asks for; return the norm, which `stream` waits for."""
        pipeline, norms, world = self._pipeline, self._norms, self._world
        if pipeline.captured and not norms.ready(request.p):
            msg = f"{request.call} allocates and compiles at first: call it once before the capture"
            raise ProtocolError(self._cycle.where(msg))

        def queue() -> Any:
            self._launch(self._policy.untouched())
            if request.clips:
                self._cycle.clip()
            failed, captured = self._cycle.failed, pipeline.captured
            return norms.measure(request, stream, failed=failed, captured=captured)

        if world.status.compares and world.world_size > 1:
            world.agree("the norm", [str(request)])
        return world.guard(queue)

    def _check(self) -> None:
        self._cycle.check()
        self._world.check()

    def _check_other(self) -> None:
        if self._status.open_backward not in (None, self):
            msg = "backward() while another reducer of this world has one open"
            raise ProtocolError(self._cycle.where(msg))

    def _check_open(self, name: str) -> None:
        self._intake.check_name(name)
        self._cycle.check_inside()
        self._world.check()

    def _check_norm(self, call: str, *, clips: bool) -> None:
        self._check()
        self._cycle.check_norm(call, clips=clips)

    def _told(self, error: ReduceError, name: str) -> ReduceError:
        return type(error)(self._cycle.where(f"{self._intake.describe(name)}: {error}"))
