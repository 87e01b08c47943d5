"""What the activations of a block take: the shapes that its buffers really have, and reports made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from ..attention.arguments import whole
from ..attention.kv_format import kv_format
from ..errors import CapacityError
from ..gpu import DeviceProfile
from .linear import padded

Shapes = dict[str, tuple[int, int]]


def attention_buffers(
    embed: int, num_heads: int, num_kv_heads: int, head_dim: int, tokens: int, fused: bool = True, kv_dtype: str = "f32"
) -> Shapes:
    """Scratch of the attention half, float32, by name; `attended` is `query` where fused: outputs replace the queries. Without split-K partials.

    A quantised cache takes the rows of several tokens in a dispatch of their own, before which they wait in `new_keys` and `new_values`.
    """
    query = (tokens, padded(num_heads * head_dim))
    if fused:
        waiting = ("new_keys", "new_values") if kv_format(kv_dtype).quantised and tokens > 1 else ()
        return {"query": query, **dict.fromkeys(waiting, (tokens, num_kv_heads * head_dim))}
    new, row = (tokens, padded(num_kv_heads * head_dim)), (tokens, padded(embed))
    return {"normed": row, "query": query, "new_keys": new, "new_values": new, "attended": query, "projected": row}


def mlp_buffers(embed: int, hidden: int, tokens: int, fused: bool = True) -> Shapes:
    """Scratch of the MLP half, float32, by name."""
    act = {"hidden": (tokens, padded(hidden))}
    return act if fused else {"normed": (tokens, padded(embed)), "gate_up": (tokens, padded(2 * hidden)), **act, "projected": (tokens, padded(embed))}


def nbytes(shapes: Mapping[str, tuple[int, int]]) -> int:
    """Bytes of float32 buffers."""
    return sum(4 * rows * columns for rows, columns in shapes.values())


def partial_bytes(num_heads: int, head_dim: int, splits: int, tokens: int = 1) -> int:
    """Bytes of the partial results of split keys: an output, a maximum and a sum for each head and split; none for one split."""
    return 4 * tokens * num_heads * splits * (-(-head_dim // 4) * 4 + 2) if splits > 1 else 0


def optimal_tiles(head_dim: int, profile: DeviceProfile) -> tuple[int, int]:
    """(query rows, keys) of a tile of prefill attention that fits the device's workgroup memory; pure.

    A tile keeps its keys, then its values, in rows of head_dim + 1 floats, and the scores. As many keys as fit, for 32 rows or else fewer.

    Raises ArgumentError for a head dim below 1, TypeError for what is no profile, CapacityError when not even one row and four keys fit.
    """
    if not isinstance(profile, DeviceProfile):
        raise TypeError(f"profile is a {type(profile).__name__}; it must be a DeviceProfile, such as device.profile.")
    row = -(-whole("head_dim", head_dim) // 4) * 4 + 1
    for queries in (32, 16, 8, 4, 2, 1):
        for keys in (64, 32, 16, 8, 4):
            if 4 * (keys * row + queries * keys) <= profile.workgroup_memory:
                return queries, keys
    raise CapacityError(f"No tile for heads of {head_dim} fits {profile.workgroup_memory} bytes of workgroup memory on {profile.name}.")


@dataclass(frozen=True)
class Saving:
    """Bytes without and with fusion."""

    what: str
    unfused: int
    fused: int

    @property
    def ratio(self) -> float:
        return self.unfused / self.fused


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of intermediates; `str()` or rich's print shows a table. KV cache, weights, and the residual stream in and out are not counted."""

    title: str
    rows: tuple[Saving, ...]
    buffers: Mapping[str, Mapping[str, tuple[int, int]]] = field(default_factory=dict)
    """For "fused" and "unfused", decode: the float32 buffers of a layer by name, with their shapes."""
    partials: int = 0
    """Bytes of split-K partials of one decode step, for the number of splits asked about; they are in the rows that say so."""

    def __getitem__(self, what: str) -> Saving:
        return next(row for row in self.rows if row.what == what)

    def _table(self) -> Table:
        table = Table("intermediates", "unfused, bytes", "fused, bytes", "ratio", title=self.title, title_justify="left")
        for column in table.columns[1:]:
            column.justify = "right"
        for r in self.rows:
            table.add_row(r.what, f"{r.unfused:,}", f"{r.fused:,}", f"{r.ratio:.2f}x")
        return table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._table()

    def __str__(self) -> str:
        console = Console(width=120, color_system=None)
        with console.capture() as captured:
            console.print(self._table())
        return captured.get()


