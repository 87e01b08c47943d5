"""The keys and values of one attention layer, on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import CapacityError, ShapeError
from ..gpu import Arena, Device, Part, Recording, Tensor, grid
from .kv_format import KV_FORMATS, kv_format
from .problem import Rows


class KVCache:
    """Keys and values, each (batch, num_kv_heads, capacity, head_dim) row-major: a head's tokens lie together. How rows are stored: `KVFormat`.

    `arena`: where the memory comes from, if not straight from the device.

    Raises:
        ArgumentError: dtype other than "f32", "f16", "q8_0" and "q4_0", in any case. CapacityError: one of the two does not fit a binding of the device.
    """

    def __init__(self, device: Device, num_kv_heads: int, head_dim: int, capacity: int, dtype: str = "f32", *, batch: int = 1, arena: Arena | None = None):
        self.format = kv_format(dtype)
        self.device, self.batch = device, batch
        self.num_kv_heads, self.head_dim, self.capacity = num_kv_heads, head_dim, capacity
        shape = self.format.shape(batch, num_kv_heads, capacity, head_dim)
        nbytes = math.prod(shape) * self.format.dtype.itemsize
        limit = device.profile.max_tensor
        if nbytes > limit:
            together = self.format.room(1)
            fits = limit // (batch * num_kv_heads * self.format.row_bytes(head_dim)) // together * together
            raise CapacityError(f"A {self.dtype} cache of {capacity} positions takes {nbytes} bytes a layer; {device.name} can bind {limit}: {fits} positions.")
        self.keys = (arena or device).empty(shape, self.format.dtype)
        self.values = (arena or device).empty(shape, self.format.dtype)

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> KVCache:
        """A cache in tensors that are there, both (num_kv_heads, capacity, head_dim) or with a batch in front; head_dim a multiple of 4.

        Raises ShapeError, TypeError for tensors that cannot be one.
        """
        kinds = {f.dtype: f for f in KV_FORMATS.values() if not f.quantised}
        if keys.dtype != values.dtype or keys.dtype not in kinds:
            raise TypeError(f"The keys of a cache are {keys.dtype} and its values {values.dtype}; both must be float32, or both float16.")
        if keys.shape != values.shape or keys.ndim not in (3, 4) or keys.shape[-1] % 4 or not keys.size:
            raise ShapeError(f"The keys of a cache have shape {keys.shape}, its values {values.shape}; both must be (KV heads, capacity, a multiple of 4).")
        cache = cls.__new__(cls)
        cache.device, cache.format = keys.device, kinds[keys.dtype]
        cache.keys, cache.values = (t.reshape((1,) * (4 - t.ndim) + t.shape) for t in (keys, values))
        cache.batch, cache.num_kv_heads, cache.capacity, cache.head_dim = cache.keys.shape
        return cache

    @property
    def dtype(self) -> str:
        """The name of the format."""
        return self.format.name

    @property
    def room(self) -> int:
        """Positions from one head to the next: the capacity, or a little more."""
        return self.format.room(self.capacity)

    @property
    def stride(self) -> int:
        """Elements from one position to the next."""
        return self.format.stride(self.head_dim)

    @property
    def aligned_dim(self) -> int:
        """Channels of a row, padded to a multiple of 4."""
        return -(-self.head_dim // 4) * 4

    @property
    def scales(self) -> int:
        """Word of `keys` and `values` at which the scales begin; 0 where there are none."""
        planes = self.format.planes(self.batch * self.num_kv_heads * self.room, self.head_dim)
        return planes[1][0] // 4 if self.format.quantised else 0

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def rows(self, tensor: Tensor) -> Rows:
        """How `keys` or `values` lie in memory."""
        head = self.room * self.stride
        return Rows(tensor, self.num_kv_heads * head, head, self.stride, self.scales)

    def k(self, length: int) -> np.ndarray:
        """([batch,] num_kv_heads, length, head_dim) float32 copy of the first `length` keys; no batch axis for a batch of 1."""
        return self._copy(self.keys, length)

    def v(self, length: int) -> np.ndarray:
        """([batch,] num_kv_heads, length, head_dim) float32 copy of the first `length` values; no batch axis for a batch of 1."""
        return self._copy(self.values, length)

    def _copy(self, tensor: Tensor, length: int) -> np.ndarray:
        array = self.format.dequantize(tensor.numpy(), self.batch * self.num_kv_heads, length, self.head_dim)
        return array if self.batch == 1 else array.reshape(self.batch, self.num_kv_heads, length, self.head_dim)

    def record_append(self, recording: Recording, *, step: Any, keys: Any, values: Any, rows: int, dtype: str) -> None:
        """Append a dispatch that stores the step's new keys and values, each (batch, rows, num_kv_heads, head_dim) in `dtype`."""
        kind = f"{'any' if self.head_dim % 4 else 'vec4'}_{dtype}"
        kernel = self.device.kernel(
            "attention/append",
            "step",
            Part.of(f"parts/rows_{kind}", name="new_keys", width="HEAD_DIM"),
            Part.of(f"parts/rows_{kind}", name="new_values", width="VALUE_DIM"),
            *self.format.append_parts("keys", "HEAD_DIM", "params.scales"),
            *self.format.append_parts("values", "VALUE_DIM", "params.scales"),
            *self.format.encode_parts,
            HEAD_DIM=self.head_dim,
            VALUE_DIM=self.head_dim,
            WORKGROUP=64,
        )
        invocations = self.batch * rows * self.num_kv_heads * 2 * self.format.units(self.head_dim)
        buffers = {"step": step, "new_keys": keys, "new_values": values, "keys": self.keys, "values": self.values}
        params = {"batch": self.batch, "kv_heads": self.num_kv_heads, "room": self.room, "rows": rows, "scales": self.scales}
        recording.add(kernel, grid(-(-invocations // 64), self.device.profile.max_workgroups), buffers, params, label="KV append")

    def copy_rows(self, source: KVCache, ranges: Sequence[tuple[int, int, int]]) -> None:
        """Copy positions from a cache of the same geometry (capacities may differ): (from, to, count) each; within one cache, downwards."""
        heads, positions = self.batch * self.num_kv_heads, sum(n for _, _, n in ranges)
        theirs, ours = (c.format.planes(heads * c.room, c.head_dim) for c in (source, self))
        with self.device.commands() as encoder:
            for a, b in ((source.keys, self.keys), (source.values, self.values)):
                for (inside, row), (place, _) in zip(theirs, ours, strict=True):
                    moves = [
                        (a.offset + inside + (head * source.room + begin) * row, b.offset + place + (head * self.room + to) * row, count * row)
                        for head in range(heads)
                        for begin, to, count in ranges
                        if count
                    ]
                    if source is self:  # within one buffer: by way of another
                        _copy_through(self.device.buffer(heads * positions * row), encoder, a.buffer, moves)
                        continue
                    for begin, to, nbytes in moves:
                        encoder.copy_buffer_to_buffer(a.buffer, begin, b.buffer, to, nbytes)


def _copy_through(staging: Any, encoder: Any, buffer: Any, moves: Sequence[tuple[int, int, int]]) -> None:
    """Copies within a buffer, (from, to, bytes) each: all is read before anything is written."""
    between = [0, *np.cumsum([nbytes for _, _, nbytes in moves]).tolist()]
    for (begin, _, nbytes), at in zip(moves, between, strict=False):
        encoder.copy_buffer_to_buffer(buffer, begin, staging, at, nbytes)
    for (_, to, nbytes), at in zip(moves, between, strict=False):
        encoder.copy_buffer_to_buffer(staging, at, buffer, to, nbytes)
