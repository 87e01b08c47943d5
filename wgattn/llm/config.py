"""The shape of a Llama-family model, out of its GGUF metadata; all of it is checked, since files come from strangers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..errors import FormatError, Unsupported
from .gguf import ModelFile

ARCHITECTURES = {"llama": True, "qwen2": False, "qwen3": False}
"""By GGUF name; whether RoPE pairs neighbouring channels (Llama's converter reorders rows for that)."""
_AGAIN = "download the file again"
_LARGEST = 1 << 24
_LARGEST_FACTOR = {"attn_factor": 100.0}
"""It multiplies queries and keys: about 1 in models that there are, and far more overflows."""


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a model, as its GGUF metadata gives it."""

    layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_dim: int
    vocab_size: int
    context_length: int
    eps: float
    rope_base: float
    rope_dim: int
    rope_interleaved: bool
    rope_scaling: dict | None

    @classmethod
    def from_file(cls, file: ModelFile) -> LlamaConfig:
        """Raises Unsupported for another architecture or a variant we cannot run, FormatError for numbers that cannot be."""
        arch = file.architecture
        if arch not in ARCHITECTURES:
            raise Unsupported(f"{file.path} holds a model of architecture {arch!r}; supported: {', '.join(ARCHITECTURES)}.")
        if file.get(f"{arch}.expert_count", 0):
            raise Unsupported(f"{file.path} is a mixture of experts ({arch}.expert_count), which is not supported.")
        numbers = _Numbers(file, arch)
        embed, heads = numbers.whole("embedding_length"), numbers.whole("attention.head_count")
        if heads > embed and file.get(f"{arch}.attention.key_length") is None:
            raise numbers.wrong("attention.head_count", heads, f"more than its {embed} channels ({arch}.embedding_length)")
        head_dim = numbers.whole("attention.key_length", embed // heads)
        kv_heads = numbers.whole("attention.head_count_kv", heads)
        if heads % kv_heads:
            raise numbers.wrong("attention.head_count_kv", kv_heads, f"which does not divide the {heads} heads")
        if numbers.whole("attention.value_length", head_dim) != head_dim:
            raise Unsupported(f"{file.path} has values of another length ({arch}.attention.value_length) than its keys, which is not supported.")
        rope_dim = numbers.whole("rope.dimension_count", head_dim)
        if rope_dim > head_dim or rope_dim % 2:
            raise numbers.wrong("rope.dimension_count", rope_dim, f"and an even number up to the {head_dim} channels of a head belongs there")
        return cls(
            layers=numbers.whole("block_count"),
            embed_dim=embed,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            hidden_dim=numbers.whole("feed_forward_length"),
            vocab_size=_vocabulary(file),
            context_length=numbers.whole("context_length", 2048),
            eps=numbers.real("attention.layer_norm_rms_epsilon", zero=True),
            rope_base=numbers.real("rope.freq_base", 10000.0),
            rope_dim=rope_dim,
            rope_interleaved=ARCHITECTURES[arch],
            rope_scaling=_rope_scaling(file, numbers),
        )


class _Numbers:
    """The numbers under an architecture's keys."""

    def __init__(self, file: ModelFile, arch: str):
        self._file, self._arch = file, arch

    def wrong(self, key: str, value: Any, why: str) -> FormatError:
        return FormatError(f"{self._file.path} says {self._arch}.{key} is {value}, {why}; {_AGAIN}.")

    def whole(self, key: str, default: int | None = None) -> int:
        name = f"{self._arch}.{key}"
        if isinstance(self._file.get(name), list):
            raise Unsupported(f"{self._file.path} has layers that differ in {name}, which is not supported.")
        value = default if default is not None and self._file.get(name) is None else self._file.require(name, int)
        if not 0 < value < _LARGEST:
            raise self.wrong(key, value, f"and a number from 1 to {_LARGEST - 1} belongs there")
        return value

    def real(self, key: str, default: float | None = None, *, zero: bool = False, most: float = math.inf) -> float:
        name = f"{self._arch}.{key}"
        value = default if default is not None and self._file.get(name) is None else self._file.require(name, float)
        if not (value > 0 or (zero and value == 0)) or math.isinf(value) or value > most:  # NaN is not above 0
            limits = f"{'not below' if zero else 'above'} 0" + ("" if math.isinf(most) else f" and at most {most:g}")
            raise self.wrong(key, value, f"and a finite number {limits} belongs there")
        return value


def _vocabulary(file: ModelFile) -> int:
    """Rows of the embedding matrix; there must be as many tokens, where the file names them."""
    matrix, tokens = file.tensors.get("token_embd.weight"), file.get("tokenizer.ggml.tokens")
    if matrix is None or len(matrix.shape) != 2:
        raise FormatError(f"{file.path} has no token embedding matrix (token_embd.weight); {_AGAIN}.")
    if isinstance(tokens, list) and len(tokens) != matrix.shape[0]:
        raise FormatError(f"{file.path} has {len(tokens)} tokens (tokenizer.ggml.tokens) and {matrix.shape[0]} rows in token_embd.weight; {_AGAIN}.")
    return matrix.shape[0]


def _rope_scaling(file: ModelFile, numbers: _Numbers) -> dict | None:
    """RoPE scaling as in Hugging Face configs. (Llama 3's kind comes as a tensor of factors instead.)"""
    name = f"{file.architecture}.rope.scaling.type"
    if file.get(name) is None or file.require(name, str) == "none":
        return None
    keys = {  # by the names of Hugging Face
        "factor": "factor",
        "original_max_position_embeddings": "original_context_length",
        "attention_factor": "attn_factor",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
    }
    given = {name: key for name, key in keys.items() if file.get(f"{file.architecture}.rope.scaling.{key}") is not None}
    found = {name: numbers.real(f"rope.scaling.{key}", most=_LARGEST_FACTOR.get(key, _LARGEST)) for name, key in given.items()}
    if "attention_factor" in found:  # llama.cpp multiplies where Hugging Face replaces
        found["attention_factor"] *= 0.1 * math.log(max(found.get("factor", 1.0), 1.0)) + 1
    return {"rope_type": file.require(name, str)} | found
