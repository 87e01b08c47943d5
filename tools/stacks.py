#!/usr/bin/env python3
"""Runs the conformance suite on every stack this machine can run - a WebGPU implementation over a Vulkan (Metal, DX12) driver - and shows a table.

    python tools/stacks.py                                        every stack; exit 1 when a test fails
    python tools/stacks.py --stack dawn+swiftshader --json FILE   one, and its results as JSON
    python tools/stacks.py --merge FILE...                        adds results, perhaps of other machines, to tools/results/stacks.json and to README.md

Stacks: wgpu or dawn, over lavapipe (Mesa's software Vulkan), swiftshader (the one of Chromium: downloaded with apt into a cache and unpacked there, not
installed), or gpu (the best real adapter). A stack that cannot be had is "not available" and says why; with --require that is a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import platformdirs
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "tools" / "results" / "stacks.json"
README = ROOT / "README.md"
BEGIN, END = "<!-- stacks: begin, written by tools/stacks.py -->\n", "<!-- stacks: end -->\n"
BACKENDS = {"wgpu": "wgpu", "dawn": "wgpudawn"}
"""WGATTN_BACKEND, and the package that it needs."""
SHOWN = 5
"""Failures of a stack that are printed."""


class NotAvailable(Exception):
    """Why a stack cannot be run here."""


# ---- drivers

ICD_FOLDERS = ("/usr/share/vulkan/icd.d", "/etc/vulkan/icd.d", "/usr/local/share/vulkan/icd.d", "/usr/local/etc/vulkan/icd.d")


@dataclass
class Driver:
    """What a child process is told, and the version, where the driver itself does not tell it."""

    environment: dict[str, str]
    version: str = ""


def _only(manifest: Path, version: str = "") -> Driver:
    """The Vulkan driver of one manifest and no other; under both names that loaders know."""
    return Driver({"VK_DRIVER_FILES": str(manifest), "VK_ICD_FILENAMES": str(manifest)}, version)


def lavapipe() -> Driver:
    given = [Path(name) for name in os.environ.get("VK_DRIVER_FILES", "").split(os.pathsep)]
    found = [path for path in given if path.name.startswith("lvp_icd") and path.is_file()]
    found += [path for folder in ICD_FOLDERS for path in sorted(Path(folder).glob("lvp_icd*.json"))]
    if not found:
        raise NotAvailable("lavapipe is not installed (Debian, Ubuntu: apt install mesa-vulkan-drivers)")
    return _only(found[0])


def swiftshader() -> Driver:
    """From Debian's package chromium-common, unpacked in the user's cache; downloaded when it is not there."""
    with _fetching:
        return _swiftshader()


_fetching = threading.Lock()  # stacks run in threads, and two of them want it


def _swiftshader() -> Driver:
    cache = Path(os.environ.get("WGATTN_CACHE_DIR") or platformdirs.user_cache_path("wgattn")) / "swiftshader"
    found = sorted(cache.glob("*/usr/lib/chromium/vk_swiftshader_icd.json"))
    if not found:
        _fetch_swiftshader(cache)
        found = sorted(cache.glob("*/usr/lib/chromium/vk_swiftshader_icd.json"))
    if not found:
        raise NotAvailable("the package chromium-common has no SwiftShader in it")
    return _only(found[-1], found[-1].relative_to(cache).parts[0].replace("_", " "))


def _fetch_swiftshader(cache: Path) -> None:
    """Download and unpack; a folder appears only when it is complete."""
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        try:
            _command(["apt-get", "download", "-q", "chromium-common"], folder)
        except NotAvailable:
            if os.geteuid() != 0:
                raise
            _command(["apt-get", "update", "-q"], folder)  # a new machine has no lists
            _command(["apt-get", "download", "-q", "chromium-common"], folder)
        (package,) = Path(folder).glob("chromium-common_*.deb")
        _command(["dpkg", "-x", package.name, "unpacked"], folder)
        name, version = package.name.split("_")[:2]
        place = cache / f"{name}_{version.partition('%3a')[2] or version}"
        if not place.exists():  # another process may have been faster
            Path(folder, "unpacked").rename(place)


def _command(command: list[str], folder: str) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        raise NotAvailable(f"SwiftShader comes from a Debian package, and {command[0]} is not here") from None
    except subprocess.TimeoutExpired:
        raise NotAvailable(f"{' '.join(command)} took more than ten minutes") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise NotAvailable(f"{' '.join(command[:2])} failed: {said[-1] if said else f'exit code {done.returncode}'}")


def real_gpu() -> Driver:
    """Whatever the environment says of drivers; the child looks for an adapter that is no CPU."""
    return Driver({})


# ---- stacks


@dataclass(frozen=True)
class Stack:
    """One way to reach a device, and what it is known to lack: tests may be "not available" for these reasons only."""

    backend: str
    driver_name: str
    driver: Callable[[], Driver]
    lacks: tuple[str, ...] = ()
    """Parts of reasons."""

    @property
    def name(self) -> str:
        return f"{self.backend}+{self.driver_name}"


_CPU = ("is a CPU", "matrix units")
_SWIFTSHADER = (*_CPU, "exp2 of NaN is a number", "subgroups have less than 8 lanes")
STACKS = (
    Stack("wgpu", "lavapipe", lavapipe, _CPU),
    Stack("wgpu", "swiftshader", swiftshader, (*_SWIFTSHADER, "storage buffers")),  # it has 10 there, and 12 with Dawn
    Stack("dawn", "swiftshader", swiftshader, _SWIFTSHADER),
    Stack("wgpu", "gpu", real_gpu, ("matrix units",)),
    Stack("dawn", "gpu", real_gpu),
)


@dataclass
class Family:
    """Cases of a kernel family on a stack, by outcome; those not available by their reason."""

    passed: int = 0
    failed: int = 0
    refused: int = 0
    not_available: dict[str, int] = field(default_factory=dict)

    @property
    def ran(self) -> int:
        return self.passed + self.failed


@dataclass
class Outcome:
    """What a stack gave."""

    stack: str
    date: str
    missing: str = ""
    """Why the stack is not available; else empty."""
    facts: dict = field(default_factory=dict)
    """Of the device: see `facts` in tests/report.py."""
    seconds: float = 0.0
    families: dict[str, Family] = field(default_factory=dict)
    failures: list[tuple[str, str]] = field(default_factory=list)
    """(test, message)."""
    refusals: list[tuple[str, str]] = field(default_factory=list)
    """Tests that ended in an error that names a lowered limit, and what it says."""
    error: str = ""
    """Why the run did not come to its end."""

    @property
    def failed(self) -> bool:
        return bool(self.failures or self.error)

    def total(self, what: str) -> int:
        return sum(getattr(f, what) if what != "not_available" else sum(f.not_available.values()) for f in self.families.values())

    @classmethod
    def of(cls, saved: Mapping) -> Outcome:
        families = {name: Family(**f) for name, f in saved["families"].items()}
        lists = {name: [tuple(pair) for pair in saved[name]] for name in ("failures", "refusals")}
        return cls(**{**saved, "families": families, **lists})


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d")


_LOOK = """
import json, sys, wgattn
from wgattn.gpu import webgpu
adapters = webgpu._ranked(webgpu.load().adapters())
print(json.dumps([[a.info["device"] or a.info["description"], a.info["adapter_type"]] for a in adapters]))
"""


def find_adapter(stack: Stack, environment: Mapping[str, str]) -> str:
    """The name of the adapter that the stack is about; its backend and driver work."""
    done = subprocess.run([sys.executable, "-c", _LOOK], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        if f"pip install 'wgattn[{stack.backend}]'" in done.stderr:
            raise NotAvailable(f"the package {BACKENDS[stack.backend]} is not installed (pip install 'wgattn[{stack.backend}]')")
        raise NotAvailable(f"looking for adapters failed: {said[-1] if said else f'exit code {done.returncode}'}")
    adapters = json.loads(done.stdout.strip().splitlines()[-1])
    wanted = [name for name, kind in adapters if (kind == "CPU") != (stack.driver_name == "gpu")]
    if not wanted:
        there = ", ".join(name for name, _ in adapters) or "none"
        raise NotAvailable(f"no {'GPU' if stack.driver_name == 'gpu' else 'software'} adapter was found; there is {there}")
    return wanted[0]


def run(stack: Stack, timeout_s: float, options: Iterable[str] = (), limits: str = "") -> Outcome:
    """Run the suite on a stack, in a process of its own, perhaps with lowered limits (see wgattn/gpu/limits.py)."""
    outcome = Outcome(stack.name, now())
    environment = {name: value for name, value in os.environ.items() if name not in ("WGATTN_ADAPTER", "WGATTN_CHECKED")}
    try:
        driver = stack.driver()
        environment |= driver.environment | {"WGATTN_BACKEND": stack.backend, "WGATTN_LIMITS": limits}
        environment["WGATTN_ADAPTER"] = find_adapter(stack, environment)
    except NotAvailable as error:
        outcome.missing = str(error)
        return outcome
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report")
        pytest = [sys.executable, "-m", "pytest", "-p", "tests.report", f"--report={report}", "-m", "conformance", "-p", "no:cacheprovider", "-q", *options]
        begun = time.monotonic()
        try:
            done = subprocess.run(pytest, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
            ended = f"the run ended with {f'signal {-done.returncode}' if done.returncode < 0 else f'exit code {done.returncode}'}"
            said = (done.stdout + done.stderr).strip()[-2000:]
        except subprocess.TimeoutExpired:
            ended, said = f"the run took more than {timeout_s:.0f} s", ""
        outcome.seconds = round(time.monotonic() - begun, 1)
        read_report(stack, outcome, report.read_text(encoding="utf-8").splitlines() if report.exists() else [], ended, said)
    outcome.facts["driver"] = " ".join(filter(None, (driver.version, outcome.facts.get("driver", ""))))
    return outcome


def read_report(stack: Stack, outcome: Outcome, lines: Iterable[str], ended: str, said: str = "") -> None:
    """Count what the plugin tests/report.py has written."""
    begun, finished, announced = "", None, 0
    for line in map(json.loads, lines):
        if "facts" in line:
            outcome.facts, announced = line["facts"], line["tests"]
        finished = line.get("finished", finished)
        begun = line.get("begun", "" if "test" in line else begun)
        if "test" not in line:
            continue
        family, reason = outcome.families.setdefault(line["family"], Family()), line.get("reason", "")
        if line["outcome"] == "not available" and any(lack in reason for lack in stack.lacks):
            family.not_available[reason] = family.not_available.get(reason, 0) + 1
        elif line["outcome"] == "passed":
            family.passed += 1
        elif line["outcome"] == "refused":
            family.refused += 1
            outcome.refusals.append((line["test"], reason))
        else:
            family.failed += 1
            known = f"not available, which was not known of {stack.name}: " if line["outcome"] == "not available" else ""
            outcome.failures.append((line["test"], known + reason))
    done = sum(f.ran + f.refused + sum(f.not_available.values()) for f in outcome.families.values())
    if finished is None or finished not in (0, 1) or done != announced or not done:
        where = f", in {begun}" if begun else ""
        outcome.error = f"{ended}{where}, after {done} of {announced} tests\n{said}".strip()


# ---- what is shown


def cell(family: Family | None) -> str:
    if family is None:
        return ""
    more = [f"[red]{family.failed} failed[/]"] if family.failed else []
    missing = sum(family.not_available.values())
    more += [f"{family.refused} refused"] if family.refused else []
    more += [f"[dim]{missing} n/a[/]"] if missing else []
    return ", ".join([f"[green]{family.passed}[/]" if family.passed else "", *more]).strip(", ")


def show(outcomes: list[Outcome], console: Console) -> None:
    """The table of stacks and kernel families; then each failure, and each reason for what is not available."""
    ran = [o for o in outcomes if not o.missing]
    if ran:
        names = (escape(o.stack.replace("+", " + ")) for o in ran)
        table = Table(Column("kernel family", no_wrap=True), *names, title="Conformance: cases passed, failed, not available (n/a)")
        for name in sorted({name for o in ran for name in o.families}):
            table.add_row(escape(name), *(cell(o.families.get(name)) for o in ran))
        table.add_section()
        table.add_row("all", *(cell(Family(o.total("passed"), o.total("failed"), o.total("refused"), {"": o.total("not_available")})) for o in ran))
        table.add_row("device", *(escape(o.facts.get("device", "")) for o in ran))
        table.add_row("driver", *(escape(o.facts.get("driver", "")) for o in ran))
        table.add_row("seconds", *(f"{o.seconds:.0f}" for o in ran))
        console.print(table)
    for o in outcomes:
        if o.missing:
            console.print(f"[bold]{o.stack}[/]: not available: {escape(o.missing)}")
        if o.error:
            console.print(f"[bold red]{o.stack}[/]: {escape(o.error)}")
        for test, message in o.failures[:SHOWN]:
            console.print(f"[red]{o.stack}[/] {escape(test)}\n    {escape(message)}", soft_wrap=True)
        if len(o.failures) > SHOWN:
            console.print(f"[red]{o.stack}[/]: and {len(o.failures) - SHOWN} failures more; --json FILE has all of them.")
        reasons = Counter({reason: 0 for f in o.families.values() for reason in f.not_available})
        for f in o.families.values():
            reasons.update(f.not_available)
        for reason, count in reasons.most_common():
            console.print(f"[dim]{o.stack}: {count} not available: {escape(reason)}[/]")


# ---- results that are kept


def save(path: Path, outcomes: Iterable[Outcome]) -> None:
    path.write_text(json.dumps({"stacks": [asdict(o) for o in outcomes]}, indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> list[Outcome]:
    return [Outcome.of(saved) for saved in json.loads(path.read_text(encoding="utf-8"))["stacks"]]


def merged(old: Iterable[Outcome], new: Iterable[Outcome]) -> list[Outcome]:
    """One outcome for each stack and device, the newer; of stacks that are not available nowhere else, why."""
    found: dict[tuple[str, str], Outcome] = {}
    for outcome in (*old, *new):
        found[outcome.stack, outcome.facts.get("device", "")] = outcome
    had = {name for (name, _), o in found.items() if not o.missing}
    order = [s.name for s in STACKS]
    kept = [o for o in found.values() if not (o.missing and o.stack in had)]
    return sorted(kept, key=lambda o: (order.index(o.stack) if o.stack in order else len(order), o.facts.get("device", "")))


def readme_table(outcomes: Iterable[Outcome]) -> str:
    lines = ["| stack | device, driver | date | cases run | failures | not available |", "|---|---|---|---|---|---|"]
    for o in outcomes:
        backend, _, driver = o.stack.partition("+")
        if o.missing:
            lines.append(f"| {backend} + {driver} | | {o.date} | not run: {o.missing} | | |")
            continue
        device = ", ".join(filter(None, (o.facts.get("device", ""), o.facts.get("driver", ""))))
        ran = "not to the end" if o.error else str(o.total("passed") + o.total("failed"))
        lines.append(f"| {o.facts.get('backend', backend)} + {driver} | {device} | {o.date} | {ran} | {o.total('failed')} | {o.total('not_available')} |")
    return "\n".join(lines) + "\n"


def with_table(text: str, table: str) -> str:
    """README's text with the table between its marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"README.md has no lines {BEGIN.strip()} and {END.strip()}")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


