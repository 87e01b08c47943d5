"""wgattn.block: the original header's functions, with its padded layouts, and what they refuse before they write."""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import wgattn
from tests.block.layers import random_matrix, rows
from tests.helpers import assert_close, assert_untouched, nmse, poison
from wgattn import ArgumentError, CapacityError, QuantizedTensor, Rope, ShapeError, Unsupported, block, reference
from wgattn.attention.kv_cache import KVCache
from wgattn.block import header, header_projections
from wgattn.gpu import Device, Tensor

JUNK = np.float32(1e30)


@dataclass
class Padded:
    """An attention half in padded layouts: E of AE, D of AD; `plain` are its weights without padding."""

    rng: np.random.Generator
    E: int = 50
    AE: int = 64
    H: int = 4
    KV: int = 2
    D: int = 12
    AD: int = 16
    kind: str = "F32"
    bias: bool = True

    def __post_init__(self) -> None:
        rng, E, AE, D, AD = self.rng, self.E, self.AE, self.D, self.AD
        self.plain: dict[str, Any] = {"norm": rng.uniform(0.5, 1.5, E).astype(np.float32)}
        self.padded: dict[str, Any] = {"norm": self.plain["norm"]}
        for name, heads in (("q", self.H), ("k", self.KV), ("v", self.KV)):
            wide = np.zeros((heads, AD, AE), np.float32)
            wide[:, :D, :E] = rng.standard_normal((heads, D, E)) * E**-0.5
            self._add(f"w{name}", wide.reshape(-1, AE), lambda w, n=heads: w.reshape(n, AD, AE)[:, :D, :E].reshape(-1, E))
            if self.bias:
                wide = np.zeros((heads, AD), np.float32)
                wide[:, :D] = rng.standard_normal((heads, D))
                self.padded[f"b{name}"], self.plain[f"b{name}"] = wide.reshape(-1), wide[:, :D].reshape(-1)
        wide = np.zeros((AE, self.H, AD), np.float32)
        wide[:E, :, :D] = rng.standard_normal((E, self.H, D)) * (self.H * D) ** -0.5
        self._add("wo", wide.reshape(AE, -1), lambda w: w.reshape(AE, self.H, AD)[:E, :, :D].reshape(E, -1))
        if self.bias:
            wide = np.zeros(AE, np.float32)
            wide[:E] = rng.standard_normal(E)
            self.padded["bo"], self.plain["bo"] = wide, wide[:E]

    def _add(self, name: str, wide: np.ndarray, narrow: Any) -> None:
        self.padded[name] = wide if self.kind == "F32" else wgattn.quantize(wide, self.kind)
        self.plain[name] = narrow(wide if self.kind == "F32" else self.padded[name].dequantize())

    @property
    def sizes(self) -> dict[str, int]:
        return {"num_heads": self.H, "num_kv_heads": self.KV, "head_dim": self.D, "embed_dim": self.E}

    def cache(self, device: Device, capacity: int, dtype: Any = np.float32) -> tuple[Tensor, Tensor]:
        return tuple(device.tensor(poison((self.KV, capacity, self.AD), dtype)) for _ in range(2))

    def widen(self, x: np.ndarray) -> np.ndarray:
        """With junk where only padding is."""
        wide = np.full((len(x), self.AE), JUNK)
        wide[:, : self.E] = x
        return wide

    def expected(self, x: np.ndarray, rope: Rope | None, past: Any = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        kw = None if rope is None else rope.reference
        sizes = {"num_heads": self.H, "num_kv_heads": self.KV, "head_dim": self.D}
        return reference.attention_block(x, self.plain, **sizes, eps=1e-5, rope=kw, past=past)


def tables(rope: Rope, positions: int) -> tuple[np.ndarray, np.ndarray]:
    table = rope.table(positions)
    return table[..., 0], table[..., 1]


def check_cache(case: Padded, cache: tuple[Tensor, Tensor], begin: int, keys: np.ndarray, values: np.ndarray, max_error: float = 2e-5) -> None:
    """Rows `begin` on are these with zero padding, all others are untouched."""
    for tensor, wanted in zip(cache, (keys, values), strict=True):
        held, end = tensor.numpy(), begin + wanted.shape[1]
        assert_untouched(held[:, :begin])
        assert_untouched(held[:, end:])
        assert_close(held[:, begin:end, : case.D], wanted, max_error=max_error)
        assert not held[:, begin:end, case.D :].any()


@pytest.mark.conformance
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"E": 64, "D": 16, "bias": False},
        {"kind": "Q8_0", "E": 40, "H": 6, "KV": 2, "D": 20, "AD": 32},
        {"E": 33, "AE": 33, "H": 3, "KV": 1, "D": 4, "AD": 8},
    ],
    ids=["padded", "unpadded", "quantised", "odd"],
)
def test_prefill_then_decode(device: Device, rng, shape):
    case, rope = Padded(rng, **shape), Rope(1000.0, dim=shape.get("D", 12))
    x, residual = rows(rng, 7, case.E), rows(rng, 7, case.E)
    expected, keys, values = case.expected(x, rope)
    cache = case.cache(device, 11)
    options = {**case.padded, **case.sizes, "cache": cache}
    y = block.attention_prefill(case.widen(x[:4]), start_position=0, rope=rope, **options)
    assert_close(y[:, : case.E], expected[:4], max_error=2e-5)
    y = np.concatenate([y, block.attention_prefill(case.widen(x[4:6]), start_position=4, residual=case.widen(residual[4:6]), rope=tables(rope, 6), **options)])
    last = block.attention_decode(case.widen(x[6:])[0], position=6, residual=case.widen(residual[6:])[0], rope=tables(rope, 11), **options)
    assert last.shape == (case.AE,)
    y = np.concatenate([y, last[None]])
    residual[:4] = 0
    assert_close(y[:, : case.E], expected + residual, max_error=2e-5)
    assert not y[:, case.E :].any()
    check_cache(case, cache, 0, keys, values)


