"""Matrix units in software (tests/emulated_units.py): products in each layout, what it must not forgive, and faults put into the real kernels that it sees."""

import dataclasses
import re

import numpy as np
import pytest

from tests import test_conformance
from tests.attention.test_paths import Case, Inputs, check, check_growing
from tests.block.test_matrix_units import TILES, check_projection
from tests.emulated_units import EmulatedUnits, emulated
from tests.helpers import poison
from tests.test_conformance import few
from wgattn.attention.flash_matrix import FlashMatrixShape
from wgattn.attention.kv_format import KV_FORMATS
from wgattn.block.linear import MatrixShape
from wgattn.cases import attention, block
from wgattn.cases.family import Family
from wgattn.gpu import Device, Kernel, Recording
from wgattn.gpu.shader import assemble

PRODUCT = """// sums = left . right + sums through workgroup memory. One workgroup of two subgroups, which do the same.
// Workgroup memory: MEMORY.   Options: WORKGROUP, SUBGROUP, MEMORY, LEFT_STRIDE, RIGHT_STRIDE, SUM_STRIDE.
var<storage, read> left: array<vec4<u32>>;          // (16, LEFT_STRIDE) f16
var<storage, read> right: array<f16>;               // (16, RIGHT_STRIDE) f16
var<storage, read_write> sums: array<f32>;          // (2, 16, SUM_STRIDE) f32
alias L = subgroup_matrix_left<f16, 16, 16>;
alias R = subgroup_matrix_right<f16, 16, 16>;
alias S = subgroup_matrix_result<f32, 16, 16>;
const AT = 16u;
var<workgroup> memory: buffer<MEMORY>;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(local_invocation_index) index: u32) {
  let vectors = bufferView<array<vec4<u32>, 16u * LEFT_STRIDE / 8u>>(&memory, AT);
  let halves = bufferView<array<f16, 16u * LEFT_STRIDE>>(&memory, AT);
  let kept = bufferView<array<f32, 32u * SUM_STRIDE>>(&memory, AT + 32u * LEFT_STRIDE);
  let kept_twice = bufferView<array<vec4<f32>, 8u * SUM_STRIDE>>(&memory, AT + 32u * LEFT_STRIDE);
  for (var n = index; n < 2u * LEFT_STRIDE; n += WORKGROUP) { vectors[n] = left[n]; }
  for (var n = index; n < 32u * SUM_STRIDE; n += WORKGROUP) { kept[n] = sums[n]; }
  workgroupBarrier();
  let at = index / SUBGROUP * 16u * SUM_STRIDE;
  var m = subgroupMatrixLoad<S, S_LAYOUT>(kept, at, SUM_STRIDE);
  let l = subgroupMatrixLoad<L, L_LAYOUT>(halves, 0, LEFT_STRIDE);
  m = subgroupMatrixMultiplyAccumulate(l, subgroupMatrixLoad<R, R_LAYOUT>(&right, 0, RIGHT_STRIDE), m);
  workgroupBarrier();
  subgroupMatrixStore<S_LAYOUT>(kept, at, m, SUM_STRIDE);
  workgroupBarrier();
  for (var n = index; n < 8u * SUM_STRIDE; n += WORKGROUP) { kept_twice[n] *= 2.0; }
  workgroupBarrier();
  for (var n = index; n < 32u * SUM_STRIDE; n += WORKGROUP) { sums[n] = kept[n]; }
}
"""
LAYOUTS = ("row_major", "col_major")


def product(device: Device, write_shader, arrays: dict[str, np.ndarray], layouts: tuple[str, str, str], change=lambda text: text) -> np.ndarray:
    """PRODUCT of arrays as they are stored; what is computed lies in NaN."""
    text = change(PRODUCT)
    for letter, layout in zip("LRS", layouts, strict=True):
        text = text.replace(f"{letter}_LAYOUT", layout)
    strides = {f"{name}_STRIDE": arrays[key].shape[-1] for name, key in (("LEFT", "left"), ("RIGHT", "right"), ("SUM", "sums"))}
    subgroup = device.profile.subgroup_size
    memory = 16 + 32 * strides["LEFT_STRIDE"] + 128 * strides["SUM_STRIDE"]
    options = {"WORKGROUP": 2 * subgroup, "SUBGROUP": subgroup, "MEMORY": memory, **strides}
    source = assemble(write_shader("product", text), options=options, directives=device.backend.directives)
    buffers = {name: device.tensor(np.ascontiguousarray(a)) for name, a in arrays.items()}
    recording = Recording(device)
    recording.add(Kernel(device, emulated(source, subgroup, 8)), (1,), buffers)
    recording.replay()
    return buffers["sums"].numpy()


