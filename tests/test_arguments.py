"""What cannot be meant, given to everything that people call, in every argument: each is a typed error, and changes nothing."""

import numpy as np
import pytest

import wgattn
from wgattn import block
from wgattn.attention.kv_cache import KVCache
from wgattn.errors import ArgumentError, Unsupported

E, H, KV, D, I = 32, 4, 2, 8, 48  # noqa: E741


def f(*shape):
    return np.full(shape, 0.5, np.float32)


def odd():
    """Values that hardly any argument takes."""
    texts = ["no", b"no", np.array("no")]
    numbers = [-1, 2.5, float("nan"), float("inf"), 1e300, -(10**30), 1j, 10**400]
    arrays = [f(0), f(3), f(0, 0, 0, 0), f(1, 2, 3, 4, 5), np.array([np.nan, 1]), np.zeros((2, 2), complex), np.array([object()]), np.zeros((2, 2), "M8[s]")]
    return [*texts, *numbers, *arrays, object(), {"a": 1}, [1, "a"], (1, 2, 3), wgattn]


def same_or_refused(call, given, begin=lambda: None, state=lambda: None):
    """Each argument in turn is odd: what the call refuses, it refuses by a typed error, and `state` is as it was after `begin`."""
    begin()
    call(**given)
    refused = 0
    for name in given:
        for value in odd():
            begin()
            before, error = state(), None
            try:
                call(**{**given, name: value})
            except Exception as raised:
                error = raised
            if error is not None:
                assert isinstance(error, wgattn.WgattnError | TypeError), f"{name}={value!r} is no {type(error).__name__}: {error}"
                assert str(error)
                assert state() == before, f"{name}={value!r}: {error}"
                refused += 1
    assert refused > 5 * len(given)


