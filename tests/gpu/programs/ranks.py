"""The laws of the whole engine on CUDA and NCCL, at any number of ranks.

Run as `mpirun -n N python -m mpi4py ranks.py`; each check prints `OK name rank r`.
"""

from __future__ import annotations

import math

import cupy
import numpy as np
import torch
from tools import bits, check, gradient, integers, main, spin, to_numpy

import cupynccl_reduce as cr
from cupynccl_reduce.errors import CommunicationError, GradientError, ProtocolError

SHAPES = [(3,), (4, 5), (), (0, 8), (1,), (130, 7), (64, 64), (1000,), (2,), (33,)]


def _reduced(world: cr.World, values: list[np.ndarray], dtype: str, **options: object) -> list:
    """Reduce one gradient list (the same shapes on every rank) and gather it back."""
    bucket_bytes = options.pop("bucket_bytes", 1 << 20)
    shard_dtype = options.pop("shard_dtype", dtype)
    specs = [
        cr.ParamSpec(f"p{i}", v.shape, dtype, shard_dtype=shard_dtype) for i, v in enumerate(values)
    ]
    registry = cr.Registry(specs, world, bucket_bytes=bucket_bytes)
    with cr.Reducer(registry, **options) as reducer:
        with reducer.backward():
            for i in reversed(range(len(values))):
                reducer.reduce_grad(f"p{i}", gradient(values[i], dtype))
        full = registry.gather(reducer.wait())
        return [to_numpy(full[f"p{i}"]) for i in range(len(values))]


@check
def values_are_exact(world: cr.World) -> None:
    size = world.world_size
    exact_mean = size in (1, 2, 4, 8)
    dtypes = [("float32", "float32", "float32"), ("bfloat16", "bfloat16", "float32")]
    dtypes += [("bfloat16", "bfloat16", "bfloat16"), ("float16", "float32", "float16")]
    dtypes += [("float64", "float64", "float64"), ("bfloat16", "float32", "float32")]
    dtypes += [("float32", "bfloat16", "float32")]
    for policy in ("planned", "arrival"):
        for bucket_bytes in (1, 200, 1 << 20) if size <= 2 else (200,):
            for memory in ("device", "pinned") if bucket_bytes == 200 else ("device",):
                specs = [
                    cr.ParamSpec(f"{d}-{k}-{i}", shape, d, reduce_dtype=w, shard_dtype=s)
                    for k, (d, w, s) in enumerate(dtypes)
                    for i, shape in enumerate(SHAPES)
                ]
                op = "mean" if exact_mean else "sum"
                registry = cr.Registry(specs, world, bucket_bytes=bucket_bytes)
                reducer = cr.Reducer(registry, op=op, policy=policy, memory=memory)
                for step, micro_batches in enumerate((1, 3)):
                    total = {s.name: np.zeros(s.shape) for s in specs}
                    for micro_batch in range(micro_batches):
                        # The same order everywhere for "arrival", one per rank for "planned".
                        seed = (step, micro_batch, 0 if policy == "arrival" else world.rank)
                        order = np.random.default_rng(seed).permutation(len(specs))
                        with reducer.backward():
                            for i in order:
                                key = (step, micro_batch, int(i))
                                grads = [
                                    integers((*key, r), specs[i].shape, 4) * size
                                    for r in range(size)
                                ]
                                total[specs[i].name] += sum(grads)
                                own = gradient(grads[world.rank], specs[i].dtype)
                                reducer.reduce_grad(specs[i].name, own)
                    full = registry.gather(reducer.wait())
                    for spec in specs:
                        expected = total[spec.name] / (size if op == "mean" else 1)
                        assert full[spec.name].shape == spec.shape
                        np.testing.assert_array_equal(
                            to_numpy(full[spec.name]), expected, f"{policy} {spec}"
                        )
                reducer.close()


