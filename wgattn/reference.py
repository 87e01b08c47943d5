"""What every operation means, in plain float64 NumPy. Slow and obvious: the kernels are tested against it, and so can you test them.

Shapes are named as in the rest of the package: B batch, S queries, T keys, H query heads, Hkv KV heads, D head dim, E embedding, I hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray


def rms_norm(x: Array, weight: Array | None = None, eps: float = 1e-5) -> Array:
    """x * weight / sqrt(mean(x^2) + eps) over the last axis."""
    x = np.asarray(x, np.float64)
    normed = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return normed if weight is None else normed * np.asarray(weight, np.float64)


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """x (..., columns) . weight (rows, columns)^T + bias (rows)."""
    y = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    return y if bias is None else y + np.asarray(bias, np.float64)


def quantize_int8(x: Array) -> Array:
    """x (..., columns), a multiple of 32, rounded to int8 codes with a float32 scale for 32 columns, and back; ties go to the even code."""
    blocks = np.asarray(x, np.float32).reshape(*np.shape(x)[:-1], -1, 32)
    highest = np.abs(blocks).max(-1, keepdims=True)
    tiny = highest <= 1e-35
    codes = np.where(tiny, 0, np.round(blocks * (np.float32(127) / np.where(tiny, 1, highest))))
    return (codes.astype(np.float64) * (highest / np.float32(127))).reshape(np.shape(x))


def linear_int8(x: Array, weight: Array, bias: Array | None = None, gamma: Array | None = None, eps: float = 1e-5) -> Array:
    """`linear` of activations rounded by `quantize_int8`. With gamma, of rms_norm(x): x * gamma is rounded, the norm's scale is applied at the end."""
    if gamma is None:
        return linear(quantize_int8(x), weight, bias)
    x = np.asarray(x, np.float64)
    scale = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    y = linear(quantize_int8(np.asarray(x, np.float32) * np.asarray(gamma, np.float32)), weight) * scale
    return y if bias is None else y + np.asarray(bias, np.float64)


def kv_stored(x: Array, kv_dtype: str) -> Array:
    """x (..., D) as a KV cache gives it back: "f32", "f16", or GGUF's "q8_0" or "q4_0", 32 channels to a scale, the last block filled with zeros.

    As in ggml's reference: codes are computed in float32 from the scale before it becomes float16. What float16 cannot hold, or a float16 scale
    cannot reach, saturates.
    """
    x = np.asarray(x, np.float32)
    if kv_dtype in ("f32", "f16"):
        return (x if kv_dtype == "f32" else x.clip(-65504, 65504).astype(np.float16)).astype(np.float64)
    most = np.float32({"q8_0": 127, "q4_0": 8}[kv_dtype])
    blocks = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 32)]).reshape(*x.shape[:-1], -1, 32).clip(-65504 * most, 65504 * most)
    if kv_dtype == "q8_0":
        scale = np.abs(blocks).max(-1, keepdims=True) / most
    else:
        scale = np.take_along_axis(blocks, np.abs(blocks).argmax(-1, keepdims=True), -1) / -most
    tiny = np.abs(scale) <= 1e-37
    codes = blocks * np.where(tiny, 0, 1 / np.where(tiny, 1, scale))
    if kv_dtype == "q8_0":
        down = np.floor(np.abs(codes))
        codes = np.sign(codes) * (down + np.floor(2 * (np.abs(codes) - down)))
    else:
        codes = np.minimum(np.floor(codes + np.float32(8.5)), 15) - 8
    return (codes.astype(np.float64) * scale.astype(np.float16)).reshape(*x.shape[:-1], -1)[..., : x.shape[-1]]


def silu(x: Array) -> Array:
    """x / (1 + e^-x)."""
    x = np.asarray(x, np.float64)
    return x / (1 + np.exp(-x))


def swiglu(x: Array, gate: Array, up: Array) -> Array:
    """silu(x . gate^T) * (x . up^T)."""
    return silu(linear(x, gate)) * linear(x, up)


def embed(token_ids: Sequence[int], matrix: Array) -> Array:
    """Rows of the embedding matrix (vocab, E), one a token."""
    return np.asarray(matrix, np.float64)[list(token_ids)]


