"""Random weights in every kind, made without quantising, and what they mean in plain numbers."""

from __future__ import annotations

import numpy as np

from wgattn.block.quant import QuantizedTensor, format_of
from wgattn.errors import Unsupported
from wgattn.reference import linear

from .records import Error

_FLOATS = {"F32": np.float32, "F16": np.float16}
_SCALES = {
    "Q8_0": ((0, 1 / 74),),
    "Q4_0": ((0, 1 / 4.6),),
    "Q4_1": ((0, 1 / 4.6), (2, -7.5 / 4.6)),
    "Q5_0": ((0, 1 / 9.2),),
    "Q5_1": ((0, 1 / 9.2), (2, -15.5 / 9.2)),
    "Q4_K": ((0, 1 / 200), (2, 7.5 / 200)),
    "Q5_K": ((0, 1 / 400), (2, 15.5 / 400)),
    "Q6_K": ((208, 1 / 1370),),
}
"""Where the f16 scales and offsets of a block stand, and what they are for weights of about 1 whose codes are random."""


def random_matrix(rng: np.random.Generator, rows: int, columns: int, kind: str) -> QuantizedTensor:
    """Weights of about 1 / sqrt(columns)."""
    size = columns**-0.5
    if kind in _FLOATS:
        return QuantizedTensor((rng.standard_normal((rows, columns), np.float32) * size).astype(_FLOATS[kind]), (rows, columns), kind)
    form = format_of(kind)
    raw = rng.integers(0, 256, (rows, form.row_bytes(columns)), np.uint8)
    blocks = raw.reshape(-1, form.block_bytes)
    for at, scale in _SCALES[kind]:
        blocks[:, at : at + 2] = np.full(len(blocks), scale * size, np.float16).view(np.uint8).reshape(-1, 2)
    return QuantizedTensor(raw, (rows, columns), kind)


def dense(matrix: QuantizedTensor, rows: np.ndarray | slice = slice(None)) -> np.ndarray | None:
    """Some rows of a matrix as floats; None where the package that knows the kind (gguf) is not installed."""
    raw = matrix.raw[rows]
    if matrix.kind in _FLOATS:
        return raw.view(_FLOATS[matrix.kind])
    try:
        return QuantizedTensor(raw, (len(raw), matrix.shape[1]), matrix.kind).dequantize()
    except Unsupported:
        return None


def linear_error(x: np.ndarray, matrix: QuantizedTensor, y: np.ndarray, bound: float, most: tuple[int, int] = (16, 512)) -> Error | None:
    """Of y (tokens, rows) = x . W^T; by some of the tokens and rows, the last ones among them, where there are many."""
    tokens, rows = (np.unique(np.linspace(0, n - 1, min(n, m)).astype(int)) for n, m in zip(y.shape, most, strict=True))
    weights = dense(matrix, rows)
    return None if weights is None else Error.of(y[np.ix_(tokens, rows)], linear(x[tokens], weights), bound)
