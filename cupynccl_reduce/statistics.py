"""What a reducer has done so far, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .cycle import Cycle
    from .intake import Intake
    from .pipeline import Pipeline
    from .policies import Policy

__all__ = ["Statistics", "take_statistics"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """A snapshot of one reducer on one rank; counts since it was built.

    Attributes:
        step: cycles begun.
        backwards: backwards ended.
        gradients: gradients handed over.
        launches: launches queued; on the planned policy one per bucket and backward.
        collectives: reduce-scatters queued.
        sent_bytes: bytes that other ranks receive from this one, padding included.
        waiting: for each bucket not launched in the open backward, the names it waits for.
        in_flight: send buffers whose collective or unpack is not done.
        shard_bytes: memory of the registry's shard arena.
        buffer_bytes: memory of the send buffers.
    """

    step: int
    backwards: int
    gradients: int
    launches: int
    collectives: int
    sent_bytes: int
    waiting: Mapping[int, tuple[str, ...]]
    in_flight: int
    shard_bytes: int
    buffer_bytes: int


def take_statistics(cycle: Cycle, intake: Intake, policy: Policy, pipeline: Pipeline) -> Statistics:
    """Return what these parts of one reducer say of themselves."""
    return Statistics(
        step=cycle.step,
        backwards=cycle.backwards,
        gradients=intake.count,
        launches=pipeline.launches,
        collectives=pipeline.collectives,
        sent_bytes=pipeline.sent_bytes,
        waiting=policy.waiting() if cycle.open else {},
        in_flight=pipeline.in_flight,
        shard_bytes=pipeline.shard_bytes,
        buffer_bytes=pipeline.buffer_bytes,
    )
