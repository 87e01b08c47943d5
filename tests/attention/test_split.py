"""Attention of recorded steps over a cache: `attention/split.wgsl` and `combine.wgsl` against the reference."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from tests.helpers import assert_close, assert_untouched, dirty_workgroup_memory, poison, split_canary, with_canary
from wgattn import reference
from wgattn.attention import split
from wgattn.attention.kv_cache import KVCache
from wgattn.attention.problem import Operands, Problem, Rows
from wgattn.attention.split import SplitShape, choose_split, regimes
from wgattn.gpu import Device, Recording, StepState, Tensor, power_of_two

MAIN_VARIANTS = ["software", "gpu_shape"]
OTHER_VARIANTS = ["gpu_shape_no_subgroup", "gpu_shape_32_lanes", "checked", "small_binding"]
VARIANTS = MAIN_VARIANTS + OTHER_VARIANTS
DIMS = [4, 8, 40, 64, 80, 128, 256]
RATIOS = [1, 3, 7, 8]
FLOATS = {"f32": np.float32, "f16": np.float16}
LENGTHS = [1, 7, 31, 32, 33, 255, 256, 257, 1000]


def problem_of(heads: int, kv_heads: int, dim: int, *, tokens: int, length: int, scale: float | None = None) -> Problem:
    """Causal attention of a recorded step of up to `tokens` tokens that see up to `length` keys."""
    return Problem(1, heads, kv_heads, tokens, length, dim, dim, dim**-0.5 if scale is None else scale, right=0, lengths="step")


def operands_of(cache: KVCache, query: Tensor, out: Tensor, p: Problem, step: Any) -> Operands:
    """query and out: (tokens, heads, dim) float32, of any shape with those elements in that order."""
    rows = Rows(query, 0, p.head_dim, p.num_heads * p.head_dim)
    return Operands(rows, cache.rows(cache.keys), cache.rows(cache.values), replace(rows, tensor=out), step=step)


@dataclass
class Step:
    """A recording of attention for up to `tokens` tokens, over a cache of `capacity` positions."""

    device: Device
    heads: int
    kv_heads: int
    dim: int
    tokens: int
    capacity: int
    dtype: str = "f32"
    length: int = 1 << 20
    scale: float | None = None

    def __post_init__(self) -> None:
        self.cache = KVCache(self.device, self.kv_heads, self.dim, self.capacity, self.dtype)
        problem = problem_of(self.heads, self.kv_heads, self.dim, tokens=self.tokens, length=self.length, scale=self.scale)
        self.split = choose_split(self.device.profile, problem)
        self.problem = replace(problem, kv_dtype=self.dtype, keys=min(self.length, self.capacity))
        self.scratch = split.scratch(self.device, self.problem, self.split)
        self.state = StepState(self.device, self.tokens)
        self.shape = (self.tokens, self.heads, self.dim)
        self.query, self.out = with_canary(self.device, poison(self.shape)), with_canary(self.device, poison(self.shape))
        self.recording = Recording(self.device)
        operands = operands_of(self.cache, self.query, self.out, self.problem, self.state.step)
        split.record(self.recording, self.problem, operands, self.split, self.scratch)

    def replay(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, position: int, **case: Any) -> np.ndarray:
        """out (count, heads, dim) for q (count, heads, dim) and k, v (kv_heads, position + count, dim); everything else is poisoned first."""
        count = len(q)
        assert k.shape == v.shape == (self.kv_heads, position + count, self.dim)
        for store, array in ((self.cache.keys, k), (self.cache.values, v)):
            padded = poison(store.shape, store.dtype)
            padded[..., : position + count, :] = 0
            padded[..., : position + count, : self.dim] = array
            store.write(padded)
        query = poison(self.shape)
        query[:count] = q
        for tensor, array in ((self.query, query), (self.out, poison(self.shape))):
            tensor.write(np.concatenate([array.reshape(-1), poison((64,))]))
        for scratch in self.scratch.values():
            scratch.write(poison(scratch.shape))
        dirty_workgroup_memory(self.device)
        self.state.write(position, [0] * count)
        self.recording.replay()
        out, canary = split_canary(self.out, self.shape)
        assert_untouched(canary, where="beyond the end", **case)
        assert_untouched(out[count:], where="tokens beyond the step's count", **case)
        return out[:count]


def expected(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float | None = None) -> np.ndarray:
    """(count, heads, dim): the reference on arrays shaped as those of `Step.replay`."""
    out, _ = reference.attention(q.swapaxes(0, 1)[None], k[None], v[None], is_causal=True, scale=scale)
    return out[0].swapaxes(0, 1)


def check(step: Step, rng: np.random.Generator, length: int, count: int) -> None:
    """Random numbers; the first of `count` tokens sees `length` keys."""
    total = length - 1 + count
    q = rng.standard_normal((count, step.heads, step.dim)).astype(np.float32)
    k, v = (rng.standard_normal((step.kv_heads, total, step.dim)).astype(np.float32) for _ in range(2))
    case = {"step": step, "shape": step.split, "length": length, "count": count, "device": step.device.profile}
    stored = [a.astype(step.cache.keys.dtype) for a in (k, v)]
    out = step.replay(q, *stored, length - 1, **case)
    assert_close(out, expected(q, *stored, step.scale), max_error=2e-5, max_nmse=1e-10, **case)
    if step.dtype == "f16":
        assert_close(out, expected(q, k, v, step.scale), max_error=2e-2, max_nmse=5e-4, what="against keys and values before rounding", **case)


def geometry(ratio: int) -> tuple[int, int]:
    """(heads, KV heads): several KV heads where that is cheap."""
    return (ratio, 1) if ratio > 3 else (2 * ratio, 2)


PAIRS = [(dim, ratio, ("f32", "f16")[(4 * i + j) // 2 % 2]) for i, dim in enumerate(DIMS) for j, ratio in enumerate(RATIOS)]
# (head dim, query heads a KV head, cache) of each variant. A case is a kernel, and those of many heads a workgroup or channels a lane take
# seconds to compile in software: the rest of the pairs is slow.
GRID = {
    "software": [pair for pair in PAIRS if pair[0] < 128 or pair[1] in (1, 8)],
    "gpu_shape": [pair for n, pair in enumerate(PAIRS) if (n // 4 + n % 4) % 2 == 0 and pair[:2] not in ((40, 7), (64, 8))],
    "gpu_shape_no_subgroup": [(4, 1, "f16"), (8, 8, "f32"), (40, 3, "f16"), (64, 7, "f16")],
    "gpu_shape_32_lanes": [(4, 3, "f16"), (80, 1, "f32"), (128, 3, "f16"), (256, 3, "f32")],
    "checked": [(8, 7, "f16"), (40, 1, "f32"), (64, 3, "f32")],
    "small_binding": [(8, 3, "f32"), (128, 1, "f16")],
}
CASES = [(variant, *case) for variant in VARIANTS for case in GRID[variant]]
CASES += [pytest.param(variant, *pair, marks=pytest.mark.slow) for variant in VARIANTS for pair in PAIRS if pair not in GRID[variant]]


@pytest.mark.conformance(variant=["gpu_shape_32_lanes"], dim=[80])
@pytest.mark.parametrize(("variant", "dim", "ratio", "dtype"), CASES)
def test_steps_over_caches(devices, rng, variant, dim, ratio, dtype):
    """One recording for each number of tokens serves all lengths."""
    heads = (ratio, 1) if variant == "small_binding" else geometry(ratio)
    for tokens in (1, 2, 5):
        step = Step(devices[variant], *heads, dim, tokens, 1004, dtype)
        for i, length in enumerate(LENGTHS):
            check(step, rng, length, tokens if i % 2 == 0 else rng.integers(1, tokens + 1))


@pytest.mark.conformance(variant=["gpu_shape"], dtype=["f16"])
@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("variant", MAIN_VARIANTS)
def test_head_dims_that_are_no_multiple_of_4(devices, rng, variant, dtype):
    for dim in (1, 6):
        for tokens in (1, 3):
            step = Step(devices[variant], 3, 3, dim, tokens, 300, dtype)
            for length in (1, 9, 290):
                check(step, rng, length, tokens)


@pytest.mark.conformance(variant=["gpu_shape"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_recordings_for_short_lengths(devices, rng, variant):
    """What decides the shape is the length recorded for: below a regime's end there is one split."""
    for length in {min(256, regime) for regime in regimes(devices[variant].profile)}:
        step = Step(devices[variant], 6, 2, 8, 2, 300, length=length)
        assert step.split.splits == 1
        for first in (1, 33, length - 1):
            check(step, rng, first, 2)


