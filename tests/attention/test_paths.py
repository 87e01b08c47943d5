"""Every way to compute attention against the float64 reference: one grid of problems for all paths, shapes of all kinds of devices, all GEMM tiles."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest

from tests.helpers import assert_close, assert_untouched, dirty_workgroup_memory, poison, split_canary, with_canary
from wgattn import reference
from wgattn.attention import flash_matrix, gemm, matrices, unfused
from wgattn.attention.flash_matrix import FlashMatrixShape
from wgattn.attention.matrices import Matrices, rounds
from wgattn.attention.paths import PATHS, PORTABLE_PATHS
from wgattn.attention.problem import OPEN, Operands, Problem, Rows, packs_output
from wgattn.attention.tune import flash_candidates
from wgattn.errors import Unsupported
from wgattn.gpu import Device, Recording, StepState

KEYS = (1, 7, 17, 31, 32, 33, 61, 64, 127, 128, 129, 255, 256, 257, 511, 512, 513, 640, 1025)
QUERIES = (1, 2, 3, 4, 5, 32, 75, 128, 513)
RATIOS = (1, 3, 4, 7, 8)
DIMS = (5, 6, 7, 8, 40, 64, 72, 80, 96, 128, 192, 256)


@dataclass(frozen=True)
class Case:
    """A problem, in the words of `reference.attention` where there are any."""

    S: int
    T: int
    D: int
    Dv: int = 0
    """0: as D."""
    B: int = 1
    Hkv: int = 1
    ratio: int = 1
    dtype: str = "f32"
    layout: str = "bhsd"
    is_causal: bool = False
    causal_alignment: str = "bottom_right"
    window_size: tuple[int, int] | None = None
    mask: str = ""
    """Storage, then which axes it has: "f32 BHSn", "u8 S"; n: narrower than T, of at least one column."""
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    lengths: bool = False

    @property
    def parameters(self) -> dict:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}

    def __str__(self) -> str:
        return " ".join(f"{k}={v}".replace("=True", "") for k, v in self.parameters.items())


FEATURES: tuple[dict, ...] = (
    {},
    {"is_causal": True},
    {"is_causal": True, "window_size": (6, 0), "lengths": True},
    {"mask": "u8 BSn"},
    {"mask": "f32 HS", "softcap": 2.0},
    {"alibi": True, "is_causal": True, "sinks": True},
    {"causal_alignment": "top_left", "is_causal": True, "layout": "bshd"},
    {"mask": "u32 B", "window_size": (20, 9)},
    {"sinks": True, "lengths": True, "layout": "bshd"},
    {"mask": "f16 BHSn", "is_causal": True},
    {"softcap": 5.0, "window_size": (-1, 3), "causal_alignment": "top_left"},
    {"mask": "f32 Sn", "softcap": 1.5, "alibi": True, "sinks": True, "lengths": True, "is_causal": True, "layout": "bshd"},
)
_QUERY_PAIRS = ((1, 75), (3, 128), (5, 513), (2, 32), (4, 75))
"""A few queries and many: each number below 5 may be a pipeline of its own, and compiling is what takes time."""


def pruned() -> Iterator[Case]:
    """Each head dim in f32 and f16, with other features each time; numbers of queries and keys, ratios and batches rotate."""
    n = 0
    for i, D in enumerate(DIMS):
        for dtype, shift in (("f32", 0), ("f16", 5)):
            features = FEATURES[(i + shift) % len(FEATURES)]
            ratio = RATIOS[(i + shift) % len(RATIOS)]
            queries = _QUERY_PAIRS[(i + shift) % len(_QUERY_PAIRS)]
            queries = queries * 2 if dtype == "f32" else queries[i % 2 :][:1] * 3
            Dv = {7: 5, 40: 64, 96: 6, 128: 80, 192: 128}.get(D, 0) if dtype == "f32" else 0
            for S in queries:
                T = KEYS[n * 7 % len(KEYS)]
                small = S * T * ratio * D < 2_000_000
                yield Case(S, T, D, Dv, B=1 + n % 2 if small else 1, Hkv=1 + n % 3 if small else 1, ratio=ratio, dtype=dtype, **features)
                n += 1


def everything(D: int) -> Iterator[Case]:
    """All numbers of queries and keys for one head dim; the rest rotates."""
    for n, (S, T) in enumerate((S, T) for S in QUERIES for T in KEYS):
        features = FEATURES[(n + D) % len(FEATURES)]
        small = S * T * D < 1_000_000
        sizes = {"B": 1 + n % 2, "Hkv": 1 + n % 3, "ratio": RATIOS[n % 5]} if small else {}
        yield Case(S, T, D, dtype=("f32", "f16")[n % 2], **sizes, **features)


def make_mask(case: Case, rng: np.random.Generator) -> np.ndarray:
    kind, axes = case.mask.split()
    sizes = (case.B if "B" in axes else 1, case.Hkv * case.ratio if "H" in axes else 1, case.S if "S" in axes else 1)
    shape = (*sizes, max(1, case.T * 2 // 3) if "n" in axes and case.T != 2 else case.T)
    hidden = rng.random(shape) < 0.3
    if kind in ("u8", "u32"):
        return np.where(hidden, 0, rng.integers(1, 200, shape)).astype(np.uint8 if kind == "u8" else np.uint32)
    dtype = np.float32 if kind == "f32" else np.float16
    values = rng.standard_normal(shape).astype(dtype)
    values[hidden] = rng.choice([np.finfo(dtype).min, -np.inf])
    return values


@dataclass
class Inputs:
    """Arrays of a case in layout bhsd, and the reference's keyword arguments."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    options: dict

    @classmethod
    def of(cls, case: Case, rng: np.random.Generator) -> "Inputs":
        c, dtype = case, {"f32": np.float32, "f16": np.float16}[case.dtype]
        H = c.Hkv * c.ratio
        sizes = ((H, c.S, c.D), (c.Hkv, c.T, c.D), (c.Hkv, c.T, c.Dv or c.D))
        query, key, value = (rng.standard_normal((c.B, *size)).astype(dtype) for size in sizes)
        options = {"is_causal": c.is_causal, "causal_alignment": c.causal_alignment, "window_size": c.window_size, "softcap": c.softcap}
        options["attn_mask"] = make_mask(c, rng) if c.mask else None
        options["alibi_slopes"] = 2.0 ** -np.linspace(2, 6, H).astype(np.float32) if c.alibi else None
        options["sinks"] = rng.standard_normal(H).astype(np.float32) if c.sinks else None
        if c.lengths:
            options["key_lengths"] = rng.integers(0, c.T + 1, c.B)
        return cls(query, key, value, options)

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        options = dict(self.options)
        mask = options["attn_mask"]
        if mask is not None and mask.dtype == np.float16:  # its lowest number hides a key, too
            options["attn_mask"] = np.where(mask == np.finfo(np.float16).min, -np.inf, mask.astype(np.float64))
        return reference.attention(self.query, self.key, self.value, **options)


