"""The fused block as plain functions over arrays, one for each of the original header's, with its padded layouts.

Names of dimensions: E channels in AE columns, H query heads over KV heads of D channels in AD columns, I hidden channels in AI columns, C positions
of a cache, T tokens. AE, AD and AI are what the arrays have; E, D and I may be smaller. Padding of activations and of a cache may hold any finite
number; padding of weights is taken as zero where rows are padding, and must be zero or any finite number where columns are. Outputs have zero padding.

Each call uploads its weights and records its work. For step after step over the same weights use `FusedAttention` and `FusedMLP`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..attention.arguments import checked_eps, floating
from ..attention.kv_cache import KVCache
from ..errors import ArgumentError, CapacityError, ShapeError, Unsupported
from ..gpu import Device, DeviceProfile, Recording, StepState, Tensor, default_device
from .arithmetic import checked, resolve
from .attention_block import AttentionBlock, ChosenAttention, Geometry, QkvProjection
from .fused import attention_chunk, attention_steps
from .linear import Matrix, pad_vector, padded, record_linear
from .memory import allocate, attention_buffers, mlp_buffers, nbytes, partial_bytes
from .mlp import MlpBlock
from .quant import QuantizedTensor
from .rope import Rope
from .steps import chunk_tokens
from .weights import matrix, vector

Array = Any
Cache = KVCache | tuple[Tensor, Tensor]
RopeLike = Rope | tuple[Array, Array] | None


class TableRope(Rope):
    """RoPE by tables of cosines and sines, each (positions, pairs), over channels (i, i + pairs) of a head."""

    def __init__(self, cosines: Array, sines: Array):
        cosines, sines = (np.asarray(a) for a in (cosines, sines))
        if cosines.ndim != 2 or cosines.shape != sines.shape or 0 in cosines.shape:
            raise ShapeError(f"The tables of cos and sin have shapes {cosines.shape} and {sines.shape}; both must be (positions, pairs).")
        self.dim, self.interleaved = 2 * cosines.shape[1], False
        self.rows = np.stack([cosines, sines], axis=-1).astype(np.float32)

    def table(self, positions: int | np.ndarray) -> np.ndarray:
        """Rows 0 .. n - 1, or those given."""
        return self.rows[:positions] if np.ndim(positions) == 0 else self.rows[positions]


# ---- attention


def attention_decode(
    x: Array,
    norm: Array,
    wq: Array,
    wk: Array,
    wv: Array,
    wo: Array,
    cache: Cache,
    position: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    embed_dim: int | None = None,
    residual: Array | None = None,
    bq: Array | None = None,
    bk: Array | None = None,
    bv: Array | None = None,
    bo: Array | None = None,
    rope: RopeLike = None,
    eps: float = 1e-5,
    arithmetic: str = "exact",
) -> np.ndarray:
    """The attention half of a block for one token: wo . attention(norm(x)) + bo [+ residual]; writes row `position` of the cache.

    Args:
        x: (AE,) or (1, AE), an array; norm: (E,) or (AE,).
        wq: (H*AD, AE), wk and wv: (KV*AD, AE), wo: (AE, H*AD), or slabs (H, AE, AD) a head as the original's decode takes them; arrays or
            QuantizedTensor of any kinds. bq (H*AD), bk, bv (KV*AD), bo (AE).
        cache: a `KVCache`, or tensors (k, v) of (KV, C, AD), float32 or float16; the device is theirs. AD is theirs too.
        position: rows before it are the history. head_dim: D; scores are scaled by 1 / sqrt(D). embed_dim: E, default AE.
        rope: a `Rope`; or tables (cos, sin), each (positions, D / 2), for pairs (i, i + D / 2); None: no rotation.
        residual: as x. arithmetic: as in `FusedAttention`.

    Returns:
        Like x, float32.

    Raises:
        ShapeError, TypeError, ArgumentError, CapacityError, Unsupported, before anything is written.
    """
    x = floating_array("x", x)
    if x.ndim not in (1, 2) or (x.ndim == 2 and x.shape[0] != 1):
        raise ShapeError(f"x has shape {x.shape}; attention_decode takes one token, (AE,) or (1, AE). For more use attention_prefill.")
    residual = None if residual is None else floating_array("residual", residual)
    if residual is not None and residual.shape != x.shape:
        raise ShapeError(f"residual has shape {residual.shape}; it must be x's, {x.shape}.")
    weights = {"norm": norm, "wq": wq, "wk": wk, "wv": wv, "wo": wo, "bq": bq, "bk": bk, "bv": bv, "bo": bo}
    call = _Attention(x.reshape(1, -1), weights, cache, position, num_heads, num_kv_heads, head_dim, embed_dim, rope, eps, (arithmetic, arithmetic))
    return call.decode(None if residual is None else residual.reshape(1, -1)).reshape(x.shape)


def attention_decode_workspace(*args: Any, q_output_workspace: Array, kv_workspace: Array, **kwargs: Any) -> np.ndarray:
    """`attention_decode` with the original's workspaces: at least 2*H*AD and 2*KV*AD floats. Equal results, bit for bit.

    Too small a workspace raises CapacityError before anything is written. The kernels keep what the original puts there in registers and in one
    buffer of their own, so the workspaces' contents stay as they are. All other arguments are those of `attention_decode`.
    """
    cache = kwargs.get("cache", args[6] if len(args) > 6 else None)
    store = _cache(cache)
    for name, workspace, heads in (("q_output_workspace", q_output_workspace, "num_heads"), ("kv_workspace", kv_workspace, "num_kv_heads")):
        need = 2 * 4 * kwargs[heads] * store.aligned_dim
        if workspace is None:
            raise ArgumentError(f"{name} is None; it must have at least {need} bytes.")
        if not hasattr(workspace, "nbytes"):
            raise TypeError(f"{name} is a {type(workspace).__name__}; it must be an array or a tensor.")
        if workspace.nbytes < need:
            raise CapacityError(f"{name} has {workspace.nbytes} bytes; it must have at least {need}.")
    return attention_decode(*args, **kwargs)


def attention_prefill(
    x: Array,
    norm: Array,
    wq: Array,
    wk: Array,
    wv: Array,
    wo: Array,
    cache: Cache,
    start_position: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    embed_dim: int | None = None,
    residual: Array | None = None,
    bq: Array | None = None,
    bk: Array | None = None,
    bv: Array | None = None,
    bo: Array | None = None,
    rope: RopeLike = None,
    eps: float = 1e-5,
    arithmetic: str = "exact",
) -> np.ndarray:
    """The attention half of a block for T tokens: x (T, AE) to (T, AE); writes rows start_position .. start_position + T - 1 of the cache.

    Token t sees the rows before start_position and tokens 0 .. t. All arguments as in `attention_decode`, which it equals token by token.
    """
    weights = {"norm": norm, "wq": wq, "wk": wk, "wv": wv, "wo": wo, "bq": bq, "bk": bk, "bv": bv, "bo": bo}
    x = floating_array("x", x)
    both = (arithmetic, arithmetic)
    return _Attention(x, weights, cache, start_position, num_heads, num_kv_heads, head_dim, embed_dim, rope, eps, both).prefill(residual)


def attention_prefill_q8_0(
    x: Array,
    norm: Array,
    wq: Array,
    wk: Array,
    wv: Array,
    wo: QuantizedTensor,
    cache: Cache,
    start_position: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    embed_dim: int | None = None,
    residual: Array | None = None,
    bq: Array | None = None,
    bk: Array | None = None,
    bv: Array | None = None,
    bo: Array | None = None,
    rope: RopeLike = None,
    eps: float = 1e-5,
    arithmetic: str = "exact",
) -> np.ndarray:
    """`attention_prefill` whose output projection rounds the attended heads to int8, 32 channels to a scale. `arithmetic` is of the others.

    Raises besides: Unsupported when wo is not Q8_0, or AD or AE not a multiple of 32.
    """
    if not isinstance(wo, QuantizedTensor) or wo.kind != "Q8_0":
        raise Unsupported(f"attention_prefill_q8_0 takes wo as a QuantizedTensor in Q8_0, not {getattr(wo, 'kind', type(wo).__name__)}.")
    x = floating_array("x", x)
    stride, columns = _cache(cache).aligned_dim, wo.shape[0]
    if stride % 32 or columns % 32:
        raise Unsupported(f"attention_prefill_q8_0 needs AD and AE to be multiples of 32; they are {stride} and {columns}.")
    weights = {"norm": norm, "wq": wq, "wk": wk, "wv": wv, "wo": wo, "bq": bq, "bk": bk, "bv": bv, "bo": bo}
    pair = (arithmetic, "int8")
    return _Attention(x, weights, cache, start_position, num_heads, num_kv_heads, head_dim, embed_dim, rope, eps, pair).prefill(residual)


class _Attention:
    """One call, checked: nothing is written before all of it is known to be right."""

    def __init__(
        self,
        x: np.ndarray,
        weights: Mapping[str, Any],
        cache: Cache,
        position: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        embed_dim: int | None,
        rope: RopeLike,
        eps: float,
        arithmetic: tuple[str, str],
    ):
        for name in arithmetic:
            checked(name)
        if x.ndim != 2 or 0 in x.shape:
            raise ShapeError(f"x has shape {x.shape}; it must be (T, AE) with T of at least 1.")
        (T, AE), self.cache = x.shape, _cache(cache)
        self.E = _within("embed_dim", embed_dim, AE)
        self.rope = TableRope(*rope) if isinstance(rope, tuple) else rope
        Geometry(num_heads, num_kv_heads, head_dim if self.rope else 4 * math.ceil(head_dim / 4), float(eps)).check(self.rope)
        AD = self.cache.aligned_dim
        if self.cache.batch != 1 or self.cache.num_kv_heads != num_kv_heads or head_dim > AD:
            shape = self.cache.keys.shape
            raise ShapeError(f"The cache has shape {shape}; it must hold one sequence of {num_kv_heads} heads with at least {head_dim} channels.")
        _check_position(position, T, self.cache.capacity, self.rope)
        self.position = position
        self.geometry = Geometry(num_heads, num_kv_heads, AD, float(eps) * self.E / AE, 1 / math.sqrt(head_dim))
        self.weights = _attention_weights(weights, self.geometry, self.E, AE, head_dim)
        self.x, self.arithmetic = cleared("x", x, self.E), arithmetic

    def decode(self, residual: np.ndarray | None) -> np.ndarray:
        residual = self._residual(residual)
        return self._finish(self._steps().prepare_decode().decode(self.position, self.x, residual))

    def prefill(self, residual: np.ndarray | None) -> np.ndarray:
        residual = self._residual(residual)
        return self._finish(self._steps().prefill(self.position, self.x, residual))

    def _residual(self, residual: Array | None) -> np.ndarray | None:
        if residual is None:
            return None
        residual = floating_array("residual", residual)
        if residual.shape != self.x.shape:
            raise ShapeError(f"residual has shape {residual.shape}; it must be x's, {self.x.shape}.")
        return cleared("residual", residual, self.E)

    def _steps(self) -> Any:
        device, T = self.cache.device, len(self.x)
        table = None if self.rope is None else device.tensor(self.rope.table(self.position + T))
        block = AttentionBlock(device, self.weights, self.geometry, self.rope, self.arithmetic)
        return attention_steps(block, self.cache, table, self.x.shape[1], tokens=T)

    def _finish(self, y: np.ndarray) -> np.ndarray:
        y[:, self.E :] = 0
        return y


def _attention_weights(weights: Mapping[str, Any], g: Geometry, E: int, AE: int, D: int) -> dict[str, Any]:
    """As `AttentionBlock` takes them, for heads of AD channels in AE columns."""
    AD = g.head_dim
    found: dict[str, Any] = {"norm": padded_gamma("norm", weights["norm"], E, AE)}
    for name, heads in (("q", g.num_heads), ("k", g.num_kv_heads), ("v", g.num_kv_heads)):
        padding = np.tile(np.arange(AD) >= D, heads)
        weight = weights[f"w{name}"]
        if not isinstance(weight, QuantizedTensor) and np.ndim(weight) == 3:
            weight = np.reshape(weight, (-1, np.shape(weight)[-1]))
        found[f"w{name}"] = zero_rows(matrix(f"w{name}", weight, (heads * AD, AE)), padding)
        if weights[f"b{name}"] is not None:
            found[f"b{name}"] = np.where(padding, 0, vector(f"b{name}", weights[f"b{name}"], heads * AD))
    wo = weights["wo"]
    found["wo"] = matrix("wo", wo_from_slabs(wo) if not isinstance(wo, QuantizedTensor) and np.ndim(wo) == 3 else wo, (AE, g.num_heads * AD))
    if weights["bo"] is not None:
        found["bo"] = vector("bo", weights["bo"], AE)
    return found


def wo_from_slabs(wo: Array) -> np.ndarray:
    """(AE, H*AD) from slabs (H, AE, AD), one a head: the original's two layouts of the output projection."""
    wo = np.asarray(wo)
    if wo.ndim != 3:
        raise ShapeError(f"wo has shape {wo.shape}; slabs are (heads, AE, AD).")
    return np.ascontiguousarray(wo.transpose(1, 0, 2)).reshape(wo.shape[1], -1)


