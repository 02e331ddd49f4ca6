"""save(): the steps of all ranks, in order. No file formats here."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cupynccl_reduce.errors import LayoutError, ReduceError

from .arrays import check_idle, flat_bytes, host_bytes, read_states, settle_streams
from .manifest import MOST_BYTES, Manifest
from .together import do_on_first, do_together

if TYPE_CHECKING:
    from cupynccl_reduce.dlpack import View
    from cupynccl_reduce.membership import World
    from cupynccl_reduce.registry import Registry

__all__ = ["save"]


def save(
    path: str | os.PathLike[str],
    registry: Registry,
    states: Mapping[str, Mapping[str, Any]],
    meta: Mapping[str, Any] | None = None,
    *,
    tied: Mapping[str, str] | None = None,
) -> None:
    """Write this rank's shards into a checkpoint, in place of one that is there.

    Collective, blocks the host until all ranks' files and the manifest are on disk. It waits for
    what is queued on the arrays' streams; call `wait()` first, and save outside of backward. The
    older checkpoint stays whole until the new one is, and is then removed: there is room for two.
    On a GPU, the host holds one copy of this rank's arrays meanwhile. No rank may take longer than
    the others by ten times the `timeout_s` of connect().

    Args:
        path: the checkpoint's folder, on a file system that all ranks share; made if need be.
        registry: says which elements of which parameters this rank has.
        states: state -> name -> shard, such as `{"param": params, "exp_avg": exp_avg}`. A shard is
            any array that DLPack reads, flat and contiguous, of the length of the registry's
            interval, and of one dtype on all ranks. A state may leave parameters out.
        meta: anything else, as JSON: the step, the optimizer's scalars, the state of a random
            generator. May differ between ranks. Tuples come back as lists, keys as strings.
        tied: other names of registered parameters, as `{"head.weight": "embed.weight"}`, under
            which load() finds them too.

    Raises:
        LayoutError: a name, array or meta that cannot be saved. MismatchError: ranks that give
            different states or dtypes, or of which one was refused.
        CheckpointError: a file that could not be written, on all ranks. The older checkpoint is
            whole, or the new one is where only the last sync failed.
    """
    world = registry.world
    check_idle(world, "save()")
    folder = Path(os.path.abspath(path))  # noqa: PTH100  # resolve() differs between machines
    refused: ReduceError | None = None
    try:
        from . import files

        files.check_installed()
        views = read_states(states, registry, "save")
        aliases = _check_tied({} if tied is None else tied, registry)
        meta_text = _encode({} if meta is None else meta)
        dtypes = {state: {n: v.dtype for n, v in of.items()} for state, of in views.items()}
        entries = _entries(folder, aliases, dtypes)
    except ReduceError as error:
        refused, entries = error, []
    world.agree("what to save", entries, refused=refused)
    settle_streams(world, [view for of in views.values() for view in of.values()])

    what = f"save to {folder}"
    token = do_on_first(world, what, lambda: files.make_save(folder).encode()).decode()
    params = {name: place.spec.shape for name, place in registry.items()}
    manifest = Manifest(token, world.world_size, params, aliases, dtypes)

    def write_shards() -> bytes:
        nbytes = files.write_file(folder, manifest, world.rank, _pieces(views, world))
        return f"{nbytes} {meta_text}".encode()

    written = do_together(world, what, write_shards)

    def write_manifest() -> bytes:
        whole = _complete(manifest, written)
        for rank in range(world.world_size):
            files.check_file(folder, whole, rank)
        files.write_manifest(folder, whole)
        return b""

    do_on_first(world, what, write_manifest)
    if world.rank == 0:
        files.sweep(folder, token)


def _entries(
    folder: Path, tied: Mapping[str, str], dtypes: Mapping[str, Mapping[str, str]]
) -> list[str]:
    """Return what must be the same on all ranks."""
    entries = [f"path {str(folder)!r}", f"tied {sorted(tied.items())}"]
    for state, of in sorted(dtypes.items()):
        entries += [f"state {state!r}", *(f"{state!r} of {n!r}: {of[n]}" for n in sorted(of))]
    return entries


def _complete(manifest: Manifest, written: list[bytes]) -> Manifest:
    """Return the manifest with what every rank told of its file: the bytes, and the meta."""
    sizes, metas = zip(*(text.split(b" ", 1) for text in written), strict=True)
    distinct = metas if len(set(metas)) > 1 else metas[:1]
    return replace(
        manifest, file_bytes=tuple(map(int, sizes)), metas=tuple(map(json.loads, distinct))
    )


def _pieces(views: Mapping[str, Mapping[str, View]], world: World) -> dict[str, Any]:
    """Return what this rank's file holds: key -> bytes on the host; empty pieces are left out."""
    return {
        f"{state}/{name}": host_bytes(flat_bytes(view, world), world)
        for state, of in views.items()
        for name, view in of.items()
        if view.shape[0]
    }


def _check_tied(tied: Mapping[str, str], registry: Registry) -> dict[str, str]:
    """Return `tied` as a dict; LayoutError for what are no two names of one parameter."""
    if not isinstance(tied, Mapping):
        msg = f"save: tied must be a mapping, other name -> registered name, not {tied!r:.80}"
        raise LayoutError(msg)
    for other, name in tied.items():
        strings = isinstance(other, str) and isinstance(name, str)
        if not strings or other in registry or name not in registry:
            msg = f"save: tied {other!r}: {name!r} must be another name of a registered parameter"
            raise LayoutError(msg)
    return dict(tied)


def _encode(meta: Mapping[str, Any]) -> str:
    """Return a meta as JSON text; LayoutError names the key that is none."""
    if not isinstance(meta, Mapping):
        msg = f"save: meta must be a mapping, not {meta!r:.80}"
        raise LayoutError(msg)
    for key, value in meta.items():
        try:
            json.dumps({key: value})
        except (TypeError, ValueError, RecursionError) as error:
            msg = (
                f"save: meta[{key!r}] is no JSON ({error}); give numbers, strings, lists and "
                "dicts: .tolist() of an array, base64 of bytes"
            )
            raise LayoutError(msg) from error
    text = json.dumps(dict(meta))
    if len(text) > MOST_BYTES:
        msg = f"save: meta has {len(text):,} bytes, over {MOST_BYTES:,}; arrays belong into states"
        raise LayoutError(msg)
    return text
