"""int8 arithmetic: close to exact, closer to its own emulation, and as robust."""


import gguf
import numpy as np
import pytest

import wgattn
from tests.block.layers import QUANTISED, Attention, dequantised, random_matrix, rows
from tests.block.test_fused_mlp import made
from tests.helpers import assert_untouched, dirty_workgroup_memory, nmse, poison, split_canary, with_canary
from wgattn import QuantizedTensor, Rope, reference
from wgattn.block import arithmetic
from wgattn.block.linear import Matrix, pad_vector, record_linear
from wgattn.gpu import Device, Recording, StepState

EXACT, EMULATED = 5e-4, 1e-5
"""Gates of the NMSE against exact arithmetic, and against the emulation (codes may flip at ties)."""
VARIANTS = ["software", "gpu_shape", "gpu_shape_no_subgroup", "gpu_shape_32_lanes", "checked", "small_binding"]


def project(device: Device, matrix: QuantizedTensor, x: np.ndarray, *, tokens: int = 0, arithmetic: str = "int8", **vectors: np.ndarray) -> np.ndarray:
    """W . norm(x) + bias for the first tokens of a recording of `tokens`, checking that nothing else is written."""
    tokens = max(tokens, len(x))
    given = poison((tokens, x.shape[1]))
    given[: len(x)] = x
    y, state = with_canary(device, poison((tokens, matrix.shape[0]))), StepState(device)
    recording = Recording(device)
    record_linear(
        recording,
        Matrix(device, matrix),
        step=state.step,
        x=device.tensor(given),
        output="store",
        outputs={"y": y},
        tokens=tokens,
        y_stride=matrix.shape[0],
        gamma=device.tensor(pad_vector(vectors["gamma"])) if "gamma" in vectors else None,
        eps=1e-5,
        bias=device.tensor(vectors["bias"]) if "bias" in vectors else None,
        arithmetic=arithmetic,
    )
    state.place(0, len(x))
    dirty_workgroup_memory(device)
    recording.replay()
    after, canary = split_canary(y, (tokens, matrix.shape[0]))
    assert_untouched(canary)
    assert_untouched(after[len(x) :])
    return after[: len(x)]


@pytest.mark.conformance(variant=["gpu_shape"], kind=["Q8_0"])
@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("variant", ["software", "gpu_shape"])
def test_each_kind(devices, rng, variant, kind):
    matrix = random_matrix(rng, 130, 512, kind)
    several = variant == "software" or kind in ("Q4_0", "Q6_K")  # kernels for several tokens take long to compile
    for tokens, count in ((1, 1), (5, 5), (5, 2)) if several else ((1, 1),):
        x = rows(rng, count, 512) * rng.uniform(0.1, 10, (count, 1)).astype(np.float32)
        vectors = {"gamma": rng.uniform(0.5, 2, 512).astype(np.float32), "bias": 0.1 * rng.standard_normal(130).astype(np.float32)}
        got = project(devices[variant], matrix, x, tokens=tokens, **vectors)
        emulated = reference.linear_int8(x, matrix.dequantize(), **vectors)
        exact = reference.linear(reference.rms_norm(x, vectors["gamma"]), matrix.dequantize(), vectors["bias"])
        assert nmse(got, emulated) < EMULATED, (tokens, count)
        assert 1e-7 < nmse(got, exact) < EXACT, (tokens, count)  # it really rounds


