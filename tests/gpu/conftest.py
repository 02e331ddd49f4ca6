"""Skip this folder where no GPU is visible; never because CuPy or NCCL is broken."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from cupynccl_reduce.gpus import count_gpus

if TYPE_CHECKING:
    from pathlib import Path


class WithoutGpu(pytest.Module):
    """A test module that is not even imported: it would import CuPy."""

    def collect(self) -> NoReturn:
        pytest.skip("no GPU is visible", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> pytest.Module | None:
    if count_gpus():
        return None
    return WithoutGpu.from_parent(parent, path=module_path)
