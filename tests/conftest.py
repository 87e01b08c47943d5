"""Fixtures that all tests share, and what belongs to the conformance suite."""

import dataclasses
import os
import signal
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

import wgattn
from tests.emulated_units import EmulatedUnits
from tests.helpers import WideProfile, named_limit
from tests.report import REFUSED
from wgattn.errors import CapacityError, ModelNotFound, Unsupported
from wgattn.gpu import Device, shader
from wgattn.llm.gguf import find_model


def pytest_configure() -> None:
    """Shells start jobs in the background with Ctrl-C ignored, which Python and every child process would keep to."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


# ---- the conformance suite


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The mark `conformance` leaves what is slow, what needs a GPU, and parameters that its own arguments leave out: what remains takes minutes anywhere."""
    for item in items:
        mark = item.get_closest_marker("conformance")
        if mark is None:
            continue
        if mark not in item.own_markers:
            raise pytest.UsageError(f"{item.nodeid}: mark functions with conformance, not modules.")
        if item.get_closest_marker("slow") or item.get_closest_marker("gpu") or not _chosen(item, mark):
            item.own_markers.remove(mark)


def _chosen(item: pytest.Item, mark: pytest.Mark) -> bool:
    """Whether the parameters of a test are what its mark `conformance(name=values, ...)` asks for; a function instead of values tells it itself."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    for name, wanted in mark.kwargs.items():
        if name not in given:
            raise pytest.UsageError(f"{item.nodeid}: its mark conformance names a parameter {name!r}, which it has not.")
        if not (wanted(given[name]) if callable(wanted) else given[name] in wanted):
            return False
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Where the environment has lowered limits, a typed error that names one of them is an answer too, and reported as such."""
    try:
        return (yield)
    except (CapacityError, Unsupported) as error:
        limit = named_limit(error, wgattn.default_device())
        if limit is None:
            raise
        pytest.skip(f"{REFUSED}{limit}: {error}")


# ---- fixtures


@pytest.fixture(scope="session", autouse=True)
def _no_tuning_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What `wgattn tune` found on this machine must not change what is tested."""
    before = os.environ.get("WGATTN_CACHE_DIR")
    os.environ["WGATTN_CACHE_DIR"] = str(tmp_path_factory.mktemp("tuning"))
    yield
    os.environ.pop("WGATTN_CACHE_DIR")
    if before is not None:
        os.environ["WGATTN_CACHE_DIR"] = before


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The demo model's file. A test that needs it fails without it: a skip would pass for a success."""
    try:
        return find_model("smollm2")
    except ModelNotFound as error:
        pytest.fail(str(error))


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Fresh numbers for each test and each run; a failing test shows how to get the same ones again."""
    run = getattr(request.config.option, "randomly_seed", 0)
    run = run if isinstance(run, int) else 0
    seed = [run, zlib.crc32(request.node.nodeid.encode())]
    request.node.add_report_section("setup", "seed", f"np.random.default_rng({seed}); the same numbers again: pytest --randomly-seed={run}")
    return np.random.default_rng(seed)


_shared: list[Device] = []
"""Devices that live as long as the session."""
_MOST_KERNELS = 200
"""That each of them keeps from one file of tests to the next: software drivers take some megabytes for a kernel, and compile it again from their cache."""


def shared(device: Device) -> Device:
    assert device.profile  # measured now: tests that count objects or swap shaders must not see the probe
    _shared.append(device)
    return device


@pytest.fixture(scope="module", autouse=True)
def _few_kernels() -> Iterator[None]:
    yield
    for device in _shared:
        if len(device._kernels) > _MOST_KERNELS:
            device._kernels.clear()


@pytest.fixture(scope="session")
def device() -> Device:
    """The device as it is."""
    return shared(wgattn.default_device())


@pytest.fixture(scope="session")
def units() -> Device:
    """A device with matrix units: Dawn on a GPU that has them."""
    found = shared(Device(backend="dawn"))
    assert found.profile.matrix_units, f"{found} has no matrix units"
    return found


@pytest.fixture(scope="session")
def emulated_units() -> Device:
    """The device with matrix units in software."""
    made = EmulatedUnits(workgroup_memory=49152)
    if not made.profile.f16:
        pytest.skip(f"{made} has no f16, of which matrix units are made.")
    return shared(made)


def with_profile(limits: Mapping[str, int] | None = None, **changes: object) -> Device:
    """A device that says of itself what it is not, so that kernels take the shapes of another kind."""
    made = Device(limits=limits)
    made.profile = dataclasses.replace(made.profile, **changes)
    return made


def wide_lanes() -> Device:
    made = Device()
    made.profile = WideProfile(**{**dataclasses.asdict(made.profile), "kind": "DiscreteGPU", "subgroup_size": 32})
    return made


_VARIANTS: Mapping[str, Callable[[], Device]] = {
    "software": lambda: with_profile(kind="CPU"),
    "gpu_shape": lambda: with_profile(kind="DiscreteGPU"),
    "gpu_shape_no_subgroup": lambda: with_profile(kind="DiscreteGPU", subgroup_size=0),
    "gpu_shape_32_lanes": wide_lanes,
    "checked": lambda: Device(checked=True),
    "small_binding": lambda: Device(limits={"max-storage-buffer-binding-size": 1 << 20}),
}


class Devices(Mapping):
    """Variants of the device by name, each made when first asked for."""

    def __init__(self) -> None:
        self._made: dict[str, Device] = {}

    def __getitem__(self, name: str) -> Device:
        if name not in self._made:
            self._made[name] = shared(_VARIANTS[name]())
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_VARIANTS)

    def __len__(self) -> int:
        return len(_VARIANTS)


@pytest.fixture(scope="session")
def devices() -> Devices:
    """The device in variants, so that one machine runs the kernel shapes of all kinds: software and GPU shapes, with subgroups and without,
    with all of the compiler's checks, and with room for 1 MiB in a binding."""
    return Devices()


@pytest.fixture
def write_shader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: Device) -> Iterator[Callable[[str, str], str]]:
    """write_shader(name, text) puts a shader where the assembler looks, for the length of a test; the house's own are out of sight."""
    monkeypatch.setattr(shader, "SHADERS", tmp_path)
    shader._read.cache_clear()

    def write(name: str, text: str) -> str:
        path = tmp_path / f"{name}.wgsl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        shader._read.cache_clear()
        return name

    yield write
    shader._read.cache_clear()
