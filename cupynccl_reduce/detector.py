"""A happens-before checker on plain numbers: lanes, clocks and byte ranges. No arrays, no streams.

A lane is anything that does things in order: a stream, or a host thread. Each has a vector clock
(lane -> how much of it is known to be done). Two accesses of overlapping bytes, one of them a
write, are a race unless the later one's lane knows of the earlier one. That does not depend on the
order in which anything really ran: one run finds every missing edge that it exercises.

Vector clocks are those of Fidge (1988); last write and last reads per lane as in
FastTrack (Flanagan and Freund, PLDI 2009).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

__all__ = ["Block", "Conflict", "Detector", "Operation"]


@dataclass(slots=True, eq=False)
class Operation:
    """One thing that a lane does: what it is, where it was asked for, and its place in the lane."""

    kind: str
    label: str
    site: object  # told with str()
    lane: int = -1
    epoch: int = 0


@dataclass(slots=True, eq=False)
class _Interval:
    """Bytes of a block that were last touched alike."""

    start: int
    stop: int
    write: Operation | None
    reads: dict[int, Operation]

    def cut(self, at: int) -> _Interval:
        """Keep the bytes before `at`; return the rest."""
        rest = _Interval(at, self.stop, self.write, dict(self.reads))
        self.stop = at
        return rest


@dataclass(slots=True, eq=False)
class Block:
    """One allocation: `[base, base + nbytes)`, and what was last done to its bytes."""

    base: int
    nbytes: int
    label: str
    intervals: list[_Interval] = field(default_factory=list)
    freed: Operation | None = None
    names: dict[tuple[int, int], str] = field(default_factory=dict)  # bytes -> what they are


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two accesses that nothing orders."""

    earlier: Operation
    earlier_writes: bool
    later: Operation
    later_writes: bool
    block: Block
    start: int  # bytes of the block that both touch
    stop: int


