"""Cut parameters into buckets: pure functions of the parameter list."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cupynccl_reduce.dtypes import DTYPES
from cupynccl_reduce.errors import LayoutError, check_integer

from .bucket import BucketLayout, Matrix
from .spec import ParamSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ALIGN_BYTES", "plan_buckets", "send_bound"]

ALIGN_BYTES = 16  # the widest vector copy of a GPU thread
REPEATS = 64  # arrivals of a parameter used many times that one bucket has room for
ARENA_ALIGN_BYTES = 256  # what CUDA allocations are aligned to


def plan_buckets(
    params: Sequence[ParamSpec], *, world_size: int, bucket_bytes: int, direct_bytes: int = 0
) -> tuple[BucketLayout, ...]:
    """Cut parameters into buckets: the same cut on every rank, and for every arrival order.

    Parameters are taken in reverse (the order in which backward tends to produce gradients). A
    bucket holds one combination of dtypes and closes when the next parameter would take it over
    `bucket_bytes` of gradients, so a larger parameter has a bucket of its own. Buckets are indexed
    in the order in which their last gradient is expected; those with `uses="many"` come last.

    With `direct_bytes` (0 is never), gradients of at least so many bytes that need no padding, no
    cast and no sum lie at a bucket's end: they may be sent from where they are.

    Raises:
        LayoutError: no parameters, a repeated name, world_size < 1, bucket_bytes < 1 or
            direct_bytes < 0.
    """
    _check_plan(params, world_size, bucket_bytes, direct_bytes)
    filling: dict[tuple[str, ...], list[int]] = {}
    filled: dict[tuple[str, ...], int] = {}
    cut: list[list[int]] = []
    for index in reversed(range(len(params))):
        spec = params[index]
        nbytes = spec.nbytes
        key = (spec.dtype, spec.reduce_dtype, spec.shard_dtype, spec.uses)
        if key not in filling or filled[key] + nbytes > bucket_bytes:
            filling[key] = []
            filled[key] = 0
            cut.append(filling[key])
        filling[key].append(index)
        filled[key] += nbytes
    cut.sort(key=lambda members: (params[members[0]].uses == "many", -members[-1]))
    buckets = []
    shard_offset = 0
    for index, members in enumerate(cut):
        specs = [params[m] for m in members]
        bucket = _lay_out(index, specs, world_size, shard_offset, direct_bytes)
        buckets.append(bucket)
        shard_offset += -(-bucket.shard_bytes // ARENA_ALIGN_BYTES) * ARENA_ALIGN_BYTES
    return tuple(buckets)


def send_bound(layouts: Sequence[BucketLayout], bucket_bytes: int) -> int:
    """Return bytes for the send buffer of a bucket that fills in arrival order, padding included.

    Each layout holds one parameter; one over `bucket_bytes` travels alone. Where each comes once,
    this holds any arrivals of at most `bucket_bytes` of gradients: it is the fractional knapsack,
    filled with the parameters that padding makes longest, the last one whole. For those that
    repeat (`uses="many"`) there is room for some more arrivals, up to `bucket_bytes`; a bucket
    that they fill before is launched early.
    """
    total = sum(layout.send_bytes for layout in layouts)
    limit = max([bucket_bytes, *(layout.gradient_bytes for layout in layouts)])
    dearest = sorted(
        (layout for layout in layouts if layout.gradient_bytes),
        key=lambda layout: layout.send_bytes / layout.gradient_bytes,
        reverse=True,
    )
    bound = filled = 0
    for layout in dearest:
        bound += layout.send_bytes
        filled += layout.gradient_bytes
        if filled >= limit:
            break
    alone = max((layout.send_bytes for layout in layouts), default=0)
    once = max(alone, min(bound, total))
    again = sum(layout.send_bytes for layout in layouts if layout.uses == "many")
    return once + min(REPEATS * again, bucket_bytes)


def _lay_out(
    index: int,
    specs: Sequence[ParamSpec],
    world_size: int,
    shard_offset: int,
    direct_bytes: int,
) -> BucketLayout:
    first = specs[0]
    itemsize = min(DTYPES[first.reduce_dtype].itemsize, DTYPES[first.shard_dtype].itemsize)
    align = ALIGN_BYTES // itemsize
    direct = 0
    uncast = first.dtype == first.reduce_dtype
    if direct_bytes and world_size > 1 and uncast and first.uses == "once":

        def unpadded(spec: ParamSpec) -> bool:
            return spec.nbytes >= direct_bytes and spec.numel % (world_size * align) == 0

        specs = sorted(specs, key=unpadded)  # those in the end
        direct = sum(map(unpadded, specs))
    flats = ((s.name, numel := s.numel, -(-numel // world_size)) for s in specs)
    return BucketLayout(
        index=index,
        dtype=first.dtype,
        reduce_dtype=first.reduce_dtype,
        shard_dtype=first.shard_dtype,
        uses=first.uses,
        matrix=Matrix.of(flats, world_size, align, f"bucket {index}"),
        shard_offset=shard_offset,
        direct=direct,
    )


def _check_plan(
    params: Sequence[ParamSpec], world_size: int, bucket_bytes: int, direct_bytes: int
) -> None:
    check_integer("world_size", world_size, 1)
    check_integer("bucket_bytes", bucket_bytes, 1)
    check_integer("direct_bytes", direct_bytes, 0)
    if not params:
        msg = "no parameters: give at least one ParamSpec"
        raise LayoutError(msg)
    seen = set()
    for spec in params:
        if not isinstance(spec, ParamSpec):
            msg = f"parameters must be ParamSpec values, not {spec!r}"
            raise LayoutError(msg)
        if spec.name in seen:
            msg = f"parameter {spec.name!r} is given twice; tied parameters are registered once"
            raise LayoutError(msg)
        seen.add(spec.name)
