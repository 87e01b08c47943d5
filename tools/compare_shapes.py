"""Times every shape that a device can run of a family of kernels: what the constants in the choosers are justified by, and chosen anew for another GPU.

    python tools/compare_shapes.py gemm [--rows 4096 --columns 4096 --tokens 4096 --kind F16] [--json FILE]
    python tools/compare_shapes.py flash_matrix [--heads 32 --kv-heads 32 --dim 128 --queries 2048 --keys 2048]

Families: gemm, projections of many tokens on matrix units; tiles, the same in f32; int8, the same with rounded activations; gemv, of one token;
flash_matrix, attention of prompts on matrix units; split, attention of one query. Device time is by timestamps where the device has them: the median of
rounds in which all shapes take turns, after a warm-up, of the one dispatch that the shape is about. Results are compared with NumPy's in float64.
Ends with 1 where a result is wrong, with 2 where the device can run no shape.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import wgattn
from wgattn import reference
from wgattn.attention import flash_matrix, split
from wgattn.attention.paths import PATHS
from wgattn.attention.problem import Operands, Problem, Rows
from wgattn.block import tiles
from wgattn.block.linear import Matrix, choose_linear, matrix_candidates, padded, record_linear
from wgattn.block.quant import FORMATS
from wgattn.block.vector import VectorShape, choose_vector, digits_of
from wgattn.cases.weights import random_matrix
from wgattn.errors import CapacityError, Unsupported, WgattnError
from wgattn.gpu import Device, DeviceProfile, Recording, StepState
from wgattn.gpu.timing import Stopwatch

_TOKENS = 16
"""Of a projection's results, how many are compared."""


@dataclass
class Bench:
    """A problem in all shapes: what to record, and how wrong the result is."""

    shapes: list[Any]
    chosen: Any
    record: Callable[[Any], tuple[Recording, Callable[[], float]]]
    """Of a shape: the recording, and what tells the NMSE of its result."""
    allowed: float
    """NMSE."""
    operations: float
    nbytes: float
    """Read at least."""


# ---- projections


def _projection(device: Device, args: argparse.Namespace, shapes: Iterable[Any], tokens: int, arithmetic: str, allowed: float) -> Bench:
    rng = np.random.default_rng(0)
    weights = random_matrix(rng, args.rows, args.columns, args.kind)
    matrix, state = Matrix(device, weights, 2), StepState(device, tokens)
    state.write(0, [0] * tokens)
    x = np.zeros((tokens, padded(args.columns)), np.float32)
    x[:, : args.columns] = rng.standard_normal((tokens, args.columns))
    given, y = device.tensor(x), device.empty((tokens, args.rows))
    expected = reference.linear(x[-_TOKENS:, : args.columns], weights.dequantize())

    def record(shape: Any) -> tuple[Recording, Callable[[], float]]:
        recording = Recording(device)
        record_linear(
            recording, matrix, step=state.step, x=given, output="store", outputs={"y": y}, tokens=tokens, y_stride=args.rows, arithmetic=arithmetic, shape=shape
        )
        return recording, lambda: _nmse(y.numpy()[-_TOKENS:], expected)

    device.write(y.buffer, np.full(y.shape, np.nan, np.float32))
    chosen = choose_linear(device.profile, args.rows, args.columns, tokens, 0, arithmetic, FORMATS[args.kind])
    return Bench(list(shapes), chosen, record, allowed, 2.0 * tokens * args.rows * args.columns, matrix.nbytes)


def _gemm(device: Device, args: argparse.Namespace) -> Bench:
    _units(device.profile)
    return _projection(device, args, matrix_candidates(device.profile), args.tokens, "half", 1e-6)


def _tile_shapes(device: Device, known: Iterable[tiles.TileShape]) -> list[tiles.TileShape]:
    p = device.profile
    return [t for t in known if t.workgroup_bytes <= p.workgroup_memory and t.workgroup <= p.max_invocations]


def _tiles(device: Device, args: argparse.Namespace) -> Bench:
    return _projection(device, args, _tile_shapes(device, tiles._TILES), args.tokens, "exact", 1e-9)


def _int8(device: Device, args: argparse.Namespace) -> Bench:
    if not FORMATS[args.kind].quantised:
        raise Unsupported(f"{args.kind} is not quantised: int8 is for weights that are codes.")
    return _projection(device, args, _tile_shapes(device, tiles._INT8_TILES), args.tokens, "int8", 1e-3)


def _gemv(device: Device, args: argparse.Namespace) -> Bench:
    return _projection(device, args, vector_candidates(device.profile, args.rows, args.columns, args.kind), 1, "exact", 1e-9)


