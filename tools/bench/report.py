"""The result of a run: what it says, its file, and its comparison with an earlier one."""

from __future__ import annotations

import datetime
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import wgattn
from wgattn.files import replace_file
from wgattn.gpu.webgpu import describe

from .records import BadRequest, Bench, Row, key_of

FORMAT = 1
_LEAST_NOISE = 0.05
"""Times of two runs that differ by less are called equal."""


@dataclass
class Report:
    """All that is known so far. `save` after each row: an interruption then loses nothing."""

    about: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    ceilings: dict[str, float] = field(default_factory=dict)
    profile: dict[str, Any] | None = None
    state: str = "running"
    """ "running", "complete", "interrupted" by the user, or "failed"."""
    baseline: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, bench: Bench, options: Mapping[str, Any], baseline: Mapping[str, Any] | None = None) -> Report:
        device, profile = bench.device, bench.device.profile
        about = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "adapter": describe(device.adapter),
            "driver": profile.driver,
            "backend": device.backend.name,
            "software": profile.software,
            "checked": device.checked,
            "clock": "timestamps" if profile.timestamps else "wall",
            "versions": {"wgattn": wgattn.__version__, "numpy": np.__version__, "python": platform.python_version()},
            "options": dict(options),
        }
        return cls(about, ceilings=bench.ceilings, baseline=baseline)

    def compare(self, row: Row) -> str | None:
        """Note in a row how it compares with the baseline's; the verdict, or None where there is nothing to compare."""
        if self.baseline is not None and row.section != "ceilings":
            row.change = _change(row, self.baseline)
        return row.change and row.change["verdict"]

    def json(self) -> dict[str, Any]:
        whole = {"format": FORMAT, "state": self.state, **self.about, "ceilings": self.ceilings, "rows": [row.json() for row in self.rows]}
        return whole if self.profile is None else whole | {"profile": self.profile}

    def close(self, path: Path | None) -> None:
        """Save for the last time; a run that is still running now has failed."""
        self.state = "failed" if self.state == "running" else self.state
        if path:
            self.save(path)

    def save(self, path: Path) -> None:
        """Write the file, all at once or not at all."""
        replace_file(path, json.dumps(self.json(), indent=1) + "\n", 0o644)

    @property
    def slower(self) -> list[Row]:
        return [row for row in self.rows if row.change and row.change["verdict"] == "slower"]

    @property
    def wrong(self) -> list[Row]:
        """Rows that ought to have worked: results far from the reference, or none."""
        return [row for row in self.rows if row.wrong or row.failed]


# ---- the baseline


def read_baseline(path: Path) -> dict[str, Any]:
    """A file that `save` wrote; BadRequest for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadRequest(f"the baseline {path} cannot be read ({error.strerror})") from None
    except ValueError:
        raise BadRequest(f"the baseline {path} is not JSON") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("rows"), list):
        raise BadRequest(f"the baseline {path} is not a result of this version's wgattn bench --json")
    return content


def check_baseline(baseline: Mapping[str, Any], report: Report, keys: set[str]) -> None:
    """BadRequest unless the baseline is of this device and has one of these rows."""
    for what in ("adapter", "backend", "checked", "clock"):
        if baseline.get(what) != report.about[what]:
            raise BadRequest(f"the baseline's {what} is {baseline.get(what)!r}, and here it is {report.about[what]!r}: they cannot be compared")
    if not keys & set(_times(baseline)):
        raise BadRequest("the baseline has none of the rows that this run will have")


def _times(baseline: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    rows = (row for row in baseline["rows"] if isinstance(row, dict) and row.get("seconds"))
    return {key_of(row.get("section"), row.get("problem"), row.get("variant")): row for row in rows}


def _change(row: Row, baseline: Mapping[str, Any]) -> dict[str, Any] | None:
    """How a row's time compares: beyond the noise only where its share of the ceiling has moved as well, for a busy machine slows both."""
    before = _times(baseline).get(row.key)
    if before is None or row.seconds is None or before.get("facts", {}).get("model") != row.facts.get("model"):
        return None
    noise = max(_LEAST_NOISE, 2 * ((row.spread or 0) + (before.get("spread") or 0)))
    ratio = row.seconds / before["seconds"]
    against_ceiling = before["share"] / row.share if row.share and before.get("share") else ratio
    verdict = "same"
    if min(ratio, against_ceiling) > 1 + noise:
        verdict = "slower"
    elif max(ratio, against_ceiling) < 1 / (1 + noise):
        verdict = "faster"
    return {"ratio": ratio, "against_ceiling": against_ceiling, "noise": noise, "verdict": verdict}