@check
def direct_gradients_have_the_bits_of_packed_ones(world: cr.World) -> None:
    shapes = [(3,), (64, 64), (96,), (130, 7), (1536,), (4096,)]
    rng = np.random.default_rng(world.rank)
    backwards = [[gradient(rng.standard_normal(s), "bfloat16") for s in shapes] for _ in range(2)]
    if world.rank == 1:
        backwards[0][1] = backwards[0][1].T.contiguous().T  # not laid out as its matrix: packed
    normal = world.communicator.direct_bytes
    for op in ("mean", "sum"):
        for shard_dtype in ("bfloat16", "float32"):
            for bucket_bytes in (1 << 20, 9000):
                results = set()
                for direct_bytes in (0, 64, 4000):
                    world.communicator.direct_bytes = direct_bytes
                    specs = [
                        cr.ParamSpec(f"p{i}", shape, "bfloat16", shard_dtype=shard_dtype)
                        for i, shape in enumerate(shapes)
                    ]
                    registry = cr.Registry(specs, world, bucket_bytes=bucket_bytes)
                    large = any(bucket.direct for bucket in registry.buckets)
                    assert large == (direct_bytes > 0 and world.world_size > 1)
                    with cr.Reducer(registry, op=op) as reducer:
                        for grads in backwards:
                            with reducer.backward():
                                for i, grad in enumerate(grads):
                                    reducer.reduce_grad(f"p{i}", grad)
                        full = registry.gather(reducer.wait())
                        results.add(bits(full))
                # Beyond 2 ranks NCCL may sum in another order where the count is another.
                assert world.world_size > 2 or len(results) == 1, (op, shard_dtype, bucket_bytes)
    world.communicator.direct_bytes = 64
    try:
        values = [
            integers((5, i, world.rank), s, 4) * world.world_size for i, s in enumerate(shapes)
        ]
        sums = [
            sum(integers((5, i, r), s, 4) for r in range(world.world_size))
            for i, s in enumerate(shapes)
        ]
        for got, total in zip(_reduced(world, values, "float32"), sums, strict=True):
            np.testing.assert_array_equal(got, total)
    finally:
        world.communicator.direct_bytes = normal


@check
def integers_are_summed(world: cr.World) -> None:
    for dtype in ("int32", "int64"):
        for policy in ("planned", "arrival"):
            everyone = [
                [integers((11, i, r), shape, 1000) for i, shape in enumerate(SHAPES)]
                for r in range(world.world_size)
            ]
            got = _reduced(world, everyone[world.rank], dtype, op="sum", policy=policy)
            for i, total in enumerate(got):
                np.testing.assert_array_equal(total, sum(grads[i] for grads in everyone))


@check
def policies_agree_bit_for_bit(world: cr.World) -> None:
    """policy="arrival" and "planned" give equal bits where the sum is order-free."""
    if world.world_size > 2:
        return
    rng = np.random.default_rng(world.rank)
    grads = [gradient(rng.standard_normal(shape), "bfloat16") for shape in SHAPES]
    for shard_dtype in ("bfloat16", "float32"):
        results = set()
        for policy in ("planned", "arrival"):
            for bucket_bytes in (1, 500, 1 << 20):
                specs = [
                    cr.ParamSpec(f"p{i}", shape, "bfloat16", shard_dtype=shard_dtype)
                    for i, shape in enumerate(SHAPES)
                ]
                registry = cr.Registry(specs, world, bucket_bytes=bucket_bytes)
                with cr.Reducer(registry, policy=policy) as reducer:
                    for _ in range(2):
                        with reducer.backward():
                            for i, grad in enumerate(grads):
                                reducer.reduce_grad(f"p{i}", grad)
                    shards = reducer.wait()
                    results.add(b"".join(bits({n: shards[n]}) for n in registry))
        assert len(results) == 1


