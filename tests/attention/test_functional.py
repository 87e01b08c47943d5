"""scaled_dot_product_attention: what its contract promises, on every path. (Agreement over a grid of sizes is tested elsewhere.)"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import wgattn
from tests.helpers import assert_close, exp2_of_nan, not_available, poison
from tests.watch import Calls, Guard, check_refused, forbid_reading
from wgattn import reference
from wgattn.attention.paths import PORTABLE_PATHS
from wgattn.errors import ArgumentError, ShapeError, Unsupported
from wgattn.gpu import Device

F32, F16 = np.float32, np.float16
ERROR = {F32: 2e-5, F16: 2e-3}
sdpa = wgattn.scaled_dot_product_attention

every_path = pytest.mark.parametrize("path", PORTABLE_PATHS)


def draw(rng: np.random.Generator, B: int, H: int, Hkv: int, S: int, T: int, D: int, Dv: int | None = None, dtype: type = F32) -> list[np.ndarray]:
    """query, key and value of unit variance."""
    return [rng.standard_normal(shape).astype(dtype) for shape in ((B, H, S, D), (B, Hkv, T, D), (B, Hkv, T, D if Dv is None else Dv))]


def assert_lse(lse: np.ndarray, expected: np.ndarray, max_error: float, **case: Any) -> None:
    """Equal where nothing is seen, close elsewhere."""
    assert lse.dtype == F32
    assert lse.shape == expected.shape
    empty = np.isneginf(expected)
    assert np.array_equal(np.isneginf(lse), empty), f"rows that see nothing differ ({case})"
    assert_close(np.where(empty, 0, lse), np.where(empty, 0, expected), max_error=max_error, what="lse", **case)


@dataclass
class Check:
    """Runs a call in poisoned memory and holds it against the reference: outputs, lse, and nothing written beyond."""

    guard: Guard
    device: Device | None = None

    def __call__(self, *arrays: np.ndarray, path: str = "auto", max_error: float | None = None, **options: Any) -> np.ndarray:
        out, lse = sdpa(*arrays, path=path, return_lse=True, device=self.device, **options)
        expected, expected_lse = reference.attention(*arrays, **options)
        error = max_error or ERROR[F16 if arrays[0].dtype == F16 or arrays[1].dtype == F16 else F32]
        case = {"path": path, "shapes": [a.shape for a in arrays], "dtype": arrays[0].dtype.name, **{k: getattr(v, "shape", v) for k, v in options.items()}}
        assert out.dtype == (F16 if arrays[0].dtype == F16 else F32)
        assert_close(out, expected, max_error=error, **case)
        assert_lse(lse, expected_lse, max(error, 2e-6 * float(np.abs(expected_lse[np.isfinite(expected_lse)]).max(initial=0))), **case)
        self.guard.check(**case)
        self.guard.tensors.clear()
        return out


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, device: Device) -> Check:
    return Check(Guard(monkeypatch), device)


# ---- arrays in, arrays out


@every_path
def test_layouts_are_the_same_but_for_the_order_of_axes(rng, check, path):
    q, k, v = draw(rng, 2, 4, 2, 5, 9, 8)
    mask = rng.standard_normal((2, 4, 5, 9)).astype(F32)
    out = check(q, k, v, mask, path=path)
    swapped = (a.swapaxes(1, 2) for a in (q, k, v))  # views: strides that are not a dense array's
    again, lse = sdpa(*swapped, mask, layout="bshd", path=path, return_lse=True)
    assert again.shape == (2, 5, 4, 8)
    assert lse.shape == (2, 4, 5)
    assert np.array_equal(again.swapaxes(1, 2), out)


@pytest.mark.parametrize(
    ("q_dtype", "kv_dtype", "out_dtype"),
    [(F32, F32, F32), (F16, F16, F16), (np.float64, np.float64, F32), (F16, np.float64, F16), (np.float64, F16, F32)],
)
@pytest.mark.parametrize("path", ["auto", "gemm"])
def test_the_output_has_the_dtype_of_the_query(rng, path, q_dtype, kv_dtype, out_dtype):
    arrays = draw(rng, 1, 2, 1, 3, 6, 8)
    q, k, v = (a.astype(t) for a, t in zip(arrays, (q_dtype, kv_dtype, kv_dtype), strict=True))
    out = sdpa(q, k, v, path=path)
    assert out.dtype == out_dtype
    assert_close(out, reference.attention(q, k, v)[0], max_error=ERROR[out_dtype], path=path)


@every_path
@pytest.mark.parametrize(("dtype", "value_dim"), [(F32, 8), (F16, 8), (F16, 7)])
def test_tensors_give_tensors_and_nothing_is_copied_to_the_host(device, rng, monkeypatch, path, dtype, value_dim):
    q, k, v = draw(rng, 2, 4, 2, 5, 9, 8, value_dim, dtype)
    more = {
        "attn_mask": rng.standard_normal((5, 9)).astype(F32),
        "sinks": rng.standard_normal(4).astype(F32),
        "alibi_slopes": rng.random(4).astype(F32),
        "key_lengths": np.array([9, 4], np.uint32),
    }
    expected = sdpa(q, k, v, **more, path=path, return_lse=True)
    tensors = [device.tensor(a) for a in (q, k, v)]
    with monkeypatch.context() as forbidden:
        forbid_reading(forbidden)
        out, lse = sdpa(*tensors, **{n: device.tensor(a) for n, a in more.items()}, path=path, return_lse=True)
    assert isinstance(out, wgattn.Tensor)
    assert isinstance(lse, wgattn.Tensor)
    assert out.dtype == dtype
    assert lse.dtype == F32
    for ours, theirs in zip((out, lse), expected, strict=True):
        assert np.array_equal(ours.numpy(), theirs)


def test_kind_follows_the_query(device, rng):
    q, k, v = draw(rng, 1, 2, 2, 3, 6, 8)
    expected = sdpa(q, k, v)
    assert np.array_equal(sdpa(q, device.tensor(k), v), expected)
    out = sdpa(device.tensor(q), k, device.tensor(v))
    assert isinstance(out, wgattn.Tensor)
    assert np.array_equal(out.numpy(), expected)


def test_integer_masks_of_tensors(device, rng):
    q, k, v = draw(rng, 1, 2, 2, 3, 6, 8)
    for dtype in (np.int32, np.uint32):
        mask = rng.integers(0, 2, (3, 6)).astype(dtype) * dtype(7)
        mask[:, 0] = dtype(256)  # nonzero, though its low byte is 0
        tensors = [device.tensor(a) for a in (q, k, v, mask)]
        assert_close(sdpa(*tensors).numpy(), reference.attention(q, k, v, mask)[0], max_error=2e-5, dtype=dtype)


def test_arrays_that_are_not_dense(rng):
    """Strides, negative strides, Fortran order, foreign byte order, read-only, nested lists: all are what NumPy says they are."""
    q, k, v = draw(rng, 2, 4, 2, 5, 9, 8)
    mask = rng.integers(0, 2, (4, 5, 9)).astype(bool) | (np.arange(9) == 0)
    expected = sdpa(q, k, v, mask)
    wide = np.zeros((4, 8, 10, 16), F32)
    wide[::2, ::2, ::2, 1::2] = q
    others = {
        "strided": wide[::2, ::2, ::2, 1::2],
        "reversed": np.ascontiguousarray(q[:, :, ::-1])[:, :, ::-1],
        "Fortran": np.asfortranarray(q),
        "big-endian": q.astype(">f4"),
        "list": q.astype(float).tolist(),
    }
    for name, other in others.items():
        assert np.array_equal(sdpa(other, k, v, mask), expected), name
    frozen = k.copy()
    frozen.setflags(write=False)
    assert np.array_equal(sdpa(q, frozen, np.asfortranarray(v), np.asfortranarray(mask)), expected)
    assert np.array_equal(sdpa(q, k, v, np.broadcast_to(mask, (2, 4, 5, 9))), expected)
    assert np.array_equal(sdpa(q, k, v, mask.astype(">i2")), expected)
    broadcast = np.broadcast_to(k[:, :1], k.shape)  # stride 0
    assert np.array_equal(sdpa(q, broadcast, v), sdpa(q, broadcast.copy(), v))


def test_inputs_are_left_as_they_were(device, rng):
    arrays = draw(rng, 1, 2, 2, 3, 6, 8)
    copies = [a.copy() for a in arrays]
    sdpa(*arrays, is_causal=True)
    tensors = [device.tensor(a) for a in arrays]
    sdpa(*tensors, is_causal=True)
    for array, copy, tensor in zip(arrays, copies, tensors, strict=True):
        assert np.array_equal(array, copy)
        assert np.array_equal(tensor.numpy(), copy)


def test_torch_calls_run_unchanged(rng):
    q, k, v = draw(rng, 1, 4, 2, 3, 6, 8)
    assert np.array_equal(wgattn.sdpa(q, k, v, enable_gqa=True), sdpa(q, k, v))
    assert wgattn.sdpa is sdpa


# ---- heads and widths


@every_path
@pytest.mark.parametrize(("H", "Hkv"), [(14, 2), (28, 4), (36, 4), (9, 3), (15, 5), (32, 8), (8, 8), (71, 1)])
def test_a_query_head_reads_its_own_kv_head(rng, path, H, Hkv):
    """The values of KV head j are j + 1 everywhere: head h gives h // (H // Hkv) + 1, exactly where the weights are powers of two."""
    value = np.broadcast_to(np.arange(1, Hkv + 1, dtype=F32)[None, :, None, None], (1, Hkv, 4, 8))
    expected = np.broadcast_to((np.arange(H) * Hkv // H + 1)[None, :, None, None], (1, H, 3, 8))
    even = sdpa(np.zeros((1, H, 3, 8), F32), rng.standard_normal((1, Hkv, 4, 8)).astype(F32), value, path=path)
    assert np.array_equal(even, expected)
    random, key, _ = draw(rng, 1, H, Hkv, 3, 4, 8)
    assert_close(sdpa(random, key, value, path=path), expected, max_error=2e-5, path=path, H=H, Hkv=Hkv)


@every_path
def test_keys_of_a_head_are_its_own_too(rng, check, path):
    """Keys that differ by head, in a batch: a wrong map of keys does not cancel out."""
    check(*draw(rng, 2, 6, 3, 5, 7, 8), path=path)
    check(*draw(rng, 3, 4, 1, 1, 7, 8), path=path)


@every_path
@pytest.mark.parametrize(("D", "Dv", "dtype"), [(5, 5, F32), (6, 9, F32), (7, 8, F16), (8, 16, F32), (1, 2, F32), (5, 7, F16)])
def test_any_head_dim_and_values_of_another(rng, check, path, D, Dv, dtype):
    check(*draw(rng, 2, 4, 2, 3, 6, D, Dv, dtype), path=path, is_causal=True)


@every_path
def test_an_odd_number_of_f16_outputs(rng, check, path):
    """The last word is half one."""
    check(*draw(rng, 1, 1, 1, 3, 6, 8, 5, F16), path=path)
    check(*draw(rng, 1, 1, 1, 1, 6, 8, 1, F16), path=path)


# ---- the softmax


@every_path
def test_equal_scores_give_the_running_mean(check, path):
    """q = 0: row i is the mean of the values that it sees, whatever tiles the sizes fall into."""
    lengths = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 257)
    rng = np.random.default_rng(0)
    key, value = rng.standard_normal((2, 1, 1, 257, 8)).astype(F32)
    sums = np.concatenate([np.zeros((1, 8)), value[0, 0].cumsum(0, dtype=np.float64)])
    for S, T in itertools.product(lengths, lengths):
        q = np.zeros((1, 1, S, 8), F32)
        seen = np.clip(np.arange(S) + T - S + 1, 0, T)
        for causal, count in ((True, seen), (False, np.full(S, T))):
            out, lse = sdpa(q, key[:, :, :T], value[:, :, :T], is_causal=causal, path=path, return_lse=True)
            expected = sums[count] / np.maximum(count, 1)[:, None]
            assert_close(out[0, 0], expected, max_error=2e-6, S=S, T=T, path=path, causal=causal)
            with np.errstate(divide="ignore"):
                assert_lse(lse[0, 0], np.log(count), 2e-6, S=S, T=T, path=path, causal=causal)
    check.guard.check(path=path)


def scores_to_keys(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(query, key) of head dim 4 whose product, with scale 1, is `scores` (T) to the last bit."""
    query, key = np.zeros((1, 1, 2, 4), F32), np.zeros((1, 1, len(scores), 4), F32)
    query[..., 0] = 1
    key[0, 0, :, 0] = scores
    return query, key


@every_path
@pytest.mark.parametrize("kv_dtype", [F32, F16])
def test_logits_around_minus_60000(rng, check, path, kv_dtype):
    """Lower than any sentinel that fits f16. Steps of 32 where the keys are f16."""
    steps = np.array([0, 0, 0.25, 1, 2, 5, 40] if kv_dtype == F32 else [0, 0, 0, 32, 32, 64, 320])
    query, key = scores_to_keys(-60000 - steps if kv_dtype == F32 else -59968 - steps)
    value = rng.standard_normal((1, 1, 7, 4)).astype(kv_dtype)
    out = check(query, key.astype(kv_dtype), value, scale=1.0, path=path, max_error=0.01)  # 60,000 has 0.004 to the next f32
    weights = np.exp(-steps) / np.exp(-steps).sum()
    assert_close(out[0, 0], np.broadcast_to(weights @ value[0, 0].astype(np.float64), (2, 4)), max_error=0.01)


@every_path
@pytest.mark.parametrize("lowest", [-2e9, -1e30, -1e38, 2e9, 1e30])
def test_logits_beyond_all_reason(rng, check, path, lowest):
    """Where equal logits share, and any lower one has no weight: differences are all that counts."""
    query, key = scores_to_keys(np.array([lowest, lowest, lowest - abs(lowest) / 1000, lowest, lowest - abs(lowest) / 2]))
    value = rng.standard_normal((1, 1, 5, 4)).astype(F32)
    out = check(query, key, value, scale=1.0, path=path)
    assert_close(out[0, 0], np.broadcast_to(value[0, 0, [0, 1, 3]].mean(0), (2, 4)), max_error=2e-6)


@every_path
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("given", ["products", "mask", "scale"])
def test_scores_beyond_f32_saturate(rng, path, given, sign):
    """No NaN from finite input: equal scores share, however large they are, and a row with keys does not look like one without."""
    q, k, v = np.ones((1, 1, 2, 4), F32), sign * np.ones((1, 1, 5, 4), F32), rng.standard_normal((1, 1, 5, 4)).astype(F32)
    more = {"scale": 3e38} if given == "scale" else {"attn_mask": np.full((2, 5), sign * 3e38, F32)} if given == "mask" else {}
    if given == "products":
        q, k = q * F32(1e30), k * F32(1e30)
    out, lse = sdpa(q, k, v, path=path, return_lse=True, **more)
    assert_close(out[0, 0], np.broadcast_to(v[0, 0].mean(0), (2, 4)), max_error=2e-6)
    assert np.isfinite(lse).all()
    assert (np.sign(lse) == sign).all()


@pytest.mark.conformance(features=["plain"])
@every_path
@pytest.mark.parametrize("features", ["plain", "softcap", "mask", "sinks"])
@pytest.mark.parametrize("where", ["query", "key", "mask"])
def test_nan_is_seen(devices, rng, path, features, where):
    """Not taken for a hidden key: it makes the rows NaN that see it, and no other; their lse too."""
    if not np.isnan(exp2_of_nan(devices["software"])):
        not_available("exp2 of NaN is a number here.")
    more = {"softcap": {"softcap": 9.0}, "sinks": {"sinks": np.zeros(2, F32)}}.get(features, {})
    mask = np.zeros((40, 70), F32)
    for variant in ("software", "gpu_shape"):
        q, k, v = (rng.standard_normal((1, 2, n, 20)).astype(F32) for n in (40, 70, 70))
        mask[:] = 0
        if where == "mask":
            mask[7, 33] = np.nan
        else:
            {"query": q, "key": k}[where][0, 1, 7 if where == "query" else 33, 5] = np.nan
        given = {"attn_mask": mask} if features == "mask" or where == "mask" else {}
        tensors = [devices[variant].tensor(a) for a in (q, k, v)]
        out, lse = sdpa(*tensors, path=path, return_lse=True, is_causal=True, **given, **more)
        sees = np.zeros((1, 2, 40), bool)
        if where == "key":
            sees[0, 1, 33 - 30 :] = True  # bottom-right: query i sees keys up to i + 30
        else:
            sees[0, :, 7] = [where == "mask", True]
        np.testing.assert_array_equal(np.isnan(out.numpy()), np.broadcast_to(sees[..., None], out.shape))
        np.testing.assert_array_equal(np.isnan(lse.numpy()), sees)


@every_path
@pytest.mark.parametrize("dtype", [F16, F32])
def test_dot_products_beyond_f16(rng, check, path, dtype):
    """102,400 before scaling, 12,800 after; the second key's is 30 lower."""
    q = np.full((1, 1, 2, 64), 40, dtype)
    k = np.full((1, 1, 3, 64), 40, dtype)
    k[0, 0, 1] = 39.90625
    v = rng.standard_normal((1, 1, 3, 64)).astype(dtype)
    out = check(q, k, v, path=path)
    assert_close(out[0, 0, 0], (v[0, 0, 0].astype(float) + v[0, 0, 2]) / 2, max_error=ERROR[dtype])


@every_path
def test_large_entries_of_both_signs_in_f16(rng, check, path):
    q, k = (rng.choice([-30.0, 30.0], (1, 2, n, 128)).astype(F16) for n in (3, 40))
    k[0, :, 7] = q[0, :, 1]  # 115,200
    check(q, k, rng.standard_normal((1, 2, 40, 128)).astype(F16), path=path, max_error=5e-3)


@every_path
@pytest.mark.parametrize("scale", [None, 1.0, 0.01, -0.7, 0.0, 30.0])
def test_scale(rng, check, path, scale):
    check(*draw(rng, 1, 2, 1, 4, 6, 8), scale=scale, path=path, max_error=2e-5 if not scale or abs(scale) < 2 else 1e-3)


@every_path
@pytest.mark.parametrize("softcap", [0.5, 2.0, 50.0])
def test_softcap_comes_before_the_mask(rng, check, path, softcap):
    q, k, v = draw(rng, 1, 2, 1, 4, 6, 8)
    mask = rng.standard_normal((4, 6)).astype(F32) * 3
    mask[2, 1:4] = -np.inf
    check(q * 4, k * 4, v, mask, softcap=softcap, path=path, max_error=1e-4)  # errors of the scores are as large as the scores
    q, k = np.abs(q) + 0.5, (np.abs(k) + 0.5) * rng.choice([-1, 1], (*k.shape[:-1], 1)).astype(F32)  # no score is near 0, where its error would show
    check(q * 1000, k * 1000, v, softcap=softcap, path=path)  # far into the flat part, where e^2x would overflow


@every_path
def test_sinks_take_their_share(rng, check, path):
    """A sink joins the sum: it can be far below, far above, or infinitely far below, and is all that a row has that sees no key."""
    q, k, v = draw(rng, 2, 4, 2, 6, 5, 8)
    check(q, k, v, sinks=np.array([0.0, 3.0, -200.0, 60.0], F32), path=path, is_causal=True)
    hidden = np.zeros((6, 5), bool)
    hidden[1:] = True
    out, lse = sdpa(q, k, v, hidden, sinks=np.array([0.5, 3.0, -200.0, 60.0], F32), path=path, return_lse=True)
    assert not out[:, :, 0].any()
    assert_close(lse[:, :, 0], np.broadcast_to([0.5, 3.0, -200.0, 60.0], (2, 4)), max_error=1e-5)


@every_path
@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
def test_alibi_counts_the_distance_from_where_the_query_stands(rng, path, alignment, check):
    q, k, v = draw(rng, 2, 4, 2, 5, 9, 8)
    slopes = np.array([0.5, 0.25, 0.0, -0.3], F32)
    check(q, k, v, alibi_slopes=slopes, causal_alignment=alignment, path=path)
    place = np.arange(5)[:, None] + (4 if alignment == "bottom_right" else 0)
    bias = -slopes[:, None, None] * np.abs(place - np.arange(9))
    assert_close(sdpa(q, k, v, alibi_slopes=slopes, causal_alignment=alignment, path=path), reference.attention(q, k, v, bias)[0], max_error=2e-5)


@every_path
def test_lse_joins_two_halves(rng, path):
    q, k, v = draw(rng, 1, 4, 2, 5, 12, 8)
    halves = [sdpa(q, k[:, :, part], v[:, :, part], return_lse=True, path=path) for part in (slice(0, 5), slice(5, 12))]
    out, lse = wgattn.merge_state(*halves[0], *halves[1])
    whole, whole_lse = sdpa(q, k, v, return_lse=True, path=path)
    assert_close(out, whole, max_error=2e-6)
    assert_close(lse, whole_lse, max_error=2e-6)


# ---- who sees whom


def causal_by_hand(S: int, T: int, alignment: str) -> np.ndarray:
    """(S, T): the last query sees the last key; or the first query sees the first."""
    seen = np.zeros((S, T), bool)
    for i in range(S):
        for j in range(T):
            before_end = (S - 1 - i, T - 1 - j)
            seen[i, j] = before_end[1] >= before_end[0] if alignment == "bottom_right" else j <= i
    return seen


@every_path
@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
def test_causal(rng, path, alignment):
    for S, T in ((1, 1), (1, 7), (3, 3), (4, 7), (7, 4), (9, 1), (33, 40), (40, 33)):
        q, k, v = draw(rng, 1, 2, 1, S, T, 8)
        expected, expected_lse = reference.attention(q, k, v, causal_by_hand(S, T, alignment))
        out, lse = sdpa(q, k, v, is_causal=True, causal_alignment=alignment, path=path, return_lse=True)
        case = {"path": path, "S": S, "T": T, "alignment": alignment}
        assert_close(out, expected, max_error=2e-5, **case)
        assert_lse(lse, expected_lse, 2e-5, **case)


def windowed_by_hand(S: int, T: int, left: int, right: int, alignment: str) -> np.ndarray:
    seen = np.zeros((S, T), bool)
    for i in range(S):
        place = i + T - S if alignment == "bottom_right" else i
        for j in range(T):
            seen[i, j] = (left == -1 or place - j <= left) and (right == -1 or j - place <= right)
    return seen


@every_path
def test_windows_to_the_key(rng, path):
    """One key more or less at either end would change the result: values are powers of two, and weights equal."""
    S, T = 6, 9
    value = np.zeros((1, 1, T, 4), F32)
    value[0, 0, :, 0] = 2.0 ** np.arange(T)
    key, query = rng.standard_normal((1, 1, T, 8)).astype(F32), np.zeros((1, 1, S, 8), F32)
    sizes = [(left, right) for left in (-1, 0, 1, 3, 20) for right in (-1, 0, 1, 2, 20)]
    for (left, right), alignment, causal in itertools.product(sizes, ("bottom_right", "top_left"), (False, True)):
        seen = windowed_by_hand(S, T, left, 0 if causal else right, alignment)
        out = sdpa(query, key, value, window_size=(left, right), causal_alignment=alignment, is_causal=causal, path=path)
        sums = np.where(seen, value[0, 0, :, 0], 0).sum(1)
        count = seen.sum(1)
        found = np.rint(out[0, 0, :, 0] * count)
        assert np.array_equal(found, sums), f"window {(left, right)}, {alignment}, causal {causal}, path {path}: {found} instead of {sums}"


@every_path
def test_a_window_given_as_a_number_counts_the_current_key(rng, path):
    q, k, v = draw(rng, 1, 2, 1, 5, 9, 8)
    for w in (1, 2, 4, 9, 100):
        assert np.array_equal(sdpa(q, k, v, window_size=w, path=path), sdpa(q, k, v, window_size=(w - 1, 0), path=path))
    assert np.array_equal(sdpa(q, k, v, window_size=(-1, -1), path=path), sdpa(q, k, v, path=path))
    assert np.array_equal(sdpa(q, k, v, window_size=np.int64(3), path=path), sdpa(q, k, v, window_size=3, path=path))
    only_itself = sdpa(q, k, v, window_size=1, path=path)
    assert_close(only_itself, np.repeat(v[:, :, 4:], 2, 1), max_error=1e-6)


@every_path
def test_key_lengths_each_its_own(rng, check, path):
    """Aligned to each sequence's last key; what lies behind it may be NaN."""
    lengths = np.array([7, 0, 1, 4])
    for dtype in (F32, F16):
        q, k, v = draw(rng, 4, 4, 2, 3, 7, 8, dtype=dtype)
        for b, n in enumerate(lengths):
            k[b, :, n:] = poison(k[b, :, n:].shape, dtype)
            v[b, :, n:] = np.nan
        for options in ({}, {"is_causal": True}, {"window_size": (1, 1)}, {"is_causal": True, "causal_alignment": "top_left"}):
            out = check(q, k, v, key_lengths=lengths, path=path, **options)
            assert not out[1].any()


@every_path
def test_nothing_but_nan_behind_the_causal_edge(rng, check, path):
    """Keys that no query sees may hold anything."""
    q, k, v = draw(rng, 1, 2, 1, 3, 9, 8)
    k[:, :, 3:], v[:, :, 3:] = np.nan, np.inf
    check(q, k, v, is_causal=True, causal_alignment="top_left", path=path)
    q, k, v = draw(rng, 1, 2, 1, 2, 9, 8)
    k[:, :, :5], v[:, :, :5] = np.inf, np.nan
    check(q, k, v, window_size=3, path=path)


# ---- masks


def mask_kinds(rng: np.random.Generator, shape: tuple[int, ...]) -> Iterator[tuple[str, np.ndarray]]:
    """One mask of each dtype that hides some keys; added numbers where there are any."""
    seen = rng.random(shape) < 0.7
    bias = rng.standard_normal(shape)
    yield "bool", seen
    for dtype in (np.uint8, np.int8, np.int32, np.uint32, np.int64):
        yield np.dtype(dtype).name, seen.astype(dtype) * dtype(64)
    yield "float32 with -inf", np.where(seen, bias, -np.inf).astype(F32)
    yield "float32 with its lowest", np.where(seen, bias, np.finfo(F32).min).astype(F32)
    yield "float64 with -inf", np.where(seen, bias, -np.inf)
    yield "float16 with -inf", np.where(seen, bias, -np.inf).astype(F16)
    yield "float16 with its lowest", np.where(seen, bias, np.finfo(F16).min).astype(F16)


def as_reference(mask: np.ndarray) -> np.ndarray:
    """f16's lowest number hides a key, which the reference knows of f32's."""
    return np.where(mask <= np.finfo(F16).min, -np.inf, mask) if mask.dtype == F16 else mask


@every_path
def test_masks_of_every_kind(rng, path):
    q, k, v = draw(rng, 2, 4, 2, 5, 9, 8)
    for kind, mask in mask_kinds(rng, (2, 1, 5, 9)):
        out, lse = sdpa(q, k, v, mask, path=path, return_lse=True)
        expected, expected_lse = reference.attention(q, k, v, as_reference(mask))
        assert_close(out, expected, max_error=2e-5, kind=kind, path=path)
        assert_lse(lse, expected_lse, 2e-5, kind=kind, path=path)


@every_path
def test_masks_are_broadcast(rng, check, path):
    q, k, v = draw(rng, 2, 4, 2, 5, 9, 8)
    for rank in (1, 2, 3, 4):
        for shape in itertools.product(*((1, n) for n in (2, 4, 5, 9)[4 - rank :])):
            check(q, k, v, rng.standard_normal(shape).astype(F32) * 2, path=path)
            check(q, k, v, rng.random(shape) < 0.6, path=path)


@every_path
def test_a_mask_narrower_than_the_keys_belongs_to_the_last(rng, path):
    q, k, v = draw(rng, 2, 4, 2, 5, 9, 8)
    for width in (2, 5, 8):
        for kind, mask in mask_kinds(rng, (2, 1, 5, width)):
            visible = np.zeros((2, 1, 5, 9 - width)) if mask.dtype.kind == "f" else np.ones((2, 1, 5, 9 - width), bool)
            whole = np.concatenate([visible, as_reference(mask) if mask.dtype.kind == "f" else mask != 0], -1)
            expected, expected_lse = reference.attention(q, k, v, whole)
            out, lse = sdpa(q, k, v, mask, path=path, return_lse=True)
            assert_close(out, expected, max_error=2e-5, kind=kind, width=width, path=path)
            assert_lse(lse, expected_lse, 2e-5, kind=kind, width=width, path=path)


@every_path
def test_masks_with_everything_else(rng, check, path):
    """Mask, causal rule, window, key lengths, softcap, ALiBi and sinks in one call."""
    q, k, v = draw(rng, 3, 4, 2, 5, 11, 8, 12)
    options = {
        "is_causal": True,
        "window_size": (5, -1),
        "softcap": 3.0,
        "scale": 0.4,
        "sinks": rng.standard_normal(4).astype(F32),
        "alibi_slopes": rng.random(4).astype(F32),
        "key_lengths": np.array([11, 6, 2]),
    }
    for mask in (rng.standard_normal((3, 4, 5, 11)).astype(F32), rng.random((3, 1, 5, 8)) < 0.7):
        check(q, k, v, mask, path=path, **options)


def hidden(rng: np.random.Generator, kind: str, S: int, T: int) -> tuple[np.ndarray, np.ndarray]:
    """(a mask whose rows 1 and 3 hide everything, which rows those are)."""
    rows = np.isin(np.arange(S), (1, 3))
    name, _, how = kind.partition(" ")
    if how:
        lowest = {"-inf": -np.inf, "lowest": np.finfo(name).min}[how]
        return np.where(rows[:, None], lowest, rng.standard_normal((S, T))).astype(name), rows
    return np.broadcast_to(~rows[:, None], (S, T)).astype(name), rows


@every_path
@pytest.mark.parametrize("kind", ["bool", "uint8", "int32", "uint32", "int64", *(f"float{n} {how}" for n in (16, 32, 64) for how in ("-inf", "lowest"))])
@pytest.mark.filterwarnings("error")
def test_a_row_that_sees_nothing_gives_zeros(rng, check, path, kind):
    q, k, v = draw(rng, 1, 2, 1, 5, 9, 8)
    mask, rows = hidden(rng, kind, 5, 9)
    out, lse = sdpa(q, k, v, mask, path=path, return_lse=True)
    assert not out[:, :, rows].any()
    assert np.isneginf(lse[:, :, rows]).all()
    expected, expected_lse = reference.attention(q, k, v, as_reference(mask))
    assert_close(out, expected, max_error=2e-5, path=path, kind=kind)
    assert_lse(lse, expected_lse, 2e-5, path=path, kind=kind)
    check.guard.check(path=path, kind=kind)


@every_path
@pytest.mark.parametrize("kind", ["int32", "float32 -inf", "float16 lowest"])
def test_a_row_that_sees_nothing_by_a_mask_on_the_device(device, rng, path, kind):
    q, k, v = draw(rng, 1, 2, 1, 5, 9, 8)
    mask, rows = hidden(rng, kind, 5, 9)
    out, lse = sdpa(*(device.tensor(a) for a in (q, k, v, mask)), path=path, return_lse=True)
    assert not out.numpy()[:, :, rows].any()
    assert np.isneginf(lse.numpy()[:, :, rows]).all()
    assert out.numpy()[:, :, ~rows].all()


@every_path
def test_rows_that_see_nothing_for_other_reasons(rng, check, path):
    """More queries than keys; a length of 0; a window that ends before the first key; a mask over what the causal rule leaves."""
    q, k, v = draw(rng, 2, 2, 1, 9, 4, 8)
    assert not check(q, k, v, is_causal=True, path=path)[:, :, :5].any()
    assert not check(q, k, v, key_lengths=np.array([0, 4]), path=path)[0].any()
    assert not check(q, k, v, window_size=(0, 1), path=path)[:, :, :4].any()
    mask = np.ones((9, 4), bool)
    mask[6, :2] = False
    assert not check(q, k, v, mask, is_causal=True, path=path)[:, :, 6].any()
    assert not check(q, k, v, np.zeros((1, 1), bool), path=path).any()


@every_path
def test_huge_and_infinite_mask_values(rng, check, path):
    """What is added may be as large as f32 goes without hiding a key; a row with -inf for all keys but one is that key."""
    q, k, v = draw(rng, 1, 2, 1, 4, 6, 8)
    mask = np.zeros((4, 6), F32)
    mask[0] = -np.inf
    mask[0, 3] = 0
    mask[1, 2:] = -1e30
    mask[2] = -1e37  # the same for all: as if nothing were added, but for what rounding leaves of the scores
    mask[3, 5] = 1e30
    out, lse = sdpa(q, k, v, mask, path=path, return_lse=True)
    values = np.repeat(v, 2, 1)
    assert_close(out[:, :, 0], values[:, :, 3], max_error=1e-6)
    assert_close(out[:, :, 1], reference.attention(q[:, :, 1:2], k[:, :, :2], v[:, :, :2])[0][:, :, 0], max_error=2e-5)
    assert_close(out[:, :, 2], values.mean(2), max_error=2e-6)
    assert_close(out[:, :, 3], values[:, :, 5], max_error=1e-6)
    assert np.isfinite(lse).all()


# ---- nothing


@pytest.mark.parametrize("path", ["auto", *PORTABLE_PATHS])
@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize(("B", "S", "T", "Dv"), [(0, 3, 4, 8), (2, 0, 4, 8), (2, 3, 0, 8), (2, 0, 0, 8)])
def test_empty_arrays(device, rng, path, dtype, B, S, T, Dv):
    arrays = draw(rng, B, 4, 2, S, T, 8, Dv, dtype)
    out, lse = sdpa(*arrays, path=path, return_lse=True)
    assert out.shape == (B, 4, S, Dv)
    assert out.dtype == dtype
    assert lse.shape == (B, 4, S)
    assert not out.any()
    assert sdpa(*(a.swapaxes(1, 2) for a in arrays), layout="bshd", path=path).shape == (B, S, 4, Dv)
    tensors = sdpa(*(device.tensor(a) for a in arrays), path=path, return_lse=True)
    assert [t.shape for t in tensors] == [(B, 4, S, Dv), (B, 4, S)]
    assert np.isneginf(lse).all()  # of T = 0; the others have no rows
    assert np.isneginf(tensors[1].numpy()).all()


@every_path
def test_no_keys_but_a_sink_and_a_mask(rng, path):
    q, k, v = draw(rng, 1, 2, 1, 3, 0, 8)
    out, lse = sdpa(q, k, v, np.zeros((3, 0), F32), sinks=np.array([1.0, -2.0], F32), path=path, return_lse=True)
    assert not out.any()
    assert_close(lse, np.broadcast_to(np.array([1.0, -2.0])[:, None], (1, 2, 3)), max_error=1e-6)


# ---- what is refused

Q = np.zeros((2, 4, 3, 8), F32)
K = np.zeros((2, 2, 6, 8), F32)

Refusal = tuple[type[Exception], Callable[[Any], Any]]


def refuse(error: type[Exception], *arrays: Any, **options: Any) -> Refusal:
    return error, lambda devices: sdpa(*(arrays or (Q, K, K)), **options)


def with_tensors(error: type[Exception], call: Callable[[Device, Device], Any]) -> Refusal:
    return error, lambda devices: call(*devices)


REFUSED: dict[str, Refusal] = {
    "a query of three dimensions": refuse(ShapeError, Q[0], K, K),
    "a key of five dimensions": refuse(ShapeError, Q, K[None], K),
    "batches that differ": refuse(ShapeError, Q, K[:1], K[:1]),
    "a value of another batch": refuse(ShapeError, Q, K, K[:1]),
    "keys and values of different lengths": refuse(ShapeError, Q, K, K[:, :, :5]),
    "keys and values of different heads": refuse(ShapeError, Q, K, K[:, :1]),
    "head dims that differ": refuse(ShapeError, Q, K[..., :7], K),
    "a head dim of 0": refuse(ShapeError, Q[..., :0], K[..., :0], K),
    "heads that do not divide": refuse(ShapeError, np.zeros((2, 5, 3, 8), F32), K, K),
    "fewer query heads than KV heads": refuse(ShapeError, Q[:, :1], K, K),
    "values of no channels": refuse(ShapeError, Q, K, K[..., :0]),
    "no KV heads": refuse(ShapeError, Q, K[:, :0], K[:, :0]),
    "the other layout": refuse(ShapeError, Q.swapaxes(1, 2), K.swapaxes(1, 2), K.swapaxes(1, 2)),
    "a complex query": refuse(TypeError, Q.astype(complex), K, K),
    "an integer query": refuse(TypeError, Q.astype(int), K, K),
    "a bool key": refuse(TypeError, Q, K.astype(bool), K),
    "a value of long double": refuse(TypeError, Q, K, K.astype(np.longdouble)),
    "a query of text": refuse(TypeError, "query", K, K),
    "no query": refuse(TypeError, None, K, K),
    "keys and values of different dtypes": refuse(TypeError, Q, K, K.astype(F16)),
    "a layout that does not exist": refuse(ArgumentError, layout="bsd"),
    "an alignment that does not exist": refuse(ArgumentError, causal_alignment="center"),
    "a path that does not exist": refuse(ArgumentError, path="fused"),
    "a negative softcap": refuse(ArgumentError, softcap=-1.0),
    "an infinite softcap": refuse(ArgumentError, softcap=np.inf),
    "a NaN softcap": refuse(ArgumentError, softcap=np.nan),
    "a NaN scale": refuse(ArgumentError, scale=np.nan),
    "an infinite scale": refuse(ArgumentError, scale=np.inf),
    "a window of 0": refuse(ArgumentError, window_size=0),
    "a negative window": refuse(ArgumentError, window_size=-1),
    "a window beyond open": refuse(ArgumentError, window_size=(-2, 0)),
    "a window of three": refuse(ArgumentError, window_size=(1, 2, 3)),
    "a window of text": refuse(ArgumentError, window_size="wide"),
    "a window that is True": refuse(ArgumentError, window_size=True),
    "a mask that is a number": refuse(ShapeError, attn_mask=np.float32(0)),
    "a mask of five dimensions": refuse(ShapeError, attn_mask=np.zeros((1, 2, 4, 3, 6), F32)),
    "a mask of another batch": refuse(ShapeError, attn_mask=np.zeros((3, 1, 3, 6), F32)),
    "a mask of KV heads": refuse(ShapeError, attn_mask=np.zeros((2, 2, 3, 6), F32)),
    "a mask of other queries": refuse(ShapeError, attn_mask=np.zeros((2, 6), F32)),
    "a mask wider than the keys": refuse(ShapeError, attn_mask=np.zeros((3, 7), F32)),
    "a mask of no keys": refuse(ShapeError, attn_mask=np.zeros((3, 0), F32)),
    "a mask of complex numbers": refuse(TypeError, attn_mask=np.zeros((3, 6), complex)),
    "a mask of text": refuse(TypeError, attn_mask="causal"),
    "sinks of another number of heads": refuse(ShapeError, sinks=np.zeros(2, F32)),
    "sinks of two dimensions": refuse(ShapeError, sinks=np.zeros((1, 4), F32)),
    "sinks of complex numbers": refuse(TypeError, sinks=np.zeros(4, complex)),
    "slopes of another number of heads": refuse(ShapeError, alibi_slopes=np.zeros(3, F32)),
    "slopes for each sequence": refuse(ShapeError, alibi_slopes=np.zeros((2, 4), F32)),
    "slopes that are bools": refuse(TypeError, alibi_slopes=np.zeros(4, bool)),
    "key lengths of another batch": refuse(ShapeError, key_lengths=np.array([1, 2, 3])),
    "a key length for all": refuse(ShapeError, key_lengths=3),
    "key lengths beyond the keys": refuse(ArgumentError, key_lengths=np.array([6, 7])),
    "negative key lengths": refuse(ArgumentError, key_lengths=np.array([-1, 6])),
    "key lengths that are no integers": refuse(TypeError, key_lengths=np.array([1.0, 2.0])),
    "a query of another device than its keys": with_tensors(ArgumentError, lambda a, b: sdpa(a.tensor(Q), b.tensor(K), b.tensor(K))),
    "a mask of another device": with_tensors(ArgumentError, lambda a, b: sdpa(a.tensor(Q), K, K, b.tensor(np.zeros((3, 6))))),
    "tensors of another device than the call's": with_tensors(ArgumentError, lambda a, b: sdpa(a.tensor(Q), a.tensor(K), a.tensor(K), device=b)),
    "a query tensor of integers": with_tensors(TypeError, lambda a, b: sdpa(a.tensor(Q, np.int32), K, K)),
    "a mask tensor that does not fit": with_tensors(ShapeError, lambda a, b: sdpa(Q, K, K, a.tensor(np.zeros((4, 6))))),
    "a sinks tensor of f16": with_tensors(TypeError, lambda a, b: sdpa(Q, K, K, sinks=a.tensor(np.zeros(4, F16)))),
    "a key lengths tensor of i32": with_tensors(TypeError, lambda a, b: sdpa(Q, K, K, key_lengths=a.tensor(np.array([1, 2], np.int32)))),
    "a key lengths tensor that does not fit": with_tensors(ShapeError, lambda a, b: sdpa(Q, K, K, key_lengths=a.tensor(np.array([1], np.uint32)))),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_meant_is_refused_before_any_work(device, devices, monkeypatch, case):
    error, call = REFUSED[case]
    other = devices["gpu_shape"]
    assert other.profile
    made = check_refused(monkeypatch, error, call, device, other).made
    assert set(made) <= {"create_buffer"}, made  # those of the test's own tensors


def test_key_lengths_of_a_tensor_are_capped_on_the_device(device, rng):
    """They cannot be checked without reading them back."""
    q, k, v = draw(rng, 2, 2, 1, 3, 6, 8)
    lengths = device.tensor(np.array([4_000_000_000, 2], np.uint32))
    out = sdpa(q, k, v, key_lengths=lengths)
    assert_close(out, reference.attention(q, k, v, key_lengths=np.array([6, 2]))[0], max_error=2e-5)


def test_a_forced_path_that_cannot_run_says_what_is_missing(devices, monkeypatch):
    device = devices["software"]
    assert device.profile
    calls = Calls(device, monkeypatch)
    wide = np.zeros((1, 1, 1, 20_000), F32)
    with pytest.raises(Unsupported, match=r"'split'.*\d+ bytes of workgroup memory"):
        sdpa(wide, wide, wide, path="split", device=device)
    assert calls["submit"] == 0


# ---- the same again


@every_path
def test_repeats_are_identical(device, rng, path):
    """A missing barrier would show as a difference sooner or later."""
    q, k, v = (device.tensor(a) for a in draw(rng, 1, 4, 2, 33, 130, 8))
    mask = device.tensor(rng.standard_normal((33, 130)).astype(F32))
    first = sdpa(q, k, v, mask, is_causal=True, path=path).numpy()
    for _ in range(30):
        assert np.array_equal(sdpa(q, k, v, mask, is_causal=True, path=path).numpy(), first)


@every_path
def test_nan_is_seen_in_f16(device, rng, path):
    """Outputs of a multiple of 4 channels, and others, which a dispatch of its own packs."""
    for D in (20, 21):
        q, k, v = (rng.standard_normal((1, 2, n, D)).astype(F16) for n in (9, 30, 30))
        q[0, 1, 7, 5] = np.nan
        out = sdpa(*(device.tensor(a) for a in (q, k, v)), path=path).numpy()
        sees = np.zeros((1, 2, 9, 1), bool)
        sees[0, 1, 7] = True
        np.testing.assert_array_equal(np.isnan(out), np.broadcast_to(sees, out.shape))


@pytest.mark.parametrize("head_dim", [16, 18])
def test_nan_stays_in_a_cache_of_f16(device, rng, head_dim):
    pipe = wgattn.AttentionPipeline(2, 2, head_dim, kv_dtype="f16", capacity=16, device=device)
    q, k, v = (rng.standard_normal((1, 9, 2, head_dim)).astype(F32) for _ in range(3))
    k[0, 4, 1, 3] = v[0, 5, 0, 2] = np.nan
    pipe.prefill(q, k, v)
    assert np.argwhere(np.isnan(pipe.cache.k(9))).tolist() == [[1, 4, 3]]
    assert np.argwhere(np.isnan(pipe.cache.v(9))).tolist() == [[0, 5, 2]]


def test_nan_is_seen_across_splits_and_sets(devices, rng):
    """One NaN in a key of one split, and in one of the sets that are merged."""
    device = devices["gpu_shape"]
    q, k, v = (rng.standard_normal((1, 2, n, 16)).astype(F32) for n in (1, 1500, 1500))
    k[0, 1, 1200, 3] = np.nan
    out, lse = (t.numpy() for t in sdpa(*(device.tensor(a) for a in (q, k, v)), path="split", return_lse=True))
    parts = [sdpa(*(device.tensor(a) for a in (q, k[:, :, at], v[:, :, at])), return_lse=True) for at in (slice(0, 700), slice(700, 1500))]
    merged, joined = wgattn.merge_state(*parts[0], *parts[1])
    for rows, logs in ((out, lse), (merged.numpy(), joined.numpy())):
        assert np.isfinite(rows[0, 0]).all()
        assert np.isfinite(logs[0, 0]).all()
        assert np.isnan(rows[0, 1]).all()
        assert np.isnan(logs[0, 1]).all()
