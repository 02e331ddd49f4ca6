"""A report as lines to read, as JSON and as a file that is whole or not there."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from cupynccl_reduce.errors import Reason
from cupynccl_reduce.report import RankState, Report

ENTRY: dict[str, Any] = {"number": 3, "what": "reduce", "names": ["a"]}
REPORT = Report(
    reason="did not call",
    ranks=(2,),
    detail="it has not launched this",
    rank=0,
    launch=ENTRY,
    launch_text="launch 3 (reduce of bucket 0: 'a')",
    running_s=60.04,
    timeout_s=60.0,
    states=(
        RankState(0, "up", 0.0, 1, 3, 3, 2),
        RankState(1, "silent", 9.0, 1, 3, 2, 2),
        RankState(2, "left", 0.1, 1, 2, 2, 2),
    ),
    records={0: [ENTRY], 1: []},
)


def test_the_text_says_who_and_why_what_waits_how_each_rank_is_and_what_to_do() -> None:
    assert REPORT.text.splitlines() == [
        "rank 2 did not call (it has not launched this)",
        (
            "  first launch that is not done here: launch 3 (reduce of bucket 0: 'a'), which has "
            "run for 60.0 s here"
        ),
        "  rank 0: up, step 1, 3 queued, 3 started, 2 done",
        "  rank 1: silent, step 1, 3 queued, 2 started, 2 done",
        "  rank 2: left, step 1, 2 queued, 2 started, 2 done",
        (
            "  This world is aborted, and what its queued work has written is undefined. Leave it; "
            "a longer wait is connect(timeout_s=...), now 60."
        ),
    ]


def test_what_is_not_known_is_left_out() -> None:
    bare = replace(REPORT, detail="", launch=None, launch_text="", running_s=0.0, states=())
    who, what_to_do = bare.text.splitlines()
    assert who == "rank 2 did not call"
    assert what_to_do.startswith("  This world is aborted")
    waits = replace(REPORT, running_s=0.0).text.splitlines()[1]
    assert waits.endswith("launch 3 (reduce of bucket 0: 'a')")


@pytest.mark.parametrize("reason", get_args(Reason))
def test_every_reason_has_words(reason: Reason) -> None:
    ranks = () if reason == "fabric" else (1,)
    first = replace(REPORT, reason=reason, ranks=ranks).text.splitlines()[0]
    assert first.startswith("rank 0 waits for the fabric (" if reason == "fabric" else "rank 1 ")


def test_eight_ranks_are_named_of_many() -> None:
    states = tuple(RankState(rank, "up", 0.0, 0, 0, 0, 0) for rank in range(1000))
    report = replace(REPORT, ranks=tuple(range(9)), states=states)
    lines = report.text.splitlines()
    assert lines[0].startswith("ranks 0, 1, 2, 3, 4, 5, 6, 7, ... did not call")
    assert len(lines) == 11
    assert len(report.as_json()["states"]) == 1000
    two = replace(REPORT, ranks=(1, 2)).text
    assert two.startswith("ranks 1, 2 did not call")


def test_json_has_every_field_and_the_text() -> None:
    told = json.loads(json.dumps(REPORT.as_json()))
    assert told.keys() == {*Report.__slots__, "text"}
    assert told["text"] == REPORT.text
    assert told["ranks"] == [2]
    assert told["launch"] == ENTRY
    assert told["records"] == {"0": [ENTRY], "1": []}
    assert told["states"][1] == {
        "rank": 1,
        "link": "silent",
        "age_s": 9.0,
        "step": 1,
        "queued": 3,
        "started": 2,
        "done": 2,
    }


def test_it_is_written_whole_over_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    target.write_text("old")
    for path in (target, str(target)):
        REPORT.write(path)
        assert json.loads(target.read_text()) == json.loads(json.dumps(REPORT.as_json()))
    odd = replace(REPORT, detail="\u00fc \ud800 \U0001f600")
    odd.write(target)
    assert json.loads(target.read_text())["detail"] == odd.detail
    assert os.listdir(tmp_path) == ["report.json"]  # noqa: PTH208  # names alone


@pytest.mark.parametrize("at", ["half way", "replace", "text"])
@pytest.mark.parametrize("old", [None, "old"])
def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, old: str | None
) -> None:
    target = tmp_path / "report.json"
    if old is not None:
        target.write_text(old)
    write = Path.write_text

    def half(path: Path, data: str, *args: Any) -> int:
        write(path, data[: len(data) // 2], *args)
        raise OSError("no space left")

    def no(*args: Any) -> Path:
        raise OSError("no space left")

    report, error = REPORT, OSError
    if at == "half way":
        monkeypatch.setattr(Path, "write_text", half)
    elif at == "replace":
        monkeypatch.setattr(Path, "replace", no)
    else:
        report, error = replace(REPORT, records={0: [{"number": object()}]}), TypeError
    with pytest.raises(error):
        report.write(target)
    assert [path.name for path in tmp_path.iterdir()] == ([] if old is None else ["report.json"])
    assert old is None or target.read_text() == old


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        REPORT.write(tmp_path / "none" / "report.json")
    assert list(tmp_path.iterdir()) == []
