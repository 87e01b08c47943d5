"""attention_scores: each stage between the dot products and the values, against plain NumPy."""

import numpy as np
import pytest

import wgattn
from tests.helpers import assert_close
from tests.watch import Calls, Guard, forbid_reading
from wgattn import reference
from wgattn.attention.scores import STAGES, attention_scores
from wgattn.errors import ArgumentError, CapacityError, ShapeError, Unsupported
from wgattn.gpu import Device

F32, F16 = np.float32, np.float16


def stages(
    q: np.ndarray, k: np.ndarray, mask: np.ndarray | None, seen: np.ndarray, *, softcap: float, scale: float, slopes: np.ndarray
) -> dict[str, np.ndarray]:
    """All stages in float64, (B, H, S, T). `seen` (.., S, T) is what causal rule, window and lengths leave."""
    k = np.repeat(k.astype(np.float64), q.shape[1] // k.shape[1], 1)
    scaled = scale * np.einsum("bhsd,bhtd->bhst", q.astype(np.float64), k)
    capped = softcap * np.tanh(scaled / softcap)
    S, T = scaled.shape[2:]
    bias = -slopes[:, None, None] * np.abs(np.arange(S)[:, None] + T - S - np.arange(T))
    if mask is not None:
        bias = bias + (np.where(mask, 0, -np.inf) if mask.dtype == bool else mask)
    masked = np.where(seen, capped + bias, -np.inf)
    top = masked.max(-1, keepdims=True)
    weights = np.exp(masked - np.where(np.isfinite(top), top, 0))
    return {"scaled": scaled, "softcap": capped, "masked": masked, "softmax": weights / np.maximum(weights.sum(-1, keepdims=True), 1e-300)}


@pytest.mark.conformance(T=[131])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize(("D", "T"), [(8, 9), (5, 12), (8, 131)])
def test_every_stage(device, rng, monkeypatch, stage, dtype, D, T):
    """With everything that belongs to a later stage given, too: it must not be felt. A row is hidden altogether."""
    guard = Guard(monkeypatch)
    q, k = rng.standard_normal((2, 4, 5, D)).astype(dtype), rng.standard_normal((2, 2, T, D)).astype(dtype)
    slopes = rng.random(4).astype(F32)
    seen = reference.visible(5, T, is_causal=True, window_size=(6, -1))
    bias = rng.standard_normal((2, 1, 5, T)).astype(F32)
    bias[1, 0, 2] = -np.inf
    for mask in (bias, rng.random((5, T)) < 0.6):
        options = {"softcap": 1.5, "scale": 0.6, "alibi_slopes": slopes, "is_causal": True, "window_size": (6, -1)}
        found = attention_scores(q, k, mask, stage=stage, **options)
        expected = stages(q, k, mask, seen, softcap=1.5, scale=0.6, slopes=slopes)[stage]
        case = {"stage": stage, "D": D, "T": T, "dtype": dtype, "mask": mask.dtype}
        assert found.dtype == F32
        hidden = np.isneginf(expected)
        assert np.array_equal(np.isneginf(found), hidden), case
        assert hidden.any() == (stage == "masked")
        assert_close(np.where(hidden, 0, found), np.where(hidden, 0, expected), max_error=1e-5, **case)
    guard.check(stage=stage)


def test_probabilities_are_those_that_weigh_the_values(rng):
    q, k, v = (rng.standard_normal((2, 3, n, 8)).astype(F32) for n in (4, 7, 7))
    options = {"sinks": rng.standard_normal(3).astype(F32), "key_lengths": np.array([7, 3]), "is_causal": True}
    p = attention_scores(q, k, **options)
    assert_close(np.einsum("bhst,bhtd->bhsd", p, v), wgattn.sdpa(q, k, v, **options), max_error=2e-6)
    assert (p.sum(-1) < 1).all(), "the sink has its share"
    assert not p[1, :, :, 3:].any()


def test_what_nobody_sees_may_be_nan(rng):
    q, k = rng.standard_normal((1, 2, 3, 8)).astype(F32), rng.standard_normal((1, 2, 9, 8)).astype(F32)
    clean = attention_scores(q, k[:, :, :5], is_causal=True)
    k[:, :, 5:] = np.nan
    dirty = attention_scores(q, k, is_causal=True, key_lengths=np.array([5]))
    assert np.array_equal(dirty[..., :5], clean)
    assert not dirty[..., 5:].any()
    assert np.isneginf(attention_scores(q, k, is_causal=True, key_lengths=np.array([5]), stage="masked")[..., 5:]).all()


def test_layouts_and_tensors(device, rng, monkeypatch):
    q, k = rng.standard_normal((2, 4, 5, 8)).astype(F32), rng.standard_normal((2, 2, 9, 8)).astype(F32)
    mask = rng.standard_normal((4, 1, 9)).astype(F32)
    expected = attention_scores(q, k, mask)
    assert np.array_equal(attention_scores(q.swapaxes(1, 2), k.swapaxes(1, 2), mask, layout="bshd"), expected)
    with monkeypatch.context() as forbidden:
        forbid_reading(forbidden)
        out = attention_scores(device.tensor(q), device.tensor(k), device.tensor(mask))
    assert np.array_equal(out.numpy(), expected)


@pytest.mark.parametrize("variant", ["gpu_shape", "gpu_shape_no_subgroup", "checked", "small_binding"])
def test_other_kernel_shapes(devices, rng, variant):
    """The last cuts the heads into rounds."""
    q, k = rng.standard_normal((2, 4, 70, 8)).astype(F32), rng.standard_normal((2, 2, 300, 8)).astype(F32)
    for stage in STAGES:
        found = attention_scores(q, k, stage=stage, softcap=2.0, scale=0.5, device=devices[variant])
        expected = stages(q, k, None, np.ones((70, 300), bool), softcap=2.0, scale=0.5, slopes=np.zeros(4))[stage]
        assert_close(found, expected, max_error=1e-5, variant=variant, stage=stage)


@pytest.mark.parametrize("shape", [(0, 4, 3, 6), (2, 4, 0, 6), (2, 4, 3, 0)])
def test_empty_arrays(shape):
    B, H, S, T = shape
    for stage in STAGES:
        assert attention_scores(np.zeros((B, H, S, 8), F32), np.zeros((B, 2, T, 8), F32), stage=stage).shape == shape


Q, K = np.zeros((1, 2, 3, 8), F32), np.zeros((1, 2, 6, 8), F32)


@pytest.mark.parametrize(
    ("error", "arguments", "options"),
    [
        (ArgumentError, (Q, K), {"stage": "logits"}),
        (ShapeError, (Q, K[:, :1, :, :4]), {}),
        (ShapeError, (Q, K, np.zeros((3, 7), F32)), {}),
        (TypeError, (Q.astype(int), K), {}),
        (ArgumentError, (Q, K), {"softcap": -1.0}),
        (TypeError, (Q, K), {"return_scores": True}),
    ],
)
def test_what_cannot_be_meant_is_refused_before_any_work(device, monkeypatch, error, arguments, options):
    assert device.profile
    calls = Calls(device, monkeypatch)
    with pytest.raises(error):
        attention_scores(*arguments, **options)
    assert dict(calls) == {}


def test_scores_that_do_not_fit_are_refused_with_the_numbers(devices):
    device: Device = devices["small_binding"]
    with pytest.raises(CapacityError, match="1440000 bytes"):
        attention_scores(np.zeros((1, 4, 300, 8), F32), np.zeros((1, 4, 300, 8), F32), device=device)
    with pytest.raises(Unsupported, match="600 x 600"):
        attention_scores(np.zeros((1, 1, 600, 8), F32), np.zeros((1, 1, 600, 8), F32), device=device)
