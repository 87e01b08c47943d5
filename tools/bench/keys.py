"""Leaving by a key: while a terminal shows the dashboard, `q` does what Ctrl-C does."""

from __future__ import annotations

import _thread
import contextlib
import os
import select
import sys
import threading
from collections.abc import Iterator

try:
    import termios
    import tty
except ImportError:  # Windows has Ctrl-C only
    termios = None


_AGAIN = 2.0
"""Seconds after which an interrupt is made again where it had no effect: one that comes while an object is finalised is lost."""


@contextlib.contextmanager
def q_interrupts(wanted: bool) -> Iterator[bool]:
    """Within the block, `q` interrupts the main thread, where `wanted`, stdin is a terminal and we are in its foreground. Gives whether that is so."""
    file = _terminal() if wanted else None
    if file is None:
        yield False
        return
    before, done = termios.tcgetattr(file), threading.Event()
    try:
        tty.setcbreak(file)
        threading.Thread(target=_read, args=(file, done), daemon=True).start()
        yield True
    finally:
        done.set()
        termios.tcsetattr(file, termios.TCSADRAIN, before)


def _terminal() -> int | None:
    try:
        file = sys.stdin.fileno()
        in_front = termios is not None and os.isatty(file) and os.tcgetpgrp(file) == os.getpgrp()  # else changing it would stop us
    except (AttributeError, OSError, ValueError):  # no stdin, or one that is no file
        return None
    return file if in_front else None


def _read(file: int, done: threading.Event) -> None:
    while not done.is_set():
        if select.select([file], [], [], 0.1)[0]:
            typed = os.read(file, 64)
            if not typed or done.is_set():
                return
            if b"q" in typed.lower():
                _thread.interrupt_main()
                while not done.wait(_AGAIN):
                    _thread.interrupt_main()
