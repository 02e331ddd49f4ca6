"""Laws of a Communicator and its Control, as functions of one rank's world.

Every rank of a world runs them in this order: as threads (test_communicators.py), as processes over
MPI (tests/mpi) or over NCCL. Values are small integers, so that no order of summation matters,
except in laws marked `host`, which state the order and the rounding that only the host promises.
"""

from __future__ import annotations

import random
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from contract.arrays import FLOATS, INTEGERS, Buffer, empty, numpy_dtype, put
from contract.model import assert_same, bits_of, rounded

if TYPE_CHECKING:
    from collections.abc import Callable

    from cupynccl_reduce import World

__all__ = ["folded", "laws"]

DTYPES = (*FLOATS, *INTEGERS)
NUMELS = (1, 7, 1000)
LONG = 33_000  # many pieces, where calls are cut
ROUNDS = 30

_laws: dict[str, Callable[[World], None]] = {}
_host_laws: dict[str, Callable[[World], None]] = {}


def laws(*, host: bool) -> dict[str, Callable[[World], None]]:
    """Return name -> law; with those that only a host communicator keeps, if `host`."""
    return {**_laws, **(_host_laws if host else {})}


def _each(name: str, dtypes: tuple[str, ...] = DTYPES, *, host: bool = False) -> Any:
    """Register a law once for each dtype."""

    def register(law: Callable[[World, str], None]) -> Callable[[World, str], None]:
        for dtype in dtypes:
            (_host_laws if host else _laws)[f"{name} {dtype}"] = partial(law, dtype=dtype)
        return law

    return register


def _law(name: str, *, host: bool = False) -> Any:
    def register(law: Callable[[World], None]) -> Callable[[World], None]:
        (_host_laws if host else _laws)[name] = law
        return law

    return register


def values(key: object, rank: int, numel: int, dtype: str) -> np.ndarray:
    """Return what `rank` contributes: every rank can tell what every other one does.

    Multiples of 12, so that means over 1 to 4 and 6 ranks are integers too; sums stay below 127.
    """
    rng = np.random.default_rng([*repr(key).encode(), rank])
    low = 0 if dtype.startswith("u") else -1
    return (12 * rng.integers(low, 3, numel)).astype(numpy_dtype(dtype))


def summed(world: World, key: object, numel: int, dtype: str, op: str = "sum") -> np.ndarray:
    total = sum(values(key, r, numel, dtype).astype(np.float64) for r in range(world.world_size))
    return (total / (world.world_size if op == "avg" else 1)).astype(numpy_dtype(dtype))


def ops(dtype: str) -> tuple[str, ...]:
    return ("sum", "avg") if dtype in FLOATS else ("sum",)


def numels(dtype: str) -> tuple[int, ...]:
    return (*NUMELS, LONG) if dtype in ("bfloat16", "float32") else NUMELS


def row(world: World, buffer: Buffer, numel: int) -> Any:
    """Return this rank's row, of `numel` elements, of a buffer of world_size rows."""
    itemsize = numpy_dtype(buffer.dtype).itemsize
    start = buffer.inside.start + world.rank * numel * itemsize
    return world.runtime.view(buffer.memory, start, numel, buffer.dtype)


@_each("reduce_scatter")
def reduce_scatter(world: World, dtype: str) -> None:
    for op in ops(dtype):
        for numel in numels(dtype):
            key, total = (op, dtype, numel), numel * world.world_size
            mine = slice(world.rank * numel, (world.rank + 1) * numel)
            expected = summed(world, key, total, dtype, op)[mine]
            sent = values(key, world.rank, total, dtype)
            apart, recv = put(world.runtime, sent, dtype), empty(world.runtime, numel, dtype)
            together = put(world.runtime, sent, dtype)
            run = partial(world.communicator.reduce_scatter, dtype=dtype, op=op)
            run(apart.array, recv.array, stream=world.stream)
            run(together.array, row(world, together, numel), stream=world.stream)
            world.stream.synchronize()
            assert_same(recv.get(), expected)
            assert_same(apart.get(), sent)
            assert_same(together.get()[mine], expected)