@check
def real_values_stay_within_the_bound(world: cr.World) -> None:
    """One rounding in pack, world_size - 1 in the sum, each half an ulp of the sum of sizes."""
    epsilon = {"float32": 2.0**-24, "bfloat16": 2.0**-9}
    for dtype, eps in epsilon.items():
        rngs = [np.random.default_rng((7, r)) for r in range(world.world_size)]
        everyone = [
            [to_numpy_values(rng.standard_normal(s), dtype) for s in SHAPES] for rng in rngs
        ]
        got = _reduced(world, everyone[world.rank], dtype)
        for i, shape in enumerate(SHAPES):
            if math.prod(shape):
                mean = sum(g[i] for g in everyone) / world.world_size
                scale = sum(np.abs(g[i]) for g in everyone) / world.world_size
                bound = (world.world_size + 1) * eps * scale
                assert (np.abs(got[i] - mean) <= bound).all()


def to_numpy_values(values: np.ndarray, dtype: str) -> np.ndarray:
    return gradient(values, dtype).double().cpu().numpy()


@check
def a1_a_send_buffer_is_not_packed_while_its_collective_reads_it(world: cr.World) -> None:
    size = world.world_size
    specs = [cr.ParamSpec(f"p{i}", (4,), "float32") for i in range(6)]
    registry = cr.Registry(specs, world, bucket_bytes=16)
    with cr.Reducer(registry, op="sum", max_buffers=2) as reducer:
        spin(world.stream)
        with reducer.backward():
            for i in range(6):
                grad = cupy.full(4, (i + 1) * (world.rank + 1), cupy.float32)
                reducer.reduce_grad(f"p{i}", grad)
        full = registry.gather(reducer.wait())
        for i in range(6):
            expected = (i + 1) * size * (size + 1) / 2
            assert (to_numpy(full[f"p{i}"]) == expected).all()


@check
def a3_every_producer_stream_of_a_bucket_is_waited_for(world: cr.World) -> None:
    specs = [cr.ParamSpec("one", (4096,), "float32"), cr.ParamSpec("two", (4096,), "float32")]
    registry = cr.Registry(specs, world)
    with cr.Reducer(registry) as reducer:
        first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        for kind in ("cupy", "torch"):
            grads = [cupy.full(4096, cupy.nan, cupy.float32) for _ in range(2)]
            cupy.cuda.get_current_stream().synchronize()
            with reducer.backward():
                spin(first)
                for name, grad, stream, value in (
                    ("one", grads[0], first, 1),
                    ("two", grads[1], second, 2),
                ):
                    with stream, torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
                        grad.fill(value)
                        handed = grad if kind == "cupy" else torch.from_dlpack(grad)
                        reducer.reduce_grad(name, handed)
            full = registry.gather(reducer.wait())
            assert (to_numpy(full["one"]) == 1).all()
            assert (to_numpy(full["two"]) == 2).all()


@check
def a5_a_dropped_gradient_is_not_handed_out_again_before_it_was_read(world: cr.World) -> None:
    size = world.world_size
    numel = 1 << 16
    registry = cr.Registry([cr.ParamSpec("p", (numel,), "float32")], world)
    with cr.Reducer(registry) as reducer:
        for round_ in range(50):
            for make in (cupy.full, lambda n, v, d: torch.full((n,), v, device="cuda")):
                grad = make(numel, float((world.rank + 1) * (round_ + 1)), cupy.float32)
                spin(world.stream, 1.0)
                with reducer.backward():
                    reducer.reduce_grad("p", grad)
                    del grad
                trash = [make(numel, float("nan"), cupy.float32) for _ in range(3)]
                full = registry.gather(reducer.wait())
                expected = (round_ + 1) * (size + 1) / 2
                assert (to_numpy(full["p"]) == expected).all()
                del trash, full


