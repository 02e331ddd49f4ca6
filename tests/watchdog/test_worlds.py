"""Watched worlds of threads, and the report as text and as a file."""

from __future__ import annotations

import json
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupynccl_reduce as cr
from cupynccl_reduce.report import Report


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


SPECS = [cr.ParamSpec(f"p{i}", (64,), "float32") for i in range(4)]


def run(bad: int, how: Any, world_size: int = 3) -> dict[int, cr.CommunicationError]:
    """Run steps on threads; rank `bad` does `how(world)` at one; return what others were told."""
    errors: dict[int, cr.CommunicationError] = {}
    over = threading.Event()

    def work(world: cr.World) -> None:
        registry = cr.Registry(SPECS, world, bucket_bytes=256)
        reducer = cr.Reducer(registry)
        try:
            for step in range(4):
                if step == 2 and world.rank == bad:
                    how(world, over)
                with reducer.backward():
                    for spec in SPECS:
                        reducer.reduce_grad(spec.name, np.ones(64, np.float32))
                reducer.wait()
        except cr.CommunicationError as error:
            errors[world.rank] = error
            check_later(reducer, error)
            if len(errors) == world_size - 1:
                over.set()

    with pytest.raises(ValueError, match="planted"):
        cr.run_local(world_size, work, timeout_s=1.0, check="heartbeat")
    return errors


def check_later(reducer: cr.Reducer, first: cr.CommunicationError) -> None:
    with pytest.raises(cr.CommunicationError) as later, reducer.backward():
        pass
    assert later.value.report is first.report


def fail(world: cr.World, over: threading.Event) -> None:
    raise ValueError("planted")


def leave(world: cr.World, over: threading.Event) -> None:
    world.close()
    over.wait(20)
    raise ValueError("planted")


def do_nothing(world: cr.World, over: threading.Event) -> None:
    over.wait(20)
    raise ValueError("planted")


@pytest.mark.parametrize("bad", [0, 2])
@pytest.mark.parametrize(
    ("how", "reason"), [(fail, "raised"), (leave, "left"), (do_nothing, "did not call")]
)
def test_a_rank_is_named_on_the_others(how: Any, reason: str, bad: int) -> None:
    errors = run(bad, how)
    assert sorted(errors) == sorted({0, 1, 2} - {bad})
    for rank, error in errors.items():
        assert (error.report.reason, error.report.ranks, error.ranks) == (reason, (bad,), (bad,))
        assert error.report.rank == rank
        assert str(error).startswith(f"rank {rank}: the world is broken: rank {bad} ")
        path = str(error).rpartition(" are in ")[2]
        told = json.loads(Path(path).read_text())
        assert told["reason"] == reason
        assert len(told["records"][str(rank)]) >= 8


def test_sync_compares_before_each_launch() -> None:
    def work(world: cr.World) -> None:
        reducer = cr.Reducer(cr.Registry(SPECS, world, bucket_bytes=256))
        if world.rank == 1:
            buckets: Any = reducer._policy
            buckets._buckets[0], buckets._buckets[1] = buckets._buckets[1], buckets._buckets[0]
        with reducer.backward():
            for spec in SPECS[::-1]:
                reducer.reduce_grad(spec.name, np.ones(64, np.float32))

    with pytest.raises(cr.MismatchError, match="rank 0: 'p3'; rank 1: 'p2'"):
        cr.run_local(2, work, check="sync")


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("inf"), float("nan"), "1", None, True])
def test_a_timeout_is_a_number_above_0(timeout_s: Any) -> None:
    with pytest.raises(cr.LayoutError, match="timeout_s"):
        cr.run_local(1, lambda _: None, timeout_s=timeout_s)
    with pytest.raises(cr.LayoutError, match="timeout_s"):
        cr.connect("host", timeout_s=timeout_s)


def test_a_check_is_one_of_three() -> None:
    with pytest.raises(cr.LayoutError, match="'heartbeat', 'sync', 'off', not 'on'"):
        cr.connect("host", check="on")  # type: ignore[arg-type]


def test_a_report_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    report = Report("fabric", (), "why", 1, None, "", 0.0, 5.0, (), {1: []})
    report.write(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text())["text"] == report.text
    assert report.text.startswith("rank 1 waits for the fabric (why)\n")
    assert "timeout_s" in report.text
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        report.write(tmp_path / "folder")
    assert json.loads((tmp_path / "report.json").read_text())["reason"] == "fabric"
