"""The CUDA runtime's memory, streams and reading; NCCL with one rank, and with two on one GPU."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import cupy
import ml_dtypes
import numpy as np
import pytest

from cupynccl_reduce.communicators import nccl as nccl_module
from cupynccl_reduce.communicators.nccl import NcclCommunicator
from cupynccl_reduce.errors import GradientError, GradientTypeError, LayoutError, ProtocolError
from cupynccl_reduce.layout import Matrix
from cupynccl_reduce.runtimes.cuda import CudaRuntime, bus_id

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.gpu

SPIN = cupy.RawKernel(
    'extern "C" __global__ void spin(long long n) { n += clock64(); while (clock64() < n); }',
    "spin",
)


@pytest.fixture
def runtime() -> Iterator[CudaRuntime]:
    runtime = CudaRuntime(0)
    yield runtime
    runtime.close()


def spin(stream: Any) -> None:
    """Keep `stream` busy for about a quarter of a second."""
    SPIN.kernel((1,), (1,), (400_000_000,), stream=stream)


def two_segments(runtime: CudaRuntime, stream: Any) -> tuple[Matrix, list[Any], list[Any], Any]:
    matrix = Matrix.of([("a", 1000, 500), ("b", 70, 35)], 2, 4)
    arrays = [cupy.arange(n, dtype=np.float32) + 1 for n in (1000, 70)]
    target = runtime.allocate(matrix.numel * 4).view(np.float32)
    cupy.cuda.Stream.null.synchronize()
    return matrix, arrays, [[runtime.read(a, stream)] for a in arrays], target


class Allocations(cupy.cuda.MemoryHook):
    name = "allocations"

    def __init__(self) -> None:
        self.count = 0

    def malloc_postprocess(self, **_: Any) -> None:
        self.count += 1


@pytest.mark.pool
def test_hot_path_neither_allocates_nor_waits(runtime: CudaRuntime) -> None:
    stream = runtime.stream()
    matrix, _arrays, views, target = two_segments(runtime, stream)
    pack = runtime.pack_kernel(matrix, "float32", "float32", divisor=2)
    unpack = runtime.unpack_kernel(matrix, "float32", "float32")
    flats = [view for group in views for view in group]
    with Allocations() as seen:
        spin(stream)
        pack(views, target, fill="zero", stream=stream)
        unpack(target, flats, accumulate=True, stream=stream)
        assert not stream.done
        assert seen.count == 0
        stream.synchronize()
        assert float(_arrays[0][-1]) == 1500
        # The hook does see the copy of a source that is not contiguous.
        pack(
            [[runtime.read(cupy.ones(2000, "f4")[::2], stream)], []],
            target,
            fill="nan",
            stream=stream,
        )
        assert seen.count == 2
    stream.synchronize()


def test_the_pointer_table_is_taken_at_the_call(runtime: CudaRuntime) -> None:
    stream = runtime.stream()
    matrix, _arrays, views, target = two_segments(runtime, stream)
    pack = runtime.pack_kernel(matrix, "float32", "float32")
    spin(stream)
    pack(views, target, fill="zero", stream=stream)
    other = runtime.allocate(target.nbytes).view(np.float32)
    pack([[], []], other, fill="nan", stream=stream)
    views.clear()
    stream.synchronize()
    assert float(target.sum()) == 1000 * 1001 / 2 + 70 * 71 / 2
    assert int(cupy.isnan(other).sum()) == 1070


def test_pack_in_a_cuda_graph(runtime: CudaRuntime) -> None:
    stream = runtime.stream()
    matrix, arrays, views, target = two_segments(runtime, stream)
    pack = runtime.pack_kernel(matrix, "float32", "float32", divisor=4)
    with stream:
        stream.begin_capture()
        pack(views, target, fill="zero", stream=stream)
        strided = replace(views[0][0], strides=(-1,))
        with pytest.raises(ProtocolError, match="contiguous"):
            pack([[strided], []], target, fill="zero", stream=stream)
        graph = stream.end_capture()
    for value in (4.0, 12.0):
        for array in arrays:
            array.fill(value)
        cupy.cuda.Stream.null.synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert float(target.sum()) == 1070 * value / 4


def test_copies_of_strided_sources_are_not_reused_too_early(runtime: CudaRuntime) -> None:
    stream = runtime.stream()
    matrix = Matrix.of([("a", 4096, 4096)], 1, 4)
    pack = runtime.pack_kernel(matrix, "float32", "float32")
    targets = [runtime.allocate(4096 * 4).view(np.float32) for _ in range(20)]
    sources = [cupy.full(8192, i, np.float32)[::2] for i in range(20)]
    views = [[[runtime.read(source, stream)]] for source in sources]
    cupy.cuda.Stream.null.synchronize()
    spin(stream)
    for view, target in zip(views, targets, strict=True):
        pack(view, target, fill="zero", stream=stream)
    stream.synchronize()
    assert [float(target.sum()) / 4096 for target in targets] == list(range(20))


def test_allocate(runtime: CudaRuntime) -> None:
    for _ in range(3):
        block = runtime.allocate(10_000)
        assert not bool(block.any())
        block.fill(7)
        del block
    assert runtime.allocate(0).size == 0
    pinned = runtime.allocate(4096, memory="pinned")
    assert cupy.cuda.runtime.pointerGetAttributes(pinned.data.ptr).type == 1  # host memory
    floats = runtime.view(pinned, 1024, 256, "float32")
    floats[...] = cupy.arange(256)
    cupy.cuda.Stream.null.synchronize()
    on_host = (ctypes.c_float * 256).from_address(pinned.data.ptr + 1024)
    assert list(on_host) == list(range(256))
    assert runtime.allocate(0, memory="pinned").size == 0
    with pytest.raises(
        LayoutError, match=r"no device memory for 1125899906842624 bytes.*pool holds"
    ):
        runtime.allocate(1 << 50)


def test_pack_into_pinned_memory(runtime: CudaRuntime) -> None:
    stream = runtime.stream()
    matrix, arrays, views, _target = two_segments(runtime, stream)
    pinned = runtime.allocate(matrix.numel * 4, memory="pinned").view(np.float32)
    runtime.pack_kernel(matrix, "float32", "float32")(views, pinned, fill="zero", stream=stream)
    stream.synchronize()
    assert float(pinned.sum()) == float(arrays[0].sum() + arrays[1].sum())


def test_bfloat16_views(runtime: CudaRuntime) -> None:
    view = runtime.view(runtime.allocate(64), 16, 8, "bfloat16")
    assert view.shape == (8,)
    assert view.dtype == ml_dtypes.bfloat16
    assert runtime.read(view, cupy.cuda.Stream.null).dtype == "bfloat16"


@pytest.mark.pool
def test_close_returns_the_memory() -> None:
    free = []
    for _ in range(10):
        runtime = CudaRuntime(0)
        block = runtime.allocate(50 << 20)
        runtime.pack_kernel(Matrix.of([("a", 8, 8)], 1, 8), "float32", "float32")
        del block
        runtime.close()
        runtime.close()
        assert runtime._pools.memory.total_bytes() == 0
        free.append(cupy.cuda.runtime.memGetInfo()[0])
        with pytest.raises(ProtocolError, match="closed"):
            runtime.allocate(1)
    assert max(free[1:]) - min(free[1:]) <= 1 << 20


def test_read_describes_cupy_arrays(runtime: CudaRuntime) -> None:
    array = cupy.zeros((3, 4), np.float32)
    mine = cupy.cuda.Stream(non_blocking=True)
    with mine:
        view = runtime.read(array, None)
    assert (view.pointer, view.dtype, view.shape) == (array.data.ptr, "float32", (3, 4))
    assert (view.strides, view.device, view.device_id, view.owner) == (None, "cuda", 0, array)
    assert view.stream is mine
    assert runtime.read(array.T, None).strides == (1, 4)
    assert runtime.read(array[:, :1].T, None).strides == (1, 4)
    assert runtime.read(array[:1, ::-1], None).strides == (4, -1)
    assert runtime.read(array[1:2], None).strides is None  # extents of 1 do not count
    assert runtime.read(cupy.broadcast_to(array[0, 0], (5,)), None).strides == (0,)
    assert runtime.read(array[0, 0], None).shape == ()


def test_read_refuses(runtime: CudaRuntime) -> None:
    stream = cupy.cuda.Stream.null
    with pytest.raises(GradientError, match=r"cpu:0.*works on cuda:0.*connect\('host'\)"):
        runtime.read(np.zeros(3, np.float32), stream)
    with pytest.raises(GradientTypeError, match="complex64"):
        runtime.read(cupy.zeros(3, np.complex64), stream)
    with pytest.raises(GradientTypeError):
        runtime.read(1.5, stream)
    odd = cupy.zeros(9, np.uint8)[1:].view(np.float32)
    with pytest.raises(GradientError, match="multiple of the itemsize"):
        runtime.read(odd, stream)
    runtime.device = 1
    with pytest.raises(GradientError, match=r"cuda:0.*works on cuda:1"):
        runtime.read(cupy.zeros(3), stream)
    runtime.device = 0


def test_torch_arrays_and_streams(runtime: CudaRuntime) -> None:
    torch = pytest.importorskip("torch")
    side = torch.cuda.Stream()
    stream = runtime.stream()
    with torch.cuda.stream(side):
        tensor = torch.ones(3, 5, device="cuda", dtype=torch.bfloat16)
        view = runtime.read(tensor.T, stream)
    assert (view.pointer, view.dtype, view.strides) == (tensor.data_ptr(), "bfloat16", (1, 5))
    if view.stream is not None:  # torch >= 2.10 says where it was
        assert view.stream.ptr == side.cuda_stream
        assert view.stream is runtime.adopt(side)
    plain = runtime.read(tensor, stream)
    assert plain.stream is None or plain.stream.ptr == 0


def test_adopt(runtime: CudaRuntime) -> None:
    null, mine = cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)
    assert runtime.adopt(None) is null
    with mine:
        assert runtime.adopt(None) is mine
    assert runtime.adopt(mine) is mine
    assert runtime.adopt(0) is runtime.adopt(1) is null
    assert runtime.adopt(2).ptr == 2
    adopted = runtime.adopt(mine.ptr)
    assert adopted is runtime.adopt(mine.ptr)
    assert adopted == mine
    event = runtime.event()
    event.record(adopted)
    runtime.stream().wait_event(event)
    with pytest.raises(ProtocolError, match="no CUDA stream"):
        runtime.adopt("mine")
    assert ":" in bus_id(0)


class Untouchable:
    def __getattr__(self, name: str) -> Any:
        msg = f"NCCL was used: {name}"
        raise AssertionError(msg)


def test_one_rank_never_calls_nccl(runtime: CudaRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_module, "nccl", Untouchable())
    communicator = NcclCommunicator(1, b"", 0, 0)
    stream = runtime.stream()
    for dtype, numel in itertools.product(("f4", "f2"), (1, 7, 8, 31, 33, 257, 4099, 65537)):
        send = cupy.arange(1, numel + 1, dtype="f4").astype(dtype)
        for method in ("reduce_scatter", "all_gather", "all_reduce"):
            recv = cupy.full(numel, np.nan, dtype)
            cupy.cuda.Stream.null.synchronize()
            op = () if method == "all_gather" else ("avg",)
            with communicator.group():
                getattr(communicator, method)(send, recv, "float32", *op, stream)
                getattr(communicator, method)(send, send, "float32", *op, stream)
            communicator.broadcast(send, 0, "float32", stream)
            stream.synchronize()
            assert bool((recv == send).all())
    with pytest.raises(LayoutError, match="7 and 9"):
        communicator.all_reduce(send[:7], send[:9], "float32", "sum", stream)
    communicator.check()
    communicator.close()
    communicator.abort()
    communicator.close()


RANK = """
import os, pathlib, sys, time
rank, folder = int(sys.argv[1]), pathlib.Path(sys.argv[2])
os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_NET="Socket")
import cupy, numpy as np
from cupynccl_reduce.communicators.nccl import NcclCommunicator, unique_id
from cupynccl_reduce.errors import CommunicationError

