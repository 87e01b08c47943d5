"""Block-quantised matrices in the formats of GGUF, and their repacking into planes that a GPU can load in aligned words.

Repacking is lossless and keeps the size: scales and codes of a row's blocks go to separate arrays, and nibbles are put in column order.
The formats and their reference dequantisation are those of the `gguf` package (llama.cpp's ggml).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ..errors import ShapeError, Unsupported
from ..extras import load_extra
from ..gpu.tensor import checked_shape, converted

CHUNK = 16
"""Columns that a kernel takes at a time; rows of float formats are padded to a multiple."""


def padded(columns: int) -> int:
    """The stride of rows of activations: whole chunks, so that kernels need no tail. The padding is zero and stays zero."""
    return -(-columns // CHUNK) * CHUNK


Planes = dict[str, np.ndarray]


@dataclass(frozen=True)
class Format:
    """How a kind of matrix is stored: `block` columns in `block_bytes` bytes; `parts` and `options` are of the shader text that reads its planes."""

    name: str
    block: int
    block_bytes: int
    parts: tuple[str, ...]
    planes: Callable[[np.ndarray, int], Planes]
    options: Mapping[str, int] = field(default_factory=dict)

    @property
    def quantised(self) -> bool:
        """Its codes are integers, at most 8 bits."""
        return self.block > 1

    @property
    def halves(self) -> str:
        """The part that turns its weights into f16."""
        return "halves_codes" if self.quantised else "halves_f16" if self.name == "F16" else "halves_floats"

    @property
    def dots(self) -> str:
        """The part that multiplies its codes with int8 in tiles: by what 32 columns have in common."""
        return "dots_halves" if self.name == "Q6_K" else "dots_centred" if "ZERO" in self.options else "dots_offset"

    @property
    def chunk_words(self) -> int:
        """Words of 32 bits that a chunk of CHUNK columns takes, about."""
        return round(CHUNK * self.block_bytes / self.block / 4)

    def row_bytes(self, columns: int) -> int:
        return columns // self.block * self.block_bytes


def _words(array: np.ndarray) -> np.ndarray:
    """Any contiguous array as u32 words, zero-padded at the end."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return np.pad(data, (0, -data.size % 4)).view(np.uint32)


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """(blocks, columns) codes below 16 in words of eight columns: 0..3 in the low nibbles of its bytes, 4..7 in the high."""
    columns = codes.reshape(len(codes), -1, 2, 4)
    return _words(columns[:, :, 0] | columns[:, :, 1] << 4)


def _fifth_bits(bits: np.ndarray) -> np.ndarray:
    """(..., 32) bits in a word for 32 columns: bit g of byte b belongs to column 4 g + b, which is in byte b of the nibbles' words."""
    return _words(np.packbits(bits.reshape(-1, 8, 4).swapaxes(1, 2), axis=-1, bitorder="little"))


def _halves(qs: np.ndarray) -> np.ndarray:
    """(..., n) bytes to (..., 2n) codes: all low nibbles, then all high."""
    return np.concatenate([qs & 15, qs >> 4], axis=-1)


def _floats(dtype: type) -> Callable[[np.ndarray, int], Planes]:
    def planes(raw: np.ndarray, columns: int) -> Planes:
        rows = raw.view(dtype).reshape(-1, columns)
        return {"weights_codes_plane": _words(np.pad(rows, ((0, 0), (0, -columns % CHUNK))))}

    return planes


def _simple(bytes_of: Mapping[str, int]) -> Callable[[np.ndarray, int], Planes]:
    """Blocks of 32 whose fields (scales, bits, qs) are so many bytes each; qs of 16 bytes are nibbles, of 32 bytes signed codes."""

    def planes(raw: np.ndarray, columns: int) -> Planes:
        blocks = raw.reshape(-1, sum(bytes_of.values()))
        fields = dict(zip(bytes_of, np.split(blocks, np.cumsum([*bytes_of.values()])[:-1], axis=1), strict=True))
        qs = fields.pop("qs")
        found = {}
        if "bits" in fields:
            found["weights_bits_plane"] = _fifth_bits(np.unpackbits(np.ascontiguousarray(fields.pop("bits")), axis=1, bitorder="little"))
        found["weights_scales_plane"] = _words(fields["scales"])
        return found | {"weights_codes_plane": _nibbles(_halves(qs)) if qs.shape[1] == 16 else _words(qs)}

    return planes


