"""An attention problem: its sizes and features, its operands in memory, and what all kernels that solve it have in common."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..gpu import DeviceProfile, Kernel, Part, Recording, Tensor
from ..gpu.shader import Option
from .kv_format import kv_format

OPEN = 2**29
"""`left` or `right` of a window that is open on that side."""

MASKS = ("none", "f32", "f16", "u8", "u32")


@dataclass(frozen=True)
class Problem:
    """What is asked for; decides kernels together with a device's profile, and needs no device itself.

    `keys` is the most keys a sequence can have. Each query sees `left` keys before and `right` after its own position.
    """

    batch: int
    num_heads: int
    num_kv_heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    scale: float
    dtype: str = "f32"
    """Storage of queries and outputs, "f32" or "f16"."""
    kv_dtype: str = "f32"
    """One of KV_FORMATS; the quantised ones for rows of a `KVCache`."""
    mask: str = "none"
    """How the mask is stored: one of MASKS."""
    left: int = OPEN
    right: int = OPEN
    bottom_right: bool = True
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    lse: bool = False
    lengths: str = "fixed"
    """Where the number of keys comes from: "fixed", "each" (a buffer, one a sequence) or "step" (the state of a recorded step)."""
    half: bool = False
    """Queries and probabilities may be rounded to f16, even where they are f32."""
    in_place: bool = False
    """Outputs replace the queries in their buffer, f32 rows of a multiple of 4; for paths that read a query before they write its output."""

    @property
    def ratio(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def width(self) -> int:
        """vec4s in a row of queries or keys."""
        return -(-self.head_dim // 4)

    @property
    def value_width(self) -> int:
        """vec4s in a row of values or outputs."""
        return -(-self.value_dim // 4)

    @property
    def rows(self) -> int:
        """Rows of scores in all: batch x heads x queries."""
        return self.batch * self.num_heads * self.queries

    @property
    def operations(self) -> float:
        """Multiplications and additions of both products, at most: of a prompt as if all its queries saw what the last one can see.

        0 for one query, which never takes long: a decode step stays one submit.
        """
        if self.queries == 1:
            return 0.0
        return 2.0 * self.rows * min(self.keys, self.left + self.right + 1) * (self.head_dim + self.value_dim)

    @property
    def storage_buffers(self) -> int:
        """How many a kernel binds that does it all."""
        return 4 + sum((self.mask != "none", self.alibi, self.sinks, self.lse, self.lengths == "each"))

    @property
    def plain(self) -> bool:
        """Scores are only scaled."""
        return not (self.softcap or self.alibi or self.mask != "none")


@dataclass(frozen=True)
class Rows:
    """Rows of a tensor by batch, head and position; strides in elements. scales: the word where those of a quantised KV cache begin."""

    tensor: Any
    batch: int
    head: int
    row: int
    scales: int = 0

    @classmethod
    def of(cls, tensor: Tensor, layout: str) -> Rows:
        """A dense four-dimensional tensor in layout "bhsd" or "bshd"."""
        _, first, second, width = tensor.shape
        if layout == "bhsd":
            return cls(tensor, first * second * width, second * width, width)
        return cls(tensor, first * second * width, width, second * width)


@dataclass
class Operands:
    """Where a problem's inputs and outputs are. Those of features that the problem does not use are None."""

    query: Rows
    keys: Rows
    values: Rows
    out: Rows
    mask: Any = None
    mask_strides: tuple[int, int, int, int] = (0, 0, 0, 0)
    """(batch, head, row, column) in elements; 0 broadcasts."""
    mask_first: int = 0
    """The key that the mask's first column belongs to; earlier keys are visible."""
    sinks: Any = None
    alibi_slopes: Any = None
    key_lengths: Any = None
    lse: Any = None
    step: Any = None
    extra: dict[str, Any] = field(default_factory=dict)
    """Scratch buffers of a path, by the names its kernels declare."""

    def buffers(self) -> dict[str, Any]:
        """All that a kernel may bind, by name."""
        named = {
            "query": self.query.tensor,
            "keys": self.keys.tensor,
            "values": self.values.tensor,
            "out": self.out.tensor,
            "mask": self.mask,
            "sinks": self.sinks,
            "alibi_slopes": self.alibi_slopes,
            "key_lengths": self.key_lengths,
            "lse": self.lse,
            "step": self.step,
        }
        return {name: buffer for name, buffer in named.items() if buffer is not None} | self.extra