def connect(name):
    path = folder / name
    if rank == 0:
        (folder / "new").write_bytes(unique_id())
        (folder / "new").rename(path)
    while not path.exists():
        time.sleep(0.01)
    return NcclCommunicator(2, path.read_bytes(), rank, 0)

stream = cupy.cuda.Stream(non_blocking=True)

def exercise(communicator):
    send = cupy.arange(8, dtype=np.float32) + 10 * rank
    recv, full, mean = cupy.empty(4, "f4"), cupy.empty(8, "f4"), cupy.empty(8, "f4")
    cupy.cuda.Stream.null.synchronize()
    with communicator.group():
        communicator.reduce_scatter(send, recv, "float32", "sum", stream)
        communicator.all_reduce(send, mean, "float32", "avg", stream)
    communicator.all_gather(recv, full, "float32", stream)
    communicator.broadcast(send, 1, "float32", stream)
    communicator.reduce_scatter(send, send[4 * rank : 4 * rank + 4], "float32", "sum", stream)
    stream.synchronize()
    communicator.check()
    total = 2 * np.arange(8) + 10
    assert full.get().tolist() == total.tolist(), full
    assert mean.get().tolist() == (total / 2).tolist(), mean
    own = slice(4 * rank, 4 * rank + 4)
    assert send[own].get().tolist() == (2 * np.arange(8) + 20)[own].tolist(), send

first = connect("first")
exercise(first)
before = cupy.full(8, 5, "f4")
try:
    with first.group():
        first.all_reduce(before, before, "float32", "sum", stream)
        raise ValueError("stop")
except ValueError as error:
    assert str(error) == "stop"
stream.synchronize()
assert before.get().tolist() == [5] * 8, "a broken group was queued"
assert "FAILED" in repr(first), first
first.close()
first.close()
try:
    first.all_reduce(before, before, "float32", "sum", stream)
except CommunicationError as error:
    print(error)
else:
    raise AssertionError
second = connect("second")
exercise(second)
try:
    second.broadcast(before, 99, "float32", stream)
except CommunicationError as error:
    print(error)
else:
    raise AssertionError
second.abort()
third = connect("third")
exercise(third)
third.close()
leaked = connect("fourth")
print("done")
"""


def test_two_ranks_on_one_gpu(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        texts = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, text in zip(ranks, texts, strict=True):
        assert rank.returncode == 0, "\n".join(texts)
        assert "done" in text
    assert "rank 0 of 2" in texts[0]
    for part in ("cuda:0 at PCI", "NCCL 2.", "CuPy built for 2.", "NCCL_NET=Socket"):
        assert part in texts[0], texts[0]
