"""The attention half of a transformer block: norm, QKV, RoPE and KV append in one dispatch, attention, then output projection and residual."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from ..attention.arguments import checked_eps, whole
from ..attention.choose import choose
from ..attention.kv_cache import KVCache
from ..attention.paths import PATHS
from ..attention.problem import Operands, Problem, Rows
from ..attention.split import Onward, SplitShape
from ..attention.split import record as record_split
from ..errors import ArgumentError, ShapeError, Unsupported
from ..gpu import DeviceProfile, Recording, Store, Tensor
from .arithmetic import resolve
from .linear import Matrix, pad_vector, record_linear
from .quant import QuantizedTensor, stack_rows
from .rope import Rope
from .slices import SliceShape, choose_slice, onward
from .vector import digits_of


@dataclass(frozen=True)
class Geometry:
    """What all layers of a model share. Scores are scaled by 1 / sqrt(head_dim), or by `scale`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    scale: float | None = None

    @property
    def kernel_options(self) -> dict[str, int]:
        return {"HEADS": self.num_heads, "KV_HEADS": self.num_kv_heads, "HEAD_DIM": self.head_dim}

    def check(self, rope: Rope | None) -> None:
        """Raises ArgumentError, ShapeError for numbers that cannot be, Unsupported for those that our kernels do not take."""
        if rope is not None and not isinstance(rope, Rope):
            raise TypeError(f"rope is a {type(rope).__name__}; it must be a Rope, or None for no rotation.")
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            whole(name, getattr(self, name))
        checked_eps(self.eps)
        if self.num_heads % self.num_kv_heads:
            raise ShapeError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads: it does not divide.")
        rotary = 0 if rope is None else rope.dim
        if rotary and self.head_dim % 2:
            raise ArgumentError(f"RoPE rotates pairs of channels: head_dim must be even, not {self.head_dim}.")
        if rotary > self.head_dim:
            raise ShapeError(f"RoPE rotates {rotary} channels; heads have {self.head_dim}.")
        if self.head_dim % 4 or rotary % 4:
            raise Unsupported(f"Head dim {self.head_dim} and rotary dim {rotary} must be multiples of 4.")


_NO_SCORES = ("flash", "split", "flash_matrix")
"""Paths of attention whose one dispatch reads a query before it writes its output."""


class ChosenAttention:
    """Causal attention of a recorded step of up to `tokens` queries over up to `length` keys, by whichever path suits the device.

    Where `query` and `out` of a recording are one tensor, outputs replace the queries. With arithmetic "half" or "auto", queries and probabilities
    may be rounded to f16, for matrix units.
    """

    def __init__(self, profile: DeviceProfile, geometry: Geometry, tokens: int, length: int, arithmetic: str = "exact"):
        g, self._profile = geometry, profile
        scale = 1 / math.sqrt(g.head_dim) if g.scale is None else g.scale
        half = arithmetic in ("half", "auto")
        self.problem = Problem(1, g.num_heads, g.num_kv_heads, tokens, length, g.head_dim, g.head_dim, scale, right=0, lengths="step", half=half)

    @property
    def path(self) -> str:
        """The path for the device, among those that keep no scores in memory where one of them can run."""
        best = choose(self._profile, self.problem).path
        return next((p for p in (best, "flash", "split") if p in _NO_SCORES and PATHS[p].unsupported(self._profile, self.problem) is None), best)

    @property
    def splits(self) -> int:
        """Parts that the keys are divided into, whose partial results take memory; 1: none."""
        return self._splits(self.problem)

    def _splits(self, problem: Problem) -> int:
        return getattr(PATHS[self.path].shape(self._profile, problem), "splits", 1)

    def of(self, cache: KVCache) -> Problem:
        """The problem over a cache."""
        return replace(self.problem, kv_dtype=cache.dtype, keys=min(self.problem.keys, cache.capacity))

    def unsplit(self, cache: KVCache) -> SplitShape | None:
        """The shape over a cache where one workgroup of path "split" sees all that a head's query sees, and can go on with its output."""
        shape = PATHS[self.path].shape(self._profile, self.of(cache)) if self.path == "split" else None
        return shape if shape and shape.splits == 1 else None

    def record(self, recording: Recording, *, step: Any, query: Tensor, cache: KVCache, out: Tensor, onward: Onward | None = None) -> None:
        """Append the dispatches: token t of the step sees keys 0 .. position + t. query and out: (tokens, at least H * D) float32.

        onward: what follows where `unsplit` has a shape; `out` is then left as it is.
        """
        p = self.of(cache)
        in_place = query is out and self.path in _NO_SCORES and self._splits(p) == 1 and not onward  # else other dispatches read and write them
        p = replace(p, in_place=in_place)
        rows = Rows(query, 0, p.head_dim, query.shape[1])
        operands = Operands(rows, cache.rows(cache.keys), cache.rows(cache.values), Rows(out, 0, p.head_dim, out.shape[1]), step=step)
        if onward:
            record_split(recording, p, operands, self.unsplit(cache), {}, onward)
        else:
            PATHS[self.path].record(recording, p, operands)


