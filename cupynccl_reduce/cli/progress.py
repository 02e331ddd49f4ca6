"""The progress bar of commands that run long: on stderr, and only on a terminal."""

from __future__ import annotations

import sys

__all__ = ["draw"]


def draw(label: str, done: int, total: int) -> None:
    """Redraw the progress bar on a terminal; `total` 0 wipes it."""
    if not sys.stderr.isatty():
        return
    bar = "#" * (30 * done // total) if total else ""
    text = f"{label:13} [{bar:30}] {done}/{total}" if total else ""
    print(f"\r{text:70}", end="" if total else "\r", file=sys.stderr, flush=True)
