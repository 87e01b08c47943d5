"""Puts what programs print into README.md: the table of paths. `--check` says whether it is up to date (a test does)."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import wgattn

README = Path(__file__).parent.parent / "README.md"
_BLOCK = re.compile(r"(`print\(wgattn\.explain\(\)\)`\):\n\n```text\n).*?(```)", re.S)


def updated(text: str) -> str:
    """README's text with the table as it is now, without the device's name."""
    table = str(wgattn.explain())
    lines = "\n".join(line.rstrip() for line in table[table.index("┏") :].strip("\n").splitlines())
    return _BLOCK.sub(lambda m: f"{m[1]}{lines}\n{m[2]}", text)


def main() -> int:
    text = README.read_text(encoding="utf-8")
    if "--check" in sys.argv:
        return int(updated(text) != text)
    README.write_text(updated(text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
