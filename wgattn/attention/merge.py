"""Joining attention over two sets of keys."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import ShapeError
from ..gpu import Device, Part, Recording, Tensor, grid
from .arguments import device_of, floating

Array = Any


def merge_state(o_a: Array, lse_a: Array, o_b: Array, lse_b: Array, *, device: Device | None = None) -> tuple[Array, Array]:
    """Attention over two disjoint sets of keys from the outputs and natural-log lse over each, as `return_lse=True` gives them.

    Args:
        o_a, o_b: (..., D) float32, float16 or float64; lse_a, lse_b: (...) float32. NumPy arrays, or tensors of one device.

    Returns:
        (o (..., D), lse (...)), both float32. An lse of -inf stands for an empty set.

    Raises:
        ShapeError, TypeError: arrays that do not belong together.
    """
    given = {"o_a": o_a, "lse_a": lse_a, "o_b": o_b, "lse_b": lse_b}
    device, _ = device_of(given, device)
    as_tensors = any(isinstance(a, Tensor) for a in given.values())
    arrays = {name: floating(name, a) for name, a in given.items()}
    shape = tuple(arrays["o_a"].shape)
    if not shape or not shape[-1] or tuple(arrays["o_b"].shape) != shape or any(tuple(arrays[n].shape) != shape[:-1] for n in ("lse_a", "lse_b")):
        shapes = ", ".join(f"{n} {tuple(a.shape)}" for n, a in arrays.items())
        raise ShapeError(f"Outputs must have one shape (..., D), D of at least 1, and each lse that shape without D: {shapes}.")
    rows, width = int(np.prod(shape[:-1], dtype=np.int64)), shape[-1]
    on_device = {n: a if isinstance(a, Tensor) else device.tensor(a, np.float32 if n.startswith("lse") else None) for n, a in arrays.items()}
    for name in ("lse_a", "lse_b"):
        if on_device[name].dtype != np.float32:
            raise TypeError(f"{name} is a tensor of {on_device[name].dtype}; it must be float32.")
    out, lse = device.empty(shape), device.empty(shape[:-1])
    if rows:
        kind = "any" if width % 4 else "vec4"
        dtype = {n: "f16" if on_device[n].dtype == np.float16 else "f32" for n in ("o_a", "o_b")}
        kernel = device.kernel(
            "attention/merge",
            Part.of(f"parts/rows_{kind}_{dtype['o_a']}", name="a", width="VALUE_DIM"),
            Part.of(f"parts/rows_{kind}_{dtype['o_b']}", name="b", width="VALUE_DIM"),
            Part.of(f"parts/store_{kind}_f32", name="out", width="VALUE_DIM"),
            VALUE_DIM=width,
            WORKGROUP=64,
        )
        recording = Recording(device)
        groups = grid(-(-rows * -(-width // 4) // 64), device.profile.max_workgroups)
        buffers = {"a": on_device["o_a"], "b": on_device["o_b"], "lse_a": on_device["lse_a"], "lse_b": on_device["lse_b"], "out": out, "lse": lse}
        recording.add(kernel, groups, buffers, {"rows": rows}, label="merge")
        recording.replay()
    return (out, lse) if as_tensors else (out.numpy(), lse.numpy())
