"""The command `wgattn`: parses, calls the library, prints.

Exit codes: 0; 1 for an error that the message explains; 2 for bad usage; 130 after Ctrl-C; 141 when the reader of a pipe has gone.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import __version__
from .attention.kv_format import KV_FORMATS
from .commands import bench as bench_command
from .commands import selftest as selftest_command
from .commands import tune as tune_command
from .commands.typed import count, natural, number
from .errors import ArgumentError, CapacityError, DeviceError, WgattnError
from .gpu import Device, DeviceProfile, default_device, list_adapters
from .gpu.webgpu import describe
from .llm.gguf import ModelFile, find_model
from .llm.llama import Llama
from .llm.tokenizer import Tokenizer

_BACKENDS = {"wgpu": ("wgpu", "pip install wgpu"), "dawn": ("wgpudawn", "pip install 'wgattn[dawn]'")}  # package, how to install it
_SOFTWARE = "The chosen adapter is software: the CPU does all the work, which is slow. If this machine has a GPU, install its driver."

_INFO_HELP = """Shows the adapters, which of them is used and why, what it can do (measured), and versions.

example:
  wgattn info
  wgattn info --json --adapter llvmpipe"""
_GENERATE_HELP = """Continues a text with a language model from a GGUF file. The text goes to stdout as it comes, one summary line to stderr.

example:
  wgattn generate "The capital of France is"
  wgattn generate --model llama.gguf --tokens 200 --chat --temperature 0.7 --top-p 0.9 "Why is the sky blue?"
  wgattn generate --json --logits - < prompt.txt"""
_TUNE_HELP = """Times tile shapes for attention on this device and keeps the fastest in a file of yours; later runs use them. Known ones are not timed again.

example:
  wgattn tune
  wgattn tune --again --json"""

_SELFTEST_HELP = """Runs every kernel that this device would use on random numbers and compares with a float64 reference. Exit code 1 when one is wrong.

