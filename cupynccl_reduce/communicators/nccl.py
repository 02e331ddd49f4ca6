"""Collectives between GPUs through CuPy's NCCL. Nothing about parameters or buckets.

At world_size 1 no function of NCCL is ever called: collectives are copies. (NCCL's average over one
rank leaves trailing elements unwritten in some versions.)
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import cupy
from cupy.cuda import nccl

from cupynccl_reduce.errors import CommunicationError, LayoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from cupynccl_reduce.protocols import Array, Control, Op

__all__ = ["MINIMUM_VERSION", "NcclCommunicator", "check_usable", "check_version", "unique_id"]

MINIMUM_VERSION = 21000  # NCCL 2.10: bfloat16 and averages


def check_version(version: int) -> None:
    """Raise LayoutError unless NCCL `version`, as NCCL encodes it, is new enough."""
    if version < MINIMUM_VERSION:
        msg = (
            f"NCCL {_version_text(version)} is too old: {_version_text(MINIMUM_VERSION)} or newer "
            "is needed; pip install -U nvidia-nccl-cu12 (or -cu13)"
        )
        raise LayoutError(msg)


def unique_id() -> bytes:
    """Return a new unique id; made on one rank and given to all."""
    check_usable()
    try:
        return bytes(nccl.get_unique_id())
    except (nccl.NcclError, KeyError) as error:
        msg = f"NCCL made no unique id: {_reason(error)}"
        raise CommunicationError(msg) from error


class NcclCommunicator:
    """protocols.Communicator over NCCL.

    Args:
        world_size: number of ranks.
        unique_id: the same on all ranks; not looked at when world_size is 1.
        rank: this process's position.
        device: index of this rank's GPU.
        direct_bytes: see protocols.Communicator.

    Collective: every rank must construct it; NCCL waits until all have come.
    """

    def __init__(
        self,
        world_size: int,
        unique_id: bytes,
        rank: int,
        device: int,
        *,
        direct_bytes: int = 0,
    ) -> None:
        self.rank = rank
        self.direct_bytes = direct_bytes
        self.world_size = world_size
        self._device = cupy.cuda.Device(device)
        self._lock = threading.Lock()
        self._communicator: Any = None
        self._failed = False
        self._constants: dict[str, int] = {}
        if world_size == 1:
            return
        check_usable()
        # Asked now: after a fault, CUDA may answer nothing any more.
        bus = cupy.cuda.runtime.deviceGetPCIBusId(device)
        self._place = f"{platform.node()}, cuda:{device} at PCI {bus}"
        # NCCL takes the current device; left at the default, every rank would open GPU 0.
        with self._device:
            self._communicator = self._call(nccl.NcclCommunicator, world_size, unique_id, rank)
        # CuPy destroys a communicator when its object dies, and NCCL's destroy waits for peers that
        # may be gone: this reference outlives the interpreter unless close() or abort() takes it.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._communicator))

    def reduce_scatter(self, send: Array, recv: Array, dtype: str, op: Op, stream: Any) -> None:
        """Queue: `recv` becomes row `rank` of the sum over ranks of `send`."""
        self._check_counts("reduce_scatter", send.size, recv.size * self.world_size)
        if self.world_size == 1:
            self._copy(send, recv, stream)
            return
        types = self._constant(dtype), self._constant(op)
        with self._device:
            self._call(
                self._open().reduceScatter,
                *(send.data.ptr, recv.data.ptr, recv.size, *types, stream.ptr),
            )

    def all_gather(self, send: Array, recv: Array, dtype: str, stream: Any) -> None:
        """Queue: row r of `recv` becomes rank r's `send`."""
        self._check_counts("all_gather", recv.size, send.size * self.world_size)
        if self.world_size == 1:
            self._copy(send, recv, stream)
            return
        with self._device:
            self._call(
                self._open().allGather,
                *(send.data.ptr, recv.data.ptr, send.size, self._constant(dtype), stream.ptr),
            )

    def all_reduce(self, send: Array, recv: Array, dtype: str, op: Op, stream: Any) -> None:
        """Queue: `recv` becomes the sum over ranks of `send`."""
        self._check_counts("all_reduce", send.size, recv.size)
        if self.world_size == 1:
            self._copy(send, recv, stream)
            return
        types = self._constant(dtype), self._constant(op)
        with self._device:
            self._call(
                self._open().allReduce,
                *(send.data.ptr, recv.data.ptr, send.size, *types, stream.ptr),
            )

    def broadcast(self, array: Array, root: int, dtype: str, stream: Any) -> None:
        """Queue: `array` becomes rank `root`'s."""
        if self.world_size == 1:
            return
        pointer = array.data.ptr
        with self._device:
            self._call(
                self._open().broadcast,
                *(pointer, pointer, array.size, self._constant(dtype), root, stream.ptr),
            )

    @contextmanager
    def group(self) -> Iterator[None]:
        """Hold back the collectives of this thread, then queue them together.

        If the body raises, none of them is queued, and this communicator can only be aborted.
        """
        if self.world_size == 1:
            yield
            return
        communicator = self._open()
        with self._device:
            self._call(nccl.groupStart)
            try:
                yield
            except BaseException:
                self._failed = True
                # The group must be left, or this thread's later calls would never start. Leaving
                # it would queue what it holds, where peers queue more: NCCL drops a whole group
                # when one of its calls failed, so one without data, type or operation goes first.
                with suppress(nccl.NcclError, KeyError):
                    communicator.allReduce(0, 0, 1, -1, -1, 0)
                with suppress(nccl.NcclError, KeyError):
                    nccl.groupEnd()
                raise
            self._call(nccl.groupEnd)

    def regroup(self, control: Control, ranks: Sequence[int]) -> NcclCommunicator:
        """Return a communicator among `ranks`; collective among them, blocks the host."""
        rank, alone = ranks.index(self.rank), len(ranks) == 1
        token = control.all_gather(b"" if rank or alone else unique_id())[0]
        return NcclCommunicator(
            *(len(ranks), token, rank, self._device.id), direct_bytes=self.direct_bytes
        )

    def check(self) -> None:
        """Raise CommunicationError if NCCL has seen a fault since; does not block the host."""
        with self._lock:  # no other thread may free it meanwhile
            if self._communicator is not None:
                self._call(self._communicator.check_async_error)

    def close(self) -> None:
        """Tear down: waits for peers to do so too, unless a call here has failed. Idempotent."""
        self._end("abort" if self._failed else "destroy")

    def abort(self) -> None:
        """Tear down now; frees this rank's queued collectives, from any thread. Idempotent."""
        self._failed = True
        self._end("abort")

    def _end(self, how: str) -> None:
        with self._lock:  # two threads must not free one communicator
            communicator, self._communicator = self._communicator, None
        if communicator is None:
            return
        with self._device:
            getattr(communicator, how)()
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(communicator))

    def _open(self) -> Any:
        communicator = self._communicator
        if communicator is None:
            ended = "was aborted" if self._failed else "is closed"
            msg = f"this communicator {ended} ({self._context()})"
            raise CommunicationError(msg)
        return communicator

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except (nccl.NcclError, KeyError) as error:
            self._failed = True  # from now on only abort() frees it; destroy() would block
            name = getattr(function, "__name__", function)
            msg = f"NCCL's {name} failed: {_reason(error)} ({self._context()})"
            raise CommunicationError(msg) from error

    def _constant(self, name: str) -> int:
        """Return NCCL's number of a dtype or operation; looked up late, as old CuPys lack some."""
        number = self._constants.get(name)
        if number is None:
            number = getattr(nccl, f"NCCL_{name.upper()}", None)
            if number is None:
                msg = (
                    f"CuPy {cupy.__version__} has no NCCL_{name.upper()}; install CuPy 14 or newer"
                )
                raise LayoutError(msg)
            self._constants[name] = number
        return number

    def _copy(self, send: Array, recv: Array, stream: Any) -> None:
        source, target = send.data.ptr, recv.data.ptr
        if source != target:
            runtime = cupy.cuda.runtime
            with self._device:
                runtime.memcpyAsync(target, source, send.nbytes, runtime.memcpyDefault, stream.ptr)

    def _check_counts(self, what: str, whole: int, rows: int) -> None:
        # NCCL takes one count and trusts it: it would read or write past the shorter array.
        if whole != rows:
            msg = f"{what} over {self.world_size} ranks: arrays of {whole} and {rows} elements"
            raise LayoutError(msg)

    def _context(self) -> str:
        """Return everything that NCCL's own messages leave out."""
        variables = [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith("NCCL_")]
        return (
            f"rank {self.rank} of {self.world_size} on {self._place}, NCCL "
            f"{_version_text(nccl.get_version())}, CuPy built for "
            f"{_version_text(nccl.get_build_version())}, {' '.join(variables) or 'no NCCL_* set'}"
        )

    def __repr__(self) -> str:
        ended = self.world_size > 1 and self._communicator is None
        state = "FAILED" if self._failed else "CLOSED" if ended else "OPEN"
        return f"<NcclCommunicator rank {self.rank} of {self.world_size} {state}>"


def check_usable() -> None:
    """Raise LayoutError, saying what to do, unless NCCL can be used at all."""
    if not nccl.available:
        msg = f"CuPy {cupy.__version__} finds no NCCL; pip install nvidia-nccl-cu12 (or -cu13)"
        raise LayoutError(msg)
    check_version(nccl.get_version())
    if os.environ.get("NCCL_COMM_BLOCKING") == "0":
        msg = "NCCL_COMM_BLOCKING=0 is set, but CuPy has no non-blocking communicators; unset it"
        raise LayoutError(msg)


def _version_text(version: int) -> str:
    # NCCL 2.9 changed the encoding: 2804 is 2.8.4, 20902 is 2.9.2.
    thousand = 1000 if version < 10000 else 10000  # noqa: PLR2004  # the line above
    return f"{version // thousand}.{version % thousand // 100}.{version % 100}"


def _reason(error: BaseException) -> str:
    """Return NCCL's message. CuPy raises KeyError for results that it has no name for."""
    if isinstance(error, KeyError):
        return f"NCCL result {error.args[0]}, which CuPy {cupy.__version__} has no name for"
    return str(error)
