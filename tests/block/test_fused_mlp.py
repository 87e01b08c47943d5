"""FusedMLP: against the float64 reference, what it accepts and refuses, and what a call may do."""

import re
from typing import Any

import numpy as np
import pytest

import wgattn
from tests.block.layers import KINDS, dequantised, random_matrix, rows
from tests.helpers import assert_close
from tests.watch import Calls, forbid_reading
from wgattn import ArgumentError, ShapeError, reference
from wgattn.block.linear import Matrix, pad_vector
from wgattn.block.memory import allocate, mlp_buffers
from wgattn.block.mlp import MlpBlock
from wgattn.gpu import Device, Recording, StepState

E, HIDDEN = 64, 96


def made(rng: np.random.Generator, E: int = E, hidden: int = HIDDEN, kinds: Any = "F32", biases: tuple[str, ...] = ()) -> dict[str, Any]:
    kinds = (kinds,) * 3 if isinstance(kinds, str) else kinds
    shapes = {"gate": (hidden, E), "up": (hidden, E), "down": (E, hidden)}
    lengths = {"b_gate": hidden, "b_up": hidden, "b_down": E}
    weights = {"norm": rng.uniform(0.5, 1.5, E).astype(np.float32)}
    weights |= {name: random_matrix(rng, *shape, kind) for (name, shape), kind in zip(shapes.items(), kinds, strict=True)}
    return weights | {name: rng.standard_normal(lengths[name]).astype(np.float32) for name in biases}


def expected(weights: dict[str, Any], x: np.ndarray, eps: float = 1e-5) -> np.ndarray:
    return x + reference.mlp(x, dequantised(weights), eps)


@pytest.mark.parametrize("kind", KINDS)
def test_each_weight_format(rng, kind):
    weights, x = made(rng, 256, 256, kind), rows(rng, 1, 256)
    assert_close(wgattn.FusedMLP(weights)(x), expected(weights, x), max_error=2e-5)


@pytest.mark.conformance(E=[50, 64])
@pytest.mark.parametrize(
    ("E", "hidden", "kinds", "biases"),
    [
        (896, 4864, ("Q5_0", "Q5_0", "Q6_K"), ()),
        (576, 1536, "Q4_1", ()),
        (64, 96, "F32", ("b_gate", "b_up", "b_down")),
        (64, 96, ("F16", "Q8_0", "F32"), ("b_gate", "b_down")),
        (64, 96, ("F16", "Q8_0", "F32"), ("b_up",)),
        (50, 37, "F32", ("b_up",)),
        (5, 3, "F16", ("b_gate", "b_up", "b_down")),
    ],
    ids=["Qwen2-0.5B", "SmolLM-135M", "biases", "kinds, biases", "kinds, one bias", "odd sizes", "tiny"],
)
@pytest.mark.parametrize("fused", [True, False])
def test_against_the_reference(rng, fused, E, hidden, kinds, biases):
    weights = made(rng, E, hidden, kinds, biases)
    mlp = wgattn.FusedMLP(weights, eps=1e-6, fused=fused)
    for tokens in (1, 3):
        x = rows(rng, tokens, E)
        assert_close(mlp(x), expected(weights, x, 1e-6), max_error=2e-5, tokens=tokens)


@pytest.mark.conformance(variant=["gpu_shape"])
@pytest.mark.parametrize("variant", ["gpu_shape", "gpu_shape_32_lanes", "checked", "small_binding"])
def test_on_other_devices(devices, rng, variant):
    weights = made(rng, 96, 2800, "F32", ("b_gate", "b_up", "b_down"))  # matrices above 1 MiB
    mlp = wgattn.FusedMLP(weights, device=devices[variant])
    for tokens in (1, 6):
        x = rows(rng, tokens, 96)
        assert_close(mlp(x), expected(weights, x), max_error=2e-5, tokens=tokens)


@pytest.mark.conformance(kind=["Q4_0"])
@pytest.mark.parametrize("kind", KINDS)
def test_bug_22_any_number_of_tokens(rng, kind):
    """Each row by itself, around the sizes where other implementations went wrong; twice, for what the first run leaves behind."""
    width = 256 if kind.endswith("K") else E
    weights = made(rng, width, width if kind.endswith("K") else HIDDEN, kind)
    mlp, x = wgattn.FusedMLP(weights), rows(rng, 1024, width)
    want = expected(weights, x)
    for tokens in (1, 2, 3, 64, 65, 499, 500, 512, 535, 1024, 1, 2):
        assert_close(mlp(x[:tokens]), want[:tokens], max_error=2e-5, tokens=tokens)
        first = tokens // 2
        assert_close(mlp(x[first:tokens]), want[first:tokens], max_error=2e-5, tokens=tokens, first=first)


def test_the_stream_in_place_equals_apart(device: Device, rng):
    """As a model records it, h += ..., and as FusedMLP does."""
    weights, x = made(rng), rows(rng, 5, E)
    block, step, found = MlpBlock(device, weights, 1e-5), StepState(device), []
    step.place(0, 5)
    for apart in (False, True):
        h, y = device.tensor(x), device.empty(x.shape)
        state = {"step": step.step, "h": h, **allocate(device, mlp_buffers(E, HIDDEN, 5))} | ({"y": y, "residual": h} if apart else {})
        recording = Recording(device)
        block.record(recording, state, 5)
        assert len(recording) == 2
        recording.replay()
        found.append((y if apart else h).numpy())
    assert_close(found[0], expected(weights, x), max_error=2e-5)
    np.testing.assert_array_equal(*found)


