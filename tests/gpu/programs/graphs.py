"""A whole step in one CUDA graph: forward, backward, and the reducer through wait().

Run as `mpirun -n N python -m mpi4py graphs.py`; each check prints `OK name rank r`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import cupy
import torch
from tools import bits, check, integers, main, to_numpy

import cupynccl_reduce as cr
import cupynccl_reduce.torch
from cupynccl_reduce.errors import CommunicationError

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH, BATCH, LAYERS = 64, 16, 6
REPLAYS = 5


def model_of_integers() -> torch.nn.Sequential:
    """Weights of -1, 0 and 1: products and sums are exact, whatever kernel multiplies."""
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    with torch.no_grad():
        for i, param in enumerate(model.parameters()):
            shape = tuple(param.shape)
            few = integers((8, i), shape) == 0
            param.copy_(torch.from_numpy(integers((7, i), shape, 2).clip(-1, 1) * few))
    return model.cuda()


def batch(world: cr.World, step: int) -> torch.Tensor:
    return torch.from_numpy(integers((step, world.rank), (BATCH, WIDTH), 2)).float().cuda()


def replayed(step: Callable[[], None], stream: torch.cuda.Stream, sharded: Any) -> Any:
    """Warm up on `stream`, then capture one whole step."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    sharded.reducer.synchronize()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


@check
def torch_graph_replays_bit_equal(world: cr.World) -> None:
    for shard_dtype in ("float32", "bfloat16"):
        for bucket_bytes in (1 << 20, 20_000):
            model = model_of_integers()
            sharded = cupynccl_reduce.torch.attach(
                model, world, bucket_bytes=bucket_bytes, shard_dtype=shard_dtype, op="sum"
            )
            x = batch(world, 0)

            def step(model: Any = model, sharded: Any = sharded, x: Any = x) -> None:
                sharded.backward(model(x).sum())
                sharded.reducer.wait(stream=torch.cuda.current_stream())

            expected = []
            for number in range(REPLAYS):
                x.copy_(batch(world, number))
                step()
                expected.append(bits(sharded.registry.shards))
                torch.cuda.synchronize()
            assert len(set(expected)) > 1
            graph = replayed(step, torch.cuda.Stream(), sharded)
            for number in range(REPLAYS):
                x.copy_(batch(world, number))
                graph.replay()
                torch.cuda.synchronize()
                assert bits(sharded.registry.shards) == expected[number], (shard_dtype, number)
            # The engine goes on outside the graph, and the graph after it.
            x.copy_(batch(world, 1))
            step()
            sharded.reducer.synchronize()
            assert bits(sharded.registry.shards) == expected[1]
            x.copy_(batch(world, 2))
            graph.replay()
            torch.cuda.synchronize()
            assert bits(sharded.registry.shards) == expected[2]
            del graph
            sharded.detach()


@check
def cupy_capture_replays_bit_equal(world: cr.World) -> None:
    specs = [cr.ParamSpec(f"p{i}", (1000 + i,), "float32") for i in range(5)]
    registry = cr.Registry(specs, world, bucket_bytes=9000)
    stream = cupy.cuda.Stream(non_blocking=True)
    with cr.Reducer(registry) as reducer, stream:
        x = cupy.zeros((2000,), "float32")
        grads = [cupy.empty(spec.shape, "float32") for spec in specs]

        def step() -> None:
            for micro_batch in range(2):
                with reducer.backward():
                    for i, (spec, grad) in enumerate(zip(specs, grads, strict=True)):
                        cupy.multiply(x[: grad.size], i + 1 + micro_batch, out=grad)
                        reducer.reduce_grad(spec.name, grad)
                reducer.wait_packed()
            reducer.wait()

        step()
        reducer.synchronize()
        stream.synchronize()
        stream.begin_capture()
        step()
        graph = stream.end_capture()
        for number in range(1, REPLAYS):
            x.fill(8 * number * (world.rank + 1))
            graph.launch(stream)
            stream.synchronize()
            mean = 8 * number * (world.world_size + 1) / 2
            for i, shard in enumerate(registry.shards.values()):
                assert (to_numpy(shard) == mean * (2 * i + 3)).all(), (number, i)
        del graph


