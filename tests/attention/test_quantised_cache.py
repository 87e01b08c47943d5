"""KV caches in q8_0 and q4_0: what is stored is what GGUF's formats say, attention over it is attention over what it means, and nothing else is touched."""

import math
from typing import Any

import gguf
import numpy as np
import pytest

from tests.attention.test_pipeline import check_cuts
from tests.helpers import assert_close, nmse
from tests.watch import Calls, Guard
from wgattn import AttentionPipeline, reference
from wgattn.attention import tune
from wgattn.attention.kv_cache import KVCache
from wgattn.attention.kv_format import KV_FORMATS, kv_format
from wgattn.attention.paths import PATHS
from wgattn.attention.problem import Problem
from wgattn.errors import ArgumentError, CapacityError
from wgattn.gpu import Device

F32 = np.float32
KINDS = ["q8_0", "q4_0"]
MOST = {"q8_0": 127, "q4_0": 8}
"""What the farthest value of a block is divided by to give the scale."""
GATES = {"q8_0": 1e-4, "q4_0": 2.5e-2}
"""NMSE of attention against that over unrounded keys and values. The error of a value is uniform within a step, which is (the maximum of 32 values,
about 2.1 of their deviation) / 127 or / 8: 4.5 / 127^2 / 12 = 2.3e-5 of the variance, or 5.9e-3 (and as much again where q4_0 clips at 7). Of keys
it goes into scores, of values into outputs: twice that or thrice."""

every_kind = pytest.mark.parametrize("kind", KINDS)


def blocks_of(x: np.ndarray) -> np.ndarray:
    """(..., blocks, 32), zeros behind the last channel."""
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 32)]).reshape(*x.shape[:-1], -1, 32)


def open_values(given: np.ndarray, kind: str) -> np.ndarray:
    """Where the last bit of a division decides: values next to a tie of two codes, and all of a block whose scale is next to a tie of two f16."""
    x = blocks_of(np.asarray(given, np.float64)).clip(-65504 * MOST[kind], 65504 * MOST[kind])
    scale = np.abs(x).max(-1, keepdims=True) / MOST[kind]
    with np.errstate(invalid="ignore"):
        tie = np.abs(np.abs(x / scale) % 1 - 0.5) < 1e-4
    between = np.abs(scale / np.spacing(scale.astype(np.float16)).astype(np.float64) % 1 - 0.5) < 1e-3
    return tie | between


def assert_stored(held: np.ndarray, given: np.ndarray, kind: str, **case: Any) -> None:
    """What a cache gives back is `reference.kv_stored` of what it was given, but for the next code or scale where that is open."""
    expected = reference.kv_stored(given, kind)
    wrong, free = blocks_of(held != expected.astype(F32)), open_values(given, kind)
    assert not (wrong & ~free).any(), f"{(wrong & ~free).sum()} of {wrong.size} values stored wrongly: {case}"
    scale = np.abs(blocks_of(given)).max(-1, keepdims=True) / MOST[kind]
    assert (np.abs(blocks_of(held - expected)) <= 1.01 * scale)[wrong].all(), case


def words(rng: np.random.Generator, store: Any) -> np.ndarray:
    """Random codes and scales that are NaN: what no kernel may read, and each word of which can be told from what a kernel writes."""
    return rng.integers(0, 1 << 10, store.size).astype(np.uint32) * np.uint32(0x10001) | np.uint32(0x7C007C00 | 1)


def draw(rng: np.random.Generator, pipe: AttentionPipeline, S: int) -> list[np.ndarray]:
    """New q, k, v of S positions."""
    heads = (pipe.num_heads, pipe.num_kv_heads, pipe.num_kv_heads)
    return [rng.standard_normal((pipe.batch, S, n, pipe.head_dim)).astype(F32) for n in heads]


