"""Read any DLPack producer without copying: pointer, dtype, shape, strides, device.

Layouts and constants are those of the DLPack specification, version 1 (dlpack.h and
https://dmlc.github.io/dlpack/latest/). Nothing here reads or writes an array's elements.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from .dtypes import DTYPES
from .errors import GradientError, GradientTypeError, ReduceError
from .view import View

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["View", "is_tensor", "read"]

VERSION = (1, 0)  # the newest DLPack version whose meaning is known here
CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13  # DLDeviceType
LEGACY_STREAM = 1  # the default stream in DLPack's and CUDA's own numbering
MAX_NDIM = 64  # NumPy's and torch's limit

DEVICES = {CPU: "cpu", CUDA_HOST: "cpu", CUDA: "cuda", CUDA_MANAGED: "cuda"}
# DLDataType {uint8 code, uint8 bits, uint16 lanes} read as one integer -> name
NAMES = {
    struct.unpack("=I", struct.pack("=BBH", d.dlpack_code, d.itemsize * 8, 1))[0]: d.name
    for d in DTYPES.values()
}

unpack_tensor = struct.Struct("=QiiiIQQQ").unpack_from
unpack_version = struct.Struct("=II").unpack_from
UNPACK_INTEGERS = {n: struct.Struct(f"={n}q").unpack_from for n in range(MAX_NDIM + 1)}
unpack_flags = struct.Struct("=Q").unpack_from
# DLManagedTensorVersioned {version, manager_ctx, deleter, flags, dl_tensor}
FLAGS, VERSIONED_TENSOR = 24, 32
READ_ONLY, IS_COPIED = 1, 2  # bits of its flags
# The address space as one buffer: reading at an address then makes no ctypes object.
MEMORY = (ctypes.c_char * sys.maxsize).from_address(0)


class DLTensor(ctypes.Structure):
    """Room for one DLTensor. `unpack_tensor` reads it: eight fields one by one cost more."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint32),
        ("shape", ctypes.c_uint64),
        ("strides", ctypes.c_uint64),
        ("byte_offset", ctypes.c_uint64),
    )


COPY = "copy it into an array of NumPy, CuPy or torch"  # the remedy for a broken producer

# PyObject* arguments are declared void* and given as id(): faster than py_object.
capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
FILL = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(DLTensor))
CURRENT_STREAM = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(DLTensor)
)


def read(source: Any, *, stream: int | None = None) -> View:
    """Describe an array of any DLPack producer; copy nothing and keep the producer alive.

    A type with the C exchange API (torch >= 2.10) says on which stream it works: for CUDA arrays
    `view.stream` is that raw handle, never 0 (1 is the legacy default stream), and `stream` is not
    used. Any other CUDA producer is asked to make `stream` wait (a raw handle in DLPack's
    numbering: 1 or None legacy default, 2 per-thread default), and `view.stream` is None.
    Does not block the host. Resizing the array or replacing its storage ends the view's validity.

    Raises:
        GradientTypeError: not an array, or one without dense memory on a CPU or CUDA device, or
            of a dtype that is not in DTYPES.
        GradientError: a torch tensor that requires grad.
    """
    return (_readers.get(type(source)) or _learn(type(source)))(source, stream)


_readers: dict[type, Callable[[Any, int | None], View]] = {}  # grows with types, not with arrays


def _learn(kind: type) -> Callable[[Any, int | None], View]:
    """Choose how to read objects of type `kind`, and remember it."""
    autograd = is_tensor(kind)
    functions = _exchange_functions(kind)
    if functions:
        reader = _exchange_reader(*functions, autograd=autograd)
    else:
        reader = _read_resolved if autograd else _read_capsule
    _readers[kind] = reader
    return reader


def is_tensor(kind: type) -> bool:
    """Return whether objects of type `kind` are torch's tensors: with a graph and a neg bit."""
    return hasattr(kind, "requires_grad") and hasattr(kind, "resolve_neg")


def _exchange_functions(kind: type) -> tuple[int, int] | None:
    """Return the addresses of a type's two functions of the C exchange API, if it has them."""
    capsule = getattr(kind, "__dlpack_c_exchange_api__", None)
    try:
        address = capsule_pointer(id(capsule), b"dlpack_exchange_api")
    except ValueError:
        return None
    while address:
        # DLPackExchangeAPI {version, prev_api, allocator, from_py_object, to_py_object,
        #                    dltensor_from_py_object_no_sync, current_work_stream}
        _, older = UNPACK_INTEGERS[2](MEMORY, address)
        if unpack_version(MEMORY, address)[0] == VERSION[0]:
            *_, fill, current_stream = UNPACK_INTEGERS[7](MEMORY, address)
            return (fill, current_stream) if fill else None  # only `fill` may be NULL
        address = older
    return None


def _exchange_reader(
    fill_address: int, stream_address: int, *, autograd: bool
) -> Callable[[Any, int | None], View]:
    fill = FILL(fill_address)
    current_stream = CURRENT_STREAM(stream_address)

    def read_exchange(source: Any, _stream: int | None) -> View:
        tensor = DLTensor()
        given = source
        try:
            if autograd and (source.requires_grad or source.is_neg()):
                source = _resolve(source)
            fill(id(source), tensor)  # a failure arrives as the exception that the producer set
        except ReduceError:
            raise
        except Exception as cause:  # the producer's code may raise anything
            raise _refusal(source, cause) from cause
        view = _view(tensor, 0, source, source)
        if source is not given:
            view.writable = False  # a copy with the sign resolved
        if view.device == "cuda":
            # `tensor` has been read, so its first word can take the stream.
            current_stream(CUDA, view.device_id, tensor)
            view.stream = tensor.data or LEGACY_STREAM
        return view

    return read_exchange


