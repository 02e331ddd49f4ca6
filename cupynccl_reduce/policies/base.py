"""What a policy is, and the refusals that all share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cupynccl_reduce.layout import BucketLayout, Launch

__all__ = ["ARRIVED", "FLUSHED", "SKIPPED", "TWICE", "Policy"]

TWICE = (
    "it arrived twice in one backward; ParamSpec(uses='many') sums such gradients "
    "(torch: attach(uses_many=[...]))"
)
SKIPPED = "skip_grad() said that none would come in this backward"
ARRIVED = "a gradient of it has arrived in this backward; skip_grad() comes instead of one"
FLUSHED = "its bucket was launched already; it must come before flush()"


class Policy(Protocol):
    """What the reducer asks; one object serves all backwards of a reducer."""

    layouts: tuple[BucketLayout, ...]  # as they arrive and are unpacked
    packed: tuple[BucketLayout, ...]  # as they are packed
    direct: tuple[BucketLayout, ...]  # as they are packed where they are not sent from their place
    buffer_bytes: tuple[int, ...]

    def begin(self, *, accumulate: bool) -> None:
        """Start a backward; `accumulate` unless it is the first of its cycle."""

    def arrive(self, name: str) -> BucketLayout | None:
        """Note one gradient, refusing a second; return the layout that it completes, if any."""

    def skip(self, name: str) -> BucketLayout | None:
        """Note that no gradient will come; return the layout that this completes, if any."""

    def due(self) -> Iterator[Launch]:
        """Yield what may be launched now. Each is to be run before the next is asked for."""

    def finish(self) -> Iterator[Launch]:
        """Yield whatever is not yet launched."""

    def missing(self) -> tuple[str, ...]:
        """Return the names that neither arrived nor were skipped in this backward."""

    def waiting(self) -> dict[int, tuple[str, ...]]:
        """Return, for each bucket not launched, the names it still waits for."""

    def untouched(self) -> Iterator[Launch]:
        """Yield launches that zero the shards which nothing in this cycle has written.

        They hold no collective: every rank makes its own.
        """
