"""The float64 reference itself, against formulas written another way: loops over single numbers."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wgattn import reference

INF = math.inf


def naive_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    sees: object = lambda b, h, i, j: True,
    added: object = lambda b, h, i, j: 0.0,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention number by number, softmax straight from its definition (for scores that are not large)."""
    B, H, S, D = q.shape
    Hkv, T = k.shape[1:3]
    out, lse = np.zeros((B, H, S, v.shape[-1])), np.zeros((B, H, S))
    scale = 1 / math.sqrt(D) if scale is None else scale
    for b in range(B):
        for h in range(H):
            g = h // (H // Hkv)
            for i in range(S):
                total = 0.0 if sinks is None else math.exp(sinks[h])
                for j in range(T):
                    if not sees(b, h, i, j):
                        continue
                    score = scale * math.fsum(float(q[b, h, i, c]) * float(k[b, g, j, c]) for c in range(D))
                    if softcap:
                        score = softcap * math.tanh(score / softcap)
                    weight = math.exp(score + added(b, h, i, j))
                    total += weight
                    out[b, h, i] += weight * v[b, g, j]
                if total:
                    out[b, h, i] /= total
                lse[b, h, i] = math.log(total) if total else -INF
    return out, lse


def qkv(rng: np.random.Generator, B: int = 2, H: int = 4, Hkv: int = 2, S: int = 3, T: int = 5, D: int = 4, Dv: int | None = None) -> list[np.ndarray]:
    shapes = ((B, H, S, D), (B, Hkv, T, D), (B, Hkv, T, D if Dv is None else Dv))
    return [rng.standard_normal(shape) for shape in shapes]


def same(actual: tuple[np.ndarray, np.ndarray], expected: tuple[np.ndarray, np.ndarray]) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == np.float64
        np.testing.assert_allclose(a, e, rtol=1e-12, atol=1e-13)


# ---- attention


@pytest.mark.parametrize(("H", "Hkv"), [(1, 1), (4, 4), (4, 1), (6, 3)])
@pytest.mark.parametrize(("S", "T"), [(1, 1), (1, 5), (3, 3), (2, 5), (5, 2)])
def test_attention(rng, H, Hkv, S, T):
    args = qkv(rng, H=H, Hkv=Hkv, S=S, T=T, Dv=3)
    same(reference.attention(*args), naive_attention(*args))
    same(reference.attention(*args, scale=-0.3), naive_attention(*args, scale=-0.3))


