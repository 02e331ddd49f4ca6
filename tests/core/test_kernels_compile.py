"""kernels.cu compiles for every architecture, and agrees with kernels.py. Needs no GPU."""

from __future__ import annotations

import itertools
import math
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupynccl_reduce.dlpack import View
from cupynccl_reduce.dtypes import DTYPES
from cupynccl_reduce.layout import Matrix
from cupynccl_reduce.runtimes import cuda_norm, kernels
from cupynccl_reduce.runtimes.cuda_norm import norm_names
from cupynccl_reduce.runtimes.kernels import kernel_name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future

CODE = kernels.read_source()
ARCHITECTURES = ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120"]
FLOATS = [name for name, dtype in DTYPES.items() if dtype.is_float]
PAIRS = [
    *itertools.product(FLOATS, FLOATS),
    *((name, name) for name, dtype in DTYPES.items() if not dtype.is_float),
]
NORMS = {name for p in (1, 2, 3, math.inf) for dtype in FLOATS for name in norm_names(p, dtype)}
NAMES = sorted({kernel_name(k, *pair) for k in ("pack", "unpack") for pair in PAIRS} | NORMS)


def compile_for(architecture: str) -> tuple[list[bytes], bytes, bytes]:
    """Compile all kernels as CuPy does; return their symbols, the cubin and the PTX."""
    from cuda.bindings import nvrtc

    def call(function: Any, *args: Any) -> Any:
        result, *values = function(*args)
        assert result == nvrtc.nvrtcResult.NVRTC_SUCCESS, f"{function.__name__}: {result}"
        return values[0] if values else None

    program = call(nvrtc.nvrtcCreateProgram, CODE.encode(), b"kernels.cu", 0, [], [])
    for name in NAMES:
        call(nvrtc.nvrtcAddNameExpression, program, name.encode())
    options = [b"-std=c++17", b"-ftz=true", f"-arch={architecture}".encode()]
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    # Not of spaces: an empty log is written into b" " itself, of which Python has only one.
    log = bytes(call(nvrtc.nvrtcGetProgramLogSize, program))
    call(nvrtc.nvrtcGetProgramLog, program, log)
    assert result == nvrtc.nvrtcResult.NVRTC_SUCCESS, log.decode()
    assert b"warning" not in log, log.decode()
    symbols = [call(nvrtc.nvrtcGetLoweredName, program, name.encode()) for name in NAMES]
    cubin = b" " * call(nvrtc.nvrtcGetCUBINSize, program)
    call(nvrtc.nvrtcGetCUBIN, program, cubin)
    ptx = b" " * call(nvrtc.nvrtcGetPTXSize, program)
    call(nvrtc.nvrtcGetPTX, program, ptx)
    return symbols, cubin, ptx


@pytest.fixture(scope="module")
def programs() -> Iterator[dict[str, Future[tuple[list[bytes], bytes, bytes]]]]:
    # Slowest first, one on each core; a test waits for its own.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {name: pool.submit(compile_for, name) for name in reversed(ARCHITECTURES)}


@pytest.mark.skipif(sys.platform != "linux", reason="NVRTC's wheels are for Linux")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_compiles(
    programs: dict[str, Future[tuple[list[bytes], bytes, bytes]]], architecture: str
) -> None:
    symbols, cubin, ptx = programs[architecture].result()
    assert cubin.startswith(b"\x7fELF")
    assert [name for name, symbol in zip(NAMES, symbols, strict=True) if symbol not in cubin] == []
    # pow() of fp64 looks at a half of its exponent so, which does no harm.
    ours = re.sub(rb"\.func [^{}]*__internal_accurate_pow\(.*?\n}\n", b"", ptx, flags=re.DOTALL)
    assert b".ftz" not in ours  # subnormal floats stay what they are


def test_python_repeats_the_constants_of_the_kernels() -> None:
    constants = dict(re.findall(r"\b([A-Z_]+) = (\d+)[,;} ]", CODE))
    for name in ("THREADS", "ENTRIES", "DIVIDE", "SCALE", "NAN_FILL", "ACCUMULATE"):
        assert int(constants[name]) == getattr(kernels, name), name
    for name in ("THREADS", "FOLDERS", "ANY", "DOUBLE_SCALE"):
        assert int(constants[name]) == getattr(cuda_norm, name), name
    assert kernels.ARGUMENTS.itemsize <= 4096
    assert bytes_of("struct Arguments {", "entries[ENTRIES];") == kernels.HEADER.size
    assert bytes_of("struct NormArguments {", "enum : uint32 { DOUBLE") == cuda_norm.HEADER.size


def bytes_of(start: str, stop: str) -> int:
    """Return the bytes of a struct's fields."""
    sizes = dict.fromkeys(("int64", "float64"), 8) | {"uint32": 4}
    fields = CODE[CODE.index(start) : CODE.index(stop)]
    size = 0
    for kind, names in re.findall(r"^    (?:const )?(\w+\*?) ([\w, ]+);", fields, re.MULTILINE):
        size += 8 if kind.endswith("*") else sizes[kind] * len(names.split(","))
    return size


@given(numels=st.lists(st.integers(0, 300_000), max_size=4), dtype=st.sampled_from(FLOATS))
def test_tiles_of_the_norm_cover_every_element_once(numels: list[int], dtype: str) -> None:
    itemsize, at, arrays, expected = DTYPES[dtype].itemsize, 64, [], []
    for numel in numels:
        arrays.append(View(at, dtype, (numel,), None, "cuda", 0, None, None))
        expected.append((at, at + numel * itemsize))
        at += numel * itemsize + 16
    tiles = cuda_norm.cut_arrays(arrays)
    assert all(0 < numel * itemsize <= cuda_norm.TILE_BYTES for _, numel in tiles)
    joined: list[tuple[int, int]] = []
    for address, numel in tiles:
        follows = bool(joined) and joined[-1][1] == address
        start = joined.pop()[0] if follows else address
        joined.append((start, address + numel * itemsize))
    assert joined == [span for span in expected if span[0] < span[1]]


@given(
    numels=st.lists(st.integers(0, 3000), min_size=1, max_size=6),
    rows=st.integers(1, 9),
    per_word=st.sampled_from([1, 2, 4, 8, 16]),
    align=st.sampled_from([1, 4, 16]),
    multiprocessors=st.sampled_from([1, 132]),
)
def test_tiles_cover_every_cell_once(
    numels: list[int], rows: int, per_word: int, align: int, multiprocessors: int
) -> None:
    flats = [(f"p{i}", numel, -(-numel // rows)) for i, numel in enumerate(numels)]
    matrix = Matrix.of(flats, rows, align)
    records, starts = kernels.cut_tiles(matrix, per_word, multiprocessors)
    seen = [[0] * matrix.columns for _ in range(rows)]
    for index, record in enumerate(records.tolist()):
        numel, width, column, columns, first, chunks, chunk, tile_rows, lanes = record
        segment = matrix.segments[index]
        assert (numel, width) == (segment.numel, segment.width)
        assert (column, columns, first) == (segment.column, segment.columns, starts[index])
        assert chunk % per_word == 0
        assert kernels.THREADS % lanes == 0
        for tile in range(starts[index + 1] - first):  # as struct Tile of kernels.cu counts
            top, left = tile // chunks * tile_rows, tile % chunks * chunk
            for row in range(top, min(top + tile_rows, rows)):
                for cell in range(left, min(left + chunk, columns)):
                    seen[row][column + cell] += 1
    assert all(count == 1 for row in seen for count in row)
