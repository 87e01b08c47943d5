"""Matrix units in software: the text of a kernel that uses them, rewritten so that any WebGPU device with f16 runs it.

A subgroup of 16, 32 or 64 lanes is so many consecutive invocations, whatever the device's own subgroups are. Of a result of 16 x 16 each lane holds a
block of 4 rows and 16, 8 or 4 columns less, of the left factor all of these rows, of the right all of these columns: products need no other lane, and
a matrix is what memory held when it was loaded. Barriers stay what they are. Factors are f16, products and sums f32.

The kernel's `buffer<>` is an array of words, full of NaN when a workgroup begins. A read outside of a view is NaN, and so are matrices whose place or
stride is no multiple of 16 bytes; after a write outside of a view all matrices are NaN. Subgroups of real devices may run in lockstep and need no barrier
among themselves; WGSL does not say so, and here it does not hold. A CPU's device runs branches by masks: a barrier in a branch that nobody takes holds
invocations up like any other, and may stand for one that is missing nearby.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass

from tests.helpers import WideProfile
from wgattn.gpu import Device, Kernel
from wgattn.gpu.shader import Source

UNITS = (("f16", "f32", 16, 16, 16),)
_COMMENT = re.compile(r"//[^\n]*")
_DIRECTIVE = re.compile(r"^(enable (?!f16)|requires|diagnostic)[^;]*;\n", re.M)
_ALIAS = re.compile(r"^alias (\w+) = subgroup_matrix_(left|right|result)<(\w+), 16, 16>;", re.M)
_MEMORY = re.compile(r"^var<workgroup>\s+(\w+)\s*:\s*buffer<([^;]+)>;", re.M)
_VIEW = re.compile(r"let (\w+) = bufferView<array<([\w<>]+), ([^;]+)>>\(&(\w+), ([^;]+)\);")
_STORED = re.compile(r"var<storage, read(?:_write)?> (\w+): array<(f16|f32)>;")
_LOAD = re.compile(r"(\blet \w+ = |\w+ = |)subgroupMatrixLoad<(\w+), (row_major|col_major)>\(&?(\w+), ")
_STORE = re.compile(r"subgroupMatrixStore<(row_major|col_major)>\(&?(\w+), ")
_MAIN = re.compile(r"fn main\([^{]*@builtin\(local_invocation_index\) (\w+): u32[^{]*\{\n")
_ASSIGN = re.compile(r"\s*(<<|>>|[-+*/%&|^])?=(?!=)\s*")
_WORDS = {"u32": 1, "f32": 1, "vec2<u32>": 2, "vec4<u32>": 4, "vec4<f32>": 4}


@dataclass(frozen=True)
class _Array:
    """A view of the kernel's memory, or a storage buffer: the expression of a number of elements, and where it begins in bytes."""

    name: str
    kind: str
    length: str
    at: str | None = None

    @property
    def declarations(self) -> str:
        if self.at is None:
            return f"fn {self.name}_get(i: u32) -> f32 {{ return f32({self.name}[i]); }}\n"
        first = f"const {self.name}_FIRST = ({self.at}) / 4u;\nconst {self.name}_COUNT = {self.length};\n"
        if self.kind == "f16":
            halves = f"emulated_memory[{self.name}_FIRST + min(i, {self.name}_COUNT - 1u) / 2u] >> (16u * (i % 2u))"
            return f"{first}fn {self.name}_get(i: u32) -> f32 {{ return select(emulated_nan(), unpack2x16float({halves}).x, i < {self.name}_COUNT); }}\n"
        n = _WORDS[self.kind]
        words = ", ".join(f"emulated_memory[at + {w}u]" for w in range(n))
        vector = "u32" if n == 1 else f"vec{n}<u32>"
        at = f"  let at = {self.name}_FIRST + min(i, {self.name}_COUNT - 1u) * {n}u;\n"
        read = f"select({vector}(emulated_nan_word()), {vector}({words}), i < {self.name}_COUNT)"
        write = f"  let inside = i < {self.name}_COUNT;\n  let words = {f'bitcast<{vector}>(v)' if 'f32' in self.kind else 'v'};\n"
        for w in range(n):
            write += f"  emulated_memory[select(EMULATED_FAULT, at + {w}u, inside)] = select(1u, words{f'[{w}]' if n > 1 else ''}, inside);\n"
        return first + (
            f"fn {self.name}_get(i: u32) -> {self.kind} {{\n{at}  return {f'bitcast<{self.kind}>({read})' if 'f32' in self.kind else read};\n}}\n"
            f"fn {self.name}_set(i: u32, v: {self.kind}) {{\n{at}{write}}}\n"
        )


