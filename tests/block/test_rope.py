"""RoPE's tables, row order and scaling on the host."""

import math

import numpy as np
import pytest

from wgattn import reference
from wgattn.block.rope import Rope
from wgattn.errors import ArgumentError, ShapeError, Unsupported

FAR = np.array([0, 1, 1000, 100_000])
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


def turned(rope: Rope, positions: np.ndarray, **options: object) -> np.ndarray:
    """(n, dim / 2, 2): what the reference makes of the vector (1, 0) in every pair."""
    ones = np.zeros((len(positions), 1, rope.dim))
    ones[..., 0::2] = 1
    out = reference.apply_rope(ones, positions, base=rope.base, dim=rope.dim, interleaved=True, **options)
    return out.reshape(len(positions), -1, 2)


@pytest.mark.parametrize("base", [10000.0, 500000.0, 1e6, 2.0])
@pytest.mark.parametrize("dim", [2, 4, 64, 128])
def test_tables_are_the_reference_rounded_once(base, dim):
    rope = Rope(base, dim)
    table = rope.table(FAR)
    assert (table.shape, table.dtype) == ((4, dim // 2, 2), np.float32)
    np.testing.assert_allclose(table, turned(rope, FAR), rtol=0, atol=2**-24)
    assert (table[0] == [1, 0]).all()


def test_a_number_of_positions_means_all_of_them():
    rope = Rope(10000.0, 8)
    np.testing.assert_array_equal(rope.table(1001), rope.table(np.arange(1001)))
    np.testing.assert_array_equal(rope.table(1001)[1000], rope.table([1000])[0])
    assert rope.table(0).shape == (0, 4, 2)


def test_how_channels_are_paired_does_not_change_the_table():
    np.testing.assert_array_equal(Rope(dim=16, interleaved=True).table(FAR), Rope(dim=16, interleaved=False).table(FAR))


# ---- the order of rows


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("heads", "head_dim", "dim"), [(1, 4, 4), (3, 8, 8), (2, 16, 4), (4, 64, 64), (1, 6, 2)])
def test_pairs_stand_next_to_one_another(heads, head_dim, dim, interleaved):
    rope = Rope(dim=dim, interleaved=interleaved)
    order = rope.pair_order(heads, head_dim)
    np.testing.assert_array_equal(np.sort(order), np.arange(heads * head_dim))
    for head in range(heads):
        mine = order[head * head_dim : (head + 1) * head_dim] - head * head_dim
        for pair in range(dim // 2):
            first, second = mine[2 * pair], mine[2 * pair + 1]
            assert first == (2 * pair if interleaved else pair)
            assert second - first == rope.pair_distance
        np.testing.assert_array_equal(mine[dim:], np.arange(dim, head_dim))
    assert rope.pair_distance == (1 if interleaved else dim // 2)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("head_dim", "dim"), [(8, 8), (20, 12)])
def test_turning_ordered_rows_by_the_table_is_the_reference(rng, head_dim, dim, interleaved):
    """What the kernel does, in three lines: order, turn neighbours, put back."""
    rope, heads = Rope(dim=dim, interleaved=interleaved), 3
    x = rng.standard_normal((5, heads, head_dim))
    order = rope.pair_order(heads, head_dim)
    ordered = x.reshape(5, -1)[:, order].reshape(5, heads, head_dim)
    pairs = ordered[..., :dim].reshape(5, heads, -1, 2)
    cos, sin = np.moveaxis(rope.table(5), -1, 0)[:, :, None]
    pairs = np.stack([pairs[..., 0] * cos - pairs[..., 1] * sin, pairs[..., 0] * sin + pairs[..., 1] * cos], axis=-1)
    ordered[..., :dim] = pairs.reshape(5, heads, dim)
    back = np.empty((5, heads * head_dim))
    back[:, order] = ordered.reshape(5, -1)
    expected = reference.apply_rope(x, np.arange(5), dim=dim, interleaved=interleaved)
    np.testing.assert_allclose(back.reshape(x.shape), expected, rtol=0, atol=1e-6)


# ---- scaling


@pytest.mark.parametrize("scaling", [None, {}, {"rope_type": "default"}, {"type": "default"}, {"rope_type": "none"}])
def test_no_scaling(scaling):
    np.testing.assert_array_equal(Rope(dim=16, scaling=scaling).table(FAR), Rope(dim=16).table(FAR))


@pytest.mark.parametrize("name", ["rope_type", "type"])
def test_linear_scaling_is_slower_by_its_factor(name):
    rope = Rope(dim=64, scaling={name: "linear", "factor": 4.0})
    np.testing.assert_allclose(rope.table(4 * FAR), Rope(dim=64).table(FAR), rtol=0, atol=2**-23)
    np.testing.assert_allclose(rope.table(FAR), turned(rope, FAR / 4), rtol=0, atol=2**-23)


def test_factors_divide_the_frequencies(rng):
    factors = rng.uniform(0.5, 32, 32)
    rope = Rope(500000.0, 64, factors=factors)
    np.testing.assert_allclose(rope.table(FAR), turned(rope, FAR, factors=factors), rtol=0, atol=2**-23)
    both = Rope(500000.0, 64, scaling={"type": "linear", "factor": 2.0}, factors=factors)
    np.testing.assert_allclose(both.table(FAR), turned(rope, FAR / 2, factors=factors), rtol=0, atol=2**-23)
    np.testing.assert_array_equal(Rope(dim=64, factors=np.ones(32)).table(FAR), Rope(dim=64).table(FAR))


def test_llama3_scaling_by_wavelength():
    """Short waves stay, long ones are stretched, between them it is blended: Meta's own rule, written with wavelengths."""
    rope = Rope(500000.0, 128, scaling=LLAMA3)
    for pair, frequency in enumerate(500000.0 ** (-np.arange(64) / 64)):
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            expected = frequency
        elif wavelength > 8192 / 1:
            expected = frequency / 8
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected = (1 - smooth) * frequency / 8 + smooth * frequency
        assert rope.frequencies[pair] == pytest.approx(expected, rel=1e-12), pair
    kinds = np.unique(np.round(rope.frequencies * 500000.0 ** (np.arange(64) / 64), 6))
    assert {1.0, 0.125} < set(kinds)  # both ends and something between


def test_yarn_scaling_keeps_fast_pairs_and_stretches_slow_ones():
    rope, plain = Rope(10000.0, 64, scaling=YARN), 10000.0 ** (-np.arange(32) / 32)
    ratio = rope.frequencies / plain
    assert ratio[0] == 1
    assert ratio[-1] == 0.25
    assert (np.diff(ratio) <= 0).all()
    turns = 2048 * plain / (2 * math.pi)  # of each pair over the trained context
    np.testing.assert_allclose(ratio[turns > 33], 1)
    np.testing.assert_allclose(ratio[turns < 0.7], 0.25)
    assert ((ratio > 0.25) & (ratio < 1)).any()
    assert rope.magnitude == pytest.approx(0.1 * math.log(4) + 1)
    assert np.hypot(*np.moveaxis(rope.table(FAR), -1, 0)) == pytest.approx(rope.magnitude, rel=1e-6)
    assert Rope(dim=64, scaling={**YARN, "attention_factor": 1.5}).magnitude == 1.5
    assert Rope(dim=64, scaling={**YARN, "factor": 0.5}).magnitude == 1


# ---- what cannot be


@pytest.mark.parametrize("dim", [0, -2, 1, 63])
def test_channels_come_in_pairs(dim):
    with pytest.raises(ArgumentError, match=f"dim .*{dim}"):
        Rope(dim=dim)


@pytest.mark.parametrize("base", [0.0, -1.0, math.inf, math.nan])
def test_the_base_is_positive(base):
    with pytest.raises(ArgumentError, match=f"base .*{base}"):
        Rope(base=base)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "", None])
def test_other_scaling_is_unsupported(kind):
    with pytest.raises(Unsupported, match=f"{kind!r} is not supported"):
        Rope(scaling={"rope_type": kind, "factor": 2.0})


@pytest.mark.parametrize("factor", [None, 0.0, -1.0, math.nan])
@pytest.mark.parametrize("scaling", [{"type": "linear"}, LLAMA3, YARN], ids=["linear", "llama3", "yarn"])
def test_scaling_needs_its_factor(scaling, factor):
    with pytest.raises(ArgumentError, match="factor"):
        Rope(scaling={**scaling, "factor": factor})


@pytest.mark.parametrize("missing", ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"])
def test_scaling_names_what_is_missing(missing):
    with pytest.raises(ArgumentError, match=missing):
        Rope(scaling={k: v for k, v in LLAMA3.items() if k != missing})


@pytest.mark.parametrize("shape", [(), (31,), (33,), (64,), (1, 32), (32, 1)])
def test_factors_are_one_a_pair(shape):
    with pytest.raises(ShapeError) as caught:
        Rope(dim=64, factors=np.ones(shape))
    assert str(shape) in str(caught.value)
    assert "32 frequency factors" in str(caught.value)
