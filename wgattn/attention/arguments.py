"""Checking the arguments of attention calls, and stating them in the terms of `Problem`. Nothing here touches a device."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from ..errors import ArgumentError, ShapeError
from ..gpu import Device, Tensor, device_or_default
from ..gpu.tensor import converted
from .problem import OPEN

Array = Any
FLOATS = {"float32": "f32", "float16": "f16", "float64": "f32"}
"""Storage of each floating dtype; float64 is computed in float32."""


def device_of(given: dict[str, Array], device: Device | None) -> tuple[Device, bool]:
    """The device of the call, and whether its query is a tensor."""
    if device is not None:
        device = device_or_default(device)
    tensors = {name: a for name, a in given.items() if isinstance(a, Tensor)}
    for name, tensor in tensors.items():
        if device is not None and tensor.device is not device:
            raise ArgumentError(f"{name} is on another device ({tensor.device}); copy it there first.")
        device = tensor.device
    return device_or_default(device), "query" in tensors


def native(array: Any) -> np.ndarray:
    """As a NumPy array in the machine's byte order."""
    array = np.asarray(array)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def floating(name: str, array: Array) -> Array:
    """The array, in the machine's byte order, or TypeError when it is not floating."""
    if not isinstance(array, Tensor):
        array = native(array)
    if array.dtype.name not in FLOATS:
        raise TypeError(f"{name} has dtype {array.dtype}; it must be float32, float16 or float64.")
    return array


def finite(name: str, number: float) -> float:
    """The number, or ArgumentError when it is not finite, TypeError when it is none."""
    try:
        value = float(number)
    except (ValueError, OverflowError):
        value = math.nan
    except TypeError:
        raise TypeError(f"{name} is {number!r}; it must be a number.") from None
    if not math.isfinite(value):
        raise ArgumentError(f"{name} is {number!r}; it must be a finite number.")
    return value


MOST = 2**31 - 1
"""The largest size or count that is taken for one."""


def whole(name: str, number: int, least: int = 1, most: float = MOST) -> int:
    """The number, or ArgumentError when it is not whole, below `least` or above `most`, TypeError when it is none."""
    try:
        found = int(number)
    except (ValueError, OverflowError):  # NaN, infinities, texts
        found = None
    except TypeError:
        raise TypeError(f"{name} is {number!r}; it must be a whole number.") from None
    if found is None or found != number or not least <= found <= most:
        raise ArgumentError(f"{name} is {number!r}; it must be a whole number of at least {least}{f' and at most {most}' if found and found > most else ''}.")
    return found


def shorter(n: int, length: int) -> int:
    """How many positions a sequence of `length` is cut to, or ArgumentError when it has fewer, TypeError when that is no number."""
    try:
        return whole("n", n, 0, length)
    except ArgumentError:
        raise ArgumentError(f"The sequence has {length} positions; it cannot be truncated to {n}.") from None


def checked_eps(eps: float) -> float:
    """What a norm adds to the mean square, or ArgumentError when it is negative or not finite."""
    eps = finite("eps", eps)
    if eps < 0:
        raise ArgumentError(f"eps is {eps}; it must be finite and not negative.")
    return eps


def checked_flag(name: str, value: bool) -> bool:
    """The value as a bool, or TypeError when it is neither that nor 0 or 1: of texts, "False" would be true."""
    if not isinstance(value, bool | np.bool_ | int | np.integer) or value not in (0, 1):
        raise TypeError(f"{name} is {value!r}; it must be True or False.")
    return bool(value)


def checked_name(name: str, value: str, names: tuple[str, ...]) -> None:
    """ArgumentError unless the value is one of the names."""
    if not isinstance(value, str) or value not in names:
        raise ArgumentError(f"{name} is {value!r}; it must be {' or '.join(map(repr, names))}.")


def checked_softcap(softcap: float) -> float:
    """The softcap, or ArgumentError when it is negative or not finite."""
    softcap = finite("softcap", softcap)
    if softcap < 0:
        raise ArgumentError(f"softcap is {softcap}; it must be positive, or 0 for none.")
    return softcap


def checked_window(window_size: int | tuple[int, int] | None) -> tuple[int, int]:
    """(left, right) with OPEN for open."""
    if window_size is None:
        return OPEN, OPEN
    if isinstance(window_size, int | np.integer) and not isinstance(window_size, bool):
        if window_size < 1:
            raise ArgumentError(f"window_size is {window_size}; it counts the current key and must be at least 1.")
        return min(int(window_size) - 1, OPEN), 0
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise ArgumentError(f"window_size is {window_size!r}; it must be a number or (left, right).") from None
    left, right = (whole("A side of window_size", n, -1, sys.maxsize) for n in (left, right))
    return (OPEN if left == -1 else min(left, OPEN)), (OPEN if right == -1 else min(right, OPEN))


