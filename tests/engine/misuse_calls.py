"""Calls that a cycle, a reducer or a world refuses, and gradients that are none. No options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from engine.model import FLOATS
from engine.session import Misuse, Seat
from producers import CUDA, Producer
from strategies import numpy_dtype

from cupynccl_reduce import (
    CommunicationError,
    GradientError,
    GradientTypeError,
    ProtocolError,
    Reducer,
    Registry,
)

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CALLS", "HUGE", "NAN", "Table", "ones"]

NAN = float("nan")
HUGE = 10**400  # no float holds it


class Table(dict[str, Misuse]):
    """Misuse by name."""

    def refuse(
        self, name: str, when: str, call: Any, kind: Any, *words: str, about: str = ""
    ) -> None:
        """Add a bad call: when it may be tried, its error's class, and what the text holds."""
        assert name not in self
        self[name] = Misuse(when, call, kind, words, about)


CALLS = Table()


def ones(*shape: int, dtype: Any = "f4") -> np.ndarray:
    return np.ones(shape, dtype)


class Unreadable:
    """Raises when it is exported."""

    def __dlpack__(self, **_: Any) -> Any:
        raise ValueError("out of order")


class Uncapsuled:
    """Exports no capsule."""

    def __dlpack__(self, **_: Any) -> Any:
        return 5


def enter_twice(seat: Seat) -> None:
    with seat.reducer.backward():
        pass


def other_backward(seat: Seat) -> None:
    with Reducer(Registry(FLOATS, seat.world)) as other, other.backward():
        pass


GRADIENTS: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "transposed": (ones(3, 2), GradientError, ("'table' float32 (2, 3)", "float32 (3, 2)")),
    "flat": (ones(6), GradientError, ("(6,)",)),
    "one-axis-more": (ones(1, 2, 3), GradientError, ("(1, 2, 3)",)),
    "0-dim": (ones(), GradientError, ("float32 ()",)),
    "empty": (ones(0), GradientError, ("(0,)",)),
    "larger": (ones(4, 3), GradientError, ("(4, 3)", "hand over what is registered")),
    "float64": (ones(2, 3, dtype="f8"), GradientError, ("float64 (2, 3)",)),
    "float16": (ones(2, 3, dtype="f2"), GradientError, ("float16 (2, 3)",)),
    "bfloat16": (ones(2, 3, dtype=ml_dtypes.bfloat16), GradientError, ("bfloat16 (2, 3)",)),
    "int32": (ones(2, 3, dtype="i4"), GradientError, ("int32 (2, 3)",)),
    "int16": (ones(2, 3, dtype="i2"), GradientTypeError, ("int16", "cast it to one of")),
    "uint16": (ones(2, 3, dtype="u2"), GradientTypeError, ("uint16",)),
    "bool": (ones(2, 3, dtype="?"), GradientTypeError, ("bool",)),
    "complex64": (ones(2, 3, dtype="c8"), GradientTypeError, ("complex64",)),
    "longdouble": (ones(2, 3, dtype="g"), GradientTypeError, ("DLPack", "float32")),
    "float8": (ones(2, 3, dtype=ml_dtypes.float8_e5m2), GradientTypeError, ("DLPack",)),
    "big-endian": (ones(2, 3, dtype=">f4"), GradientTypeError, ("byte order",)),
    "objects": (ones(2, 3, dtype=object), GradientTypeError, ("DLPack", "bfloat16")),
    "dates": (np.zeros((2, 3), "M8[s]"), GradientTypeError, ("DLPack",)),
    "text": (np.zeros((2, 3), "U3"), GradientTypeError, ("DLPack",)),
    "records": (np.zeros((2, 3), "f4,f4"), GradientTypeError, ("DLPack",)),
    "none": (None, GradientTypeError, ("NoneType", "0-dim")),
    "nan": (NAN, GradientTypeError, ("float is not an array",)),
    "huge-int": (HUGE, GradientTypeError, ("int is not an array",)),
    "scalar": (np.float32(1), GradientTypeError, ("numpy.float32", "0-dim array")),
    "nested-list": ([[1.0] * 3] * 2, GradientTypeError, ("list",)),
    "bytes": (bytes(24), GradientTypeError, ("bytes",)),
    "memoryview": (memoryview(ones(2, 3)), GradientTypeError, ("memoryview",)),
    "its-type": (np.ndarray, GradientTypeError, ("type",)),
    "generator": ((x for x in ()), GradientTypeError, ("generator",)),
    "on-a-gpu": (Producer(ones(2, 3), device_type=CUDA), GradientError, ("cuda:0", "connect(")),
    "on-a-phone": (Producer(ones(2, 3), device_type=8), GradientTypeError, ("device type 8",)),
    "raises": (Unreadable(), GradientTypeError, ("ValueError: out of order",)),
    "no-capsule": (Uncapsuled(), GradientTypeError, ("int from __dlpack__",)),
}


def give(name: Any, grad: Any) -> Callable[[Seat], object]:
    return lambda s: s.reducer.reduce_grad(name, grad)


for _name, (_grad, _kind, _words) in GRADIENTS.items():
    _told = "'table' float32 (2, 3): ", *_words
    CALLS.refuse(f"gradient-{_name}", "inside", give("table", _grad), _kind, *_told)

