"""What cannot be saved or loaded: told on all ranks, with names, before any file is touched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoint.states import PARAMS, make_full, make_out, save_on

import cupynccl_reduce as cr
from cupynccl_reduce import (
    LayoutError,
    MismatchError,
    ParamSpec,
    ProtocolError,
    ReduceError,
    Registry,
    World,
    run_local,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

P = (ParamSpec("p", (8,), "float32"), ParamSpec("q", (3,), "float32"))
FULL = make_full(P, {"s": "float32", "t": "bfloat16"})


def errors(work: Callable[[World], Any], world_size: int = 2) -> list[ReduceError]:
    """Return what `work` raises on each rank, after which the world goes on."""

    def run(world: World) -> ReduceError:
        with pytest.raises(ReduceError) as caught:
            work(world)
        world.control.all_gather(b"")
        return caught.value

    return run_local(world_size, run)


def one_rank(errors: list[ReduceError], rank: int, text: str) -> None:
    """Check that `rank` was refused, and that the others were told of it."""
    for at, error in enumerate(errors):
        assert isinstance(error, LayoutError if at == rank else MismatchError)
        assert text in str(error)
        if at != rank:
            assert f"rank {rank}: refused: " in str(error)


def everyone(errors: list[ReduceError], *texts: str) -> None:
    for error in errors:
        assert type(error) is LayoutError
        for text in texts:
            assert text in str(error)


@pytest.mark.parametrize(
    ("states", "text"),
    [
        ([], "give a mapping of states"),
        ({"p": np.ones(4, "f4")}, "state 'p' must be a mapping"),
        ({"a/b": {}}, "without '/', not 'a/b'"),
        ({"": {}}, "not ''"),
        ({3: {}}, "not 3"),
        ({"s": {"r": np.ones(4, "f4")}}, "state 's': no parameter 'r'"),
        ({"s": {"p": np.ones(5, "f4")}}, "'s' of parameter 'p' on rank"),
        ({"s": {"p": np.ones((4, 1), "f4")}}, "has shape (4, 1)"),
        ({"s": {"p": np.array(1, "f4")}}, "has shape ()"),
        ({"s": {"p": 1.5}}, "is not an array"),
        ({"s": {"p": np.ones(8, "f4")[::2]}}, "has shape (4,), not contiguous"),
        ({"s": {"p": np.ones(4, "c8")}}, "unsupported dtype complex64"),
    ],
)
def test_states_that_cannot_be_saved(tmp_path: Path, states: Any, text: str) -> None:
    path = tmp_path / "c"
    everyone(errors(lambda world: cr.save(path, Registry(P, world), states)), text)
    shards = {"s": {"p": np.ones(4, "f4")}}

    def alone(world: World) -> None:
        cr.save(path, Registry(P, world), states if world.rank == 1 else shards)

    one_rank(errors(alone), 1, text)
    assert not path.exists()


@pytest.mark.parametrize(
    ("meta", "text"),
    [
        ({"a": 1, "b": np.float32(1)}, "meta['b'] is no JSON"),
        ({"b": b"x"}, "meta['b'] is no JSON"),
        ({(1, 2): 3}, "meta[(1, 2)] is no JSON"),
        ([1], "meta must be a mapping"),
        ({"b": "x" * (33 << 20)}, "arrays belong into states"),
    ],
)
def test_a_meta_that_cannot_be_saved(tmp_path: Path, meta: Any, text: str) -> None:
    def save(world: World) -> None:
        cr.save(tmp_path / "c", Registry(P, world), {}, meta if world.rank == 0 else {})

    one_rank(errors(save), 0, text)
    assert not (tmp_path / "c").exists()


def test_metas_that_are_too_long_together(tmp_path: Path) -> None:
    def save(world: World) -> None:
        cr.save(tmp_path, Registry(P, world), {}, {"x": "x" * (20 << 20), "rank": world.rank})

    for error in errors(save):
        assert isinstance(error, cr.CheckpointError)
        assert "give a shorter meta" in str(error)


@pytest.mark.parametrize("tied", [{"p": "q"}, {"r": "none"}, {3: "p"}, {"r": ["p"]}, [("r", "p")]])
def test_tied_names_that_are_none(tmp_path: Path, tied: Any) -> None:
    everyone(errors(lambda w: cr.save(tmp_path, Registry(P, w), {}, tied=tied)), "save: tied ")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (lambda rank: {"s": {"p": np.ones(4, f"f{4 * (rank + 1)}")}}, "float64"),
        (lambda rank: {"s": {"pq"[rank]: np.ones((4, 2 - rank)[rank], "f4")}}, "'s' of 'q'"),
        (lambda rank: {"st"[rank]: {}}, "state 't'"),
    ],
)
def test_ranks_that_save_different_states(
    tmp_path: Path, given: Callable[[int], Any], text: str
) -> None:
    for error in errors(lambda w: cr.save(tmp_path / "c", Registry(P, w), given(w.rank))):
        assert isinstance(error, MismatchError)
        assert "ranks disagree on what to save" in str(error)
        assert text in str(error)
    for error in errors(lambda w: cr.save(tmp_path / str(w.rank), Registry(P, w), {})):
        assert "path" in str(error)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    run_local(2, lambda world: save_on(world, tmp_path, P, FULL))
    return tmp_path


def load(path: Path, params: Any, change: Callable[[Any, int], Any]) -> list[ReduceError]:
    """Load with an `out` that was changed."""

    def work(world: World) -> None:
        registry = Registry(params, world)
        full = make_full(params, {"s": "float32", "t": "bfloat16"})
        out = make_out(full, registry)
        cr.load(path, registry, change(out, world.rank) or out)

    return errors(work)


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (P[:1], "its parameters also have 'q'"),
        ((*P, ParamSpec("r", (2,), "int8")), "its parameters lack 'r'"),
        ((P[0], ParamSpec("k", (3,), "int8")), "lack 'k' and also have 'q'"),
        ((P[0], ParamSpec("q", (3, 1), "float32")), "parameter 'q' is (3,) there, (3, 1) here"),
    ],
)
def test_other_parameters(path: Path, params: Any, text: str) -> None:
    told = load(path, params, lambda *_: None)
    everyone(told, text, str(path / "manifest.json"))


def test_many_missing_parameters_are_told_shortly(path: Path) -> None:
    params = [ParamSpec(f"n{i}", (1,), "float32") for i in range(1000)]
    told = load(path, params, lambda *_: None)
    everyone(told, "lack 'n0', 'n1', 'n10', 'n100', ")
    assert len(str(told[0])) < 1000


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda out, _: out["s"].pop("q"), "state 's''s parameters also have 'q'"),
        (lambda out, _: out["t"].update(p=out["s"]["p"]), "give a contiguous, writable bfloat16"),
        (lambda out, _: out.update(u={}), "no state 'u'; it has 's', 't'"),
        (lambda out, _: out["s"]["p"].setflags(write=False), "'s' of 'p': out is float32 (4,) and"),
    ],
)
def test_an_out_that_does_not_fit(path: Path, change: Callable[..., Any], text: str) -> None:
    def changed(out: Any, rank: int, only: int | None) -> None:
        if only in (None, rank):
            change(out, rank)

    everyone(load(path, P, lambda out, rank: changed(out, rank, None)), text)
    one_rank(load(path, P, lambda out, rank: changed(out, rank, 1)), 1, text)


def test_arrays_of_out_that_share_memory(path: Path) -> None:
    def share(out: Any, _: int) -> None:
        memory = np.zeros(4, "f4")
        out["s"].update(p=memory, q=memory[1:][: len(out["s"]["q"])])

    everyone(load(path, P, share), "'s/p' and 's/q' share memory")


def test_ranks_that_load_different_states(path: Path) -> None:
    told = load(path, P, lambda out, rank: {"s": out["s"]} if rank else None)
    for error in told:
        assert isinstance(error, MismatchError)
        assert "ranks disagree on what to load" in str(error)


def test_inside_backward_and_after_the_world(path: Path) -> None:
    def work(world: World) -> Registry:
        registry = Registry(PARAMS, world)
        with cr.Reducer(registry, op="sum") as reducer, reducer.backward():
            for call in (cr.save, cr.load):
                with pytest.raises(ProtocolError, match=f"{call.__name__}.. inside backward"):
                    call(path, registry, {})
        return registry

    registry, _ = run_local(2, work)
    for call in (cr.save, cr.load):
        with pytest.raises(ProtocolError, match="closed"):
            call(path, registry, {})
