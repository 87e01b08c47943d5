"""Times one attention library on one problem and prints one JSON object; runs in that library's own Python (see `tools/compare_attention.py`).

The problem is (1, heads, length, dim) float32 from a fixed seed, so that every library gets the same numbers; results are compared by a few of them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

Run = Callable[[], np.ndarray]


def inputs(heads: int, length: int, dim: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((1, heads, length, dim), np.float32) for _ in range(3)]


def tinygrad(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> Run:
    """tinygrad on its WebGPU backend (Dawn), its scaled_dot_product_attention under its JIT."""
    import pydawn

    library = Path(pydawn.__file__).parent / "lib" / "libwebgpu_dawn_x86_64.so"
    os.environ |= {"DEV": "WEBGPU", "WEBGPU_BACKEND": "WGPUBackendType_Vulkan", "WEBGPU_PATH": str(library)}
    from tinygrad import Device, Tensor, TinyJit

    tensors = [Tensor(a).realize() for a in (q, k, v)]
    attend = TinyJit(lambda a, b, c: a.scaled_dot_product_attention(b, c, is_causal=causal).realize())

    def run() -> np.ndarray:
        out = attend(*tensors)
        Device[Device.DEFAULT].synchronize()
        return out

    for _ in range(3):
        run()
    run.result = lambda: attend(*tensors).numpy()
    return run


def computeml(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> Run:
    """computeml on Vulkan: rows of heads side by side."""
    import computeml as cml

    _, heads, length, dim = q.shape
    context = cml.Context()
    rows = [context.from_numpy(np.ascontiguousarray(a[0].swapaxes(0, 1).reshape(length, heads * dim))) for a in (q, k, v)]

    def run() -> np.ndarray:
        out = cml.ops.attention(*rows, num_heads=heads, causal=causal)
        context.flush()
        return out

    run.result = lambda: run().numpy().reshape(1, length, heads, dim).swapaxes(1, 2)
    return run


def torch(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> Run:
    """torch's scaled_dot_product_attention on CUDA where there is one, else on the CPU."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = [torch.from_numpy(a).to(device) for a in (q, k, v)]

    def run() -> np.ndarray:
        out = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=causal)
        if device == "cuda":
            torch.cuda.synchronize()
        return out

    run.result = lambda: run().cpu().numpy()
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=["tinygrad", "computeml", "torch"])
    for name, default in (("heads", 8), ("length", 512), ("dim", 64), ("repeat", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--causal", action="store_true")
    args = parser.parse_args()
    run = getattr(sys.modules[__name__], args.peer)(*inputs(args.heads, args.length, args.dim), args.causal)
    run()
    times = []
    for _ in range(args.repeat):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    sample = np.asarray(run.result(), np.float64)[0, :, :: max(1, args.length // 16), :4]
    print(json.dumps({"seconds": float(np.median(times)), "sample": sample.ravel().tolist()}))


if __name__ == "__main__":
    main()
