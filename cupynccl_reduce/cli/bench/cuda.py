"""What the bench asks of CUDA: a device, its end of work, timed events, names. Not for hosts."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import cupy
from cupy.cuda import nccl

__all__ = ["CudaClock", "choose_device", "describe", "synchronize"]


def choose_device(device: int) -> None:
    """Make `device` current for CuPy on this thread, for all that follows."""
    cupy.cuda.Device(device).use()


def synchronize() -> None:
    """Block the host until every stream of the current device is done."""
    cupy.cuda.Device().synchronize()


class CudaClock:
    """Clock of the cuda runtime: timed events; the host's marks are aligned with them at start."""

    def __init__(self, device: int) -> None:
        self._device = cupy.cuda.Device(device)
        self._zero: Any = None
        self._zero_s = 0.0

    def start(self) -> None:
        """Make now zero, on the device and on the host. Blocks the host."""
        synchronize()
        self._zero = self.mark(cupy.cuda.Stream.null)
        self._zero.synchronize()
        self._zero_s = time.perf_counter()

    def mark(self, stream: Any) -> Any:
        """Queue a mark on `stream`."""
        # Hooks mark on autograd's thread, whose current device may be another one.
        with self._device:
            event = cupy.cuda.Event()
            event.record(stream)
        return event

    def now(self) -> float:
        """Return a mark of the host's own time."""
        return time.perf_counter()

    def read_ms(self, mark: Any) -> float:
        """Return when `mark` was passed."""
        if isinstance(mark, float):
            return (mark - self._zero_s) * 1e3
        return float(cupy.cuda.get_elapsed_time(self._zero, mark))


def describe() -> dict[str, Any]:
    """Return names and versions of the current device and of what drives it."""
    runtime = cupy.cuda.runtime
    name = runtime.getDeviceProperties(cupy.cuda.Device().id)["name"]
    version = nccl.get_version() if nccl.available else 0
    return {
        "gpu": name.decode() if isinstance(name, bytes) else name,
        "gpus": runtime.getDeviceCount(),
        "driver": _driver(),
        "cuda": _dotted(runtime.runtimeGetVersion(), 1000, 10),
        "nccl": _dotted(version, 10000, 100) + f".{version % 100}",
        "cupy": cupy.__version__,
    }


def _dotted(version: int, major: int, minor: int) -> str:
    return f"{version // major}.{version % major // minor}"


def _driver() -> str:
    """Return the version of NVIDIA's driver, which only its management library tells."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return "unknown"
    text = ctypes.create_string_buffer(96)
    if library.nvmlInit_v2() or library.nvmlSystemGetDriverVersion(text, len(text)):
        return "unknown"
    return text.value.decode()
