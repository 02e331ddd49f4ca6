"""Memory for full parameters: the caller's, or the runtime's, which is used again. No streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cupynccl_reduce.dtypes import DTYPES
from cupynccl_reduce.errors import LayoutError, ReduceError
from cupynccl_reduce.gather import check_apart, check_mapping, check_writable
from cupynccl_reduce.layout import ALIGN_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from cupynccl_reduce.dlpack import View
    from cupynccl_reduce.protocols import Array
    from cupynccl_reduce.registry import Registry

    from .units import Unit

__all__ = ["FullMemory", "full_dtypes"]


class FullMemory:
    """Allocates arrays for units. Which stream may use them when is the gatherer's."""

    def __init__(
        self,
        registry: Registry,
        dtypes: Mapping[str, str],
        allocate: Callable[[str], Any] | None,
        free: Callable[[str], None] | None,
    ) -> None:
        self._registry, self._world = registry, registry.world
        self._runtime = registry.world.runtime
        self._dtypes = dtypes
        self._allocate, self._free = allocate, free
        self._blocks: dict[Unit, Array] = {}  # the runtime's memory that units have
        self._spare: dict[int, list[Array]] = {}  # and that they had, by size

    def make(self, unit: Unit) -> dict[str, Any]:
        """Return memory for a unit's parameters."""
        if self._allocate is not None:
            return {name: self._allocate(name) for name in unit.names}
        sizes = [-(-self.nbytes(n) // ALIGN_BYTES) * ALIGN_BYTES for n in unit.names]
        spare = self._spare.setdefault(sum(sizes), [])
        block = spare.pop() if spare else self._runtime.allocate(sum(sizes))
        arrays, offset = {}, 0
        for name, size in zip(unit.names, sizes, strict=True):
            spec = self._registry[name].spec
            flat = self._runtime.view(block, offset, spec.numel, self._dtypes[name])
            arrays[name] = flat.reshape(spec.shape)
            offset += size
        self._blocks[unit] = block
        return arrays

    def give_back(self, unit: Unit, arrays: Mapping[str, Any]) -> None:
        """Free a unit's arrays."""
        if self._allocate is None:
            block = self._blocks.pop(unit)
            self._spare[block.size].append(block)
        elif self._free is not None:
            for name in arrays:
                self._free(name)

    def read(self, made: Iterable[Mapping[str, Any]]) -> dict[str, View]:
        """Return arrays as views to write to; LayoutError names one that does not fit."""
        targets: dict[str, View] = {}
        for name, array in (pair for arrays in made for pair in arrays.items()):
            what = f"allocate({name!r})"
            try:
                view = self._runtime.read(array, self._world.stream)
            except ReduceError as error:
                msg = f"{what}: {error}"
                raise LayoutError(msg) from error
            check_writable(what, view, self._registry[name].spec.shape, self._dtypes[name])
            targets[name] = view
        check_apart("allocate", targets)
        return targets

    def nbytes(self, name: str) -> int:
        """Return the bytes of a full parameter."""
        return self._registry[name].spec.numel * DTYPES[self._dtypes[name]].itemsize

    def clear(self) -> None:
        """Drop what is spare."""
        self._spare.clear()


def full_dtypes(
    registry: Registry, sources: Mapping[str, View], given: Mapping[str, str] | None
) -> dict[str, str]:
    """Return the dtype of every full parameter; LayoutError says which cannot be."""
    given = {} if given is None else given
    check_mapping("Gatherer: dtypes", given, "dtypes")
    for name in given:
        if name not in sources:
            msg = f"Gatherer: dtypes: no shard {name!r} was given"
            raise LayoutError(msg)
    dtypes = {name: given.get(name, registry[name].spec.dtype) for name in sources}
    for name, dtype in dtypes.items():
        if (
            not isinstance(dtype, str)
            or dtype not in DTYPES
            or (
                dtype != sources[name].dtype
                and not (DTYPES[dtype].is_float and DTYPES[sources[name].dtype].is_float)
            )
        ):
            msg = f"{name!r}: a shard of {sources[name].dtype} cannot become {dtype!r}"
            raise LayoutError(msg)
    return dtypes
