"""Shaders as text: joining, numbering, options, unrolling, sizes. No device computes anything here."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wgattn.errors import ArgumentError
from wgattn.gpu import Device, Named, Part
from wgattn.gpu.shader import SHADERS, Source, assemble, evaluate

MAIN = """// A kernel.
struct Params { columns: u32, shift: i32, eps: f32 }
var<uniform> params: Params;
var<storage, read> x: array<f32>;     // (columns) f32
override WORKGROUP: u32 = 64;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(local_invocation_index) index: u32) { y[index] = x[index] * params.eps; }
"""
PART = """// A part.
var<storage, read_write> y: array<f32>;
"""
DIRECTIVES = {"f16": "enable f16;", "subgroup": "enable subgroups;"}


def body(text: str, header: str = "") -> str:
    """A main file that is complete around some text."""
    return f"// A kernel.\n{header}\n@compute @workgroup_size(1)\nfn main() {{\n{text}\n}}\n"


def ready(write: Callable[[str, str], str], text: str, **options: object) -> Source:
    """The source of a main file with this text."""
    return assemble(write("case", text), options=options)


# ---- joining and numbering


def test_buffers_are_numbered_in_the_order_of_main_file_then_parts(write_shader):
    write_shader("wing/kernel", MAIN)
    write_shader("parts/out", PART)
    source = assemble("wing/kernel", ("out",))
    assert source.name == "wing/kernel"
    assert source.buffers == (("params", "uniform"), ("x", "read-only-storage"), ("y", "storage"))
    for number, declaration in enumerate(("var<uniform> params", "var<storage, read> x", "var<storage, read_write> y")):
        assert f"@group(0) @binding({number}) {declaration}" in source.text
    assert source.text.count("@binding(") == 3
    assert "fn main(" in source.text
    assert "// A part." in source.text


def test_a_part_is_found_in_parts_or_by_its_path(write_shader):
    write_shader("kernel", body(""))
    write_shader("parts/common", "const COMMON = 1u;\n")
    write_shader("wing/parts/own", "const OWN = 2u;\n")
    text = assemble("kernel", ("common", "wing/parts/own")).text
    assert text.index("const COMMON") < text.index("const OWN")


def test_a_variable_within_a_function_or_a_comment_is_no_buffer(write_shader):
    source = ready(write_shader, body("  var<function> a = 1u;\n  // var<storage, read> b: array<f32>;", "// var<storage, read> c: array<f32>;"))
    assert source.buffers == ()


@pytest.mark.parametrize("missing", ["nowhere/nothing", "../pyproject", ""])
def test_an_unknown_shader_is_named(missing):
    with pytest.raises(ArgumentError, match=re.escape(repr(missing))):
        assemble(missing)


def test_an_unknown_part_is_named(write_shader):
    write_shader("kernel", body(""))
    with pytest.raises(ArgumentError, match="parts/nothing"):
        assemble("kernel", ("nothing",))


def test_a_part_with_holes_serves_several_buffers(write_shader):
    write_shader("kernel", body("  let a = query_load(0u) + keys_load(1u);"))
    write_shader("parts/rows", "// Rows of $width.\nvar<storage, read> $name: array<f32>;\nfn $name_load(i: u32) -> f32 { return $name[i * $width]; }\n")
    parts = [Part.of("parts/rows", name=name, width="WIDTH") for name in ("query", "keys")]
    assert parts[0] == Part.of("parts/rows", width="WIDTH", name="query") != parts[1]
    source = assemble("kernel", tuple(parts), {"WIDTH": 4})
    assert source.buffers == (("query", "read-only-storage"), ("keys", "read-only-storage"))
    assert "@binding(1) var<storage, read> keys: array<f32>;" in source.text
    assert "fn query_load(i: u32) -> f32 { return query[i * WIDTH]; }" in source.text
    assert "$" not in source.text


def test_named_parts_are_a_second_set(write_shader):
    """What they declare, their options and their parameters have names of their own; what is the kernel's, and members, stay."""
    write_shader("kernel", body("  let a = load(0u) + slice_load(1u);", "struct Params { columns: u32 }\nvar<uniform> params: Params;"))
    write_shader(
        "parts/codes",
        """alias Codes = u32;
struct Unit { size: u32 }
const SIZE = DIM * 2u;
var<storage, read> plane: array<u32>;
var<workgroup> kept: array<u32, DIM>;
//@ unroll n in 0..COUNT
var<private> code$n: Codes;
//@ end
fn load(i: u32) -> Codes {
  var sum = plane[i * params.columns + WORKGROUP + Unit(SIZE).size];
  //@ unroll n in 0..COUNT
  sum += other(code$n);
  //@ end
  return sum;
}
""",
    )
    write_shader("parts/other", "fn other(x: u32) -> u32 { return x; }\n")
    options = {"DIM": 4, "COUNT": 1, "WORKGROUP": 64, "slice_DIM": 8, "slice_COUNT": 3, "slice_columns": 16}
    source = assemble("kernel", ("codes", "other", Named("slice", ("codes", Part.of("parts/other")))), options)
    assert [name for name, _ in source.buffers] == ["params", "plane", "slice_plane"]
    assert source.workgroup_bytes == 4 * 4 + 4 * 8
    assert source.parts == ("parts/codes", "parts/other", "parts/codes as slice", "parts/other as slice")
    own, second = source.text.split("alias slice_Codes = u32;")
    for text in ("fn load(i: u32) -> Codes {", "plane[i * params.columns + WORKGROUP + Unit(SIZE).size]", "sum += other(code0);", "const SIZE = DIM * 2u;"):
        assert text in own
    wanted = ("fn slice_load(i: u32) -> slice_Codes {", "slice_plane[i * slice_columns + WORKGROUP + slice_Unit(slice_SIZE).size]")
    for text in (*wanted, "sum += slice_other(slice_code2);", "const slice_SIZE = slice_DIM * 2u;"):
        assert text in second
    assert [text.count("var<private>") for text in (own, second)] == [1, 3]