def rows(device: Device, array: np.ndarray, layout: str, room: int = 0) -> Rows:
    """A tensor of an array in bhsd, stored in `layout`, with `room` poisoned positions after each head's (each sequence's) own."""
    array = np.concatenate([array, poison((*array.shape[:2], room, array.shape[3]), array.dtype)], axis=2)
    stored = array if layout == "bhsd" else array.swapaxes(1, 2)
    return Rows.of(device.tensor(stored), layout)


@dataclass
class Outputs:
    """What a path has written: `out` in bhsd, and lse."""

    out: np.ndarray
    lse: np.ndarray


def problem_of(case: Case) -> Problem:
    left, right = (OPEN if side == -1 else side for side in case.window_size or (-1, -1))
    return Problem(
        batch=case.B,
        num_heads=case.Hkv * case.ratio,
        num_kv_heads=case.Hkv,
        queries=case.S,
        keys=case.T,
        head_dim=case.D,
        value_dim=case.Dv or case.D,
        scale=1 / math.sqrt(case.D),
        dtype=case.dtype,
        kv_dtype=case.dtype,
        mask=case.mask.split()[0] if case.mask else "none",
        left=left,
        right=min(right, 0) if case.is_causal else right,
        bottom_right=case.causal_alignment == "bottom_right",
        softcap=case.softcap,
        alibi=case.alibi,
        sinks=case.sinks,
        lse=True,
        lengths="each" if case.lengths else "fixed",
    )