def _k_scales(head: np.ndarray) -> np.ndarray:
    """The 16 bytes d, dmin and twelve bytes of 6-bit factors, as five words: d and dmin, eight bytes sc, eight bytes mn."""
    b = head[:, 4:16]
    low_sc, low_mn = b[:, 0:4] & 63, b[:, 4:8] & 63
    high_sc, high_mn = (b[:, 8:12] & 15) | (b[:, 0:4] >> 6 << 4), (b[:, 8:12] >> 4) | (b[:, 4:8] >> 6 << 4)
    return _words(np.concatenate([head[:, :4], low_sc, high_sc, low_mn, high_mn], axis=1))


def _q4_k(raw: np.ndarray, columns: int) -> Planes:
    blocks = raw.reshape(-1, 144)
    codes = _halves(blocks[:, 16:].reshape(-1, 4, 32))  # 64 columns: the low nibbles of 32 bytes, then the high
    return {"weights_scales_plane": _k_scales(blocks), "weights_codes_plane": _nibbles(codes.reshape(-1, 256))}


def _q5_k(raw: np.ndarray, columns: int) -> Planes:
    blocks = raw.reshape(-1, 176)
    codes = _halves(blocks[:, 48:].reshape(-1, 4, 32))
    bits = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[None, :, None]) & 1  # bit s of byte l belongs to column 32 s + l
    return {
        "weights_scales_plane": _k_scales(blocks),
        "weights_bits_plane": _fifth_bits(bits),
        "weights_codes_plane": _nibbles(codes.reshape(-1, 256)),
    }


def _q6_k(raw: np.ndarray, columns: int) -> Planes:
    blocks = raw.reshape(-1, 210)
    ql, qh = blocks[:, :128].reshape(-1, 2, 2, 32), blocks[:, 128:192].reshape(-1, 2, 1, 32)
    low = np.concatenate([ql & 15, ql >> 4], axis=2)  # (blocks, half, four groups of 32 columns, 32)
    high = ((qh >> np.array([0, 2, 4, 6], np.uint8)[None, None, :, None]) & 3).reshape(-1, 4, 4)  # (16 columns as 4 x 4)
    pairs = (high << np.array([0, 2, 4, 6], np.uint8)[None, :, None]).sum(1, dtype=np.uint8)
    return {
        "weights_scales_plane": _words(blocks[:, 192:208]),
        "weights_blocks_plane": _words(blocks[:, 208:]),
        "weights_bits_plane": _words(pairs),
        "weights_codes_plane": _nibbles(low.reshape(-1, 256)),
    }


def _float(*names: str) -> tuple[str, ...]:
    return (*(f"block/parts/weights_{name}" for name in names), "block/parts/scales_one")


def _quantised(codes: str, scales: str) -> tuple[str, ...]:
    return (f"block/parts/codes_{codes}", "block/parts/codes_floats", f"block/parts/scales_{scales}")


FORMATS: Mapping[str, Format] = {
    f.name: f
    for f in (
        Format("F32", 1, 4, _float("f32"), _floats(np.float32)),
        Format("F16", 1, 2, _float("f16", "halves"), _floats(np.float16)),
        Format("BF16", 1, 2, _float("bf16", "halves"), _floats(np.uint16)),
        Format("Q8_0", 32, 34, _quantised("bytes", "d"), _simple({"scales": 2, "qs": 32}), {"ZERO": 0}),
        Format("Q4_0", 32, 18, _quantised("nibbles", "d"), _simple({"scales": 2, "qs": 16}), {"ZERO": 8}),
        Format("Q4_1", 32, 20, _quantised("nibbles", "dm"), _simple({"scales": 4, "qs": 16})),
        Format("Q5_0", 32, 22, _quantised("nibbles_bit", "d"), _simple({"scales": 2, "bits": 4, "qs": 16}), {"ZERO": 16}),
        Format("Q5_1", 32, 24, _quantised("nibbles_bit", "dm"), _simple({"scales": 4, "bits": 4, "qs": 16})),
        Format("Q4_K", 256, 144, _quantised("nibbles", "k"), _q4_k),
        Format("Q5_K", 256, 176, _quantised("nibbles_bit", "k"), _q5_k),
        Format("Q6_K", 256, 210, _quantised("nibbles_pair", "q6_k"), _q6_k),
    )
}


