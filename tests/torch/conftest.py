"""What every torch test needs; nothing is imported from here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from cupynccl_reduce.torch import Sharded


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    # Ranks are threads here: torch's own would only fight over the cores.
    torch.set_num_threads(1)


@pytest.fixture
def reduced() -> Callable[[Sharded], dict[str, torch.Tensor]]:
    """Return the function that closes a cycle and puts its reduced gradients together."""

    def gather(sharded: Sharded) -> dict[str, torch.Tensor]:
        full = sharded.registry.gather(sharded.reducer.wait())
        return {name: torch.from_numpy(array.astype("float64")) for name, array in full.items()}

    return gather