def emulated(source: Source, subgroup: int, real: int) -> Source:
    """The source with text for a device whose subgroups have `real` lanes; as it is if it does not use matrix units.

    ValueError for what is not emulated: f16 written by lanes, other shapes of matrices, subgroup operations but shuffles among `real` lanes.
    """
    if "matrix" not in source.features:
        return source
    return dataclasses.replace(source, text=_Rewriting(_COMMENT.sub("", source.text), subgroup, real).text)


class _Rewriting:
    def __init__(self, text: str, subgroup: int, real: int):
        if subgroup not in (16, 32, 64):
            raise ValueError(f"subgroups of {subgroup} lanes")
        self._columns = 64 // subgroup
        self._row = "f32" if self._columns == 1 else f"vec{self._columns}<f32>"
        self._functions: dict[str, str] = {}
        self._slots = dict.fromkeys(("left", "right"), 0)  # the first is of those that are used where they are loaded
        text = _DIRECTIVE.sub("", text)
        kinds = {name: kind for name, kind, _ in _ALIAS.findall(text)}
        text = _ALIAS.sub(lambda m: f"alias {m[1]} = Emulated_{m[2]};", text)
        memory = _MEMORY.findall(text)
        if len(memory) > 1:
            raise ValueError("several buffers of workgroup memory alias one another")
        text = _MEMORY.sub("", text)
        arrays = [_Array(name, kind, length, at) for name, kind, length, _, at in _VIEW.findall(text)]
        text = _VIEW.sub("", text)
        for array in arrays:
            text = self._accesses(text, array)
        by_name = {a.name: a for a in (*arrays, *(_Array(name, kind, f"arrayLength(&{name})") for name, kind in _STORED.findall(text)))}
        text = _LOAD.sub(lambda m: m[1] + self._load(m[1], kinds[m[2]], m[3], by_name[m[4]]), text)
        text = _STORE.sub(lambda m: self._store(m[1], by_name[m[2]]), text)
        for name, ours in _REPLACED.items():
            text = text.replace(name, ours)
        if left := re.search(r"\bsubgroup[A-Z_]\w*|\bbufferView\b", text):
            raise ValueError(f"{left[0]} is not emulated")
        text = _MAIN.sub(lambda m: m[0] + _BEGIN.replace("$index", m[1]), text)
        used = (a for a in by_name.values() if re.search(rf"\b{a.name}_[gs]et\(", text + "".join(self._functions.values())))
        head = f"const EMULATED_WORDS = ({memory[0][1] if memory else 0}) / 4u;\n"
        right = [f"right[{c}]" for c in range(self._columns)] if self._columns > 1 else ["right"]
        products = "".join(f"    m.v{c} = fma(emulated_left[left.slot + k], vec4<f32>({r}), m.v{c});\n" for c, r in enumerate(right))
        members = ", ".join(f"v{c}: vec4<f32>" for c in range(self._columns))
        common = _COMMON.replace("$columns", f"{self._columns}u").replace("$row", self._row).replace("$members", members)
        common = common.replace("$left", str(16 * self._slots["left"] + 16)).replace("$right", str(16 * self._slots["right"] + 16))
        common = common.replace("$products", products).replace("$real", f"{real}u")
        self.text = text + head + common + "".join(a.declarations for a in used) + "".join(self._functions.values())

    @staticmethod
    def _accesses(text: str, array: _Array) -> str:
        """Elements of a view by its accessors; the last first, so that what is within an index is done before it."""
        for match in reversed(list(re.finditer(rf"\b{array.name}\[", text))):
            depth, end = 1, match.end()
            while depth:
                depth += {"[": 1, "]": -1}.get(text[end], 0)
                end += 1
            if array.kind == "f16":
                raise ValueError(f"{array.name}: f16 that lanes read or write")
            index = text[match.end() : end - 1]
            if assign := _ASSIGN.match(text, end):
                stop = text.index(";", assign.end())
                value = text[assign.end() : stop]
                value = f"{array.name}_get({index}) {assign[1]} ({value})" if assign[1] else value
                text = f"{text[: match.start()]}{array.name}_set({index}, {value}){text[stop:]}"
            else:
                text = f"{text[: match.start()]}{array.name}_get({index}){text[end:]}"
        return text

    def _load(self, place: str, kind: str, layout: str, array: _Array) -> str:
        """A call of the function that loads such a matrix, up to its first argument."""
        if (kind == "result") != (array.kind == "f32"):
            raise ValueError(f"a {kind} matrix of {array.kind}")
        unit = {"f16": 8, "f32": 4}[array.kind]
        name = f"emulated_load_{kind}_{layout}_{array.name}"
        if kind == "left":
            elements = [_place(layout, f"emulated_row() + {r}u", "k") for r in range(4)]
        elif kind == "right":
            elements = [_place(layout, "k", f"emulated_column() + {c}u") for c in range(self._columns)]
        if kind == "result":
            gets = (f"{array.name}_get({_place(layout, 'emulated_row() + r', f'emulated_column() + {c}u')})" for c in range(self._columns))
            body = " ".join(f"m.v{c}[r] = select({e}, emulated_nan(), broken);" for c, e in enumerate(gets))
            loop = f"  var m: Emulated_result;\n  for (var r = 0u; r < emulated_count(); r++) {{ {body} }}\n  return m;\n"
            self._functions[name] = f"fn {name}(at: u32, stride: u32) -> Emulated_result {{\n  let broken = emulated_broken(at, stride, {unit}u);\n{loop}}}\n"
            return f"{name}("
        row = "vec4<f32>" if kind == "left" else self._row
        value = f"select({row}({', '.join(f'{array.name}_get({e})' for e in elements)}), {row}(emulated_nan()), broken)"
        loop = f"  for (var k = 0u; k < 4u * emulated_count(); k++) {{ emulated_{kind}[slot + k] = {value}; }}\n"
        begin = f"  let broken = emulated_broken(at, stride, {unit}u);\n"
        self._functions[name] = f"fn {name}(slot: u32, at: u32, stride: u32) -> Emulated_{kind} {{\n{begin}{loop}  return Emulated_{kind}(slot);\n}}\n"
        if place and not place.startswith("let "):
            raise ValueError(f"{place}a factor: it would outlive its place")
        self._slots[kind] += bool(place)
        return f"{name}({16 * self._slots[kind] if place else 0}u, "

    def _store(self, layout: str, array: _Array) -> str:
        """A call of the function that stores a result, up to its first argument."""
        if array.kind != "f32":
            raise ValueError(f"results stored as {array.kind}")
        body = ""
        for c in range(self._columns):
            at, value = _place(layout, "emulated_row() + r", f"emulated_column() + {c}u"), f"select(m.v{c}[r], emulated_nan(), broken)"
            body += f"    {array.name}_set({at}, {value});\n" if array.at is not None else f"    {array.name}[{at}] = {value};\n"
        name = f"emulated_store_{layout}_{array.name}"
        begin = "  let broken = emulated_broken(at, stride, 4u);\n  var m = sums;\n"
        loop = f"  for (var r = 0u; r < emulated_count(); r++) {{\n{body}  }}\n"
        self._functions[name] = f"fn {name}(at: u32, sums: Emulated_result, stride: u32) {{\n{begin}{loop}}}\n"
        return f"{name}("


