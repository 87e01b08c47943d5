"""Side by side on one machine, one after the other: wgattn and llama.cpp's Vulkan backend on the same model.

    python -m venv peer && peer/bin/pip install --no-deps cyllama-vulkan==0.2.18        (Python 3.12 and newer: 0.7.0)
    python tools/compare_llama.py --peer peer/bin/python [--model FILE.gguf|smollm2] [--prompt 128] [--decode 16] [--json FILE]

Ratios are what counts: on a shared machine an absolute time means little.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import wgattn
from wgattn.llm.gguf import find_model
from wgattn.llm.llama import Llama


def ours(path: Path, prompt: int, decode: int, depth: int, repeat: int) -> dict:
    """Median tokens per second. Prompts are random tokens; decoding is greedy generation, which does more than the peer's: it also chooses.

    `single_step_tok_s` is the peer's method: one call a token, its logits read back.
    """
    model = Llama.from_gguf(path, capacity=depth + prompt + decode + 64)
    rng = np.random.default_rng(0)
    draw = lambda n: rng.integers(0, model.config.vocab_size, n).tolist()  # noqa: E731

    def run(count: int, single: bool) -> float:
        model.reset()
        if depth:
            model.prefill(draw(depth))
        ids = draw(count)
        begin = time.perf_counter()
        for token in ids if single else [ids]:
            _ = model.decode(token) if single else model.prefill(token)
        return time.perf_counter() - begin

    def generate(count: int) -> float:
        model.reset()
        stream = model.generate(draw(max(depth, 1)), count + 1, stop_ids=())
        next(stream)
        begin = time.perf_counter()
        for _ in stream:
            pass
        return time.perf_counter() - begin

    model.warm_up()
    run(prompt, False), generate(decode)
    rate = lambda count, single: count / statistics.median(run(count, single) for _ in range(repeat))  # noqa: E731
    return {
        "prompt_tok_s": rate(prompt, False),
        "decode_tok_s": decode / statistics.median(generate(decode) for _ in range(repeat)),
        "single_step_tok_s": rate(decode, True),
        "dispatches_per_token": model.dispatches_per_token,
        "device": model.device.name,
        "driver": model.device.profile.driver,
        "backend": model.device.backend.name,
    }


def theirs(python: str, path: Path, prompt: int, decode: int, depth: int, repeat: int) -> dict:
    script = Path(__file__).parent / "peers" / "llama_cpp.py"
    command = [python, str(script), str(path), "--prompt", str(prompt), "--decode", str(decode), "--depth", str(depth), "--repeat", str(repeat)]
    environment = {**os.environ, "GGML_VK_VISIBLE_DEVICES": "0"}  # otherwise it skips software devices and runs on the CPU, quietly
    environment |= {"PYTHONPATH": environment.pop("PEER_PYTHONPATH", "")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"The peer failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", required=True, help="the Python in whose environment cyllama-vulkan is installed")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--decode", type=int, default=16)
    parser.add_argument("--depth", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the result there")
    args = parser.parse_args()
    path = find_model(args.model)
    sizes = (args.prompt, args.decode, args.depth, args.repeat)
    us, peer = ours(path, *sizes), theirs(args.peer, path, *sizes)
    table = Table("", "wgattn", "llama.cpp Vulkan", "ratio", title=f"{path.name} on {us['device']}, tokens per second")
    ratios = {}
    for key, name in (("prompt_tok_s", f"prompt of {args.prompt} at depth {args.depth}"), ("decode_tok_s", f"decode at depth {args.depth}")):
        ratios[key] = us[key] / peer[key]
        table.add_row(name, f"{us[key]:.2f}", f"{peer[key]:.2f}", f"{ratios[key]:.1f}x")
    Console().print(table)
    if args.json:
        result = {
            "date": datetime.date.today().isoformat(),
            "wgattn_version": wgattn.__version__,
            "model": path.name,
            "sizes": dict(zip(("prompt", "decode", "depth", "repeat"), sizes, strict=True)),
            "wgattn": us,
            "peer": peer,
            "ratio": ratios,
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