example:
  wgattn selftest
  wgattn selftest --seed 7 --only "MLP Q4_0" --json"""


# ---- what is typed


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with the usage in one sentence, without the whole synopsis."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help.\n")


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--adapter", metavar="NAME", help="use the adapter whose name contains this (default: WGATTN_ADAPTER, else the best)")
    common.add_argument("--backend", choices=list(_BACKENDS), help="WebGPU implementation (default: WGATTN_BACKEND, else wgpu)")
    common.add_argument("--checked", action="store_true", help="compile shaders with every check of the compiler: slower, for hunting errors")

    as_json = argparse.ArgumentParser(add_help=False)
    as_json.add_argument("--json", action="store_true", help="print one JSON object instead")

    about = "Transformer attention on any GPU, through WebGPU."
    parser = _Parser(prog="wgattn", description=about, epilog="example: wgattn info", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"wgattn {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], int], summary: str, description: str, *more: argparse.ArgumentParser) -> argparse.ArgumentParser:
        raw = argparse.RawDescriptionHelpFormatter
        made = commands.add_parser(name, parents=[*more, common], help=summary, description=description, formatter_class=raw, allow_abbrev=False)
        made.set_defaults(run=run, usage_error=made.error)
        return made

    command("info", info, "show adapters, features, the measured profile and versions", _INFO_HELP, as_json)
    _add_generate_options(command("generate", generate, "continue a text with a language model", _GENERATE_HELP, as_json))
    tuned = command("tune", tune, "find the fastest tiles for this device", _TUNE_HELP, as_json)
    tuned.add_argument("--again", action="store_true", help="time what is known too")
    tested = command("selftest", selftest, "compare every kernel with the reference on this device", _SELFTEST_HELP, as_json)
    tested.add_argument("--seed", type=natural, metavar="N", help="the same random numbers again (default: others each time; printed)")
    tested.add_argument("--only", metavar="TEXT", help="only the lines whose name contains this")
    bench_command.add_options(command("bench", bench_command.run, "measure this device, live", bench_command.HELP))
    return parser


def _add_generate_options(parser: argparse.ArgumentParser) -> None:
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
    add("--capacity", type=count, metavar="N", help="positions in the KV cache (default: what prompt and new tokens need, at least 512)")
    add("--logits", action="store_true", help="with --json: the five largest logits of the first step, as [id, logit, text]")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. `argv`: the words after `wgattn`; default: those of this process."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a character that the terminal lacks must not end the program
    try:
        code = _run(argv)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except OSError as error:  # stdout is a pipe that nobody reads, or a full disk
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python fails again when it flushes at exit
        return 141 if isinstance(error, BrokenPipeError) else _fail(error)
    return code


def _run(argv: Sequence[str] | None) -> int:
    try:
        args = _parser().parse_args(argv)
        return args.run(args)
    except SystemExit as end:  # argparse has printed help, the version or an error
        return int(end.code or 0)
    except WgattnError as error:
        return _fail(error)


def _fail(error: Exception) -> int:
    print(f"wgattn: {error}", file=sys.stderr)
    return 1


# ---- tune


def tune(args: argparse.Namespace) -> int:
    """`wgattn tune`."""
    tune_command.run(Device(args.adapter, args.backend, checked=args.checked or None), again=args.again, as_json=args.json)
    return 0


# ---- selftest


def selftest(args: argparse.Namespace) -> int:
    """`wgattn selftest`."""
    device = selftest_command.PoisonedDevice(args.adapter, args.backend, checked=args.checked or None)
    return selftest_command.run(device, seed=args.seed, as_json=args.json, only=args.only)


# ---- info


def info(args: argparse.Namespace) -> int:
    """`wgattn info`. What can be said without a device is said even when there is none."""
    adapters = list_adapters(args.backend)
    device, failure = None, None
    try:
        device = Device(args.adapter, args.backend, checked=args.checked or None)
    except DeviceError as error:
        failure = error
    if args.json:
        print(json.dumps(_info(args, adapters, device), indent=2))
    else:
        _print_info(args, adapters, device)
    return _fail(failure) if failure else 0


def _info(args: argparse.Namespace, adapters: list[str], device: Device | None) -> dict[str, Any]:
    report: dict[str, Any] = {"adapters": adapters, "chosen": None, "versions": _versions(), "backends": _backends()}
    if device is not None:
        profile = asdict(device.profile) | {"software": device.profile.software}
        report |= {"chosen": describe(device.adapter), "why": _why(args, adapters), "software": device.profile.software}
        report |= {"backend": device.backend.name, "checked": device.checked, "features": sorted(device.gpu.features), "profile": profile}
    return report


def _print_info(args: argparse.Namespace, adapters: list[str], device: Device | None) -> None:
    console = _console()
    chosen = adapters.index(describe(device.adapter)) if device else None
    rows = [(name, f"used: {_why(args, adapters)}" if i == chosen else "") for i, name in enumerate(adapters)]
    _section(console, "Adapters", rows or [("none", "")])
    if device is not None:
        if device.profile.software:
            console.print(f"  {_SOFTWARE}", soft_wrap=True)
        features = [(name, "") for name in sorted(device.gpu.features)]
        _section(console, "Features in use", features or [("none", "")])
        _section(console, "Profile (measured)", _profile_rows(device.profile) + ([("shaders", "checked: slower")] if device.checked else []))
    has = lambda b: f"installed: {b['package']} {b['version']}" if b["version"] else f"not installed: {b['install']}"  # noqa: E731
    _section(console, "Backends", [(name, has(backend)) for name, backend in _backends().items()])
    _section(console, "Versions", [(name, value or "unknown") for name, value in _versions().items()])


def _section(console: Console, title: str, rows: Sequence[tuple[str, str]]) -> None:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None, pad_edge=False, padding=(0, 2))
    for left, right in rows:
        table.add_row(Text(left), Text(right, overflow="fold"))
    console.print(table)


def _profile_rows(p: DeviceProfile) -> list[tuple[str, str]]:
    matrix = ", ".join(f"{m}x{n}x{k} {a} to {b}" for a, b, m, n, k in p.matrix_units)
    return [
        ("subgroup size", f"{p.subgroup_size} lanes" if p.subgroup_size else "no usable subgroups"),
        ("f16 arithmetic", "yes" if p.f16 else "no"),
        ("timestamps", "yes" if p.timestamps else "no"),
        ("matrix units", matrix or "none usable"),
        ("workgroup memory", _size(p.workgroup_memory)),
        ("workgroup", f"{p.max_invocations:,} invocations"),
        ("grid", f"{p.max_workgroups:,} workgroups in a dimension"),
        ("storage buffers", f"{p.max_storage_buffers:,} in a kernel"),
        ("largest binding", _size(p.max_binding)),
        ("largest buffer", _size(p.max_buffer)),
        ("offset alignment", _size(p.storage_alignment)),
        ("driver", p.driver),
    ]


def _why(args: argparse.Namespace, adapters: list[str]) -> str:
    if args.adapter:
        return f"--adapter {args.adapter}"
    if os.environ.get("WGATTN_ADAPTER"):
        return f"WGATTN_ADAPTER={os.environ['WGATTN_ADAPTER']}"
    return "the only one" if len(adapters) == 1 else "the first in order of preference (discrete, integrated, virtual, other, software)"


def _size(count: int) -> str:
    """Bytes in the largest unit that leaves at least 1: 134217728 is 128 MiB."""
    power = min(6, (max(1, count).bit_length() - 1) // 10)
    return f"{count / 1024**power:.4g} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB', 'EiB')[power]}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions() -> dict[str, str | None]:
    native = sys.modules.get("wgpu.backends.wgpu_native")  # not imported for this: only the backend in use is
    return {
        "wgattn": __version__,
        "wgpu": _version("wgpu"),
        "wgpu_native": getattr(native, "__version__", None),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def _backends() -> dict[str, dict[str, str | None]]:
    return {name: {"package": package, "version": _version(package), "install": install} for name, (package, install) in _BACKENDS.items()}


# ---- generate


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


def generate(args: argparse.Namespace) -> int:
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
    capacity = _capacity(args, len(prompt_ids))
    own = args.adapter or args.backend or args.checked
    device = Device(args.adapter, args.backend, checked=args.checked or None) if own else default_device()
    model = Llama(file, kv_dtype=args.kv_dtype, capacity=capacity, device=device)
    loaded = time.perf_counter()
    model.warm_up()
    warm = time.perf_counter()
    answer = _answer(model, tokenizer, prompt_ids, args)
    report = _generate_report(args, model, prompt_ids, answer, load_s=loaded - begin, warmup_s=warm - loaded)
    if args.json:
        print(json.dumps(report))
    else:
        if not answer.text.endswith("\n"):
            sys.stdout.write("\n")
        sys.stdout.flush()
        _console(stderr=True).print(_summary(report), style="dim", soft_wrap=True)
    return 130 if answer.stop_reason == "interrupted" else 0


def _prompt(given: str) -> str:
    if given != "-":
        return given
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise ArgumentError(f"stdin is not UTF-8 text (byte {error.start}): convert it") from None
    return text.removesuffix("\n").removesuffix("\r")


def _capacity(args: argparse.Namespace, prompt_tokens: int) -> int:
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


def _generate_report(args: argparse.Namespace, model: Llama, prompt_ids: list[int], answer: _Answer, **before: float) -> dict[str, Any]:
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
        "versions": _versions(),
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


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError  # `main` treats all of them alike


def _console(stderr: bool = False) -> Console:
    """Prints names as they are, without markup; wide where no terminal sets the width, so that lines stay whole."""
    console = _Console(stderr=stderr, markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = max(120, console.width)
    return console
