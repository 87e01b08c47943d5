"""`wgattn generate`: continue a text with a language model."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..attention.kv_format import KV_FORMATS
from ..block.arithmetic import ARITHMETICS
from ..errors import ArgumentError, CapacityError
from ..gpu import Device, default_device
from ..gpu.webgpu import describe
from ..llm.gguf import ModelFile, find_model
from ..llm.llama import Llama
from ..llm.tokenizer import Tokenizer
from .console import plain_console, say
from .info import versions
from .typed import count, natural, number

HELP = """Continues a text with a language model from a GGUF file. The text goes to stdout as it comes, one summary line to stderr.

example:
  wgattn generate "The capital of France is"
  wgattn generate --model llama.gguf --tokens 200 --chat --temperature 0.7 --top-p 0.9 "Why is the sky blue?"
  wgattn generate --json --logits - < prompt.txt
  wgattn generate --arithmetic auto --backend dawn "Once upon a time"      # the quickest on a GPU with matrix units"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """What can be typed behind `wgattn generate`."""
    add = parser.add_argument
    add("prompt", help="the text to continue; - reads it from stdin, less a line end at its end")
    add("--model", default="smollm2", metavar="FILE", help="a GGUF file, or smollm2 for the demo model (default)")
    add("--tokens", type=count, default=64, metavar="N", help="at most N new tokens (default 64)")
    add("--chat", action="store_true", help="put the prompt into the model's chat template, as what the user says")
    add("--ignore-eos", action="store_true", help="go on after the model's end token")
    temperature = number(float, lambda t: 0 <= t < math.inf, "0 or a positive number")
    add("--temperature", type=temperature, default=0.0, metavar="T", help="0 takes the likeliest token (default); larger is more random")
    add("--top-k", type=natural, default=0, metavar="K", help="sample among the K likeliest tokens; 0 is all (default)")
    top_p = number(float, lambda p: 0 < p <= 1, "above 0 and at most 1")
    add("--top-p", type=top_p, default=1.0, metavar="P", help="sample among the likeliest tokens that together have the probability P (default 1)")
    add("--seed", type=natural, metavar="N", help="makes sampling repeatable")
    add("--kv-dtype", type=str.lower, choices=list(KV_FORMATS), default="f16", help="how the KV cache is stored (default f16)")
    add("--arithmetic", choices=list(ARITHMETICS), default="exact", help="how weights are multiplied: auto measures, and takes the quickest (default exact)")
    add("--capacity", type=count, metavar="N", help="positions in the KV cache (default: what prompt and new tokens need, at least 512)")
    add("--logits", action="store_true", help="with --json: the five largest logits of the first step, as [id, logit, text]")


