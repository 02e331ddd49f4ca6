"""Hub and leaf as plain state: whatever they do not accept changes nothing."""

from __future__ import annotations

import copy
import random
from collections import deque
from typing import Any

import pytest

from cupynccl_reduce.control.frames import MAX_NOTICE_BYTES, Frame, Kind, Row, encode_rows
from cupynccl_reduce.control.hub import GRACE_S, SILENT_S, Hub, Leaf
from cupynccl_reduce.control.pulse import QUIET_S

WORLD_SIZE = 4


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class End:
    """A hub or a leaf with all that it may change."""

    def __init__(self, rank: int, world_size: int = WORLD_SIZE) -> None:
        self.clock = Clock()
        self.node = Hub(world_size, self.clock) if rank == 0 else Leaf(rank, world_size, self.clock)
        self.notices: deque[tuple[int, bytes]] = deque()
        self.gathered: dict[int, list[bytes]] = {}

    def take(self, frame: Frame, sender: bytes = b"", fd: int = 5) -> list[tuple[bytes, bytes]]:
        return self.node.take(sender, frame, fd, self.notices, self.gathered)

    def own(self, kind: Kind, turn: int = 0, body: bytes = b"") -> list[tuple[bytes, bytes]]:
        return self.node.own(kind, turn, body, self.gathered)

    def links(self) -> list[str]:
        return [peer.link for peer in self.node.peers()]

    def snapshot(self) -> Any:
        def plain(thing: Any) -> Any:
            if hasattr(thing, "__dict__"):
                return {name: plain(value) for name, value in vars(thing).items()}
            return [plain(one) for one in thing] if isinstance(thing, list) else thing

        known = {name: value for name, value in vars(self.node).items() if name != "_clock"}
        return copy.deepcopy(
            ({name: plain(value) for name, value in known.items()}, self.notices, self.gathered)
        )


def beat(rank: int, number: int, body: bytes = b"") -> Frame:
    return Frame(Kind.BEAT, rank, number, 0, body)


def table(number: int, *rows: Row) -> Frame:
    return Frame(Kind.TABLE, 0, number, 0, encode_rows(rows or [Row()] * WORLD_SIZE))


def refuses(end: End, frame: Frame, sender: bytes = b"") -> None:
    before = end.snapshot()
    assert end.take(frame, sender) == []
    assert end.snapshot() == before


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize(
    ("sender", "rank"),
    [(b"r9", 9), (b"r0", 0), (b"", 1), (b"stranger", 1), (b"r1", 2), (b"r2", 1), (b"r01", 1)],
)
def test_strangers_change_nothing(kind: Kind, sender: bytes, rank: int) -> None:
    refuses(End(0), Frame(kind, rank, 1, 1, b"lies"), sender)


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("number", [0, 1, 4, 5])
def test_replays_change_nothing(kind: Kind, number: int) -> None:
    hub, leaf = End(0), End(1)
    hub.take(beat(1, 5, b"new"), b"r1")
    refuses(hub, Frame(kind, 1, number, 1, b"old"), b"r1")
    leaf.take(table(5))
    leaf.own(Kind.GATHER, 1)
    refuses(leaf, Frame(kind, 0, number, 1, b"old"))


@pytest.mark.parametrize("turn", [0, 1, 3, 4, 1 << 60])
def test_skipped_and_repeated_turns_change_nothing(turn: int) -> None:
    hub = End(0)
    hub.take(Frame(Kind.GATHER, 1, 1, 1, b"x"), b"r1")
    refuses(hub, Frame(Kind.GATHER, 1, 2, turn, b"y"), b"r1")
    hub.take(Frame(Kind.GATHER, 1, 2, 2, b"y"), b"r1")  # the number was not used up
    assert hub.node.turns() == [0, 2, 0, 0]


def test_wrong_kinds_change_nothing() -> None:
    hub, leaf = End(0), End(1)
    for kind in (Kind.TABLE, Kind.GATHERED):
        refuses(hub, Frame(kind, 1, 1, 1, encode_rows([Row()] * WORLD_SIZE)), b"r1")
    for kind in (Kind.BEAT, Kind.GATHER):
        refuses(leaf, Frame(kind, 0, 1, 1, b"x"))


