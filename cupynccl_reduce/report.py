"""What a fault was, as fields, as text to read aloud and as a file. Nothing is looked up here."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from .errors import Reason
    from .peers import Link

__all__ = ["RankState", "Report", "first_difference"]

NAMED_RANKS = 8
COMPARED = ("what", "bucket", "dtype", "nbytes", "calls")  # of a launch
WORDS = {
    "died": "died",
    "stopped": "is silent",
    "left": "has left this world",
    "did not call": "did not call",
    "did not start": "did not start",
    "raised": "failed",
    "mismatch": "launches something else",
    "asynchronous error": "met an error of the transport",
}


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank at the time of the fault: launches counted since its world began."""

    rank: int
    link: Link
    age_s: float
    step: int
    queued: int
    started: int
    done: int


@dataclass(frozen=True, slots=True)
class Report:
    """The first fault of a world, as this rank knows it.

    `ranks` are those to blame; none when the reason is "fabric". `launch` is the launch that waits,
    if there is one, and `running_s` the seconds for which it has run here.
    """

    reason: Reason
    ranks: tuple[int, ...]
    detail: str
    rank: int
    launch: dict[str, Any] | None
    launch_text: str
    running_s: float
    timeout_s: float
    states: tuple[RankState, ...]
    records: dict[int, list[dict[str, Any]]]

    @property
    def text(self) -> str:
        """The report in some lines."""
        lines = [f"{self._who()} ({self.detail})" if self.detail else self._who()]
        if self.launch_text:
            ran = f", which has run for {self.running_s:.1f} s here" if self.running_s else ""
            lines.append(f"  first launch that is not done here: {self.launch_text}{ran}")
        lines += [
            f"  rank {state.rank}: {state.link}, step {state.step}, {state.queued} queued, "
            f"{state.started} started, {state.done} done"
            for state in self.states[:NAMED_RANKS]
        ]
        lines.append(
            "  This world is aborted, and what its queued work has written is undefined. Leave it; "
            f"a longer wait is connect(timeout_s=...), now {self.timeout_s:g}."
        )
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Return all of it, for json.dump."""
        return asdict(self) | {"text": self.text}

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, all or nothing. Blocks the host."""
        target = Path(path)
        partial = target.with_name(f"{target.name}.{os.getpid()}")
        try:
            partial.write_text(json.dumps(self.as_json(), indent=1), "utf-8")
            partial.replace(target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def _who(self) -> str:
        if not self.ranks:
            return f"rank {self.rank} waits for the fabric"
        named = ", ".join(map(str, self.ranks[:NAMED_RANKS]))
        named += ", ..." if len(self.ranks) > NAMED_RANKS else ""
        return f"rank{'s' * (len(self.ranks) > 1)} {named} {WORDS[self.reason]}"


def first_difference(
    records: Mapping[int, list[dict[str, Any]]],
) -> tuple[tuple[int, ...], int, str] | None:
    """Return who differs, in which launch and how: the first in which records of ranks differ."""
    by_rank = {rank: {one["number"]: one for one in record} for rank, record in records.items()}
    numbers = sorted({number for record in by_rank.values() for number in record})
    for one in numbers:
        having = {rank: record[one] for rank, record in by_rank.items() if one in record}
        groups: dict[tuple[Any, ...], list[int]] = {}
        all_so_far: dict[str, list[int]] = {}
        for rank in sorted(having):
            groups.setdefault(tuple(having[rank][f] for f in COMPARED), []).append(rank)
            all_so_far.setdefault(having[rank]["digest"], []).append(rank)
        if len(groups) > 1:
            told = "; ".join(
                f"rank {', '.join(map(str, ranks))}: "
                + ", ".join(f"{f} {value}" for f, value in zip(COMPARED, values, strict=True))
                for values, ranks in groups.items()
            )
            return _odd_ones(groups.values()), one, f"at launch {one}, {told}"
        if len(all_so_far) > 1:
            told = f"they differ in a launch before {one}, which is not kept any more"
            return _odd_ones(all_so_far.values()), one, told
    return None


def _odd_ones(groups: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return the ranks outside the group that holds more than half; all where none does."""
    sized = sorted(groups, key=len, reverse=True)
    total = sum(map(len, sized))
    odd = sized[1:] if 2 * len(sized[0]) > total else sized
    return tuple(sorted(rank for ranks in odd for rank in ranks))
