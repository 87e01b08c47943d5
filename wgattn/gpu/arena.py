"""Many tensors in few buffers: WebGPU implementations track buffers, and each one there is makes every dispatch dearer for the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .profile import DeviceProfile
from .tensor import OFFSET_ALIGNMENT, Store, Tensor

if TYPE_CHECKING:
    from .device import Device

_SHARE = 32
"""An arena makes buffers of about this part of what is expected: the last one may stay empty."""


class Arena(Store):
    """Gives out tensors that share buffers. A buffer lives as long as one of its tensors does.

    Tensors of one arena may not be read and written in the same dispatch: to WebGPU a buffer is one or the other.

    Args:
        expected: bytes that will be asked for in all; any number of them works.
    """

    def __init__(self, device: Device, expected: int):
        self.device = device
        self.nbytes = 0
        """Bytes of the buffers made."""
        self._block = min(max(expected // _SHARE, 1 << 16), device.profile.max_buffer // OFFSET_ALIGNMENT * OFFSET_ALIGNMENT)
        self._open: list[list[Any]] = []  # [buffer, bytes used, bytes] of those with room left

    @property
    def profile(self) -> DeviceProfile:
        return self.device.profile

    @property
    def name(self) -> str:
        return self.device.name

    def empty(self, shape: tuple[int, ...], dtype: Any = np.float32) -> Tensor:
        """A tensor of zeros. ShapeError for a shape that cannot be; CapacityError when it does not fit a binding."""
        shape, dtype, nbytes = self._checked(shape, dtype)
        room = max(1, -(-nbytes // OFFSET_ALIGNMENT)) * OFFSET_ALIGNMENT
        place = next((b for b in self._open if b[1] + room <= b[2]), None)
        if place is None:
            size = max(room, self._block)
            place = [self.device.buffer(size), 0, size]
            self._open.append(place)
            self.nbytes += size
        offset, place[1] = place[1], place[1] + room
        self._open = [b for b in self._open if b[1] < b[2]]
        return Tensor(self.device, shape, dtype, place[0], offset)
