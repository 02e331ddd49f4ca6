"""The sum over ranks on the host: in rank order, 16-bit floats in fp32. No transport."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

import numpy as np

from cupynccl_reduce.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cupynccl_reduce.protocols import Array, Op

__all__ = ["fold"]

TILE = 1 << 15  # elements: the temporaries stay in the cache


def fold(rows: Sequence[Array], recv: Array, dtype: str, op: Op) -> None:
    """Write the sum of `rows` (their mean for "avg") into `recv`, which may be one of them.

    16-bit floats are summed in fp32 and rounded once. The order is that of `rows`, so the result
    does not depend on how an array is cut. One row is copied bit for bit.
    """
    compute = np.float32 if DTYPES[dtype].itemsize == 2 else recv.dtype  # noqa: PLR2004
    with np.errstate(all="ignore"):  # an overflow is infinity and no warning, as on a GPU
        for start in range(0, recv.size, TILE):
            tile = slice(start, start + TILE)
            if len(rows) == 1:
                recv[tile] = rows[0][tile]
                continue
            total = reduce(np.add, (row[tile].astype(compute, copy=False) for row in rows))
            recv[tile] = np.divide(total, len(rows)) if op == "avg" else total
