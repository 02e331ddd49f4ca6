"""attach() and detach(): what is broadcast, what is refused, and what is left behind."""

from __future__ import annotations

import copy
import gc
import re
import subprocess
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from cupynccl_reduce import LayoutError, MismatchError, ProtocolError, ReduceError
from cupynccl_reduce import run_local as run
from cupynccl_reduce.torch import Sharded, attach, attachment

if TYPE_CHECKING:
    from collections.abc import Callable

    from cupynccl_reduce import World

    Reduced = Callable[[Sharded], dict[str, torch.Tensor]]

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.uint8,
    torch.bool,
]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    flat = (t.detach().clone(memory_format=torch.contiguous_format) for t in (one, other))
    return torch.equal(*(t.reshape(-1).view(torch.uint8) for t in flat))


def build_model(seed: int) -> nn.Module:
    """Return a model of every dtype and memory layout, with random bits: NaN payloads too."""
    generator = torch.Generator().manual_seed(seed)

    def draw(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        if dtype is torch.bool:
            return torch.randint(0, 2, shape, generator=generator).bool()
        numel = torch.empty(shape).numel() * torch.empty(0, dtype=dtype).element_size()
        bits = torch.randint(0, 256, (numel,), generator=generator, dtype=torch.uint8)
        return bits.view(dtype).reshape(shape)

    model = nn.Module()
    for index, dtype in enumerate(DTYPES):
        for shape in ((), (0, 3), (7,), (3, 2, 5, 4)):
            model.register_buffer(f"b{index}_{len(shape)}", draw(dtype, *shape))
    strided = draw(torch.float32, 3, 2, 5, 4).contiguous(memory_format=torch.channels_last)
    model.register_buffer("channels_last", strided)
    model.register_buffer("every_other", draw(torch.int64, 10)[::2])
    model.register_buffer("expanded", draw(torch.float32, 4, 1).expand(4, 5), persistent=False)
    model.register_buffer("one_expanded", draw(torch.float32, 1).expand(5))
    model.register_buffer("one_strided", draw(torch.float64, 14)[::7][:1])
    model.weight = nn.Parameter(draw(torch.float32, 5, 3).t())
    model.low = nn.Parameter(draw(torch.bfloat16, 9))
    model.frozen = nn.Parameter(draw(torch.float32, 4), requires_grad=False)
    return model


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("broadcast_bytes", [1 << 20, 16])
def test_every_rank_gets_rank_0s_model(
    world_size: int, broadcast_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attachment, "BROADCAST_BYTES", broadcast_bytes)

    def rank(world: World) -> Any:
        model = build_model(world.rank)
        with attach(model, world) as sharded:
            for name, shard in sharded.named_parameters():
                place = sharded.registry[name]
                full = model.get_parameter(name).detach().reshape(-1)
                assert same_bits(shard, full[place.start : place.stop].to(shard.dtype))
        return dict(model.named_buffers(), **dict(model.named_parameters()))

    source = build_model(0)
    expected = dict(source.named_buffers(), **dict(source.named_parameters()))
    for state in run(world_size, rank):
        assert set(state) == set(expected)
        for name, tensor in expected.items():
            assert same_bits(state[name], tensor), name
            assert state[name].stride() == tensor.stride(), name


def test_parameters_are_one_flat_master_shard_each() -> None:
    def rank(world: World) -> Any:
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1).bfloat16())
        with attach(model, world) as sharded:
            shards = dict(sharded.named_parameters())
            assert list(shards) == [n for n, _ in model.named_parameters()]
            assert list(map(id, sharded.parameters())) == list(map(id, shards.values()))
            assert all(isinstance(s, nn.Parameter) and s.ndim == 1 for s in shards.values())
            assert {s.dtype for s in shards.values()} == {torch.float32}
            assert shards["0.weight"].data_ptr() != model[0].weight.data_ptr()
            return [s.numel() for s in shards.values()]

    assert run(4, rank) == [[2, 1, 1, 1], [2, 1, 1, 0], [2, 0, 0, 0], [0, 0, 0, 0]]


def test_tied_parameters_are_one(reduced: Reduced) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, index: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(index)).sum()

    index = torch.tensor([0, 3, 3])
    torch.manual_seed(0)
    plain = Tied()
    nn.init.constant_(plain.embed.weight, 2.0)
    plain(index).backward()

    def rank(world: World) -> Any:
        model = Tied()
        nn.init.constant_(model.embed.weight, 2.0 + world.rank)
        # Either name of the tied pair will do.
        with attach(model, world, uses_many=["head.weight"]) as sharded:
            assert list(sharded.registry) == ["embed.weight"]
            assert sharded.registry["embed.weight"].spec.uses == "many"
            sharded.backward(model(index))
            grad = reduced(sharded)["embed.weight"]
            sharded.step(torch.optim.SGD(sharded.parameters(), lr=1.0))
            assert model.head.weight is model.embed.weight
            return grad, model.head.weight.detach()

    for grad, weight in run(2, rank):
        assert torch.equal(grad, plain.embed.weight.grad.double())
        assert torch.equal(weight, 2 - plain.embed.weight.grad)


