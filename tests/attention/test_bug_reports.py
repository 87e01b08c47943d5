"""Bugs that others have had in public: one test for each that concerns attention, unless tests/README.md says which test has it already."""

import ast
import gc
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wgattn
from tests.helpers import assert_close, dirty_workgroup_memory, poison
from tests.watch import Calls, Guard
from wgattn import AttentionPipeline, reference
from wgattn.attention import tune, unfused
from wgattn.attention.paths import PATHS, PORTABLE_PATHS
from wgattn.attention.problem import OPEN, Operands, Problem, Rows
from wgattn.errors import ArgumentError, CapacityError, DeviceError, Unsupported
from wgattn.gpu import Device, DeviceProfile, Recording

F32, F16 = np.float32, np.float16
sdpa = wgattn.scaled_dot_product_attention

every_path = pytest.mark.parametrize("path", PORTABLE_PATHS)


def draw(rng: np.random.Generator, B: int, H: int, Hkv: int, S: int, T: int, D: int, dtype: type = F32) -> list[np.ndarray]:
    return [rng.standard_normal(shape).astype(dtype) for shape in ((B, H, S, D), (B, Hkv, T, D), (B, Hkv, T, D))]


def step(rng: np.random.Generator, pipe: AttentionPipeline, S: int) -> list[np.ndarray]:
    return [rng.standard_normal((pipe.batch, S, heads, pipe.head_dim)).astype(F32) for heads in (pipe.num_heads, pipe.num_kv_heads, pipe.num_kv_heads)]


