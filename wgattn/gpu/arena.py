"""Many tensors in few buffers: WebGPU implementations track buffers, and each one there is makes every dispatch dearer for the host."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..errors import CapacityError
from .profile import DeviceProfile
from .tensor import Tensor, checked_shape, converted, dtype_of, storage_of

if TYPE_CHECKING:
    from .device import Device

_ALIGNMENT = 256
"""Of the offsets: the largest that WebGPU allows a device to ask for."""
_SHARE = 32
"""An arena makes buffers of about this part of what is expected: the last one may stay empty."""


class Store(Protocol):
    """What makes tensors: a device, or an arena on it."""

    @property
    def profile(self) -> DeviceProfile: ...

    @property
    def name(self) -> str: ...

    def tensor(self, array: Any, dtype: Any = None) -> Tensor: ...


class Arena:
    """Gives out tensors that share buffers. A buffer lives as long as one of its tensors does.

    Tensors of one arena may not be read and written in the same dispatch: to WebGPU a buffer is one or the other.

    Args:
        expected: bytes that will be asked for in all; any number of them works.
    """

    def __init__(self, device: Device, expected: int):
        self.device = device
        self.nbytes = 0
        """Bytes of the buffers made."""
        self._block = min(max(expected // _SHARE, 1 << 16), device.profile.max_buffer // _ALIGNMENT * _ALIGNMENT)
        self._open: list[list[Any]] = []  # [buffer, bytes used, bytes] of those with room left

    @property
    def profile(self) -> DeviceProfile:
        return self.device.profile

    @property
    def name(self) -> str:
        return self.device.name

    def empty(self, shape: tuple[int, ...], dtype: Any = np.float32) -> Tensor:
        """A tensor of zeros. ShapeError for a shape that cannot be; CapacityError when it does not fit a binding."""
        shape, dtype = checked_shape(shape), dtype_of(dtype)
        nbytes = max(16, math.prod(shape) * dtype.itemsize)
        limit = self.device.profile.max_binding
        if nbytes > limit:
            raise CapacityError(f"A tensor of shape {shape} takes {nbytes} bytes; {self.device.name} can bind {limit}.")
        room = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        place = next((b for b in self._open if b[1] + room <= b[2]), None)
        if place is None:
            size = max(room, self._block)
            place = [self.device.buffer(size), 0, size]
            self._open.append(place)
            self.nbytes += size
        offset, place[1] = place[1], place[1] + room
        self._open = [b for b in self._open if b[1] < b[2]]
        return Tensor(self.device, shape, dtype, place[0], offset)

    def tensor(self, array: Any, dtype: Any = None) -> Tensor:
        """A copy of an array, stored as `Device.tensor` would."""
        array = np.asarray(array)
        dtype = storage_of(array) if dtype is None else dtype_of(dtype)
        array = converted(array, dtype)  # before memory is taken
        tensor = self.empty(array.shape, dtype)
        tensor.write(array)
        return tensor