@pytest.mark.conformance(rotary=[12])
@pytest.mark.parametrize(("interleaved", "rotary"), [(False, 12), (True, 12), (False, 8), (True, 4)])
def test_bug_19_partial_rotary_far_into_a_sequence(device: Device, rng, interleaved, rotary):
    """Both pairings at positions 0, 1,000 and 100,000: the row that is written, and channels that are not rotated."""
    case, rope = Padded(rng, H=2, KV=1), Rope(10000.0, rotary, interleaved)
    x = rows(rng, 2, case.E)
    for position in (0, 1000, 100_000):
        cache = tuple(device.tensor(np.zeros((1, position + 3, case.AD), np.float32)) for _ in range(2))
        y = block.attention_prefill(case.widen(x), start_position=position, rope=rope, cache=cache, **case.padded, **case.sizes)
        past = np.zeros((1, position, case.D))
        expected, keys, values = case.expected(x, rope, (past, past))
        assert_close(y[:, : case.E], expected, max_error=2e-5, position=position)
        k, v = (t.numpy() for t in cache)
        for held, wanted in ((k, keys), (v, values)):
            assert_close(held[:, position : position + 2, : case.D], wanted[:, position:], max_error=2e-5, position=position)
            assert not held[:, :position].any()
            assert not held[:, position + 2 :].any()
        plain = reference.linear(reference.rms_norm(x, case.plain["norm"]), case.plain["wk"], case.plain["bk"])
        np.testing.assert_allclose(k[0, position : position + 2, rotary : case.D], plain[:, rotary:], atol=2e-6)
        if position == 0:
            np.testing.assert_allclose(k[0, 0, : case.D], plain[0], atol=2e-6)
        else:
            assert np.abs(k[0, position, :rotary] - plain[0, :rotary]).max() > 0.01


