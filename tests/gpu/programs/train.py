"""The torch adapter on CUDA and NCCL, at any number of ranks, against one process."""

from __future__ import annotations

import gc
from typing import Literal

import cupy
import torch
from tools import check, main
from torch import nn
from torch.utils.checkpoint import checkpoint

import cupynccl_reduce as cr
import cupynccl_reduce.torch as adapter


class Blocks(nn.Module):
    """Three checkpointed blocks, tied ends, one frozen and one unused parameter."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.embed = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)
        )
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(4, 4)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + checkpoint(block, hidden, use_reentrant=self.reentrant)
        return self.head(self.frozen(hidden))


def _batches(world_size: int, steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    size = (steps, 8, 17)
    return list(torch.randint(50, size, generator=generator).cuda()) if world_size else []


def _loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _train(
    world: cr.World, *, reentrant: bool, compiled: bool = False, zero: Literal[1, 2, 3] = 2
) -> None:
    torch.manual_seed(world.rank)  # attach() broadcasts rank 0's values
    model = Blocks(reentrant=reentrant).cuda()
    torch.manual_seed(0)
    reference = Blocks(reentrant=reentrant).cuda()
    sharded = adapter.attach(model, world, zero=zero, bucket_bytes=8192)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2, eps=1e-4)
    expected = torch.optim.AdamW(
        [p for p in reference.parameters() if p.requires_grad], lr=1e-2, eps=1e-4
    )
    run = torch.compile(model, backend="aot_eager") if compiled else model
    for tokens in _batches(world.world_size, 5):
        own = tokens.chunk(world.world_size)[world.rank]
        sharded.backward(_loss(run, own))
        assert zero == 1 or all(p.grad is None for p in model.parameters())
        sharded.step(optimizer)
        expected.zero_grad()
        _loss(reference, tokens).backward()
        for parameter in reference.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        expected.step()
    with sharded.full_parameters():
        trained = {name: param.detach().clone() for name, param in model.named_parameters()}
    for (name, got), want in zip(trained.items(), reference.parameters(), strict=True):
        assert torch.allclose(got, want, atol=2e-4), name
    sharded.detach()


@check
def training_equals_one_process(world: cr.World) -> None:
    for zero in (1, 2, 3):
        for reentrant in (False, True):
            _train(world, reentrant=reentrant, zero=zero)


@check
def a_compiled_model_trains_alike(world: cr.World) -> None:
    _train(world, reentrant=False, compiled=True)


@check
def no_sync_accumulates_locally(world: cr.World) -> None:
    model = nn.Linear(3, 1, bias=False).cuda()
    sharded = adapter.attach(model, world)
    for count in (3, 1, 2):
        values = [10.0**k for k in range(count)]
        for value in values[:-1]:
            with sharded.no_sync():
                sharded.backward((model.weight * value).sum())
        sharded.backward((model.weight * values[-1]).sum())
        full = sharded.registry.gather(sharded.reducer.wait())
        for grad in full.values():
            assert bool((grad == sum(values)).all())
    sharded.detach()


@check
def hooks_on_a_side_stream_are_ordered(world: cr.World) -> None:
    model = nn.Linear(512, 512, bias=False).cuda()
    sharded = adapter.attach(model, world)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for step in range(1, 6):
            torch.cuda._sleep(10_000_000)
            sharded.backward((model.weight * float(step)).sum())
            shards = sharded.reducer.wait(stream=side)
            for shard in shards.values():
                torch_view = torch.from_dlpack(shard)
                assert bool((torch_view == step).all())
    sharded.detach()


@check
def a_bfloat16_model_keeps_float32_shards(world: cr.World) -> None:
    model = nn.Linear(16, 16).cuda().bfloat16()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    sharded = adapter.attach(model, world)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.5)
    sharded.backward(sum(p.sum() for p in model.parameters()))
    sharded.step(optimizer)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter.detach(), (before[name].float() - 0.5).bfloat16()) or (
            world.rank > 0
        )
    assert all(p.dtype == torch.float32 for p in sharded.parameters())
    sharded.detach()


@check
def attaching_twenty_times_leaves_nothing_behind(world: cr.World) -> None:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]).cuda()
    levels = []
    for _ in range(20):
        sharded = adapter.attach(model, world)
        sharded.backward(model(torch.ones(2, 64, device="cuda")).sum())
        sharded.reducer.wait()
        sharded.detach()
        del sharded
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()  # counts blocks in that other streams used, until it looks again
        cupy.get_default_memory_pool().free_all_blocks()
        levels.append(torch.cuda.memory_allocated())
    assert len(set(levels[2:])) == 1, levels


if __name__ == "__main__":
    main(share_gpu=True)
