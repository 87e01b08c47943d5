"""The kernels in `shaders/`: every variant of them, what their headers promise and whether that holds, and a table of them.

    python tools/shaders.py        # prints the table; tools/readme.py puts it into shaders/README.md

Every variant is what `wgattn.cases` makes on paper, on made-up devices of all kinds: nothing here lists kernels, parts or options by hand. The lint is
tests/test_shader_lint.py.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cache
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from wgattn.bench import ceilings
from wgattn.cases import FAMILIES, TUNED
from wgattn.cases.family import Choice, Family
from wgattn.errors import CapacityError, Unsupported
from wgattn.gpu import webgpu
from wgattn.gpu.paper import PROFILES, PaperDevice
from wgattn.gpu.shader import SHADERS, Source, assemble, evaluate

# ---- every variant


def sources(names: Iterable[str] = PROFILES, strength: int = 1, known: dict | None = None) -> dict[str, Source]:
    """All kernels that the cases use on made-up devices, by their text without directives.

    strength: as in `Family.cases`; 0: all combinations. known: as of `PaperDevice`, to share texts among calls.
    """
    found: dict[str, Source] = {}
    known = {} if known is None else known
    for name in names:
        device = PaperDevice(PROFILES[name], known)
        for family in (*FAMILIES, *TUNED):
            for choice in family.cases(strength) if strength else family.texts():
                _record(device, family, choice)
        for _ in ceilings.kernels(device):
            pass
        found |= {source.text + _constants(source): source for source in (*device.sources, _probe(device))}
    return found


PAIRS = ("CPU, 8 lanes", "GPU, 32 lanes")
"""Devices on which `most_sources` has all pairs of options; on the others, each value of each."""


def most_sources() -> dict[str, Source]:
    """What the tests compile by default, and what the table is made of."""
    known: dict = {}
    return sources(known=known) | sources(PAIRS, strength=2, known=known)


def _record(device: PaperDevice, family: Family, choice: Choice) -> None:
    try:
        for _ in family.run(device, np.random.default_rng(0), **choice):
            pass
    except (Unsupported, CapacityError):
        pass  # before any kernel that is too much for the device; what others can run, they list


def _probe(device: PaperDevice) -> Source:
    """The one kernel that belongs to no operation: it measures the size of a subgroup."""
    return assemble("parts/probe_subgroup", options={"WORKGROUP": min(256, device.profile.max_invocations)})


def _constants(source: Source) -> str:
    return "".join(f"\n// {name} = {value}" for name, value in sorted(source.overrides.items()))


# ---- compilers


class Compiler:
    """A backend's compiler: compiles modules, and pipelines of what fits its device."""

    def __init__(self, backend: webgpu.Backend, adapter: Any):
        self.backend = backend
        self.gpu = backend.request_device(adapter, webgpu.usable_features(backend, adapter), adapter.limits, False)
        self.name = f"{backend.name} on {webgpu.describe(adapter)}"
        names = {"f16": "shader-f16", "subgroup": backend.subgroup_feature, "matrix": webgpu.MATRIX_UNITS}
        self.features = {f for f, name in names.items() if name in self.gpu.features}
        self.invocations, self.memory, self.buffers = (
            self.gpu.limits[f"max-{name}"]
            for name in ("compute-invocations-per-workgroup", "compute-workgroup-storage-size", "storage-buffers-per-shader-stage")
        )
        self.multiple = backend.matrix_workgroup(adapter)

    def missing(self, source: Source) -> str | None:
        """A feature without which the compiler is not even asked, or None."""
        return next((f for f in sorted(source.features) if f not in self.features), None)

    def _fits(self, source: Source) -> bool:
        storage = sum(kind != "uniform" for _, kind in source.buffers)
        if "matrix" in source.features and source.workgroup_size % self.multiple:
            return False
        return source.workgroup_size <= self.invocations and source.workgroup_storage <= self.memory and storage <= self.buffers

    def compile(self, source: Source, pipeline: bool = True) -> str | None:
        """What the compiler says against it, or None."""
        api = self.backend.api
        try:
            module = self.backend.create_module(self.gpu, source.under(self.backend.directives), source.name, False)
            if pipeline and self._fits(source):
                compute = {"module": module, "entry_point": "main", "constants": dict(source.overrides)}
                self.gpu.create_compute_pipeline(layout="auto", compute=compute)
        except api.GPUError as error:
            return str(error)
        return None


