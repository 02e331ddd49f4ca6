"""Launches of norm.cu: tables and scratch made once. No CuPy in here, and no collectives."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynccl_reduce.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cupynccl_reduce.dlpack import View
    from cupynccl_reduce.protocols import Array

    from .cuda import CudaRuntime

__all__ = ["CudaNorm", "cut_arrays", "norm_names"]

# These repeat kernels.cu and norm.cu.
THREADS, FOLDERS, ANY = 256, 1024, 3
DOUBLE_SCALE = 1
HEADER = struct.Struct("=QQQQqddddII")
ARGUMENTS = np.dtype(f"V{HEADER.size}")

TILE_BYTES = 1 << 16  # of one thread block; a multiple of any itemsize and of a word


def cut_arrays(arrays: Sequence[View]) -> list[tuple[int, int]]:
    """Cut arrays of one dtype into tiles: the address and numel of each, none of them empty."""
    tiles = []
    for view in arrays:
        itemsize = DTYPES[view.dtype].itemsize
        nbytes = math.prod(view.shape) * itemsize
        for start in range(0, nbytes, TILE_BYTES):
            numel = min(TILE_BYTES, nbytes - start) // itemsize
            tiles.append((view.pointer + start, numel))
    return tiles


def norm_names(p: float, dtype: str) -> tuple[str, str, str, str]:
    """Return the C++ names of the four kernels: measure, fold, finish, scale."""
    power = 0 if math.isinf(p) else int(p) if p in (1, 2) else ANY
    return f"measure<{dtype}, {power}>", f"fold<{power}>", f"finish<{power}>", f"scale<{dtype}>"


class CudaNorm:
    """protocols.NormKernel: one launch for each dtype, and one that folds what its tiles gave.

    Building one compiles and allocates, which blocks the host; launches do neither.
    """

    def __init__(self, runtime: CudaRuntime, arrays: Sequence[View], p: float) -> None:
        self._runtime = runtime
        self._p = p
        self._arrays = tuple(arrays)  # alive as long as the tables with their addresses
        self._tables = []  # (table, tiles, first tile, measure, scale) of each dtype
        first = 0
        for dtype in dict.fromkeys(view.dtype for view in arrays):
            tiles = cut_arrays([view for view in arrays if view.dtype == dtype])
            if tiles:
                measure, _, _, scale = map(runtime.function, norm_names(p, dtype))
                table = runtime.upload(np.array(tiles, np.uint64))
                self._tables.append((table, len(tiles), first, measure, scale))
                first += len(tiles)
        self._count = first
        # Of the one stream that this kernel is used on: in its order, each launch comes after what
        # read these before.
        self._partial = runtime.allocate(8 * first)
        _, fold, finish, _ = norm_names(p, "float32")
        self._fold, self._finish = runtime.function(fold), runtime.function(finish)
        # A launch takes a copy of its arguments, so one block of them serves all.
        self._arguments = bytearray(HEADER.size)
        self._by_value = np.frombuffer(self._arguments, ARGUMENTS)  # CuPy passes one element so

    def measure(self, out: Array, *, start: float, stream: Any) -> None:
        """Queue: `out` becomes this rank's part of the norm."""
        partial: int = self._partial.data.ptr
        with self._runtime.current:
            for table, tiles, first, measure, _ in self._tables:
                addresses = (table.data.ptr, 0, partial + 8 * first)
                self._launch(measure, (tiles, THREADS), stream, addresses)
            addresses = (0, partial, out.data.ptr)
            folding: dict[str, Any] = {"count": self._count, "start": start}
            self._launch(self._fold, (1, FOLDERS), stream, addresses, **folding)

    def finish(
        self,
        parts: Array,
        out: Array,
        *,
        max_norm: float | None,
        loss_scale: float | View,
        stream: Any,
    ) -> None:
        """Queue: `out` becomes norm and factor."""
        fields: dict[str, Any] = {"count": parts.size}
        if max_norm is not None:
            fields["max_norm"] = max_norm
        if isinstance(loss_scale, float):
            fields["loss_scale"] = loss_scale
        else:
            fields["scale_at"] = loss_scale.pointer
            fields["mode"] = DOUBLE_SCALE if loss_scale.dtype == "float64" else 0
        with self._runtime.current:
            addresses = (0, parts.data.ptr, out.data.ptr)
            self._launch(self._finish, (1, FOLDERS), stream, addresses, **fields)

    def scale(self, factor: Array, *, stream: Any) -> None:
        """Queue: multiply every element."""
        with self._runtime.current:
            for table, tiles, _, _, scale in self._tables:
                addresses = (table.data.ptr, factor.data.ptr, 0)
                self._launch(scale, (tiles, THREADS), stream, addresses)

    def _launch(
        self,
        function: Any,
        shape: tuple[int, int],
        stream: Any,
        addresses: tuple[int, int, int],
        *,
        scale_at: int = 0,
        count: int = 0,
        start: float = 0.0,
        max_norm: float = -1.0,
        loss_scale: float = 1.0,
        mode: int = 0,
    ) -> None:
        """Queue a kernel of `shape` blocks and threads; `addresses` of tiles, `in` and `out`."""
        fields = scale_at, count, self._p, start, max_norm, loss_scale, mode, 0
        HEADER.pack_into(self._arguments, 0, *addresses, *fields)
        blocks, threads = shape
        function((blocks,), (threads,), (self._by_value,), stream=stream)
