"""The fused block as plain functions over arrays, without attention: norm and QKV projections, output projection and MLP. Names as in `header`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..attention.arguments import checked_eps, whole
from ..attention.kv_cache import KVCache
from ..errors import ArgumentError, ShapeError
from ..gpu import Device, DeviceProfile, Recording, StepState, Tensor, device_or_default, profile_or_default
from .arithmetic import checked, resolve
from .attention_block import Geometry, QkvProjection
from .header_arguments import RopeLike, checked_position, cleared, floating_array, output_matrix, padded_gamma, rope_of, sizes_of, within, zero_rows
from .linear import Matrix, pad_vector, padded, record_linear
from .memory import allocate, mlp_buffers, nbytes
from .mlp import MlpBlock
from .quant import QuantizedTensor
from .steps import chunk_tokens
from .weights import matrix, vector

Array = Any


# ---- norm and QKV alone


def rmsnorm_qkv(
    x: Array,
    norm: Array,
    w_qkv: Array,
    b_qkv: Array | None = None,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float = 1e-5,
    arithmetic: str = "exact",
    device: Device | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k, v = w_qkv . norm(x) + b_qkv, in one dispatch: x (E,) to (H, D), (KV, D), (KV, D), or (T, E) to (T, H, D) and so on.

    w_qkv: ((H + 2 KV) * D, E): the rows of Q, of K, of V; an array or a QuantizedTensor. b_qkv in the same order.

    Raises ShapeError, TypeError, ArgumentError, before any work.
    """
    call = _Qkv(x, norm, w_qkv, b_qkv, num_heads, num_kv_heads, head_dim, eps, arithmetic, device)
    weights = Matrix(call.device, call.w)
    y = call.device.empty((len(call.x), weights.rows))
    recording, step = call.recording()
    record_linear(
        recording,
        weights,
        step=step,
        x=call.on_device(),
        output="store",
        outputs={"y": y},
        tokens=len(call.x),
        y_stride=weights.rows,
        gamma=call.device.tensor(pad_vector(call.norm)),
        eps=call.eps,
        bias=None if call.b is None else call.device.tensor(call.b),
        arithmetic=resolve(call.device, weights, len(call.x), arithmetic),
    )
    recording.replay()
    return call.shaped(*np.split(y.numpy(), np.cumsum(call.rows)[:2], axis=1))


def rmsnorm_qkv_rope(
    x: Array,
    norm: Array,
    w_qkv: Array,
    b_qkv: Array | None = None,
    *,
    position: int,
    rope: RopeLike,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float = 1e-5,
    arithmetic: str = "exact",
    device: Device | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`rmsnorm_qkv` with q and k rotated, token t at `position` + t. rope: as in `attention_decode`; tables bound the position."""
    rope = rope_of(rope)
    if rope is None:
        raise ArgumentError("rope is None; give a Rope or tables (cos, sin), or use rmsnorm_qkv.")
    call = _Qkv(x, norm, w_qkv, b_qkv, num_heads, num_kv_heads, head_dim, eps, arithmetic, device)
    geometry = Geometry(num_heads, num_kv_heads, head_dim, call.eps)
    geometry.check(rope)
    T = len(call.x)
    position = checked_position(position, T, 2**32 - 1, rope)
    ends = np.cumsum(call.rows)
    parts = [QuantizedTensor(raw, (len(raw), call.w.shape[1]), call.w.kind) for raw in np.split(call.w.raw, ends[:2])]
    weights = {"norm": call.norm, **dict(zip(("wq", "wk", "wv"), parts, strict=True))}
    if call.b is not None:
        weights |= dict(zip(("bq", "bk", "bv"), np.split(call.b, ends[:2]), strict=True))
    cache = KVCache(call.device, num_kv_heads, head_dim, T)
    query = call.device.empty((T, call.rows[0]))
    recording, step = call.recording()
    state = {"step": step, "h": call.on_device(), "query": query, "rope": call.device.tensor(rope.table(position + np.arange(T)))}
    QkvProjection(call.device, weights, geometry, rope, arithmetic).record(recording, cache, state, T)
    recording.replay()
    return call.shaped(query.numpy(), *(a.swapaxes(0, 1) for a in (cache.k(T), cache.v(T))))


class _Qkv:
    """What both have in common."""

    def __init__(self, x: Any, norm: Any, w: Any, b: Any, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, arithmetic: str, device: Device | None):
        num_heads, num_kv_heads, head_dim = whole("num_heads", num_heads), whole("num_kv_heads", num_kv_heads), whole("head_dim", head_dim)
        eps = checked_eps(eps)
        Geometry(num_heads, num_kv_heads, 4 * math.ceil(head_dim / 4), eps).check(None)
        checked(arithmetic)
        self.x = floating_array("x", x)
        self.single, self.head_dim, self.eps = self.x.ndim == 1, head_dim, eps
        self.x = self.x.reshape(1, -1) if self.single else self.x
        if self.x.ndim != 2 or 0 in self.x.shape:
            raise ShapeError(f"x has shape {np.shape(x)}; it must be (E,) or (T, E).")
        self.rows = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
        self.norm = vector("norm", norm, self.x.shape[1])
        self.w = matrix("w_qkv", w, (sum(self.rows), self.x.shape[1]))
        self.b = None if b is None else vector("b_qkv", b, sum(self.rows))
        self.device = device_or_default(device)

    def recording(self) -> tuple[Recording, Any]:
        """An empty recording, and the state of a step at position 0 over all tokens."""
        state = StepState(self.device)
        state.place(0, len(self.x))
        return Recording(self.device), state.step

    def on_device(self) -> Tensor:
        rows = np.zeros((len(self.x), padded(self.x.shape[1])), np.float32)
        rows[:, : self.x.shape[1]] = self.x
        return self.device.tensor(rows)

    def shaped(self, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        found = tuple(np.ascontiguousarray(a.reshape(len(self.x), -1, self.head_dim)) for a in arrays)
        return tuple(a[0] for a in found) if self.single else found


# ---- output projection and MLP


def outproj_mlp_prefill(
    attended: Array,
    residual: Array,
    norm: Array,
    wo: Array,
    w1: Array,
    w2: Array,
    *,
    bo: Array | None = None,
    b1: Array | None = None,
    b2: Array | None = None,
    embed_dim: int | None = None,
    intermediate_dim: int | None = None,
    eps: float = 1e-5,
    arithmetic: str = "exact",
    device: Device | None = None,
) -> np.ndarray:
    """h + w2 . (silu(gate) * up) + b2, with h = wo . attended + bo + residual and gate, up = w1 . rms_norm(h) + b1. Three dispatches a chunk.

    Args:
        attended: (H, T, AD), head-major; residual: (T, AE); arrays. norm: (E,) or (AE,).
        wo: (AE, H*AD); w1: (2*AI, AE), all rows of gate, then all of up; w2: (AE, AI); arrays or QuantizedTensor of any kinds.
        bo (AE), b1 (2*AI), b2 (AE). embed_dim: E, default AE; intermediate_dim: I, default AI. arithmetic: as in `FusedMLP`.

    Returns:
        (T, AE) float32.

    Raises ShapeError, TypeError, ArgumentError, CapacityError, before any work.
    """
    checked(arithmetic)
    attended, residual = floating_array("attended", attended), floating_array("residual", residual)
    if attended.ndim != 3 or residual.ndim != 2 or 0 in attended.shape or 0 in residual.shape or attended.shape[1] != residual.shape[0]:
        raise ShapeError(f"attended has shape {attended.shape} and residual {residual.shape}; they must be (H, T, AD) and (T, AE).")
    (H, T, AD), AE = attended.shape, residual.shape[1]
    E = within("embed_dim", embed_dim, AE)
    eps = checked_eps(eps)
    wo = zero_rows(output_matrix(wo, AE, H * AD), np.arange(AE) >= E)
    w1 = matrix("w1", w1, (None, AE))
    if w1.shape[0] % 2:
        raise ShapeError(f"w1 has {w1.shape[0]} rows; they must be those of gate and of up, as many.")
    AI = w1.shape[0] // 2
    beyond = np.arange(AI) >= within("intermediate_dim", intermediate_dim, AI)
    gate, up = (zero_rows(QuantizedTensor(raw, (AI, AE), w1.kind), beyond) for raw in np.split(w1.raw, 2))
    weights = {"norm": padded_gamma(norm, E, AE), "gate": gate, "up": up, "down": matrix("w2", w2, (AE, AI))}
    if b1 is not None:
        weights |= dict(zip(("b_gate", "b_up"), (np.where(beyond, 0, b) for b in np.split(vector("b1", b1, 2 * AI), 2)), strict=True))
    if b2 is not None:
        weights["b_down"] = vector("b2", b2, AE)
    bo = None if bo is None else np.where(np.arange(AE) < E, vector("bo", bo, AE), 0).astype(np.float32)
    rows = np.ascontiguousarray(attended.astype(np.float32).transpose(1, 0, 2)).reshape(T, -1)
    device = device_or_default(device)
    out = _outproj_mlp(device, rows, cleared(residual, E), wo, bo, MlpBlock(device, weights, eps * E / AE, arithmetic), arithmetic)
    out[:, E:] = 0
    return out


def _outproj_mlp(device: Device, rows: np.ndarray, residual: np.ndarray, wo: Any, bo: Any, mlp: MlpBlock, arithmetic: str) -> np.ndarray:
    (T, AE), wo = residual.shape, Matrix(device, wo)
    tokens = min(T, chunk_tokens(device.profile, padded(max(AE, wo.columns, mlp.hidden))))
    buffers = allocate(device, _outproj_mlp_buffers(tokens, AE, wo.columns, mlp.hidden))
    state, recording, step = buffers, Recording(device), StepState(device)
    record_linear(
        recording,
        wo,
        step=step.step,
        x=state["attended"],
        output="residual",
        outputs={"y": state["h"], "residual": state["residual"]},
        tokens=tokens,
        y_stride=padded(AE),
        bias=None if bo is None else device.tensor(bo),
        arithmetic=resolve(device, wo, tokens, arithmetic),
        label="output projection, residual",
    )
    after = {"step": step.step, "h": state["h"], "hidden": state["hidden"], "y": state["y"], "residual": state["h"]}
    mlp.record(recording, after, tokens)
    out = np.empty((T, AE), np.float32)
    for first in range(0, T, tokens):
        count = min(tokens, T - first)
        step.place(0, count)
        for name, array in (("attended", rows), ("residual", residual)):
            wide = np.zeros((count, state[name].shape[1]), np.float32)
            wide[:, : array.shape[1]] = array[first : first + count]
            device.write(state[name].buffer, wide)
        recording.replay()
        out[first : first + count] = device.read(state["y"].buffer, np.float32, count * padded(AE)).reshape(count, -1)[:, :AE]
    return out


def _outproj_mlp_buffers(tokens: int, AE: int, attended: int, AI: int) -> dict[str, tuple[int, int]]:
    ends = {"attended": (tokens, padded(attended)), **dict.fromkeys(("residual", "h", "y"), (tokens, padded(AE)))}
    return ends | mlp_buffers(AE, AI, tokens)


def outproj_mlp_scratch_size(tokens: int, embed_dim: int, num_heads: int, head_dim: int, intermediate_dim: int, *, profile: DeviceProfile | None = None) -> int:
    """Bytes that `outproj_mlp_prefill` of so many tokens allocates beside the weights, in aligned dimensions; 0 where one is not positive."""
    sizes = sizes_of(tokens=tokens, embed_dim=embed_dim, num_heads=num_heads, head_dim=head_dim, intermediate_dim=intermediate_dim)
    if sizes is None:
        return 0
    tokens, embed_dim, num_heads, head_dim, intermediate_dim = sizes
    profile = profile_or_default(profile)
    chunk = min(tokens, chunk_tokens(profile, padded(max(embed_dim, num_heads * head_dim, intermediate_dim))))
    return nbytes(_outproj_mlp_buffers(chunk, embed_dim, num_heads * head_dim, intermediate_dim))
