"""Collectives between threads of one process. For tests, laptops and learning."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynccl_reduce.errors import MismatchError

from .fold import DIRECT_ROW_BYTES, fold

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cupynccl_reduce.meeting import Meeting
    from cupynccl_reduce.protocols import Array, Control, Op

__all__ = ["LocalCommunicator"]


class LocalCommunicator:
    """protocols.Communicator over a Meeting; work runs on the stream's thread."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank = rank
        self.world_size = meeting.world_size
        self.direct_bytes = DIRECT_ROW_BYTES * self.world_size
        self._meeting = meeting

    def reduce_scatter(self, send: Array, recv: Array, dtype: str, op: Op, stream: Any) -> None:
        """Queue: `recv` becomes row `rank` of the sum over ranks of `send`."""
        row = slice(self.rank * recv.size, (self.rank + 1) * recv.size)

        def use(sends: Sequence[Array]) -> None:
            fold([peer[row] for peer in sends], recv, dtype, op)

        self._queue(f"reduce_scatter {op} {dtype} {recv.size}", send, use, stream)

    def all_gather(self, send: Array, recv: Array, dtype: str, stream: Any) -> None:
        """Queue: row r of `recv` becomes rank r's `send`."""
        rows = recv.reshape(self.world_size, send.size)

        def use(sends: Sequence[Array]) -> None:
            for row, peer in zip(rows, sends, strict=True):
                _copy(peer, row)

        self._queue(f"all_gather {dtype} {send.size}", send, use, stream)

    def all_reduce(self, send: Array, recv: Array, dtype: str, op: Op, stream: Any) -> None:
        """Queue: `recv` becomes the sum over ranks of `send`."""
        # Summed beside `recv`: where that is `send`, a slower peer would read what is reduced.
        total = np.empty_like(recv)

        def use(sends: Sequence[Array]) -> None:
            fold(sends, total, dtype, op)

        self._queue(f"all_reduce {op} {dtype} {send.size}", send, use, stream)
        stream.submit(partial(_copy, total, recv))

    def broadcast(self, array: Array, root: int, dtype: str, stream: Any) -> None:
        """Queue: `array` becomes rank `root`'s."""

        def use(arrays: Sequence[Array]) -> None:
            _copy(arrays[root], array)

        self._queue(f"broadcast from {root} {dtype} {array.size}", array, use, stream)

    def group(self) -> AbstractContextManager[None]:
        """Return a context that does nothing: one queue keeps the order by itself."""
        return nullcontext()

    def regroup(self, control: Control, ranks: Sequence[int]) -> LocalCommunicator:  # noqa: ARG002
        """Return a communicator among `ranks`, for one of them. The meeting needs no `control`."""
        return LocalCommunicator(self._meeting.successor(len(ranks)), ranks.index(self.rank))

    def check(self) -> None:
        """Find nothing: what fails here raises on the stream."""

    def close(self) -> None:
        """Free ranks that would wait for this one for ever. Idempotent."""
        self._meeting.abort()

    def abort(self) -> None:
        """Free every rank that waits in a collective. Idempotent."""
        self._meeting.abort()

    def _queue(
        self, what: str, payload: Array, use: Callable[[list[Array]], None], stream: Any
    ) -> None:
        def check_and_use(posts: list[tuple[str, Array]]) -> None:
            told = {rank: post[0] for rank, post in enumerate(posts)}
            if len(set(told.values())) > 1:
                msg = f"ranks queued different collectives: {told}"
                raise MismatchError(msg)
            use([post[1] for post in posts])

        stream.submit(partial(self._meeting.exchange, self.rank, (what, payload), check_and_use))


def _copy(source: Array, target: Array) -> None:
    if source.ctypes.data != target.ctypes.data:
        target[...] = source
