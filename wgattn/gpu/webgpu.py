"""The WebGPU implementations we run on, behind one small face.

`wgpu` (wgpu-native, compiler naga) is the default; `dawn` (package wgpudawn, compiler Tint) is optional. Both have the API of wgpu-py.
What differs between them - how a device is asked for, how a module is compiled, which directives the WGSL needs - is in this file only.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import ModuleType
from typing import Any

from ..errors import ArgumentError, DeviceError, Unsupported
from .guard import Held, Waiting

MATRIX_UNITS = "chromium-experimental-subgroup-matrix"
# Features we use where the adapter has them. Never all of `adapter.features`: experimental ones make the request fail.
FEATURES = ("shader-f16", "subgroup", "timestamp-query", "timestamp-query-inside-passes", MATRIX_UNITS)
# What kinds of adapter to prefer when none is named.
_PREFERENCE = ("DiscreteGPU", "IntegratedGPU", "VirtualGPU", "Unknown", "CPU")
_NO_ADAPTER = (
    "No WebGPU adapter was found. Install a GPU driver with Vulkan, Metal or DX12, "
    "or software Vulkan (Debian, Ubuntu: apt install mesa-vulkan-drivers)."
)


class Backend:
    """wgpu-native through wgpu-py."""

    name = "wgpu"
    package = "wgpu"
    subgroup_feature = "subgroup"
    compiles_in_threads = True
    """Whether several threads may compile at once; else promises of pipelines are kept side by side."""
    directives: Mapping[str, str] = {"f16": "enable f16;"}  # naga knows subgroups without a directive, and refuses the line

    def __init__(self) -> None:
        if sys.platform == "linux":  # Vulkan loaders complain on stderr, once an adapter, when this is unset
            os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())
        self.api: ModuleType = importlib.import_module(self.package)
        self._process = os.getpid()
        self._set_up()

    def _set_up(self) -> None:
        """Skip OpenGL on Linux: three times faster to start. Process-wide, so only while no instance exists."""
        self._native = importlib.import_module("wgpu.backends.wgpu_native._api")
        from wgpu.backends.wgpu_native import _helpers, extras

        if sys.platform == "linux" and getattr(_helpers, "_the_instance", None) is None:
            extras.set_instance_extras(backends=["Vulkan"])

    def check_process(self) -> None:
        """DeviceError in a fork of the process that loaded the backend: its threads stayed there, and what waits for them waits for ever."""
        if self._process != os.getpid():
            raise DeviceError(
                f"WebGPU was started by process {self._process}, of which this one is a fork; it cannot be used here. "
                "Start processes before the first use of a device, or by spawning (multiprocessing.set_start_method('spawn'))."
            )

    def adapters(self) -> list[Any]:
        self.check_process()
        return list(self.api.gpu.enumerate_adapters_sync())

    def request_device(self, adapter: Any, features: Iterable[str], limits: Mapping[str, int], checked: bool) -> Any:
        gpu = adapter.request_device_sync(required_features=list(features), required_limits=dict(limits))
        poller = getattr(gpu, "_poller", None)
        if hasattr(poller, "_poll_func"):  # of wgpu-py 0.32; without it all works, but steps do not overlap
            poller._poll_func = self._patient_poll(gpu._internal)
        return gpu

    def _patient_poll(self, handle: Any) -> Callable[[bool], None]:
        """What the thread of wgpu-py's calls until promises are kept: looks, and sleeps an eighth of the time that it has waited.

        Its own call blocks until all that was submitted is done, and others can submit nothing meanwhile: what a block of steps left could only be
        read when the block behind it was done as well, and the device had nothing to do while the next was encoded.
        """
        native, started = self._native, 0.0

        def poll(again: bool) -> None:
            nonlocal started
            native.libf.wgpuDevicePoll(handle, False, native.ffi.NULL)
            if not again:
                started = time.perf_counter()
            else:
                time.sleep(min(max((time.perf_counter() - started) / 8, 2e-5), 1e-3))

        return poll

    def create_module(self, device: Any, text: str, label: str, checked: bool) -> Any:
        """Compile WGSL. Unless `checked`, without loop bounding (up to 14 times slower on real GPUs); bounds checks always stay on."""
        native = self._native
        if checked or not hasattr(native.lib, "wgpuDeviceCreateShaderModuleTrusted"):
            return device.create_shader_module(label=label, code=text)
        utf8 = native.ffi.new("char[]", text.encode())  # must outlive the call: naga aborts the process on freed text
        source = native.ffi.new("WGPUShaderSourceWGSL *")
        source.chain.sType = native.lib.WGPUSType_ShaderSourceWGSL
        source.code.data, source.code.length = utf8, len(utf8) - 1
        descriptor = native.ffi.new("WGPUShaderModuleDescriptor *")
        descriptor.nextInChain = native.ffi.cast("WGPUChainedStruct *", source)
        bounds_checks = 1
        handle = native.libf.wgpuDeviceCreateShaderModuleTrusted(device._internal, descriptor, bounds_checks)
        return native.GPUShaderModule(label, handle, device)

    def prepare(self, dispatches: Iterable[Any]) -> list[tuple]:
        """What `encode` needs of dispatches (with `pipeline`, `bindings` and `groups`): handles, which live as long as the objects do."""
        calls, pipeline = [], None
        for d in dispatches:
            calls.append((None if d.pipeline is pipeline else d.pipeline._internal, d.bindings._internal, *d.groups))
            pipeline = d.pipeline
        return calls

    def encode(self, compute_pass: Any, calls: list[tuple]) -> None:
        """Put prepared dispatches into a pass, by the library's C functions: a third of the time that the objects' methods take.

        What is wrong with a call is an error of the pass, and raises where that is finished.
        """
        lib, null, handle = self._native.lib, self._native.ffi.NULL, compute_pass._internal
        set_pipeline, set_bindings = lib.wgpuComputePassEncoderSetPipeline, lib.wgpuComputePassEncoderSetBindGroup
        dispatch = lib.wgpuComputePassEncoderDispatchWorkgroups
        for pipeline, bindings, x, y, z in calls:
            if pipeline is not None:
                set_pipeline(handle, pipeline)
            set_bindings(handle, 0, bindings, 0, null)
            dispatch(handle, x, y, z)

    def wait(self, promise: Any) -> Any:
        """What was promised, when it is kept. Callbacks come from a thread of wgpu-py's; Ctrl-C may end the wait."""
        with Waiting():
            return promise.sync_wait()

    def is_lost(self, device: Any) -> bool:
        """Whether nothing can be made on the device any more, because the adapter has gone or it was destroyed."""
        try:
            device.create_bind_group_layout(entries=[])
        except self.api.GPUError:
            return True
        return False

    def is_out_of_memory(self, error: Exception) -> bool:
        """Whether an error means that memory ran out; wgpu-native 29 says so in the text of a validation error only."""
        return isinstance(error, self.api.GPUOutOfMemoryError) or (isinstance(error, self.api.GPUError) and "Not enough memory" in str(error))

    def timestamp_period(self, device: Any) -> float:
        """Nanoseconds a timestamp tick."""
        return float(self._native.lib.wgpuQueueGetTimestampPeriod(device.queue._internal))

    def matrix_shapes(self, adapter: Any) -> tuple[tuple[str, str, int, int, int], ...]:
        """Matrix-unit shapes as (input type, result type, M, N, K). wgpu-native 29 cannot enable its cooperative matrices."""
        return ()

    def matrix_workgroup(self, adapter: Any) -> int:
        """What workgroups of kernels on matrix units must be a multiple of, in invocations."""
        return 1