# ---- parameters and options


def test_params_become_a_numpy_layout(write_shader):
    layout = ready(write_shader, MAIN).params
    assert layout == np.dtype([("columns", np.uint32), ("shift", np.int32), ("eps", np.float32)])
    assert layout.itemsize == 12


def test_a_text_without_params_has_no_layout(write_shader):
    assert ready(write_shader, body("")).params is None


@pytest.mark.parametrize(
    ("value", "declaration"),
    [
        (5, "const OPTION = 5u;"),
        (0, "const OPTION = 0u;"),
        (True, "const OPTION = true;"),
        (False, "const OPTION = false;"),
        (0.5, "const OPTION: f32 = 0.5;"),
        (1e-05, "const OPTION: f32 = 1e-05;"),
        ("f16", "alias OPTION = f16;"),
        ("array<f32, 4>", "alias OPTION = array<f32, 4>;"),
    ],
)
def test_an_option_becomes_a_constant_or_an_alias(write_shader, value, declaration):
    source = ready(write_shader, body(""), OPTION=value)
    assert source.text.startswith(declaration + "\n")
    assert source.overrides == {}


def test_an_option_that_the_text_overrides_goes_to_the_pipeline(write_shader):
    source = ready(write_shader, MAIN, WORKGROUP=32, OTHER=3)
    assert source.overrides == {"WORKGROUP": 32.0}
    assert "const WORKGROUP" not in source.text
    assert "override WORKGROUP: u32 = 64;" in source.text
    assert "const OTHER = 3u;" in source.text
    assert source.workgroup_size == 32
    assert ready(write_shader, MAIN).workgroup_size == 64  # the default


def test_an_override_without_a_default_takes_the_option(write_shader):
    text = "// A kernel.\noverride SIZE: u32;\nvar<workgroup> a: array<f32, SIZE>;\n@compute @workgroup_size(SIZE, 2)\nfn main() {}\n"
    source = ready(write_shader, text, SIZE=8)
    assert (source.workgroup_size, source.workgroup_bytes, source.overrides) == (16, 32, {"SIZE": 8.0})