@pytest.mark.conformance(position=[100_000])
@pytest.mark.parametrize("position", [0, 1000, 100_000])
def test_decode_far_into_a_sequence(device: Device, rng, position):
    case, rope = Padded(rng, H=2, KV=1), Rope(10000.0, 12)
    x, history = rows(rng, 1, case.E), [rng.standard_normal((1, position, case.D)) for _ in range(2)]
    cache = case.cache(device, position + 2)
    for tensor, past in zip(cache, history, strict=True):
        held = tensor.numpy()
        held[:, :position] = JUNK  # padding of a cache may hold anything
        held[:, :position, : case.D] = past
        tensor.write(held)
    y = block.attention_decode(case.widen(x), position=position, rope=rope, cache=cache, **case.padded, **case.sizes)
    past = [h.astype(np.float32).astype(np.float64) for h in history]
    expected, keys, _ = case.expected(x, rope, past)
    assert_close(y[:, : case.E], expected, max_error=2e-5)
    assert_close(cache[0].numpy()[:, position, : case.D], keys[:, position], max_error=2e-5)
    assert_untouched(cache[0].numpy()[:, position + 1 :])


def test_padding_rows_of_weights_count_as_zero(device: Device, rng):
    """Where rows of a matrix are padding they are ignored, where columns are, junk meets zeros."""
    clean, dirty = (Padded(np.random.default_rng(3)) for _ in range(2))
    for name, heads in (("q", 4), ("k", 2), ("v", 2)):
        wide = dirty.padded[f"w{name}"].reshape(heads, 16, 64)
        wide[:, 12:], wide[:, :, 50:] = JUNK, JUNK
        dirty.padded[f"b{name}"].reshape(heads, 16)[:, 12:] = JUNK
    dirty.padded["wo"].reshape(64, 4, 16)[:, :, 12:] = JUNK
    dirty.padded["wo"][50:] = JUNK
    dirty.padded["bo"][50:] = JUNK
    x = rows(rng, 3, 50)
    found = []
    for case in (clean, dirty):
        cache = case.cache(device, 5)
        y = block.attention_prefill(case.widen(x), start_position=1, rope=Rope(dim=12), cache=cache, **case.padded, **case.sizes)
        found.append([y, *(t.numpy()[:, 1:4] for t in cache)])
    # row 0 of the poisoned cache is history here: attention over it is NaN, and the written rows are what is compared
    for a, b in zip(found[0][1:], found[1][1:], strict=True):
        np.testing.assert_array_equal(a, b)
    for case in (clean, dirty):
        y = block.attention_prefill(case.widen(x), start_position=0, rope=Rope(dim=12), cache=case.cache(device, 3), **case.padded, **case.sizes)
        assert_close(y[:, :50], clean.expected(x, Rope(dim=12))[0], max_error=2e-5)
        assert not y[:, 50:].any()


def test_both_layouts_of_wo(device: Device, rng):
    case = Padded(rng)
    wo = case.padded["wo"]
    slabs = block.slabs_from_wo(wo, case.H)
    assert slabs.shape == (4, 64, 16)
    assert slabs[2, 7, 5] == wo[7, 2 * 16 + 5]
    np.testing.assert_array_equal(block.wo_from_slabs(slabs), wo)
    x, found = rows(rng, 1, case.E), []
    for layout in (wo, slabs):
        options = {**case.padded, "wo": layout, **case.sizes, "cache": case.cache(device, 2)}
        found.append(block.attention_decode(case.widen(x), position=0, **options))
    np.testing.assert_array_equal(*found)
    for call in (lambda: block.wo_from_slabs(wo), lambda: block.slabs_from_wo(wo, 5)):
        with pytest.raises(ShapeError):
            call()


def test_caches_of_every_sort(device: Device, rng):
    case = Padded(rng, D=16)
    x, rope = rows(rng, 3, case.E), Rope(dim=16)
    expected, keys, values = case.expected(x, rope)
    caches = {
        "f32": case.cache(device, 4),
        "f16": case.cache(device, 4, np.float16),
        "KVCache": KVCache(device, 2, 16, 4),
        "q8_0": KVCache(device, 2, 16, 4, "q8_0"),
        "q4_0": KVCache(device, 2, 16, 4, "q4_0"),
        "with a batch": tuple(t.reshape(1, 2, 4, 16) for t in case.cache(device, 4)),
    }
    for name, cache in caches.items():
        y = block.attention_prefill(case.widen(x), start_position=0, rope=rope, cache=cache, **case.padded, **case.sizes)
        limit = {"f16": 1e-5, "q8_0": 1e-4, "q4_0": 2.5e-2}.get(name, 1e-11)
        assert nmse(y[:, : case.E], expected) < limit, name
        held = (cache.k(3), cache.v(3)) if isinstance(cache, KVCache) else (t.numpy().astype(np.float32).reshape(2, 4, 16)[:, :3] for t in cache)
        for rows_held, wanted in zip(held, (keys, values), strict=True):
            assert nmse(rows_held, wanted) < limit, name
        if isinstance(cache, KVCache):  # and a step behind it
            step = block.attention_decode(case.widen(x[2:]), position=2, rope=rope, cache=cache, **case.padded, **case.sizes)
            assert nmse(step[:, : case.E], y[2:, : case.E]) < 1e-9 + (limit if name in ("q8_0", "q4_0") else 0), name


