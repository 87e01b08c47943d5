"""What a script of one kind of problems does when it is run: one peer, one problem, in an interpreter that need not have wgattn.

    PYTHON attention.py PEER FOLDER

FOLDER has problem.json, and arrays that belong to it as NAME.npy. The answer goes to FOLDER/answer.json, and the array that was computed to
FOLDER/result.npy: libraries print what they like.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

Answer = dict[str, Any]
"""seconds: of each repeat; or what else was measured. device: what the library says it ran on. result: an array."""


class Cannot(Exception):
    """The library has no way to say what is asked; the message tells what it lacks."""


def version(package: str) -> str:
    return f"{package} {importlib.metadata.version(package)}"


def timed(run: Callable[[], Any], repeat: int, warm: int = 2) -> list[float]:
    """Seconds of each of `repeat` calls, after some that are not counted."""
    found = []
    for _ in range(warm + repeat):
        begin = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin)
    return found[warm:]


def main(peers: Mapping[str, Callable[[dict], Answer]]) -> None:
    peer, folder = sys.argv[1], Path(sys.argv[2])
    problem = json.loads((folder / "problem.json").read_text()) | {path.stem: np.load(path) for path in folder.glob("*.npy")}
    try:
        answer = peers[peer](problem)
    except (ImportError, importlib.metadata.PackageNotFoundError) as error:
        answer = {"missing": str(error)}
    except Cannot as error:
        answer = {"cannot": str(error)}
    except Exception as error:  # whatever a library raises is its row in the table
        answer = {"error": f"{type(error).__name__}: {error}"}
    if "result" in answer:
        np.save(folder / "result.npy", np.asarray(answer.pop("result")))
    (folder / "answer.json").write_text(json.dumps(answer))
