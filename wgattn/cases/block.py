"""Cases of the transformer block: norm, RoPE, and both halves of a layer over every kind of weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from .. import reference
from ..attention.kv_cache import KVCache
from ..attention.kv_format import KV_FORMATS
from ..block.attention_block import AttentionBlock, ChosenAttention, Geometry
from ..block.functional import apply_rope, rms_norm
from ..block.fused import FusedAttention, FusedMLP
from ..block.linear import half_fits, padded
from ..block.mlp import MlpBlock
from ..block.quant import FORMATS, QuantizedTensor
from ..block.rope import Rope
from ..block.slices import SLICE, Stream
from ..errors import Unsupported
from ..gpu import Device, Recording, StepState
from .family import Family, Result, once
from .weights import random_matrix, random_vector, width_of

_DTYPES = {"f32": np.float32, "f16": np.float16}
WEIGHTS = (*FORMATS, *(f"{kind} int8" for kind, form in FORMATS.items() if form.quantised))
"""Kinds of matrices, those of codes also with int8 activations."""
QUANTISED_CACHE = {"q8_0": 3e-4, "q4_0": 4e-2}
"""NMSE that a quantised KV cache adds, at most."""
_EMULATED = 2e-5
"""NMSE of int8 arithmetic against its emulation: a code that is a tie may be rounded either way."""
_ROUNDED = 2e-3
"""NMSE of an MLP's int8 arithmetic against exact: 1e-4 on average, but a token whose hidden channels have one outlier may have ten times that."""


def _dequantised(weights: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: w.dequantize() if isinstance(w, QuantizedTensor) else w for name, w in weights.items()}


def _parted(weights: str) -> tuple[str, str]:
    """A kind of WEIGHTS as (format, arithmetic)."""
    kind, _, arithmetic = weights.partition(" ")
    return kind, arithmetic or "exact"


def _normal(rng: np.random.Generator, *shape: int, dtype: str = "f32") -> np.ndarray:
    return rng.standard_normal(shape).astype(_DTYPES[dtype])


# ---- functions


def _norm(device: Device, rng: np.random.Generator, *, dtype: str, weight: str, width: int) -> Iterator[Result]:
    x, gamma = _normal(rng, 3, 5, width, dtype=dtype), random_vector(rng, width).astype(_DTYPES[weight])
    x[1, 2] = 0
    yield Result("y", rms_norm(x, gamma, 1e-5, device=device), lambda: reference.rms_norm(x, gamma, 1e-5), 1e-5, 1e-3 if dtype == "f16" else 1e-6)


def _rope(device: Device, rng: np.random.Generator, *, dtype: str, dims: tuple[int, int], interleaved: bool) -> Iterator[Result]:
    head_dim, dim = dims
    x, positions = _normal(rng, 7, 3, head_dim, dtype=dtype), rng.integers(0, 5000, 7)
    got = apply_rope(x, positions, Rope(1e4, dim, interleaved=interleaved), device=device)
    yield Result(
        "y", got, lambda: reference.apply_rope(x, positions, dim=dim, interleaved=interleaved), 1e-5, 1e-3 if dtype == "f16" else 1e-6
    )


# ---- the halves of a layer


def _mlp(
    device: Device, rng: np.random.Generator, *, weights: str, tokens: str, mixed: bool, bias: bool, fused: bool = True
) -> Iterator[Result]:
    """`mixed`: gate and up are of different kinds, so that two dispatches compute them."""
    yield from _mlp_of(device, rng, weights, int(tokens.split()[0]), 2 * width_of(_parted(weights)[0]), mixed=mixed, bias=bias, fused=fused)


def _large_mlp(device: Device, rng: np.random.Generator, *, weights: str) -> Iterator[Result]:
    """So many rows and tokens that a large GPU is busy, for which it has other kernels."""
    if device.profile.software:
        raise Unsupported(f"{device.name} is a CPU: it computes large layers by the same kernels as small ones.")
    yield from _mlp_of(device, rng, weights, 256, 4352, mixed=False, bias=False, fused=True)


def _half_mlp(device: Device, rng: np.random.Generator, *, weights: str, tokens: int, mixed: bool, bias: bool) -> Iterator[Result]:
    if not half_fits(device.profile, tokens):
        raise Unsupported(f"{device.name} has no matrix units that this backend can use: arithmetic half is exact there.")
    yield from _mlp_of(device, rng, f"{weights} half", tokens, 2 * width_of(weights) if tokens < 256 else 2048, mixed=mixed, bias=bias, fused=True)


