"""Chat templates, which are programs in the model's file, rendered where they can do no harm: sandboxed, in a process with bounds."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, FormatError, Unsupported
from ..extras import load_extra

MAX_SECONDS = 10.0
"""That one rendering may take, the start of the process included."""
MAX_CHARACTERS = 1 << 22
"""Of a prompt."""
MAX_MEMORY = 1 << 29
"""Bytes of the process that renders, where the system keeps such limits (Linux)."""

_ENVIRONMENT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT", "TZ")
"""All that the process gets of the environment, where there may be secrets: what a Python may need to start, and the time zone."""

_WORKER = Path(__file__).with_name("template_worker.py")


class Template:
    """A Jinja template, `source`, that `place` in some file holds. Threads that render take turns.

    Its process starts with the first rendering and ends with this object. It gets nothing but the template and the names to render with.
    """

    def __init__(self, source: str, place: str):
        self._source, self._place = source, place
        self._turn = threading.Lock()
        self._worker: tuple[subprocess.Popen, int] | None = None

    def render(self, **names: Any) -> str:
        """The text.

        ArgumentError: names that the template rejects, that it cannot be rendered with, or that are no JSON. FormatError: a template that does not
        parse, or takes more time, text or memory than is allowed. Unsupported: Jinja is missing, or Python cannot start another Python.
        """
        try:
            request = json.dumps({"source": self._source, "names": names})
        except (TypeError, ValueError, RecursionError) as error:
            raise ArgumentError(f"chat messages must be made of texts, numbers, lists and mappings ({error})") from error
        with self._turn:
            answer = self._ask(request)
        if "text" in answer:
            return answer["text"]
        (kind, why), *_ = answer.items()
        if kind == "rejected":
            raise ArgumentError(f"the chat template rejects the messages: {why}")
        if kind == "failed":
            raise ArgumentError(f"the chat template of {self._place} cannot render these messages ({why}): check roles and contents")
        what = f"does not parse ({why})" if kind == "syntax" else why
        raise FormatError(f"{self._place} has a chat template (tokenizer.chat_template) that {what}: write the prompt out, or use another file")

    def _ask(self, request: str) -> Mapping[str, str]:
        process = self._process()
        late = threading.Event()

        def stop() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(MAX_SECONDS, stop)
        timer.daemon = True
        timer.start()
        try:
            process.stdin.write(request + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:  # it has ended
            line = ""
        except BaseException:  # Ctrl-C: half an answer is left
            self._drop()
            raise
        finally:
            timer.cancel()
        if line.endswith("\n"):
            return json.loads(line)
        self._drop()
        return {"bounds": f"takes more than {MAX_SECONDS:g} seconds" if late.is_set() else f"ends the process that renders it (exit code {process.returncode})"}

    def _process(self) -> subprocess.Popen:
        """The process, started where there is none of ours (a fork has only its parent's)."""
        if self._worker is not None and self._worker[1] == os.getpid() and self._worker[0].poll() is None:
            return self._worker[0]
        packages = [load_extra(name) for name in ("jinja2", "markupsafe")]
        paths = list(dict.fromkeys(str(Path(p.__file__).parents[1]) for p in packages))
        own = {"start_new_session": True} if os.name == "posix" else {"creationflags": getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)}  # Ctrl-C is ours
        try:
            command = [sys.executable, "-I", "-S", "-X", "utf8", str(_WORKER)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "encoding": "utf-8"}
            process = subprocess.Popen(command, **pipes, env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}, **own)
        except (OSError, ValueError) as error:
            raise Unsupported(f"chat templates are rendered by a Python process of their own, and none can be started ({error})") from error
        self._worker = process, os.getpid()
        weakref.finalize(self, _end, process, os.getpid())
        process.stdin.write(json.dumps({"paths": paths, "memory": MAX_MEMORY, "longest": MAX_CHARACTERS}) + "\n")
        return process

    def _drop(self) -> None:
        if self._worker is not None:
            _end(*self._worker)
        self._worker = None


def _end(process: subprocess.Popen, owner: int) -> None:
    if owner != os.getpid():
        return
    process.kill()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # what it was told last is lost with it
            pipe.close()
    process.wait()