def stored(matrix: np.ndarray, layout: str, stride: int) -> np.ndarray:
    """A matrix in rows of `stride`, NaN in between."""
    lines = matrix if layout == "row_major" else matrix.T
    found = poison((16, stride), matrix.dtype)
    found[:, :16] = lines
    return found


@pytest.fixture(scope="module", params=[16, 32, 64])
def lanes(request: pytest.FixtureRequest, emulated_units: Device) -> Device:
    return emulated_units if request.param == 32 else EmulatedUnits(request.param)


def factors(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    left, right = rng.standard_normal((2, 16, 16)).astype(np.float16)
    return left, right, rng.standard_normal((2, 16, 16)).astype(np.float32)


@pytest.mark.parametrize("left_layout", LAYOUTS)
@pytest.mark.parametrize("right_layout", LAYOUTS)
@pytest.mark.parametrize("sums_layout", LAYOUTS)
def test_products_in_each_layout(lanes: Device, write_shader, rng, left_layout, right_layout, sums_layout):
    left, right, sums = factors(rng)
    for strides in ((16, 16, 16), (24, 40, 20)):
        arrays = {"left": stored(left, left_layout, strides[0]), "right": stored(right, right_layout, strides[1])}
        arrays["sums"] = np.stack([stored(s, sums_layout, strides[2]) for s in sums])
        got = product(lanes, write_shader, arrays, (left_layout, right_layout, sums_layout))[:, :, :16]
        got = got if sums_layout == "row_major" else got.swapaxes(1, 2)
        np.testing.assert_allclose(got, 2 * (left.astype(np.float64) @ right.astype(np.float64) + sums), rtol=0, atol=1e-4)


FAULTS = {
    "no barrier before the product": ("  workgroupBarrier();\n  let at", "  let at"),
    "no barrier behind the product": ("  workgroupBarrier();\n  for (var n = index; n < 8u", "  for (var n = index; n < 8u"),
    "a place that is no multiple of 16 bytes": ("(halves, 0,", "(halves, 1,"),
    "a stride that is no multiple of 16 bytes": ("0, LEFT_STRIDE)", "0, LEFT_STRIDE + 4u)"),
    "another place": ("(halves, 0,", "(halves, 8,"),
    "another stride": ("0, RIGHT_STRIDE)", "0, 32u)"),
    "a matrix that reaches out of the view": ("(kept, at, m", "(kept, at + 4u * SUM_STRIDE, m"),
    "an element behind the view": ("n < 8u * SUM_STRIDE;", "n < 8u * SUM_STRIDE + 64u;"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_nothing_is_forgiven(emulated_units: Device, write_shader, rng, fault):
    """The last of them writes behind a view before a matrix is stored once more."""
    left, right, sums = factors(rng)
    arrays = {"left": stored(left, "row_major", 24), "right": stored(right, "col_major", 16), "sums": sums}
    before, after = FAULTS[fault]

    def change(text: str) -> str:
        assert text.count(before) == 1
        changed = text.replace(before, after)
        again = "  subgroupMatrixStore<S_LAYOUT>(kept, at, m, SUM_STRIDE);\n  workgroupBarrier();\n  for (var n = index; n < 32u"
        return changed if "behind the view" not in fault else re.sub(r"  for \(var n = index; n < 32u(?=[^\n]*sums\[n\] =)", lambda _: again, changed)

    got = product(emulated_units, write_shader, arrays, ("row_major", "col_major", "row_major"), change)
    want = 2 * (left.astype(np.float64) @ right.astype(np.float64) + sums)
    assert not (np.abs(got - want) < 1e-2).all()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("let p = bufferView<array<f16, 8>>(&memory, 0);\n  p[index] = 1h;", "f16 that lanes"),
        ("let s = subgroupAdd(index);", "subgroupAdd"),
        ("var r = subgroupMatrixLoad<R, row_major>(&right, 0, 16);", "a factor"),
    ],
)
def test_what_is_not_emulated_is_told(write_shader, line, why):
    text = PRODUCT.replace("_LAYOUT", "").replace("<S, S>", "<S, row_major>")
    text = re.sub(r"<([LRS]), [LRS]>", r"<\1, row_major>", text).replace("Store<S>", "Store<row_major>")
    text = text.replace("{\n  let vectors", "{\n  " + line + "\n  let vectors")
    options = {"WORKGROUP": 32, "SUBGROUP": 32, "MEMORY": 4096, "LEFT_STRIDE": 16, "RIGHT_STRIDE": 16, "SUM_STRIDE": 16}
    with pytest.raises(ValueError, match=why):
        emulated(assemble(write_shader("product", text), options=options), 32, 8)


# ---- faults in the real kernels


def without_barrier(number: int):
    """Removes the barrier of that number from a text, the first being 0."""

    def change(text: str) -> str:
        at = [m.start() for m in re.finditer(r"workgroupBarrier\(\);", text)][number]
        return text[:at] + text[at:].replace("workgroupBarrier();", "", 1)

    return change


def replacing(before: str, after: str):
    def change(text: str) -> str:
        assert before in text, before
        return text.replace(before, after)

    return change


FLASH_FAULTS = {
    "barrier after the queries": without_barrier(0),
    "barrier after keys and values": without_barrier(2),
    "barrier after scores": without_barrier(3),
    "place of the values": replacing("const S_AT = V_AT + 16u", "const S_AT = V_AT - 64u + 16u"),
    "stride of the scores": replacing("scores, S_STRIDE * 4u)", "scores, S_STRIDE * 4u + 4u)"),
    "place of the probabilities": replacing("S_STRIDE * 2u + part", "S_STRIDE * 2u + 1u + part"),
}


@pytest.mark.parametrize("fault", FLASH_FAULTS)
def test_faults_in_attention_are_seen(rng, fault):
    case = Case(70, 90, 16)
    with pytest.raises(AssertionError, match=r"wrong|not finite|NMSE"):
        check(EmulatedUnits(change=FLASH_FAULTS[fault]), "flash_matrix", case, Inputs.of(case, rng))


AHEAD_FAULTS = {
    "barrier after the products": without_barrier(6),
    "place of the probabilities": replacing("const P_AT = S_AT + 16u", "const P_AT = S_AT - 256u + 16u"),
}


@pytest.mark.parametrize("fault", AHEAD_FAULTS)
def test_faults_in_attention_ahead_are_seen(rng, fault):
    case = Case(70, 90, 16)
    with pytest.raises(AssertionError, match=r"wrong|not finite|NMSE"):
        check(EmulatedUnits(change=AHEAD_FAULTS[fault]), "flash_matrix", case, Inputs.of(case, rng), FlashMatrixShape(4, 16, 32, ahead=True))


@pytest.mark.parametrize("number", [5, 6])
def test_faults_where_outputs_are_rescaled_are_seen(rng, number):
    """Barriers within the branch."""
    with pytest.raises(AssertionError, match=r"wrong|not finite"):
        check_growing(EmulatedUnits(change=without_barrier(number)), rng)


LINEAR_FAULTS = {
    "barrier after the tiles": replacing("if (0u == 0u && FETCH > 0u) { workgroupBarrier(); }", ""),
    "barrier after the products": replacing("if (BUFFERS == 1u) { workgroupBarrier(); }", ""),
    "place of the rows": replacing("(team_row + 0u * 16u) * TILE_STRIDE", "(team_row + 0u * 16u) * TILE_STRIDE + 8u"),
    "stride of the tokens": replacing("0u * 16u, TILE_STRIDE);", "0u * 16u, TILE_STRIDE + 8u);"),
}


@pytest.mark.parametrize("fault", LINEAR_FAULTS)
def test_faults_in_projections_are_seen(rng, fault):
    with pytest.raises(AssertionError):
        check_projection(EmulatedUnits(change=LINEAR_FAULTS[fault]), rng, "F16", 70, 160, 70, 70, "store", MatrixShape(*TILES[2], 32))


# ---- the cases of the self-test that only such devices run

def only(family: Family, **axes: tuple) -> list:
    """Few cases of a family with other values of some axes."""
    smaller = dataclasses.replace(family, axes={**family.axes, **axes})
    return [pytest.param(family, choice, id=f"{family.name}-{i}") for i, choice in enumerate(few(smaller))]


OURS = [
    *only(attention.CACHED, path=("flash_matrix",), head_dim=(32, 21), mask=("none", "u8")),
    *only(attention.FUNCTION, path=("flash_matrix",), dims=((16, 16), (21, 6)), sizes=((33, 70),), mask=("none", "f16"), sight=("all", "causal window")),
    *only(block.MATRIX_UNITS, tokens=(20,), weights=("F32", "Q4_0")),
]


@pytest.mark.parametrize(("family", "choice"), OURS)
def test_cases_of_the_self_test(emulated_units: Device, rng, family, choice):
    test_conformance.check(emulated_units, rng, family, choice)
    assert any("matrix" in kernel.source.features for kernel in emulated_units._kernels.values())


def test_all_caches_are_among_the_cases():
    assert {choice.values[1].get("kv_dtype") for choice in OURS} >= set(KV_FORMATS)