def test_what_a_leaf_cannot_use_changes_nothing() -> None:
    leaf = End(1)
    good = table(1).body
    for frame in (
        Frame(Kind.TABLE, 0, 1, 0, good[:-1]),
        Frame(Kind.TABLE, 0, 1, 0, good + b"x"),
        Frame(Kind.TABLE, WORLD_SIZE, 1, 0, good),
        Frame(Kind.NOTICE, WORLD_SIZE, 1, 0, b"of nobody"),
        Frame(Kind.NOTICE, 0, 1, 0, bytes(MAX_NOTICE_BYTES + 1)),
        Frame(Kind.GATHERED, 0, 1, 1, bytes(4 * WORLD_SIZE)),  # it has not come to that turn
    ):
        refuses(leaf, frame)
    leaf.own(Kind.GATHER, 1, b"x")
    refuses(leaf, Frame(Kind.GATHERED, 0, 1, 2, bytes(4 * WORLD_SIZE)))
    refuses(leaf, Frame(Kind.GATHERED, 0, 1, 1, bytes(4 * WORLD_SIZE - 1)))
    leaf.take(Frame(Kind.GATHERED, 0, 1, 1, bytes(4 * WORLD_SIZE)))
    assert leaf.gathered == {1: [b""] * WORLD_SIZE}
    refuses(leaf, Frame(Kind.GATHERED, 0, 2, 1, bytes(4 * WORLD_SIZE)))


@pytest.mark.parametrize("kind", list(Kind))
def test_after_a_goodbye_nothing_changes(kind: Kind) -> None:
    hub, leaf = End(0), End(1)
    hub.take(Frame(Kind.GOODBYE, 1, 1, 0, b"last"), b"r1")
    refuses(hub, Frame(kind, 1, 2, 1, b"after"), b"r1")
    leaf.own(Kind.GATHER, 1)
    leaf.take(Frame(Kind.GOODBYE, 0, 1))
    body = {Kind.TABLE: table(2).body, Kind.GATHERED: bytes(4 * WORLD_SIZE)}.get(kind, b"after")
    refuses(leaf, Frame(kind, 0, 2, 1, body))
    for end, rank in ((hub, 1), (leaf, 0)):
        end.node.dropped(5)
        end.clock.now += 100
        assert end.links()[rank] == "left"


def test_what_is_random_changes_a_hub_only_where_it_is_newer_and_its_sender_s() -> None:
    rng = random.Random(3)
    hub = End(0)
    newest, turns, left = [-1] * WORLD_SIZE, [0] * WORLD_SIZE, [False] * WORLD_SIZE
    taken = refused = 0
    for _ in range(1500):
        rank, sender = rng.randrange(WORLD_SIZE + 1), rng.randrange(WORLD_SIZE + 1)
        # Few say goodbye, else nobody is there any more to listen to.
        kind = rng.choice([*Kind] if rng.random() < 0.01 else [k for k in Kind if k < 6])
        number, turn = rng.randrange(4000), rng.randrange(4)
        if rng.random() < 0.5 and rank < WORLD_SIZE:
            sender, number, turn = rank, newest[rank] + rng.randrange(3), turns[rank] + 1
        accepted = (
            0 < rank < WORLD_SIZE
            and sender == rank
            and not left[rank]
            and number > newest[rank]
            and kind not in (Kind.TABLE, Kind.GATHERED)
            and (kind is not Kind.GATHER or turn == turns[rank] + 1)
        )
        frame = Frame(kind, rank, number, turn, b"%d" % number)
        if not accepted:
            refuses(hub, frame, b"r%d" % sender)
            refused += 1
            continue
        hub.take(frame, b"r%d" % sender)
        newest[rank] = number
        turns[rank] += kind is Kind.GATHER
        left[rank] = kind is Kind.GOODBYE
        assert hub.node.turns() == turns
        assert [link == "left" for link in hub.links()] == left
        taken += 1
    assert min(taken, refused) > 100
    assert hub.gathered == {}  # rank 0 never came


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)])
def test_a_gather_completes_once_with_everyones_payload_in_rank_order(
    order: tuple[int, ...],
) -> None:
    hub = End(0)
    leaves = {rank: End(rank) for rank in range(1, WORLD_SIZE)}
    for turn in range(1, 4):
        payloads = [b"%d of %d" % (rank, turn) * rank for rank in range(WORLD_SIZE)]
        sent: list[tuple[bytes, bytes]] = []
        for rank in order:
            assert sent == []
            assert turn not in hub.gathered
            if rank == 0:
                sent = hub.own(Kind.GATHER, turn, payloads[0])
                continue
            ((receiver, data),) = leaves[rank].own(Kind.GATHER, turn, payloads[rank])
            frame = Frame.decode(data)
            assert frame is not None
            assert receiver == b""
            sent = hub.take(frame, b"r%d" % rank)
            refuses(hub, frame, b"r%d" % rank)
        assert [receiver for receiver, _ in sent] == [b"r1", b"r2", b"r3"]
        for (_, data), leaf in zip(sent, leaves.values(), strict=True):
            frame = Frame.decode(data)
            assert frame is not None
            leaf.take(frame)
            refuses(leaf, frame)
        for end in (hub, *leaves.values()):
            assert end.gathered[turn] == payloads
    assert [list(end.gathered) for end in (hub, *leaves.values())] == [[1, 2, 3]] * WORLD_SIZE


