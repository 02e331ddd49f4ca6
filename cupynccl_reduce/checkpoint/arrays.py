"""The arrays that a checkpoint reads and fills: described, checked, and as bytes. No files here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cupynccl_reduce.dtypes import DTYPES
from cupynccl_reduce.errors import LayoutError, ProtocolError, ReduceError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cupynccl_reduce.dlpack import View
    from cupynccl_reduce.membership import World
    from cupynccl_reduce.registry import Registry

__all__ = [
    "Wanted",
    "check_idle",
    "fill",
    "flat_bytes",
    "host_bytes",
    "read_states",
    "settle_streams",
]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Elements `[first, last)` of a piece, for the array `target`, from its element `offset` on."""

    key: str
    dtype: str
    first: int
    last: int
    target: Any
    offset: int


def check_idle(world: World, what: str) -> None:
    """Raise unless `world` is whole and outside of backward."""
    world.check()
    if world.status.open_backward is not None:
        msg = f"{what} inside backward(), whose gradients are under way: leave it first"
        raise ProtocolError(msg)


def read_states(
    states: Mapping[str, Mapping[str, Any]], registry: Registry, what: str
) -> dict[str, dict[str, View]]:
    """Describe state -> name -> shard, without copying.

    Raises:
        LayoutError: names that are not there, or arrays that are no contiguous flat shards.
    """
    if not isinstance(states, Mapping):
        msg = f"{what}: give a mapping of states, such as {{'param': shards}}, not {states!r:.80}"
        raise LayoutError(msg)
    views: dict[str, dict[str, View]] = {}
    for state, shards in states.items():
        if not isinstance(state, str) or not state or "/" in state:
            msg = f"{what}: a state's name must be a non-empty string without '/', not {state!r}"
            raise LayoutError(msg)
        if not isinstance(shards, Mapping):
            msg = f"{what}: state {state!r} must be a mapping, parameter -> shard"
            raise LayoutError(msg)
        views[state] = {name: _read(registry, state, name, shards[name], what) for name in shards}
    return views


def _read(registry: Registry, state: str, name: str, array: Any, what: str) -> View:
    if name not in registry:
        msg = f"{what}: state {state!r}: no parameter {name!r} in this registry"
        raise LayoutError(msg)
    world, place = registry.world, registry[name]
    label = f"{what}: {state!r} of parameter {name!r} on rank {world.rank}"
    try:
        view = world.runtime.read(array, world.stream)
    except ReduceError as error:
        msg = f"{label}: {error}"
        raise LayoutError(msg) from error
    if view.shape != (place.stop - place.start,) or view.strides is not None:
        flaw = "" if view.strides is None else ", not contiguous"
        msg = (
            f"{label} has shape {view.shape}{flaw}; give a contiguous flat array of elements "
            f"{place.start} to {place.stop}. One value for a whole parameter goes into meta"
        )
        raise LayoutError(msg)
    return view


def settle_streams(world: World, views: Iterable[View]) -> None:
    """Block the host until all work queued so far on these arrays is done."""
    streams = {view.stream: None for view in views if view.stream is not None}
    # What this library has queued, and what the caller has, may be on other streams.
    for stream in (world.copy_stream, world.stream, world.runtime.adopt(None), *streams):
        world.guard(stream.synchronize)


def flat_bytes(view: View, world: World) -> Any:
    """Return the memory of a contiguous view as bytes, in an array of the world's runtime."""
    nbytes = view.shape[0] * DTYPES[view.dtype].itemsize
    return world.runtime.array(replace(view, dtype="uint8", shape=(nbytes,)))


def host_bytes(array: Any, world: World) -> Any:
    """Return such bytes as a NumPy array: themselves, or a copy where they lie on a GPU."""
    return array if world.runtime.kind == "host" else array.get()


def fill(array: Any, first: int, data: Any, world: World) -> None:
    """Copy `data` (NumPy) into such bytes from byte `first` on; a GPU may lag behind the host."""
    part = array[first : first + len(data)]
    if world.runtime.kind == "host":
        part[...] = data
    else:
        part.set(data)
