"""Stacks: what shaders and tests keep to so that every stack can run them, and the tool that runs them."""

import re
from collections.abc import Iterator

import pytest

from wgattn.gpu.shader import SHADERS


def functions(text: str) -> Iterator[tuple[str, str]]:
    """(name, body) of each function of a WGSL text but main."""
    text = re.sub(r"//[^\n]*", "", text)
    for head in re.finditer(r"\bfn (\w+)\(", text):
        depth, begin = 0, text.index("{", head.end())
        for end in range(begin, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if not depth:
                break
        if head[1] != "main":
            yield head[1], text[begin + 1 : end]


@pytest.mark.parametrize("path", ["flash_rows", *sorted(p.stem for p in (SHADERS / "attention/parts").glob("mask_*.wgsl"))])
def test_what_is_called_for_each_score_has_no_branches(path):
    """Kernels call these for each of a tile's scores, and compilers inline them: with a return in the middle, SwiftShader took minutes."""
    for name, body in functions((SHADERS / f"attention/parts/{path}.wgsl").read_text(encoding="utf-8")):
        assert not re.search(r"\bif\b|&&|\|\|", body), f"{path}: {name} branches"
