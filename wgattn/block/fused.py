"""The fused transformer block: its attention half and its MLP half, each an object with weights on the device and work recorded once."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..attention.arguments import checked_eps, checked_flag, shorter, whole
from ..attention.kv_cache import KVCache
from ..attention.split import regimes
from ..errors import CapacityError
from ..gpu import Device, DeviceProfile, Recording, Tensor, device_or_default, in_turn
from . import arithmetic as arithmetics
from .attention_block import AttentionBlock, ChosenAttention, Geometry
from .linear import padded
from .memory import allocate, attention_buffers, mlp_buffers
from .mlp import MlpBlock
from .rope import Rope
from .steps import Steps, chunk_tokens
from .unfused import UnfusedAttentionBlock, UnfusedMlpBlock
from .weights import matrix, named, vector

Array = Any


class FusedAttention:
    """The attention half of a transformer block over a KV cache: y = wo . attention(norm(x)) + bo [+ residual]. Three dispatches a token.

    Threads that call it take turns.

    Args:
        weights: mapping norm (E,), wq (H*D, E), wk and wv (Hkv*D, E), wo (E, H*D), optional bq bk bv bo, q_norm (D,), k_norm (D,).
            Matrices are arrays (float32, float64, float16, bfloat16) or `QuantizedTensor`, in any mix of kinds.
        num_heads, num_kv_heads, head_dim: H, Hkv, D. H must be a multiple of Hkv; query head h reads KV head h // (H // Hkv).
        rope: a `Rope`, or None for no rotation.
        kv_dtype: how the cache is stored, as in `AttentionPipeline`; capacity: positions it has room for.
        arithmetic: "exact" computes in float32; "int8" rounds activations to int8 too, where a matrix is quantised; "half" may round to f16 where many
            tokens can then use matrix units (backend "dawn"); "auto" measures which is quickest.
        fused: False runs the same layer in eight dispatches, for comparison.
        device: default: `default_device()`.

    Raises:
        ArgumentError, ShapeError, TypeError: what cannot be meant. Unsupported: D or the rotary dim not a multiple of 4.
        CapacityError: what does not fit the device.
    """

    def __init__(
        self,
        weights: Mapping[str, Any],
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rope: Rope | None = None,
        eps: float = 1e-5,
        kv_dtype: str = "f32",
        capacity: int = 2048,
        arithmetic: str = "exact",
        fused: bool = True,
        device: Device | None = None,
    ):
        num_heads, num_kv_heads, head_dim = whole("num_heads", num_heads), whole("num_kv_heads", num_kv_heads), whole("head_dim", head_dim)
        geometry = Geometry(num_heads, num_kv_heads, head_dim, checked_eps(eps))
        geometry.check(rope)
        arithmetics.checked(arithmetic)
        fused = checked_flag("fused", fused)
        capacity = whole("capacity", capacity)
        weights = attention_weights(weights, geometry)
        self.device = device_or_default(device)
        self.length, self.turn = 0, threading.RLock()
        store = KVCache(self.device, num_kv_heads, head_dim, capacity, kv_dtype)
        table = None if rope is None else self.device.tensor(rope.table(store.capacity))
        block = (AttentionBlock if fused else UnfusedAttentionBlock)(self.device, weights, geometry, rope, arithmetic)
        self._steps = attention_steps(block, store, table, weights["norm"].size, fused=fused).prepare_decode()
        self.cache = CacheView(self, store)

    @property
    def capacity(self) -> int:
        """Positions that the cache has room for."""
        return self.cache.capacity

    @property
    def dispatches_per_token(self) -> int:
        """Dispatches of one decode step at the present length."""
        return len(self._steps.recording(self.length))

    @in_turn
    def prefill(self, x: Array, residual: Array | None = None) -> Array:
        """Append T tokens: x (T, E) to (T, E) in x's kind, wo . attention + bo [+ residual]; token t sees the history and tokens 0 .. t.

        Arrays of float32, float16 or float64 (computed and returned as float32), or float32 tensors. `residual` may be x itself.

        Raises ShapeError, TypeError, ArgumentError, CapacityError before any work; the cache is then as it was.
        """
        x, residual = self._checked(x, residual)
        y = self._steps.prefill(self.length, x, residual)
        self.length += x.shape[0]
        return y

    @in_turn
    def decode(self, x: Array, residual: Array | None = None) -> Array:
        """Append one token: x (1, E) to (1, E). One replay: one write, one submit; makes no GPU object.

        A tensor in gives a tensor out, the same one at every step. Raises as `prefill` does.
        """
        x, residual = self._checked(x, residual, 1)
        y = self._steps.decode(self.length, x, residual)
        self.length += 1
        return y

    @in_turn
    def reset(self) -> None:
        """Forget the sequence; the memory is kept."""
        self.length = 0

    @in_turn
    def truncate(self, n: int) -> None:
        """Keep the first n positions. ArgumentError when there are fewer, or n is not whole."""
        self.length = shorter(n, self.length)

    def _checked(self, x: Array, residual: Array | None, tokens: int | None = None) -> tuple[Array, Array | None]:
        x = self._steps.checked("x", x, tokens)
        if residual is not None:
            residual = self._steps.checked("residual", residual, x.shape[0])
        if self.length + x.shape[0] > self.capacity:
            raise CapacityError(
                f"{x.shape[0]} tokens do not fit: {self.length} of {self.capacity} positions are in use. Make the block with a larger capacity, or reset it."
            )
        return x, residual


class CacheView:
    """The cache of a `FusedAttention`: `k()` and `v()` copy what the sequence has so far."""

    def __init__(self, owner: FusedAttention, store: KVCache):
        self._owner, self.store = owner, store

    @property
    def capacity(self) -> int:
        return self.store.capacity

    @property
    def dtype(self) -> str:
        return self.store.dtype

    @property
    def nbytes(self) -> int:
        return self.store.nbytes

    def k(self) -> np.ndarray:
        """(Hkv, length, D) float32: keys after RoPE."""
        return self.store.k(self._owner.length)

    def v(self) -> np.ndarray:
        """(Hkv, length, D) float32."""
        return self.store.v(self._owner.length)


class FusedMLP:
    """The MLP half of a transformer block: x + down . (silu(gate . n + b_gate) * (up . n + b_up)) + b_down, n = rms_norm(x). Two dispatches.

    Args:
        weights: mapping norm (E,), gate and up (I, E), down (E, I), optional b_gate, b_up (I,), b_down (E,); matrices as in `FusedAttention`.
        eps, arithmetic, device: as in `FusedAttention`. fused: False runs the same layer in five dispatches, for comparison.

    Raises as `FusedAttention` does.
    """

    def __init__(
        self, weights: Mapping[str, Any], *, eps: float = 1e-5, arithmetic: str = "exact", fused: bool = True, device: Device | None = None
    ):
        arithmetics.checked(arithmetic)
        fused = checked_flag("fused", fused)
        eps = checked_eps(eps)
        weights = mlp_weights(weights)
        self.device, self.turn = device_or_default(device), threading.RLock()
        block = (MlpBlock if fused else UnfusedMlpBlock)(self.device, weights, eps, arithmetic)
        self._steps = mlp_steps(self.device, block, weights["norm"].size, fused=fused).prepare_decode()

    @property
    def dispatches_per_token(self) -> int:
        """Dispatches of one token."""
        return len(self._steps.recording(0))

    @in_turn
    def __call__(self, x: Array) -> Array:
        """x (T, E) to (T, E), in x's kind; one replay for one token. A tensor of one token gives the same tensor at every call.

        Raises ShapeError, TypeError, ArgumentError before any work.
        """
        x = self._steps.checked("x", x)
        return self._steps.decode(0, x, None) if x.shape[0] == 1 else self._steps.prefill(0, x, None)


def attention_weights(weights: Mapping[str, Any], geometry: Geometry) -> dict[str, Any]:
    """The weights of the attention half, checked: matrices as QuantizedTensor, vectors float32."""
    found = named(weights, ("norm", "wq", "wk", "wv", "wo"), ("bq", "bk", "bv", "bo", "q_norm", "k_norm"))
    q, kv = geometry.num_heads * geometry.head_dim, geometry.num_kv_heads * geometry.head_dim
    norm = vector("norm", found["norm"], None)
    E = norm.size
    shapes = {"wq": (q, E), "wk": (kv, E), "wv": (kv, E), "wo": (E, q)}
    lengths = {"bq": q, "bk": kv, "bv": kv, "bo": E, "q_norm": geometry.head_dim, "k_norm": geometry.head_dim}
    vectors = {name: vector(name, found[name], n) for name, n in lengths.items() if name in found}
    return {"norm": norm} | {name: matrix(name, found[name], shape) for name, shape in shapes.items()} | vectors


def mlp_weights(weights: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of the MLP half, checked: matrices as QuantizedTensor, vectors float32."""
    found = named(weights, ("norm", "gate", "up", "down"), ("b_gate", "b_up", "b_down"))
    norm = vector("norm", found["norm"], None)
    gate = matrix("gate", found["gate"], (None, norm.size))
    hidden, E = gate.shape
    lengths = {"b_gate": hidden, "b_up": hidden, "b_down": E}
    vectors = {name: vector(name, found[name], n) for name, n in lengths.items() if name in found}
    return {"norm": norm, "gate": gate, "up": matrix("up", found["up"], (hidden, E)), "down": matrix("down", found["down"], (E, hidden))} | vectors