def expected_of(q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> np.ndarray:
    """The reference in the pipeline's layout."""
    return reference.attention(*(a.swapaxes(1, 2) for a in (q, k, v)), **options)[0].swapaxes(1, 2)


def test_the_table_of_reports_names_tests_that_exist():
    """And every test of this file is in it."""
    tests = Path(__file__).parent.parent
    own = Path(__file__).relative_to(tests).as_posix()
    named, default = [], own
    for line in (tests / "README.md").read_text(encoding="utf-8").splitlines():
        if found := re.search(r"Without a file: in `([\w/]+\.py)`", line):
            default = found[1]
        named += [(file or default, name) for file, name in re.findall(r"`(?:([\w/]+\.py)::)?(test_\w+)`", line)]
    assert len(named) > 50
    defined = {
        file: {f.name for f in ast.parse((tests / file).read_text(encoding="utf-8")).body if isinstance(f, ast.FunctionDef)}
        for file in {file for file, _ in named}
    }
    for file, name in named:
        assert name in defined[file], f"there is no {name} in {file}"
    ours = {name for name in defined[own] if name.startswith("test_")} - {"test_the_table_of_reports_names_tests_that_exist"}
    assert ours <= {name for file, name in named if file == own}


# ---- alibaba/MNN


@pytest.mark.parametrize("path", ["auto", *PORTABLE_PATHS])
@pytest.mark.parametrize("kv_dtype", ["f32", "f16"])
def test_a_prompt_that_ends_within_the_last_group_of_rows(device, rng, monkeypatch, path, kv_dtype):
    """alibaba/MNN issue 4498: kernels that write keys in fours wrote behind a cache of 64 rows when 3 came after 61."""
    guard = Guard(monkeypatch)
    pipe = AttentionPipeline(4, 2, 8, capacity=64, growth=0, kv_dtype=kv_dtype, path=path, device=device)
    first, second = step(rng, pipe, 61), step(rng, pipe, 3)
    pipe.prefill(*first)
    out = pipe.prefill(*second)
    keys, values = (np.concatenate(pair, 1).astype(F16 if kv_dtype == "f16" else F32) for pair in zip(first[1:], second[1:], strict=True))
    assert_close(out, expected_of(second[0], keys, values, is_causal=True), max_error=2e-5, path=path, kv_dtype=kv_dtype)
    assert np.array_equal(pipe.cache.k(64), keys[0].swapaxes(0, 1))
    assert np.array_equal(pipe.cache.v(64), values[0].swapaxes(0, 1))
    guard.check(path=path)


@every_path
def test_long_prefill_without_a_mask(device, rng, path):
    """alibaba/MNN issue 4653: the kernel without a mask took other arguments than were set, and the error was only logged."""
    q, k, v = draw(rng, 1, 2, 2, 640, 640, 8)
    assert_close(sdpa(q, k, v, path=path), reference.attention(q, k, v)[0], max_error=2e-5, path=path)


def test_wrong_arguments_of_a_kernel_raise(device):
    """alibaba/MNN issue 4653: a buffer too many or too few, or a parameter, is an error and no dispatch."""
    kernel, recording = device.kernel("parts/pack_f16", WORKGROUP=64), Recording(device)
    buffers = {"values": device.empty((8,)), "packed": device.empty((8,), F16)}
    for wrong in ({**buffers, "mask": buffers["values"]}, {"values": buffers["values"]}):
        with pytest.raises(ArgumentError, match="buffers missing"):
            recording.add(kernel, (1,), wrong, {"count": 8})
    with pytest.raises(ArgumentError, match="parameters"):
        recording.add(kernel, (1,), buffers, {"count": 8, "scale": 1})
    assert len(recording) == 0


@pytest.mark.parametrize("kv_dtype", ["f32", "f16"])
def test_rollback_of_a_draft_keeps_single_rows(device, rng, kv_dtype):
    """alibaba/MNN issue 4737: 10 rows, 6 taken back, of these (1, 1) and (3, 2) kept: rows 5, 7, 8 become 4, 5, 6, in keys and values of all heads."""
    pipe = AttentionPipeline(4, 2, 8, capacity=13, growth=0, kv_dtype=kv_dtype, device=device)
    pipe.prefill(*step(rng, pipe, 10))
    before = pipe.cache.k(10), pipe.cache.v(10)
    pipe.keep([(0, 4), (4 + 1, 1), (4 + 3, 2)])
    assert pipe.length == 7
    for copy, rows in zip((pipe.cache.k(7), pipe.cache.v(7)), before, strict=True):
        assert np.array_equal(copy, rows[:, [0, 1, 2, 3, 5, 7, 8]])


def test_a_fork_outlives_its_origin(device, rng):
    """alibaba/MNN issue 4046: a clone that shared buffers crashed. Ours has its own, on the same device."""
    pipe = AttentionPipeline(4, 2, 8, capacity=8, growth=8, device=device)
    history, q = step(rng, pipe, 5), step(rng, pipe, 1)
    pipe.prefill(*history)
    twin = pipe.fork()
    assert twin.device is device
    assert not {id(pipe.cache.keys.buffer), id(pipe.cache.values.buffer)} & {id(twin.cache.keys.buffer), id(twin.cache.values.buffer)}
    del pipe
    gc.collect()
    keys, values = (np.concatenate(pair, 1) for pair in zip(history[1:], q[1:], strict=True))
    assert_close(twin.decode(*q), expected_of(q[0], keys, values), max_error=2e-5)


def test_a_fork_takes_no_tensors_of_another_device(device, devices, rng):
    """alibaba/MNN issue 4046: buffers of one context were used in another."""
    twin = AttentionPipeline(4, 2, 8, capacity=8, device=device).fork()
    q, k, v = step(rng, twin, 1)
    with pytest.raises(ArgumentError, match="another device"):
        twin.decode(q, devices["gpu_shape"].tensor(k), v)
    assert twin.length == 0


@pytest.mark.parametrize("path", tune.PATHS)
def test_tuned_prefill_with_few_kv_heads(device, rng, monkeypatch, tmp_path, path):
    """alibaba/MNN PR 4609: the tuner read values as if each query head had its own. 16 heads share 2, buffers are sized by the 2."""
    monkeypatch.setenv("WGATTN_CACHE_DIR", str(tmp_path))
    q, k, v = draw(rng, 1, 16, 2, 640, 640, 8)
    problem = wgattn.explain(q, k, v, is_causal=True, path=path).problem
    monkeypatch.setattr(tune, "rounded", lambda p: replace(p, queries=16, keys=16, right=OPEN))  # short work for the clock, the same heads
    flash_shapes, gemm_shapes = tune.flash_candidates, tune.gemm_candidates
    monkeypatch.setattr(tune, "flash_candidates", lambda *args: flash_shapes(*args)[:4])
    monkeypatch.setattr(tune, "gemm_candidates", lambda *args: gemm_shapes(*args)[:4])
    tune.tuned_shape(device, path, problem)
    guard = Guard(monkeypatch)
    assert_close(sdpa(q, k, v, is_causal=True, path=path), reference.attention(q, k, v, is_causal=True)[0], max_error=2e-5, path=path)
    guard.check(path=path)


@every_path
def test_a_prompt_of_the_same_length_again(device, rng, path):
    """alibaba/MNN issue 3623: after the second prompt of one length, steps read what the first had left. Replays give what stateless calls give."""
    pipe = AttentionPipeline(4, 2, 8, capacity=32, path=path, device=device)
    for _ in range(2):
        pipe.reset()
        given = [step(rng, pipe, 9), *(step(rng, pipe, 1) for _ in range(5))]
        found = [pipe.prefill(*given[0]), *(pipe.decode(*s) for s in given[1:])]
        for n, (out, (q, _, _)) in enumerate(zip(found, given, strict=True)):
            keys, values = (np.concatenate([s[i] for s in given[: n + 1]], 1) for i in (1, 2))
            eager = sdpa(q, keys, values, is_causal=True, layout="bshd", path=path)
            assert_close(out, eager, max_error=1e-6, path=path, step=n)
            assert_close(out, expected_of(q, keys, values, is_causal=True), max_error=2e-5, path=path, step=n)


@pytest.mark.parametrize("kv_dtype", ["f32", "f16"])
def test_a_step_appends_one_row_and_leaves_the_others(device, rng, kv_dtype):
    """alibaba/MNN PR 3511: the new row went to the wrong place."""
    pipe = AttentionPipeline(4, 2, 8, batch=2, capacity=12, kv_dtype=kv_dtype, device=device)
    pipe.prefill(*step(rng, pipe, 7))
    before = pipe.cache.k(12), pipe.cache.v(12)
    q, k, v = step(rng, pipe, 1)
    pipe.decode(q, k, v)
    for copy, rows, new in zip((pipe.cache.k(12), pipe.cache.v(12)), before, (k, v), strict=True):
        assert np.array_equal(copy[:, :, 7], new[:, 0].astype(F16 if kv_dtype == "f16" else F32))
        assert np.array_equal(copy[:, :, :7], rows[:, :, :7])
        assert not copy[:, :, 8:].any()


@every_path
def test_a_mask_for_the_new_keys_only(device, rng, path):
    """alibaba/MNN PR 3511: a mask narrower than the keys has a row stride of its own."""
    pipe = AttentionPipeline(4, 2, 8, capacity=12, path=path, device=device)
    history, new = step(rng, pipe, 7), step(rng, pipe, 4)
    pipe.prefill(*history)
    mask = rng.standard_normal((4, 4)).astype(F32)
    keys, values = (np.concatenate(pair, 1) for pair in zip(history[1:], new[1:], strict=True))
    whole = np.pad(mask, [(0, 0), (7, 0)])
    assert_close(pipe.prefill(*new, mask, is_causal=False), expected_of(new[0], keys, values, attn_mask=whole), max_error=2e-5, path=path)


def softmax_of(device: Device, scores: np.ndarray, lanes: int, repeats: int) -> list[np.ndarray]:
    """What the softmax of path "unfused", by so many lanes a row, gives each time: its weights of values that are the unit vectors of the keys."""
    rows, T = scores.shape
    query = np.zeros((1, 1, rows, 4), F32)
    query[0, 0, :, 0] = 1
    key = np.zeros((1, rows, T, 4), F32)
    key[0, :, :, 0] = scores
    weights = np.broadcast_to(np.stack([np.ones(T), np.arange(T), np.arange(T) % 2, np.arange(T) < T / 3], 1), (1, rows, T, 4)).astype(F32)
    problem = Problem(1, rows, rows, 1, T, 4, 4, 1.0)
    query = np.ascontiguousarray(query.swapaxes(1, 2))
    tensors = [device.tensor(a) for a in (query, key, weights)]
    out = device.tensor(poison((1, rows, 1, 4)))
    recording = Recording(device)
    shape = replace(unfused.choose_unfused(device.profile, problem), lanes=lanes)
    PATHS["unfused"].record(recording, problem, Operands(*(Rows.of(t, "bhsd") for t in (*tensors, out))), shape)
    found = []
    for _ in range(repeats):
        recording.replay()
        found.append(out.numpy()[0, :, 0])
    return found


def check_softmax(device: Device, rng: np.random.Generator, T: int, lanes: int, repeats: int) -> None:
    scores = (rng.standard_normal((3, T)) * 3).astype(F32)
    first, *others = softmax_of(device, scores, lanes, repeats)
    for other in others:
        assert np.array_equal(other, first), f"T={T}, lanes={lanes}"
    p = np.exp(scores - scores.max(1, keepdims=True).astype(np.float64))
    p /= p.sum(1, keepdims=True)
    values = np.stack([np.ones(T), np.arange(T), np.arange(T) % 2, np.arange(T) < T / 3], 1)
    assert_close(first, p @ values, max_error=2e-6 * (1 + values.max(0)), T=T, lanes=lanes)


@pytest.mark.parametrize("lanes", [64, 128, 256])
@pytest.mark.parametrize("variant", ["gpu_shape_no_subgroup", "gpu_shape"])
def test_softmax_rows_of_any_length_are_the_same_each_time(devices, rng, variant, lanes):
    """alibaba/MNN PR 3406: scratch memory was used for the sum before all had read the maximum."""
    for T in (1, 3, 4, 5, 63, 64, 65, 255, 256, 257, 511, 1000, 1025):
        dirty_workgroup_memory(devices[variant])
        check_softmax(devices[variant], rng, T, lanes, 50)


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [64, 128, 256])
def test_softmax_rows_of_every_length(devices, rng, lanes):
    """alibaba/MNN PR 3406, all lengths."""
    for T in range(1, 1026):
        check_softmax(devices["gpu_shape_no_subgroup"], rng, T, lanes, 5)


