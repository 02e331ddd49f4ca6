"""Gradients through sharded.backward(): every shape, layout and use of a parameter."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cupynccl_reduce import GradientError, GradientTypeError, MismatchError, ProtocolError, dlpack
from cupynccl_reduce import run_local as run
from cupynccl_reduce.torch import Sharded, attach

if TYPE_CHECKING:
    from collections.abc import Callable

    from cupynccl_reduce import World

    Reduced = Callable[[Sharded], dict[str, torch.Tensor]]

WORLDS = pytest.mark.parametrize("world_size", [1, 2, 4])


class Values(nn.Module):
    """Parameters and nothing else; losses are written in the tests."""

    def __init__(self, **values: Any) -> None:
        super().__init__()
        for name, value in values.items():
            setattr(self, name, nn.Parameter(torch.as_tensor(value)))


def plain_grads(
    model: nn.Module, loss: Callable[[nn.Module], torch.Tensor]
) -> dict[str, torch.Tensor | None]:
    """Return torch's own gradients of `loss`, on a copy of `model`."""
    twin = copy.deepcopy(model)
    loss(twin).backward()
    return {n: p.grad for n, p in twin.named_parameters()}


def test_the_gradient_is_reduced_not_the_parameter(reduced: Reduced) -> None:  # G9
    def rank(world: World) -> Any:
        model = Values(p=[5.0])
        with attach(model, world) as sharded:
            sharded.backward((2 * model.p).sum())
            assert model.p.grad is None  # O3
            assert model.p.tolist() == [5.0]
            return reduced(sharded)["p"].tolist()

    assert run(2, rank) == [[2.0], [2.0]]


@WORLDS
def test_expanded_gradient(world_size: int, reduced: Reduced) -> None:  # D1
    def rank(world: World) -> Any:
        model = Values(p=torch.zeros(3, 4))
        with attach(model, world) as sharded:
            sharded.backward(model.p.sum())
            first = reduced(sharded)["p"]
            # An expanded gradient in p.grad itself: one element, strides 0.
            source = torch.tensor(2.0)
            model.p.grad = source.expand(3, 4)
            sharded.backward(0 * torch.ones(1, requires_grad=True))
            second = reduced(sharded)["p"]
            assert source.item() == 2.0
            return first, second

    for first, second in run(world_size, rank):
        assert torch.equal(first, torch.ones(3, 4).double())
        assert torch.equal(second, torch.full((3, 4), 2.0).double())


@WORLDS
def test_0_dim_parameter(world_size: int, reduced: Reduced) -> None:  # C5
    def rank(world: World) -> Any:
        model = Values(p=torch.tensor(7.0))
        with attach(model, world) as sharded:
            sharded.backward(model.p * (world.rank + 1))
            return reduced(sharded)["p"], next(sharded.parameters()).numel()

    results = run(world_size, rank)
    for grad, _ in results:
        assert grad.shape == ()
        assert grad.item() == (world_size + 1) / 2
    assert [numel for _, numel in results] == [1] + [0] * (world_size - 1)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kernel", [1, 3])
def test_channels_last_conv(
    world_size: int, kernel: int, reduced: Reduced
) -> None:  # D3; warnings are errors
    torch.manual_seed(0)
    conv = nn.Conv2d(8, 4, kernel).to(memory_format=torch.channels_last)
    images = (
        torch.randint(-3, 4, (4, 8, 5, 5)).float().contiguous(memory_format=torch.channels_last)
    )
    expected = plain_grads(conv, lambda model: model(images).sum())

    def rank(world: World) -> Any:
        model = copy.deepcopy(conv)
        with attach(model, world) as sharded:
            with sharded.no_sync():
                sharded.backward(model(images).sum())
            # In memory a 1x1 kernel is dense whatever its strides say: nothing to copy first.
            assert (dlpack.read(model.weight.grad).strides is None) == (kernel == 1)
            sharded.backward(0 * model(images).sum())
            return reduced(sharded)

    for grads in run(world_size, rank):
        for name, grad in expected.items():
            assert torch.equal(grads[name], grad.double())