@check
def a7_bucket_size_is_never_visible_in_the_result(world: cr.World) -> None:
    values = [integers((3, i, world.rank), (i,)) for i in range(1, 13)]
    results = [
        np.concatenate(
            _reduced(
                world, values, "float32", op="sum", bucket_bytes=4 * numel, max_buffers=buffers
            )
        ).tobytes()
        for numel in (1, 2, 5, 7, 13, 78, 10**6)
        for buffers in (1, 2)
    ]
    assert len(set(results)) == 1


@check
def d1_an_expanded_gradient_gives_its_logical_values(world: cr.World) -> None:
    weight = torch.zeros(3, 4, device="cuda", requires_grad=True)
    (grad,) = torch.autograd.grad(weight.sum(), weight)
    scalar = torch.ones((), device="cuda")
    registry = cr.Registry(
        [cr.ParamSpec("w", (3, 4), "float32"), cr.ParamSpec("e", (3, 4), "float32")], world
    )
    with cr.Reducer(registry) as reducer:
        with reducer.backward():
            reducer.reduce_grad("w", grad)
            reducer.reduce_grad("e", scalar.expand(3, 4))
        full = registry.gather(reducer.wait())
    assert (to_numpy(full["w"]) == 1).all()
    assert (to_numpy(full["e"]) == 1).all()
    assert scalar.item() == 1


@check
def d9_bfloat16_tensors_need_nothing_of_cupy(world: cr.World) -> None:
    registry = cr.Registry([cr.ParamSpec("p", (5,), "bfloat16", shard_dtype="bfloat16")], world)
    with cr.Reducer(registry, op="sum") as reducer:
        with reducer.backward():
            reducer.reduce_grad("p", torch.full((5,), 1.0 + world.rank, device="cuda").bfloat16())
        out = torch.zeros(5, dtype=torch.bfloat16, device="cuda")
        registry.gather(reducer.wait(), out={"p": out})
    size = world.world_size
    assert out.dtype == torch.bfloat16
    assert (out == size * (size + 1) / 2).all()


@check
def e3_float16_travels_in_float32(world: cr.World) -> None:
    for value in (20000.0, 2.0**-24):
        (got,) = _reduced(world, [np.full(3, value)], "float16")
        assert (got == value).all()


@check
def a_failed_backward_leaves_every_rank_aligned(world: cr.World) -> None:
    specs = [cr.ParamSpec(f"p{i}", (8,), "float32") for i in range(6)]
    registry = cr.Registry(specs, world, bucket_bytes=32)
    with cr.Reducer(registry) as reducer:
        for bad_rank in (0, world.world_size - 1):
            try:
                with reducer.backward():
                    for i in reversed(range(6)):
                        if i == 2 and world.rank == bad_rank:
                            raise KeyError("planted")
                        reducer.reduce_grad(f"p{i}", cupy.ones(8, cupy.float32))
            except KeyError:
                assert world.rank == bad_rank
                _expect(ProtocolError, reducer.wait)
            else:
                full = {n: to_numpy(a) for n, a in reducer.wait().items()}
                assert all(np.isnan(full[f"p{i}"]).all() for i in range(3))
                assert all((full[f"p{i}"] == 1).all() for i in range(3, 6))
            reducer.discard()
            with reducer.backward():
                for i in range(6):
                    reducer.reduce_grad(f"p{i}", cupy.full(8, i, cupy.float32))
            for i in range(6):
                assert (to_numpy(reducer.wait()[f"p{i}"]) == i).all()


@check
def the_callers_own_shards_are_written(world: cr.World) -> None:
    specs = [cr.ParamSpec("a", (7,), "float32"), cr.ParamSpec("b", (9,), "bfloat16")]
    own = cr.Registry(specs, world)
    brought = {
        name: cupy.full(place.stop - place.start, cupy.nan, cupy.float32)
        for name, place in own.items()
    }
    for policy in ("planned", "arrival"):
        registry = cr.Registry(specs, world, shards={"a": brought["a"], "b": brought["b"]})
        with cr.Reducer(registry, op="sum", policy=policy) as reducer:
            for _ in range(2):
                with reducer.backward():
                    reducer.reduce_grad("a", cupy.ones(7, cupy.float32))
                    reducer.reduce_grad("b", torch.ones(9, device="cuda").bfloat16())
            shards = reducer.wait()
            for name in ("a", "b"):
                assert shards[name] is brought[name]
                assert (to_numpy(brought[name]) == 2 * world.world_size).all()