# ---- the workspace


@pytest.mark.parametrize("on_device", [True, False])
def test_decode_workspace(device: Device, rng, on_device):
    """The original's test of it: equal bits with enough room, and four bytes short nothing is written."""
    case = Padded(rng, E=64, H=4, KV=2, D=16, bias=False)
    x = rows(rng, 1, 64)
    make = (lambda n: device.empty((n,))) if on_device else (lambda n: np.zeros(n, np.float32))
    need = (2 * 4 * 16, 2 * 2 * 16)
    options = {**case.padded, **case.sizes, "position": 0, "residual": x}
    plain, spacious = case.cache(device, 8), case.cache(device, 8)
    want = block.attention_decode(x, cache=plain, **options)
    for extra in (0, 100):
        got = block.attention_decode_workspace(
            x, cache=spacious, q_output_workspace=make(need[0] + extra), kv_workspace=make(need[1] + extra), **options
        )
        np.testing.assert_array_equal(got, want)
        for a, b in zip(plain, spacious, strict=True):
            np.testing.assert_array_equal(a.numpy().view(np.uint32), b.numpy().view(np.uint32))
    for short in ((need[0] - 1, need[1]), (need[0], need[1] - 1)):
        untouched = case.cache(device, 8)
        with pytest.raises(CapacityError, match=f"has {4 * (short[0] if short[0] < need[0] else short[1])} bytes"):
            block.attention_decode_workspace(x, cache=untouched, q_output_workspace=make(short[0]), kv_workspace=make(short[1]), **options)
        for tensor in untouched:
            assert_untouched(tensor.numpy())
    with pytest.raises(ArgumentError, match="kv_workspace is None"):
        block.attention_decode_workspace(x, cache=spacious, q_output_workspace=make(need[0]), kv_workspace=None, **options)
    with pytest.raises(TypeError, match="q_output_workspace is a list"):
        block.attention_decode_workspace(x, cache=spacious, q_output_workspace=[0.0] * 128, kv_workspace=make(64), **options)


# ---- int8 output projection


def test_prefill_q8_0(device: Device, rng):
    """Its output projection is int8: as the emulation says, and no closer to exact than that. QKV is as asked for."""
    case = Padded(rng, E=64, H=4, KV=2, D=32, AD=32, kind="Q8_0", bias=False)
    x, rope = rows(rng, 5, 64), Rope(dim=32)
    options = {**case.padded, **case.sizes, "start_position": 0, "rope": rope}
    y = block.attention_prefill_q8_0(x, cache=case.cache(device, 5), **options)
    exact, _, _ = case.expected(x, rope)
    n = reference.rms_norm(x, case.plain["norm"])
    q, k, v = (reference.linear(n, case.plain[w]).reshape(5, -1, 32) for w in ("wq", "wk", "wv"))
    q, k = (reference.apply_rope(a, np.arange(5)) for a in (q, k))
    heads = reference.attention(*(a.swapaxes(0, 1)[None] for a in (q, k, v)), is_causal=True)[0][0]
    attended = heads.swapaxes(0, 1).reshape(5, -1)
    assert nmse(y, reference.linear_int8(attended, case.plain["wo"])) < 1e-5
    assert 1e-7 < nmse(y, exact) < 5e-4
    both = block.attention_prefill_q8_0(x, cache=case.cache(device, 5), arithmetic="int8", **options)
    assert nmse(both, y) > 1e-7
    for change, message in (
        ({"wo": case.plain["wo"]}, "Q8_0, not ndarray"),
        ({"wo": wgattn.quantize(case.plain["wo"], "Q5_0")}, "Q8_0, not Q5_0"),
    ):
        with pytest.raises(Unsupported, match=message):
            block.attention_prefill_q8_0(x, cache=case.cache(device, 5), **options | change)
    small = Padded(rng, E=64, H=4, KV=2, D=16, AD=16, kind="Q8_0", bias=False)
    cache = small.cache(device, 5)
    with pytest.raises(Unsupported, match="AD and AE to be multiples of 32; they are 16 and 64"):
        block.attention_prefill_q8_0(x, cache=cache, start_position=0, **small.padded, **small.sizes)
    assert_untouched(cache[0].numpy())