@pytest.mark.parametrize("shard_dtype", ["default", "bfloat16"])
def test_bfloat16(shard_dtype: str, reduced: Reduced) -> None:  # D9
    def rank(world: World) -> Any:
        model = Values(p=torch.zeros(5, dtype=torch.bfloat16))
        with attach(model, world, shard_dtype=shard_dtype) as sharded:
            shard = next(sharded.parameters())
            sharded.backward(model.p.sum() * (world.rank + 1))
            sharded.step(torch.optim.SGD([shard], lr=1.0))
            assert shard.dtype == shard.grad.dtype
            assert shard.grad.tolist() == [1.5] * shard.numel()
            assert model.p.dtype == torch.bfloat16
            assert model.p.tolist() == [-1.5] * 5
            return shard.dtype

    expected = torch.float32 if shard_dtype == "default" else torch.bfloat16
    assert run(2, rank) == [expected] * 2


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("local", [False, True])
def test_micro_steps_of_any_number(world_size: int, local: bool, reduced: Reduced) -> None:  # F1
    def rank(world: World) -> Any:
        model = Values(p=torch.zeros(3))
        results = []
        with attach(model, world, op="sum") as sharded:
            for count in (3, 1, 2):
                for index in range(count):
                    loss = (model.p * 10.0**index).sum()
                    if local and index < count - 1:
                        with sharded.no_sync():
                            sharded.backward(loss)
                            assert model.p.grad is not None
                    else:
                        sharded.backward(loss)
                        assert model.p.grad is None
                results.append(reduced(sharded)["p"][0].item())
        return results

    expected = [111.0 * world_size, 1.0 * world_size, 11.0 * world_size]
    assert run(world_size, rank) == [expected] * world_size


def test_no_sync_takes_plain_backward_too_and_nests(reduced: Reduced) -> None:
    def rank(world: World) -> Any:
        model = Values(p=torch.zeros(3))
        with attach(model, world) as sharded:
            with sharded.no_sync():
                with sharded.no_sync():
                    (2 * model.p).sum().backward()
                model.p.sum().backward()
            assert model.p.grad.tolist() == [3.0] * 3
            sharded.backward(model.p.sum())
            return reduced(sharded)["p"].tolist()

    assert run(2, rank) == [[4.0] * 3] * 2


def test_touched_only_in_no_sync(reduced: Reduced) -> None:  # F5
    def rank(world: World) -> Any:
        model = Values(a=torch.zeros(2), b=torch.zeros(3))
        with attach(model, world) as sharded:
            with sharded.no_sync():
                sharded.backward((model.b * (2, 6)[world.rank]).sum())
            sharded.backward((model.a * (1, 3)[world.rank]).sum())
            assert model.a.grad is None
            assert model.b.grad is None
            grads = reduced(sharded)
            return grads["a"].tolist(), grads["b"].tolist()

    assert run(2, rank) == [([2.0] * 2, [4.0] * 3)] * 2


@pytest.mark.parametrize("policy", ["planned", "arrival"])
def test_backwards_of_one_cycle_accumulate(policy: str, reduced: Reduced) -> None:
    def rank(world: World) -> Any:
        model = Values(a=torch.zeros(5), b=torch.zeros(3))
        with attach(model, world, policy=policy, bucket_bytes=16) as sharded:
            for factor in (1, 10, 100):
                sharded.backward((model.a.sum() + 2 * model.b.sum()) * factor)
            grads = reduced(sharded)
            return grads["a"].tolist(), grads["b"].tolist()

    assert run(2, rank) == [([111.0] * 5, [222.0] * 3)] * 2


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("reentrant", [True, False])
def test_one_module_in_two_checkpoints(
    world_size: int, reentrant: bool, reduced: Reduced
) -> None:  # G1
    torch.manual_seed(0)
    linear = nn.Linear(4, 3)
    first = torch.randint(-3, 4, (2, 4)).float().requires_grad_()
    second = torch.randint(-3, 4, (2, 4)).float().requires_grad_()

    def loss(model: nn.Module) -> torch.Tensor:
        return sum(checkpoint(model, x, use_reentrant=reentrant).sum() for x in (first, second))

    expected = plain_grads(linear, loss)

    def rank(world: World) -> Any:
        model = copy.deepcopy(linear)
        with attach(model, world, uses_many=["weight", "bias"] if reentrant else ()) as sharded:
            sharded.backward(loss(model))
            return reduced(sharded)

    for grads in run(world_size, rank):
        for name, grad in expected.items():
            assert torch.equal(grads[name], grad.double())


