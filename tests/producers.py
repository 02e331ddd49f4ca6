"""Arrays whose DLPack export says what no array of NumPy would say."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

__all__ = ["CUDA", "Producer"]

CUDA = 2  # DLDeviceType

# Offsets of DLTensor {void *data; DLDevice {int32 type, id}; int32 ndim; DLDataType; int64 *shape,
# *strides; uint64 byte_offset}, which a DLManagedTensor starts with.
DEVICE_TYPE, STRIDES = 8, 32

capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class Producer:
    """Exports `array` as if it lay elsewhere, or without strides (then it is contiguous)."""

    def __init__(self, array: np.ndarray, *, device_type: int = 1, strides: bool = True) -> None:
        self._array = array
        self._device_type = device_type
        self._strides = strides

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device_type, 0

    def __dlpack__(self, **_: Any) -> Any:
        capsule = self._array.__dlpack__()
        tensor = capsule_pointer(capsule, b"dltensor")
        ctypes.c_int32.from_address(tensor + DEVICE_TYPE).value = self._device_type
        if not self._strides:
            ctypes.c_void_p.from_address(tensor + STRIDES).value = None
        return capsule
