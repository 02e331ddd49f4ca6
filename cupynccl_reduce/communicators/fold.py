"""The sum over ranks on the host: in rank order, 16-bit floats in fp32. No transport."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cupynccl_reduce.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cupynccl_reduce.protocols import Array, Op

__all__ = ["DIRECT_ROW_BYTES", "fold"]

# From rows of so many bytes on, sending a gradient from where it lies saves more by not packing it
# than its own messages cost.
DIRECT_ROW_BYTES = 256 << 10

TILE = 1 << 17  # elements: the running sum stays in the cache


def fold(rows: Sequence[Array], recv: Array, dtype: str, op: Op) -> None:
    """Write the sum of `rows` (their mean for "avg") into `recv`, which may be one of them.

    16-bit floats are summed in fp32 and rounded once. The order is that of `rows`, so the result
    does not depend on how an array is cut. One row is copied bit for bit. A mean of 2, 4, 8, ...
    rows divides each of them first, which is exact and keeps the sum in range; of others, the sum.
    """
    count = len(rows)
    if count == 1:
        recv[...] = rows[0]
        return
    compute = np.dtype(np.float32) if DTYPES[dtype].itemsize == 2 else recv.dtype  # noqa: PLR2004
    first = op == "avg" and count & (count - 1) == 0
    tiles = np.empty((2, min(TILE, recv.size)), compute)

    def term(row: Array, scratch: Array) -> Array:
        return np.divide(row, count, out=scratch, dtype=compute) if first else row

    with np.errstate(all="ignore"):  # an overflow is infinity and no warning, as on a GPU
        for start in range(0, recv.size, TILE):
            cut = slice(start, start + TILE)
            out = recv[cut]
            tile, scratch = tiles[:, : out.size]
            total = term(rows[0][cut], tile)
            for row in rows[1:-1]:
                total = np.add(total, term(row[cut], scratch), out=tile, dtype=compute)
            last = term(rows[-1][cut], scratch)
            # Only the last step writes `recv`, and casts as it goes.
            if op == "sum" or first:
                np.add(total, last, out=out, dtype=compute, casting="unsafe")
            else:
                total = np.add(total, last, out=tile, dtype=compute)
                np.divide(total, count, out=out, dtype=compute, casting="unsafe")
