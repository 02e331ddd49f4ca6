"""step(max_norm=, scaler=): torch's clip_grad_norm_ and GradScaler on one process are the model."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from cupynccl_reduce import LayoutError, ProtocolError
from cupynccl_reduce import run_local as run
from cupynccl_reduce.torch import attach

if TYPE_CHECKING:
    from cupynccl_reduce import World

WORLDS = pytest.mark.parametrize("world_size", [1, 2, 4])
ELEMENTS = 8  # of a batch
STEPS = 6


def build() -> nn.Module:
    """Build a model with tied weights, an unused and a one-element parameter."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 1))
    model[2].weight = model[0].weight
    model.unused = nn.Parameter(torch.ones(3))
    return model


def batches(count: int = STEPS) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(ELEMENTS, 5, dtype=torch.float32) for _ in range(count)]


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean() * 30


def fill_in(model: nn.Module) -> None:
    """Give what has no gradient one of zero, as a missing one counts here."""
    for param in model.parameters():
        if param.grad is None:
            param.grad = torch.zeros_like(param)


@WORLDS
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_clipping_equals_clip_grad_norm(
    world_size: int, max_norm: float, dtype: torch.dtype, error: float
) -> None:
    net, data = build().to(dtype), [batch.to(dtype) for batch in batches()]
    alone = copy.deepcopy(net)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.01, momentum=0.9)
    expected = []
    for batch in data:
        optimizer.zero_grad()
        loss_of(alone, batch).backward()
        fill_in(alone)
        norm = nn.utils.clip_grad_norm_(alone.parameters(), max_norm)
        optimizer.step()
        expected.append((norm.item(), copy.deepcopy(alone.state_dict())))

    def rank(world: World) -> list[Any]:
        model = copy.deepcopy(net)
        steps = []
        with attach(model, world, bucket_bytes=64) as sharded:
            optimizer = torch.optim.SGD(sharded.parameters(), lr=0.01, momentum=0.9)
            for batch in data:
                sharded.backward(loss_of(model, batch[world.rank :: world_size]))
                norm = sharded.step(optimizer, max_norm=max_norm)
                assert norm is not None
                steps.append((norm, copy.deepcopy(model.state_dict())))
        return steps

    everyone = run(world_size, rank)
    clipped = [wanted > max_norm for wanted, _ in expected]
    assert all(clipped) if max_norm < 1 else not any(clipped)
    for step, (wanted, state) in enumerate(expected):
        for steps in everyone:
            norm, mine = steps[step]
            assert (norm.shape, norm.dtype) == ((), torch.float64)
            assert norm.item() == pytest.approx(wanted, rel=error)
            assert torch.equal(norm, everyone[0][step][0])
            for name, value in state.items():
                torch.testing.assert_close(mine[name], value, rtol=10 * error, atol=error)


@WORLDS
def test_the_norm_is_that_of_fp64_over_the_reduced_gradients(world_size: int) -> None:
    net, (batch,) = build(), batches(1)

    def rank(world: World) -> None:
        model = copy.deepcopy(net)
        with attach(model, world) as sharded:
            optimizer = torch.optim.SGD(sharded.parameters(), lr=0.0)
            sharded.backward(loss_of(model, batch[world.rank :: world_size]))
            norm = sharded.step(optimizer, max_norm=math.inf)  # clips nothing
            assert norm is not None
            full = sharded.registry.gather(sharded.reducer.wait())
        flat = torch.cat([torch.from_numpy(a).double().flatten() for a in full.values()])
        assert norm.item() == pytest.approx(flat.norm().item(), rel=1e-12)

    run(world_size, rank)


