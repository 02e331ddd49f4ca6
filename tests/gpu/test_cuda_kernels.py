"""Pack and unpack on a GPU against a NumPy model, bit for bit: every dtype pair, odd layouts."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import cupy
import ml_dtypes
import numpy as np
import pytest

from cupynccl_reduce.dtypes import DTYPES
from cupynccl_reduce.errors import LayoutError
from cupynccl_reduce.layout import Matrix
from cupynccl_reduce.runtimes.cuda import CudaRuntime
from cupynccl_reduce.runtimes.kernels import MAX_LIST, sum_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

pytestmark = pytest.mark.gpu

FLOATS = [name for name, dtype in DTYPES.items() if dtype.is_float]
INTEGERS = [name for name, dtype in DTYPES.items() if not dtype.is_float]
PAIRS = [*itertools.product(FLOATS, FLOATS), *((name, name) for name in INTEGERS)]
NUMELS = [7, 0, 1, 64, 13, 4800, 96, 100_003, 768]  # short and long rows, odd and even, none

RNG = np.random.default_rng(20)
Array = Any
Values = np.ndarray[Any, Any]


# ---- the model --------------------------------------------------------------------------------


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def bits_of(values: Values) -> Values:
    return values.view(f"u{values.itemsize}")


def random_bits(numel: int, dtype: str) -> Values:
    """Return any values at all: subnormals, infinities, NaNs with payloads, both zeros."""
    nbytes = numel * DTYPES[dtype].itemsize
    return RNG.integers(0, 256, nbytes, np.uint8).view(numpy_dtype(dtype))


def random_numbers(numel: int, dtype: str) -> Values:
    if not DTYPES[dtype].is_float:
        return random_bits(numel, dtype)
    return RNG.standard_normal(numel).astype(numpy_dtype(dtype))


def narrow(values: Values, dtype: str) -> Values:
    """Round once, to nearest even. ml_dtypes would go from float64 to bfloat16 through float32."""
    target = numpy_dtype(dtype)
    if values.dtype == target:
        return values
    if values.dtype == np.float64 and dtype == "bfloat16":
        near = values.astype(np.float32)
        beyond = np.abs(near.astype(np.float64)) > np.abs(values)
        chopped = np.where(beyond, np.nextafter(near, np.float32(0)), near)
        inexact = (chopped.astype(np.float64) != values) & ~np.isnan(values)
        values = (bits_of(chopped) | inexact).view(np.float32)
    return values.astype(target)


def total(terms: Sequence[Values], dtype: str) -> Values:
    result = terms[0].astype(numpy_dtype(dtype))
    for term in terms[1:]:
        result = result + term.astype(result.dtype)
    return result


def packed(
    matrix: Matrix,
    sources: Sequence[Sequence[Values]],
    dtypes: tuple[str, str],
    divisor: int,
    fill: str,
) -> Values:
    """Return the matrix that pack must give: sums in fp32 or fp64, a division, one rounding."""
    source, target = dtypes
    result = np.zeros((matrix.rows, matrix.columns), numpy_dtype(target))
    for segment, group in zip(matrix.segments, sources, strict=True):
        if not group:
            flat = np.full(segment.numel, np.nan if fill == "nan" else 0, result.dtype)
        elif len(group) == 1 and source == target and divisor == 1:
            flat = group[0]
        else:
            compute = sum_dtype(source, target)
            if len(group) > MAX_LIST:
                starts = range(0, len(group), MAX_LIST)
                group = [total(group[i : i + MAX_LIST], compute) for i in starts]  # noqa: PLW2901
            summed = total(group, compute)
            if divisor != 1:
                summed = summed / summed.dtype.type(divisor)
            flat = narrow(summed, target)
        for row in range(matrix.rows):
            start, stop = segment.interval(row)
            result[row, segment.column : segment.column + stop - start] = flat[start:stop]
    return result


def assert_same(got: Values, expected: Values, *, exact: bool, where: str) -> None:
    """Compare bit for bit; NaNs only as NaNs unless `exact`."""
    got, expected = got.reshape(-1), expected.reshape(-1)
    equal = bits_of(got) == bits_of(expected)
    if not exact and expected.dtype.kind not in "iu":
        equal |= np.isnan(got) & np.isnan(expected)
    wrong = np.flatnonzero(~equal)
    some = [(int(i), got[i], expected[i]) for i in wrong[:5]]
    assert len(wrong) == 0, f"{where}: {len(wrong)} of {len(got)} differ: {some}"


# ---- helpers ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runtime() -> Iterator[CudaRuntime]:
    runtime = CudaRuntime(0)
    yield runtime
    runtime.close()


@pytest.fixture(scope="module")
def stream(runtime: CudaRuntime) -> Any:
    return runtime.stream()


def device_array(runtime: CudaRuntime, values: Values, dtype: str, *, skip: int = 0) -> Array:
    """Return a copy on the device that starts `skip` elements past a 16-byte boundary."""
    itemsize = DTYPES[dtype].itemsize
    block = runtime.allocate((len(values) + skip) * itemsize)
    if len(values):
        block[skip * itemsize :].set(values.view(np.uint8))
    return runtime.view(block, skip * itemsize, len(values), dtype)


def lay_out(numels: Sequence[int], rows: int, dtypes: tuple[str, str], align: int = 0) -> Matrix:
    itemsize = min(DTYPES[dtype].itemsize for dtype in dtypes)
    flats = [(f"p{i}", numel, -(-numel // rows)) for i, numel in enumerate(numels)]
    return Matrix.of(flats, rows, align or 16 // itemsize)


class Guarded:
    """A device array with a pattern before and after it, which nothing may change."""

    def __init__(self, runtime: CudaRuntime, numel: int, dtype: str, *, skip: int = 0) -> None:
        self.dtype = dtype
        self.start = 64 + skip * DTYPES[dtype].itemsize
        self.stop = self.start + numel * DTYPES[dtype].itemsize
        self.block = runtime.allocate(self.stop + 64)
        self.block.fill(0xA5)
        self.array = runtime.view(self.block, self.start, numel, dtype)

    def get(self) -> Values:
        everything = self.block.get()
        outside = np.delete(everything, np.s_[self.start : self.stop])
        assert (outside == 0xA5).all(), "written outside the array"
        return everything[self.start : self.stop].view(numpy_dtype(self.dtype))


def check_pack(
    runtime: CudaRuntime,
    stream: Any,
    matrix: Matrix,
    values: Sequence[Sequence[Values]],
    dtypes: tuple[str, str],
    *,
    divisor: int = 1,
    fill: Any = "zero",
    skip: int = 0,
    exact: bool = False,
) -> None:
    pack = runtime.pack_kernel(matrix, *dtypes, divisor=divisor)
    views = [
        [runtime.read(device_array(runtime, v, dtypes[0], skip=skip), stream) for v in group]
        for group in values
    ]
    target = Guarded(runtime, matrix.numel, dtypes[1], skip=skip)
    cupy.cuda.Stream.null.synchronize()
    pack(views, target.array, fill=fill, stream=stream)
    stream.synchronize()
    expected = packed(matrix, values, dtypes, divisor, fill)
    where = f"{dtypes}, {matrix.rows} rows, divisor {divisor}, skip {skip}"
    assert_same(target.get(), expected, exact=exact, where=where)


# ---- values -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_pack_values(runtime: CudaRuntime, stream: Any, source: str, target: str) -> None:
    dtypes = source, target
    floats = DTYPES[target].is_float
    cases = [(1, 1, 0), (2, 2, 1), (3, 3, 0), (4, 7, 0), (8, 8, 3), (3, 1, 1)]
    with np.errstate(all="ignore"):
        for rows, divisor, skip in cases:
            matrix = lay_out(NUMELS, rows, dtypes, align=1 if rows == 4 else 0)
            values = [[random_bits(numel, source)] for numel in NUMELS]
            scale = divisor if floats else 1
            check_pack(
                runtime, stream, matrix, values, dtypes, divisor=scale, skip=skip,
                exact=source == target and scale == 1,
            )  # fmt: skip


@pytest.mark.parametrize(
    ("source", "target"),
    [("bfloat16", "bfloat16"), ("float16", "float32"), ("float32", "float32"),
     ("float64", "bfloat16"), ("float32", "float64"), ("int8", "int8"), ("uint32", "uint32"),
     ("int64", "int64")],
)  # fmt: skip
def test_pack_sums_a_segments_sources(
    runtime: CudaRuntime, stream: Any, source: str, target: str
) -> None:
    dtypes = source, target
    counts = [3, 1, 2, 0, 1, 5, 2, 4, 2]
    floats = DTYPES[target].is_float
    for rows, divisor, skip in [(1, 3, 0), (2, 1, 1), (3, 7, 0)]:
        matrix = lay_out(NUMELS, rows, dtypes)
        values = [
            [random_numbers(numel, source) for _ in range(count)]
            for numel, count in zip(NUMELS, counts, strict=True)
        ]
        fill = "nan" if floats else "zero"
        scale = divisor if floats else 1
        check_pack(runtime, stream, matrix, values, dtypes, divisor=scale, skip=skip, fill=fill)


@pytest.mark.parametrize("count", [480, 496, 500, 1000])
def test_any_number_of_sources(runtime: CudaRuntime, stream: Any, count: int) -> None:
    dtypes = "bfloat16", "bfloat16"
    numels = [1 + i % 40 for i in range(count)]
    matrix = lay_out(numels, 2, dtypes)
    single = [[random_numbers(numel, "bfloat16")] for numel in numels]
    check_pack(runtime, stream, matrix, single, dtypes, divisor=2)
    double = [group * 2 for group in single]
    check_pack(runtime, stream, matrix, double, dtypes, divisor=2)
    # All of one segment, between two others.
    matrix = lay_out([300, 1003, 300], 2, dtypes)
    values = [[random_numbers(1003, "bfloat16") for _ in range(count)]]
    ends = [random_numbers(300, "bfloat16")]
    check_pack(runtime, stream, matrix, [ends, *values, ends], dtypes, divisor=3)
    matrix = lay_out([300, 1003, 300], 2, ("int32", "int32"))
    integers = [random_numbers(1003, "int32") for _ in range(count)]
    check_pack(runtime, stream, matrix, [[], integers, []], ("int32", "int32"))


def test_bits_are_kept_where_nothing_is_computed(runtime: CudaRuntime, stream: Any) -> None:
    for dtype in FLOATS:
        matrix = lay_out(NUMELS, 2, (dtype, dtype))
        values = [[random_bits(numel, dtype)] for numel in NUMELS]
        for fill in ("zero", "nan"):
            check_pack(runtime, stream, matrix, values, (dtype, dtype), fill=fill, exact=True)


def test_integers_take_no_nan_and_no_division(runtime: CudaRuntime, stream: Any) -> None:
    matrix = lay_out([4], 1, ("int32", "int32"))
    with pytest.raises(LayoutError, match="only summed"):
        runtime.pack_kernel(matrix, "int32", "int32", divisor=2)
    with pytest.raises(LayoutError, match="one dtype"):
        runtime.pack_kernel(matrix, "int32", "float32")
    pack = runtime.pack_kernel(matrix, "int32", "int32")
    with pytest.raises(LayoutError, match="nan"):
        pack([[]], runtime.allocate(16).view(np.int32), fill="nan", stream=stream)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8", "float64"])
def test_strided_sources(runtime: CudaRuntime, stream: Any, dtype: str) -> None:
    base = random_bits(24 * 10, dtype)
    whole = runtime.read(device_array(runtime, base, dtype), stream)
    itemsize = DTYPES[dtype].itemsize
    cases = {  # shape, strides and first element, in elements
        "transposed": ((10, 24), (1, 10), 0),
        "expanded": ((240,), (0,), 17),
        "expanded rows": ((24, 10), (0, 1), 30),
        "reversed": ((24, 10), (-10, -1), 239),
        "every other": ((120,), (2,), 1),
        "one element": ((1, 1), (5, 7), 3),
        "none": ((0, 3), (9, 9), 0),
    }
    for name, (shape, strides, first) in cases.items():
        numel = math.prod(shape)
        view = replace(
            whole, pointer=whole.pointer + first * itemsize, shape=shape, strides=strides
        )
        places = np.indices(shape).reshape(len(shape), -1)
        expected = base[first + np.array(strides) @ places]
        matrix = lay_out([numel, 5], 2, (dtype, dtype))
        pack = runtime.pack_kernel(matrix, dtype, dtype)
        target = Guarded(runtime, matrix.numel, dtype)
        cupy.cuda.Stream.null.synchronize()
        pack([[view], []], target.array, fill="zero", stream=stream)
        stream.synchronize()
        model = packed(matrix, [[expected], []], (dtype, dtype), 1, "zero")
        assert_same(target.get(), model, exact=True, where=name)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_unpack_values(runtime: CudaRuntime, stream: Any, source: str, target: str) -> None:
    for rows, skip, accumulate in itertools.product((1, 3, 8), (0, 1), (False, True)):
        matrix = lay_out(NUMELS, rows, (source, target), align=1 if rows == 8 else 0)
        cells = random_bits(matrix.numel, source)
        memory = device_array(runtime, cells, source, skip=skip)
        unpack = runtime.unpack_kernel(matrix, source, target)
        old, targets, views = [], [], []
        for numel in NUMELS:
            old.append(random_bits(numel, target))
            targets.append(Guarded(runtime, numel, target, skip=skip))
            targets[-1].array.view(np.uint8)[...] = cupy.asarray(old[-1].view(np.uint8))
            views.append(runtime.read(targets[-1].array, stream))
        cupy.cuda.Stream.null.synchronize()
        unpack(memory, views, accumulate=accumulate, stream=stream)
        stream.synchronize()
        where = f"{source} -> {target}, {rows} rows, skip {skip}, accumulate {accumulate}"
        grid = cells.reshape(matrix.rows, matrix.columns)
        for segment, guarded, before in zip(matrix.segments, targets, old, strict=True):
            rows_of = grid[:, segment.column : segment.column + segment.width]
            flat = rows_of.reshape(-1)[: segment.numel]
            with np.errstate(all="ignore"):
                if accumulate:
                    flat = total([before, flat], sum_dtype(source, target))
                elif source != target:
                    flat = flat.astype(numpy_dtype(sum_dtype(source, target)))
                expected = narrow(flat, target)
            exact = source == target and not accumulate
            assert_same(guarded.get(), expected, exact=exact, where=f"{where}, {segment.name}")


def test_unpack_of_many_targets_and_of_strided_ones(runtime: CudaRuntime, stream: Any) -> None:
    matrix = lay_out([9] * 1000, 1, ("float32", "float32"))
    cells = random_numbers(matrix.numel, "float32")
    memory = device_array(runtime, cells, "float32")
    block = runtime.allocate(1000 * 36).view(np.float32)
    views = [runtime.read(block[i * 9 : i * 9 + 9], stream) for i in range(1000)]
    unpack = runtime.unpack_kernel(matrix, "float32", "float32")
    cupy.cuda.Stream.null.synchronize()
    unpack(memory, views, accumulate=False, stream=stream)
    stream.synchronize()
    assert (block.get().reshape(1000, 9) == cells.reshape(1000, -1)[:, :9]).all()
    views[3] = replace(views[3], strides=(2,))
    with pytest.raises(LayoutError, match="'p3'"):
        unpack(memory, views, accumulate=False, stream=stream)


def test_more_elements_than_a_32_bit_index(runtime: CudaRuntime, stream: Any) -> None:
    numel = (1 << 31) + 5003
    if cupy.cuda.runtime.memGetInfo()[0] < 5 * numel:
        pytest.skip("needs 10 GiB of free memory")
    pattern = cupy.arange(-(-numel // 8) * 2, dtype=np.uint32) * np.uint32(2654435761)
    source = pattern.view(np.int8)[:numel]
    for rows in (1, 2):
        matrix = lay_out([11, numel], rows, ("int8", "int8"))
        target = runtime.allocate(matrix.numel)
        back = runtime.allocate(numel)
        views = [[], [runtime.read(source, stream)]]
        pack = runtime.pack_kernel(matrix, "int8", "int8")
        unpack = runtime.unpack_kernel(matrix, "int8", "int8")
        cupy.cuda.Stream.null.synchronize()
        pack(views, target.view(np.int8), fill="zero", stream=stream)
        outs = [runtime.read(runtime.allocate(11).view(np.int8), stream)]
        outs.append(runtime.read(back.view(np.int8), stream))
        unpack(target.view(np.int8), outs, accumulate=False, stream=stream)
        stream.synchronize()
        segment = matrix.segments[1]
        for row in range(rows):
            start, stop = segment.interval(row)
            at = row * matrix.columns + segment.column
            assert bool((target[at : at + stop - start] == source[start:stop].view("u1")).all())
        assert bool((back == source.view("u1")).all())
        del target, back, outs
        runtime._pools.memory.free_all_blocks()
