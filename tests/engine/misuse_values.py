"""Options, arrays and names that no reducer, registry, parameter or world takes. No cycle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from engine.misuse_calls import HUGE, NAN, Table, ones
from engine.model import FLOATS
from producers import CUDA, Producer
from strategies import interval

from cupynccl_reduce import (
    Gatherer,
    LayoutError,
    ParamSpec,
    ProtocolError,
    Reducer,
    Registry,
    connect,
    run_local,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.session import Seat

__all__ = ["VALUES"]

VALUES = Table()


def frozen(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def on_stream(value: Any) -> dict[str, Callable[[Seat], object]]:
    return {
        "wait": lambda s: s.reducer.wait(stream=value),
        "gather": lambda s: s.registry.gather({}, stream=value),
        "norm": lambda s: s.reducer.norm(stream=value),
        "clip": lambda s: s.reducer.clip(1.0, stream=value),
    }


WHEN = {"wait": "landed", "gather": "idle", "norm": "reduced", "clip": "reduced"}
for _name, _value in {"text": "mine", "number": 7, "nan": NAN, "raw": 0}.items():
    for _call, _do in on_stream(_value).items():
        _told = f"no stream {_value!r}"
        VALUES.refuse(f"{_call}-stream-{_name}", WHEN[_call], _do, ProtocolError, _told)

CLIPS: dict[str, tuple[Any, ...]] = {
    "p": (0, -1, NAN, None, True, "2", HUGE, ones()),
    "max_norm": (-1, -1e-9, NAN, True, "1", HUGE, ones()),
    "loss_scale": (0, -2.0, NAN, float("inf"), None, True, "1", ones(2), ones(dtype="f2")),
}


def clip(name: str, value: Any) -> Callable[[Seat], object]:
    return lambda s: s.reducer.clip(**{"max_norm": 1.0} | {name: value})


for _name, _values in CLIPS.items():
    for _index, _value in enumerate(_values):
        _do, _told = clip(_name, _value), f"{_name} must be "
        VALUES.refuse(f"clip-{_name}-{_index}", "reduced", _do, LayoutError, _told)

REDUCERS: dict[str, Any] = {
    "op": ("max", "SUM", None, NAN, ["mean"], True),
    "policy": ("eager", None, 1, "Planned"),
    "missing": ("ignore", None, 0, NAN),
    "memory": ("managed", None, "pinned"),
    "pre_divide": ("no", None, 1, False),
    "max_buffers": (0, -1, 2.0, NAN, True, None, "2", np.int64(2)),
}
for _name, _values in REDUCERS.items():
    for _value in _values:
        VALUES.refuse(
            f"reducer-{_name}-{_value!r}",
            "closed",
            lambda s, bad={_name: _value}: Reducer(s.registry, **{"op": "sum"} | bad),
            LayoutError,
            _name,
            "" if _value is False else repr(_value),
        )
for _value in (1 << 45, 1 << 70):
    VALUES.refuse(
        f"reducer-max_buffers-{_value}-of-arrival",
        "closed",
        lambda s, value=_value: Reducer(s.registry, policy="arrival", op="sum", max_buffers=value),
        LayoutError,
        "max_buffers",
    )

ONCE = FLOATS[0]
PARAMS: dict[str, tuple[Any, str]] = {
    "none": (None, "list of ParamSpec, not NoneType"),
    "one": (ONCE, "list of ParamSpec, not ParamSpec"),
    "nan": (NAN, "list of ParamSpec, not float"),
    "empty": ([], "no parameters"),
    "empty-generator": ((spec for spec in ()), "no parameters"),
    "twice": ([ONCE, ONCE], "'once' is given twice"),
    "of-names": (["once"], "ParamSpec values, not 'once'"),
    "with-none": ([ONCE, None], "ParamSpec values, not None"),
    "of-tuples": ([("once", (3,), "float32")], "ParamSpec values"),
    "in-a-dict": ({"once": ONCE}, "ParamSpec values"),
    "too-large": ([ParamSpec("p", (1 << 62,), "float32")], "no memory"),
    "beyond-any-address": ([ParamSpec("p", (HUGE, 3), "float64")], "no memory"),
}
for _name, (_value, _word) in PARAMS.items():
    VALUES.refuse(
        f"params-{_name}",
        "usable",
        lambda s, value=_value: Registry(value, s.world),
        LayoutError,
        _word,
    )
for _value in (0, -1, 64.0, NAN, float("inf"), None, True, "64", np.int64(64)):
    VALUES.refuse(
        f"bucket_bytes-{_value!r}",
        "usable",
        lambda s, value=_value: Registry(FLOATS, s.world, bucket_bytes=value),
        LayoutError,
        "bucket_bytes must be an integer >= 1",
        repr(_value),
    )


def shared(seat: Seat) -> None:
    block = ones(3)
    params = [ONCE, ParamSpec("other", (3,), "float32")]
    length = interval(ones(3), seat.world.rank, seat.world.world_size).size
    Registry(params, seat.world, shards={spec.name: block[:length] for spec in params})


def bring(make: Callable[[int], Any]) -> Callable[[Seat], object]:
    """Bring `make(length of this rank's interval)` as the shard of "four"."""
    four = ParamSpec("four", (4,), "float32")
    return lambda s: Registry([four], s.world, shards={"four": make(4 // s.world.world_size)})


SHARDS: dict[str, tuple[Any, str]] = {
    "a-list": (lambda s: Registry([ONCE], s.world, shards=[ones(3)]), "a mapping"),
    "text": (lambda s: Registry([ONCE], s.world, shards="once"), "a mapping"),
    "nan": (lambda s: Registry([ONCE], s.world, shards=NAN), "a mapping"),
    "unknown": (lambda s: Registry([ONCE], s.world, shards={"two": ones(3)}), "'two'"),
    "shared": (shared, "share memory"),
    "none": (bring(lambda _: None), "NoneType"),
    "number": (bring(lambda _: 1.0), "float"),
    "objects": (bring(lambda n: ones(n, dtype=object)), "DLPack"),
    "big-endian": (bring(lambda n: ones(n, dtype=">f4")), "byte order"),
    "float64": (bring(lambda n: ones(n, dtype="f8")), "float64"),
    "too-long": (bring(lambda n: ones(n + 1)), "give a contiguous, writable float32"),
    "two-dims": (bring(lambda n: ones(n, 1)), "float32 ("),
    "read-only": (bring(lambda n: frozen(ones(n))), "not writable"),
    "backwards": (bring(lambda n: ones(n)[::-1]), "not contiguous"),
    "strided": (bring(lambda n: ones(2 * n)[::2]), "not contiguous"),
    "on-a-gpu": (bring(lambda n: Producer(ones(n), device_type=CUDA)), "cuda:0"),
}
for _name, (_do, _word) in SHARDS.items():
    VALUES.refuse(f"shards-{_name}", "usable", _do, LayoutError, "shards", _word)


def gather(make: Callable[[np.ndarray], Any], out: Any = None) -> Callable[[Seat], object]:
    """Gather `make(shard of "table")`."""
    return lambda s: s.registry.gather(make(s.registry.shards["table"]), out=out)


def gather_out(make: Callable[[], Any]) -> Callable[[Seat], object]:
    return lambda s: s.registry.gather({"table": s.registry.shards["table"]}, out=make())


GATHERS: dict[str, tuple[Any, str]] = {
    "none": (gather(lambda _: None), "mapping"),
    "a-list": (gather(lambda a: [a]), "mapping"),
    "a-name": (gather(lambda _: "table"), "mapping"),
    "unknown": (gather(lambda a: {"desk": a}), "'desk'"),
    "by-number": (gather(lambda a: {1: a}), "no parameter 1"),
    "of-none": (gather(lambda _: {"table": None}), "NoneType"),
    "of-nan": (gather(lambda _: {"table": NAN}), "float"),
    "too-long": (gather(lambda a: {"table": ones(a.size + 1)}), "holds elements"),
    "two-dims": (gather(lambda a: {"table": a.reshape(1, -1)}), "holds elements"),
    "complex": (gather(lambda a: {"table": a.astype("c8")}), "complex64"),
    "objects": (gather(lambda a: {"table": a.astype(object)}), "DLPack"),
    "on-a-gpu": (gather(lambda a: {"table": Producer(a, device_type=CUDA)}), "cuda:0"),
    "out-a-list": (gather_out(lambda: [ones(2, 3)]), "mapping"),
    "out-a-name": (gather_out(lambda: "table"), "mapping"),
    "out-a-number": (gather_out(lambda: 5), "mapping"),
    "out-empty": (gather_out(dict), "same names"),
    "out-another": (gather_out(lambda: {"once": ones(3)}), "same names"),
    "out-none": (gather_out(lambda: {"table": None}), "NoneType"),
    "out-float64": (gather_out(lambda: {"table": ones(2, 3, dtype="f8")}), "float64"),
    "out-flat": (gather_out(lambda: {"table": ones(6)}), "(6,)"),
    "out-read-only": (gather_out(lambda: {"table": frozen(ones(2, 3))}), "not writable"),
    "out-backwards": (gather_out(lambda: {"table": ones(2, 3)[::-1]}), "not contiguous"),
    "out-transposed": (gather_out(lambda: {"table": ones(3, 2).T}), "not contiguous"),
}
for _name, (_do, _word) in GATHERS.items():
    VALUES.refuse(f"gather-{_name}", "idle", _do, LayoutError, _word)


def gatherer(**options: Any) -> Callable[[Seat], object]:
    return lambda s: Gatherer(s.registry, **({"shards": s.registry.shards} | options))


GATHERERS: dict[str, tuple[dict[str, Any], str]] = {
    "shards-none": ({"shards": None}, "a mapping of names to arrays, not NoneType"),
    "shards-a-list": ({"shards": [ones(3)]}, "a mapping of names to arrays, not list"),
    "shards-a-name": ({"shards": "table"}, "a mapping of names to arrays, not str"),
    "shards-unknown": ({"shards": {"desk": ones(3)}}, "no parameter 'desk'"),
    "shards-of-none": ({"shards": {"table": None}}, "NoneType"),
    "shards-too-long": ({"shards": {"table": ones(7)}}, "holds elements"),
    "dtypes-a-list": ({"dtypes": ["table"]}, "a mapping of names to dtypes, not list"),
    "dtypes-no-list": ({"dtypes": []}, "a mapping of names to dtypes, not list"),
    "dtypes-a-name": ({"dtypes": "table"}, "a mapping of names to dtypes, not str"),
    "dtypes-zero": ({"dtypes": 0}, "a mapping of names to dtypes, not int"),
    "dtypes-false": ({"dtypes": False}, "a mapping of names to dtypes, not bool"),
    "dtypes-nan": ({"dtypes": NAN}, "a mapping of names to dtypes, not float"),
    "dtypes-unknown": ({"dtypes": {"desk": "float32"}}, "no shard 'desk'"),
    "dtypes-by-number": ({"dtypes": {1: "float32"}}, "no shard 1"),
    "dtypes-of-none": ({"dtypes": {"table": None}}, "cannot become None"),
    "dtypes-of-a-list": ({"dtypes": {"table": ["float32"]}}, "cannot become ['float32']"),
    "dtypes-of-a-type": ({"dtypes": {"table": np.float32}}, "numpy.float32"),
    "dtypes-integer": ({"dtypes": {"table": "int32"}}, "cannot become 'int32'"),
    "prefetch": ({"prefetch": -1}, "prefetch must be an integer >= 0"),
    "persistent": ({"persistent": 1.0}, "persistent must be an integer >= 0"),
}
for _name, (_fields, _word) in GATHERERS.items():
    VALUES.refuse(f"gatherer-{_name}", "idle", gatherer(**_fields), LayoutError, _word)

SPECS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "name-none": ((None, (3,), "float32"), {}, "non-empty string, not None"),
    "name-empty": (("", (3,), "float32"), {}, "non-empty string, not ''"),
    "name-bytes": ((b"p", (3,), "float32"), {}, "b'p'"),
    "name-nan": ((NAN, (3,), "float32"), {}, "nan"),
    "shape-none": (("p", None, "float32"), {}, "not None"),
    "shape-number": (("p", 3, "float32"), {}, "not 3"),
    "shape-text": (("p", "33", "float32"), {}, "not '33'"),
    "shape-negative": (("p", (3, -1), "float32"), {}, "(3, -1)"),
    "shape-fraction": (("p", (1.5,), "float32"), {}, "(1.5,)"),
    "shape-nan": (("p", (NAN,), "float32"), {}, "(nan,)"),
    "shape-of-none": (("p", (None,), "float32"), {}, "(None,)"),
    "dtype-none": (("p", (3,), None), {}, "dtype None"),
    "dtype-type": (("p", (3,), np.float32), {}, "numpy.float32"),
    "dtype-list": (("p", (3,), ["float32"]), {}, "['float32']"),
    "dtype-complex": (("p", (3,), "complex64"), {}, "'complex64'"),
    "dtype-short": (("p", (3,), "f4"), {}, "'f4'"),
    "wire-none": (("p", (3,), "float32"), {"reduce_dtype": None}, "reduce_dtype"),
    "wire-integer": (("p", (3,), "float32"), {"reduce_dtype": "int32"}, "cannot hold"),
    "wire-other-integer": (("p", (3,), "int32"), {"reduce_dtype": "int64"}, "cannot hold"),
    "shard-integer": (("p", (3,), "float32"), {"shard_dtype": "int8"}, "cannot hold"),
    "shard-nan": (("p", (3,), "float32"), {"shard_dtype": NAN}, "shard_dtype"),
    "uses-none": (("p", (3,), "float32"), {"uses": None}, "uses must be"),
    "uses-twice": (("p", (3,), "float32"), {"uses": "twice"}, "'twice'"),
}
for _name, (_given, _fields, _word) in SPECS.items():
    VALUES.refuse(
        f"spec-{_name}",
        "",
        lambda _, given=_given, fields=_fields: ParamSpec(*given, **fields),
        LayoutError,
        _word,
    )

WATCHES: dict[str, Any] = {
    "timeout_s": (0, -1, 0.0, NAN, float("inf"), None, True, "60", 604_801, 1e9, HUGE),
    "check": ("on", None, [], True, NAN, ""),
}
for _name, _values in WATCHES.items():
    for _value in _values:
        for _call, _first in (("connect", ("host",)), ("run_local", (1, id))):
            VALUES.refuse(
                f"{_call}-{_name}-{_value!r:.12}",
                "",
                lambda _, call=_call, first=_first, name=_name, value=_value: {
                    "connect": connect,
                    "run_local": run_local,
                }[call](*first, **{name: value}),
                LayoutError,
                f"{_name} must be",
                f"{_value!r:.80}",
            )
for _value in (0, -1, 2.0, NAN, None, True, "2", np.int64(2)):
    VALUES.refuse(
        f"run_local-ranks-{_value!r}",
        "",
        lambda _, value=_value: run_local(value, id),
        LayoutError,
        "world_size must be an integer >= 1",
        repr(_value),
    )
for _value in ("gpu", "HOST", None, NAN, [], b"host"):
    VALUES.refuse(
        f"connect-runtime-{_value!r}",
        "",
        lambda _, value=_value: connect(value),
        LayoutError,
        f"not {_value!r}",
    )
VALUES.refuse(
    "connect-share", "", lambda _: connect("host", share_gpu=True), LayoutError, "share_gpu"
)
