"""A wall for every simulation: one that hangs fails, and the others still run."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT_S = 300.0


class HangError(BaseException):
    """Not an Exception: neither a test nor Hypothesis is to catch it and go on."""


def _hung(*_: object) -> None:
    msg = "this test hangs"
    raise HangError(msg)


@pytest.fixture(autouse=True)
def limit(request: pytest.FixtureRequest) -> Iterator[None]:
    """End a test that hangs: the main thread is freed; the ranks' threads are daemons."""
    marker = request.node.get_closest_marker("limit")
    before = signal.signal(signal.SIGALRM, _hung)
    signal.setitimer(signal.ITIMER_REAL, marker.args[0] if marker else LIMIT_S)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def pytest_configure(config: pytest.Config) -> None:
    """Name the marker: pytest is strict."""
    config.addinivalue_line("markers", "limit(seconds): when a test counts as hanging")
