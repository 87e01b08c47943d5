"""Tile shapes by the clock: what `wgattn tune` times and what the paths "flash" and "gemm" then find in the user's cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..gpu import Device, DeviceProfile, Recording, StepState
from ..gpu.tuning import TuningCache, TuningKey, default_cache, find, tune, tuning_key
from . import flash, gemm
from .flash import FlashShape, FlashTileShape
from .gemm import GemmShape, GemmShapes
from .kv_cache import KVCache
from .kv_format import kv_format
from .matrices import too_large
from .problem import Operands, Problem, Rows, packs_output

PATHS = ("flash", "gemm")
"""Paths whose shapes are tuned."""
_PRODUCTS = ("scores", "outputs")
_SOFTWARE_TILE = 1024
"""Elements of the largest tile that is tried on a CPU: larger ones only take long to compile."""

Progress = Callable[[int, int, str], None]
"""Called with the candidates timed so far, all there are, and what is being tuned."""


@dataclass(frozen=True)
class Outcome:
    """What `run` found for one path and problem; seconds as in `gpu.tuning.Tuned`, None where the cache knew the answer."""

    path: str
    problem: Problem
    shape: FlashShape | GemmShapes
    seconds: float | None
    default_seconds: float | None


def rounded(problem: Problem) -> Problem:
    """The problem that is timed in place of all that are like it: the next powers of two of queries, keys and KV heads, none of the features."""
    kv_heads = _power_of_two(problem.batch * problem.num_kv_heads)
    return Problem(
        batch=1,
        num_heads=kv_heads * problem.ratio,
        num_kv_heads=kv_heads,
        queries=_power_of_two(problem.queries),
        keys=_power_of_two(problem.keys),
        head_dim=problem.head_dim,
        value_dim=problem.value_dim,
        scale=1 / math.sqrt(problem.head_dim),
        dtype=problem.dtype,
        kv_dtype=problem.kv_dtype,
    )


def _power_of_two(n: int) -> int:
    return 1 << (max(n, 1) - 1).bit_length()


def _key(device: Device, path: str, problem: Problem, product: str = "") -> TuningKey:
    p = rounded(problem)
    what = f"{path} {product}".strip()
    return tuning_key(
        device, "attention", f"{what} H{p.num_heads}/{p.num_kv_heads} S{p.queries} T{p.keys} D{p.head_dim}/{p.value_dim} {p.dtype}/{p.kv_dtype}"
    )


def flash_candidates(profile: DeviceProfile, problem: Problem) -> list[FlashShape]:
    """The shapes that a device can run, `choose_flash`'s first; on a CPU those around it; pure."""
    chosen = flash.choose_flash(profile, problem)
    if isinstance(chosen, FlashTileShape):
        others = flash.tile_shapes(profile, problem)
    else:
        others = [replace(chosen, rows=rows, keys=keys) for rows in (1, 2, 4, 8) for keys in (1, 2, 4) if rows * keys <= 16]
    return list(dict.fromkeys((chosen, *others)))


def gemm_candidates(profile: DeviceProfile, problem: Problem, product: str) -> list[GemmShape]:
    """Shapes for one of the two products, the default first; pure."""
    M, T = gemm.aligned(problem.queries), gemm.aligned(problem.keys)
    N, K = (T, problem.head_dim) if product == "scores" else (gemm.aligned(problem.value_dim), T)
    shapes = dict.fromkeys((getattr(gemm.choose_gemm(profile, problem), product), *gemm.candidates(profile, M, N, gemm.padded(K, 16))))
    return [s for s in shapes if not profile.software or s.MWG * s.NWG <= _SOFTWARE_TILE]


def stored_shape(device: Device, path: str, problem: Problem, cache: TuningCache | None = None) -> FlashShape | GemmShapes | None:
    """The shape that was fastest for a problem like this one, when it has been tuned and fits; times nothing."""
    cache = cache or default_cache()
    if cache.empty:
        return None
    like = rounded(problem)
    if path == "flash":
        return find(flash_candidates(device.profile, like), cache.get(_key(device, path, problem)))
    found = {n: find(gemm_candidates(device.profile, like, n), cache.get(_key(device, path, problem, n))) for n in _PRODUCTS}
    if None in found.values():
        return None
    shapes = GemmShapes(**found)
    return None if too_large(device.profile, gemm.matrices(problem, shapes)) else shapes


def tuned_shape(device: Device, path: str, problem: Problem, cache: TuningCache | None = None) -> FlashShape | GemmShapes:
    """The fastest shape for problems like this one: from the cache, else by timing candidates on buffers of that size, and then stored."""
    return _tune(device, path, problem, cache or default_cache()).shape