# ---- the command


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [s.name for s in STACKS]
    parser.add_argument("--stack", action="append", choices=names, metavar="NAME", help=f"run this one, may be given again: {', '.join(names)}")
    parser.add_argument("--require", action="store_true", help="a stack that is not available is a failure")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="stacks that run at the same time")
    parser.add_argument("--timeout", type=float, default=3600, metavar="SECONDS", help="the longest that a stack may take (3600)")
    parser.add_argument("--limits", default="", metavar="TEXT", help="lower limits of the devices, as WGATTN_LIMITS does; what is refused then is counted")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    parser.add_argument("--merge", type=Path, nargs="*", metavar="FILE", help="run nothing; add results to tools/results/stacks.json and README.md")
    parser.add_argument("pytest", nargs="*", help="after --: options for pytest, as -k merge")
    return parser


def main(argv: list[str] | None = None) -> int:
    options = arguments().parse_args(argv)
    console = Console() if sys.stdout.isatty() else Console(width=160)
    if options.merge is not None:
        outcomes = merged(load(RESULTS) if RESULTS.exists() else [], [o for path in options.merge for o in load(path)])
        save(RESULTS, outcomes)
        README.write_text(with_table(README.read_text(encoding="utf-8"), readme_table(outcomes)), encoding="utf-8")
        show(outcomes, console)
        return 0
    stacks = [s for s in STACKS if not options.stack or s.name in options.stack]
    with ThreadPoolExecutor(max(1, options.jobs)) as pool:
        outcomes = list(pool.map(lambda stack: run(stack, options.timeout, options.pytest, options.limits), stacks))
    show(outcomes, console)
    if options.json:
        save(options.json, outcomes)
    bad = [o.stack for o in outcomes if o.failed or (o.missing and options.require)]
    if bad:
        console.print(f"[bold red]Not in order: {', '.join(bad)}[/]")
    elif all(o.missing for o in outcomes):
        console.print("[bold red]Nothing was run: no stack is available[/]")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
