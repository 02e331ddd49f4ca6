"""Norm, clip and loss scales on CUDA and NCCL, at any number of ranks.

Run as `mpirun -n N python -m mpi4py norm.py`; each check prints `OK name rank r`.
"""

from __future__ import annotations

import math
from typing import Any

import cupy
import numpy as np
import torch
from tools import check, gradient, integers, main, spin, to_numpy

import cupynccl_reduce as cr
import cupynccl_reduce.torch as adapter

ORDERS = (0.5, 1, 2, 3, math.inf)
SHAPES = [(3,), (4, 5), (), (0, 8), (1,), (130, 7), (64, 64), (100_003,), (2,), (33,)]
DTYPES = [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]
DTYPES += [("float16", "float16"), ("float64", "float64")]


def same_everywhere(world: cr.World, value: Any) -> None:
    """Check that all ranks hold the same bits."""
    raw = cupy.asnumpy(value).tobytes()
    assert set(world.control.all_gather(raw)) == {raw}


def norm_of(full: Any, p: float) -> float:
    return float(np.linalg.norm(np.concatenate([to_numpy(a).ravel() for a in full.values()]), p))


def build(world: cr.World) -> cr.Registry:
    specs = [
        cr.ParamSpec(f"{dtype}-{shard}-{i}", shape, dtype, shard_dtype=shard)
        for dtype, shard in DTYPES
        for i, shape in enumerate(SHAPES)
    ]
    specs.append(cr.ParamSpec("unused", (1000,), "float32"))
    brought = {}
    if world.rank % 2 == world.world_size % 2:  # some ranks bring memory, at odd addresses too
        for name, numel in (("float32-float32-7", 100_003), ("bfloat16-float32-5", 910)):
            width = -(-numel // world.world_size)
            mine = max(0, min(numel, (world.rank + 1) * width) - world.rank * width)
            brought[name] = cupy.full(mine + 1, cupy.nan, "float32")[1:]
    return cr.Registry(specs, world, bucket_bytes=50_000, shards=brought)


def hand_over(reducer: cr.Reducer, registry: cr.Registry, key: int) -> None:
    rank = registry.world.rank
    with reducer.backward():
        for i, name in enumerate(registry):
            spec = registry[name].spec
            if name != "unused":
                values = integers((key, i, rank), spec.shape, 4)
                reducer.reduce_grad(name, gradient(values, spec.dtype))


@check
def norms_are_those_of_the_full_gradients(world: cr.World) -> None:
    for policy in ("planned", "arrival"):
        registry = build(world)
        with cr.Reducer(registry, op="sum", policy=policy) as reducer:
            for key, micro_batches in enumerate((1, 3)):
                for micro_batch in range(micro_batches):
                    hand_over(reducer, registry, 10 * key + micro_batch)
                norms = [reducer.norm(p).copy() for p in ORDERS]
                for norm in norms:
                    same_everywhere(world, norm)
                full = registry.gather(reducer.wait())
                for p, norm in zip(ORDERS, norms, strict=True):
                    assert math.isclose(float(norm), norm_of(full, p), rel_tol=1e-13), (p, policy)


@check
def clip_scales_every_shard_once(world: cr.World) -> None:
    registry = build(world)
    with cr.Reducer(registry, op="sum") as reducer:
        scales = [(1.0, 1.0), (8.0, 8.0), (cupy.array(8, "float32"), 8.0), (cupy.array([3.0]), 3.0)]
        for scale, number in scales:
            for max_norm in (None, 0.5, 1e9):
                hand_over(reducer, registry, 5)
                before = float(reducer.norm())
                norm = reducer.clip(max_norm, loss_scale=scale)
                same_everywhere(world, norm)
                whole = float(norm)  # the next norm overwrites it
                assert math.isclose(whole, before / number, rel_tol=1e-14)
                factor = 1.0 if max_norm is None else min(1.0, max_norm / (whole + 1e-6))
                after = float(reducer.norm())
                # 16-bit shards round: 2**-9 of each element, and less of the norm.
                assert math.isclose(after, whole * factor, rel_tol=2**-8)
                reducer.wait()


@check
def scaled_bits_are_those_of_float64_rounded_once(world: cr.World) -> None:
    registry = cr.Registry([cr.ParamSpec("p", (70_001,), "float32")], world)
    grad = np.random.default_rng(1).standard_normal(70_001).astype(np.float32)
    grad[:3] = 2.0**-149, -(2.0**-126), 0.0
    for max_norm in (1.0, None):
        with cr.Reducer(registry, op="sum") as reducer:
            with reducer.backward():
                mine = grad if world.rank == 0 else np.zeros_like(grad)
                reducer.reduce_grad("p", cupy.asarray(mine))
            norm = float(reducer.clip(max_norm, loss_scale=3.0))
            factor = 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
            full = cupy.asnumpy(registry.gather(reducer.wait())["p"])
        wanted = (grad.astype(np.float64) * (factor / 3.0)).astype(np.float32)
        assert full.tobytes() == wanted.tobytes()


@check
def what_is_not_finite_shows_on_every_rank(world: cr.World) -> None:
    specs = [cr.ParamSpec("p", (1001,), "float32"), cr.ParamSpec("one", (1,), "float32")]
    registry = cr.Registry(specs, world)
    with cr.Reducer(registry, op="sum") as reducer:
        for bad in (math.nan, math.inf, -math.inf):
            for where in (0, 500, 1000):
                with reducer.backward():
                    grad = cupy.ones(1001, "float32")
                    if world.rank == world.world_size - 1:
                        grad[where] = bad
                    reducer.reduce_grad("p", grad)
                spin(world.stream)
                for p in ORDERS:
                    norm = reducer.norm(p)
                    same_everywhere(world, norm)
                    assert not math.isfinite(float(norm))
                assert not math.isfinite(float(reducer.clip(1.0, loss_scale=2.0)))
                reducer.wait()
                with reducer.backward():
                    reducer.reduce_grad("one", cupy.ones(1, "float32"))
                assert float(reducer.norm()) == world.world_size
                reducer.discard()


@check
def a_failed_rank_makes_every_norm_nan(world: cr.World) -> None:
    registry = cr.Registry([cr.ParamSpec("p", (100,), "float32")], world)
    with cr.Reducer(registry) as reducer:
        failed = False
        try:
            with reducer.backward():
                reducer.reduce_grad("p", cupy.ones(100, "float32"))
                if world.rank == 0:
                    raise KeyError
        except KeyError:
            failed = True
        assert failed == (world.rank == 0)
        assert math.isnan(float(reducer.clip(1.0)))
        reducer.discard()
        with reducer.backward():
            reducer.reduce_grad("p", cupy.ones(100, "float32"))
        assert float(reducer.norm()) == 10.0


@check
def streams_are_ordered_and_the_host_is_not_blocked(world: cr.World) -> None:
    registry = cr.Registry([cr.ParamSpec("p", (1 << 16,), "float32")], world)
    side, reader = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    with cr.Reducer(registry, op="mean") as reducer:
        for step in range(1, 6):
            with side:
                grad = cupy.empty(1 << 16, "float32")
                scale = cupy.empty((), "float32")
                spin(side, 50)
                grad.fill(8 * step)
                scale.fill(8)
                with reducer.backward():
                    reducer.reduce_grad("p", grad)
                    del grad
                spin(world.stream, 50)
                norm = reducer.clip(None, loss_scale=scale, stream=reader)
                queued = step == 1 or not reader.done  # the first one compiles, and blocks
                del scale
                cupy.full((), cupy.nan, "float32")  # takes its memory
                assert queued
            with reader:
                assert float(norm) == 256.0 * step
                for shard in reducer.wait(stream=reader).values():
                    spin(reader, 2)
                    assert bool((shard == step).all())
        side.synchronize()


@check
def a_scaler_trains_as_on_one_process(world: cr.World) -> None:
    for fused in (False, True):
        torch.manual_seed(0)
        alone = torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)
        )
        alone.cuda()
        model = torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)
        )
        model.cuda().load_state_dict(alone.state_dict())
        scalers = [
            torch.amp.GradScaler("cuda", init_scale=2.0**14, growth_interval=2) for _ in "ab"
        ]
        sharded = adapter.attach(model, world)
        optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2, eps=1e-4, fused=fused)
        reference = torch.optim.AdamW(alone.parameters(), lr=1e-2, eps=1e-4, fused=fused)
        for step in range(8):
            batch = torch.randn(32, 16, device="cuda")
            if step % 3 == 2:
                batch[-1, 0] = math.inf  # of the last rank alone
            mine = batch.chunk(world.world_size)[world.rank]
            sharded.backward(scalers[0].scale(model(mine).square().mean()))
            norm = sharded.step(optimizer, max_norm=0.5, scaler=scalers[0])
            scalers[0].update()
            reference.zero_grad()
            scalers[1].scale(alone(batch).square().mean()).backward()
            scalers[1].unscale_(reference)
            wanted = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
            scalers[1].step(reference)
            scalers[1].update()
            assert norm is not None
            same_everywhere(world, cupy.from_dlpack(norm))
            assert math.isfinite(norm.item()) == (step % 3 != 2)
            if step % 3 != 2:
                assert math.isclose(norm.item(), wanted.item(), rel_tol=1e-4)
            assert scalers[0].get_scale() == scalers[1].get_scale()
        for got, expected in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.allclose(got, expected, atol=2e-4)
        sharded.detach()