def standard_problems(profile: DeviceProfile) -> list[Problem]:
    """Prefill as common models do it: heads and head dims of small and large ones, f32 and f16 caches. Few and small on a CPU."""
    heads = [(8, 8, 64)] if profile.software else [(8, 8, 64), (9, 3, 64), (32, 8, 64), (32, 8, 128)]
    lengths = [128, 512] if profile.software else [512, 2048]
    kv_dtypes = ["f32"] if profile.software else ["f32", "f16"]
    return [
        rounded(Problem(1, h, kv, n, n, d, d, 1 / math.sqrt(d), kv_dtype=kv_dtype))
        for h, kv, d in heads
        for n in lengths
        for kv_dtype in kv_dtypes
    ]


def run(device: Device, progress: Progress = lambda done, total, what: None, *, again: bool = False, cache: TuningCache | None = None) -> list[Outcome]:
    """Tune all standard problems. What the cache knows is not timed, unless `again`."""
    profile = device.profile
    jobs = [(path, problem) for problem in standard_problems(profile) for path in PATHS if path != "gemm" or gemm.unsupported(profile, problem) is None]
    total = sum(len(c) for path, problem in jobs for c in _candidates(profile, path, problem))
    outcomes, finished = [], 0
    for path, problem in jobs:
        steps = [finished]
        what = f"{path}: {problem.num_heads} / {problem.num_kv_heads} heads, {problem.queries} positions, head dim {problem.head_dim}, {problem.kv_dtype} keys"

        def step(steps: list[int] = steps, what: str = what) -> None:
            steps[0] += 1
            progress(steps[0], total, what)

        progress(finished, total, what)
        outcomes.append(_tune(device, path, problem, cache or default_cache(), again, step))
        finished += sum(map(len, _candidates(profile, path, problem)))
        progress(finished, total, what)
    return outcomes


def _candidates(profile: DeviceProfile, path: str, problem: Problem) -> list[list]:
    if path == "flash":
        return [flash_candidates(profile, problem)]
    return [gemm_candidates(profile, problem, product) for product in _PRODUCTS]


def _tune(device: Device, path: str, problem: Problem, cache: TuningCache, again: bool = False, step: Callable[[], None] = lambda: None) -> Outcome:
    like, profile = rounded(problem), device.profile
    operands: list[Operands] = []  # made when something is timed

    def recording(record: Callable, shape: Any) -> Recording:
        if not operands:
            operands.append(_operands(device, like))
        made = Recording(device)
        record(made, like, operands[0], shape)
        return made

    if path == "flash":
        key, candidates = _key(device, path, like), flash_candidates(profile, like)
        tuned = tune(device, candidates, lambda s: recording(flash.record, s), cache, key, again=again, progress=step)
        return Outcome(path, problem, tuned.choice, tuned.seconds, tuned.first_seconds)
    shapes, first = gemm.choose_gemm(profile, like), None
    for product in _PRODUCTS:
        key, candidates = _key(device, path, like, product), gemm_candidates(profile, like, product)
        tuned = tune(device, candidates, lambda s: recording(gemm.record, replace(shapes, **{product: s})), cache, key, again=again, progress=step)  # noqa: B023
        shapes = replace(shapes, **{product: tuned.choice})
        first = tuned.first_seconds if first is None else first
    return Outcome(path, problem, shapes, tuned.seconds, first)


def _operands(device: Device, problem: Problem) -> Operands:
    """Buffers of a problem's size, filled with what could be queries, keys and values."""
    p = problem
    some = np.random.default_rng(0).standard_normal(1 << 16)

    def tensor(heads: int, length: int, width: int, dtype: str) -> Rows:
        return Rows.of(device.tensor(np.resize(some, (1, heads, length, width)), dtype), "bhsd")

    if kv_format(p.kv_dtype).quantised:  # only a cache is stored so
        cache = KVCache(device, p.num_kv_heads, p.head_dim, p.keys, p.kv_dtype)
        state, appending = StepState(device), Recording(device)
        state.place(0, p.keys)
        new = device.tensor(np.resize(some, (1, p.keys, p.num_kv_heads, p.head_dim)), "f32")
        cache.record_append(appending, step=state.step, keys=new, values=new, rows=p.keys, dtype="f32")
        appending.replay()
        keys, values = cache.rows(cache.keys), cache.rows(cache.values)
    else:
        keys, values = (tensor(p.num_kv_heads, p.keys, width, p.kv_dtype) for width in (p.head_dim, p.value_dim))
    return Operands(
        query=tensor(p.num_heads, p.queries, p.head_dim, p.dtype),
        keys=keys,
        values=values,
        out=tensor(p.num_heads, p.queries, p.value_dim, "f32" if packs_output(p) else p.dtype),
    )
