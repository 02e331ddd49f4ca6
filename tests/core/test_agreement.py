"""Ranks compare what they believe: all pass, or all raise with every differing value."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from cupynccl_reduce.agreement import agree
from cupynccl_reduce.control.local import LocalControl
from cupynccl_reduce.errors import LayoutError, MismatchError, ReduceError
from cupynccl_reduce.meeting import Meeting


class Counted(LocalControl):
    """Counts the bytes that one rank sends."""

    sent = 0

    def all_gather(self, payload: bytes) -> list[bytes]:
        self.sent += len(payload)
        return super().all_gather(payload)


def told(
    *entries: list[str] | ReduceError, sent: list[int] | None = None
) -> list[ReduceError | None]:
    """Return what each rank raises when each gives its own entries, or refuses."""
    meeting = Meeting(len(entries))
    controls = [Counted(meeting, rank) for rank in range(len(entries))]

    def ask(rank: int) -> ReduceError | None:
        mine = entries[rank]
        refused = mine if isinstance(mine, ReduceError) else None
        try:
            agree(controls[rank], "things", [] if refused else mine, refused=refused)
        except ReduceError as error:
            return error
        return None

    with ThreadPoolExecutor(len(entries)) as ranks:
        errors = list(ranks.map(ask, range(len(entries))))
    if sent is not None:
        sent += [control.sent for control in controls]
    return errors


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_equal_entries_pass(world_size: int) -> None:
    assert told(*[["a", "b"]] * world_size) == [None] * world_size


def test_every_rank_is_told_the_first_difference_with_all_values() -> None:
    errors = told(["a", "b", "c"], ["a", "x", "y"], ["a", "b", "c"], ["a", "z", "c"])
    for error in errors:
        assert type(error) is MismatchError
        assert "things, first at entry 1: ranks 0, 2: b; rank 1: x; rank 3: z." in str(error)


@pytest.mark.parametrize("place", [0, 1, 4_998, 4_999])
def test_few_bytes_travel_however_many_entries_there_are(place: int) -> None:
    entries = [f"entry {i}" for i in range(5_000)]
    others = entries.copy()
    others[place] = "another"
    equal: list[int] = []
    assert told(entries, entries.copy(), entries, sent=equal) == [None] * 3
    assert equal == [16] * 3  # one digest
    different: list[int] = []
    for error in told(entries, others, entries, sent=different):
        assert type(error) is MismatchError
        assert f"entry {place}: ranks 0, 2: entry {place}; rank 1: another." in str(error)
    assert max(different) < 400


def test_an_empty_entry_is_not_the_same_as_none() -> None:
    for error in told(["a"], ["a", ""]):
        assert type(error) is MismatchError
        assert "entry 1: rank 0: (nothing); rank 1: ." in str(error)


@pytest.mark.parametrize("entries", [(["a", "b"], ["a"]), (["a"], ["a", "b"])])
def test_a_shorter_list_is_a_difference(entries: tuple[list[str], list[str]]) -> None:
    for error in told(*entries):
        assert type(error) is MismatchError
        for word in ("entry 1", ": b", "(nothing)"):
            assert word in str(error)


def test_a_rank_that_refuses_tells_its_peers_why() -> None:
    mine = LayoutError("bad bucket")
    errors = told(["a"], mine, ["a"])
    assert errors[1] is mine
    for error in (errors[0], errors[2]):
        assert type(error) is MismatchError
        assert "rank 1: refused: bad bucket" in str(error)


def test_ranks_that_refuse_alike_raise_their_own_errors() -> None:
    errors = [LayoutError("bad"), LayoutError("bad")]
    assert told(*errors) == errors


def test_many_ranks_make_a_short_message() -> None:
    error = told(*[["a"]] * 20, ["b"])[0]
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7, ...: a; rank 20: b" in str(error)