ATTENTION_WEIGHTS = {"norm": f(E), "wq": f(H * D, E), "wk": f(KV * D, E), "wv": f(KV * D, E), "wo": f(E, H * D)}
MLP_WEIGHTS = {"norm": f(E), "gate": f(I, E), "up": f(I, E), "down": f(E, I)}
NUMBERS = {"num_heads": H, "num_kv_heads": KV, "head_dim": D}
QKV = {"x": f(3, E), "norm": f(E), "w_qkv": f((H + 2 * KV) * D, E), "b_qkv": f((H + 2 * KV) * D), **NUMBERS, "eps": 1e-5, "arithmetic": "exact"}
LLAMA3 = {"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 100, "low_freq_factor": 1, "high_freq_factor": 4}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 100, "beta_fast": 32, "beta_slow": 1, "attention_factor": 1.0}
SIZES = {"tokens": 3, "embed_dim": 32, "num_heads": 4, "head_dim": 8}


def scaled(**scaling):
    return wgattn.Rope(dim=8, scaling=scaling).table(3)


@pytest.mark.parametrize(
    ("call", "given"),
    [
        (
            wgattn.sdpa,
            {"query": f(1, H, 3, D), "key": f(1, KV, 5, D), "value": f(1, KV, 5, D), "attn_mask": np.ones((3, 5), bool), "is_causal": True}
            | {"scale": 1.0, "enable_gqa": True, "softcap": 1.0, "window_size": (2, 1), "sinks": f(H), "alibi_slopes": f(H)}
            | {"causal_alignment": "top_left", "key_lengths": [4], "layout": "bhsd", "return_lse": True, "path": "auto", "device": None},
        ),
        (wgattn.explain, {"query": f(1, H, 3, D), "key": f(1, KV, 5, D), "value": f(1, KV, 5, D), "path": "auto", "device": None}),
        (wgattn.merge_state, {"o_a": f(3, 4), "lse_a": f(3), "o_b": f(3, 4), "lse_b": f(3), "device": None}),
        (wgattn.rms_norm, {"x": f(2, 8), "weight": f(8), "eps": 1e-5, "device": None}),
        (wgattn.apply_rope, {"x": f(2, 3, 8), "positions": [0, 1], "rope": wgattn.Rope(dim=8), "device": None}),
        (wgattn.apply_rope, {"x": f(2, 3, 8), "positions": [0, 1], "rope": (f(2, 4), f(2, 4)), "interleaved": True, "device": None}),
        (wgattn.Rope, {"base": 1e4, "dim": 8, "interleaved": True, "scaling": YARN, "factors": f(4)}),
        (scaled, YARN),
        (scaled, LLAMA3),
        (wgattn.quantize, {"array": f(2, 32), "kind": "F32"}),
        (wgattn.QuantizedTensor, {"data": bytes(256), "shape": (2, 32), "kind": "F32"}),
        (wgattn.AttentionPipeline, NUMBERS | {"batch": 1, "kv_dtype": "f32", "capacity": 16, "growth": 4, "scale": 1.0, "softcap": 0.0, "window_size": 3}),
        (wgattn.AttentionPipeline, NUMBERS | {"path": "auto", "device": None}),
        (
            wgattn.FusedAttention,
            NUMBERS | {"weights": ATTENTION_WEIGHTS, "rope": wgattn.Rope(dim=8), "eps": 1e-5, "kv_dtype": "f32", "capacity": 16, "arithmetic": "exact"},
        ),
        (wgattn.FusedAttention, NUMBERS | {"weights": ATTENTION_WEIGHTS, "fused": True, "device": None}),
        (wgattn.FusedMLP, {"weights": MLP_WEIGHTS, "eps": 1e-5, "arithmetic": "exact", "fused": True, "device": None}),
        (block.rmsnorm_qkv, QKV | {"device": None}),
        (block.rmsnorm_qkv_rope, QKV | {"position": 1, "rope": wgattn.Rope(dim=8)}),
        (
            block.outproj_mlp_prefill,
            {"attended": f(H, 3, D), "residual": f(3, E), "norm": f(E), "wo": f(E, H * D), "w1": f(2 * I, E), "w2": f(E, I), "bo": f(E), "b1": f(2 * I)}
            | {"b2": f(E), "embed_dim": E, "intermediate_dim": I, "eps": 1e-5, "arithmetic": "exact", "device": None},
        ),
        (block.attention_scratch_size, SIZES | {"num_kv_heads": 2, "capacity": 10, "kv_dtype": "f32", "profile": None}),
        (block.outproj_mlp_scratch_size, SIZES | {"intermediate_dim": 48, "profile": None}),
        (block.memory_report, {"hidden": 64, "layers": 2, "seq_len": 3, **NUMBERS, "intermediate": 64, "splits": 2, "kv_dtype": "f32"}),
        (block.slabs_from_wo, {"wo": f(E, H * D), "num_heads": H}),
        (wgattn.Device, {"adapter": None, "backend": None, "limits": {"shader-f16": 0}}),
    ],
    ids=lambda value: getattr(value, "__name__", None) if callable(value) else "-".join(value)[:40],
)
def test_functions_and_constructors(call, given):
    same_or_refused(call, given)


def test_tiles(device):
    same_or_refused(block.optimal_tiles, {"head_dim": 64, "profile": device.profile})


@pytest.mark.parametrize("kv_dtype", ["f32", "q8_0"])
def test_calls_of_a_pipeline(kv_dtype):
    pipe = wgattn.AttentionPipeline(H, KV, D, capacity=8, kv_dtype=kv_dtype)
    prompt, one = ({"q": f(1, n, H, D), "k": f(1, n, KV, D), "v": f(1, n, KV, D)} for n in (3, 1))

    def begin():
        pipe.reset()
        pipe.prefill(**prompt)

    def state():
        return pipe.length, pipe.cache.k(pipe.length).tobytes(), pipe.cache.v(pipe.length).tobytes()

    calls = [(pipe.prefill, {**prompt, "mask": np.ones((3, 6), bool), "is_causal": True}), (pipe.decode, one), (pipe.truncate, {"n": 2})]
    for call, given in [*calls, (pipe.keep, {"ranges": [(0, 1), (2, 1)]}), (lambda begin: pipe.keep([(begin, 1)]), {"begin": 1})]:
        same_or_refused(call, given, begin, state)


def test_calls_of_a_fused_block():
    attention = wgattn.FusedAttention(ATTENTION_WEIGHTS, **NUMBERS, capacity=8)

    def begin():
        attention.reset()
        attention.prefill(f(3, E))

    def state():
        return attention.length, attention.cache.k().tobytes(), attention.cache.v().tobytes()

    for call, tokens in ((attention.prefill, 2), (attention.decode, 1)):
        same_or_refused(call, {"x": f(tokens, E), "residual": f(tokens, E)}, begin, state)
    same_or_refused(attention.truncate, {"n": 2}, begin, state)
    same_or_refused(wgattn.FusedMLP(MLP_WEIGHTS), {"x": f(2, E)})


@pytest.mark.parametrize("name", ["attention_decode", "attention_decode_workspace", "attention_prefill"])
def test_functions_over_a_cache(name, device):
    cache = KVCache(device, KV, D, 16)
    tokens = 3 if name == "attention_prefill" else 1
    given = {**ATTENTION_WEIGHTS, **NUMBERS, "x": f(tokens, E), "cache": cache, "embed_dim": E, "residual": f(tokens, E), "eps": 1e-5, "arithmetic": "exact"}
    given |= {"start_position" if tokens > 1 else "position": 2, "rope": wgattn.Rope(dim=8), "bq": f(H * D), "bo": f(E)}
    if name.endswith("workspace"):
        given |= {"q_output_workspace": f(2 * H * D), "kv_workspace": f(2 * KV * D)}
    same_or_refused(getattr(block, name), given)


def test_a_refused_call_over_a_cache_writes_nothing(device):
    cache = KVCache(device, KV, D, 16)
    block.attention_prefill(f(3, E), **ATTENTION_WEIGHTS, cache=cache, start_position=0, **NUMBERS)
    before = cache.k(16).tobytes(), cache.v(16).tobytes()
    good = {**ATTENTION_WEIGHTS, **NUMBERS, "x": f(1, E), "cache": cache, "position": 3}
    for change in ({"position": 16}, {"rope": (f(3, 4), f(3, 4))}, {"eps": "no"}, {"wo": f(E, E - 1)}, {"residual": f(2, E)}, {"num_heads": 3}):
        with pytest.raises((wgattn.WgattnError, TypeError)):
            block.attention_decode(**{**good, **change})
    assert (cache.k(16).tobytes(), cache.v(16).tobytes()) == before


# ---- what was taken for something else


@pytest.mark.parametrize("flag", ["False", "", None, 2, 0.0, np.array([True])])
def test_a_flag_is_true_or_false(flag):
    q, k = f(1, H, 3, D), f(1, KV, 3, D)
    for call in (
        lambda: wgattn.sdpa(q, k, k, is_causal=flag),
        lambda: wgattn.sdpa(q, k, k, return_lse=flag),
        lambda: wgattn.Rope(dim=8, interleaved=flag),
        lambda: wgattn.FusedMLP(MLP_WEIGHTS, fused=flag),
        lambda: wgattn.AttentionPipeline(H, KV, D).prefill(f(1, 3, H, D), f(1, 3, KV, D), f(1, 3, KV, D), is_causal=flag),
    ):
        with pytest.raises(TypeError, match="True or False"):
            call()


@pytest.mark.parametrize("window", [(1.5, 0), (0, 1.5), ("1", 0), (np.nan, 0), (0, None)])
def test_sides_of_a_window_are_whole(window):
    with pytest.raises((ArgumentError, TypeError), match="window_size"):
        wgattn.sdpa(f(1, H, 3, D), f(1, KV, 3, D), f(1, KV, 3, D), window_size=window)


@pytest.mark.parametrize("n", [1.5, "1", np.nan])
def test_a_sequence_is_cut_to_whole_positions(n):
    attention, pipe = wgattn.FusedAttention(ATTENTION_WEIGHTS, **NUMBERS, capacity=4), wgattn.AttentionPipeline(H, KV, D)
    attention.prefill(f(3, E))
    pipe.prefill(f(1, 3, H, D), f(1, 3, KV, D), f(1, 3, KV, D))
    for sequence in (attention, pipe):
        with pytest.raises(ArgumentError, match="3 positions"):
            sequence.truncate(n)
        assert sequence.length == 3


def test_scaling_without_its_kind_is_not_ignored():
    with pytest.raises(ArgumentError, match="no 'rope_type'"):
        wgattn.Rope(scaling={"factor": 2.0})


@pytest.mark.parametrize("more", [{"mscale": 1.0}, {"mscale_all_dim": 1.0}, {"truncate": False}])
def test_yarn_with_what_we_do_not_compute_is_unsupported(more):
    assert wgattn.Rope(scaling={**YARN, "truncate": True}).magnitude == 1
    with pytest.raises(Unsupported, match=next(iter(more))):
        wgattn.Rope(scaling={**YARN, **more})


@pytest.mark.parametrize("factors", [np.zeros(4), -np.ones(4), np.full(4, np.nan), np.array(["1"] * 4), np.ones(4, complex)])
def test_factors_are_positive_numbers(factors):
    with pytest.raises((ArgumentError, TypeError), match="factors"):
        wgattn.Rope(dim=8, factors=factors)


def test_complex_numbers_do_not_lose_their_other_half():
    with pytest.raises(TypeError, match="complex"):
        wgattn.quantize(np.ones((2, 32), complex), "Q8_0")


@pytest.mark.parametrize("shape", [(2.5, 32), (2, 32, 1), (64,), "no", 64, (-2, -32)])
def test_a_matrix_has_rows_and_columns(shape):
    with pytest.raises(wgattn.ShapeError):
        wgattn.QuantizedTensor(bytes(4 * 64), shape, "F32")


def test_outputs_without_channels_have_no_state():
    with pytest.raises(wgattn.ShapeError, match="at least 1"):
        wgattn.merge_state(f(3, 0), f(3), f(3, 0), f(3))


def test_a_mask_of_one_column_fits_no_keys():
    """As NumPy broadcasts: 1 to 0."""
    out = wgattn.sdpa(f(1, H, 3, D), f(1, KV, 0, D), f(1, KV, 0, D), attn_mask=np.ones((3, 1), bool))
    assert out.shape == (1, H, 3, D)
    assert not out.any()


def test_sizes_of_heads_that_do_not_divide(device):
    with pytest.raises(wgattn.ShapeError, match="does not divide"):
        block.attention_scratch_size(3, 32, 1, 8, num_kv_heads=2)
