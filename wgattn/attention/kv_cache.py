"""The keys and values of one attention layer, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import ArgumentError, CapacityError, ShapeError
from ..gpu import Arena, Device, Part, Recording, Tensor, grid
from .problem import Rows

KV_DTYPES = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16)}


class KVCache:
    """Keys and values, each (batch, num_kv_heads, capacity, head_dim) row-major in f32 or f16: a head's tokens lie together.

    Rows are padded to a multiple of 4 channels, so that they never share a word. `arena`: where the memory comes from, if not straight from the device.

    Raises:
        ArgumentError: dtype other than "f32" and "f16". CapacityError: one of the two does not fit a binding of the device.
    """

    def __init__(self, device: Device, num_kv_heads: int, head_dim: int, capacity: int, dtype: str = "f32", *, batch: int = 1, arena: Arena | None = None):
        if dtype not in KV_DTYPES:
            raise ArgumentError(f"A KV cache is stored as f32 or f16, not {dtype!r}.")
        self.device, self.batch, self.dtype = device, batch, dtype
        self.num_kv_heads, self.head_dim, self.capacity = num_kv_heads, head_dim, capacity
        self.stride = -(-head_dim // 4) * 4
        """Elements from one position to the next."""
        shape = (batch, num_kv_heads, capacity, self.stride)
        nbytes = int(np.prod(shape, dtype=np.int64)) * KV_DTYPES[dtype].itemsize
        limit = min(device.profile.max_binding, device.profile.max_buffer)
        if nbytes > limit:
            fits = limit * capacity // nbytes
            raise CapacityError(f"A {dtype} cache of {capacity} positions takes {nbytes} bytes a layer; {device.name} can bind {fits} positions.")
        self.keys = (arena or device).empty(shape, KV_DTYPES[dtype])
        self.values = (arena or device).empty(shape, KV_DTYPES[dtype])

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> KVCache:
        """A cache in tensors that are there, both (num_kv_heads, capacity, head_dim) or with a batch in front; head_dim a multiple of 4.

        Raises ShapeError, TypeError for tensors that cannot be one.
        """
        kinds = {dtype: name for name, dtype in KV_DTYPES.items()}
        if keys.dtype != values.dtype or keys.dtype not in kinds:
            raise TypeError(f"The keys of a cache are {keys.dtype} and its values {values.dtype}; both must be float32, or both float16.")
        if keys.shape != values.shape or keys.ndim not in (3, 4) or keys.shape[-1] % 4 or not keys.size:
            raise ShapeError(f"The keys of a cache have shape {keys.shape}, its values {values.shape}; both must be (KV heads, capacity, a multiple of 4).")
        cache = cls.__new__(cls)
        cache.device, cache.dtype = keys.device, kinds[keys.dtype]
        cache.keys, cache.values = (t.reshape((1,) * (4 - t.ndim) + t.shape) for t in (keys, values))
        cache.batch, cache.num_kv_heads, cache.capacity, cache.head_dim = cache.keys.shape
        cache.stride = cache.head_dim
        return cache

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    @property
    def store_part(self) -> str:
        return f"cache_store_{self.dtype}"

    def rows(self, tensor: Tensor) -> Rows:
        """How `keys` or `values` lie in memory."""
        head = self.capacity * self.stride
        return Rows(tensor, self.num_kv_heads * head, head, self.stride)

    def k(self, length: int) -> np.ndarray:
        """([batch,] num_kv_heads, length, head_dim) float32 copy of the first `length` keys; no batch axis for a batch of 1."""
        return self._copy(self.keys, length)

    def v(self, length: int) -> np.ndarray:
        """([batch,] num_kv_heads, length, head_dim) float32 copy of the first `length` values; no batch axis for a batch of 1."""
        return self._copy(self.values, length)

    def _copy(self, tensor: Tensor, length: int) -> np.ndarray:
        array = tensor.numpy()[:, :, :length, : self.head_dim].astype(np.float32)
        return array[0] if self.batch == 1 else array

    def record_append(self, recording: Recording, *, step: Any, keys: Any, values: Any, rows: int, dtype: str) -> None:
        """Append a dispatch that stores the step's new keys and values, each (batch, rows, num_kv_heads, head_dim) in `dtype`."""
        kind = f"{'any' if self.head_dim % 4 else 'vec4'}_{dtype}"
        kernel = self.device.kernel(
            "attention/append",
            "step",
            Part.of(f"parts/rows_{kind}", name="new_keys", width="HEAD_DIM"),
            Part.of(f"parts/rows_{kind}", name="new_values", width="VALUE_DIM"),
            Part.of(f"parts/store_vec4_{self.dtype}", name="keys"),
            Part.of(f"parts/store_vec4_{self.dtype}", name="values"),
            HEAD_DIM=self.head_dim,
            VALUE_DIM=self.head_dim,
            WORKGROUP=64,
        )
        invocations = self.batch * rows * self.num_kv_heads * self.stride // 2
        buffers = {"step": step, "new_keys": keys, "new_values": values, "keys": self.keys, "values": self.values}
        params = {"batch": self.batch, "kv_heads": self.num_kv_heads, "capacity": self.capacity, "rows": rows}
        recording.add(kernel, grid(-(-invocations // 64), self.device.profile.max_workgroups), buffers, params, label="KV append")

    def copy_rows(self, source: KVCache, ranges: Sequence[tuple[int, int, int]]) -> None:
        """Copy positions from a cache of the same geometry (capacities may differ): (from, to, count) each; within one cache, downwards."""
        itemsize = KV_DTYPES[self.dtype].itemsize * self.stride
        with self.device.commands() as encoder:
            for theirs, ours in ((source.keys, self.keys), (source.values, self.values)):
                staging = self.device.buffer(sum(n for _, _, n in ranges) * itemsize * self.batch * self.num_kv_heads) if source is self else ours.buffer
                moves, at = [], 0
                for head in range(self.batch * self.num_kv_heads):
                    for begin, place, count in ranges:
                        inside = (head * source.capacity + begin) * itemsize
                        target = (head * self.capacity + place) * itemsize
                        moves.append((inside, at if source is self else target, target, count * itemsize))
                        at += count * itemsize
                moves = [m for m in moves if m[3]]
                for inside, between, _, nbytes in moves:
                    encoder.copy_buffer_to_buffer(theirs.buffer, theirs.offset + inside, staging, between, nbytes)
                for _, between, target, nbytes in moves if source is self else ():
                    encoder.copy_buffer_to_buffer(staging, between, ours.buffer, ours.offset + target, nbytes)
