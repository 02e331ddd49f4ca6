"""load(): the steps of all ranks, in order. No file formats here."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cupynccl_reduce.errors import LayoutError, ReduceError
from cupynccl_reduce.gather import check_apart, check_writable

from .arrays import Wanted, check_idle, fill, flat_bytes, read_states, settle_streams
from .manifest import MANIFEST, parse, read_manifest
from .together import do_on_first, do_together

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from cupynccl_reduce.dlpack import View
    from cupynccl_reduce.registry import Registry

    from .manifest import Manifest

__all__ = ["load"]

NAMED = 8  # an error about thousands of parameters must still be readable


def load(
    path: str | os.PathLike[str], registry: Registry, out: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Fill `out` with this rank's shards from a checkpoint, and return the meta saved with it.

    Collective, blocks the host until `out` is filled. The checkpoint may come from any number of
    ranks, any `bucket_bytes` and any order of parameters: shards are found by name. Each rank reads
    the elements that it keeps, and checks them.

    The meta is what this rank gave to save(). Where the number of ranks is another, it has only
    what all ranks gave alike: the state of each rank's random generator is then missing, so that
    no two ranks draw the same numbers. (One rank alone is alike: seed again after 1 rank.)

    Args:
        path: the folder that save() was given.
        registry: of the same parameters, with the same names (or tied ones) and shapes.
        out: state -> name -> shard to fill: contiguous, writable, flat, of the length of the
            registry's interval, and of the saved dtype. `registry.shards` will do, and so will a
            torch parameter's `.detach()`. States that it leaves out are not read, but of each state
            it has all parameters that were saved.

    Raises:
        LayoutError: other names, shapes or dtypes than the checkpoint's. MismatchError: ranks that
            ask for different states, or of which one was refused.
        CheckpointError: a file that is missing, cut off, damaged or of another save, on all ranks.
            `out` is untouched unless only reading the elements found it.
    """
    world = registry.world
    check_idle(world, "load()")
    folder = Path(os.path.abspath(path))  # noqa: PTH100  # resolve() differs between machines
    what, where = f"load from {folder}", str(folder / MANIFEST)
    text = do_on_first(world, what, partial(read_manifest, folder))
    manifest = parse(text, f"{what}: {where}")
    refused: ReduceError | None = None
    try:
        from . import files

        files.check_installed()
        views = read_states(out, registry, "load")
        saved_names = _match(manifest, registry, where)
        for state, of in views.items():
            _check_state(manifest, state, of, saved_names, where)
        named = {f"{state}/{n}": view for state, of in views.items() for n, view in of.items()}
        check_apart("load", named)
        entries = [f"path {str(folder)!r}", *(f"state {state!r}" for state in sorted(views))]
    except ReduceError as error:
        refused, entries = error, []
    world.agree("what to load", entries, refused=refused)
    settle_streams(world, named.values())

    wanted = _plan(manifest, registry, views, saved_names)

    def check_files() -> bytes:
        # Each file is checked by somebody, also one that holds nothing.
        for rank in range(manifest.world_size):
            if rank in wanted or rank % world.world_size == world.rank:
                files.check_file(folder, manifest, rank)
        return b""

    do_together(world, what, check_files)

    def read_shards() -> bytes:
        for rank, ranges in wanted.items():
            files.read_file(folder, manifest, rank, ranges, partial(fill, world=world))
        settle_streams(world, ())  # copies to a GPU are queued on the caller's stream
        return b""

    do_together(world, what, read_shards)
    return manifest.meta(world.rank, world.world_size)


def _match(manifest: Manifest, registry: Registry, where: str) -> dict[str, str]:
    """Return the registry's names -> the checkpoint's; LayoutError unless they are the same."""
    saved_names = {name: manifest.tied.get(name, name) for name in registry}
    _check_names(where, "parameters", manifest.params, saved_names)
    for name, saved in saved_names.items():
        shape = registry[name].spec.shape
        if shape != manifest.params[saved]:
            msg = f"{where}: parameter {name!r} is {manifest.params[saved]} there, {shape} here"
            raise LayoutError(msg)
    return saved_names


def _check_names(
    where: str, what: str, saved: Iterable[str], saved_names: Mapping[str, str]
) -> None:
    here: dict[str, str] = {}
    for name, other in saved_names.items():
        if other in here:
            msg = f"{where}: {name!r} and {here[other]!r} are tied there: one parameter"
            raise LayoutError(msg)
        here[other] = name
    missing = [here[name] for name in here.keys() - set(saved)]
    extra = set(saved) - here.keys()
    told = [
        f"{label} {', '.join(map(repr, sorted(names)[:NAMED]))}" + ", ..." * (len(names) > NAMED)
        for label, names in (("lack", missing), ("also have", extra))
        if names
    ]
    if told:
        msg = f"{where}: its {what} {' and '.join(told)}"
        raise LayoutError(msg)


def _check_state(
    manifest: Manifest,
    state: str,
    views: Mapping[str, View],
    saved_names: Mapping[str, str],
    where: str,
) -> None:
    if state not in manifest.states:
        msg = f"{where}: no state {state!r}; it has {', '.join(map(repr, manifest.states))}"
        raise LayoutError(msg)
    saved = manifest.states[state]
    mine = {name: saved_names[name] for name in views}
    _check_names(where, f"state {state!r}'s parameters", saved, mine)
    for name, view in views.items():
        label = f"{where}: {state!r} of {name!r}: out"
        check_writable(label, view, view.shape, saved[mine[name]])


def _plan(
    manifest: Manifest,
    registry: Registry,
    views: Mapping[str, Mapping[str, View]],
    saved_names: Mapping[str, str],
) -> dict[int, list[Wanted]]:
    """Return what this rank reads of which rank's file: integers, and the arrays as bytes."""
    wanted: dict[int, list[Wanted]] = {}
    for state, of in views.items():
        for name, view in of.items():
            saved, place = saved_names[name], registry[name]
            if place.start == place.stop:
                continue
            target = flat_bytes(view, registry.world)
            for rank in manifest.ranks(saved, place.start, place.stop):
                start, stop = manifest.interval(saved, rank)
                begin, end = max(start, place.start), min(stop, place.stop)
                want = Wanted(
                    key=f"{state}/{saved}",
                    dtype=view.dtype,
                    first=begin - start,
                    last=end - start,
                    target=target,
                    offset=begin - place.start,
                )
                wanted.setdefault(rank, []).append(want)
    return wanted
