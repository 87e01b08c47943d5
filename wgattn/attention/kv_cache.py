"""The keys and values of one attention layer, on the device."""

from __future__ import annotations

import numpy as np

from ..errors import ArgumentError, CapacityError
from ..gpu import Device, Tensor
from .problem import Rows

KV_DTYPES = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16)}


class KVCache:
    """Keys and values, each (num_kv_heads, capacity, head_dim) row-major in f32 or f16: a head's tokens lie together.

    Raises:
        ArgumentError: dtype other than "f32" and "f16". CapacityError: one of the two does not fit a binding of the device.
    """

    def __init__(self, device: Device, num_kv_heads: int, head_dim: int, capacity: int, dtype: str = "f32"):
        if dtype not in KV_DTYPES:
            raise ArgumentError(f"A KV cache is stored as f32 or f16, not {dtype!r}.")
        self.num_kv_heads, self.head_dim, self.capacity, self.dtype = num_kv_heads, head_dim, capacity, dtype
        shape = (num_kv_heads, capacity, head_dim)
        nbytes = int(np.prod(shape)) * KV_DTYPES[dtype].itemsize
        if nbytes > device.profile.max_binding:
            fits = device.profile.max_binding * capacity // nbytes
            raise CapacityError(f"A {dtype} cache of {capacity} positions takes {nbytes} bytes a layer; {device.name} can bind {fits} positions.")
        self.keys = device.empty(shape, KV_DTYPES[dtype])
        self.values = device.empty(shape, KV_DTYPES[dtype])

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    @property
    def store_part(self) -> str:
        return f"cache_store_{self.dtype}"

    def rows(self, tensor: Tensor) -> Rows:
        """How `keys` or `values` lie in memory."""
        return Rows(tensor, tensor.size, self.capacity * self.head_dim, self.head_dim)

    def k(self, length: int) -> np.ndarray:
        """(num_kv_heads, length, head_dim) float32 copy of the first `length` keys."""
        return self.keys.numpy()[:, :length].astype(np.float32)

    def v(self, length: int) -> np.ndarray:
        """(num_kv_heads, length, head_dim) float32 copy of the first `length` values."""
        return self.values.numpy()[:, :length].astype(np.float32)
