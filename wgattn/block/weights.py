"""What callers give as weights, checked: all of it before anything goes to the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import ArgumentError, ShapeError
from .quant import QuantizedTensor

_KINDS = {"float32": "F32", "float64": "F32", "float16": "F16", "bfloat16": "BF16"}


def matrix(name: str, weight: Any, shape: tuple[int | None, int | None]) -> QuantizedTensor:
    """A matrix of that shape (None: any), in the kind it has: float64 becomes F32, float32, float16 and bfloat16 stay what they are.

    Raises TypeError for what is neither a QuantizedTensor nor a floating array, ShapeError for another shape.
    """
    if not isinstance(weight, QuantizedTensor):
        weight = np.asarray(weight)
        if weight.dtype.name not in _KINDS:
            raise TypeError(f"{name} has dtype {weight.dtype}; a matrix is float32, float64, float16, bfloat16 or a QuantizedTensor.")
        _fits(name, weight.shape, shape)
        kind = _KINDS[weight.dtype.name]
        weight = weight.astype(np.float32) if kind == "F32" else weight.view(np.uint16) if kind == "BF16" else weight.astype(np.float16)
        return QuantizedTensor(weight, weight.shape, kind)
    _fits(name, weight.shape, shape)
    return weight


def vector(name: str, array: Any, length: int | None) -> np.ndarray:
    """A float32 vector of that length; TypeError, ShapeError for anything else."""
    array = np.asarray(array)
    if array.dtype.kind not in "f" and array.dtype.name != "bfloat16":
        raise TypeError(f"{name} has dtype {array.dtype}; it must be floating.")
    _fits(name, array.shape, (length,))
    return array.astype(np.float32)


def named(weights: Mapping[str, Any], required: Sequence[str], optional: Sequence[str]) -> dict[str, Any]:
    """A copy of the mapping without what is None; ArgumentError when a name is missing or unknown, TypeError when it is none."""
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights is a {type(weights).__name__}; it must be a mapping from names to arrays.")
    found = {name: w for name, w in weights.items() if w is not None}
    missing, unknown = [n for n in required if n not in found], sorted(map(str, set(weights) - {*required, *optional}))
    if missing or unknown:
        told = [*([f"{', '.join(missing)} missing"] if missing else []), *([f"{', '.join(unknown)} not known"] if unknown else [])]
        raise ArgumentError(f"Weights: {'; '.join(told)}. Wanted are {', '.join(required)}, and there may be {', '.join(optional)}.")
    return found


def _fits(name: str, shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> None:
    if len(shape) != len(wanted) or any(w not in (None, n) for n, w in zip(shape, wanted, strict=True)) or 0 in shape:
        text = ", ".join("any" if w is None else str(w) for w in wanted)
        raise ShapeError(f"{name} has shape {tuple(shape)}; it must be ({text}{',' if len(wanted) == 1 else ''}).")