class Poison(nn.Module):
    """One parameter per element; the gradient of any of them can be made not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.arange(1.0, 6.0))
        self.last = nn.Parameter(torch.tensor([2.0]))  # on one rank only: others have none of it

    def forward(self, factors: torch.Tensor) -> torch.Tensor:
        return (self.first * factors[:5]).sum() + (self.last * factors[5:]).sum()


def poisoned(steps: int) -> list[torch.Tensor]:
    """Return gradients of some steps: every other one is not finite, each in another place."""
    torch.manual_seed(2)
    every = []
    for step in range(steps):
        factors = torch.randint(-4, 5, (6,)).float()
        if step % 2:
            factors[step % 6] = (math.inf, math.nan, -math.inf)[step % 3]
        every.append(factors)
    return every


def make_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)


@WORLDS
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("max_norm", [None, 3.0])
def test_a_scaler_skips_and_scales_as_on_one_process(
    world_size: int, max_norm: float | None, fused: bool
) -> None:
    net, data = Poison(), poisoned(12)
    alone, scaler = copy.deepcopy(net), make_scaler()
    optimizer = torch.optim.Adam(alone.parameters(), lr=0.1, fused=fused)
    expected = []
    for factors in data:
        optimizer.zero_grad()
        scaler.scale(alone(factors)).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(alone.parameters(), max_norm or math.inf)
        scaler.step(optimizer)
        scaler.update()
        expected.append((norm.item(), scaler.get_scale(), copy.deepcopy(alone.state_dict())))
    assert len({scale for _, scale, _ in expected}) > 2

    def rank(world: World) -> list[Any]:
        model, scaler = copy.deepcopy(net), make_scaler()
        steps = []
        with attach(model, world) as sharded:
            optimizer = torch.optim.Adam(sharded.parameters(), lr=0.1, fused=fused)
            for factors in data:
                # Not finite on one rank only, which need not be the one that keeps the element.
                mine = factors if world.rank == world_size - 1 else factors.nan_to_num(0, 0, 0)
                sharded.backward(scaler.scale(model(mine)))
                norm = sharded.step(optimizer, max_norm=max_norm, scaler=scaler)
                assert norm is not None
                scaler.update()
                steps.append((norm, scaler.get_scale(), copy.deepcopy(model.state_dict())))
        return steps

    everyone = run(world_size, rank)
    for step, (wanted, scale, state) in enumerate(expected):
        for steps in everyone:
            norm, mine, parameters = steps[step]
            assert math.isfinite(norm.item()) == math.isfinite(wanted) == (step % 2 == 0)
            if math.isfinite(wanted):
                assert norm.item() == pytest.approx(wanted, rel=1e-6)
            assert mine == scale
            for name, value in state.items():
                torch.testing.assert_close(parameters[name], value)
                assert torch.equal(parameters[name], everyone[0][step][2][name])


def test_a_skipped_step_changes_neither_parameters_nor_the_optimizer() -> None:
    def rank(world: World) -> None:
        model, scaler = Poison(), make_scaler()
        before = copy.deepcopy(model.state_dict())
        with attach(model, world) as sharded:
            optimizer = torch.optim.Adam(sharded.parameters(), lr=0.1)
            factors = torch.ones(6)
            factors[3] = math.inf if world.rank else 1.0
            sharded.backward(scaler.scale(model(factors)))
            norm = sharded.step(optimizer, scaler=scaler)
            assert norm is not None
            assert not norm.isfinite()
            scaler.update()
            assert scaler.get_scale() == 2.0**11
            assert not optimizer.state
            for name, value in model.state_dict().items():
                assert torch.equal(value, before[name])
            with pytest.raises(ProtocolError, match="used these gradients already"):
                sharded.step(optimizer, scaler=scaler)

    run(2, rank)


def test_a_disabled_scaler_scales_nothing_and_skips_nothing() -> None:
    def rank(world: World) -> None:
        model, scaler = Poison(), torch.amp.GradScaler("cpu", enabled=False)
        with attach(model, world) as sharded:
            optimizer = torch.optim.SGD(sharded.parameters(), lr=1.0)
            sharded.backward(scaler.scale(model(torch.ones(6))))
            norm = sharded.step(optimizer, scaler=scaler)
            scaler.update()
            assert norm is not None
            assert norm.item() == pytest.approx(math.sqrt(6))
        assert model.first.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]

    run(2, rank)


def test_two_optimizers_share_the_clipping_and_the_scaler() -> None:
    def rank(world: World) -> list[Any]:
        model, scaler = Poison(), make_scaler()
        with attach(model, world) as sharded:
            shards = dict(sharded.named_parameters())
            first = torch.optim.SGD([shards["first"]], lr=1.0)
            last = torch.optim.SGD([shards["last"]], lr=1.0)
            for factors in (torch.full((6,), 2.0), torch.full((6,), math.nan)):
                sharded.backward(scaler.scale(model(factors)))
                norms = [
                    sharded.step(optimizer, max_norm=1.0, scaler=scaler)
                    for optimizer in (first, last)
                ]
                assert norms[0] is not None
                assert norms[0] is norms[1]
                for other in ({}, {"max_norm": 2.0, "scaler": scaler}):
                    with pytest.raises(ProtocolError, match="another max_norm or scaler"):
                        sharded.step(torch.optim.SGD([shards["last"]], lr=1.0), **other)
                scaler.update()
            assert scaler.get_scale() == 2.0**11
        return model.first.tolist() + model.last.tolist()

    each = 1 / math.sqrt(6)
    wanted = [1 - each, 2 - each, 3 - each, 4 - each, 5 - each, 2 - each]
    for values in run(2, rank):
        assert values == pytest.approx(wanted, abs=1e-6)


def test_float16_shards_are_unscaled_where_torch_refuses_to() -> None:
    def rank(world: World) -> None:
        model = nn.Linear(4, 4, bias=False, dtype=torch.float16)
        nn.init.zeros_(model.weight)
        scaler = make_scaler()
        with attach(model, world, shard_dtype="float16") as sharded:
            optimizer = torch.optim.SGD(sharded.parameters(), lr=1.0)
            sharded.backward(scaler.scale(model.weight.sum()))
            norm = sharded.step(optimizer, scaler=scaler)
            assert norm is not None
            assert norm.item() == 4.0
        assert set(model.weight.flatten().tolist()) == {-1.0}

    run(2, rank)


def test_a_norm_that_was_returned_stays_what_it_was() -> None:
    def rank(world: World) -> list[float]:
        model = Poison()
        norms = []
        with attach(model, world) as sharded:
            optimizer = torch.optim.SGD(sharded.parameters(), lr=1.0)
            for value in (1.0, 2.0, 3.0):
                sharded.backward(model(torch.full((6,), value)))
                norms.append(sharded.step(optimizer, max_norm=1.0))
        return [float(norm) for norm in norms if norm is not None]

    for norms in run(2, rank):
        assert norms == pytest.approx([value * math.sqrt(6) for value in (1, 2, 3)])


def test_step_without_either_returns_nothing_and_refuses_bad_values() -> None:
    def rank(world: World) -> None:
        model = Poison()
        with attach(model, world) as sharded:
            optimizer = torch.optim.SGD(sharded.parameters(), lr=1.0)
            sharded.backward(model(torch.ones(6)))
            with pytest.raises(LayoutError, match="max_norm must be a number >= 0"):
                sharded.step(optimizer, max_norm=-1.0)
            assert sharded.step(optimizer) is None  # nothing has changed
            sharded.backward(model(torch.ones(6)))
            sharded.reducer.wait()
            with pytest.raises(ProtocolError, match=r"between the cycle's last backward\(\)"):
                sharded.step(optimizer, max_norm=1.0)

    run(2, rank)