# ---- norm and QKV


@pytest.mark.conformance
@pytest.mark.parametrize(("E", "H", "KV", "D", "kind", "tokens"), [(48, 4, 2, 16, "F32", None), (64, 3, 1, 5, "Q4_0", 3), (50, 2, 2, 12, "F16", 70)])
def test_rmsnorm_qkv(rng, E, H, KV, D, kind, tokens):
    x, norm = rows(rng, tokens or 1, E), rng.uniform(0.5, 2, E)
    w, b = random_matrix(rng, (H + 2 * KV) * D, E, kind), rng.standard_normal((H + 2 * KV) * D)
    n = reference.rms_norm(x, norm, 1e-6)
    for bias in (None, b):
        want = np.split(reference.linear(n, w.dequantize(), bias).reshape(len(x), -1, D), [H, H + KV], axis=1)
        got = block.rmsnorm_qkv(x if tokens else x[0], norm, w, bias, num_heads=H, num_kv_heads=KV, head_dim=D, eps=1e-6)
        for g, m in zip(got, want, strict=True):
            assert_close(g, m if tokens else m[0], max_error=2e-5)


@pytest.mark.conformance(position=[100_000])
@pytest.mark.parametrize("position", [0, 1000, 100_000])
def test_rmsnorm_qkv_rope(rng, position):
    E, H, KV, D = 64, 4, 2, 16
    x, norm = rows(rng, 3, E), rng.uniform(0.5, 2, E)
    w, b = random_matrix(rng, (H + 2 * KV) * D, E, "Q5_0"), rng.standard_normal((H + 2 * KV) * D)
    q, k, v = np.split(reference.linear(reference.rms_norm(x, norm), w.dequantize(), b).reshape(3, -1, D), [H, H + KV], axis=1)
    sizes = {"num_heads": H, "num_kv_heads": KV, "head_dim": D}
    for rope, kw in (
        (Rope(dim=D), {"dim": D}),
        (tables(Rope(dim=D), position + 3), {"dim": D}),
        (Rope(dim=8, interleaved=True), {"dim": 8, "interleaved": True}),
    ):
        turned = [reference.apply_rope(a, position + np.arange(3), **kw) for a in (q, k)]
        for g, m in zip(block.rmsnorm_qkv_rope(x, norm, w, b, position=position, rope=rope, **sizes), [*turned, v], strict=True):
            assert_close(g, m, max_error=3e-5)
    for given, error, message in (
        ({"rope": tables(Rope(dim=D), 3), "position": 1}, CapacityError, "Positions 1 to 3 do not fit: the tables of cos and sin have 3"),
        ({"rope": Rope(dim=D), "position": -1}, ArgumentError, "The position is -1"),
        ({"rope": None, "position": 0}, ArgumentError, "rope is None"),
        ({"rope": Rope(dim=32), "position": 0}, ShapeError, "RoPE rotates 32 channels; heads have 16"),
    ):
        with pytest.raises(error, match=message):
            block.rmsnorm_qkv_rope(x, norm, w, b, **given, **sizes)
    with pytest.raises(ArgumentError, match="head_dim must be even, not 15"):
        block.rmsnorm_qkv_rope(x, norm, random_matrix(rng, 45, 64), position=0, rope=Rope(dim=4), num_heads=1, num_kv_heads=1, head_dim=15)


# ---- output projection and MLP


