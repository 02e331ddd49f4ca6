"""Laws of pack and unpack, on every runtime: values bit for bit, and every element written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from contract.arrays import FLOATS, INTEGERS, empty, numpy_dtype, put, source
from contract.model import assert_same, awkward, bits_of, packed, unpacked
from strategies import MEMORY, in_memory

from cupynccl_reduce.layout import Matrix

if TYPE_CHECKING:
    from collections.abc import Sequence

PAIRS = [(s, t) for s in FLOATS for t in FLOATS] + [(name, name) for name in INTEGERS]
NUMELS = (0, 1, 3, 4, 7, 16, 33, 130, 0, 1001)
LONG = (70_001, 5, 33_000)  # longer than the tile of any runtime

pairs = pytest.mark.parametrize(("source_dtype", "dtype"), PAIRS)
all_rows = pytest.mark.parametrize("rows", [1, 2, 3, 4, 8])


def lay_out(numels: Sequence[int], rows: int, dtype: str, *, align: int = 0) -> Matrix:
    align = align or 16 // numpy_dtype(dtype).itemsize
    return Matrix.of(((f"p{i}", n, -(-n // rows)) for i, n in enumerate(numels)), rows, align)


def pack(
    runtime: Any,
    matrix: Matrix,
    sources: Sequence[Sequence[np.ndarray]],
    source_dtype: str,
    dtype: str,
    *,
    divisor: int = 1,
    fill: str = "zero",
) -> np.ndarray:
    stream = runtime.stream()
    kernel = runtime.pack_kernel(matrix, source_dtype, dtype, divisor=divisor)
    target = empty(runtime, matrix.numel, dtype)
    views = [[source(runtime, a, source_dtype, stream) for a in group] for group in sources]
    before = [[a.tobytes() for a in group] for group in sources]
    kernel(views, target.array, fill=fill, stream=stream)
    stream.synchronize()
    assert [[a.tobytes() for a in group] for group in sources] == before
    return target.get()


def check_pack(runtime: Any, matrix: Matrix, sources: Any, *dtypes: str, **options: Any) -> None:
    actual = pack(runtime, matrix, sources, *dtypes, **options)
    assert_same(actual, packed(matrix, sources, *dtypes, **options))


@pairs
@all_rows
def test_pack_casts_sums_divides_and_pads(
    runtime: Any, source_dtype: str, dtype: str, rows: int
) -> None:
    rng = np.random.default_rng([rows, PAIRS.index((source_dtype, dtype))])
    matrix = lay_out(NUMELS, rows, dtype)
    for divisor in (1, 3, 4, 7) if dtype in FLOATS else (1,):
        for most in (1, 3):
            counts = rng.integers(most == 1, most + 1, len(NUMELS))
            sources = [
                [awkward(rng, numel, source_dtype, dtype) for _ in range(count)]
                for numel, count in zip(NUMELS, counts, strict=True)
            ]
            check_pack(runtime, matrix, sources, source_dtype, dtype, divisor=divisor)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("fill", ["zero", "nan"])
@all_rows
def test_a_segment_without_sources_is_filled_and_its_padding_is_zero(
    runtime: Any, dtype: str, fill: str, rows: int
) -> None:
    rng = np.random.default_rng(0)
    matrix = lay_out(NUMELS, rows, dtype)
    some = [[awkward(rng, n, dtype, dtype)] if i % 2 else [] for i, n in enumerate(NUMELS)]
    for sources in (some, [[] for _ in NUMELS]):
        check_pack(runtime, matrix, sources, dtype, dtype, fill=fill)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_are_filled_with_zero(runtime: Any, dtype: str) -> None:
    check_pack(runtime, lay_out(NUMELS, 3, dtype), [[] for _ in NUMELS], dtype, dtype)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_a_pack_of_equal_dtypes_copies_the_bits(runtime: Any, dtype: str) -> None:
    # Payloads of NaN, quiet and signalling, and the sign of zero.
    rng = np.random.default_rng(1)
    kind = numpy_dtype(dtype)
    every = np.frombuffer(rng.bytes(4096 * kind.itemsize), kind).copy()
    if dtype in FLOATS:
        every[:2] = 0.0, -0.0
        top = bits_of(np.array([-np.inf], kind))
        every[2:34] = (top + np.arange(32, dtype=top.dtype)).view(kind)
    matrix = lay_out((every.size,), 3, dtype)
    actual = pack(runtime, matrix, [[every]], dtype, dtype)
    assert_same(actual, packed(matrix, [[every]], dtype, dtype), payload=True)


@pytest.mark.parametrize("layout", MEMORY)
@pytest.mark.parametrize(("source_dtype", "dtype"), [("float32", "bfloat16"), ("int8", "int8")])
def test_sources_may_lie_in_memory_in_any_way(
    runtime: Any, source_dtype: str, dtype: str, layout: str
) -> None:
    rng = np.random.default_rng(2)
    shapes = ((), (1,), (5,), (3, 7), (2, 3, 4), (0, 3), (33, 65))
    numels = [int(np.prod(shape)) for shape in shapes]
    sources = [
        [in_memory(awkward(rng, shape, source_dtype, dtype), layout) for _ in range(1 + i % 2)]
        for i, shape in enumerate(shapes)
    ]
    check_pack(runtime, lay_out(numels, 2, dtype), sources, source_dtype, dtype)


@pytest.mark.parametrize(
    ("source_dtype", "dtype"), [("float32", "float32"), ("bfloat16", "float32"), ("uint8", "uint8")]
)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_segment_may_be_longer_than_a_tile(
    runtime: Any, source_dtype: str, dtype: str, rows: int
) -> None:
    rng = np.random.default_rng(3)
    matrix = lay_out(LONG, rows, dtype)
    sources = [[awkward(rng, n, source_dtype, dtype) for _ in range(2)] for n in LONG]
    check_pack(runtime, matrix, sources, source_dtype, dtype)


def test_columns_need_no_alignment(runtime: Any) -> None:
    rng = np.random.default_rng(4)
    for dtype in ("float16", "float32", "int8"):
        matrix = lay_out(NUMELS, 3, dtype, align=1)
        sources = [[awkward(rng, n, dtype, dtype)] for n in NUMELS]
        check_pack(runtime, matrix, sources, dtype, dtype)


def test_a_matrix_may_have_thousands_of_segments(runtime: Any) -> None:
    rng = np.random.default_rng(5)
    numels = tuple(int(n) for n in rng.integers(0, 5, 1500))
    sources = [[awkward(rng, n, "float32", "float32")] * (i % 3) for i, n in enumerate(numels)]
    matrix = lay_out(numels, 2, "float32")
    check_pack(runtime, matrix, sources, "float32", "float32", divisor=3)
    # Exact in any order: one launch on a GPU sums fewer sources than these, so it sums in parts.
    many = [[rng.integers(-9, 9, 9).astype("f4") for _ in range(700)], [np.ones(3, "f4")]]
    check_pack(runtime, lay_out((9, 3), 2, "float32"), many, "float32", "float32")


def test_a_matrix_may_be_empty(runtime: Any) -> None:
    matrix = lay_out((0, 0), 2, "float32")
    nothing = [[np.empty(0, np.float32)], []]
    check_pack(runtime, matrix, nothing, "float32", "float32")


def check_unpack(
    runtime: Any, matrix: Matrix, dtype: str, target_dtype: str, rng: Any, *, accumulate: bool
) -> None:
    # The padding is garbage that no target may see.
    values = awkward(rng, matrix.numel, dtype, target_dtype)
    old = [awkward(rng, s.numel, target_dtype, target_dtype) for s in matrix.segments]
    stream = runtime.stream()
    kernel = runtime.unpack_kernel(matrix, dtype, target_dtype)
    held = put(runtime, values, dtype)
    targets = [put(runtime, a, target_dtype, shift=i % 3) for i, a in enumerate(old)]
    views = [target.view(stream) for target in targets]
    kernel(held.array, views, accumulate=accumulate, stream=stream)
    stream.synchronize()
    assert held.get().tobytes() == values.tobytes()
    expected = unpacked(matrix, values, old, dtype, target_dtype, accumulate=accumulate)
    for target, wanted in zip(targets, expected, strict=True):
        assert_same(target.get(), wanted, payload=dtype == target_dtype and not accumulate)


@pairs
@all_rows
@pytest.mark.parametrize("accumulate", [False, True])
def test_unpack_casts_and_adds_with_one_rounding(
    runtime: Any, source_dtype: str, dtype: str, rows: int, accumulate: bool
) -> None:
    rng = np.random.default_rng([rows, PAIRS.index((source_dtype, dtype))])
    matrix = lay_out(NUMELS, rows, source_dtype)
    check_unpack(runtime, matrix, source_dtype, dtype, rng, accumulate=accumulate)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("rank", range(3))
def test_a_rank_unpacks_its_own_row(runtime: Any, rank: int, accumulate: bool) -> None:
    rng = np.random.default_rng(rank)
    for numels in (NUMELS, LONG):
        row = lay_out(numels, 3, "bfloat16").row(rank)
        check_unpack(runtime, row, "bfloat16", "float32", rng, accumulate=accumulate)


def test_unpack_of_unaligned_and_of_very_many_segments(runtime: Any) -> None:
    rng = np.random.default_rng(6)
    odd = lay_out(NUMELS, 3, "float32", align=1)
    many = lay_out([int(n) for n in rng.integers(0, 4, 600)], 2, "float32")
    for matrix in (odd, many):
        check_unpack(runtime, matrix, "float32", "float32", rng, accumulate=True)


def test_pack_then_unpack_gives_the_arrays_back(runtime: Any) -> None:
    rng = np.random.default_rng(7)
    for rows in (1, 3, 8):
        matrix = lay_out(NUMELS, rows, "uint64")
        arrays = [awkward(rng, n, "uint64", "uint64") for n in NUMELS]
        packed_bits = pack(runtime, matrix, [[a] for a in arrays], "uint64", "uint64")
        held = put(runtime, packed_bits, "uint64")
        targets = [empty(runtime, n, "uint64") for n in NUMELS]
        stream = runtime.stream()
        kernel = runtime.unpack_kernel(matrix, "uint64", "uint64")
        kernel(held.array, [t.view(stream) for t in targets], accumulate=False, stream=stream)
        stream.synchronize()
        for target, array in zip(targets, arrays, strict=True):
            assert_same(target.get(), array)
