"""What a checkpoint's manifest says, as a value and as JSON. No arrays here."""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from cupynccl_reduce.errors import CheckpointError
from cupynccl_reduce.layout import Segment

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "FORMAT",
    "MANIFEST",
    "MOST_BYTES",
    "Manifest",
    "dump",
    "folder_name",
    "parse",
    "read_manifest",
]

MANIFEST = "manifest.json"
FORMAT = "cupynccl_reduce checkpoint, version 1"
MOST_BYTES = 32 << 20  # ranks tell it to each other in one message


@dataclass(frozen=True, slots=True)
class Manifest:
    """One checkpoint: what was saved, by how many ranks, in which files.

    Args:
        token: of this save; the manifest's files have it too, those of any other save another.
        world_size: how many ranks saved.
        params: name -> full shape.
        tied: other names -> the name in `params` of the same parameter.
        states: state -> name -> dtype; a state may leave parameters out.
        file_bytes: the bytes of each rank's file; known when all are written, as metas are.
        metas: what every rank gave as `meta`, in rank order; one alone if all gave the same.
    """

    token: str
    world_size: int
    params: dict[str, tuple[int, ...]]
    tied: dict[str, str]
    states: dict[str, dict[str, str]]
    file_bytes: tuple[int, ...] = ()
    metas: tuple[dict[str, Any], ...] = ()

    def file(self, rank: int) -> str:
        """Return the path of a rank's file, below the checkpoint's folder."""
        name = f"rank-{rank:05d}-of-{self.world_size:05d}.safetensors"
        return f"{folder_name(self.token)}/{name}"

    def identity(self, rank: int) -> dict[str, str]:
        """Return what a rank's file says of itself."""
        return {"token": self.token, "rank": str(rank), "world_size": str(self.world_size)}

    def interval(self, name: str, rank: int) -> tuple[int, int]:
        """Return `(start, stop)` of the flat elements of a parameter in a rank's file."""
        numel = math.prod(self.params[name])
        width = -(-numel // self.world_size)
        return Segment(name, numel, width, 0, width).interval(rank)

    def ranks(self, name: str, start: int, stop: int) -> range:
        """Return the ranks whose files hold elements `[start, stop)`, which are not empty."""
        width = -(-math.prod(self.params[name]) // self.world_size)
        return range(start // width, (stop - 1) // width + 1)

    def pieces(self, rank: int) -> dict[str, tuple[str, int]]:
        """Return what a rank's file holds: key -> dtype and numel; empty pieces are left out."""
        pieces = {}
        for state, dtypes in self.states.items():
            for name, dtype in dtypes.items():
                start, stop = self.interval(name, rank)
                if stop > start:
                    pieces[f"{state}/{name}"] = dtype, stop - start
        return pieces

    def meta(self, rank: int, world_size: int) -> dict[str, Any]:
        """Return the meta for `rank` of a world that loads this; see load()."""
        if len(self.metas) == 1:
            return self.metas[0]
        if world_size == self.world_size:
            return self.metas[rank]
        first, *others = ({k: json.dumps(v) for k, v in meta.items()} for meta in self.metas)
        common = [key for key, text in first.items() if all(m.get(key) == text for m in others)]
        return {key: self.metas[0][key] for key in common}


def folder_name(token: str) -> str:
    """Return the name of the folder that holds the files of one save."""
    return f"save-{token}"


def read_manifest(folder: Path) -> bytes:
    """Return the manifest's text, for `parse`; CheckpointError if it is missing or far too long."""
    path = folder / MANIFEST
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
    except FileNotFoundError as error:
        msg = f"{path} is missing: there is no complete checkpoint"
        raise CheckpointError(msg) from error
    if len(text) > MOST_BYTES:
        msg = f"{path} is no manifest: it has over {MOST_BYTES:,} bytes"
        raise CheckpointError(msg)
    return text


def dump(manifest: Manifest) -> str:
    """Return a manifest as JSON, with a checksum of it; CheckpointError if it is too long."""
    body = {"format": FORMAT, **asdict(manifest)}
    body["crc32"] = _checksum(body)
    lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in body.items())
    text = "{\n" + ",\n".join(lines) + "\n}\n"  # a line for each field
    if len(text) > MOST_BYTES:
        msg = f"a manifest of {len(text):,} bytes is too long ({MOST_BYTES:,}); give a shorter meta"
        raise CheckpointError(msg)
    return text


def parse(text: bytes, what: str) -> Manifest:
    """Return the manifest in `text`; CheckpointError names `what` where it is damaged."""
    try:
        body = json.loads(text)
        if not isinstance(body, dict):
            raise TypeError  # noqa: TRY301  # of the same kind as what json raises
    except (ValueError, TypeError, RecursionError) as error:
        msg = f"{what} is cut off or no manifest: not a JSON object ({error})"
        raise CheckpointError(msg) from error
    if body.get("format") != FORMAT:
        msg = f"{what} is no manifest that can be read here: format {body.get('format')!r:.80}"
        raise CheckpointError(msg)
    if body.pop("crc32", None) != _checksum(body):
        msg = f"{what} is damaged, or was edited: its checksum is another"
        raise CheckpointError(msg)
    del body["format"]
    body["params"] = {name: tuple(shape) for name, shape in body["params"].items()}
    for field in ("file_bytes", "metas"):
        body[field] = tuple(body[field])
    return Manifest(**body)


def _checksum(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
