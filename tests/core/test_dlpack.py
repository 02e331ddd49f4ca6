"""read() against NumPy, torch and hand-made producers: values, refusals, lifetime, threads."""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import re
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupynccl_reduce.dlpack import View, read
from cupynccl_reduce.dtypes import DTYPES
from cupynccl_reduce.errors import GradientError, GradientTypeError

try:
    import torch
except ImportError:
    torch = None

needs_torch = pytest.mark.skipif(torch is None, reason="torch is not installed")


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def values(view: View) -> np.ndarray:
    """Copy out what the view describes, by strides alone."""
    dtype = numpy_dtype(view.dtype)
    if 0 in view.shape:
        return np.empty(view.shape, dtype)
    strides = contiguous_strides(view.shape) if view.strides is None else view.strides
    ends = [(extent - 1) * stride for extent, stride in zip(view.shape, strides, strict=True)]
    low, high = sum(min(0, end) for end in ends), sum(max(0, end) for end in ends)
    nbytes = (high - low + 1) * dtype.itemsize
    memory = (ctypes.c_char * nbytes).from_address(view.pointer + low * dtype.itemsize)
    byte_strides = [stride * dtype.itemsize for stride in strides]
    return np.ndarray(view.shape, dtype, memory, -low * dtype.itemsize, byte_strides).copy()


def assert_describes(view: View, expected: np.ndarray, dtype: str) -> None:
    assert (view.dtype, view.shape) == (dtype, expected.shape)
    assert (view.device, view.device_id, view.stream) == ("cpu", 0, None)
    assert type(view.shape) is tuple
    assert values(view).tobytes() == expected.tobytes()