_SESSION = """
import sys
import numpy as np
import wgattn
def session(seed, prompt, steps):
    rng = np.random.default_rng(seed)
    pipe = wgattn.AttentionPipeline(4, 2, 8, capacity=64, kv_dtype="f16")
    def draw(S):
        return [rng.standard_normal((1, S, h, 8)).astype(np.float32) for h in (4, 2, 2)]
    return np.concatenate([pipe.prefill(*draw(prompt)), *(pipe.decode(*draw(1)) for _ in range(steps))], 1)
"""


def test_sessions_one_after_the_other_equal_that_of_a_fresh_process(tmp_path):
    """alibaba/MNN issue 3370: the first run was right, later ones were not."""
    space: dict[str, Any] = {}
    exec(_SESSION, space)
    short, long, other = (1, 7, 3), (2, 40, 5), (3, 2, 1)
    here = [space["session"](*s) for s in (short, long, short, other, long)]
    assert all(np.isfinite(out).all() for out in here)
    assert np.array_equal(here[0], here[2])
    code = _SESSION + "np.save(sys.argv[1], session(*map(int, sys.argv[2:])))"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "out.npy"), *map(str, long)], check=True, timeout=120)
    there = np.load(tmp_path / "out.npy")
    assert np.array_equal(here[1], there)
    assert np.array_equal(here[4], there)