class DawnBackend(Backend):
    """Dawn through wgpudawn."""

    name = "dawn"
    package = "wgpudawn"
    subgroup_feature = "subgroups"
    compiles_in_threads = False
    directives: Mapping[str, str] = {
        "f16": "enable f16;",
        "subgroup": "enable subgroups;",
        "matrix": "enable chromium_experimental_subgroup_matrix;\nenable chromium_disable_uniformity_analysis;\nrequires buffer_view;\n"
        "diagnostic(off, chromium.subgroup_matrix_uniformity);\ndiagnostic(off, subgroup_uniformity);",
    }

    def _set_up(self) -> None:
        self._native = importlib.import_module("wgpudawn.backends.dawn._api")
        self._extras = importlib.import_module("wgpudawn.backends.dawn.extras")
        self._extras.set_instance_extras(enable_toggles=["allow_unsafe_apis", "vulkan_enable_f16_on_nvidia", "use_vulkan_memory_model"])

    def request_device(self, adapter: Any, features: Iterable[str], limits: Mapping[str, int], checked: bool) -> Any:
        """Unless `checked`, without bounds checks in shaders: indices come from shapes that are checked before any work."""
        return self._extras.request_device_sync(
            adapter,
            required_features=list(features),
            required_limits=dict(limits),
            enable_toggles=[] if checked else ["disable_robustness"],
            disable_toggles=["timestamp_quantization"],
        )

    def create_module(self, device: Any, text: str, label: str, checked: bool) -> Any:
        return device.create_shader_module(label=label, code=text)

    def wait(self, promise: Any) -> Any:
        """As there, to its end: callbacks come in this thread, and a KeyboardInterrupt in one of them would be lost, and the promise with it."""
        with Held():
            return promise.sync_wait()

    def timestamp_period(self, device: Any) -> float:
        return 1.0  # Dawn converts ticks to nanoseconds itself

    def matrix_shapes(self, adapter: Any) -> tuple[tuple[str, str, int, int, int], ...]:
        try:
            configs = self._extras.get_adapter_properties(adapter)["subgroup_matrix_configs"]
        except (KeyError, AttributeError, NotImplementedError):
            return ()
        fields = ("component_type", "result_component_type", "m", "n", "k")
        return tuple(tuple(c[f] for f in fields) for c in configs if all(f in c for f in fields))

    def matrix_workgroup(self, adapter: Any) -> int:
        return int(adapter.info.get("stackgroup_max_size") or adapter.info.get("subgroup_max_size") or 1)  # the largest subgroup; so wgpu-py calls it


