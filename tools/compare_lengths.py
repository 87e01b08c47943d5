"""Whether one more position ever costs much: attention at T and at T + 1, for T = 64, 128, ... and where shapes of kernels change.

    python tools/compare_lengths.py [--most 32768] [--prompts 4096] [--heads 32 --kv-heads 8 --dim 128] [--kv-dtype f16] [--json FILE]

Decoding is recorded as models record it: one recording for a range of lengths, of which a step picks its own. A prompt is causal attention of T
queries over T keys, by the path that is chosen. The two of a pair are timed in turns, device time where there are timestamps; medians.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import wgattn
from wgattn.attention.kv_cache import KVCache
from wgattn.attention.split import regimes
from wgattn.block.attention_block import ChosenAttention, Geometry
from wgattn.gpu import Device, Recording, StepState
from wgattn.gpu.timing import Stopwatch

STEP = 0.15
"""More than that is a step that users would notice."""


def lengths(device: Device, most: int) -> list[int]:
    """Powers of two, and the last length before another recording serves."""
    powers = [2**n for n in range(6, most.bit_length()) if 2**n <= most]
    return sorted({*powers, *(limit for limit in regimes(device.profile, most + 2) if limit <= most)})


class Attention:
    """Causal attention of a step of some queries, the last of which sees `keys` keys, recorded for every range of lengths."""

    def __init__(self, device: Device, args: argparse.Namespace, tokens: int, capacity: int):
        geometry = Geometry(args.heads, args.kv_heads, args.dim, 1e-5)
        self._state = StepState(device)
        cache = KVCache(device, args.kv_heads, args.dim, capacity, args.kv_dtype)
        rows = device.tensor(np.random.default_rng(0).standard_normal((tokens, args.heads * args.dim), np.float32))
        out = device.empty(rows.shape)
        self._recordings = []
        for limit in regimes(device.profile, capacity) if tokens == 1 else [2**32]:
            recording = Recording(device)
            chosen = ChosenAttention(device.profile, geometry, tokens, min(limit, capacity))
            chosen.record(recording, step=self._state.step, query=rows, cache=cache, out=out)
            self._recordings.append((limit, recording))

    def at(self, keys: int, tokens: int) -> Recording:
        """The recording of a step that ends at that length, placed there."""
        self._state.place(keys - tokens, tokens)
        return next(recording for limit, recording in self._recordings if keys - tokens < limit)


def pairs(device: Device, args: argparse.Namespace) -> Iterator[tuple[str, int, float, float]]:
    """(what, T, seconds at T, seconds at T + 1)."""
    stopwatch = Stopwatch(device, samples=1, sample=2e-3)

    def measured(sides: Sequence[tuple[Attention, int, int]]) -> list[float]:
        rounds = [[stopwatch(attention.at(keys, tokens)) for attention, keys, tokens in sides] for _ in range(args.rounds + 1)]
        return [statistics.median(times) for times in zip(*rounds[1:], strict=True)]  # the first warms up

    decode = Attention(device, args, 1, args.most + 2)
    for T in lengths(device, args.most):
        yield "decode", T, *measured([(decode, T, 1), (decode, T + 1, 1)])
    for T in lengths(device, args.prompts):
        yield "prompt", T, *measured([(Attention(device, args, n, n), n, n) for n in (T, T + 1)])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("most", 32768), ("prompts", 4096), ("heads", 32), ("kv-heads", 8), ("dim", 128), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--kv-dtype", default="f16", help="how the cache is stored (default f16)")
    parser.add_argument("--json", type=Path, help="also write the result there")
    args = parser.parse_args(argv)
    device, found = wgattn.default_device(), []
    heads = f"{args.heads}/{args.kv_heads} heads of {args.dim}, {args.kv_dtype}"
    table = Table("", "T", "at T, us", "at T + 1, us", "step", title=f"{heads}; {device.name} ({device.backend.name})", title_justify="left")
    for what, T, before, after in pairs(device, args):
        step = after / before - 1
        found.append({"what": what, "T": T, "us": [before * 1e6, after * 1e6], "step": step})
        table.add_row(what, str(T), f"{before * 1e6:.4g}", f"{after * 1e6:.4g}", f"{'[bold red]' if step > STEP else ''}{step:+.1%}")
    Console().print(table)
    worst = max(found, key=lambda f: f["step"])
    print(f"The largest step: {worst['step']:+.1%}, {worst['what']} at {worst['T']}.")
    if args.json:
        about = {"date": datetime.date.today().isoformat(), "wgattn_version": wgattn.__version__, "device": device.name, "driver": device.profile.driver}
        sizes = {"backend": device.backend.name, **{k: v for k, v in vars(args).items() if k != "json"}}
        args.json.write_text(json.dumps(about | sizes | {"lengths": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