def params(problem: Problem, operands: Operands, splits: int = 1, first_group: int = 0) -> dict[str, float]:
    """The values of `attention/parts/problem.wgsl`."""
    p, o = problem, operands
    strides = {
        f"{letter}_{axis}": getattr(rows, axis)
        for letter, rows in (("q", o.query), ("k", o.keys), ("v", o.values), ("o", o.out))
        for axis in ("batch", "head", "row")
    }
    scales = {"k_scales": o.keys.scales, "v_scales": o.values.scales}
    mask = dict(zip(("mask_batch", "mask_head", "mask_row", "mask_column"), o.mask_strides, strict=True))
    sizes = {"batch": p.batch, "heads": p.num_heads, "kv_heads": p.num_kv_heads, "queries": p.queries, "keys": p.keys}
    rule = {"left": p.left, "right": p.right, "bottom_right": int(p.bottom_right), "scale": p.scale, "softcap": p.softcap}
    return {**sizes, **strides, **scales, **mask, "mask_first": o.mask_first, **rule, "splits": splits, "first_group": first_group}


def rows_part(problem: Problem, name: str) -> Part:
    """The part that loads rows of "query", "keys" or "values"."""
    if name == "query" and problem.in_place:
        return Part.of("parts/rows_in_place", name=name, target="out")
    width = "VALUE_DIM" if name == "values" else "HEAD_DIM"
    dim = problem.value_dim if name == "values" else problem.head_dim
    stored = kv_format(problem.dtype if name == "query" else problem.kv_dtype)
    return stored.load_part(name, width, dim, f"params.{name[0]}_scales")


def by_eights(problem: Problem, operands: Operands, name: str) -> bool:
    """Whether rows of "keys" or "values" are f16 and begin at multiples of 16 bytes, so that eight channels can be a load."""
    rows, dim = (operands.keys, problem.head_dim) if name == "keys" else (operands.values, problem.value_dim)
    return problem.kv_dtype == "f16" and all(n % 8 == 0 for n in (dim, rows.batch, rows.head, rows.row))


def beyond_limits(profile: DeviceProfile, problem: Problem) -> str | None:
    """What a dispatch for all KV heads and sequences exceeds on a device, in a sentence, or None."""
    limit = profile.max_workgroups
    if max(problem.num_kv_heads, problem.batch) > limit:
        return f"{problem.num_kv_heads} KV heads and {problem.batch} sequences must each be at most {limit}."
    if problem.storage_buffers > profile.max_storage_buffers:
        return f"it binds {problem.storage_buffers} storage buffers, there are {profile.max_storage_buffers}."
    return None


def base_parts(problem: Problem) -> list[str | Part]:
    """Sizes and lengths: every attention kernel has them."""
    return ["attention/parts/problem", f"attention/parts/lengths_{problem.lengths}", *(["step"] if problem.lengths == "step" else [])]


def score_parts(problem: Problem) -> list[str | Part]:
    """What happens to a score between the dot product and the softmax."""
    if problem.plain:
        return ["attention/parts/adjust_plain"]
    alibi = "some" if problem.alibi else "none"
    return ["attention/parts/adjust_terms", f"attention/parts/alibi_{alibi}", f"attention/parts/mask_{problem.mask}"]


def finish_parts(problem: Problem) -> list[str | Part]:
    """The end of a softmax and the store of an output row."""
    store = "any_f32" if problem.value_dim % 4 else f"vec4_{problem.dtype}"
    return [
        Part.of(f"parts/store_{store}", name="out", width="VALUE_DIM"),
        "attention/parts/finish",
        f"attention/parts/sink_{'some' if problem.sinks else 'none'}",
        f"attention/parts/lse_{'some' if problem.lse else 'none'}",
    ]


def options(problem: Problem) -> dict[str, Option]:
    """Constants that every attention kernel has."""
    return {"HEAD_DIM": problem.head_dim, "VALUE_DIM": problem.value_dim, "SOFTCAP": bool(problem.softcap)}


def add(
    recording: Recording,
    kernel: Kernel,
    groups: tuple[int, ...],
    problem: Problem,
    operands: Operands,
    scratch: Mapping[str, Any] | None = None,
    splits: int = 1,
    label: str = "",
    operations: float = 0.0,
    first_group: int = 0,
) -> None:
    """Append a dispatch, binding what the kernel declares out of operands and scratch."""
    everything = operands.buffers() | dict(scratch or {})
    buffers = {name: everything[name] for name, _ in kernel.source.buffers if name != "params"}
    recording.add(kernel, groups, buffers, params(problem, operands, splits, first_group), label or kernel.source.name, operations)


def pieces(profile: DeviceProfile, groups: int, operations: float) -> Iterator[tuple[int, int, float]]:
    """(first, number, operations) of the workgroups that go into a dispatch each, so that none runs for long; usually one has them all."""
    share = max(1, groups // max(1, math.ceil(operations / profile.most_operations)))
    for first in range(0, groups, share):
        number = min(share, groups - first)
        yield first, number, operations * number / groups


def packs_output(problem: Problem) -> bool:
    """Kernels write f32 and a last dispatch packs f16: rows of odd length share words, which no two invocations may write."""
    return problem.dtype == "f16" and problem.value_dim % 4 != 0
