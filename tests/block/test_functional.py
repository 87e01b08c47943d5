"""rms_norm and apply_rope: every width, storage, pairing and kernel shape against the reference."""

from dataclasses import replace

import numpy as np
import pytest

import wgattn
from tests.helpers import assert_close
from tests.watch import Guard, check_refused, forbid_reading
from wgattn import reference
from wgattn.block.functional import choose_norm
from wgattn.errors import ArgumentError, ShapeError
from wgattn.gpu import Device

F32, F16 = np.float32, np.float16
DTYPES = [F32, F16]
VARIANTS = ["software", "gpu_shape", "gpu_shape_no_subgroup", "gpu_shape_32_lanes", "checked"]


def bound(expected: np.ndarray, dtype: type) -> np.ndarray:
    """The error allowed for each value: some roundings of f32, and one of the storage."""
    storage = 2.0**-11 if dtype == F16 else 0.0
    return np.abs(expected) * (1e-6 + storage) + (2.0**-25 if dtype == F16 else 1e-37)


# ---- rms_norm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 7, 8, 33, 64, 130, 896, 1025])
def test_rms_norm_of_any_width(device, rng, monkeypatch, width, dtype):
    guard = Guard(monkeypatch)
    x = (rng.standard_normal((2, 3, width)) * rng.uniform(0.1, 100, (2, 3, 1))).astype(dtype)
    weight = rng.uniform(-2, 2, width).astype(dtype)
    y = wgattn.rms_norm(x, weight, 1e-6)
    assert y.dtype == dtype
    expected = reference.rms_norm(x, weight, 1e-6)
    assert_close(y, expected, max_error=bound(expected, dtype), width=width, dtype=dtype)
    guard.check(width=width, dtype=dtype)


@pytest.mark.conformance
@pytest.mark.parametrize("variant", VARIANTS)
def test_rms_norm_in_every_kernel_shape(devices, rng, monkeypatch, variant):
    device, guard = devices[variant], Guard(monkeypatch)
    for width, rows, dtype in ((96, 11, F32), (37, 70, F16), (5, 3, F16), (1, 3, F32), (300, 1, F32)):
        x, weight = rng.standard_normal((rows, width)).astype(dtype), rng.standard_normal(width).astype(F32)
        expected = reference.rms_norm(x, weight)
        y = wgattn.rms_norm(x, weight, device=device)
        assert_close(y, expected, max_error=bound(expected, dtype), variant=variant, width=width, rows=rows)
    guard.check(variant=variant)


def test_rms_norm_of_large_activations_keeps_its_variance_in_f32(rng):
    """Squares beyond what f16 holds."""
    x = rng.choice([-800.0, 800.0], (4, 896)).astype(F32)
    x[1, 17] = 3e4
    weight = rng.uniform(0.5, 2, 896).astype(F32)
    for dtype in DTYPES:
        y = wgattn.rms_norm(x.astype(dtype), weight)
        expected = reference.rms_norm(x.astype(dtype), weight)
        assert_close(y, expected, max_error=np.abs(expected) * (1e-6 if dtype == F32 else 2.0**-11 + 1e-6), dtype=dtype)


def test_rms_norm_of_zeros_and_of_tiny_numbers_is_finite():
    weight = np.ones(6, F32)
    assert not wgattn.rms_norm(np.zeros((2, 6), F32), weight, 0.0).any()
    assert not wgattn.rms_norm(np.zeros((2, 6), F16), weight).any()
    tiny = np.full((1, 6), 1e-8, F32)
    expected = reference.rms_norm(tiny, weight, 1e-5)
    assert_close(wgattn.rms_norm(tiny, weight, 1e-5), expected, max_error=np.abs(expected) * 1e-6)


def test_rms_norm_of_more_rows_than_a_grid_is_long(rng, devices):
    """A row more or less than the grid's length, and many more: each row is right, the last included."""
    device = Device(limits={"max-compute-workgroups-per-dimension": 7})
    for rows in (55, 56, 57, 7 * 7 * 8 - 1):
        x = rng.standard_normal((rows, 4)).astype(F32)
        expected = reference.rms_norm(x, np.ones(4))
        assert_close(wgattn.rms_norm(x, np.ones(4, F32), device=device), expected, max_error=bound(expected, F32), rows=rows)


@pytest.mark.parametrize(("subgroup", "lanes"), [(0, 32), (4, 4), (8, 8), (16, 16), (32, 32), (64, 32), (128, 32)])
def test_lanes_of_rms_norm_follow_the_subgroup(device, subgroup, lanes):
    profile = replace(device.profile, kind="DiscreteGPU", subgroup_size=subgroup)
    assert choose_norm(profile, 4096) == (lanes, 64)
    assert choose_norm(profile, 8)[0] == 2
    assert choose_norm(profile, 1)[0] == 1