def solve(device: Device, path: str, case: Case, inputs: Inputs, shape: object = None, *, replays: int = 1) -> Outputs:
    """A path's answer into poisoned memory, from keys and values with NaN behind those that count; nothing may be written beyond the outputs."""
    problem, options = problem_of(case), inputs.options
    missing = PATHS[path].unsupported(device.profile, problem)
    if missing:
        raise Unsupported(f"{path} cannot run {case}: {missing}")
    order = (0, 1, 2, 3) if case.layout == "bhsd" else (0, 2, 1, 3)
    heads = (problem.batch, problem.num_heads, problem.queries, problem.value_dim)
    stored = tuple(heads[i] for i in order)
    out = with_canary(device, poison(stored, np.float32 if case.dtype == "f32" or packs_output(problem) else np.float16))
    lse = with_canary(device, poison(heads[:3]))
    key, value, lengths = inputs.key.copy(), inputs.value.copy(), options.get("key_lengths")
    for b, n in enumerate(lengths if lengths is not None else []):
        key[b, :, n:] = value[b, :, n:] = np.nan
    operands = Operands(
        query=rows(device, inputs.query, case.layout),
        keys=rows(device, key, case.layout, room=3),
        values=rows(device, value, case.layout, room=3),
        out=replace(Rows.of(device.empty(stored), case.layout), tensor=out),
        sinks=None if options["sinks"] is None else device.tensor(options["sinks"]),
        alibi_slopes=None if options["alibi_slopes"] is None else device.tensor(options["alibi_slopes"]),
        key_lengths=None if lengths is None else device.tensor(lengths, np.uint32),
        lse=lse,
    )
    mask = options["attn_mask"]
    if mask is not None:
        flat = np.pad(mask.reshape(-1), (0, -mask.size % 4))
        operands.mask = device.tensor(flat.view(np.uint32) if mask.dtype == np.uint8 else flat)
        strides = np.cumprod([1, *mask.shape[:0:-1]])[::-1]
        operands.mask_strides = tuple(0 if n == 1 else int(stride) for n, stride in zip(mask.shape, strides, strict=True))
        operands.mask_first = 0 if mask.shape[3] == 1 else case.T - mask.shape[3]
    recording = Recording(device)
    PATHS[path].record(recording, problem, operands, shape)
    dirty_workgroup_memory(device)
    for _ in range(replays):
        recording.replay()
    found, canary = split_canary(out, stored)
    found_lse, lse_canary = split_canary(lse, heads[:3])
    assert_untouched(canary, path=path, **case.parameters)
    assert_untouched(lse_canary, path=path, **case.parameters)
    return Outputs(found.transpose(order), found_lse)


def check(device: Device, path: str, case: Case, inputs: Inputs, shape: object = None, **more: object) -> None:
    """A path agrees with the reference."""
    expected, expected_lse = inputs.expected()
    found = solve(device, path, case, inputs, shape)
    parameters = {"path": path, **case.parameters, **({} if shape is None else {"shape": shape}), **more}
    exact = case.dtype == "f32" and path != "flash_matrix"
    bounds = {"max_error": 2e-5} if exact else {"max_error": 5e-3, "max_nmse": 5e-4}
    assert_close(found.out, expected, **bounds, **parameters)
    nothing = np.isneginf(expected_lse)
    assert np.array_equal(np.isneginf(found.lse), nothing), f"lse is -inf for other rows than those that see nothing: {parameters}"
    assert not found.out[nothing & (inputs.options["sinks"] is None)].any(), f"rows that see nothing are not zero: {parameters}"
    finite = np.where(nothing, 0, expected_lse)
    error = (5e-3 if path == "flash_matrix" else 2e-5) + 1e-6 * np.abs(finite)
    assert_close(np.where(nothing, 0, found.lse), finite, max_error=error, output="lse", **parameters)


