"""The cache of keys and values: its shape, its limits, copies of it on the host."""

import numpy as np
import pytest

from tests.helpers import poison
from wgattn.attention.kv_cache import KVCache
from wgattn.errors import ArgumentError, CapacityError
from wgattn.gpu import Device


@pytest.mark.parametrize(("dtype", "itemsize"), [("f32", 4), ("f16", 2)])
@pytest.mark.parametrize(("heads", "dim", "capacity"), [(1, 4, 1), (3, 64, 10), (2, 8, 333)])
def test_a_cache_holds_zeros_head_by_head(device: Device, dtype, itemsize, heads, dim, capacity):
    cache = KVCache(device, heads, dim, capacity, dtype)
    assert (cache.num_kv_heads, cache.head_dim, cache.capacity, cache.dtype) == (heads, dim, capacity, dtype)
    assert cache.nbytes == 2 * heads * dim * capacity * itemsize
    for store in (cache.keys, cache.values):
        assert store.shape[-3:] == (heads, capacity, dim)
        assert store.size == heads * capacity * dim
        assert store.dtype.itemsize == itemsize
        assert not store.numpy().any()
    assert cache.keys.buffer is not cache.values.buffer


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_copies_are_float32_of_the_first_positions(device: Device, rng, dtype):
    heads, capacity, dim = 3, 11, 8
    cache = KVCache(device, heads, dim, capacity, dtype)
    written = {}
    for name, store in (("k", cache.keys), ("v", cache.values)):
        array = poison(store.shape, store.dtype)
        array[..., :7, :] = written[name] = rng.standard_normal((heads, 7, dim)).astype(store.dtype)
        store.write(array)
    for length in (0, 1, 6, 7):
        for name, copy in (("k", cache.k(length)), ("v", cache.v(length))):
            assert (copy.shape, copy.dtype) == ((heads, length, dim), np.float32)
            np.testing.assert_array_equal(copy, written[name][:, :length].astype(np.float32))
    copy = cache.k(7)
    copy[:] = 0  # a copy
    np.testing.assert_array_equal(cache.k(7), written["k"].astype(np.float32))


@pytest.mark.parametrize("dtype", ["float32", "bf16", "q8", "Q8_1", "", None])
def test_another_dtype_is_refused(device: Device, dtype):
    with pytest.raises(ArgumentError, match="stored as f32, f16, q8_0 or q4_0, not"):
        KVCache(device, 1, 4, 4, dtype)


@pytest.mark.parametrize(("dtype", "fits"), [("f32", 2048), ("f16", 4096)])
def test_a_cache_that_does_not_fit_tells_how_much_would(devices, dtype, fits):
    small = devices["small_binding"]  # 1 MiB
    assert KVCache(small, 2, 64, fits, dtype).capacity == fits
    needed = (fits + 1) * (1 << 20) // fits
    with pytest.raises(CapacityError, match=rf"{dtype} cache of {fits + 1} positions takes {needed} bytes.* {fits} positions"):
        KVCache(small, 2, 64, fits + 1, dtype)
