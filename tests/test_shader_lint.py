"""Every shader: its header, its buffers' shapes, its workgroup memory; and every variant through the compilers, naga and Tint."""

import dataclasses
import re
from collections import Counter

import pytest

from tools import readme, shaders
from wgattn.errors import Unsupported
from wgattn.gpu.paper import PROFILES
from wgattn.gpu.shader import SHADERS


@pytest.fixture(scope="module")
def sources():
    """The variants of the default run, by text."""
    return shaders.most_sources()


@pytest.fixture(scope="module")
def compilers():
    made = {}

    def get(name):
        if name not in made:
            try:
                made[name] = getattr(shaders, name)()
            except Unsupported as error:
                pytest.skip(f"{name} compiled nothing: {error}")
        return made[name]

    return get


def check_compile(compiler, found, capsys, pipelines=()):
    """Compile all modules, and pipelines of some; say how many there were, and what the compiler has no features for."""
    missing = Counter(compiler.missing(s) for s in found)
    ready = [s for s in found if compiler.missing(s) is None]
    wanted = {id(s) for s in pipelines}
    wrong = [f"{s.name} ({', '.join(s.parts)}; {s.options}):\n{e}" for s in ready if (e := compiler.compile(s, id(s) in wanted))]
    told = "".join(f", {n} not compiled: {feature} is missing there" for feature, n in missing.items() if feature)
    with capsys.disabled():
        print(f"\n{compiler.name}: {len(ready)} variants{told}")
    assert not wrong, f"{len(wrong)} of {len(ready)} variants do not compile; the first:\n" + "\n".join(wrong[:3])
    return missing


# ---- the files


@pytest.mark.parametrize("path", sorted(p.relative_to(SHADERS).with_suffix("").as_posix() for p in SHADERS.rglob("*.wgsl")))
def test_header_and_buffers(path):
    faults = list(shaders.file_faults(shaders.file(path)))
    assert not faults, f"shaders/{path}.wgsl " + "; ".join(faults)


def test_every_file_is_in_a_variant(sources):
    used = {f.path for s in sources.values() for f in shaders.parts_of(s)}
    assert {f.path for f in shaders.files()} - used == set(), "no case in wgattn/cases uses these files"


def test_headers_agree_with_the_variants(sources):
    """Options, parts, and the bytes of workgroup memory."""
    faults = {(s.name, fault) for s in sources.values() for fault in shaders.source_faults(s)}
    assert not faults, "\n".join(f"shaders/{name}.wgsl {fault}" for name, fault in sorted(faults)[:20])


def test_headers_list_no_option_that_nothing_has(sources):
    given = {name for s in sources.values() for name in s.options}
    given |= {name.removeprefix(f"{f.name}_") for s in sources.values() for f in shaders.parts_of(s) if f.name for name in s.options}
    derived = {name for f in shaders.files() for name in re.findall(r"const (\w+)", f.text)}
    listed = {(f.path, option) for f in shaders.files() for option in f.options if option not in given | derived}
    assert not listed


def test_the_table_of_kernels_is_up_to_date(sources):
    path, _ = readme.BLOCKS["kernels"]
    text = path.read_text(encoding="utf-8")
    assert readme.updated("kernels", text, readme.kernels(sources.values())) == text, "run tools/readme.py kernels"


# ---- the compilers


def test_naga_compiles_every_file_and_option(sources, compilers, capsys):
    found = list(sources.values())
    missing = check_compile(compilers("naga"), found, capsys, pipelines=shaders.covering(found))
    assert missing[None] > len(found) / 2


def test_tint_compiles_every_file_and_option(sources, compilers, capsys):
    found = list(sources.values())
    missing = check_compile(compilers("tint"), found, capsys, pipelines=shaders.covering(found))
    assert missing == {None: len(found)}  # the Null backend has all features


