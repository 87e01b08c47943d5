"""The fused block as plain functions over arrays, one for each of the original header's, with its padded layouts: the attention half, here.

Names of dimensions: E channels in AE columns, H query heads over KV heads of D channels in AD columns, I hidden channels in AI columns, C positions
of a cache, T tokens. AE, AD and AI are what the arrays have; E, D and I may be smaller. Padding of activations and of a cache may hold any finite
number; padding of weights is taken as zero where rows are padding, and must be zero or any finite number where columns are. Outputs have zero padding.

Each call uploads its weights and records its work. For step after step over the same weights use `FusedAttention` and `FusedMLP`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from inspect import signature
from typing import Any

import numpy as np

from ..attention.arguments import checked_eps, whole
from ..errors import ArgumentError, CapacityError, ShapeError, Unsupported
from ..gpu import DeviceProfile, profile_or_default
from .arithmetic import checked
from .attention_block import AttentionBlock, ChosenAttention, Geometry
from .fused import attention_chunk, attention_steps
from .header_arguments import Cache, RopeLike, attention_weights, cache_of, checked_position, cleared, floating_array, rope_of, sizes_of, within
from .linear import padded
from .memory import attention_buffers, nbytes, partial_bytes
from .quant import QuantizedTensor

Array = Any


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
    given = signature(attention_decode).bind(*args, **kwargs).arguments
    store = cache_of(given["cache"])
    for name, workspace, heads in (("q_output_workspace", q_output_workspace, "num_heads"), ("kv_workspace", kv_workspace, "num_kv_heads")):
        need = 2 * 4 * whole(heads, given[heads]) * store.aligned_dim
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
    stride, columns = cache_of(cache).aligned_dim, wo.shape[0]
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
        (T, AE), self.cache = x.shape, cache_of(cache)
        self.E = within("embed_dim", embed_dim, AE)
        self.rope = rope_of(rope)
        num_heads, num_kv_heads, head_dim = whole("num_heads", num_heads), whole("num_kv_heads", num_kv_heads), whole("head_dim", head_dim)
        eps = checked_eps(eps)
        Geometry(num_heads, num_kv_heads, head_dim if self.rope else 4 * math.ceil(head_dim / 4), eps).check(self.rope)
        AD = self.cache.aligned_dim
        if self.cache.batch != 1 or self.cache.num_kv_heads != num_kv_heads or head_dim > AD:
            shape = self.cache.keys.shape
            raise ShapeError(f"The cache has shape {shape}; it must hold one sequence of {num_kv_heads} heads with at least {head_dim} channels.")
        self.position = checked_position(position, T, self.cache.capacity, self.rope)
        self.geometry = Geometry(num_heads, num_kv_heads, AD, eps * self.E / AE, 1 / math.sqrt(head_dim))
        self.weights = attention_weights(weights, self.geometry, self.E, AE, head_dim)
        self.x, self.arithmetic = cleared(x, self.E), arithmetic

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
        return cleared(residual, self.E)

    def _steps(self) -> Any:
        device, T = self.cache.device, len(self.x)
        table = None if self.rope is None else device.tensor(self.rope.table(self.position + T))
        block = AttentionBlock(device, self.weights, self.geometry, self.rope, self.arithmetic)
        return attention_steps(block, self.cache, table, self.x.shape[1], tokens=T)

    def _finish(self, y: np.ndarray) -> np.ndarray:
        y[:, self.E :] = 0
        return y


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

    Raises ArgumentError, ShapeError, TypeError for what are no such numbers, CapacityError where not even one token fits the device.
    """
    sizes = sizes_of(tokens=tokens, embed_dim=embed_dim, num_heads=num_heads, head_dim=head_dim)
    if sizes is None:
        return 0
    (tokens, embed_dim, num_heads, head_dim), profile = sizes, profile_or_default(profile)
    num_kv_heads = num_heads if num_kv_heads is None else whole("num_kv_heads", num_kv_heads)
    capacity = tokens if capacity is None else whole("capacity", capacity)
    if num_heads % num_kv_heads:
        raise ShapeError(f"{num_heads} query heads cannot share {num_kv_heads} KV heads: it does not divide.")
    chunk = attention_chunk(profile, embed_dim, num_heads * head_dim, tokens)
    geometry = Geometry(num_heads, num_kv_heads, head_dim, 0.0)
    splits = ChosenAttention(profile, geometry, chunk, capacity).splits
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