@dataclass
class _Answer:
    """What one run of the model gave, as far as it came."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    stop_reason: str = "interrupted"
    prompt_s: float | None = None
    decode_s: float = 0.0
    decodes: int = 0
    top5: list[list[Any]] | None = None


def run(args: argparse.Namespace) -> int:
    """`wgattn generate`."""
    if args.logits and not args.json:
        args.usage_error("--logits needs --json")
    prompt = _prompt(args.prompt)
    begin = time.perf_counter()
    file = ModelFile(find_model(args.model))
    tokenizer = Tokenizer.from_gguf(file)
    if args.chat:
        prompt = tokenizer.render_chat([{"role": "user", "content": prompt}])
    prompt_ids = tokenizer.encode(prompt)
    room = capacity(args, len(prompt_ids))
    own = args.adapter or args.backend or args.checked
    device = Device(args.adapter, args.backend, checked=args.checked or None) if own else default_device()
    model = Llama(file, kv_dtype=args.kv_dtype, capacity=room, arithmetic=args.arithmetic, device=device)
    loaded = time.perf_counter()
    model.warm_up()
    warm = time.perf_counter()
    answer = _answer(model, tokenizer, prompt_ids, args)
    report = _report(args, model, prompt_ids, answer, load_s=loaded - begin, warmup_s=warm - loaded)
    if args.json:
        print(json.dumps(report))
    else:
        if not answer.text.endswith("\n"):
            sys.stdout.write("\n")
        sys.stdout.flush()
        say(plain_console(stderr=True), _summary(report), style="dim")
    return 130 if answer.stop_reason == "interrupted" else 0


def _prompt(given: str) -> str:
    if given != "-":
        return given
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise ArgumentError(f"stdin is not UTF-8 text (byte {error.start}): convert it") from None
    return text.removesuffix("\n").removesuffix("\r")


def capacity(args: argparse.Namespace, prompt_tokens: int) -> int:
    """Positions to ask for; checked here so that nobody waits for a model to load to hear of it."""
    if not prompt_tokens:
        raise ArgumentError("the prompt has no tokens: give some text")
    if args.capacity is None:
        return max(512, -(-(prompt_tokens + args.tokens) // 256) * 256)
    if prompt_tokens > args.capacity:
        raise CapacityError(f"the prompt has {prompt_tokens} tokens and --capacity is {args.capacity}: raise it, or leave it out")
    return args.capacity


def _answer(model: Llama, tokenizer: Tokenizer, prompt_ids: list[int], args: argparse.Namespace) -> _Answer:
    """Generate, and show each piece of text as soon as its characters are whole. Only the model's own time is counted."""
    answer, decoder = _Answer(), tokenizer.stream()

    def show(piece: str) -> None:
        answer.text += piece
        if piece and not args.json:
            sys.stdout.write(piece)
            sys.stdout.flush()

    stop_ids = () if args.ignore_eos else tokenizer.end_ids
    sampling = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p, "seed": args.seed}
    tokens = model.generate(prompt_ids, args.tokens, stop_ids=stop_ids, **sampling)
    try:
        while True:
            begin = time.perf_counter()
            token = next(tokens, None)
            took = time.perf_counter() - begin
            if answer.prompt_s is None:  # the first token comes right after the prompt
                answer.prompt_s = took
                answer.top5 = _top5(model.logits.numpy(), tokenizer) if args.logits else None
            else:
                answer.decode_s += took
                answer.decodes = model.length - len(prompt_ids)
            if token is None:
                break
            answer.ids.append(token)
            show(decoder.push(token))
        whole = len(answer.ids) == args.tokens
        answer.stop_reason = "length" if whole else "end" if answer.decodes == len(answer.ids) else "capacity"
    except KeyboardInterrupt:
        pass  # what there is so far is the answer
    show(decoder.finish())
    return answer


def _top5(logits: np.ndarray, tokenizer: Tokenizer) -> list[list[Any]]:
    return [[int(i), float(logits[i]), tokenizer.decode([i])] for i in np.argsort(-logits, kind="stable")[:5]]


def _report(args: argparse.Namespace, model: Llama, prompt_ids: list[int], answer: _Answer, **before: float) -> dict[str, Any]:
    timings = before | {
        "prompt_s": answer.prompt_s,
        "decode_s": answer.decode_s,
        "prompt_tok_s": _rate(len(prompt_ids), answer.prompt_s),
        "decode_tok_s": _rate(answer.decodes, answer.decode_s),
    }
    report = {
        "prompt_ids": prompt_ids,
        "ids": answer.ids,
        "text": answer.text,
        "stop_reason": answer.stop_reason,
        "timings": timings,
        "dispatches_per_token": model.dispatches_per_token,
        "adapter": describe(model.device.adapter),
        "backend": model.device.backend.name,
        "model": str(find_model(args.model)),
        "versions": versions(),
    }
    return report | ({"top5": answer.top5} if args.logits else {})


def _rate(count: int, seconds: float | None) -> float | None:
    return count / seconds if count and seconds else None


def _summary(report: dict[str, Any]) -> str:
    prompt, decode = (report["timings"][key] for key in ("prompt_tok_s", "decode_tok_s"))
    parts = [f"prompt {len(report['prompt_ids'])} tokens" + (f", {prompt:.1f} tok/s" if prompt else "")]
    parts.append(f"decode {len(report['ids'])} tokens" + (f", {decode:.1f} tok/s" if decode else ""))
    parts += [f"{report['dispatches_per_token']} dispatches per token", report["adapter"]]
    unusual = {"capacity": "the KV cache is full (see --capacity)", "interrupted": "interrupted"}
    if report["stop_reason"] in unusual:
        parts.append(unusual[report["stop_reason"]])
    return " | ".join(parts)
