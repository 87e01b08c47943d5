"""A terminal for what commands say."""

from __future__ import annotations

from typing import NoReturn

from rich.console import Console


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError  # `wgattn.cli.main` treats all of them alike


def plain_console(stderr: bool = False) -> Console:
    """Prints names as they are, without markup; wide where no terminal sets the width, so that lines stay whole."""
    console = _Console(stderr=stderr, markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = max(120, console.width)
    return console