def test_an_override_in_a_comment_is_none(write_shader):
    source = ready(write_shader, body("", "// override SIZE: u32 = 1;\n/// override SIZE: u32 = 1;"), SIZE=4)
    assert source.overrides == {}
    assert "const SIZE = 4u;" in source.text


# ---- unrolling


def test_a_block_is_repeated_with_its_variable_replaced(write_shader):
    text = ready(write_shader, body("  //@ unroll r in 0..ROWS\n  let a$r = $ru + ROWS;\n  //@ end"), ROWS=3).text
    assert re.findall(r"let .*", text) == ["let a0 = 0u + ROWS;", "let a1 = 1u + ROWS;", "let a2 = 2u + ROWS;"]
    assert "//@" not in text


def test_a_block_may_be_repeated_a_fixed_number_of_times_or_never(write_shader):
    source = ready(write_shader, body("  //@ unroll i in 0..2\n  let a$i = 0;\n  //@ end\n  //@ unroll i in 0..NONE\n  let b$i = 0;\n  //@ end"), NONE=0)
    assert re.findall(r"let (\w+)", source.text) == ["a0", "a1"]


def test_blocks_nest(write_shader):
    lines = ("//@ unroll r in 0..R", "let a$r = 0;", "//@ unroll t in 0..T", "let b$r_$t = 0;", "//@ unroll k in 0..2", "let c$r_$t_$k = 0;", "//@ end")
    lines += ("let d$r_$t = 0;", "//@ end", "let e$r = 0;", "//@ end", "let f = 0;")
    names = re.findall(r"let (\w+)", ready(write_shader, body("\n".join(lines)), R=2, T=2).text)
    expected = []
    for r in range(2):
        expected.append(f"a{r}")
        for t in range(2):
            expected += [f"b{r}_{t}", f"c{r}_{t}_0", f"c{r}_{t}_1", f"d{r}_{t}"]
        expected.append(f"e{r}")
    assert names == [*expected, "f"]


def test_blocks_may_follow_one_another_inside_a_block(write_shader):
    lines = ("//@ unroll g in 0..2", "//@ unroll s in 0..2", "let a$g_$s = 0;", "//@ end", "//@ unroll s in 0..1", "let b$g_$s = 0;", "//@ end", "//@ end")
    names = re.findall(r"let (\w+)", ready(write_shader, body("\n".join(lines))).text)
    assert names == ["a0_0", "a0_1", "b0_0", "a1_0", "a1_1", "b1_0"]


# ---- directives and features


@pytest.mark.parametrize(
    ("text", "features"),
    [
        ("  let a = 1.0;", set()),
        ("  let a = f16(1.0);", {"f16"}),
        ("  let a = subgroupAdd(1.0);", {"subgroup"}),
        ("  let a = f16(subgroupAdd(1.0));", {"f16", "subgroup"}),
        ("  // f16 and subgroupAdd in a comment", set()),
        ("  let my_f16_cache = unpack2x16float(1u);", set()),
        ("  let subgroups = 1;", set()),
    ],
)
def test_directives_are_those_of_the_backend_and_only_where_needed(write_shader, text, features):
    name = write_shader("kernel", body(text))
    for known in ({}, {"f16": "enable f16;"}, DIRECTIVES):
        source = assemble(name, options={"SIZE": 1}, directives=known)
        assert source.features == features
        written = [line for line in source.text.splitlines() if line.startswith("enable")]
        assert sorted(written) == sorted(known[f] for f in features if f in known)
        assert source.text.splitlines()[: len(written)] == written  # WGSL wants them before anything else


def test_a_builtin_value_of_subgroups_needs_them(write_shader):
    text = "// A kernel.\n@compute @workgroup_size(8)\nfn main(@builtin(subgroup_size) size: u32) {}\n"
    assert ready(write_shader, text).features == {"subgroup"}


