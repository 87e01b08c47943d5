"""Language models by other libraries: tokens per second of a prompt and of decoding, and the tokens that greedy decoding chooses.

`tools/compare_peers.py` runs this. A prompt is one timed call after a clear. Decoding is timed token by token with a wait after each and no choice of
tokens, as llama-bench does; wgattn's is also timed as greedy generation, which chooses.
"""

from __future__ import annotations

import importlib
import os
import random
import statistics
import time
from typing import Any

import numpy as np
from child import Answer, main


def _draw(p: dict, count: int) -> list[int]:
    rng = random.Random(p["seed"] + count)
    return [rng.randrange(p["vocab"]) for _ in range(count)]


def wgattn(p: dict) -> Answer:
    import wgattn
    from wgattn import Llama

    device = wgattn.Device(backend=p["backend"])
    model = Llama.from_gguf(p["model"], capacity=p["depth"] + p["prompt"] + p["decode"] + 64, arithmetic=p["arithmetic"], device=device)

    def run(count: int, single: bool) -> float:
        model.reset()
        if p["depth"]:
            model.prefill(_draw(p, p["depth"]))
        ids = _draw(p, count)
        begin = time.perf_counter()
        for part in ids if single else [ids]:
            _ = model.decode(part) if single else model.prefill(part)
        return time.perf_counter() - begin

    def generate(count: int) -> float:
        model.reset()
        stream = model.generate(_draw(p, max(p["depth"], 1)), count + 1, stop_ids=())
        next(stream)
        begin = time.perf_counter()
        for _ in stream:
            pass
        return time.perf_counter() - begin

    model.warm_up()
    run(p["prompt"], False), generate(p["decode"])
    rate = lambda count, what: count / statistics.median(what() for _ in range(p["repeat"]))  # noqa: E731
    answer = {
        "prompt_tok_s": rate(p["prompt"], lambda: run(p["prompt"], False)),
        "decode_tok_s": rate(p["decode"], lambda: generate(p["decode"])),
        "single_step_tok_s": rate(p["decode"], lambda: run(p["decode"], True)),
        "dispatches_per_token": model.dispatches_per_token,
    }
    model.reset()
    chosen = list(model.generate(p["check"], p["check_tokens"], stop_ids=()))
    about = {"device": f"{model.device.name} ({model.device.backend.name})", "driver": model.device.profile.driver}
    return answer | about | {"result": np.array(chosen), "version": f"wgattn {wgattn.__version__}"}


def llama_cpp(p: dict) -> Answer:
    """llama.cpp's Vulkan backend through the cyllama-vulkan wheel, all layers on the device, f16 cache."""
    os.environ["GGML_VK_VISIBLE_DEVICES"] = "0"  # otherwise it skips software devices and runs on the CPU, quietly
    lib = importlib.import_module("cyllama.llama.llama_cpp")
    lib.ggml_backend_load_all()
    devices = [d for d in lib.ggml_backend_dev_info() if d["type"] != "CPU"]
    if not devices:
        raise RuntimeError("llama.cpp found no Vulkan device")
    params = lib.LlamaModelParams()
    params.n_gpu_layers = 999
    model = lib.LlamaModel(path_model=p["model"], params=params)
    options = lib.LlamaContextParams()
    options.n_ctx = p["depth"] + p["prompt"] + p["decode"] + 64
    options.n_batch, options.n_ubatch, options.no_perf = 2048, 512, True
    context = lib.LlamaContext(model=model, params=options)

    def feed(ids: list[int], position: int) -> None:
        context.decode(lib.llama_batch_get_one(ids, position))
        context.synchronize()

    def run(count: int, single: bool) -> float:
        context.kv_cache_clear(True)
        if p["depth"]:
            feed(_draw(p, p["depth"]), 0)
        ids = _draw(p, count)
        begin = time.perf_counter()
        if single:
            for i, token in enumerate(ids):
                feed([token], p["depth"] + i)
        else:
            feed(ids, p["depth"])
        return time.perf_counter() - begin

    run(p["prompt"], False)  # compiles its pipelines
    run(2, True)
    rate = lambda count, single: count / statistics.median(run(count, single) for _ in range(p["repeat"]))  # noqa: E731
    answer = {"prompt_tok_s": rate(p["prompt"], False), "decode_tok_s": rate(p["decode"], True)}
    context.kv_cache_clear(True)
    sampler = lib.LlamaSampler(lib.LlamaSamplerChainParams())
    sampler.add_greedy()
    chosen: list[int] = []
    ids, position = list(p["check"]), 0
    while len(chosen) < p["check_tokens"]:
        feed(ids, position)
        position += len(ids)
        ids = [int(sampler.sample(context, -1))]
        chosen += ids
    package: Any = importlib.import_module("cyllama")
    about = {"device": devices[0]["description"], "version": f"llama.cpp Vulkan (cyllama {package.__version__}, ggml {lib.ggml_version()})"}
    return answer | about | {"result": np.array(chosen)}


PEERS = {"wgattn": wgattn, "llama.cpp": llama_cpp}
if __name__ == "__main__":
    main(PEERS)
