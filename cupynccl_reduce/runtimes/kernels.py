"""Launches of kernels.cu: tables made once, pointers by value at each call. No CuPy in here."""

from __future__ import annotations

import struct
from dataclasses import replace
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynccl_reduce.dlpack import View
from cupynccl_reduce.dtypes import DTYPES
from cupynccl_reduce.errors import LayoutError
from cupynccl_reduce.layout import Matrix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cupynccl_reduce.protocols import Array, Fill

    from .cuda import CudaRuntime

__all__ = ["CudaPack", "CudaUnpack", "cut_tiles", "kernel_name", "read_source", "sum_dtype"]

SOURCES = ("arithmetic.cu", "kernels.cu", "norm.cu")
# These repeat kernels.cu.
THREADS = 256
WORD_BYTES = 16
ENTRIES = 496
LIST = 1 << 63
DIVIDE, SCALE, NAN_FILL, ACCUMULATE = 1, 2, 4, 8
HEADER = struct.Struct("=QQQqqdIIII")
ARGUMENTS = np.dtype(f"V{HEADER.size + 8 * ENTRIES}")

TILE_WORDS = 4096  # of one thread block, 64 KiB: half or twice as much moves no more
MAX_LIST = ENTRIES - 1  # sources of one segment that one launch can sum


def read_source() -> str:
    """Return the CUDA source of all kernels."""
    files = resources.files(__package__)
    return "".join(files.joinpath(name).read_text("utf-8") for name in SOURCES)


def kernel_name(kernel: str, source: str, target: str) -> str:
    """Return the C++ name of a kernel for two dtypes. Integers go as unsigned: sums wrap around."""
    names = (
        name if DTYPES[name].is_float else f"uint{8 * DTYPES[name].itemsize}"
        for name in (source, target)
    )
    return f"{kernel}<{', '.join(names)}>"


def sum_dtype(source: str, target: str) -> str:
    """Return what sums and divisions are made in: fp64 where one side is, else fp32; integers."""
    if not DTYPES[source].is_float:
        return source
    return "float64" if "float64" in (source, target) else "float32"