def outproj_case(rng: np.random.Generator, E: int, AE: int, H: int, D: int, AD: int, hidden: int, AI: int, kinds: tuple[str, str, str]) -> tuple[dict, dict]:
    """(arguments in padded layouts, the same without padding)."""
    wo, w1, w2 = np.zeros((AE, H, AD)), np.zeros((2, AI, AE)), np.zeros((AE, AI))
    wo[:E, :, :D] = rng.standard_normal((E, H, D)) * (H * D) ** -0.5
    w1[:, :hidden, :E] = rng.standard_normal((2, hidden, E)) * E**-0.5
    w2[:E, :hidden] = rng.standard_normal((E, hidden)) * hidden**-0.5
    kind_o, kind_1, kind_2 = kinds
    padded = {"wo": wgattn.quantize(wo.reshape(AE, -1), kind_o), "w1": wgattn.quantize(w1.reshape(-1, AE), kind_1)}
    padded["w2"] = random_matrix(rng, AE, AI, kind_2) if kind_2 in ("Q4_K", "Q6_K") else wgattn.quantize(w2, kind_2)
    for name, length, used in (("bo", AE, E), ("b2", AE, E)):
        padded[name] = np.where(np.arange(length) < used, rng.standard_normal(length), 0).astype(np.float32)
    b1 = np.zeros((2, AI), np.float32)
    b1[:, :hidden] = rng.standard_normal((2, hidden))
    padded |= {"b1": b1.reshape(-1), "norm": rng.uniform(0.5, 1.5, E).astype(np.float32)}
    gate, up = padded["w1"].dequantize().reshape(2, AI, AE)[:, :hidden, :E]
    mlp = {"norm": padded["norm"], "gate": gate, "up": up, "down": padded["w2"].dequantize()[:E, :hidden]}
    mlp |= {"b_gate": b1[0, :hidden], "b_up": b1[1, :hidden], "b_down": padded["b2"][:E]}
    return padded, mlp | {"wo": padded["wo"].dequantize().reshape(AE, H, AD)[:E, :, :D].reshape(E, -1), "bo": padded["bo"][:E]}


@pytest.mark.conformance(tokens=[70])
@pytest.mark.parametrize(
    ("sizes", "kinds", "tokens"),
    [
        ((64, 64, 2, 32, 32, 256, 256), ("Q5_0", "Q5_0", "Q4_K"), 4),
        ((64, 64, 2, 32, 32, 256, 256), ("Q8_0", "Q5_0", "Q6_K"), 4),
        ((50, 64, 4, 12, 16, 40, 64), ("F32", "F32", "F32"), 70),
        ((40, 64, 4, 20, 32, 30, 32), ("Q8_0", "Q4_0", "Q5_1"), 3),
        ((33, 33, 3, 5, 5, 7, 7), ("F16", "F32", "F16"), 3),
    ],
    ids=["original, Q4_K", "original, Q6_K", "padded", "padded, quantised", "odd"],
)
def test_outproj_mlp_prefill(rng, sizes, kinds, tokens):
    E, AE, H, D, AD, hidden, _ = sizes
    given, plain = outproj_case(rng, *sizes, kinds)
    attended, residual = np.full((H, tokens, AD), JUNK), np.full((tokens, AE), JUNK)
    attended[:, :, :D], residual[:, :E] = rng.standard_normal((H, tokens, D)), rng.standard_normal((tokens, E))
    y = block.outproj_mlp_prefill(attended, residual, embed_dim=E, intermediate_dim=hidden, **given)
    h = residual[:, :E] + reference.linear(attended[:, :, :D].swapaxes(0, 1).reshape(tokens, -1), plain["wo"], plain["bo"])
    assert_close(y[:, :E], h + reference.mlp(h, plain, 1e-5), max_error=3e-5)
    assert not y[:, E:].any()
    if kinds[0] == "F32":
        slabs = block.slabs_from_wo(given["wo"].dequantize(), H)
        np.testing.assert_array_equal(block.outproj_mlp_prefill(attended, residual, embed_dim=E, intermediate_dim=hidden, **given | {"wo": slabs}), y)
    elif "K" in kinds[2]:
        rounded = block.outproj_mlp_prefill(attended, residual, arithmetic="int8", **given)
        assert 1e-7 < nmse(rounded, y) < 5e-4


