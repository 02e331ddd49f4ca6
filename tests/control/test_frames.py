"""Messages of the channel: what is none changes nothing."""

from __future__ import annotations

import random
from collections import deque

import pytest

from cupynccl_reduce.control.frames import (
    MAX_STATE_BYTES,
    Frame,
    Invitation,
    Kind,
    Row,
    decode_payloads,
    decode_rows,
    encode_payloads,
    encode_rows,
)
from cupynccl_reduce.control.hub import GRACE_S, SILENT_S, Hub, Leaf


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def frame(kind: Kind, rank: int, number: int, turn: int = 0, body: bytes = b"") -> Frame:
    return Frame(kind, rank, number, turn, body)


def snapshot(hub: Hub) -> list[object]:
    return [hub.peers(), hub.turns()]


@pytest.mark.parametrize("kind", list(Kind))
def test_a_frame_comes_back(kind: Kind) -> None:
    sent = Frame(kind, 3, 1 << 40, 7, b"x" * 10)
    assert Frame.decode(sent.encode()) == sent


def test_what_is_no_frame_is_none() -> None:
    good = Frame(Kind.BEAT, 1, 1, 0, b"state").encode()
    assert Frame.decode(b"") is None
    assert Frame.decode(good[:10]) is None
    assert Frame.decode(b"XXXX" + good[4:]) is None
    assert Frame.decode(good[:4] + b"\x00" + good[5:]) is None
    assert Frame.decode(good + b"x" * MAX_STATE_BYTES) is None


def test_random_bytes_never_raise_and_change_nothing() -> None:
    rng = random.Random(1)
    clock = Clock()
    hub, leaf = Hub(3, clock), Leaf(1, 3, clock)
    before = snapshot(hub), leaf.peers()
    good = frame(Kind.TABLE, 0, 5, 0, encode_rows([Row()] * 3)).encode()
    taken = 0
    for _ in range(5000):
        data = bytearray(rng.randbytes(rng.randrange(80)) if rng.random() < 0.5 else good)
        if data and rng.random() < 0.5:
            data = data[: rng.randrange(len(data))]
        decoded = Frame.decode(bytes(data))
        if decoded is None:
            continue
        taken += 1
        # A stranger to the hub; to a leaf, a table that is cut off.
        notices: deque[tuple[int, bytes]] = deque()
        assert hub.take(b"stranger", decoded, 9, notices, {}) == []
        if decoded.body != encode_rows([Row()] * 3):
            assert leaf.take(b"", decoded, 9, notices, {}) == []
        assert not notices
    assert taken > 100
    assert (snapshot(hub), leaf.peers()) == before


def test_tables_and_payloads_come_back_or_are_none() -> None:
    rows = [Row("up", 0.5, 3, b"abc"), Row("lost", 9.0, 1, b""), Row("left", 0.0, 0, b"x" * 256)]
    body = encode_rows(rows)
    assert decode_rows(body, 3) == rows
    payloads = [b"", b"a" * 1000, b"bc"]
    packed = encode_payloads(payloads)
    assert decode_payloads(packed, 3) == payloads
    for cut in (1, 7, len(body) - 1):
        assert decode_rows(body[:cut], 3) is None
    assert decode_rows(body, 2) is None
    assert decode_rows(b"\xff" + body[1:], 3) is None
    for wrong in (packed[:-1], packed + b"x", packed[:3]):
        assert decode_payloads(wrong, 3) is None


def test_an_invitation_comes_back_and_shows_no_key() -> None:
    invitation = Invitation("127.0.0.1", 4242, b"s" * 40, b"p" * 40, b"k" * 40)
    assert Invitation.decode(invitation.encode()) == invitation
    assert Invitation.decode(b"no channel") is None
    assert "k" * 40 not in repr(invitation)


