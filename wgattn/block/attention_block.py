"""The attention half of a transformer block: norm, QKV, RoPE and KV append in one dispatch, attention, then output projection and residual."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from ..attention.kv_cache import KVCache
from ..attention.split import SplitAttention
from ..errors import Unsupported
from ..gpu import Device, Recording, Tensor
from .linear import Matrix, pad_vector, record_linear
from .quant import CHUNK, QuantizedTensor, stack_rows
from .rope import Rope


@dataclass(frozen=True)
class Geometry:
    """What all layers of a model share."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float

    @property
    def kernel_options(self) -> dict[str, int]:
        return {"HEADS": self.num_heads, "KV_HEADS": self.num_kv_heads, "HEAD_DIM": self.head_dim}


class AttentionBlock:
    """The weights of one layer's attention half, on the device, and the recording of its dispatches.

    Args:
        weights: norm (E,), wq (H*D, E), wk and wv (Hkv*D, E), wo (E, H*D), optional bq bk bv bo, optional q_norm and k_norm (D,) for QK-norm;
            matrices as QuantizedTensor, vectors float32.

    Raises:
        Unsupported: head_dim or the rotary dim is not a multiple of 4, or num_heads * head_dim not of 16.
    """

    def __init__(self, device: Device, weights: Mapping[str, Any], geometry: Geometry, rope: Rope):
        if geometry.head_dim % 4 or rope.dim % 4:
            raise Unsupported(f"Head dim {geometry.head_dim} and rotary dim {rope.dim} must be multiples of 4.")
        if geometry.num_heads * geometry.head_dim % CHUNK:
            raise Unsupported(f"num_heads * head_dim is {geometry.num_heads * geometry.head_dim}; it must be a multiple of {CHUNK}.")
        self.geometry, self.rope = geometry, rope
        self.gamma = device.tensor(pad_vector(weights["norm"]))
        orders = [rope.pair_order(geometry.num_heads, geometry.head_dim), rope.pair_order(geometry.num_kv_heads, geometry.head_dim), None]
        self.head_gamma = _head_gamma(device, weights, geometry, rope)
        unit = 4 if self.head_gamma is None else geometry.head_dim
        self.qkv = _stack_by_kind(device, [weights["wq"], weights["wk"], weights["wv"]], orders, unit)
        self.bias = _stack_bias(device, weights, orders)
        self.wo = Matrix(device, weights["wo"])
        self.bo = device.tensor(weights["bo"]) if weights.get("bo") is not None else None

    @property
    def nbytes(self) -> int:
        vectors = [t for t in (self.gamma, self.bias, self.bo, self.head_gamma) if t is not None]
        return sum(m.nbytes for m, _ in self.qkv) + self.wo.nbytes + sum(t.nbytes for t in vectors)

    def record(self, recording: Recording, attention: SplitAttention, cache: KVCache, state: Mapping[str, Any], tokens: int) -> None:
        """Append h += wo . attention(norm(h)) for up to `tokens` tokens, writing their rows of the cache.

        state: `step`, the residual stream `h` (tokens, padded E), scratch `query` and `attended` (tokens, padded H*D), the table `rope`.
        """
        g = self.geometry
        for matrix, first_row in self.qkv:
            record_linear(
                recording,
                matrix,
                step=state["step"],
                x=state["h"],
                output="qkv",
                outputs={"rope": state["rope"], "query": state["query"], "keys": cache.keys, "values": cache.values},
                parts=(cache.store_part,),
                options={**g.kernel_options, "ROTARY": self.rope.dim, "PAIR_DISTANCE": self.rope.pair_distance},
                tokens=tokens,
                first_row=first_row,
                gamma=self.gamma,
                eps=g.eps,
                bias=self.bias,
                head_gamma=self.head_gamma,
                label="norm, QKV, RoPE, KV append",
            )
        attention.record(recording, step=state["step"], query=state["query"], cache=cache, out=state["attended"])
        record_linear(
            recording,
            self.wo,
            step=state["step"],
            x=state["attended"],
            output="add",
            outputs={"y": state["h"]},
            tokens=tokens,
            y_stride=state["h"].shape[1],
            bias=self.bo,
            label="output projection, residual",
        )


def _head_gamma(device: Device, weights: Mapping[str, Any], geometry: Geometry, rope: Rope) -> Tensor | None:
    """The weights of QK-norm in the order of the projections' rows; ones where only one of the two has any."""
    given = [weights.get("q_norm"), weights.get("k_norm")]
    if all(g is None for g in given):
        return None
    order = rope.pair_order(1, geometry.head_dim)
    return device.tensor(np.stack([np.ones(geometry.head_dim) if g is None else np.asarray(g)[order] for g in given]), np.float32)


def _stack_by_kind(device: Device, matrices: list[QuantizedTensor], orders: list[np.ndarray | None], unit: int) -> list[tuple[Matrix, int]]:
    """(matrix, first row) for each run of matrices of one kind, so that a model of one kind needs one dispatch."""
    found, first = [], 0
    ordered = [m if o is None else stack_rows([m], o) for m, o in zip(matrices, orders, strict=True)]
    for _, run in groupby(ordered, key=lambda m: m.kind):
        stacked = stack_rows(list(run))
        found.append((Matrix(device, stacked, unit), first))
        first += stacked.shape[0]
    return found


def _stack_bias(device: Device, weights: Mapping[str, Any], orders: list[np.ndarray | None]) -> Tensor | None:
    names = (("bq", "wq"), ("bk", "wk"), ("bv", "wv"))
    if all(weights.get(b) is None for b, _ in names):
        return None
    parts = []
    for (b, w), order in zip(names, orders, strict=True):
        vector = np.zeros(weights[w].shape[0], np.float32) if weights.get(b) is None else np.asarray(weights[b], np.float32)
        parts.append(vector if order is None else vector[order])
    return device.tensor(np.concatenate(parts))
