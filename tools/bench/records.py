"""What the dashboard is made of: cases to measure, what a case is when it is ready, and the row that comes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from wgattn.errors import WgattnError
from wgattn.gpu import Device, Recording

SECTIONS = {
    "ceilings": "Ceilings",
    "gemm": "GEMM",
    "prefill": "Attention prefill",
    "decode": "Attention decode",
    "block": "Transformer block",
    "model": "Model",
}
"""The sections in their order, by the names that `--only` takes. Ceilings are always measured: the others are shares of them."""

CEILINGS = {
    "copy": "copy bandwidth",
    "f32": "f32 FMA chain",
    "f16": "f16 FMA chain",
    "dot4": "dot4I8Packed chain",
    "matrix": "matrix units",
}


class BadRequest(Exception):
    """What was asked for cannot be done, in one sentence."""


class Missing(WgattnError):
    """A case cannot be measured here, which is nobody's fault; the message says what is missing."""


@dataclass
class Bench:
    """What all cases share."""

    device: Device
    quick: bool = False
    model: str = "auto"
    ceilings: dict[str, float] = field(default_factory=dict)
    """FLOP/s or bytes/s measured in this run, by the names of CEILINGS; those that the device lacks are not there."""
    kept: dict[str, Any] = field(default_factory=dict)
    """What one case leaves for the next."""

    @property
    def size(self) -> str:
        """ "cpu", "small" or "large": how large problems are."""
        profile = self.device.profile
        return "cpu" if profile.software else "large" if profile.kind == "DiscreteGPU" else "small"

    @property
    def seconds(self) -> float:
        """How long a case is sampled."""
        return 0.25 if self.quick else 2.0

    def rng(self) -> np.random.Generator:
        """The same numbers in every case and run."""
        return np.random.default_rng(0)

    # ---- caches

    @property
    def uncached(self) -> int:
        """Bytes of a working set that no cache holds. WebGPU does not tell the size of a GPU's cache: 256 MiB is beyond most."""
        return 2 * cpu_cache() if self.device.profile.software else 256 << 20

    def copies(self, nbytes: int) -> int:
        """How many copies of a working set to replay in turn, so that caches do not flatter."""
        return max(1, min(16 if self.quick else 64, -(-self.uncached // max(nbytes, 1))))


def cpu_cache() -> int:
    """Bytes of the CPU's last cache where the system tells, else 32 MiB."""
    try:
        levels = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
        return int(levels[-1].read_text().strip().removesuffix("K")) << 10
    except (OSError, ValueError, IndexError):
        return 32 << 20


@dataclass(frozen=True)
class Error:
    """How far results are from the float64 reference: |difference| / |reference| (2-norms), the largest difference, and what is still right."""

    relative: float
    largest: float
    bound: float

    @classmethod
    def of(cls, actual: np.ndarray, expected: np.ndarray, bound: float) -> Error:
        if bound == 0 and np.array_equal(actual, expected):
            return cls(0.0, 0.0, 0.0)
        actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
        if not np.isfinite(actual).all():
            return cls(float("inf"), float("inf"), bound)
        apart, size = np.linalg.norm(actual - expected), np.linalg.norm(expected)
        return cls(float(apart / size if size else apart), float(np.abs(actual - expected).max(initial=0)), bound)

    @property
    def wrong(self) -> bool:
        return not self.relative <= self.bound


@dataclass(frozen=True)
class Work:
    """A case ready to be measured.

    `recordings` do the same on other buffers and are replayed in turn. What is counted is for one replay, and times are divided by `units`.
    """

    recordings: Sequence[Recording]
    flops: float = 0
    nbytes: float = 0
    """Bytes that have to be read and written."""
    ceiling: str | None = None
    """The one of CEILINGS that bounds it; "copy" makes the rate one of bytes."""
    units: int = 1
    check: Callable[[], Error | None] = lambda: None
    arrange: Callable[[], None] = lambda: None
    """Puts inputs into place that the check has changed."""
    working_set: int = 0
    """Bytes that all recordings together touch."""
    wall: Callable[[], float] | None = None
    """Measured in place of replays: runs once and returns seconds by the wall clock."""
    best: bool = False
    """What counts is the shortest sample, not the median: a ceiling is what can be reached."""
    note: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """More that is worth knowing of it, by name."""


def key_of(section: str, problem: str, variant: str) -> str:
    """The name of a row among all: what a case will be, and what a baseline has."""
    return f"{section}: {problem}: {variant}"


@dataclass(frozen=True)
class Case:
    """One row to come. `build` makes the work: it allocates, uploads and records; it may raise WgattnError, and the row then says why."""

    section: str
    problem: str
    variant: str
    build: Callable[[Bench], Work]
    cost: float = 1.0
    """Seconds that it takes next to the others, for the time left."""

    @property
    def key(self) -> str:
        return key_of(self.section, self.problem, self.variant)


@dataclass
class Row:
    """What was measured of a case. Times in seconds of one unit, rates in FLOP/s or bytes/s."""

    section: str
    problem: str
    variant: str
    seconds: float | None = None
    """The median; for ceilings the shortest."""
    spread: float | None = None
    """Half the distance between the quartiles, as a share of the median."""
    samples: int = 0
    clock: str | None = None
    """What `seconds` were taken with: "timestamps", or "wall"."""
    host_seconds: float | None = None
    """Of the host, to encode and submit one unit."""
    rate: float | None = None
    unit: str | None = None
    ceiling: str | None = None
    share: float | None = None
    """Of the ceiling, as measured in the same run."""
    error: float | None = None
    largest_error: float | None = None
    error_bound: float | None = None
    wrong: bool = False
    in_cache: bool = False
    """The working set may fit the device's caches, all copies of it taken together."""
    copies: int = 0
    working_set: int = 0
    note: str = ""
    missing: str | None = None
    """Why there is nothing."""
    failed: bool = False
    """It should have worked."""
    facts: dict[str, Any] = field(default_factory=dict)
    change: dict[str, Any] | None = None
    """Against the baseline: `ratio` of times, `noise`, `verdict`."""

    @property
    def key(self) -> str:
        return key_of(self.section, self.problem, self.variant)

    def json(self) -> dict[str, Any]:
        return asdict(self)


def arithmetic_of(recording: Recording) -> str:
    """The one of CEILINGS whose instructions a recording's kernels use for their products."""
    texts = [d.kernel.source.text for d in recording]
    found = {"matrix": "subgroupMatrixMultiplyAccumulate(", "dot4": "dot4I8Packed("}
    return next((name for name, word in found.items() if any(word in text for text in texts)), "f32")
