"""What is not a number stays visible: a NaN or an infinity in a token's activations leaves no finite value in its result, whatever the arithmetic."""

import numpy as np
import pytest

from tests.block.layers import random_matrix, rows
from tests.block.test_int8 import project
from tests.helpers import nmse
from wgattn import reference, rms_norm
from wgattn.block.prepared import half_stride, record_half
from wgattn.gpu import Recording, StepState

COLUMNS = 256
BAD = (np.nan, -np.nan, np.inf, -np.inf)
CASES = {
    "floats": ("F32", "exact", False),
    "digits": ("Q4_0", "exact", False),
    "int8": ("Q8_0", "int8", False),
    "int8 with offsets": ("Q4_1", "int8", False),
    "int8 behind a norm": ("Q8_0", "int8", True),
}
"""Kind of weights, arithmetic, norm."""


def places(rng: np.random.Generator, tokens: int) -> list[tuple[int, int]]:
    """(token, column) for bad values: one in each place of a block of 32, since they meet in some order when the largest is looked for."""
    return [(int(rng.integers(tokens)), int(32 * rng.integers(COLUMNS // 32) + column)) for column in range(32)]


@pytest.mark.parametrize("tokens", [1, 5, 40], ids=["one token", "few tokens", "many tokens"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("variant", ["software", "gpu_shape", "gpu_shape_no_subgroup"])
def test_every_row_of_a_token_shows_it_and_no_other_token(devices, rng, variant, case, tokens):
    kind, arithmetic, norm = CASES[case]
    matrix = random_matrix(rng, 36, COLUMNS, kind)
    vectors = {"gamma": rng.uniform(0.5, 2, COLUMNS).astype(np.float32)} if norm else {}
    for i, (token, column) in enumerate(places(rng, tokens)):
        x, bad = rows(rng, tokens, COLUMNS), BAD[i % 4 if i % 8 >= 4 else i % 2]
        good = np.delete(np.arange(tokens), token)
        x[token, column] = bad
        got = project(devices[variant], matrix, x, arithmetic=arithmetic, **vectors)
        shown = np.isnan(got[token]) if np.isnan(bad) else ~np.isfinite(got[token])
        assert shown.all(), f"{np.count_nonzero(~shown)} of {shown.size} rows hide {bad} in column {column} of token {token}"
        if len(good):
            normed = reference.rms_norm(x[good], vectors["gamma"], 1e-5) if norm else x[good]
            assert nmse(got[good], reference.linear(normed, matrix.dequantize())) < 1e-3, (token, column)


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("variant", ["gpu_shape", "gpu_shape_no_subgroup"])
def test_x_as_halves_for_matrix_units_shows_it(devices, rng, variant, norm):
    """The dispatch in front of matrix units, which needs none. What a half times the token's scale is must be as bad as x is."""
    device, tokens = devices[variant], 3
    gamma = rng.uniform(0.5, 2, COLUMNS).astype(np.float32)
    for i, (token, column) in enumerate(places(rng, tokens)):
        x = rows(rng, tokens, COLUMNS)
        x[token, column] = BAD[i % 4]
        state, recording = StepState(device), Recording(device)
        left = record_half(recording, state.step, device.tensor(x), tokens, COLUMNS, device.tensor(gamma) if norm else None, 1e-5, "each", "")
        state.place(0, tokens)
        recording.replay()
        halves, scale = left["x"].numpy().view(np.float16).reshape(tokens, half_stride(COLUMNS)), left["x_scale"].numpy()
        with np.errstate(invalid="ignore"):
            got = (halves.astype(np.float32) * scale[:, None]).sum(1)  # as a row of ones would
        assert np.isfinite(got).tolist() == [t != token for t in range(tokens)], (BAD[i % 4], token, column)


@pytest.mark.parametrize("width", [8, 37, 2048])
def test_rms_norm(devices, rng, width):
    """Its mean square is none then, and nothing of the row is a number; other rows do not notice."""
    for variant in ("software", "gpu_shape", "gpu_shape_no_subgroup"):
        x = rng.standard_normal((3, width)).astype(np.float32)
        x[1, rng.integers(width)] = np.nan
        y = rms_norm(devices[variant].tensor(x), devices[variant].tensor(np.ones(width, np.float32)), 1e-5).numpy()
        assert np.isnan(y[1]).all(), variant
        assert np.isfinite(y[[0, 2]]).all(), variant