def test_second_arrival_names_the_remedy(reduced: Reduced) -> None:  # G1, by default
    def rank(world: World) -> Any:
        model = nn.Linear(4, 3)
        x = torch.ones(2, 4, requires_grad=True)
        with attach(model, world) as sharded:
            loss = sum(checkpoint(model, x, use_reentrant=True).sum() for _ in range(2))
            with pytest.raises(ProtocolError, match=r"'(weight|bias)'.*uses_many=\[") as caught:
                sharded.backward(loss)
            assert f"rank {world.rank} of 2, step 1" in str(caught.value)
            with pytest.raises(ProtocolError, match=r"discard\(\)"):
                sharded.backward(model(x).sum())
            sharded.discard()
            sharded.backward(model(x).sum())
            return reduced(sharded)["weight"].flatten().tolist()

    assert run(2, rank) == [[2.0] * 12] * 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_blocks_with_unused_and_frozen(
    reentrant: bool, reduced: Reduced
) -> None:  # G5
    torch.manual_seed(0)
    net = nn.ModuleDict(
        {name: nn.Linear(4, 4) for name in ("one", "two", "three", "unused", "ice")}
    )
    for param in net["ice"].parameters():
        param.requires_grad_(False)
    x = torch.randint(-3, 4, (2, 4)).float().requires_grad_()

    def loss(model: nn.Module) -> torch.Tensor:
        hidden = x
        for name in ("one", "ice", "two", "three"):
            hidden = checkpoint(model[name], hidden, use_reentrant=reentrant)
        return hidden.square().sum()

    expected = plain_grads(net, loss)

    def rank(world: World) -> Any:
        model = copy.deepcopy(net)
        steps = []
        with attach(model, world, bucket_bytes=64) as sharded:
            for _ in range(3):
                sharded.backward(loss(model))
                steps.append(reduced(sharded))
        return steps

    for steps in run(2, rank):
        for grads in steps:
            assert set(grads) == {n for n in expected if not n.startswith("ice")}
            for name, grad in grads.items():
                wanted = expected[name]
                assert torch.equal(
                    grad, torch.zeros_like(grad) if wanted is None else wanted.double()
                )


def test_ranks_use_different_parameters(reduced: Reduced) -> None:  # G7
    def rank(world: World) -> Any:
        model = Values(a=torch.zeros(2), b=torch.zeros(3), c=torch.zeros(5))
        with attach(model, world, bucket_bytes=8) as sharded:
            other = (model.b, model.c)[world.rank]
            sharded.backward(4 * model.a.sum() + 6 * other.sum())
            grads = reduced(sharded)
            return [grads[name].tolist() for name in "abc"]

    assert run(2, rank) == [[[4.0] * 2, [3.0] * 3, [3.0] * 5]] * 2


def test_ranks_use_a_parameter_a_different_number_of_times(
    reduced: Reduced,
) -> None:  # G7, uses="many"
    def rank(world: World) -> Any:
        model = nn.Linear(2, 1, bias=False)
        x = torch.ones(1, 2, requires_grad=True)
        with attach(model, world, op="sum", uses_many=["weight"]) as sharded:
            times = (1, 3)[world.rank]
            sharded.backward(
                sum(checkpoint(model, x, use_reentrant=True).sum() for _ in range(times))
            )
            return reduced(sharded)["weight"].tolist(), sharded.reducer.statistics().collectives

    assert run(2, rank) == [([[4.0, 4.0]], 1)] * 2


def test_layer_run_in_a_loop(reduced: Reduced) -> None:  # G13
    linear = nn.Linear(3, 3)
    with torch.no_grad():
        linear.weight.copy_(torch.randint(-2, 3, (3, 3)))
        linear.bias.copy_(torch.tensor([1.0, 0.0, -1.0]))

    def loss(model: nn.Module) -> torch.Tensor:
        hidden = torch.ones(2, 3)
        for _ in range(4):
            hidden = model(hidden)
        return hidden.sum()

    expected = plain_grads(linear, loss)

    def rank(world: World) -> Any:
        model = copy.deepcopy(linear)
        with attach(model, world) as sharded:
            sharded.backward(loss(model))
            return reduced(sharded)

    for grads in run(2, rank):
        for name, grad in expected.items():
            assert torch.equal(grads[name], grad.double())


