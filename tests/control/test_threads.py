"""Side channels between threads: the values, who waits and who left, and what keys do not show."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from cupynccl_reduce import CommunicationError, LayoutError
from cupynccl_reduce.control import hub
from cupynccl_reduce.control import service as service_module
from cupynccl_reduce.control.channel import Channel
from cupynccl_reduce.control.frames import (
    MAX_GATHER_BYTES,
    MAX_NOTICE_BYTES,
    MAX_STATE_BYTES,
    Frame,
    Invitation,
    Kind,
)
from cupynccl_reduce.control.local import LocalControl
from cupynccl_reduce.control.sockets import Server
from cupynccl_reduce.meeting import Meeting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LIMIT_S = 60.0  # for what hangs
Control = Channel | LocalControl


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.005)


def together(*works: Callable[[], Any]) -> list[Any]:
    """Run each on a thread of its own; return what they return, or raise the first's error."""
    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result(LIMIT_S) for future in [pool.submit(work) for work in works]]


def channels(world_size: int) -> list[Channel]:
    server = Server("127.0.0.1")
    sources: list[Server | Invitation] = [server] + [server.invitation] * (world_size - 1)
    return together(*(lambda r=r, s=s: Channel(r, world_size, s) for r, s in enumerate(sources)))


def close_all(ends: list[Any]) -> None:
    for end in reversed(ends):  # rank 0 last: it takes the others' goodbyes
        end.close()


@pytest.fixture(params=["channel", "local"])
def make(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[int], list[Any]]]:
    monkeypatch.setattr(service_module, "LINGER_MS", 100)  # for a goodbye that nobody takes
    made: list[Any] = []

    def make(world_size: int) -> list[Any]:
        if request.param == "channel":
            made.extend(channels(world_size))
        else:
            meeting = Meeting(world_size)
            made.extend(LocalControl(meeting, rank) for rank in range(world_size))
        return made

    yield make
    close_all(made)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_gather_show_and_tell(make: Callable[[int], list[Any]], world_size: int) -> None:
    ends = make(world_size)
    others = {rank: [r for r in range(world_size) if r != rank] for rank in range(world_size)}
    sizes = (0, 1, 1000, 2 << 20, 5)

    def payloads(turn: int) -> list[bytes]:
        return [
            (b"%d of %d;" % (rank, turn) * sizes[turn])[: sizes[turn] + rank]
            for rank in range(world_size)
        ]

    def work(rank: int) -> None:
        for turn in range(len(sizes)):
            assert ends[rank].all_gather(payloads(turn)[rank]) == payloads(turn)
        states = [b"state %d" % r for r in range(world_size)]
        ends[rank].publish(states[rank])
        until(lambda: [peer.state for peer in ends[rank].peers()] == states)
        assert [peer.rank for peer in ends[rank].peers()] == list(range(world_size))
        assert all(peer.link != "left" for peer in ends[rank].peers())
        for number in range(5):
            ends[rank].tell(b"%d" % number)
        told: list[tuple[int, bytes]] = []
        until(lambda: told.extend(ends[rank].notices()) or len(told) >= 5 * (world_size - 1))
        for other in others[rank]:
            assert [n for origin, n in told if origin == other] == [b"%d" % n for n in range(5)]
        assert {origin for origin, _ in told} == set(others[rank])
        assert ends[rank].notices() == []

    together(*(lambda rank=rank: work(rank) for rank in range(world_size)))


@pytest.mark.parametrize("leaver", [0, 2])
def test_who_closes_has_left_with_its_last_state(
    make: Callable[[int], list[Any]], leaver: int
) -> None:
    ends = make(3)
    ends[leaver].publish(b"last")
    ends[leaver].close()
    ends[leaver].close()
    for end in (end for end in ends if end is not ends[leaver]):
        until(lambda end=end: end.peers()[leaver].link == "left")
        assert end.peers()[leaver].state == b"last"
        with pytest.raises(CommunicationError) as caught:
            end.all_gather(b"")
        if isinstance(end, Channel):
            assert caught.value.ranks == (leaver,)


