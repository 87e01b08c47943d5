"""What the device can reach at most, measured by kernels that do nothing else (`shaders/bench`), and what a dispatch costs.

Every other row is a share of these, so that a row means the same on a fast device, a slow one, and one that others load. Results are exact
counts, compared with the reference as any other: a chain that a compiler had shortened would show.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import numpy as np

from wgattn.gpu import Device, Kernel, Recording, Tensor, grid
from wgattn.gpu.timing import ReplayClock

from .records import Bench, Case, Error, Missing, Work

_FMA_A_ROUND = 4 * 8 * 4
_UNIT = ("f16", "f32", 16, 16, 16)
_DOT4_A_ROUND = 4 * 16
_OFFSETS = np.arange(16, dtype=np.uint32) * np.uint32(0x01030507)


def cases(bench: Bench) -> list[Case]:
    """Ceilings first, by their names, then dispatches."""
    return [
        Case("ceilings", "copy bandwidth", "copy", copy, 1.5),
        Case("ceilings", "f32 FMA chain", "f32", lambda b: fma(b, "f32")),
        Case("ceilings", "f16 FMA chain", "f16", lambda b: fma(b, "f16")),
        Case("ceilings", "dot4I8Packed chain", "dot4", dot4),
        Case("ceilings", "matrix units", "matrix", matrix, 0.1),
        Case("ceilings", "dispatch in a pass", "count", dispatches, 0.5),
        Case("ceilings", "submit and wait", "count", submit, 0.5),
    ]


def kernels(device: Device) -> Iterator[Kernel]:
    """All that the cases would run on such a device."""
    yield from _copy_kernels(device)
    for scalar in ("f32", "f16"):
        if scalar == "f32" or device.profile.f16:
            yield from _fma_kernels(device, scalar)
    yield _dot4_kernel(device)
    if _UNIT in device.profile.matrix_units:
        yield _matrix_kernel(device)
    yield device.kernel("bench/count")


def _copy_kernels(device: Device) -> Iterator[Kernel]:
    """A CPU likes runs, a GPU neighbours side by side."""
    for workgroup, each, runs in ((64, 4, 1), (64, 16, 1), (8, 16, 1)) if device.profile.software else ((256, 1, 0), (256, 4, 0), (64, 8, 0)):
        yield device.kernel("bench/copy", WORKGROUP=workgroup, EACH=each, RUNS=runs)


def _fma_kernels(device: Device, scalar: str) -> Iterator[Kernel]:
    for fused in (True, False):
        yield device.kernel("bench/fma", SCALAR=scalar, FUSED=fused, WORKGROUP=_workgroup(device))


def _dot4_kernel(device: Device) -> Kernel:
    return device.kernel("bench/dot4", WORKGROUP=_workgroup(device))


def _matrix_kernel(device: Device) -> Kernel:
    subgroup = device.profile.subgroup_size
    return device.kernel("bench/matrix", WORKGROUP=4 * subgroup, SUBGROUP=subgroup)


def _workgroup(device: Device) -> int:
    return 8 if device.profile.software else min(128, device.profile.max_invocations)


def _workgroups(device: Device) -> int:
    """Enough to fill the device."""
    return 512 if device.profile.software else 4096


def _fastest(bench: Bench, recordings: Iterable[Recording]) -> Recording:
    """The quickest of some variants of a kernel: a ceiling is what the best of them reaches."""
    clock = ReplayClock(bench.device)
    found = []
    for recording in recordings:
        clock([recording])
        found.append((min(clock([recording]) for _ in range(3)), recording))
    return min(found, key=lambda f: f[0])[1]


# ---- memory


def copy(bench: Bench) -> Work:
    """Buffers far beyond any cache; bytes read and written count."""
    device, profile = bench.device, bench.device.profile
    nbytes = min(bench.uncached, profile.max_tensor) // 4096 * 4096
    pattern = bench.rng().integers(0, 2**32, nbytes // 4, np.uint32)
    source, copied = device.tensor(pattern), device.empty(pattern.shape, np.uint32)

    def variants() -> Iterable[Recording]:
        for kernel in _copy_kernels(device):
            recording = Recording(device)
            groups = grid(-(-nbytes // 16 // (kernel.source.workgroup_size * kernel.source.options["EACH"])), profile.max_workgroups)
            recording.add(kernel, groups, {"source": source, "copied": copied}, {"count": nbytes // 16})
            yield recording

    recording = _fastest(bench, variants())

    def check() -> Error:
        device.write(copied.buffer, np.zeros(copied.size, np.uint32))
        recording.replay()
        return Error.of(copied.numpy(), pattern, 0)

    return Work([recording], nbytes=2 * nbytes, check=check, working_set=2 * nbytes, best=True)


# ---- arithmetic


def fma(bench: Bench, scalar: str) -> Work:
    """x = x * 1 + step, exact, so that the sum counts the steps."""
    device = bench.device
    if scalar == "f16" and not device.profile.f16:
        raise Missing("the device has no f16 arithmetic")
    rounds = 500  # in f16 numbers are exact up to 2048
    groups = _workgroups(device)
    first = np.arange(32) % 7
    seeds = np.stack([first, np.ones(32), np.full(32, 2), np.full(32, -1)], axis=1).astype(np.float32)
    totals = device.empty((groups * _workgroup(device),))

    def variants() -> Iterable[Recording]:
        for kernel in _fma_kernels(device, scalar):
            recording = Recording(device)
            recording.add(kernel, (groups,), {"seeds": device.tensor(seeds), "totals": totals}, {"rounds": rounds})
            yield recording

    recording = _fastest(bench, variants())

    def check() -> Error:
        device.write(totals.buffer, np.zeros(totals.size, np.float32))
        recording.replay()
        expected = 32 * (first + rounds * 2.0 * (2 - 1)) + 8 * (0 + 1 + 2 + 3)
        return Error.of(totals.numpy(), np.resize(expected, totals.size), 0)

    return Work([recording], flops=2 * _FMA_A_ROUND * rounds * totals.size, check=check, best=True)


def dot4(bench: Bench) -> Work:
    """x = dot(x, weights) + x in integers; four multiplications and four additions each."""
    device, rng = bench.device, bench.rng()
    rounds = 256
    kernel, groups = _dot4_kernel(device), _workgroups(device)
    seeds = rng.integers(0, 2**32, (32, 2), np.uint32)
    totals = device.empty((groups * kernel.source.workgroup_size,), np.uint32)
    recording = Recording(device)
    recording.add(kernel, (groups,), {"seeds": device.tensor(seeds), "totals": totals}, {"rounds": rounds})

    def check() -> Error:
        recording.replay()
        x = seeds[:, :1] + _OFFSETS
        weights = np.ascontiguousarray(seeds[:, 1]).view(np.int8).reshape(32, 1, 4).astype(np.int32)
        for _ in range(4 * rounds):
            x = x + (np.ascontiguousarray(x).view(np.int8).reshape(32, 16, 4) * weights).sum(-1, dtype=np.int32).view(np.uint32)
        return Error.of(totals.numpy(), np.resize(x.sum(1, dtype=np.uint32), totals.size), 0)

    return Work([recording], flops=8 * _DOT4_A_ROUND * rounds * totals.size, check=check, best=True)


def matrix(bench: Bench) -> Work:
    """Products of 16 x 16 matrices of f16 with sums in f32, where the backend lets kernels use matrix units."""
    device, profile = bench.device, bench.device.profile
    if not profile.matrix_units:
        raise Missing(f"{device.backend.package} can use none here")
    if _UNIT not in profile.matrix_units:
        raise Missing(f"not for 16 x 16 x 16 of f16 with sums in f32, only {', '.join(map(str, profile.matrix_units))}")
    kernel, rounds, groups = _matrix_kernel(device), 500, 2048
    factors = bench.rng().integers(0, 3, (2, 2, 16, 16)).astype(np.float16)
    teams = groups * kernel.source.workgroup_size // profile.subgroup_size
    sums, recording = device.empty((teams, 2, 2, 2, 16, 16)), Recording(device)
    recording.add(kernel, (groups,), {"factors": device.tensor(factors), "sums": sums}, {"rounds": rounds})

    def check() -> Error:
        recording.replay()
        products = np.einsum("imk,jkn->ijmn", *factors.astype(np.float64)) * 2 * rounds
        return Error.of(sums.numpy(), np.broadcast_to(products, sums.shape), 0)

    return Work([recording], flops=2 * 16**3 * 2 * 8 * rounds * teams, check=check, best=True)


# ---- dispatches


def dispatches(bench: Bench) -> Work:
    """One dispatch in a long row of them, each waiting for the one before it."""
    count = 64 if bench.device.profile.software else 512
    recording, counter = counting(bench, count)

    def check() -> Error:
        before = counter.numpy()
        recording.replay()
        return Error.of(counter.numpy() - before, np.array([count]), 0)

    return Work([recording], units=count, check=check, note=f"one of {count} that wait for each other")


def submit(bench: Bench) -> Work:
    """The wall clock's time of a dispatch by itself: encoded, submitted and waited for."""
    recording, counter = counting(bench, 1)

    def wall() -> float:
        begin = time.perf_counter()
        recording.replay()
        bench.device.wait()
        return time.perf_counter() - begin

    def check() -> Error:
        before = counter.numpy()
        wall()
        return Error.of(counter.numpy() - before, np.ones(1), 0)

    return Work([recording], wall=wall, check=check, note="a dispatch by itself: encode, submit, wait")


def counting(bench: Bench, count: int) -> tuple[Recording, Tensor]:
    """So many dispatches of one invocation, each of which waits for the one before it, and their counter."""
    device = bench.device
    counter, recording = device.empty((1,), np.uint32), Recording(device)
    for _ in range(count):
        recording.add(device.kernel("bench/count"), (1,), {"counter": counter})
    return recording, counter
