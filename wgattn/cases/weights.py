"""Random weights of every kind, made without code that quantises: matrices, and a model of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..block.quant import FORMATS, QuantizedTensor, format_of
from ..llm.gguf import FileTensor, ModelFile

_SCALES: Mapping[str, tuple[tuple[int, float], ...]] = {
    "Q8_0": ((0, 1 / 74),),
    "Q4_0": ((0, 1 / 4.6),),
    "Q4_1": ((0, 1 / 4.6), (2, -7.5 / 4.6)),
    "Q5_0": ((0, 1 / 9.2),),
    "Q5_1": ((0, 1 / 9.2), (2, -15.5 / 9.2)),
    "Q4_K": ((0, 1 / 270), (2, 7.5 / 270)),
    "Q5_K": ((0, 1 / 540), (2, 15.5 / 540)),
    "Q6_K": ((208, 1 / 1370),),
}
"""Where the f16 numbers of a block are, and their size for weights around 1, of mean 0, where all other bytes are random."""


def random_matrix(rng: np.random.Generator, rows: int, columns: int, kind: str) -> QuantizedTensor:
    """Weights of about 1 / sqrt(columns)."""
    size, form = columns**-0.5, format_of(kind)
    if not form.quantised:
        values = (rng.standard_normal((rows, columns), np.float32) * size).astype(np.float16 if kind == "F16" else np.float32)
        return QuantizedTensor((values.view(np.uint32) >> 16).astype(np.uint16) if kind == "BF16" else values, (rows, columns), kind)
    blocks = rng.integers(0, 256, (rows * columns // form.block, form.block_bytes), np.uint8)
    for at, scale in _SCALES[kind]:
        blocks[:, at : at + 2] = (rng.uniform(0.5, 1, len(blocks)) * scale * size).astype(np.float16).view(np.uint8).reshape(-1, 2)
    return QuantizedTensor(blocks, (rows, columns), kind)


def random_vector(rng: np.random.Generator, n: int) -> np.ndarray:
    """Weights of a norm."""
    return rng.uniform(0.5, 1.5, n).astype(np.float32)


def width_of(kind: str) -> int:
    """Columns that a small matrix of that kind can have."""
    return max(96, FORMATS[kind].block)


class RandomModel(ModelFile):
    """A model of random weights that was never in a file.

    Args:
        sizes: metadata by GGUF's names without the architecture, of them at least block_count, embedding_length, feed_forward_length,
            attention.head_count and attention.head_count_kv.
        kind: of all matrices; F32 where columns are not whole blocks.
        tied: the output matrix is the embedding.
    """

    def __init__(
        self, rng: np.random.Generator, sizes: Mapping[str, int], kind: str, *, vocab: int, arch: str = "llama", tied: bool = True, name: str = "random weights"
    ):
        self.path, self.architecture, self.tensors = Path(name), arch, {}
        self.metadata = {f"{arch}.{key}": number for key, number in (sizes | {"attention.layer_norm_rms_epsilon": 1e-5}).items()}
        E, H, Hkv, hidden = (sizes[n] for n in ("embedding_length", "attention.head_count", "attention.head_count_kv", "feed_forward_length"))
        D = sizes.get("attention.key_length", E // H)
        shapes = {"attn_q": (H * D, E), "attn_k": (Hkv * D, E), "attn_v": (Hkv * D, E), "attn_output": (E, H * D)}
        shapes |= {"ffn_gate": (hidden, E), "ffn_up": (hidden, E), "ffn_down": (E, hidden)}
        norms = {"attn_norm": E, "ffn_norm": E, **({"attn_q_norm": D, "attn_k_norm": D} if arch == "qwen3" else {})}
        for outer in ("token_embd",) if tied else ("token_embd", "output"):
            self._add(f"{outer}.weight", random_matrix(rng, vocab, E, kind))
        self._add("output_norm.weight", random_vector(rng, E))
        for i in range(sizes["block_count"]):
            for matrix, shape in shapes.items():
                self._add(f"blk.{i}.{matrix}.weight", random_matrix(rng, *shape, "F32" if shape[1] % FORMATS[kind].block else kind))
            for norm, n in norms.items():
                self._add(f"blk.{i}.{norm}.weight", random_vector(rng, n))
            for biased in ("attn_q", "attn_k", "attn_v") if arch == "qwen2" else ():
                self._add(f"blk.{i}.{biased}.bias", rng.standard_normal(shapes[biased][0], np.float32))

    def _add(self, name: str, weight: QuantizedTensor | np.ndarray) -> None:
        kind, data = (weight.kind, weight.raw) if isinstance(weight, QuantizedTensor) else ("F32", weight)
        self.tensors[name] = FileTensor(name, weight.shape, kind, data.reshape(-1).view(np.uint8))