def test_an_alias_of_f16_needs_f16(write_shader):
    assert ready(write_shader, body("  let a = KV(1.0);"), KV="f16").features == {"f16"}


# ---- workgroup memory


@pytest.mark.parametrize(
    ("declarations", "expected"),
    [
        ("", 0),
        ("var<workgroup> a: f32;", 4),
        ("var<workgroup> a: f16;", 2),
        ("var<workgroup> a: atomic<u32>;", 4),
        ("var<workgroup> a: vec2<f32>;\nvar<workgroup> b: vec3<f32>;\nvar<workgroup> c: vec4<f16>;", 8 + 16 + 8),
        ("var<workgroup> a: array<vec4<f32>, 10>;", 160),
        ("var<workgroup> a: array<f32, 10u>;", 40),
        ("var<workgroup> a: array<array<f32, 3>, 5>;", 60),
        ("var<workgroup> a: array<atomic<i32>, SIZE>;", 4 * 24),
        ("const HALF = SIZE / 2u;\nvar<workgroup> a: array<f32, HALF + 1u>;", 4 * 13),
        ("const B = A * 2u;\nconst A = SIZE - 4u;\nvar<workgroup> a: array<f32, B>;", 4 * 40),  # constants in any order
        ("var<workgroup> a: array<f32, (SIZE + 6u) / 7u>;", 4 * 4),
        ("var<workgroup> a: array<f32, SIZE % 7u>;", 4 * 3),
        ("var<workgroup> a: array<vec2<u32>, max(SIZE, 30u)>;", 8 * 30),
        ("var<workgroup> a: array<array<f32, min(SIZE, 5u)>, max(2u, 3u)>;", 4 * 5 * 3),
        ("var<workgroup> a: array<f32, (SIZE >> 2u)>;", 4 * 6),
        ("var<workgroup> a: array<f32, (1u << 4u)>;", 4 * 16),
        ("override W: u32 = 64;\nvar<workgroup> a: array<f32, W * 4u + 1u>;", 4 * 257),
        ("override W: u32 = 64;\noverride TEAMS = W / 8u;\nvar<workgroup> a: array<f32, TEAMS>;", 32),
        ("// var<workgroup> a: array<f32, 100>;", 0),
    ],
)
def test_workgroup_memory_is_counted(write_shader, declarations, expected):
    assert ready(write_shader, body("", declarations), SIZE=24).workgroup_bytes == expected


def test_workgroup_memory_follows_the_options(write_shader):
    text = body(
        "", "override W: u32 = 64;\nconst TEAMS = W / LANES;\nvar<workgroup> a: array<vec4<f32>, TEAMS * (DIM / 4u)>;\nvar<workgroup> b: array<f32, W>;"
    )
    assert ready(write_shader, text, LANES=8, DIM=80).workgroup_bytes == 16 * 8 * 20 + 4 * 64
    assert ready(write_shader, text, LANES=4, DIM=128, W=256).workgroup_bytes == 16 * 64 * 32 + 4 * 256


def test_each_workgroup_variable_counts_in_sixteens(write_shader):
    """As in Dawn, which compares the sum of these with the device's limit."""
    source = ready(write_shader, body("", "var<workgroup> a: u32;\nvar<workgroup> b: array<vec4<f32>, 2>;\nvar<workgroup> c: array<f16, 9>;"))
    assert (source.workgroup_bytes, source.workgroup_storage) == (4 + 32 + 18, 16 + 32 + 32)


def test_workgroup_memory_of_every_part_counts(write_shader):
    write_shader("kernel", body("", "var<workgroup> a: array<f32, 8>;"))
    write_shader("parts/more", "var<workgroup> b: array<u32, 4>;\n")
    assert assemble("kernel", ("more",)).workgroup_bytes == 48


@pytest.mark.parametrize(("sizes", "expected"), [("64", 64), ("8, 4", 32), ("8, 4, 2", 64), ("SIZE", 24), ("SIZE * 2u, 2", 96)])
def test_workgroup_size_is_the_product(write_shader, sizes, expected):
    text = f"// A kernel.\n@compute @workgroup_size({sizes})\nfn main() {{}}\n"
    assert ready(write_shader, text, SIZE=24).workgroup_size == expected