def vector_candidates(profile: DeviceProfile, rows: int, columns: int, kind: str) -> list[VectorShape]:
    """Shapes of `block/linear_vector.wgsl` that fit a device, each of whose workgroups has rows."""
    form = FORMATS[kind]
    base = choose_vector(profile, rows, padded(columns), form, digits_of(form, "exact"))
    if base is None:
        return []
    found = []
    for lanes, workgroup, batch, batches in itertools.product((8, 16, 32, 64, 128), (64, 128, 256, 512, 1024), (1, 2, 4), (1, 2, 4)):
        if lanes <= workgroup <= profile.max_invocations:
            s = replace(base, lanes=lanes, teams=workgroup // lanes, batch=batch, batches=batches)
            whole = workgroup % s.subgroup == 0 and s.rows % 4 == 0 and s.rows // 4 <= workgroup and s.rows <= max(4, rows)
            if whole and 1 <= s.chunks <= 4 and s.batch * s.chunks <= 12 and s.workgroup_bytes <= profile.workgroup_memory:
                found.append(s)
    return found


# ---- attention


def _attention(device: Device, args: argparse.Namespace, path: str, queries: int, shapes: Callable[[Problem], list[Any]], allowed: float) -> Bench:
    rng, D = np.random.default_rng(0), args.dim
    dtypes = {"f32": np.float32, "f16": np.float16}
    p = Problem(1, args.heads, args.kv_heads, queries, args.keys, D, D, 1 / math.sqrt(D), kv_dtype=args.kv_dtype, right=0)
    if path == "flash_matrix":
        p = replace(p, half=True)
    if missing := PATHS[path].unsupported(device.profile, p):
        raise Unsupported(f"{path}: {missing}")
    q, k, v = (
        rng.standard_normal((1, h, n, D), np.float32).astype(t)
        for h, n, t in ((args.heads, queries, np.float32), *((args.kv_heads, args.keys, dtypes[args.kv_dtype]),) * 2)
    )
    out = device.empty((1, args.heads, queries, D))
    device.write(out.buffer, np.full(out.shape, np.nan, np.float32))
    operands = Operands(*(Rows.of(t, "bhsd") for t in (*map(device.tensor, (q, k, v)), out)))
    group = args.heads // args.kv_heads
    expected, _ = reference.attention(q[:, -group:], k[:, -1:], v[:, -1:], is_causal=True)

    def record(shape: Any) -> tuple[Recording, Callable[[], float]]:
        recording = Recording(device)
        PATHS[path].record(recording, p, operands, shape)
        return recording, lambda: _nmse(out.numpy()[:, -group:], expected)

    seen = queries * args.keys - queries * (queries - 1) / 2
    nbytes = 2.0 * args.kv_heads * args.keys * D * np.dtype(dtypes[args.kv_dtype]).itemsize
    return Bench(shapes(p), PATHS[path].shape(device.profile, p), record, allowed, 4.0 * args.heads * D * seen, nbytes)


def _flash_matrix(device: Device, args: argparse.Namespace) -> Bench:
    return _attention(device, args, "flash_matrix", args.queries, lambda p: flash_matrix.candidates(device.profile, p), 1e-5)


def _split(device: Device, args: argparse.Namespace) -> Bench:
    return _attention(device, args, "split", 1, lambda p: split_candidates(device.profile, p), 1e-9)


def split_candidates(profile: DeviceProfile, problem: Problem) -> list[split.SplitShape]:
    """The shape that is chosen, and those around it that fit a device."""
    chosen = split.choose_split(profile, problem)
    found = [chosen]
    lanes = (1,) if chosen.folded == 1 else [n for n in (4, 8, 16, 32) if n <= profile.subgroup_size]
    workgroups = (8, 16, 32) if profile.software else (64, 128, 256, 512)
    groups = [g for g in range(1, chosen.group * 2 + 1) if problem.ratio % g == 0]
    for group, lane, keys, workgroup, splits in itertools.product(groups, lanes, (1, 2, 4, 8), workgroups, (1, 8, 16, 32, 64)):
        folded = profile.subgroup_size if chosen.folded > 1 and workgroup % profile.subgroup_size == 0 else lane
        s = split.SplitShape(group, lane, keys, workgroup, splits, folded)
        slots = math.ceil(max(problem.width, problem.value_width) / lane)
        fits = s.merge_bytes(problem.value_width, 1) <= profile.workgroup_memory and workgroup <= profile.max_invocations
        near = workgroup * splits * problem.rows // group
        if fits and keys <= lane and lane <= workgroup and group * slots <= 64 and (splits == 1 or 4096 <= near <= 262144):
            found.append(s)
    return list(dict.fromkeys(found))


FAMILIES = {"gemm": _gemm, "tiles": _tiles, "int8": _int8, "gemv": _gemv, "flash_matrix": _flash_matrix, "split": _split}


def _units(profile: DeviceProfile) -> None:
    if ("f16", "f32", 16, 16, 16) not in profile.matrix_units:
        raise Unsupported(f"{profile.name} ({profile.backend}) has no matrix units of 16 x 16 x 16 from f16 to f32.")


def _nmse(got: np.ndarray, expected: np.ndarray) -> float:
    error = float(((got - expected) ** 2).sum() / (expected**2).sum())
    return error if math.isfinite(error) else math.inf


# ---- measuring


def measure(device: Device, bench: Bench, rounds: int, most: int) -> list[dict[str, Any]]:
    """For each shape its fields, median seconds, what these are in operations and bytes a second, and the NMSE; the quickest first."""
    shapes = list(dict.fromkeys([bench.chosen, *bench.shapes] if bench.chosen in bench.shapes else bench.shapes))[: most or None]
    found, stopwatch = [], Stopwatch(device, samples=3, hopeless=3)
    for shape in shapes:
        row = {"shape": {"kernel": type(shape).__name__} | dataclasses.asdict(shape), "chosen": shape == bench.chosen, "seconds": [], "error": math.inf}
        try:
            recording, error = bench.record(shape)
        except CapacityError as refused:
            found.append(row | {"refused": str(refused), "recording": None})
            continue
        recording.replay()
        row["error"] = error()
        long = max(recording, key=lambda d: d.operations)
        found.append(row | {"recording": Recording(device, [d for d in recording if d.kernel is long.kernel or not long.operations])})
    for _ in range(rounds):
        for row in found:
            if row["recording"] is not None:
                row["seconds"].append(stopwatch(row["recording"]))
    for row in found:
        del row["recording"]
        if row["seconds"]:
            row["seconds"] = statistics.median(row["seconds"])
            row |= {"operations_s": bench.operations / row["seconds"], "bytes_s": bench.nbytes / row["seconds"]}
        row["right"] = "refused" in row or row["error"] <= bench.allowed
    return sorted(found, key=lambda r: r["seconds"] or math.inf)


def table(title: str, found: list[dict[str, Any]], most: int = 40) -> Table:
    varying = [k for k in found[0]["shape"] if len({str(r["shape"].get(k)) for r in found}) > 1]
    fixed = ", ".join(f"{k} {v}" for k, v in found[0]["shape"].items() if k not in varying and k != "kernel")
    shown = Table(*varying, "us", "of the best", "TFLOP/s", "GB/s", "NMSE", "", title=f"{title}\nall: {fixed}", title_justify="left")
    best = found[0]["seconds"]
    for row in [r for i, r in enumerate(found) if i < most or r["chosen"] or not r["right"]]:
        cells = [str(row["shape"][k]) for k in varying]
        if "refused" in row:
            shown.add_row(*cells, "-", "-", "-", "-", "-", "does not fit")
            continue
        rates = (f"{row['operations_s'] / 1e12:.4g}", f"{row['bytes_s'] / 1e9:.4g}", f"{row['error']:.1e}")
        note = " ".join(["chosen"] * row["chosen"] + ["[red]wrong[/red]"] * (not row["right"]))
        shown.add_row(*cells, f"{row['seconds'] * 1e6:.1f}", f"{row['seconds'] / best:.2f}", *rates, note)
    return shown


def main(argv: list[str] | None = None, device: Device | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=FAMILIES)
    sizes = {"rows": 4096, "columns": 4096, "tokens": 4096, "heads": 32, "kv-heads": 32, "dim": 128, "queries": 2048, "keys": 2048, "rounds": 3}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kind", choices=FORMATS, default="F16", help="of weights")
    parser.add_argument("--kv-dtype", choices=("f32", "f16"), default="f16")
    parser.add_argument("--most", type=int, default=0, help="time no more shapes than these; 0: all")
    parser.add_argument("--json", type=Path, help="also write the result there")
    args = parser.parse_args(argv)
    try:
        device = device or wgattn.default_device()
        bench = FAMILIES[args.family](device, args)
        if not bench.shapes:
            raise Unsupported(f"{device.name} can run no shape of {args.family}.")
        found = measure(device, bench, args.rounds, args.most)
    except WgattnError as error:
        print(error, file=sys.stderr)
        return 2
    attention = args.family in ("flash_matrix", "split")
    used = ("heads", "kv_heads", "dim", "queries", "keys", "kv_dtype") if attention else ("rows", "columns", "tokens", "kind")
    problem = {name: getattr(args, name) for name in used} | ({"queries": 1} if args.family == "split" else {"tokens": 1} if args.family == "gemv" else {})
    told = ", ".join(f"{k} {v}" for k, v in problem.items())
    Console().print(table(f"{args.family}: {told}, on {device.name} ({device.backend.name})", found))
    if args.json:
        about = {"date": datetime.date.today().isoformat(), "wgattn_version": wgattn.__version__, "device": device.name, "driver": device.profile.driver}
        result = about | {"backend": device.backend.name, "family": args.family, "problem": problem, "rounds": args.rounds, "shapes": found}
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(row["right"] for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