@_each("all_gather")
def all_gather(world: World, dtype: str) -> None:
    for numel in numels(dtype):
        key = (dtype, numel)
        sent = values(key, world.rank, numel, dtype)
        expected = np.concatenate([values(key, r, numel, dtype) for r in range(world.world_size)])
        apart, recv = put(world.runtime, sent, dtype), empty(world.runtime, expected.size, dtype)
        start = np.zeros(expected.size, expected.dtype)
        start[world.rank * numel : (world.rank + 1) * numel] = sent
        together = put(world.runtime, start, dtype)
        run = partial(world.communicator.all_gather, dtype=dtype, stream=world.stream)
        run(apart.array, recv.array)
        run(row(world, together, numel), together.array)
        world.stream.synchronize()
        assert_same(recv.get(), expected)
        assert_same(apart.get(), sent)
        assert_same(together.get(), expected)


@_each("all_reduce")
def all_reduce(world: World, dtype: str) -> None:
    for op in ops(dtype):
        for numel in numels(dtype):
            key = (op, dtype, numel)
            expected = summed(world, key, numel, dtype, op)
            sent = values(key, world.rank, numel, dtype)
            apart, recv = put(world.runtime, sent, dtype), empty(world.runtime, numel, dtype)
            together = put(world.runtime, sent, dtype)
            run = partial(world.communicator.all_reduce, dtype=dtype, op=op, stream=world.stream)
            run(apart.array, recv.array)
            run(together.array, together.array)
            world.stream.synchronize()
            assert_same(recv.get(), expected)
            assert_same(apart.get(), sent)
            assert_same(together.get(), expected)


@_each("broadcast")
def broadcast(world: World, dtype: str) -> None:
    for root in range(world.world_size):
        for numel in numels(dtype):
            buffer = put(world.runtime, values(numel, world.rank, numel, dtype), dtype)
            world.communicator.broadcast(buffer.array, root, dtype, world.stream)
            world.stream.synchronize()
            assert_same(buffer.get(), values(numel, root, numel, dtype))


@_law("a group of collectives")
def group(world: World) -> None:
    runtime, communicator, stream = world.runtime, world.communicator, world.stream
    sends, recvs = {}, {}
    for index, dtype in enumerate(DTYPES):
        sent = values(dtype, world.rank, world.world_size * (index + 1), dtype)
        sends[dtype] = put(runtime, sent, dtype)
        recvs[dtype] = empty(runtime, index + 1, dtype)
    gathered = empty(runtime, 5 * world.world_size, "float32")
    own = put(runtime, values("own", world.rank, 5, "float32"), "float32")
    with communicator.group():
        for dtype in DTYPES:
            communicator.reduce_scatter(
                sends[dtype].array, recvs[dtype].array, dtype, "sum", stream
            )
        communicator.all_gather(own.array, gathered.array, "float32", stream)
    with communicator.group():
        pass
    stream.synchronize()
    for index, dtype in enumerate(DTYPES):
        expected = summed(world, dtype, world.world_size * (index + 1), dtype)
        assert_same(
            recvs[dtype].get(), expected[world.rank * (index + 1) : (world.rank + 1) * (index + 1)]
        )
    rows = [values("own", r, 5, "float32") for r in range(world.world_size)]
    assert_same(gathered.get(), np.concatenate(rows))


@_law("a group of long sums, in place and apart")
def group_of_sums(world: World) -> None:
    runtime, communicator = world.runtime, world.communicator
    lengths = (LONG, 7, LONG + 1, 1000)
    for op in ("sum", "avg"):
        keys = [(op, index) for index in range(len(lengths))]
        totals = [numel * world.world_size for numel in lengths]
        sent = [values(k, world.rank, t, "float32") for k, t in zip(keys, totals, strict=True)]
        sends = [put(runtime, array, "float32") for array in sent]
        recvs = [empty(runtime, numel, "float32") for numel in lengths]
        with communicator.group():
            for index, (send, numel) in enumerate(zip(sends, lengths, strict=True)):
                recv = row(world, send, numel) if index % 2 else recvs[index].array
                communicator.reduce_scatter(send.array, recv, "float32", op, world.stream)
        world.stream.synchronize()
        for index, (key, numel) in enumerate(zip(keys, lengths, strict=True)):
            mine = slice(world.rank * numel, (world.rank + 1) * numel)
            expected = summed(world, key, totals[index], "float32", op)[mine]
            got = sends[index].get()[mine] if index % 2 else recvs[index].get()
            assert_same(got, expected)