def test_unfrozen_after_attach(reduced: Reduced) -> None:  # G11
    def rank(world: World) -> Any:
        model = Values(a=torch.zeros(2), b=torch.zeros(1000))
        model.b.requires_grad_(False)
        with attach(model, world) as sharded:
            assert "b" not in sharded.registry
            assert sharded.registry.arena_bytes < 100
            assert sharded.reducer.statistics().buffer_bytes < 100
            for _ in range(2):
                sharded.backward((model.a.sum() + model.b.sum()) * 2)
            model.b.requires_grad_()
            for context in (sharded.no_sync, torch.enable_grad):
                with context(), pytest.raises(ProtocolError, match=r"'b' .*detach\(\) and attach"):
                    sharded.backward(model.a.sum() + model.b.sum())
            assert reduced(sharded)["a"].tolist() == [4.0, 4.0]  # nothing else has happened
        with attach(model, world) as sharded:
            sharded.backward(model.a.sum() + 3 * model.b.sum())
            grads = reduced(sharded)
            return grads["a"].tolist(), set(grads["b"].tolist())

    assert run(2, rank) == [([1.0, 1.0], {3.0})] * 2


def test_added_after_attach() -> None:  # G11
    def rank(world: World) -> None:
        model = nn.Sequential(nn.Linear(2, 2))
        with attach(model, world) as sharded:
            model.append(nn.Linear(2, 2))
            with pytest.raises(ProtocolError, match=r"'1\.weight' \(2, 2\)"):
                sharded.backward(model(torch.ones(1, 2)).sum())

    run(1, rank)


@pytest.mark.parametrize("missing", ["zero", "error"])
@pytest.mark.parametrize("frozen_on", [(0, 1), (1,)])
def test_frozen_again(missing: str, frozen_on: tuple[int, ...], reduced: Reduced) -> None:  # G11
    def rank(world: World) -> Any:
        model = Values(a=torch.zeros(2), b=torch.zeros(3))
        with attach(model, world, missing=missing) as sharded:
            sharded.backward(model.a.sum() + model.b.sum())
            reduced(sharded)
            if world.rank in frozen_on:
                model.b.requires_grad_(False)
            sharded.backward(model.a.sum() + 2 * model.b.sum())
            return reduced(sharded)["b"].tolist()

    assert run(2, rank) == [[2.0 - len(frozen_on)] * 3] * 2


def test_missing_error(reduced: Reduced) -> None:  # H3
    def rank(world: World) -> Any:
        model = Values(a=torch.zeros(2), b=torch.zeros(3))
        with attach(model, world, missing="error") as sharded:
            with pytest.raises(MismatchError, match=r"rank 0: .*'b'"):
                sharded.backward(model.b.sum() if world.rank else model.a.sum())
            sharded.discard()
            sharded.backward(model.a.sum() + model.b.sum())
            return reduced(sharded)["b"].tolist()

    assert run(2, rank) == [[1.0] * 3] * 2


def test_grads_are_dropped_and_memory_is_shards_only() -> None:  # O3
    def rank(world: World) -> None:
        model = Values(**{f"p{i}": torch.zeros(1000) for i in range(20)})
        with attach(model, world, bucket_bytes=8000) as sharded:
            sharded.backward(sum(p.sum() for p in model.parameters()))
            assert all(p.grad is None for p in model.parameters())
            sharded.reducer.wait()
            statistics = sharded.reducer.statistics()
            assert statistics.shard_bytes <= 20 * 1000 + 20 * 256
            assert statistics.buffer_bytes <= 2 * (8000 + 512)
            assert not sharded.reducer._intake.names

    run(4, rank)


def test_sparse_gradient_is_refused() -> None:
    def rank(world: World) -> None:
        model = nn.Sequential(nn.Embedding(5, 3, sparse=True))
        with attach(model, world) as sharded:
            with pytest.raises(GradientTypeError, match=r"'0\.weight' float32 \(5, 3\)"):
                sharded.backward(model(torch.tensor([1, 2])).sum())
            assert model[0].weight.grad is not None
            sharded.discard()
            assert model[0].weight.grad is None

    run(2, rank)