@pytest.mark.conformance(variant=["gpu_shape"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_on_other_devices(devices, rng, variant):
    for kind, columns in (("Q8_0", 96), ("Q6_K", 256)) if variant == "gpu_shape_32_lanes" else (("Q4_1", 64),):
        matrix = random_matrix(rng, 37, columns, kind)
        x = rows(rng, 2, columns)
        assert nmse(project(devices[variant], matrix, x), reference.linear_int8(x, matrix.dequantize())) < EMULATED, kind


def test_codes_are_those_of_gguf(rng):
    """The emulation itself: as gguf's Q8_0, but for its f16 scale and for ties."""
    x = rows(rng, 8, 256)
    raw = gguf.quants.quantize(x, gguf.GGMLQuantizationType.Q8_0).reshape(-1, 34)
    codes = raw[:, 2:].view(np.int8).astype(int)
    ours = reference.quantize_int8(x).reshape(-1, 32)
    scale = np.abs(x.reshape(-1, 32)).max(1, keepdims=True) / 127
    np.testing.assert_allclose(ours / scale, np.rint(ours / scale), atol=1e-4)
    assert (np.rint(ours / scale) != codes).mean() < 1e-3
    assert np.abs(ours - x.reshape(-1, 32)).max() <= 0.5001 * scale.max()


@pytest.mark.conformance(kinds=["Q4_0"])
@pytest.mark.parametrize("kinds", ["Q4_0", ("Q8_0", "Q8_0", "Q8_0", "Q5_1")], ids=str)
def test_an_attention_half(rng, kinds):
    layer = Attention(896, 14, 2, 64, kinds, rope=Rope(1e6, 64), eps=1e-6)
    weights, x = layer.weights(rng), rows(rng, 6, 896)
    blocks = {name: layer.block(weights, arithmetic=name) for name in ("int8", "exact")}
    got = {name: np.concatenate([b.prefill(x[:5]), b.decode(x[5:])]) for name, b in blocks.items()}
    emulated, keys, values = layer.expected(weights, x, int8=True)
    assert nmse(got["int8"], emulated) < EMULATED
    assert nmse(blocks["int8"].cache.k(), keys) < EMULATED
    assert nmse(blocks["int8"].cache.v(), values) < EMULATED
    exact = layer.expected(weights, x)[0]
    assert 1e-7 < nmse(got["int8"], exact) < EXACT
    assert nmse(got["exact"], exact) < 1e-10


@pytest.mark.conformance(fused=[True])
@pytest.mark.parametrize("fused", [True, False])
def test_an_mlp_half(rng, fused):
    weights, x = made(rng, 256, 512, ("Q4_K", "Q4_K", "Q6_K"), ("b_gate", "b_up")), rows(rng, 5, 256)
    got = wgattn.FusedMLP(weights, arithmetic="int8", fused=fused)(x) - x
    assert nmse(got, reference.mlp(x, dequantised(weights), 1e-5)) < EXACT
    if fused:  # apart, the norm's result is rounded instead of what the norm scales
        assert nmse(got, reference.mlp(x, dequantised(weights), 1e-5, int8=True)) < 2 * EMULATED


def test_floats_stay_exact(device: Device, rng):
    layer = Attention(64, 4, 2, 16, "F16")
    weights, x = layer.weights(rng), rows(rng, 3, 64)
    np.testing.assert_array_equal(layer.block(weights, arithmetic="int8").prefill(x), layer.block(weights).prefill(x))
    for kind in ("F32", "F16", "BF16"):
        for wanted in ("int8", "auto"):
            assert arithmetic.resolve(device, Matrix(device, random_matrix(rng, 4, 32, kind)), 1, wanted) == "exact"


def test_auto_measures_once_and_takes_the_quicker(device: Device, rng, monkeypatch):
    monkeypatch.setattr(arithmetic, "_measured", {})
    asked: list[tuple] = []

    def measure(device: Device, matrix: Matrix, tokens: int, names: list[str]) -> dict[str, float]:
        asked.append((matrix.format.name, tokens, names))
        return {"exact": 2.0, "int8": 1.0 if matrix.format.name == "Q8_0" else 1.99}

    monkeypatch.setattr(arithmetic, "measure", measure)
    matrices = {kind: Matrix(device, random_matrix(rng, 8, 64, kind)) for kind in ("Q8_0", "Q4_0")}
    for _ in range(2):
        assert arithmetic.resolve(device, matrices["Q8_0"], 1, "auto") == "int8"
        assert arithmetic.resolve(device, matrices["Q4_0"], 1, "auto") == "exact"
        assert arithmetic.resolve(device, matrices["Q4_0"], 300, "auto") == "exact"
    timed = 64 if device.profile.software else 300
    assert asked == [(kind, n, ["exact", "int8"]) for kind, n in (("Q8_0", 1), ("Q4_0", 1), ("Q4_0", timed))]


def test_auto_on_the_real_device(device: Device, rng, monkeypatch):
    monkeypatch.setattr(arithmetic, "_measured", {})
    layer = Attention(64, 4, 2, 16, "Q8_0")
    weights, x = layer.weights(rng), rows(rng, 2, 64)
    got = layer.block(weights, arithmetic="auto").decode(x[:1])
    assert len(arithmetic._measured) == 2  # of QKV and of the output projection
    assert set(arithmetic._measured.values()) <= {"exact", "int8"}
    assert nmse(got, layer.expected(weights, x[:1])[0]) < EXACT
    seconds = arithmetic.measure(device, Matrix(device, random_matrix(rng, 64, 64, "Q8_0")), 1, ["exact", "int8"])
    assert list(seconds) == ["exact", "int8"]
    assert all(0 < s < 10 for s in seconds.values())


# ---- public bugs of other implementations


def test_bug_5_sums_beyond_f16(device: Device):
    """3072 products of 24: 73,728, exactly."""
    raw = np.zeros((4, 96, 34), np.uint8)
    raw[:, :, :2] = np.array([1.0], np.float16).view(np.uint8)
    raw[:, :, 2:] = 4
    x = np.full((1, 3072), 6.0, np.float32)
    for name in ("int8", "exact"):
        got = project(device, QuantizedTensor(raw, (4, 3072), "Q8_0"), x, arithmetic=name)
        assert np.abs(got - 73728).max() <= (0 if name == "exact" else 0.02)
    x[0, ::32] = 127  # codes are then the values themselves
    np.testing.assert_array_equal(project(device, QuantizedTensor(raw, (4, 3072), "Q8_0"), x), 4 * (96 * 127 + 96 * 31 * 6.0))


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("variant", ["software", "gpu_shape"])
@pytest.mark.parametrize("kind", ["Q4_1", "Q5_1", "Q4_K", "Q5_K"])
def test_bug_7_sums_of_activations_beyond_f16(devices, rng, kind, variant, tokens):
    """Sums of 32 activations, 88,000 and 96,000, that meet the offset of such a block."""
    matrix = random_matrix(rng, 8, 256, kind)
    x = np.full((tokens, 256), 3000.0, np.float32)
    x[::2, ::8] = 1000
    assert np.abs(x.reshape(tokens, -1, 32).sum(2)).min() > np.finfo(np.float16).max
    got = project(devices[variant], matrix, x)
    assert np.isfinite(got).all()
    assert nmse(got, reference.linear(x, matrix.dequantize())) < EXACT


@pytest.mark.parametrize("size", [1e-6, 1e-8, 1e-20, 1e-36, 1e-44, 0.0])
def test_bug_8_tiny_activations(device: Device, rng, size):
    """The scale would be a denormal, or zero: nothing becomes infinite, and zeros stay zeros."""
    matrix = random_matrix(rng, 8, 128, "Q5_0")
    x = rows(rng, 2, 128)
    x[:, 32:64] = (x[:, 32:64] * size).astype(np.float32)
    x[1, :] = (x[1, :] * size).astype(np.float32)
    got = project(device, matrix, x)
    assert np.isfinite(got).all()
    assert nmse(got[0], reference.linear(x[0], matrix.dequantize())) < EXACT
    if size > 1e-30:
        assert nmse(got[1] / size, reference.linear(x[1] / size, matrix.dequantize())) < EXACT
    else:  # below 1e-35 they count as zeros
        assert not got[1].any()


def test_large_activations(device: Device, rng):
    matrix = random_matrix(rng, 8, 128, "Q8_0")
    x = rows(rng, 1, 128) * np.float32(1e30)
    assert nmse(project(device, matrix, x) / 1e30, reference.linear(x, matrix.dequantize()) / 1e30) < EXACT