def slabs_from_wo(wo: Array, num_heads: int) -> np.ndarray:
    """Slabs (H, AE, AD) from (AE, H*AD)."""
    wo = np.asarray(wo)
    if wo.ndim != 2 or wo.shape[1] % num_heads:
        raise ShapeError(f"wo has shape {wo.shape}; its columns must divide among {num_heads} heads.")
    return np.ascontiguousarray(wo.reshape(wo.shape[0], num_heads, -1).transpose(1, 0, 2))


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
    rope = TableRope(*rope) if isinstance(rope, tuple) else rope
    if rope is None:
        raise ArgumentError("rope is None; give a Rope or tables (cos, sin), or use rmsnorm_qkv.")
    call = _Qkv(x, norm, w_qkv, b_qkv, num_heads, num_kv_heads, head_dim, eps, arithmetic, device)
    geometry = Geometry(num_heads, num_kv_heads, head_dim, call.eps)
    geometry.check(rope)
    T = len(call.x)
    _check_position(position, T, 2**32 - 1, rope)
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
        Geometry(num_heads, num_kv_heads, 4 * math.ceil(head_dim / 4), float(eps)).check(None)
        checked(arithmetic)
        self.x = floating_array("x", x)
        self.single, self.head_dim, self.eps = self.x.ndim == 1, head_dim, float(eps)
        self.x = self.x.reshape(1, -1) if self.single else self.x
        if self.x.ndim != 2 or 0 in self.x.shape:
            raise ShapeError(f"x has shape {np.shape(x)}; it must be (E,) or (T, E).")
        self.rows = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
        self.norm = vector("norm", norm, self.x.shape[1])
        self.w = matrix("w_qkv", w, (sum(self.rows), self.x.shape[1]))
        self.b = None if b is None else vector("b_qkv", b, sum(self.rows))
        self.device = device or default_device()

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
    E = _within("embed_dim", embed_dim, AE)
    eps = checked_eps(eps)
    wo = zero_rows(matrix("wo", wo_from_slabs(wo) if not isinstance(wo, QuantizedTensor) and np.ndim(wo) == 3 else wo, (AE, H * AD)), np.arange(AE) >= E)
    w1 = matrix("w1", w1, (None, AE))
    if w1.shape[0] % 2:
        raise ShapeError(f"w1 has {w1.shape[0]} rows; they must be those of gate and of up, as many.")
    AI = w1.shape[0] // 2
    beyond = np.arange(AI) >= _within("intermediate_dim", intermediate_dim, AI)
    gate, up = (zero_rows(QuantizedTensor(raw, (AI, AE), w1.kind), beyond) for raw in np.split(w1.raw, 2))
    weights = {"norm": padded_gamma("norm", norm, E, AE), "gate": gate, "up": up, "down": matrix("w2", w2, (AE, AI))}
    if b1 is not None:
        weights |= dict(zip(("b_gate", "b_up"), (np.where(beyond, 0, b) for b in np.split(vector("b1", b1, 2 * AI), 2)), strict=True))
    if b2 is not None:
        weights["b_down"] = vector("b2", b2, AE)
    bo = None if bo is None else np.where(np.arange(AE) < E, vector("bo", bo, AE), 0).astype(np.float32)
    rows = np.ascontiguousarray(attended.astype(np.float32).transpose(1, 0, 2)).reshape(T, -1)
    device = device or default_device()
    out = _outproj_mlp(device, rows, cleared("residual", residual, E), wo, bo, MlpBlock(device, weights, eps * E / AE, arithmetic), arithmetic)
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