def test_outproj_mlp_is_refused(rng):
    given, _ = outproj_case(rng, 64, 64, 2, 32, 32, 64, 64, ("F32", "F32", "F32"))
    attended, residual = np.zeros((2, 3, 32)), np.zeros((3, 64))
    for change, error, message in (
        ({"residual": residual[:2]}, ShapeError, "attended has shape (2, 3, 32) and residual (2, 64)"),
        ({"wo": np.zeros((64, 60))}, ShapeError, "wo has shape (64, 60); it must be (64, 64)"),
        ({"w1": np.zeros((127, 64))}, ShapeError, "w1 has 127 rows"),
        ({"w2": np.zeros((64, 60))}, ShapeError, "w2 has shape (64, 60); it must be (64, 64)"),
        ({"b1": np.zeros(64)}, ShapeError, "b1 has shape (64,); it must be (128,)"),
        ({"embed_dim": 65}, ArgumentError, "embed_dim is 65; it must be a whole number from 1 to 64"),
        ({"intermediate_dim": 0}, ArgumentError, "intermediate_dim is 0"),
        ({"attended": attended.astype(int)}, TypeError, "attended has dtype int64"),
        ({"arithmetic": "int16"}, ArgumentError, "no arithmetic 'int16'"),
        ({"eps": -1}, ArgumentError, "eps is -1"),
    ):
        with pytest.raises(error, match=re.escape(message)):
            block.outproj_mlp_prefill(**{"attended": attended, "residual": residual, **given, **change})


# ---- what attention refuses


def test_attention_is_refused_before_any_write(device: Device, rng):
    case = Padded(rng)
    x, cache = case.widen(rows(rng, 2, case.E)), case.cache(device, 4)
    options = {**case.padded, **case.sizes, "cache": cache, "start_position": 0, "rope": Rope(dim=12)}
    quantised = QuantizedTensor(bytes(64 * 34), (32, 64), "Q8_0")
    for change, error, message in (
        ({"start_position": 3}, CapacityError, "Positions 3 to 4 do not fit: the cache has 4"),
        ({"start_position": -1}, ArgumentError, "The position is -1"),
        ({"start_position": 0.5}, ArgumentError, "The position is 0.5"),
        ({"rope": tables(Rope(dim=12), 1)}, CapacityError, "the tables of cos and sin have 1"),
        ({"rope": tables(Rope(dim=24), 9)}, ShapeError, "RoPE rotates 24 channels; heads have 12"),
        ({"rope": (np.ones((9, 6)), np.ones((9, 5)))}, ShapeError, "(9, 6) and (9, 5)"),
        ({"head_dim": 11}, ArgumentError, "head_dim must be even, not 11"),
        ({"head_dim": 20}, ShapeError, "at least 20 channels"),
        ({"num_kv_heads": 4}, ShapeError, "must hold one sequence of 4 heads"),
        ({"num_heads": 3}, ShapeError, "3 query heads cannot share 2 KV heads"),
        ({"embed_dim": 65}, ArgumentError, "embed_dim is 65"),
        ({"wq": case.padded["wq"][:, :60]}, ShapeError, "wq has shape (64, 60); it must be (64, 64)"),
        ({"wk": quantised.raw}, TypeError, "wk has dtype uint8"),
        ({"wv": case.padded["wv"].astype(np.int16)}, TypeError, "wv has dtype int16"),
        ({"wo": case.padded["wo"][:50]}, ShapeError, "wo has shape (50, 64)"),
        ({"norm": np.ones(49)}, ShapeError, "norm has shape (49,)"),
        ({"bk": np.ones(24)}, ShapeError, "bk has shape (24,); it must be (32,)"),
        ({"residual": x[:1]}, ShapeError, "residual has shape (1, 64)"),
        ({"x": x[0]}, ShapeError, "x has shape (64,)"),
        ({"x": x[:, :40]}, ArgumentError, "embed_dim is 50; it must be a whole number from 1 to 40"),
        ({"x": np.ones((2, 64), np.int32)}, TypeError, "x has dtype int32"),
        ({"x": device.tensor(x)}, TypeError, "x is a tensor"),
        ({"arithmetic": "int4"}, ArgumentError, "no arithmetic 'int4'"),
        ({"eps": float("inf")}, ArgumentError, "eps is inf"),
        ({"cache": (cache[0].numpy(), cache[1].numpy())}, TypeError, "pair of tensors"),
        ({"cache": (cache[0], device.empty((2, 5, 16)))}, ShapeError, "(2, 4, 16), its values (2, 5, 16)"),
        ({"cache": (cache[0], device.empty((2, 4, 16), np.float16))}, TypeError, "both must be float32, or both float16"),
    ):
        with pytest.raises(error, match=re.escape(message)):
            block.attention_prefill(**{"x": x, **options, **change})
    for tensor in cache:
        assert_untouched(tensor.numpy())
    with pytest.raises(ShapeError, match="takes one token"):
        block.attention_decode(x, position=0, **{n: o for n, o in options.items() if n != "start_position"})


