"""WGSL as text: a main file and its parts become one module. Text in, text out; no device needed.

Module scope in WGSL is order-independent, so a kernel is a generated prelude + one main file + parts, concatenated.
Files declare buffers by name, without numbers (`var<storage, read> query: array<f32>;`); they are numbered here, and the bind group
layout and the layout of `struct Params` come from the same text.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from ..errors import ArgumentError

_PACKAGE = Path(__file__).resolve().parent.parent
# Inside the package in a wheel; beside it in a checkout.
SHADERS = _PACKAGE / "shaders" if (_PACKAGE / "shaders").is_dir() else _PACKAGE.parent / "shaders"

Option = bool | int | float | str


@dataclass(frozen=True)
class Part:
    """A part whose text has holes: `$name` is replaced by `names["name"]`. Lets one text serve several buffers of a kernel."""

    path: str
    names: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, path: str, **names: str) -> Part:
        return cls(path, tuple(sorted(names.items())))

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path,)

    def text(self, options: Mapping[str, Option]) -> str:
        text = _read(self.path)
        for name, value in self.names:
            text = text.replace(f"${name}", value)
        return text


_DECLARED = re.compile(r"^(?:fn|alias|struct|const|override|var<[^>]*>)\s+(\w+)", re.M)


@dataclass(frozen=True)
class Named:
    """Parts under a name of their own, so that a kernel can have two sets of them, as for a second matrix.

    All that they declare begins with `name_`, buffers too; an option X of theirs is given as `name_X`, and what they read as `params.x` is the
    option `name_x`.
    """

    name: str
    parts: tuple[str | Part, ...]

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(f"{path} as {self.name}" for p in self.parts for path in _part(p).paths)

    def text(self, options: Mapping[str, Option]) -> str:
        text = "\n".join(_part(p).text(options) for p in self.parts)
        prefix = f"{self.name}_"
        words = {*_DECLARED.findall(text), *(o.removeprefix(prefix) for o in options if o.startswith(prefix))}
        text = re.sub(rf"(?<![^.]\.)(?<!\w)(?:{'|'.join(sorted(words))})\b", lambda m: prefix + m[0], text)
        return re.sub(r"\bparams\.(\w+)", rf"{prefix}\1", text)


AnyPart = str | Part | Named
"""How a part is asked for; text is the path of one without holes, `name` for `parts/name`."""


def _part(part: AnyPart) -> Part | Named:
    return Part.of(part if "/" in part else f"parts/{part}") if isinstance(part, str) else part


_COMMENT = re.compile(r"//[^\n]*")
_BUFFER = re.compile(r"^var<(uniform|storage, read_write|storage, read)>\s+(\w+)", re.M)
_OVERRIDE = re.compile(r"^override\s+(\w+)(?::\s*\w+)?(?:\s*=\s*([^;]+))?;", re.M)
_CONST = re.compile(r"^const\s+(\w+)(?::\s*\w+)?\s*=\s*([^;]+);", re.M)
_WORKGROUP = re.compile(r"^var<workgroup>\s+\w+\s*:\s*([^;]+);", re.M)
_WORKGROUP_SIZE = re.compile(r"@workgroup_size\(([^)]*)\)")
_STRUCT = re.compile(r"^struct Params \{([^}]*)\}", re.M)
_MEMBER = re.compile(r"(\w+)\s*:\s*(\w+)")
_UNROLL = re.compile(r"^[ \t]*//@ unroll (\w+) in 0\.\.(\w+)\n(.*?)^[ \t]*//@ end\n", re.M | re.S)

_FEATURES = {
    "f16": ("f16", re.compile(r"\bf16\b")),
    "subgroup": ("subgroup", re.compile(r"\bsubgroup[A-Z_]\w*")),
    "matrix": ("subgroup_matrix_", re.compile(r"\bsubgroup_matrix_\w+")),
}
"""By feature: a text that is quickly looked for, and what it must be part of."""
_BINDING_TYPE = {"uniform": "uniform", "storage, read": "read-only-storage", "storage, read_write": "storage"}
_SCALARS = {"u32": np.uint32, "i32": np.int32, "f32": np.float32}
_SIZES = {"u32": 4, "i32": 4, "f32": 4, "f16": 2, "bool": 4}


@dataclass(frozen=True)
class Source:
    """WGSL ready to compile, and what Python needs to know about it."""

    name: str
    text: str
    buffers: tuple[tuple[str, str], ...]
    """(name, binding type) in the order of binding numbers."""
    overrides: Mapping[str, float]
    """Values for the pipeline's `override` declarations."""
    params: np.dtype | None
    """Layout of `struct Params`, or None."""
    workgroup_size: int
    workgroup_bytes: int
    """Of all workgroup variables."""
    workgroup_storage: int = 0
    """The same as WebGPU counts it against a device's limit: each variable rounded up to 16 bytes."""
    features: frozenset[str] = field(default_factory=frozenset)
    """Of "f16", "subgroup", "matrix" (matrix units): what the text needs from the device."""
    parts: tuple[str, ...] = ()
    """Paths of the parts that the text is made of; those of `Named` parts with "as name" behind."""
    options: Mapping[str, Option] = field(default_factory=dict)
    constants: Mapping[str, float] = field(default_factory=dict)
    """Every number that array lengths may name: options, and what the text declares."""

    def under(self, directives: Mapping[str, str]) -> str:
        """The text of a source assembled without directives, with those."""
        return _header(self.features, directives) + self.text


