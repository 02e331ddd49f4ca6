"""What n ranks save, m ranks load: the same bits, whatever the buckets and the order."""

from __future__ import annotations

import base64
import json
import random
import tempfile
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoint.states import PARAMS, check, load_on, make_full, make_shards, save_on
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from strategies import FLOATS, INTEGERS, bits, bucket_sizes, params

import cupynccl_reduce as cr
from cupynccl_reduce import LayoutError, ParamSpec, Registry, World, run_local
from cupynccl_reduce.checkpoint.files import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

STATES = {"param": "bfloat16", "exp_avg": "float32", "exp_avg_sq": "float64"}


@pytest.mark.parametrize(("before", "after"), list(product([1, 2, 3, 4], repeat=2)))
def test_any_world_size(tmp_path: Path, before: int, after: int) -> None:
    full = make_full(PARAMS, STATES)
    run_local(before, lambda world: save_on(world, tmp_path / "c", PARAMS, full, {"step": 7}))
    metas = run_local(after, lambda w: load_on(w, tmp_path / "c", PARAMS[::-1], full, 16))
    assert metas == [{"step": 7}] * after


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
def test_any_dtype(tmp_path: Path, dtype: str) -> None:
    full = make_full(PARAMS, {"s": dtype})
    run_local(3, lambda world: save_on(world, tmp_path, PARAMS, full))
    run_local(2, lambda world: load_on(world, tmp_path, PARAMS, full))


@settings(max_examples=40)
@given(data=st.data(), specs=params(), seed=st.integers(0, 1 << 30))
def test_what_is_saved_is_loaded(
    data: st.DataObject, specs: tuple[ParamSpec, ...], seed: int
) -> None:
    before, after = (data.draw(st.integers(1, 4)) for _ in range(2))
    dtypes = data.draw(st.dictionaries(st.sampled_from("abc"), st.sampled_from(FLOATS + INTEGERS)))
    first, second = (data.draw(bucket_sizes) for _ in range(2))
    full = make_full(specs, dtypes, seed)
    for of in full.values():  # a state need not have all parameters
        for name in data.draw(st.sets(st.sampled_from(sorted(of)))):
            del of[name]
    shuffled = data.draw(st.permutations(specs))

    def save(world: World) -> None:
        registry = Registry(specs, world, bucket_bytes=first)
        cr.save(folder, registry, make_shards(full, registry))

    with tempfile.TemporaryDirectory() as folder:
        run_local(before, save)
        run_local(after, lambda world: load_on(world, Path(folder), shuffled, full, second))