def test_a_state_that_comes_after_close_does_not_bring_a_rank_back() -> None:
    meeting = Meeting(2)
    ends = [LocalControl(meeting, rank) for rank in range(2)]
    ends[1].close()
    ends[1].publish(b"late")
    assert ends[0].peers()[1].link == "left"


@pytest.mark.parametrize("rank", [0, 1])
def test_abort_frees_who_waits_on_that_rank_and_notices_still_go(
    make: Callable[[int], list[Any]], rank: int
) -> None:
    ends = make(2)
    waiting, other = ends[rank], ends[1 - rank]
    came = threading.Event()

    def wait() -> str:
        came.set()
        with pytest.raises(CommunicationError) as caught:
            waiting.all_gather(b"")
        return str(caught.value)

    def abort() -> None:
        assert came.wait(LIMIT_S)
        waiting.abort()
        waiting.abort()

    assert "left" in together(wait, abort)[0]
    with pytest.raises(CommunicationError):
        waiting.all_gather(b"")
    waiting.tell(b"why")
    told: list[tuple[int, bytes]] = []
    until(lambda: told.extend(other.notices()) or told == [(rank, b"why")])


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_abort_frees_all_who_wait_now_or_later(make: Callable[[int], list[Any]], rank: int) -> None:
    ends = make(3)
    others = [end for end in ends if end is not ends[rank]]
    coming = threading.Barrier(3)

    def wait(end: Any) -> None:
        coming.wait(LIMIT_S)
        for _ in range(2):
            with pytest.raises(CommunicationError) as caught:
                end.all_gather(b"")
            if isinstance(end, Channel):
                assert str(caught.value) == f"rank {rank} left this world after a failure"
                assert caught.value.ranks == (rank,)
        end.publish(b"here")

    def abort() -> None:
        coming.wait(LIMIT_S)
        ends[rank].abort()

    together(abort, *(lambda end=end: wait(end) for end in others))
    until(lambda: [peer.state for peer in ends[rank].peers()].count(b"here") == 2)
    assert "left" not in {peer.link for peer in ends[rank].peers()}


def test_abort_takes_nothing_back(make: Callable[[int], list[Any]]) -> None:
    ends = make(3)

    def gather_and_abort() -> list[bytes]:
        everyone = ends[1].all_gather(b"1")
        ends[1].abort()
        return everyone

    works = [lambda r=r: ends[r].all_gather(b"%d" % r) for r in range(3)]
    works[1] = gather_and_abort
    assert together(*works) == [[b"0", b"1", b"2"]] * 3


def test_what_is_too_long_is_refused_alike(make: Callable[[int], list[Any]]) -> None:
    (end,) = make(1)
    for call, limit in (
        (end.publish, MAX_STATE_BYTES),
        (end.tell, MAX_NOTICE_BYTES),
        (end.all_gather, MAX_GATHER_BYTES),
    ):
        call(bytes(limit))
        with pytest.raises(LayoutError, match=f"at most {limit} bytes, not {limit + 1}"):
            call(bytes(limit + 1))
    assert end.all_gather(b"x") == [b"x"]


@pytest.mark.parametrize("rank", [0, 1])
def test_close_frees_who_waits_for_that_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "LINGER_MS", 100)  # for a goodbye that nobody takes
    ends = channels(2)

    def wait() -> tuple[int, ...]:
        with pytest.raises(CommunicationError, match=f"rank {rank} has left") as caught:
            ends[1 - rank].all_gather(b"")
        return caught.value.ranks

    assert together(wait, ends[rank].close)[0] == (rank,)
    close_all(ends)