def _header(features: frozenset[str], directives: Mapping[str, str]) -> str:
    return "".join(line + "\n" for feature, line in sorted(directives.items()) if feature in features)


@cache
def _read(path: str) -> str:
    try:
        return (SHADERS / f"{path}.wgsl").read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ArgumentError(f"There is no shader {path!r} in {SHADERS}.") from None


def assemble(main: str, parts: tuple[AnyPart, ...] = (), options: Mapping[str, Option] | None = None, directives: Mapping[str, str] | None = None) -> Source:
    """Join one main file (`wing/name`) with parts (`wing/parts/name`, or `name` for `parts/name`; a `Part` fills holes, `Named` renames) and options.

    An option that the text declares with `override` goes to the pipeline. Any other becomes a module constant, or an alias where the
    value is text (`KV="f16"`). A block between `//@ unroll r in 0..ROWS` and `//@ end` is repeated with `$r` replaced, because naga does
    not unroll loops and arrays indexed by a loop variable are slow. `directives` maps a feature to the line that a compiler wants for it.
    """
    options = dict(options or {})
    made = [_part(p) for p in parts]
    body = "\n".join([_read(main), *(p.text(options) for p in made)])
    body = _unroll(body, options)
    code = _COMMENT.sub("", body)
    declared = dict(_OVERRIDE.findall(code))
    prelude = "".join(_declaration(k, v) for k, v in options.items() if k not in declared)
    features = frozenset(f for f, (word, pattern) in _FEATURES.items() if word in prelude + code and pattern.search(prelude + code))
    buffers: list[tuple[str, str]] = []

    def number(match: re.Match[str]) -> str:
        buffers.append((match[2], _BINDING_TYPE[match[1]]))
        return f"@group(0) @binding({len(buffers) - 1}) {match[0]}"

    text = _header(features, directives or {}) + prelude + _BUFFER.sub(number, body)
    values = _values(code, options, declared)
    struct = _STRUCT.search(code)
    sizes = [_bytes(t, values) for t in _WORKGROUP.findall(code)]
    return Source(
        name=main,
        text=text,
        buffers=tuple(buffers),
        overrides={k: float(options[k]) for k in options if k in declared},
        params=np.dtype([(n, _SCALARS[t]) for n, t in _MEMBER.findall(struct[1])]) if struct else None,
        workgroup_size=int(np.prod([evaluate(e, values) for e in _WORKGROUP_SIZE.search(code)[1].split(",")])),
        workgroup_bytes=sum(sizes),
        workgroup_storage=sum(-(-size // 16) * 16 for size in sizes),
        features=features,
        parts=tuple(path for p in made for path in p.paths),
        options=options,
        constants=values,
    )


def _unroll(text: str, options: Mapping[str, Option]) -> str:
    done = 0  # before it there are no blocks; searching anew took half of the time that a text takes
    while (done := text.find("//@ unroll", done)) >= 0:
        match = _UNROLL.search(text, text.rfind("\n", 0, done) + 1)
        if match is None:
            break
        done = match.start()
        count = int(options[match[2]]) if match[2] in options else int(match[2])
        body = match[3]
        if "//@ unroll" in body:  # the innermost block first: start again after the inner opening
            inner = match.start() + match[0].rindex("//@ unroll")
            start = text.rindex("\n", 0, inner) + 1
            text = text[:start] + _unroll(text[start : match.end()], options) + text[match.end() :]
            continue
        text = text[: match.start()] + "".join(body.replace(f"${match[1]}", str(i)) for i in range(count)) + text[match.end() :]
    return text


def _declaration(name: str, value: Option) -> str:
    if isinstance(value, bool | np.bool_):
        return f"const {name} = {str(value).lower()};\n"
    if isinstance(value, int | np.integer):
        return f"const {name} = {value}u;\n"
    if isinstance(value, float | np.floating):
        return f"const {name}: f32 = {float(value)!r};\n"
    return f"alias {name} = {value};\n"


def _values(code: str, options: Mapping[str, Option], declared: Mapping[str, str]) -> dict[str, float]:
    """Every number that array lengths may name: options, overrides with defaults, and constants of the text, in dependency order."""
    values: dict[str, float] = {k: v for k, v in options.items() if not isinstance(v, str)}
    pending = {k: v for k, v in [*_CONST.findall(code), *declared.items()] if k not in values and v}
    for _ in range(len(pending)):
        for name, expression in list(pending.items()):
            try:
                values[name] = evaluate(expression, values)
                del pending[name]
            except (KeyError, ValueError):
                continue
    return values


_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}


def evaluate(expression: str, values: Mapping[str, float]) -> int:
    """The value of an integer WGSL expression; KeyError for an unknown name, ValueError for anything but arithmetic."""

    def walk(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name):
            return int(values[node.id])
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](walk(node.left), walk(node.right))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("max", "min"):
            return {"max": max, "min": min}[node.func.id](*map(walk, node.args))
        raise ValueError(f"not integer arithmetic: {expression!r}")

    try:
        return walk(_parsed(expression))
    except SyntaxError:
        raise ValueError(f"not integer arithmetic: {expression!r}") from None


