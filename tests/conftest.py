"""Factories that tests share, and a wall for every test. Never imported from."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

import cupynccl_reduce
from cupynccl_reduce import ParamSpec, Reducer, Registry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from cupynccl_reduce import World

# Laws are about values and order, never about time: a slow machine changes no verdict.
settings.register_profile("laws", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", settings.get_profile("laws"), max_examples=5000)
settings.load_profile("laws")

# For what hangs, on the slowest machine; memcheck slows all down many times.
PATIENCE = float(os.environ.get("TEST_PATIENCE", "1"))
LIMIT_S = 300.0


class HangError(BaseException):
    """Not an Exception: neither a test, the engine nor Hypothesis is to catch and go on."""


def _hung(*_: object) -> None:
    msg = "this test hangs"
    raise HangError(msg)


@pytest.fixture(autouse=True)
def limit(request: pytest.FixtureRequest) -> Iterator[None]:
    """End a test that hangs: the main thread is freed; the ranks' threads are daemons."""
    marker = request.node.get_closest_marker("limit")
    before = signal.signal(signal.SIGALRM, _hung)
    limit_s = marker.args[0] if marker else LIMIT_S
    signal.setitimer(signal.ITIMER_REAL, limit_s * PATIENCE)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def pytest_configure(config: pytest.Config) -> None:
    """Name the markers: pytest is strict. Give out exact memory, where memcheck watches."""
    # A shell's background job ignores Ctrl-C, and so would every process that tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "limit(seconds): when a test counts as hanging")
    config.addinivalue_line("markers", "pool: counts what CuPy's own pool does")
    if "TEST_EXACT_MEMORY" in os.environ:
        import cupy

        class ExactPool(cupy.cuda.MemoryPool):
            """A pool that rounds no size up and keeps no block: its neighbours are not ours."""

            def malloc(self, nbytes: int) -> Any:
                return cupy.cuda.MemoryPointer(cupy.cuda.Memory(nbytes), 0)

        cupy.cuda.MemoryPool = ExactPool


@pytest.fixture(scope="session")
def make_params() -> Callable[..., list[ParamSpec]]:
    """Return a factory: shapes (an integer is a length) -> parameters p0, p1, ..."""

    def make(
        *shapes: int | tuple[int, ...], dtype: str = "float32", **fields: Any
    ) -> list[ParamSpec]:
        return [
            ParamSpec(f"p{i}", (shape,) if isinstance(shape, int) else shape, dtype, **fields)
            for i, shape in enumerate(shapes)
        ]

    return make


@pytest.fixture(scope="session")
def reduce_cycle() -> Callable[..., dict[str, Any]]:
    """Return a function that reduces one cycle on one rank, and puts all shards together.

    `backwards` has one mapping, name -> gradient (None skips it), for each backward.
    """

    def reduce(
        world: World,
        params: Sequence[ParamSpec],
        *backwards: Mapping[str, Any] | Iterable[tuple[str, Any]],
        bucket_bytes: int = 1 << 20,
        **options: Any,
    ) -> dict[str, Any]:
        registry = Registry(params, world, bucket_bytes=bucket_bytes)
        with Reducer(registry, **options) as reducer:
            for gradients in backwards:
                with reducer.backward():
                    for name, grad in dict(gradients).items():
                        if grad is None:
                            reducer.skip_grad(name)
                        else:
                            reducer.reduce_grad(name, grad)
            return registry.gather(reducer.wait())

    return reduce


@pytest.fixture(scope="session")
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs source in a fresh interpreter, with a wall limit.

    For what may crash or hang, and for what must not be imported yet.
    """
    paths = [str(Path(cupynccl_reduce.__file__).parents[1]), str(Path(__file__).parent)]

    def run(source: str, *, env: Mapping[str, str] = {}, limit_s: float = 60.0) -> Any:
        return subprocess.run(
            [sys.executable, "-W", "error", "-c", source],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **env},
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )

    return run
