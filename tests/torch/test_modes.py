"""Whatever is sharded, the results are the same bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from cupynccl_reduce import LayoutError, ProtocolError, run_local
from cupynccl_reduce.torch import attach

if TYPE_CHECKING:
    from cupynccl_reduce import World

MODES = (1, 2, 3)
MICRO, STEPS = 3, 2


class Blocks(nn.Module):
    """Layers whose products stay small integers; the last weight is the first one's, tied."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=i % 2 == 0) for i in range(3))
        self.unused = nn.Parameter(torch.zeros(5))
        self.last = nn.Linear(3, 4, bias=False)
        self.last.weight = self.first.weight
        for number, param in enumerate(self.parameters()):
            values = torch.arange(param.numel()).reshape(param.shape) + number
            param.data = (values % 3 - 1).to(param.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.linear(x, self.last.weight.t())


def rows(world: World, step: int, micro: int) -> torch.Tensor:
    """Return rows of small integers, others on every rank."""
    seed = (step * MICRO + micro) * world.world_size + world.rank
    return torch.randint(-1, 2, (2, 3), generator=torch.Generator().manual_seed(seed)).double()


def train(world: World, zero: Any, **step: Any) -> list[torch.Tensor]:
    """Return the parameters after some steps: integers far below 2**53, so that sums are exact."""
    model = Blocks().double()
    with attach(model, world, zero=zero, op="sum", bucket_bytes=64) as sharded:
        optimizer = torch.optim.SGD(sharded.parameters(), lr=1.0)
        for number in range(STEPS):
            for micro in range(MICRO):
                sharded.backward(model(rows(world, number, micro)).sum())
                assert all(p.grad is None for p in model.parameters()) == (zero != 1)
            sharded.step(optimizer, **step)
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("step", [{}, {"max_norm": 1e30}])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_mode_gives_the_same_bits(world_size: int, step: dict[str, Any]) -> None:
    ranks = {zero: run_local(world_size, lambda w, z=zero: train(w, z, **step)) for zero in MODES}
    first = ranks[MODES[0]][0]
    assert 10 < max(param.abs().max() for param in first) < 2.0**50
    for zero, results in ranks.items():
        for result in results:
            for ours, theirs in zip(result, first, strict=True):
                assert torch.equal(ours, theirs), zero


def test_zero_1_reduces_once_in_a_step() -> None:
    def work(world: World) -> None:
        model = Blocks().double()
        with attach(model, world, zero=1, bucket_bytes=64) as sharded:
            optimizer = torch.optim.SGD(sharded.parameters(), lr=1.0)
            with pytest.raises(ProtocolError):
                sharded.step(optimizer)
            for _ in range(4):
                sharded.backward(model(rows(world, 0, 0)).sum())
            assert sharded.reducer.statistics().launches == 0
            sharded.step(optimizer)
            assert sharded.reducer.statistics().launches == len(sharded.registry.buckets)
            assert all(param.grad is None for param in model.parameters())
            with pytest.raises(ProtocolError, match="used these gradients already"):
                sharded.step(optimizer)
            sharded.backward(model(rows(world, 0, 0)).sum())
            sharded.discard()
            with pytest.raises(ProtocolError):
                sharded.step(optimizer)

    run_local(2, work)


@pytest.mark.parametrize("zero", [0, 4, "2", None])
def test_an_unknown_mode_is_refused(zero: Any) -> None:
    def work(world: World) -> None:
        with pytest.raises(LayoutError, match="zero must be"):
            attach(Blocks(), world, zero=zero)

    run_local(2, work)
