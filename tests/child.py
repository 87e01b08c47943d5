"""Python code in a process of its own: what may end the process, or hang, is tested there."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(code: str, *arguments: str, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess:
    """The finished process: `returncode`, `stdout`, `stderr`. TimeoutExpired when it hangs; it is killed then."""
    command = [sys.executable, "-X", "faulthandler", "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=ROOT, env={**os.environ, **environment}, check=False)


def check(code: str, *arguments: str, timeout: float = 120, **environment: str) -> str:
    """What it prints; the test fails when it does not end with exit code 0."""
    done = run(code, *arguments, timeout=timeout, **environment)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr[-4000:]}"
    return done.stdout
