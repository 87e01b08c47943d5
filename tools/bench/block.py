"""Section "block": decode steps of transformer layers, fused (5 dispatches a layer) and not (13), from the same projection kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from wgattn import Rope, reference
from wgattn.attention.kv_cache import KVCache
from wgattn.block.attention_block import AttentionBlock, ChosenAttention, Geometry
from wgattn.block.linear import padded
from wgattn.block.memory import allocate, attention_buffers, mlp_buffers, nbytes
from wgattn.block.mlp import MlpBlock
from wgattn.block.quant import QuantizedTensor
from wgattn.block.unfused import UnfusedAttentionBlock, UnfusedMlpBlock
from wgattn.cases.weights import random_matrix
from wgattn.gpu import Arena, Device, Recording, StepState, Tensor

from .records import Bench, Case, Error, Work
from .weights import dense

E, H, KV, D, HIDDEN, EPS = 896, 14, 2, 64, 4864, 1e-6
"""The shape of Qwen2-0.5B."""
_ROPE = Rope(1e6, D)
_CHECKED_LAYERS = 2
_BOUND = 1e-3
"""Keys and values are kept in f16."""


@dataclass
class Step:
    """One decode step of some layers at a depth, recorded; the residual stream begins and ends in `stream`."""

    recording: Recording
    stream: Tensor
    depth: int
    scratch_bytes: int
    """Of the buffers for intermediates, which all layers share."""
    weight_bytes: int
    layers: list[dict[str, Any]] = field(repr=False)
    """Weights, and what the cache held before: `keys` and `values` (KV, depth, D)."""


def random_layer(rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights of both halves in the kinds of a small Q5_0 file: down projections in Q6_K, Q, K and V with biases."""
    sizes = {"q": H * D, "k": KV * D, "v": KV * D}
    attention: dict[str, Any] = {"norm": np.ones(E, np.float32), "wo": random_matrix(rng, E, H * D, "Q5_0")}
    attention |= {f"w{m}": random_matrix(rng, rows, E, "Q5_0") for m, rows in sizes.items()}
    attention |= {f"b{m}": rng.standard_normal(rows).astype(np.float32) for m, rows in sizes.items()}
    mlp: dict[str, Any] = {"norm": np.ones(E, np.float32), "down": random_matrix(rng, E, HIDDEN, "Q6_K")}
    return attention, mlp | {m: random_matrix(rng, HIDDEN, E, "Q5_0") for m in ("gate", "up")}


def record(device: Device, fused: bool, layers: int, depth: int) -> Step:
    """One decode step at that depth, over random weights: the same ones for both ways."""
    rng = np.random.default_rng(0)
    geometry = Geometry(H, KV, D, EPS)
    state = StepState(device)
    state.place(depth, 1)
    arena = Arena(device, layers * 12_000_000)
    shapes = attention_buffers(E, H, KV, D, 1, fused) | mlp_buffers(E, HIDDEN, 1, fused)
    scratch = {"attended": None, **allocate(device, shapes)}
    scratch["attended"] = scratch["attended"] or scratch["query"]
    scratch |= {"step": state.step, "rope": device.tensor(_ROPE.table(depth + 1))}
    # Fused, the residual is added in place; unfused, it goes from one stream to the other and back.
    streams = [device.empty((1, padded(E))) for _ in range(1 if fused else 2)]
    turns = [scratch | {"h": s, "residual": s, "y": streams[i - 1]} for i, s in enumerate(streams)] if not fused else [scratch | {"h": streams[0]}]
    recording, attention, kept = Recording(device), ChosenAttention(device.profile, geometry, 1, depth + 1), []
    for _ in range(layers):
        weights, mlp = random_layer(rng)
        past = rng.standard_normal((2, KV, depth, D)).astype(np.float16)
        cache = KVCache(device, KV, D, depth + 1, "f16")
        for tensor, rows in zip((cache.keys, cache.values), past, strict=True):
            tensor.write(np.pad(rows, ((0, 0), (0, 1), (0, 0)))[None])
        (AttentionBlock if fused else UnfusedAttentionBlock)(arena, weights, geometry, _ROPE).record(recording, attention, cache, turns[0], 1)
        (MlpBlock if fused else UnfusedMlpBlock)(arena, mlp, EPS).record(recording, turns[-1], 1)
        kept.append({"attention": weights, "mlp": mlp, "past": past})
    weight_bytes = sum(m.nbytes for layer in kept for half in ("attention", "mlp") for m in layer[half].values())
    return Step(recording, streams[0], depth, nbytes(shapes), weight_bytes, kept)


def error(step: Step) -> Error | None:
    """Of the stream after the first layers."""
    x = np.random.default_rng(1).standard_normal((1, E)).astype(np.float32)
    count = min(_CHECKED_LAYERS, len(step.layers))
    part = len(step.recording) // len(step.layers) * count
    step.stream.write(np.pad(x, ((0, 0), (0, step.stream.shape[1] - E))))
    Recording(step.recording.device, step.recording.dispatches[:part]).replay()
    sizes, h = {"num_heads": H, "num_kv_heads": KV, "head_dim": D, "eps": EPS}, x.astype(np.float64)
    for layer in step.layers[:count]:
        halves = [{n: dense(w) if isinstance(w, QuantizedTensor) else w for n, w in layer[half].items()} for half in ("attention", "mlp")]
        if any(w is None for half in halves for w in half.values()):
            return None
        h = h + reference.attention_block(h, halves[0], **sizes, rope=_ROPE.reference, past=tuple(layer["past"]))[0]
        h = h + reference.mlp(h, halves[1], EPS)
    return Error.of(step.stream.numpy()[:, :E], h, _BOUND)


def cases(bench: Bench) -> list[Case]:
    """Fused and unfused, at one depth or two."""
    layers = {"cpu": 4 if bench.quick else 8, "small": 12, "large": 24}[bench.size]
    found = []
    for depth in (200,) if bench.quick else (200, 512):
        for way in ("fused", "unfused"):
            build = lambda b, f=way == "fused", n=depth: work(b, f, layers, n)  # noqa: E731
            found.append(Case("block", f"{layers} layers @{depth}", way, build, 4.0))
    return found


def work(bench: Bench, fused: bool, layers: int, depth: int) -> Work:
    step = record(bench.device, fused, layers, depth)
    moved = step.weight_bytes + sum(layer["past"].nbytes for layer in step.layers)
    facts = {"dispatches": len(step.recording), "scratch_bytes": step.scratch_bytes}
    return Work([step.recording], nbytes=moved, ceiling="copy", check=lambda: error(step), working_set=moved, facts=facts)