class QkvProjection:
    """Norm, QKV projections, RoPE and KV append: the weights on the device, and the recording of the dispatch (one for each run of a kind).

    Args and errors as `AttentionBlock`.
    """

    def __init__(self, device: Store, weights: Mapping[str, Any], geometry: Geometry, rope: Rope | None, arithmetic: str = "exact"):
        geometry.check(rope)
        self.geometry, self.rope, self.arithmetic = geometry, rope, arithmetic
        self.gamma = device.tensor(pad_vector(weights["norm"]))
        orders = [pair_order(rope, geometry.num_heads, geometry.head_dim), pair_order(rope, geometry.num_kv_heads, geometry.head_dim), None]
        self.head_gamma = head_gamma(device, weights, geometry, rope)
        self.matrices = _stack_by_kind(device, [weights["wq"], weights["wk"], weights["wv"]], orders, geometry.head_dim)
        self.bias = _stack_bias(device, weights, orders)

    @property
    def nbytes(self) -> int:
        return sum(m.nbytes for m, _ in self.matrices) + sum(t.nbytes for t in (self.gamma, self.bias, self.head_gamma) if t is not None)

    def record(self, recording: Recording, cache: KVCache, state: Mapping[str, Any], tokens: int) -> None:
        """Append the dispatches: `query` of the state and the tokens' rows of the cache. State as for `AttentionBlock`.

        32 channels of a quantised cache share a scale. For one token a workgroup computes a whole head and quantises it; for more, tiles are better
        for the projection, and one more dispatch appends the rows that it leaves.
        """
        g = self.geometry
        quantised = cache.format.quantised
        later = quantised and tokens > 1
        keys, values = (state["new_keys"], state["new_values"]) if later else (cache.keys, cache.values)
        for matrix, first_row in self.matrices:
            record_linear(
                recording,
                matrix,
                step=state["step"],
                x=state.get("stream", state["h"]),
                output="qkv",
                outputs={"rope": state["rope"], "query": state["query"], "keys": keys, "values": values},
                parts=("cache_store_rows",) if later else cache.format.cache_parts,
                group_rows=g.head_dim if quantised and not later else 0,
                options={**g.kernel_options, **rope_options(self.rope)},
                tokens=tokens,
                y_stride=state["query"].shape[1],
                first_row=first_row,
                gamma=self.gamma,
                eps=g.eps,
                bias=self.bias,
                head_gamma=self.head_gamma,
                arithmetic=resolve(recording.device, matrix, tokens, self.arithmetic),
                label="norm, QKV, RoPE" if later else "norm, QKV, RoPE, KV append",
            )
        if later:
            cache.record_append(recording, step=state["step"], keys=keys, values=values, rows=tokens, dtype="f32")


