"""The bench: what reducing costs, beside its limit and beside other libraries. It only measures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cupynccl_reduce.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cupynccl_reduce.layout import ParamSpec

    from .arguments import Settings

__all__ = ["run_bench"]


def run_bench(settings: Settings) -> int:
    """Measure on every rank, print on rank 0; return the exit code.

    Collective, blocks the host.
    """
    from cupynccl_reduce.cli.models import load_params
    from cupynccl_reduce.world import connect

    from .report import chatter_to_stderr, print_report

    params = [] if settings.steps else load_params(settings.model, dtype=settings.dtype)
    if not settings.steps:
        _check_params(params)
    elif settings.rows or settings.watchdog or len(settings.bucket_bytes) > 1:
        msg = (
            "--steps measures rows of its own at one bucket size: leave out --rows, --watchdog and "
            "a sweep"
        )
        raise LayoutError(msg)
    if settings.plot:
        _check_plot(Path(settings.plot))
    # What other libraries print is not part of the report.
    with chatter_to_stderr(), connect(settings.runtime, share_gpu=settings.share_gpu) as world:
        if settings.steps:
            from .steps import measure_steps

            report = measure_steps(world, settings)
        else:
            from .compare import compare

            report = compare(world, settings, params)
        first = world.rank == 0
    if first:
        print_report(report, json=settings.json)
        if settings.plot:
            from .plot import draw_report

            draw_report(report, settings.plot)
    return 0


def _check_params(params: Sequence[ParamSpec]) -> None:
    for spec in params:
        if not spec.is_float:
            msg = f"bench reduces means of floats, and {spec.name!r} is {spec.dtype}"
            raise LayoutError(msg)
    if not any(spec.numel for spec in params):
        msg = "bench: this model has no elements to reduce"
        raise LayoutError(msg)


def _check_plot(path: Path) -> None:
    """Raise LayoutError now, rather than when everything is measured."""
    if not path.parent.is_dir() or path.is_dir():
        told = "that is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        msg = f"--plot {path}: {told}"
        raise LayoutError(msg)
    try:
        from . import plot  # noqa: F401  # only whether it loads
    except ModuleNotFoundError as error:
        msg = "--plot needs matplotlib, which is not installed; pip install 'cupynccl-reduce[plot]'"
        raise LayoutError(msg) from error
