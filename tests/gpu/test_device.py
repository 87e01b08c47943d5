"""Choosing an adapter, limits, moving arrays, and what is measured about a device."""

import time
from dataclasses import replace

import numpy as np
import pytest

import wgattn
from tests.helpers import POISON
from wgattn.attention.paths import PATHS
from wgattn.attention.problem import Operands, Problem, Rows
from wgattn.errors import ArgumentError, CapacityError, DeviceError, ShapeError, Unsupported
from wgattn.gpu import Device, Readback, Recording, webgpu
from wgattn.gpu.profile import measure_subgroup_size

# ---- which adapter, which backend


def test_adapters_are_listed():
    adapters = wgattn.list_adapters()
    assert adapters
    assert all(isinstance(name, str) and name for name in adapters)


def test_an_adapter_is_chosen_by_part_of_its_name_in_any_case(monkeypatch):
    monkeypatch.delenv("WGATTN_ADAPTER", raising=False)
    best = wgattn.list_adapters()[0]
    assert Device().name in best
    for part in (best, best.upper(), best[:6].lower()):
        assert Device(adapter=part).name in best
    monkeypatch.setenv("WGATTN_ADAPTER", best[:6])
    assert Device().name in best


def test_the_argument_counts_more_than_the_environment(monkeypatch):
    best = wgattn.list_adapters()[0]
    monkeypatch.setenv("WGATTN_ADAPTER", "no such adapter")
    assert Device(adapter=best).name in best
    with pytest.raises(DeviceError, match="no such adapter"):
        Device()


def test_an_unknown_adapter_is_told_with_those_there_are():
    with pytest.raises(DeviceError) as caught:
        Device(adapter="Voodoo 2")
    assert "'Voodoo 2'" in str(caught.value)
    for name in wgattn.list_adapters():
        assert name in str(caught.value)


def test_an_unknown_backend_is_told_with_those_there_are(monkeypatch):
    with pytest.raises(ArgumentError, match=r"'cuda'.*wgpu, dawn"):
        Device(backend="cuda")
    monkeypatch.setenv("WGATTN_BACKEND", "metal")
    with pytest.raises(ArgumentError, match=r"'metal'.*wgpu, dawn"):
        Device()
    with pytest.raises(ArgumentError, match=r"'metal'.*wgpu, dawn"):
        wgattn.list_adapters()


def test_the_environment_is_read_anew_each_time(monkeypatch):
    monkeypatch.delenv("WGATTN_BACKEND", raising=False)
    assert wgattn.list_adapters()
    monkeypatch.setenv("WGATTN_BACKEND", "metal")
    with pytest.raises(ArgumentError, match="'metal'"):
        wgattn.list_adapters()


def test_there_is_one_default_device(device: Device):
    assert wgattn.default_device() is device
    assert repr(device.name) in repr(device)


@pytest.mark.parametrize(("value", "checked"), [("", False), ("0", False), ("1", True)])
def test_the_environment_asks_for_checks(monkeypatch, value, checked):
    monkeypatch.setenv("WGATTN_CHECKED", value)
    assert Device().checked is checked
    assert Device(checked=not checked).checked is not checked


# ---- limits


def test_lowered_limits_hold():
    lowered = {"max-storage-buffer-binding-size": 1 << 20, "max-compute-workgroup-storage-size": 16384, "max-compute-invocations-per-workgroup": 256}
    device = Device(limits=lowered)
    profile = device.profile
    assert (profile.max_binding, profile.workgroup_memory, profile.max_invocations) == (1 << 20, 16384, 256)
    assert device.tensor(np.ones(1 << 18, np.float32)).numpy().sum() == 1 << 18
    with pytest.raises(CapacityError, match=f"{(1 << 20) + 4} bytes.* {1 << 20}"):
        device.empty(((1 << 18) + 1,))


def test_limits_are_never_raised(device: Device):
    name = "max-storage-buffer-binding-size"
    assert Device(limits={name: device.profile.max_binding * 4}).profile.max_binding == device.profile.max_binding


def test_features_can_be_gone_without(device: Device):
    without = Device(limits={"shader-f16": 0, "subgroup": 0, "timestamp-query": 0}).profile
    assert (without.f16, without.subgroup_size, without.timestamps) == (False, 0, False)
    asked = Device(limits={"shader-f16": 1, "subgroup": 1}).profile
    assert (asked.f16, asked.subgroup_size) == (device.profile.f16, device.profile.subgroup_size)


def test_a_lower_alignment_is_a_coarser_one(device: Device):
    assert device.profile.storage_alignment < 512
    assert Device(limits={"min-storage-buffer-offset-alignment": 512}).profile.storage_alignment == 512
    assert Device(limits={"min-storage-buffer-offset-alignment": 1}).profile.storage_alignment == device.profile.storage_alignment


