"""CudaNorm without a GPU: its kernels are played on host memory, from the arguments they get."""

from __future__ import annotations

import ctypes
import math
import re
import struct
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupynccl_reduce.dlpack import View
from cupynccl_reduce.runtimes import cuda_norm
from cupynccl_reduce.runtimes.cuda_norm import CudaNorm

STREAM = object()


def at(address: int, numel: int, dtype: str) -> np.ndarray:
    nbytes = numel * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype)


def device(array: np.ndarray) -> Any:
    """Return what stands for a CuPy array over this memory."""
    return SimpleNamespace(
        data=SimpleNamespace(ptr=array.ctypes.data), size=array.size, array=array
    )


class Played:
    """As much of CudaRuntime as CudaNorm asks for; kernels run at once, as norm.cu has them."""

    current = nullcontext()

    def __init__(self) -> None:
        self.launches: list[str] = []
        self.allocated = 0

    def upload(self, table: np.ndarray) -> Any:
        return device(table.copy())

    def allocate(self, nbytes: int) -> Any:
        self.allocated += 1
        return device(np.full(nbytes, 0xA5, np.uint8))

    def function(self, name: str) -> Any:
        kernel, arguments = re.fullmatch(r"(\w+)<(.*)>", name).groups()  # type: ignore[union-attr]

        def launch(grid: Any, block: Any, arguments_given: Any, *, stream: Any) -> None:
            assert stream is STREAM
            folds = kernel in ("fold", "finish")
            assert block == ((cuda_norm.FOLDERS if folds else cuda_norm.THREADS),)
            self.launches.append(name)
            (by_value,) = arguments_given
            assert by_value.shape == (1,)
            fields = struct.unpack("=QQQQqddddII", by_value.tobytes())
            getattr(self, f"_{kernel}")(grid[0], arguments.split(", "), *fields)

        return launch

    def _tiles(self, tiles: int, count: int, dtype: str) -> list[np.ndarray]:
        return [at(int(a), int(n), dtype) for a, n in at(tiles, 2 * count, "u8").reshape(-1, 2)]

    def _measure(self, blocks: int, types: Any, *fields: Any) -> None:
        dtype, power = types
        tiles, _, out, _, _, p, *_ = fields
        sums = at(out, blocks, "f8")
        p = p if power == "3" else int(power)
        for block, tile in enumerate(self._tiles(tiles, blocks, dtype)):
            wide = np.abs(tile.astype("f8"))
            sums[block] = wide.max() if power == "0" else (wide**p).sum()

    def _join(self, power: str, values: np.ndarray, start: float) -> float:
        return float(max([start, *values]) if power == "0" else start + values.sum())

    def _fold(self, blocks: int, types: Any, *fields: Any) -> None:
        _, source, out, _, count, _, start, *_ = fields
        assert blocks == 1
        at(out, 1, "f8")[0] = self._join(types[0], at(source, count, "f8"), start)

    def _finish(self, blocks: int, types: Any, *fields: Any) -> None:
        _, source, out, scale_at, count, p, start, max_norm, loss_scale, mode, _ = fields
        assert blocks == 1
        total = self._join(types[0], at(source, count, "f8"), start)
        if scale_at:
            loss_scale = float(at(scale_at, 1, "f8" if mode & 1 else "f4")[0])
        norm = total ** {"0": 1, "1": 1, "2": 0.5, "3": 1 / p}[types[0]] / loss_scale
        factor = min(1.0, max_norm / (norm + 1e-6)) if max_norm >= 0 else 1.0
        at(out, 2, "f8")[:] = norm, factor / loss_scale

    def _scale(self, blocks: int, types: Any, tiles: int, source: int, *_: Any) -> None:
        for tile in self._tiles(tiles, blocks, types[0]):
            np.multiply(tile, at(source, 1, "f8")[0], out=tile, casting="unsafe")


def view(array: np.ndarray) -> View:
    address, dtype = array.ctypes.data, array.dtype.name
    return View(address, dtype, array.shape, None, "cuda", 0, None, array)


@pytest.mark.parametrize("p", [0.5, 1, 2, 3, math.inf])
@pytest.mark.parametrize("scale", [2.0, np.array(4.0, "f4"), np.array([8.0])], ids=["1", "2", "3"])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_launches_measure_and_scale_every_element(p: float, scale: Any, max_norm: Any) -> None:
    rng = np.random.default_rng(0)
    sizes = [("f4", 5), ("f2", 7), ("f4", 0), ("f8", 20_000), ("f4", 40_000), ("f2", 1)]
    arrays = [rng.integers(-5, 6, numel).astype(dtype) for dtype, numel in sizes]
    before = np.concatenate([a.astype("f8") for a in arrays])
    runtime: Any = Played()
    norm = CudaNorm(runtime, [view(a) for a in arrays], p)
    made = runtime.allocated
    parts, out = np.full(3, -1.0), np.full(2, -1.0)
    for _ in range(2):
        norm.measure(device(parts[1:2]), start=0.0, stream=STREAM)
    whole = float(np.linalg.norm(before, p))
    assert parts.tolist() == pytest.approx([-1.0, whole if math.isinf(p) else whole**p, -1.0])
    given = scale if isinstance(scale, float) else view(scale)
    rank_parts = device(parts[1:2])
    norm.finish(rank_parts, device(out), max_norm=max_norm, loss_scale=given, stream=STREAM)
    number = float(np.asarray(scale).reshape(()))
    factor = 1.0 if max_norm is None else min(1.0, 1.0 / (whole / number + 1e-6))
    assert out.tolist() == pytest.approx([whole / number, factor / number])
    norm.scale(device(out[1:]), stream=STREAM)
    after = np.concatenate([a.astype("f8") for a in arrays])
    np.testing.assert_allclose(after, before * out[1], rtol=2**-9, atol=1e-7)
    # One pass for each dtype, and one kernel that folds; nothing is allocated.
    assert len(runtime.launches) == 2 * (3 + 1) + 1 + 3
    assert runtime.allocated == made


def test_nothing_to_measure_launches_the_folds_alone() -> None:
    runtime: Any = Played()
    norm = CudaNorm(runtime, [view(np.empty(0, "f4"))], 2)
    out = np.full(1, -1.0)
    norm.measure(device(out), start=math.nan, stream=STREAM)
    assert math.isnan(out[0])
    norm.scale(device(out), stream=STREAM)
    assert runtime.launches == ["fold<2>"]
