"""Bytes of arrays, and a check that those which operations do not declare do not matter."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynccl_reduce.errors import LayoutError

from .findings import DeclarationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cupynccl_reduce.detector import Operation
    from cupynccl_reduce.protocols import Array

    from .device import Range

__all__ = ["MemoryCheck", "range_of", "still"]


class MemoryCheck:
    """Runs every operation twice, the second time with all undeclared bytes scrambled.

    A byte that changes without a declared write, and a result that depends on a byte without a
    declared read, are each a DeclarationError. A collective is one operation of all ranks.
    """

    def __init__(self) -> None:
        self._stores: list[Any] = []
        self._random = np.random.default_rng(0)

    def watch(self, store: Any) -> None:
        """Look after one more allocation."""
        if store.size:
            self._stores.append(store)

    def wrap(
        self,
        what: Operation,
        run: Callable[[], Any],
        reads: Sequence[Range],
        writes: Sequence[Range],
    ) -> Callable[[], None]:
        """Return `run`, checked; what it returns is part of its result."""

        def run_checked() -> None:
            before = [store.copy() for store in self._stores]
            result = run()
            after = [store.copy() for store in self._stores]
            for store, old, new in zip(self._stores, before, after, strict=True):
                if bool((~_mask(store, writes) & (old != new)).any()):
                    _refuse(what, "writes")
            for store, old in zip(self._stores, before, strict=True):
                noise = self._random.integers(0, 256, store.size, np.uint8)
                store[...] = np.where(_mask(store, reads), old, noise)
            same = _same(result, run())
            for store, new in zip(self._stores, after, strict=True):
                same = same and not bool((_mask(store, writes) & (store != new)).any())
                store[...] = new
            if not same:
                _refuse(what, "reads")

        return run_checked


def _refuse(what: Operation, verb: str) -> None:
    msg = f"{what.kind} {what.label}, at {what.site}, {verb} bytes that it does not declare"
    raise DeclarationError(msg)


def _same(one: Any, other: Any) -> bool:
    """Return whether two results are equal, bit for bit; what is no array of numbers counts so."""
    one, other = np.asarray(one), np.asarray(other)
    return bool(one.dtype == object) or (one.shape, one.tobytes()) == (other.shape, other.tobytes())


def _mask(store: Any, ranges: Sequence[Range]) -> Any:
    """Return which bytes of `store` lie in one of the ranges."""
    mask = np.zeros(store.size, bool)
    base = store.ctypes.data
    for address, nbytes in ranges:
        start, stop = max(address - base, 0), min(address + nbytes - base, store.size)
        if start < stop:
            mask[start:stop] = True
    return mask


def range_of(array: Array) -> Range:
    """Return the bytes of a contiguous array; raise LayoutError for another."""
    if not array.flags.c_contiguous:
        msg = f"an array of shape {array.shape} and strides {array.strides} is not contiguous"
        raise LayoutError(msg)
    return array.ctypes.data, array.nbytes


def still(array: Array) -> Array:
    """Return the same memory, keeping nothing alive."""
    memory = (ctypes.c_char * array.nbytes).from_address(array.ctypes.data)
    return np.frombuffer(memory, np.uint8).view(array.dtype).reshape(array.shape)
