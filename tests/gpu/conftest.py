"""Skip this folder where no GPU is visible; never because CuPy or NCCL is broken."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if TYPE_CHECKING:
    from pathlib import Path


def count_gpus() -> int:
    """Return how many GPUs the driver shows this process."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0  # no driver, so no GPU
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


class WithoutGpu(pytest.Module):
    """A test module that is not even imported: it would import CuPy."""

    def collect(self) -> NoReturn:
        pytest.skip("no GPU is visible", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> pytest.Module | None:
    if count_gpus():
        return None
    return WithoutGpu.from_parent(parent, path=module_path)