@check
def passes_over_the_shards_move_memory_fast(world: cr.World) -> None:
    """Print how long a norm and a clip of 512 MiB take on one rank, beside a copy of them."""
    if world.world_size > 1:
        return
    registry = cr.Registry([cr.ParamSpec("p", (1 << 27,), "float32")], world)
    grad = cupy.ones(1 << 27, "float32")
    other = cupy.empty(1 << 27, "float32")
    times = {}
    with cr.Reducer(registry) as reducer:
        for what in ("copy", "norm", "clip"):
            for _ in range(3):
                with reducer.backward():
                    reducer.reduce_grad("p", grad)
                reducer.synchronize()
                cupy.cuda.Device().synchronize()
                start, stop = cupy.cuda.Event(), cupy.cuda.Event()
                start.record(cupy.cuda.get_current_stream())
                if what == "copy":
                    other[...] = registry.shards["p"]
                elif what == "norm":
                    reducer.norm()
                else:
                    reducer.clip(1.0)
                stop.record(cupy.cuda.get_current_stream())
                stop.synchronize()
                times[what] = cupy.cuda.get_elapsed_time(start, stop)
                reducer.wait()
    told = ", ".join(f"{what} {ms:.3f} ms" for what, ms in times.items())
    print(f"512 MiB of shards: {told}", flush=True)


if __name__ == "__main__":
    main(share_gpu=True)