# ---- evaluate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("7", 7),
        (" 7u ", 7),
        ("A", 12),
        ("A + B * 2u", 22),
        ("(A + B) * 2", 34),
        ("A / B", 2),
        ("A % B - 1u", 1),
        ("1u << B", 32),
        ("A >> 2u", 3),
        ("max(A, B) - min(A, B)", 7),
    ],
)
def test_evaluate(expression, value):
    assert evaluate(expression, {"A": 12, "B": 5.0}) == value


@pytest.mark.parametrize("expression", ["", "A +", "A.x", "f32(A)", "'A'", "1.5", "A if A else A", "__import__('os')", "A ** 2", "[A]", "array<f32, 4>"])
def test_evaluate_takes_integer_arithmetic_only(expression):
    with pytest.raises(ValueError, match="not integer arithmetic"):
        evaluate(expression, {"A": 12})


def test_evaluate_names_the_unknown():
    with pytest.raises(KeyError, match="B"):
        evaluate("A + B", {"A": 1})


naturals = st.integers(0, 1000)
expressions = st.recursive(
    naturals.map(lambda n: (f"{n}u", n)),
    lambda inner: st.tuples(inner, st.sampled_from("+*-"), inner).map(lambda t: (f"({t[0][0]} {t[1]} {t[2][0]})", eval(f"{t[0][1]} {t[1]} ({t[2][1]})"))),
    max_leaves=8,
)


@given(expressions)
def test_evaluate_agrees_with_python(case):
    expression, value = case
    assert evaluate(expression, {}) == value


# ---- the kernels of a device


def test_kernels_are_kept_by_name_parts_and_options(device: Device):
    def kernel(**options: object) -> object:
        return device.kernel("block/embed", "step", "block/parts/weights_f32", **options)

    one = kernel(WORKGROUP=64, EXTRA=1)
    assert kernel(EXTRA=1, WORKGROUP=64) is one
    assert kernel(EXTRA=2, WORKGROUP=64) is not one
    assert device.kernel("block/embed", "step", "block/parts/weights_f16", WORKGROUP=64, EXTRA=1) is not one
    assert Device().kernel("block/embed", "step", "block/parts/weights_f32", WORKGROUP=64, EXTRA=1) is not one


def test_options_that_are_equal_in_python_but_not_in_wgsl_are_different(device: Device):
    kinds = [device.kernel("block/embed", "step", "block/parts/weights_f32", SAME=value).source.text for value in (1, True, 1.0)]
    assert ["const SAME = 1u;" in kinds[0], "const SAME = true;" in kinds[1], "const SAME: f32 = 1.0;" in kinds[2]] == [True] * 3


# ---- the files

FILES = sorted(SHADERS.rglob("*.wgsl"))


def test_there_are_shaders():
    assert len(FILES) > 20


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(SHADERS).as_posix())
def test_a_shader_file_follows_the_rules_of_the_house(path: Path):
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    assert len(lines) < 320
    assert "@binding(" not in text
    assert "@group(" not in text
    assert not any(line.startswith("enable ") for line in lines), "the assembler writes directives"
    assert re.match(r"// .{3}", text) or len(lines) == 1, "the first line says what this is"
    assert text.endswith("\n")
    assert "\t" not in text
    assert text.count("//@ unroll") == text.count("//@ end")
    for line in lines:
        if line.startswith("var<storage") and "$name" not in line:
            assert re.search(r"// .{3}", line), f"a buffer tells what it holds: {line}"
    header = "\n".join(lines[: next((i for i, line in enumerate(lines) if not line.startswith("//")), len(lines))])
    memory = re.search(r"Workgroup memory: (.*)", header)
    if "@compute" in text:
        assert memory
        assert "Options:" in header
    if "var<workgroup>" in text:
        assert memory
        assert not memory[1].startswith("none")
