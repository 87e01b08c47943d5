"""Attention as a function: arrays or device tensors in, the same kind out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ShapeError
from ..gpu import Device, Recording, Tensor, grid
from .arguments import (
    FLOATS,
    checked_flag,
    checked_lengths,
    checked_mask,
    checked_name,
    checked_softcap,
    checked_vector,
    checked_window,
    device_of,
    finite,
    floating,
    mask_first,
    mask_kind,
    mask_strides,
    storable,
)
from .choose import choose
from .paths import PATHS
from .problem import Operands, Problem, Rows, packs_output

Array = Any


def scaled_dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float = 0.0,
    window_size: int | tuple[int, int] | None = None,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    causal_alignment: str = "bottom_right",
    key_lengths: Array | None = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    path: str = "auto",
    device: Device | None = None,
) -> Array | tuple[Array, Array]:
    """softmax(adjust(query . key^T * scale)) . value, on the GPU. **Causal is bottom-right aligned**, unlike torch's, when S != T.

    Args:
        query: (B, H, S, D); key: (B, Hkv, T, D); value: (B, Hkv, T, Dv). float32, float16 or float64 (computed and returned as float32).
            NumPy arrays, or tensors of one device. Query head h reads KV head h // (H // Hkv). Any D and Dv; multiples of 4 are fast.
        attn_mask: broadcast to (B, H, S, T). bool or integer: nonzero takes part. Floating: added after scale and softcap; the lowest
            number of its dtype, or -inf, hides the key. A mask narrower than T belongs to the last keys; earlier ones are visible.
        is_causal: query i sees keys up to i + T - S (`causal_alignment="bottom_right"`: flash-attention, MLX, ONNX) or up to i ("top_left": torch).
        scale: default 1 / sqrt(D). softcap: scores become softcap * tanh(score / softcap); 0 is off.
        window_size: w keys including the current one, or (left, right) besides it, -1 for open.
        sinks: (H,) logits that join the softmax's sum. alibi_slopes: (H,) penalties per key of distance.
        key_lengths: (B,) keys that each sequence really has, at most T; alignment is to the last of them.
        layout: "bhsd", or "bshd" with heads and positions swapped in all four arrays.
        return_lse: also return the natural log of each row's sum of exponentials, (B, H, S) float32.
        enable_gqa: accepted for calls written for torch; differing head counts need no switch.
        path: "auto", or one of `wgattn.attention.paths.PATHS`; see `wgattn.explain`.
        device: default: that of the tensors, else `default_device()`.

    Returns:
        (B, H, S, Dv) in `layout` and query's dtype [and lse]. A row that sees no key gives zeros and lse -inf (with a sink: the sink).

    Raises:
        ShapeError, ArgumentError, TypeError: what cannot be meant. Unsupported: what the device or the forced path cannot do.
    """
    call = prepare(
        query,
        key,
        value,
        attn_mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        softcap=softcap,
        window_size=window_size,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        causal_alignment=causal_alignment,
        key_lengths=key_lengths,
        layout=layout,
        return_lse=return_lse,
        device=device,
    )
    choice = choose(call.device.profile, call.problem, path)
    out, lse = call.run(choice.path)
    return (out, lse) if call.problem.lse else out


sdpa = scaled_dot_product_attention


@dataclass
class Call:
    """A checked call: nothing has been copied to the device yet."""

    device: Device
    problem: Problem
    layout: str
    inputs: dict[str, Array]
    as_tensors: bool

    def run(self, path: str) -> tuple[Array, Array | None]:
        p, device = self.problem, self.device
        if p.rows == 0:
            return self._empty()
        given = {name: on_device(device, a) for name, a in self.inputs.items() if a is not None}
        shape, dtype, lse_shape = self._result()
        out = device.empty(shape, dtype)
        written = device.empty(shape, np.float32) if packs_output(p) else out
        lse = device.empty(lse_shape, np.float32) if p.lse else None
        rows = {name: Rows.of(given[name], self.layout) for name in ("query", "keys", "values")}
        mask = self.inputs.get("mask")
        operands = Operands(
            **rows,
            out=Rows.of(written, self.layout),
            mask=given.get("mask"),
            mask_strides=mask_strides(mask.shape) if mask is not None else (0, 0, 0, 0),
            mask_first=mask_first(mask.shape, p.keys) if mask is not None else 0,
            sinks=given.get("sinks"),
            alibi_slopes=given.get("alibi_slopes"),
            key_lengths=given.get("key_lengths"),
            lse=lse,
        )
        recording = Recording(device)
        if p.keys == 0:  # a binding cannot be empty, and there is nothing to read
            operands.keys, operands.values = (Rows(device.buffer(16), 0, 0, 0) for _ in range(2))
        PATHS[path].record(recording, p, operands)
        if written is not out:
            record_pack(recording, written, out)
        recording.replay()
        if self.as_tensors:
            return out, lse
        return out.numpy(), None if lse is None else lse.numpy()

    def _result(self) -> tuple[tuple[int, ...], type, tuple[int, ...]]:
        """Shape and dtype of the output, and the shape of lse."""
        p = self.problem
        rows = (p.num_heads, p.queries) if self.layout == "bhsd" else (p.queries, p.num_heads)
        return (p.batch, *rows, p.value_dim), np.float16 if p.dtype == "f16" else np.float32, (p.batch, p.num_heads, p.queries)

    def _empty(self) -> tuple[Array, Array | None]:
        shape, dtype, lse_shape = self._result()
        out = np.zeros(shape, dtype)
        lse = np.full(lse_shape, -np.inf, np.float32) if self.problem.lse else None
        if self.as_tensors:
            return self.device.tensor(out), None if lse is None else self.device.tensor(lse)
        return out, lse


def on_device(device: Device, array: Array) -> Tensor:
    """The tensor, or a copy of the array in a dtype that the device stores."""
    return array if isinstance(array, Tensor) else device.tensor(*storable(array))


def record_pack(recording: Recording, values: Tensor, packed: Tensor) -> None:
    """Append packed (f16) = values (f32), for outputs of which `packs_output` says so."""
    groups = grid(-(-packed.size // 128), recording.device.profile.max_workgroups)
    kernel = recording.device.kernel("parts/pack_f16", WORKGROUP=64)
    recording.add(kernel, groups, {"values": values, "packed": packed}, {"count": packed.size}, label="pack f16")


def prepare(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float = 0.0,
    window_size: int | tuple[int, int] | None = None,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    causal_alignment: str = "bottom_right",
    key_lengths: Array | None = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    device: Device | None = None,
) -> Call:
    """Check the arguments of `scaled_dot_product_attention` and state the problem; touches no device."""
    mask, slopes, alignment = attn_mask, alibi_slopes, causal_alignment
    is_causal, return_lse = checked_flag("is_causal", is_causal), checked_flag("return_lse", return_lse)
    checked_flag("enable_gqa", enable_gqa)
    checked_name("layout", layout, ("bhsd", "bshd"))
    checked_name("causal_alignment", alignment, ("bottom_right", "top_left"))
    given = {"query": query, "key": key, "value": value, "attn_mask": mask, "sinks": sinks, "alibi_slopes": slopes, "key_lengths": key_lengths}
    device, as_tensors = device_of(given, device)
    query, key, value = (floating(name, given[name]) for name in ("query", "key", "value"))
    for name, a in (("query", query), ("key", key), ("value", value)):
        if a.ndim != 4:
            raise ShapeError(f"{name} has shape {tuple(a.shape)}; it must have four dimensions, {layout.upper()}.")
    order = (0, 1, 2, 3) if layout == "bhsd" else (0, 2, 1, 3)
    (B, H, S, D), (Bk, Hkv, T, Dk), (Bv, Hv, Tv, Dv) = (tuple(a.shape[i] for i in order) for a in (query, key, value))
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)} in layout {layout}"
    if Bk != B or Bv != B:
        raise ShapeError(f"Batches differ: {shapes}.")
    if Hv != Hkv or Tv != T:
        raise ShapeError(f"Keys and values differ in heads or length: {shapes}.")
    if Dk != D or not D or not Dv:
        raise ShapeError(f"Queries and keys must have the same head dim, and that and the values' be at least 1: {shapes}.")
    if Hkv == 0 or H % Hkv:
        raise ShapeError(f"{H} query heads cannot share {Hkv} KV heads: it does not divide. {shapes}.")
    if len({FLOATS[a.dtype.name] for a in (key, value)}) > 1:
        raise TypeError(f"key is {key.dtype} and value is {value.dtype}; they must have one dtype.")
    left, right = checked_window(window_size)
    if mask is not None:
        mask = checked_mask(mask, (B, H, S, T))
    problem = Problem(
        batch=B,
        num_heads=H,
        num_kv_heads=Hkv,
        queries=S,
        keys=T,
        head_dim=D,
        value_dim=Dv,
        scale=finite("scale", 1 / math.sqrt(D) if scale is None else scale),
        dtype=FLOATS[query.dtype.name],
        kv_dtype=FLOATS[key.dtype.name],
        mask="none" if mask is None else mask_kind(mask),
        left=left,
        right=min(right, 0) if is_causal else right,
        bottom_right=alignment == "bottom_right",
        softcap=checked_softcap(softcap),
        alibi=slopes is not None,
        sinks=sinks is not None,
        lse=return_lse,
        lengths="fixed" if key_lengths is None else "each",
    )
    inputs = {
        "query": query,
        "keys": key,
        "values": value,
        "mask": mask,
        "sinks": checked_vector("sinks", sinks, H, np.float32),
        "alibi_slopes": checked_vector("alibi_slopes", slopes, H, np.float32),
        "key_lengths": checked_lengths(key_lengths, B, T),
    }
    return Call(device, problem, layout, inputs, as_tensors)