def format_of(kind: str) -> Format:
    """The format of that name; Unsupported when our kernels cannot read it."""
    if not isinstance(kind, str) or kind not in FORMATS:
        raise Unsupported(f"Weights of type {kind} cannot be used; supported are {', '.join(FORMATS)}.")
    return FORMATS[kind]


class QuantizedTensor:
    """A matrix in a GGUF block format.

    Args:
        data: its bytes, row after row, each a whole number of blocks; anything that NumPy can view as bytes.
        shape: (rows, columns).
        kind: one of FORMATS: F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K.

    Raises:
        Unsupported: another kind. ShapeError: columns not a multiple of the block, or the wrong number of bytes. TypeError: data that are no bytes.
    """

    def __init__(self, data: bytes | np.ndarray, shape: tuple[int, int], kind: str):
        self.format = format_of(kind)
        self.shape = rows, columns = _matrix_shape(shape)
        if columns % self.format.block:
            raise ShapeError(f"A {kind} row must be a multiple of {self.format.block} columns long, not {columns}.")
        if not isinstance(data, np.ndarray | bytes | bytearray | memoryview):
            raise TypeError(f"The data of a matrix is a {type(data).__name__}; it must be bytes or an array.")
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8) if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
        if raw.size != rows * self.format.row_bytes(columns):
            raise ShapeError(f"A {kind} matrix of shape {self.shape} takes {rows * self.format.row_bytes(columns)} bytes; {raw.size} were given.")
        self.raw = raw.reshape(rows, self.format.row_bytes(columns))
        """(rows, bytes a row) uint8."""

    @property
    def kind(self) -> str:
        return self.format.name

    @property
    def nbytes(self) -> int:
        return self.raw.nbytes

    def dequantize(self) -> np.ndarray:
        """(rows, columns) float32, by the `gguf` package's own code."""
        gguf = load_extra("gguf")
        return np.asarray(gguf.quants.dequantize(self.raw, gguf.GGMLQuantizationType[self.kind]), np.float32).reshape(self.shape)

    def planes(self) -> Planes:
        """The arrays that the shader part reads, by buffer name."""
        return self.format.planes(self.raw, self.shape[1])

    def __repr__(self) -> str:
        return f"QuantizedTensor({self.shape[0]} x {self.shape[1]}, {self.kind})"


def _matrix_shape(shape: tuple[int, int]) -> tuple[int, int]:
    """(rows, columns) as integers, or ShapeError."""
    found = checked_shape(shape)
    if len(found) != 2:
        raise ShapeError(f"A matrix has two dimensions; the shape is {found}.")
    return found


def quantize(array: np.ndarray, kind: str) -> QuantizedTensor:
    """A matrix of numbers (rows, columns) in a GGUF format, quantised by the `gguf` package's own code.

    Raises ShapeError, Unsupported as `QuantizedTensor`, and TypeError for what are no real numbers.
    """
    array = np.ascontiguousarray(converted(np.asarray(array), np.dtype(np.float32)))
    if array.ndim != 2:
        raise ShapeError(f"A matrix has two dimensions; the array has shape {array.shape}.")
    if array.shape[1] % format_of(kind).block:
        raise ShapeError(f"A {kind} row must be a multiple of {format_of(kind).block} columns long, not {array.shape[1]}.")
    gguf = load_extra("gguf")
    return QuantizedTensor(gguf.quants.quantize(array, gguf.GGMLQuantizationType[kind]), array.shape, kind)


def stack_rows(matrices: list[QuantizedTensor], order: np.ndarray | None = None) -> QuantizedTensor:
    """Matrices of one kind and width above one another; `order` then rearranges the rows."""
    first = matrices[0]
    raw = np.concatenate([m.raw for m in matrices]) if len(matrices) > 1 else first.raw
    if order is not None:
        raw = raw[order]
    return QuantizedTensor(raw, (len(raw), first.shape[1]), first.kind)


def rows_that_fit(matrix: QuantizedTensor, limit: int, unit: int) -> int:
    """The most rows, a multiple of `unit`, whose largest plane is at most `limit` bytes; 0 when not even one unit fits."""
    rows, columns = matrix.shape
    largest = max(p.nbytes for p in QuantizedTensor(matrix.raw[:1], (1, columns), matrix.kind).planes().values())
    return min(math.ceil(rows / unit), limit // (largest * unit)) * unit