@check
def a_graph_holds_norm_and_clip(world: cr.World) -> None:
    """Also a loss scale that changes between replays, because it is read on the device."""
    specs = [cr.ParamSpec(f"p{i}", (1000 + i,), "float32") for i in range(3)]
    registry = cr.Registry(specs, world, bucket_bytes=5000)
    stream = cupy.cuda.Stream(non_blocking=True)
    with cr.Reducer(registry, op="mean") as reducer, stream:
        x, scale = cupy.zeros((2000,), "float32"), cupy.ones((), "float32")
        grads = [cupy.empty(spec.shape, "float32") for spec in specs]
        norms = cupy.zeros(2)

        def step() -> None:
            with reducer.backward():
                for spec, grad in zip(specs, grads, strict=True):
                    cupy.multiply(x[: grad.size], 3, out=grad)
                    reducer.reduce_grad(spec.name, grad)
            norms[0] = reducer.norm()
            norms[1] = reducer.clip(1.0, loss_scale=scale)
            reducer.wait()

        step()
        reducer.synchronize()
        stream.synchronize()
        stream.begin_capture()
        step()
        graph = stream.end_capture()
        for number in range(1, REPLAYS):
            x.fill(number)
            scale.fill(2.0**number)
            graph.launch(stream)
            stream.synchronize()
            whole = 3 * number * sum(spec.numel for spec in specs) ** 0.5
            got = norms.get().tolist()
            assert abs(got[0] / whole - 1) < 1e-12, number
            assert abs(got[1] * 2.0**number / whole - 1) < 1e-12, number
            each = 3 * number / 2.0**number * min(1.0, 1 / (got[1] + 1e-6))
            for shard in registry.shards.values():
                assert abs(to_numpy(shard) / each - 1).max(initial=0) < 1e-6, number
        step()  # outside the graph again
        assert abs(float(norms[0]) / whole - 1) < 1e-12
        reducer.synchronize()
        del graph


@check
def replays_cost_the_host_next_to_nothing(world: cr.World) -> None:
    """Print what communication adds to the host's time of a replayed step."""
    medians = []
    for with_reducer in (False, True):
        model = model_of_integers()
        sharded = cupynccl_reduce.torch.attach(model, world, op="sum")
        x = batch(world, 0)
        if not with_reducer:
            sharded.detach()

        def step(model: Any = model, sharded: Any = sharded, x: Any = x) -> None:
            loss = model(x).sum()
            if sharded._detached:
                loss.backward()
                model.zero_grad()
            else:
                sharded.backward(loss)
                sharded.reducer.wait(stream=torch.cuda.current_stream())

        if with_reducer:
            graph = replayed(step, torch.cuda.Stream(), sharded)
        else:
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
        times = []
        for _ in range(200):
            torch.cuda.synchronize()
            world.control.all_gather(b"")
            start = time.perf_counter()
            graph.replay()
            times.append(time.perf_counter() - start)
        medians.append(sorted(times)[100] * 1e6)
        torch.cuda.synchronize()
        del graph
        sharded.detach()
    if world.rank == 0:
        none, reducer = medians
        print(f"a replay takes the host {none:.1f} us, with the reducer {reducer:.1f}", flush=True)


@check
def a_capture_with_work_in_flight_is_refused(world: cr.World) -> None:
    """A launch that is refused half way breaks its world; main() goes on with another."""
    registry = cr.Registry([cr.ParamSpec("p", (1000,), "float32")], world)
    stream = cupy.cuda.Stream(non_blocking=True)
    reducer = cr.Reducer(registry)
    with stream:
        grad = cupy.ones((1000,), "float32")
        with reducer.backward():
            reducer.reduce_grad("p", grad)
        reducer.wait()
        stream.synchronize()
        stream.begin_capture()
        told = ""
        try:
            with reducer.backward():
                reducer.reduce_grad("p", grad)
        except CommunicationError as error:
            told = str(error)
        finally:
            stream.end_capture()
        assert "call synchronize() before the capture" in told


@check
def a_second_world_of_the_process_is_whole(world: cr.World) -> None:
    registry = cr.Registry([cr.ParamSpec("p", (1000,), "float32")], world)
    with cr.Reducer(registry, op="sum") as reducer:
        with reducer.backward():
            reducer.reduce_grad("p", cupy.full((1000,), world.rank + 1.0, "float32"))
        reducer.synchronize()
        total = world.world_size * (world.world_size + 1) / 2
        assert (to_numpy(registry.shards["p"]) == total).all()


if __name__ == "__main__":
    main(share_gpu=True)