def _mlp_of(
    device: Device, rng: np.random.Generator, weights: str, tokens: int, hidden: int, *, mixed: bool, bias: bool, fused: bool
) -> Iterator[Result]:
    kind, arithmetic = _parted(weights)
    E = width_of(kind)
    kinds = {"gate": "F16" if mixed else kind, "up": kind, "down": kind}
    if kind == "F16" and mixed:
        kinds["gate"] = "F32"
    shapes = {"gate": (hidden, E), "up": (hidden, E), "down": (E, hidden)}
    given: dict[str, Any] = {"norm": random_vector(rng, E)} | {name: random_matrix(rng, *shapes[name], kinds[name]) for name in shapes}
    if bias:
        given |= {f"b_{name}": _normal(rng, rows) for name, (rows, _) in shapes.items()}
    x = _normal(rng, tokens, E)
    got = FusedMLP(given, arithmetic=arithmetic, fused=fused, device=device)(x)
    if arithmetic == "exact":
        yield Result("y", got, lambda: x + reference.mlp(x, _dequantised(given), 1e-5), 2e-5, 2e-6)
    elif arithmetic == "half":
        yield Result("y", got - x, lambda: reference.mlp(x, _dequantised(given), 1e-5), nmse=5e-6)
    else:  # rounding is emulated where both matrices of the norm are rounded, and it comes after the norm's scale
        emulated = fused and not mixed
        yield Result("y", got - x, lambda: reference.mlp(x, _dequantised(given), 1e-5, int8=emulated), nmse=_EMULATED if emulated else _ROUNDED)


_ROPES = {
    "none": None,
    "halves": {"dim": 32},
    "interleaved": {"dim": 32, "interleaved": True},
    "partial": {"dim": 16},
}


def _attention(
    device: Device,
    rng: np.random.Generator,
    *,
    weights: str,
    kv_dtype: str,
    rope: str,
    bias: bool,
    qk_norm: bool,
    residual: str,
    mixed: bool,
    layer: str,
    prompt: int,
) -> Iterator[Result]:
    """A prompt and two steps, and no room for more. `mixed`: V is of another kind than Q and K. Residual: none, of its own, or x itself."""
    (kind, arithmetic), fused = _parted(weights), layer == "fused"
    E, H, Hkv, D = width_of(kind), FORMATS[kind].block // 32 if FORMATS[kind].block > 32 else 4, 2, 32
    shapes = {"wq": (H * D, E), "wk": (Hkv * D, E), "wv": (Hkv * D, E), "wo": (E, H * D)}
    kinds = dict.fromkeys(shapes, kind) | ({"wv": "F32" if kind == "F16" else "F16"} if mixed else {})
    given: dict[str, Any] = {"norm": random_vector(rng, E)} | {name: random_matrix(rng, *shapes[name], kinds[name]) for name in shapes}
    if bias:
        given |= {f"b{name[1]}": _normal(rng, rows) for name, (rows, _) in shapes.items()}
    if qk_norm:
        given |= {name: random_vector(rng, D) for name in ("q_norm", "k_norm")}
    sizes = {"num_heads": H, "num_kv_heads": Hkv, "head_dim": D}
    turns = _ROPES[rope]
    block = FusedAttention(
        given, **sizes, rope=turns and Rope(1e4, **turns), kv_dtype=kv_dtype, capacity=prompt + 2, arithmetic=arithmetic, fused=fused, device=device
    )
    x, own = (_normal(rng, prompt + 2, E) for _ in range(2))
    added = {"none": None, "own": own, "x": x}[residual]
    rows = [slice(0, prompt), slice(prompt, prompt + 1), slice(prompt + 1, prompt + 2)]
    got = [call(x[r], None if added is None else added[r]) for call, r in zip((block.prefill, block.decode, block.decode), rows, strict=True)]
    emulated = arithmetic == "int8" and fused and not mixed
    expected = once(lambda: reference.attention_block(x, _dequantised(given), **sizes, eps=1e-5, rope=turns and {"base": 1e4, **turns}, int8=emulated))
    out = np.concatenate(got)
    close: dict[str, Any] = {"absolute": 2e-5, "relative": 2e-6}
    if arithmetic == "int8":
        close = {"nmse": _EMULATED if emulated else 5e-4}
    elif kv_dtype == "f16":
        close = {"absolute": 5e-3}
    if kv_dtype in QUANTISED_CACHE:
        close = {"nmse": QUANTISED_CACHE[kv_dtype] + close.get("nmse", 0)}
    yield Result("y", out, lambda: expected()[0] + (0 if added is None else added), **close)
    kept = close if "nmse" in close else {"absolute": 2e-5, "relative": 1e-3 if kv_dtype == "f16" else 2e-6}
    yield Result("keys", block.cache.k(), lambda: expected()[1], **kept)
    yield Result("values", block.cache.v(), lambda: expected()[2], **kept)


