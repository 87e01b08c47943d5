"""Projections: `block/linear.wgsl` in all its compositions against the reference."""

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from tests.helpers import assert_close, assert_untouched, dirty_workgroup_memory, poison, split_canary, untouched, with_canary
from wgattn import reference
from wgattn.attention.kv_cache import KVCache
from wgattn.block.linear import Matrix, TileShape, VectorShape, choose_linear, pad_vector, padded, record_linear
from wgattn.block.quant import FORMATS, QuantizedTensor, quantize, stack_rows
from wgattn.block.rope import Rope
from wgattn.errors import CapacityError
from wgattn.gpu import Device, Recording, StepState

KINDS = ["F32", "F16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"]
MAIN_VARIANTS = ["software", "gpu_shape"]
OTHER_VARIANTS = ["gpu_shape_no_subgroup", "gpu_shape_32_lanes", "checked", "small_binding"]
VARIANTS = MAIN_VARIANTS + OTHER_VARIANTS
EPS = 1e-5


@dataclass(frozen=True)
class Case:
    """One projection. `count` of `tokens` recorded tokens are computed."""

    kind: str
    rows: int
    columns: int
    tokens: int
    count: int
    norm: bool = False
    bias: bool = False
    output: str = "store"
    token: str = "each"


def random_matrix(rng: np.random.Generator, rows: int, columns: int, kind: str) -> QuantizedTensor:
    if not kind.endswith("_K"):
        return quantize(rng.standard_normal((rows, columns)).astype(np.float32), kind)
    form = FORMATS[kind]  # there is no code to quantise these: random bytes, with scales that give numbers of the size of 1
    blocks = rng.integers(0, 256, (rows * columns // form.block, form.block_bytes), np.uint8)
    for at in [208] if kind == "Q6_K" else [0, 2]:
        blocks[:, at : at + 2] = rng.uniform(1e-4, 2e-3, len(blocks)).astype(np.float16)[:, None].view(np.uint8)
    return QuantizedTensor(blocks, (rows, columns), kind)


def inputs(rng: np.random.Generator, case: Case) -> dict[str, np.ndarray | None]:
    """x (tokens, padded columns) with NaN in the tokens beyond the count; gamma and bias where the case has them."""
    x = poison((case.tokens, padded(case.columns)))
    x[: case.count] = 0
    x[: case.count, : case.columns] = rng.standard_normal((case.count, case.columns)) * rng.uniform(0.1, 10, (case.count, 1))
    gamma = rng.uniform(0.5, 2, case.columns).astype(np.float32) if case.norm else None
    bias = rng.standard_normal(case.rows).astype(np.float32) if case.bias else None
    return {"x": x, "gamma": gamma, "bias": bias}


def results(case: Case, given: dict[str, Any], weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """W . norm(x) + bias in float64 for the tokens that are computed, and the error that f32 sums may have: a few roundings of their largest terms."""
    x = given["x"][: case.count, : case.columns]
    if case.norm:
        x = reference.rms_norm(x, given["gamma"], EPS)
    result = reference.linear(x, weights, given["bias"])
    terms = np.abs(x).sum(1, keepdims=True) * np.abs(weights).max() + (0 if given["bias"] is None else np.abs(given["bias"]))
    return result, np.broadcast_to(4 * 2**-24 * terms, result.shape)


def nmse_limit(values: np.ndarray) -> float | None:
    """None for a few values: their sum of squares can be small by chance."""
    return 1e-11 if values.size >= 100 else None


def record(device: Device, matrix: Matrix, case: Case, given: dict[str, Any], state: StepState, outputs: dict[str, Any], **more: Any) -> Recording:
    recording = Recording(device)
    record_linear(
        recording,
        matrix,
        step=state.step,
        x=device.tensor(given["x"]),
        output=case.output,
        outputs=outputs,
        tokens=1 if case.token == "last" else case.tokens,
        gamma=None if given["gamma"] is None else device.tensor(pad_vector(given["gamma"])),
        eps=EPS,
        bias=None if given["bias"] is None else device.tensor(given["bias"]),
        token=case.token,
        **more,
    )
    return recording


def gated(gate: np.ndarray, up: np.ndarray, gate_bound: np.ndarray, up_bound: np.ndarray | float) -> tuple[np.ndarray, np.ndarray]:
    """silu(gate) * up and its error, from those of its factors; WGSL allows exp(x) an error that grows with x."""
    with np.errstate(over="ignore"):
        silu = reference.silu(gate)
    return silu * up, 1.1 * gate_bound * np.abs(up) + np.abs(silu) * up_bound + (8 + 4 * np.abs(gate)) * 2**-24 * np.abs(silu * up) + 1e-36


def run(device: Device, rng: np.random.Generator, case: Case, matrix: QuantizedTensor | None = None) -> np.ndarray:
    """Compute a case whose output is one matrix, compare it with the reference, check that nothing else is written; returns what was computed."""
    matrix = matrix or random_matrix(rng, case.rows, case.columns, case.kind)
    given = inputs(rng, case)
    expected, bound = results(case, given, matrix.dequantize())
    if case.token == "last":
        expected, bound = expected[-1:], bound[-1:]
    width = case.rows // 2 if case.output == "swiglu" else case.rows
    stride, height = width + 3, 1 if case.token == "last" else case.tokens
    before = poison((height, stride))
    old = rng.standard_normal((len(expected), width)).astype(np.float32)
    if case.output in ("add", "silu_mul"):
        before[: len(expected), :width] = old
    if case.output == "add":
        expected = expected + old
        bound = bound + 2**-23 * np.abs(expected)
    elif case.output == "silu_mul":
        expected, bound = gated(expected, old, bound, 0)
    elif case.output == "swiglu":
        expected, bound = gated(expected[:, 0::2], expected[:, 1::2], bound[:, 0::2], bound[:, 1::2])
    y, state = with_canary(device, before), StepState(device, case.tokens)
    unit = 2 if case.output == "swiglu" else 1
    recording = record(device, Matrix(device, matrix, unit), case, given, state, {"y": y}, y_stride=stride)
    state.write(123, [0] * case.count)
    dirty_workgroup_memory(device)
    recording.replay()
    after, canary = split_canary(y, before.shape)
    place = {"case": case, "device": device.profile}
    assert_untouched(canary, where="beyond the end", **place)
    assert_untouched(after[len(expected) :], where="tokens beyond the step's count", **place)
    assert_untouched(after[: len(expected), width:], where="between the rows", **place)
    computed = after[: len(expected), :width]
    assert_close(computed, expected, max_error=bound, max_nmse=nmse_limit(expected), **place)
    return computed


# ---- formats, shapes, tokens


def shapes(kind: str) -> list[int]:
    """Columns: one, several and many lanes a row; where rows are floats, also lengths that are no multiple of anything."""
    return [32, 96, 576, 5, 17, 100] if kind in ("F32", "F16") else [32, 96, 576]


@pytest.mark.conformance(variant=["gpu_shape"], tokens=[1], kind=["F32", "Q4_0", "Q8_0"])
@pytest.mark.parametrize("tokens", [1, 64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", MAIN_VARIANTS)
def test_formats_and_shapes(devices, rng, variant, kind, tokens):
    place = KINDS.index(kind)
    for i, columns in enumerate(shapes(kind)):
        several_lanes = variant != "software"
        if several_lanes and tokens > 1 and columns != 576 and (place + i) % 2:
            continue  # each number of lanes is a kernel, and kernels take long to compile
        turn = place + (i if several_lanes else tokens)
        norm, bias = bool(turn % 2), bool(turn // 2 % 2)
        for j, rows in enumerate((1, 3, 7, 129, 1000)):
            counts = [1] if tokens == 1 else [(1, 2, 3, 5, 64)[(i + j) % 5], (4, 5, 1, 63, 9)[j]]
            for count in counts:
                if rows * count <= 10_000:
                    run(devices[variant], rng, Case(kind, rows, columns, tokens, count, norm, bias))


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_long_rows(devices, rng, kind):
    """One token: x that nearly fills workgroup memory, and x that does not fit."""
    for columns in (8192, 16384):
        run(devices["gpu_shape"], rng, Case(kind, 9, columns, 1, 1, norm=True, bias=False))


@pytest.mark.conformance(variant=["gpu_shape"], kind=["BF16", "Q6_K"])
@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind not in KINDS])
@pytest.mark.parametrize("variant", MAIN_VARIANTS)
def test_the_other_formats(devices, rng, variant, kind):
    """The five that need few cases of their own: bf16, Q5_1 and the K-quants, which read the same parts."""
    for rows, blocks in ((7, 1), (129, 3)):
        columns = blocks * max(FORMATS[kind].block, 96)
        run(devices[variant], rng, Case(kind, rows, columns, 1, 1, norm=blocks == 1, bias=blocks == 3))
        if variant == "software":
            run(devices[variant], rng, Case(kind, rows, columns, 5, 3 + blocks // 2, norm=blocks == 3))


@pytest.mark.conformance(variant=["gpu_shape_no_subgroup", "small_binding"], tokens=[1])
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("variant", OTHER_VARIANTS)
def test_formats_and_shapes_on_other_devices(devices, rng, variant, tokens):
    for i, kind in enumerate(KINDS):
        if tokens > 1 and (i + OTHER_VARIANTS.index(variant)) % 2:
            continue
        columns = (576, 100, 96, 576, 32, 2048)[i]
        for rows in (7, 129):
            run(devices[variant], rng, Case(kind, rows, columns, tokens, min(tokens, 1 + i), norm=bool(i % 2), bias=bool(i // 2 % 2)))


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind not in KINDS])
@pytest.mark.parametrize("variant", MAIN_VARIANTS)
def test_formats_with_parts_of_their_own(devices, rng, variant, kind):
    """The rest of the formats, each with one kernel: they differ in how codes and scales are read, not in what follows."""
    for rows, columns in ((7, 512), (129, 768)):
        run(devices[variant], rng, Case(kind, rows, columns, 1, 1, norm=True, bias=True))


@pytest.mark.conformance(variant=["gpu_shape"], tokens=[5])
@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
@pytest.mark.parametrize("variant", MAIN_VARIANTS)
def test_recordings_for_a_few_tokens(devices, rng, variant, tokens):
    """Every count up to the recorded tokens; the others keep what they had."""
    matrix = random_matrix(rng, 37, 96, "Q8_0")
    for count in range(1, tokens + 1):
        run(devices[variant], rng, Case("Q8_0", 37, 96, tokens, count, norm=True, bias=True), matrix)


OUTPUTS = ["store", "add", "swiglu", "silu_mul"]


@pytest.mark.conformance(variant=["gpu_shape"])
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_outputs(devices, rng, variant, output):
    turn = VARIANTS.index(variant) + OUTPUTS.index(output)
    kind = ("Q4_0", "F32", "Q8_0", "Q4_1", "F16", "Q5_0")[turn % 6]
    several = variant in MAIN_VARIANTS or turn % 4 == 0
    for tokens, count in [(1, 1), (5, 5), (5, 2)] if several else [(1, 1)]:
        for rows in (2, 6, 130) if output == "swiglu" else (1, 7, 131):
            run(devices[variant], rng, Case(kind, rows, 96, tokens, count, norm=turn % 2 == 0, bias=turn // 2 % 2 == 0, output=output))


@pytest.mark.conformance(memory=[16384])
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("memory", [16384, 32768])
def test_tiles_for_many_tokens(devices, rng, memory, output):
    """GPU shapes for prompts, in the sizes that fit different amounts of workgroup memory."""
    device = Device()
    device.profile = replace(devices["gpu_shape"].profile, workgroup_memory=min(memory, devices["gpu_shape"].profile.workgroup_memory))
    shape = choose_linear(device.profile, 130, 96, 40)
    assert isinstance(shape, TileShape)
    assert shape.workgroup_bytes <= memory
    kind, turn = ("Q4_0", "F16", "Q6_K", "Q5_1")[OUTPUTS.index(output)], OUTPUTS.index(output) + (memory > 16384)
    columns = 256 if kind == "Q6_K" else 96
    for rows in (2, 130) if output == "swiglu" else (1, 131):
        for count in (1, 33, 40):
            run(device, rng, Case(kind, rows, columns, 40, count, norm=turn % 2 == 0, bias=turn // 2 % 2 == 0, output=output))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_composition_of_norm_and_bias(devices, rng, variant):
    for norm in (False, True):
        for bias in (False, True):
            run(devices[variant], rng, Case("Q8_0", 33, 160, 1, 1, norm, bias))


def test_gates_far_from_zero_stay_finite(device: Device, rng):
    """silu of +-1000 and beyond: e^x overflows f32, the result must not."""
    gate = np.array([-1e30, -1000.0, -89.0, -88.0, 0.0, 88.0, 89.0, 1000.0], np.float32)
    for output in ("swiglu", "silu_mul"):
        weights = np.zeros((2 * len(gate) if output == "swiglu" else len(gate), 16), np.float32)
        weights[:: 2 if output == "swiglu" else 1, 0] = gate
        if output == "swiglu":
            weights[1::2, 0] = 0.5
        case = Case("F32", len(weights), 16, 1, 1, output=output)
        before = np.full(len(gate), 0.5, np.float32)
        y, state = with_canary(device, before), StepState(device, 1)
        x = np.zeros((1, 16), np.float32)
        x[0, 0] = 1
        matrix = Matrix(device, QuantizedTensor(weights, weights.shape, "F32"), 2)
        recording = record(device, matrix, case, {"x": x, "gamma": None, "bias": None}, state, {"y": y}, y_stride=len(gate))
        state.write(0, [0])
        recording.replay()
        after, _ = split_canary(y, gate.shape)
        assert np.isfinite(after).all(), (output, after)
        with np.errstate(over="ignore"):
            np.testing.assert_allclose(after, reference.silu(gate) * 0.5, rtol=1e-5, atol=1e-30, err_msg=output)


def test_the_norm_of_tiny_and_large_activations(device: Device, rng):
    """eps rules where x is tiny; a row of zeros gives the bias."""
    case = Case("F32", 9, 100, 4, 4, norm=True, bias=True)
    matrix = random_matrix(rng, 9, 100, "F32")
    given = inputs(rng, case)
    given["x"][:, :100] *= np.array([0, 1e-6, 1e-3, 1e6], np.float32)[:, None]
    y, state = with_canary(device, poison((4, 9))), StepState(device, 4)
    recording = record(device, Matrix(device, matrix), case, given, state, {"y": y}, y_stride=9)
    state.write(0, [0] * 4)
    recording.replay()
    after, _ = split_canary(y, (4, 9))
    expected, bound = results(case, given, matrix.dequantize())
    assert_close(after, expected, max_error=bound, case=case)
    np.testing.assert_array_equal(after[0], given["bias"])


@pytest.mark.conformance(variant=["gpu_shape"])
@pytest.mark.parametrize("kind", ["F16", "Q5_0"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_last_token_only(devices, rng, variant, kind):
    for tokens, count in ((1, 1), (5, 5), (5, 3), (64, 40)):  # one kernel
        run(devices[variant], rng, Case(kind, 67, 96, tokens, count, norm=True, token="last"))


# ---- pieces and grids


@pytest.mark.parametrize("output", ["store", "add", "swiglu", "silu_mul"])
@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0"])
def test_pieces_give_the_same_bits(device: Device, devices, rng, kind, output):
    small = devices["small_binding"]
    columns = 96
    rows = 2 * int((1 << 20) / columns / {"F32": 4, "Q8_0": 1, "Q4_0": 0.5}[kind]) + 50
    unit = 2 if output == "swiglu" else 1
    matrix = QuantizedTensor(np.tile(random_matrix(rng, 500, columns, kind).raw, (rows // 500 + 1, 1))[:rows], (rows, columns), kind)
    pieces = Matrix(small, matrix, unit).pieces
    assert len(pieces) >= 3
    assert [p.first_row for p in pieces] == np.cumsum([0, *(p.rows for p in pieces)])[:-1].tolist()
    assert sum(p.rows for p in pieces) == rows
    assert all(p.first_row % unit == 0 for p in pieces)
    case = Case(kind, rows, columns, 1, 1, norm=True, bias=True, output=output)
    seed = int(rng.integers(1 << 32))
    computed = [run(d, np.random.default_rng(seed), case, matrix) for d in (device, small)]
    np.testing.assert_array_equal(*computed)


def test_a_matrix_whose_rows_do_not_fit_is_refused(devices):
    small = devices["small_binding"]
    wide = QuantizedTensor(np.zeros((2, 1 << 17), np.float32), (2, 1 << 17), "F32")  # rows of 512 KiB
    assert [p.rows for p in Matrix(small, wide, 2)] == [2]
    with pytest.raises(CapacityError, match=r"4 rows of QuantizedTensor\(2 x 131072, F32\) do not fit a binding of 1048576 bytes"):
        Matrix(small, wide, 4)


def test_a_matrix_knows_its_size(device: Device, rng):
    matrix = Matrix(device, random_matrix(rng, 3, 96, "Q4_0"))
    assert (matrix.rows, matrix.columns, matrix.format.name) == (3, 96, "Q4_0")
    assert matrix.nbytes == 3 * 48 + 20  # nine f16 scales are padded to whole words


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("limit", [1, 3, 4])
def test_more_workgroups_than_a_dimension_holds(devices, rng, limit, tokens):
    """A made-up limit on the grid, and numbers of rows around its multiples; the surplus workgroups write nothing."""
    device = Device()
    device.profile = replace(devices["software"].profile, max_workgroups=limit)
    shape = choose_linear(device.profile, 100, 32, tokens)
    group = shape.workgroup // shape.lanes * shape.rows
    for groups in sorted({g for g in (1, limit, limit + 1, 2 * limit, 2 * limit + 1, limit * limit) if g <= limit * limit}):
        for rows in {groups * group - 1, groups * group, (groups - 1) * group + 1}:
            run(device, rng, Case("F16", rows, 20, tokens, tokens))


@pytest.mark.parametrize("groups", [65534, 65535, 65536, 65537])
def test_more_workgroups_than_webgpu_allows(devices, groups):
    """The real thing: around 65,535 workgroups of the software shape, one column."""
    device = devices["software"]
    shape = choose_linear(device.profile, 1 << 22, 1, 2)
    group = shape.workgroup // shape.lanes * shape.rows
    rows = groups * group - 1
    weights = (np.arange(rows) % 1999).astype(np.float16)[:, None]
    matrix = Matrix(device, QuantizedTensor(weights, (rows, 1), "F16"))
    y, state = with_canary(device, poison((rows,))), StepState(device, 2)
    x = np.zeros((2, 16), np.float32)
    x[0, 0] = 3
    recording = Recording(device)
    record_linear(recording, matrix, step=state.step, x=device.tensor(x), output="store", outputs={"y": y}, tokens=2, y_stride=rows)
    assert len(matrix.pieces) > 1 or recording.dispatches[0].groups[1] == (2 if groups > 65535 else 1)
    state.write(0, [0])
    recording.replay()
    after, canary = split_canary(y, (rows,))
    assert_untouched(canary, groups=groups)
    np.testing.assert_array_equal(after, weights[:, 0].astype(np.float32) * 3)


# ---- the epilogue of attention: rotation, query, cache


@dataclass(frozen=True)
class Heads:
    """Geometry of the QKV epilogue."""

    heads: int
    kv_heads: int
    dim: int
    rotary: int
    interleaved: bool
    cache: str = "f32"
    kinds: tuple[str, str, str] = ("Q8_0", "Q8_0", "Q8_0")
    norm: bool = True
    bias: bool = False


HEADS = {
    "all rotated, neighbours": Heads(4, 4, 16, 16, True),
    "all rotated, halves": Heads(4, 2, 16, 16, False, bias=True),
    "partly rotated, neighbours": Heads(3, 1, 40, 12, True, "f16"),
    "partly rotated, halves": Heads(6, 2, 20, 8, False, "f16", bias=True),
    "four channels": Heads(2, 1, 4, 4, False, kinds=("F16", "F16", "F16"), norm=False),
    "four channels, f16": Heads(7, 7, 4, 4, True, "f16", ("F32", "F32", "F32")),
    "three formats": Heads(8, 1, 64, 64, True, "f16", ("Q4_0", "Q4_1", "Q5_0"), bias=True),
    "two formats": Heads(9, 3, 20, 8, False, "f32", ("Q4_0", "Q4_0", "Q8_0"), norm=False, bias=True),
}


def run_qkv(device: Device, rng: np.random.Generator, g: Heads, tokens: int, count: int, position: int, capacity: int, columns: int = 64) -> None:
    rope = Rope(10000.0, g.rotary, g.interleaved)
    rows = (g.heads * g.dim, g.kv_heads * g.dim, g.kv_heads * g.dim)
    weights = [random_matrix(rng, n, columns, kind) for n, kind in zip(rows, g.kinds, strict=True)]
    case = Case("mixed", sum(rows), columns, tokens, count, g.norm, g.bias, "qkv")
    given = inputs(rng, case)
    expected, bound = results(case, given, np.concatenate([w.dequantize() for w in weights]))
    bound = 2 * bound.max()  # a rotation mixes two
    q, k, v = (e.reshape(count, -1, g.dim) for e in np.split(expected, np.cumsum(rows)[:2], axis=1))
    positions = position + np.arange(count)
    q, k = (reference.apply_rope(a, positions, dim=g.rotary, interleaved=g.interleaved) for a in (q, k))

    orders = [rope.pair_order(g.heads, g.dim), rope.pair_order(g.kv_heads, g.dim), np.arange(rows[2])]
    ordered = [stack_rows([w], order) for w, order in zip(weights, orders, strict=True)]
    if g.bias:
        given["bias"] = np.concatenate([b[o] for b, o in zip(np.split(given["bias"], np.cumsum(rows)[:2]), orders, strict=True)])
    same = len(set(g.kinds)) == 1
    runs = [(stack_rows(ordered), 0)] if same else [(m, sum(rows[:i])) for i, m in enumerate(ordered)]

    cache = KVCache(device, g.kv_heads, g.dim, capacity, g.cache)
    for store in (cache.keys, cache.values):
        store.write(poison(store.shape, store.dtype))
    query, state = with_canary(device, poison((tokens, g.heads, g.dim))), StepState(device, tokens)
    outputs = {"rope": device.tensor(rope.table(capacity)), "query": query, "keys": cache.keys, "values": cache.values}
    options = {"HEADS": g.heads, "KV_HEADS": g.kv_heads, "HEAD_DIM": g.dim, "ROTARY": g.rotary, "PAIR_DISTANCE": rope.pair_distance}
    state.write(position, [0] * count)
    dirty_workgroup_memory(device)
    for matrix, first in reversed(runs):  # so that what a matrix writes beyond its rows stays seen
        record(
            device,
            Matrix(device, matrix, 4),
            case,
            given,
            state,
            outputs,
            parts=cache.format.cache_parts,
            options=options,
            first_row=first,
            y_stride=g.heads * g.dim,
        ).replay()
    place = {"geometry": g, "tokens": tokens, "count": count, "position": position, "capacity": capacity, "device": device.profile}
    after, canary = split_canary(query, (tokens, g.heads, g.dim))
    assert_untouched(canary, where="beyond the queries", **place)
    assert_untouched(after[count:], where="queries of tokens beyond the count", **place)
    assert_close(after[:count], q, max_error=bound, max_nmse=nmse_limit(q), what="queries", **place)
    half = g.cache == "f16"
    for name, store, wanted in (("keys", cache.keys, k), ("values", cache.values, v)):
        held = store.numpy().reshape(g.kv_heads, capacity, g.dim)
        mine = np.zeros(capacity, bool)
        mine[positions] = True
        assert_untouched(held[:, ~mine], where=f"{name} of other positions", **place)
        rounding = 2**-10 * np.abs(wanted).max() if half else 0  # WGSL does not say which way f16 is rounded
        assert_close(held[:, mine].swapaxes(0, 1), wanted, max_error=bound + rounding, max_nmse=1e-6 if half else nmse_limit(wanted), what=name, **place)


@pytest.mark.conformance(variant=["gpu_shape"], name=["partly rotated, halves", "three formats"])
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("variant", MAIN_VARIANTS)
def test_qkv(devices, rng, variant, name):
    run_qkv(devices[variant], rng, HEADS[name], 1, 1, 0, 1)
    run_qkv(devices[variant], rng, HEADS[name], 1, 1, 36, 37)
    if variant == "software" or list(HEADS).index(name) % 2:
        run_qkv(devices[variant], rng, HEADS[name], 5, 5, 0, 5)
        run_qkv(devices[variant], rng, HEADS[name], 5, 3, 30, 35)


@pytest.mark.conformance(variant=["gpu_shape_no_subgroup"])
@pytest.mark.parametrize("variant", OTHER_VARIANTS)
def test_qkv_on_other_devices(devices, rng, variant):
    for i, name in enumerate(HEADS):
        if i % 4 == OTHER_VARIANTS.index(variant):
            run_qkv(devices[variant], rng, HEADS[name], 1, 1, 3, 9)
            if i < 4:
                run_qkv(devices[variant], rng, HEADS[name], 5, 4, 7, 13)


@pytest.mark.conformance
@pytest.mark.parametrize("name", ["partly rotated, neighbours", "two formats"])
def test_qkv_in_tiles(devices, rng, name):
    """The recordings of prompts on GPUs."""
    run_qkv(devices["gpu_shape"], rng, HEADS[name], 20, 20, 0, 20)
    run_qkv(devices["gpu_shape"], rng, HEADS[name], 20, 11, 30, 45)


def test_qkv_in_pieces(devices, rng):
    """A binding of 1 MiB holds fewer rows than Q, K and V have: pieces begin within a head."""
    g = Heads(12, 3, 96, 96, False, kinds=("F32", "F32", "F32"), bias=True)
    rows = 18 * 96
    assert len(Matrix(devices["small_binding"], random_matrix(rng, rows, 320, "F32"), 4).pieces) == 3
    run_qkv(devices["small_binding"], rng, g, 1, 1, 2, 4, columns=320)


def test_what_f16_cannot_hold_is_clamped(device: Device, rng):
    """No inf enters the cache: attention over it would give NaN."""
    dim, columns = 8, 16
    weights = np.zeros((3 * dim, columns), np.float32)
    weights[:, 0] = np.tile([1e6, -1e6, 65504, -65504, 1, 0, 70000, -1e30], 3)
    case = Case("F32", 3 * dim, columns, 1, 1, output="qkv")
    cache, state = KVCache(device, 1, dim, 2, "f16"), StepState(device, 1)
    outputs = {"rope": device.tensor(Rope(dim=dim).table(2)), "query": device.empty((1, 1, dim)), "keys": cache.keys, "values": cache.values}
    options = {"HEADS": 1, "KV_HEADS": 1, "HEAD_DIM": dim, "ROTARY": dim, "PAIR_DISTANCE": 1}
    x = np.zeros((1, columns), np.float32)
    x[0, 0] = 1
    matrix = Matrix(device, QuantizedTensor(weights, weights.shape, "F32"), 4)
    given = {"x": x, "gamma": None, "bias": None}
    state.write(0, [0])
    record(device, matrix, case, given, state, outputs, parts=cache.format.cache_parts, options=options, y_stride=dim).replay()
    assert cache.v(1)[0, 0].tolist() == [65504, -65504, 65504, -65504, 1, 0, 65504, -65504]
    assert cache.k(1)[0, 0].tolist() == [65504, -65504, 65504, -65504, 1, 0, 65504, -65504]  # position 0: not turned
    assert not untouched(cache.keys.numpy()).any()


# ---- the choice of shape


def test_the_shape_suits_the_kernel(device: Device):
    """For any device and problem: teams of a power of two lanes within a workgroup, rows in fours, memory within the limit."""
    for kind in ("CPU", "DiscreteGPU", "IntegratedGPU"):
        for subgroup in (0, 4, 8, 16, 32, 64, 128):
            for invocations in (128, 256, 1024):
                profile = replace(device.profile, kind=kind, subgroup_size=subgroup, max_invocations=invocations)
                for rows in (1, 100, 49152):
                    for columns in (1, 16, 17, 32, 576, 8192):
                        for tokens, form in itertools.product((1, 2, 64), (FORMATS["F32"], FORMATS["F16"], FORMATS["Q4_0"], FORMATS["Q8_0"])):
                            if columns % form.block:
                                continue
                            s = choose_linear(profile, rows, columns, tokens, form=form)
                            where = (s, profile, rows, columns, tokens, form.name)
                            if isinstance(s, TileShape):
                                assert kind != "CPU", where
                                assert tokens >= 16, where
                                assert s.workgroup_bytes <= profile.workgroup_memory, where
                                assert s.workgroup <= invocations, where
                                assert s.workgroup % s.tokens == 0, where
                                continue
                            if isinstance(s, VectorShape):
                                assert kind != "CPU", where
                                assert tokens == 1, where
                                assert s.workgroup_bytes <= profile.workgroup_memory, where
                                assert s.columns <= 16 * 4 * s.lanes, where
                                assert s.workgroup % s.subgroup == 0, where
                            else:
                                assert (s.tokens == 1) == (tokens == 1), where
                            assert s.lanes & (s.lanes - 1) == 0, where
                            assert s.lanes < 2 * max(1, padded(columns) // 16), where
                            assert s.workgroup <= invocations, where
                            assert s.workgroup % s.lanes == 0, where
                            assert s.rows % 4 == 0, where