def test_links_of_a_hub_go_up_silent_lost_and_back_until_they_left() -> None:
    hub = End(0, 2)
    hub.take(beat(1, 1), b"r1", fd=5)
    for number in range(2, 5):
        assert hub.links() == ["up", "up"]
        hub.clock.now += SILENT_S
        assert hub.links() == ["up", "up"]  # just in time
        hub.clock.now += 0.1
        assert hub.links() == ["up", "silent"]
        hub.node.dropped(6)  # another connection
        hub.clock.now += GRACE_S + 0.1
        assert hub.links() == ["up", "silent"]
        hub.node.dropped(5)
        hub.clock.now += GRACE_S
        assert hub.links() == ["up", "silent"]  # it may come back
        hub.clock.now += 0.1
        assert hub.links() == ["up", "lost"]
        hub.take(beat(1, number), b"r1", fd=5)
    hub.take(Frame(Kind.GOODBYE, 1, 9, 0, b"last"), b"r1")
    hub.node.dropped(5)
    hub.clock.now += 100
    assert hub.links() == ["up", "left"]
    assert hub.node.peers()[1].state == b"last"


def test_links_of_a_leaf_are_the_table_s_and_rank_0_s_its_own() -> None:
    leaf = End(1)
    leaf.node.state = b"mine"
    rows = [Row("up", 0.0, 1, b"zero"), Row("lost"), Row("silent", 3.0), Row("left", 7.0)]
    for number in range(1, 4):
        leaf.take(table(number, *rows))
        assert leaf.links() == ["up", "up", "silent", "left"]  # of itself it knows better
        assert leaf.node.peers()[1].state == b"mine"
        leaf.clock.now += SILENT_S + 0.1
        assert leaf.links() == ["silent", "up", "silent", "left"]
        assert leaf.node.peers()[2].age_s == pytest.approx(3.0 + SILENT_S + 0.1)
        leaf.node.dropped(5)
        assert leaf.links()[0] == "silent"
        leaf.clock.now += GRACE_S + 0.1
        assert leaf.links() == ["lost", "up", "silent", "left"]
    leaf.take(table(4))
    assert leaf.links() == ["up"] * WORLD_SIZE


def test_who_left_is_sent_nothing_and_a_goodbye_of_rank_0_comes_with_a_last_table() -> None:
    hub = End(0)
    hub.take(Frame(Kind.GOODBYE, 2, 1), b"r2")
    assert [receiver for receiver, _ in hub.node.beat()] == [b"r1", b"r3"]
    assert [receiver for receiver, _ in hub.own(Kind.NOTICE, 0, b"news")] == [b"r1", b"r3"]
    leaf = End(1)
    for receiver, data in hub.own(Kind.GOODBYE):
        frame = Frame.decode(data)
        assert frame is not None
        if receiver == b"r1":
            leaf.take(frame)
    assert leaf.links() == ["left", "up", "left", "up"]


