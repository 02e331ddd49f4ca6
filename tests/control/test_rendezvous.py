"""Ranks that are left find each other, whoever is gone; the others never get in."""

from __future__ import annotations

import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import zmq
from control.apart import SILENT_S, WALL_S, links, until, world

from cupynccl_reduce import CommunicationError
from cupynccl_reduce.control import hub
from cupynccl_reduce.control import service as service_module
from cupynccl_reduce.control.rendezvous import Rendezvous
from cupynccl_reduce.control.sockets import Keys, open_socket

if TYPE_CHECKING:
    from collections.abc import Callable

    from cupynccl_reduce.control.channel import Channel
    from cupynccl_reduce.peers import Link

LIMIT_S = 30.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "SILENT_S", SILENT_S)
    monkeypatch.setattr(service_module, "LINGER_MS", 100)  # for a goodbye that nobody takes


def regroup(ends: dict[int, Channel], blamed: tuple[int, ...]) -> None:
    """The ranks here have one world, and are all that it has."""
    with ThreadPoolExecutor(len(ends)) as pool:
        joining = {r: pool.submit(end.regroup, blamed, LIMIT_S) for r, end in ends.items()}
        joined = {rank: future.result(WALL_S) for rank, future in joining.items()}
        assert [ranks for ranks, _ in joined.values()] == [sorted(ends)] * len(ends)
        gathering = {r: pool.submit(new.all_gather, b"%d" % r) for r, (_, new) in joined.items()}
        everyone = [b"%d" % rank for rank in sorted(ends)]
        assert [one.result(WALL_S) for one in gathering.values()] == [everyone] * len(ends)
    for rank in sorted(joined, reverse=True):
        joined[rank][1].close()


@pytest.mark.parametrize("victim", [0, 1, 2, 3])
@pytest.mark.parametrize(("how", "link"), [("SIGKILL", "lost"), ("SIGSTOP", "silent")])
def test_survivors_of_any_rank_meet_in_their_old_order(victim: int, how: str, link: str) -> None:
    with world(victim, 4) as (process, ends):
        process.process.send_signal(getattr(signal, how))
        until(lambda: links(ends, victim) == {link})
        for end in ends.values():
            end.abort()  # as a world that breaks does
        regroup(ends, (victim,))


@pytest.mark.parametrize("victim", [0, 1])
def test_one_survivor_is_a_world_of_one(victim: int) -> None:
    with world(victim, 2) as (process, ends):
        process.process.kill()
        until(lambda: links(ends, victim) == {"lost"})
        regroup(ends, (victim,))


def test_a_rank_that_left_is_not_waited_for() -> None:
    with world(1, 3) as (process, ends):
        process.process.kill()
        until(lambda: links(ends, 1) == {"lost"})
        ends[0].close()
        until(lambda: ends[2].peers()[0].link == "left")
        regroup({2: ends[2]}, (0, 1))


def test_a_rank_that_answers_and_never_comes_is_left_behind() -> None:
    with world(2, 4) as (_, ends), ThreadPoolExecutor(2) as pool:
        joining = [pool.submit(ends[rank].regroup, (2,), 1.0) for rank in (0, 1)]
        joined = [future.result(WALL_S) for future in joining]
        assert [ranks for ranks, _ in joined] == [[0, 1]] * 2
        with pytest.raises(CommunicationError, match="rank 3: rank 0 meets its peers no more"):
            ends[3].regroup((2,), 1.0)
        for _, new in reversed(joined):
            new.close()


def test_a_child_that_was_forked_before_holds_no_place() -> None:
    with world(0, 3) as (process, ends):
        process.say("leave a child")
        child = int(process.hear())
        try:
            process.process.kill()
            until(lambda: links(ends, 0) == {"lost"})
            address = ends[1]._invitations[0]
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((address.host, address.port), WALL_S)
            regroup(ends, (0,))
        finally:
            os.kill(child, signal.SIGKILL)


def garbage(places: list[Rendezvous]) -> Callable[[], object]:
    connection = socket.create_connection(places[0].address)
    connection.send(os.urandom(1000))
    return connection.close


def words(places: list[Rendezvous]) -> Callable[[], object]:
    """From rank 2, which has every key."""
    context, dealer = open_socket(2, places[0].invitation)
    for parts in ([b"gone"], [b"here", b""], [b""]):
        dealer.send_multipart(parts)
    return lambda: (dealer.close(linger=0), context.destroy())


def wrong_key(places: list[Rendezvous]) -> Callable[[], object]:
    host, port = places[0].address
    true, other = places[0].invitation, Keys().invite(host, port)
    context: Any = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.identity = b"r2"
    dealer.curve_serverkey = true.server_key
    dealer.curve_publickey, dealer.curve_secretkey = other.public_key, other.secret_key
    dealer.connect(f"tcp://{host}:{port}")
    dealer.send(b"here")
    return lambda: (dealer.close(linger=0), context.destroy())


@pytest.mark.parametrize("stranger", [garbage, words, wrong_key])
def test_strangers_are_not_met(
    stranger: Callable[[list[Rendezvous]], Callable[[], object]],
) -> None:
    places = [Rendezvous(rank, "127.0.0.1") for rank in range(3)]
    invitations = [place.invitation for place in places]
    end = stranger(places)

    def links() -> list[Link]:
        return ["up", "up", "lost"]

    try:
        with ThreadPoolExecutor(2) as pool:
            # One that never comes keeps the door open, for whom it would let in.
            first = pool.submit(places[0].meet, invitations, lambda: ["up"] * 3, (), 1.0)
            second = pool.submit(places[1].meet, invitations, links, (), LIMIT_S)
            (ranks, server), (told, _) = first.result(WALL_S), second.result(WALL_S)
        assert ranks == told == [0, 1]
        server.context.destroy(linger=0)
    finally:
        end()
        for place in places:
            place.close()
