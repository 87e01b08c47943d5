"""The same layer in 13 dispatches instead of 5, from the same projection kernels: to measure what fusing them gains, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..attention.kv_cache import KVCache
from ..gpu import Device, Recording, Tensor
from .arithmetic import resolve
from .attention_block import ChosenAttention, Geometry, head_gamma, rope_options
from .linear import Matrix, pad_vector, padded, record_linear
from .mlp import gate_up_bias
from .quant import stack_rows
from .rope import Rope


class UnfusedAttentionBlock:
    """As `AttentionBlock`, in eight dispatches: norm; Q; K; V; RoPE and KV append; attention; output projection; residual."""

    def __init__(self, device: Device, weights: Mapping[str, Any], geometry: Geometry, rope: Rope | None, arithmetic: str = "exact"):
        geometry.check(rope)
        self.geometry, self.rope, self.arithmetic = geometry, rope, arithmetic
        self.gamma = device.tensor(pad_vector(weights["norm"]))
        self.matrices = {name: Matrix(device, weights[name]) for name in ("wq", "wk", "wv", "wo")}
        self.biases = {f"w{n[1]}": device.tensor(weights[n]) for n in ("bq", "bk", "bv", "bo") if weights.get(n) is not None}
        self.head_gamma = head_gamma(device, weights, geometry, rope)
        self._no_gamma = device.empty((4,))

    def record(self, recording: Recording, attention: ChosenAttention, cache: KVCache, state: Mapping[str, Any], tokens: int) -> None:
        """As `AttentionBlock.record`; the state also has scratch `normed`, `new_keys`, `new_values`, `projected`, and always `y` and `residual`."""
        g, device = self.geometry, recording.device
        _norm(recording, state, self.gamma, self.matrices["wq"].columns, g.eps, tokens)
        for name, x, y in (("wq", "normed", "query"), ("wk", "normed", "new_keys"), ("wv", "normed", "new_values")):
            _project(recording, state, self.matrices[name], x, y, tokens, self.arithmetic, self.biases.get(name))
        kernel = device.kernel(
            "block/rope_append",
            "step",
            "block/parts/output_qkv",
            *cache.format.cache_parts,
            **g.kernel_options,
            **rope_options(self.rope),
            QK_NORM=self.head_gamma is not None,
            ROWS=4,
            QUADS=1,
            WORKGROUP=g.head_dim // 4,
        )
        gamma = self._no_gamma if self.head_gamma is None else self.head_gamma
        buffers = {name: state[name] for name in ("step", "rope", "query", "new_keys", "new_values")}
        buffers |= {"head_gamma": gamma, "keys": cache.keys, "values": cache.values}
        heads = g.num_heads + 2 * g.num_kv_heads
        strides = {"y_stride": state["query"].shape[1], "kv_stride": state["new_keys"].shape[1]}
        recording.add(kernel, (heads, tokens), buffers, {"rows": heads * g.head_dim, "first_row": 0, **strides, "eps": g.eps}, label="RoPE, KV append")
        attention.record(recording, step=state["step"], query=state["query"], cache=cache, out=state["attended"])
        _project(recording, state, self.matrices["wo"], "attended", "projected", tokens, self.arithmetic, self.biases.get("wo"))
        _add_residual(recording, state, self.matrices["wo"].rows, tokens)


class UnfusedMlpBlock:
    """As `MlpBlock`, in five dispatches (six where gate and up are of different kinds): norm; gate and up; SwiGLU; down; residual."""

    def __init__(self, device: Device, weights: Mapping[str, Any], eps: float, arithmetic: str = "exact"):
        self.eps, self.arithmetic = eps, arithmetic
        self.gamma = device.tensor(pad_vector(weights["norm"]))
        gate, up = weights["gate"], weights["up"]
        self.hidden = gate.shape[0]
        self.gate_up = [(Matrix(device, m), i * self.hidden) for i, m in enumerate([stack_rows([gate, up])] if gate.kind == up.kind else [gate, up])]
        biases = gate_up_bias(weights)
        self.bias = None if biases is None else device.tensor(biases.reshape(-1))
        self.down = Matrix(device, weights["down"])
        self.b_down = None if weights.get("b_down") is None else device.tensor(weights["b_down"])

    def record(self, recording: Recording, state: Mapping[str, Any], tokens: int) -> None:
        """As `MlpBlock.record`; the state also has scratch `normed`, `gate_up`, `projected`, and always `y` and `residual`."""
        _norm(recording, state, self.gamma, self.down.rows, self.eps, tokens)
        for matrix, first in self.gate_up:
            _project(recording, state, matrix, "normed", "gate_up", tokens, self.arithmetic, self.bias, first)
        both, hidden = state["gate_up"], state["hidden"]
        strides = {"a_stride": both.shape[1], "b_stride": both.shape[1], "b_first": self.hidden, "y_stride": hidden.shape[1]}
        _elementwise(recording, state, "silu_mul", {"a": both, "b": both, "y": hidden}, {"columns": self.hidden, **strides}, tokens, "SwiGLU")
        _project(recording, state, self.down, "hidden", "projected", tokens, self.arithmetic, self.b_down)
        _add_residual(recording, state, self.down.rows, tokens)


def _norm(recording: Recording, state: Mapping[str, Any], gamma: Tensor, columns: int, eps: float, tokens: int) -> None:
    profile = recording.device.profile
    lanes = 1 if profile.software else min(profile.subgroup_size or 32, 32)
    kernel = recording.device.kernel("block/norm", "step", profile.team_part(lanes), LANES=lanes, WORKGROUP=lanes)
    buffers = {"step": state["step"], "x": state["h"], "gamma": gamma, "y": state["normed"]}
    recording.add(kernel, (tokens,), buffers, {"columns": columns, "stride": padded(columns), "eps": eps}, label="norm")


def _project(
    recording: Recording, state: Mapping[str, Any], matrix: Matrix, x: str, y: str, tokens: int, arithmetic: str, bias: Tensor | None, first: int = 0
) -> None:
    record_linear(
        recording,
        matrix,
        step=state["step"],
        x=state[x],
        output="store",
        outputs={"y": state[y]},
        tokens=tokens,
        y_stride=state[y].shape[1],
        first_row=first,
        bias=bias,
        arithmetic=resolve(recording.device, matrix, tokens, arithmetic),
        label=f"{y} projection",
    )


def _add_residual(recording: Recording, state: Mapping[str, Any], columns: int, tokens: int) -> None:
    projected, y = state["projected"], state["y"]
    strides = {"a_stride": projected.shape[1], "b_stride": y.shape[1], "b_first": 0, "y_stride": y.shape[1]}
    buffers = {"a": projected, "b": state["residual"], "y": y}
    _elementwise(recording, state, "add", buffers, {"columns": columns, **strides}, tokens, "residual")


def _elementwise(recording: Recording, state: Mapping[str, Any], part: str, buffers: dict, params: Mapping[str, int], tokens: int, label: str) -> None:
    workgroup = min(64, recording.device.profile.max_invocations)
    kernel = recording.device.kernel("block/elementwise", "step", f"block/parts/combine_{part}", WORKGROUP=workgroup)
    groups = (int(np.ceil(params["columns"] / workgroup)), tokens)
    recording.add(kernel, groups, {"step": state["step"], **buffers}, params, label=label)
