"""The rows of the bench: each one way to reduce the gradients of a step. No timing here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .limit import Limit
from .ours import Accumulating, Looped, with_check
from .setup import Setup, find_torch, make_gradients

if TYPE_CHECKING:
    from collections.abc import Callable

    from cupynccl_reduce.cli.bench.measure import Row

__all__ = ["MODULE_ROWS", "PEERS", "Setup", "build_row", "find_torch", "make_gradients"]

PEERS = ("ddp", "fsdp2", "deepcompile")
MODULE_ROWS = ("backward", "attached", "ddp", "fsdp2")


def build_row(name: str, setup: Setup, started: Callable[[], None]) -> Row:
    """Build one row; `started` is called when what the user brings is there, and no more."""
    if name in MODULE_ROWS:
        from .given import build_given
        from .modules import Attached, Backward, Ddp, Fsdp2

        given = build_given(setup)
        started()
        builders: dict[str, Callable[[], Any]] = {
            "backward": lambda: Backward(given),
            "attached": lambda: Attached(setup, given),
            "ddp": lambda: Ddp(setup, given),
            "fsdp2": lambda: Fsdp2(given),
        }
    else:
        started()
        builders = {
            "limit": lambda: Limit(setup, buckets=False),
            "limit_buckets": lambda: Limit(setup, buckets=True),
            "planned": lambda: Looped(setup, "planned"),
            "arrival": lambda: Looped(setup, "arrival"),
            "accumulate": lambda: Accumulating(setup),
            "unwatched": lambda: Looped(with_check(setup, "off"), "planned"),
            "compared": lambda: Looped(with_check(setup, "sync"), "planned"),
            "deepcompile": lambda: _build_deepcompile(setup),
        }
    row: Row = builders[name]()
    return row


def _build_deepcompile(setup: Setup) -> Row:
    from .deepcompile import DeepCompile

    return DeepCompile(setup)
