"""Binding by name, packing of parameters, limits, compile errors; recordings and the step state."""

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.helpers import assert_untouched, poison
from tests.watch import Calls
from wgattn.errors import ArgumentError, CapacityError, DeviceError, Unsupported
from wgattn.gpu import Device, Readback, Recording, Slice, StepState, Tensor, grid

SCALE = """// y = x * factor + offset for the first `count` numbers.
struct Params { count: u32, offset: i32, factor: f32 }
var<uniform> params: Params;
var<storage, read> x: array<f32>;         // (count) f32
var<storage, read_write> y: array<f32>;   // (count) f32
override WORKGROUP: u32 = 64;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x < params.count) { y[id.x] = fma(x[id.x], params.factor, f32(params.offset)); }
}
"""
COUNT = """// Every workgroup adds one.
var<storage, read_write> total: array<atomic<u32>>;   // (1) u32
@compute @workgroup_size(1)
fn main() { atomicAdd(&total[0], 1u); }
"""
NOTHING = "@compute @workgroup_size(1)\nfn main() {}\n"


@pytest.fixture
def device_here(write_shader, device: Device) -> Callable[..., Device]:
    """device_here(name=text, ...) is a device that knows these shaders and no others."""

    def make(checked: bool = False, **shaders: str) -> Device:
        for name, text in shaders.items():
            write_shader(name, text)
        made = Device(checked=checked)
        made.profile = device.profile  # measuring needs a shader of the house
        return made

    return make