def memory_report(
    hidden: int,
    layers: int,
    seq_len: int,
    *,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int = 64,
    intermediate: int | None = None,
    splits: int = 1,
    kv_dtype: str = "f32",
) -> MemoryReport:
    """What fusing a transformer block saves in activations, in the bytes of the buffers that our fused and unfused recordings allocate.

    Args:
        hidden: E. layers: of the model. seq_len: tokens of a prefill that is computed at once.
        num_heads: default hidden / head_dim; num_kv_heads: default half of that; intermediate: I of the MLP, default 4 * hidden.
        splits: parts that decode attention divides its keys into; their partial results are memory that fusion does not save.
        kv_dtype: how the cache is stored: a quantised one costs a prefill a copy of its keys and values.

    The prefill rows count what the original operator keeps besides: a head-major copy of the attended heads, and, in the row that says so, a
    matrix of scores and one of probabilities. "whole model" compares every layer having buffers of its own with one set that all layers share.
    """
    hidden, head_dim, layers, seq_len, splits = (
        whole(name, n) for name, n in (("hidden", hidden), ("head_dim", head_dim), ("layers", layers), ("seq_len", seq_len), ("splits", splits))
    )
    num_heads = whole("num_heads", hidden // head_dim if num_heads is None else num_heads)
    num_kv_heads = whole("num_kv_heads", max(1, num_heads // 2) if num_kv_heads is None else num_kv_heads)
    intermediate = whole("intermediate", 4 * hidden if intermediate is None else intermediate)
    sizes, T = (hidden, num_heads, num_kv_heads, head_dim), seq_len
    attention = {fused: nbytes(attention_buffers(*sizes, 1, fused)) for fused in (False, True)}
    prompt = nbytes(attention_buffers(*sizes, T, True, kv_dtype))
    mlp = {fused: nbytes(mlp_buffers(hidden, intermediate, 1, fused)) for fused in (False, True)}
    stream = 4 * padded(hidden)
    partials = partial_bytes(num_heads, head_dim, splits)
    copied = T * (attention[False] + 4 * padded(num_heads * head_dim))
    scores = 2 * 4 * num_heads * T * T
    rows = [
        Saving("decode, attention half", attention[False], attention[True]),
        *([Saving(f"decode, attention half, {splits} splits", attention[False], attention[True] + partials)] if splits > 1 else []),
        Saving("decode, whole layer", attention[False] + stream + mlp[False], attention[True] + mlp[True]),
        Saving("decode, attention half, whole model", layers * attention[False], attention[True]),
        Saving(f"prefill of {T}, attention half", copied, prompt),
        Saving(f"prefill of {T}, attention half with scores", copied + scores, prompt),
        Saving(f"prefill of {T}, MLP half", T * (stream + mlp[False]), T * (stream + mlp[True])),
    ]
    buffers = {
        name: {f"attention.{k}": v for k, v in attention_buffers(*sizes, 1, fused).items()}
        | {f"mlp.{k}": v for k, v in mlp_buffers(hidden, intermediate, 1, fused).items()}
        for name, fused in (("fused", True), ("unfused", False))
    }
    title = f"E {hidden}, {num_heads}/{num_kv_heads} heads of {head_dim}, I {intermediate}, {layers} layers; float32"
    return MemoryReport(title, tuple(rows), buffers, partials)


def allocate(device: Any, shapes: Shapes) -> dict[str, Any]:
    """The buffers on a device."""
    return {name: device.empty(shape) for name, shape in shapes.items()}