@pytest.mark.slow
@pytest.mark.parametrize("profile", PROFILES)
def test_both_compile_every_variant(profile, compilers, capsys):
    """All combinations of all options, on one kind of device."""
    found = list(shaders.sources([profile], strength=0).values())
    for name in ("naga", "tint"):
        check_compile(compilers(name), found, capsys)


# ---- the lint itself


def test_covering_leaves_nothing_out(sources):
    chosen = shaders.covering(sources.values())
    assert len(chosen) < len(sources) / 2

    def seen(found):
        return {(s.name, p) for s in found for p in s.parts} | {(s.name, *o) for s in found for o in s.options.items()}

    assert seen(chosen) == seen(sources.values())


GOOD = shaders.File(
    "block/good",
    """// y = 2 x.        numpy
// One workgroup takes WORKGROUP values.   Workgroup memory: 4 * WORKGROUP + 16.   Options: WORKGROUP; parts: step, rows_* as x.

var<storage, read> x: array<f32>;                // (count) f32
var<workgroup> kept: array<f32, WORKGROUP>;
@compute @workgroup_size(WORKGROUP)
fn main() {}
""",
)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("// y = 2 x.        numpy\n// One", "", "no header"),
        ("Workgroup memory: 4 * WORKGROUP + 16.", "", "workgroup memory in bytes"),
        ("Options: WORKGROUP; parts: step, rows_* as x.", "", "list its options"),
        ("One workgroup takes", "This takes", "what one workgroup"),
        ("// (count) f32", "// numbers", "without its shape"),
        ("// (count) f32", "", "without its shape"),
        ("var<storage", "@group(0) @binding(0) var<storage", "binding number"),
        ("var<workgroup> kept", "@must var<workgroup> kept", "not counted"),
    ],
)
def test_a_bad_file_is_told(old, new, told):
    assert list(shaders.file_faults(GOOD)) == []
    assert old in GOOD.text
    faults = list(shaders.file_faults(dataclasses.replace(GOOD, text=GOOD.text.replace(old, new))))
    assert any(told in fault for fault in faults), faults


def test_what_a_header_says():
    assert GOOD.summary == "y = 2 x"
    assert (GOOD.memory, GOOD.options) == ("4 * WORKGROUP + 16", {"WORKGROUP"})
    assert {"step", "rows_*"} <= set(GOOD.parts)
    said = "// a.   Workgroup memory: {}.   Options: none.\n@compute"
    known = {"none": "0", "that of the team part": "0", "4 * A, and that of the team part": "4 * A", "max(A, 4 * B): tiles. More": "max(A, 4 * B)"}
    for text, memory in known.items():
        assert shaders.File("x", said.format(text)).memory == memory


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"workgroup_bytes": 1}, "bytes of workgroup memory"),
        ({"constants": {}}, "cannot be evaluated"),
        ({"options": {"LANES": 1, "NEW": 2}}, "no header lists: NEW"),
        ({"parts": ("attention/parts/finish",)}, "part finish"),
    ],
)
def test_a_header_that_disagrees_with_a_variant_is_told(sources, change, told):
    source = next(s for s in sources.values() if s.name == "block/norm" and s.workgroup_bytes)
    assert list(shaders.source_faults(source)) == []
    faults = list(shaders.source_faults(dataclasses.replace(source, **change)))
    assert any(told in fault for fault in faults), faults


@pytest.mark.parametrize("name", ["naga", "tint"])
def test_a_text_that_does_not_compile_is_told(sources, compilers, name):
    compiler = compilers(name)
    source = next(s for s in sources.values() if s.name == "block/norm" and s.workgroup_bytes and s.workgroup_size <= 256)
    assert compiler.compile(source) is None
    assert compiler.compile(dataclasses.replace(source, text=source.text.replace("group.x", "grup.x")))
    assert compiler.compile(dataclasses.replace(source, overrides={"NO_SUCH": 1.0}))  # only a pipeline shows this
    assert compiler.compile(dataclasses.replace(source, overrides={"NO_SUCH": 1.0}), pipeline=False) is None