class History:
    """What a pipeline with a quantised cache ought to do: attention over what the cache should hold."""

    def __init__(self, rng: np.random.Generator, pipe: AttentionPipeline, **options: Any):
        self.rng, self.pipe, self.options, self.kind = rng, pipe, options, pipe.cache.dtype
        self.given = [np.zeros((pipe.batch, 0, pipe.num_kv_heads, pipe.head_dim), F32)] * 2

    def held(self) -> list[np.ndarray]:
        """Keys and values of the cache, (B, Hkv, length, D) float32."""
        p = self.pipe
        return [copy(p.length).reshape(p.batch, p.num_kv_heads, p.length, p.head_dim) for copy in (p.cache.k, p.cache.v)]

    def check(self, S: int, mask: np.ndarray | None = None, **case: Any) -> None:
        """Append S positions, one by `decode`, more by `prefill`; compare the output and what the cache holds."""
        q, k, v = draw(self.rng, self.pipe, S)
        out = self.pipe.decode(q, k, v) if S == 1 and mask is None else self.pipe.prefill(q, k, v, mask)
        self.given = [np.concatenate(pair, 1) for pair in zip(self.given, (k, v), strict=True)]
        self.check_state(**case)
        expected = reference.attention(q.swapaxes(1, 2), *self.held(), mask, is_causal=True, **self.options)[0].swapaxes(1, 2)
        assert_close(out, expected, max_error=2e-5, max_nmse=1e-9, S=S, length=self.pipe.length, kind=self.kind, **case)

    def check_state(self, **case: Any) -> None:
        assert self.pipe.length == self.given[0].shape[1], case
        for held, given in zip(self.held(), self.given, strict=True):
            assert_stored(held, given.swapaxes(1, 2), self.kind, **case)

    def keep(self, rows: Any) -> None:
        self.given = [a[:, rows] for a in self.given]


def pipeline(device: Device, kind: str, D: int = 64, heads: tuple[int, int] = (4, 2), **options: Any) -> AttentionPipeline:
    return AttentionPipeline(*heads, D, kv_dtype=kind, **{"capacity": 40, "growth": 0, "device": device, **options})


# ---- the formats


def hard_blocks(rng: np.random.Generator, count: int = 400) -> np.ndarray:
    """(n, 64): normal numbers of many sizes, zeros, one value, equals of both signs at the top, codes that are ties, scales that f16 holds as denormals."""
    x = rng.standard_normal((count, 64)) * 10.0 ** rng.uniform(-9, 4, (count, 1))
    x[0] = 0
    x[1] = 3.0
    x[2, 5], x[2, 40] = -7.0, 1e-3
    x[3] = np.tile([1.5, -1.5], 32)
    x[4] = np.tile([-1.5, 1.5], 32)
    x[5] = np.arange(64) - 31.5  # of steps of 1/2: ties
    x[6] = (np.arange(64) % 8) * 16 - 63.5
    x[7] = rng.integers(-127, 128, 64)
    x[8, :32], x[8, 32:] = 1e-6, 0
    for row in range(9, 41):  # the farthest twice, of both signs, at any two places
        a, b = rng.permutation(32)[:2]
        x[row, [a, b]] = [10, -10]
    return x.astype(F32)


@every_kind
def test_the_reference_is_that_of_gguf(rng, kind):
    """Byte for byte, whatever the package's own code makes of it."""
    x = np.concatenate([hard_blocks(rng), rng.standard_normal((3000, 64)).astype(F32)])
    raw = gguf.quants.quantize(x, gguf.GGMLQuantizationType[kind.upper()])
    wanted = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind.upper()])
    np.testing.assert_array_equal(reference.kv_stored(x, kind).astype(F32), wanted)


