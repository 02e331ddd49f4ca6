"""All that touches the disk: the manifest, and one rank's safetensors file. No world, no GPU.

Every piece is a flat array, called "state/parameter"; bfloat16 travels as uint16, of the same bits.
A file's metadata have the save's token, and for every MiB of every piece its CRC-32.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynccl_reduce.dtypes import DTYPES
from cupynccl_reduce.errors import CheckpointError, LayoutError

from .manifest import MANIFEST, dump, folder_name, parse, read_manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from .arrays import Wanted
    from .manifest import Manifest

__all__ = [
    "check_file",
    "check_installed",
    "make_save",
    "read_file",
    "sweep",
    "write_file",
    "write_manifest",
]

BLOCK_BYTES = 1 << 20  # what one checksum covers, and what is read at a time
STORED = {name: np.dtype("uint16" if name == "bfloat16" else name) for name in DTYPES}
OURS = re.compile(r"(save-|manifest\.json\.)[0-9a-f]{16}", re.ASCII)  # with a save's token


def check_installed() -> None:
    """Raise LayoutError if safetensors does not load."""
    try:
        import safetensors.numpy  # noqa: F401  # only whether it loads
    except ImportError as error:
        msg = (
            f"checkpoints need safetensors, which does not load ({error}); "
            "pip install 'cupynccl_reduce[checkpoint]'"
        )
        raise LayoutError(msg) from error


def make_save(folder: Path) -> str:
    """Make the folder of a new save, on disk, and return its token; remove what crashes left."""
    _make_folder(folder)
    with suppress(CheckpointError):  # where the manifest cannot be read, nothing is a stray
        known = (folder / MANIFEST).exists()
        sweep(folder, parse(read_manifest(folder), MANIFEST).token if known else "")
    token = os.urandom(8).hex()
    (folder / folder_name(token)).mkdir()
    _sync(folder)
    return token


def sweep(folder: Path, keep: str) -> None:
    """Remove the files of all saves but that of token `keep`; what cannot be removed stays."""
    with suppress(OSError):
        for entry in list(folder.iterdir()):
            if OURS.fullmatch(entry.name) and entry.name != folder_name(keep):
                if entry.is_dir():
                    shutil.rmtree(entry, ignore_errors=True)
                else:
                    entry.unlink()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace the manifest in one step: a crash leaves the older or the newer one, never a half."""
    draft = folder / f"{MANIFEST}.{manifest.token}"
    with draft.open("w", encoding="utf-8") as file:
        file.write(dump(manifest))
        file.flush()
        os.fsync(file.fileno())
    draft.replace(folder / MANIFEST)
    _sync(folder)


