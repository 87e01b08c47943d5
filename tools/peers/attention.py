"""Attention by other libraries: (1, heads, length, dim) float32 arrays that stay on the device, the wait for the result included.

`tools/compare_peers.py` runs this. Each function raises `Cannot` for what its library does not offer: it must not be given something else instead.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import numpy as np
from child import Answer, Cannot, main, timed, version


def inputs(p: dict) -> list[np.ndarray]:
    return [p[name] for name in ("query", "key", "value")]


def wgattn(p: dict, path: str = "auto") -> Answer:
    import wgattn

    device = wgattn.default_device()
    tensors = [device.tensor(a) for a in inputs(p)]
    attend = lambda: wgattn.sdpa(*tensors, is_causal=p["causal"], path=path)  # noqa: E731

    def run() -> Any:
        out = attend()
        device.wait()
        return out

    seconds = timed(run, p["repeat"])
    return {"seconds": seconds, "result": attend().numpy(), "device": f"{device.name} ({device.backend.name})", "version": f"wgattn {wgattn.__version__}"}


def torch(p: dict) -> Answer:
    """On CUDA or Metal where there is one, else on the CPU."""
    import torch

    kind = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    tensors = [torch.from_numpy(a).to(kind) for a in inputs(p)]
    options = {"is_causal": p["causal"], "enable_gqa": p["heads"] != p["kv_heads"]}
    attend = lambda: torch.nn.functional.scaled_dot_product_attention(*tensors, **options)  # noqa: E731

    def run() -> None:
        attend()
        if kind == "cuda":
            torch.cuda.synchronize()
        elif kind == "mps":
            torch.mps.synchronize()

    name = torch.cuda.get_device_name() if kind == "cuda" else f"{kind}, {torch.get_num_threads()} threads"
    return {"seconds": timed(run, p["repeat"]), "result": attend().cpu().numpy(), "device": name, "version": f"torch {torch.__version__}"}


def tinygrad(p: dict) -> Answer:
    """On its WebGPU backend (Dawn), under its JIT."""
    import pydawn

    ending = {"Linux": ".so", "Darwin": ".dylib", "Windows": ".dll"}[platform.system()]
    libraries = sorted((Path(pydawn.__file__).parent / "lib").glob(f"*webgpu_dawn*{ending}"))
    library = next((path for path in libraries if platform.machine().lower() in path.name), libraries[0])
    os.environ |= {"DEV": "WEBGPU", "WEBGPU_BACKEND": "WGPUBackendType_Vulkan", "WEBGPU_PATH": str(library)}
    from tinygrad import Device, Tensor, TinyJit

    tensors = [Tensor(a).realize() for a in inputs(p)]
    options = {"is_causal": p["causal"], "enable_gqa": p["heads"] != p["kv_heads"]}
    attend = TinyJit(lambda q, k, v: q.scaled_dot_product_attention(k, v, **options).realize())

    def run() -> None:
        attend(*tensors)
        Device[Device.DEFAULT].synchronize()

    seconds = timed(run, p["repeat"], warm=3)  # the JIT records in its second call
    return {"seconds": seconds, "result": attend(*tensors).numpy(), "device": Device.DEFAULT, "version": version("tinygrad")}


def computeml(p: dict) -> Answer:
    """On Vulkan: rows of heads side by side."""
    import computeml as cml

    if p["heads"] != p["kv_heads"]:
        raise Cannot("no grouped heads")
    if p["dim"] > 128:
        raise Cannot("head dims up to 128")
    context = cml.Context()
    rows = [context.from_numpy(np.ascontiguousarray(a[0].swapaxes(0, 1).reshape(a.shape[2], -1))) for a in inputs(p)]

    def run() -> Any:
        out = cml.ops.attention(*rows, num_heads=p["heads"], causal=p["causal"])
        context.flush()
        return out

    seconds = timed(run, p["repeat"])
    result = run().numpy().reshape(1, p["queries"], p["heads"], p["dim"]).swapaxes(1, 2)
    return {"seconds": seconds, "result": result, "device": str(context.device_name), "version": version("computeml")}


def aule(p: dict) -> Answer:
    """On Vulkan, with tensors on the device."""
    from aule.vulkan import Aule

    if p["dim"] > 64:
        raise Cannot("head dims up to 64")
    library, arrays = Aule(), inputs(p)
    query, key, value, out = (library.tensor(a.shape) for a in (*arrays, arrays[0]))
    for tensor, array in zip((query, key, value), arrays, strict=True):
        tensor.upload(array)
    attend = lambda: library.attention_gpu(query, key, value, out, causal=p["causal"])  # noqa: E731
    seconds = timed(attend, p["repeat"], warm=1)
    return {"seconds": seconds, "result": out.download(), "device": str(library.device_name), "version": version("aule-attention")}


PEERS = {"wgattn": wgattn, "torch": torch, "tinygrad": tinygrad, "computeml": computeml, "aule": aule}
if __name__ == "__main__":
    main(PEERS | {f"wgattn {path}": lambda p, path=path: wgattn(p, path) for path in ("flash", "split", "unfused", "gemm")})