def attention_steps(block: Any, cache: KVCache, table: Tensor | None, width: int, *, fused: bool = True, tokens: int | None = None) -> Steps:
    """Recordings of an attention half of `width` channels over a cache; the table has (cos, sin) of every position. At most `tokens` come at once."""
    device, g = cache.device, block.geometry
    rope = device.empty((4,)) if table is None else table
    scratch: dict[int, dict[str, Any]] = {}

    def record(recording: Recording, state: Mapping[str, Any], tokens: int, limit: int) -> None:
        if tokens not in scratch:
            scratch[tokens] = allocate(device, attention_buffers(width, g.num_heads, g.num_kv_heads, g.head_dim, tokens, fused, cache.dtype))
        attention = ChosenAttention(device.profile, g, tokens, min(limit, cache.capacity), block.arithmetic)
        attended = scratch[tokens].get("attended", scratch[tokens]["query"])
        block.record(recording, attention, cache, {**state, **scratch[tokens], "attended": attended, "rope": rope}, tokens)

    limits = regimes(device.profile, cache.capacity) if ChosenAttention(device.profile, g, 1, cache.capacity).path == "split" else [2**32]
    chunk = attention_chunk(device.profile, width, g.num_heads * g.head_dim, tokens or cache.capacity)
    return Steps(device, width, chunk, record, limits=limits)


def attention_chunk(profile: DeviceProfile, width: int, query_width: int, tokens: int) -> int:
    """Tokens that a replay of an attention half computes, where at most `tokens` come."""
    return min(tokens, chunk_tokens(profile, padded(max(width, query_width))))


def mlp_steps(device: Device, block: Any, width: int, *, fused: bool = True) -> Steps:
    """Recordings of an MLP half of `width` channels."""
    hidden = block.hidden

    def record(recording: Recording, state: Mapping[str, Any], tokens: int, limit: int) -> None:
        block.record(recording, {**state, **allocate(device, mlp_buffers(width, hidden, tokens, fused))}, tokens)

    chunk = chunk_tokens(device.profile, padded(max(width, hidden if fused else 2 * hidden)))
    return Steps(device, width, chunk, record, takes_residual=False)


