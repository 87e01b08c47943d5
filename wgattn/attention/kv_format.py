"""How a KV cache stores keys and values: floats, or the block formats of GGUF. Sizes and the meaning of the bytes; nothing here touches a device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..errors import ArgumentError
from ..gpu import Part

BLOCK = 32
"""Channels of a row that share a scale; the last block of a row is filled up with zeros."""
_POSITIONS = 16
"""A quantised cache has room for a multiple of so many positions, so that its scales begin at a multiple of 256 bytes and can be bound by themselves."""


@dataclass(frozen=True)
class KVFormat:
    """One way to store rows of `head_dim` channels, a row a position and KV head.

    Floats: rows are padded to a multiple of 4 channels, so that they never share a word. Quantised: a tensor of u32 has the codes of all rows, each
    row padded to whole blocks, and behind them the scales of all rows, f16, two a word, each row's padded to whole words. Eight codes of 4 bits make
    a word: channels 0..3 in the low nibbles of its bytes, 4..7 in the high ones.
    """

    name: str
    bits: int
    """Of a channel."""
    dtype: np.dtype
    """Of the tensor."""
    zero: int = 0
    """The code that means 0."""

    @property
    def quantised(self) -> bool:
        return self.dtype == np.uint32

    def stride(self, head_dim: int) -> int:
        """Channels from one row to the next."""
        return _padded(head_dim, BLOCK if self.quantised else 4)

    def scale_words(self, head_dim: int) -> int:
        """Words of a row's scales."""
        return math.ceil(head_dim / BLOCK / 2) if self.quantised else 0

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of a row, the scales included."""
        return self.stride(head_dim) * self.bits // 8 + 4 * self.scale_words(head_dim)

    def room(self, capacity: int) -> int:
        """Positions that are allocated."""
        return _padded(capacity, _POSITIONS) if self.quantised else capacity

    def shape(self, batch: int, num_kv_heads: int, capacity: int, head_dim: int) -> tuple[int, ...]:
        """Of the tensor that holds keys or values."""
        if not self.quantised:
            return batch, num_kv_heads, capacity, self.stride(head_dim)
        return (batch * num_kv_heads * self.room(capacity) * self.row_bytes(head_dim) // 4,)

    def planes(self, rows: int, head_dim: int) -> list[tuple[int, int]]:
        """Where rows lie in such a tensor of so many rows: (byte at which row 0 begins, bytes from one row to the next) of codes, and of scales."""
        codes = self.stride(head_dim) * self.bits // 8
        return [(0, codes)] + ([(rows * codes, 4 * self.scale_words(head_dim))] if self.quantised else [])

    def dequantize(self, data: np.ndarray, heads: int, length: int, head_dim: int) -> np.ndarray:
        """(heads, length, head_dim) float32: the first positions of each head, of the contents of a tensor."""
        if not self.quantised:
            return data.reshape(heads, -1, self.stride(head_dim))[:, :length, :head_dim].astype(np.float32)
        rows, blocks = 4 * data.size // self.row_bytes(head_dim), self.stride(head_dim) // BLOCK
        parts = np.split(data.reshape(-1).view(np.uint8), [rows * blocks * BLOCK * self.bits // 8])
        codes, scales = (part.reshape(heads, rows // heads, -1)[:, :length] for part in parts)
        if self.bits == 4:
            codes = (codes.reshape(heads, length, blocks * BLOCK // 8, 1, 4) >> np.array([[0], [4]], np.uint8)) & 15
        factors = np.ascontiguousarray(scales).view(np.float16)[..., :blocks, None].astype(np.float32)
        values = (np.ascontiguousarray(codes).view(np.int8).reshape(heads, length, blocks, BLOCK) - np.int8(self.zero)) * factors
        return values.reshape(heads, length, blocks * BLOCK)[..., :head_dim]

    # ---- the shader parts

    def load_part(self, name: str, width: str, dim: int, scales: str) -> Part:
        """Loads rows of the buffer `name` as vec4s: `width` is the constant for `dim`, `scales` where the scales begin."""
        if self.quantised:
            return Part.of(f"parts/rows_{self.name}", name=name, width=width, scales=scales)
        return Part.of(f"parts/rows_{'any' if dim % 4 else 'vec4'}_{self.name}", name=name, width=width)

    def append_parts(self, name: str, width: str, scales: str) -> tuple[Part, ...]:
        """Store new rows into the buffer `name`, a unit of channels at a time; `new_NAME_load` gives them."""
        if self.quantised:
            return (Part.of("parts/kv_append_blocks", name=name, width=width, scales=scales),)
        return Part.of("parts/kv_append", name=name, width=width), Part.of(f"parts/store_vec4_{self.name}", name=name)

    @property
    def encode_parts(self) -> tuple[str, ...]:
        """What `append_parts` want, once a kernel."""
        return ("parts/kv_encode", f"parts/kv_encode_{self.name}") if self.quantised else ()

    def units(self, head_dim: int) -> int:
        """Units of an append: four channels, or eight of a quantised row."""
        return self.stride(head_dim) // (8 if self.quantised else 4)

    @property
    def cache_parts(self) -> tuple[str | Part, ...]:
        """Take keys and values from `block/parts/output_qkv`; quantised ones want a workgroup to compute a whole head."""
        if not self.quantised:
            return (f"cache_store_{self.name}",)
        appends = [part for name in ("keys", "values") for part in self.append_parts(name, "HEAD_DIM", "cache_scales()")]
        return ("cache_store_blocks", *appends, *self.encode_parts)


def _padded(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


KV_FORMATS: Mapping[str, KVFormat] = {
    f.name: f
    for f in (
        KVFormat("f32", 32, np.dtype(np.float32)),
        KVFormat("f16", 16, np.dtype(np.float16)),
        KVFormat("q8_0", 8, np.dtype(np.uint32)),
        KVFormat("q4_0", 4, np.dtype(np.uint32), zero=8),
    )
}
"""By the names that `kv_dtype` takes, in lower case."""


def kv_format(kv_dtype: str) -> KVFormat:
    """The format of that name, in any case; ArgumentError when there is none."""
    found = KV_FORMATS.get(kv_dtype.lower()) if isinstance(kv_dtype, str) else None
    if found is None:
        *names, last = KV_FORMATS
        raise ArgumentError(f"A KV cache is stored as {', '.join(names)} or {last}, not {kv_dtype!r}.")
    return found
