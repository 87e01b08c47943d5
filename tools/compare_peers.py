"""wgattn and other libraries on the same problems, on one machine, one after the other: times, ratios, and whether what they computed is right.

    python tools/compare_peers.py                                              # whichever peers this environment has
    python tools/compare_peers.py --python llama.cpp=peer/bin/python           # a peer in an environment of its own; again for others
    python tools/compare_peers.py --only attention --heads 32 --kv-heads 8 --dim 128 --length 2048 --json FILE
    python tools/compare_peers.py --only model --model FILE.gguf --depth 0 --depth 2048 --ours wgpu:exact --ours dawn:auto

Every peer runs in a process of its own, because they do not get on with one another inside one. A peer that is not installed is a row that says how to
install it, and one that fails a row with its error. Only ratios count: absolute times mean little on a shared machine. Inputs stay on the device, and
a time is that of a whole call with the wait for its result, the median of some repeats. The reference for what is right is float64.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import wgattn
from wgattn import reference
from wgattn.attention.paths import PATHS
from wgattn.block.arithmetic import ARITHMETICS
from wgattn.commands.info import BACKENDS
from wgattn.errors import ModelNotFound
from wgattn.llm.gguf import ModelFile, find_model
from wgattn.llm.llama import LlamaConfig

HERE = Path(__file__).parent / "peers"
CYLLAMA = "cyllama-vulkan==0.2.18" if sys.version_info < (3, 12) else "cyllama-vulkan==0.7.0"
INSTALL = {
    "attention": {
        "torch": "pip install torch",
        "tinygrad": "pip install tinygrad==0.14 dawn-python==0.3.0",
        "computeml": "pip install computeml==0.4.4",
        "aule": "pip install aule-attention==0.5.0",
    },
    "model": {"llama.cpp": f"pip install --no-deps {CYLLAMA}"},
}
"""Peers of each kind of problem, and how to get them; `peers/KIND.py` has a function for each."""
OURS = "wgattn"
_RIGHT = 1e-3
"""Largest error of attention, for values around 1, that counts as right; half precision inside is within it."""
_CLOSE = 0.05
"""Largest difference of logits between the best token and the one chosen that still counts as right: they are nearly equal."""


@dataclass
class Outcome:
    """What one peer did with one problem: numbers, or why there are none."""

    numbers: dict[str, float] = field(default_factory=dict)
    """"seconds" of a call, or rates; larger is better for names that end in tok_s."""
    error: float | None = None
    """Largest difference from the reference."""
    right: bool | None = None
    about: dict[str, Any] = field(default_factory=dict)
    missing: str | None = None
    cannot: str | None = None
    failed: str | None = None

    @property
    def excuse(self) -> str:
        return self.cannot or self.failed or ""


def ask(kind: str, peer: str, problem: dict, args: argparse.Namespace) -> tuple[dict, np.ndarray | None]:
    """Run a peer in a child: (answer, what it computed)."""
    where = args.pythons.get(peer.split()[0])
    python = sys.executable if where is None or os.path.isdir(where) else where
    environment = dict(os.environ)
    if where is not None:
        environment["PYTHONPATH"] = where if os.path.isdir(where) else ""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for key, value in problem.items():
            if isinstance(value, np.ndarray):
                np.save(folder / f"{key}.npy", value)
        (folder / "problem.json").write_text(json.dumps({k: v for k, v in problem.items() if not isinstance(v, np.ndarray)}))
        command = [python, str(HERE / f"{kind}.py"), peer, name]
        how: dict[str, Any] = {"capture_output": True, "text": True, "errors": "replace", "stdin": subprocess.DEVNULL, "cwd": name, "env": environment}
        try:
            done = subprocess.run(command, timeout=args.timeout, **how)
        except subprocess.TimeoutExpired:
            return {"error": f"took longer than {args.timeout:g} s (--timeout)"}, None
        except OSError as error:
            return {"error": f"{python}: {error.strerror}"}, None
        answer, result = folder / "answer.json", folder / "result.npy"
        if not answer.exists():
            last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
            return {"error": f"ended with code {done.returncode}: {last}"}, None
        return json.loads(answer.read_text()), np.load(result) if result.exists() else None


def outcome_of(answer: dict, wrongness: Callable[[], tuple[float | None, bool | None]]) -> Outcome:
    """`wrongness()`: the error of what was computed, and whether that is right; None where nobody looked."""
    if "missing" in answer:
        return Outcome(missing=answer["missing"])
    if "cannot" in answer:
        return Outcome(cannot=answer["cannot"])
    if "error" in answer:
        return Outcome(failed=answer["error"])
    numbers = {name: value for name, value in answer.items() if name.endswith("tok_s")}
    if "seconds" in answer:
        numbers["seconds"] = statistics.median(answer["seconds"])
    error, right = wrongness()
    return Outcome(numbers, error, right, {name: answer[name] for name in ("device", "driver", "version", "dispatches_per_token") if name in answer})


# ---- attention


def attention_problems(args: argparse.Namespace) -> dict[str, dict]:
    """By the name of their column; the same numbers for every peer."""
    rng = np.random.default_rng(args.seed)

    def problem(queries: int, keys: int, kv_heads: int, causal: bool) -> dict:
        shapes = {"query": (args.heads, queries), "key": (kv_heads, keys), "value": (kv_heads, keys)}
        arrays = {name: rng.standard_normal((1, *shape, args.dim), np.float32) for name, shape in shapes.items()}
        sizes = {"heads": args.heads, "kv_heads": kv_heads, "queries": queries, "keys": keys, "dim": args.dim}
        return {**sizes, "causal": causal, "repeat": args.repeat, **arrays}

    L, H = args.length, args.heads
    found = {"full": problem(L, L, H, False), "causal": problem(L, L, H, True)}
    if args.kv_heads != H:
        found[f"causal, {args.kv_heads} KV heads"] = problem(L, L, args.kv_heads, True)
    return found | {f"one query, {4 * L} keys": problem(1, 4 * L, H, False)}


def compare_attention(args: argparse.Namespace) -> Iterator[tuple[str, str, Outcome]]:
    """(peer, problem, outcome)."""
    problems = attention_problems(args)
    expected = {n: reference.attention(p["query"], p["key"], p["value"], is_causal=p["causal"])[0] for n, p in problems.items()}
    for peer in (OURS, *(f"{OURS} {path}" for path in PATHS if args.paths), *INSTALL["attention"]):
        for name, problem in problems.items():
            answer, result = ask("attention", peer, problem, args)

            def wrongness(result: np.ndarray | None = result, name: str = name) -> tuple[float, bool]:
                error = float(np.abs(result - expected[name]).max()) if result.shape == expected[name].shape else np.inf
                return error, error <= _RIGHT

            yield peer, name, outcome_of(answer, wrongness)


# ---- models


def model_problem(args: argparse.Namespace) -> tuple[dict, ModelFile]:
    """What the problems of all depths have in common, and the file."""
    file = ModelFile(find_model(args.model))
    config = LlamaConfig.from_file(file)
    check = np.random.default_rng(args.seed).integers(0, config.vocab_size, 12).tolist()
    sizes = {"prompt": args.prompt, "decode": args.decode, "repeat": args.repeat, "seed": args.seed}
    return {"model": str(file.path.resolve()), "vocab": config.vocab_size, "check": check, "check_tokens": 8, **sizes}, file


def sides(args: argparse.Namespace) -> dict[str, tuple[str, dict[str, str | None]]]:
    """Rows of the table by name: whose they are, and what else that side is told."""
    ways = [word.partition(":")[::2] for word in args.ours]
    ours = {f"{OURS} {backend} {arithmetic}": (OURS, {"backend": backend, "arithmetic": arithmetic}) for backend, arithmetic in ways}
    ours = ours or {OURS: (OURS, {"backend": None, "arithmetic": "exact"})}
    return ours | {peer: (peer, {}) for peer in INSTALL["model"]}


def compare_models(args: argparse.Namespace) -> Iterator[tuple[str, str, Outcome]]:
    """(peer, problem, outcome)."""
    problem, file = model_problem(args)
    weights: dict[str, np.ndarray] = {}
    for depth in args.depth or [0]:
        for name, (peer, more) in sides(args).items():
            answer, result = ask("model", peer, problem | {"depth": depth} | more, args)

            def wrongness(result: np.ndarray | None = result) -> tuple[float | None, bool | None]:
                """How much less likely than the best, by the logits of the reference, a chosen token is at worst."""
                if args.unchecked:
                    return None, None
                chosen = result.tolist()
                weights.update(weights or dequantised(file))
                logits = reference.llama(weights, problem["check"] + chosen[:-1], LlamaConfig.from_file(file))[-len(chosen) :]
                gap = float((logits.max(1) - logits[np.arange(len(chosen)), chosen]).max())
                return gap, gap <= _CLOSE

            yield name, f"{file.path.name}, prompt of {args.prompt}, decode at depth {depth}", outcome_of(answer, wrongness)


def dequantised(file: ModelFile) -> dict[str, np.ndarray]:
    """All weights in float32."""
    return {name: t.dequantize() for name, t in file.tensors.items()}


# ---- what is shown


def row(peer: str, outcomes: dict[str, Outcome], names: Sequence[str], ours: Sequence[dict[str, Outcome]], install: dict[str, str]) -> list[str]:
    """The cells of a peer."""
    missing = {o.missing for o in outcomes.values()}
    if None not in missing:
        return [peer, f"not installed: {install.get(peer) or missing.pop()}"]
    return [peer, *(cell(outcomes[name], [o[name] for o in ours]) for name in names)]


def cell(outcome: Outcome, ours: Sequence[Outcome]) -> str:
    """Numbers, and behind those of a peer how many times as fast each of our rows was."""
    if not outcome.numbers:
        return outcome.excuse or f"not installed: {outcome.missing}"
    parts = []
    for what, value in outcome.numbers.items():
        text = f"{value * 1e3:.4g} ms" if what == "seconds" else f"{what.removesuffix('_tok_s').replace('_', ' ')} {value:.4g} tok/s"
        for mine in () if any(outcome is o for o in ours) else (o.numbers.get(what) for o in ours):
            if mine:
                text += f", {value / mine if what == 'seconds' else mine / value:.2f}x"
        parts.append(text)
    verdict = "not checked" if outcome.right is None else f"error {outcome.error:.1e}" if outcome.right else f"WRONG: error {outcome.error:.2g}"
    return "\n".join([*parts, verdict])


def show(console: Console, title: str, found: dict[str, dict[str, Outcome]], install: dict[str, str]) -> None:
    """A table: peers down, problems across. The factors behind a number say how many times as fast our rows were, in their order."""
    names = list(next(iter(found.values())))
    ours = [found[OURS]] if OURS in found else [outcomes for side, outcomes in found.items() if side.startswith(OURS)]
    table = Table("", *names, title=title, title_justify="left", show_lines=True)
    for peer, outcomes in found.items():
        table.add_row(*row(peer, outcomes, names, ours, install))
    console.print(table)
    for peer, outcomes in found.items():
        about = next((o.about for o in outcomes.values() if o.about), None)
        if about:
            console.print(f"{peer}: {about['version']} on {about['device']}", soft_wrap=True)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", choices=["attention", "model"], help="one kind of problem (default: both)")
    add("--python", action="append", default=[], metavar="PEER=PATH", help="where a peer is: an interpreter, or a folder of packages (pip install --target)")
    add("--json", type=Path, metavar="FILE", help="also write all numbers there")
    add("--timeout", type=float, default=600, help="seconds that a peer may take for a problem (default 600)")
    add("--paths", action="store_true", help="also each of wgattn's ways to compute attention")
    for name, default in (("heads", 8), ("kv-heads", 2), ("length", 512), ("dim", 64), ("repeat", 5), ("seed", 0)):
        add(f"--{name}", type=int, default=default, help=f"default {default}")
    add("--model", default="smollm2", metavar="FILE", help="a GGUF file, or smollm2 for the demo model (default)")
    for name, default in (("prompt", 128), ("decode", 16)):
        add(f"--{name}", type=int, default=default, help=f"tokens (default {default})")
    add("--depth", type=int, action="append", help="positions before them (default 0); again for others")
    add("--ours", action="append", default=[], metavar="BACKEND:ARITHMETIC", help="a row of models by wgattn, such as dawn:int8; again for others")
    add("--unchecked", action="store_true", help="do not compute by the reference which tokens are right, which takes long for large models")
    args = parser.parse_args(argv)
    known = {OURS, *(peer for peers in INSTALL.values() for peer in peers)}
    for word in args.ours:
        backend, _, arithmetic = word.partition(":")
        if backend not in BACKENDS or arithmetic not in ARITHMETICS:
            parser.error(f"--ours {word}: BACKEND:ARITHMETIC is wanted, of {', '.join(BACKENDS)} and {', '.join(ARITHMETICS)}")
    args.pythons = {}
    for word in args.python:
        peer, _, path = word.partition("=")
        if peer not in known or not path:
            parser.error(f"--python {word}: PEER=PATH is wanted, with one of {', '.join(sorted(known))}")
        args.pythons[peer] = os.path.abspath(path)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args, console = parse(argv), Console()
    if not console.is_terminal:
        console.width = max(160, console.width)
    kinds = {"attention": compare_attention, "model": compare_models}
    report: dict[str, Any] = {"date": datetime.date.today().isoformat(), "wgattn_version": wgattn.__version__, "machine": platform.platform()}
    report["options"] = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k not in ("json", "python", "pythons")}
    for kind in [args.only] if args.only else kinds:
        found: dict[str, dict[str, Outcome]] = {}
        try:
            for peer, problem, outcome in kinds[kind](args):
                found.setdefault(peer, {})[problem] = outcome
        except ModelNotFound as error:
            console.print(f"{kind}: {error}", soft_wrap=True)
            continue
        title = f"Attention (1, {args.heads}, {args.length}, {args.dim}) float32" if kind == "attention" else "Models, tokens a second"
        show(console, f"{title}; x: times as fast as the peer wgattn was", found, INSTALL[kind])
        report[kind] = {peer: {name: asdict(o) for name, o in outcomes.items()} for peer, outcomes in found.items()}
    if args.json:
        args.json.write_text(json.dumps(report, indent=1, default=str) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
