"""The ONNX standard's own node tests, through our kernels: every case for Attention, RotaryEmbedding and RMSNormalization that is not an expansion."""

from collections import Counter

import numpy as np
import pytest
from onnx.backend.test.loader import load_model_tests

import wgattn
from tests.onnx_backend import WgattnBackend, cases, operator, opset
from tests.watch import Guard
from wgattn.attention.paths import PORTABLE_PATHS
from wgattn.gpu import Device

FOUND = {"Attention": 93, "RotaryEmbedding": 8, "RMSNormalization": 19}
"""Cases in onnx 1.23.2."""
RTOL = {"bfloat16": 2**-6}
"""Where the runner's tolerance is wider: the package computes expected values in bfloat16 and rounds each stage to 8 bits, we round once. Two last places."""

SOME = ("test_attention_4d_gqa", "test_attention_local_window", "test_rotary", "test_rms_normalization_4d_axis")
"""Cases of the conformance suite, by how their names begin."""


def agree(name: str, guard: Guard, device: Device, path: str = "auto") -> None:
    """The case's outputs are the expected ones, in shape, dtype and value, and nothing beyond them was written."""
    case = cases()[name]
    assert case.data_sets
    for inputs, expected in case.data_sets:
        outputs = WgattnBackend.prepare(case.model, device, path).run(inputs)
        assert len(outputs) == len(expected)
        for number, (ours, theirs) in enumerate(zip(outputs, expected, strict=True)):
            case_name = f"{name}, opset {opset(case)}, output {number}, path {path}"
            assert ours.dtype == theirs.dtype, case_name
            assert ours.shape == theirs.shape, case_name
            rtol = RTOL.get(theirs.dtype.name, case.rtol)
            np.testing.assert_allclose(ours.astype(np.float64), theirs.astype(np.float64), rtol=rtol, atol=case.atol, equal_nan=False, err_msg=case_name)
    guard.check(case=name)


def test_no_case_is_missing():
    counts = Counter(operator(case) for case in cases().values())
    for name, number in FOUND.items():
        assert counts[name] >= number, f"{counts[name]} cases of {name} were found, there are {number}"
    assert {opset(case) for case in cases().values()} >= {23, 24, 25}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # from drawing the package's other cases
def test_the_package_has_no_other_cases_for_our_operators():
    known = cases()
    assert {case.name for case in load_model_tests(kind="node") if operator(case)} == set(known)


@pytest.mark.conformance(name=lambda name: name.startswith(SOME))
@pytest.mark.parametrize("name", cases())
def test_onnx_node(device, monkeypatch, name):
    agree(name, Guard(monkeypatch), device)


@pytest.mark.slow
@pytest.mark.parametrize("path", PORTABLE_PATHS)
@pytest.mark.parametrize("name", [name for name, case in cases().items() if operator(case) == "Attention"])
def test_onnx_attention_by_each_path(device, monkeypatch, name, path):
    agree(name, Guard(monkeypatch), device, path)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["gpu_shape", "gpu_shape_no_subgroup", "checked"])
@pytest.mark.parametrize("name", cases())
def test_onnx_node_in_other_kernel_shapes(devices, monkeypatch, name, variant):
    assert devices[variant].profile
    agree(name, Guard(monkeypatch), devices[variant])


@pytest.mark.conformance
def test_onnx_past_and_present_by_the_pipeline(device, monkeypatch):
    """The case that a decoder's step has the shape of: as many queries as new keys, causal, behind a past."""
    guard = Guard(monkeypatch)
    case = cases()["test_attention_4d_causal_with_past_and_present"]
    ((q, k, v, past_key, past_value), (expected, present_key, present_value)) = case.data_sets[0]
    q, k, v, past_key, past_value = (a.swapaxes(1, 2) for a in (q, k, v, past_key, past_value))
    pipe = wgattn.AttentionPipeline(q.shape[2], k.shape[2], q.shape[3], batch=q.shape[0], capacity=4, growth=4, device=device)
    pipe.prefill(np.zeros_like(past_key), past_key, past_value)
    out = pipe.prefill(q, k, v)
    np.testing.assert_allclose(out.swapaxes(1, 2), expected, rtol=case.rtol, atol=case.atol)
    assert np.array_equal(pipe.cache.k(pipe.length), present_key)
    assert np.array_equal(pipe.cache.v(pipe.length), present_value)
    guard.check()
