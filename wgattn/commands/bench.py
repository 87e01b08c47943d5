"""`wgattn bench`: what may be typed, checked before any work. The dashboard itself is `wgattn.bench`."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from ..bench import run as dashboard
from ..bench.records import SECTIONS, BadRequest
from ..bench.report import read_baseline
from ..gpu import Device
from .typed import natural

HELP = """Measures this device: what it can reach at most, then matrix products, attention, transformer layers and a language model, each as a share of
that and compared with the float64 reference. On a terminal a live dashboard, else lines; q or Ctrl-C leaves with what is done.

example:
  wgattn bench --quick
  wgattn bench --only gemm,decode --json bench.json --svg bench.svg
  wgattn bench --quick --baseline bench.json --gate      (exit code 1 when something got slower beyond the noise)
  wgattn bench --profile generate --depth 512            (one decode step, dispatch by dispatch)"""


def _sections(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        raise argparse.ArgumentTypeError(f"must be of {', '.join(SECTIONS)}, with commas between them, not {unknown[0]!r}")
    return names


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `wgattn bench`."""
    add = parser.add_argument
    add("--quick", action="store_true", help="fewer and smaller problems, less than a minute; example: --quick")
    add("--only", type=_sections, metavar="SECTION[,SECTION]", help=f"of {', '.join(SECTIONS)} (ceilings are always measured); example: --only gemm,decode")
    add("--json", type=Path, metavar="FILE", help="also write the numbers, renewed after each row; example: --json bench.json")
    add("--svg", type=Path, metavar="FILE", help="also draw the dashboard; example: --svg bench.svg")
    add("--baseline", type=Path, metavar="FILE", help="mark what differs from an earlier --json beyond the noise; example: --baseline bench.json")
    add("--gate", action="store_true", help="with --baseline: exit code 1 when something got slower beyond the noise; example: --baseline bench.json --gate")
    add("--model", metavar="FILE", help="a GGUF file, smollm2, or random (default: smollm2 if installed, else random weights); example: --model smollm2")
    add("--profile", choices=["generate"], help="show one decode step of the model dispatch by dispatch instead; example: --profile generate")
    add("--depth", type=natural, metavar="N", help="with --profile: positions before the step (default 128); example: --profile generate --depth 1024")


def run(args: argparse.Namespace) -> int:
    """Check what was asked for, then measure. Exit code 1: something is wrong, or slower with --gate; 130: the user left early."""
    try:
        _check(args)
        baseline = read_baseline(args.baseline) if args.baseline else None
        device = Device(args.adapter, args.backend, checked=args.checked or None)
        common = {"quick": args.quick, "model": args.model or "auto", "json_file": args.json, "svg_file": args.svg}
        if args.profile:
            return dashboard.profile(device, depth=128 if args.depth is None else args.depth, **common)
        return dashboard.run(device, only=args.only, baseline=baseline, gate=args.gate, **common)
    except BadRequest as error:
        args.usage_error(str(error))


def _check(args: argparse.Namespace) -> None:
    """BadRequest for what cannot be meant together, or cannot be written."""
    if args.gate and not args.baseline:
        raise BadRequest("--gate needs --baseline")
    if args.profile:
        for name in ("only", "baseline"):
            if getattr(args, name):
                raise BadRequest(f"--profile cannot go with --{name}")
    elif args.depth is not None:
        raise BadRequest("--depth needs --profile")
    if args.model and args.only and "model" not in args.only:
        raise BadRequest(f"--model is for the section model, which --only {','.join(args.only)} leaves out")
    for name in ("json", "svg"):
        if getattr(args, name):
            setattr(args, name, _writable(f"--{name}", getattr(args, name)))
    files = [("--json", args.json), ("--svg", args.svg), ("--baseline", args.baseline and args.baseline.resolve())]
    given = [(name, path) for name, path in files if path]
    for i, (name, path) in enumerate(given):
        for other, same in given[i + 1 :]:
            if path == same:
                raise BadRequest(f"{name} and {other} are the same file")


def _writable(option: str, path: Path) -> Path:
    """The file that the path leads to, which can be written (again); nothing is left behind."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise BadRequest(f"{option}: {path} is not a regular file")
    if not path.parent.is_dir():
        raise BadRequest(f"{option}: there is no folder {path.parent}")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise BadRequest(f"{option}: nothing can be written to {path.parent} ({error.strerror})") from None
    return path
