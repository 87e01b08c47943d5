"""Path "gemm": attention as two products of padded matrices, seven dispatches (six without a mask), `attention/xgemm_batched.wgsl` and those around it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from ..gpu import Device, DeviceProfile, Kernel, Part, Recording
from . import problem as common
from .matrices import Matrices, add_softmax, mask_share, neutral_options, padded, rounds, softmax_lanes, too_large
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