def _small_layers(device: Device, rng: np.random.Generator, *, weights: str, kv_dtype: str, bias: bool) -> Iterator[Result]:
    """Steps of two layers so small that a GPU computes each in three dispatches, with a stream that sums are added to."""
    kind, arithmetic = _parted(weights)
    E, (H, KV, D), hidden, steps = width_of(kind), (8, 2, 32), 4 * SLICE, 3
    shapes = {"wq": (H * D, E), "wk": (KV * D, E), "wv": (KV * D, E), "wo": (E, H * D)}, {"gate": (hidden, E), "up": (hidden, E), "down": (E, hidden)}
    geometry, state, recording = Geometry(H, KV, D, 1e-5), StepState(device), Recording(device)
    h = device.empty((1, padded(E)))
    scratch = {"step": state.step, "h": h, "rope": device.tensor(np.zeros((steps, 1, 2), np.float32)), "hidden": device.empty((1, padded(hidden)))}
    scratch |= {n: device.empty((1, H * D)) for n in ("query", "attended")}
    scratch["stream"] = stream = Stream(h, device.empty(h.shape))
    attention, layers = ChosenAttention(device.profile, geometry, 1, steps), []
    for _ in range(2):
        halves = [{"norm": random_vector(rng, E)} | {n: random_matrix(rng, *shape, kind) for n, shape in half.items()} for half in shapes]
        if bias:
            halves = [half | {_bias_of(n): _normal(rng, w.shape[0]) for n, w in half.items() if n != "norm"} for half in halves]
        blocks = AttentionBlock(device, halves[0], geometry, None, arithmetic), MlpBlock(device, halves[1], 1e-5, arithmetic)
        blocks[0].record(recording, attention, KVCache(device, KV, D, steps, kv_dtype), scratch, 1)
        blocks[1].record(recording, scratch, 1)
        layers.append([_dequantised(half) for half in halves])
    end, x, got = stream.settle(recording), _normal(rng, steps, E), []
    for position, row in enumerate(x):
        state.place(position, 1)
        h.write(np.pad(row, (0, h.shape[1] - E))[None])
        recording.replay()
        got.append(end.numpy()[0, :E])

    def expected() -> np.ndarray:
        y, int8 = x.astype(np.float64), arithmetic == "int8"
        for attention, mlp in layers:
            y = y + reference.attention_block(y, attention, num_heads=H, num_kv_heads=KV, head_dim=D, eps=1e-5, rope=None, int8=int8)[0]
            y = y + reference.mlp(y, mlp, 1e-5, int8=int8)
        return y

    close: dict[str, Any] = {"nmse": _ROUNDED} if arithmetic == "int8" else {"absolute": 1e-2} if kv_dtype == "f16" else {"absolute": 2e-5}
    if kv_dtype in QUANTISED_CACHE:
        close = {"nmse": QUANTISED_CACHE[kv_dtype] + close.get("nmse", 0)}
    yield Result("y", np.stack(got), expected, **close)


def _bias_of(matrix: str) -> str:
    return f"b{matrix[1]}" if matrix.startswith("w") else f"b_{matrix}"


NORM = Family("rms_norm", {"dtype": tuple(_DTYPES), "weight": tuple(_DTYPES), "width": (64, 37, 1000)}, _norm)
ROPE = Family("apply_rope", {"dtype": tuple(_DTYPES), "dims": ((64, 64), (64, 16), (37, 10)), "interleaved": (False, True)}, _rope)
_MLP_AXES = {"weights": WEIGHTS, "tokens": ("1 token", "20 tokens"), "mixed": (False, True), "bias": (False, True)}
MLP = Family("MLP", _MLP_AXES, _mlp, rows=("weights", "tokens"))
_FEW_WEIGHTS = ("F32", "F16", "Q4_0", "Q6_K", "Q8_0 int8")
"""For layers of several dispatches, whose projections are those of one."""
UNFUSED_MLP = Family("MLP unfused", _MLP_AXES | {"weights": _FEW_WEIGHTS}, partial(_mlp, fused=False))
LARGE_MLP = Family("large MLP", {"weights": ("F32", "F16", "Q4_0", "Q6_K", "Q8_0 int8")}, _large_mlp)
MATRIX_UNITS = Family("MLP in f16", {"weights": tuple(FORMATS), "tokens": (20, 256), "mixed": (False, True), "bias": (False, True)}, _half_mlp)
_ATTENTION_AXES = {
    "layer": ("fused",),
    "weights": WEIGHTS,
    "kv_dtype": tuple(KV_FORMATS),
    "rope": tuple(_ROPES),
    "bias": (False, True),
    "qk_norm": (False, True),
    "residual": ("none", "own", "x"),
    "mixed": (False, True),
    "prompt": (18, 5),
}
_IN_ATTENTION = {"rows": ("layer",), "numbers": ("rope", "prompt")}
ATTENTION = Family("attention half", _ATTENTION_AXES, _attention, **_IN_ATTENTION)
UNFUSED_ATTENTION = Family("attention half", _ATTENTION_AXES | {"layer": ("unfused",), "weights": _FEW_WEIGHTS}, _attention, **_IN_ATTENTION)
SMALL_LAYERS = Family("small layers", {"weights": WEIGHTS, "kv_dtype": tuple(KV_FORMATS), "bias": (False, True)}, _small_layers)
FAMILIES = (NORM, ROPE, MLP, UNFUSED_MLP, LARGE_MLP, MATRIX_UNITS, ATTENTION, UNFUSED_ATTENTION, SMALL_LAYERS)
