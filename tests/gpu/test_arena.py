"""Tensors that share buffers behave like tensors of their own."""

import numpy as np
import pytest

from wgattn import CapacityError, Device
from wgattn.gpu import Arena, Recording
from wgattn.gpu.kernel import Kernel
from wgattn.gpu.shader import Source


def copier(device: Device) -> Kernel:
    text = """
@group(0) @binding(0) var<storage, read> source: array<u32>;
@group(0) @binding(1) var<storage, read_write> sink: array<u32>;
@compute @workgroup_size(1) fn main() { for (var i = 0u; i < arrayLength(&source); i++) { sink[i] = source[i] + 1u; } }
"""
    return Kernel(device, Source("copier", text, (("source", "read-only-storage"), ("sink", "storage")), {}, None, 1, 0))


@pytest.mark.parametrize("expected", [0, 1000, 1 << 22])
def test_tensors_keep_apart(device, rng, expected):
    arena = Arena(device, expected)
    arrays = [rng.integers(0, 2**32, rng.integers(1, 3000), dtype=np.uint32) for _ in range(40)]
    tensors = [arena.tensor(a) for a in arrays]
    for tensor, array in zip(tensors, arrays, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array)
    tensors[7].write(np.zeros_like(arrays[7]))
    for i, (tensor, array) in enumerate(zip(tensors, arrays, strict=True)):
        np.testing.assert_array_equal(tensor.numpy(), array * (i != 7))
    assert len({id(t.buffer) for t in tensors}) < len(tensors)
    assert arena.nbytes >= sum(t.nbytes for t in tensors)


def test_kernels_see_a_tensor_and_nothing_of_its_neighbours(device):
    reads, writes = Arena(device, 1 << 16), Arena(device, 1 << 16)
    before, source, after = (reads.tensor(np.full(n, n, np.uint32)) for n in (5, 77, 9))
    sinks = [writes.empty((n,), np.uint32) for n in (64, 77, 64)]
    recording = Recording(device)
    recording.add(copier(device), (1,), {"source": source, "sink": sinks[1]})
    recording.replay()
    np.testing.assert_array_equal(sinks[1].numpy(), np.full(77, 78))  # arrayLength is the tensor's, not the buffer's
    assert not sinks[0].numpy().any()
    assert not sinks[2].numpy().any()
    assert before.numpy().tolist() == [5] * 5
    assert after.numpy().tolist() == [9] * 9


def test_stored_like_a_device_stores(device):
    arena = Arena(device, 0)
    assert arena.tensor(np.arange(3.0)).dtype == np.float32
    assert arena.tensor(np.arange(3), "f16").numpy().tolist() == [0, 1, 2]
    odd = arena.tensor(np.arange(7, dtype=np.float16))
    next_to_it = arena.tensor(np.ones(3, np.float16))
    odd.write(np.arange(7, 14))
    assert odd.reshape(7, 1).numpy().ravel().tolist() == list(range(7, 14))
    assert next_to_it.numpy().tolist() == [1, 1, 1]


def test_little_is_wasted(device, rng):
    sizes = rng.integers(1000, 100_000, 200)
    arena = Arena(device, int(4 * sizes.sum()))
    tensors = [arena.empty((n,)) for n in sizes]
    assert arena.nbytes < 1.08 * sum(t.nbytes for t in tensors)
    assert len({id(t.buffer) for t in tensors}) < 50


def test_too_large_for_a_binding():
    device = Device(limits={"max-storage-buffer-binding-size": 1 << 16})
    arena = Arena(device, 1 << 20)
    arena.empty(((1 << 16) // 4,))
    with pytest.raises(CapacityError, match="65540"):
        arena.empty(((1 << 16) // 4 + 1,))