@_law("collectives of no elements")
def nothing(world: World) -> None:
    communicator, stream = world.communicator, world.stream
    for dtype in DTYPES:
        a, b = empty(world.runtime, 0, dtype).array, empty(world.runtime, 0, dtype).array
        communicator.reduce_scatter(a, b, dtype, "sum", stream)
        communicator.all_gather(a, b, dtype, stream)
        communicator.all_reduce(a, a, dtype, "sum", stream)
        communicator.broadcast(a, world.world_size - 1, dtype, stream)
    stream.synchronize()


@_law("a send buffer may be written again as soon as its collective is done")
def reuse(world: World) -> None:
    # A peer that were slower must not read what its owner, by then, has legally overwritten.
    runtime, communicator, stream = world.runtime, world.communicator, world.stream
    naps = random.Random(world.rank)
    done = runtime.event()
    for numel, rounds in ((5, ROUNDS), (30_000, ROUNDS // 3)):
        total = numel * world.world_size
        send, recv = empty(runtime, total, "float32"), empty(runtime, numel, "float32")
        full = empty(runtime, total, "float32")
        for step in range(rounds):
            key = (step, numel)
            send.set(values(key, world.rank, total, "float32"))
            if naps.random() < 0.1:
                time.sleep(naps.random() * 2e-3)
            communicator.reduce_scatter(send.array, recv.array, "float32", "sum", stream)
            done.record(stream)
            done.synchronize()
            send.set(np.full(total, np.nan, np.float32))
            communicator.all_gather(recv.array, full.array, "float32", stream)
            done.record(stream)
            done.synchronize()
            expected = summed(world, key, total, "float32")
            own = recv.get()
            recv.set(np.full(numel, np.nan, np.float32))
            assert_same(own, expected[world.rank * numel : (world.rank + 1) * numel])
            assert_same(full.get(), expected)


@_law("collectives queued back to back on one buffer")
def back_to_back(world: World) -> None:
    # Each in place and over the one before: x becomes the sum over ranks of x, and so on.
    buffer = put(world.runtime, np.ones(33, np.float64), "float64")
    for step in range(2 * ROUNDS // 3):
        world.communicator.all_reduce(
            buffer.array, buffer.array, "float64", ("sum", "avg")[step % 2], world.stream
        )
        world.communicator.broadcast(buffer.array, step % world.world_size, "float64", world.stream)
    world.stream.synchronize()
    expected = float(world.world_size) ** (ROUNDS // 3)
    assert set(buffer.get().tolist()) == {expected}


@_law("every rank's payload arrives in rank order over the side channel")
def control(world: World) -> None:
    rank, world_size = world.rank, world.world_size
    assert world.control.all_gather(b"") == [b""] * world_size
    unequal = [bytes([r]) * (r * 1000) for r in range(world_size)]
    assert world.control.all_gather(unequal[rank]) == unequal
    large = [bytes([65 + r]) * ((1 << 20) + r) for r in range(world_size)]
    for _ in range(3):
        assert world.control.all_gather(large[rank]) == large
    naps = random.Random(rank)
    for step in range(ROUNDS):
        if naps.random() < 0.1:
            time.sleep(naps.random() * 2e-3)
        told = world.control.all_gather(f"{rank} at {step}".encode())
        assert told == [f"{r} at {step}".encode() for r in range(world_size)]


@_law("the side channel and collectives do not mix")
def both_channels(world: World) -> None:
    buffer = put(world.runtime, np.ones(LONG, np.float32), "float32")
    for step in range(5):
        world.communicator.all_reduce(buffer.array, buffer.array, "float32", "avg", world.stream)
        assert len(world.control.all_gather(bytes(100 * step))) == world.world_size
    world.stream.synchronize()
    assert set(buffer.get().tolist()) == {1.0}


def folded(rows: list[np.ndarray], dtype: str, op: str) -> np.ndarray:
    """Return the sum in rank order: each step rounded to fp32 (fp64), the end to `dtype`.

    A mean of 2, 4, 8, ... rows divides each of them first, of others the sum.
    """
    step = "float64" if dtype == "float64" else "float32"
    count = len(rows) if op == "avg" else 1
    before, after = (count, 1) if count & (count - 1) == 0 else (1, count)
    with np.errstate(all="ignore"):
        total, *terms = (rounded(row.astype(np.float64) / before, step) for row in rows)
        for term in terms:
            total = rounded(total + term, step)
        return rounded(rounded(total / after, step), dtype).astype(numpy_dtype(dtype))


@_each("sums are in rank order, in fp32, and rounded once", FLOATS, host=True)
def order(world: World, dtype: str) -> None:
    for op in ops(dtype):
        for numel in (513, 9000):
            rows = [
                np.random.default_rng([numel, r]).normal(size=numel * world.world_size)
                for r in range(world.world_size)
            ]
            sends = [rounded(r, dtype).astype(numpy_dtype(dtype)) for r in rows]
            expected = folded(sends, dtype, op)
            send = put(world.runtime, sends[world.rank], dtype)
            recv = empty(world.runtime, numel, dtype)
            total = empty(world.runtime, numel * world.world_size, dtype)
            communicator, stream = world.communicator, world.stream
            communicator.reduce_scatter(send.array, recv.array, dtype, op, stream)
            communicator.all_reduce(send.array, total.array, dtype, op, stream)
            stream.synchronize()
            mine = slice(world.rank * numel, (world.rank + 1) * numel)
            assert_same(recv.get(), expected[mine])
            assert_same(total.get(), expected)


@_each("what one step in 16 bits would lose is kept", ("float16", "bfloat16"), host=True)
def small_terms(world: World, dtype: str) -> None:
    # In 16 bits, 1 + eps/2 is 1 again and again; in fp32 the halves add up.
    eps = {"float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    sent = np.full(3, 1 if world.rank == 0 else eps / 2).astype(numpy_dtype(dtype))
    buffer = put(world.runtime, sent, dtype)
    world.communicator.all_reduce(buffer.array, buffer.array, dtype, "sum", world.stream)
    world.stream.synchronize()
    exact = np.full(3, 1 + (world.world_size - 1) * eps / 2)
    assert_same(buffer.get(), rounded(exact, dtype).astype(sent.dtype))


@_each("infinities, NaN and overflow are values", FLOATS, host=True)
def not_finite(world: World, dtype: str) -> None:
    kind = numpy_dtype(dtype)
    greatest = (bits_of(np.array([np.inf], kind)) - 1).view(kind)[0]
    signed = np.inf if world.rank % 2 == 0 else -np.inf
    sent = np.array([np.inf, signed, np.nan, greatest, -greatest, -0.0, 1]).astype(kind)
    buffer = put(world.runtime, sent, dtype)
    world.communicator.all_reduce(buffer.array, buffer.array, dtype, "sum", world.stream)
    world.stream.synchronize()
    rows = []
    for rank in range(world.world_size):
        peer = sent.copy()
        peer[1] = np.inf if rank % 2 == 0 else -np.inf
        rows.append(peer)
    assert_same(buffer.get(), folded(rows, dtype, "sum"))


@_law("one rank alone gets its own bits back", host=True)
def alone(world: World) -> None:
    if world.world_size > 1:
        return
    for dtype in DTYPES:
        kind = numpy_dtype(dtype)
        sent = np.frombuffer(np.random.default_rng(0).bytes(512 * kind.itemsize), kind)
        send, recv = put(world.runtime, sent, dtype), empty(world.runtime, 512, dtype)
        full = empty(world.runtime, 512, dtype)
        communicator, stream = world.communicator, world.stream
        communicator.reduce_scatter(send.array, recv.array, dtype, "sum", stream)
        communicator.all_reduce(send.array, full.array, dtype, "sum", stream)
        communicator.broadcast(send.array, 0, dtype, stream)
        stream.synchronize()
        for buffer in (send, recv, full):
            assert_same(buffer.get(), sent, payload=True)