def write_file(folder: Path, manifest: Manifest, rank: int, pieces: Mapping[str, Any]) -> int:
    """Write a rank's file and have it on disk; return its bytes. Blocks the host.

    `pieces` has for each key of `manifest.pieces(rank)` the elements' bytes (NumPy uint8).

    Raises:
        CheckpointError: safetensors could not write. OSError: the file system could not.
    """
    path = folder / manifest.file(rank)
    if not path.parent.is_dir():
        msg = f"{path.parent}, which rank 0 has made, is not seen here; all ranks must share it"
        raise CheckpointError(msg)
    sums = {key: _sums(data) for key, data in pieces.items()}
    dtypes = {key: STORED[dtype] for key, (dtype, _) in manifest.pieces(rank).items()}
    arrays = {key: data.view(dtypes[key]) for key, data in pieces.items()}
    # safetensors gives its files mode 0600, whatever the umask says.
    with path.open("xb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        save_file(arrays, path, {**manifest.identity(rank), "sums": json.dumps(sums)})
    except SafetensorError as error:
        msg = f"{path} could not be written: {error}"
        raise CheckpointError(msg) from error
    path.chmod(mode)
    _sync(path)
    _sync(path.parent)
    return _count_bytes(path)


def check_file(folder: Path, manifest: Manifest, rank: int) -> None:
    """Raise CheckpointError unless the file of a saved rank is there, whole, and of this save.

    The elements are not read.
    """
    path = folder / manifest.file(rank)
    expected = manifest.file_bytes[rank]
    try:
        nbytes = _count_bytes(path)
    except FileNotFoundError as error:
        msg = f"{path} is missing, or this rank does not see it; all ranks must share the folder"
        raise CheckpointError(msg) from error
    except OSError as error:
        msg = f"{path} cannot be read: {error}"
        raise CheckpointError(msg) from error
    if nbytes != expected:
        state = "cut off" if nbytes < expected else "of another save"
        msg = f"{path} is {state}: it has {nbytes:,} bytes instead of {expected:,}"
        raise CheckpointError(msg)
    _reading(path, _check_header, manifest, rank)


def read_file(
    folder: Path,
    manifest: Manifest,
    rank: int,
    wanted: Sequence[Wanted],
    fill: Callable[[Any, int, Any], None],
) -> None:
    """Read what is wanted of a saved rank's file, and check it; CheckpointError if it is damaged.

    `fill(target, first_byte, data)` gets it by and by; `data` is NumPy uint8.
    """
    _reading(folder / manifest.file(rank), _read_wanted, wanted, fill)


def _reading(path: Path, action: Callable[..., None], *args: Any) -> None:
    """Run `action(file, path, *args)`; whatever a damaged file can raise is a CheckpointError."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            action(file, path, *args)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        msg = f"{path} is damaged: {type(error).__name__}: {error}"
        raise CheckpointError(msg) from error


def _check_header(file: Any, path: Path, manifest: Manifest, rank: int) -> None:
    metadata = file.metadata() or {}
    mine = manifest.identity(rank)
    theirs = {key: metadata.get(key) for key in mine}
    if theirs != mine:
        msg = f"{path} is of another save: it says {theirs}, and the manifest {mine}"
        raise CheckpointError(msg)
    pieces, sums = manifest.pieces(rank), json.loads(metadata["sums"])
    if set(file.keys()) != pieces.keys() or sums.keys() != pieces.keys():
        odd = sorted(set(file.keys()) ^ pieces.keys()) or sorted(sums.keys() ^ pieces.keys())
        msg = f"{path} and the manifest differ: only one has {', '.join(map(repr, odd[:8]))}"
        raise CheckpointError(msg)
    for key, (dtype, numel) in pieces.items():
        piece, stored = file.get_slice(key), STORED[dtype]
        found = piece.get_dtype(), piece.get_shape(), len(sums[key])
        code = f"{stored.name[0].upper()}{8 * stored.itemsize}"  # such as F32
        if found != (code, [numel], -(-numel * stored.itemsize // BLOCK_BYTES)):
            msg = f"{path}: {key!r} is {found}; the manifest has {numel} elements of {dtype}"
            raise CheckpointError(msg)


def _read_wanted(
    file: Any, path: Path, wanted: Sequence[Wanted], fill: Callable[[Any, int, Any], None]
) -> None:
    sums = json.loads(file.metadata()["sums"])
    for want in wanted:
        piece = file.get_slice(want.key)
        itemsize = DTYPES[want.dtype].itemsize
        step, (numel,) = BLOCK_BYTES // itemsize, piece.get_shape()
        # Whole blocks, because a checksum covers one.
        for block in range(want.first // step, -(-want.last // step)):
            begin, end = block * step, min((block + 1) * step, numel)
            data = piece[begin:end].view(np.uint8)
            if zlib.crc32(data) != sums[want.key][block]:
                msg = f"{path} is damaged: {want.key!r} has another checksum in MiB {block}"
                raise CheckpointError(msg)
            first, last = max(want.first, begin), min(want.last, end)
            place = (want.offset + first - want.first) * itemsize
            fill(want.target, place, data[(first - begin) * itemsize : (last - begin) * itemsize])


def _sums(data: Any) -> list[int]:
    return [zlib.crc32(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)]


def _count_bytes(path: Path) -> int:
    """Return the bytes of a file, as other machines see it: opening it asks a network's server."""
    with path.open("rb") as file:
        return file.seek(0, os.SEEK_END)


def _sync(path: Path) -> None:
    """Block until a file's bytes, or a folder's entries, are on disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _make_folder(path: Path) -> None:
    """Make a folder and those above it, and have them on disk."""
    if not path.is_dir():
        _make_folder(path.parent)
        path.mkdir(exist_ok=True)
        _sync(path.parent)
