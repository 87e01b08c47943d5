"""Choosing by the clock: candidates are timed once on a device, and the fastest is remembered in a file of the user's."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import os
import warnings
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from platformdirs import user_cache_dir

from ..errors import CapacityError, DeviceError, Unsupported
from ..files import replace_file
from . import shader
from .recording import Recording
from .timing import Stopwatch

if TYPE_CHECKING:
    from .device import Device

_log = logging.getLogger(__name__)
_FORMAT = 1
_MARGIN = 0.97
"""A candidate must take less than this share of the first one's time to be chosen in its place: less is noise."""

T = TypeVar("T")


class TuningKey(NamedTuple):
    """What a choice holds for: another device, driver, shader text or problem finds nothing."""

    device: str
    shaders: str
    problem: str


def tuning_key(device: Device, wing: str, problem: str) -> TuningKey:
    """The key of a problem, in words of the caller's, that kernels of a wing (a folder of shaders) solve."""
    profile = device.profile
    return TuningKey(f"{profile.name} | {profile.driver} | {profile.backend}", _digest(shader.SHADERS, wing), problem)


@cache
def _digest(shaders: Path, wing: str) -> str:
    """A hash of all shader text that a wing's kernels are made of."""
    found = hashlib.sha256()
    for folder in (wing, "parts"):
        for path in sorted((shaders / folder).rglob("*.wgsl")):
            found.update(path.relative_to(shaders).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


class TuningCache:
    """What was fastest, by `TuningKey`, in a JSON file.

    A file that is damaged, foreign or of another version counts as empty (the next choice replaces it), and one that cannot be written
    is left: a warning says so, once. Nothing here ever fails a call.

    Args:
        directory: where the file is; default: environment variable WGATTN_CACHE_DIR, else the user's cache directory.
    """

    def __init__(self, directory: str | Path | None = None):
        self.path = Path(directory or os.environ.get("WGATTN_CACHE_DIR") or user_cache_dir("wgattn")) / "tuning.json"
        self._noted: set[str] = set()

    @cached_property
    def _devices(self) -> dict[str, dict[str, dict]]:
        return self._load()

    def _load(self) -> dict[str, dict[str, dict]]:
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            self._note("damaged", f"cannot be read ({error})")
            return {}
        if not isinstance(content, dict) or "format" not in content:
            self._note("foreign", "is not a tuning cache of wgattn")
        elif content["format"] != _FORMAT:
            self._note("format", f"has format {content['format']!r}, not {_FORMAT}")
        elif not _well_formed(content.get("devices")):
            self._note("damaged", "is damaged")
        else:
            return content["devices"]
        return {}

    def _note(self, kind: str, what: str) -> None:
        if kind not in self._noted:
            self._noted.add(kind)
            warnings.warn(f"The tuning cache {self.path} {what}; it is ignored. Remove it, or set WGATTN_CACHE_DIR.", stacklevel=2)

    @property
    def empty(self) -> bool:
        """Whether nothing has been tuned yet, or nothing can be read."""
        return not self._devices

    def get(self, key: TuningKey) -> Any:
        """The choice stored under a key, as plain JSON values, or None."""
        if self.empty:
            return None
        if key.device not in self._devices and "device" not in self._noted:
            self._noted.add("device")
            _log.info("The tuning cache %s knows other devices, not %s.", self.path, key.device)
        entry = self._devices.get(key.device, {}).get(key.problem)
        return entry["choice"] if entry and entry["shaders"] == key.shaders else None

    def put(self, key: TuningKey, choice: Any, seconds: float) -> None:
        """Store a choice, in memory and, all at once or not at all, in the file; what other processes have stored meanwhile stays."""
        entry = {"shaders": key.shaders, "choice": choice, "microseconds": round(seconds * 1e6, 3)}
        self._devices.setdefault(key.device, {})[key.problem] = entry
        merged = self._load()
        merged.setdefault(key.device, {})[key.problem] = entry
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.path, json.dumps({"format": _FORMAT, "devices": merged}, indent=1))
        except OSError as error:
            self._note("unwritable", f"cannot be written ({error})")


def _well_formed(devices: Any) -> bool:
    if not isinstance(devices, dict) or not all(isinstance(entries, dict) for entries in devices.values()):
        return False
    entries = [entry for of_device in devices.values() for entry in of_device.values()]
    return all(isinstance(entry, dict) and isinstance(entry.get("shaders"), str) and "choice" in entry for entry in entries)


@dataclasses.dataclass(frozen=True)
class Tuned(Generic[T]):
    """The fastest candidate; how long it took, and the first candidate, in seconds (None when the choice came from the cache)."""

    choice: T
    seconds: float | None = None
    first_seconds: float | None = None


def tune(
    device: Device,
    candidates: Sequence[T],
    build: Callable[[T], Recording],
    cache: TuningCache,
    key: TuningKey,
    clock: Callable[[Recording], float] | None = None,
    *,
    again: bool = False,
    progress: Callable[[], None] = lambda: None,
) -> Tuned[T]:
    """The fastest of the candidates (dataclasses of plain values; the first is the one to beat), from the cache or else by timing `build(candidate)`.

    Candidates that the device cannot run are passed over. `again` times even what the cache knows; `progress` is called after each candidate.

    Raises:
        Unsupported: the device can run none of them.
    """
    stored = None if again else find(candidates, cache.get(key))
    if stored is not None:
        return Tuned(stored)
    clock = clock or Stopwatch(device)
    seconds: list[float] = []
    reason: Exception | None = None
    for candidate in candidates:
        try:
            seconds.append(clock(build(candidate)))
        except (CapacityError, Unsupported, DeviceError, device.api.GPUError) as error:
            seconds.append(math.inf)
            reason = error
        progress()
    best = min(range(len(seconds)), key=lambda i: seconds[i] * (1.0 if i else _MARGIN), default=None)
    if best is None or math.isinf(seconds[best]):
        raise Unsupported(f"{device.name} can run none of {len(candidates)} candidates for {key.problem}: {reason}")
    cache.put(key, dataclasses.asdict(candidates[best]), seconds[best])
    return Tuned(candidates[best], seconds[best], seconds[0])


def find(candidates: Sequence[T], choice: Any) -> T | None:
    """The candidate that a stored choice means; None when there is none such (any more)."""
    return None if choice is None else next((c for c in candidates if dataclasses.asdict(c) == choice), None)


@cache
def _open(path: str) -> TuningCache:
    return TuningCache(path)


def default_cache() -> TuningCache:
    """The user's cache, read once a process."""
    return _open(os.environ.get("WGATTN_CACHE_DIR") or user_cache_dir("wgattn"))