@cache
def _parsed(expression: str) -> ast.expr:
    return ast.parse(re.sub(r"\b(\d+)u\b", r"\1", expression.strip()), mode="eval").body


def _bytes(kind: str, values: Mapping[str, float]) -> int:
    """Size of a workgroup variable's type."""
    kind = kind.strip()
    if match := re.fullmatch(r"array<(.*)>", kind, re.S):
        element, length = _split_at_comma(match[1])
        return _bytes(element, values) * evaluate(length, values)
    if match := re.fullmatch(r"buffer<(.*)>", kind, re.S):
        return evaluate(match[1], values)
    if match := re.fullmatch(r"vec([234])<(\w+)>", kind):
        return {2: 2, 3: 4, 4: 4}[int(match[1])] * _SIZES[match[2]]
    if match := re.fullmatch(r"atomic<(\w+)>", kind):
        return _SIZES[match[1]]
    return _SIZES[kind]


def _split_at_comma(text: str) -> tuple[str, str]:
    """What stands before and behind the first comma outside all brackets; within parentheses, < and > are operators."""
    angles = parentheses = 0
    for i, character in enumerate(text):
        parentheses += (character == "(") - (character == ")")
        if not parentheses:
            angles += (character == "<") - (character == ">")
            if character == "," and not angles:
                return text[:i], text[i + 1 :]
    raise ValueError(f"not an element type and a length: {text!r}")
