"""The limit: raw reduce_scatters through the world's communicator. Nothing is packed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cupynccl_reduce.dtypes import DTYPES
from cupynccl_reduce.layout import plan_buckets

from .setup import fill, first_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .setup import Setup

__all__ = ["Limit"]


class Limit:
    """Raw reduce_scatters: one for all bytes of a dtype, or one for each bucket of the plan."""

    def __init__(self, setup: Setup, *, buckets: bool) -> None:
        self._world = setup.world
        plan = plan_buckets(
            setup.params, world_size=setup.world.world_size, bucket_bytes=setup.bucket_bytes
        )
        columns = [(bucket.reduce_dtype, bucket.matrix.columns) for bucket in plan]
        self.own_bytes = 0
        self._calls = [self._call(*each) for each in (columns if buckets else _joined(columns))]
        # They were filled on the caller's stream, and travel on the communication stream.
        self._world.runtime.adopt(None).synchronize()

    def _call(self, dtype: str, columns: int) -> tuple[Any, Any, str]:
        world, itemsize = self._world, DTYPES[dtype].itemsize
        numel = columns * world.world_size
        self.own_bytes += (numel + columns) * itemsize
        send = world.runtime.view(world.runtime.allocate(numel * itemsize), 0, numel, dtype)
        recv = world.runtime.view(world.runtime.allocate(columns * itemsize), 0, columns, dtype)
        fill(send, world.rank + 1, dtype)  # memory that was never written is faster to read
        return send, recv, dtype

    def prepare(self) -> None:
        """Do nothing."""

    def issue(self) -> None:
        """Queue all calls."""
        reduce_scatter, stream = self._world.communicator.reduce_scatter, self._world.stream
        for send, recv, dtype in self._calls:
            reduce_scatter(send, recv, dtype, "sum", stream)

    def land(self) -> None:
        """Block the host until all are done."""
        self._world.stream.synchronize()

    def value(self) -> float:
        """Return the mean of the first column."""
        _, recv, dtype = self._calls[0]
        return first_of(recv, dtype) / self._world.world_size

    def close(self) -> None:
        """Drop the arrays."""
        self._calls.clear()


def _joined(columns: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return the sum of the columns of each dtype."""
    totals: dict[str, int] = {}
    for dtype, count in columns:
        totals[dtype] = totals.get(dtype, 0) + count
    return list(totals.items())