# ---- apply_rope


def rotate(x: np.ndarray, positions: np.ndarray, rope: wgattn.Rope) -> np.ndarray:
    """The reference for positions that may differ from one sequence to another."""
    everywhere = np.broadcast_to(positions, x.shape[:-2])
    flat, each = x.reshape(-1, *x.shape[-3:]), everywhere.reshape(-1, x.shape[-3])
    options = {"base": rope.base, "dim": rope.dim, "interleaved": rope.interleaved}
    return np.stack([reference.apply_rope(a, p, **options) for a, p in zip(flat, each, strict=True)]).reshape(x.shape)


def rope_bound(x: np.ndarray, dtype: type) -> float:
    return float(np.abs(x).max()) * (6e-7 + (2.0**-10 if dtype == F16 else 0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "dim"), [(2, 2), (5, 4), (6, 2), (7, 6), (8, 8), (20, 12), (64, 64), (64, 32), (80, 20), (128, 128)])
def test_rope_of_any_width_and_pairing(device, rng, monkeypatch, head_dim, dim, interleaved, dtype):
    """At position 0, which changes nothing, and far out; channels behind `dim` stay as they are, bit for bit."""
    guard = Guard(monkeypatch)
    rope = wgattn.Rope(10000.0, dim, interleaved)
    x = rng.standard_normal((4, 3, head_dim)).astype(dtype)
    positions = np.array([0, 1, 1000, 100_000])
    y = wgattn.apply_rope(x, positions, rope)
    assert y.dtype == dtype
    case = {"head_dim": head_dim, "dim": dim, "interleaved": interleaved, "dtype": dtype}
    assert_close(y, rotate(x, positions, rope), max_error=rope_bound(x, dtype), **case)
    assert np.array_equal(y[0], x[0])
    assert np.array_equal(y[..., dim:], x[..., dim:])
    assert not np.array_equal(y[1], x[1])
    guard.check(**case)


def test_interleaved_rope_is_multiplication_by_a_complex_number(rng):
    x = rng.standard_normal((5, 2, 8)).astype(F32)
    positions = np.array([3, 1, 4, 1, 5])
    y = wgattn.apply_rope(x, positions, wgattn.Rope(100.0, 8, True))
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * positions[:, None, None] * 100.0 ** (-np.arange(4) / 4))
    assert_close(y[..., 0::2], turned.real, max_error=2e-6)
    assert_close(y[..., 1::2], turned.imag, max_error=2e-6)


@pytest.mark.parametrize("leading", [(), (1,), (2,), (2, 3)])
@pytest.mark.parametrize("each", [False, True])
def test_rope_with_positions_for_all_or_for_each_sequence(rng, leading, each):
    rope = wgattn.Rope(500.0, 6, False)
    x = rng.standard_normal((*leading, 4, 2, 8)).astype(F32)
    positions = rng.integers(0, 50, (*leading, 4) if each else (4,))
    assert_close(wgattn.apply_rope(x, positions, rope), rotate(x, positions, rope), max_error=rope_bound(x, F32), leading=leading, each=each)


def test_one_position_serves_all_tokens(rng):
    x, rope = rng.standard_normal((2, 3, 1, 4)).astype(F32), wgattn.Rope(dim=4)
    assert_close(wgattn.apply_rope(x, 7, rope), rotate(x, np.array(7), rope), max_error=rope_bound(x, F32))
    each = np.array([[3], [9]])  # one a sequence
    assert_close(wgattn.apply_rope(x, each, rope), rotate(x, each, rope), max_error=rope_bound(x, F32))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_from_a_table(device, rng, interleaved):
    """Any numbers, not only cosines and sines: each output is one product and one sum of them."""
    cos, sin = rng.standard_normal((2, 9, 3)).astype(F32)
    x, positions = rng.standard_normal((2, 4, 2, 7)).astype(F32), rng.integers(0, 9, (2, 4))
    first, second = (np.arange(0, 6, 2), np.arange(1, 6, 2)) if interleaved else (np.arange(3), np.arange(3, 6))
    c, s = cos[positions][:, :, None], sin[positions][:, :, None]
    expected = x.astype(np.float64)
    expected[..., first] = c * x[..., first] - s * x[..., second]
    expected[..., second] = s * x[..., first] + c * x[..., second]
    y = wgattn.apply_rope(x, positions, (cos, sin), interleaved=interleaved)
    assert_close(y, expected, max_error=4e-6)
    tensors = (device.tensor(cos), device.tensor(sin))
    again = wgattn.apply_rope(x, device.tensor(positions.astype(np.uint32)), tensors, interleaved=interleaved)
    assert np.array_equal(again, y)


