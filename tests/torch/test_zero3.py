"""attach(zero=3): parameters come and go with the blocks that use them, whatever the model does."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cupynccl_reduce import CommunicationError, LayoutError, MismatchError, run_local
from cupynccl_reduce.torch import attach

if TYPE_CHECKING:
    from collections.abc import Callable

    from cupynccl_reduce import World
    from cupynccl_reduce.torch import Sharded


LOCK = threading.Lock()


class Block(nn.Module):
    """Adds to its input; may do so under activation checkpointing."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.how = nn.Linear(4, 4), how
        self.scale = nn.Parameter(torch.ones(4))

    def body(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = torch.tanh(self.inner(x)) * (self.scale * 2)
        return added

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "inside":
            x = x + checkpoint(self.body, x, use_reentrant=False)
        else:
            x = x + self.body(x)
        return x


class Model(nn.Module):
    """Blocks of one kind, the first of which is used twice, between tied ends."""

    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        self.how = how
        with LOCK:  # ranks are threads, and draw from one generator
            torch.manual_seed(0)
            self.first = nn.Linear(3, 4)
            self.blocks = nn.ModuleList(Block(how) for _ in range(3))
            self.norm = nn.LayerNorm(4)
            self.head = nn.Linear(3, 4, bias=False)
            self.unused = nn.Linear(2, 2)
        self.head.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * self.frozen
        for block in (*self.blocks, self.blocks[0]):
            if self.how == "outside":
                x = checkpoint(block, x, use_reentrant=False)
            elif self.how == "reentrant":
                x = checkpoint(block, x, use_reentrant=True)
            else:
                x = block(x)
        return nn.functional.linear(self.norm(x), self.head.weight.t())


HOWS = ["plain", "inside", "outside", "reentrant"]


def rows(seed: int) -> torch.Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(seed))


def sizes(model: nn.Module) -> dict[str, int]:
    named = model.named_parameters()
    return {n: p.untyped_storage().nbytes() for n, p in named if p.requires_grad}


def adamw(params: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=0.05, eps=1e-4)


def alone(how: str, steps: int) -> list[torch.Tensor]:
    """Train on one process."""
    model = Model(how)
    optimizer = adamw(p for p in model.parameters() if p.requires_grad)
    for step in range(steps):
        model(rows(step)).square().mean().backward()
        for param in model.unused.parameters():
            param.grad = torch.zeros_like(param)  # as here: an unused parameter decays too
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_it_trains_as_one_process_does(world_size: int, how: str) -> None:
    def work(world: World) -> list[torch.Tensor]:
        model = Model(how)
        # Each re-entrant checkpoint gives its block's parameters a gradient of its own.
        many = [name for name in sizes(model) if name.startswith("blocks.0.")]
        options: Any = {"uses_many": many if how == "reentrant" else []}
        with attach(model, world, zero=3, bucket_bytes=64, **options) as sharded:
            optimizer = adamw(sharded.parameters())
            assert set(sizes(model).values()) == {0}
            for step in range(4):
                mine = rows(step).chunk(world.world_size)[world.rank]
                sharded.backward(model(mine).square().mean())
                sharded.step(optimizer)
                assert set(sizes(model).values()) == {0}
        return [param.detach() for param in model.parameters()]

    expected = alone(how, 4)
    for result in run_local(world_size, work):
        for ours, theirs in zip(result, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_memory_is_that_of_a_few_buckets() -> None:
    def work(world: World) -> None:
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(10)))
        whole = sum(p.nbytes for p in model.parameters())
        most = 0

        def look(*_: Any) -> None:
            nonlocal most
            most = max(most, sum(sizes(model).values()))

        with attach(model, world, zero=3, bucket_bytes=1, prefetch=1) as sharded:
            for layer in model:
                layer.register_forward_hook(look)
                layer.register_full_backward_hook(look)
            for _ in range(3):
                x = torch.ones(2, 8, requires_grad=True)
                sharded.backward(model(x).sum())
                sharded.step(torch.optim.SGD(sharded.parameters()))
        assert 0 < most <= 4 * whole // 10  # in use, ahead, and the last one

    run_local(2, work)


def with_model(work: Callable[[World, Model, Sharded], Any], **options: Any) -> list[Any]:
    def rank(world: World) -> Any:
        model = Model()
        with attach(model, world, zero=3, bucket_bytes=64, **options) as sharded:
            return work(world, model, sharded)

    return run_local(2, rank)


def test_without_gradients_it_computes_and_keeps_nothing() -> None:
    expected = Model()(rows(0)).detach()

    def work(world: World, model: Model, sharded: Sharded) -> None:
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                assert torch.equal(model(rows(0)), expected)
        assert torch.equal(model(rows(0)).detach(), expected)  # whose backward never comes
        sharded.backward(model(rows(0)).sum())
        sharded.discard()
        assert torch.equal(model(rows(0)).detach(), expected)

    with_model(work)


