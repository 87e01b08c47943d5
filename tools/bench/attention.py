"""Sections "prefill" (many queries, by every path) and "decode" (one query, over the depth of the cache)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wgattn import reference
from wgattn.attention.choose import choose
from wgattn.attention.kv_cache import KVCache
from wgattn.attention.kv_format import kv_format
from wgattn.attention.paths import PATHS
from wgattn.attention.problem import Operands, Problem, Rows
from wgattn.errors import Unsupported
from wgattn.gpu import Device, Recording, StepState, Tensor

from .records import Bench, Case, Error, Work, arithmetic_of

_VARIANTS = {"flash_matrix": "matrix"}
"""Paths by shorter names."""
_BOUND = {"f32": 1e-5, "matrix": 2e-3, "dot4": 2e-2}
_SAMPLED = 32
"""Queries that are compared with the reference, where there are more."""


@dataclass(frozen=True)
class Shape:
    """Heads, KV heads, head dim, and how the cache is stored."""

    heads: int
    kv_heads: int
    dim: int
    kv_dtype: str = "f32"

    def __str__(self) -> str:
        heads = str(self.heads) if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        return f"{heads}x{self.dim} {self.kv_dtype}"


# (shape, positions), by the size of the device; the first is what --quick takes.
_PREFILL = {
    "cpu": [(Shape(8, 8, 64), 256), (Shape(8, 8, 64), 512), (Shape(8, 2, 128, "f16"), 512)],
    "small": [(Shape(8, 8, 64), 512), (Shape(32, 8, 128, "f16"), 1024)],
    "large": [(Shape(32, 8, 128, "f16"), 2048), (Shape(32, 32, 128), 2048), (Shape(32, 8, 64, "f16"), 4096)],
}
_DECODE = {
    "cpu": [Shape(9, 3, 64, "f16"), *(Shape(32, 8, 128, kv_dtype) for kv_dtype in ("f16", "q8_0", "q4_0"))],
    "small": [*(Shape(32, 8, 128, kv_dtype) for kv_dtype in ("f16", "q8_0", "q4_0")), Shape(9, 3, 64, "f16")],
    "large": [*(Shape(32, 8, 128, kv_dtype) for kv_dtype in ("f16", "f32", "q8_0", "q4_0")), Shape(9, 3, 64, "f16")],
}
_DEPTHS = {"cpu": (128, 512, 2048, 8192), "small": (256, 1024, 4096, 16384), "large": (256, 1024, 4096, 16384, 65536)}


def prefill_cases(bench: Bench) -> list[Case]:
    """Causal self-attention by each path."""
    problems = _PREFILL[bench.size]
    found = []
    for shape, length in problems[:1] if bench.quick else problems:
        for path in PATHS:
            build = lambda b, s=shape, n=length, p=path: attention(b, s, n, n, p)  # noqa: E731
            found.append(Case("prefill", f"{shape} S{length}", _VARIANTS.get(path, path), build, 1.0 if bench.quick else 3.0))
    return found


def decode_cases(bench: Bench) -> list[Case]:
    """One query over more and more keys, by the path that is chosen for it."""
    shapes = _DECODE[bench.size]
    found = []
    for shape in shapes[:1] if bench.quick else shapes:
        for depth in _DEPTHS[bench.size]:
            build = lambda b, s=shape, n=depth: attention(b, s, 1, n, "auto")  # noqa: E731
            found.append(Case("decode", f"{shape} @{depth}", "auto", build, 0.7 if bench.quick else 3.0))
    return found


def attention(bench: Bench, shape: Shape, queries: int, keys: int, path: str) -> Work:
    """Causal attention of the last `queries` positions, (1, heads, queries, D), over a cache of `keys`."""
    device, rng = bench.device, bench.rng()
    p = Problem(1, shape.heads, shape.kv_heads, queries, keys, shape.dim, shape.dim, 1 / math.sqrt(shape.dim), kv_dtype=shape.kv_dtype, right=0)
    if path != "auto" and (missing := PATHS[path].unsupported(device.profile, p)):
        raise Unsupported(missing)
    path = choose(device.profile, p, path).path
    query = rng.standard_normal((1, shape.heads, queries, shape.dim), np.float32)
    new = [device.tensor(np.resize(rng.standard_normal(n, np.float32), (1, keys, shape.kv_heads, shape.dim))) for n in (4099, 4111)]
    caches, outputs = [], []

    def record() -> Recording:
        caches.append(_filled(device, shape, keys, new))
        outputs.append(device.empty(query.shape))
        recording, rows = Recording(device), Rows.of(device.tensor(query), "bhsd")
        cached = (caches[-1].rows(tensor) for tensor in (caches[-1].keys, caches[-1].values))
        PATHS[path].record(recording, p, Operands(rows, *cached, out=Rows.of(outputs[-1], "bhsd")))
        return recording

    nbytes = 2 * shape.kv_heads * keys * kv_format(shape.kv_dtype).row_bytes(shape.dim) + 2 * query.nbytes
    recordings = [record() for _ in range(bench.copies(nbytes))]
    ceiling = arithmetic_of(recordings[0])
    seen = queries * keys - queries * (queries - 1) // 2  # pairs of a query and a key that it sees

    def check() -> Error:
        recordings[-1].replay()
        arrays = {"query": query, "keys": caches[-1].k(keys)[None], "values": caches[-1].v(keys)[None]}
        return _error(arrays, outputs[-1].numpy(), _BOUND[ceiling])

    return Work(
        recordings,
        flops=4 * shape.heads * shape.dim * seen,
        nbytes=nbytes,
        ceiling="copy" if queries == 1 else ceiling,
        check=check,
        working_set=nbytes * len(recordings),
        facts={"path": path, "dispatches": len(recordings[0]), "shape": str(PATHS[path].shape(device.profile, p))},
    )


def _filled(device: Device, shape: Shape, keys: int, new: Sequence[Tensor]) -> KVCache:
    """A cache of so many positions, stored as pipelines store them."""
    cache, state, recording = KVCache(device, shape.kv_heads, shape.dim, keys, shape.kv_dtype), StepState(device), Recording(device)
    state.place(0, keys)
    cache.record_append(recording, step=state.step, keys=new[0], values=new[1], rows=keys, dtype="f32")
    recording.replay()
    return cache


def _error(arrays: dict[str, np.ndarray], out: np.ndarray, bound: float) -> Error:
    """By some queries, each over the keys that it sees: two KV heads of them, the last among them."""
    queries, keys = arrays["query"].shape[2], arrays["keys"].shape[2]
    ratio = arrays["query"].shape[1] // arrays["keys"].shape[1]
    heads = sorted({0, arrays["keys"].shape[1] - 1})
    found, expected = [], []
    for i in np.unique(np.linspace(0, queries - 1, min(queries, _SAMPLED)).astype(int)):
        end = keys - queries + i + 1
        for kv in heads:
            of_head: Any = slice(kv * ratio, (kv + 1) * ratio)
            query = arrays["query"][:, of_head, i : i + 1]
            expected.append(reference.attention(query, *(arrays[n][:, kv : kv + 1, :end] for n in ("keys", "values")))[0])
            found.append(out[:, of_head, i : i + 1])
    return Error.of(np.concatenate(found), np.concatenate(expected), bound)