def _place(layout: str, row: str, column: str) -> str:
    """Where an element of a matrix is."""
    return f"at + ({row}) * stride + {column}" if layout == "row_major" else f"at + ({column}) * stride + {row}"


_REPLACED = {
    "subgroupMatrixMultiplyAccumulate(": "emulated_multiply_accumulate(",
    "subgroupShuffleXor(": "emulated_shuffle_xor(",
    "bitcast<vec4<f16>>(": "emulated_halves(",  # naga has neither
    "bitcast<vec2<u32>>(": "emulated_words(",
}
_BEGIN = """  emulated_lane = $index % SUBGROUP;
  for (var n = $index; n < EMULATED_WORDS; n += WORKGROUP) { emulated_memory[n] = emulated_nan_word(); }
  if ($index == 0u) { emulated_memory[EMULATED_FAULT] = 0u; emulated_memory[EMULATED_COUNT] = 4u; }
  workgroupBarrier();
"""
_COMMON = """
const EMULATED_FAULT = EMULATED_WORDS;
const EMULATED_COUNT = EMULATED_WORDS + 1u;
var<workgroup> emulated_memory: array<u32, EMULATED_WORDS + 2u>;
struct Emulated_left { slot: u32 }                // factors have a place for each `let` in the text, and are used before that comes again
struct Emulated_right { slot: u32 }
var<private> emulated_left: array<vec4<f32>, $left>;
var<private> emulated_right: array<$row, $right>;
struct Emulated_result { $members }
var<private> emulated_lane: u32;
fn emulated_count() -> u32 { return emulated_memory[EMULATED_COUNT]; }   // 4, which no compiler knows: it would unroll all loops
fn emulated_nan_word() -> u32 { return 0x7fc17e01u + min(emulated_lane, 0u); }   // two NaN of f16, too
fn emulated_nan() -> f32 { return bitcast<f32>(emulated_nan_word()); }
fn emulated_row() -> u32 { return emulated_lane % 4u * 4u; }
fn emulated_column() -> u32 { return emulated_lane / 4u * $columns; }
fn emulated_broken(at: u32, stride: u32, unit: u32) -> bool { return ((at | stride) % unit != 0u) | (emulated_memory[EMULATED_FAULT] != 0u); }
fn emulated_shuffle_xor(v: f32, distance: u32) -> f32 {
  let w = subgroupShuffleXor(v, distance);
  return select(w, emulated_nan(), distance >= $real);
}
fn emulated_halves(w: vec2<u32>) -> vec4<f16> { return vec4<f16>(vec4<f32>(unpack2x16float(w.x), unpack2x16float(w.y))); }
fn emulated_words(h: vec4<f16>) -> vec2<u32> {
  let v = vec4<f32>(h);
  return vec2<u32>(pack2x16float(v.xy), pack2x16float(v.zw));
}
fn emulated_multiply_accumulate(left: Emulated_left, r: Emulated_right, sums: Emulated_result) -> Emulated_result {
  var m = sums;
  for (var k = 0u; k < 4u * emulated_count(); k++) {
    let right = emulated_right[r.slot + k];
$products  }
  return m;
}
"""


class EmulatedUnits(Device):
    """The device, through wgpu, as one with subgroups of `subgroup` lanes and matrix units, whose kernels are rewritten where they use these.

    change: what to do to the rewritten text, to see whether a fault in it is seen.
    """

    def __init__(self, subgroup: int = 32, change: Callable[[str], str] = lambda text: text, **changes: object):
        super().__init__(backend="wgpu")
        self._real, self._change = self.profile.subgroup_size, change
        about = {"kind": "DiscreteGPU", "subgroup_size": subgroup, "matrix_units": UNITS, **changes}
        self.profile = WideProfile(**(dataclasses.asdict(self.profile) | about))

    def _made_kernel(self, key: tuple, source: Callable[[], Source]) -> Kernel:
        made = source()
        if "matrix" in made.features:
            made = emulated(dataclasses.replace(made, text=self._change(made.text)), self.profile.subgroup_size, self._real)
        return Kernel(self, made)
