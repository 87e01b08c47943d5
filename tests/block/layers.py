"""Layers for the tests of the block: random weights in every kind, their float64 reference, and comparison."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import wgattn
from tests.helpers import assert_close, assert_untouched, poison
from wgattn import QuantizedTensor, Rope, quantize, reference
from wgattn.block.quant import FORMATS
from wgattn.gpu import Device

KINDS = list(FORMATS)
QUANTISED = [kind for kind in KINDS if FORMATS[kind].quantised]
_SCALES = {"Q4_K": ((0, 1 / 400), (2, 1 / 800)), "Q5_K": ((0, 1 / 800), (2, 1 / 800)), "Q6_K": ((208, 1 / 2000),)}
"""Where the f16 scales of a block are that `quantize` cannot make, and about how large they are for weights around 1."""


def random_matrix(rng: np.random.Generator, rows: int, columns: int, kind: str = "F32") -> QuantizedTensor:
    """Weights of about 1 / sqrt(columns), in any kind."""
    size = columns**-0.5
    if kind not in _SCALES:
        return quantize((rng.standard_normal((rows, columns)) * size).astype(np.float32), kind)
    blocks = rng.integers(0, 256, (rows * columns // 256, FORMATS[kind].block_bytes), np.uint8)
    for at, scale in _SCALES[kind]:
        blocks[:, at : at + 2] = (rng.uniform(0.3, 1, len(blocks)) * scale * size).astype(np.float16).view(np.uint8).reshape(-1, 2)
    return QuantizedTensor(blocks, (rows, columns), kind)


@dataclass(frozen=True)
class Attention:
    """An attention half: its geometry, and the kinds of its matrices (one for all, or of q, k, v, o)."""

    E: int
    H: int
    KV: int
    D: int
    kinds: Any = "F32"
    bias: bool = False
    qk_norm: bool = False
    rope: Rope | None = field(default_factory=lambda: Rope(dim=16))
    eps: float = 1e-5

    @property
    def sizes(self) -> dict[str, int]:
        return {"num_heads": self.H, "num_kv_heads": self.KV, "head_dim": self.D}

    @property
    def reference_rope(self) -> dict[str, Any] | None:
        return None if self.rope is None else self.rope.reference

    def weights(self, rng: np.random.Generator) -> dict[str, Any]:
        E, q, kv = self.E, self.H * self.D, self.KV * self.D
        kinds = (self.kinds,) * 4 if isinstance(self.kinds, str) else self.kinds
        shapes = {"wq": (q, E), "wk": (kv, E), "wv": (kv, E), "wo": (E, q)}
        found: dict[str, Any] = {"norm": rng.uniform(0.5, 1.5, E).astype(np.float32)}
        found |= {name: random_matrix(rng, *shape, kind) for (name, shape), kind in zip(shapes.items(), kinds, strict=True)}
        if self.bias:
            lengths = {"bq": (q, 1), "bk": (kv, 4), "bv": (kv, 1), "bo": (E, 1)}  # that of K is large, as in Qwen2
            found |= {name: (size * rng.standard_normal(n)).astype(np.float32) for name, (n, size) in lengths.items()}
        if self.qk_norm:
            found |= {name: rng.uniform(0.5, 1.5, self.D).astype(np.float32) for name in ("q_norm", "k_norm")}
        return found

    def block(self, weights: dict[str, Any], **options: Any) -> wgattn.FusedAttention:
        """The block, with a cache full of NaN."""
        made = wgattn.FusedAttention(weights, **self.sizes, rope=self.rope, eps=self.eps, **{"capacity": 40, **options})
        for store in (made.cache.store.keys, made.cache.store.values):
            store.write(poison(store.shape, store.dtype))
        return made

    def expected(self, weights: dict[str, Any], x: np.ndarray, **options: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(out, keys, values) in float64."""
        return reference.attention_block(x, dequantised(weights), **self.sizes, eps=self.eps, rope=self.reference_rope, **options)


def dequantised(weights: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: w.dequantize() if isinstance(w, QuantizedTensor) else w for name, w in weights.items()}


SMALL = Attention(48, 4, 2, 16)
"""The geometry of the tests that need no other: its kernels are compiled once."""


def rows(rng: np.random.Generator, tokens: int, width: int) -> np.ndarray:
    return rng.standard_normal((tokens, width)).astype(np.float32)


def check_layer(rng: np.random.Generator, layer: Attention, *, tokens: int = 6, max_error: float = 2e-5, device: Device | None = None, **options: Any) -> None:
    """Prefill and decode with a residual against the reference: outputs, the cache's rows, and no other row of it."""
    weights, x, residual = layer.weights(rng), rows(rng, tokens, layer.E), rows(rng, tokens, layer.E)
    block = layer.block(weights, device=device, **options)
    expected, keys, values = layer.expected(weights, x)
    got = [block.prefill(x[:-2], residual[:-2]), block.decode(x[-2:-1], residual[-2:-1]), block.decode(x[-1:])]
    residual[-1] = 0
    case = {"layer": layer, **options}
    assert_close(np.concatenate(got), expected + residual, max_error=max_error, **case)
    assert block.length == tokens
    assert_close(block.cache.k(), keys, max_error=max_error, what="keys", **case)
    assert_close(block.cache.v(), values, max_error=max_error, what="values", **case)
    for store in (block.cache.store.keys, block.cache.store.values):
        assert_untouched(store.numpy()[:, :, tokens:], what="cache rows beyond the length", **case)


def rotary(layer: Attention, **options: Any) -> Attention:
    """The layer with another rope."""
    return replace(layer, rope=Rope(**options))
