"""A plugin of pytest (-p tests.report --report FILE): what a run found, as JSON lines that outlive a crash of the process.

The first line tells the device, then one when a test begins and one when it is done, and the last that the run came to its end.
"""

import importlib.metadata
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import wgattn

NOT_AVAILABLE = "not available: "
"""How the reason of a skip begins that `not_available` makes. No other skip is expected where results are recorded."""
REFUSED = "refused: "
"""How it begins where a lowered limit was refused by a typed error that names it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--report", metavar="FILE", type=Path, help="write what each test found to FILE, as JSON lines")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--report"):
        config.pluginmanager.register(Report(config.getoption("--report")))


def facts(device: wgattn.Device) -> dict[str, Any]:
    """What a device is, in words and numbers."""
    profile = device.profile
    package = device.backend.package
    return {
        "backend": f"{package} {importlib.metadata.version(package)}",
        "device": profile.name,
        "driver": profile.driver,
        "kind": profile.kind,
        "subgroup": profile.subgroup_size,
        "f16": profile.f16,
        "limits": device.lowered,
    }


def family(item: pytest.Item) -> str:
    """The kernel family that a test belongs to: what it says itself by the property "family", else the name of its file."""
    named = [value for name, value in item.user_properties if name == "family"]
    return named[0] if named else re.sub(r"^tests/|test_|\.py$", "", item.nodeid.partition("::")[0])


class Report:
    """Writes the lines."""

    def __init__(self, path: Path):
        self._file = path.open("w", encoding="utf-8")

    def _write(self, **line: Any) -> None:
        print(json.dumps(line), file=self._file, flush=True)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._write(facts=facts(wgattn.default_device()), tests=len(session.items))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._write(begun=item.nodeid)
        self._reports: list[pytest.TestReport] = []
        try:
            return (yield)
        finally:
            self._write(test=item.nodeid, family=family(item), seconds=round(sum(r.duration for r in self._reports), 3), **self._outcome())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)

    def _outcome(self) -> dict[str, str]:
        for report in self._reports:
            if report.failed:
                crash = getattr(report.longrepr, "reprcrash", None)
                return {"outcome": "failed", "reason": f"{report.when}: {crash.message if crash else report.longreprtext}"[:2000]}
        for report in self._reports:
            if report.skipped:
                reason = report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else report.longreprtext
                for outcome, prefix in (("not available", NOT_AVAILABLE), ("refused", REFUSED)):
                    if reason.startswith(prefix):
                        return {"outcome": outcome, "reason": reason.removeprefix(prefix)}
                return {"outcome": "failed", "reason": f"skipped without a typed reason: {reason}"}
        return {"outcome": "passed"}

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._write(finished=int(exitstatus))
        self._file.close()