def test_pieces_longer_than_a_block(tmp_path: Path) -> None:
    specs = [ParamSpec("p", (3 * BLOCK_BYTES // 4 + 5,), "float32"), ParamSpec("q", (9,), "int8")]
    full = make_full(specs, {"wide": "float64", "narrow": "int8"})
    for before, after in ((1, 3), (3, 1), (2, 3), (2, 2)):
        run_local(before, lambda world: save_on(world, tmp_path, specs, full))
        run_local(after, lambda world: load_on(world, tmp_path, specs, full))


def test_a_new_save_replaces_the_old_one(tmp_path: Path) -> None:
    for seed, world_size in enumerate((2, 4, 1, 3)):
        full = make_full(PARAMS, STATES, seed)
        run_local(world_size, lambda w, f=full, s=seed: save_on(w, tmp_path, PARAMS, f, {"s": s}))
        (meta,) = run_local(1, lambda world, f=full: load_on(world, tmp_path, PARAMS, f))
        assert meta == {"s": seed}
        assert len(list(tmp_path.iterdir())) == 2
        assert len(list(tmp_path.glob("save-*/*"))) == world_size


def test_a_folder_of_the_users_own_files_keeps_them(tmp_path: Path) -> None:
    for name in ("notes.txt", "save-1", "manifest.json.bak", "save-0123456789abcdeg"):
        (tmp_path / name).write_text("mine")
    full = make_full(PARAMS, STATES)
    for _ in range(2):
        run_local(2, lambda world: save_on(world, tmp_path, PARAMS, full))
    assert len(list(tmp_path.iterdir())) == 6


def test_other_programs_read_the_files(tmp_path: Path) -> None:
    full = make_full(PARAMS, {"a": "bfloat16"})
    run_local(2, lambda world: save_on(world, tmp_path, PARAMS, full, {"x": [1, {"y": None}]}))
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["params"]["embed.weight"] == [5, 7]
    assert manifest["states"]["a"]["embed.weight"] == "bfloat16"
    assert manifest["metas"] == [{"x": [1, {"y": None}]}]
    (folder,) = tmp_path.glob("save-*")
    parts = []
    for rank in range(2):
        with safe_open(folder / f"rank-0000{rank}-of-00002.safetensors", "numpy") as file:
            parts.append(file.get_tensor("a/embed.weight"))
            assert file.metadata()["token"] == manifest["token"]
    joined = np.concatenate(parts)
    assert joined.dtype == np.uint16
    assert joined.tobytes() == full["a"]["embed.weight"].tobytes()


def test_a_files_mode_is_as_the_umask_says(tmp_path: Path) -> None:
    run_local(1, lambda world: save_on(world, tmp_path, PARAMS, {}))
    (file,) = tmp_path.glob("save-*/*")
    assert file.stat().st_mode == (tmp_path / "manifest.json").stat().st_mode


def test_a_relative_path_and_folders_above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    full = make_full(PARAMS, STATES)
    run_local(2, lambda world: save_on(world, Path("runs/7/c"), PARAMS, full))
    run_local(3, lambda world: load_on(world, tmp_path / "runs/7/c", PARAMS, full))


def test_the_registrys_own_shards_are_saved_and_filled(tmp_path: Path) -> None:
    specs = [ParamSpec("p", (10,), "float32"), ParamSpec("q", (3,), "float32")]
    values = {"p": np.arange(10, dtype="f4"), "q": np.arange(3, dtype="f4")}

    def save(world: World) -> None:
        registry = Registry(specs, world)
        with cr.Reducer(registry, op="sum") as reducer:
            with reducer.backward():
                for name, array in values.items():
                    if world.rank == 0:
                        reducer.reduce_grad(name, array)
            cr.save(tmp_path, registry, {"grad": reducer.wait()})

    def load(world: World) -> Any:
        registry = Registry(specs, world)
        cr.load(tmp_path, registry, {"grad": registry.shards})
        return registry.gather(registry.shards)

    run_local(2, save)
    for full in run_local(3, load):
        assert all(bits(full[name]) == bits(array) for name, array in values.items())


def test_states_that_are_not_asked_for_are_not_read(tmp_path: Path) -> None:
    full = make_full(PARAMS, STATES)
    run_local(2, lambda world: save_on(world, tmp_path, PARAMS, full))
    run_local(2, lambda world: load_on(world, tmp_path, PARAMS, {"param": full["param"]}))
    run_local(2, lambda world: load_on(world, tmp_path, PARAMS, {}))


def test_the_meta_of_each_rank_comes_back_to_it(tmp_path: Path) -> None:
    def save(world: World) -> None:
        rng = np.random.default_rng(world.rank)
        rng.random(world.rank + 1)
        meta = {"step": 3, "rng": rng.bit_generator.state, "loss": float("nan"), "betas": (0.9, 1)}
        save_on(world, tmp_path, PARAMS, {}, meta)

    def load(world: World) -> Any:
        meta = load_on(world, tmp_path, PARAMS, {})
        assert (meta["step"], meta["betas"], meta["loss"] == meta["loss"]) == (3, [0.9, 1], False)
        if world.world_size != 2:
            assert "rng" not in meta
            return None
        rng = np.random.default_rng()
        rng.bit_generator.state = meta["rng"]
        return rng.random()

    run_local(2, save)
    assert run_local(2, load) == [np.random.default_rng(r).random(r + 2)[-1] for r in range(2)]
    run_local(1, load)
    run_local(3, load)


def test_a_tied_name_finds_the_parameter(tmp_path: Path) -> None:
    full = make_full(PARAMS, STATES)

    def save(world: World) -> None:
        registry = Registry(PARAMS, world)
        cr.save(tmp_path, registry, make_shards(full, registry), tied={"lm": "embed.weight"})

    renamed = [ParamSpec("lm", (5, 7), "bfloat16"), *PARAMS[1:]]
    other = {s: {"lm": of["embed.weight"], **of} for s, of in full.items()}
    for of in other.values():
        del of["embed.weight"]
    run_local(2, save)
    run_local(3, lambda world: load_on(world, tmp_path, PARAMS, full))
    run_local(3, lambda world: load_on(world, tmp_path, renamed, other))
    untied = [*PARAMS, renamed[0]]
    with pytest.raises(LayoutError, match=r"'lm' and 'embed.weight' are tied"):
        run_local(1, lambda world: load_on(world, tmp_path, untied, {}))


def test_torch_tensors_and_generators(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    def tensors(registry: Registry, fill: Callable[..., Any]) -> dict[str, Any]:
        shards = {n: fill(p.stop - p.start, dtype=torch.bfloat16) for n, p in registry.items()}
        return {"param": shards, "grad": {n: t.float() for n, t in shards.items()}}

    generator = torch.Generator().manual_seed(3)
    state = base64.b64encode(generator.get_state().numpy()).decode()

    def save(world: World) -> None:
        registry = Registry(PARAMS, world)
        cr.save(tmp_path, registry, tensors(registry, torch.ones), {"torch": state})

    def load(world: World) -> None:
        registry = Registry(PARAMS, world)
        out = tensors(registry, torch.zeros)
        parameters = {n: torch.nn.Parameter(t) for n, t in out["param"].items()}
        out["param"] = {n: p.detach() for n, p in parameters.items()}
        meta = cr.load(tmp_path, registry, out)
        expected = tensors(registry, torch.ones)
        for name in registry:
            assert torch.equal(parameters[name], expected["param"][name])
            assert torch.equal(out["grad"][name], expected["grad"][name])
        other = torch.Generator()
        data = bytearray(base64.b64decode(meta["torch"]))
        other.set_state(torch.frombuffer(data, dtype=torch.uint8))
        assert torch.equal(other.get_state(), generator.get_state())

    run_local(2, save)
    run_local(3, load)


def test_torch_training_goes_on_where_it_was(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from cupynccl_reduce.torch import attach

    def train(world: World, steps: range, *, keep: bool = False) -> Any:
        model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
        generator = torch.Generator().manual_seed(steps.start)  # other values where it resumes
        for p in model.parameters():
            torch.nn.init.normal_(p, generator=generator)
        with attach(model, world) as sharded:
            shards = dict(sharded.named_parameters())
            optimizer = torch.optim.AdamW(shards.values(), lr=0.1)
            states = {"param": {name: p.detach() for name, p in shards.items()}}
            for moment in ("exp_avg", "exp_avg_sq"):
                states[moment] = {name: torch.zeros_like(p) for name, p in states["param"].items()}
            if steps.start:
                meta = cr.load(tmp_path, sharded.registry, states)
                assert meta == {"step": steps.start}
                sharded.gather()
            for name, p in shards.items():
                optimizer.state[p] = {s: of[name] for s, of in states.items() if s != "param"}
                optimizer.state[p]["step"] = torch.tensor(float(steps.start))
            for step in steps:
                batch = torch.full((2, 3), step + 1.0)
                sharded.backward(model(batch).square().sum())
                sharded.step(optimizer)
            if keep:
                cr.save(tmp_path, sharded.registry, states, {"step": steps.stop})
            return [bits(p.detach().numpy()) for p in model.parameters()]

    (straight,) = run_local(1, lambda world: train(world, range(5)))
    # Every rank has the same batch: the mean is exact at powers of two.
    for before, after in ((1, 1), (1, 2), (2, 4), (4, 2), (4, 1)):
        run_local(before, lambda world: train(world, range(2), keep=True))
        for ended in run_local(after, lambda world: train(world, range(2, 5))):
            assert ended == straight


def test_a_save_while_old_arrays_change_hands(tmp_path: Path) -> None:
    """A rank may reuse its arrays as soon as save() returns."""
    full = make_full(PARAMS, STATES)

    def work(world: World) -> None:
        registry = Registry(PARAMS, world)
        shards = make_shards(full, registry)
        cr.save(tmp_path, registry, shards)
        for of in shards.values():
            for array in of.values():
                array.view(np.uint8)[...] = random.randrange(256)
        cr.load(tmp_path, registry, shards)
        check(shards, make_shards(full, registry))

    run_local(4, work)


@pytest.mark.parametrize("call", ["", "cr.run_local(2, work)"])
def test_what_is_imported(run_python: Callable[..., Any], tmp_path: Path, call: str) -> None:
    source = f"""
import sys
import cupynccl_reduce as cr
import cupynccl_reduce.checkpoint
def work(world):
    registry = cr.Registry([cr.ParamSpec("p", (3,), "float32")], world)
    cr.save({str(tmp_path)!r}, registry, {{"s": registry.shards}})
    cr.load({str(tmp_path)!r}, registry, {{"s": registry.shards}})
{call}
print(sorted({{"numpy", "safetensors", "cupy", "mpi4py", "torch"}} & set(sys.modules)))
"""
    done = run_python(source)
    loaded = "['numpy', 'safetensors']" if call else "[]"
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{loaded}\n", "")


def test_without_safetensors_all_ranks_say_what_to_install(run_python: Callable[..., Any]) -> None:
    source = """
import sys
sys.modules["safetensors"] = None
import cupynccl_reduce as cr
def work(world):
    registry = cr.Registry([cr.ParamSpec("p", (3,), "float32")], world)
    try:
        cr.save("nowhere", registry, {"s": registry.shards})
    except cr.LayoutError as error:
        return str(error)
print(*cr.run_local(8, work), sep="\\n")
"""
    done = run_python(source)
    assert done.stdout.count("pip install 'cupynccl_reduce[checkpoint]'") == 8, done
