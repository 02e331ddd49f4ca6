"""Where threads meet: all see all payloads, and whoever fails frees the others. No arrays."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from cupynccl_reduce.errors import CommunicationError
from cupynccl_reduce.meeting import Meeting


def test_every_rank_sees_every_payload_round_after_round() -> None:
    meeting = Meeting(3)

    def meet(rank: int) -> list[list[int]]:
        seen: list[list[int]] = []
        for turn in range(50):
            meeting.exchange(rank, 10 * turn + rank, seen.append)
        return seen

    with ThreadPoolExecutor(3) as ranks:
        for seen in ranks.map(meet, range(3)):
            assert seen == [[10 * turn + rank for rank in range(3)] for turn in range(50)]


def test_an_aborted_meeting_frees_who_waits_and_who_comes_later() -> None:
    meeting = Meeting(3)

    def meet(rank: int) -> None:
        with pytest.raises(CommunicationError, match=f"rank {rank}: another rank"):
            meeting.exchange(rank, None, list)

    with ThreadPoolExecutor(2) as ranks:
        first = ranks.submit(meet, 0)
        meeting.abort()
        meeting.abort()
        first.result()
        ranks.submit(meet, 1).result()


def test_who_leaves_a_finished_meeting_does_not_break_it_for_the_others() -> None:
    """A rank that raises after a comparison ends its world; its peers still get their answer."""
    for _ in range(300):
        meeting = Meeting(3)

        def meet(rank: int, meeting: Meeting = meeting) -> list[int]:
            seen: list[int] = []
            meeting.exchange(rank, rank, seen.extend)
            meeting.abort()
            return seen

        with ThreadPoolExecutor(3) as ranks:
            assert list(ranks.map(meet, range(3))) == [[0, 1, 2]] * 3


def test_a_failure_of_one_rank_s_own_part_does_not_hang_the_others() -> None:
    meeting = Meeting(2)

    def fail(_: object) -> None:
        msg = "mine alone"
        raise ValueError(msg)

    def meet(rank: int) -> list[int]:
        seen: list[int] = []
        if rank == 0:
            with pytest.raises(ValueError, match="mine alone"):
                meeting.exchange(rank, rank, fail)
        else:
            meeting.exchange(rank, rank, seen.extend)
        return seen

    with ThreadPoolExecutor(2) as ranks:
        assert list(ranks.map(meet, range(2))) == [[], [0, 1]]
