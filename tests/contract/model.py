"""What pack and unpack must yield, bit for bit. Nothing of the package's own arithmetic.

Everything is computed in float64, and rounded by scaling to integers. Sums, and quotients of fp32
values by small integers, rounded from float64 to fp32 are those of fp32 itself (53 >= 2 * 24 + 2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from contract.arrays import FLOATS, numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cupynccl_reduce.layout import Matrix

__all__ = ["assert_same", "awkward", "bits_of", "packed", "reduced", "rounded", "unpacked"]

# dtype -> (digits of its significand, exponent of its least positive value, greatest value)
FORMATS = {
    "float16": (11, -24, 65504.0),
    "bfloat16": (8, -133, float.fromhex("0x1.fep127")),
    "float32": (24, -149, float.fromhex("0x1.fffffep127")),
}


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Round float64 `values` to the nearest in `dtype`, ties to even; stay in float64."""
    if dtype == "float64":
        return values
    digits, least, greatest = FORMATS[dtype]
    with np.errstate(all="ignore"):
        _, exponent = np.frexp(values)
        unit = np.maximum(exponent - digits, least)
        result = np.ldexp(np.rint(np.ldexp(values, -unit)), unit)
        result = np.where(np.isfinite(values), result, values)
        return np.where(np.abs(result) > greatest, np.copysign(np.inf, result), result)


def reduced(
    pieces: Sequence[np.ndarray], source_dtype: str, dtype: str, *, divisor: int = 1
) -> np.ndarray:
    """Return the sum of `pieces` in order, divided, in `dtype`: each step rounded, then the end."""
    if source_dtype not in FLOATS:
        total = np.zeros_like(pieces[0])
        for piece in pieces:
            total = total + piece  # wraps around
        return total
    if len(pieces) == 1 and source_dtype == dtype and divisor == 1:
        return pieces[0]
    step = "float64" if "float64" in (source_dtype, dtype) else "float32"
    with np.errstate(all="ignore"):
        total = pieces[0].astype(np.float64)
        for piece in pieces[1:]:
            total = rounded(total + piece.astype(np.float64), step)
        total = rounded(total / divisor, step)
        return rounded(total, dtype).astype(numpy_dtype(dtype))


def packed(
    matrix: Matrix,
    sources: Sequence[Sequence[np.ndarray]],
    source_dtype: str,
    dtype: str,
    *,
    divisor: int = 1,
    fill: str = "zero",
) -> np.ndarray:
    """Return the flat matrix that holds `sources`, element by element from the definition."""
    result = np.zeros((matrix.rows, matrix.columns), numpy_dtype(dtype))
    for segment, group in zip(matrix.segments, sources, strict=True):
        if group:
            flat = reduced([g.reshape(-1) for g in group], source_dtype, dtype, divisor=divisor)
        else:
            flat = np.full(segment.numel, np.nan if fill == "nan" else 0, numpy_dtype(dtype))
        for row in range(matrix.rows):
            start = row * segment.width
            part = flat[start : min(start + segment.width, segment.numel)]
            result[row, segment.column : segment.column + part.size] = part
    return result.reshape(-1)


def unpacked(
    matrix: Matrix,
    source: np.ndarray,
    targets: Sequence[np.ndarray],
    dtype: str,
    target_dtype: str,
    *,
    accumulate: bool,
) -> list[np.ndarray]:
    """Return what `targets` hold after the matrix `source` was copied over or added to them."""
    rows = source.reshape(matrix.rows, matrix.columns)
    results = []
    for segment, target in zip(matrix.segments, targets, strict=True):
        columns = slice(segment.column, segment.column + segment.width)
        flat = rows[:, columns].reshape(-1)[: segment.numel]
        if not accumulate:
            results.append(reduced([flat], dtype, target_dtype))
        elif dtype not in FLOATS:
            results.append(target + flat)
        else:
            # float64 holds both exactly: one rounding to the step's dtype, and one to the target's.
            step = "float64" if "float64" in (dtype, target_dtype) else "float32"
            with np.errstate(all="ignore"):
                total = rounded(target.astype(np.float64) + flat.astype(np.float64), step)
                results.append(rounded(total, target_dtype).astype(numpy_dtype(target_dtype)))
    return results


def awkward(
    rng: np.random.Generator, shape: int | tuple[int, ...], dtype: str, target: str
) -> np.ndarray:
    """Draw values that catch faults: any bits, plain numbers, and near-ties of `target`."""
    kind = numpy_dtype(dtype)
    numel = int(np.prod(shape))
    any_bits = np.frombuffer(rng.bytes(numel * kind.itemsize), kind).copy()
    if dtype not in FLOATS:
        return any_bits.reshape(shape)
    with np.errstate(all="ignore"):
        plain = rng.normal(size=numel).astype(kind)
        low = rounded(rng.normal(size=numel), target)
        half = np.ldexp(1.0, np.frexp(low)[1] - FORMATS.get(target, (53,))[0] - 1)
        near = low + half * (1 + rng.choice([-1, 0, 1], numel) * 2.0 ** rng.choice([-14, -20]))
        choice = rng.integers(3, size=numel)
        values = np.where(choice == 0, any_bits, np.where(choice == 1, plain, near.astype(kind)))
    return values.reshape(shape)


def bits_of(values: np.ndarray) -> np.ndarray:
    """Return the bits of each element as an unsigned integer."""
    return values.view(f"u{values.itemsize}")


def assert_same(actual: np.ndarray, expected: np.ndarray, *, payload: bool = False) -> None:
    """Compare bit for bit; any NaN equals any other unless its `payload` counts."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    equal = bits_of(actual) == bits_of(expected)
    if not payload and actual.dtype.kind not in "iu":
        with np.errstate(all="ignore"):
            equal |= np.isnan(actual.astype(np.float64)) & np.isnan(expected.astype(np.float64))
    where = np.flatnonzero(~equal)
    assert not where.size, (
        f"{where.size} of {equal.size} differ, first at {where[0]}: "
        f"{actual[where[0]]!r} instead of {expected[where[0]]!r}"
    )
