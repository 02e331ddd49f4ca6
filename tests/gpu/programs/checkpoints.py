"""Checkpoints of CuPy arrays and torch tensors, at any number of ranks on one GPU."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np
import torch
from tools import bits, check, main, spin

import cupynccl_reduce as cr
from cupynccl_reduce.torch import attach

if TYPE_CHECKING:
    from collections.abc import Iterator

SPECS = [
    cr.ParamSpec("matrix", (70, 13), "bfloat16"),
    cr.ParamSpec("scalar", (), "float32"),
    cr.ParamSpec("long", (1 << 20,), "float32"),  # several blocks of a file
]


@contextmanager
def _folder(world: cr.World) -> Iterator[Path]:
    """Yield a folder that all ranks share; remove it."""
    made = tempfile.mkdtemp().encode() if world.rank == 0 else b""
    path = Path(world.control.all_gather(made)[0].decode())
    yield path
    world.control.all_gather(b"")  # all have read
    if world.rank == 0:
        shutil.rmtree(path)


def _shards(registry: cr.Registry, seed: int) -> dict[str, dict[str, Any]]:
    """Return shards of random bits: CuPy arrays, and torch tensors of bfloat16."""
    states: dict[str, dict[str, Any]] = {"param": {}, "exp_avg": {}}
    for name, place in registry.items():
        full = np.random.default_rng(seed).integers(0, 256, 4 * place.spec.numel, np.uint8)
        own = cupy.asarray(full[4 * place.start : 4 * place.stop])
        states["exp_avg"][name] = own.view(cupy.float32)
        param = torch.empty(own.size // 4, dtype=torch.bfloat16, device="cuda")
        if own.size:
            param.view(torch.uint8).copy_(torch.from_dlpack(own[: own.size // 2]))
        states["param"][name] = param
    return states


def _bits(states: dict[str, dict[str, Any]]) -> bytes:
    param = [t.view(torch.uint8).cpu().numpy().tobytes() for t in states["param"].values()]
    return b"".join(param) + bits(states["exp_avg"])


@check
def arrays_on_the_gpu_come_back(world: cr.World) -> None:
    registry = cr.Registry(SPECS, world)
    saved, out = _shards(registry, 1), _shards(registry, 2)
    assert _bits(saved) != _bits(out)
    with _folder(world) as path:
        cr.save(path, registry, saved, {"step": 3})
        other = cr.Registry(SPECS[::-1], world, bucket_bytes=4096)
        assert cr.load(path, other, out) == {"step": 3}
        assert _bits(saved) == _bits(out)


@check
def what_is_queued_is_saved_and_filled_first(world: cr.World) -> None:
    registry = cr.Registry(SPECS[2:], world)
    with _folder(world) as path, cupy.cuda.Stream(non_blocking=True) as stream:
        shard = cupy.zeros(registry["long"].stop - registry["long"].start, cupy.float32)
        spin(stream)
        shard.fill(5)
        cr.save(path, registry, {"s": {"long": shard}})
        shard.fill(6)
        spin(stream)
        shard.fill(7)  # queued, and must not overwrite what is loaded
        cr.load(path, registry, {"s": {"long": shard}})
        assert bool((shard == 5).all())


@check
def the_registrys_own_shards_are_saved(world: cr.World) -> None:
    registry = cr.Registry(SPECS, world)
    with cr.Reducer(registry, op="sum") as reducer, _folder(world) as path:
        with reducer.backward():
            for spec in SPECS:
                grad = torch.full(spec.shape, 2.0, device="cuda", dtype=getattr(torch, spec.dtype))
                reducer.reduce_grad(spec.name, grad)
        shards = reducer.wait()
        cr.save(path, registry, {"grad": shards})
        for shard in shards.values():
            shard.fill(0)
        cr.load(path, registry, {"grad": registry.shards})
        for name, shard in registry.shards.items():
            assert bool((shard == 2 * world.world_size).all()), name


@check
def adamw_goes_on_where_it_was(world: cr.World) -> None:
    moments = ("exp_avg", "exp_avg_sq")

    def train(steps: range, path: Path) -> list[bytes]:
        model = torch.nn.Linear(33, 7, device="cuda", dtype=torch.bfloat16)
        torch.nn.init.constant_(model.weight, 0.5 if steps.start == 0 else 9.0)
        torch.nn.init.zeros_(model.bias)
        with attach(model, world) as sharded:
            shards = dict(sharded.named_parameters())
            optimizer = torch.optim.AdamW(shards.values(), lr=0.1)
            states = {"param": {name: p.detach() for name, p in shards.items()}}
            for moment in moments:
                states[moment] = {name: torch.zeros_like(p) for name, p in states["param"].items()}
            if steps.start:
                assert cr.load(path, sharded.registry, states) == {"step": steps.start}
                sharded.gather()
            for name, p in shards.items():
                optimizer.state[p] = {moment: states[moment][name] for moment in moments}
                optimizer.state[p]["step"] = torch.tensor(float(steps.start))
            for step in steps:
                batch = torch.full((2, 33), step + 1.0, device="cuda", dtype=torch.bfloat16)
                sharded.backward(model(batch).float().square().sum())
                sharded.step(optimizer)
                if step == 1:
                    cr.save(path, sharded.registry, states, {"step": 2})
            return [p.detach().float().cpu().numpy().tobytes() for p in model.parameters()]

    with _folder(world) as path:
        straight = train(range(4), path)
        assert train(range(2, 4), path) == straight


@check
def what_is_not_on_this_gpu_is_refused(world: cr.World) -> None:
    registry = cr.Registry(SPECS[:1], world)
    with _folder(world) as path:
        cr.save(path, registry, {})
        for call in (cr.save, cr.load):
            told = ""
            try:
                call(path, registry, {"s": {"matrix": np.zeros(1, np.float32)}})
            except cr.LayoutError as error:
                told = str(error)
            assert "this rank works on cuda" in told, (call, told)


if __name__ == "__main__":
    main(share_gpu=True)