def naga() -> Compiler:
    """wgpu's compiler, on the default adapter."""
    backend = webgpu.load("wgpu")
    return Compiler(backend, webgpu.pick_adapter(backend, None))


def tint() -> Compiler:
    """Dawn's compiler, on its Null backend: it needs no driver, has all features, and no more than WebGPU's default limits.

    Unsupported when the package wgpudawn is missing, or has no Null backend.
    """
    backend = webgpu.load("dawn")
    before = os.environ.get("WGPU_BACKEND_TYPE")
    os.environ["WGPU_BACKEND_TYPE"] = "Null"
    try:
        return Compiler(backend, backend.api.gpu.request_adapter_sync())
    except RuntimeError as error:
        raise Unsupported(f"wgpudawn has no Null backend here: {error}") from error
    finally:
        del os.environ["WGPU_BACKEND_TYPE"]
        if before is not None:
            os.environ["WGPU_BACKEND_TYPE"] = before


# ---- headers


@dataclass(frozen=True)
class File:
    """A .wgsl file: its path below `shaders/` without the ending, and its text; as a part of a kernel, the name of its `Named` set, if any."""

    path: str
    text: str
    name: str = ""

    @property
    def is_part(self) -> bool:
        return "@compute" not in self.text

    @property
    def header(self) -> str:
        """The comment that the file opens with, as one line."""
        lines = []
        for line in self.text.splitlines():
            if not line.startswith("//") or line.startswith("//@"):
                break
            lines.append(line.removeprefix("//").removeprefix(" ").rstrip())
        return " ".join(lines)

    @property
    def summary(self) -> str:
        """The header's first sentence, without the names of functions that stand at the end of its line."""
        return re.split(r"\s{2,}|(?<=\S\.)\s|(?<=\S); ", self.header)[0].strip().removesuffix(".")

    def after(self, label: str) -> str | None:
        """What the header says behind `label:`, up to the next of the labels, or None."""
        found = re.search(rf"\b{label}: (.*?)(?=\s*(?:Workgroup memory|Options|Parts):|$)", self.header)
        return found[1].strip() if found else None

    @property
    def memory(self) -> str | None:
        """The file's own workgroup memory, an expression in bytes; what its parts have is not in it."""
        said = self.after("Workgroup memory")
        if said is None:
            return None
        own = re.split(r"(?:, and |\band )?that of |[.:](?:\s|$)", said)[0].strip()
        return "0" if own in ("", "none") else own

    @property
    def options(self) -> set[str]:
        """Constants that the header lists."""
        said = re.sub(r"\([^()]*\)", "", (self.after("Options") or "").partition("parts:")[0])
        own = set(re.findall(r"\b[A-Z][A-Z0-9_]*\b", said))
        return {f"{self.name}_{o}" for o in own | set(re.findall(r"\bparams\.(\w+)", self.text))} if self.name else own

    def constants(self, source: Source) -> dict[str, float]:
        """What the file's names stand for in a text that it is a part of."""
        prefix = f"{self.name}_"
        return dict(source.constants) | {n.removeprefix(prefix): v for n, v in source.constants.items() if self.name and n.startswith(prefix)}

    @property
    def parts(self) -> list[str]:
        """Patterns of the names of parts that the header lists."""
        said = (self.after("Options") or "").partition("parts:")[2] + " " + (self.after("Parts") or "")
        return re.findall(r"[a-z][a-z0-9_]*\*?", said)


@cache
def file(path: str) -> File:
    return File(path, (SHADERS / f"{path}.wgsl").read_text(encoding="utf-8"))


def files() -> list[File]:
    return [file(path.relative_to(SHADERS).with_suffix("").as_posix()) for path in sorted(SHADERS.rglob("*.wgsl"))]


def covering(found: Iterable[Source]) -> list[Source]:
    """Some of them, in which each file has each of the parts and each value of each option that it has in any of them."""
    seen: set[tuple] = set()
    chosen = []
    for source in found:
        has = {(source.name, part) for part in source.parts} | {(source.name, *option) for option in source.options.items()} | {(source.name,)}
        if not has <= seen:
            seen |= has
            chosen.append(source)
    return chosen