@check
def wait_packed_lets_a_gradient_be_overwritten(world: cr.World) -> None:
    registry = cr.Registry([cr.ParamSpec("p", (1 << 20,), "float32")], world)
    with cr.Reducer(registry) as reducer:
        grad = cupy.ones(1 << 20, cupy.float32)
        spin(world.stream)
        with reducer.backward():
            reducer.reduce_grad("p", grad)
        reducer.wait_packed()
        grad.fill(cupy.nan)
        assert (to_numpy(reducer.wait()["p"]) == 1).all()


@check
def a_late_reader_holds_back_the_next_cycle(world: cr.World) -> None:
    registry = cr.Registry([cr.ParamSpec("p", (1 << 18,), "float32")], world)
    reader = cupy.cuda.Stream(non_blocking=True)
    with cr.Reducer(registry) as reducer:
        with reducer.backward():
            reducer.reduce_grad("p", cupy.ones(1 << 18, cupy.float32))
        shards = reducer.wait(stream=reader)
        spin(reader)
        with reader:
            copy = shards["p"].copy()
        with reducer.backward():
            reducer.reduce_grad("p", cupy.full(1 << 18, 5, cupy.float32))
        reducer.wait()
        reader.synchronize()
        assert (to_numpy(copy) == 1).all()


@check
def gradients_on_the_host_are_refused_and_the_step_goes_on(world: cr.World) -> None:
    registry = cr.Registry([cr.ParamSpec("p", (3,), "float32")], world)
    with cr.Reducer(registry) as reducer:
        with reducer.backward():
            for bad in (np.ones(3, np.float32), torch.ones(3), cupy.ones(4, cupy.float32)):
                _expect(GradientError, reducer.reduce_grad, "p", bad)
            reducer.reduce_grad("p", cupy.ones(3, cupy.float32))
        assert (to_numpy(reducer.wait()["p"]) == 1).all()


@check
def o1_live_send_buffers_are_capped(world: cr.World) -> None:
    held = []
    for num_buckets in (8, 80):
        specs = [cr.ParamSpec(f"p{i}", (1 << 14,), "float32") for i in range(num_buckets)]
        registry = cr.Registry(specs, world, bucket_bytes=4 << 14)
        with cr.Reducer(registry, max_buffers=2) as reducer:
            spin(world.stream)
            with reducer.backward():
                for spec in specs:
                    reducer.reduce_grad(spec.name, cupy.ones(1 << 14, cupy.float32))
            assert reducer.statistics().in_flight <= 2
            held.append(reducer.statistics().buffer_bytes)
            assert all((to_numpy(a) == 1).all() for a in reducer.wait().values())
    assert held[0] == held[1]


@check
def the_arrival_policy_breaks_the_world_on_failure(world: cr.World) -> None:
    if world.world_size > 1:
        return  # its peers would have to be told, and then end: see the one-rank run
    registry = cr.Registry([cr.ParamSpec("p", (3,), "float32")], world)
    reducer = cr.Reducer(registry, policy="arrival")
    try:
        with reducer.backward():
            raise KeyError("planted")
    except KeyError:
        pass
    _expect(CommunicationError, reducer.wait)
    world.status.fault = None  # the world goes on for the other checks


def _expect(kind: type[BaseException], function: object, *args: object) -> None:
    try:
        function(*args)
    except kind:
        return
    raise AssertionError(f"{kind.__name__} was expected from {function}")


if __name__ == "__main__":
    main(share_gpu=True)
