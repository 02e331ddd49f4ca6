"""CUDA events whose queries tell a failed GPU from a busy one, and raw handles of streams."""

from __future__ import annotations

from typing import Any

import cupy

from cupynccl_reduce.errors import CommunicationError

__all__ = ["CudaEvent", "Handle"]

SUCCESS, NOT_READY, CAPTURING = 0, 600, 900


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


class Handle:
    """A raw stream handle in the CUDA stream protocol; keeps the caller's stream alive."""

    def __init__(self, handle: int, owner: Any) -> None:
        self.handle = handle
        self.owner = owner

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle
