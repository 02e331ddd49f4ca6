"""Skip this folder without safetensors. Wait for no disk: it proves nothing, and takes long."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if TYPE_CHECKING:
    from pathlib import Path


class WithoutSafetensors(pytest.Module):
    """A test module that is not even imported."""

    def collect(self) -> NoReturn:
        pytest.skip("safetensors is not installed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> pytest.Module | None:
    if find_spec("safetensors"):
        return None
    return WithoutSafetensors.from_parent(parent, path=module_path)


@pytest.fixture(autouse=True)
def _no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