def test_positions_of_a_tensor_beyond_the_table_use_its_last_row(device, rng):
    cos, sin = rng.standard_normal((2, 3, 2)).astype(F32)
    x = rng.standard_normal((2, 1, 4)).astype(F32)
    y = wgattn.apply_rope(x, device.tensor(np.array([2, 4_000_000_000], np.uint32)), (cos, sin))
    assert np.array_equal(y, wgattn.apply_rope(x, np.array([2, 2]), (cos, sin)))


@pytest.mark.conformance
@pytest.mark.parametrize("variant", ["gpu_shape", "checked", "small_binding"])
def test_rope_on_other_devices(devices, rng, variant):
    x, rope = rng.standard_normal((70, 3, 36)).astype(F32), wgattn.Rope(dim=18)
    positions = np.arange(40, 110)
    y = wgattn.apply_rope(x, positions, rope, device=devices[variant])
    assert_close(y, rotate(x, positions, rope), max_error=rope_bound(x, F32), variant=variant)


def test_rope_scaled_linearly_turns_as_slowly(rng):
    x = rng.standard_normal((3, 1, 8)).astype(F32)
    slow = wgattn.Rope(dim=8, scaling={"rope_type": "linear", "factor": 4.0})
    assert np.array_equal(wgattn.apply_rope(x, np.array([4, 8, 400]), slow), wgattn.apply_rope(x, np.array([1, 2, 100]), wgattn.Rope(dim=8)))


# ---- what both promise


def norm(x: object, **options: object) -> object:
    return wgattn.rms_norm(x, np.arange(1, 9, dtype=F32), **options)


def turn(x: object, **options: object) -> object:
    return wgattn.apply_rope(x, np.arange(3), wgattn.Rope(dim=4), **options)


@pytest.mark.parametrize("call", [norm, turn])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_gives_a_tensor_and_nothing_is_copied_to_the_host(device, rng, monkeypatch, call, dtype):
    x = rng.standard_normal((2, 3, 1, 8)).astype(dtype)
    expected = call(x)
    with monkeypatch.context() as forbidden:
        forbid_reading(forbidden)
        y = call(device.tensor(x))
    assert isinstance(y, wgattn.Tensor)
    assert y.dtype == dtype
    assert np.array_equal(y.numpy(), expected)


@pytest.mark.parametrize("call", [norm, turn])
def test_other_kinds_of_arrays(rng, call):
    """float64 gives float32; views with strides, foreign byte order and lists of numbers are what they say."""
    x = rng.standard_normal((2, 3, 1, 8)).astype(F32)
    expected = call(x)
    wide = call(x.astype(np.float64))
    assert wide.dtype == F32
    assert np.array_equal(wide, expected)
    strided = np.zeros((2, 6, 1, 16), F32)[:, ::2, :, ::2]
    strided[...] = x
    assert np.array_equal(call(strided), expected)
    assert np.array_equal(call(np.asfortranarray(x)), expected)
    assert np.array_equal(call(x.astype(">f4")), expected)
    assert np.array_equal(call(x.astype(np.float64).tolist()), expected)


@pytest.mark.parametrize("call", [norm, turn])
@pytest.mark.parametrize("shape", [(0, 3, 1, 8), (2, 3, 0, 8)])
def test_nothing_in_gives_nothing_out(device, call, shape):
    assert call(np.zeros(shape, F16)).shape == shape
    assert call(np.zeros(shape, F16)).dtype == F16
    assert call(device.tensor(np.zeros(shape, F32))).shape == shape