def test_gpu_shapes_split_the_keys(devices):
    """Else the cases above would not reach combine.wgsl."""
    for variant in ("gpu_shape", "gpu_shape_no_subgroup", "gpu_shape_32_lanes"):
        step = Step(devices[variant], 6, 2, 8, 1, 300)
        assert step.split.splits > 1
        assert [d.label for d in step.recording] == ["attention", "attention combine"]
    assert len(Step(devices["software"], 6, 2, 8, 1, 300).recording) == 1


@pytest.mark.conformance(variant=["gpu_shape"], scale=[-0.5])
@pytest.mark.parametrize("scale", [0.0, 1.0, -0.5, 0.125])
@pytest.mark.parametrize("variant", MAIN_VARIANTS)
def test_the_scale_may_be_given(devices, rng, variant, scale):
    check(Step(devices[variant], 6, 2, 8, 2, 300, scale=scale), rng, 270, 2)


# ---- inputs whose outcome is known


@pytest.mark.conformance(variant=["gpu_shape"], dtype=["f32"])
@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_query_of_zero_gives_the_mean_of_the_values(devices, rng, variant, dtype):
    step = Step(devices[variant], 6, 2, 8, 2, 1004, dtype)
    for length in (1, 2, 33, 257, 1000):
        total = length + 1
        k, v = (rng.standard_normal((2, total, 8)).astype(step.cache.keys.dtype) for _ in range(2))
        out = step.replay(np.zeros((2, 6, 8), np.float32), k, v, length - 1)
        for token in range(2):
            mean = v[:, : length + token].astype(np.float64).mean(1)
            assert_close(out[token], np.repeat(mean, 3, axis=0), max_error=2e-6, variant=variant, length=length, token=token)


