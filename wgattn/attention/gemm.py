"""Path "gemm": attention as two products of padded matrices, seven dispatches (six without a mask), `attention/xgemm_batched.wgsl` and those around it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from ..gpu import Device, DeviceProfile, Kernel, Part, Recording
from . import problem as common
from .matrices import Matrices, add_softmax, mask_share, neutral_options, operations, padded, rounds, softmax_lanes, too_large
from .problem import Operands, Problem

_DIRECT_STEP = 4
"""Rows of the operands between loop tests where they are not staged."""
_BLOCK = 32
"""Rows and columns that a workgroup of the rearranging kernels moves."""


@dataclass(frozen=True)
class GemmShape:
    """How a product C (M, N) = A^T (M, K) . B (K, N) is cut up; names and order are those of CLBlast."""

    KWG: int
    """Rows of A and B that are staged at a time (when they are)."""
    KWI: int
    """Of these, rows between loop tests."""
    MDIMA: int
    """Invocations that bring a row of A's tile."""
    MDIMC: int
    """Invocations along M."""
    MWG: int
    """Tile along M."""
    NDIMB: int
    NDIMC: int
    NWG: int
    SA: int
    """1: A goes through workgroup memory."""
    SB: int
    STRM: int
    """1: an invocation's vectors along M are MDIMC vectors apart."""
    STRN: int
    VWM: int
    """Width of vectors along M: 2, 4 or 8."""
    VWN: int

    @property
    def workgroup(self) -> int:
        return self.MDIMC * self.NDIMC

    @property
    def step(self) -> int:
        """What K must be a multiple of."""
        return self.KWG if self.SA else _DIRECT_STEP

    @property
    def workgroup_bytes(self) -> int:
        return 4 * self.KWG * (self.SA * self.MWG + self.SB * self.NWG)

    def valid(self, profile: DeviceProfile, M: int, N: int, K: int) -> bool:
        """Whether a device can run it on a product of that size."""
        return (
            M % self.MWG == N % self.NWG == K % self.step == 0
            and self.MWG % (self.MDIMC * self.VWM) == self.NWG % (self.NDIMC * self.VWN) == 0
            and self.MDIMA == self.MDIMC
            and self.NDIMB == self.NDIMC
            and self.SA == self.SB
            and self.KWG % self.KWI == 0
            and {self.VWM, self.VWN} <= {2, 4, 8}
            and self.workgroup <= profile.max_invocations
            and self.workgroup_bytes <= profile.workgroup_memory
        )

    def exchanged(self) -> GemmShape:
        """The shape for C^T = B^T . A, which is computed in its place where C is wanted transposed."""
        return replace(
            self,
            **{"MDIMA": self.NDIMB, "MDIMC": self.NDIMC, "MWG": self.NWG, "STRM": self.STRN, "VWM": self.VWN},
            **{"NDIMB": self.MDIMA, "NDIMC": self.MDIMC, "NWG": self.MWG, "STRN": self.STRM, "VWN": self.VWM},
        )


@dataclass(frozen=True)
class GemmShapes:
    """`scores` for queries (M) . keys (N), `outputs` for probabilities (M: queries) . values (N: channels)."""

    scores: GemmShape
    outputs: GemmShape


def tile(M: int, N: int, threads_m: int, threads_n: int, vector_m: int, vector_n: int, strides: str, staged: int = 0, depth: int = 16) -> GemmShape:
    """A shape in short: a tile of M x N on threads_m x threads_n invocations; strides: STRM and STRN as in "10"."""
    strided_m, strided_n = map(int, strides)
    return GemmShape(depth, 2, threads_m, threads_m, M, threads_n, threads_n, N, staged, staged, strided_m, strided_n, vector_m, vector_n)


# What the original tries, tiles with the operands straight from memory.
_WIDE = (
    tile(16, 16, 4, 4, 2, 2, "10"),
    *(tile(64, 128, 16, 8, 4, 8, s) for s in ("00", "01")),
    *(tile(64, 128, 16, 8, 2, 8, s) for s in ("11", "10")),
    *(tile(128, 64, 16, 8, 8, 8, s) for s in ("00", "10", "01", "11")),
    *(tile(128, 64, 16, 8, 2, 8, s) for s in ("11", "10")),
    tile(128, 64, 16, 8, 4, 4, "11"),
    tile(128, 64, 16, 8, 4, 8, "10"),
    *(tile(128, 128, 16, 16, 8, 8, s) for s in ("00", "01", "10")),
    *(tile(128, 128, 16, 8, 8, 8, s) for s in ("00", "01", "11")),
    tile(128, 32, 16, 8, 8, 4, "01"),
    tile(128, 32, 16, 8, 4, 4, "00"),
    *(tile(64, 32, 16, 8, 4, 4, s) for s in ("00", "01", "10")),
    tile(64, 32, 4, 8, 4, 4, "10"),
    tile(64, 64, 8, 8, 2, 8, "10"),
    tile(32, 128, 8, 8, 2, 8, "10"),
    tile(32, 64, 4, 8, 2, 4, "01"),
    tile(32, 32, 4, 8, 8, 2, "00"),
    tile(32, 32, 8, 8, 2, 4, "10"),
    tile(16, 64, 8, 8, 2, 8, "00"),
    tile(16, 64, 4, 8, 2, 8, "00"),
    *(tile(16, 128, 8, 8, 2, 8, s) for s in ("00", "10", "11")),
    tile(16, 32, 4, 8, 4, 2, "00"),
    tile(16, 32, 8, 8, 2, 4, "11"),
)

