"""The picture: time over bucket size, and one step with the streams as lanes. Needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from .report import format_bytes
from .trace import COMMUNICATION, COMPUTE, COPY, HOST

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .report import Report
    from .trace import Span

__all__ = ["draw_report"]

LANES = (HOST, COMPUTE, COPY, COMMUNICATION)
COLORS = {
    "reduce_grad": "tab:blue",
    "forward": "tab:cyan",
    "backward": "tab:blue",
    "update": "tab:olive",
    "pack": "tab:orange",
    "reduce_scatter": "tab:green",
    "all_gather": "tab:purple",
    "unpack": "tab:brown",
    "wait": "tab:red",
}


def draw_report(report: Report, path: str) -> None:
    """Write a PNG."""
    figure = Figure(figsize=(11, 8), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1)
    rows = [row for row in report.rows if "skipped" not in row]
    if any("step_ms" in row for row in rows):
        _draw_steps(upper, rows)
    else:
        _draw_sweep(upper, rows)
    _draw_timeline(lower, report.trace)
    machine = report.machine
    device = machine.get("gpu", machine["cpu"])
    figure.suptitle(
        f"cupynccl_reduce {machine['library']}: {report.workload['model']}, "
        f"{report.workload['dtype']}, world_size {machine['world_size']} on {device}"
    )
    figure.savefig(path, format="png", dpi=120)


def _draw_sweep(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Draw a line for each row: medians, with quartiles as bars."""
    for name in dict.fromkeys(row["name"] for row in rows):
        mine = [row for row in rows if row["name"] == name]
        medians = [row["total_ms"] for row in mine]
        below = [row["total_ms"] - row["total_ms_quartiles"][0] for row in mine]
        above = [row["total_ms_quartiles"][1] - row["total_ms"] for row in mine]
        axes.errorbar(
            [row["bucket_bytes"] for row in mine],
            medians,
            yerr=[below, above],
            label=name,
            marker="o",
            capsize=3,
            linestyle="--" if name.startswith("limit") else "-",
        )
    sizes = sorted({row["bucket_bytes"] for row in rows})
    axes.set(xscale="log", yscale="log", xlabel="bucket", ylabel="ms until all shards")
    axes.set_xticks(sizes, [format_bytes(nbytes) for nbytes in sizes], minor=False)
    axes.set_xticks([], minor=True)
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend(ncols=2, fontsize="small")


def _draw_steps(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Draw a bar for each arm: until the gradients are reduced, and the whole step."""
    names = [row["name"] for row in rows]
    axes.bar(names, [row["step_ms"] for row in rows], color="tab:olive", label="update")
    axes.bar(names, [row["gradients_ms"] for row in rows], color="tab:blue", label="until reduced")
    axes.set(ylabel="ms a step")
    axes.legend()


def _draw_timeline(axes: Any, spans: Sequence[Span]) -> None:
    """Draw one lane for each stream; what waits lies over what it waits in."""
    lanes = [lane for lane in LANES if any(span.lane == lane for span in spans)]
    kinds = [kind for kind in COLORS if any(span.kind == kind for span in spans)]
    for span in sorted(spans, key=lambda span: span.kind == "wait"):
        axes.broken_barh(
            [(span.start_ms, span.stop_ms - span.start_ms)],
            (lanes.index(span.lane) - 0.4, 0.8),
            facecolors=COLORS.get(span.kind, "gray"),
            edgecolor="white",
            linewidth=0.3,
        )
    axes.set(yticks=range(len(lanes)), yticklabels=lanes, xlabel="ms, one step of rank 0")
    axes.invert_yaxis()
    handles = [Patch(color=COLORS[kind], label=kind) for kind in kinds]
    axes.legend(
        handles=handles,
        ncols=len(handles),
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        frameon=False,
        fontsize="small",
    )
