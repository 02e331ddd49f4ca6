"""Segments, matrices, bucket layouts and launches: values that say what lies where."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from cupynccl_reduce.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["BucketLayout", "Launch", "Matrix", "Part", "Segment"]


@dataclass(frozen=True, slots=True)
class Segment:
    """The columns of a matrix that one flat array occupies.

    Row r of them holds elements `[r * width, min((r + 1) * width, numel))`, then zeros up to
    `columns`.
    """

    name: str
    numel: int
    width: int
    column: int
    columns: int

    def interval(self, rank: int) -> tuple[int, int]:
        """Return `(start, stop)` of the flat elements in row `rank`; empty past the end."""
        return min(rank * self.width, self.numel), min((rank + 1) * self.width, self.numel)


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows by columns, and who owns which columns. The geometry that pack and unpack work on.

    `label` names it to people ("bucket 3"); nothing computes with it.
    """

    rows: int
    columns: int
    segments: tuple[Segment, ...]
    label: str = ""

    @classmethod
    def of(
        cls, flats: Iterable[tuple[str, int, int]], rows: int, align: int, label: str = ""
    ) -> Matrix:
        """Lay `(name, numel, width)` side by side, each starting at a multiple of `align`."""
        segments = []
        column = 0
        for name, numel, width in flats:
            columns = -(-width // align) * align
            segments.append(Segment(name, numel, width, column, columns))
            column += columns
        return cls(rows, column, tuple(segments), label)

    @property
    def numel(self) -> int:
        """Elements of the whole matrix, padding included."""
        return self.rows * self.columns

    def row(self, rank: int) -> Matrix:
        """Return the one-row matrix of the shards that row `rank` holds."""
        segments = []
        for segment in self.segments:
            start, stop = segment.interval(rank)
            segments.append(replace(segment, numel=stop - start))
        return Matrix(1, self.columns, tuple(segments), self.label)


@dataclass(frozen=True, slots=True, eq=False)
class BucketLayout:
    """Parameters whose gradients travel in one collective, and where they lie.

    `shard_offset` is the first byte, in the rank's shard arena, of the row it receives.
    The last `direct` segments are large gradients without padding: their columns, by themselves,
    are a matrix that lies as the gradient does, so a collective may send the gradient itself.
    """

    index: int
    dtype: str
    reduce_dtype: str
    shard_dtype: str
    uses: Literal["once", "many"]
    matrix: Matrix
    shard_offset: int
    direct: int = 0
    names: tuple[str, ...] = field(init=False)  # the parameters, in column order

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(s.name for s in self.matrix.segments))

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one gradient of each parameter; what `bucket_bytes` counts."""
        return sum(s.numel for s in self.matrix.segments) * DTYPES[self.dtype].itemsize

    @property
    def send_bytes(self) -> int:
        """Bytes of the matrix on the wire, padding included."""
        return self.matrix.numel * DTYPES[self.reduce_dtype].itemsize

    @property
    def shard_bytes(self) -> int:
        """Bytes of one row in the shard arena."""
        return self.matrix.columns * DTYPES[self.shard_dtype].itemsize

    def split(self) -> tuple[BucketLayout, ...]:
        """Return one layout per parameter, over the same shard memory (policy "arrival")."""
        return self._split(self.matrix.segments)

    def split_direct(self) -> tuple[tuple[BucketLayout, ...], tuple[BucketLayout, ...]]:
        """Return one layout of all packed segments (or none), and one of each direct segment."""
        end = len(self.matrix.segments) - self.direct
        packed, direct = self.matrix.segments[:end], self.matrix.segments[end:]
        columns = sum(segment.columns for segment in packed)
        matrix = replace(self.matrix, columns=columns, segments=packed)
        rest = (replace(self, matrix=matrix, direct=0),) if columns else ()
        return rest, self._split(direct)

    def _split(self, segments: Iterable[Segment]) -> tuple[BucketLayout, ...]:
        itemsize = DTYPES[self.shard_dtype].itemsize
        return tuple(
            replace(
                self,
                matrix=replace(self.matrix, columns=s.columns, segments=(replace(s, column=0),)),
                shard_offset=self.shard_offset + s.column * itemsize,
                direct=0,
            )
            for s in segments
        )


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One matrix of a launch: where it lies in the send buffer and what becomes of its row.

    `straight`: the row is received into the shards themselves. Otherwise it is received in place
    (row `rank` of the matrix), or at byte `row` of the buffer, and unpacked: cast, and added where
    `accumulate`. `direct`: a gradient that lies as the matrix does is sent from there, not packed.
    """

    layout: BucketLayout
    offset: int
    straight: bool
    accumulate: bool
    row: int | None = None
    direct: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """What one launch queues on send buffer `buffer`: packs, a group of reduce-scatters, unpacks.

    Both policies emit these and the pipeline runs them; it never asks which policy made one.
    `calls` has one collective per part and is empty at world_size 1. A launch that is not `last`
    only packs: more of the same buffer follows.
    """

    buffer: int
    pack: tuple[Part, ...]
    calls: tuple[Part, ...]
    unpack: tuple[Part, ...]
    last: bool

    def summary(self) -> dict[str, Any]:
        """Return what its collectives are, as `Flight.launch` notes it."""
        first = self.calls[0].layout
        return {
            "what": "reduce",
            "bucket": first.index,
            "dtype": first.reduce_dtype,
            "nbytes": sum(part.layout.send_bytes for part in self.calls),
            "calls": len(self.calls),
            "names": first.names,
        }
