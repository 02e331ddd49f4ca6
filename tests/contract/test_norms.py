"""Laws of the norm's kernels, on every runtime: values in float64, one order, one rounding."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from contract.arrays import FLOATS, numpy_dtype, put
from contract.model import assert_same, rounded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from contract.arrays import Buffer

EXACT = (1, 2, math.inf)
ORDERS = (0.5, *EXACT, 3)
NUMELS = (0, 1, 3, 7, 16, 130, 0, 1001, 70_001)  # the last is longer than the tile of any runtime

orders = pytest.mark.parametrize("p", ORDERS)


class Norm:
    """The kernel over some arrays, each a few elements off a 64-byte boundary."""

    def __init__(self, runtime: Any, values: Sequence[np.ndarray], p: float) -> None:
        self.runtime = runtime
        self.stream = runtime.stream()
        self.buffers: list[Buffer] = []
        for i, array in enumerate(values):
            self.buffers.append(put(runtime, array, array.dtype.name, shift=i % 3))
        self.kernel = runtime.norm_kernel([b.view(self.stream) for b in self.buffers], p)

    def measure(self, start: float = 0.0) -> float:
        out = put(self.runtime, np.array([-1.0]), "float64")
        self.kernel.measure(out.array, start=start, stream=self.stream)
        self.stream.synchronize()
        return float(out.get()[0])

    def finish(self, parts: list[float], max_norm: float | None, scale: Any) -> tuple[float, float]:
        held = put(self.runtime, np.array(parts), "float64")
        out = put(self.runtime, np.array([-1.0, -1.0]), "float64")
        if isinstance(scale, np.ndarray):
            scale = put(self.runtime, scale, scale.dtype.name).view(self.stream)
        arrays = held.array, out.array
        self.kernel.finish(*arrays, max_norm=max_norm, loss_scale=scale, stream=self.stream)
        self.stream.synchronize()
        assert held.get().tolist() == pytest.approx(parts, nan_ok=True)
        norm, factor = out.get().tolist()
        return norm, factor

    def scale(self, factor: float) -> list[np.ndarray]:
        held = put(self.runtime, np.array([factor]), "float64")
        self.kernel.scale(held.array, stream=self.stream)
        self.stream.synchronize()
        return self.get()

    def get(self) -> list[np.ndarray]:
        return [buffer.get().copy() for buffer in self.buffers]


def model(values: Sequence[np.ndarray], p: float) -> float:
    flat = np.abs(np.concatenate([a.astype(np.float64) for a in values]))
    if math.isinf(p):
        return float(flat.max(initial=0.0))
    return math.fsum(flat**p)


def draw(dtype: str, seed: int = 0, numels: Sequence[int] = NUMELS) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(n).astype(numpy_dtype(dtype)) for n in numels]


@orders
@pytest.mark.parametrize("dtype", FLOATS)
def test_measure_sums_in_float64_and_reads_only(runtime: Any, dtype: str, p: float) -> None:
    values = draw(dtype)
    norm = Norm(runtime, values, p)
    wanted = model(values, p)
    assert norm.measure() == pytest.approx(wanted, rel=1e-13)
    assert {norm.measure() for _ in range(3)} == {norm.measure()}
    assert [a.tobytes() for a in norm.get()] == [a.tobytes() for a in values]
    for array in values:  # integers: exact in any order, but for roots and cubes by pow()
        array[...] = np.rint(np.clip(array.astype("f4") * 3, -8, 8)).astype(array.dtype)
    error = 0 if p in EXACT else 1e-13
    assert Norm(runtime, values, p).measure() == pytest.approx(model(values, p), rel=error, abs=0)


@orders
def test_arrays_of_all_dtypes_are_one_vector(runtime: Any, p: float) -> None:
    values = [a for dtype in FLOATS for a in draw(dtype, numels=(5, 0, 40_000))]
    values = values[::2] + values[1::2]
    assert Norm(runtime, values, p).measure() == pytest.approx(model(values, p), rel=1e-13)


@orders
def test_nothing_measures_zero(runtime: Any, p: float) -> None:
    for values in ([], [np.empty(0, "f4")], [np.zeros(5, "f4"), np.array([-0.0], "f4")]):
        norm = Norm(runtime, values, p)
        assert norm.measure() == 0.0
        assert norm.finish([0.0, 0.0], 1.0, 2.0) == (0.0, 0.5)
        norm.scale(2.0)


@orders
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows_wherever_it_is(
    runtime: Any, dtype: str, bad: float, p: float
) -> None:
    for where in (0, 6, 39_999):
        values = [np.ones(3, numpy_dtype(dtype)), np.ones(40_000, numpy_dtype(dtype))]
        values[1][where] = bad
        total = Norm(runtime, values, p).measure()
        assert math.isnan(total) if math.isnan(bad) else total == math.inf
    norm = Norm(runtime, [np.ones(3, numpy_dtype(dtype))], p)
    assert math.isnan(norm.measure(start=math.nan))
    for parts in ([bad, 1.0], [1.0, bad]):
        assert not math.isfinite(norm.finish([abs(x) for x in parts], None, 1.0)[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_subnormal_numbers_count(runtime: Any, dtype: str) -> None:
    least = {"float32": 2.0**-149, "bfloat16": 2.0**-133, "float64": 2.0**-1074}[dtype]
    values = [np.full(3, least, numpy_dtype(dtype))]
    assert Norm(runtime, values, 1).measure() == 3 * least
    assert Norm(runtime, values, math.inf).measure() == least
    assert Norm(runtime, values, 2).measure() == 3 * least * least
    (kept,) = Norm(runtime, values, 2).scale(0.75)
    assert (kept.astype("f8") == least).all()  # rounded to the nearest, and not flushed


@orders
def test_finish_follows_torchs_formula(runtime: Any, p: float) -> None:
    norm = Norm(runtime, [np.ones(1, "f4")], p)
    for parts in ([9.0], [9.0, 16.0], [0.25] * 1500):
        total = max(parts) if math.isinf(p) else math.fsum(parts)
        whole = total if math.isinf(p) else total ** (1 / p)
        for max_norm in (None, 0.0, 1.0, 1e9, math.inf):
            for scale in (1.0, 8.0, 3.0, np.array([8.0], "f4"), np.array([3.0], "f8")):
                number = float(np.asarray(scale).reshape(()))
                wanted = whole / number
                factor = 1.0 if max_norm is None else min(1.0, max_norm / (wanted + 1e-6))
                actual = norm.finish(parts, max_norm, scale)
                assert actual == pytest.approx((wanted, factor / number), rel=2e-15)


def test_finish_of_what_is_not_finite_is_torchs(runtime: Any) -> None:
    norm = Norm(runtime, [np.ones(1, "f4")], 2)
    assert norm.finish([math.inf], 1.0, 1.0) == (math.inf, 0.0)
    assert norm.finish([math.inf], None, 2.0) == (math.inf, 0.5)
    assert all(map(math.isnan, norm.finish([math.nan], 1.0, 1.0)))
    got, factor = norm.finish([math.nan], None, 2.0)
    assert math.isnan(got)
    assert factor == 0.5
    got, factor = norm.finish([math.inf], math.inf, 1.0)
    assert got == math.inf
    assert math.isnan(factor)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("factor", [0.5, 1 / 3, 2.0**-16, 1e-30, 7.7, 0.0, math.nan])
def test_scale_multiplies_in_float64_and_rounds_once(
    runtime: Any, dtype: str, factor: float
) -> None:
    values = draw(dtype)
    values[2][:2] = math.inf, -0.0
    for actual, array in zip(Norm(runtime, values, 2).scale(factor), values, strict=True):
        with np.errstate(invalid="ignore"):
            wanted = rounded(array.astype("f8") * factor, dtype)
        assert_same(actual, wanted.astype(numpy_dtype(dtype)))


def test_a_factor_of_one_leaves_every_bit(runtime: Any) -> None:
    payloads = np.array([0x7F800001, 0xFFC12345, 0x80000000, 1], np.uint32).view(np.float32)
    (kept,) = Norm(runtime, [payloads], 2).scale(1.0)
    assert kept.tobytes() == payloads.tobytes()
