"""The MLP half of a transformer block: norm, gate, up and SwiGLU in one dispatch, then down projection and residual."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..gpu import Device, Recording, Store, Tensor
from .arithmetic import resolve
from .attention_block import residual_output
from .linear import Matrix, pad_vector, padded, record_linear
from .quant import QuantizedTensor, stack_rows
from .slices import SLICE, SliceShape, choose_slice, onward
from .vector import choose_vector, digits_of


class MlpBlock:
    """The weights of one layer's MLP half, on the device, and the recording of its dispatches.

    Args:
        device: what makes the tensors, a device or an arena.
        weights: norm (E,), gate and up (I, E), down (E, I), optional b_gate b_up b_down; matrices as QuantizedTensor, vectors float32.
    """

    def __init__(self, device: Store, weights: Mapping[str, Any], eps: float, arithmetic: str = "exact"):
        self.eps, self.arithmetic = eps, arithmetic
        self.gamma = device.tensor(pad_vector(weights["norm"]))
        gate, up = weights["gate"], weights["up"]
        self.hidden = gate.shape[0]
        biases = gate_up_bias(weights)
        self.gate_up: list[tuple[Matrix, str, Tensor | None]]
        if gate.kind == up.kind:
            bias = None if biases is None else device.tensor(biases.T.reshape(-1))
            self.gate_up = [(Matrix(device, _interleave(gate, up), unit=2), "swiglu", bias)]
        else:
            of_gate, of_up = (None, None) if biases is None else (device.tensor(b) for b in biases)
            self.gate_up = [(Matrix(device, up), "store", of_up), (Matrix(device, gate), "silu_mul", of_gate)]
        self.down = Matrix(device, weights["down"])
        self.b_down = None if weights.get("b_down") is None else device.tensor(weights["b_down"])

    @property
    def nbytes(self) -> int:
        vectors = [b for b in (self.gamma, self.b_down, *(b for _, _, b in self.gate_up)) if b is not None]
        return sum(m.nbytes for m, _, _ in self.gate_up) + self.down.nbytes + sum(v.nbytes for v in vectors)

    def record(self, recording: Recording, state: Mapping[str, Any], tokens: int) -> None:
        """Append h += down . (silu(gate . norm(h)) * (up . norm(h))) for up to `tokens` tokens.

        state: `step`, the residual stream `h` (tokens, padded E), scratch `hidden` (tokens, padded I). With `y` in it, the result goes there,
        on top of `residual`; with `stream`, that is read and left instead of h; see `AttentionBlock.record`.
        """
        x, device = state.get("stream", state["h"]), recording.device
        shape = self._slice(device) if "stream" in state else None
        end = onward(recording, self.down, self.b_down, shape, "MLP") if shape else None
        hidden = {"output": "slice", "outputs": end.buffers, "parts": (end.part,), "options": end.options, "group_rows": 2 * shape.columns} if end else {}
        for matrix, output, bias in self.gate_up:
            record_linear(
                recording,
                matrix,
                step=state["step"],
                x=x,
                tokens=tokens,
                gamma=self.gamma,
                eps=self.eps,
                bias=bias,
                arithmetic=resolve(device, matrix, tokens, self.arithmetic),
                label=end.label if end else "norm, gate, up, SwiGLU",
                **(hidden or {"output": output, "outputs": {"y": state["hidden"]}, "y_stride": state["hidden"].shape[1]}),
            )
        if end:
            x.leave(end, shape.slices)
            return
        record_linear(
            recording,
            self.down,
            step=state["step"],
            x=state["hidden"],
            tokens=tokens,
            bias=self.b_down,
            arithmetic=resolve(device, self.down, tokens, self.arithmetic),
            label="down projection, residual",
            **residual_output(state),
        )

    def _slice(self, device: Device) -> SliceShape | None:
        """How the dispatch of gate and up goes on with the down projection; None where that has one of its own."""
        matrix, output, _ = self.gate_up[0]
        if output != "swiglu" or len(matrix.pieces) > 1 or len(self.down.pieces) > 1 or device.profile.software:
            return None
        first, last = (digits_of(m.format, resolve(device, m, 1, self.arithmetic)) for m in (matrix, self.down))
        group = choose_vector(device.profile, matrix.rows, padded(matrix.columns), matrix.format, first, 2 * SLICE)
        if group is None:
            return None
        sizes = (self.down.rows, self.down.columns, SLICE, self.down.format, last)
        return choose_slice(device.profile, *sizes, group.workgroup, group.workgroup_bytes)


def gate_up_bias(weights: Mapping[str, Any]) -> np.ndarray | None:
    """(2, I) float32 of gate and up; zeros where only one has a bias, None where neither has."""
    given = [weights.get("b_gate"), weights.get("b_up")]
    if all(b is None for b in given):
        return None
    return np.stack([np.zeros(weights["gate"].shape[0]) if b is None else b for b in given]).astype(np.float32)


def _interleave(gate: QuantizedTensor, up: QuantizedTensor) -> QuantizedTensor:
    """Rows gate 0, up 0, gate 1, up 1 ...: a team then owns both sides of its products."""
    rows = gate.shape[0]
    return stack_rows([gate, up], np.arange(2 * rows).reshape(2, rows).T.reshape(-1))
