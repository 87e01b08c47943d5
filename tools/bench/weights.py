"""What random weights mean in plain numbers."""

from __future__ import annotations

import numpy as np

from wgattn.block.quant import QuantizedTensor
from wgattn.errors import Unsupported
from wgattn.reference import linear

from .records import Error

_FLOATS = {"F32": np.float32, "F16": np.float16}


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
