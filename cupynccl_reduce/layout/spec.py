"""What a parameter is: name, shape and dtypes. No storage."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from typing import Literal

from cupynccl_reduce.dtypes import DTYPES, check_dtype, default_reduce_dtype, default_shard_dtype
from cupynccl_reduce.errors import LayoutError

__all__ = ["ParamSpec"]


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter: name, shape and dtypes; no storage.

    Args:
        name: unique among the parameters of a registry.
        shape: any number of dimensions, zeros allowed; `()` is a 0-dim parameter.
        dtype: of the gradients, by name ("bfloat16").
        reduce_dtype: on the wire; "default" is `dtype`, but float32 for float16.
        shard_dtype: of the reduced shard; "default" is float32 for 16-bit floats, else `dtype`.
        uses: "once" (one gradient in each backward) or "many" (summed in fp32 before the division).

    Raises:
        LayoutError: a field that cannot work; integers cannot change dtype on the way.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    reduce_dtype: str = field(default="default", kw_only=True)
    shard_dtype: str = field(default="default", kw_only=True)
    uses: Literal["once", "many"] = field(default="once", kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            msg = f"a parameter's name must be a non-empty string, not {self.name!r}"
            raise LayoutError(msg)
        what = f"parameter {self.name!r}"
        try:
            shape = tuple(operator.index(extent) for extent in self.shape)
        except TypeError:
            shape = (-1,)
        if min(shape, default=0) < 0:
            msg = f"{what}: shape must be a tuple of integers >= 0, not {self.shape!r}"
            raise LayoutError(msg)
        object.__setattr__(self, "shape", shape)
        dtype = check_dtype(self.dtype, what)
        for wire, default in (
            ("reduce_dtype", default_reduce_dtype(self.dtype)),
            ("shard_dtype", default_shard_dtype(self.dtype)),
        ):
            if getattr(self, wire) == "default":
                object.__setattr__(self, wire, default)
            other = check_dtype(getattr(self, wire), f"{what}: {wire}")
            if other.is_float != dtype.is_float or not (dtype.is_float or other == dtype):
                msg = (
                    f"{what}: {wire} {other.name!r} cannot hold {dtype.name!r} gradients; "
                    "integers keep one dtype throughout"
                )
                raise LayoutError(msg)
        if self.uses not in ("once", "many"):
            msg = f"{what}: uses must be 'once' or 'many', not {self.uses!r}"
            raise LayoutError(msg)

    def __repr__(self) -> str:
        # Ranks compare it for every parameter; a dataclass's own takes three times as long.
        wire, shard = f"reduce_dtype={self.reduce_dtype!r}", f"shard_dtype={self.shard_dtype!r}"
        given = f"{self.name!r}, {self.shape}, {self.dtype!r}"
        return f"ParamSpec({given}, {wire}, {shard}, uses={self.uses!r})"

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)

    @property
    def is_float(self) -> bool:
        """Whether gradients are floating point; integers are only ever summed."""
        return DTYPES[self.dtype].is_float

    @property
    def nbytes(self) -> int:
        """Bytes of one gradient."""
        return self.numel * DTYPES[self.dtype].itemsize