def test_the_environment_lowers_limits_too(monkeypatch):
    monkeypatch.setenv("WGATTN_LIMITS", " max-storage-buffer-binding-size=2097152  subgroup=0")
    profile = Device().profile
    assert (profile.max_binding, profile.subgroup_size) == (2097152, 0)
    assert Device(limits={"max-storage-buffer-binding-size": 1 << 20}).profile.max_binding == 1 << 20
    assert Device(limits={"max-storage-buffer-binding-size": 1 << 22}).profile.max_binding == 1 << 21


@pytest.mark.parametrize("text", ["max-coffee=3", "subgroup", "subgroup=", "shader-f16=no", "shader-f16=2", "=3", "max-buffer-size=-1"])
def test_what_the_environment_must_not_say(monkeypatch, text):
    monkeypatch.setenv("WGATTN_LIMITS", text)
    with pytest.raises(ArgumentError, match=text.partition("=")[0] or "'=3'"):
        Device()


def test_an_unknown_limit_is_named():
    with pytest.raises(ArgumentError, match="'max-coffee'"):
        Device(limits={"max-coffee": 3})
    with pytest.raises(ArgumentError, match="max-buffer-size cannot be -5"):
        Device(limits={"max-buffer-size": -5})


def test_more_than_a_device_holds_is_refused_before_it_is_tried(device: Device):
    with pytest.raises(CapacityError, match=str(device.profile.max_binding)):
        device.empty((device.profile.max_binding // 4 + 1,))
    with pytest.raises(CapacityError, match=str(device.profile.max_buffer)):
        device.buffer(device.profile.max_buffer + 1)
    assert device.tensor(np.arange(3)).numpy().tolist() == [0, 1, 2]  # and the device goes on


# ---- arrays to the device and back

SHAPES = [(), (1,), (3,), (0,), (5, 7), (3, 0, 2), (2, 3, 5), (1, 1, 1, 1), (4099,)]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint32, np.int32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_arrays_come_back_bit_for_bit(device: Device, rng, dtype, shape):
    count = int(np.prod(shape))
    array = rng.integers(0, 256, count * np.dtype(dtype).itemsize, np.uint8).view(dtype).reshape(shape)  # NaN, inf and denormals too
    tensor = device.tensor(array)
    assert (tensor.shape, tensor.dtype, tensor.ndim, tensor.size, tensor.nbytes) == (shape, dtype, len(shape), count, array.nbytes)
    back = tensor.numpy()
    assert (back.shape, back.dtype) == (shape, dtype)
    assert back.tobytes() == array.tobytes()


def test_what_the_gpu_cannot_store_is_converted_where_that_is_meant(device: Device, rng):
    double = rng.standard_normal((3, 5))
    assert device.tensor(double).dtype == np.float32
    np.testing.assert_array_equal(device.tensor(double).numpy(), double.astype(np.float32))
    truth = rng.random((2, 9)) < 0.5
    assert device.tensor(truth).dtype == np.uint32
    np.testing.assert_array_equal(device.tensor(truth).numpy(), truth.astype(np.uint32))
    numbers = rng.integers(-(2**31), 2**31, 7)
    assert numbers.dtype == np.int64
    assert device.tensor(numbers).dtype == np.int32
    np.testing.assert_array_equal(device.tensor(numbers).numpy(), numbers)
    np.testing.assert_array_equal(device.tensor([1.5, 2.5]).numpy(), np.array([1.5, 2.5], np.float32))


@pytest.mark.parametrize("dtype", [np.float16, "float16", "f16", np.dtype("float16")])
def test_a_dtype_may_be_given(device: Device, rng, dtype):
    array = rng.standard_normal((3, 3)).astype(np.float32)
    tensor = device.tensor(array, dtype)
    assert tensor.dtype == np.float16
    np.testing.assert_array_equal(tensor.numpy(), array.astype(np.float16))
    assert device.empty((2, 3), dtype).dtype == np.float16


@pytest.mark.parametrize("dtype", [np.complex64, np.int8, np.uint8, np.int16, np.uint64, np.longdouble, "<U3", object])
def test_other_dtypes_are_a_type_error(device: Device, dtype):
    with pytest.raises(TypeError, match="float32, float16, uint32, int32"):
        device.tensor(np.zeros(3).astype(dtype))
    with pytest.raises(TypeError):
        device.empty((3,), dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_arrays_may_be_views(device: Device, rng, dtype):
    array = rng.standard_normal((6, 7, 5)).astype(dtype)
    for view in (array.T, array[::2, 1::3], array[::-1], array.swapaxes(0, 1)[:, :, 1], np.broadcast_to(array[0], (3, 7, 5))):
        np.testing.assert_array_equal(device.tensor(view).numpy(), view)


def test_empty_is_zeros(device: Device):
    for shape in SHAPES:
        assert not device.empty(shape).numpy().any()


def test_write_replaces_the_contents(device: Device, rng):
    tensor = device.tensor(rng.standard_normal((3, 5)))
    array = rng.standard_normal((5, 3)).T
    tensor.write(array)
    np.testing.assert_array_equal(tensor.numpy(), array.astype(np.float32))
    half = device.empty((3,), "f16")
    half.write(np.array([1, 2, 3]))
    np.testing.assert_array_equal(half.numpy(), np.array([1, 2, 3], np.float16))


@pytest.mark.parametrize("shape", [(5, 3), (15,), (3, 4), (3, 5, 1), ()])
def test_write_wants_the_same_shape_and_else_writes_nothing(device: Device, shape):
    tensor = device.tensor(np.ones((3, 5)))
    with pytest.raises(ShapeError) as caught:
        tensor.write(np.zeros(shape))
    assert str(shape) in str(caught.value)
    assert "(3, 5)" in str(caught.value)
    assert tensor.numpy().all()


def test_write_and_read_at_an_offset(device: Device):
    tensor = device.tensor(np.zeros(8, np.float16))
    device.write(tensor.buffer, np.array([1, 2, 3], np.float16), offset=8)  # an odd tail is padded with zeros
    np.testing.assert_array_equal(tensor.numpy(), [0, 0, 0, 0, 1, 2, 3, 0])
    np.testing.assert_array_equal(device.read(tensor.buffer, np.float16, 3, offset=4), [0, 0, 1])


def test_reshape_is_the_same_memory(device: Device, rng):
    array = rng.standard_normal((4, 6)).astype(np.float32)
    tensor = device.tensor(array)
    for shape in ((24,), (2, 3, 4), (6, 4), (1, 24, 1)):
        np.testing.assert_array_equal(tensor.reshape(*shape).numpy(), array.reshape(shape))
        np.testing.assert_array_equal(tensor.reshape(shape).numpy(), array.reshape(shape))
    np.testing.assert_array_equal(tensor.reshape(3, -1).numpy(), array.reshape(3, 8))
    np.testing.assert_array_equal(tensor.reshape(-1).numpy(), array.reshape(-1))
    tensor.reshape(-1).write(np.arange(24))
    np.testing.assert_array_equal(tensor.numpy(), np.arange(24).reshape(4, 6))


@pytest.mark.parametrize("shape", [(5, 5), (-1, 5), (-1, -1), (0, -1), (25,), ()])
def test_reshape_keeps_the_size(device: Device, shape):
    with pytest.raises(ShapeError, match=r"\(4, 6\)"):
        device.empty((4, 6)).reshape(*shape)


def test_a_tensor_never_turns_into_an_array_by_itself(device: Device):
    tensor = device.tensor(np.ones(3))
    for convert in (np.asarray, np.array, lambda t: np.ones(3) + t, lambda t: np.zeros(3).__iadd__(t), np.sum):
        with pytest.raises(ArgumentError, match=r"\.numpy\(\)"):
            convert(tensor)


def test_a_tensor_says_what_it_is(device: Device):
    text = repr(device.empty((2, 3), "f16"))
    assert "(2, 3)" in text
    assert "float16" in text
    assert device.name in text


# ---- buffers


def test_buffers_are_whole_words_and_zero(device: Device):
    for nbytes, size in ((0, 16), (1, 16), (16, 16), (17, 20), (1000, 1000)):
        buffer = device.buffer(nbytes)
        assert buffer.size == size
        assert not device.read(buffer, np.uint32, size // 4).any()


def test_uniforms_of_equal_bytes_are_one(device: Device):
    data = np.array([1.5, 2.5, 3.5, 4.5], np.float32).tobytes()
    one = device.uniform(data)
    assert device.uniform(bytes(data)) is one
    assert device.uniform(data[::-1]) is not one
    assert device.read(one, np.float32, 4).tobytes() == data
    assert device.read(device.uniform(data[::-1]), np.uint8, 16).tobytes() == data[::-1]


def test_a_read_waits_for_its_own_work_only(device: Device, rng):
    """What was submitted behind it may take long. Once in five times has to show it: the machine may be busy with something else."""
    first, x = device.tensor(np.arange(8, dtype=np.uint32)), rng.standard_normal((1, 8, 1024, 64)).astype(np.float32)
    readback, long = Readback(first), recording_of(device, x)
    long.replay()
    device.wait()

    def share() -> float:
        """Of the time that all of it takes, what the read takes."""
        begin = time.perf_counter()
        with device.commands() as encoder:
            readback.encode(encoder)
        long.replay(times=4)
        assert readback.numpy().tolist() == list(range(8))
        early = time.perf_counter() - begin
        device.wait()
        return early / (time.perf_counter() - begin)

    assert any(share() < 0.5 for _ in range(5))


def recording_of(device: Device, x: np.ndarray) -> Recording:
    """Attention of x over itself, which takes a while."""
    problem = Problem(*x.shape[:2], x.shape[1], x.shape[2], x.shape[2], x.shape[3], x.shape[3], x.shape[3] ** -0.5)
    recording, tensors = Recording(device), [device.tensor(x) for _ in range(4)]
    PATHS["flash"].record(recording, problem, Operands(*(Rows.of(t, "bhsd") for t in tensors)))
    return recording


def test_wait_returns_when_the_work_is_done(device: Device):
    device.wait()
    tensor = device.tensor(np.full(1000, POISON[4], np.uint32))
    device.wait()
    assert (tensor.numpy() == POISON[4]).all()


# ---- the profile


def test_the_profile_tells_what_the_device_is(device: Device):
    profile = device.profile
    assert profile.name == device.name
    assert profile.backend == device.backend.name
    assert profile.kind in ("DiscreteGPU", "IntegratedGPU", "VirtualGPU", "CPU", "Unknown")
    assert profile.software == (profile.kind == "CPU")
    assert profile.workgroup_memory >= 16384
    assert profile.max_invocations >= 256
    assert profile.max_storage_buffers >= 8
    assert profile.max_binding >= 128 << 20
    assert profile.max_buffer >= profile.max_binding
    assert profile.max_workgroups >= 65535
    assert profile.storage_alignment in (4, 8, 16, 32, 64, 128, 256)


def test_the_subgroup_size_is_a_power_of_two_and_measured_alike_twice(device: Device):
    size = device.profile.subgroup_size
    assert 0 <= size <= 128
    assert size & (size - 1) == 0
    assert measure_subgroup_size(device) == size
    assert measure_subgroup_size(Device(checked=True)) == size


LANES = """// For each invocation, how many lanes its subgroup has, and the highest local index among them.
var<storage, read_write> seen: array<vec2<u32>>;   // (128) of (lanes, highest) u32
@compute @workgroup_size(128)
fn main(@builtin(local_invocation_index) index: u32) { seen[index] = vec2<u32>(subgroupAdd(1u), subgroupMax(index)); }
"""


def test_subgroups_are_what_the_profile_says(device: Device, write_shader):
    size = device.profile.subgroup_size
    kernel_name = write_shader("lanes", LANES)
    if size == 0:
        with pytest.raises(Unsupported, match="subgroup"):
            device.kernel(kernel_name)
        return
    seen = device.tensor(np.full((128, 2), POISON[4]))
    recording = Recording(device)
    recording.add(device.kernel(kernel_name), (1,), {"seen": seen})
    recording.replay()
    lanes, highest = seen.numpy().T
    assert (lanes == size).all()
    np.testing.assert_array_equal(highest, np.arange(128) // size * size + size - 1)


TEAMS = [(8, 1, "one"), (0, 1, "one"), (8, 8, "subgroup"), (32, 8, "subgroup"), (0, 2, "workgroup"), (0, 64, "workgroup")]


@pytest.mark.parametrize(("size", "lanes", "part"), TEAMS)
def test_a_team_adds_up_with_what_there_is(device: Device, size, lanes, part):
    assert replace(device.profile, subgroup_size=size).team_part(lanes) == f"team_{part}"


def test_a_device_without_the_feature_has_no_subgroups(monkeypatch):
    monkeypatch.setattr(webgpu, "FEATURES", ())
    profile = Device().profile
    assert (profile.subgroup_size, profile.f16, profile.timestamps) == (0, False, False)


# ---- every variant works


@pytest.mark.parametrize("variant", ["software", "gpu_shape", "gpu_shape_no_subgroup", "gpu_shape_32_lanes", "checked", "small_binding"])
def test_each_variant_of_the_device_is_what_its_name_says(devices, variant):
    device = devices[variant]
    assert devices[variant] is device
    assert device.checked == (variant == "checked")
    assert device.profile.max_binding == (1 << 20 if variant == "small_binding" else devices["checked"].profile.max_binding)
    if variant == "software":
        assert device.profile.software
    if variant.startswith("gpu_shape"):
        assert not device.profile.software
        assert {"gpu_shape_no_subgroup": 0, "gpu_shape_32_lanes": 32}.get(variant, device.profile.subgroup_size) == device.profile.subgroup_size
    np.testing.assert_array_equal(device.tensor(np.arange(5)).numpy(), np.arange(5))
