"""Work within artificially small limits: the same results, or a typed error that names the limit."""

import numpy as np
import pytest

import wgattn
from tests import test_conformance as conformance
from tests.conftest import with_profile
from tests.helpers import named_limit, not_available
from tests.test_stacks import HERE
from tools import stacks
from wgattn.cases import FAMILIES
from wgattn.errors import CapacityError, Unsupported

LIMITS = {
    "bindings of 1 MiB": {"max-storage-buffer-binding-size": 1 << 20},
    "bindings of 16 MiB": {"max-storage-buffer-binding-size": 1 << 24},
    "16 KiB of workgroup memory": {"max-compute-workgroup-storage-size": 16384},
    "256 invocations": {"max-compute-invocations-per-workgroup": 256, "max-compute-workgroup-size-x": 256},
    "8 storage buffers": {"max-storage-buffers-per-shader-stage": 8},
    "no f16": {"shader-f16": 0},
    "no subgroups": {"subgroup": 0},
    "65,535 workgroups": {"max-compute-workgroups-per-dimension": 65535},
    "bindings at multiples of 256": {"min-storage-buffer-offset-alignment": 256},
}
"""What WebGPU promises everywhere, and smaller."""
SETS = {**LIMITS, "all of them": {name: value for limits in reversed(LIMITS.values()) for name, value in limits.items()}}
FIELDS = {
    "max-storage-buffer-binding-size": "max_binding",
    "max-compute-workgroup-storage-size": "workgroup_memory",
    "max-compute-invocations-per-workgroup": "max_invocations",
    "max-storage-buffers-per-shader-stage": "max_storage_buffers",
    "shader-f16": "f16",
    "subgroup": "subgroup_size",
    "max-compute-workgroups-per-dimension": "max_workgroups",
    "min-storage-buffer-offset-alignment": "storage_alignment",
}


@pytest.mark.parametrize("name", SETS)
def test_a_device_keeps_its_limits(name):
    profile = wgattn.Device(limits=SETS[name]).profile
    for limit, field in FIELDS.items():
        if limit in SETS[name]:
            assert getattr(profile, field) == SETS[name][limit], limit


def cases(every: int) -> list:
    """Some of the conformance suite's cases: of each family the first, then one in so many."""
    found = []
    for family in FAMILIES:
        few = conformance.few(family)
        found += [pytest.param(family, choice, id=f"{family.row(choice)}-{i}") for i, choice in enumerate(few) if i % every == 0]
    return found


class Small:
    """Devices within all of the limits at once, of each kind."""

    def __init__(self) -> None:
        self._made: dict[str, wgattn.Device] = {}

    def __getitem__(self, kind: str) -> wgattn.Device:
        if kind not in self._made:
            self._made[kind] = with_profile(SETS["all of them"], kind=kind)
        return self._made[kind]


@pytest.fixture(scope="module")
def small() -> Small:
    return Small()


@pytest.mark.parametrize("kind", ["CPU", "DiscreteGPU"])
@pytest.mark.parametrize(("family", "choice"), cases(every=8))
def test_within_all_of_them(small, rng, family, choice, kind):
    """In the kernel shapes of both kinds of devices."""
    device = small[kind]
    try:
        conformance.check(device, rng, family, choice)
    except (Unsupported, CapacityError) as error:
        if not named_limit(error, device):
            not_available(str(error))


def test_large_work_within_small_bindings(rng):
    """What needs more than one binding of 1 MiB: weights in pieces, heads in rounds; and what cannot be divided is refused, with the limit."""
    device = wgattn.Device(limits=SETS["all of them"])
    shapes = {"gate": (1536, 320), "up": (1536, 320), "down": (320, 1536)}
    weights = {name: 0.05 * rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    x = rng.standard_normal((3, 320)).astype(np.float32)
    y = wgattn.FusedMLP({"norm": np.ones(320), **weights}, device=device)(x)
    whole = wgattn.FusedMLP({"norm": np.ones(320), **weights})(x)
    np.testing.assert_allclose(y, whole, rtol=1e-5, atol=1e-5)
    q, k, v = (rng.standard_normal((1, 8, 200, 64)).astype(np.float32) for _ in range(3))
    for path in ("unfused", "gemm"):  # 8 x 200 x 200 scores take 1.3 MB
        expected, _ = wgattn.reference.attention(q, k, v, is_causal=True)
        np.testing.assert_allclose(wgattn.sdpa(q, k, v, is_causal=True, path=path, device=device), expected, atol=2e-5)
    long = rng.standard_normal((1, 1, 600, 8)).astype(np.float32)
    for path in ("unfused", "gemm"):
        with pytest.raises((CapacityError, Unsupported), match="1048576"):
            wgattn.sdpa(long, long, long, path=path, device=device)
    with pytest.raises(CapacityError, match="1048576"):
        device.tensor(np.zeros((1 << 18) + 1, np.float32))


# ---- the whole suite

REFUSED = {
    "max-storage-buffers-per-shader-stage": (
        *("attention flash", "gpu_shape-flash", "attention half fused", "small layers", "model-", "test_kinds_of_devices"),
        *("test_each_models_shape", "test_each_family", "test_prefill_then_decode", "test_rmsnorm_qkv", "test_qkv", "test_models_of_three_dispatches_a_layer"),
    ),
    "max-compute-workgroup-storage-size": ("test_flash_tiles.py::test_features", "test_tiles.py::test_each_format_in_int8"),
    "max-storage-buffer-binding-size": ("far_into_a_sequence", "test_steps_over_caches"),
}
"""What may be refused because of a limit: parts of the names of tests. Kernels of a layer with biases, QK-norm or mins of weights bind up to 11 buffers;
some tests force tiles that take more memory than others; tables and caches of many positions stay in one binding."""


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_the_conformance_suite(name):
    """Each test passes, or ends in a typed error that names a limit of the set where that is known."""
    limits = " ".join(f"{limit}={value}" for limit, value in SETS[name].items())
    outcome = stacks.run(HERE, 3600, limits=limits)
    assert not outcome.failed, (outcome.error, outcome.failures)
    assert outcome.facts["limits"] == SETS[name]
    assert outcome.total("passed") > 200
    unknown = [
        (test, reason)
        for test, reason in outcome.refusals
        if not any(part in test for part in REFUSED.get(reason.partition(":")[0], ())) or reason.partition(":")[0] not in SETS[name]
    ]
    assert not unknown
