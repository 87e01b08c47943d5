"""What commands print on terminals: lines that fit, cut at words."""

import io

import pytest
from rich.console import Console
from rich.progress import TimeRemainingColumn

from wgattn.commands.console import progress, say

SENTENCE = "  The chosen adapter is software: the CPU does all the work, which is slow. If this machine has a GPU, install its driver."


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_a_sentence_is_wrapped_at_words_on_a_terminal(width):
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=width)
    say(console, SENTENCE)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert all(len(line) <= width and line.startswith("  ") for line in lines)
    assert [word for line in lines for word in line.split()] == SENTENCE.split()


def test_a_sentence_stays_whole_elsewhere():
    console = Console(file=io.StringIO(), width=80)
    say(console, SENTENCE)
    assert console.file.getvalue() == SENTENCE + "\n"


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_progress_is_one_line_with_whole_numbers(width):
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=width)
    bar = progress(console, TimeRemainingColumn())
    bar.add_task("flash: 8 / 8 heads, 512 positions, head dim 64, f32 keys, and more besides", total=60, completed=30)
    console.print(bar.get_renderable())
    (line,) = console.file.getvalue().splitlines()
    assert len(line) <= width
    assert "30 of 60 0:00:00 -:--:--" in line
    assert line.startswith("flash: 8")
