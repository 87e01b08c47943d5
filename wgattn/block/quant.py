"""Block-quantised matrices in the formats of GGUF, and their repacking into planes that a GPU can load in aligned words.

Repacking is lossless and keeps the size: scales and codes of a row's blocks go to separate arrays, and nibbles are put in column order.
The formats and their reference dequantisation are those of the `gguf` package (llama.cpp's ggml).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ..errors import ShapeError, Unsupported
from ..extras import load_extra

CHUNK = 16
"""Columns that a kernel takes at a time; rows of float formats are padded to a multiple."""

Planes = dict[str, np.ndarray]


@dataclass(frozen=True)
class Format:
    """How a kind of matrix is stored: `block` columns in `block_bytes` bytes; `part` is the shader part that reads its planes."""

    name: str
    block: int
    block_bytes: int
    part: str
    planes: Callable[[np.ndarray, int], Planes]

    def row_bytes(self, columns: int) -> int:
        return columns // self.block * self.block_bytes


def _words(array: np.ndarray) -> np.ndarray:
    """Any contiguous array as u32 words, zero-padded at the end."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return np.pad(data, (0, -data.size % 4)).view(np.uint32)


def _nibbles(qs: np.ndarray) -> np.ndarray:
    """(blocks, 16) bytes, column i low and i + 16 high, to (blocks, 4) words of eight columns: 0..3 low, 4..7 high."""
    columns = np.concatenate([qs & 15, qs >> 4], axis=1).reshape(-1, 4, 2, 4)
    return _words(columns[:, :, 0] | columns[:, :, 1] << 4)


def _floats(dtype: type) -> Callable[[np.ndarray, int], Planes]:
    def planes(raw: np.ndarray, columns: int) -> Planes:
        rows = raw.view(dtype).reshape(-1, columns)
        return {"weights_codes_plane": _words(np.pad(rows, ((0, 0), (0, -columns % CHUNK))))}

    return planes


def _q8_0(raw: np.ndarray, columns: int) -> Planes:
    blocks = raw.reshape(-1, 34)
    return {"weights_scales_plane": _words(blocks[:, :2]), "weights_codes_plane": _words(blocks[:, 2:])}


def _q4_0(raw: np.ndarray, columns: int) -> Planes:
    blocks = raw.reshape(-1, 18)
    return {"weights_scales_plane": _words(blocks[:, :2]), "weights_codes_plane": _nibbles(blocks[:, 2:])}


def _q4_1(raw: np.ndarray, columns: int) -> Planes:
    blocks = raw.reshape(-1, 20)
    return {"weights_scales_plane": _words(blocks[:, :4]), "weights_codes_plane": _nibbles(blocks[:, 4:])}


def _q5_0(raw: np.ndarray, columns: int) -> Planes:
    blocks = raw.reshape(-1, 22)
    return {
        "weights_scales_plane": _words(blocks[:, :2]),
        "weights_bits_plane": _words(blocks[:, 2:6]),
        "weights_codes_plane": _nibbles(blocks[:, 6:]),
    }


FORMATS: Mapping[str, Format] = {
    f.name: f
    for f in (
        Format("F32", 1, 4, "block/parts/weights_f32", _floats(np.float32)),
        Format("F16", 1, 2, "block/parts/weights_f16", _floats(np.float16)),
        Format("Q8_0", 32, 34, "block/parts/weights_q8_0", _q8_0),
        Format("Q4_0", 32, 18, "block/parts/weights_q4_0", _q4_0),
        Format("Q4_1", 32, 20, "block/parts/weights_q4_1", _q4_1),
        Format("Q5_0", 32, 22, "block/parts/weights_q5_0", _q5_0),
    )
}


def format_of(kind: str) -> Format:
    """The format of that name; Unsupported when our kernels cannot read it."""
    if kind not in FORMATS:
        raise Unsupported(f"Weights of type {kind} cannot be used; supported are {', '.join(FORMATS)}.")
    return FORMATS[kind]


class QuantizedTensor:
    """A matrix in a GGUF block format.

    Args:
        data: its bytes, row after row, each a whole number of blocks; anything that NumPy can view as bytes.
        shape: (rows, columns).
        kind: "F32", "F16", "Q8_0", "Q4_0", "Q4_1" or "Q5_0".

    Raises:
        Unsupported: another kind. ShapeError: columns not a multiple of the block, or the wrong number of bytes.
    """

    def __init__(self, data: bytes | np.ndarray, shape: tuple[int, int], kind: str):
        self.format = format_of(kind)
        self.shape = rows, columns = int(shape[0]), int(shape[1])
        if columns % self.format.block:
            raise ShapeError(f"A {kind} row must be a multiple of {self.format.block} columns long, not {columns}.")
        raw = np.frombuffer(data, np.uint8) if isinstance(data, bytes | bytearray | memoryview) else np.ascontiguousarray(data).reshape(-1).view(np.uint8)
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


def quantize(array: np.ndarray, kind: str) -> QuantizedTensor:
    """A float matrix (rows, columns) in a GGUF format, quantised by the `gguf` package's own code."""
    array = np.ascontiguousarray(array, np.float32)
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