def test_wrong_gradient_dtype_is_refused() -> None:
    def rank(world: World) -> None:
        model = nn.Linear(2, 2)
        with attach(model, world) as sharded:
            model.double()
            with pytest.raises(GradientError, match=r"'(bias|weight)' float32 .*float64"):
                sharded.backward(model(torch.ones(1, 2).double()).sum())

    run(1, rank)


def test_backward_outside_is_refused_and_not_counted(reduced: Reduced) -> None:
    def rank(world: World) -> Any:
        model = Values(a=torch.zeros(2), b=torch.zeros(3))
        with attach(model, world) as sharded:
            for _ in range(2):
                with pytest.raises(ProtocolError, match=r"call that instead of loss\.backward\(\)"):
                    (model.a.sum() + model.b.sum()).backward()
            assert model.a.grad is None
            assert model.b.grad is None
            sharded.backward(model.a.sum() + model.b.sum())
            grads = reduced(sharded)
            return grads["a"].tolist(), grads["b"].tolist()

    assert run(2, rank) == [([1.0] * 2, [1.0] * 3)] * 2


def test_backward_outside_that_loses_local_gradients(reduced: Reduced) -> None:
    def rank(world: World) -> Any:
        model = Values(a=torch.zeros(2))
        with attach(model, world) as sharded:
            optimizer = torch.optim.SGD(sharded.parameters(), lr=1.0)
            with sharded.no_sync():
                sharded.backward(5 * model.a.sum())
            with pytest.raises(ProtocolError, match="outside sharded"):
                model.a.sum().backward()
            for call in (
                lambda: sharded.backward(model.a.sum()),
                lambda: sharded.step(optimizer),
                lambda: sharded.no_sync().__enter__(),
            ):
                with pytest.raises(ProtocolError, match=r"discard\(\)"):
                    call()
            sharded.discard()
            sharded.backward(model.a.sum())
            return reduced(sharded)["a"].tolist()

    assert run(2, rank) == [[1.0, 1.0]] * 2


class Failing(torch.autograd.Function):
    """Identity whose backward raises."""

    @staticmethod
    def forward(_context: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(_context: Any, _grad: torch.Tensor) -> None:
        msg = "no luck"
        raise ArithmeticError(msg)


def test_one_rank_fails_in_backward(reduced: Reduced) -> None:
    def rank(world: World) -> Any:
        model = Values(a=torch.zeros(2), b=torch.zeros(3), c=torch.zeros(4))
        with attach(model, world, bucket_bytes=8) as sharded:
            with sharded.no_sync():
                sharded.backward(7 * model.b.sum())  # dropped with the step, on every rank
            failing = Failing.apply(model.b) if world.rank == 1 else model.b
            loss = model.a.sum() + (failing * 2).sum() + model.c.sum()
            if world.rank == 1:
                with pytest.raises(ArithmeticError, match="no luck"):
                    sharded.backward(loss)
            else:
                sharded.backward(loss)
                assert torch.tensor(sharded.reducer.wait()["b"]).isnan().all()
            sharded.discard()
            assert all(p.grad is None for p in model.parameters())
            sharded.backward(model.a.sum() + model.b.sum() + model.c.sum())
            grads = reduced(sharded)
            return [set(grads[name].tolist()) for name in "abc"]

    assert run(2, rank) == [[{1.0}, {1.0}, {1.0}]] * 2


def test_autograd_grad_hands_nothing_over(reduced: Reduced) -> None:
    def rank(world: World) -> Any:
        model = Values(a=torch.tensor([3.0]))
        with attach(model, world) as sharded:
            (grad,) = torch.autograd.grad(model.a.square().sum(), [model.a])
            assert grad.tolist() == [6.0]
            sharded.backward(model.a.sum())
            return reduced(sharded)["a"].item()

    assert run(1, rank) == [1.0]


def test_gradient_and_retain_graph(reduced: Reduced) -> None:
    def rank(world: World) -> Any:
        model = Values(a=torch.zeros(3))
        with attach(model, world) as sharded:
            output = 2 * model.a
            sharded.backward(output, gradient=torch.tensor([1.0, 2.0, 3.0]), retain_graph=True)
            sharded.backward(output, gradient=torch.ones(3))
            return reduced(sharded)["a"].tolist()

    assert run(2, rank) == [[4.0, 6.0, 8.0]] * 2