def parts_of(source: Source) -> list[File]:
    """The main file and the parts that a text is made of."""
    return [file(source.name), *(replace(file(path), name=name) for path, _, name in (p.partition(" as ") for p in source.parts))]


def file_faults(f: File) -> Iterator[str]:
    """What is wrong with a file by itself."""
    if not f.header:
        yield "has no header: a comment that says what it computes"
    has_memory = "var<workgroup>" in f.text
    if (has_memory or not f.is_part) and f.memory is None:
        yield "does not say its workgroup memory in bytes (Workgroup memory: none, or a formula)"
    if not f.is_part:
        if f.after("Options") is None:
            yield "does not list its options (Options: none, or names; parts: names)"
        if not re.search(r"\b([Ww]orkgroup|[Ii]nvocation|[Tt]eam)s?\b", f.header.partition("Workgroup memory:")[0]):
            yield "does not say what one workgroup or invocation does"
    for number, line in enumerate(f.text.splitlines(), 1):
        code, _, comment = line.partition("//")
        if "var<storage" in code and not re.search(r"\(.+\)", comment):
            yield f"line {number}: a storage buffer without its shape in a comment, such as // (B, Hkv, S, D) f16"
        if "@binding(" in code or "@group(" in code:
            yield f"line {number}: a binding number; these are given when the text is put together"
        if "var<workgroup>" in code and not re.match(r"var<workgroup>\s+\w+\s*:\s*[^;]+;", code):
            yield f"line {number}: workgroup memory that is not counted; declare it on a line of its own"


def source_faults(source: Source) -> Iterator[str]:
    """What is wrong with the headers of the files that a text is made of."""
    made_of = parts_of(source)
    try:
        said = sum(evaluate(f.memory or "0", f.constants(source)) for f in made_of)
    except (KeyError, ValueError) as error:
        yield f"the formula of its workgroup memory cannot be evaluated: {error}"
    else:
        if said != source.workgroup_bytes:
            formulas = "; ".join(f"{f.path}: {f.memory}" for f in made_of if f.memory)
            yield f"declares {source.workgroup_bytes} bytes of workgroup memory, the headers say {said} ({formulas})"
    unknown = set(source.options) - set().union(*(f.options for f in made_of))
    if unknown:
        yield f"gets options that no header lists: {', '.join(sorted(unknown))}"
    patterns = [p for f in made_of for p in f.parts]
    for part in made_of[1:]:
        name = part.path.rpartition("/")[2]
        if not any(fnmatch(name, p) for p in patterns):
            yield f"has part {name}, which no header lists"


# ---- the table


def patterns(names: Iterable[str]) -> list[str]:
    """Names of parts in short: those that begin alike as one pattern."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        groups.setdefault(name.partition("_")[0], []).append(name)
    return [found[0] if len(found) == 1 else f"{first}_*" for first, found in groups.items()]


def kernels_table(found: Iterable[Source]) -> list[tuple[str, str, str, str, str]]:
    """(kernel, what it computes, workgroup memory in bytes, options, parts) of each main file; only names, no numbers."""
    by_name: dict[str, list[Source]] = {}
    for source in found:
        by_name.setdefault(source.name, []).append(source)
    rows = []
    for name, variants in sorted(by_name.items()):
        options: dict[str, set[str]] = {}
        for variant in variants:
            for option, value in variant.options.items():
                options.setdefault(option, set()).update([str(value).lower() if isinstance(value, bool) else value] if isinstance(value, bool | str) else [])
        told = ", ".join(f"{o} ({', '.join(sorted(values))})" if values else o for o, values in sorted(options.items()))
        parts = ", ".join(patterns({f.path.rpartition("/")[2] for v in variants for f in parts_of(v)[1:]}))
        memory = file(name).after("Workgroup memory") or ""
        rows.append((name, file(name).summary, re.split(r"[.:](?:\s|$)", memory)[0], told, parts))
    return rows


def parts_table() -> list[tuple[str, str]]:
    """(part, what it is for)."""
    return [(f.path, f.summary) for f in files() if f.is_part]


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *escaped))


HEAD = ("kernel", "what it computes", "workgroup memory, bytes", "options", "parts")


def main() -> int:
    console, table = Console(), Table(*HEAD, title="Kernels", title_justify="left", show_lines=True)
    if not console.is_terminal:
        console.width = 200
    for row in kernels_table(most_sources().values()):
        table.add_row(*row)
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