class AttentionBlock:
    """The weights of one layer's attention half, on the device, and the recording of its dispatches.

    Args:
        device: what makes the tensors, a device or an arena.
        weights: norm (E,), wq (H*D, E), wk and wv (Hkv*D, E), wo (E, H*D), optional bq bk bv bo, optional q_norm and k_norm (D,) for QK-norm;
            matrices as QuantizedTensor, vectors float32.
        rope: None: no rotation.
        arithmetic: "exact", "int8" or "auto", or a pair: of the QKV projections, and of the output projection.

    Raises:
        ArgumentError, ShapeError, Unsupported: as `Geometry.check`.
    """

    def __init__(self, device: Store, weights: Mapping[str, Any], geometry: Geometry, rope: Rope | None, arithmetic: str | tuple[str, str] = "exact"):
        of_qkv, self.arithmetic = (arithmetic, arithmetic) if isinstance(arithmetic, str) else arithmetic
        self.geometry = geometry
        self.qkv = QkvProjection(device, weights, geometry, rope, of_qkv)
        self.wo = Matrix(device, weights["wo"])
        self.bo = device.tensor(weights["bo"]) if weights.get("bo") is not None else None

    @property
    def nbytes(self) -> int:
        return self.qkv.nbytes + self.wo.nbytes + (0 if self.bo is None else self.bo.nbytes)

    def record(self, recording: Recording, attention: ChosenAttention, cache: KVCache, state: Mapping[str, Any], tokens: int) -> None:
        """Append h += wo . attention(norm(h)) for up to `tokens` tokens, writing their rows of the cache.

        state: `step`, the residual stream `h` (tokens, padded E), scratch `query` and `attended` (tokens, padded H*D), which may be one tensor
        for a `ChosenAttention`, the table `rope`. With `y` (tokens, any stride) in it: y = residual + wo . attention(norm(h)); `residual` has
        the same stride, and may be y. With `stream`, the `Stream` of a decode step, that is read and left instead of h.
        """
        self.qkv.record(recording, cache, state, tokens)
        arithmetic = resolve(recording.device, self.wo, tokens, self.arithmetic)
        stream, given = state.get("stream"), {"step": state["step"], "query": state["query"], "cache": cache, "out": state["attended"]}
        if stream and (shape := self._slice(recording.device.profile, attention, cache, arithmetic)):
            end = onward(recording, self.wo, self.bo, shape, "attention, output projection")
            attention.record(recording, **given, onward=end)
            stream.leave(end, shape.slices)
            return
        attention.record(recording, **given)
        record_linear(
            recording,
            self.wo,
            step=state["step"],
            x=state["attended"],
            tokens=tokens,
            bias=self.bo,
            label="output projection, residual",
            arithmetic=arithmetic,
            **residual_output(state),
        )

    def _slice(self, profile: DeviceProfile, attention: ChosenAttention, cache: KVCache, arithmetic: str) -> SliceShape | None:
        """How the dispatch of attention goes on with the output projection; None where that has one of its own."""
        shape, D = attention.unsplit(cache), self.geometry.head_dim
        if shape is None or len(self.wo.pieces) > 1:
            return None
        memory = shape.merge_bytes(D // 4, shape.heads_at_once(D // 4, profile.workgroup_memory))
        form, wo = self.wo.format, self.wo
        return choose_slice(profile, wo.rows, wo.columns, shape.group * D, form, digits_of(form, arithmetic), shape.workgroup, memory)


def residual_output(state: Mapping[str, Any]) -> dict[str, Any]:
    """How a projection ends: added to the residual stream in place, or y = residual + result; as keywords of `record_linear`."""
    if "stream" in state:
        state = {"h": state["stream"].tensor}
    y = state.get("y", state["h"])
    if y is state["h"] or y is state["residual"]:
        return {"output": "add", "outputs": {"y": y}, "y_stride": y.shape[1]}
    return {"output": "residual", "outputs": {"y": y, "residual": state["residual"]}, "y_stride": y.shape[1]}


def rope_options(rope: Rope | None) -> dict[str, int]:
    """The constants of `output_qkv`; a rotary dim of 0 rotates nothing."""
    return {"ROTARY": 0, "PAIR_DISTANCE": 1} if rope is None else {"ROTARY": rope.dim, "PAIR_DISTANCE": rope.pair_distance}


def pair_order(rope: Rope | None, heads: int, head_dim: int) -> np.ndarray | None:
    """`Rope.pair_order`, or None for the order that there is."""
    return None if rope is None else rope.pair_order(heads, head_dim)


def head_gamma(device: Store, weights: Mapping[str, Any], geometry: Geometry, rope: Rope | None) -> Tensor | None:
    """The weights of QK-norm in the order of the projections' rows; ones where only one of the two has any."""
    given = [weights.get("q_norm"), weights.get("k_norm")]
    if all(g is None for g in given):
        return None
    order = np.arange(geometry.head_dim) if rope is None else rope.pair_order(1, geometry.head_dim)
    return device.tensor(np.stack([np.ones(geometry.head_dim) if g is None else np.asarray(g)[order] for g in given]), np.float32)


def _stack_by_kind(device: Store, matrices: list[QuantizedTensor], orders: list[np.ndarray | None], unit: int) -> list[tuple[Matrix, int]]:
    """(matrix, first row) for each run of matrices of one kind, so that a model of one kind needs one dispatch."""
    found, first = [], 0
    ordered = [m if o is None else stack_rows([m], o) for m, o in zip(matrices, orders, strict=True)]
    for _, run in groupby(ordered, key=lambda m: m.kind):
        stacked = stack_rows(list(run))
        found.append((Matrix(device, stacked, unit), first))
        first += stacked.shape[0]
    return found


def _stack_bias(device: Store, weights: Mapping[str, Any], orders: list[np.ndarray | None]) -> Tensor | None:
    names = (("bq", "wq"), ("bk", "wk"), ("bv", "wv"))
    if all(weights.get(b) is None for b, _ in names):
        return None
    parts = []
    for (b, w), order in zip(names, orders, strict=True):
        vector = np.zeros(weights[w].shape[0], np.float32) if weights.get(b) is None else np.asarray(weights[b], np.float32)
        parts.append(vector if order is None else vector[order])
    return device.tensor(np.concatenate(parts))
