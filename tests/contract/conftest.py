"""The runtimes under test. Never imported from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from cupynccl_reduce.gpus import count_gpus
from cupynccl_reduce.runtimes.host import HostRuntime

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module", params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def runtime(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return each runtime in turn; closed at the end of the module, twice."""
    if request.param == "host":
        made: Any = HostRuntime()
    else:
        if not count_gpus():
            pytest.skip("no NVIDIA device is visible")
        from cupynccl_reduce.runtimes.cuda import CudaRuntime

        made = CudaRuntime(0)
    yield made
    made.close()
    made.close()