# ---- sizes


def attention_scratch_size(
    tokens: int,
    embed_dim: int,
    num_heads: int,
    head_dim: int,
    *,
    num_kv_heads: int | None = None,
    capacity: int | None = None,
    kv_dtype: str = "f32",
    profile: DeviceProfile | None = None,
) -> int:
    """Bytes that `attention_prefill` of so many tokens allocates beside the weights, in aligned dimensions (AE, AD); 0 where one is not positive.

    Tokens are computed in chunks, so that it stops growing. num_kv_heads (default: num_heads) and capacity of the cache (default: tokens) decide
    whether keys are split, whose partial results count. A quantised cache (`kv_dtype`) takes a copy of the new keys and values.
    profile: of the device, default that of `default_device()`.
    """
    if min(tokens, embed_dim, num_heads, head_dim) <= 0:
        return 0
    profile = profile or default_device().profile
    chunk = attention_chunk(profile, embed_dim, num_heads * head_dim, tokens)
    geometry = Geometry(num_heads, num_kv_heads or num_heads, head_dim, 0.0)
    splits = ChosenAttention(profile, geometry, chunk, capacity or tokens).splits
    ends = dict.fromkeys(("x", "residual", "y"), (chunk, padded(embed_dim)))
    scratch = attention_buffers(embed_dim, num_heads, geometry.num_kv_heads, head_dim, chunk, kv_dtype=kv_dtype)
    return nbytes(ends | scratch) + partial_bytes(num_heads, head_dim, splits, chunk)


