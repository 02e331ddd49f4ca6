"""What a parameter may be, and which dtypes it takes on the way. No layout."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from strategies import FLOATS, INTEGERS

from cupynccl_reduce import LayoutError, ParamSpec
from cupynccl_reduce.dtypes import DTYPES


@pytest.mark.parametrize(
    ("dtype", "wire", "shard"),
    [
        ("float16", "float32", "float32"),  # a sum over ranks overflows, and dividing underflows
        ("bfloat16", "bfloat16", "float32"),
        ("float32", "float32", "float32"),
        ("float64", "float64", "float64"),
        *((dtype, dtype, dtype) for dtype in INTEGERS),
    ],
)
def test_default_dtypes(dtype: str, wire: str, shard: str) -> None:
    spec = ParamSpec("p", (2, 3), dtype)
    assert (spec.reduce_dtype, spec.shard_dtype) == (wire, shard)
    assert spec.is_float == (dtype in FLOATS)


@pytest.mark.parametrize("uses", ["once", "many"])
def test_a_repr_is_what_makes_the_same_parameter(uses: Any) -> None:
    for shape in ((), (3,), (2, 3)):
        spec = ParamSpec("a 'name'", shape, "bfloat16", reduce_dtype="float32", uses=uses)
        assert eval(repr(spec)) == spec  # noqa: S307  # written two lines above
        assert all(repr(value) in repr(spec) for value in (spec.name, shape, "float32", uses))


def test_every_dtype_is_known() -> None:
    assert set(DTYPES) == {*FLOATS, *INTEGERS}


@pytest.mark.parametrize(
    ("shape", "numel"), [((), 1), ((0,), 0), ((0, 8), 0), ((7,), 7), ((2, 3, 4), 24), ([2, 3], 6)]
)
def test_numel_and_bytes(shape: Any, numel: int) -> None:
    spec = ParamSpec("p", shape, "bfloat16")
    assert spec.shape == tuple(shape)
    assert (spec.numel, spec.nbytes) == (numel, 2 * numel)


def test_equal_parameters_are_equal_and_cannot_change() -> None:
    spec = ParamSpec("p", (2,), "float16")
    assert spec == ParamSpec("p", (2,), "float16", reduce_dtype="float32", shard_dtype="float32")
    with pytest.raises(FrozenInstanceError):
        spec.dtype = "float32"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        pytest.param({"name": ""}, ["non-empty string", "''"], id="empty-name"),
        pytest.param({"name": 3}, ["non-empty string", "3"], id="a-number-as-name"),
        pytest.param({"shape": (2, -1)}, ["'p'", "shape", "(2, -1)"], id="negative"),
        pytest.param({"shape": 3}, ["'p'", "tuple of integers", "3"], id="a-number-as-shape"),
        pytest.param({"shape": (2.5,)}, ["'p'", "tuple of integers", "(2.5,)"], id="half"),
        pytest.param({"shape": None}, ["'p'", "tuple of integers", "None"], id="no-shape"),
        pytest.param({"shape": ("a",)}, ["'p'", "tuple of integers", "('a',)"], id="a-name"),
        pytest.param({"dtype": "complex64"}, ["'p'", "complex64", "bfloat16"], id="complex"),
        pytest.param({"dtype": "bool"}, ["'p'", "'bool'", "choose one of"], id="bool"),
        pytest.param({"dtype": float}, ["'p'", "float", "choose one of"], id="a-type"),
        pytest.param({"reduce_dtype": "half"}, ["'p'", "reduce_dtype", "'half'"], id="wire"),
        pytest.param({"shard_dtype": None}, ["'p'", "shard_dtype", "None"], id="no-shard-dtype"),
        pytest.param({"reduce_dtype": "int32"}, ["'int32'", "'float32'"], id="float-as-integer"),
        pytest.param({"uses": "twice"}, ["'p'", "'once' or 'many'", "'twice'"], id="uses"),
        pytest.param(
            {"dtype": "int32", "shard_dtype": "int64"}, ["one dtype throughout"], id="wider-integer"
        ),
        pytest.param(
            {"dtype": "int32", "reduce_dtype": "float32"}, ["one dtype"], id="integer-as-float"
        ),
    ],
)
def test_what_cannot_work_cannot_exist(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(LayoutError) as caught:
        ParamSpec(**({"name": "p", "shape": (2,), "dtype": "float32"} | fields))
    for word in words:
        assert word in str(caught.value)
