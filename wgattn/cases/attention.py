"""Cases of attention: every path as a function and under a KV cache, merging, scores, tuned tiles."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from .. import reference
from ..attention import flash_matrix
from ..attention.functional import scaled_dot_product_attention
from ..attention.kv_format import KV_FORMATS
from ..attention.merge import merge_state
from ..attention.paths import PATHS, PORTABLE_PATHS
from ..attention.pipeline import AttentionPipeline
from ..attention.problem import MASKS, Operands, Problem, Rows
from ..attention.scores import STAGES, attention_scores
from ..attention.tune import flash_candidates, gemm_candidates
from ..errors import Unsupported
from ..gpu import Device, Recording
from .family import Family, Result, once

_DTYPES = {"f32": np.float32, "f16": np.float16}
_ERROR: dict[str, dict[str, float]] = {"f32": {"absolute": 2e-5}, "f16": {"absolute": 2e-4, "relative": 1e-3}}
"""Of values around 1, by how the result is stored."""
_KEPT: dict[str, dict[str, float]] = {"f32": {"absolute": 0.0}, "f16": {"absolute": 1e-7, "relative": 1e-3}, "q8_0": {"nmse": 1e-6}, "q4_0": {"nmse": 1e-4}}
"""Of what a cache keeps: WGSL leaves open which way f16 is rounded, and the last bit of a division, which may decide between two codes."""
_MATRIX_UNITS = {"absolute": 5e-3, "relative": 2e-3}
"""Of paths that round everything to f16."""
_SIGHT = {
    "all": {},
    "causal": {"is_causal": True},
    "window": {"window_size": (20, 3)},
    "causal window": {"is_causal": True, "window_size": 9},
    "top left": {"is_causal": True, "causal_alignment": "top_left"},
}


def _normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str = "f32") -> np.ndarray:
    return rng.standard_normal(shape).astype(_DTYPES[dtype])


def _mask(device: Device, rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> tuple[Any, np.ndarray | None]:
    """The mask as it is given, and as the reference takes it. "u8" is what bool arrays are stored as, "u32" a tensor of integers."""
    if kind == "none":
        return None, None
    hidden = rng.random(shape) < 0.3
    if kind in _DTYPES:
        mask = np.where(hidden, -np.inf, rng.standard_normal(shape)).astype(_DTYPES[kind])
        return mask, mask
    keep = ~hidden
    return (device.tensor(keep.astype(np.uint32)) if kind == "u32" else keep), keep


def _close(path: str, dtype: str) -> dict[str, float]:
    """The error that is allowed."""
    return _ERROR[dtype] if path in PORTABLE_PATHS else _MATRIX_UNITS


def _lse(got: np.ndarray, expected: Any, path: str = PORTABLE_PATHS[0]) -> Result:
    return Result("lse", got, expected, 3e-5 if path in PORTABLE_PATHS else 5e-3, 1e-6)


def _function(
    device: Device,
    rng: np.random.Generator,
    *,
    path: str,
    dtype: str,
    kv_dtype: str,
    dims: tuple[int, int],
    sizes: tuple[int, int],
    heads: tuple[int, int],
    mask: str,
    softcap: float,
    alibi: bool,
    sinks: bool,
    lse: bool,
    lengths: bool,
    sight: str,
    layout: str,
) -> Iterator[Result]:
    (D, Dv), (S, T), (H, Hkv), B = dims, sizes, heads, 2
    q, k, v = (_normal(rng, (B, h, n, d), t) for h, n, d, t in ((H, S, D, dtype), (Hkv, T, D, kv_dtype), (Hkv, T, Dv, kv_dtype)))
    given, known = _mask(device, rng, mask, (1, H, S, T))
    terms: dict[str, Any] = {"softcap": softcap, **_SIGHT[sight]}
    if alibi:
        terms["alibi_slopes"] = 2.0 ** -np.linspace(2, 6, H)
    if sinks:
        terms["sinks"] = rng.standard_normal(H)
    if lengths:
        terms["key_lengths"] = np.array([T, T - T // 3])
        k[1, :, T - T // 3 :] = v[1, :, T - T // 3 :] = np.nan  # nobody may read these
    turned = [a if layout == "bhsd" else np.ascontiguousarray(a.swapaxes(1, 2)) for a in (q, k, v)]
    found = scaled_dot_product_attention(*turned, given, layout=layout, return_lse=lse, path=path, device=device, **terms)
    out, found_lse = found if lse else (found, None)
    expected = once(lambda: reference.attention(q, k, v, known, **terms))
    yield Result("out", out if layout == "bhsd" else out.swapaxes(1, 2), lambda: expected()[0], **_close(path, dtype))
    if lse:
        yield _lse(found_lse, lambda: expected()[1], path)


def _cached(
    device: Device,
    rng: np.random.Generator,
    *,
    path: str,
    kv_dtype: str,
    dtype: str,
    head_dim: int,
    heads: tuple[int, int],
    softcap: float,
    mask: str,
    window: int | None,
) -> Iterator[Result]:
    """A prompt, a few steps, and a second prompt, behind positions that a truncation has left."""
    H, Hkv = heads
    pipe = AttentionPipeline(
        H, Hkv, head_dim, kv_dtype=kv_dtype, capacity=320, growth=0, softcap=softcap, window_size=window, path=path, device=device
    )
    history: list[tuple[np.ndarray, np.ndarray]] = []
    for positions in (40, 1, 1, 7):
        q, k, v = (_normal(rng, (1, positions, n, head_dim), dtype) for n in (H, Hkv, Hkv))
        history.append((k, v))
        if positions == 1:
            out, known = pipe.decode(q, k, v), None
        else:
            given, known = _mask(device, rng, mask, (positions, pipe.length + positions))
            out = pipe.prefill(q, k, v, given)
        keys, values = pipe.cache.k(pipe.length)[None], pipe.cache.v(pipe.length)[None]  # what is kept is looked at below

        def expected(q: np.ndarray = q, keys: np.ndarray = keys, values: np.ndarray = values, known: Any = known) -> np.ndarray:
            out, _ = reference.attention(q.swapaxes(1, 2), keys, values, known, is_causal=True, softcap=softcap, window_size=window)
            return out.swapaxes(1, 2)

        yield Result(f"out of {positions} at {pipe.length - positions}", out, expected, **_close(path, dtype))
    for name, copy, i in (("keys", pipe.cache.k, 0), ("values", pipe.cache.v, 1)):
        given = np.concatenate([h[i] for h in history], 1)[0].swapaxes(0, 1)
        yield Result(name, copy(pipe.length), lambda given=given: reference.kv_stored(given, kv_dtype), **_KEPT[kv_dtype])


def _merge(device: Device, rng: np.random.Generator, *, first: str, second: str, width: int) -> Iterator[Result]:
    a, b = _normal(rng, (3, 5, width), first), _normal(rng, (3, 5, width), second)
    lse_a, lse_b = _normal(rng, (3, 5)), _normal(rng, (3, 5))
    lse_a[0, 0] = lse_b[0, :2] = -np.inf
    out, lse = merge_state(a, lse_a, b, lse_b, device=device)
    expected = once(lambda: reference.merge_state(a, lse_a, b, lse_b))
    yield Result("out", out, lambda: expected()[0], 1e-5)
    yield _lse(lse, lambda: expected()[1])


def _scores(device: Device, rng: np.random.Generator, *, stage: str, mask: str, head_dim: int, dtype: str) -> Iterator[Result]:
    """Against the softmax of what the reference attends to: values are the unit vectors."""
    S, T, H = 5, 37, 4
    q, k = _normal(rng, (1, H, S, head_dim), dtype), _normal(rng, (1, 2, T, head_dim), dtype)
    given, known = _mask(device, rng, mask, (1, H, S, T))
    options = {"softcap": 3.0, "is_causal": True}
    got = attention_scores(q, k, given, stage=stage, device=device, **options)

    def expected() -> np.ndarray:
        units = np.broadcast_to(np.eye(T), (1, 2, T, T))
        if stage == "softmax":
            return reference.attention(q, k, units, known, **options)[0]
        plain = np.einsum("bhsd,bhtd->bhst", *(a.astype(np.float64) for a in (q, np.repeat(k, 2, 1)))) / math.sqrt(head_dim)
        if stage == "scaled":
            return plain
        capped = 3 * np.tanh(plain / 3)
        if stage == "softcap":
            return capped
        term = 0 if known is None else known if known.dtype != bool else np.where(known, 0, -np.inf)
        return np.where(reference.visible(S, T, is_causal=True), capped + term, -np.inf)

    yield Result(stage, got, expected, 3e-5)


def _tiles(device: Device, rng: np.random.Generator, *, path: str, candidate: int, kv_dtype: str) -> Iterator[Result]:
    """One of the shapes that `wgattn tune` times; there are as many as the device can run."""
    S = T = 128
    p = Problem(1, 2, 1, S, T, 64, 64, 0.125, kv_dtype=kv_dtype, right=0)
    if path == "flash":
        shapes: list[Any] = flash_candidates(device.profile, p)
    elif path == "flash_matrix":
        shapes = flash_matrix.candidates(device.profile, p)
    else:
        both = [gemm_candidates(device.profile, p, product) for product in ("scores", "outputs")]
        default = PATHS["gemm"].shape(device.profile, p)
        shapes = [type(default)(*(c[min(i, len(c) - 1)] for c in both)) for i in range(max(map(len, both)))]
    if candidate >= len(shapes):
        raise Unsupported(f"{path} has {len(shapes)} candidates on {device.name}.")
    q, k, v = (_normal(rng, (1, h, n, 64), t) for h, n, t in ((2, S, "f32"), (1, T, kv_dtype), (1, T, kv_dtype)))
    out, recording = device.empty((1, 2, S, 64)), Recording(device)
    PATHS[path].record(recording, p, Operands(*(Rows.of(device.tensor(a), "bhsd") for a in (q, k, v)), out=Rows.of(out, "bhsd")), shapes[candidate])
    recording.replay()
    yield Result(f"out with {shapes[candidate]}", out.numpy(), lambda: reference.attention(q, k, v, is_causal=True)[0], **_close(path, "f32"))


FUNCTION = Family(
    "attention",
    {
        "path": tuple(PATHS),
        "dtype": tuple(_DTYPES),
        "kv_dtype": tuple(_DTYPES),
        "dims": ((64, 64), (64, 6), (37, 32), (5, 5)),
        "sizes": ((1, 300), (5, 37), (33, 70), (2, 1500)),
        "heads": ((6, 2), (2, 2)),
        "mask": MASKS,
        "softcap": (0.0, 5.0),
        "alibi": (False, True),
        "sinks": (False, True),
        "lse": (False, True),
        "lengths": (False, True),
        "sight": tuple(_SIGHT),
        "layout": ("bhsd", "bshd"),
    },
    _function,
    rows=("path", "dtype"),
    numbers=("sight", "layout", "heads", "sizes"),
)
CACHED = Family(
    "KV cache",
    {
        "path": tuple(PATHS),
        "kv_dtype": tuple(KV_FORMATS),
        "dtype": tuple(_DTYPES),
        "head_dim": (64, 37),
        "heads": ((6, 2), (2, 2)),
        "softcap": (0.0, 5.0),
        "mask": MASKS,
        "window": (None, 9),
    },
    _cached,
    rows=("kv_dtype",),
    numbers=("window", "heads"),
)
MERGE = Family("merge_state", {"first": tuple(_DTYPES), "second": tuple(_DTYPES), "width": (64, 37)}, _merge)
SCORES = Family(
    "attention_scores", {"stage": STAGES, "mask": MASKS, "head_dim": (64, 37), "dtype": tuple(_DTYPES)}, _scores, rows=("stage",)
)
TILES = Family("tiles", {"path": ("flash", "gemm", "flash_matrix"), "candidate": tuple(range(64)), "kv_dtype": tuple(_DTYPES)}, _tiles, rows=("path",))
FAMILIES = (FUNCTION, CACHED, MERGE, SCORES)
