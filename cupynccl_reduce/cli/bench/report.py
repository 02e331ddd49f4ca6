"""What was measured, as values, as JSON and as a table."""

from __future__ import annotations

import json as json_module
import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .measure import Sample, Spread, median_ratio, spread

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .trace import Span

__all__ = ["Report", "Result", "chatter_to_stderr", "format_bytes", "print_report"]

KIB = 1 << 10


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that one run has to tell. `trace` is one step's time-line."""

    machine: dict[str, Any]
    workload: dict[str, Any]
    rows: list[dict[str, Any]]
    exposed: list[dict[str, Any]] = field(default_factory=list)
    watchdog: dict[str, float] = field(default_factory=dict)
    trace: Sequence[Span] = ()

    def as_json(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        told = {"machine": self.machine, "workload": self.workload, "rows": self.rows}
        more = {"exposed": self.exposed, "watchdog": self.watchdog}
        return told | {name: value for name, value in more.items() if value}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One row at one bucket size: its samples, or why there are none."""

    name: str
    bucket_bytes: int
    skipped: str = ""
    samples: Sequence[Sample] = ()
    peak_extra_bytes: int = 0

    def as_json(
        self, limit: Sequence[Sample], *, gradients: int, wire_bytes: int, world_size: int
    ) -> dict[str, Any]:
        """Return the row's object: medians, with quartiles beside them."""
        row: dict[str, Any] = {"name": self.name, "bucket_bytes": self.bucket_bytes}
        if self.skipped:
            return {**row, "skipped": self.skipped}
        host = spread([sample.issue_s * 1e6 / gradients for sample in self.samples])
        total = spread([sample.total_s * 1e3 for sample in self.samples])
        # As nccl-tests count: what a rank's link carries, (n - 1) / n of all bytes, or twice that.
        rounds_over_link = 2 if self.name == "ddp" else 1
        carried = rounds_over_link * wire_bytes * (world_size - 1) / world_size
        if self.name == "backward":
            carried = 0.0
        return {
            **row,
            "host_us_per_grad": host.median,
            "host_us_per_grad_quartiles": [host.low, host.high],
            "total_ms": total.median,
            "total_ms_quartiles": [total.low, total.high],
            "ratio_to_limit": median_ratio(self.samples, limit),
            "bus_gb_per_s": carried / total.median / 1e6,
            "peak_extra_bytes": self.peak_extra_bytes,
            "samples": len(self.samples),
        }


@contextmanager
def chatter_to_stderr() -> Iterator[None]:
    """Send what is written to stdout, also by libraries in C and child processes, to stderr."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)


def print_report(report: Report, *, json: bool) -> None:
    """Print one JSON object, or tables."""
    if json:
        print(json_module.dumps(report.as_json()), flush=True)
        return
    print("; ".join(f"{name} {value}" for name, value in report.machine.items()))
    print("; ".join(f"{name} {value}" for name, value in report.workload.items()))
    is_steps = any("step_ms" in row for row in report.rows)
    table = _steps_table(report.rows) if is_steps else _table(report.rows)
    print("\n".join(_aligned(table)))
    if report.exposed:
        print("\n".join(["", *_aligned(_exposed_table(report.exposed))]))
    if report.watchdog:
        print("\nwatching")
        told = [[name, f"{value:.4g}"] for name, value in report.watchdog.items()]
        print("\n".join(_aligned(told)))
    skipped = {row["name"]: row["skipped"] for row in report.rows if "skipped" in row}
    for name, why in skipped.items():
        print(f"{name}: skipped: {why}")


def _table(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    table = [
        ["bucket", "row", "host us/grad", "total ms (quartiles)", "x limit", "GB/s", "extra MiB"]
    ]
    for row in rows:
        cells = [format_bytes(row["bucket_bytes"]), row["name"]]
        if "skipped" in row:
            table.append([*cells, "-", "-", "-", "-", "-"])
            continue
        total = Spread(row["total_ms_quartiles"][0], row["total_ms"], row["total_ms_quartiles"][1])
        table.append(
            [
                *cells,
                f"{row['host_us_per_grad']:.2f}",
                _ms(total),
                f"{row['ratio_to_limit']:.2f}",
                f"{row['bus_gb_per_s']:.2f}",
                f"{row['peak_extra_bytes'] / KIB / KIB:.1f}",
            ]
        )
    return table


def _steps_table(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    table = [["row", "to gradients ms", "step ms (quartiles)", "x none"]]
    for row in rows:
        if "skipped" in row:
            table.append([row["name"], "-", "-", "-"])
            continue
        step = Spread(row["step_ms_quartiles"][0], row["step_ms"], row["step_ms_quartiles"][1])
        cells = [f"{row['gradients_ms']:.2f}", _ms(step), f"{row['ratio_to_none']:.3f}"]
        table.append([row["name"], *cells])
    return table


def _exposed_table(exposed: Sequence[dict[str, Any]]) -> list[list[str]]:
    table = [["bucket", "bytes", "launch to landed ms", "waited for pack ms", "for landing ms"]]
    table += [
        [
            str(each["bucket"]),
            f"{each['bytes']:,}",
            f"{each['launch_to_landed_ms']:.3f}",
            f"{each['waited_for_pack_ms']:.3f}",
            f"{each['waited_for_landing_ms']:.3f}",
        ]
        for each in exposed
    ]
    return table


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    ]


def _ms(each: Spread) -> str:
    return f"{each.median:.3f} ({each.low:.3f} to {each.high:.3f})"


def format_bytes(number: float) -> str:
    """Return a number of bytes in its largest unit, to three digits."""
    for unit in ("B", "KiB", "MiB"):
        if number < KIB:
            return f"{number:.3g} {unit}"
        number /= KIB
    return f"{number:.3g} GiB"
