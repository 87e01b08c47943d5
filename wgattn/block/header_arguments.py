"""What the functions of `wgattn.block` are given, checked, and in the terms of the classes behind them: padding, slabs, tables, pairs of tensors."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..attention.arguments import MOST, floating, whole
from ..attention.kv_cache import KVCache
from ..errors import ArgumentError, CapacityError, ShapeError
from ..gpu import Tensor
from .attention_block import Geometry
from .quant import QuantizedTensor
from .rope import Rope
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


def rope_of(rope: RopeLike) -> Rope | None:
    """The rotation, made of tables where it is a pair of them."""
    if rope is None or isinstance(rope, Rope):
        return rope
    if not isinstance(rope, tuple) or len(rope) != 2:
        raise TypeError(f"rope is {rope!r}; it must be a Rope, a pair of tables (cos, sin), or None.")
    return TableRope(*rope)


# ---- weights


def attention_weights(weights: Mapping[str, Any], g: Geometry, E: int, AE: int, D: int) -> dict[str, Any]:
    """As `AttentionBlock` takes them, for heads of AD channels in AE columns."""
    AD = g.head_dim
    found: dict[str, Any] = {"norm": padded_gamma(weights["norm"], E, AE)}
    for name, heads in (("q", g.num_heads), ("k", g.num_kv_heads), ("v", g.num_kv_heads)):
        weight = weights[f"w{name}"]
        if not isinstance(weight, QuantizedTensor) and np.ndim(weight) == 3:
            weight = np.reshape(weight, (-1, np.shape(weight)[-1]))
        weight = matrix(f"w{name}", weight, (heads * AD, AE))
        padding = np.tile(np.arange(AD) >= D, heads)
        found[f"w{name}"] = zero_rows(weight, padding)
        if weights[f"b{name}"] is not None:
            found[f"b{name}"] = np.where(padding, 0, vector(f"b{name}", weights[f"b{name}"], heads * AD))
    found["wo"] = output_matrix(weights["wo"], AE, g.num_heads * AD)
    if weights["bo"] is not None:
        found["bo"] = vector("bo", weights["bo"], AE)
    return found


def output_matrix(wo: Any, rows: int, columns: int) -> QuantizedTensor:
    """The output projection of that shape, also from slabs."""
    return matrix("wo", wo if isinstance(wo, QuantizedTensor) or np.ndim(wo) != 3 else wo_from_slabs(wo), (rows, columns))


def wo_from_slabs(wo: Array) -> np.ndarray:
    """(AE, H*AD) from slabs (H, AE, AD), one a head: the original's two layouts of the output projection."""
    wo = np.asarray(wo)
    if wo.ndim != 3:
        raise ShapeError(f"wo has shape {wo.shape}; slabs are (heads, AE, AD).")
    return np.ascontiguousarray(wo.transpose(1, 0, 2)).reshape(wo.shape[1], -1)


def slabs_from_wo(wo: Array, num_heads: int) -> np.ndarray:
    """Slabs (H, AE, AD) from (AE, H*AD)."""
    wo = np.asarray(wo)
    if wo.ndim != 2 or wo.shape[1] % whole("num_heads", num_heads):
        raise ShapeError(f"wo has shape {wo.shape}; its columns must divide among {num_heads} heads.")
    return np.ascontiguousarray(wo.reshape(wo.shape[0], num_heads, -1).transpose(1, 0, 2))


# ---- padding


def floating_array(name: str, array: Array) -> np.ndarray:
    """The array, or TypeError for a tensor or what is not floating."""
    if isinstance(array, Tensor):
        raise TypeError(f"{name} is a tensor; the functions of wgattn.block take arrays (FusedAttention and FusedMLP take tensors).")
    return floating(name, array)


def cleared(rows: np.ndarray, used: int) -> np.ndarray:
    """(T, columns) float32 with zeros from column `used` on."""
    rows = rows.astype(np.float32)
    rows[:, used:] = 0
    return rows


def padded_gamma(gamma: Array, used: int, columns: int) -> np.ndarray:
    """The norm's weights for rows of `columns` channels of which `used` are, the others zero.

    Kernels take the mean over all columns: the weights make up for that, and so does an eps of eps * used / columns.
    """
    gamma = np.asarray(gamma)
    gamma = vector("norm", gamma, columns if gamma.shape == (columns,) else used)[:used]
    return np.pad(gamma if used == columns else gamma * np.float32(math.sqrt(used / columns)), (0, columns - used))


def zero_rows(weight: QuantizedTensor, rows: np.ndarray) -> QuantizedTensor:
    """The matrix with these rows zero (a mask); the same where there are none. Blocks of zero bytes are zeros in every format."""
    if not rows.any():
        return weight
    raw = weight.raw.copy()
    raw[rows] = 0
    return QuantizedTensor(raw, weight.shape, weight.kind)


# ---- sizes, positions, caches


def within(name: str, number: int | None, limit: int) -> int:
    """How much of an axis of `limit` is used, None being all of it; ArgumentError for what is not within it."""
    if number is None:
        return limit
    try:
        return whole(name, number, 1, limit)
    except ArgumentError:
        raise ArgumentError(f"{name} is {number}; it must be a whole number from 1 to {limit}, the length of the arrays.") from None


def sizes_of(**sizes: int) -> list[int] | None:
    """The sizes as integers, None where one is not positive; ArgumentError, TypeError for what are none."""
    found = [whole(name, size, -MOST) for name, size in sizes.items()]
    return None if min(found) <= 0 else found


def checked_position(position: int, tokens: int, capacity: int, rope: Rope | None) -> int:
    """The position; ArgumentError for what is no position, CapacityError where so many tokens from it on do not fit the cache, or a table of RoPE."""
    position = whole("The position", position, 0, sys.maxsize)
    if position + tokens > capacity:
        raise CapacityError(f"Positions {position} to {position + tokens - 1} do not fit: the cache has {capacity}.")
    if isinstance(rope, TableRope) and position + tokens > len(rope.rows):
        raise CapacityError(f"Positions {position} to {position + tokens - 1} do not fit: the tables of cos and sin have {len(rope.rows)}.")
    return position


def cache_of(cache: Cache) -> KVCache:
    """The cache, made of a pair of tensors where it is one; TypeError, ArgumentError, ShapeError for anything else."""
    if isinstance(cache, KVCache):
        return cache
    if not isinstance(cache, tuple) or len(cache) != 2 or not all(isinstance(t, Tensor) for t in cache):
        raise TypeError("The cache must be a KVCache, or a pair of tensors (k, v): make them with device.tensor or device.empty.")
    if cache[0].device is not cache[1].device:
        raise ArgumentError("The keys and the values of the cache are on different devices.")
    return KVCache.of(*cache)
