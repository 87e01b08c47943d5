import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from wgattn.errors import ArgumentError, ShapeError
from wgattn.llm.sample import sample


def possible(logits, draws=2000, **options) -> set[int]:
    """The tokens that come up."""
    rng = np.random.default_rng(0)
    return {sample(np.asarray(logits), rng=rng, **options) for _ in range(draws)}


def log(*probabilities: float) -> np.ndarray:
    return np.log(np.array(probabilities))


def test_temperature_0_is_argmax_and_ties_fall_to_the_lowest_id():
    assert sample(np.array([0.0, 3.0, 1.0, 3.0], np.float32)) == 1
    assert sample(np.array([2.0, 2.0, 2.0])) == 0
    token = sample(np.array([1.0, -np.inf, 5.0], np.float16), top_k=1, top_p=0.1)
    assert (type(token), token) == (int, 2)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature):
    logits = np.array([1.0, 0.0, -1.0, 2.0, -np.inf], np.float32)
    weights = np.exp(logits.astype(np.float64) / temperature)
    expected = weights / weights.sum()
    rng, draws = np.random.default_rng(1), 20000
    counts = np.bincount([sample(logits, temperature=temperature, rng=rng) for _ in range(draws)], minlength=5)
    assert counts[4] == 0
    deviation = np.sqrt(draws * expected * (1 - expected))
    assert (np.abs(counts - draws * expected) <= 5 * deviation).all(), (counts, draws * expected)


def test_the_same_generator_state_gives_the_same_tokens():
    logits = np.random.default_rng(2).standard_normal(1000).astype(np.float32)
    a, b, c = ([sample(logits, temperature=1.0, rng=rng) for _ in range(50)] for rng in map(np.random.default_rng, (7, 7, 8)))
    assert a == b
    assert a != c
    assert len({sample(logits, temperature=1.0) for _ in range(50)}) > 1  # without one, fresh entropy


@pytest.mark.parametrize(("drawn", "token"), [(0.0, 1), (0.4999, 1), (0.5, 3), (np.nextafter(1.0, 0.0), 3)])
def test_no_draw_falls_on_an_impossible_token(drawn, token):
    class Fixed:
        def random(self):
            return drawn

    assert sample(np.array([-np.inf, 0.0, -np.inf, 0.0, -np.inf]), temperature=1.0, rng=Fixed()) == token


def test_top_k():
    logits = [0.0, 0.3, 0.1, 0.2, -np.inf]
    assert possible(logits, temperature=1.0, top_k=1) == {1}
    assert possible(logits, temperature=1.0, top_k=2) == {1, 3}
    assert possible(logits, temperature=1.0, top_k=5) == {0, 1, 2, 3}
    assert possible(logits, temperature=1.0, top_k=10**9) == {0, 1, 2, 3}
    assert possible(logits, temperature=1.0, top_k=0) == {0, 1, 2, 3}
    assert possible([1.0, 0.5, 1.0, 0.5, 0.5], temperature=1.0, top_k=3) == {0, 1, 2}  # ties at the border


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    logits = log(0.125, 0.5, 0.25, 0.125)
    assert possible(logits, temperature=1.0, top_p=1e-9) == {1}
    assert possible(logits, temperature=1.0, top_p=0.4999) == {1}
    assert possible(logits, temperature=1.0, top_p=0.5001) == {1, 2}
    assert possible(logits, temperature=1.0, top_p=0.7501) == {0, 1, 2}  # the tie falls to the lower id
    assert possible(logits, temperature=1.0, top_p=0.8751) == {0, 1, 2, 3}
    assert possible(logits, temperature=1.0, top_p=1.0) == {0, 1, 2, 3}
    assert possible(np.zeros(4), temperature=1.0, top_p=0.5) == {0, 1}  # exactly reached


def test_top_p_counts_after_temperature_and_top_k():
    logits = log(0.4, 0.3, 0.2, 0.1)
    assert possible(logits, temperature=1.0, top_p=0.5) == {0, 1}
    assert possible(logits, temperature=0.25, top_p=0.5) == {0}
    assert possible(logits, temperature=1.0, top_k=2, top_p=0.55) == {0}  # 0.4 of 0.7


def test_kept_tokens_keep_their_proportions():
    logits = log(0.1, 0.6, 0.3)
    rng, draws = np.random.default_rng(3), 20000
    counts = np.bincount([sample(logits, temperature=1.0, top_k=2, rng=rng) for _ in range(draws)], minlength=3)
    assert counts[0] == 0
    assert abs(counts[1] / draws - 2 / 3) < 0.02


def test_extreme_logits_do_not_overflow():
    with np.errstate(all="raise"):
        assert possible([3e38, -3e38, 0.0], 50, temperature=1e-300) == {0}
        assert possible([1e4, 1e4, -1e4], 200, temperature=1.0) == {0, 1}
        assert possible([0.0, np.inf, np.inf], 200, temperature=1.0) == {1, 2}


@given(
    logits=st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=40),
    temperature=st.floats(0.0625, 4),
    top_k=st.integers(0, 45),
    top_p=st.floats(0.0625, 1),
    seed=st.integers(0, 2**32),
)
@example(logits=[-1.1754943508222875e-38, 0.0], temperature=1.0, top_k=0, top_p=0.25, seed=0)  # one weight, two logits
def test_the_token_is_among_those_a_plain_sort_keeps(logits, temperature, top_k, top_p, seed):
    token = sample(np.array(logits), temperature=temperature, top_k=top_k, top_p=top_p, rng=np.random.default_rng(seed))
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: top_k or None]
    weights = [np.exp((logits[i] - max(logits)) / temperature) for i in order]
    reached = np.cumsum(weights) / sum(weights)
    kept = order[: int((reached < top_p - 1e-9).sum()) + 1]
    near = order[: int((reached < top_p + 1e-9).sum()) + 1]  # rounding may keep one more
    assert token in near
    assert set(kept) <= set(near)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": np.nan}, "temperature"),
        ({"temperature": np.inf}, "temperature"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": -0.5}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_p": np.nan}, "top_p"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_options(options, what, temperature):
    with pytest.raises(ArgumentError, match=what):
        sample(np.zeros(4), **{"temperature": temperature} | options)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_logits(temperature):
    with pytest.raises(ArgumentError, match=r"2 of 4 logits are NaN \(the first is number 1\)"):
        sample(np.array([0.0, np.nan, 1.0, np.nan]), temperature=temperature)
    with pytest.raises(ArgumentError, match="all 3 logits are -inf"):
        sample(np.full(3, -np.inf), temperature=temperature)
    for shape in ((0,), (1, 4), ()):
        with pytest.raises(ShapeError, match="shape"):
            sample(np.zeros(shape), temperature=temperature)
