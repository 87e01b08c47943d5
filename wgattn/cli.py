"""The command `wgattn`: parses, calls the library, prints.

Exit codes: 0; 1 for an error that the message explains; 2 for bad usage; 130 after Ctrl-C; 141 when the reader of a pipe has gone.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from . import __version__
from .commands import bench as bench_command
from .commands import generate as generate_command
from .commands import info as info_command
from .commands import selftest as selftest_command
from .commands import tune as tune_command
from .commands.typed import natural
from .errors import WgattnError
from .gpu import Device

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
    common.add_argument("--backend", choices=list(info_command.BACKENDS), help="WebGPU implementation (default: WGATTN_BACKEND, else wgpu)")
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

    command("info", info_command.run, "show adapters, features, the measured profile and versions", info_command.HELP, as_json)
    generate_command.add_options(command("generate", generate_command.run, "continue a text with a language model", generate_command.HELP, as_json))
    tuned = command("tune", tune, "find the fastest tiles for this device", _TUNE_HELP, as_json)
    tuned.add_argument("--again", action="store_true", help="time what is known too")
    tested = command("selftest", selftest, "compare every kernel with the reference on this device", _SELFTEST_HELP, as_json)
    tested.add_argument("--seed", type=natural, metavar="N", help="the same random numbers again (default: others each time; printed)")
    tested.add_argument("--only", metavar="TEXT", help="only the lines whose name contains this")
    bench_command.add_options(command("bench", bench_command.run, "measure this device, live", bench_command.HELP))
    return parser


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
