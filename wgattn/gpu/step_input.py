"""The inputs of a recorded step in one buffer, so that one write brings all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from .recording import Copy
from .tensor import OFFSET_ALIGNMENT, Slice, Tensor

if TYPE_CHECKING:
    from .device import Device


class StepInput:
    """The state of a step (`parts/step.wgsl`) and float32 arrays of so many elements each, by name.

    `step` (uniform) and `self[name]` (storage) are what kernels bind.
    """

    def __init__(self, device: Device, sizes: Mapping[str, int]):
        self.device = device
        self._slices: dict[str, tuple[int, int]] = {}
        end = OFFSET_ALIGNMENT
        for name, count in sizes.items():
            self._slices[name] = (end, count)
            end += -(-4 * count // OFFSET_ALIGNMENT) * OFFSET_ALIGNMENT
        self._host = np.zeros(end // 4, np.float32)
        self._buffer = device.buffer(end, uniform=True)
        self.step = Slice(self._buffer, 0, 16)
        self.copies: list[Copy] = []
        """Copies on the device that the next replay has to begin with."""

    def __getitem__(self, name: str) -> Slice:
        offset, count = self._slices[name]
        return Slice(self._buffer, offset, -(-4 * count // 16) * 16)

    @property
    def nbytes(self) -> int:
        return self._host.nbytes

    def write(self, position: int, arrays: Mapping[str, Any]) -> None:
        """The next replay is one token at `position`, with these arrays or float32 tensors, at most as long as said; None is zeros.

        What is beyond a shorter one is zero.
        """
        self._host[:2].view(np.uint32)[:] = position, 1
        self.copies = []
        for name, array in arrays.items():
            offset, count = self._slices[name]
            if isinstance(array, Tensor):
                self.copies.append((array.buffer, array.offset, self._buffer, offset, 4 * array.size))
            else:
                self._host[offset // 4 : offset // 4 + (count if array is None else array.size)] = 0 if array is None else array.reshape(-1)
        self.device.write(self._buffer, self._host)
