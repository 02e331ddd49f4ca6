"""Rounds, medians and spread. What a row does in a step, and on what device, is not known here."""

from __future__ import annotations

import gc
import time
from array import array
from dataclasses import dataclass
from statistics import median, quantiles
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cupynccl_reduce.protocols import Control

__all__ = [
    "Row",
    "Sample",
    "Spread",
    "gather_slowest",
    "median_ratio",
    "spread",
    "take_samples",
]


class Row(Protocol):
    """One way to reduce the gradients of a step."""

    own_bytes: int  # of memory that the device's meter does not see

    def prepare(self) -> None:
        """Do what belongs to a step, but is not measured."""

    def issue(self) -> None:
        """Make all calls of one step."""

    def land(self) -> None:
        """Block the host until the result of `issue` is there."""

    def value(self) -> float:
        """Return an element of the result of gradients that are all rank + 1."""

    def close(self) -> None:
        """Give memory back. Blocks the host."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One repetition, slowest rank: host time of the calls, and time until the result was there."""

    round: int
    issue_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles."""

    low: float
    median: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Return the median and quartiles of one value or more."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    return Spread(*quantiles(values, n=4, method="inclusive"))


def median_ratio(samples: Sequence[Sample], base: Sequence[Sample]) -> float:
    """Return the median over rounds of a row's time against that of `base` in the same round.

    Both had the same neighbours then, which on a shared machine matters more than their number.
    """
    ratios = []
    for number in sorted({sample.round for sample in samples}):
        ours, theirs = (
            median(sample.total_s for sample in some if sample.round == number)
            for some in (samples, base)
        )
        ratios.append(ours / theirs)
    return median(ratios)


def take_samples(
    rows: dict[str, Row],
    control: Control,
    synchronize: Callable[[], None],
    *,
    rounds: int,
    repeats: int,
    tick: Callable[[], None],
) -> dict[str, list[Sample]]:
    """Measure `repeats` steps of every row in each round, all ranks together.

    Collective, blocks the host. Rows take turns, in the opposite order in every second round, so
    that none has a quieter time or a better predecessor than another.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in rows}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for number in range(rounds):
            for name in list(rows)[:: -1 if number % 2 else 1]:
                for _ in range(repeats):
                    times = _time_step(rows[name], control, synchronize)
                    samples[name].append(Sample(number, *times))
                tick()
            gc.collect()
    finally:
        if collecting:
            gc.enable()
    return samples


def _time_step(row: Row, control: Control, synchronize: Callable[[], None]) -> list[float]:
    """Return one step's times on the slowest rank."""
    row.prepare()
    synchronize()
    control.all_gather(b"")  # ranks start together
    started = time.perf_counter()
    row.issue()
    issued = time.perf_counter()
    row.land()
    landed = time.perf_counter()
    return gather_slowest(control, [issued - started, landed - started])


def gather_slowest(control: Control, times: Sequence[float]) -> list[float]:
    """Collective, blocks the host: return each of `times` as it is on its slowest rank."""
    everyone = [array("d", payload) for payload in control.all_gather(array("d", times).tobytes())]
    return [max(ranks) for ranks in zip(*everyone, strict=True)]