@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
@pytest.mark.parametrize("window", [None, 1, 2, (0, 0), (1, 1), (-1, 0), (0, -1), (2, -1), (-1, -1)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("S", "T"), [(3, 3), (2, 5), (5, 2)])
def test_causal_rule_and_window(rng, S, T, causal, window, alignment):
    args = qkv(rng, S=S, T=T)

    def sees(b: int, h: int, i: int, j: int) -> bool:
        at = i + T - S if alignment == "bottom_right" else i
        if causal and j > at:
            return False
        if isinstance(window, int):
            return at - window < j <= at
        left, right = window or (-1, -1)
        return (left < 0 or j >= at - left) and (right < 0 or j <= at + right)

    same(reference.attention(*args, is_causal=causal, window_size=window, causal_alignment=alignment), naive_attention(*args, sees=sees))
    table = reference.visible(S, T, is_causal=causal, window_size=window, causal_alignment=alignment)
    np.testing.assert_array_equal(table, [[sees(0, 0, i, j) for j in range(T)] for i in range(S)])


def test_visible_by_eye():
    def rows(*args: int, **options: object) -> list[str]:
        return ["".join(".x"[int(seen)] for seen in row) for row in reference.visible(*args, **options)]

    assert rows(2, 4) == ["xxxx", "xxxx"]
    assert rows(2, 4, is_causal=True) == ["xxx.", "xxxx"]
    assert rows(2, 4, is_causal=True, causal_alignment="top_left") == ["x...", "xx.."]
    assert rows(3, 2, is_causal=True) == ["..", "x.", "xx"]  # the first query stands before all keys
    assert rows(3, 2, is_causal=True, causal_alignment="top_left") == ["x.", "xx", "xx"]
    assert rows(3, 3, window_size=2) == ["x..", "xx.", ".xx"]
    assert rows(3, 3, window_size=(1, 1)) == ["xx.", "xxx", ".xx"]
    assert rows(3, 3, window_size=(0, -1)) == ["xxx", ".xx", "..x"]
    assert rows(2, 5, is_causal=True, length=3) == ["xx...", "xxx.."]
    assert rows(2, 5, length=0) == [".....", "....."]


@pytest.mark.parametrize("shape", [(2, 4, 3, 5), (1, 1, 3, 5), (3, 5), (4, 1, 1), (2, 1, 1, 5), (5,), (1, 4, 3, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("dtype", [np.bool_, np.int32, np.uint8, np.float32, np.float64])
def test_masks(rng, shape, dtype):
    args = qkv(rng)
    floating = np.dtype(dtype).kind == "f"
    mask = (rng.standard_normal(shape) if floating else rng.integers(0, 3, shape)).astype(dtype)
    if floating:
        mask[rng.random(shape) < 0.3] = rng.choice([-INF, np.finfo(np.float32).min])
    full = np.broadcast_to(mask, (2, 4, 3, 5))
    if floating:
        sees, added = lambda *at: full[at] > -1e30, lambda *at: float(full[at])
    else:
        sees, added = lambda *at: full[at] != 0, lambda *at: 0.0
    same(reference.attention(*args, mask), naive_attention(*args, sees=sees, added=added))


@pytest.mark.parametrize("dtype", [np.bool_, np.float64])
@pytest.mark.parametrize("width", [2, 4])
def test_a_mask_narrower_than_the_keys_belongs_to_the_last_of_them(rng, width, dtype):
    args = qkv(rng)
    mask = rng.integers(0, 2, (3, width)).astype(dtype)
    if dtype == np.float64:
        mask -= 0.5
    wide = np.concatenate([np.ones((3, 5 - width), bool) if dtype == np.bool_ else np.zeros((3, 5 - width)), mask], axis=1)
    same(reference.attention(*args, mask), reference.attention(*args, wide))
    same(
        reference.attention(*args, mask),
        naive_attention(*args, sees=lambda b, h, i, j: dtype == np.float64 or wide[i, j], added=lambda b, h, i, j: float(wide[i, j]) * (dtype == np.float64)),
    )


def test_mask_and_causal_rule_together(rng):
    args = qkv(rng, S=4, T=4)
    mask = rng.random((4, 4)) < 0.6
    same(reference.attention(*args, mask, is_causal=True), naive_attention(*args, sees=lambda b, h, i, j: mask[i, j] and j <= i))


@pytest.mark.parametrize("dtype", [np.bool_, np.int64, np.float32])
def test_a_row_that_sees_nothing_gives_zeros(rng, dtype):
    args = qkv(rng)
    mask = np.ones((3, 5), dtype)
    mask[1] = -INF if dtype == np.float32 else 0
    out, lse = reference.attention(*args, mask)
    assert not out[:, :, 1].any()
    assert (lse[:, :, 1] == -INF).all()
    assert np.isfinite(out).all()
    assert np.isfinite(lse[:, :, [0, 2]]).all()
    out, lse = reference.attention(*args, np.zeros((3, 5), bool))
    assert not out.any()
    assert (lse == -INF).all()


def test_a_sink_takes_part_in_the_sum_only(rng):
    args, sinks = qkv(rng), rng.standard_normal(4)
    same(reference.attention(*args, sinks=sinks), naive_attention(*args, sinks=sinks))
    hidden = np.ones((3, 5), bool)
    hidden[2] = False
    out, lse = reference.attention(*args, hidden, sinks=sinks)
    assert not out[:, :, 2].any()
    np.testing.assert_allclose(lse[:, :, 2], np.broadcast_to(sinks, (2, 4)), rtol=1e-12)
    same(reference.attention(*args, sinks=np.full(4, -INF)), reference.attention(*args))
    out, lse = reference.attention(*args, sinks=np.full(4, 1000.0))  # larger than any score, and than exp can take
    assert np.abs(out).max() < 1e-300
    assert (lse == 1000).all()


def test_softcap_comes_before_the_mask(rng):
    args, mask = qkv(rng), rng.standard_normal((3, 5))
    args[0] *= 10
    same(reference.attention(*args, mask, softcap=2.0), naive_attention(*args, softcap=2.0, added=lambda b, h, i, j: mask[i, j]))


@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
@pytest.mark.parametrize(("S", "T"), [(3, 5), (4, 4)])
def test_alibi_grows_with_the_distance(rng, S, T, alignment):
    args, slopes = qkv(rng, S=S, T=T), rng.uniform(0.1, 1, 4)
    offset = T - S if alignment == "bottom_right" else 0
    expected = naive_attention(*args, added=lambda b, h, i, j: -slopes[h] * abs(i + offset - j))
    same(reference.attention(*args, alibi_slopes=slopes, causal_alignment=alignment), expected)


@pytest.mark.parametrize("causal", [False, True])
def test_each_sequence_may_have_its_own_length(rng, causal):
    args, lengths = qkv(rng, S=2), [4, 2]
    args[1][0, :, 4:] = args[2][1, :, 2:] = math.nan  # what lies beyond is not looked at
    out, lse = reference.attention(*args, key_lengths=lengths, is_causal=causal)
    for b, n in enumerate(lengths):
        alone = [args[0][b : b + 1], args[1][b : b + 1, :, :n], args[2][b : b + 1, :, :n]]
        same((out[b : b + 1], lse[b : b + 1]), reference.attention(*alone, is_causal=causal))


def test_large_scores_do_not_overflow(rng):
    q, k, v = qkv(rng, B=1, H=1, Hkv=1, S=1, T=3)
    for shift in (-1e5, 1e5):
        bias = np.array([shift, shift + 1.0, shift - 2.0])
        out, lse = reference.attention(q * 0, k, v, bias)
        plain, plain_lse = reference.attention(q * 0, k, v, bias - shift)
        np.testing.assert_allclose(out, plain, rtol=1e-9)
        np.testing.assert_allclose(lse, plain_lse + shift, rtol=1e-12)


# ---- merge_state


@pytest.mark.parametrize("cut", [1, 2, 4])
def test_attention_over_two_parts_merges_to_the_whole(rng, cut):
    q, k, v = qkv(rng)
    parts = [reference.attention(q, k[:, :, s], v[:, :, s]) for s in (slice(0, cut), slice(cut, None))]
    same(reference.merge_state(*parts[0], *parts[1]), reference.attention(q, k, v))
    same(reference.merge_state(*parts[1], *parts[0]), reference.attention(q, k, v))


def test_a_part_that_sees_nothing_changes_nothing(rng):
    o, lse = reference.attention(*qkv(rng))
    nothing = np.full_like(o, 7.0), np.full_like(lse, -INF)
    same(reference.merge_state(o, lse, *nothing), (o, lse))
    same(reference.merge_state(*nothing, o, lse), (o, lse))
    out, total = reference.merge_state(o * 0, nothing[1], o * 0, nothing[1])
    assert not out.any()
    assert (total == -INF).all()


@given(st.floats(-700, 700), st.floats(-700, 700), st.floats(-10, 10), st.floats(-10, 10))
def test_merging_is_a_weighted_mean(lse_a, lse_b, a, b):
    out, lse = reference.merge_state(np.array([a]), np.array(lse_a), np.array([b]), np.array(lse_b))
    assert lse == pytest.approx(max(lse_a, lse_b) + math.log1p(math.exp(-abs(lse_a - lse_b))), abs=1e-9)
    weight = 1 / (1 + math.exp(lse_b - lse_a)) if lse_b - lse_a < 700 else 0
    assert out[0] == pytest.approx(weight * a + (1 - weight) * b, abs=1e-9)


# ---- norms, projections, gates


def test_rms_norm(rng):
    x, weight = rng.standard_normal((2, 3, 7)), rng.standard_normal(7)
    for eps in (0.0, 1e-5, 1.0):
        for row, normed in zip(x.reshape(-1, 7), reference.rms_norm(x, weight, eps).reshape(-1, 7), strict=True):
            root = math.sqrt(math.fsum(float(n) ** 2 for n in row) / 7 + eps)
            np.testing.assert_allclose(normed, [n * w / root for n, w in zip(row, weight, strict=True)], rtol=1e-12)
    normed = reference.rms_norm(1000 * x)
    np.testing.assert_allclose((normed**2).mean(-1), 1, rtol=1e-9)
    assert not reference.rms_norm(np.zeros(4)).any()


def test_linear_and_gates(rng):
    x, weight, up, bias = rng.standard_normal((2, 3)), rng.standard_normal((4, 3)), rng.standard_normal((4, 3)), rng.standard_normal(4)
    expected = [[math.fsum(x[t, c] * weight[r, c] for c in range(3)) + bias[r] for r in range(4)] for t in range(2)]
    np.testing.assert_allclose(reference.linear(x, weight, bias), expected, rtol=1e-12)
    np.testing.assert_allclose(reference.linear(x, weight), np.array(expected) - bias, rtol=1e-9, atol=1e-12)
    assert reference.silu(0.0) == 0
    assert reference.silu(1.0) == pytest.approx(math.e / (math.e + 1))
    assert reference.silu(-1.0) == pytest.approx(-1 / (math.e + 1))
    gate, raised = np.array(expected) - bias, reference.linear(x, up)
    np.testing.assert_allclose(reference.swiglu(x, weight, up), gate / (1 + np.exp(-gate)) * raised, rtol=1e-9)


def test_embed_takes_rows(rng):
    matrix = rng.standard_normal((5, 3)).astype(np.float16)
    out = reference.embed([4, 0, 4], matrix)
    assert out.dtype == np.float64
    np.testing.assert_array_equal(out, matrix[[4, 0, 4]])


# ---- RoPE


def test_rope_pair_by_pair(rng):
    x, positions, dim = rng.standard_normal((2, 3, 4, 10)), np.array([0, 7, 100_000]), 6
    for interleaved in (False, True):
        out = reference.apply_rope(x, positions, base=100.0, dim=dim, interleaved=interleaved, factors=np.array([1.0, 2.0, 4.0]))
        expected = x.copy()
        for s, position in enumerate(positions):
            for pair in range(3):
                a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + 3)
                turn = complex(math.cos(angle := float(position) * 100.0 ** (-2 * pair / dim) / 2**pair), math.sin(angle))
                z = (x[:, s, :, a] + 1j * x[:, s, :, b]) * turn
                expected[:, s, :, a], expected[:, s, :, b] = z.real, z.imag
        np.testing.assert_allclose(out, expected, rtol=1e-9, atol=1e-9)
        np.testing.assert_array_equal(out[..., dim:], x[..., dim:])


@given(st.integers(0, 100_000), st.integers(0, 1000), st.integers(0, 1000), st.booleans())
@settings(deadline=None)
def test_only_the_distance_of_positions_matters_to_a_product(shift, first, second, interleaved):
    rng = np.random.default_rng(first)
    q, k = rng.standard_normal((2, 1, 1, 16))

    def product(a: int, b: int) -> float:
        turned = [reference.apply_rope(x, np.array([at]), interleaved=interleaved) for x, at in ((q, a), (k, b))]
        return float((turned[0] * turned[1]).sum())

    assert product(first, second) == pytest.approx(product(first + shift, second + shift), abs=1e-8)


def test_rope_keeps_lengths_and_position_0(rng):
    x = rng.standard_normal((5, 2, 16))
    for interleaved in (False, True):
        out = reference.apply_rope(x, np.arange(5), interleaved=interleaved)
        np.testing.assert_array_equal(out[0], x[0])
        np.testing.assert_allclose(np.linalg.norm(out, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-12)
        assert not np.allclose(out[1:], x[1:])


# ---- the model


def test_llama_sees_no_later_token(rng):
    """A changed token changes the logits from its place on, and not before."""
    config = SimpleNamespace(layers=2, num_heads=2, num_kv_heads=1, head_dim=4, eps=1e-5, rope_base=10000.0, rope_dim=4, rope_interleaved=True)
    shapes = {"attn_q": (8, 8), "attn_k": (4, 8), "attn_v": (4, 8), "attn_output": (8, 8), "ffn_gate": (12, 8), "ffn_up": (12, 8), "ffn_down": (8, 12)}
    # Small weights: with large ones a token may look at one other only.
    weights = {f"blk.{i}.{name}.weight": 0.3 * rng.standard_normal(shape) for i in range(2) for name, shape in shapes.items()}
    weights |= {f"blk.{i}.{name}.weight": rng.uniform(0.5, 2, 8) for i in range(2) for name in ("attn_norm", "ffn_norm")}
    weights |= {"token_embd.weight": rng.standard_normal((10, 8)), "output_norm.weight": rng.uniform(0.5, 2, 8)}
    logits = reference.llama(weights, [1, 2, 3, 4], config)
    changed = reference.llama(weights, [1, 2, 9, 4], config)
    assert logits.shape == (4, 10)
    np.testing.assert_allclose(changed[:2], logits[:2], rtol=1e-12)
    assert not np.isclose(changed[2:], logits[2:]).all(1).any()
    np.testing.assert_allclose(reference.llama({**weights, "output.weight": weights["token_embd.weight"]}, [1, 2, 3, 4], config), logits, rtol=1e-12)