class Detector:
    """Follows lanes, events (as clock snapshots) and accesses of one address space."""

    def __init__(self) -> None:
        self.lanes: list[str] = []
        self._clocks: list[dict[int, int]] = []
        self._bases: list[int] = []
        self._blocks: list[Block] = []

    def lane(self, name: str) -> int:
        """Return the number of a new lane."""
        self.lanes.append(name)
        number = len(self._clocks)
        self._clocks.append({number: 0})
        return number

    def begin(self, operation: Operation, lane: int) -> None:
        """Put `operation` at the end of `lane`; its accesses are checked next."""
        clock = self._clocks[lane]
        clock[lane] += 1
        operation.lane, operation.epoch = lane, clock[lane]

    def snapshot(self, lane: int) -> dict[int, int]:
        """Return what `lane` knows now: what an event that is recorded there carries."""
        return dict(self._clocks[lane])

    def join(self, lane: int, clock: dict[int, int]) -> None:
        """Let `lane` know from now on what `clock` knows: a wait, or an enqueue by a host."""
        mine = self._clocks[lane]
        for other, epoch in clock.items():
            if epoch > mine.get(other, -1):
                mine[other] = epoch

    def follow(self, lane: int, other: int) -> None:
        """Let `lane` know from now on what `other` knows now."""
        self.join(lane, self._clocks[other])

    def covers(self, lane: int, clock: dict[int, int]) -> bool:
        """Return whether `lane` knows all that `clock` knows: joining it would change nothing."""
        mine = self._clocks[lane]
        return all(mine.get(other, 0) >= epoch for other, epoch in clock.items())

    def knows(self, lane: int, operation: Operation) -> bool:
        """Return whether `operation` is done before whatever `lane` does next."""
        return self._clocks[lane].get(operation.lane, 0) >= operation.epoch

    def add_block(self, base: int, nbytes: int, label: str) -> Block:
        """Register memory that no live block overlaps; its bytes are untouched so far."""
        block = Block(base, nbytes, label)
        if nbytes:
            block.intervals.append(_Interval(0, nbytes, None, {}))
            at = bisect_right(self._bases, base)
            self._bases.insert(at, base)
            self._blocks.insert(at, block)
        return block

    def remove_block(self, block: Block) -> None:
        """Forget memory that is gone for good."""
        at = bisect_right(self._bases, block.base) - 1
        if at >= 0 and self._blocks[at] is block:
            del self._bases[at], self._blocks[at]

    def name(self, address: int, nbytes: int, text: str) -> None:
        """Say what bytes are, such as a parameter's gradient: a race on them tells it."""
        block = self.find(address) if nbytes else None
        if block is not None:
            start = address - block.base
            block.names[start, start + nbytes] = text

    def find(self, address: int) -> Block | None:
        """Return the block that holds `address`."""
        at = bisect_right(self._bases, address) - 1
        if at < 0:
            return None
        block = self._blocks[at]
        return block if address < block.base + block.nbytes else None

    def access(
        self, operation: Operation, address: int, nbytes: int, *, write: bool
    ) -> Conflict | None:
        """Note that `operation` touches bytes; return the first access it races with, if any.

        Memory that was never registered is nobody's business: None.
        """
        block = self.find(address) if nbytes else None
        if block is None:
            return None
        start = address - block.base
        stop = min(start + nbytes, block.nbytes)
        if block.freed is not None:
            return Conflict(
                block.freed,
                earlier_writes=True,
                later=operation,
                later_writes=write,
                block=block,
                start=start,
                stop=stop,
            )
        first, last = self._cut(block, start, stop)
        touched = block.intervals[first:last]
        conflict = None
        for interval in touched:
            conflict = conflict or self._check(operation, interval, block, write=write)
            if not write:
                interval.reads[operation.lane] = operation
        if write:
            # Written alike from now on: one interval again.
            block.intervals[first:last] = [_Interval(start, stop, operation, {})]
        return conflict

    def tell(self, conflict: Conflict) -> str:
        """Return the text of a race: both operations, both call sites and the bytes."""
        block = conflict.block
        names = [
            name
            for (start, stop), name in block.names.items()
            if start < conflict.stop and conflict.start < stop
        ]
        named = f": {', '.join(names)}" if names else ""
        lines = [f"race on bytes {conflict.start} to {conflict.stop} of {block.label}{named}"]
        for when, what, writes in (
            ("earlier", conflict.earlier, conflict.earlier_writes),
            ("later  ", conflict.later, conflict.later_writes),
        ):
            told = f"{what.kind} {what.label} on {self.lanes[what.lane]}, at {what.site}"
            lines.append(f"  {when} {'write' if writes else 'read '}: {told}")
        if block.freed is conflict.earlier:
            lines.append("  memory that was given back is nobody's, whatever the order")
        else:
            earlier, later = self.lanes[conflict.earlier.lane], self.lanes[conflict.later.lane]
            lines.append(f"  {later} never waited for that point of {earlier}")
        return "\n".join(lines)

    def free(self, operation: Operation, block: Block) -> Conflict | None:
        """Note that memory is given back: a write of all of it, and whoever comes later is wrong.

        For memory whose address is not used again; otherwise `access` and `remove_block`.
        """
        conflict = self.access(operation, block.base, block.nbytes, write=True)
        block.freed = operation
        return conflict

    def written_by(self, address: int) -> Operation | None:
        """Return what wrote the byte at `address` last."""
        block = self.find(address)
        if block is None:
            return None
        at = bisect_right(block.intervals, address - block.base, key=_start) - 1
        return block.intervals[at].write

    def _cut(self, block: Block, start: int, stop: int) -> tuple[int, int]:
        """Return which intervals make up `[start, stop)` exactly, as a slice."""
        intervals = block.intervals
        first = bisect_right(intervals, start, key=_start) - 1
        if intervals[first].start < start:
            first += 1
            intervals.insert(first, intervals[first - 1].cut(start))
        last = first
        while last < len(intervals) and intervals[last].stop <= stop:
            last += 1
        if last < len(intervals) and intervals[last].start < stop:
            intervals.insert(last + 1, intervals[last].cut(stop))
            last += 1
        return first, last

    def _check(
        self, operation: Operation, interval: _Interval, block: Block, *, write: bool
    ) -> Conflict | None:
        known = self._clocks[operation.lane]
        before = [(interval.write, True)] if interval.write is not None else []
        if write:
            before += [(read, False) for read in interval.reads.values()]
        for earlier, writes in before:
            if known.get(earlier.lane, 0) < earlier.epoch:
                return Conflict(
                    earlier, writes, operation, write, block, interval.start, interval.stop
                )
        return None


def _start(interval: _Interval) -> int:
    return interval.start
