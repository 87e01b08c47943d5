"""What fusing a transformer layer gains: decode steps of 24 layers of Qwen2-0.5B's shape, fused (5 dispatches a layer) and not (13).

    python tools/compare_fusion.py [--layers 24] [--depth 512] [--json FILE]

Both are made of the same projection kernels over the same random weights (Q5_0, down projections Q6_K), with one residual stream through all layers:
those of the section "block" of `wgattn bench`, here measured in turns. Device time is by timestamps where the device has them; wall time is of whole
steps, encoded, submitted and waited for one by one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import wgattn
from wgattn.bench.block import record
from wgattn.gpu import Recording
from wgattn.gpu.timing import Stopwatch


def wall(recording: Recording, repeat: int) -> float:
    """Median seconds of a step by itself, the wait for it included."""
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        recording.replay()
        recording.device.wait()
        times.append(time.perf_counter() - begin)
    return float(np.median(times))


def stream(recording: Recording, seconds: float = 0.3) -> float:
    """Seconds a step where steps follow one another, as in generating text: submitted one by one, waited for at the end."""

    def run(steps: int) -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            recording.replay()
        recording.device.wait()
        return time.perf_counter() - begin

    steps = max(2, int(seconds / run(2) * 2))
    run(steps)  # a GPU that idled is slow at first
    return run(steps) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--depth", type=int, default=512, help="positions in the cache before the step")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write the result there")
    args = parser.parse_args()
    device = wgattn.default_device()
    steps = {kind: record(device, kind == "fused", args.layers, args.depth) for kind in ("fused", "unfused")}
    stopwatch = Stopwatch(device, hopeless=100)
    found = {kind: {"dispatches": len(s.recording), "device_ms": [], "stream_ms": [], "wall_ms": []} for kind, s in steps.items()}
    for _ in range(3):  # in turns, so that a change of the machine's speed meets both
        for kind, step in steps.items():
            found[kind]["stream_ms"].append(stream(step.recording) * 1e3)
            found[kind]["device_ms"].append(stopwatch(step.recording) * 1e3)
            found[kind]["wall_ms"].append(wall(step.recording, args.repeat) * 1e3)
    for numbers in found.values():
        numbers |= {key: float(np.median(numbers[key])) for key in ("device_ms", "stream_ms", "wall_ms")}
    title = f"A decode step of {args.layers} layers on {device.name} ({device.backend.name})"
    table = Table("", "dispatches", "device, ms", "in a stream, ms", "alone, ms", title=title, title_justify="left")
    for kind, n in found.items():
        table.add_row(kind, str(n["dispatches"]), f"{n['device_ms']:.3f}", f"{n['stream_ms']:.3f}", f"{n['wall_ms']:.3f}")
    ratio = {key: found["unfused"][key] / found["fused"][key] for key in ("dispatches", "device_ms", "stream_ms", "wall_ms")}
    table.add_row("unfused / fused", *(f"{r:.2f}x" for r in ratio.values()))
    Console().print(table)
    if args.json:
        about = {"date": datetime.date.today().isoformat(), "wgattn_version": wgattn.__version__, "device": device.name, "driver": device.profile.driver}
        sizes = {"backend": device.backend.name, "layers": args.layers, "depth": args.depth}
        args.json.write_text(json.dumps(about | sizes | found | {"ratio": ratio}, indent=1) + "\n")


if __name__ == "__main__":
    main()