NAMES: dict[str, Any] = {
    "unknown": "desk",
    "of-nothing": "",
    "in-capitals": "TABLE",
    "with-a-space": "table ",
    "none": None,
    "nan": NAN,
    "number": 1,
    "bytes": b"table",
    "tuple": ("table",),
    "list": ["table"],
    "gradient": ones(2, 3),
}


def skip(name: Any) -> Callable[[Seat], object]:
    return lambda s: s.reducer.skip_grad(name)


for _name, _value in NAMES.items():
    _told = repr(_value) if isinstance(_value, str) else type(_value).__name__
    _gives, _skips = give(_value, ones(2, 3)), skip(_value)
    CALLS.refuse(f"reduce_grad-name-{_name}", "inside", _gives, GradientError, _told)
    CALLS.refuse(f"skip_grad-name-{_name}", "inside", _skips, GradientError, _told)


def again(seat: Seat) -> None:
    spec = seat.registry[seat.names[0]].spec
    seat.reducer.reduce_grad(spec.name, ones(*spec.shape, dtype=numpy_dtype(spec.dtype)))


def skip_it(seat: Seat) -> None:
    seat.reducer.skip_grad(seat.names[-1])


CALLS.refuse(
    "second-gradient", "given", again, ProtocolError, "twice", "uses='many'", about="given"
)
CALLS.refuse("skip-after-it", "given", skip_it, ProtocolError, "instead of one", about="given")
CALLS.refuse("gradient-after-skip", "skipped", again, ProtocolError, "skip_grad()", about="skipped")
CALLS.refuse("second-skip", "skipped", skip_it, ProtocolError, "skip_grad()", about="skipped")
CALLS.refuse("gradient-after-flush", "late", again, ProtocolError, "before flush()", about="late")

INSIDE: dict[str, tuple[Any, str]] = {
    "wait": (lambda s: s.reducer.wait(), "wait() inside backward()"),
    "discard": (lambda s: s.reducer.discard(), "discard() inside backward()"),
    "norm": (lambda s: s.reducer.norm(), "norm() inside backward()"),
    "clip": (lambda s: s.reducer.clip(1.0), "clip() inside backward()"),
    "close": (lambda s: s.reducer.close(), "close() inside backward()"),
    "backward": (enter_twice, "backward() inside backward()"),
    "gather": (lambda s: s.registry.gather(s.registry.shards), "gather() inside backward()"),
    "world-close": (lambda s: s.world.close(), "close() inside backward()"),
    "other-reducer": (other_backward, "another reducer"),
}
for _name, (_do, _word) in INSIDE.items():
    CALLS.refuse(f"{_name}-inside", "inside", _do, ProtocolError, _word)

# Calls that a state of the cycle, of the reducer or of the world refuses.
BAD_TIMES: dict[str, Any] = {
    "gradient": give("once", ones(3)),
    "skip": skip("once"),
    "backward": enter_twice,
    "wait": lambda s: s.reducer.wait(),
    "wait_packed": lambda s: s.reducer.wait_packed(),
    "flush": lambda s: s.reducer.flush(),
    "synchronize": lambda s: s.reducer.synchronize(),
    "discard": lambda s: s.reducer.discard(),
    "norm": lambda s: s.reducer.norm(),
    "clip": lambda s: s.reducer.clip(1.0),
    "gather": lambda s: s.registry.gather(s.registry.shards),
    "registry": lambda s: Registry(FLOATS, s.world),
    "reducer": lambda s: Reducer(s.registry, op="sum"),
}
for _name, _do in BAD_TIMES.items():
    if _name in ("gradient", "skip"):
        CALLS.refuse(
            f"{_name}-outside", "outside", _do, ProtocolError, "outside backward()", "'once'"
        )
    if _name not in ("gather", "registry", "reducer"):
        CALLS.refuse(f"{_name}-after-close", "closed", _do, ProtocolError, "reducer is closed")
    if _name not in ("gradient", "skip"):  # which are outside backward, before anything else
        CALLS.refuse(f"{_name}-in-a-closed-world", "left", _do, ProtocolError, "is closed")
        CALLS.refuse(f"{_name}-in-a-broken-world", "broken", _do, CommunicationError, "is broken")
CALLS.refuse("wait-before-any", "new", BAD_TIMES["wait"], ProtocolError, "no backward has run")
CALLS.refuse("wait-after-discard", "discarded", BAD_TIMES["wait"], ProtocolError, "was discarded")
CALLS.refuse(
    "wait-after-failure", "failed", BAD_TIMES["wait"], ProtocolError, "failed", "discard() first"
)
CALLS.refuse("backward-after-failure", "failed", enter_twice, ProtocolError, "failed", "discard()")
CALLS.refuse(
    "second-reducer", "ready", BAD_TIMES["reducer"], ProtocolError, "has a reducer", "close()"
)
for _name, _when, _told in (
    ("before-any", "new", "no backward has run"),
    ("after-wait", "landed", "the last cycle"),
    ("after-discard", "discarded", "was discarded"),
):
    for _call in ("norm", "clip"):
        _words = f"{_call}(): the shards hold ", _told, "between the cycle's last backward()"
        CALLS.refuse(f"{_call}-{_name}", _when, BAD_TIMES[_call], ProtocolError, *_words)
CALLS.refuse("second-clip", "clipped", BAD_TIMES["clip"], ProtocolError, "scaled already", "once")
CALLS.refuse("backward-after-clip", "clipped", enter_twice, ProtocolError, "wait() or discard()")
