"""Where every gradient and shard lies: integers only, no arrays and no devices.

A bucket is a matrix with one row per rank; row r is what rank r receives. Each parameter owns some
columns (its segment). Two parameters, numel 7 (a) and 4 (b), world_size 2, 4-byte elements::

    column     0  1  2  3  4  5  6  7
    row 0     a0 a1 a2 a3|b0 b1  .  .      . is padding, always zero when sent
    row 1     a4 a5 a6  .|b2 b3  .  .
              `--- a ---'`--- b ---'       segments start on 16-byte columns

    width(a) = ceil(7 / 2) = 4             rank 0 keeps a[0:4], rank 1 keeps a[4:7]
    width(b) = ceil(4 / 2) = 2             rank 0 keeps b[0:2], rank 1 keeps b[2:4]

The shard arena of a rank repeats the columns of its row, so a received row *is* the shards' memory.
"""

from .bucket import BucketLayout, Launch, Matrix, Part, Segment
from .plan import ALIGN_BYTES, plan_buckets, send_bound
from .spec import ParamSpec

__all__ = [
    "ALIGN_BYTES",
    "BucketLayout",
    "Launch",
    "Matrix",
    "ParamSpec",
    "Part",
    "Segment",
    "plan_buckets",
    "send_bound",
]
