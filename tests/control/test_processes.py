"""One rank in a process of its own, which is killed, stopped or held; the others here see it."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from control.apart import SILENT_S, WALL_S, Apart, links, until, world

from cupynccl_reduce import CommunicationError
from cupynccl_reduce.control import hub
from cupynccl_reduce.control import service as service_module

if TYPE_CHECKING:
    from cupynccl_reduce.control.channel import Channel


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "SILENT_S", SILENT_S)
    monkeypatch.setattr(service_module, "LINGER_MS", 100)  # for a goodbye that nobody takes


def gather(process: Apart, ends: dict[int, Channel]) -> None:
    """All ranks meet, and have what all gave."""
    process.say("gather")
    everyone = [b"%d" % rank for rank in range(len(ends) + 1)]
    with ThreadPoolExecutor(len(ends)) as pool:
        met = [pool.submit(end.all_gather, b"%d" % rank) for rank, end in ends.items()]
        assert [future.result(WALL_S) for future in met] == [everyone] * len(ends)
    assert process.hear() == str([one.decode() for one in everyone])


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_lost_for_all_the_others_and_they_for_nobody(victim: int) -> None:
    with world(victim) as (process, ends):
        gather(process, ends)
        process.process.send_signal(signal.SIGKILL)
        until(lambda: links(ends, victim) == {"lost"})
        for other in ends:
            assert "lost" not in links(ends, other)
        for end in ends.values():
            with pytest.raises(CommunicationError, match=f"rank {victim} died") as caught:
                end.all_gather(b"")
            assert caught.value.ranks == (victim,)


def test_rank_0_that_dies_after_it_came_to_a_gather_frees_who_waits_there() -> None:
    """Rank 1 has not come: who waits for it waits for an answer that rank 0 never gives."""
    with world(0) as (process, ends), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ends[2].all_gather, b"")
        process.say("gather")
        until(lambda: ends[2]._service.node.turns() == [2, 1, 2])
        process.process.send_signal(signal.SIGKILL)
        try:
            with pytest.raises(CommunicationError, match="rank 0 died") as caught:
                waiting.result(10)
            assert caught.value.ranks == (0,)
            late = pool.submit(ends[1].all_gather, b"")
            with pytest.raises(CommunicationError, match="rank 0 died"):
                late.result(10)
        finally:
            for end in ends.values():
                end.abort()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_or_held_is_silent_and_never_lost(rank: int) -> None:
    seen: set[str] = set()

    def all_see(link: str) -> bool:
        now = links(ends, rank)
        seen.update(now)
        return now == {link}

    with world(rank) as (process, ends):
        process.process.send_signal(signal.SIGSTOP)
        until(lambda: all_see("silent"))
        process.process.send_signal(signal.SIGCONT)
        until(lambda: all_see("up"))
        process.say("hold")
        until(lambda: all_see("silent"))
        process.say("")
        until(lambda: all_see("up"))
        assert process.hear() == "held"
        gather(process, ends)
        assert seen == {"up", "silent"}


@pytest.mark.parametrize(("rank", "how", "code"), [(0, "raise", 1), (1, "exit", 3)])
def test_a_process_that_ends_without_close_ends_and_is_lost(rank: int, how: str, code: int) -> None:
    with world(rank, 2) as (process, ends):
        process.say(how)
        assert process.process.wait(WALL_S) == code
        until(lambda: links(ends, rank) == {"lost"})


@pytest.mark.parametrize("rank", [0, 1])
def test_a_forked_child_is_inert_and_its_parent_goes_on(rank: int) -> None:
    with world(rank, 2) as (process, ends):
        process.say("fork")
        assert process.hear() == "7"
        gather(process, ends)
        assert "lost" not in links(ends, rank)
        assert "left" not in links(ends, rank)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_forked_child_does_not_hide_its_parent_s_death(victim: int) -> None:
    with world(victim) as (process, ends):
        process.say("leave a child")
        child = int(process.hear())
        try:
            process.process.send_signal(signal.SIGKILL)
            until(lambda: links(ends, victim) == {"lost"})
            os.kill(child, 0)  # it is there all the while
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_rank_0_that_dies_before_its_answer_has_died() -> None:
    """Everybody has come, so nobody is late; yet no answer can come any more."""
    with world(0) as (process, ends), ThreadPoolExecutor(2) as pool:
        process.say("mute")
        process.say("gather")
        waiting = [pool.submit(end.all_gather, b"") for end in ends.values()]
        until(lambda: all(end._service.node.turns() == [2, 2, 2] for end in ends.values()))
        process.process.send_signal(signal.SIGKILL)
        for one in waiting:
            with pytest.raises(CommunicationError, match="rank 0 died") as caught:
                one.result(WALL_S)  # a tenth of what it waits for ranks that answer
            assert caught.value.ranks == (0,)
