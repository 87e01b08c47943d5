"""An array on the device."""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import ArgumentError, CapacityError, ShapeError

if TYPE_CHECKING:
    from .device import Device
    from .profile import DeviceProfile

OFFSET_ALIGNMENT = 256
"""Bytes: the largest alignment of a binding's offset that WebGPU allows a device to ask for."""

DTYPES = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "u32": np.dtype(np.uint32), "i32": np.dtype(np.int32)}


def dtype_of(dtype: Any) -> np.dtype:
    """The NumPy dtype of a storage type, given as "f32", "float32", np.float32 ...; TypeError for what the GPU cannot store."""
    found = np.dtype(DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype)
    if found not in DTYPES.values():
        raise TypeError(f"dtype {found} cannot be stored on the GPU; use one of {', '.join(d.name for d in DTYPES.values())}.")
    return found


def storage_of(array: np.ndarray) -> np.dtype:
    """The dtype that an array is stored in: float64 becomes float32, bool uint32, int64 int32, and what the GPU can store stays."""
    native = array.dtype.newbyteorder("=")
    return dtype_of({"float64": np.float32, "bool": np.uint32, "int64": np.int32}.get(native.name, native))


def converted(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The array in a storage type, where that keeps its values but for the rounding of floats.

    TypeError for what is no real number; ArgumentError for numbers that an integer type cannot hold.
    """
    if array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
        raise TypeError(f"An array of {array.dtype} cannot be stored as {dtype}.")
    if dtype.kind in "iu" and array.size:
        if array.dtype.kind not in "biu" and not (np.isfinite(array).all() and (array == np.trunc(array)).all()):
            raise ArgumentError(f"An array of {array.dtype} with fractions does not fit {dtype}.")
        limits, lowest, highest = np.iinfo(dtype), int(array.min()), int(array.max())
        if lowest < limits.min or highest > limits.max:
            raise ArgumentError(f"Integers from {lowest} to {highest} do not fit {dtype}.")
    with np.errstate(over="ignore", invalid="ignore"):  # too large for f16: infinite; NaN stays NaN
        return array.astype(dtype, copy=False)


def _whole_numbers(shape: Iterable[int]) -> tuple[int, ...]:
    try:
        return tuple(operator.index(n) for n in shape)
    except TypeError:
        raise ShapeError(f"A shape is a sequence of whole numbers, not {shape!r}.") from None


def checked_shape(shape: Iterable[int]) -> tuple[int, ...]:
    """The shape as integers, or ShapeError."""
    found = _whole_numbers(shape)
    if min(found, default=0) < 0 or math.prod(n or 1 for n in found) >= 1 << 60:
        raise ShapeError(f"A tensor cannot have the shape {found}.")
    return found


class Slice(NamedTuple):
    """Part of a buffer, for binding: offset and size in bytes, the offset a multiple of OFFSET_ALIGNMENT."""

    buffer: Any
    offset: int
    size: int


class Tensor:
    """A dense row-major array in a storage buffer: `shape`, `dtype` (NumPy), `numpy()` for a copy on the host."""

    def __init__(self, device: Device, shape: tuple[int, ...], dtype: np.dtype, buffer: Any, offset: int | None = None):
        self.device, self.shape, self.dtype, self.buffer = device, tuple(shape), dtype, buffer
        self._offset = offset

    @property
    def offset(self) -> int:
        """Where in the buffer it begins, in bytes."""
        return self._offset or 0

    @property
    def binding(self) -> dict[str, Any]:
        """What a bind group holds: the whole buffer, or its part of a buffer that it shares."""
        if self._offset is None:
            return {"buffer": self.buffer}
        return {"buffer": self.buffer, "offset": self._offset, "size": max(16, -(-self.nbytes // 4) * 4)}

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def numpy(self) -> np.ndarray:
        """A copy on the host; waits for the work submitted so far."""
        return self.device.read(self.buffer, self.dtype, self.size, self.offset).reshape(self.shape)

    def write(self, array: np.ndarray) -> None:
        """Replace the contents; the shape must be equal, the values are converted to the tensor's dtype (see `converted`)."""
        array = np.asarray(array)
        if array.shape != self.shape:
            raise ShapeError(f"An array of shape {array.shape} cannot be written to a tensor of shape {self.shape}.")
        self.device.write(self.buffer, converted(array, self.dtype), self.offset)

    def reshape(self, *shape: int) -> Tensor:
        """The same memory under another shape."""
        shape = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        shape = _whole_numbers(shape)
        if shape.count(-1) == 1:
            known = math.prod(n for n in shape if n != -1)
            shape = tuple((self.size // known if known > 0 else -1) if n == -1 else n for n in shape)
        if min(shape, default=0) < 0 or math.prod(shape) != self.size:
            raise ShapeError(f"A tensor of shape {self.shape} cannot be reshaped to {shape}.")
        return Tensor(self.device, shape, self.dtype, self.buffer, self._offset)

    def __repr__(self) -> str:
        return f"Tensor(shape={self.shape}, dtype={self.dtype.name}, device={self.device.name!r})"

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        raise ArgumentError("A device tensor does not turn into a NumPy array by itself; call .numpy() to copy it to the host.")


class Store(ABC):
    """What makes tensors: a device, or an arena on it."""

    profile: DeviceProfile
    name: str

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: Any = np.float32) -> Tensor:
        """A tensor of zeros. ShapeError for a shape that cannot be; CapacityError when it does not fit a binding."""

    def tensor(self, array: Any, dtype: Any = None) -> Tensor:
        """Copy an array to the device. float64 becomes float32, bool becomes uint32; dtype: float32, float16, uint32 or int32.

        TypeError for what cannot be stored so; ArgumentError for integers that do not fit; CapacityError.
        """
        array = np.asarray(array)
        dtype = storage_of(array) if dtype is None else dtype_of(dtype)
        array = converted(array, dtype)  # before memory is taken
        tensor = self.empty(array.shape, dtype)
        tensor.write(array)
        return tensor

    def _checked(self, shape: tuple[int, ...], dtype: Any) -> tuple[tuple[int, ...], np.dtype, int]:
        """Shape, dtype and bytes of a tensor that fits a binding; errors as `empty`."""
        shape, dtype = checked_shape(shape), dtype_of(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        limit = self.profile.max_binding
        if nbytes > limit:
            raise CapacityError(f"A tensor of shape {shape} takes {nbytes} bytes; {self.name} can bind {limit}.")
        return shape, dtype, nbytes
