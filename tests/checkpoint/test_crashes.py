"""A save that ends at any of its steps leaves the older or the newer checkpoint, and no strays."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.numpy
from checkpoint.states import PARAMS, load_on, make_full, save_on

from cupynccl_reduce import CheckpointError, CommunicationError, World, run_local

if TYPE_CHECKING:
    from collections.abc import Callable

STATES = {"param": "bfloat16", "exp_avg": "float32"}
OLD, NEW = (make_full(PARAMS, STATES, seed) for seed in (1, 2))
# Every call that changes what is on disk, by what it is reached through.
STEPS: list[tuple[Any, str]] = [
    (os, "fsync"),
    (Path, "chmod"),
    (Path, "mkdir"),
    (Path, "open"),
    (Path, "replace"),
    (Path, "unlink"),
    (safetensors.numpy, "save_file"),
    (shutil, "rmtree"),
]


class KilledError(BaseException):
    """What ends a rank at once: nothing catches it, as nothing catches a power cut."""


class Disk:
    """Counts and notes the steps of a save, and fails at one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[str, str]] = []
        self.fail_at: int | None = None
        self.fault: Callable[[], BaseException] = KilledError
        self._lock = threading.Lock()
        for owner, name in STEPS:
            monkeypatch.setattr(owner, name, self._watched(name, getattr(owner, name)))

    def _watched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and "rb" in (*args[1:2], kwargs.get("mode")):
                return real(*args, **kwargs)  # changes nothing
            target = args[1] if name == "save_file" else args[0]
            opened = Path(f"/proc/self/fd/{target}")
            path = str(opened.readlink() if name == "fsync" else target)
            with self._lock:
                number = len(self.log)
                self.log.append((name, path))
            if number == self.fail_at:
                if name == "save_file":  # half of it
                    real(*args, **kwargs)
                    with Path(target).open("rb+") as file:
                        file.truncate(Path(target).stat().st_size // 2)
                if name == "open":
                    Path(target).touch()
                raise self.fault()
            return real(*args, **kwargs)

        return step


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def which(path: Path) -> str:
    """Load a checkpoint at another world size; return whether it is the old or the new one."""

    def load(world: World) -> Any:
        try:
            return load_on(world, path, PARAMS, OLD)
        except AssertionError:
            return load_on(world, path, PARAMS, NEW)

    meta, other = run_local(2, load)
    assert meta == other
    return meta["which"]


def save(world: World, path: Path, name: str) -> None:
    save_on(world, path, PARAMS, {"old": OLD, "new": NEW}[name], {"which": name})


def no_strays(path: Path, world_size: int) -> bool:
    found = sorted(p.name.partition("-")[0] for p in path.iterdir())
    return found == ["manifest.json", "save"] and len(list(path.glob("save-*/*"))) == world_size


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_killed_at_any_step(tmp_path: Path, disk: Disk, world_size: int) -> None:
    outcomes = []
    for step in range(1000):
        path = tmp_path / str(step)
        run_local(2, lambda world, p=path: save(world, p, "old"))
        disk.log.clear()
        disk.fail_at = step
        with suppress(KilledError, CommunicationError):
            run_local(world_size, lambda world, p=path: save(world, p, "new"))
        disk.fail_at = None
        ended = len(disk.log) <= step
        outcomes.append(which(path))
        run_local(world_size, lambda world, p=path: save(world, p, "new"))
        assert which(path) == "new"
        assert no_strays(path, world_size)
        if ended:
            break
    assert outcomes == sorted(outcomes, reverse=True)  # old at first, and new from some step on
    # folder, file (open, write, mode), its syncs, the manifest (open, sync, replace, sync), sweep
    assert 2 + 5 * world_size + 4 + 1 <= len(outcomes) - 1 <= 2 + 5 * world_size + 4 + 2
    assert outcomes.count("new") >= 2


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_first_save_killed_at_any_step(tmp_path: Path, disk: Disk, world_size: int) -> None:
    for step in range(1000):
        path = tmp_path / str(step) / "deep"
        disk.log.clear()
        disk.fail_at = step
        with suppress(KilledError, CommunicationError):
            run_local(world_size, lambda world, p=path: save(world, p, "new"))
        disk.fail_at = None
        ended = len(disk.log) <= step
        try:
            assert which(path) == "new"
        except CheckpointError as error:
            assert "manifest.json is missing" in str(error)  # noqa: PT017
        run_local(world_size, lambda world, p=path: save(world, p, "new"))
        assert which(path) == "new"
        assert no_strays(path, world_size)
        if ended:
            break
    assert step > 10


def test_a_full_disk_at_any_step_is_an_error_on_all_ranks(tmp_path: Path, disk: Disk) -> None:
    disk.fault = lambda: OSError(errno.ENOSPC, "No space left on device", "the file")

    def work(world: World, path: Path) -> str:
        told = ""
        try:
            save(world, path, "new")
        except CheckpointError as error:
            told = str(error)
        world.control.all_gather(b"")  # the same world goes on
        return told

    for step in range(1000):
        path = tmp_path / str(step)
        run_local(2, lambda world, p=path: save(world, p, "old"))
        disk.log.clear()
        disk.fail_at = step
        told, other = run_local(2, lambda world, p=path: work(world, p))
        disk.fail_at = None
        assert told == other
        if told:
            assert "No space left on device" in told
            assert f"save to {path}: rank " in told
        replaced = [name for name, _ in disk.log[:step]].count("replace")
        assert which(path) == ("new" if replaced else "old")
        if len(disk.log) <= step:
            break
        assert told or disk.log[step][0] in ("rmtree", "unlink")  # only room is lost then
        run_local(2, lambda world, p=path: save(world, p, "new"))
        assert which(path) == "new"
        assert no_strays(path, 2)


def test_what_is_on_disk_before_what(tmp_path: Path, disk: Disk) -> None:
    path = tmp_path / "new" / "c"
    for _ in range(2):
        before = {str(p) for p in path.glob("save-*")} if path.exists() else set()
        disk.log.clear()
        run_local(2, lambda world: save(world, path, "new"))
        (folder,) = {str(p) for p in path.glob("save-*")} - before
        log = disk.log
        replace = next(i for i, (name, _) in enumerate(log) if name == "replace")
        synced = {where for name, where in log[:replace] if name == "fsync"}
        (draft,) = {where for name, where in log if name == "replace"}
        shards = {f"{folder}/rank-0000{rank}-of-00002.safetensors" for rank in range(2)}
        assert synced >= {*shards, folder, str(path), draft}
        if not before:
            assert synced >= {str(tmp_path), str(tmp_path / "new")}
        for shard in shards:
            assert log.index(("save_file", shard)) < log.index(("fsync", shard))
        assert log[replace + 1] == ("fsync", str(path))
        removed = [where for name, where in log[replace + 2 :] if name == "rmtree"]
        assert set(removed) >= before
        assert not [1 for name, _ in log[:replace] if name in ("rmtree", "unlink")]


def test_a_killed_process(tmp_path: Path, run_python: Callable[..., Any]) -> None:
    source = """
import os, shutil, sys
from pathlib import Path
from checkpoint.states import PARAMS, make_full, save_on
from cupynccl_reduce import run_local
import safetensors.numpy
{patch} = lambda *_, **__: os._exit(9)
full = make_full(PARAMS, {states}, 2)
run_local(2, lambda world: save_on(world, Path({path!r}), PARAMS, full, {{"which": "new"}}))
"""
    for patch, left in {
        "safetensors.numpy.save_file": "old",
        "Path.replace": "old",
        "shutil.rmtree": "new",
    }.items():
        path = tmp_path / patch
        run_local(2, lambda world, p=path: save(world, p, "old"))
        done = run_python(source.format(patch=patch, states=STATES, path=str(path)))
        assert done.returncode == 9, done
        assert which(path) == left
        run_local(2, lambda world, p=path: save(world, p, "new"))
        assert no_strays(path, 2)