def cut_tiles(
    matrix: Matrix, per_word: int, multiprocessors: int
) -> tuple[np.ndarray[Any, Any], list[int]]:
    """Cut a matrix into the tiles of thread blocks.

    Returns:
        One row of numbers per segment (struct Segment of kernels.cu), and for each segment and the
        end the number of tiles before it.
    """
    words = matrix.rows * -(-matrix.columns // per_word)
    tile = TILE_WORDS
    while tile > THREADS and words < 4 * multiprocessors * tile:
        tile //= 2  # a small bucket still fills the GPU
    records, starts = [], [0]
    for s in matrix.segments:
        in_row = -(-s.columns // per_word)
        chunks = max(1, -(-in_row // tile))
        chunk = max(1, -(-in_row // chunks))
        rows = max(1, tile // max(1, in_row))
        lanes = min(THREADS, 1 << (chunk - 1).bit_length())
        shape = (s.numel, s.width, s.column, s.columns)
        records.append((*shape, starts[-1], chunks, chunk * per_word, rows, lanes))
        starts.append(starts[-1] + (chunks * -(-matrix.rows // rows) if s.columns else 0))
    return np.array(records, np.int64).reshape(-1, 9), starts


class Kernel:
    """One kernel over one matrix: its tables on the device, and launches over their ranges."""

    def __init__(
        self, runtime: CudaRuntime, kernel: str, matrix: Matrix, source: str, target: str
    ) -> None:
        what = f"{kernel} of {source} into {target}"
        if source != target and not (DTYPES[source].is_float and DTYPES[target].is_float):
            msg = f"{what}: integers keep one dtype throughout"
            raise LayoutError(msg)
        per_word = WORD_BYTES // max(DTYPES[source].itemsize, DTYPES[target].itemsize)
        segments, self._starts = cut_tiles(matrix, per_word, runtime.multiprocessors)
        tiles = np.repeat(np.arange(len(segments), dtype=np.uint32), np.diff(self._starts))
        self._segments = runtime.upload(segments)
        self._tiles = runtime.upload(tiles)
        self._function = runtime.function(kernel_name(kernel, source, target))
        self._shape = matrix.rows, matrix.columns
        # A launch takes a copy of its arguments, so one block of them serves all.
        self._arguments = bytearray(ARGUMENTS.itemsize)
        self._by_value = np.frombuffer(self._arguments, ARGUMENTS)  # CuPy passes one element so

    def launch(
        self,
        first: int,
        heads: list[int],
        tail: list[int],
        memory: Array,
        *,
        mode: int,
        divisor: float = 1.0,
        stream: Any,
    ) -> None:
        """Queue the work of `len(heads)` segments from `first` on; `memory` is the matrix."""
        start = self._starts[first]
        tiles = self._starts[first + len(heads)] - start
        if tiles == 0:
            return
        tables = self._segments.data.ptr, self._tiles.data.ptr, memory.data.ptr
        HEADER.pack_into(
            self._arguments, 0, *tables, *self._shape, divisor, start, first, len(heads), mode
        )
        entries = len(heads) + len(tail)
        struct.pack_into(f"={entries}Q", self._arguments, HEADER.size, *heads, *tail)
        self._function((tiles,), (THREADS,), (self._by_value,), stream=stream)


class CudaPack:
    """protocols.PackKernel: one launch for as many sources as its arguments have room for."""

    def __init__(
        self, runtime: CudaRuntime, matrix: Matrix, source_dtype: str, dtype: str, divisor: int = 1
    ) -> None:
        if divisor != 1 and not DTYPES[dtype].is_float:
            msg = f"{dtype} gradients cannot be divided by {divisor}: integers are only summed"
            raise LayoutError(msg)
        self._runtime = runtime
        self._matrix = matrix
        self._segments = len(matrix.segments)
        self._dtypes = source_dtype, dtype
        self._divisor = divisor
        self._kernel = Kernel(runtime, "pack", matrix, source_dtype, dtype)
        # A power of two has an exact reciprocal, and then the product rounds as the quotient does.
        exact = divisor & (divisor - 1) == 0
        self._mode = 0 if divisor == 1 else SCALE if exact else DIVIDE
        self._factor = 1.0 / divisor if exact else float(divisor)
        self._folds: dict[int, tuple[CudaPack, CudaPack]] = {}

    def __call__(
        self, sources: Sequence[Sequence[View]], target: Array, *, fill: Fill, stream: Any
    ) -> None:
        """Queue the pack on `stream`. Allocates only for sources that are not contiguous."""
        mode = self._mode
        if fill == "nan":
            if not DTYPES[self._dtypes[1]].is_float:
                msg = f"fill='nan' cannot be written as {self._dtypes[1]}"
                raise LayoutError(msg)
            mode |= NAN_FILL
        options = {"mode": mode, "divisor": self._factor, "stream": stream}
        with self._runtime.current:
            heads = [g[0].pointer if len(g) == 1 and g[0].strides is None else -1 for g in sources]
            if -1 not in heads and len(heads) == self._segments <= ENTRIES:
                self._kernel.launch(0, heads, [], target, **options)
            else:
                self._pack_any(sources, target, options)

    def _pack_any(
        self, sources: Sequence[Sequence[View]], target: Array, options: dict[str, Any]
    ) -> None:
        """Pack segments of no source, several or strided ones, in as many launches as it takes."""
        # Contiguous copies of sources. Dropped on return, with the launches only queued: the pool
        # gives the memory out again to this stream alone, behind them.
        copies: list[Array] = []
        folds: list[tuple[int, Sequence[View]]] = []
        first, heads, tail = 0, list[int](), list[int]()
        for index, (segment, group) in enumerate(zip(self._matrix.segments, sources, strict=True)):
            count = len(group) if segment.numel else 0
            if count > MAX_LIST:
                folds.append((index, group))  # overwrites what this launch fills in
                count = 0
            if len(heads) + len(tail) + 1 + (count if count > 1 else 0) > ENTRIES:
                self._kernel.launch(first, heads, tail, target, **options)
                first, heads, tail = index, [], []
            pointers = [self._address(view, copies, options["stream"]) for view in group[:count]]
            if count > 1:
                heads.append(LIST | count << 32 | len(tail))
                tail += pointers
            else:
                heads += pointers or [0]
        self._kernel.launch(first, heads, tail, target, **options)
        for index, group in folds:
            self._pack_fold(index, group, target, options["stream"])

    def _address(self, view: View, copies: list[Array], stream: Any) -> int:
        if view.strides is None:
            return view.pointer
        copies.append(self._runtime.flatten(view, stream))
        return int(copies[-1].data.ptr)

    def _pack_fold(self, index: int, group: Sequence[View], target: Array, stream: Any) -> None:
        """Pack a segment of more sources than one launch can sum, through partial sums."""
        segment, (source, dtype) = self._matrix.segments[index], self._dtypes
        partial = sum_dtype(source, dtype)
        if index not in self._folds:
            flat = replace(segment, width=segment.numel, column=0, columns=segment.numel)
            whole = Matrix(1, segment.numel, (flat,))
            part = replace(self._matrix, segments=(segment,))
            self._folds[index] = (
                CudaPack(self._runtime, whole, source, partial),
                CudaPack(self._runtime, part, partial, dtype, self._divisor),
            )
        fold, finish = self._folds[index]
        sums = []
        for start in range(0, len(group), MAX_LIST):
            block = self._runtime.scratch(segment.numel, partial, stream)
            some = group[start : start + MAX_LIST]
            fold([some], block, fill="zero", stream=stream)
            shape, device = (segment.numel,), self._runtime.device
            sums.append(View(block.data.ptr, partial, shape, None, "cuda", device, None, block))
        finish([sums], target, fill="zero", stream=stream)


class CudaUnpack:
    """protocols.UnpackKernel: one launch for as many targets as its arguments have room for."""

    def __init__(self, runtime: CudaRuntime, matrix: Matrix, dtype: str, target_dtype: str) -> None:
        self._runtime = runtime
        self._matrix = matrix
        self._kernel = Kernel(runtime, "unpack", matrix, dtype, target_dtype)

    def __call__(
        self, source: Array, targets: Sequence[View], *, accumulate: bool, stream: Any
    ) -> None:
        """Queue the unpack on `stream`. Allocates nothing."""
        heads = []
        for segment, view in zip(self._matrix.segments, targets, strict=True):
            if view.strides is not None and segment.numel:
                msg = (
                    f"{segment.name!r}: a target must be contiguous, not of shape {view.shape} "
                    f"and strides {view.strides}"
                )
                raise LayoutError(msg)
            heads.append(view.pointer)
        mode = ACCUMULATE if accumulate else 0
        with self._runtime.current:
            for first in range(0, len(heads), ENTRIES):
                part = heads[first : first + ENTRIES]
                self._kernel.launch(first, part, [], source, mode=mode, stream=stream)
