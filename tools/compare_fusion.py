"""What fusing a transformer layer gains: decode steps of 24 layers of Qwen2-0.5B's shape, fused (5 dispatches a layer) and not (13).

    python tools/compare_fusion.py [--layers 24] [--depth 512] [--json FILE]

Both are made of the same projection kernels over the same random weights (Q5_0, down projections Q6_K), with one residual stream through all layers.
Device time is by timestamps where the device has them; wall time is of whole steps, encoded, submitted and waited for one by one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import wgattn
from wgattn.attention.kv_cache import KVCache
from wgattn.block.attention_block import AttentionBlock, ChosenAttention, Geometry
from wgattn.block.linear import padded
from wgattn.block.mlp import MlpBlock
from wgattn.block.quant import QuantizedTensor, format_of
from wgattn.block.unfused import UnfusedAttentionBlock, UnfusedMlpBlock
from wgattn.gpu import Arena, Recording, StepState
from wgattn.gpu.tuning import Stopwatch

E, H, KV, D, HIDDEN = 896, 14, 2, 64, 4864


def random_matrix(rng: np.random.Generator, rows: int, columns: int, kind: str) -> QuantizedTensor:
    """Random codes, with scales that keep activations near 1."""
    form = format_of(kind)
    raw = rng.integers(0, 256, (rows, form.row_bytes(columns)), dtype=np.uint8)
    blocks = raw.reshape(-1, form.block_bytes)
    at = {"Q5_0": 0, "Q6_K": 208}[kind]
    scale = columns**-0.5 / {"Q5_0": 10, "Q6_K": 1500}[kind]
    blocks[:, at : at + 2] = np.full(len(blocks), scale, np.float16).view(np.uint8).reshape(-1, 2)
    return QuantizedTensor(raw, (rows, columns), kind)


def record(device: wgattn.Device, fused: bool, layers: int, depth: int) -> Recording:
    """One decode step at that depth."""
    rng = np.random.default_rng(0)
    geometry, rope = Geometry(H, KV, D, 1e-6), wgattn.Rope(1e6, D)
    state = StepState(device, 1)
    state.write(depth, [0])
    arena = Arena(device, layers * 12_000_000)
    make = lambda width: device.empty((1, padded(width)))  # noqa: E731
    streams = [device.tensor(rng.standard_normal((1, padded(E))).astype(np.float32)), make(E)]
    widths = {"query": H * D, "new_keys": KV * D, "new_values": KV * D, "normed": E, "projected": E, "gate_up": 2 * HIDDEN, "hidden": HIDDEN}
    scratch: dict[str, Any] = {name: make(width) for name, width in widths.items()}
    scratch |= {"step": state.step, "rope": device.tensor(rope.table(depth + 1))}
    scratch["attended"] = scratch["query"] if fused else make(H * D)
    # Fused, the residual is added in place; unfused, it goes from one buffer to the other.
    states = [scratch | {"h": streams[i], "residual": streams[i], "y": streams[1 - i]} for i in range(2)]
    if fused:
        states = [scratch | {"h": streams[0]}] * 2
    attention = ChosenAttention(device.profile, geometry, 1, depth + 1)
    recording = Recording(device)
    for _ in range(layers):
        sizes = {"q": H * D, "k": KV * D, "v": KV * D}
        weights = {"norm": np.ones(E, np.float32), "wo": random_matrix(rng, E, H * D, "Q5_0")}
        weights |= {f"w{m}": random_matrix(rng, rows, E, "Q5_0") for m, rows in sizes.items()}
        weights |= {f"b{m}": rng.standard_normal(rows).astype(np.float32) for m, rows in sizes.items()}
        mlp = {"norm": np.ones(E, np.float32), "down": random_matrix(rng, E, HIDDEN, "Q6_K")}
        mlp |= {m: random_matrix(rng, HIDDEN, E, "Q5_0") for m in ("gate", "up")}
        cache = KVCache(device, KV, D, depth + 1, "f16")
        (AttentionBlock if fused else UnfusedAttentionBlock)(arena, weights, geometry, rope).record(recording, attention, cache, states[0], 1)
        (MlpBlock if fused else UnfusedMlpBlock)(arena, mlp, 1e-6).record(recording, states[1], 1)
    return recording


def wall(recording: Recording, repeat: int) -> float:
    """Median seconds of a step by itself, the wait for it included."""
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        recording.replay()
        recording.device.wait()
        times.append(time.perf_counter() - begin)
    return float(np.median(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--depth", type=int, default=512, help="positions in the cache before the step")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write the result there")
    args = parser.parse_args()
    device = wgattn.default_device()
    recordings = {kind: record(device, kind == "fused", args.layers, args.depth) for kind in ("fused", "unfused")}
    stopwatch = Stopwatch(device, hopeless=100)
    found = {kind: {"dispatches": len(r), "device_ms": [], "wall_ms": []} for kind, r in recordings.items()}
    for _ in range(3):  # in turns, so that a change of the machine's speed meets both
        for kind, recording in recordings.items():
            found[kind]["device_ms"].append(stopwatch(recording) * 1e3)
            found[kind]["wall_ms"].append(wall(recording, args.repeat) * 1e3)
    for numbers in found.values():
        numbers |= {key: float(np.median(numbers[key])) for key in ("device_ms", "wall_ms")}
    title = f"A decode step of {args.layers} layers on {device.name} ({device.backend.name})"
    table = Table("", "dispatches", "device, ms", "wall, ms", title=title, title_justify="left")
    for kind, n in found.items():
        table.add_row(kind, str(n["dispatches"]), f"{n['device_ms']:.3f}", f"{n['wall_ms']:.3f}")
    ratio = {key: found["unfused"][key] / found["fused"][key] for key in ("dispatches", "device_ms", "wall_ms")}
    table.add_row("unfused / fused", *(f"{r:.2f}x" for r in ratio.values()))
    Console().print(table)
    if args.json:
        about = {"date": datetime.date.today().isoformat(), "wgattn_version": wgattn.__version__, "device": device.name, "driver": device.profile.driver}
        sizes = {"backend": device.backend.name, "layers": args.layers, "depth": args.depth}
        args.json.write_text(json.dumps(about | sizes | found | {"ratio": ratio}, indent=1) + "\n")


if __name__ == "__main__":
    main()
