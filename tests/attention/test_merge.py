"""merge_state: attention over two sets of keys, joined."""

import numpy as np
import pytest

import wgattn
from tests.helpers import assert_close
from tests.watch import Guard, check_refused, forbid_reading
from wgattn import reference
from wgattn.errors import ArgumentError, ShapeError

F32, F16 = np.float32, np.float16


@pytest.mark.conformance
@pytest.mark.parametrize(("a_dtype", "b_dtype"), [(F32, F32), (F16, F16), (F16, F32), (np.float64, F32)])
@pytest.mark.parametrize("shape", [(1,), (4,), (7,), (3, 5), (2, 4, 6, 8), (2, 3, 5, 37), (70, 64)])
def test_any_shape_and_storage(device, rng, monkeypatch, shape, a_dtype, b_dtype):
    guard = Guard(monkeypatch)
    o_a, o_b = rng.standard_normal(shape).astype(a_dtype), rng.standard_normal(shape).astype(b_dtype)
    lse_a, lse_b = rng.standard_normal((2, *shape[:-1])).astype(F32) * 5
    o, lse = wgattn.merge_state(o_a, lse_a, o_b, lse_b)
    expected, expected_lse = reference.merge_state(o_a, lse_a, o_b, lse_b)
    case = {"shape": shape, "dtypes": (a_dtype, b_dtype)}
    assert o.dtype == lse.dtype == F32
    assert_close(o, expected, max_error=4e-6, **case)
    assert_close(lse, expected_lse, max_error=4e-6, **case)
    guard.check(**case)


@pytest.mark.parametrize("sets", [1, 2, 5])
def test_parts_joined_one_after_the_other_are_the_whole(rng, sets):
    """In any order; a part may be empty, and a row may see none of a part's keys."""
    q, k, v = (rng.standard_normal((2, 3, n, 8)).astype(F32) for n in (6, 20, 20))
    mask = rng.random((6, 20)) < 0.4
    mask[2] = False
    mask[3, :10] = False
    whole, whole_lse = wgattn.sdpa(q, k, v, mask, return_lse=True)
    cuts = sorted(rng.integers(0, 21, sets - 1))
    parts = [wgattn.sdpa(q, k[:, :, a:b], v[:, :, a:b], mask[:, a:b], return_lse=True) for a, b in zip([0, *cuts], [*cuts, 20], strict=True)]
    for order in (parts, parts[::-1]):
        o, lse = np.zeros_like(whole), np.full_like(whole_lse, -np.inf)
        for part in order:
            o, lse = wgattn.merge_state(o, lse, *part)
        assert_close(o, whole, max_error=2e-6, cuts=cuts)
        assert np.array_equal(np.isneginf(lse), np.isneginf(whole_lse))
        seen = np.isfinite(whole_lse)
        assert_close(lse[seen], whole_lse[seen], max_error=4e-6, cuts=cuts)
        assert not o[:, :, 2].any()


def test_an_empty_set_counts_for_nothing_whatever_its_output_holds(rng):
    o = rng.standard_normal((3, 8)).astype(F32)
    lse = np.array([0.5, -np.inf, -np.inf], F32)
    other, other_lse = np.full((3, 8), 123.0, F32), np.array([-np.inf, 2.0, -np.inf], F32)
    for a, b in (((o, lse), (other, other_lse)), ((other, other_lse), (o, lse))):
        merged, merged_lse = wgattn.merge_state(*a, *b)
        assert np.array_equal(merged[0], o[0])
        assert np.array_equal(merged[1], other[1])
        assert not merged[2].any()
        assert_close(merged_lse[:2], np.array([0.5, 2.0]), max_error=1e-6)
        assert np.isneginf(merged_lse[2])


@pytest.mark.parametrize("level", [-1e5, -60000.0, -100.0, 0.0, 88.0, 1000.0, 1e5, 1e30])
def test_any_level_of_the_lse(level):
    """Weights come from differences: equal parts share, a part 200 lower has no say."""
    ones, zeros, lse = np.ones((1, 4), F32), np.zeros((1, 4), F32), np.full(1, level, F32)
    o, _ = wgattn.merge_state(ones, lse, zeros, lse)
    assert_close(o, np.full((1, 4), 0.5), max_error=1e-6)
    o, joined = wgattn.merge_state(ones, lse, zeros, lse - F32(200 + abs(level)))
    assert np.array_equal(o, ones)
    assert_close(joined, lse, max_error=abs(level) * 1e-6 + 1e-6)


def test_tensors_give_tensors_and_nothing_is_copied_to_the_host(device, rng, monkeypatch):
    arrays = [rng.standard_normal(shape).astype(F32) for shape in ((3, 5, 8), (3, 5), (3, 5, 8), (3, 5))]
    expected = wgattn.merge_state(*arrays)
    with monkeypatch.context() as forbidden:
        forbid_reading(forbidden)
        results = wgattn.merge_state(*(device.tensor(a) for a in arrays))
    for ours, theirs in zip(results, expected, strict=True):
        assert isinstance(ours, wgattn.Tensor)
        assert np.array_equal(ours.numpy(), theirs)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8)])
def test_no_rows(device, shape):
    o, lse = wgattn.merge_state(np.zeros(shape), np.zeros(shape[:-1]), np.zeros(shape), np.zeros(shape[:-1]))
    assert o.shape == shape
    assert lse.shape == shape[:-1]


def test_more_rows_than_a_grid_is_long(rng):
    device = wgattn.Device(limits={"max-compute-workgroups-per-dimension": 3})
    arrays = [rng.standard_normal(shape).astype(F32) for shape in ((500, 4), (500,), (500, 4), (500,))]
    for ours, theirs in zip(wgattn.merge_state(*arrays, device=device), reference.merge_state(*arrays), strict=True):
        assert_close(ours, theirs, max_error=4e-6)


OUT, LSE = np.zeros((3, 5, 8), F32), np.zeros((3, 5), F32)

REFUSED = {
    "outputs of different shapes": (ShapeError, lambda d: wgattn.merge_state(OUT, LSE, OUT[:2], LSE)),
    "outputs of different width": (ShapeError, lambda d: wgattn.merge_state(OUT, LSE, OUT[..., :7], LSE)),
    "an lse of the outputs' shape": (ShapeError, lambda d: wgattn.merge_state(OUT, OUT, OUT, LSE)),
    "an lse with a last axis of 1": (ShapeError, lambda d: wgattn.merge_state(OUT, LSE, OUT, LSE[..., None])),
    "numbers": (ShapeError, lambda d: wgattn.merge_state(F32(0), F32(0), F32(0), F32(0))),
    "outputs of integers": (TypeError, lambda d: wgattn.merge_state(OUT.astype(int), LSE, OUT, LSE)),
    "an lse of complex numbers": (TypeError, lambda d: wgattn.merge_state(OUT, LSE, OUT, LSE.astype(complex))),
    "an lse tensor of f16": (TypeError, lambda d: wgattn.merge_state(OUT, d[0].tensor(LSE, F16), OUT, LSE)),
    "tensors of two devices": (ArgumentError, lambda d: wgattn.merge_state(d[0].tensor(OUT), LSE, d[1].tensor(OUT), LSE)),
    "tensors of another device than the call's": (ArgumentError, lambda d: wgattn.merge_state(d[0].tensor(OUT), LSE, OUT, LSE, device=d[1])),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_meant_is_refused_before_any_work(device, devices, monkeypatch, case):
    error, call = REFUSED[case]
    other = devices["gpu_shape"]
    assert other.profile
    check_refused(monkeypatch, error, call, device, other)