@pytest.fixture
def calls(device: Device, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Counts calls of the backend's device and queue from here on."""
    return Calls(device, monkeypatch)


def scaled(device: Device, x: Tensor, y: object, **params: float) -> Recording:
    recording = Recording(device)
    recording.add(device.kernel("scale"), (-(-int(params["count"]) // 64),), {"x": x, "y": y}, params)
    return recording


# ---- binding


def test_buffers_are_bound_by_name(device_here, rng):
    device = device_here(scale=SCALE)
    x, y = rng.standard_normal(100).astype(np.float32), device.tensor(poison((164,)))
    scaled(device, device.tensor(x), y, count=100, offset=-3, factor=2.0).replay()
    np.testing.assert_allclose(y.numpy()[:100], x.astype(np.float64) * 2 - 3, rtol=0, atol=1e-6)
    assert_untouched(y.numpy()[100:])


def test_the_order_of_names_does_not_matter(device_here):
    device = device_here(scale=SCALE)
    x, y = device.tensor(np.ones(4)), device.tensor(np.zeros(4))
    recording = Recording(device)
    recording.add(device.kernel("scale"), (1,), {"y": y, "x": x}, {"factor": 5.0, "offset": 1, "count": 4})
    recording.replay()
    assert y.numpy().tolist() == [6, 6, 6, 6]
    assert x.numpy().tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((), r"missing \['params', 'x', 'y'\], unknown \[\]"),
        (("x", "params"), r"missing \['y'\], unknown \[\]"),
        (("x", "y", "params", "z"), r"missing \[\], unknown \['z'\]"),
        (("x", "Y", "params"), r"missing \['y'\], unknown \['Y'\]"),
    ],
)
def test_every_buffer_and_no_other_must_be_bound(device_here, given, message):
    device = device_here(scale=SCALE)
    with pytest.raises(ArgumentError, match=f"scale: .*{message}"):
        device.kernel("scale").bind({name: device.empty((4,)) for name in given})


def test_a_slice_binds_part_of_a_buffer(device_here):
    device = device_here(scale=SCALE)
    x, y = device.tensor(np.arange(256)).numpy().astype(np.float32), device.tensor(poison((256,)))
    source = device.tensor(x)
    kernel = device.kernel("scale")
    recording = Recording(device)
    buffers = {"x": Slice(source.buffer, 256, 256), "y": Slice(y.buffer, 512, 256)}
    recording.add(kernel, (2,), buffers, {"count": 128, "offset": 0, "factor": 1.0})  # asks for more than the slices hold
    recording.replay()
    result = y.numpy()
    np.testing.assert_array_equal(result[128:192], x[64:128])
    assert_untouched(result[:128])
    assert_untouched(result[192:])


# ---- parameters


def test_params_are_packed_in_the_order_of_the_struct(device_here):
    kernel = device_here(scale=SCALE).kernel("scale")
    packed = kernel.pack({"factor": 1.5, "count": 7, "offset": -2})
    assert packed == np.uint32(7).tobytes() + np.int32(-2).tobytes() + np.float32(1.5).tobytes() + bytes(4)


COMPLETE = {"count": 1, "offset": 0, "factor": 1.0}


@pytest.mark.parametrize("params", [{}, {"count": 1, "offset": 0}, {**COMPLETE, "extra": 1}, {"Count": 1, "offset": 0, "factor": 1.0}])
def test_every_parameter_and_no_other_must_be_given(device_here, params):
    kernel = device_here(scale=SCALE).kernel("scale")
    with pytest.raises(ArgumentError) as caught:
        kernel.pack(params)
    assert "scale" in str(caught.value)
    assert str(sorted(params)) in str(caught.value)
    assert "['count', 'offset', 'factor']" in str(caught.value)


def test_params_for_a_kernel_without_any_are_refused(device_here):
    device = device_here(count=COUNT)
    with pytest.raises(ArgumentError, match=r"\['factor'\] given, \[\] wanted"):
        Recording(device).add(device.kernel("count"), (1,), {"total": device.empty((1,), "u32")}, {"factor": 1.0})


def test_a_number_that_does_not_fit_its_parameter_is_refused(device_here):
    kernel = device_here(scale=SCALE).kernel("scale")
    for wrong in (-1, 2**32):
        with pytest.raises(OverflowError):
            kernel.pack({"count": wrong, "offset": 0, "factor": 1.0})


@pytest.mark.filterwarnings("error")
def test_a_number_beyond_f32_is_infinite_there_and_warns_of_nothing(device_here):
    packed = device_here(scale=SCALE).kernel("scale").pack({"count": 1, "offset": 0, "factor": -1e300})
    assert np.frombuffer(packed, np.float32)[2] == -np.inf


# ---- limits, before the backend is asked for anything


def test_workgroup_memory_beyond_the_limit_is_refused_before_any_gpu_call(device_here, calls):
    big = "// Big.\nvar<workgroup> a: array<f32, SIZE>;\n"
    device = device_here(big=big + NOTHING, two=big + "var<workgroup> b: u32;\n" + NOTHING)
    limit = device.profile.workgroup_memory
    calls.clear()
    with pytest.raises(CapacityError, match=f"big needs {limit + 16} bytes of workgroup memory; .* {limit}"):
        device.kernel("big", SIZE=limit // 4 + 1)
    with pytest.raises(CapacityError, match=f"two needs {limit + 16} bytes of workgroup memory; .* {limit}"):
        device.kernel("two", SIZE=limit // 4 - 1)  # 4 bytes of b, which count as 16
    assert not calls
    assert device.kernel("big", SIZE=limit // 4).pipeline
    assert device.kernel("two", SIZE=limit // 4 - 4).pipeline


def test_a_workgroup_beyond_the_limit_is_refused_before_any_gpu_call(device_here, calls):
    device = device_here(wide="// Wide.\noverride WORKGROUP: u32 = 64;\n@compute @workgroup_size(WORKGROUP)\nfn main() {}\n")
    limit = device.profile.max_invocations
    calls.clear()
    with pytest.raises(CapacityError, match=f"wide needs workgroups of {limit + 1}; .* {limit}"):
        device.kernel("wide", WORKGROUP=limit + 1)
    assert not calls
    assert device.kernel("wide", WORKGROUP=limit).pipeline


def test_more_storage_buffers_than_the_device_binds_are_refused(device_here):
    text = "// Many.\n//@ unroll i in 0..COUNT\nvar<storage, read> b$i: array<f32>;   // (1) f32\n//@ end\n" + NOTHING
    device, limit = device_here(many=text), 8
    device.profile = replace(device.profile, max_storage_buffers=limit)  # real ones may allow a million
    with pytest.raises(CapacityError, match=f"many binds {limit + 1} storage buffers; .* {limit}"):
        device.kernel("many", COUNT=limit + 1)
    assert len(device.kernel("many", COUNT=limit).source.buffers) == limit


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_grid_beyond_the_limit_is_refused_before_any_gpu_call(device_here, calls, axis):
    device = device_here(count=COUNT)
    kernel, buffers = device.kernel("count"), {"total": device.empty((1,), "u32")}
    limit = device.profile.max_workgroups
    groups = [1, 1, 1]
    groups[axis] = limit + 1
    recording = Recording(device)
    calls.clear()
    with pytest.raises(CapacityError, match=f"count needs a grid .*{limit + 1}.* {limit} "):
        recording.add(kernel, tuple(groups), buffers)
    assert not calls
    assert len(recording) == 0
    groups[axis] = limit
    recording.add(kernel, tuple(groups), buffers)
    recording.replay()
    assert device.read(buffers["total"].buffer, np.uint32, 1)[0] == limit


@pytest.mark.parametrize(
    ("missing", "statement"),
    [({"f16": False}, "let a = f16(1.0);"), ({"subgroup_size": 0}, "let a = subgroupAdd(1.0);")],
)
def test_a_kernel_needs_what_the_profile_has(device_here, calls, missing, statement):
    device = device_here(needy=f"// Needy.\n@compute @workgroup_size(1)\nfn main() {{ {statement} }}\n")
    device.profile = replace(device.profile, **missing)
    calls.clear()
    with pytest.raises(Unsupported, match=f"needy needs {next(iter(missing)).removesuffix('_size')} operations, .*{re.escape(device.name)}"):
        device.kernel("needy")
    assert not calls


# ---- compiling


@pytest.mark.parametrize(
    "statement",
    ["let a = ;", "y[0] = undeclared;", "let a: f32 = 1u;", "for (", "discard;"],
    ids=["syntax", "name", "type", "unclosed", "stage"],
)
@pytest.mark.parametrize("checked", [False, True])
def test_a_shader_that_does_not_compile_is_named_and_the_device_goes_on(device_here, statement, checked):
    broken = "// Broken.\nvar<storage, read_write> y: array<f32>;   // (1) f32\n@compute @workgroup_size(1)\nfn main() { %s }\n" % statement  # noqa: UP031
    device = device_here(broken=broken, count=COUNT, checked=checked)
    recording, total = Recording(device), device.empty((1,), "u32")
    for _ in range(2):
        with pytest.raises(DeviceError, match="could not compile broken: ") as caught:
            device.kernel("broken").pipeline  # noqa: B018
        assert device.name in str(caught.value)
    recording.add(device.kernel("count"), (5,), {"total": total})
    recording.replay()
    assert total.numpy().tolist() == [5]
    recording.add(device.kernel("broken"), (1,), {"y": device.empty((1,))})
    for use in (recording.compile, recording.replay) * 2:
        with pytest.raises(DeviceError, match="could not compile broken: "):
            use()
    assert total.numpy().tolist() == [5]  # nothing of it has run


def test_nothing_is_compiled_before_it_is_used(device_here, calls):
    device = device_here(count=COUNT)
    calls.clear()
    kernel = device.kernel("count")
    assert not calls
    first = kernel.pipeline
    assert calls.made["create_compute_pipeline"] == 1
    assert kernel.pipeline is first
    assert device.kernel("count").pipeline is first
    assert calls.made["create_compute_pipeline"] == 1


# ---- recordings


def test_a_replay_makes_nothing_and_submits_once(device_here, calls):
    device = device_here(scale=SCALE, count=COUNT)
    x, y, total = device.tensor(np.ones(8)), device.tensor(np.zeros(8)), device.empty((1,), "u32")
    recording = scaled(device, x, y, count=8, offset=1, factor=1.0)
    for _ in range(5):
        recording.add(device.kernel("count"), (2, 3), {"total": total})
    recording.replay()
    device.wait()
    calls.clear()
    recording.replay()
    assert calls == {"create_command_encoder": 1, "submit": 1}
    calls.clear()
    recording.replay(times=3)
    assert calls == {"create_command_encoder": 1, "submit": 1}
    assert total.numpy().tolist() == [5 * 5 * 6]


def test_dispatches_run_in_order_and_see_what_came_before(device_here):
    device = device_here(scale=SCALE)
    a, b = device.tensor(np.ones(4)), device.tensor(np.zeros(4))
    recording = scaled(device, a, b, count=4, offset=0, factor=3.0)
    kernel = device.kernel("scale")
    recording.add(kernel, (1,), {"x": b, "y": a}, {"count": 4, "offset": 1, "factor": 1.0})
    recording.replay(times=3)
    assert b.numpy().tolist() == [39] * 4  # 1 -> 3, 4 -> 12, 13 -> 39
    assert a.numpy().tolist() == [40] * 4


def test_a_grid_of_no_workgroups_does_nothing(device_here):
    device = device_here(count=COUNT)
    total = device.empty((1,), "u32")
    recording = Recording(device)
    for groups in ((0,), (3, 0), (2, 2, 0)):
        recording.add(device.kernel("count"), groups, {"total": total})
    recording.replay()
    assert total.numpy().tolist() == [0]


def test_a_recording_tells_what_it_holds(device_here):
    device = device_here(count=COUNT)
    total = device.empty((1,), "u32")
    recording = Recording(device)
    recording.add(device.kernel("count"), (2,), {"total": total}, label="counting")
    recording.add(device.kernel("count"), (2, 5, 3), {"total": total})
    assert [(d.label, d.groups) for d in recording] == [("counting", (2, 1, 1)), ("count", (2, 5, 3))]
    assert len(recording) == 2


def test_a_failed_add_leaves_the_recording_as_it_was(device_here):
    device = device_here(count=COUNT)
    recording = Recording(device)
    with pytest.raises(ArgumentError):
        recording.add(device.kernel("count"), (1,), {})
    assert len(recording) == 0


LIMITS = [1, 2, 7, 100, 65535]


@pytest.mark.parametrize("limit", LIMITS)
def test_a_grid_covers_all_groups_within_the_limit(limit):
    numbers = {1, 2, 3, limit - 1, limit, limit + 1, 2 * limit - 1, 2 * limit, 2 * limit + 1, limit * limit, 65534, 65535, 65536, 65537, 200_000}
    for groups in sorted(n for n in numbers if 0 < n <= limit * limit):
        x, y = grid(groups, limit)
        assert 1 <= x <= limit, (groups, limit)
        assert 1 <= y <= limit, (groups, limit)
        assert groups <= x * y < groups + y, (groups, limit)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint32])
@pytest.mark.parametrize("shape", [(1,), (3,), (5, 7)], ids=str)
def test_a_readback_receives_what_the_replay_left(device_here, calls, rng, dtype, shape):
    device = device_here(count=COUNT)
    tensor, total = device.tensor(np.zeros(shape, dtype)), device.empty((1,), "u32")
    readback, recording = Readback(tensor), Recording(device)
    recording.add(device.kernel("count"), (1,), {"total": total})
    recording.compile()
    for _ in range(2):
        array = (rng.standard_normal(shape) * 100).astype(np.int32).astype(dtype)
        tensor.write(array)
        calls.clear()
        recording.replay(readback=readback)
        first = readback.numpy()
        assert calls == {"create_command_encoder": 1, "submit": 1}
        tensor.write(np.zeros(shape))
        np.testing.assert_array_equal(first, array)
        np.testing.assert_array_equal(readback.numpy(), array)
        assert first.dtype == dtype
    assert total.numpy().tolist() == [2]


# ---- the step state

STEP = """// What a kernel sees of the step.
struct Step { position: u32, count: u32, a: u32, b: u32 }
var<uniform> step: Step;
var<storage, read> tokens: array<u32>;        // (chunk) u32
var<storage, read_write> seen: array<u32>;    // (3 + chunk) u32
@compute @workgroup_size(1)
fn main() {
  seen[0] = step.position;
  seen[1] = step.count;
  seen[2] = arrayLength(&tokens);
  for (var i = 0u; i < step.count; i++) { seen[3u + i] = tokens[i]; }
}
"""


def test_the_step_state_changes_what_a_recording_sees_with_one_write(device_here, calls):
    device = device_here(see=STEP)
    state, seen = StepState(device, 5), device.tensor(poison((9,)).view(np.uint32))
    recording = Recording(device)
    recording.add(device.kernel("see"), (1,), {"step": state.step, "tokens": state.tokens, "seen": seen})
    recording.compile()
    for position, ids in ((7, [3, 1, 4]), (2**31, [2**32 - 1]), (0, [9, 8, 7, 6, 5])):
        seen.write(poison((9,)).view(np.uint32))
        calls.clear()
        state.write(position, ids)
        recording.replay()
        assert calls == {"write_buffer": 1, "create_command_encoder": 1, "submit": 1}
        result = seen.numpy()
        assert result[: 3 + len(ids)].tolist() == [position, len(ids), 5, *ids]
        assert_untouched(result[3 + len(ids) :].view(np.float32))
    state.place(8, 2)
    recording.replay()
    assert seen.numpy()[:3].tolist() == [8, 2, 5]
