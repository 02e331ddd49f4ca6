"""sharded.step(): optimizers on shards, against one process that trains on the whole batch."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from cupynccl_reduce import LayoutError, ProtocolError
from cupynccl_reduce import run_local as run
from cupynccl_reduce.torch import Sharded, attach

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from cupynccl_reduce import World

    Batches = list[tuple[torch.Tensor, torch.Tensor]]
    Reduced = Callable[[Sharded], dict[str, torch.Tensor]]

WORLDS = pytest.mark.parametrize("world_size", [1, 2, 4])


def build_mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 3))


def build_batches(steps: int, numel: int = 8) -> Batches:
    torch.manual_seed(1)
    return [(torch.randn(numel, 7), torch.randint(0, 3, (numel,))) for _ in range(steps)]


def adamw(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    decay, other = [], []
    for name, param in named:
        (decay if name.endswith("weight") else other).append(param)
    return torch.optim.AdamW([{"params": decay}, {"params": other, "weight_decay": 0.0}], lr=1e-2)


def train_alone(model: nn.Module, data: Batches) -> list[dict[str, torch.Tensor]]:
    optimizer = adamw(model.named_parameters())
    states = []
    for inputs, labels in data:
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        states.append(copy.deepcopy(model.state_dict()))
    return states


@WORLDS
@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 64}, {"policy": "arrival"}])
def test_training_equals_one_process(world_size: int, options: dict[str, Any]) -> None:
    net, data = build_mlp(), build_batches(5)  # here: ranks that are threads share one generator
    expected = train_alone(copy.deepcopy(net), data)

    def rank(world: World) -> Any:
        model = copy.deepcopy(net)
        if world.rank:
            nn.init.zeros_(model[0].weight)  # attach() mends it
        states = []
        with attach(model, world, **options) as sharded:
            optimizer = adamw(sharded.named_parameters())
            for inputs, labels in data:
                mine = slice(world.rank, None, world_size)
                sharded.backward(functional.cross_entropy(model(inputs[mine]), labels[mine]))
                sharded.step(optimizer)
                states.append(copy.deepcopy(model.state_dict()))
        return states

    everyone = run(world_size, rank)
    for step in range(len(data)):
        for name, wanted in expected[step].items():
            for states in everyone:
                assert torch.equal(states[step][name], everyone[0][step][name])
                # fp32: the mean over ranks is rounded in another order than the batch's, and Adam
                # divides by the square root of gradients that may be near 0.
                torch.testing.assert_close(states[step][name], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("local", [False, True])
def test_micro_batches_equal_the_whole_batch(local: bool) -> None:
    net, data = build_mlp(), build_batches(3)
    expected = train_alone(copy.deepcopy(net), data)

    def rank(world: World) -> Any:
        model = copy.deepcopy(net)
        states = []
        with attach(model, world) as sharded:
            optimizer = adamw(sharded.named_parameters())
            for inputs, labels in data:
                first, second = (slice(world.rank + 2 * k, None, 4) for k in range(2))
                with sharded.no_sync() if local else nullcontext():
                    loss = functional.cross_entropy(model(inputs[first]), labels[first])
                    sharded.backward(loss / 2)
                loss = functional.cross_entropy(model(inputs[second]), labels[second])
                sharded.backward(loss / 2)
                sharded.step(optimizer)
                states.append(copy.deepcopy(model.state_dict()))
        return states

    for states in run(2, rank):
        for step, state in enumerate(states):
            for name, wanted in expected[step].items():
                torch.testing.assert_close(state[name], wanted, rtol=1e-4, atol=1e-5)


def test_sgd_equals_numpy_model_bit_for_bit() -> None:  # N7
    def rank(world: World) -> Any:
        model = nn.Module()
        model.p = nn.Parameter(torch.arange(7.0) * (world.rank == 0))
        history = []
        with attach(model, world, op="sum") as sharded:
            optimizer = torch.optim.SGD(sharded.parameters(), lr=0.5)
            for step in range(3):
                sharded.backward((model.p * (world.rank + step)).sum())
                sharded.step(optimizer)
                history.append(model.p.detach().numpy().copy())
        return history

    everyone = run(3, rank)
    wanted = np.arange(7, dtype=np.float32)
    for step in range(3):
        wanted -= np.float32(0.5) * (3 + 3 * step)
        for history in everyone:
            np.testing.assert_array_equal(history[step], wanted)


@pytest.mark.parametrize("kind", ["for-loop", "foreach", "fused"])
@pytest.mark.parametrize("optimizer_type", [torch.optim.SGD, torch.optim.AdamW])
def test_optimizers_accept_empty_shards(optimizer_type: type[Any], kind: str) -> None:
    options = {"foreach": kind == "foreach", "fused": kind == "fused"}

    def rank(world: World) -> Any:
        model = nn.Module()
        model.scale = nn.Parameter(torch.tensor(1.0))
        model.none = nn.Parameter(torch.zeros(0, 3))
        model.p = nn.Parameter(torch.ones(5))
        with attach(model, world) as sharded:
            optimizer = optimizer_type(sharded.parameters(), lr=0.5, **options)
            assert len(optimizer.param_groups[0]["params"]) == 3
            for _ in range(2):
                sharded.backward(model.scale * model.p.sum() + model.none.sum())
                sharded.step(optimizer)
            optimizer.load_state_dict(optimizer.state_dict())
            return model.scale.item(), model.p.tolist()

    alone = run(1, rank)[0]
    assert alone[0] != 1.0
    for result in run(4, rank):
        torch.testing.assert_close(result, alone)


def test_16_bit_parameters_have_fp32_masters() -> None:
    def rank(world: World) -> Any:
        model = nn.Linear(4, 2, bias=False, dtype=torch.bfloat16)
        nn.init.ones_(model.weight)
        with attach(model, world) as sharded:
            (shard,) = sharded.parameters()
            optimizer = torch.optim.SGD([shard], lr=2.0**-10)  # less than half a bf16 step from 1
            seen = []
            for _ in range(8):
                sharded.backward(model(torch.ones(1, 4, dtype=torch.bfloat16)).sum())
                sharded.step(optimizer)
                seen.append(model.weight[0, 0].item())
                assert shard.tolist() == [1 - len(seen) * 2.0**-10] * 4
            return seen

    for seen in run(2, rank):
        assert seen == [torch.tensor(1 - (k + 1) * 2.0**-10).bfloat16().item() for k in range(8)]
        assert seen[-1] == 1 - 2.0**-7


def test_gather_brings_shards_into_the_model() -> None:
    """As after a checkpoint was loaded into them; 16-bit parameters get rounded values."""

    def rank(world: World) -> None:
        model = build_mlp().bfloat16()
        with attach(model, world) as sharded:
            for shard in sharded.parameters():
                shard.detach().fill_(1 + 2.0**-7 + 2.0**-9)
            sharded.gather()
            assert all((param == 1 + 2.0**-7).all() for param in model.parameters())
        with pytest.raises(ProtocolError, match="detached"):
            sharded.gather()

    run(3, rank)


@pytest.mark.parametrize("world_size", [1, 2])
def test_channels_last_parameters_keep_their_layout(world_size: int) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    images = torch.randn(2, 3, 5, 5)
    plain = copy.deepcopy(conv)
    plain(images).sum().backward()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()

    def rank(world: World) -> Any:
        model = copy.deepcopy(conv)
        with attach(model, world) as sharded:
            sharded.backward(model(images).sum())
            sharded.step(torch.optim.SGD(sharded.parameters(), lr=0.5))
        assert model.weight.stride() == conv.weight.stride()
        return model.weight.detach()

    for weight in run(world_size, rank):
        torch.testing.assert_close(weight, plain.weight.detach())


def test_values_in_place() -> None:
    def rank(world: World) -> None:
        model = nn.Linear(3, 2)
        addresses = [p.data_ptr() for p in model.parameters()]
        with attach(model, world) as sharded:
            sharded.backward(model(torch.ones(1, 3)).sum())
            sharded.step(torch.optim.SGD(sharded.parameters(), lr=0.5))
        assert [p.data_ptr() for p in model.parameters()] == addresses
        assert all(p.requires_grad and p.grad is None for p in model.parameters())

    run(2, rank)


def test_backward_through_an_older_graph_is_torchs_error() -> None:
    def rank(world: World) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        with attach(model, world) as sharded:
            loss = model(torch.ones(1, 3)).sum()
            sharded.backward(loss, retain_graph=True)
            sharded.step(torch.optim.SGD(sharded.parameters(), lr=0.5))
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                sharded.backward(loss)
            sharded.discard()

    run(2, rank)


def test_optimizer_with_a_full_parameter_is_refused() -> None:
    def rank(world: World) -> None:
        model = nn.Linear(3, 2)
        with attach(model, world) as sharded:
            sharded.backward(model(torch.ones(1, 3)).sum())
            mixed = [*sharded.parameters(), model.bias]
            for params, name in ((model.parameters(), "weight"), (mixed, "bias")):
                with pytest.raises(LayoutError, match=f"holds the full parameter '{name}'"):
                    sharded.step(torch.optim.SGD(params, lr=0.5))
            with pytest.raises(LayoutError, match="none of the shards"):
                sharded.step(torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.5))
            sharded.step(torch.optim.SGD(sharded.parameters(), lr=0.5))  # state is unchanged

    run(2, rank)


def test_optimizers_with_some_of_the_shards() -> None:
    def rank(world: World) -> Any:
        model = nn.Module()
        for name in "abc":
            model.register_parameter(name, nn.Parameter(torch.zeros(5)))
        with attach(model, world) as sharded:
            shards = dict(sharded.named_parameters())
            one = torch.optim.SGD([shards["a"]], lr=1.0)
            other = torch.optim.SGD([shards["b"]], lr=2.0)
            for _ in range(2):
                sharded.backward(model.a.sum() + model.b.sum() + model.c.sum())
                sharded.step(one)
                sharded.step(other)
            return [set(model.get_parameter(name).tolist()) for name in "abc"]

    assert run(2, rank) == [[{-2.0}, {-4.0}, {0.0}]] * 2


def test_step_without_gradients_is_an_error() -> None:
    def rank(world: World) -> None:
        model = nn.Linear(3, 2)
        x = torch.ones(1, 3)
        with attach(model, world) as sharded:
            optimizer = torch.optim.SGD(sharded.parameters(), lr=0.5)
            with pytest.raises(ProtocolError, match="no backward has run"):
                sharded.step(optimizer)
            sharded.backward(model(x).sum())
            sharded.step(optimizer)
            with pytest.raises(ProtocolError, match="used these gradients already"):
                sharded.step(optimizer)
            with sharded.no_sync():
                sharded.backward(model(x).sum())
            with pytest.raises(ProtocolError, match=r"no_sync\(\) are not handed over"):
                sharded.step(optimizer)
            sharded.discard()
            with pytest.raises(ProtocolError, match="discarded"):
                sharded.step(optimizer)
            sharded.backward(model(x).sum())
            sharded.step(optimizer)

    run(2, rank)


def test_discard_drops_local_gradients_too(reduced: Reduced) -> None:
    def rank(world: World) -> Any:
        model = nn.Linear(3, 2)
        x = torch.ones(1, 3)
        with attach(model, world) as sharded:
            sharded.backward(100 * model(x).sum())
            with sharded.no_sync():
                sharded.backward(100 * model(x).sum())
            sharded.discard()
            sharded.backward(model(x).sum())
            return reduced(sharded)["bias"].tolist()

    assert run(2, rank) == [[1.0, 1.0]] * 2


def test_frozen_again_stays_where_it_is() -> None:
    def rank(world: World) -> Any:
        model = nn.Module()
        model.a = nn.Parameter(torch.ones(5))
        model.b = nn.Parameter(torch.ones(5))
        with attach(model, world) as sharded:
            optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.5, weight_decay=0.5)
            sharded.backward(model.a.sum() + model.b.sum())
            sharded.step(optimizer)
            model.b.requires_grad_(False)
            before = model.b.tolist()
            sharded.backward(model.a.sum())
            sharded.step(optimizer)
            assert model.b.tolist() == before  # neither momentum nor decay moves it
            return before

    run(2, rank)
