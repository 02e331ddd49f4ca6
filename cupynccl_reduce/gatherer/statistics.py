"""What a gatherer has done so far, as a value."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GathererStatistics"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GathererStatistics:
    """A snapshot of one gatherer on one rank; counts since it was built.

    Attributes:
        gathers: buckets gathered.
        prefetches: those of them that nobody had acquired yet.
        hits: prefetched buckets that were acquired.
        received_bytes: bytes that came from other ranks, padding included.
        full_bytes: full parameters that have memory at present.
        scratch_bytes: memory of the matrix that one all_gather fills.
    """

    gathers: int
    prefetches: int
    hits: int
    received_bytes: int
    full_bytes: int
    scratch_bytes: int
