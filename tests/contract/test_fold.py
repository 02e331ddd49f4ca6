"""The sum over ranks on the host: rank order, one rounding, in place, for any length."""

from __future__ import annotations

import numpy as np
import pytest
from contract.arrays import FLOATS, INTEGERS, numpy_dtype
from contract.laws import folded
from contract.model import assert_same, awkward

from cupynccl_reduce.communicators.fold import TILE, fold

LENGTHS = (0, 1, 1000, TILE - 1, TILE, 2 * TILE + 3)


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("count", [2, 3, 5])
def test_floats_are_summed_in_order_and_rounded_once(dtype: str, op: str, count: int) -> None:
    rng = np.random.default_rng([count, len(op), *dtype.encode()])
    for numel in LENGTHS:
        rows = [awkward(rng, numel, dtype, dtype) for _ in range(count)]
        expected = folded(rows, dtype, op)
        apart = np.ones(numel, rows[0].dtype)
        before = [row.tobytes() for row in rows]
        fold(rows, apart, dtype, op)
        assert_same(apart, expected)
        assert [row.tobytes() for row in rows] == before
    for place in range(count):
        copies = [row.copy() for row in rows]
        fold(copies, copies[place], dtype, op)
        assert_same(copies[place], expected)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_wrap_around(dtype: str) -> None:
    rng = np.random.default_rng(0)
    for numel in LENGTHS:
        rows = [awkward(rng, numel, dtype, dtype) for _ in range(3)]
        recv = np.ones(numel, numpy_dtype(dtype))
        fold(rows, recv, dtype, "sum")
        assert_same(recv, rows[0] + rows[1] + rows[2])


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_one_row_is_copied_bit_for_bit(dtype: str) -> None:
    kind = numpy_dtype(dtype)
    row = np.frombuffer(np.random.default_rng(1).bytes(4096 * kind.itemsize), kind)
    recv = np.ones(4096, kind)
    fold([row], recv, dtype, "sum")
    assert_same(recv, row, payload=True)
