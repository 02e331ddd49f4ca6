"""A step of which all ranks hear how it went everywhere, so that all go on or none does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cupynccl_reduce.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

    from cupynccl_reduce.membership import World

__all__ = ["do_on_first", "do_together"]

NAMED_RANKS = 8  # an error about 4,096 ranks must still be readable
DONE, FAILED = b"+", b"-"


def do_together(world: World, what: str, action: Callable[[], bytes]) -> list[bytes]:
    """Run `action` on this rank, and return what it gave on every rank, in rank order.

    Collective, blocks the host until all ranks are through. What a file system may raise is a
    CheckpointError on all ranks, which names `what`, the ranks and their errors; the world goes on.
    Any other exception breaks the world, which frees the ranks that would wait for this one.
    """
    answer, error = world.guard(_attempt, action)
    everyone: list[bytes] = world.guard(world.control.all_gather, answer)
    told = [
        f"rank {rank}: {text.removeprefix(FAILED).decode()}"
        for rank, text in enumerate(everyone)
        if text.startswith(FAILED)
    ]
    if told:
        more = ["..."] if len(told) > NAMED_RANKS else []
        msg = f"{what}: {'; '.join([*told[:NAMED_RANKS], *more])}"
        raise CheckpointError(msg) from error
    return [text.removeprefix(DONE) for text in everyone]


def do_on_first(world: World, what: str, action: Callable[[], bytes]) -> bytes:
    """Run `action` on rank 0 alone, and return what it gave, on all ranks; as do_together."""
    return do_together(world, what, action if world.rank == 0 else bytes)[0]


def _attempt(action: Callable[[], bytes]) -> tuple[bytes, Exception | None]:
    """Return what this rank tells the others, and the error that it told them of."""
    try:
        return DONE + action(), None
    except (CheckpointError, OSError, MemoryError) as error:
        text = str(error) or type(error).__name__
        return FAILED + text.encode(errors="backslashreplace"), error
