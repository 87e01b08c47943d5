"""FusedAttention: against the float64 reference at the shapes of real models, what it accepts and refuses, and what a step may do."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import wgattn
from tests.block.layers import KINDS, SMALL, Attention, check_layer, dequantised, random_matrix, rotary, rows
from tests.helpers import assert_close, assert_untouched, nmse, poison
from tests.watch import Calls, forbid_reading
from wgattn import ArgumentError, CapacityError, QuantizedTensor, Rope, ShapeError, Unsupported, reference
from wgattn.attention.split import regimes
from wgattn.block.attention_block import AttentionBlock, ChosenAttention, Geometry
from wgattn.block.memory import attention_buffers
from wgattn.gpu import Device, DeviceProfile, Recording, StepState, Tensor

LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
MODELS = {
    "Qwen2-0.5B": Attention(896, 14, 2, 64, bias=True, rope=Rope(1e6, 64), eps=1e-6),
    "Qwen2-0.5B as its files are": Attention(896, 14, 2, 64, ("Q5_0", "Q5_0", "Q8_0", "Q5_0"), bias=True, rope=Rope(1e6, 64), eps=1e-6),
    "Qwen2.5-1.5B": Attention(1536, 12, 2, 128, "Q4_K", bias=True, rope=Rope(1e6, 128), eps=1e-6),
    "Qwen2.5-7B": Attention(3584, 28, 4, 128, ("Q4_K", "Q4_K", "Q6_K", "Q4_K"), bias=True, rope=Rope(1e6, 128), eps=1e-6),
    "Qwen3-0.6B": Attention(1024, 16, 8, 128, "Q8_0", qk_norm=True, rope=Rope(1e6, 128), eps=1e-6),
    "Llama-2-7B": Attention(4096, 32, 32, 128, "Q4_0", rope=Rope(1e4, 128, interleaved=True)),
    "Llama-3.2-1B": Attention(2048, 32, 8, 64, "Q4_0", rope=Rope(5e5, 64, interleaved=True, scaling={**LLAMA3, "factor": 32.0})),
    "Llama-3.1-8B": Attention(4096, 32, 8, 128, ("Q4_K", "Q4_K", "Q6_K", "Q4_K"), rope=Rope(5e5, 128, interleaved=True, scaling={**LLAMA3, "factor": 8.0})),
    "SmolLM-135M": Attention(576, 9, 3, 64, "Q4_1", rope=Rope(1e4, 64, interleaved=True)),
    "partial rotary, D 80": Attention(2560, 32, 32, 80, "F16", bias=True, rope=Rope(1e4, 32)),
}
QUANTISED_CACHES = ("q8_0", "q4_0")
SMALL_ENOUGH = ("Qwen2-0.5B", "Qwen2-0.5B as its files are", "SmolLM-135M")


def shrunk(layer: Attention) -> Attention:
    """Fewer channels of the residual stream and fewer heads of the same ratio: the heads are the same."""
    kv = 1 if layer.KV == layer.H else min(2, layer.KV)
    wide = 256 if "K" in "".join(layer.kinds) else 96
    return replace(layer, E=wide, H=kv * layer.H // layer.KV * (2 if kv == 1 else 1), KV=kv * (2 if kv == 1 else 1))


# ---- agreement with the reference


@pytest.mark.conformance(name=["Qwen2-0.5B as its files are", "partial rotary, D 80"])
@pytest.mark.parametrize("name", MODELS)
def test_each_models_shape(rng, name):
    check_layer(rng, MODELS[name] if name in SMALL_ENOUGH else shrunk(MODELS[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name not in SMALL_ENOUGH])
def test_each_models_shape_in_full(rng, name):
    check_layer(rng, MODELS[name], capacity=8)


@pytest.mark.conformance(variant=["gpu_shape", "small_binding"])
@pytest.mark.parametrize("variant", ["gpu_shape", "gpu_shape_no_subgroup", "gpu_shape_32_lanes", "checked", "small_binding"])
def test_on_other_devices(devices, rng, variant):
    check_layer(rng, replace(SMALL, bias=True, kinds=("F32", "F16", "F16", "F32")), device=devices[variant])


@pytest.mark.parametrize("kind", KINDS)
def test_each_weight_format(rng, kind):
    layer = Attention(256, 16, 2, 16, kind)
    weights, x = layer.weights(rng), rows(rng, 3, 256)
    block = layer.block(weights)
    expected, keys, values = layer.expected(weights, x)
    assert_close(np.concatenate([block.decode(x[i : i + 1]) for i in range(3)]), expected, max_error=2e-5, kind=kind)
    assert_close(block.cache.k(), keys, max_error=2e-5, kind=kind)
    assert_close(block.cache.v(), values, max_error=2e-5, kind=kind)


def test_formats_mixed_at_will(rng):
    check_layer(rng, Attention(256, 16, 2, 16, ("Q4_0", "Q6_K", "F16", "BF16"), bias=True))


def test_weights_as_arrays_of_every_float(rng):
    import ml_dtypes

    weights = dequantised(SMALL.weights(rng))
    weights |= {"wk": weights["wk"].astype(np.float16), "wv": weights["wv"].astype(np.float64), "wo": weights["wo"].astype(ml_dtypes.bfloat16)}
    x = rows(rng, 4, SMALL.E)
    rounded = weights | {"wo": weights["wo"].astype(np.float32)}
    assert_close(SMALL.block(weights).prefill(x), SMALL.expected(rounded, x)[0], max_error=2e-5)


@pytest.mark.parametrize(
    "layer",
    [
        replace(SMALL, rope=None),
        replace(SMALL, rope=None, qk_norm=True, bias=True),
        rotary(SMALL, dim=8),
        rotary(SMALL, dim=8, interleaved=True),
        rotary(SMALL, dim=16, interleaved=True, scaling={"rope_type": "linear", "factor": 4.0}),
        rotary(SMALL, dim=16, scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}),
        replace(SMALL, E=50, H=3, KV=1, D=20, rope=Rope(dim=20), qk_norm=True),
    ],
    ids=["no rope", "no rope, QK-norm, biases", "partial, halves", "partial, neighbours", "linear", "yarn", "E and H*D no multiples of 16"],
)
def test_options(rng, layer):
    check_layer(rng, layer)


def test_only_one_of_the_two_head_norms(rng):
    layer = replace(SMALL, qk_norm=True)
    weights = layer.weights(rng)
    x = rows(rng, 3, layer.E)
    for name in ("q_norm", "k_norm"):
        some = {n: w for n, w in weights.items() if n != name}
        ones = weights | {name: np.ones(layer.D)}
        keyless = reference.attention_block(x, dequantised(some), **layer.sizes, eps=layer.eps, rope=layer.reference_rope)[0]
        kernel = layer.block(some).prefill(x)
        assert_close(kernel, layer.expected(ones, x)[0], max_error=2e-5, missing=name)  # weights of one: still normed
        assert nmse(kernel, keyless) > 1e-4, name


@pytest.mark.parametrize("layer", [MODELS["Qwen2-0.5B"], SMALL], ids=["Qwen2-0.5B", "small"])
def test_f16_cache(rng, layer):
    weights, x = layer.weights(rng), rows(rng, 30, layer.E)
    block = layer.block(weights, kv_dtype="f16")
    expected, keys, values = layer.expected(weights, x)
    got = np.concatenate([block.prefill(x[:28]), block.decode(x[28:29]), block.decode(x[29:])])
    assert 0 < nmse(got, expected) < 1e-5
    assert 0 < nmse(block.cache.k(), keys) < 1e-5
    assert nmse(block.cache.v(), values) < 1e-5
    for store in (block.cache.store.keys, block.cache.store.values):
        assert store.dtype == np.float16
        assert_untouched(store.numpy()[:, :, 30:])


# ---- a quantised cache

FLIPS = {"q8_0": 1e-5, "q4_0": 2e-3}
"""NMSE that a few codes or scales make which went the other way, because a key differs from the reference by the rounding of f32."""


def stored_rows(block: wgattn.FusedAttention, store: Tensor) -> list[np.ndarray]:
    """The words of codes, and of scales, of a quantised cache: (KV heads, positions, words) each."""
    cache = block.cache.store
    return [part.reshape(cache.num_kv_heads, cache.room, -1) for part in np.split(store.numpy(), [cache.scales])]


def check_quantised(rng: np.random.Generator, layer: Attention, kind: str, *, tokens: int = 6, device: Device | None = None, **options: Any) -> None:
    """As `check_layer`, against attention over keys and values that were quantised; the caches begin as NaN."""
    weights, x, residual = layer.weights(rng), rows(rng, tokens, layer.E), rows(rng, tokens, layer.E)
    block = layer.block(weights, device=device, kv_dtype=kind, **options)
    expected, keys, values = layer.expected(weights, x, kv_dtype=kind)
    got = [block.prefill(x[:-2], residual[:-2]), block.decode(x[-2:-1], residual[-2:-1]), block.decode(x[-1:])]
    residual[-1] = 0
    case = {"layer": layer, "kind": kind, **options}
    flipped = 0
    for name, held, wanted in (("keys", block.cache.k(), keys), ("values", block.cache.v(), values)):
        wrong = held != wanted.astype(np.float32)
        blocks = np.add.reduceat(wrong, np.arange(0, layer.D, 32), axis=-1) > 0  # a scale is that of all of its block
        flipped += blocks.sum()
        assert blocks.sum() <= max(3, blocks.size // 20), (name, case)
        assert nmse(held, wanted) < FLIPS[kind], (name, case)
    exact = {"max_error": 2e-5} if not flipped else {"max_error": np.inf, "max_nmse": FLIPS[kind]}
    assert_close(np.concatenate(got), expected + residual, **exact, **case)
    for store in (block.cache.store.keys, block.cache.store.values):
        for part in stored_rows(block, store):
            assert_untouched(part[:, tokens:], what="cache rows beyond the length", **case)


@pytest.mark.conformance(name=["Qwen2-0.5B", "partial rotary, D 80"])
@pytest.mark.parametrize(
    ("kind", "name"), [("q8_0", "Qwen2-0.5B"), ("q4_0", "Qwen3-0.6B"), ("q8_0", "Llama-3.2-1B"), ("q4_0", "SmolLM-135M"), ("q8_0", "partial rotary, D 80")]
)
def test_quantised_cache_at_each_models_shape(rng, kind, name):
    check_quantised(rng, MODELS[name] if name in SMALL_ENOUGH else shrunk(MODELS[name]), kind)


@pytest.mark.conformance(variant=["gpu_shape_32_lanes"])
@pytest.mark.parametrize("variant", ["software", "gpu_shape", "gpu_shape_no_subgroup", "gpu_shape_32_lanes", "checked", "small_binding"])
@pytest.mark.parametrize("kind", QUANTISED_CACHES)
def test_quantised_cache_on_other_devices(devices, rng, kind, variant):
    heads = {"q8_0": {"bias": True}, "q4_0": {"H": 6, "KV": 3, "D": 36, "rope": Rope(dim=36), "qk_norm": True}}
    layer = replace(SMALL, **heads[kind], kinds=("F16", "F32", "F32", "F16"))
    check_quantised(rng, layer, kind, device=devices[variant])
    check_quantised(rng, layer, kind, device=devices[variant], tokens=22, capacity=22)  # prompts of many take other kernels


@pytest.mark.parametrize(
    ("kind", "layer"),
    [
        ("q4_0", replace(SMALL, rope=None)),
        ("q8_0", replace(SMALL, E=64, D=96, rope=Rope(dim=64, interleaved=True), kinds=("Q4_0", "Q8_0", "F16", "F32"))),
        ("q4_0", replace(SMALL, E=256, D=128, H=2, KV=1, rope=Rope(dim=128), kinds="Q4_K", qk_norm=True, bias=True)),
    ],
    ids=["no rope", "D 96, partial, neighbours, kinds of each", "D 128, QK-norm, biases"],
)
def test_quantised_cache_with_other_options(rng, kind, layer):
    check_quantised(rng, layer, kind)
    check_quantised(rng, layer, kind, fused=False)


@pytest.mark.parametrize("kind", QUANTISED_CACHES)
def test_quantised_cache_and_int8(rng, kind):
    """Activations rounded as well: no farther from the truth than both by themselves."""
    layer = replace(SMALL, E=64, kinds="Q8_0")
    weights, x = layer.weights(rng), rows(rng, 12, layer.E)
    expected = layer.expected(weights, x)[0]
    block = layer.block(weights, kv_dtype=kind, arithmetic="int8")
    got = np.concatenate([block.prefill(x[:9]), *(block.decode(x[i : i + 1]) for i in range(9, 12))])
    assert nmse(got, expected) < {"q8_0": 1e-4, "q4_0": 2.5e-2}[kind] + 5e-4


@pytest.mark.parametrize("kind", QUANTISED_CACHES)
def test_a_step_writes_one_row_of_a_quantised_cache(rng, kind):
    """Codes and scales of that position, in each KV head; all other words of the cache stay. So does a row of a prompt."""
    for layer in (SMALL, replace(SMALL, D=96, H=3, KV=1)):
        for fused in (True, False) if layer is SMALL else (True,):
            block, x = layer.block(layer.weights(rng), kv_dtype=kind, fused=fused), rows(rng, 12, layer.E)
            for S in (4, 1, 1, 5, 1):
                before = [*stored_rows(block, block.cache.store.keys), *stored_rows(block, block.cache.store.values)]
                (block.decode if S == 1 else block.prefill)(x[:S])
                mine = np.s_[block.length - S : block.length]
                after = [*stored_rows(block, block.cache.store.keys), *stored_rows(block, block.cache.store.values)]
                for old, new in zip(before, after, strict=True):
                    changed = (old != new).any(-1)
                    assert changed[:, mine].all(), (kind, fused, S)
                    assert not np.delete(changed, mine, axis=1).any(), (kind, fused, S)


@pytest.mark.parametrize("kind", QUANTISED_CACHES)
def test_quantised_prefill_in_pieces(rng, kind):
    """In one, in pieces and in single tokens: equal codes but for those next to a tie, and outputs that differ by no more than these make."""
    weights, x, residual = SMALL.weights(rng), rows(rng, 9, SMALL.E), rows(rng, 9, SMALL.E)
    block = SMALL.block(weights, kv_dtype=kind)
    whole, keys = block.prefill(x, residual), block.cache.k()
    for cuts in ([1], [4], [8], [3, 5], list(range(1, 9))):
        block.reset()
        parts = np.split(np.arange(9), cuts)
        out = np.concatenate([(block.decode if len(p) == 1 else block.prefill)(x[p], residual[p]) for p in parts])
        assert (block.cache.k() != keys).any(-1).sum() <= 2, cuts
        assert nmse(out, whole) < FLIPS[kind], cuts
    block.truncate(5)
    again = block.prefill(x[5:], residual[5:])
    block.truncate(5)
    np.testing.assert_array_equal(block.prefill(x[5:], residual[5:]), again)


@pytest.mark.parametrize("kind", QUANTISED_CACHES)
def test_steps_over_a_quantised_cache_take_three_dispatches_and_make_nothing(rng, monkeypatch, kind):
    weights, x = SMALL.weights(rng), rows(rng, 1, SMALL.E)
    for fused, dispatches in ((True, 3), (False, 8)):
        block = SMALL.block(weights, kv_dtype=kind, fused=fused)
        assert block.dispatches_per_token == dispatches
        with monkeypatch.context() as patch:
            calls = Calls(block.device, patch)
            for array in (block.device.tensor(x), x):
                calls.check_step(block.decode, array, array)


# ---- pieces, and where a sequence continues


@pytest.mark.conformance
def test_prefill_in_pieces_equals_prefill_in_one_and_single_decodes(rng):
    weights, x, residual = SMALL.weights(rng), rows(rng, 9, SMALL.E), rows(rng, 9, SMALL.E)
    block = SMALL.block(weights)
    whole, keys = block.prefill(x, residual), block.cache.k()
    for cut in range(10):
        block.reset()
        pieces = [block.prefill(x[a:b], residual[a:b]) for a, b in ((0, cut), (cut, 9)) if b > a]
        assert_close(np.concatenate(pieces), whole, max_error=2e-6, cut=cut)
        assert_close(block.cache.k(), keys, max_error=2e-6, cut=cut)
    block.reset()
    assert_close(np.concatenate([block.decode(x[i : i + 1], residual[i : i + 1]) for i in range(9)]), whole, max_error=2e-6, cut="decodes")


@pytest.mark.conformance
@pytest.mark.parametrize("tokens", [63, 64, 65, 150])
def test_prompts_around_and_beyond_the_chunk(rng, tokens):
    weights, x, residual = SMALL.weights(rng), rows(rng, tokens, SMALL.E), rows(rng, tokens, SMALL.E)
    block = SMALL.block(weights, capacity=tokens + 3)
    expected = SMALL.expected(weights, x)[0] + residual
    assert_close(block.prefill(x, residual), expected, max_error=2e-5)
    block.truncate(7)
    assert_close(block.prefill(x[7:], residual[7:]), expected[7:], max_error=2e-5)


def test_the_second_sequence_is_as_good_as_the_first(rng):
    weights, x = SMALL.weights(rng), rows(rng, 8, SMALL.E)
    used, fresh = SMALL.block(weights), SMALL.block(weights)
    used.prefill(rows(rng, 30, SMALL.E), rows(rng, 30, SMALL.E))
    used.decode(rows(rng, 1, SMALL.E), rows(rng, 1, SMALL.E))
    used.reset()
    assert used.length == 0
    assert used.cache.k().shape == (SMALL.KV, 0, SMALL.D)
    np.testing.assert_array_equal(used.prefill(x[:7]), fresh.prefill(x[:7]))  # without a residual: none is left over from before
    np.testing.assert_array_equal(used.decode(x[7:]), fresh.decode(x[7:]))


def test_truncate_goes_back(rng):
    block, x = SMALL.block(SMALL.weights(rng)), rows(rng, 6, SMALL.E)
    block.prefill(x)
    block.truncate(3)
    again = block.prefill(x[3:])
    block.truncate(3)
    np.testing.assert_array_equal(block.prefill(x[3:]), again)
    for n in (-1, 7):
        with pytest.raises(ArgumentError, match=rf"has 6 positions; it cannot be truncated to {n}\."):
            block.truncate(n)


# ---- what comes in and goes out


def test_arrays_of_every_float_and_strided_ones(rng):
    weights, x = SMALL.weights(rng), rows(rng, 4, SMALL.E)
    block = SMALL.block(weights)
    want = block.prefill(x)
    for given, dtype in ((x.astype(np.float64), np.float32), (np.asfortranarray(x), np.float32), (x.astype(">f4"), np.float32)):
        block.reset()
        y = block.prefill(given)
        assert y.dtype == dtype
        np.testing.assert_array_equal(y, want)
    block.reset()
    y = block.prefill(x.astype(np.float16))
    assert y.dtype == np.float16
    assert nmse(y, want) < 1e-5
    assert block.decode(x[:1].astype(np.float16)).dtype == np.float16


def test_tensors_stay_on_the_device(device: Device, rng, monkeypatch):
    for layer in (SMALL, replace(SMALL, E=50, kinds="F16")):  # with rows that are padded, too
        weights, x, residual = layer.weights(rng), rows(rng, 70, layer.E), rows(rng, 70, layer.E)
        block, twin = layer.block(weights, capacity=80), layer.block(weights, capacity=80)
        want = [twin.prefill(x[:69], residual[:69]), twin.decode(x[69:], residual[69:])]
        xs, x1, rs, r1 = (device.tensor(a) for a in (x[:69], x[69:], residual[:69], residual[69:]))
        with monkeypatch.context() as patch:
            forbid_reading(patch)
            got = [block.prefill(xs, rs), block.decode(x1, r1)]
        assert [g.shape for g in got] == [(69, layer.E), (1, layer.E)]
        for g, w in zip(got, want, strict=True):
            np.testing.assert_array_equal(g.numpy(), w)


@pytest.mark.conformance
def test_residual_is_x_or_the_last_result(device: Device, rng):
    """The aliasing cases of a residual stream: the input, the previous output, an array besides; on the host and on the device."""
    weights, x = SMALL.weights(rng), rows(rng, 1, SMALL.E)
    outcomes = []
    for on_device in (False, True):
        block = SMALL.block(weights)
        y = device.tensor(x) if on_device else x
        found = []
        for _ in range(4):
            y = block.decode(y, y)
            found.append(y.numpy() if on_device else y)
        outcomes.append(found)
    np.testing.assert_array_equal(*outcomes)
    h = x.astype(np.float64)
    past = None
    for got in outcomes[0]:
        out, *past = reference.attention_block(h, dequantised(weights), **SMALL.sizes, eps=SMALL.eps, rope=SMALL.reference_rope, past=past)
        h = h + out
        assert_close(got, h, max_error=5e-5)


@pytest.mark.conformance
def test_bug_16_output_is_residual_or_input_or_neither(device: Device, rng):
    """Recorded in place and apart: equal bits, and no buffer bound twice in a way that WebGPU refuses."""
    layer = SMALL
    weights, x, T = layer.weights(rng), rows(rng, 5, layer.E), 5
    block = AttentionBlock(device, weights, Geometry(layer.H, layer.KV, layer.D, layer.eps), layer.rope)
    found = {}
    for case in ("h += ...", "y apart", "y is x", "y is residual", "residual is x"):
        cache = wgattn.attention.kv_cache.KVCache(device, layer.KV, layer.D, 8)
        h, residual, y, step = device.tensor(x), device.tensor(x), device.tensor(poison(x.shape)), StepState(device)
        scratch = {name: device.empty(s) for name, s in attention_buffers(layer.E, layer.H, layer.KV, layer.D, T).items()}
        state = {"step": step.step, "h": h, "rope": device.tensor(layer.rope.table(8)), **scratch, "attended": scratch["query"]}
        extra = {
            "h += ...": {},
            "y apart": {"y": y, "residual": residual},
            "y is x": {"y": h, "residual": residual},
            "y is residual": {"y": residual, "residual": residual},
            "residual is x": {"y": y, "residual": h},
        }[case]
        recording = Recording(device)
        block.record(recording, ChosenAttention(device.profile, block.geometry, T, 8), cache, state | extra, T)
        step.place(0, T)
        recording.replay()
        found[case] = (extra.get("y", h)).numpy()
    expected = x + layer.expected(weights, x)[0]
    for case, got in found.items():
        assert_close(got, expected, max_error=2e-5, case=case)
        np.testing.assert_array_equal(got, found["y apart"], err_msg=case)


# ---- what a step does


@pytest.mark.parametrize("fused", [True, False])
def test_a_decode_step_makes_nothing_writes_once_and_submits_once(rng, monkeypatch, fused):
    block, x = SMALL.block(SMALL.weights(rng), fused=fused), rows(rng, 1, SMALL.E)
    given = [block.device.tensor(x), x]
    with monkeypatch.context() as patch:
        calls = Calls(block.device, patch)
        for position in range(3):
            for array in given:
                calls.check_step(block.decode, array, array, position=position)


def test_dispatches_fused_and_unfused(device: Device, devices, rng):
    """Three for the attention half, four where a GPU splits a long sequence; eight unfused. One kind of matrix."""
    weights = SMALL.weights(rng)
    for where in (device, devices["gpu_shape"], devices["software"]):
        counts = []
        for fused in (True, False):
            block = SMALL.block(weights, fused=fused, device=where, capacity=1300)
            counts.append(block.dispatches_per_token)
            block.length = 1280
            splits = len(regimes(where.profile)) > 1
            assert block.dispatches_per_token == counts[-1] + splits
        assert counts == [3, 8]


def test_no_path_that_keeps_scores_in_memory(devices):
    """Prefill too stays within the memory that the report tells, whatever is quickest for attention by itself."""
    for name in devices:
        for tokens in (1, 8, 64, 256):
            attention = ChosenAttention(devices[name].profile, Geometry(14, 2, 64, 1e-6), tokens, 4096)
            assert attention.path in ("split", "flash"), (name, tokens)


def test_312_dispatches_become_120(rng):
    """A token of Qwen2-0.5B: 24 layers."""
    layer, hidden = MODELS["Qwen2-0.5B"], 4864
    weights = layer.weights(rng)
    mlp = {"norm": weights["norm"], "gate": np.zeros((hidden, 896), np.float16), "up": np.zeros((hidden, 896), np.float16), "down": np.zeros((896, hidden))}
    halves = {fused: (layer.block(weights, fused=fused, capacity=4), wgattn.FusedMLP(mlp, fused=fused)) for fused in (True, False)}
    assert {fused: 24 * sum(half.dispatches_per_token for half in both) for fused, both in halves.items()} == {True: 120, False: 312}


@pytest.mark.conformance
@pytest.mark.parametrize(
    "layer",
    [
        replace(SMALL, bias=True),
        replace(SMALL, qk_norm=True, E=50, H=3, KV=1, D=20, rope=Rope(dim=8)),
        replace(SMALL, kinds="F16", rope=Rope(dim=16, interleaved=True)),
        replace(SMALL, rope=None),
    ],
    ids=["biases", "QK-norm, partial", "neighbours", "no rope"],
)
def test_unfused_is_right(rng, layer):
    check_layer(rng, layer, fused=False)


def test_unfused_gives_the_same(rng):
    layer = replace(SMALL, bias=True)
    weights, x, residual = layer.weights(rng), rows(rng, 70, layer.E), rows(rng, 70, layer.E)
    both = [layer.block(weights, fused=fused, capacity=80) for fused in (True, False)]
    assert_close(*(b.prefill(x, residual) for b in both), max_error=1e-5)
    assert_close(*(b.cache.k() for b in both), max_error=1e-5)


def test_a_prompt_of_many_operations_is_several_submits(rng, monkeypatch):
    """Here a device does 400,000 operations at a time. A step stays one submit. Outputs replace the queries in pieces as well."""
    weights, x = SMALL.weights(rng), rows(rng, 60, SMALL.E)
    whole, block = SMALL.block(weights, capacity=60), SMALL.block(weights, capacity=60)
    expected = [whole.prefill(x[:59]), whole.decode(x[59:])]
    with monkeypatch.context() as patch:
        patch.setattr(DeviceProfile, "most_operations", 400_000)  # QKV: 2 * 60 * 128 * 48; attention: 2 * 60 * 4 * 60 * 32
        calls = Calls(block.device, patch)
        tensors = [block.device.tensor(a) for a in (x[:59], x[59:])]
        got = []
        for call, tensor in zip((block.prefill, block.decode), tensors, strict=True):
            calls.clear()
            got.append(call(tensor))
            assert calls["submit"] >= 4 if call == block.prefill else calls["submit"] == 1
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a.numpy(), b)


# ---- what is refused


@pytest.mark.parametrize(
    ("change", "options", "error", "message"),
    [
        ({}, {"num_heads": 3}, ShapeError, "3 query heads cannot share 2 KV heads"),
        ({}, {"num_heads": 0}, ArgumentError, "num_heads is 0"),
        ({}, {"head_dim": 15, "rope": Rope(dim=8)}, ArgumentError, "head_dim must be even, not 15"),
        ({}, {"head_dim": 18, "rope": None}, Unsupported, "Head dim 18 and rotary dim 0 must be multiples of 4"),
        ({}, {"rope": Rope(dim=6)}, Unsupported, "rotary dim 6 must be multiples of 4"),
        ({}, {"rope": Rope(dim=20)}, ShapeError, "RoPE rotates 20 channels; heads have 16"),
        ({}, {"kv_dtype": "f64"}, ArgumentError, "f32, f16, q8_0 or q4_0, not 'f64'"),
        ({}, {"capacity": 0}, ArgumentError, "capacity is 0"),
        ({}, {"capacity": 1 << 30}, CapacityError, "positions"),
        ({}, {"arithmetic": "int4"}, ArgumentError, "no arithmetic 'int4'"),
        ({}, {"eps": -1.0}, ArgumentError, "eps is -1.0"),
        ({"wq": None}, {}, ArgumentError, "wq missing"),
        ({"bias_q": np.ones(64)}, {}, ArgumentError, "bias_q not known"),
        ({"wq": np.zeros((64, 47), np.float32)}, {}, ShapeError, r"wq has shape (64, 47); it must be (64, 48)"),
        ({"wo": np.zeros((64, 48), np.float32)}, {}, ShapeError, r"wo has shape (64, 48); it must be (48, 64)"),
        ({"wk": QuantizedTensor(bytes(64 * 34), (32, 64), "Q8_0")}, {}, ShapeError, "wk has shape (32, 64)"),
        ({"wv": np.zeros((32, 48), np.int8)}, {}, TypeError, "wv has dtype int8"),
        ({"wv": np.zeros((32, 48), np.complex64)}, {}, TypeError, "wv has dtype complex64"),
        ({"norm": np.ones((48, 1), np.float32)}, {}, ShapeError, "norm has shape (48, 1)"),
        ({"bq": np.ones(63, np.float32)}, {}, ShapeError, "bq has shape (63,); it must be (64,)"),
        ({"bo": np.ones(48, np.int32)}, {}, TypeError, "bo has dtype int32"),
        ({"q_norm": np.ones(64, np.float32)}, {}, ShapeError, "q_norm has shape (64,); it must be (16,)"),
    ],
    ids=lambda v: re.sub(r"\W+", "-", str(v))[:40],
)
def test_making_is_refused(device: Device, rng, monkeypatch, change, options, error, message):
    weights = {**SMALL.weights(rng), **change}
    with monkeypatch.context() as patch:
        calls = Calls(device, patch)
        with pytest.raises(error, match=re.escape(message)):
            wgattn.FusedAttention(weights, **{**SMALL.sizes, "rope": SMALL.rope, **options})
        assert not calls, "something was made before the refusal"


@pytest.mark.parametrize("columns", [16, 48, 100])
def test_rows_that_are_no_whole_blocks_are_refused(columns):
    with pytest.raises(ShapeError, match="multiple of 32"):
        random_matrix(np.random.default_rng(0), 4, columns, "Q5_0")
    with pytest.raises(ShapeError, match=f"multiple of 256 columns long, not {columns}"):
        QuantizedTensor(bytes(144), (1, columns), "Q4_K")


def test_calls_are_refused_before_anything_is_written(device: Device, rng, monkeypatch):
    block = SMALL.block(SMALL.weights(rng), capacity=6)
    x = rows(rng, 5, SMALL.E)
    block.prefill(x)
    keys = block.cache.store.keys.numpy()
    half, foreign = device.tensor(x[:1], np.float16), Device().tensor(x[:1])
    refused = [
        (lambda: block.prefill(x[:2]), CapacityError, "2 tokens do not fit: 5 of 6"),
        (lambda: block.prefill(x[:1, :40]), ShapeError, r"x has shape (1, 40); it must be (T, 48)"),
        (lambda: block.prefill(x[0]), ShapeError, "x has shape (48,)"),
        (lambda: block.prefill(x[:0]), ShapeError, "T of at least 1"),
        (lambda: block.prefill(x[:1], x[:2]), ShapeError, r"residual has shape (2, 48); it must be (1, 48)"),
        (lambda: block.decode(x[:2]), ShapeError, r"it must be (1, 48)"),
        (lambda: block.decode(x[:1].astype(np.int32)), TypeError, "x has dtype int32"),
        (lambda: block.decode(x[:1], x[:1].astype(complex)), TypeError, "residual has dtype complex128"),
        (lambda: block.decode(half), TypeError, "x is a tensor of float16; it must be float32"),
        (lambda: block.decode(foreign), ArgumentError, "another device"),
    ]
    for call, error, message in refused:
        with monkeypatch.context() as patch:
            watch = Calls(device, patch)
            with pytest.raises(error, match=re.escape(message)):
                call()
            assert not watch, message
        assert block.length == 5
    np.testing.assert_array_equal(block.cache.store.keys.numpy().view(np.uint32), keys.view(np.uint32))
    block.decode(x[:1])
    with pytest.raises(CapacityError, match="6 of 6 positions are in use"):
        block.decode(x[:1])


# ---- public bugs of other implementations


def test_bug_4_scores_beyond_f16(rng):
    """Large biases of K and Q, as in Qwen2: dot products of 102,400."""
    layer = Attention(16, 1, 1, 64, rope=None)
    weights = {name: np.zeros(shape, np.float32) for name, shape in (("wq", (64, 16)), ("wk", (64, 16)), ("wo", (16, 64)))}
    weights |= {"norm": np.ones(16), "wv": np.zeros((64, 16)), "bq": np.full(64, 40.0), "bk": np.full(64, 40.0)}
    weights["wk"][:, 0] = -0.1  # the second key is 39.9
    weights["wv"][:, 0] = 1.0
    weights["wo"][:, :16] = np.eye(16)
    x = np.zeros((3, 16), np.float32)
    x[1, 0] = 1.0
    for kv_dtype in ("f32", "f16"):
        block = layer.block(weights, kv_dtype=kv_dtype)
        got = np.concatenate([block.decode(x[i : i + 1]) for i in range(3)])
        expected, keys, _ = layer.expected(weights, x)
        assert keys.max() == 40
        assert_close(got, expected, max_error=2e-4 if kv_dtype == "f32" else 0.05)


def test_bug_6_variance_beyond_f16(rng):
    layer = replace(SMALL, E=896)
    weights, x = layer.weights(rng), rows(rng, 4, 896)
    x[1] = np.where(rng.random(896) < 0.5, 800, -800)
    x[2] = 800 * x[2]
    x[2, 100] = 3e4
    x[3] = 0
    check = layer.block(weights)
    expected = layer.expected(weights, x)[0]
    assert_close(check.prefill(x), expected, max_error=2e-5)


@pytest.mark.conformance(D=[40])
@pytest.mark.parametrize("D", [16, 40, 72, 80, *(pytest.param(D, marks=pytest.mark.slow) for D in (64, 96, 112, 128, 256))])
def test_bug_11_head_dims(rng, D):
    check_layer(rng, Attention(32, 3, 1, D, rope=Rope(dim=D)), tokens=4)


@pytest.mark.conformance
@pytest.mark.parametrize(("H", "KV"), [(14, 2), (28, 4), (36, 4), (9, 3), (15, 5), (32, 8), (8, 8), (71, 1)])
def test_bug_12_each_head_reads_its_own_kv_head(H, KV):
    """Values of KV head j are j + 1 whatever the input: head h must give h // (H // KV) + 1, but for the softmax's rounding."""
    D = 4
    wo = np.zeros((-(-H // 16) * 16, H * D), np.float32)
    wo[np.arange(H), np.arange(H) * D] = 1  # channel h of the output is channel 0 of head h
    E = len(wo)
    weights = {"norm": np.ones(E), "wq": np.ones((H * D, E)), "wk": np.ones((KV * D, E)), "wv": np.zeros((KV * D, E)), "wo": wo}
    weights["bv"] = np.repeat(np.arange(KV) + 1.0, D)
    block = Attention(E, H, KV, D, rope=Rope(dim=4)).block(weights)
    x = np.random.default_rng(1).standard_normal((3, E))
    wanted = np.arange(H) // (H // KV) + 1.0
    for i in range(3):
        y = block.decode(x[i : i + 1])
        np.testing.assert_allclose(y[:, :H], np.broadcast_to(wanted, (len(y), H)), rtol=1e-6)


def test_bug_14_small_bindings_give_the_same_bits(device: Device, devices, rng):
    layer = Attention(512, 16, 2, 64, rope=Rope(dim=64))  # wq is 2 MiB, a binding 1 MiB
    weights, x = layer.weights(rng), rows(rng, 3, layer.E)
    small = devices["small_binding"]
    found = [[b.prefill(x[:2]), b.decode(x[2:])] for b in (layer.block(weights, device=d) for d in (device, small))]
    assert layer.block(weights, device=small).dispatches_per_token > layer.block(weights).dispatches_per_token
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_array_equal(found[0][1], found[1][1])


def test_bug_17_a_large_cache_with_nan_in_its_tail(rng):
    check_layer(rng, SMALL, capacity=5000)  # `block` fills it with NaN


def test_bug_23_a_hundred_repeats_are_equal(rng):
    layer = SMALL
    block, x = layer.block(layer.weights(rng)), rows(rng, 20, layer.E)
    first = block.prefill(x), block.decode(x[:1])
    for _ in range(100):
        block.reset()
        np.testing.assert_array_equal(block.prefill(x), first[0])
        np.testing.assert_array_equal(block.decode(x[:1]), first[1])


def test_nan_stays_in_a_cache_of_f16(device, rng):
    """A bias that is NaN makes one channel of all keys NaN, and is not written as a number."""
    weights = {"norm": np.ones(32)} | {name: rng.standard_normal((32, 32)) for name in ("wq", "wk", "wv", "wo")} | {"bk": np.zeros(32)}
    weights["bk"][17] = np.nan
    block = wgattn.FusedAttention(weights, num_heads=2, num_kv_heads=2, head_dim=16, kv_dtype="f16", capacity=8, device=device)
    block.prefill(rng.standard_normal((3, 32)).astype(np.float32))
    nan = np.isnan(block.cache.k())
    assert nan[1, :, 1].all()
    assert nan.sum() == 3