@pytest.mark.parametrize("identity", [b"r9", b"r0", b"", b"r1", b"not a rank"])
def test_who_has_the_keys_and_is_nobody_changes_nothing(identity: bytes) -> None:
    """Its messages are seen to arrive, but for "r1": there is one already, and it stays."""
    server = Server("127.0.0.1")
    told = server.invitation
    ends: list[Any] = together(lambda: Channel(0, 2, server), lambda: Channel(1, 2, told))
    arrived: list[bytes] = []
    take = ends[0]._service.node.take

    def spy(sender: bytes, frame: Frame, *rest: Any) -> Any:
        if frame.body.startswith(b"lie"):
            arrived.append(sender)
        return take(sender, frame, *rest)

    ends[0]._service.node.take = spy
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        if identity:
            stranger.identity = identity
        stranger.curve_serverkey = told.server_key
        stranger.curve_publickey, stranger.curve_secretkey = told.public_key, told.secret_key
        stranger.linger = 0
        stranger.connect(f"tcp://{told.host}:{told.port}")
        for number in range(100):
            for kind in Kind:
                stranger.send(Frame(kind, 1, 1000 + number, 2, b"lie").encode())
            stranger.send(b"garbage" * number)
            stranger.send_multipart([b"two", b"parts"])
        if identity != b"r1":
            until(lambda: len(arrived) == 100 * len(Kind))
        for _ in range(5):
            both = together(lambda: ends[0].all_gather(b"a"), lambda: ends[1].all_gather(b"b"))
            assert both == [[b"a", b"b"]] * 2
    assert b"r1" not in arrived
    assert [peer.link for peer in ends[0].peers()] == ["up", "up"]
    assert all(peer.state == b"" for peer in ends[0].peers())
    assert ends[0].notices() == []
    assert ends[1].notices() == []
    close_all(ends)


def test_a_wrong_server_key_never_joins_and_all_say_who_did_not_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hub, "SILENT_S", 0.5)
    monkeypatch.setattr(service_module, "LINGER_MS", 100)
    server = Server("127.0.0.1")
    told = server.invitation
    keys = told.public_key, told.secret_key
    wrong = Invitation(told.host, told.port, zmq.curve_keypair()[0], *keys)

    def join(rank: int, source: Server | Invitation) -> tuple[str, tuple[int, ...]]:
        with pytest.raises(CommunicationError) as caught:
            Channel(rank, 3, source, timeout_s=1.0)
        return str(caught.value), caught.value.ranks

    errors = together(lambda: join(0, server), lambda: join(1, wrong), lambda: join(2, told))
    # Rank 1 knows of nobody but rank 0, which never answered.
    assert 1 in errors[0][1]
    assert "rank 1" in errors[0][0]
    assert 0 in errors[1][1]
    assert "rank 0" in errors[1][0]
    assert set(errors[2][1]) & {0, 1}
    for text, _ in errors:
        for key in (told.server_key, *keys, wrong.server_key):
            assert key.decode() not in text


def test_keys_are_in_no_text(
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys: list[bytes] = []
    make_keys = zmq.curve_keypair

    def spy() -> tuple[bytes, bytes]:
        keys.extend(pair := make_keys())
        return pair

    monkeypatch.setattr(zmq, "curve_keypair", spy)
    caplog.set_level(logging.DEBUG)
    server = Server("127.0.0.1")
    told = server.invitation
    ends: list[Any] = together(lambda: Channel(0, 2, server), lambda: Channel(1, 2, told))
    things = [server, told, server.socket, server.context, *ends]
    things += [thing for end in ends for thing in vars(end).values()]
    texts = [f(thing) for thing in things for f in (repr, str, "{}".format)]
    texts += [thread.name for thread in threading.enumerate()]
    close_all(ends)
    texts += [caplog.text, *capfd.readouterr()]
    assert len(keys) >= 4
    for key in keys:
        assert len(key) == 40
        for text in texts:
            assert key.decode() not in text
            assert key.hex() not in text