def test_a_cache_of_f16_with_large_products(device, rng):
    """alibaba/MNN issue 3560: dot products of 115,200 with keys and values in f16."""
    pipe = AttentionPipeline(2, 1, 128, capacity=8, growth=8, kv_dtype="f16", device=device)
    q, k = (rng.choice([-30.0, 30.0], (1, 9, heads, 128)).astype(F32) for heads in (2, 1))
    k[0, 4, 0] = q[0, 8, 1]
    v = rng.standard_normal((1, 9, 1, 128)).astype(F32)
    out = np.concatenate([pipe.prefill(q[:, :8], k[:, :8], v[:, :8]), pipe.decode(q[:, 8:], k[:, 8:], v[:, 8:])], 1)
    assert_close(out, expected_of(q, k, v.astype(F16), is_causal=True), max_error=5e-3)


@every_path
def test_all_keys_count_where_there_are_more_than_queries(device, path):
    """alibaba/MNN PR 4898: without a cache, keys were cut to the number of queries. Values are powers of 4, and the sum of 16 of them is exact."""
    for S, T in ((16, 64), (1, 64), (16, 17)):
        q, k = np.zeros((1, 1, S, 4), F32), np.ones((1, 1, T, 4), F32)
        v = np.zeros((1, 1, T, 4), F32)
        for j in range(T):
            v[0, 0, j, j // 16] = 2.0 ** (j % 16)
        out = sdpa(q, k, v, path=path)
        sums = np.rint(out[0, 0].astype(np.float64) * T)
        assert np.array_equal(sums, np.broadcast_to(v[0, 0].sum(0), (S, 4))), f"S={S}, T={T}, path={path}"


def test_a_kernel_that_does_not_compile_is_a_typed_error_and_other_paths_go_on(rng, monkeypatch):
    """alibaba/MNN issues 3175 and 4802: a driver refused a kernel, and the program aborted or went on with nothing."""
    device = Device()
    assert device.profile
    q, k, v = draw(rng, 1, 2, 2, 20, 20, 8)
    create = type(device.backend).create_module
    refused = {"flash": "attention/flash", "gemm": "attention/xgemm_batched"}

    def refuse(self: Any, gpu: Any, text: str, label: str, checked: bool) -> Any:
        return create(self, gpu, "this is not WGSL" if label.startswith(tuple(refused.values())) else text, label, checked)

    monkeypatch.setattr(type(device.backend), "create_module", refuse)
    for path, kernel in (*refused.items(), *refused.items(), ("auto", "attention/")):
        with pytest.raises(DeviceError, match=f"could not compile .*{kernel}"):
            sdpa(q, k, v, path=path, device=device)
    for path in ("split", "unfused"):
        assert_close(sdpa(q, k, v, path=path, device=device), reference.attention(q, k, v)[0], max_error=2e-5, path=path)
    pipe = AttentionPipeline(2, 2, 8, capacity=32, device=device)
    with pytest.raises(DeviceError, match="could not compile"):
        pipe.prefill(*step(rng, pipe, 20))
    assert pipe.length == 0
    last = step(rng, pipe, 1)
    assert_close(pipe.decode(*last), last[2], max_error=1e-6)


# ---- WebGPU, Vulkan and other engines


@pytest.fixture
def splits(monkeypatch):
    """splits(n): path "split" cuts the keys into n parts, however few there are."""
    path = PATHS["split"]

    def force(n: int) -> None:
        monkeypatch.setitem(PATHS, "split", replace(path, shape=lambda profile, problem: replace(path.shape(profile, problem), splits=n)))

    return force


@pytest.mark.parametrize("number", [1, 2, 4, 7, 33, 64])
@pytest.mark.parametrize("variant", ["software", "gpu_shape", "gpu_shape_no_subgroup", "gpu_shape_32_lanes"])
def test_splits_without_a_key(devices, rng, monkeypatch, splits, variant, number):
    """ggml-org/llama.cpp PR 12776: a part without keys, or with none that is seen, made NaN of all. And PR 23040: any number of parts, any subgroup."""
    device, guard = devices[variant], Guard(monkeypatch)
    assert device.profile
    splits(number)
    for T, options in ((1, {}), (257, {}), (5, {"window_size": 2}), (64, {"key_lengths": np.array([3, 0])}), (40, {"attn_mask": np.arange(40) == 20})):
        q, k, v = draw(rng, 2, 4, 2, 1, T, 8)
        assert wgattn.explain(q, k, v, path="split", device=device).shape.splits == number
        out, lse = sdpa(q, k, v, path="split", return_lse=True, device=device, **options)
        expected, expected_lse = reference.attention(q, k, v, **options)
        case = {"variant": variant, "splits": number, "T": T, "options": list(options)}
        assert_close(out, expected, max_error=2e-5, **case)
        seen = np.isfinite(expected_lse)
        assert np.array_equal(np.isfinite(lse), seen), case
        assert_close(lse[seen], expected_lse[seen], max_error=2e-5, **case)
    guard.check(variant=variant)


@pytest.mark.parametrize("number", [1, 2, 7, 33, 64])
def test_every_number_of_splits_and_every_way_to_add_up_agree(devices, rng, splits, number):
    """ggml-org/llama.cpp PR 23040, microsoft/onnxruntime PR 23637, ggml-org/ggml PR 1619: a subgroup of 32, or a lane a split, was taken for granted."""
    q, k, v = draw(rng, 1, 4, 2, 2, 300, 32)
    plain = sdpa(q, k, v, path="split", device=devices["software"])
    splits(number)
    for variant in ("software", "gpu_shape", "gpu_shape_no_subgroup", "gpu_shape_32_lanes"):
        assert_close(sdpa(q, k, v, path="split", device=devices[variant]), plain, max_error=1e-6, variant=variant, splits=number)


@every_path
def test_query_rows_behind_the_last_are_not_written(device, rng, monkeypatch, path):
    """tracel-ai/burn issue 4694: rows that only fill the last tile see nothing, and must not be stored either."""
    guard = Guard(monkeypatch)
    for S in (1, 3, 5, 31, 33):
        q, k, v = draw(rng, 1, 3, 3, S, 8, 8)
        out, lse = sdpa(q, k, v, path=path, return_lse=True)
        assert_close(out, reference.attention(q, k, v)[0], max_error=2e-5, S=S, path=path)
        assert np.isfinite(lse).all()
    guard.check(path=path)


@every_path
@pytest.mark.parametrize("level", [-60000.0, -2e9])
def test_real_logits_below_any_finite_sentinel(device, rng, path, level):
    """flashinfer-ai/flashinfer PR 4401: keys of logits below the number that stood for "hidden" were dropped. Here beside keys that are hidden."""
    q, k = np.ones((1, 1, 1, 4), F32), np.full((1, 1, 6, 4), level / 4, F32)
    v = rng.standard_normal((1, 1, 6, 4)).astype(F32)
    out, lse = sdpa(q, k, v, np.array([True, False, True, True, False, False]), scale=1.0, path=path, return_lse=True)
    assert_close(out[0, 0, 0], v[0, 0, [0, 2, 3]].mean(0), max_error=1e-6, path=path, level=level)
    assert_close(lse, np.full((1, 1, 1), level + np.log(3)), max_error=abs(level) * 1e-6)


@every_path
def test_large_keys_of_one_sign(device, rng, path):
    """ggml-org/llama.cpp issue 7805, PR 8412: products of 102,400 before scaling, and a second key a little lower."""
    q, k = np.full((1, 1, 1, 64), 40, F32), np.full((1, 1, 2, 64), 40, F32)
    k[0, 0, 1] = 39.998
    v = rng.standard_normal((1, 1, 2, 64)).astype(F32)
    expected = reference.attention(q, k, v)[0]
    assert np.abs(expected - v[:, :, :1]).max() > 0.1, "the second key has weight"
    assert_close(sdpa(q, k, v, path=path), expected, max_error=0.02, path=path)  # 102,400 has 0.008 to the next f32, and there are 64 sums


@pytest.mark.parametrize("head_dim", [5, 6, 7])
@pytest.mark.parametrize("kv_dtype", ["f32", "f16"])
def test_padding_of_the_caches_rows_may_hold_anything(device, rng, head_dim, kv_dtype):
    """ggml-org/llama.cpp PR 23020: rows padded to what the kernel likes. 1e30 (or f16's largest) and NaN in the padding change nothing."""
    pipe = AttentionPipeline(4, 2, head_dim, capacity=16, kv_dtype=kv_dtype, device=device)
    pipe.prefill(*step(rng, pipe, 9))
    twin, q = pipe.fork(), step(rng, pipe, 1)
    clean = twin.decode(*q)
    for store in (pipe.cache.keys, pipe.cache.values):
        rows = store.numpy()
        rows[..., head_dim:] = np.where(np.arange(16)[:, None] % 2, np.nan, 1e30 if kv_dtype == "f32" else 65504)
        store.write(rows)
    assert np.array_equal(pipe.decode(*q), clean)


@every_path
@pytest.mark.parametrize("head_dim", [16, 112])
def test_head_dims_that_matrix_units_do_not_like(device, rng, path, head_dim):
    """ggml-org/llama.cpp PR 23020: what the larger grid of sizes leaves out."""
    q, k, v = draw(rng, 1, 2, 1, 9, 40, head_dim)
    assert_close(sdpa(q, k, v, is_causal=True, path=path), reference.attention(q, k, v, is_causal=True)[0], max_error=2e-5, path=path)


@every_path
@pytest.mark.parametrize(("H", "Hkv", "S"), [(1, 1, 65_540), (65_539, 1, 1), (65_540, 65_540, 1), (2, 2, 40_000)])
def test_more_rows_than_a_grid_is_long(device, path, H, Hkv, S):
    """ggml-org/llama.cpp PR 19965, pytorch/executorch PR 20583: 65,535 workgroups are all that one dimension holds."""
    q = np.zeros((1, H, S, 4), F32)
    q[..., 0] = np.arange(H * S).reshape(H, S) % 7
    k, v = np.zeros((1, Hkv, 2, 4), F32), np.zeros((1, Hkv, 2, 4), F32)
    k[0, :, 1, 0] = 1
    v[0, :, 1, 1] = 1 + np.arange(Hkv) % 5
    if path == "flash" and Hkv > device.profile.max_workgroups:
        with pytest.raises(Unsupported, match="65540 KV heads"):
            sdpa(q, k, v, path=path)
        path = "auto"
    if path in ("unfused", "gemm") and Hkv < H:
        path = "auto"  # a round of dispatches for each of these heads, which are too many for one and a prime number
    out = sdpa(q, k, v, scale=1.0, path=path)
    weight = 1 / (1 + np.exp(-q[..., 0].astype(np.float64)))
    assert_close(out[..., 1], weight * np.repeat(v[:, :, 1, 1], H // Hkv, 1)[..., None], max_error=1e-5, path=path)


@every_path
def test_small_bindings_give_the_same_bits(devices, device, rng, path):
    """mlc-ai/web-llm issue 209: a binding may be small. 1 MiB: scores are computed in rounds of heads."""
    small = devices["small_binding"]
    assert small.profile.max_binding == 1 << 20
    q, k, v = draw(rng, 1, 4, 2, 200, 400, 8)
    for options in ({}, {"is_causal": True, "softcap": 3.0}):
        assert np.array_equal(sdpa(q, k, v, path=path, device=small, **options), sdpa(q, k, v, path=path, device=device, **options))


def test_a_cache_in_small_bindings_gives_the_same_bits(devices, device, rng):
    """mlc-ai/web-llm issue 209: one binding for the keys of a layer, one for its values; what does not fit is refused with the numbers."""
    pipes = [AttentionPipeline(4, 2, 64, capacity=2048, device=d) for d in (device, devices["small_binding"])]
    for S in (70, 1, 1, 5):
        given = step(rng, pipes[0], S)
        first, second = ((p.decode if S == 1 else p.prefill)(*given) for p in pipes)
        assert np.array_equal(first, second)
    with pytest.raises(CapacityError, match=r"1048576|2048"):
        AttentionPipeline(4, 2, 64, capacity=2049, device=devices["small_binding"])


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_prefill_in_chunks(device, rng, chunk):
    """ggml-org/llama.cpp issue 27306: one dispatch must not run for seconds. Chunks of any size give the output and the cache of the whole."""
    T = 70
    pipe, whole = (AttentionPipeline(4, 2, 8, capacity=T, device=device) for _ in range(2))
    q, k, v = step(rng, pipe, T)
    expected = whole.prefill(q, k, v)
    out = [pipe.prefill(q[:, a : a + chunk], k[:, a : a + chunk], v[:, a : a + chunk]) for a in range(0, T, chunk)]
    assert_close(np.concatenate(out, 1), expected, max_error=2e-6, chunk=chunk)
    assert np.array_equal(pipe.cache.k(T), whole.cache.k(T))
    assert np.array_equal(pipe.cache.v(T), whole.cache.v(T))


@pytest.mark.parametrize("variant", ["software", "gpu_shape"])
def test_a_long_prompt_is_cut_into_short_submits(devices, rng, monkeypatch, variant):
    """ggml-org/llama.cpp issues 27306, 18523, 21724: a dispatch of seconds is ended by the driver. Here a device may do a million operations at a time."""
    device = devices[variant]
    q, k, v = (device.tensor(a) for a in draw(rng, 2, 6, 2, 150, 170, 8))  # 2 * 2 * 6 * 150 * 120 * 16 operations, 6.9 million
    options = {"attn_mask": device.tensor(rng.standard_normal((6, 150, 170)).astype(F32)), "is_causal": True, "window_size": 120, "return_lse": True}
    for path in ("flash", "split", "unfused", "gemm"):
        whole = [t.numpy() for t in sdpa(q, k, v, **options, path=path)]
        with monkeypatch.context() as patch:
            patch.setattr(DeviceProfile, "most_operations", 1_000_000)
            calls, made = Calls(device, patch), watch_recordings(patch)
            cut = sdpa(q, k, v, **options, path=path)
            (recording,) = made
            submits = recording.submits()
        assert calls["submit"] == len(submits) >= (7 if path in ("flash", "split") else 2), path
        assert [d for part in submits for d in part] == list(recording)
        for part in submits:
            assert sum(d.operations for d in part) <= 1e6 or sum(d.operations > 0 for d in part) == 1, (path, part)
        if path in ("flash", "split"):
            assert len(submits) <= len(recording) <= len(submits) + 2, "each dispatch has some of the queries; a rest may join the one before it"
            assert all(d.operations <= 1e6 for d in recording)
        for a, b in zip(cut, whole, strict=True):
            assert np.array_equal(a.numpy(), b), path


def test_a_long_prompt_of_a_pipeline_is_cut_too(device, rng, monkeypatch):
    """Behind a history; a step stays one submit however long the history is."""
    whole = AttentionPipeline(4, 2, 8, capacity=256, device=device)
    history, prompt, token = (step(rng, whole, n) for n in (50, 200, 1))
    whole.prefill(*history)
    pipe = whole.fork()
    expected = [whole.prefill(*prompt), whole.decode(*token)]
    with monkeypatch.context() as patch:
        patch.setattr(DeviceProfile, "most_operations", 1_000_000)
        tensors = [[device.tensor(a) for a in arrays] for arrays in (prompt, token)]
        calls, found = Calls(device, patch), []
        for call, given in zip((pipe.prefill, pipe.decode), tensors, strict=True):
            calls.clear()
            found.append(call(*given))
            assert (calls["submit"] == 1) == (call == pipe.decode)
            assert calls["submit"] >= 2 * 4 * 200 * 250 * 16 / 1e6 or call == pipe.decode
    for a, b in zip(found, expected, strict=True):
        assert np.array_equal(a.numpy(), b)


def watch_recordings(monkeypatch: pytest.MonkeyPatch) -> list[Recording]:
    """The recordings that are replayed from now on."""
    replayed, replay = [], Recording.replay

    def watch(self: Recording, *args: Any, **kwargs: Any) -> None:
        replayed.append(self)
        replay(self, *args, **kwargs)

    monkeypatch.setattr(Recording, "replay", watch)
    return replayed


@every_path
def test_one_tensor_in_several_places(device, rng, path):
    """ggml-org/llama.cpp PR 22266: a buffer bound twice where one of them is written. Ours is never both, whatever is passed."""
    x = rng.standard_normal((1, 2, 6, 8)).astype(F32)
    t = device.tensor(x)
    out = sdpa(t, t, t, is_causal=True, path=path)
    assert np.array_equal(out.numpy(), sdpa(x, x.copy(), x.copy(), is_causal=True, path=path))
    out = sdpa(out, out, t, path=path)
    assert np.array_equal(t.numpy(), x)
    o, lse = sdpa(t, t, t, path=path, return_lse=True)
    merged, merged_lse = wgattn.merge_state(o, lse, o, lse)
    assert_close(merged.numpy(), o.numpy(), max_error=1e-6)
    assert_close(merged_lse.numpy(), lse.numpy() + np.log(2), max_error=1e-6)


@every_path
@pytest.mark.parametrize("variant", ["gpu_shape", "gpu_shape_no_subgroup"])
def test_a_hundred_repeats_are_identical(devices, rng, variant, path):
    """microsoft/onnxruntime PR 23663, gfx-rs/wgpu issue 3181: a missing barrier shows now and then."""
    device = devices[variant]
    q, k, v = (device.tensor(a) for a in draw(rng, 1, 4, 2, 40, 150, 8))
    dirty_workgroup_memory(device)
    first = sdpa(q, k, v, is_causal=True, path=path).numpy()
    assert_close(first, reference.attention(q.numpy(), k.numpy(), v.numpy(), is_causal=True)[0], max_error=2e-5, path=path)
    for _ in range(100):
        assert np.array_equal(sdpa(q, k, v, is_causal=True, path=path).numpy(), first)


def test_the_length_of_the_history_counts_not_the_longest_prompt(device, rng):
    """microsoft/onnxruntime PR 31611: queries behind a history see it from where they stand, each in a batch of its own length."""
    q, k, v = draw(rng, 3, 4, 2, 4, 12, 8)
    lengths = np.array([12, 7, 4])
    for path in PORTABLE_PATHS:
        out = sdpa(q, k, v, is_causal=True, key_lengths=lengths, path=path)
        for b, n in enumerate(lengths):
            alone = reference.attention(q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n], is_causal=True)[0]
            assert_close(out[b : b + 1], alone, max_error=2e-5, path=path, length=int(n))
