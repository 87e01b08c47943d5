"""The benchmark dashboard, `wgattn bench`. Its modules stand beside this file in a wheel, and in `tools/bench` in a checkout."""

from pathlib import Path

if not (Path(__file__).parent / "run.py").exists():
    __path__ = [str(Path(__file__).resolve().parents[2] / "tools" / "bench")]