def attention_q8_0_scratch_size(
    tokens: int,
    embed_dim: int,
    num_heads: int,
    head_dim: int,
    *,
    num_kv_heads: int | None = None,
    capacity: int | None = None,
    profile: DeviceProfile | None = None,
) -> int:
    """`attention_scratch_size` of `attention_prefill_q8_0`: the same, as its int8 rows stay in registers."""
    return attention_scratch_size(tokens, embed_dim, num_heads, head_dim, num_kv_heads=num_kv_heads, capacity=capacity, profile=profile)


def outproj_mlp_scratch_size(tokens: int, embed_dim: int, num_heads: int, head_dim: int, intermediate_dim: int, *, profile: DeviceProfile | None = None) -> int:
    """Bytes that `outproj_mlp_prefill` of so many tokens allocates beside the weights, in aligned dimensions; 0 where one is not positive."""
    if min(tokens, embed_dim, num_heads, head_dim, intermediate_dim) <= 0:
        return 0
    profile = profile or default_device().profile
    chunk = min(tokens, chunk_tokens(profile, padded(max(embed_dim, num_heads * head_dim, intermediate_dim))))
    return nbytes(_outproj_mlp_buffers(chunk, embed_dim, num_heads * head_dim, intermediate_dim))


# ---- padding


def floating_array(name: str, array: Array) -> np.ndarray:
    """The array, or TypeError for a tensor or what is not floating."""
    if isinstance(array, Tensor):
        raise TypeError(f"{name} is a tensor; the functions of wgattn.block take arrays (FusedAttention and FusedMLP take tensors).")
    return floating(name, array)


