"""Files that are cut off, missing, mixed or damaged: an error on all ranks that names the file."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoint.states import PARAMS, load_on, make_full, make_out, save_on
from strategies import bits

import cupynccl_reduce as cr
from cupynccl_reduce import (
    CheckpointError,
    CommunicationError,
    ParamSpec,
    Registry,
    World,
    run_local,
)
from cupynccl_reduce.checkpoint import files as disk
from cupynccl_reduce.checkpoint.files import BLOCK_BYTES
from cupynccl_reduce.checkpoint.manifest import MOST_BYTES, _checksum

if TYPE_CHECKING:
    from collections.abc import Callable

STATES = {"param": "bfloat16", "exp_avg": "float32"}
FULL = make_full(PARAMS, STATES)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    run_local(2, lambda world: save_on(world, tmp_path / "c", PARAMS, FULL, {"step": 1}))
    return tmp_path / "c"


def files(path: Path) -> list[Path]:
    return sorted(path.glob("save-*/*"))


def refusals(path: Path, world_size: int = 3) -> list[str]:
    """Load, and return what every rank is told, or nothing; `out` must then be untouched."""

    def load(world: World) -> str:
        registry = Registry(PARAMS, world)
        out = make_out(FULL, registry)
        try:
            cr.load(path, registry, out)
        except CheckpointError as error:
            ones = make_out(FULL, registry)
            if "checksum" not in str(error):
                for state, of in ones.items():
                    assert all(bits(out[state][name]) == bits(a) for name, a in of.items())
            world.control.all_gather(b"")  # the world goes on
            return str(error)
        load_on(world, path, PARAMS, FULL)
        return ""

    return run_local(world_size, load)


def told(path: Path, *texts: str, world_size: int = 3) -> None:
    """Check that all ranks are told the same, with these texts in it."""
    first, *others = refusals(path, world_size)
    assert all(other == first for other in others)
    assert first.startswith(f"load from {path}: ")
    for text in texts:
        assert text in first


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    told(tmp_path / "nowhere", str(tmp_path / "nowhere/manifest.json"), "is missing")
    (tmp_path / "file").touch()
    told(tmp_path / "file", str(tmp_path / "file/manifest.json"))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_missing_file(path: Path, rank: int, world_size: int) -> None:
    files(path)[rank].unlink()
    told(path, f"rank-0000{rank}-of-00002.safetensors is missing", world_size=world_size)


def test_a_missing_file_that_holds_nothing(tmp_path: Path) -> None:
    specs = [ParamSpec("p", (2,), "float32")]
    full = make_full(specs, {"s": "int8"})
    run_local(4, lambda world: save_on(world, tmp_path, specs, full))
    run_local(4, lambda world: load_on(world, tmp_path, specs, full))
    files(tmp_path)[3].unlink()
    with pytest.raises(CheckpointError, match=r"rank-00003-of-00004.safetensors is missing"):
        run_local(2, lambda world: load_on(world, tmp_path, specs, full))


def test_a_file_that_is_cut_off_anywhere(path: Path) -> None:
    whole = files(path)[1].read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for nbytes in (0, 1, 7, 8, 9, header - 1, header, header + 1, len(whole) - 1):
        files(path)[1].write_bytes(whole[:nbytes])
        told(path, f"{files(path)[1]} is cut off: it has {nbytes:,} bytes")
    files(path)[1].write_bytes(whole + b"x")
    told(path, f"{files(path)[1]} is of another save: it has")
    files(path)[1].write_bytes(whole)
    assert refusals(path) == ["", "", ""]


def test_a_file_whose_end_is_a_hole(path: Path) -> None:
    """As some file systems leave one after a power cut: the size is right."""
    whole = files(path)[0].read_bytes()
    files(path)[0].write_bytes(whole[:-4] + bytes(4))
    told(path, f"{files(path)[0]} is damaged", "checksum")


def test_files_of_two_saves(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    run_local(2, lambda world: save_on(world, other, PARAMS, FULL, {"step": 1}))
    mine, theirs = files(path), files(other)
    shutil.copy(theirs[1], mine[1])
    told(path, f"{mine[1]} is of another save", theirs[1].parent.name.removeprefix("save-"))
    shutil.copy(mine[0], mine[1])  # one of this save, of another rank
    told(path, f"{mine[1]} is of another save")
    shutil.copy(other / "manifest.json", path / "manifest.json")
    told(path, f"{path / theirs[0].parent.name / theirs[0].name} is missing")


def test_any_damaged_byte_of_a_file(path: Path) -> None:
    """What does no harm, such as a space of the header, may pass."""
    file = files(path)[0]
    whole = file.read_bytes()
    passed = 0
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= (0x01, 0x20, 0x80)[at % 3]
        file.write_bytes(damaged)
        (text,) = refusals(path, 1)
        passed += not text
        assert not text or str(file) in text
    assert passed <= 8


def test_damage_in_a_later_block_is_found_by_who_reads_it(tmp_path: Path) -> None:
    specs = [ParamSpec("p", (3 * BLOCK_BYTES,), "uint8")]
    full = make_full(specs, {"s": "uint8"})
    run_local(1, lambda world: save_on(world, tmp_path, specs, full))
    (file,) = files(tmp_path)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"rank 2: .*'s/p' has another checksum in MiB 2"):
        run_local(3, lambda world: load_on(world, tmp_path, specs, full))


def test_a_manifest_that_is_cut_off_anywhere(path: Path) -> None:
    manifest = path / "manifest.json"
    whole = manifest.read_bytes()
    for nbytes in range(len(whole) - 2):
        manifest.write_bytes(whole[:nbytes])
        told(path, f"{manifest} is ", world_size=2)
    for text in (b"\xff\xfe", b"[" * 100_000, b"[]", b"null", b"{}", b'{"format": 1}', b"1" * 9999):
        manifest.write_bytes(text)
        told(path, f"{manifest} is ")
    os.truncate(manifest, MOST_BYTES + 1)
    told(path, f"{manifest} is no manifest: it has over ")


def test_any_damaged_byte_of_the_manifest(path: Path) -> None:
    manifest = path / "manifest.json"
    whole = manifest.read_bytes()
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= (0x01, 0x20, 0x80)[at % 3]
        manifest.write_bytes(damaged)
        (text,) = refusals(path, 1)
        assert text or damaged[at : at + 1].isspace()
        assert not text or str(manifest) in text


def test_a_manifest_of_another_format_is_told_apart(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace("version 1", "version 2"))
    told(path, "manifest.json is no manifest that can be read here: format", "version 2")


def test_a_save_over_a_damaged_checkpoint(path: Path) -> None:
    (path / "manifest.json").write_text("{")
    run_local(3, lambda world: save_on(world, path, PARAMS, FULL))
    assert refusals(path) == ["", "", ""]
    assert len(files(path)) == 3


def on_rank(rank: int, real: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    def instead(*args: Any) -> Any:
        if threading.current_thread().name == f"rank-{rank}":
            raise error
        return real(*args)

    return instead


@pytest.mark.parametrize(
    ("rank", "where", "error"),
    [
        (0, "make_save", OSError("no such disk")),
        (1, "write_file", CheckpointError("planted")),
        (2, "write_file", MemoryError()),
        (0, "check_file", CheckpointError("not seen")),
        (0, "write_manifest", OSError("disk is full")),
    ],
)
def test_one_rank_fails_to_save(
    path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, where: str, error: Exception
) -> None:
    def save(world: World) -> str:
        with pytest.raises(CheckpointError) as caught:
            save_on(world, path, PARAMS, make_full(PARAMS, STATES, 5))
        world.control.all_gather(b"")  # the world goes on
        return str(caught.value)

    monkeypatch.setattr(disk, where, on_rank(rank, getattr(disk, where), error))
    told = run_local(3, save)
    assert told == [f"save to {path}: rank {rank}: {str(error) or 'MemoryError'}"] * 3
    monkeypatch.undo()
    assert refusals(path) == ["", "", ""]  # the old one is whole


def test_a_file_that_is_gone_before_the_manifest_is_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = disk.write_file

    def write_file(folder: Path, manifest: Any, rank: int, pieces: Any) -> int:
        nbytes = real(folder, manifest, rank, pieces)
        if rank == 1:
            (folder / manifest.file(rank)).unlink()
        return nbytes

    monkeypatch.setattr(disk, "write_file", write_file)
    with pytest.raises(CheckpointError, match=r"rank-00001-of-00002.safetensors is missing"):
        run_local(2, lambda world: save_on(world, path, PARAMS, make_full(PARAMS, STATES, 5)))
    assert refusals(path) == ["", "", ""]


def test_an_error_of_many_ranks_stays_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_file(*_: Any) -> int:
        raise OSError("planted")

    monkeypatch.setattr(disk, "write_file", write_file)
    with pytest.raises(CheckpointError) as caught:
        run_local(12, lambda world: save_on(world, tmp_path, PARAMS, {}))
    assert str(caught.value).endswith("rank 6: planted; rank 7: planted; ...")


def test_a_folder_that_is_not_shared_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.is_dir

    def is_dir(folder: Path) -> bool:
        return threading.current_thread().name != "rank-1" and real(folder)

    monkeypatch.setattr(Path, "is_dir", is_dir)
    with pytest.raises(
        CheckpointError, match=r"rank 1: .*/save-\w+, which rank 0 has made, is not seen"
    ):
        run_local(2, lambda world: save_on(world, path, PARAMS, FULL))


def test_an_error_that_nobody_expects_breaks_the_world(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = on_rank(1, disk.write_file, ZeroDivisionError("planted"))
    monkeypatch.setattr(disk, "write_file", planted)
    with pytest.raises(CommunicationError, match="planted"):
        run_local(3, lambda world: save_on(world, path, PARAMS, FULL))
    monkeypatch.undo()
    assert refusals(path) == ["", "", ""]


def test_a_file_of_other_pieces(path: Path) -> None:
    """Only a writer of such files by hand gets here: sizes, tokens and checksums are right."""
    from safetensors import safe_open
    from safetensors.numpy import load_file, save_file

    file = files(path)[0]
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["crc32"]
    arrays = load_file(file)
    with safe_open(file, "numpy") as opened:
        metadata = opened.metadata()
    scale = arrays["param/scale"]
    for change, text in (
        ({"param/other": scale}, "only one has 'param/other'"),
        ({"param/scale": scale.reshape(1, 1)}, "'param/scale' is ('U16', [1, 1], 1)"),
        ({"param/scale": scale.view(np.int16)}, "'param/scale' is ('I16', [1], 1)"),
    ):
        save_file({**arrays, **change}, file, metadata)
        manifest["file_bytes"][0] = file.stat().st_size
        body = {**manifest, "crc32": _checksum(manifest)}
        (path / "manifest.json").write_text(json.dumps(body))
        told(path, str(file), text)
