"""The dtypes that travel, by name. Arithmetic on them lives in the runtimes."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import LayoutError

__all__ = ["DTYPES", "DType", "check_dtype", "default_reduce_dtype", "default_shard_dtype"]


@dataclass(frozen=True, slots=True)
class DType:
    """One dtype: its name, bytes per element, and its (code, bits) in DLPack.

    The DLPack codes are those of the DLPack specification: 0 int, 1 uint, 2 float, 4 bfloat.
    """

    name: str
    itemsize: int
    dlpack_code: int

    @property
    def is_float(self) -> bool:
        """Whether values are floating point; integers are only ever summed."""
        return self.dlpack_code in (2, 4)


DTYPES = {
    dtype.name: dtype
    for dtype in (
        DType("float16", 2, 2),
        DType("bfloat16", 2, 4),
        DType("float32", 4, 2),
        DType("float64", 8, 2),
        DType("int8", 1, 0),
        DType("uint8", 1, 1),
        DType("int32", 4, 0),
        DType("uint32", 4, 1),
        DType("int64", 8, 0),
        DType("uint64", 8, 1),
    )
}
"""Name -> DType; NCCL's list. Anything else is refused by name."""


def check_dtype(name: str, what: str) -> DType:
    """Return the DType called `name`; raise LayoutError, naming `what`, if there is none."""
    dtype = DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        msg = f"{what}: unsupported dtype {name!r}; choose one of {', '.join(DTYPES)}"
        raise LayoutError(msg)
    return dtype


def default_reduce_dtype(dtype: str) -> str:
    """Return the wire dtype for gradients of `dtype`: itself, but float32 for float16.

    A float16 sum over ranks overflows, and dividing first underflows.
    """
    return "float32" if dtype == "float16" else dtype


def default_shard_dtype(dtype: str) -> str:
    """Return the shard dtype for gradients of `dtype`: itself, but float32 for 16-bit floats."""
    return "float32" if dtype in ("float16", "bfloat16") else dtype