def test_full_parameters_can_be_read_and_come_back_at_the_end() -> None:
    expected = dict(Model().named_parameters())

    def work(world: World, model: Model, sharded: Sharded) -> Model:
        with sharded.full_parameters():
            state = {name: value.clone() for name, value in model.state_dict().items()}
        for name, param in expected.items():
            assert torch.equal(state[name], param), name
        return model

    for model in with_model(work):
        for name, param in model.named_parameters():
            assert torch.equal(param, expected[name]), name
        assert torch.equal(model(rows(1)), Model()(rows(1)))  # no hooks are left


def test_local_gradients_go_along_with_the_next_backward() -> None:
    def work(world: World, model: Model, sharded: Sharded) -> dict[str, Any]:
        with sharded.no_sync():
            sharded.backward(model(rows(world.rank)).sum())
        sharded.backward(model(rows(2 + world.rank)).sum())
        return sharded.registry.gather(sharded.reducer.wait())

    model = Model()
    sum(model(rows(seed)).sum() for seed in range(4)).backward()  # type: ignore[union-attr]
    for full in with_model(work, op="sum"):
        for name, param in model.named_parameters():
            if param.grad is not None:
                ours = torch.from_numpy(full[name])
                torch.testing.assert_close(ours, param.grad, rtol=1e-5, atol=1e-5)


def test_an_exception_in_forward_releases_what_was_acquired() -> None:
    def work(world: World, model: Model, sharded: Sharded) -> None:
        with pytest.raises(RuntimeError, match="shapes"):
            model.blocks[0](torch.ones(2, 5))
        sharded.backward(model(rows(0)).sum())
        sharded.step(torch.optim.SGD(sharded.parameters(), lr=0.1))

    with_model(work)


def test_an_exception_in_backward_breaks_the_step_only() -> None:
    class FailingError(Exception):
        pass

    def fail(_: Any) -> None:
        raise FailingError

    def work(world: World, model: Model, sharded: Sharded) -> None:
        x = rows(0).requires_grad_()
        x.register_hook(fail)
        with pytest.raises(FailingError):
            sharded.backward(model(x).sum())
        sharded.discard()
        sharded.backward(model(rows(0)).sum())
        sharded.step(torch.optim.SGD(sharded.parameters(), lr=0.1))

    with_model(work)


def test_a_backward_through_values_of_before_the_step_is_an_error() -> None:
    def work(world: World, model: Model, sharded: Sharded) -> None:
        old = model(rows(0)).sum()
        sharded.backward(model(rows(0)).sum())
        sharded.step(torch.optim.SGD(sharded.parameters(), lr=0.1))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            sharded.backward(old)
        sharded.discard()

    with_model(work)


def test_blocks_may_be_chosen() -> None:
    def work(world: World) -> None:
        model = Model()
        chosen = [model.blocks[0].inner, *model.blocks]  # nested
        with attach(model, world, zero=3, blocks=chosen, prefetch=0) as sharded:
            sharded.backward(model(rows(0)).sum())
            sharded.step(torch.optim.SGD(sharded.parameters(), lr=0.1))
            assert set(sizes(model).values()) == {0}

    run_local(2, work)


def test_what_cannot_be_sharded_is_refused() -> None:
    def work(world: World) -> None:
        model = nn.Linear(3, 4)
        flat = torch.zeros(16)
        model.weight = nn.Parameter(flat[:12].view(4, 3))
        with pytest.raises(LayoutError, match=r"'weight' .* memory of its own"):
            attach(model, world, zero=3)
        with pytest.raises(LayoutError, match="blocks are for zero=3"):
            attach(nn.Linear(3, 4), world, blocks=[])
        with pytest.raises(LayoutError, match="Linear is not a module of this model"):
            attach(nn.Linear(3, 4), world, zero=3, blocks=[nn.Linear(1, 1)])
        with pytest.raises(LayoutError, match="prefetch must be an integer >= 0"):
            attach(nn.Linear(3, 4), world, zero=3, prefetch=-1)
        with pytest.raises(MismatchError, match="zero="):
            attach(nn.Linear(3, 4), world, zero=2 + world.rank)  # type: ignore[arg-type]

    run_local(2, work)


def go_on(model: Model, sharded: Sharded) -> None:
    while True:
        sharded.step(torch.optim.SGD(sharded.parameters()))
        sharded.backward(model(rows(0)).sum())


def test_a_rank_that_fails_leaves_without_waiting_for_the_others() -> None:
    def work(world: World) -> None:
        model = Model()
        with attach(model, world, zero=3, bucket_bytes=64) as sharded:
            sharded.backward(model(rows(0)).sum())
            if world.rank == 1:
                raise ValueError("planted")
            with pytest.raises(CommunicationError, match="rank 1 raised"):
                go_on(model, sharded)

    with pytest.raises(ValueError, match="planted"):
        run_local(2, work, check="heartbeat", timeout_s=2.0)
