"""What is read from the wire is None or exactly what was sent: it never raises."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupynccl_reduce.control.frames import (
    LIMITS,
    LINKS,
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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WORD = st.integers(0, 2**64 - 1)
FRAMES = st.builds(
    Frame, st.sampled_from(Kind), st.integers(0, 2**32 - 1), WORD, WORD, st.binary(max_size=256)
)
ROWS = st.lists(
    st.builds(
        Row,
        st.sampled_from(LINKS),
        st.floats(0, allow_nan=False),
        WORD,
        st.binary(max_size=MAX_STATE_BYTES),
    ),
    max_size=5,
)
FRAME = Frame(Kind.GATHER, 3, 1 << 40, 7, b"payload").encode()
TABLE = encode_rows([Row("silent", 2.5, 3, b"abc"), Row("left", 0.0, 9), Row("up", 1e9, 1, b"z")])
PAYLOADS = encode_payloads([b"", b"abc", b"de"])
INVITATION = Invitation("127.0.0.1", 4242, b"s" * 40, b"p" * 40, b"k" * 40).encode()


def damaged(data: bytes) -> Iterator[bytes]:
    """Every truncation, every flipped bit, a byte too many, and random bytes."""
    for length in range(len(data)):
        yield data[:length]
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bytes(flipped)
    yield data + b"\x00"
    rng = random.Random(7)
    for _ in range(2000):
        yield data[: rng.randrange(len(data))] + rng.randbytes(rng.randrange(64))


def frame_again(data: bytes) -> bytes | None:
    frame = Frame.decode(data)
    if frame is None:
        return None
    assert isinstance(frame.kind, Kind)
    assert len(frame.body) <= LIMITS[frame.kind]
    return frame.encode()


def rows_again(data: bytes) -> bytes | None:
    rows = decode_rows(data, 3)
    if rows is None:
        return None
    assert len(rows) == 3
    assert all(row.link in LINKS and row.age_s >= 0 for row in rows)
    assert all(len(row.state) <= MAX_STATE_BYTES for row in rows)
    return encode_rows(rows)


def payloads_again(data: bytes) -> bytes | None:
    payloads = decode_payloads(data, 3)
    if payloads is None:
        return None
    assert len(payloads) == 3
    return encode_payloads(payloads)


def invitation_again(data: bytes) -> bytes | None:
    invitation = Invitation.decode(data)
    return None if invitation is None else invitation.encode()


@given(FRAMES)
def test_frames_come_back(frame: Frame) -> None:
    assert Frame.decode(frame.encode()) == frame


@given(ROWS)
def test_tables_come_back(rows: list[Row]) -> None:
    assert decode_rows(encode_rows(rows), len(rows)) == rows
    assert decode_rows(encode_rows(rows), len(rows) + 1) is None


@given(st.lists(st.binary(max_size=64), max_size=5))
def test_payloads_come_back(payloads: list[bytes]) -> None:
    assert decode_payloads(encode_payloads(payloads), len(payloads)) == payloads
    assert decode_payloads(encode_payloads(payloads), len(payloads) + 1) is None


@pytest.mark.parametrize(
    ("good", "again"),
    [
        (FRAME, frame_again),
        (TABLE, rows_again),
        (PAYLOADS, payloads_again),
        (INVITATION, invitation_again),
    ],
    ids=["frame", "table", "payloads", "invitation"],
)
def test_damage_gives_none_or_what_it_says(
    good: bytes, again: Callable[[bytes], bytes | None]
) -> None:
    assert again(good) == good
    answers = [(data, again(data)) for data in damaged(good)]
    assert all(answer in (None, data) for data, answer in answers)
    assert any(answer is None for _, answer in answers)


@given(st.binary(max_size=200))
def test_random_bytes_never_raise(data: bytes) -> None:
    for again in (frame_again, rows_again, payloads_again, invitation_again):
        assert again(data) in (None, data)


@pytest.mark.parametrize("kind", [Kind.BEAT, Kind.NOTICE, Kind.GOODBYE, Kind.GATHER])
def test_a_body_may_fill_its_limit_and_no_more(kind: Kind) -> None:
    full = Frame(kind, 1, 1, 0, bytes(LIMITS[kind]))
    assert Frame.decode(full.encode()) == full
    assert Frame.decode(full.encode() + b"x") is None
