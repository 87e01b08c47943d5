"""`wgattn info`: adapters, the profile of the one that is used, and versions."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import __version__
from ..errors import DeviceError
from ..gpu import Device, DeviceProfile, list_adapters
from ..gpu.webgpu import describe
from .console import plain_console, say

BACKENDS = {"wgpu": ("wgpu", "pip install wgpu"), "dawn": ("wgpudawn", "pip install 'wgattn[dawn]'")}
"""Their packages, and how to install them."""
_SOFTWARE = "The chosen adapter is software: the CPU does all the work, which is slow. If this machine has a GPU, install its driver."
HELP = """Shows the adapters, which of them is used and why, what it can do (measured), and versions.

example:
  wgattn info
  wgattn info --json --adapter llvmpipe"""


def run(args: argparse.Namespace) -> int:
    """`wgattn info`. What can be said without a device is said even when there is none; then DeviceError."""
    adapters = list_adapters(args.backend)
    device, failure = None, None
    try:
        device = Device(args.adapter, args.backend, checked=args.checked or None)
    except DeviceError as error:
        failure = error
    if args.json:
        print(json.dumps(_report(args, adapters, device), indent=2))
    else:
        _print(args, adapters, device)
    if failure:
        raise failure
    return 0


def _report(args: argparse.Namespace, adapters: list[str], device: Device | None) -> dict[str, Any]:
    report: dict[str, Any] = {"adapters": adapters, "chosen": None, "versions": versions(), "backends": _backends()}
    if device is not None:
        profile = asdict(device.profile) | {"software": device.profile.software}
        report |= {"chosen": describe(device.adapter), "why": _why(args, adapters), "software": device.profile.software}
        report |= {"backend": device.backend.name, "checked": device.checked, "features": sorted(device.gpu.features), "profile": profile}
    return report


def _print(args: argparse.Namespace, adapters: list[str], device: Device | None) -> None:
    console = plain_console()
    chosen = adapters.index(describe(device.adapter)) if device else None
    rows = [(name, f"used: {_why(args, adapters)}" if i == chosen else "") for i, name in enumerate(adapters)]
    _section(console, "Adapters", rows or [("none", "")])
    if device is not None:
        if device.profile.software:
            say(console, f"  {_SOFTWARE}")
        features = [(name, "") for name in sorted(device.gpu.features)]
        _section(console, "Features in use", features or [("none", "")])
        _section(console, "Profile (measured)", _profile_rows(device.profile) + ([("shaders", "checked: slower")] if device.checked else []))
    has = lambda b: f"installed: {b['package']} {b['version']}" if b["version"] else f"not installed: {b['install']}"  # noqa: E731
    _section(console, "Backends", [(name, has(backend)) for name, backend in _backends().items()])
    _section(console, "Versions", [(name, value or "unknown") for name, value in versions().items()])


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


def versions() -> dict[str, str | None]:
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
    return {name: {"package": package, "version": _version(package), "install": install} for name, (package, install) in BACKENDS.items()}
