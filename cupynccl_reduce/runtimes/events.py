"""CUDA events whose queries tell a failed GPU from a busy one, and raw handles of streams."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import cupy

from cupynccl_reduce.errors import CommunicationError

__all__ = ["CudaEvent", "Handle", "WatchedEvent"]

SUCCESS, NOT_READY, CAPTURING = 0, 600, 900
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class CudaEvent(cupy.cuda.Event):  # type: ignore[misc]  # CuPy is untyped
    """A CuPy event without timing."""

    def __init__(self) -> None:
        super().__init__(disable_timing=True)

    @property
    def done(self) -> bool:
        """Whether the recorded point has passed. Does not block the host.

        False while another thread captures a graph, which forbids asking.

        Raises:
            CommunicationError: CUDA has failed; CuPy's own property is False for ever then.
        """
        status = cupy.cuda.runtime.eventQuery(self.ptr)
        if status not in (SUCCESS, NOT_READY, CAPTURING):
            name = cupy.cuda.runtime.CUDARuntimeError(status)
            msg = f"CUDA has failed: {name}"
            raise CommunicationError(msg)
        return bool(status == SUCCESS)


class WatchedEvent(CudaEvent):
    """An event that another thread than its streams' may query, also while one captures a graph.

    A query from a thread in the default mode would be refused then, and end the capture
    (cudaStreamCaptureModeGlobal).
    """

    @property
    def done(self) -> bool:
        """See CudaEvent."""
        before = _exchange_capture_mode(RELAXED)
        try:
            return bool(CudaEvent.done.__get__(self))
        finally:
            _exchange_capture_mode(before)


def _exchange_capture_mode(mode: int) -> int:
    """Set how this thread minds captures of others, and return how it did before."""
    value = ctypes.c_int(mode)
    _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(value))
    return value.value


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")  # CuPy does not have the call


class Handle:
    """A raw stream handle in the CUDA stream protocol; keeps the caller's stream alive."""

    def __init__(self, handle: int, owner: Any) -> None:
        self.handle = handle
        self.owner = owner

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle
