"""A terminal for what commands say."""

from __future__ import annotations

from typing import NoReturn

from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError  # `wgattn.cli.main` treats all of them alike


def plain_console(stderr: bool = False) -> Console:
    """Prints names as they are, without markup; wide where no terminal sets the width, so that lines stay whole."""
    console = _Console(stderr=stderr, markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = max(120, console.width)
    return console


def say(console: Console, text: str, style: str = "") -> None:
    """Print a line: wrapped at words on a terminal, with the indentation that it has, and whole elsewhere."""
    if not console.is_terminal:
        console.print(text, style=style, soft_wrap=True)
        return
    words = text.lstrip(" ")
    console.print(Padding(Text(words, style), (0, 0, 0, len(text) - len(words)), expand=False))


def progress(console: Console, *more: ProgressColumn) -> Progress:
    """A bar that is one line however narrow the terminal is: what is done now is cut short, numbers and times are not."""
    what = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
    done = TextColumn("{task.completed} of {task.total}", table_column=Column(no_wrap=True))
    return Progress(what, BarColumn(20), done, TimeElapsedColumn(), *more, console=console, transient=True, expand=True)