# The same products with both operands staged, which GPUs with little cache prefer.
_STAGED = (
    tile(32, 32, 8, 8, 4, 4, "00", staged=1),
    tile(64, 64, 8, 8, 4, 4, "11", staged=1),
    tile(64, 64, 16, 16, 4, 4, "00", staged=1),
    tile(64, 128, 16, 16, 4, 4, "11", staged=1),
    tile(128, 64, 16, 16, 4, 4, "11", staged=1),
    tile(128, 128, 16, 16, 4, 4, "11", staged=1),
)

# For CPUs that pretend to be GPUs: narrow workgroups, wide vectors.
_SOFTWARE = tile(16, 16, 4, 2, 4, 8, "00")


def candidates(profile: DeviceProfile, M: int, N: int, K: int) -> list[GemmShape]:
    """Shapes worth trying on a product of that size, of those that a device can run."""
    return [shape for shape in (*_WIDE, *_STAGED) if shape.valid(profile, M, N, K)]


def default_shape(profile: DeviceProfile, M: int, N: int) -> GemmShape:
    """The shape for a product of M x N when nothing has been timed; pure."""
    if profile.software:
        return _SOFTWARE
    tile_m, tile_n = (next((n for n in (128, 64, 32) if size % n == 0), 16) for size in (M, N))
    if tile_m >= 64 and tile_n >= 128 and profile.max_invocations >= 128:
        return tile(64, 128, 16, 8, 2, 8, "10")
    if tile_m >= 64 and tile_n >= 64:
        return tile(64, 64, 8, 8, 4, 4, "10")
    return tile(16, 16, 4, 4, 2, 2, "10")


def aligned(n: int) -> int:
    """A size as products are cut from: a multiple of 128, or the next power of two below it, at least 16."""
    return padded(n, 128) if n > 64 else max(16, 1 << (max(n, 1) - 1).bit_length())


def choose_gemm(profile: DeviceProfile, problem: Problem) -> GemmShapes:
    """The shapes for a problem on a device; pure."""
    rows = aligned(problem.queries)
    return GemmShapes(default_shape(profile, rows, aligned(problem.keys)), default_shape(profile, rows, aligned(problem.value_dim)))


def matrices(problem: Problem, shapes: GemmShapes, share: int = 1) -> Matrices:
    """The sizes that tiles of these shapes divide."""
    scores, outputs = shapes.scores, shapes.outputs
    return Matrices(
        rows=padded(problem.queries, math.lcm(scores.MWG, outputs.MWG)),
        columns=padded(problem.keys, math.lcm(scores.NWG, outputs.step)),
        depth=padded(problem.head_dim, math.lcm(4, scores.step)),
        channels=padded(problem.value_dim, outputs.NWG),
        mask_share=share,
    )