def test_a_beat_is_sent_for_news_or_after_a_while() -> None:
    hub, leaf = End(0, 2), End(1, 2)
    for end in (hub, leaf):
        assert len(end.node.beat()) == 1
        assert end.node.beat() == []
        end.node.state = b"new"
        assert len(end.node.beat()) == 1
        assert end.node.beat() == []
        end.clock.now += QUIET_S
        assert len(end.node.beat()) == 1
    # Whoever lost a connection and has it again is waited for, and says so at once.
    hub.take(beat(1, 1), b"r1")
    leaf.take(Frame(Kind.TABLE, 0, 1, 0, encode_rows([Row()] * 2)))
    for end in (hub, leaf):
        end.node.beat()
        end.node.dropped(5)
        assert len(end.node.beat()) == 1
        assert end.node.beat() == []
    hub.take(beat(1, 2), b"r1")
    leaf.take(Frame(Kind.TABLE, 0, 2, 0, encode_rows([Row()] * 2)))
    for end in (hub, leaf):
        assert len(end.node.beat()) == 1
        assert end.node.beat() == []


def test_rank_0_is_settled_when_all_that_answer_have_what_all_came_to() -> None:
    hub = End(0, 3)
    assert hub.node.settled()
    leaves = {rank: End(rank, 3) for rank in (1, 2)}
    hub.own(Kind.GATHER, 1, b"0")
    assert hub.node.settled()  # nobody can have it yet
    for rank, leaf in leaves.items():
        sent = hub.take(Frame(Kind.GATHER, rank, 1, 1, b"x"), b"r%d" % rank)
        leaf.own(Kind.GATHER, 1, b"x")
    assert not hub.node.settled()
    frame = Frame.decode(sent[0][1])
    assert frame is not None
    ((_, answer),) = leaves[1].take(frame)
    got = Frame.decode(answer)
    assert got is not None
    assert (got.kind, got.turn) == (Kind.BEAT, 1)
    hub.take(Frame(Kind.BEAT, 1, 2, 1), b"r1")
    assert not hub.node.settled()  # rank 2 may be receiving still
    silent, lost, left, has = (copy.deepcopy(hub) for _ in range(4))
    silent.clock.now += SILENT_S + 0.1
    lost.node.dropped(5)
    lost.clock.now += GRACE_S + 0.1
    left.take(Frame(Kind.GOODBYE, 2, 2), b"r2")
    has.take(Frame(Kind.BEAT, 2, 2, 1), b"r2")
    for end in (silent, lost, left, has):
        assert end.node.settled()


def test_the_first_abort_goes_to_all_the_others_and_no_second_one() -> None:
    hub = End(0)
    sent = hub.take(Frame(Kind.ABORT, 2, 1), b"r2")
    assert [receiver for receiver, _ in sent] == [b"r1", b"r3"]
    assert hub.take(Frame(Kind.ABORT, 1, 1), b"r1") == []
    assert hub.node.aborted == 2
    frame = Frame.decode(sent[0][1])
    assert frame is not None
    leaf = End(1)
    leaf.take(frame)
    leaf.take(Frame(Kind.ABORT, 3, 9))
    assert leaf.node.aborted == 2
    assert leaf.links() == hub.links() == ["up"] * WORLD_SIZE
    assert [receiver for receiver, _ in End(0).own(Kind.ABORT)] == [b"r1", b"r2", b"r3"]


def test_a_large_world_that_beats_more_slowly_is_given_more_time() -> None:
    hub, leaf = End(0, 640), End(1, 640)
    leaf.take(Frame(Kind.TABLE, 0, 1, 0, encode_rows([Row()] * 640)))
    for end, other in ((hub, 1), (leaf, 0)):
        end.clock.now += 10 * SILENT_S
        assert end.links()[other] == "up"
        end.clock.now += 0.1
        assert end.links()[other] == "silent"