@pytest.mark.conformance
@every_kind
def test_a_cache_holds_what_gguf_would(device: Device, rng, kind):
    """Scales and codes, not only what they mean: as blocks of GGUF. (Denormals of f32 may count as zero, and are not tried.)"""
    x = hard_blocks(rng)
    pipe = pipeline(device, kind, heads=(1, 1), capacity=len(x))
    pipe.prefill(*(a[None, :, None] for a in (x, x, x[::-1])))
    raw = {"k": pipe.cache.keys, "v": pipe.cache.values}
    for name, given in (("k", x), ("v", x[::-1])):
        assert_stored(getattr(pipe.cache, name)(len(x))[0], given, kind, which=name)
        codes, scales = np.split(raw[name].numpy(), [pipe.cache.scales])
        bits = kv_format(kind).bits
        codes = codes.view(np.uint8)[: len(x) * 64 * bits // 8].reshape(-1, 32 * bits // 8)
        if bits == 4:
            eights = codes.reshape(-1, 4, 4)
            codes = np.concatenate([eights & 15, eights >> 4], axis=-1).reshape(-1, 32)
            codes = codes[:, :16] | codes[:, 16:] << 4
        stored = np.concatenate([scales.view(np.uint8)[: len(x) * 4].reshape(-1, 2), codes], axis=1).reshape(len(x), -1)
        wanted = gguf.quants.quantize(np.ascontiguousarray(given), gguf.GGMLQuantizationType[kind.upper()])
        zeros = (reference.kv_stored(given, kind) == 0).all(-1)  # a scale of 0 leaves the codes open, and so does its sign
        different = (stored != wanted).any(1) & ~zeros
        assert not (different & ~open_values(given, kind).any((1, 2))).any(), f"{different.sum()} of {different.size} rows are not those of gguf"


@every_kind
def test_ties(device: Device, kind):
    """Of scales that are powers of two, so that nothing is rounded before: q8_0 goes away from zero, q4_0 up. Scales between two f16 go to the even one."""
    factors = 2.0 ** np.array([0, 3, -3, -14, 10])
    x = np.zeros((len(factors), 32), F32)
    x[:, 0] = MOST[kind] if kind == "q8_0" else -MOST[kind]
    x[:, 1:] = (np.arange(31) - 14.5).clip(-8, 7.5)
    x *= factors[:, None]
    between = np.zeros((4, 32), F32)
    between[:, 0] = -MOST[kind] * (1 + np.array([1, 3, 5, 7]) * 2.0**-11)
    x = np.concatenate([x, between])
    pipe = pipeline(device, kind, D=32, heads=(1, 1))
    pipe.prefill(*(a[None, :, None] for a in (x, x, x)))
    np.testing.assert_array_equal(pipe.cache.k(len(x))[0], reference.kv_stored(x, kind).astype(F32))
    held = pipe.cache.v(len(x))[0] / np.concatenate([factors, np.ones(4)])[:, None]
    assert (held[:5, 16] == 1).all(), "1/2"
    assert (held[:5, 15] == (-1 if kind == "q8_0" else 0)).all(), "-1/2"
    np.testing.assert_array_equal(held[5:, 0] / -MOST[kind], 1 + np.array([0, 4, 4, 8]) * 2.0**-11)


@pytest.mark.conformance
@every_kind
def test_what_a_scale_cannot_reach_saturates(device: Device, kind):
    """Infinities too: nothing that is not finite enters the cache."""
    most = 65504.0 * MOST[kind]
    values = np.array([1e30, -1e30, np.inf, -np.inf, 2 * most, -2 * most, most, -most], F32)
    x = np.zeros((len(values), 32), F32)
    x[:, 3] = values
    pipe = pipeline(device, kind, D=32, heads=(1, 1))
    pipe.prefill(*(a[None, :, None] for a in (np.zeros_like(x), x, x)))
    for held in (pipe.cache.k(len(x))[0], pipe.cache.v(len(x))[0]):
        assert np.isfinite(held).all()
        assert (np.abs(held[:, 3]) >= 7 / 8 * most).all()
        assert (np.sign(held[:, 3]) == np.sign(values)).all()
        assert not np.delete(held, 3, axis=1).any()


@every_kind
@pytest.mark.parametrize(("heads", "dim", "capacity", "batch"), [(1, 32, 1, 1), (3, 64, 10, 2), (2, 80, 333, 1), (2, 5, 17, 1), (1, 128, 16, 3)])
def test_bytes_of_a_cache(device: Device, kind, heads, dim, capacity, batch):
    """32 codes and an f16 scale a block; rows have whole blocks and whole words of scales, heads a multiple of 16 positions."""
    cache, blocks = KVCache(device, heads, dim, capacity, kind, batch=batch), math.ceil(dim / 32)
    row = blocks * (32 if kind == "q8_0" else 16) + 2 * (blocks + blocks % 2)
    rows = batch * heads * math.ceil(capacity / 16) * 16
    assert cache.nbytes == 2 * rows * row == cache.keys.nbytes + cache.values.nbytes
    assert cache.capacity == capacity
    assert kv_format(kind).row_bytes(dim) == row
    assert cache.scales == rows * blocks * (8 if kind == "q8_0" else 4)
    assert cache.scales % 64 == 0, "scales can be bound by themselves"
    assert not cache.k(capacity).any()
    assert cache.k(capacity).shape[-3:] == (heads, capacity, dim)


@pytest.mark.parametrize(("given", "name"), [("q8_0", "q8_0"), ("Q8_0", "q8_0"), ("Q4_0", "q4_0"), ("q4_0", "q4_0"), ("F16", "f16"), ("f32", "f32")])
def test_names_in_any_case(device: Device, given, name):
    assert AttentionPipeline(2, 1, 32, kv_dtype=given, capacity=4, device=device).cache.dtype == KVCache(device, 1, 32, 4, given).dtype == name


def test_other_names_are_refused():
    for name in ("q8", "q8_1", "Q5_0", "q4_k", "int8", "", 8, None):
        with pytest.raises(ArgumentError, match="stored as f32, f16, q8_0 or q4_0, not"):
            kv_format(name)
    assert list(KV_FORMATS) == ["f32", "f16", *KINDS]


@every_kind
def test_a_cache_that_does_not_fit_says_so(devices, kind):
    fits = (1 << 20) // kv_format(kind).row_bytes(64) // 2 // 16 * 16
    small = devices["small_binding"]  # 1 MiB
    assert KVCache(small, 2, 64, fits, kind).keys.nbytes <= 1 << 20
    with pytest.raises(CapacityError, match=rf"A {kind} cache of {fits + 1} positions takes \d+ bytes.*\b{fits} positions"):
        KVCache(small, 2, 64, fits + 1, kind)


# ---- attention over it

@pytest.mark.conformance(D=[37])
@pytest.mark.parametrize(("kind", "D"), [("q8_0", 64), ("q8_0", 37), ("q8_0", 128), ("q4_0", 32), ("q4_0", 80), ("q4_0", 5)])
def test_prefill_and_decode(device: Device, rng, monkeypatch, kind, D):
    """Every path, with GQA and masks, in turn, also beyond the capacity, in a cache whose unused scales are NaN; nothing is written beyond its place."""
    for n, path in enumerate(["auto", *PATHS]):
        if path != "auto" and PATHS[path].unsupported(device.profile, Problem(1, 6, 2, 9, 40, D, D, 1.0, kv_dtype=kind)):
            continue
        with monkeypatch.context() as patch:
            guard = Guard(patch)
            options = ({}, {"window_size": 9, "softcap": 3.0})[n % 2]
            pipe = pipeline(device, kind, D, (6, 2), batch=1 + n % 2, capacity=17, growth=20, path=path, **options)
            history = History(rng, pipe, **options)
            for S in (1, 9, 1, 1, 7):
                history.check(S, path=path, D=D)
            history.check(3, rng.standard_normal((3, pipe.length + 3)).astype(F32), path=path, D=D)
            assert (pipe.capacity, pipe.generation) == (37, 1)
            guard.check(path=path, D=D, kind=kind)


@pytest.mark.parametrize("variant", ["software", "gpu_shape", "gpu_shape_no_subgroup", "gpu_shape_32_lanes", "checked", "small_binding"])
@every_kind
def test_shapes_of_all_kinds_of_devices(devices, rng, kind, variant):
    """Decoding before and behind the length from which keys are split."""
    for D, heads in ((64, (4, 2)), (20, (3, 1))):
        pipe = pipeline(devices[variant], kind, D, heads, capacity=300)
        history = History(rng, pipe)
        for S in (250, 1, 5, 1, 1, 30, 1):
            history.check(S, variant=variant, D=D)


@pytest.mark.conformance(kind=["q4_0"])
@every_kind
def test_against_attention_over_unrounded_keys_and_values(device: Device, rng, kind):
    for D, heads in ((64, (8, 2)), (128, (4, 4)), (80, (3, 1))):
        pipe = pipeline(device, kind, D, heads, capacity=200)
        q, k, v = draw(rng, pipe, 200)
        out = np.concatenate([pipe.prefill(q[:, :199], k[:, :199], v[:, :199]), pipe.decode(q[:, 199:], k[:, 199:], v[:, 199:])], 1)
        expected = reference.attention(*(a.swapaxes(1, 2) for a in (q, k, v)), is_causal=True)[0].swapaxes(1, 2)
        assert GATES[kind] / 20 < nmse(out, expected) < GATES[kind], D
        for held, given in ((pipe.cache.k(200), k), (pipe.cache.v(200), v)):
            assert GATES[kind] / 20 < nmse(held, given[0].swapaxes(0, 1)) < GATES[kind] / 2, D


@pytest.mark.conformance(D=[80], kind=["q8_0"])
@pytest.mark.parametrize("D", [64, 80, 37])
@every_kind
def test_a_step_writes_its_row_and_no_other_byte(device: Device, rng, kind, D):
    """One row of codes and scales for each sequence and KV head, the padding of its blocks included; every other word is as it was."""
    pipe = pipeline(device, kind, D, batch=2)
    codes, scales = (n // 4 for _, n in kv_format(kind).planes(1, D))
    pipe.prefill(*draw(rng, pipe, 6))
    for S in (1, 1, 5, 1):
        before = [store.numpy() for store in (pipe.cache.keys, pipe.cache.values)]
        if S == 1:
            noise = [words(rng, store) for store in (pipe.cache.keys, pipe.cache.values)]
            for store, array in zip((pipe.cache.keys, pipe.cache.values), noise, strict=True):
                store.write(array)
            before = noise
            pipe.decode(*draw(rng, pipe, 1))
        else:
            pipe.prefill(*draw(rng, pipe, S))
        for store, old in zip((pipe.cache.keys, pipe.cache.values), before, strict=True):
            rows = [np.split(a, [pipe.cache.scales]) for a in (store.numpy(), old)]
            for now, then, width in ((rows[0][0], rows[1][0], codes), (rows[0][1], rows[1][1], scales)):
                changed = (now != then).reshape(4, pipe.cache.room, width)
                assert changed[:, pipe.length - S : pipe.length].any(-1).all(), (kind, D, S)
                assert not np.delete(changed, np.s_[pipe.length - S : pipe.length], axis=1).any(), (kind, D, S)


@every_kind
def test_what_lies_behind_the_length_and_in_the_padding_may_be_anything(device: Device, rng, kind):
    """Scales of NaN behind the length for every path; codes of any value in the channels that fill up a block."""
    for path in PATHS:
        for D in (64, 37):
            if PATHS[path].unsupported(device.profile, Problem(1, 4, 2, 9, 40, D, D, 1.0, kv_dtype=kind)):
                continue
            pipe = pipeline(device, kind, D, path=path)
            for store in (pipe.cache.keys, pipe.cache.values):
                store.write(words(rng, store))
            history = History(rng, pipe)
            history.check(9, path=path, D=D)
            if D % 32:
                for store in (pipe.cache.keys, pipe.cache.values):
                    codes, rest = np.split(store.numpy(), [pipe.cache.scales])
                    filled = np.arange(64) >= D
                    if kind == "q4_0":  # of eight channels, 0..3 in the low halves of the bytes, 4..7 in the high
                        eights = filled.reshape(8, 2, 4)
                        which = np.uint8(15) * eights[:, 0] | np.uint8(240) * eights[:, 1]
                    else:
                        which = np.uint8(255) * filled
                    which = np.resize(which.reshape(-1), codes.nbytes).view(np.uint32)
                    store.write(np.concatenate([(codes & ~which) | (rng.integers(0, 1 << 32, codes.size, np.uint32) & which), rest]))
            history.check(1, path=path, D=D)
            history.check(4, path=path, D=D)


@every_kind
def test_however_the_prompt_is_cut_the_result_is_the_same(device: Device, rng, kind):
    check_cuts(lambda: pipeline(device, kind), draw(rng, pipeline(device, kind), 9), ([1], [4], [8], [3, 5], list(range(1, 9))), kind=kind)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
@every_kind
def test_arrays_of_every_float(device: Device, rng, kind, dtype):
    """Halves are quantised as the floats that they are."""
    for D in (64, 37):
        pipe, twin = pipeline(device, kind, D), pipeline(device, kind, D)
        for S in (3, 1):
            given = [a.astype(np.float16) for a in draw(rng, pipe, S)]
            call = "decode" if S == 1 else "prefill"
            out = getattr(pipe, call)(*(a.astype(dtype) for a in given))
            want = getattr(twin, call)(*(a.astype(F32) for a in given))
            assert out.dtype == (np.float16 if dtype == np.float16 else F32)
            assert_close(out, want, max_error=2e-3 if dtype == np.float16 else 0)
        assert np.array_equal(pipe.cache.k(4), twin.cache.k(4))


# ---- moving about in the history


@pytest.mark.parametrize(("batch", "D"), [(1, 64), (2, 37), (1, 80)])
@every_kind
def test_growth_truncation_keeping_forks_and_resets(device: Device, rng, kind, batch, D):
    pipe = pipeline(device, kind, D, batch=batch, capacity=7, growth=11)
    history = History(rng, pipe)
    for S in (7, 1, 9, 1, 12):
        history.check(S)
    assert (pipe.capacity, pipe.generation) == (40, 2)
    pipe.truncate(21)
    history.keep(np.arange(21))
    history.check(1)
    pipe.keep([(0, 2), (5, 3), (9, 8), (20, 1)])
    history.keep(np.r_[0:2, 5:8, 9:17, 20])
    history.check_state()
    history.check(1)
    twin = pipe.fork()
    other = History(rng, twin)
    other.given = history.given
    assert twin.cache.dtype == kind
    other.check_state()
    for first, second in ((1, 3), (2, 1), (30, 1)):
        history.check(first)
        other.check(second)
        history.check_state()
    twin.reset()
    other.keep(np.arange(0))
    other.check(4)
    other.check(1)


# ---- steps


@every_kind
@pytest.mark.parametrize("as_tensors", [False, True])
def test_a_decode_step_makes_nothing_writes_once_and_submits_once(device: Device, rng, monkeypatch, kind, as_tensors):
    pipe = pipeline(device, kind)
    pipe.prefill(*draw(rng, pipe, 3))
    pipe.decode(*draw(rng, pipe, 1))
    assert pipe.dispatches_per_token == 2
    steps = [draw(rng, pipe, 1) for _ in range(3)]
    if as_tensors:
        steps = [[device.tensor(a) for a in step] for step in steps]
    calls = Calls(device, monkeypatch)
    for step in steps:
        calls.check_step(pipe.decode, *step)


@every_kind
def test_tiles_are_tuned_over_such_a_cache(device: Device, tmp_path, kind):
    problem = Problem(1, 2, 1, 32, 32, 32, 32, 0.2, kv_dtype=kind)
    cache = tune.TuningCache(tmp_path / "tuning.json")
    shape = tune.tuned_shape(device, "flash", problem, cache)
    assert tune.stored_shape(device, "flash", problem, cache) == shape
    assert tune.stored_shape(device, "flash", Problem(1, 2, 1, 32, 32, 32, 32, 0.2), cache) is None
