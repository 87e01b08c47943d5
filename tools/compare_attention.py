"""Side by side on one machine, one after the other: wgattn's attention and that of other libraries, (1, heads, length, dim) float32.

    python -m venv peers && peers/bin/pip install numpy tinygrad==0.14 dawn-python==0.3.0 computeml==0.4.4
    python tools/compare_attention.py --peer peers/bin/python [--json FILE]

Inputs stay on the device; times are medians of whole calls, the wait for the result included. Ratios are what counts.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import time
from pathlib import Path

import numpy as np
from peers.sdpa import inputs
from rich.console import Console
from rich.table import Table

import wgattn
from wgattn.attention.paths import PATHS


def ours(path: str, heads: int, length: int, dim: int, causal: bool, repeat: int) -> dict:
    device = wgattn.default_device()
    tensors = [device.tensor(a) for a in inputs(heads, length, dim)]
    attend = lambda: wgattn.sdpa(*tensors, is_causal=causal, path=path)  # noqa: E731
    attend(), device.wait()
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        out = attend()
        device.wait()
        times.append(time.perf_counter() - begin)
    return {"seconds": float(np.median(times)), "sample": out.numpy()[0, :, :: max(1, length // 16), :4].astype(np.float64).ravel().tolist()}


def theirs(python: str, peer: str, heads: int, length: int, dim: int, causal: bool, repeat: int) -> dict | None:
    sizes = ["--heads", heads, "--length", length, "--dim", dim, "--repeat", repeat]
    command = [python, str(Path(__file__).parent / "peers" / "sdpa.py"), peer, *map(str, sizes), *(["--causal"] if causal else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    return json.loads(done.stdout.strip().splitlines()[-1]) if done.returncode == 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", required=True, help="the Python in whose environment the other libraries are installed; those missing are left out")
    for name, default in (("heads", 8), ("length", 512), ("dim", 64), ("repeat", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path, help="also write the result there")
    args = parser.parse_args()
    sizes = (args.heads, args.length, args.dim)
    device = wgattn.default_device()
    table = Table("", "full", "causal", title=f"SDPA {(1, *sizes)} float32 on {device.name}, ms (times as long as wgattn)", title_justify="left")
    found: dict[str, dict] = {}
    for causal in (False, True):
        kind = "causal" if causal else "full"
        for path in ("auto", *PATHS):
            found.setdefault(f"wgattn {path}", {})[kind] = ours(path, *sizes, causal, args.repeat)
        for peer in ("tinygrad", "computeml", "torch"):
            if result := theirs(args.peer, peer, *sizes, causal, args.repeat):
                found.setdefault(peer, {})[kind] = result
    for name, kinds in found.items():
        cells = []
        for kind in ("full", "causal"):
            best = found["wgattn auto"][kind]
            result = kinds.get(kind)
            if result is None:
                cells.append("-")
                continue
            apart = float(np.abs(np.array(result["sample"]) - np.array(best["sample"])).max())
            result["difference"] = apart
            result["ratio"] = result["seconds"] / best["seconds"]
            cells.append(f"{result['seconds'] * 1e3:.1f} ({result['ratio']:.1f}x)" + ("" if apart < 1e-4 else f" differs by {apart:.2g}"))
        table.add_row(name, *cells)
    Console().print(table)
    if args.json:
        for kinds in found.values():
            for result in kinds.values():
                result.pop("sample")
        about = {"date": datetime.date.today().isoformat(), "wgattn_version": wgattn.__version__, "device": device.name, "driver": device.profile.driver}
        args.json.write_text(json.dumps(about | {"shape": [1, *sizes], "results": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