def cleared(name: str, rows: np.ndarray, used: int) -> np.ndarray:
    """(T, columns) float32 with zeros from column `used` on."""
    rows = rows.astype(np.float32)
    rows[:, used:] = 0
    return rows


def padded_gamma(name: str, gamma: Array, used: int, columns: int) -> np.ndarray:
    """The norm's weights for rows of `columns` channels of which `used` are, the others zero.

    Kernels take the mean over all columns: the weights make up for that, and so does an eps of eps * used / columns.
    """
    gamma = np.asarray(gamma)
    gamma = vector(name, gamma, columns if gamma.shape == (columns,) else used)[:used]
    return np.pad(gamma if used == columns else gamma * np.float32(math.sqrt(used / columns)), (0, columns - used))


def zero_rows(weight: QuantizedTensor, rows: np.ndarray) -> QuantizedTensor:
    """The matrix with these rows zero (a mask); the same where there are none. Blocks of zero bytes are zeros in every format."""
    if not rows.any():
        return weight
    raw = weight.raw.copy()
    raw[rows] = 0
    return QuantizedTensor(raw, weight.shape, weight.kind)


def _within(name: str, number: int | None, limit: int) -> int:
    if number is None:
        return limit
    if int(number) != number or not 1 <= number <= limit:
        raise ArgumentError(f"{name} is {number}; it must be a whole number from 1 to {limit}, the length of the arrays.")
    return int(number)


def _check_position(position: int, tokens: int, capacity: int, rope: Rope | None) -> None:
    if int(position) != position or position < 0:
        raise ArgumentError(f"The position is {position}; it must be a whole number of at least 0.")
    if position + tokens > capacity:
        raise CapacityError(f"Positions {position} to {position + tokens - 1} do not fit: the cache has {capacity}.")
    if isinstance(rope, TableRope) and position + tokens > len(rope.rows):
        raise CapacityError(f"Positions {position} to {position + tokens - 1} do not fit: the tables of cos and sin have {len(rope.rows)}.")


def _cache(cache: Cache) -> KVCache:
    if isinstance(cache, KVCache):
        return cache
    if not isinstance(cache, tuple) or len(cache) != 2 or not all(isinstance(t, Tensor) for t in cache):
        raise TypeError("The cache must be a KVCache, or a pair of tensors (k, v): make them with device.tensor or device.empty.")
    if cache[0].device is not cache[1].device:
        raise ArgumentError("The keys and the values of the cache are on different devices.")
    return KVCache.of(*cache)
