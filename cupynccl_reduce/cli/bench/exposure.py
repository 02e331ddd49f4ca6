"""What of a bucket's communication compute had to wait for: pure functions of a time-line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .trace import COMMUNICATION, COMPUTE, COPY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cupynccl_reduce.layout import BucketLayout

    from .trace import Span

__all__ = ["expose"]


def expose(spans: Sequence[Span], buckets: Sequence[BucketLayout]) -> list[dict[str, Any]]:
    """Return, for each bucket, from launch to landing, and how long compute waited for it.

    Compute waits for a pack where it would reuse the memory of gradients, and for landing in
    `wait()`. A wait for landing is shared out: each bucket has the part of it between the landing
    of the bucket before and its own. (One rank alone packs where shards land, so both are one.)
    """
    told = []
    landed_before = 0.0
    waits = [s for s in spans if s.lane == COMPUTE and s.kind == "wait"]
    landing = [s for s in waits if s.label.startswith(f"{COMMUNICATION}: bucket")]
    for bucket in buckets:
        label = bucket.matrix.label
        work = [s for s in spans if s.label == label and s.lane in (COPY, COMMUNICATION)]
        if not work:
            continue
        landed = max(span.stop_ms for span in work)
        held = (s.stop_ms - s.start_ms for s in waits if s.label == f"{COPY}: {label}")
        parts = (min(landed, s.stop_ms) - max(landed_before, s.start_ms) for s in landing)
        told.append(
            {
                "bucket": bucket.index,
                "bytes": bucket.send_bytes,
                "launch_to_landed_ms": landed - min(span.start_ms for span in work),
                "waited_for_pack_ms": sum(held),
                "waited_for_landing_ms": sum(part for part in parts if part > 0),
            }
        )
        landed_before = max(landed_before, landed)
    return told