def test_silu_of_large_and_of_small(rng):
    """Gates of +-200 and beyond: no NaN, and zero where the reference underflows."""
    weights = {"norm": np.ones(4, np.float32), "gate": np.zeros((6, 4)), "up": np.full((6, 4), 0.25), "down": np.eye(6)[:4] + np.eye(6)[2:]}
    weights["b_gate"] = np.array([-1000.0, -200, -20, 20, 200, 1000])
    x = np.ones((2, 4), np.float32)
    for fused in (True, False):
        with np.errstate(over="ignore"):
            want = expected(weights, x)
        np.testing.assert_allclose(wgattn.FusedMLP(weights, fused=fused)(x), want, rtol=1e-6)


def test_a_call_of_one_token_makes_nothing(device: Device, rng, monkeypatch):
    mlp, x = wgattn.FusedMLP(made(rng)), rows(rng, 1, E)
    tensor = device.tensor(x)
    with monkeypatch.context() as patch:
        calls = Calls(device, patch)
        for given in (x, tensor, x):
            calls.check_step(mlp, given)


def test_dispatches(rng):
    assert [wgattn.FusedMLP(made(rng), fused=fused).dispatches_per_token for fused in (True, False)] == [2, 5]
    mixed = made(rng, kinds=("F16", "F32", "F32"))
    assert [wgattn.FusedMLP(mixed, fused=fused).dispatches_per_token for fused in (True, False)] == [3, 6]


def test_tensors_and_dtypes(device: Device, rng, monkeypatch):
    for width in (64, 50):
        weights, x = made(rng, width), rows(rng, 70, width)
        mlp = wgattn.FusedMLP(weights)
        want = [mlp(x), mlp(x[:1])]
        tensors = device.tensor(x), device.tensor(x[:1])
        with monkeypatch.context() as patch:
            forbid_reading(patch)
            got = [mlp(t) for t in tensors]
        for g, w, t in zip(got, want, tensors, strict=True):
            np.testing.assert_array_equal(g.numpy(), w)
            np.testing.assert_array_equal(t.numpy(), x[: len(w)])  # the input is as it was
    assert mlp(x.astype(np.float64)).dtype == np.float32
    assert mlp(x.astype(np.float16)).dtype == np.float16
    y = mlp(device.tensor(x[:1]))
    chained = mlp(y).numpy()  # its own output as its input
    assert_close(chained, expected(weights, expected(weights, x[:1])), max_error=5e-5)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"up": None}, ArgumentError, "up missing"),
        ({"bias": np.ones(4)}, ArgumentError, "bias not known"),
        ({"up": np.zeros((95, 64), np.float32)}, ShapeError, "up has shape (95, 64); it must be (96, 64)"),
        ({"gate": np.zeros((96, 60), np.float32)}, ShapeError, "gate has shape (96, 60); it must be (any, 64)"),
        ({"down": np.zeros((96, 64), np.float32)}, ShapeError, "down has shape (96, 64); it must be (64, 96)"),
        ({"down": np.zeros((64, 96), np.int64)}, TypeError, "down has dtype int64"),
        ({"b_up": np.zeros(64)}, ShapeError, "b_up has shape (64,); it must be (96,)"),
        ({"norm": np.ones(64, bool)}, TypeError, "norm has dtype bool"),
    ],
)
def test_making_is_refused(device: Device, rng, monkeypatch, change, error, message):
    weights = {**made(rng), **change}
    with monkeypatch.context() as patch:
        calls = Calls(device, patch)
        with pytest.raises(error, match=re.escape(message)):
            wgattn.FusedMLP(weights)
        assert not calls


def test_numbers_and_calls_are_refused(device: Device, rng):
    with pytest.raises(ArgumentError, match="eps is nan"):
        wgattn.FusedMLP(made(rng), eps=float("nan"))
    with pytest.raises(ArgumentError, match="no arithmetic 'fast'"):
        wgattn.FusedMLP(made(rng), arithmetic="fast")
    mlp, x = wgattn.FusedMLP(made(rng)), rows(rng, 2, E)
    for given, error, message in (
        (x[:, :40], ShapeError, "(2, 40)"),
        (x[0], ShapeError, "(64,)"),
        (x[:0], ShapeError, "T of at least 1"),
        (x.astype(int), TypeError, "int64"),
        (device.tensor(x, np.float16), TypeError, "float16"),
    ):
        with pytest.raises(error, match=re.escape(message)):
            mlp(given)


def test_the_weights_take_their_bytes(device: Device, rng):
    weights = made(rng, 64, 96, "Q8_0", ("b_gate", "b_up", "b_down"))
    block = MlpBlock(device, weights, 1e-5)
    vectors = pad_vector(weights["norm"]).nbytes + 4 * (96 + 96 + 64)
    assert block.nbytes == vectors + sum(Matrix(device, weights[name]).nbytes for name in ("gate", "up", "down"))