def test_a_hub_takes_each_message_of_a_known_rank_once() -> None:
    clock = Clock()
    hub = Hub(3, clock)
    notices: deque[tuple[int, bytes]] = deque()
    beat = frame(Kind.BEAT, 1, 1, 0, b"one")
    hub.take(b"r1", beat, 5, notices, {})
    assert hub.peers()[1].state == b"one"
    before = snapshot(hub)
    for sender, wrong in (
        (b"r1", beat),  # a replay
        (b"r1", frame(Kind.BEAT, 2, 9, 0, b"other's")),  # under another's name
        (b"r7", frame(Kind.BEAT, 7, 9, 0, b"nobody's")),
        (b"r1", frame(Kind.TABLE, 1, 9, 0, b"")),  # what only rank 0 says
        (b"r1", frame(Kind.GATHERED, 1, 9, 0, b"")),
        (b"r1", frame(Kind.GATHER, 1, 9, 2, b"x")),  # a turn is skipped
    ):
        assert hub.take(sender, wrong, 5, notices, {}) == []
        assert snapshot(hub) == before
    hub.take(b"r1", frame(Kind.GOODBYE, 1, 10, 0, b"last"), 5, notices, {})
    assert (hub.peers()[1].link, hub.peers()[1].state) == ("left", b"last")
    hub.take(b"r1", frame(Kind.BEAT, 1, 11, 0, b"after"), 5, notices, {})
    assert hub.peers()[1].state == b"last"


def test_payloads_of_a_turn_go_out_once_and_in_rank_order() -> None:
    hub = Hub(3, Clock())
    gathered: dict[int, list[bytes]] = {}
    notices: deque[tuple[int, bytes]] = deque()
    assert hub.take(b"r2", frame(Kind.GATHER, 2, 1, 1, b"two"), 5, notices, gathered) == []
    assert hub.own(Kind.GATHER, 1, b"zero", gathered) == []
    sent = hub.take(b"r1", frame(Kind.GATHER, 1, 1, 1, b"one"), 6, notices, gathered)
    assert gathered == {1: [b"zero", b"one", b"two"]}
    assert sorted(receiver for receiver, _ in sent) == [b"r1", b"r2"]
    leaf = Leaf(1, 3, Clock())
    leaf.own(Kind.GATHER, 1, b"one", {})
    received: dict[int, list[bytes]] = {}
    answer = Frame.decode(sent[0][1])
    assert answer is not None
    leaf.take(b"", answer, 0, notices, received)
    assert received == gathered
    assert hub.turns() == [1, 1, 1]


def test_links_follow_what_is_heard() -> None:
    clock = Clock()
    hub = Hub(2, clock)
    notices: deque[tuple[int, bytes]] = deque()

    def beat(number: int, fd: int = 5) -> None:
        hub.take(b"r1", frame(Kind.BEAT, 1, number, 0, b""), fd, notices, {})

    beat(1)
    assert hub.peers()[1].link == "up"
    clock.now += SILENT_S + 0.1
    assert hub.peers()[1].link == "silent"
    beat(2)
    assert hub.peers()[1].link == "up"
    hub.dropped(99)  # somebody else's connection
    hub.dropped(5)
    assert hub.peers()[1].link == "up"  # it may come back
    clock.now += GRACE_S + 0.1
    assert hub.peers()[1].link == "lost"
    beat(3, fd=6)
    assert hub.peers()[1].link == "up"
    leaf = Leaf(1, 2, clock)
    leaf.dropped(0)
    clock.now += GRACE_S + 0.1
    assert leaf.peers()[0].link == "lost"


def test_a_notice_goes_to_all_the_others_under_its_origins_rank() -> None:
    hub = Hub(4, Clock())
    notices: deque[tuple[int, bytes]] = deque()
    sent = hub.take(b"r2", frame(Kind.NOTICE, 2, 1, 0, b"news"), 5, notices, {})
    assert list(notices) == [(2, b"news")]
    assert sorted(receiver for receiver, _ in sent) == [b"r1", b"r3"]
    leaf = Leaf(1, 4, Clock())
    told: deque[tuple[int, bytes]] = deque()
    for _, data in sent[:1]:
        decoded = Frame.decode(data)
        assert decoded is not None
        leaf.take(b"", decoded, 0, told, {})
        leaf.take(b"", decoded, 0, told, {})  # a replay
    assert list(told) == [(2, b"news")]
