"""Times llama.cpp's Vulkan backend through the cyllama-vulkan wheel, and prints one JSON object.

Runs in the peer's own Python (the wheel wants other packages than ours): `tools/compare_llama.py` calls it. Method of llama-bench: a
prompt is one timed call after a clear; decoding is timed token by token with a synchronisation after each and no sampling.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import statistics
import sys
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the timed prompt")
    parser.add_argument("--decode", type=int, default=16, help="tokens decoded one by one")
    parser.add_argument("--depth", type=int, default=0, help="tokens in the cache before either")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()

    lib = importlib.import_module("cyllama.llama.llama_cpp")
    lib.ggml_backend_load_all()
    devices = [d for d in lib.ggml_backend_dev_info() if d["type"] != "CPU"]
    if not devices:
        sys.exit("llama.cpp found no Vulkan device; a software one needs GGML_VK_VISIBLE_DEVICES=0")
    params = lib.LlamaModelParams()
    params.n_gpu_layers = 999
    model = lib.LlamaModel(path_model=args.model, params=params)
    vocab = model.get_vocab()
    size = vocab.n_vocab() if callable(vocab.n_vocab) else vocab.n_vocab
    context_params = lib.LlamaContextParams()
    context_params.n_ctx = args.depth + args.prompt + args.decode + 64
    context_params.n_batch, context_params.n_ubatch, context_params.no_perf = 2048, 512, True
    context = lib.LlamaContext(model=model, params=context_params)
    rng = random.Random(0)

    def run(count: int, position: int, single: bool) -> float:
        steps = [[rng.randrange(size)] for _ in range(count)] if single else [[rng.randrange(size) for _ in range(count)]]
        begin = time.perf_counter()
        for step in steps:
            context.decode(lib.llama_batch_get_one(step, position))
            position += len(step)
            if single:
                context.synchronize()
        context.synchronize()
        return time.perf_counter() - begin

    def timed(count: int, single: bool) -> float:
        times = []
        for _ in range(args.repeat):
            context.kv_cache_clear(True)
            if args.depth:
                run(args.depth, 0, False)
            times.append(run(count, args.depth, single))
        return count / statistics.median(times)

    run(args.prompt, 0, False)  # compiles its pipelines
    run(2, args.prompt, True)
    result = {"prompt_tok_s": timed(args.prompt, False), "decode_tok_s": timed(args.decode, True)}
    version = importlib.import_module("cyllama").__version__
    print(json.dumps(result | {"peer": f"llama.cpp Vulkan (cyllama {version}, ggml {lib.ggml_version()})", "device": str(devices[0])}))


if __name__ == "__main__":
    main()