def load(name: str | None = None) -> Backend:
    """The backend of that name: "wgpu" or "dawn"; by default WGATTN_BACKEND, else "wgpu"."""
    if not isinstance(name, str | None):
        raise TypeError(f"backend is {name!r}; it must be a name, or None.")
    return _load(name or os.environ.get("WGATTN_BACKEND") or "wgpu")


@cache
def _load(name: str) -> Backend:
    classes = {"wgpu": Backend, "dawn": DawnBackend}
    if name not in classes:
        raise ArgumentError(f"There is no backend {name!r}; choose one of {', '.join(classes)}.")
    try:
        return classes[name]()
    except ImportError as error:
        raise Unsupported(f"Backend {name!r} needs a package that is not installed ({error}); run: pip install 'wgattn[dawn]'.") from error


def describe(adapter: Any) -> str:
    """One line for people: device, driver, kind."""
    info = adapter.info
    kind = {"CPU": "software"}.get(info["adapter_type"], info["adapter_type"])
    return f"{info['device'] or info['description']} ({info['backend_type']}, {kind})"


def list_adapters(backend: str | None = None) -> list[str]:
    """Names of the adapters that `Device(adapter=...)` can choose from, best first."""
    return [describe(a) for a in _ranked(load(backend).adapters())]


def _ranked(adapters: list[Any]) -> list[Any]:
    def rank(adapter: Any) -> tuple[int, int]:
        kind, api = adapter.info["adapter_type"], adapter.info["backend_type"]
        return (_PREFERENCE.index(kind) if kind in _PREFERENCE else len(_PREFERENCE), 1 if api == "OpenGL" else 0)

    return sorted(adapters, key=rank)


def pick_adapter(backend: Backend, wanted: str | None) -> Any:
    """The best adapter, or the best whose description holds `wanted` (any case; default WGATTN_ADAPTER)."""
    if not isinstance(wanted, str | None):
        raise TypeError(f"adapter is {wanted!r}; it must be part of a name, or None.")
    wanted = wanted or os.environ.get("WGATTN_ADAPTER")
    adapters = _ranked(backend.adapters())
    if not adapters:
        raise DeviceError(_NO_ADAPTER)
    if not wanted:
        return adapters[0]
    for adapter in adapters:
        if wanted.lower() in f"{describe(adapter)} {adapter.info['vendor']} {adapter.info['description']}".lower():
            return adapter
    raise DeviceError(f"No adapter's name contains {wanted!r}; there is {'; '.join(map(describe, adapters))}.")


def usable_features(backend: Backend, adapter: Any, without: Iterable[str] = ()) -> list[str]:
    """What of FEATURES the adapter has, less some, by the backend's names."""
    wanted = (backend.subgroup_feature if f == "subgroup" else f for f in FEATURES if f not in without)
    return [f for f in wanted if f in adapter.features]