def numbers(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Distinct values, as far as the dtype can tell them apart."""
    return np.arange(1, math.prod(shape) + 1).reshape(shape).astype(numpy_dtype(dtype))


def tensor(array: np.ndarray) -> Any:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(array)


# Producers made by hand. Layouts as in the DLPack specification's dlpack.h.


class Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class Managed(ctypes.Structure):
    _fields_ = (("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class ManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    )


new_capsule = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)(("PyCapsule_New", ctypes.pythonapi))
exported: dict[int, Any] = {}  # address of a capsule -> what it points to, and on_drop


@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def destroy(capsule: int) -> None:
    *_, on_drop = exported.pop(capsule)
    on_drop()


class Producer:
    """A NumPy array behind a capsule of which every field can be set. Remembers its calls."""

    versioned = True

    def __init__(self, array: np.ndarray, **fields: Any) -> None:
        self.array = array
        self.fields = fields
        self.calls: list[Any] = []
        self.capsules = 0

    def describe(self) -> Tensor:
        array, fields = self.array, self.fields
        integers = ctypes.c_int64 * array.ndim
        self.shape = integers(*array.shape)
        self.strides = integers(*(stride // array.itemsize for stride in array.strides))
        values = {
            "data": array.ctypes.data,
            "device_type": 1,
            "ndim": array.ndim,
            "code": 2,
            "bits": array.itemsize * 8,
            "lanes": 1,
            "shape": ctypes.addressof(self.shape),
            "strides": ctypes.addressof(self.strides),
        }
        return Tensor(**values | {k: v for k, v in fields.items() if k not in ("name", "major")})

    def export(self) -> Any:
        self.capsules += 1
        if self.versioned:
            struct = ManagedVersioned(self.fields.get("major", 1), 0, tensor=self.describe())
        else:
            struct = Managed(self.describe())
        name = b"dltensor_versioned" if self.versioned else b"dltensor"
        name = self.fields.get("name", name)
        capsule = new_capsule(ctypes.addressof(struct), name, destroy)
        exported[id(capsule)] = (struct, name, self.drop)
        return capsule

    def drop(self) -> None:
        self.capsules -= 1

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.fields.get("device_type", 1), self.fields.get("device_id", 0)

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None) -> Any:
        self.calls.append((stream, max_version))
        return self.export()


class OldProducer(Producer):
    """Before DLPack 1.0: unversioned, and no max_version."""

    versioned = False

    def __dlpack__(self, stream: Any = None) -> Any:
        self.calls.append(stream)
        return self.export()


FILL = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(Tensor))
CURRENT = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p)
)


class ExchangeAPI(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("older", ctypes.c_void_p),
        ("allocator", ctypes.c_void_p),
        ("from_py_object", ctypes.c_void_p),
        ("to_py_object", ctypes.c_void_p),
        ("fill", ctypes.c_void_p),
        ("current_stream", ctypes.c_void_p),
    )


class ExchangeProducer(Producer):
    """A producer whose subclasses get the C exchange API from `offer`."""

    handle: int | None = None
    asked: list[tuple[int, int]]
    rc = 0


@FILL
def fill(producer: ExchangeProducer, out: Any) -> int:
    if producer.rc == 0:
        out[0] = producer.describe()
    return producer.rc


@CURRENT
def current_stream(device_type: int, device_id: int, out: Any) -> int:
    ExchangeProducer.asked.append((device_type, device_id))
    out[0] = ExchangeProducer.handle
    return 0


def offer(*, major: int = 1, older: Any = None, fill: Any = fill) -> type[ExchangeProducer]:
    """Return a new producer type that offers the C exchange API."""
    ExchangeProducer.asked = []
    pointers = [ctypes.cast(f, ctypes.c_void_p) if f else None for f in (fill, current_stream)]
    api = ExchangeAPI(major, 3, older and ctypes.addressof(older), 0, 0, 0, *pointers)
    capsule = new_capsule(ctypes.addressof(api), b"dlpack_exchange_api", None)
    return type("Exchange", (ExchangeProducer,), {"__dlpack_c_exchange_api__": capsule, "api": api})


# Values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (0,), (3, 4), (1, 0, 4), (2, 1, 3), (1, 1)])
def test_numpy_array_of_every_dtype(shape: tuple[int, ...], dtype: str) -> None:
    array = numbers(shape, dtype)
    view = read(array)
    assert_describes(view, array, dtype)
    assert view.strides is None
    assert view.pointer == array.ctypes.data


@needs_torch
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (0,), (3, 4), (1, 0, 4), (2, 1, 3), (1, 1)])
def test_torch_tensor_of_every_dtype(shape: tuple[int, ...], dtype: str) -> None:
    array = numbers(shape, dtype)
    source = tensor(array)
    view = read(source)
    assert_describes(view, array, dtype)
    assert view.strides is None
    assert view.pointer == source.data_ptr()
    assert view.owner is source


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "index",
    [
        np.s_[::-1],
        np.s_[:, ::-1],
        np.s_[::-2, 1::2],
        np.s_[1:, :3],
        np.s_[:, 2],
        np.s_[2, 3, None],
        np.s_[..., None, 1],
        np.s_[:0],
        np.s_[2, 3, ...],
    ],
)
def test_numpy_slices(index: Any, dtype: str) -> None:
    array = numbers((4, 5), dtype)[index]
    assert_describes(read(array), array, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_read_only_broadcast_array(dtype: str) -> None:
    array = np.broadcast_to(numbers((), dtype), (3, 4))
    view = read(array)
    assert_describes(view, array, dtype)
    assert view.strides == (0, 0)


@needs_torch
def test_expanded_tensor() -> None:
    scalar = torch.tensor(2.0)
    view = read(scalar.expand(3, 4))
    assert_describes(view, np.full((3, 4), 2, "f4"), "float32")
    assert view.strides == (0, 0)
    assert view.pointer == scalar.data_ptr()


@needs_torch
def test_channels_last_of_a_1x1_convolution_is_contiguous() -> None:
    source = torch.arange(32.0).reshape(4, 8, 1, 1).to(memory_format=torch.channels_last)
    assert read(source).strides is None
    other = torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    assert read(other).strides == (24, 1, 8, 2)
    assert_describes(read(other), other.contiguous().numpy(), "float32")


@st.composite
def reshaped(draw: st.DrawFn, *, negative: bool) -> tuple[str, tuple[int, ...], list[Any]]:
    """A dtype, a shape, and slices, permutations, new axes and broadcasts to apply to it."""
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    steps = [1, 2, 3, *((-1, -2) if negative else ())]
    array = np.empty(shape, np.int8)
    operations: list[Any] = []
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["slice", "permute", "axis", "broadcast"]))
        if kind == "slice":
            argument: Any = tuple(
                slice(draw(st.integers(0, n)), None, draw(st.sampled_from(steps)))
                for n in array.shape
            )
        elif kind == "permute":
            argument = tuple(draw(st.permutations(range(array.ndim))))
        elif kind == "axis":
            argument = draw(st.integers(0, array.ndim))
        else:
            stretch = [draw(st.integers(0, 3)) if n == 1 else n for n in array.shape]
            argument = (*draw(st.lists(st.integers(0, 3), max_size=1)), *stretch)
        operations.append((kind, argument))
        array = with_numpy(array, [operations[-1]])
    return dtype, shape, operations


def with_numpy(array: np.ndarray, operations: list[Any]) -> np.ndarray:
    for kind, argument in operations:
        if kind == "slice":
            array = array[(*argument, ...)]  # the ellipsis keeps a 0-dim array an array
        elif kind == "permute":
            array = array.transpose(argument)
        elif kind == "axis":
            array = np.expand_dims(array, argument)
        else:
            array = np.broadcast_to(array, argument)
    return array


def with_torch(source: Any, operations: list[Any]) -> Any:
    for kind, argument in operations:
        if kind == "slice":
            source = source[argument]
        elif kind == "permute":
            source = source.permute(argument)
        elif kind == "axis":
            source = source.unsqueeze(argument)
        else:
            source = source.expand(argument)
    return source


@given(reshaped(negative=True))
def test_any_numpy_view(case: tuple[str, tuple[int, ...], list[Any]]) -> None:
    dtype, shape, operations = case
    array = with_numpy(numbers(shape, dtype), operations)
    view = read(array)
    assert_describes(view, array, dtype)
    assert (view.strides is None) == array.flags.c_contiguous


@needs_torch
@given(reshaped(negative=False))
def test_any_torch_view(case: tuple[str, tuple[int, ...], list[Any]]) -> None:
    dtype, shape, operations = case
    array = numbers(shape, dtype)
    source = with_torch(tensor(array), operations)
    view = read(source)
    assert_describes(view, with_numpy(array, operations), dtype)
    assert (view.strides is None) == source.is_contiguous()


# Torch's own states


@needs_torch
def test_parameter_that_requires_no_grad() -> None:
    parameter = torch.nn.Parameter(torch.arange(3.0), requires_grad=False)
    view = read(parameter)
    assert view.owner is parameter
    assert_describes(view, np.arange(3, dtype="f4"), "float32")


@needs_torch
@pytest.mark.parametrize("stream", [None, 1, 7])
def test_stream_is_not_for_tensors_of_the_cpu(stream: int | None) -> None:
    assert read(torch.zeros(2), stream=stream).stream is None


@needs_torch
def test_negative_bit_is_resolved() -> None:
    source = torch.complex(torch.ones(3), torch.arange(1.0, 4.0)).conj().imag
    assert source.is_neg()
    view = read(source)
    assert_describes(view, np.array([-1, -2, -3], "f4"), "float32")
    assert view.owner is not source
    assert view.pointer == view.owner.data_ptr()


@needs_torch
def test_tensor_that_requires_grad_is_refused() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    for source in (parameter, parameter * 2):
        with pytest.raises(GradientError, match=r"requires grad.*p\.grad.*\.detach\(\)") as error:
            read(source)
        assert not isinstance(error.value, TypeError)
    (parameter * 2).sum().backward()
    assert_describes(read(parameter.grad), np.full(3, 2, "f4"), "float32")
    assert_describes(read(parameter.detach()), np.ones(3, "f4"), "float32")


def wrapper() -> Any:
    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
            raise AssertionError

    return torch.Tensor._make_wrapper_subclass(Wrapper, (3,), dtype=torch.float32)


def freed() -> Any:
    source = torch.ones(3)
    source.untyped_storage().resize_(0)
    return source


def raising_subclass() -> Any:
    class Raising(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_: Any, **__: Any) -> Any:
            message = "not today"
            raise RuntimeError(message)

    return torch.ones(3).as_subclass(Raising)


@needs_torch
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.eye(3).to_sparse(), r"torch\.Tensor cannot be read.*\.to_dense\(\)"),
        (lambda: torch.eye(3).to_mkldnn(), r"cannot be read.*\.to_dense\(\)"),
        (lambda: torch.empty(3, device="meta"), "cannot be read.*meta"),
        (lambda: torch.ones(3, dtype=torch.complex64), "dtype torch.complex64.*cast it to one of"),
        (lambda: torch.ones(3, dtype=torch.complex64).conj(), "dtype torch.complex64"),
        (lambda: torch.ones(3, dtype=torch.bool), "dtype torch.bool.*cast it to one of float16"),
        (lambda: torch.ones(3, dtype=torch.int16), "dtype torch.int16"),
        (lambda: torch.ones(3).to(torch.float8_e4m3fn), "dtype torch.float8_e4m3fn"),
        (wrapper, r"shape \(3,\) has no memory.*\.to_local\(\)"),
        (freed, r"shape \(3,\) has no memory"),
        (lambda: torch._efficientzerotensor((3,)), "has no memory"),
        (raising_subclass, "Raising cannot be read.*RuntimeError: not today"),
        (lambda: torch.nn.UninitializedParameter(requires_grad=False), "cannot be read"),
    ],
)
def test_tensor_without_readable_memory_is_refused(make: Any, message: str) -> None:
    with pytest.raises(GradientTypeError, match=message) as error:
        read(make())
    assert "\n" not in str(error.value)


# Refusals


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (1.5, "^float is not an array: it has no __dlpack__; .*0-dim"),
        ([1.0, 2.0], "^list is not an array"),
        (None, "^NoneType is not an array"),
        (np.float32(1), r"^numpy\.float32 is not an array.*0-dim array"),
        (np.ones(3, "complex64"), "unsupported dtype complex64 .DLPack code 5, 64 bits, 1 lanes."),
        (np.ones(3, "bool"), "unsupported dtype bool .*cast it to one of float16, bfloat16"),
        (np.ones(3, "int16"), "unsupported dtype int16"),
        (np.ones(3, "uint16"), "unsupported dtype uint16"),
        (np.ones(3, ml_dtypes.float8_e5m2), "ndarray cannot be read.*of dtype float16, bfloat16"),
        (np.ones(3, ">f4"), r"ndarray cannot be read through DLPack \(BufferError"),
        (np.ones(3, "longdouble"), "ndarray"),
        (np.array([None]), "ndarray cannot be read"),
        (np.zeros(3, [("x", "f4")]), "ndarray cannot be read"),
        (np.zeros(3, "M8[s]"), "ndarray cannot be read"),
    ],
    ids=lambda case: case[:20] if isinstance(case, str) else None,
)
@pytest.mark.parametrize("stream", [None, 1])
def test_what_is_no_array_of_a_known_dtype_is_refused(
    source: Any, message: str, stream: int | None
) -> None:
    for _ in range(2):  # the second read finds a remembered type
        with pytest.raises(GradientTypeError, match=message):
            read(source, stream=stream)


def refusal(source: Any) -> str:
    """Return the message only: pytest.raises would keep what the traceback refers to."""
    try:
        read(source)
    except GradientTypeError as error:
        return str(error)
    raise AssertionError


class Garbage:
    def __init__(self, result: Any) -> None:
        self.result = result

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **_: Any) -> Any:
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


@pytest.mark.parametrize("result", [None, 5, "dltensor", np.ones(3), object()])
def test_what_is_no_capsule_is_refused(result: Any) -> None:
    with pytest.raises(GradientTypeError, match=r"Garbage returned .* from __dlpack__") as error:
        read(Garbage(result))
    assert isinstance(error.value.__cause__, ValueError)


@pytest.mark.parametrize(
    "cause", [BufferError("no"), RuntimeError("a\nb"), TypeError("no"), KeyError(), MemoryError()]
)
def test_error_of_a_producer_is_chained(cause: Exception) -> None:
    with pytest.raises(GradientTypeError, match=f"{type(cause).__name__}: [^\n]*; ") as error:
        read(Garbage(cause))
    assert error.value.__cause__ is cause


@pytest.mark.parametrize("cause", [BufferError("no"), RuntimeError("no")])
def test_only_an_array_that_can_be_viewed_is_read_as_bfloat16(cause: Exception) -> None:
    source: Any = Garbage(cause)
    source.dtype = SimpleNamespace(name="bfloat16")
    if not isinstance(cause, BufferError):
        source.view = np.ones(3, "f2").view
    with pytest.raises(GradientTypeError, match="no") as error:
        read(source)
    assert error.value.__cause__ is cause


def test_interrupt_passes() -> None:
    with pytest.raises(KeyboardInterrupt):
        read(Garbage(KeyboardInterrupt()))


ARRAY = numbers((2, 3), "float32")


@pytest.mark.parametrize("kind", [Producer, OldProducer])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": b"used_dltensor"}, "returned PyCapsule from __dlpack__, not a fresh DLPack"),
        ({"device_type": 10}, "device type 10, neither CPU nor CUDA; copy it"),
        ({"device_type": 0}, "device type 0"),
        ({"code": 3}, "unsupported dtype . .DLPack code 3, 32 bits, 1 lanes."),
        ({"lanes": 4}, "32 bits, 4 lanes"),
        ({"bits": 8}, "8 bits"),
        ({"ndim": 65}, "65 dimensions; reshape it to 64"),
        ({"ndim": -1}, "-1 dimensions"),
        ({"shape": None}, "2 dimensions without a shape; copy it"),
        ({"data": None}, r"shape \(2, 3\) has no memory"),
        ({"data": None, "ndim": 0}, r"shape \(\) has no memory"),
    ],
)
def test_unreadable_capsule_is_refused_and_released(
    kind: type[Producer], fields: dict[str, Any], message: str
) -> None:
    producer = kind(ARRAY, **fields)
    assert re.search(message, refusal(producer))
    assert producer.capsules == 0


def test_other_major_version_is_refused() -> None:
    with pytest.raises(GradientTypeError, match=r"exports DLPack 2\.0, which cannot be read"):
        read(Producer(ARRAY, major=2, ndim=2**30))  # its other fields mean nothing to us


# The capsule route


@pytest.mark.parametrize("kind", [Producer, OldProducer])
@pytest.mark.parametrize(
    ("array", "fields"),
    [
        (ARRAY, {}),
        (ARRAY, {"strides": None}),
        (ARRAY[::-1, ::2], {}),
        (ARRAY[:0], {"data": None, "strides": None}),
        (np.float32(3)[None][0:1], {"strides": None}),
        (np.array(3, "f4"), {"shape": None, "strides": None}),
    ],
)
def test_capsules_of_both_kinds(
    kind: type[Producer], array: np.ndarray, fields: dict[str, Any]
) -> None:
    assert_describes(read(kind(array, **fields)), array, "float32")


@pytest.mark.parametrize("kind", [Producer, OldProducer])
def test_byte_offset_is_added(kind: type[Producer]) -> None:
    view = read(kind(ARRAY[1:], data=ARRAY.ctypes.data, byte_offset=12))
    assert view.pointer == ARRAY.ctypes.data + 12
    assert_describes(view, ARRAY[1:], "float32")


@pytest.mark.parametrize(
    ("device_type", "device", "passed"),
    [(1, "cpu", None), (3, "cpu", None), (2, "cuda", 7), (13, "cuda", 7)],
)
def test_stream_is_passed_on_to_cuda_producers_only(
    device_type: int, device: str, passed: int | None
) -> None:
    producer = Producer(ARRAY, device_type=device_type, device_id=3)
    view = read(producer, stream=7)
    assert producer.calls == [(passed, (1, 0))]
    assert (view.device, view.device_id, view.stream) == (device, 3, None)
    old = OldProducer(ARRAY, device_type=device_type)
    assert read(old, stream=7).device == device
    assert old.calls == [passed]


def test_tensor_type_without_the_exchange_api() -> None:
    """torch before 2.10: its state is looked at all the same."""

    class OldTensor(Producer):
        requires_grad = False
        negated: Any = None

        def is_neg(self) -> bool:
            return self.negated is not None

        def resolve_neg(self) -> Any:
            return self.negated

    source = OldTensor(ARRAY)
    assert_describes(read(source), ARRAY, "float32")
    source.negated = OldTensor(-ARRAY)
    view = read(source)
    assert_describes(view, -ARRAY, "float32")
    assert view.owner[0] is source.negated
    source.requires_grad = True
    with pytest.raises(GradientError, match="requires grad"):
        read(source)


# The exchange API


def test_exchange_api_is_preferred_to_capsules() -> None:
    producer = offer()(ARRAY[:, ::-1])
    view = read(producer, stream=7)
    assert_describes(view, ARRAY[:, ::-1], "float32")
    assert view.owner is producer
    assert producer.calls == []
    assert producer.asked == []  # the CPU has no streams


@pytest.mark.parametrize(("handle", "stream"), [(77, 77), (None, 1), (2, 2), (2**47, 2**47)])
@pytest.mark.parametrize("device_type", [2, 13])
def test_stream_of_an_exchange_api(
    handle: int | None, stream: int, device_type: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ExchangeProducer, "handle", handle)
    producer = offer()(ARRAY, device_type=device_type, device_id=5)
    view = read(producer, stream=7)
    assert (view.device, view.device_id, view.stream) == ("cuda", 5, stream)
    assert (view.pointer, view.shape, view.strides) == (ARRAY.ctypes.data, (2, 3), None)
    assert producer.asked == [(2, 5)]


def test_older_exchange_api_is_found() -> None:
    older = offer()
    producer = offer(major=2, older=older.api)(ARRAY)
    assert_describes(read(producer), ARRAY, "float32")
    assert producer.calls == []


@pytest.mark.parametrize("options", [{"major": 2}, {"fill": None}])
def test_unusable_exchange_api_leaves_the_capsule_route(options: dict[str, Any]) -> None:
    producer = offer(**options)(ARRAY)
    assert_describes(read(producer), ARRAY, "float32")
    assert producer.calls == [(None, (1, 0))]


@pytest.mark.parametrize("attribute", [None, 5, new_capsule(8, b"another", None)])
def test_attribute_that_is_no_exchange_api(attribute: Any) -> None:
    kind = type("Odd", (Producer,), {"__dlpack_c_exchange_api__": attribute})
    assert_describes(read(kind(ARRAY)), ARRAY, "float32")


def test_exchange_api_that_fails_without_an_exception() -> None:
    producer = offer()(ARRAY)
    producer.rc = -1
    with pytest.raises(GradientTypeError, match="device type 0"):
        read(producer)


# Lifetime


@pytest.mark.parametrize("kind", [Producer, OldProducer])
def test_capsule_lives_as_long_as_the_view(kind: type[Producer]) -> None:
    producer = kind(ARRAY)
    view = read(producer)
    other = read(producer)
    assert producer.capsules == 2
    del other
    assert producer.capsules == 1
    assert view.owner[0] is producer
    del view
    assert producer.capsules == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_numpy_array_lives_as_long_as_the_view(dtype: str) -> None:
    array = numbers((3,), dtype)
    expected, alive = array.copy(), weakref.ref(array)
    view = read(array)
    del array
    assert_describes(view, expected, dtype)
    assert alive() is not None
    del view
    assert alive() is None


@needs_torch
def test_tensor_lives_as_long_as_the_view() -> None:
    source = torch.arange(3.0)
    alive = weakref.ref(source)
    view = read(source)
    del source
    assert_describes(view, np.arange(3, dtype="f4"), "float32")
    del view
    assert alive() is None


def test_refused_array_is_not_kept() -> None:
    array = np.ones(3, "complex64")
    alive = weakref.ref(array)
    assert "complex64" in refusal(array)
    del array
    assert alive() is None


# Threads and crashes


def sources() -> list[tuple[Any, int, tuple[int, ...]]]:
    """Arrays of every kind, each with its pointer and shape."""
    arrays = [np.zeros((rank + 1, 3), "f4") for rank in range(4)]
    found: list[Any] = [(array, array.ctypes.data, array.shape) for array in arrays]
    found += [(offer()(array), array.ctypes.data, array.shape) for array in arrays]
    if torch is not None:
        tensors = [torch.zeros((2,) * rank) for rank in range(4)]
        found += [(source, source.data_ptr(), tuple(source.shape)) for source in tensors]
    return found


def test_threads_do_not_mix_up_what_they_read() -> None:
    wrong: list[Any] = []
    cases = sources()
    start = threading.Barrier(len(cases))

    def work(source: Any, pointer: int, shape: tuple[int, ...]) -> None:
        start.wait()
        for _ in range(300):
            view = read(source)
            if (view.pointer, view.shape, view.strides) != (pointer, shape, None):
                wrong.append(view)

    threads = [threading.Thread(target=work, args=case) for case in cases]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []


def child() -> None:
    """Read what has crashed other readers; a crash ends this process with a signal."""
    for kind, fields in itertools.product(
        (Producer, OldProducer, offer()),
        ({"strides": None}, {"shape": None}, {"data": None}, {"ndim": -5}, {"ndim": 2**31 - 1}),
    ):
        with suppress(GradientTypeError):
            view = read(kind(ARRAY, **fields))
            assert_describes(view, ARRAY, "float32")
    for dtype in DTYPES:
        array = numbers((2, 3), dtype)
        for case in (array[::-1], np.zeros((1, 0, 4), array.dtype), array[0, 0, ...]):
            assert_describes(read(case), case, dtype)
    print("no crash")


def test_nothing_crashes_the_process() -> None:
    result = subprocess.run(
        [sys.executable, __file__],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (result.returncode, result.stdout) == (0, "no crash\n"), result.stderr


if __name__ == "__main__":
    child()