def apply_rope(
    x: Array,
    positions: Array,
    *,
    base: float = 10000.0,
    dim: int | None = None,
    interleaved: bool = False,
    factors: Array | None = None,
    frequencies: Array | None = None,
    magnitude: float = 1.0,
) -> Array:
    """Rotate pairs of channels of x (..., S, H, D) by position * base^(-2i / dim) [/ factors[i]], or by position * frequencies[i].

    Pair i is (2i, 2i + 1) when interleaved, else (i, i + dim / 2); channels from `dim` on pass through. `magnitude` multiplies what is rotated.
    Su et al. 2021.
    """
    x = np.array(x, np.float64)
    dim = x.shape[-1] if dim is None else dim
    frequencies = base ** (-np.arange(0, dim, 2) / dim) if frequencies is None else np.asarray(frequencies, np.float64)
    if factors is not None:
        frequencies = frequencies / np.asarray(factors, np.float64)
    angles = np.asarray(positions, np.float64)[:, None, None] * frequencies  # (S, 1, dim / 2)
    cos, sin = magnitude * np.cos(angles), magnitude * np.sin(angles)
    first, second = (slice(0, dim, 2), slice(1, dim, 2)) if interleaved else (slice(0, dim // 2), slice(dim // 2, dim))
    a, b = x[..., first].copy(), x[..., second].copy()
    x[..., first], x[..., second] = a * cos - b * sin, a * sin + b * cos
    return x


def visible(
    S: int,
    T: int,
    *,
    is_causal: bool = False,
    causal_alignment: str = "bottom_right",
    window_size: int | tuple[int, int] | None = None,
    length: int | None = None,
) -> Array:
    """(S, T) bool: which keys a query may see. Query i stands at key position i + length - S (bottom right) or i (top left)."""
    length = T if length is None else length
    at = np.arange(S)[:, None] + (length - S if causal_alignment == "bottom_right" else 0)
    key = np.arange(T)[None, :]
    seen = np.broadcast_to(key < length, (S, T)).copy()
    if is_causal:
        seen &= key <= at
    if window_size is not None:
        left, right = (window_size - 1, 0) if isinstance(window_size, int | np.integer) else window_size
        if left >= 0:
            seen &= key >= at - left
        if right >= 0:
            seen &= key <= at + right
    return seen


def attention(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    window_size: int | tuple[int, int] | None = None,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    causal_alignment: str = "bottom_right",
    key_lengths: Array | None = None,
) -> tuple[Array, Array]:
    """Scaled dot-product attention: (out (B, H, S, Dv), lse (B, H, S)), for query (B, H, S, D), key (B, Hkv, T, D), value (B, Hkv, T, Dv).

    In this order: scale, softcap (cap * tanh(x / cap)), ALiBi (-slope * distance), mask, causal rule and window, softmax.
    Head h reads KV head h // (H // Hkv). A bool or integer mask lets nonzero take part, a float mask is added
    (the lowest number of float16 in a float16 mask, of float32 in any other, hides the key); it is broadcast to
    (B, H, S, Tm), and where Tm < T it belongs to the last keys and the earlier ones are visible. `sinks` (H) are logits that join the
    softmax's sum and nothing else (and so the lse). `key_lengths` (B): keys that a sequence has. A row that sees nothing gives zeros and
    lse -inf (with a sink: the sink). lse is the natural log of the sum of exponentials.
    """
    query, key, value = (np.asarray(a, np.float64) for a in (query, key, value))
    (B, H, S, D), (_, Hkv, T, _) = query.shape, key.shape
    key, value = (np.repeat(a, H // Hkv, axis=1) for a in (key, value))
    lengths = np.full(B, T) if key_lengths is None else np.asarray(key_lengths, np.int64)  # unsigned ones would wrap below
    rule = {"is_causal": is_causal, "causal_alignment": causal_alignment, "window_size": window_size}
    seen = np.stack([np.broadcast_to(visible(S, T, length=int(n), **rule), (H, S, T)) for n in lengths])
    wanted = seen.any((1, 2))[:, None, :, None]  # a key that nobody sees may hold anything
    key, value = np.where(wanted, key, 0), np.where(wanted, value, 0)
    score = np.einsum("bhsd,bhtd->bhst", query, key) * (1 / np.sqrt(D) if scale is None else scale)
    if softcap:
        score = softcap * np.tanh(score / softcap)
    if alibi_slopes is not None:
        offset = lengths - S if causal_alignment == "bottom_right" else np.zeros(B, int)
        distance = np.abs(np.arange(S)[None, :, None] + offset[:, None, None] - np.arange(T))
        score = score - np.broadcast_to(np.asarray(alibi_slopes, np.float64), (B, H))[:, :, None, None] * distance[:, None]
    if attn_mask is not None:
        mask = np.asarray(attn_mask)
        lowest = np.finfo(np.float16 if mask.dtype == np.float16 else np.float32).min
        keep = mask != 0 if mask.dtype.kind in "biu" else mask > lowest
        bias = np.zeros(mask.shape) if mask.dtype.kind in "biu" else np.where(keep, mask, 0).astype(np.float64)
        missing = T - mask.shape[-1] if mask.shape[-1] != 1 or T == 1 else 0
        pad = [(0, 0)] * (mask.ndim - 1) + [(missing, 0)]
        seen = seen & np.broadcast_to(np.pad(keep, pad, constant_values=True), seen.shape)
        score = score + np.broadcast_to(np.pad(bias, pad), seen.shape)
    top = np.where(seen, score, -np.inf).max(-1, keepdims=True, initial=-np.inf)
    sink = np.full((1, H, 1, 1), -np.inf) if sinks is None else np.asarray(sinks, np.float64).reshape(1, H, 1, 1)
    top = np.maximum(top, sink)
    top = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(under="ignore"):
        p = np.where(seen, np.exp(np.where(seen, score, top) - top), 0.0)
        total = p.sum(-1, keepdims=True) + np.exp(sink - top)
    out = np.einsum("bhst,bhtd->bhsd", p / np.where(total > 0, total, 1), value)
    with np.errstate(divide="ignore"):
        return out, (np.log(total) + top)[..., 0]


def merge_state(o_a: Array, lse_a: Array, o_b: Array, lse_b: Array) -> tuple[Array, Array]:
    """Attention over two disjoint sets of keys from the attention over each: o (..., D), lse (...), natural log."""
    lse_a, lse_b = np.asarray(lse_a, np.float64), np.asarray(lse_b, np.float64)
    lse = np.logaddexp(lse_a, lse_b)
    weight = [np.where(np.isfinite(lse), np.exp(part - np.where(np.isfinite(lse), lse, 0)), 0)[..., None] for part in (lse_a, lse_b)]
    return weight[0] * np.asarray(o_a, np.float64) + weight[1] * np.asarray(o_b, np.float64), lse


def attention_block(x: Array, weights: Mapping[str, Array], *, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, rope: Mapping[str, Any] | None,
                    past: tuple[Array, Array] | None = None, int8: bool = False, kv_dtype: str = "f32") -> tuple[Array, Array, Array]:  # fmt: skip
    """wo . attention(norm(x)) + bo for x (T, E) behind a past of keys and values (Hkv, P, D): (out (T, E), keys (Hkv, P + T, D), values).

    weights: norm, wq, wk, wv, wo, optional bq bk bv bo q_norm k_norm, as in `wgattn.FusedAttention`. rope: keywords of `apply_rope`, or None.
    int8: all projections are `linear_int8`. kv_dtype: keys and values are those that such a cache gives back: `kv_stored`.
    """
    T, P = len(x), 0 if past is None else past[0].shape[1]
    n = rms_norm(x, weights["norm"], eps)
    project = linear_int8 if int8 else linear
    heads = []
    for m, count in (("q", num_heads), ("k", num_kv_heads), ("v", num_kv_heads)):
        weight, bias = weights[f"w{m}"], weights.get(f"b{m}")
        rows = (linear_int8(x, weight, bias, weights["norm"], eps) if int8 else linear(n, weight, bias)).reshape(T, count, head_dim)
        if m != "v" and weights.get(f"{m}_norm") is not None:
            rows = rms_norm(rows, weights[f"{m}_norm"], eps)
        if m != "v" and rope is not None:
            rows = apply_rope(rows, np.arange(P, P + T), **rope)
        rows = rows if m == "q" or kv_dtype == "f32" else kv_stored(rows, kv_dtype)
        heads.append(rows.swapaxes(0, 1))
    keys, values = (new if past is None else np.concatenate([old, new], axis=1) for old, new in zip(past or (None, None), heads[1:], strict=True))
    out, _ = attention(heads[0][None], keys[None], values[None], is_causal=True)
    return project(out[0].swapaxes(0, 1).reshape(T, -1), weights["wo"], weights.get("bo")), keys, values


def mlp(x: Array, weights: Mapping[str, Array], eps: float, int8: bool = False) -> Array:
    """down . (silu(gate . n + b_gate) * (up . n + b_up)) + b_down with n = rms_norm(x), for x (T, E). int8: all projections are `linear_int8`."""
    if int8:
        gate, up = (linear_int8(x, weights[name], weights.get(f"b_{name}"), weights["norm"], eps) for name in ("gate", "up"))
        return linear_int8(silu(gate) * up, weights["down"], weights.get("b_down"))
    n = rms_norm(x, weights["norm"], eps)
    hidden = silu(linear(n, weights["gate"], weights.get("b_gate"))) * linear(n, weights["up"], weights.get("b_up"))
    return linear(hidden, weights["down"], weights.get("b_down"))


def llama(weights: Mapping[str, Array], token_ids: Sequence[int], config: Any, rope: Mapping[str, Any] | None = None, kv_dtype: str = "f32") -> Array:
    """Logits (tokens, vocab) of a Llama-family model; weights by their GGUF names, dequantised; `config` as `wgattn.llm.llama.LlamaConfig`.

    rope: keywords of `apply_rope`; by default those that the config gives without scaling. kv_dtype: as in `attention_block`.
    """
    rope = rope or {"base": config.rope_base, "dim": config.rope_dim, "interleaved": config.rope_interleaved}
    h = embed(token_ids, weights["token_embd.weight"])
    sizes = {"num_heads": config.num_heads, "num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim, "eps": config.eps}
    for i in range(config.layers):
        named = {ours: weights.get(f"blk.{i}.{theirs}") for ours, theirs in GGUF_NAMES.items()}
        h = h + attention_block(h, named, rope=rope, kv_dtype=kv_dtype, **sizes)[0]
        h = h + mlp(h, named | {"norm": named["ffn_norm"]}, config.eps)
    n = rms_norm(h, weights["output_norm.weight"], config.eps)
    return linear(n, weights.get("output.weight", weights["token_embd.weight"]))


def candidates(logits: Array, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> tuple[Array, Array]:
    """(ids, probabilities) of the tokens that sampling may draw from logits (vocab,), the most likely first and equals by id.

    In this order: the `top_k` largest logits (0: all); softmax of logits / temperature; of those the fewest, from the first on, whose probabilities
    reach `top_p` (at least one; 1: all), which then share out the probability. Holtzman et al. 2020 for top_p.
    """
    logits = np.asarray(logits, np.float64)
    ids = np.argsort(-logits, kind="stable")[: top_k or None]
    with np.errstate(all="ignore"):  # +inf less itself; a huge quotient
        weights = np.exp(np.where(logits[ids] == logits.max(), 0.0, (logits[ids] - logits.max()) / temperature))
    probabilities = weights / weights.sum()
    if top_p < 1:
        ids = ids[: np.searchsorted(np.cumsum(probabilities), top_p) + 1]
        probabilities = probabilities[: len(ids)] / probabilities[: len(ids)].sum()
    return ids, probabilities


GGUF_NAMES = {
    "norm": "attn_norm.weight",
    **{f"w{m[0]}": f"attn_{m}.weight" for m in ("q", "k", "v", "output")},
    **{f"b{m[0]}": f"attn_{m}.bias" for m in ("q", "k", "v", "output")},
    **{f"{m}_norm": f"attn_{m}_norm.weight" for m in ("q", "k")},
    "ffn_norm": "ffn_norm.weight",
    **{m: f"ffn_{m}.weight" for m in ("gate", "up", "down")},
}
"""Our names of a layer's weights to those of GGUF, without the prefix blk.N."""
