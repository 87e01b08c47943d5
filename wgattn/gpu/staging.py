"""Memory through which the host reads what is on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .guard import Errors

if TYPE_CHECKING:
    from .device import Device


class Staging:
    """A buffer that the host can map: `encode` puts a copy into a command encoder, and once that is submitted `bytes` waits for it."""

    def __init__(self, device: Device, nbytes: int):
        self._device, self._nbytes = device, nbytes
        self._size = -(-nbytes // 4) * 4
        self._buffer = self._make()

    def _make(self) -> Any:
        usage = self._device.api.BufferUsage
        with self._device.guard(f"make a buffer of {self._size} bytes to read from"):
            return self._device.gpu.create_buffer(size=self._size, usage=usage.MAP_READ | usage.COPY_DST)

    def encode(self, encoder: Any, buffer: Any, offset: int) -> None:
        """Copy from a byte offset (multiple of 4) of a buffer."""
        if self._buffer.map_state != "unmapped":  # a wait was given up; wgpu-native ends a process that submits a mapped buffer
            self._buffer = self._make()
        encoder.copy_buffer_to_buffer(buffer, offset, self._buffer, 0, self._size)

    def bytes(self) -> np.ndarray:
        """(nbytes,) uint8: what the copy brought."""
        device, doing = self._device, f"read {self._nbytes} bytes"
        with device.guard(doing):
            mapping = self._buffer.map_async("READ_NOSYNC")  # plain "READ" would make and submit an empty command buffer first
        with Errors(device, doing):
            device.backend.wait(mapping)
        with device.guard(doing):
            try:
                return np.frombuffer(self._buffer.read_mapped(), np.uint8)[: self._nbytes].copy()
            finally:
                self._buffer.unmap()