# ---- sizes


@pytest.mark.parametrize("variant", ["software", "gpu_shape", "small_binding"])
@pytest.mark.parametrize("tokens", [1, 5, 300])
def test_attention_scratch_is_what_is_allocated(devices, monkeypatch, variant, tokens):
    device, case = devices[variant], Padded(np.random.default_rng(1))
    asked = block.attention_scratch_size(tokens, case.AE, case.H, case.AD, num_kv_heads=case.KV, capacity=tokens + 300, profile=device.profile)
    cache = tuple(device.empty((case.KV, tokens + 300, case.AD)) for _ in range(2))
    made: list[int] = []
    original = header.attention_steps

    def counted(*args: Any, **kwargs: Any) -> Any:
        """From here on all buffers are scratch; those of a step's state and of a kernel's parameters are uniform."""
        steps = original(*args, **kwargs)
        make = Device.buffer
        monkeypatch.setattr(Device, "buffer", lambda self, n, *, uniform=False: (uniform or made.append(n), make(self, n, uniform=uniform))[1])
        return steps

    monkeypatch.setattr(header, "attention_steps", counted)
    block.attention_prefill(np.ones((tokens, case.AE), np.float32), cache=cache, start_position=0, **case.padded, **case.sizes)
    assert sum(made) == asked
    assert asked == block.attention_q8_0_scratch_size(tokens, case.AE, case.H, case.AD, num_kv_heads=case.KV, capacity=tokens + 300, profile=device.profile)


def test_outproj_scratch_is_what_is_allocated(device: Device, rng, monkeypatch):
    given, _ = outproj_case(rng, 50, 64, 4, 12, 16, 40, 64, ("F32", "F32", "F32"))
    for tokens in (1, 70):
        made: list[int] = []
        original = header_projections.allocate

        def counted(device: Device, shapes: Any, made: list[int] = made, original: Any = original) -> Any:
            made.extend(4 * rows * columns for rows, columns in shapes.values())
            return original(device, shapes)

        with monkeypatch.context() as patch:
            patch.setattr(header_projections, "allocate", counted)
            block.outproj_mlp_prefill(np.ones((4, tokens, 16)), np.ones((tokens, 64)), embed_dim=50, **given)
        assert sum(made) == block.outproj_mlp_scratch_size(tokens, 64, 4, 16, 64, profile=device.profile)


def test_sizes_of_nothing_are_zero():
    for i in range(4):
        assert block.attention_scratch_size(*(0 if i == j else 8 for j in range(4))) == 0
        assert block.attention_q8_0_scratch_size(*(-1 if i == j else 8 for j in range(4))) == 0
    for i in range(5):
        assert block.outproj_mlp_scratch_size(*(0 if i == j else 8 for j in range(5))) == 0


def test_scratch_stays_below_the_originals(device: Device):
    """At Qwen2-0.5B: the original asks for 5,809,152 and 7,063,808 bytes at 512 tokens."""
    assert 0 < block.attention_scratch_size(512, 896, 14, 64, num_kv_heads=2, profile=device.profile) < 5_809_152
    assert 0 < block.outproj_mlp_scratch_size(512, 896, 14, 64, 4864, profile=device.profile) < 7_063_808 * 1.5