def refusals(world_size: int, attach_rank: Callable[[World], Any]) -> list[ReduceError]:
    """Return each rank's error from `attach_rank(world)`; every rank must raise one."""

    def rank(world: World) -> Any:
        with pytest.raises(ReduceError) as caught:
            attach_rank(world)
        world.check()  # nobody's world is broken by a refusal
        return caught.value

    return run(world_size, rank)


def wrong_device() -> nn.Module:
    return nn.Linear(2, 2).to("meta")


def nothing_trains() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(requires_grad=False)


def complex_parameter() -> nn.Module:
    return nn.Linear(2, 2, dtype=torch.complex64)


def float8_parameter() -> nn.Module:
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.zeros(3).to(torch.float8_e5m2))
    return model


def sparse_buffer() -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.eye(3).to_sparse())
    return model


def lazy() -> nn.Module:
    return nn.LazyLinear(2)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (wrong_device, "'weight' is on meta, but this world works on cpu; move the model"),
        (nothing_trains, "no parameter that requires grad"),
        (complex_parameter, "'weight': unsupported dtype 'complex64'"),
        (float8_parameter, "'scale': unsupported dtype 'float8_e5m2'"),
        (sparse_buffer, r"'mask' \(3, 3\) is torch.sparse_coo; only dense"),
        (lazy, "'weight' has no shape yet; run one forward"),
    ],
)
@pytest.mark.parametrize("bad_ranks", [(0, 1, 2), (1,)])
def test_bad_models_are_refused_on_all_ranks(
    build: Callable[[], nn.Module], message: str, bad_ranks: tuple[int, ...]
) -> None:
    models = [build() if rank in bad_ranks else nn.Linear(2, 2) for rank in range(3)]
    before = copy.deepcopy(models[2])
    errors = refusals(3, lambda world: attach(models[world.rank], world))
    for rank, error in enumerate(errors):
        assert re.search(message, str(error))
        assert isinstance(error, LayoutError if rank in bad_ranks else MismatchError)
    if 2 not in bad_ranks:
        assert same_bits(models[2].weight, before.weight)  # nothing was broadcast


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"uses_many": ["weight", "nothing"]}, "uses_many: the model has no parameter 'nothing'"),
        ({"bucket_bytes": 0}, "bucket_bytes must be"),
        ({"max_buffers": 0}, "max_buffers must be"),
        ({"op": "max"}, "op must be one of"),
        ({"policy": "late"}, "policy must be one of"),
        ({"pre_divide": False}, "pre_divide=False needs"),
        ({"missing": "nan"}, "missing must be one of"),
        ({"memory": "shared"}, "memory must be one of"),
        ({"reduce_dtype": "int32"}, "'weight': reduce_dtype 'int32' cannot hold"),
        ({"shard_dtype": "float128"}, "'weight': shard_dtype: unsupported dtype"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    for error in refusals(2, lambda world: attach(nn.Linear(2, 2), world, **options)):
        assert re.search(message, str(error))
        assert isinstance(error, LayoutError)


@pytest.mark.parametrize("other", [nn.Linear(2, 3), nn.Linear(2, 2).double(), nn.BatchNorm1d(2)])
def test_different_models_are_refused(other: nn.Module) -> None:
    models = [nn.Linear(2, 2), other, nn.Linear(2, 2)]
    for error in refusals(3, lambda world: attach(models[world.rank], world)):
        assert isinstance(error, MismatchError)
        assert re.search("ranks disagree on the model.*rank 1: ", str(error))


def test_frozen_on_one_rank_is_refused() -> None:
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    models[1].bias.requires_grad_(False)
    for error in refusals(2, lambda world: attach(models[world.rank], world)):
        assert re.search("rank 0: .bias. .*requires grad; rank 1: .bias.", str(error))


def test_attached_twice() -> None:
    def rank(world: World) -> None:
        model = nn.Linear(2, 2)
        with attach(model, world):
            second = attach(model, world)
            with pytest.raises(ProtocolError, match=r"detach\(\) a model before it is attached"):
                second.backward(model(torch.ones(1, 2)).sum())
            second.detach()

    run(1, rank)


def hooks(model: nn.Module) -> list[int]:
    return [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]


@pytest.mark.parametrize("world_size", [1, 2])
def test_attach_and_detach_20_times(world_size: int, reduced: Reduced) -> None:  # J9
    def rank(world: World) -> Any:
        model = nn.Linear(3, 2)
        held: list[weakref.ref[Any]] = []
        for _ in range(20):
            sharded = attach(model, world)
            optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
            assert hooks(model) == [1, 1]
            before = sharded.reducer.statistics().gradients
            sharded.backward(model(torch.ones(1, 3)).sum())
            assert sharded.reducer.statistics().gradients == before + 2  # once per parameter
            assert reduced(sharded)["bias"].tolist() == [1.0, 1.0]
            sharded.step(optimizer)
            with sharded.no_sync():
                sharded.backward(model(torch.ones(1, 3)).sum())
            shards = list(sharded.parameters())
            held += [weakref.ref(o) for o in (sharded, sharded.reducer, sharded.registry)]
            sharded.detach()
            sharded.detach()
            assert hooks(model) == [0, 0]
            assert all(p.grad is None for p in model.parameters())
            assert all(s.grad is None for s in shards)
            del sharded
        gc.collect()
        assert {ref() for ref in held} == {None}
        model(torch.ones(1, 3)).sum().backward()  # torch's own again
        return model.bias.grad.tolist()

    assert run(world_size, rank) == [[1.0, 1.0]] * world_size


def test_detach_leaves_no_stream_behind() -> None:  # J9
    def rank(world: World) -> int:
        model = nn.Linear(3, 2)
        attach(model, world).detach()
        world.control.all_gather(b"")
        before = threading.active_count()
        world.control.all_gather(b"")
        for _ in range(5):
            attach(model, world).detach()
        world.control.all_gather(b"")
        world.control.all_gather(b"")  # the other rank has counted its own by the next meeting
        after = threading.active_count()
        world.control.all_gather(b"")
        return after - before

    assert run(2, rank) == [0, 0]


def test_everything_after_detach_is_an_error() -> None:
    def rank(world: World) -> None:
        model = nn.Linear(3, 2)
        with attach(model, world) as sharded:
            optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
            assert repr(sharded).startswith("<Sharded 2 parameters OUTSIDE, <Reducer step 0")
        assert "DETACHED" in repr(sharded)
        for call in (
            lambda: sharded.backward(model(torch.ones(1, 3)).sum()),
            lambda: sharded.step(optimizer),
            lambda: sharded.no_sync().__enter__(),
        ):
            with pytest.raises(ProtocolError, match=r"detached; attach\(\) it again"):
                call()
        with pytest.raises(ProtocolError, match="closed"):
            sharded.discard()

    run(1, rank)


def test_detach_inside_backward_is_refused() -> None:
    def rank(world: World) -> Any:
        model = nn.Linear(3, 2)
        with attach(model, world) as sharded:
            output = model(torch.ones(1, 3))
            errors = []

            def interfere(grad: torch.Tensor) -> torch.Tensor:
                with pytest.raises(ProtocolError) as caught:
                    sharded.detach()
                errors.append(str(caught.value))
                return grad

            output.register_hook(interfere)
            sharded.backward(output.sum())
            assert hooks(model) == [1, 1]
            return errors

    assert run(1, rank) == [["detach() inside backward(); call it afterwards"]]


def test_detach_after_the_world_has_closed() -> None:
    model = nn.Linear(3, 2)
    (sharded,) = run(1, lambda world: attach(model, world))
    sharded.detach()
    assert hooks(model) == [0, 0]


def test_made_by_attach() -> None:
    (sharded,) = run(1, lambda world: attach(nn.Linear(1, 1), world))
    assert isinstance(sharded, Sharded)


@pytest.mark.parametrize(
    "code",
    [
        "import cupynccl_reduce, sys; assert 'torch' not in sys.modules; import torch",
        "import torch, cupynccl_reduce.torch; assert torch.Tensor",
    ],
)
def test_either_import_comes_first(code: str) -> None:  # K5
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_detach_inside_a_backward_is_refused_and_changes_nothing() -> None:
    def rank(world: World) -> list[float]:
        model = nn.Linear(2, 1, bias=False)
        sharded = attach(model, world)
        with sharded.reducer.backward(), pytest.raises(ProtocolError, match="inside backward"):
            sharded.detach()
        sharded.discard()
        sharded.backward((model.weight * 3).sum())
        full = sharded.registry.gather(sharded.reducer.wait())
        sharded.detach()
        return full["weight"].reshape(-1).tolist()

    assert run(2, rank) == [[3.0, 3.0]] * 2


def test_uses_many_is_a_list_of_names() -> None:
    for error in refusals(2, lambda world: attach(nn.Linear(2, 2), world, uses_many="weight")):
        assert "['weight']" in str(error)