@pytest.mark.conformance(variant=["gpu_shape"], heads=[7])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (7, 1), (8, 2)])
@pytest.mark.parametrize("variant", MAIN_VARIANTS)
def test_each_head_reads_its_kv_head(devices, rng, variant, heads, kv_heads):
    """Values that only tell the KV head come out as they went in."""
    step = Step(devices[variant], heads, kv_heads, 8, 1, 300)
    for length in (1, 40, 299):
        q = rng.standard_normal((1, heads, 8)).astype(np.float32)
        k = rng.standard_normal((kv_heads, length, 8)).astype(np.float32)
        v = np.broadcast_to((np.arange(kv_heads, dtype=np.float32) + 1)[:, None, None], k.shape)
        out = step.replay(q, k, v, length - 1)
        wanted = np.broadcast_to(np.repeat(np.arange(kv_heads) + 1, heads // kv_heads)[None, :, None], out.shape)
        assert_close(out, wanted, max_error=1e-5, variant=variant, heads=(heads, kv_heads), length=length)
        np.testing.assert_array_equal(np.rint(out), wanted)


@pytest.mark.conformance(variant=["gpu_shape"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_token_sees_itself_and_what_came_before(devices, variant):
    """One key outweighs all others: the value tells which it was."""
    step = Step(devices[variant], 6, 2, 8, 5, 300, scale=1.0)
    for position in (0, 30, 260):
        total = position + 5
        k = np.zeros((2, total, 8), np.float32)
        k[:, :, 0] = np.arange(total)  # the last key that is seen wins
        v = np.broadcast_to(np.arange(total, dtype=np.float32)[None, :, None], k.shape)
        q = np.zeros((5, 6, 8), np.float32)
        q[:, :, 0] = 100
        out = step.replay(q, k, v, position)
        np.testing.assert_array_equal(np.rint(out), np.broadcast_to(position + np.arange(5)[:, None, None], out.shape), err_msg=f"{variant} {position}")


@pytest.mark.conformance(variant=["gpu_shape"], dtype=["f16"])
@pytest.mark.parametrize("logit", [-60000.0, 60000.0])
@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_scores_far_from_zero(devices, rng, variant, dtype, logit):
    """Softmax depends on differences only: with every score at -60,000 or 60,000 the mean is as before, and a key 20 above takes all."""
    step = Step(devices[variant], 6, 2, 8, 1, 300, dtype, scale=1.0)
    for length in (1, 33, 299):
        q, k = np.zeros((1, 6, 8), np.float32), np.zeros((2, length, 8), step.cache.keys.dtype)
        q[..., 0], k[..., 0] = 300, logit / 300
        v = rng.standard_normal((2, length, 8)).astype(step.cache.keys.dtype)
        out = step.replay(q, k, v, length - 1)
        case = {"variant": variant, "dtype": dtype, "logit": logit, "length": length}
        assert_close(out[0], np.repeat(v.astype(np.float64).mean(1), 3, axis=0), max_error=2e-5, **case)
        q[..., 1], k[:, length // 2, 1] = 20, 1
        out = step.replay(q, k, v, length - 1)
        assert_close(out[0], np.repeat(v[:, length // 2].astype(np.float64), 3, axis=0), max_error=1e-5, **case)


@pytest.mark.conformance(variant=["gpu_shape"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_scores_that_fall_and_rise(devices, rng, variant):
    """Scores in steps of 10 up and down: the running maximum must carry over between rounds, teams and splits."""
    step = Step(devices[variant], 6, 2, 8, 1, 1004, scale=1.0)
    for length in (33, 300, 1000):
        q, k = np.zeros((1, 6, 8), np.float32), np.zeros((2, length, 8), np.float32)
        q[..., 0] = 1
        for scores in (10 * np.arange(length), -10 * np.arange(length), 10 * rng.integers(-50, 50, length)):
            k[..., 0] = scores
            v = rng.standard_normal((2, length, 8)).astype(np.float32)
            assert_close(step.replay(q, k, v, length - 1), expected(q, k, v, 1.0), max_error=2e-3, variant=variant, length=length, scores=scores[:4])


# ---- several layers, many workgroups, the choice of shape


@pytest.mark.parametrize("variant", MAIN_VARIANTS)
def test_caches_of_several_layers_in_one_recording(devices, rng, variant):
    """Scratch memory is shared; the dispatches of a recording run in order."""
    device = devices[variant]
    problem = problem_of(6, 2, 8, tokens=1, length=1 << 20)
    shape = choose_split(device.profile, problem)
    scratch = split.scratch(device, problem, shape)
    state, recording = StepState(device, 1), Recording(device)
    q = rng.standard_normal((3, 1, 6, 8)).astype(np.float32)
    k, v = rng.standard_normal((2, 3, 2, 300, 8)).astype(np.float32)
    outs = []
    for layer, dtype in enumerate(("f32", "f16", "f32")):
        cache = KVCache(device, 2, 8, 300, dtype)
        cache.keys.write(k[layer].reshape(cache.keys.shape))
        cache.values.write(v[layer].reshape(cache.values.shape))
        outs.append(device.tensor(poison((1, 6, 8))))
        p = replace(problem, kv_dtype=dtype, keys=300)
        split.record(recording, p, operands_of(cache, device.tensor(q[layer]), outs[-1], p, state.step), shape, scratch)
    state.write(299, [0])
    recording.replay()
    for layer, out in enumerate(outs):
        rounded = [(a[layer].astype(np.float16) if layer == 1 else a[layer]) for a in (k, v)]
        assert_close(out.numpy(), expected(q[layer], *rounded), max_error=2e-5, layer=layer, variant=variant)


@pytest.mark.parametrize(("limit", "heads"), [(1, 1), (3, 9), (5, 21), (5, 24)])
def test_more_workgroups_than_a_dimension_holds(devices, rng, limit, heads):
    """A made-up limit on the grid; the surplus workgroups write nothing."""
    device = Device()
    device.profile = replace(devices["software"].profile, max_workgroups=limit)
    check(Step(device, heads, heads, 8, 1, 40), rng, 35, 1)


FORCED = {  # lanes of a key, keys at a time, workgroup, splits
    "one lane": (1, 1, 16, 1),
    "two keys": (2, 2, 16, 3),
    "two keys of four lanes": (4, 2, 16, 1),
    "four keys": (4, 4, 32, 1),
    "four keys, split": (4, 4, 8, 5),
    "one key of eight lanes": (8, 1, 16, 2),
    "two keys of eight lanes": (8, 2, 32, 1),
    "eight keys": (8, 8, 16, 2),
}
DIMS_FORCED = [(64, 64, "f16"), (40, 24, "f16"), (24, 20, "f16"), (20, 40, "f32"), (9, 6, "f32"), (6, 33, "f16")]


@pytest.mark.conformance(name=["four keys, split"])
@pytest.mark.parametrize("name", FORCED)
def test_shapes_that_no_device_here_would_choose(devices, rng, name):
    """Every way to spread keys and channels over lanes, whole rows of 16 bytes or not; ALiBi tells keys and heads apart."""
    device, (_, keys, workgroup, splits) = devices["gpu_shape"], FORCED[name]
    subgroup = device.profile.subgroup_size or 1
    for dim, value_dim, kv_dtype in DIMS_FORCED:
        lanes = min(FORCED[name][0], subgroup, power_of_two(-(-min(dim, value_dim) // 4)))
        for group, heads, length in ((1, 2, 1), (3, 6, 77), (1, 3, 130)):
            shape = SplitShape(group, lanes, min(keys, lanes), max(workgroup, subgroup), splits, subgroup)
            q = rng.standard_normal((2, heads, 1, dim)).astype(np.float32)
            k, v = (rng.standard_normal((2, heads // 3 or 1, length, d)).astype(FLOATS[kv_dtype]) for d in (dim, value_dim))
            slopes = 2.0 ** -np.arange(1.0, heads + 1)
            problem = Problem(2, heads, k.shape[1], 1, length, dim, value_dim, dim**-0.5, kv_dtype=kv_dtype, alibi=True)
            out = with_canary(device, poison((2, heads, 1, value_dim)))
            operands = Operands(*(Rows.of(device.tensor(a), "bhsd") for a in (q, k, v)), out=Rows(out, heads * value_dim, value_dim, value_dim))
            operands.alibi_slopes = device.tensor(slopes.astype(np.float32))
            recording = Recording(device)
            scratch = split.scratch(device, problem, shape)
            for partial in scratch.values():
                partial.write(poison(partial.shape))
            dirty_workgroup_memory(device)
            split.record(recording, problem, operands, shape, scratch)
            recording.replay()
            got, canary = split_canary(out, (2, heads, 1, value_dim))
            case = {"shape": shape, "problem": problem}
            assert_untouched(canary, where="beyond the end", **case)
            assert_close(got, reference.attention(q, k, v, alibi_slopes=slopes)[0], max_error=2e-5, **case)


def test_the_shape_suits_the_kernel(device: Device):
    """For any device and problem: what the kernel takes for granted about its options."""

    geometries = [(4, 1, 1), (32, 32, 64), (32, 8, 128), (9, 3, 64), (7, 1, 256), (64, 8, 80), (71, 1, 64), (2, 2, 1024)]
    for kind in ("CPU", "DiscreteGPU"):
        for subgroup in (0, 4, 8, 16, 32, 64, 128):
            for invocations, memory in ((128, 16384), (256, 16384), (1024, 49152)):
                profile = replace(device.profile, kind=kind, subgroup_size=subgroup, max_invocations=invocations, workgroup_memory=memory)
                for heads, kv_heads, dim in geometries:
                    for tokens, length in ((1, 1), (1, 256), (1, 257), (5, 1 << 17), (64, 1000)):
                        shape = choose_split(profile, problem_of(heads, kv_heads, dim, tokens=tokens, length=length))
                        where = (shape, profile, heads, kv_heads, dim, tokens, length)
                        width = -(-dim // 4)
                        assert heads // kv_heads % shape.group == 0, where
                        assert shape.lanes & (shape.lanes - 1) == 0, where
                        assert shape.lanes <= width, where
                        assert shape.workgroup % shape.lanes == 0, where
                        assert shape.workgroup <= invocations, where
                        assert shape.merge_bytes(width, shape.heads_at_once(width, memory)) <= memory, where
                        assert 1 <= shape.splits <= 64, where