REFUSED = {
    "weight of another width": (ShapeError, lambda d: wgattn.rms_norm(np.zeros((2, 8), F32), np.zeros(7, F32))),
    "weight of two dimensions": (ShapeError, lambda d: wgattn.rms_norm(np.zeros((2, 8), F32), np.zeros((1, 8), F32))),
    "a number": (ShapeError, lambda d: wgattn.rms_norm(np.float32(1), np.zeros(1, F32))),
    "negative eps": (ArgumentError, lambda d: wgattn.rms_norm(np.zeros((2, 8), F32), np.zeros(8, F32), -1e-6)),
    "NaN eps": (ArgumentError, lambda d: wgattn.rms_norm(np.zeros((2, 8), F32), np.zeros(8, F32), float("nan"))),
    "complex x": (TypeError, lambda d: wgattn.rms_norm(np.zeros((2, 8), complex), np.zeros(8, F32))),
    "integer x": (TypeError, lambda d: wgattn.rms_norm(np.zeros((2, 8), int), np.zeros(8, F32))),
    "integer weight": (TypeError, lambda d: wgattn.rms_norm(np.zeros((2, 8), F32), np.zeros(8, int))),
    "weight on another device": (ArgumentError, lambda d: wgattn.rms_norm(d[0].tensor(np.zeros((2, 8))), d[1].tensor(np.zeros(8)))),
    "x on another device": (ArgumentError, lambda d: wgattn.rms_norm(d[0].tensor(np.zeros((2, 8))), np.zeros(8), device=d[1])),
    "x of two dimensions": (ShapeError, lambda d: wgattn.apply_rope(np.zeros((2, 8), F32), np.arange(2), wgattn.Rope(dim=8))),
    "more channels rotated than there are": (ShapeError, lambda d: wgattn.apply_rope(np.zeros((2, 1, 8), F32), np.arange(2), wgattn.Rope(dim=10))),
    "positions of another length": (ShapeError, lambda d: wgattn.apply_rope(np.zeros((2, 1, 8), F32), np.arange(3), wgattn.Rope(dim=8))),
    "positions of too many dimensions": (ShapeError, lambda d: wgattn.apply_rope(np.zeros((2, 1, 8), F32), np.zeros((4, 2), int), wgattn.Rope(dim=8))),
    "positions that are no integers": (TypeError, lambda d: wgattn.apply_rope(np.zeros((2, 1, 8), F32), np.arange(2.0), wgattn.Rope(dim=8))),
    "positions in a tensor for a Rope": (TypeError, lambda d: wgattn.apply_rope(np.zeros((2, 1, 8), F32), d[0].tensor(np.arange(2)), wgattn.Rope(dim=8))),
    "positions in a tensor of floats": (TypeError, lambda d: wgattn.apply_rope(np.zeros((2, 1, 4), F32), d[0].tensor(np.zeros(2)), (np.ones((2, 2)),) * 2)),
    "positions in a tensor of another shape": (
        ShapeError,
        lambda d: wgattn.apply_rope(np.zeros((3, 2, 1, 4), F32), d[0].tensor(np.zeros((1, 2), int)), (np.ones((2, 2)),) * 2),
    ),
    "positions beyond the table": (ArgumentError, lambda d: wgattn.apply_rope(np.zeros((2, 1, 4), F32), np.arange(2), (np.ones((1, 2)), np.ones((1, 2))))),
    "negative positions in a table": (ArgumentError, lambda d: wgattn.apply_rope(np.zeros((1, 1, 4), F32), np.array([-1]), (np.ones((1, 2)),) * 2)),
    "cos and sin of different shapes": (ShapeError, lambda d: wgattn.apply_rope(np.zeros((1, 1, 4), F32), np.array([0]), (np.ones((1, 2)), np.ones((1, 1))))),
    "cos of one dimension": (ShapeError, lambda d: wgattn.apply_rope(np.zeros((1, 1, 4), F32), np.array([0]), (np.ones(2), np.ones(2)))),
    "a table of no channels": (ShapeError, lambda d: wgattn.apply_rope(np.zeros((1, 1, 4), F32), np.array([0]), (np.ones((1, 0)), np.ones((1, 0))))),
    "a table of integers": (TypeError, lambda d: wgattn.apply_rope(np.zeros((1, 1, 4), F32), np.array([0]), (np.ones((1, 2), int),) * 2)),
    "a table of f16 tensors": (TypeError, lambda d: wgattn.apply_rope(np.zeros((1, 1, 4), F32), np.array([0]), (d[0].tensor(np.ones((1, 2), F16)),) * 2)),
    "a table of three": (TypeError, lambda d: wgattn.apply_rope(np.zeros((1, 1, 4), F32), np.array([0]), (np.ones((1, 2)),) * 3)),
    "no rope": (TypeError, lambda d: wgattn.apply_rope(np.zeros((1, 1, 4), F32), np.array([0]), None)),
    "rope of complex numbers": (TypeError, lambda d: wgattn.apply_rope(np.zeros((1, 1, 4), complex), np.array([0]), wgattn.Rope(dim=4))),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_meant_is_refused_before_any_work(device, devices, monkeypatch, case):
    error, call = REFUSED[case]
    other = devices["gpu_shape"]
    assert other.profile
    check_refused(monkeypatch, error, call, device, other)
