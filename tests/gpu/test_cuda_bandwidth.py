"""Print what pack and unpack move, beside a plain copy in the same process. Nothing is asserted."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import cupy
import numpy as np
import pytest

from cupynccl_reduce.dtypes import DTYPES
from cupynccl_reduce.layout import Matrix
from cupynccl_reduce.runtimes.cuda import CudaRuntime

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

pytestmark = pytest.mark.gpu

MEBI = 1 << 20
SETS = 4  # buffers in rotation: more than the L2 cache holds
OUTPUT = 256 * MEBI  # where results start in a block

CALLS, ROUNDS = 16, 7
SPIN = cupy.RawKernel(
    'extern "C" __global__ void spin(long long n) { n += clock64(); while (clock64() < n); }',
    "spin",
)

BFLOATS = ("bfloat16", "bfloat16")
PACKS: list[tuple[tuple[str, str], int, list[int]]] = [
    *((BFLOATS, rows, [MEBI] * 32) for rows in (1, 2, 4, 8)),
    (BFLOATS, 3, [MEBI] * 32),  # rows 1 and 2 start at odd elements
    (BFLOATS, 2, [768, 2304, 768 * 768 * 3, 768 * 768 * 4] * 8),
    (BFLOATS, 8, [768] * 400),
    (("float16", "float32"), 2, [MEBI] * 32),
    (("float32", "float32"), 2, [MEBI // 2] * 32),
    (("float32", "bfloat16"), 2, [MEBI] * 32),
]
UNPACKS = [("bfloat16", "float32"), ("float32", "float32"), BFLOATS]


class Bench:
    def __init__(self) -> None:
        self.runtime = CudaRuntime(0)
        self.stream = self.runtime.stream()
        self.blocks = [self.runtime.allocate(2 * OUTPUT) for _ in range(SETS)]
        for block in self.blocks:  # one float32, or two 16-bit floats, near 1 in every word
            words = block.view(np.uint32)
            words[...] = 0x3F803F80
            words += cupy.arange(len(words), dtype=np.uint32) % 99 * 0x10001
        cupy.cuda.Stream.null.synchronize()

    def show(self, what: str, nbytes: int, work: Callable[[int], None]) -> None:
        """Print the median time of one `work(i)`, and how long the host takes to queue it."""
        times, hosts = [], []
        for _ in range(1 + ROUNDS):
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            # The device spins while the host queues the calls, so that it never waits for one.
            SPIN.kernel((1,), (1,), (10_000_000,), stream=self.stream)
            start.record(self.stream)
            begin = time.perf_counter()
            for i in range(CALLS):
                work(i)
            hosts.append((time.perf_counter() - begin) / CALLS * 1e6)
            end.record(self.stream)
            assert not start.done
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(start, end) / CALLS)
        ms, host = statistics.median(times[1:]), statistics.median(hosts[1:])
        rate = nbytes / ms / 1e9
        print(f"{what:62s} {ms * 1e3:7.1f} us {rate:6.2f} TB/s, host {host:5.1f} us")

    def copy(self) -> None:
        memcpy = cupy.cuda.runtime.memcpyAsync

        def work(i: int) -> None:
            at = self.blocks[i % SETS].data.ptr
            memcpy(at + OUTPUT, at, 64 * MEBI, 3, self.stream.ptr)

        self.show("copy of 64 MiB (bytes read + written)", 128 * MEBI, work)

    def pack(self, dtypes: tuple[str, str], rows: int, numels: Sequence[int]) -> None:
        source, target = (DTYPES[dtype].itemsize for dtype in dtypes)
        flats = [(f"p{i}", numel, -(-numel // rows)) for i, numel in enumerate(numels)]
        matrix = Matrix.of(flats, rows, 16 // min(source, target))
        pack = self.runtime.pack_kernel(matrix, *dtypes, divisor=rows)
        groups = []
        for block in self.blocks:
            views, at = [], 0
            for numel in numels:
                flat = self.runtime.view(block, at, numel, dtypes[0])
                views.append([self.runtime.read(flat, self.stream)])
                at += -(-numel * source // 256) * 256
            assert at <= OUTPUT
            groups.append(views)
        targets = [self.runtime.view(b, OUTPUT, matrix.numel, dtypes[1]) for b in self.blocks]

        def work(i: int) -> None:
            pack(groups[i % SETS], targets[i % SETS], fill="zero", stream=self.stream)

        nbytes = sum(numels) * source + matrix.numel * target
        what = f"pack {dtypes[0]} -> {dtypes[1]}, {rows} rows / {rows}, {len(numels)} sources"
        self.show(f"{what}, {nbytes >> 20} MiB", nbytes, work)

    def unpack(self, dtypes: tuple[str, str], *, accumulate: bool) -> None:
        numel = 32 * MEBI
        source, target = (DTYPES[dtype].itemsize for dtype in dtypes)
        unpack = self.runtime.unpack_kernel(Matrix.of([("row", numel, numel)], 1, 8), *dtypes)
        view = self.runtime.view
        memory = [view(block, 0, numel, dtypes[0]) for block in self.blocks]
        flats = [view(block, OUTPUT, numel, dtypes[1]) for block in self.blocks]
        targets = [[self.runtime.read(flat, self.stream)] for flat in flats]

        def work(i: int) -> None:
            unpack(memory[i % SETS], targets[i % SETS], accumulate=accumulate, stream=self.stream)

        verb = "accumulated" if accumulate else "copied"
        nbytes = numel * (source + target * (2 if accumulate else 1))
        what = f"unpack {dtypes[0]} -> {dtypes[1]}, {verb}, {nbytes >> 20} MiB"
        self.show(what, nbytes, work)


def test_print_bandwidths() -> None:
    print()
    bench = Bench()
    bench.copy()
    for dtypes, rows, numels in PACKS:
        bench.pack(dtypes, rows, numels)
    for dtypes in UNPACKS:
        bench.unpack(dtypes, accumulate=False)
        bench.unpack(dtypes, accumulate=True)
    bench.runtime.close()
