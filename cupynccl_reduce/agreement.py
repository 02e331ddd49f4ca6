"""Compare what ranks believe; say on all of them where they differ. No channel of its own."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from .errors import MismatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .errors import ReduceError
    from .layout import Launch
    from .protocols import Control

__all__ = ["agree", "agree_on_launch", "gather_complaints"]

NAMED_RANKS = 8  # an error about 4,096 ranks must still be readable


def agree(
    control: Control, what: str, entries: Sequence[str], *, refused: ReduceError | None = None
) -> None:
    """Collective, blocks the host: raise MismatchError on all ranks unless all entries are equal.

    Only digests travel, and of entries that differ the first: every rank names it with the values
    of all ranks. A rank that has `refused` its own input takes part all the same, because its peers
    must not hang: they learn why, and it raises its own error.
    """
    if refused is not None:
        entries = [f"refused: {refused}"]
    index = _first_difference(control, entries)
    if index is not None:
        mine = entries[index] if index < len(entries) else "(nothing)"
        values = [value.decode() for value in control.all_gather(mine.encode())]
    if refused is not None:
        raise refused
    if index is None:
        return
    by_value: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        by_value.setdefault(value, []).append(rank)
    told = "; ".join(f"{_ranks(ranks)}: {value}" for value, ranks in by_value.items())
    msg = f"ranks disagree on {what}, first at entry {index}: {told}. Give the same on every rank."
    raise MismatchError(msg)


def agree_on_launch(control: Control, launch: Launch | None) -> None:
    """Collective, blocks the host: compare the gradients that a launch sends; None is the end."""
    if launch is None:
        agree(
            control,
            "the gradients of a backward (policy='arrival' or check='sync')",
            ["the end of backward"],
        )
    elif launch.calls:
        names = [repr(part.layout.names[0]) for part in launch.calls]
        agree(control, "the gradients of a launch (policy='arrival' or check='sync')", names)


def gather_complaints(control: Control, mine: str) -> str:
    """Collective, blocks the host: return every rank's complaint, or "" where none has one."""
    everyone = enumerate(control.all_gather(mine.encode()))
    return "; ".join(f"rank {rank}: {payload.decode()}" for rank, payload in everyone if payload)


def _first_difference(control: Control, entries: Sequence[str]) -> int | None:
    """Return the index of the first entry that differs between ranks, or None."""
    if _alike(control, entries):
        return None
    counts = control.all_gather(len(entries).to_bytes(8, "big"))
    low, high = 0, max(int.from_bytes(count, "big") for count in counts)
    while high - low > 1:  # entries[:low] are alike, entries[:high] are not
        middle = (low + high) // 2
        if _alike(control, entries[low:middle]):
            low = middle
        else:
            high = middle
    return low


def _alike(control: Control, entries: Sequence[str]) -> bool:
    text = "".join(f"{entry}\n" for entry in entries).encode()
    return len(set(control.all_gather(hashlib.blake2b(text, digest_size=16).digest()))) == 1


def _ranks(ranks: Sequence[int]) -> str:
    head = ", ".join(map(str, ranks[:NAMED_RANKS])) + (", ..." if len(ranks) > NAMED_RANKS else "")
    return f"rank {head}" if len(ranks) == 1 else f"ranks {head}"