def _resolve(tensor: Any) -> Any:
    """Return a torch tensor whose memory has the right sign: DLPack leaves out the neg bit."""
    if tensor.requires_grad:
        remedy = "hand over p.grad of a parameter p, or .detach() of the tensor"
        raise GradientError(_text(tensor, "requires grad, so it is no plain gradient", remedy))
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def _read_resolved(source: Any, stream: int | None) -> View:
    return _read_capsule(_resolve(source), stream)


def _read_capsule(source: Any, stream: int | None) -> View:
    try:
        capsule = _export(source, stream)
    except Exception as cause:  # the producer's code may raise anything
        dtype = getattr(getattr(source, "dtype", None), "name", None)
        if dtype == "bfloat16" and isinstance(cause, BufferError) and hasattr(source, "view"):
            # NumPy refuses ml_dtypes' bfloat16. The same bits, called float16, it exports.
            view = _read_capsule(source.view("float16"), stream)
            view.dtype = "bfloat16"
            return view
        raise _refusal(source, cause) from cause
    # The capsule is not consumed (renamed): its own destructor releases the export with the view.
    owner = (source, capsule)
    try:
        address = capsule_pointer(id(capsule), b"dltensor_versioned")
    except ValueError:
        pass
    else:
        major, minor = unpack_version(MEMORY, address)
        if major != VERSION[0]:
            problem = f"exports DLPack {major}.{minor}, which cannot be read"
            raise GradientTypeError(_text(source, problem, COPY))
        view = _view(MEMORY, address + VERSIONED_TENSOR, source, owner)
        view.writable = not unpack_flags(MEMORY, address + FLAGS)[0] & (READ_ONLY | IS_COPIED)
        return view
    try:
        address = capsule_pointer(id(capsule), b"dltensor")
    except ValueError as cause:
        problem = f"returned {_name(capsule)} from __dlpack__, not a fresh DLPack capsule"
        raise GradientTypeError(_text(source, problem, COPY)) from cause
    return _view(MEMORY, address, source, owner)


def _export(source: Any, stream: int | None) -> Any:
    """Return the capsule of `source`; a CUDA producer makes `stream` wait."""
    # None suits every device, so the device matters only when there is a stream to pass on.
    if stream is not None and source.__dlpack_device__()[0] in (CPU, CUDA_HOST):
        stream = None
    try:
        return source.__dlpack__(stream=stream, max_version=VERSION)
    except TypeError:  # a producer from before DLPack 1.0
        return source.__dlpack__(stream=stream)


def _view(memory: Any, offset: int, source: Any, owner: Any) -> View:
    """Turn the DLTensor at `offset` of `memory` into a View without a stream."""
    data, device_type, device_id, ndim, dtype, shape_at, strides_at, byte_offset = unpack_tensor(
        memory, offset
    )
    try:
        device = DEVICES[device_type]
        name = NAMES[dtype]
        unpack = UNPACK_INTEGERS[ndim]
    except KeyError:
        raise _unsupported(source, device_type, dtype, ndim) from None
    if not shape_at and ndim:
        raise GradientTypeError(_text(source, f"exports {ndim} dimensions without a shape", COPY))
    shape = unpack(MEMORY, shape_at)
    # NULL strides mean contiguous (allowed before DLPack 1.2).
    strides = _normalize(shape, unpack(MEMORY, strides_at)) if strides_at else None
    if not data and 0 not in shape:
        problem = f"of shape {shape} has no memory (meta, fake, distributed or freed)"
        remedy = "hand over a real array, such as a DTensor's .to_local()"
        raise GradientTypeError(_text(source, problem, remedy))
    return View(data + byte_offset, name, shape, strides, device, device_id, None, owner)


@lru_cache(maxsize=4096)
def _normalize(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return None if these strides are C-contiguous, else the strides."""
    if 0 in shape:
        return None
    expected = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != expected:
            return strides
        expected *= extent
    return None


def _name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _text(source: Any, problem: str, remedy: str) -> str:
    return f"{_name(source)} {problem}; {remedy}"


def _refusal(source: Any, cause: Exception) -> GradientTypeError:
    """Return the error for a source that was not exported."""
    if not hasattr(source, "__dlpack__"):
        remedy = "hand over an array, or for a number a 0-dim array"
        return GradientTypeError(_text(source, "is not an array: it has no __dlpack__", remedy))
    reason = (str(cause).splitlines() or [""])[0]  # torch appends its C++ stack
    problem = f"cannot be read through DLPack ({type(cause).__name__}: {reason})"
    remedy = "hand over a dense array (.to_dense() of a sparse tensor) of dtype"
    return GradientTypeError(_text(source, problem, f"{remedy} {', '.join(DTYPES)}"))


def _unsupported(source: Any, device_type: int, dtype: int, ndim: int) -> GradientTypeError:
    """Return the error for a DLTensor whose device, dtype or ndim is not known here."""
    if device_type not in DEVICES:
        problem = f"lies on DLPack device type {device_type}, neither CPU nor CUDA"
        return GradientTypeError(_text(source, problem, "copy it to one of these"))
    if dtype not in NAMES:
        code, bits, lanes = struct.unpack("=BBH", struct.pack("=I", dtype))
        name = getattr(source, "dtype", "?")
        problem = f"has unsupported dtype {name} (DLPack code {code}, {bits} bits, {lanes} lanes)"
        return GradientTypeError(_text(source, problem, f"cast it to one of {', '.join(DTYPES)}"))
    return GradientTypeError(_text(source, f"has {ndim} dimensions", f"reshape it to {MAX_NDIM}"))
