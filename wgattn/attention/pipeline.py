"""Attention with a KV cache: work is recorded when the cache is made or grows, and replayed for every decode step."""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import ArgumentError, CapacityError, ShapeError
from ..gpu import Device, Readback, Recording, StepInput, StepState, Tensor, device_or_default, in_turn
from . import split
from .arguments import (
    FLOATS,
    checked_flag,
    checked_mask,
    checked_softcap,
    checked_window,
    device_of,
    finite,
    floating,
    mask_first,
    mask_kind,
    mask_strides,
    shorter,
    whole,
)
from .choose import choose
from .functional import on_device, record_pack
from .kv_cache import KVCache
from .kv_format import kv_format
from .paths import PATHS
from .problem import Operands, Problem, Rows, packs_output

Array = Any


class AttentionPipeline:
    """Attention of one layer over a growing sequence (or `batch` sequences of one length). Threads that call it take turns.

    Args:
        num_heads, num_kv_heads, head_dim: H, Hkv, D; H must be a multiple of Hkv. Query head h reads KV head h // (H // Hkv).
        batch: sequences; all have the same length.
        kv_dtype: how keys and values are stored: "f32", "f16", or as GGUF's "q8_0" or "q4_0", 32 channels to an f16 scale; in any case. The last
            block of a head dim that is no multiple of 32 is filled up.
        capacity: positions there is room for at first; growth: positions added when they run out (0: refuse instead).
        scale: default 1 / sqrt(D). softcap, window_size, path: as in `scaled_dot_product_attention`.
        device: default: `default_device()`.

    Raises:
        ArgumentError, ShapeError: numbers that cannot be. Unsupported: the path. CapacityError: the cache does not fit the device.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        batch: int = 1,
        kv_dtype: str = "f32",
        capacity: int = 2048,
        growth: int = 2048,
        scale: float | None = None,
        softcap: float = 0.0,
        window_size: int | tuple[int, int] | None = None,
        path: str = "auto",
        device: Device | None = None,
    ):
        num_heads, num_kv_heads, head_dim = whole("num_heads", num_heads), whole("num_kv_heads", num_kv_heads), whole("head_dim", head_dim)
        batch, capacity, growth = whole("batch", batch), whole("capacity", capacity), whole("growth", growth, 0, math.inf)
        if num_heads % num_kv_heads:
            raise ShapeError(f"{num_heads} query heads cannot share {num_kv_heads} KV heads: it does not divide.")
        self.device = device_or_default(device)
        self.num_heads, self.num_kv_heads, self.head_dim, self.batch, self.growth = num_heads, num_kv_heads, head_dim, batch, growth
        self.length, self.turn = 0, threading.RLock()
        self.generation = 0
        """Counts how often the cache moved, and so its recordings were made anew."""
        left, right = checked_window(window_size)
        self._options = {"softcap": checked_softcap(softcap), "window_size": window_size, "scale": scale, "path": path}
        self._problem = Problem(
            batch=batch,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            queries=1,
            keys=capacity,
            head_dim=head_dim,
            value_dim=head_dim,
            scale=finite("scale", 1 / math.sqrt(head_dim) if scale is None else scale),
            kv_dtype=kv_format(kv_dtype).name,
            left=left,
            right=right,
            softcap=self._options["softcap"],
            lengths="step",
        )
        self._path = path
        self._choose(self._problem)
        self._use(KVCache(self.device, num_kv_heads, head_dim, capacity, self._problem.kv_dtype, batch=batch))

    @property
    def capacity(self) -> int:
        """Positions there is room for without growing."""
        return self.cache.capacity

    def _choose(self, problem: Problem) -> str:
        return choose(self.device.profile, problem, self._path).path

    # ---- recordings

    def _use(self, cache: KVCache) -> None:
        """Record the decode step over a cache and take it. What raises here changes nothing."""
        device, p = self.device, replace(self._problem, keys=cache.capacity)
        query, kv = p.batch * p.num_heads * p.head_dim, p.batch * p.num_kv_heads * p.head_dim
        out = device.empty((p.batch, 1, p.num_heads, p.head_dim))  # before memory of the host: it tells what is too large
        given = StepInput(device, {"query": query, "new_keys": kv, "new_values": kv})
        readback = Readback(out)
        operands = _operands(cache, Rows(given["query"], p.num_heads * p.head_dim, p.head_dim, 0), out)
        operands.step = given.step
        limits = split.regimes(device.profile, cache.capacity) if self._choose(p) == "split" else [2**32]
        decode = []
        for limit in limits:
            recording, bounded = Recording(device), replace(p, keys=min(limit, cache.capacity))
            cache.record_append(recording, step=given.step, keys=given["new_keys"], values=given["new_values"], rows=1, dtype="f32")
            PATHS[self._choose(bounded)].record(recording, bounded, operands)
            decode.append((limit, recording))
        device.compile(dispatch.kernel for _, recording in decode for dispatch in recording)
        self.cache, self._input, self._out, self._readback, self._decode = cache, given, out, readback, decode

    @property
    def dispatches_per_token(self) -> int:
        """Dispatches of one decode step at the present length."""
        return len(self._recording())

    def _recording(self) -> Recording:
        return next(recording for limit, recording in self._decode if self.length < limit)

    # ---- what people call

    @in_turn
    def prefill(self, q: Array, k: Array, v: Array, mask: Array | None = None, is_causal: bool = True) -> Array:
        """Append S positions and attend: q (B, S, H, D), k and v (B, S, Hkv, D) to (B, S, H, D), in q's dtype and kind.

        Queries stand behind the history: query i sees keys up to history + i when causal, else all. `mask` as in
        `scaled_dot_product_attention`, broadcast to (B, H, S, history + S); a narrower one belongs to the last keys.

        Raises:
            ShapeError, ArgumentError, TypeError, CapacityError before any work; the cache is then as it was.
        """
        q, k, v = self._checked(q, k, v)
        S = q.shape[1]
        p = replace(self._problem, queries=S, keys=self.length + S, lengths="fixed", dtype=FLOATS[q.dtype.name])
        if checked_flag("is_causal", is_causal):
            p = replace(p, right=min(p.right, 0))
        if mask is not None:
            device_of({"mask": mask}, self.device)
            mask = checked_mask(mask, (self.batch, self.num_heads, S, p.keys))
            p = replace(p, mask=mask_kind(mask))
        path = self._choose(p)
        self._make_room(S)
        device = self.device
        query, keys, values = (on_device(device, a) for a in (q, k, v))
        state = StepState(device)
        state.place(self.length, S)
        recording = Recording(device)
        self.cache.record_append(recording, step=state.step, keys=keys, values=values, rows=S, dtype=FLOATS[k.dtype.name])
        out = device.empty(q.shape, np.float16 if p.dtype == "f16" else np.float32)
        written = device.empty(q.shape) if packs_output(p) else out
        operands = _operands(self.cache, Rows.of(query, "bshd"), written)
        if mask is not None:
            operands.mask = on_device(device, mask)
            operands.mask_strides, operands.mask_first = mask_strides(mask.shape), mask_first(mask.shape, p.keys)
        PATHS[path].record(recording, p, operands)
        if written is not out:
            record_pack(recording, written, out)
        recording.replay()
        result = out if isinstance(q, Tensor) else out.numpy()
        self.length += S  # last: what raises before leaves the sequence as it was
        return result

    @in_turn
    def decode(self, q: Array, k: Array, v: Array) -> Array:
        """Append one position and attend: q (B, 1, H, D), k and v (B, 1, Hkv, D) to (B, 1, H, D). One replay; makes no GPU object.

        For a tensor the result is the same tensor every time: the next step overwrites it. Raises as `prefill` does.
        """
        q, k, v = self._checked(q, k, v)
        if q.shape[1] != 1:
            raise ShapeError(f"decode takes one position, q has shape {tuple(q.shape)}; use prefill for {q.shape[1]}.")
        if any(isinstance(a, Tensor) and a.dtype != np.float32 for a in (q, k, v)):
            raise TypeError("decode takes device tensors of float32 only; float16 arrays of the host are converted.")
        self._make_room(1)
        recording = self._recording()
        self._input.write(self.length, {"query": q, "new_keys": k, "new_values": v})
        if isinstance(q, Tensor):
            recording.replay(copies=self._input.copies)
            self.length += 1
            return self._out
        recording.replay(copies=self._input.copies, readback=self._readback)
        result = self._readback.numpy().astype(np.float16 if q.dtype == np.float16 else np.float32, copy=False)
        self.length += 1
        return result

    @in_turn
    def reset(self) -> None:
        """Forget the sequence; the memory is kept."""
        self.length = 0

    @in_turn
    def truncate(self, n: int) -> None:
        """Keep the first n positions. ArgumentError when there are fewer, or n is not whole."""
        self.length = shorter(n, self.length)

    @in_turn
    def keep(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Keep only these positions, (begin, length) each, ascending and apart; they move together. What is kept stays rotated as it was.

        ArgumentError for ranges that overlap, descend or reach beyond the sequence; TypeError for what are no pairs of whole numbers.
        """
        try:
            pairs = [(operator.index(begin), operator.index(count)) for begin, count in ranges]
        except (TypeError, ValueError):
            raise TypeError(f"ranges is {ranges!r}; it must be pairs (begin, length) of whole numbers.") from None
        end, moves, place = 0, [], 0
        for begin, count in pairs:
            if begin < end or count < 0 or begin + count > self.length:
                raise ArgumentError(f"Range {(begin, count)} must begin at {end} or later and end within the {self.length} positions.")
            if begin != place and count:
                moves.append((begin, place, count))
            place, end = place + count, begin + count
        with self.device.guard("move what is kept"):  # rows and length change together
            if moves:
                self.cache.copy_rows(self.cache, moves)
            self.length = place

    @in_turn
    def fork(self) -> AttentionPipeline:
        """An independent pipeline with the same history, on the same device."""
        p = self._problem
        twin = AttentionPipeline(
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            batch=self.batch,
            kv_dtype=p.kv_dtype,
            capacity=self.capacity,
            growth=self.growth,
            device=self.device,
            **self._options,
        )
        if self.length:
            twin.cache.copy_rows(self.cache, [(0, 0, self.length)])
        twin.length = self.length
        return twin

    def _make_room(self, positions: int) -> None:
        need = self.length + positions
        if need <= self.capacity:
            return
        if not self.growth:
            raise CapacityError(f"{positions} positions do not fit: {self.length} of {self.capacity} are in use, and growth is 0.")
        capacity = self.capacity + -(-(need - self.capacity) // self.growth) * self.growth
        larger = KVCache(self.device, self.num_kv_heads, self.head_dim, capacity, self.cache.dtype, batch=self.batch)
        if self.length:
            larger.copy_rows(self.cache, [(0, 0, self.length)])
        self._use(larger)
        self.generation += 1

    def _checked(self, q: Array, k: Array, v: Array) -> list[Array]:
        device_of({"q": q, "k": k, "v": v}, self.device)
        arrays = []
        for name, a, heads in (("q", q, self.num_heads), ("k", k, self.num_kv_heads), ("v", v, self.num_kv_heads)):
            a = floating(name, a)
            positions = a.shape[1] if a.ndim == 4 else "S"
            if a.ndim != 4 or tuple(a.shape) != (self.batch, positions, heads, self.head_dim) or not positions:
                wanted = f"({self.batch}, S, {heads}, {self.head_dim})"
                raise ShapeError(f"{name} has shape {tuple(a.shape)}; it must be {wanted} with S of at least 1.")
            arrays.append(a)
        if len({a.shape[1] for a in arrays}) > 1:
            raise ShapeError(f"q, k and v must have the same number of positions; their shapes are {', '.join(str(tuple(a.shape)) for a in arrays)}.")
        if arrays[1].dtype != arrays[2].dtype:
            raise TypeError(f"k is {arrays[1].dtype} and v is {arrays[2].dtype}; they must have one dtype.")
        return arrays


def _operands(cache: KVCache, query: Rows, out: Tensor) -> Operands:
    return Operands(query, cache.rows(cache.keys), cache.rows(cache.values), Rows.of(out, "bshd"))
