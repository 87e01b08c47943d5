"""Where a decode step of AttentionPipeline spends its time: on the host (checking, writing inputs, encoding, submitting) and on the device.

    python tools/decode_step.py [--heads 32] [--kv-heads 8] [--dim 128] [--depth 1024]
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from rich.console import Console
from rich.table import Table

import wgattn
from wgattn.gpu.timing import Stopwatch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("heads", 32), ("kv-heads", 8), ("dim", 128), ("depth", 1024), ("repeat", 50)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    device, rng = wgattn.default_device(), np.random.default_rng(0)
    pipe = wgattn.AttentionPipeline(args.heads, args.kv_heads, args.dim, kv_dtype="f16", capacity=args.depth + 2 * args.repeat + 1)
    draw = lambda positions: [rng.standard_normal((1, positions, h, args.dim), np.float32) for h in (args.heads, args.kv_heads, args.kv_heads)]  # noqa: E731
    pipe.prefill(*draw(args.depth))
    step = [device.tensor(a) for a in draw(1)]  # tensors: the call returns when the step is submitted, so its time is the host's
    pipe.decode(*step)
    host = []
    for _ in range(args.repeat):
        device.wait()
        begin = time.perf_counter()
        pipe.decode(*step)
        host.append(time.perf_counter() - begin)
    device.wait()
    table = Table("", "ms", title=f"A decode step at depth {pipe.length} on {device.name} ({device.backend.name}), {pipe.dispatches_per_token} dispatches")
    table.add_row("host: check, write, encode, submit", f"{np.median(host) * 1e3:.3f}")
    table.add_row("device", f"{Stopwatch(device)(pipe._recording()) * 1e3:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
