"""The last launches of this rank: what was queued, what has started, what is done. No threads."""

from __future__ import annotations

import json
import struct
import threading
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["Flight", "Launched", "State"]

KEEP = 64
NAMED = 5
DIGESTS = 4096  # a rank may run far ahead of another
_STATE = struct.Struct("=4sQQQQQf8s")  # magic, then the fields of State
_MAGIC = b"CNS1"


@dataclass(slots=True)
class Launched:
    """One launch, numbered from 1. Times are seconds of the flight's clock, when first seen."""

    number: int
    what: str  # "reduce", "gather", "norm" or "clip"
    bucket: int
    dtype: str
    nbytes: int
    calls: int
    names: Sequence[str]
    digest: bytes
    queued_at: float
    started: Any = None  # events; None once they have passed
    done: Any = None
    started_at: float | None = None
    done_at: float | None = None

    def describe(self) -> str:
        """Return what was launched, for a sentence."""
        more = f" and {len(self.names) - NAMED} more" if len(self.names) > NAMED else ""
        named = ", ".join(map(repr, self.names[:NAMED])) + more
        return (
            f"launch {self.number} ({self.what} of bucket {self.bucket}: {named}; "
            f"{self.nbytes:,} bytes of {self.dtype} in {self.calls} calls)"
        )

    def as_json(self) -> dict[str, Any]:
        """Return what a flight record keeps."""
        return {
            "number": self.number,
            "what": self.what,
            "bucket": self.bucket,
            "dtype": self.dtype,
            "nbytes": self.nbytes,
            "calls": self.calls,
            "names": list(self.names[:NAMED]),
            "parameters": len(self.names),
            "digest": self.digest.hex(),
            "queued_s": self.queued_at,
            "started_s": self.started_at,
            "done_s": self.done_at,
        }


@dataclass(frozen=True, slots=True)
class State:
    """What ranks tell each other of their flights: counts of launches, and a digest of all."""

    step: int = 0
    called: int = 0  # one more than queued while the host is inside a launch
    queued: int = 0
    started: int = 0
    done: int = 0
    running_s: float = 0.0  # of the oldest launch that has started and is not done
    digest: bytes = bytes(8)  # of all that are queued

    def encode(self) -> bytes:
        """Return it as bytes."""
        counts = self.step, self.called, self.queued, self.started, self.done
        return _STATE.pack(_MAGIC, *counts, self.running_s, self.digest)

    @classmethod
    def decode(cls, data: bytes) -> State | None:
        """Return it, or None if `data` is none."""
        if len(data) != _STATE.size or data[: len(_MAGIC)] != _MAGIC:
            return None
        state = cls(*_STATE.unpack(data)[1:])
        ordered = state.done <= state.started <= state.queued <= state.called
        return state if ordered and 0 <= state.running_s < float("inf") else None


class Flight:
    """Counts and keeps launches. `launch` is called by the engine, the rest by the watchdog.

    Args:
        make_event: returns a new protocols.Event.
        clock: gives seconds.
    """

    def __init__(
        self, make_event: Callable[[], Any], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._make_event = make_event
        self._clock = clock
        self._lock = threading.Lock()
        self._last: deque[Launched] = deque(maxlen=KEEP)
        self._flying: deque[Launched] = deque()
        self._calling: Launched | None = None
        self._events: list[Any] = []  # passed: to be recorded again
        self._digests: deque[bytes] = deque([bytes(8)], maxlen=DIGESTS)  # the last is of `queued`
        self._told: dict[tuple[Any, ...], bytes] = {}
        self._queued = self._started = self._done = 0
        self.step = 0

    @contextmanager
    def launch(
        self,
        stream: Any,
        *,
        what: str,
        bucket: int,
        dtype: str,
        nbytes: int,
        calls: int,
        names: Sequence[str],
    ) -> Iterator[None]:
        """Note what the block queues on `stream`, once it has. Does not block the host."""
        fields = what, bucket, dtype, nbytes, calls
        told = self._told.get(fields)
        if told is None:
            if len(self._told) >= DIGESTS:  # arrival order may ask for ever new ones
                self._told.clear()
            told = self._told[fields] = repr(fields).encode()
        digest = blake2b(self._digests[-1] + told, digest_size=8).digest()
        with self._lock:
            started = self._events.pop() if self._events else self._make_event()
            done = self._events.pop() if self._events else self._make_event()
            number = self._queued + 1
            launched = Launched(number, *fields, names, digest, self._clock(), started, done)
            self._calling = launched
        try:
            started.record(stream)
            yield
            done.record(stream)
        except BaseException:
            self._calling = None
            raise
        with self._lock:
            self._calling = None
            self._queued = number
            self._digests.append(digest)
            self._last.append(launched)
            self._flying.append(launched)

    def poll(self) -> None:
        """Look which launches have started and ended. Raises what querying an event raises."""
        with self._lock:
            now = self._clock()
            while self._flying:
                first = self._flying[0]
                if first.started_at is None:
                    if not first.started.done:
                        return
                    first.started_at = now
                    self._started += 1
                if not first.done.done:
                    return
                first.done_at = now
                self._done += 1
                self._events += [first.started, first.done]
                first.started = first.done = None
                self._flying.popleft()

    def state(self) -> State:
        """Return the counts of now."""
        with self._lock:
            return State(
                *(self.step, self._queued + (self._calling is not None)),
                *(self._queued, self._started, self._done),
                *(self._running()[1], self._digests[-1]),
            )

    def running(self) -> tuple[Launched | None, float]:
        """Return the oldest launch that is not done, and the seconds for which it has run.

        One that the host is still inside of runs too, once all before it are done.
        """
        with self._lock:
            return self._running()

    def digest(self, number: int) -> bytes | None:
        """Return the digest of all launches up to one, if it is still kept."""
        with self._lock:
            back = self._queued - number
            return self._digests[-1 - back] if 0 <= back < len(self._digests) else None

    def find(self, number: int) -> Launched | None:
        """Return a launch by its number, if it is still kept."""
        with self._lock:
            return next((one for one in self._last if one.number == number), None)

    def record(self) -> list[dict[str, Any]]:
        """Return the last launches, oldest first."""
        with self._lock:
            return [launched.as_json() for launched in self._last]

    def _running(self) -> tuple[Launched | None, float]:
        first = self._flying[0] if self._flying else self._calling
        if first is None:
            return None, 0.0
        if first is self._calling:
            return first, self._clock() - first.queued_at
        return first, 0.0 if first.started_at is None else self._clock() - first.started_at


def parse_record(data: object) -> list[dict[str, Any]]:
    """Return another rank's record; what is malformed in it is left out."""
    if not isinstance(data, list):
        return []
    numbers, words = ("number", "bucket", "nbytes", "calls"), ("what", "dtype", "digest")
    kinds = dict.fromkeys(numbers, int) | dict.fromkeys(words, str)
    return [
        entry
        for entry in data[:KEEP]
        if isinstance(entry, dict)
        and all(isinstance(entry.get(key), kind) for key, kind in kinds.items())
        and all(_is_flat(value) for value in entry.values())
    ]


def _is_flat(value: object) -> bool:
    """Whether it is a word, a number, nothing or a list of words: what a record is made of."""
    if isinstance(value, list):
        return all(isinstance(one, str) for one in value)
    return value is None or isinstance(value, (str, int, float))


def encode_notice(**fields: Any) -> bytes:
    """Return a notice as bytes."""
    return json.dumps(fields, separators=(",", ":")).encode()


def decode_notice(data: bytes) -> dict[str, Any]:
    """Return a notice, or {} if `data` is none."""
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}