# ---- the grid


@pytest.mark.conformance(case=lambda case: case.D == 7)
@pytest.mark.parametrize("case", list(pruned()), ids=str)
def test_all_paths_agree_with_the_reference(device: Device, rng, case: Case):
    inputs = Inputs.of(case, rng)
    for path in PORTABLE_PATHS:
        check(device, path, case, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("case", list(pruned()), ids=str)
def test_matrix_units_agree_with_the_reference(rng, units: Device, case: Case):
    if missing := PATHS["flash_matrix"].unsupported(units.profile, problem_of(case)):
        assert "workgroup memory" in missing
        return
    shapes = flash_matrix.fitting(units.profile, problem_of(case))
    inputs = Inputs.of(case, rng)
    for shape in {shapes[0], shapes[rng.integers(len(shapes))]}:
        check(units, "flash_matrix", case, inputs, shape)


SMALL = tuple(
    Case(S, T, D, Dv, B=1 + n % 2, Hkv=1 + n % 2, ratio=(1, 3, 2)[n % 3], dtype=("f32", "f16")[n // 2 % 2], **features)
    for n, ((S, T, D, Dv), features) in enumerate(
        zip(((33, 70, 16, 0), (18, 45, 24, 0), (5, 129, 7, 5), (20, 33, 16, 37), (40, 64, 8, 0), (17, 31, 40, 16)) * 2, FEATURES, strict=True)
    )
)
"""Each of the features, for matrix units in software, where the time goes to compiling: by the number of matrices in a row."""


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_emulated_matrix_units_agree_with_the_reference(rng, emulated_units: Device, case: Case):
    shapes = flash_matrix.fitting(emulated_units.profile, problem_of(case), eights=SMALL.index(case) % 3 > 0)
    small = [s for s in shapes if s.keys == 16]
    shape = small[SMALL.index(case) % len(small)]
    check(emulated_units, "flash_matrix", case, Inputs.of(case, rng), shape)


@pytest.mark.parametrize("case", SMALL[::3] + SMALL[11:], ids=str)
def test_scores_ahead_of_outputs_agree_with_the_reference(rng, emulated_units: Device, case: Case):
    small = [s for s in flash_matrix.fitting(emulated_units.profile, problem_of(case), ahead=True) if s.keys == 16]
    shape = small[SMALL.index(case) % len(small)]
    check(emulated_units, "flash_matrix", case, Inputs.of(case, rng), shape)


def test_large_shapes_on_emulated_matrix_units(rng, emulated_units: Device):
    """The first of those that fit, with outputs where the keys were, and beside them."""
    wide, narrow = Case(150, 200, 32, is_causal=True), Case(70, 100, 8, 24, dtype="f16")
    for case, shape in ((wide, FlashMatrixShape(8, 32, 32)), (wide, FlashMatrixShape(8, 32, 32, ahead=True)), (narrow, FlashMatrixShape(4, 16, 32))):
        assert shape in flash_matrix.fitting(emulated_units.profile, problem_of(case), ahead=shape.ahead)
        check(emulated_units, "flash_matrix", case, Inputs.of(case, rng), shape)


def growing(rng: np.random.Generator) -> tuple[Case, Inputs]:
    """Keys whose scores grow by 10 in log2 units with every 16 of them, for half of the rows; for the others by 1."""
    case = Case(40, 96, 16)
    inputs = Inputs.of(case, rng)
    inputs.query *= 0.3
    inputs.key *= 0.3
    inputs.query[0, 0, :, 0] = np.where(np.arange(40) % 2, 4, 0.4)
    inputs.key[0, 0, :, 0] += 7 * (np.arange(96) // 16)
    return case, inputs


def check_growing(units: Device, rng: np.random.Generator, ahead: bool = False) -> None:
    case, inputs = growing(rng)
    for shape in flash_matrix.fitting(units.profile, problem_of(case), ahead=ahead)[-3:]:
        found = solve(units, "flash_matrix", case, inputs, shape)
        assert_close(found.out, inputs.expected()[0], max_error=0.05, shape=shape)


@pytest.mark.parametrize("ahead", [False, True])
def test_outputs_are_rescaled_where_scores_grow(rng, emulated_units: Device, ahead: bool):
    check_growing(emulated_units, rng, ahead)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_nan_is_seen_by_matrix_units(rng, emulated_units: Device, dtype: str, ahead: bool):
    """It makes the rows NaN that see it, and no other; their lse too. Keys and queries are rounded on the way."""
    for where in ("query", "key", "mask"):
        case = Case(20, 50, 16, Hkv=2, dtype=dtype, is_causal=True, mask="f32 S" if where == "mask" else "")
        inputs = Inputs.of(case, rng)
        sees = np.zeros((1, 2, 20), bool)
        if where == "query":
            inputs.query[0, 1, 7, 5], sees[0, 1, 7] = np.nan, True
        elif where == "key":
            inputs.key[0, 1, 33, 5], sees[0, 1, 3:] = np.nan, True  # bottom-right: query i sees keys up to i + 30
        else:
            inputs.options["attn_mask"] = np.zeros((1, 1, 20, 50), np.float32)
            inputs.options["attn_mask"][0, 0, 7, 33], sees[0, :, 7] = np.nan, True
        found = solve(emulated_units, "flash_matrix", case, inputs, FlashMatrixShape(2, 16, 32, ahead=ahead))
        np.testing.assert_array_equal(np.isnan(found.out), np.broadcast_to(sees[..., None], found.out.shape), err_msg=where)
        np.testing.assert_array_equal(np.isnan(found.lse), sees, err_msg=where)


def test_queries_that_see_no_key_or_one_tile(rng, emulated_units: Device):
    """The loops of flash_matrix_ahead begin before the first tile and end behind the last."""
    for ahead in (False, True):
        for case in (Case(20, 0, 16), Case(20, 16, 16), Case(20, 17, 16), Case(40, 5, 16, is_causal=True), Case(33, 200, 16, B=3, lengths=True)):
            check(emulated_units, "flash_matrix", case, Inputs.of(case, rng), FlashMatrixShape(2, 16, 32, ahead=ahead))


@pytest.mark.slow
@pytest.mark.parametrize("D", DIMS)
@pytest.mark.parametrize("path", PORTABLE_PATHS)
def test_all_numbers_of_queries_and_keys(device: Device, rng, path: str, D: int):
    for case in everything(D):
        check(device, path, case, Inputs.of(case, rng))


def test_the_grid_covers_all_values():
    cases = list(pruned())
    assert {c.T for c in cases} == set(KEYS)
    assert {c.S for c in cases} == set(QUERIES)
    assert {c.ratio for c in cases} == set(RATIOS)
    assert {(c.D, c.dtype) for c in cases} == {(D, dtype) for D in DIMS for dtype in ("f32", "f16")}


# ---- other devices than this one

HARD = Case(5, 77, 12, 7, B=2, Hkv=2, ratio=3, mask="f32 BSn", softcap=1.5, alibi=True, sinks=True, lengths=True, is_causal=True, layout="bshd")
PLAIN = Case(37, 130, 64, Hkv=1, ratio=2, dtype="f16", is_causal=True)


@pytest.mark.conformance(variant=["gpu_shape"])
@pytest.mark.parametrize("path", PORTABLE_PATHS)
@pytest.mark.parametrize("variant", ["software", "gpu_shape", "gpu_shape_no_subgroup", "gpu_shape_32_lanes", "checked"])
def test_shapes_of_all_kinds_of_devices(devices, rng, variant: str, path: str):
    for case in (HARD, PLAIN):
        check(devices[variant], path, case, Inputs.of(case, rng), variant=variant)


@pytest.mark.conformance(path=["split"])
@pytest.mark.parametrize("path", PORTABLE_PATHS)
def test_one_subgroup_or_all_of_a_workgroup_for_a_long_row(devices, rng, path: str):
    for variant in ("gpu_shape", "gpu_shape_no_subgroup"):
        case = Case(2, 4500, 8, is_causal=True, sinks=True)
        check(devices[variant], path, case, Inputs.of(case, rng), variant=variant)


# ---- what the dispatches leave alone


@pytest.mark.conformance(count=[3])
@pytest.mark.parametrize("path", PORTABLE_PATHS)
@pytest.mark.parametrize(("position", "count"), [(0, 5), (0, 1), (9, 3), (35, 5)])
def test_a_step_sees_its_positions_and_writes_its_rows_only(device: Device, rng, path: str, position: int, count: int):
    """The recording of 5 tokens over a cache of 40, replayed with fewer: what lies behind the last token is not written, and not read."""
    S, capacity, length = 5, 40, position + count
    case = Case(S, capacity, 8, Hkv=2, ratio=2, is_causal=True)
    inputs = Inputs.of(case, rng)
    expected, expected_lse = reference.attention(inputs.query[:, :, :count], inputs.key[:, :, :length], inputs.value[:, :, :length], is_causal=True)
    inputs.key[:, :, length:] = inputs.value[:, :, length:] = inputs.query[:, :, count:] = np.nan
    state, out, lse = StepState(device, S), device.tensor(poison(inputs.query.shape)), device.tensor(poison(inputs.query.shape[:3]))
    query, keys, values = (rows(device, a, "bhsd") for a in (inputs.query, inputs.key, inputs.value))
    recording = Recording(device)
    PATHS[path].record(recording, replace(problem_of(case), lengths="step"), Operands(query, keys, values, Rows.of(out, "bhsd"), lse=lse, step=state.step))
    state.write(position, range(count))
    recording.replay()
    assert_close(out.numpy()[:, :, :count], expected, max_error=2e-5, path=path)
    assert_close(lse.numpy()[:, :, :count], expected_lse, max_error=2e-5, path=path)
    assert_untouched(out.numpy()[:, :, count:], path=path)
    assert_untouched(lse.numpy()[:, :, count:], path=path)


@pytest.mark.conformance
@pytest.mark.parametrize("path", PORTABLE_PATHS)
def test_sequences_without_keys_and_keys_that_are_nan_beyond_the_length(device: Device, rng, path: str):
    case = Case(3, 20, 8, B=5, Hkv=2, ratio=2, lengths=True, is_causal=True)
    inputs = Inputs.of(case, rng)
    inputs.options["key_lengths"] = np.array([0, 1, 2, 3, 20])
    check(device, path, case, inputs)


@pytest.mark.parametrize("path", PORTABLE_PATHS)
def test_no_keys_at_all(device: Device, rng, path: str):
    case = Case(3, 0, 8, Hkv=2)
    check(device, path, case, Inputs.of(case, rng))


@pytest.mark.conformance
@pytest.mark.parametrize("path", PORTABLE_PATHS)
def test_keys_that_the_window_hides_from_all_queries_may_hold_nan(device: Device, rng, path: str):
    case = Case(6, 64, 8, ratio=2, is_causal=True, window_size=(9, 0))
    inputs = Inputs.of(case, rng)
    inputs.key[:, :, :49] = inputs.value[:, :, :49] = np.nan  # query 0 stands at key 58 and sees 49 .. 58
    check(device, path, case, inputs)


@pytest.mark.parametrize("path", PORTABLE_PATHS)
def test_replaying_twice_gives_the_same_bits(device: Device, rng, path: str):
    case = Case(33, 65, 16, Hkv=2, ratio=2, is_causal=True, mask="u8 S")
    inputs = Inputs.of(case, rng)
    once, thrice = solve(device, path, case, inputs), solve(device, path, case, inputs, replays=3)
    assert np.array_equal(once.out, thrice.out)
    assert np.array_equal(once.lse, thrice.lse)


@pytest.mark.conformance
@pytest.mark.parametrize("path", PORTABLE_PATHS)
def test_dot_products_beyond_what_f16_holds(device: Device, path: str):
    """Up to 1.8e9 on either side: finite, and the largest wins."""
    case = Case(1, 2, 4, dtype="f16")
    for low, high in ((-60000.0, -59000.0), (-30000.0, 30000.0)):
        inputs = Inputs.of(case, np.random.default_rng(0))
        inputs.query[:], inputs.key[:] = (30000.0, 0, 0, 0), 0
        inputs.key[0, 0, :, 0], inputs.value[0, 0] = (low, high), [[1], [2]]
        assert np.array_equal(solve(device, path, case, inputs).out, np.full((1, 1, 1, 4), 2.0)), (path, low, high)


# ---- path by path


@pytest.mark.conformance(mask=["u8 BS"])
@pytest.mark.parametrize("path", ["unfused", "gemm"])
@pytest.mark.parametrize("mask", ["", "f32 BHS", "u8 BS", "u32 HS", "f16 n"])
def test_rounds_of_heads(device: Device, rng, monkeypatch, path: str, mask: str):
    """Memory for the scores of 4 heads: whole KV heads a round, or a part of one."""
    monkeypatch.setattr(matrices, "_BUDGET", 80 * 96 * 4 * 4)
    for ratio, Hkv in ((2, 3), (6, 1)):
        case = Case(67, 90, 8, B=2, Hkv=Hkv, ratio=ratio, mask=mask, is_causal=not mask)
        check(device, path, case, Inputs.of(case, rng))


@pytest.mark.conformance
@pytest.mark.parametrize("path", ["unfused", "gemm"])
def test_rounds_of_heads_where_a_binding_is_small(devices, rng, path: str):
    case = Case(200, 300, 8, B=2, Hkv=2, ratio=3)
    check(devices["small_binding"], path, case, Inputs.of(case, rng))


@pytest.mark.parametrize("path", ["unfused", "gemm"])
def test_scores_that_no_binding_holds_are_refused_with_the_numbers(devices, path: str):
    problem = problem_of(Case(600, 700, 8))
    missing = PATHS[path].unsupported(devices["small_binding"].profile, problem)
    assert missing, path
    assert str(1 << 20) in missing
    need = {"unfused": 600 * 700, "gemm": 608 * 704}[path] * 4
    assert str(need) in missing or path == "gemm", missing
    assert PATHS[path].unsupported(replace(devices["small_binding"].profile, max_binding=2 << 20), problem) is None


def test_rounds_cover_all_planes(device: Device):
    for ratio, kv_heads, batch in ((1, 5, 3), (3, 2, 2), (8, 1, 2), (4, 3, 1)):
        problem = problem_of(Case(10, 10, 8, B=batch, Hkv=kv_heads, ratio=ratio))
        for most in (1, 2, 3, 5, 7, 100):
            sizes = Matrices(16, 16)
            parts = rounds(replace(device.profile, max_binding=sizes.plane_bytes * most), problem, sizes)
            assert [first for first, _ in parts] == [sum(n for _, n in parts[:i]) for i in range(len(parts))]
            assert sum(n for _, n in parts) == batch * kv_heads * ratio
            assert all(n <= most for _, n in parts)
            for first, n in parts:
                assert first // ratio + -(-n // ratio) - 1 == (first + n - 1) // ratio, "a round touches more KV heads than its memory is for"


def test_unfused_takes_three_dispatches_and_gemm_seven(device: Device):
    def dispatches(path: str, **features: object) -> list[str]:
        case = Case(5, 9, 8, **features)
        tensors = [rows(device, np.zeros((1, 1, n, 8), np.float32), "bhsd") for n in (5, 9, 9, 5)]
        recording = Recording(device)
        operands = Operands(*tensors, mask=device.empty((9,)), mask_strides=(0, 0, 0, 1), lse=device.empty((5,)))
        PATHS[path].record(recording, problem_of(case), operands)
        return [d.kernel.source.name.removeprefix("attention/") for d in recording]

    assert dispatches("unfused") == ["qk_div_mask", "softmax", "qkv"]
    outer = ["xgemm_batched", "softmax", "transpose", "xgemm_batched", "transpose_output"]
    assert dispatches("gemm") == ["rearrange_qkv", *outer]
    assert dispatches("gemm", mask="f32 n") == ["rearrange_qkv", "rearrange_mask", *outer]


TILES = (*gemm._WIDE, *gemm._STAGED, gemm._SOFTWARE)
_SOME = (TILES[0], TILES[1], TILES[3], gemm.tile(32, 64, 4, 8, 2, 4, "01"), gemm._STAGED[0], gemm._STAGED[1])


@pytest.mark.parametrize("shape", [pytest.param(s, marks=() if s in _SOME else pytest.mark.slow, id="-".join(map(str, dataclasses.astuple(s)))) for s in TILES])
def test_gemm_tiles(device: Device, rng, shape: gemm.GemmShape):
    """Every tile of the search list, direct and staged, for both products."""
    case = Case(130, 150, 24, 40, ratio=2, is_causal=True, window_size=(70, 0))
    check(device, "gemm", case, Inputs.of(case, rng), gemm.GemmShapes(shape, shape), tile=shape)


def test_gemm_shapes_are_valid_where_they_divide_and_fit(device: Device):
    profile, wide = device.profile, len(gemm._WIDE)
    everything = gemm.candidates(profile, 128, 128, 64)
    assert set(everything) == {*gemm._WIDE, *gemm._STAGED}
    assert wide == len(set(gemm._WIDE)) == 37
    assert all(s.valid(profile, 128, 128, 64) for s in everything)
    assert not any(s.valid(profile, 120, 128, 64) for s in everything if s.MWG == 16)
    assert gemm.candidates(profile, 16, 16, 4) == [gemm._WIDE[0]]
    assert gemm.candidates(profile, 16, 16, 6) == []
    small = replace(profile, max_invocations=64, workgroup_memory=4096)
    assert all(s.workgroup <= 64 and s.workgroup_bytes <= 4096 for s in gemm.candidates(small, 128, 128, 64))
    assert not replace(gemm._WIDE[0], VWM=3).valid(profile, 128, 128, 64)
    assert not replace(gemm._WIDE[0], SA=1).valid(profile, 128, 128, 64)


def test_exchanging_a_gemm_shape_twice_changes_nothing():
    for shape in TILES:
        assert shape.exchanged().exchanged() == shape
        assert (shape.exchanged().MWG, shape.exchanged().VWN, shape.exchanged().MDIMA) == (shape.NWG, shape.VWM, shape.NDIMB)


def test_default_shapes_follow_the_sizes(devices):
    profile = devices["gpu_shape"].profile

    def tiles(**sizes: int) -> tuple[tuple[int, int], tuple[int, int]]:
        shapes = gemm.choose_gemm(profile, problem_of(Case(**sizes)))
        return (shapes.scores.MWG, shapes.scores.NWG), (shapes.outputs.MWG, shapes.outputs.NWG)

    assert tiles(S=513, T=640, D=128) == ((64, 128), (64, 128))
    assert tiles(S=513, T=640, D=64) == ((64, 128), (64, 64))
    assert tiles(S=4, T=640, D=64) == ((16, 16), (16, 16))
    assert tiles(S=64, T=60, D=8) == ((64, 64), (16, 16))
    assert gemm.aligned(1) == 16
    assert gemm.aligned(33) == 64
    assert gemm.aligned(65) == 128
    assert gemm.aligned(513) == 640


def test_a_cpu_with_short_vectors_gets_short_kernels(devices):
    """SwiftShader compiles 8 rows by 4 keys for minutes."""
    for D in (4, 16, 64, 80, 128, 256):
        for S in (1, 16, 100, 1000):
            for subgroup in (0, 4, 8, 16):
                profile = replace(devices["software"].profile, subgroup_size=subgroup)
                for shape in flash_candidates(profile, problem_of(Case(S, 100, D))):
                    assert shape.rows * shape.keys <= (64 if subgroup > 4 else 16), (D, S, subgroup, shape)


def test_unfused_computes_no_more_rows_than_there_are(device: Device):
    assert [unfused.choose_unfused(device.profile, problem_of(Case(S, 9, 8))).rows for S in (1, 2, 3, 4, 5, 100)] == [1, 2, 3, 4, 4, 4]