def checked_mask(mask: Array, wanted: tuple[int, int, int, int]) -> Array:
    """The mask with four dimensions; ShapeError when it does not broadcast."""
    if not isinstance(mask, Tensor):
        mask = native(mask)
        if mask.dtype.name == "float64":
            mask = converted(mask, np.dtype(np.float32))
        if mask.dtype.kind not in "biuf" or (mask.dtype.name not in ("bool", "float32", "float16") and mask.dtype.kind == "f"):
            raise TypeError(f"attn_mask has dtype {mask.dtype}; it must be bool, integer, float32, float16 or float64.")
        if mask.dtype.kind in "iu":
            mask = mask != 0
    if not 1 <= mask.ndim <= 4:
        raise ShapeError(f"attn_mask has shape {tuple(mask.shape)}; it must have one to four dimensions that broadcast to {wanted}.")
    shape = (1,) * (4 - mask.ndim) + tuple(mask.shape)
    B, H, S, T = wanted
    if shape[0] not in (1, B) or shape[1] not in (1, H) or shape[2] not in (1, S) or shape[3] > max(T, 1) or shape[3] == 0 < T:
        raise ShapeError(f"attn_mask has shape {tuple(mask.shape)}; it must broadcast to (B, H, S, T) = {wanted}, or be narrower than T.")
    return mask.reshape(shape)


def mask_kind(mask: Array) -> str:
    """The mask's kind in the terms of `Problem.mask`, once it is stored by `storable`."""
    if mask.dtype.name in ("float32", "float16"):
        return {"float32": "f32", "float16": "f16"}[mask.dtype.name]
    return "u32" if isinstance(mask, Tensor) else "u8"


def mask_strides(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Strides of a dense mask of four dimensions, 0 where it broadcasts."""
    dense = (shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1)
    return tuple(0 if n == 1 else stride for n, stride in zip(shape, dense, strict=True))


def mask_first(shape: tuple[int, ...], keys: int) -> int:
    """The key that the first column of a mask of four dimensions belongs to."""
    return 0 if shape[3] == 1 else keys - shape[3]


def checked_vector(name: str, array: Array | None, length: int, dtype: type) -> Array | None:
    """A vector of that length and dtype, or ShapeError, TypeError."""
    if array is None:
        return None
    if not isinstance(array, Tensor):
        array = np.asarray(array)
        if array.dtype.kind not in "fiu":
            raise TypeError(f"{name} has dtype {array.dtype}; it must be numeric.")
        array = converted(array, np.dtype(dtype))
    elif array.dtype != dtype:
        raise TypeError(f"{name} is a tensor of {array.dtype}; it must be {np.dtype(dtype)}.")
    if tuple(array.shape) != (length,):
        raise ShapeError(f"{name} has shape {tuple(array.shape)}; it must be ({length},).")
    return array


def checked_lengths(lengths: Array | None, batch: int, keys: int) -> Array | None:
    """Numbers of keys as uint32, or ShapeError, TypeError, ArgumentError. Those of a tensor are capped on the device."""
    if isinstance(lengths, Tensor):
        return checked_vector("key_lengths", lengths, batch, np.uint32)
    if lengths is None:
        return None
    array = np.asarray(lengths)
    if array.dtype.kind not in "iu":
        raise TypeError(f"key_lengths has dtype {array.dtype}; it must be integer.")
    if array.shape != (batch,):
        raise ShapeError(f"key_lengths has shape {array.shape}; it must be ({batch},).")
    if batch and (array.min() < 0 or array.max() > keys):
        raise ArgumentError(f"key_lengths must lie between 0 and {keys}; they reach from {array.min()} to {array.max()}.")
    return array.astype(np.uint32)


def storable(array: np.ndarray) -> tuple[np.ndarray, Any]:
    """The array in a dtype that the device stores; bool masks become bytes, four a word."""
    if array.dtype.name == "float64":
        return array, np.float32
    if array.dtype.kind == "b":
        data = array.astype(np.uint8).reshape(-1)
        return np.pad(data, (0, -data.size % 4)).view(np.uint32), np.uint32
    return array, array.dtype