def unsupported(profile: DeviceProfile, problem: Problem) -> str | None:
    """What is missing on such a device, or None."""
    shapes = choose_gemm(profile, problem)
    sizes = matrices(problem, shapes)
    for shape in (shapes.scores, shapes.outputs):
        if shape.workgroup > profile.max_invocations:
            return f"its tiles need workgroups of {shape.workgroup}, there are {profile.max_invocations}."
    tiles = max(sizes.rows // min(shapes.scores.MWG, _BLOCK), sizes.columns // min(shapes.scores.NWG, _BLOCK))
    if tiles > profile.max_workgroups:
        return f"{problem.queries} queries and {problem.keys} keys need a grid of {tiles} workgroups, there are {profile.max_workgroups} in a dimension."
    return too_large(profile, sizes)


def record(recording: Recording, problem: Problem, operands: Operands, shapes: GemmShapes) -> None:
    """Append the path's dispatches, for each round of heads that fits a binding."""
    device = recording.device
    sizes = matrices(problem, shapes, mask_share(problem, operands))
    kernels = _kernels(device, problem, shapes)
    masked = problem.mask != "none"
    lanes = softmax_lanes(device.profile, problem.keys)
    parts = rounds(device.profile, problem, sizes)
    scratch = _scratch(device, problem, sizes, parts)
    for first, planes in parts:
        bound = scratch | {"matrices": sizes.uniform(device, first, planes)}

        def add(name: str, groups: tuple[int, ...], depth: int = 0, **matrix: Any) -> None:
            label, work = f"attention {name.replace('_', ' ')}", operations(problem, sizes, planes, depth)  # noqa: B023
            common.add(recording, kernels[name], groups, problem, operands, bound | matrix, label=label, operations=work)  # noqa: B023

        add("rearrange_qkv", (*_blocks(max(sizes.rows, sizes.columns), max(sizes.depth, sizes.channels)), planes))
        if masked:
            add("rearrange_mask", (math.ceil(sizes.columns / _BLOCK), sizes.rows // 8, sizes.mask_planes(first, planes)))
        groups = (sizes.rows // shapes.scores.MWG, sizes.columns // shapes.scores.NWG, planes)
        add("scores", groups, sizes.depth, matrix_a=scratch["queries_t"], matrix_b=scratch["keys_t"])
        add_softmax(recording, problem, operands, bound, planes, lanes)
        add("transpose", (*_blocks(sizes.columns, sizes.rows), planes))
        groups = (sizes.channels // shapes.outputs.NWG, sizes.rows // shapes.outputs.MWG, planes)
        add("outputs", groups, sizes.channels, matrix_a=scratch["values_p"], matrix_b=scratch["probabilities_t"])
        add("transpose_output", (*_blocks(problem.queries, problem.value_dim), planes))


def _blocks(*sizes: int) -> tuple[int, ...]:
    return tuple(math.ceil(n / _BLOCK) for n in sizes)


def _scratch(device: Device, problem: Problem, sizes: Matrices, parts: list[tuple[int, int]]) -> dict[str, Any]:
    """Memory that serves all rounds."""
    planes = max(n for _, n in parts)
    kv_planes = math.ceil(planes / problem.ratio)
    shapes = {
        "queries_t": (planes, sizes.depth, sizes.rows),
        "keys_t": (kv_planes, sizes.depth, sizes.columns),
        "values_p": (kv_planes, sizes.columns, sizes.channels),
        "scores": (planes, sizes.rows, sizes.columns),
        "probabilities_t": (planes, sizes.columns, sizes.rows),
        "outputs_t": (planes, sizes.channels, sizes.rows),
    }
    if problem.mask != "none":
        shapes["padded_mask"] = (max(sizes.mask_planes(*part) for part in parts), sizes.rows, sizes.columns)
    return {name: device.empty(shape) for name, shape in shapes.items()}


def _kernels(device: Device, problem: Problem, shapes: GemmShapes) -> dict[str, Kernel]:
    """The path's own kernels, by their label."""
    shared = (*common.base_parts(problem), "attention/parts/matrices")
    options, neutral = common.options(problem), neutral_options(problem)
    rows = [common.rows_part(problem, name) for name in ("query", "keys", "values")]
    store, *_ = common.finish_parts(problem)
    mask = f"attention/parts/mask_{problem.mask}"
    adjust = ["attention/parts/mask_padded" if part == mask != "attention/parts/mask_none" else part for part in common.score_parts(problem)]
    kernels = {
        "rearrange_qkv": device.kernel("attention/rearrange_qkv", *shared, *rows, **options),
        "scores": _product(device, shapes.scores, "scores", (*shared, *adjust), neutral),
        "transpose": device.kernel("attention/transpose", *shared, **neutral),
        "outputs": _product(device, shapes.outputs.exchanged(), "outputs", shared, neutral),
        "transpose_output": device.kernel("attention/transpose_output", *shared, store, **options),
    }
    if problem.mask != "none":
        kernels["rearrange_mask"] = device.kernel("attention/rearrange_mask", *shared, mask, **neutral)
    return kernels


def _product(device: Device, shape: GemmShape, name: str, parts: tuple[str | Part, ...], options: dict) -> Kernel:
    """The kernel of one of the two products."""
    a_width, b_width = min(shape.VWM, 4), min(shape.VWN, 4)
    a, b = (f"vec{width}<f32>" for width in (a_width, b_width))
    staging = {"MDIMA": shape.MDIMA, "NDIMB": shape.NDIMB} if shape.SA else {}
    return device.kernel(
        "attention/xgemm_batched",
        *parts,
        Part.of(f"attention/parts/gemm_{'staged' if shape.SA else 'direct'}", a=a, b=b),
        Part.of(f"attention/parts/product_{name}", b=b),
        **options,
        **staging,
        **{name: getattr(shape, name) for name in ("MWG", "NWG", "MDIMC", "NDIMC", "STRM", "STRN", "VWM", "VWN")},
        WORKGROUP=shape.workgroup,
        KSTEP=shape.step,
        UNROLL=shape.KWI if shape.SA else _DIRECT_STEP,
        A_WIDTH=a_width,
        B_WIDTH=b_width,
        A_LOADS=shape.MWG // shape.MDIMC // a_width,
        B_LOADS=shape.NWG // shape.NDIMC // b_width,
    )
