"""The MLP half of a transformer block: norm, gate, up and SwiGLU in one dispatch, then down projection and residual."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..gpu import Device, Recording
from .linear import Matrix, pad_vector, record_linear
from .quant import QuantizedTensor, stack_rows


class MlpBlock:
    """The weights of one layer's MLP half, on the device, and the recording of its dispatches.

    Args:
        weights: norm (E,), gate and up (I, E), down (E, I); matrices as QuantizedTensor, norm float32.
    """

    def __init__(self, device: Device, weights: Mapping[str, Any], eps: float):
        self.eps = eps
        self.gamma = device.tensor(pad_vector(weights["norm"]))
        gate, up = weights["gate"], weights["up"]
        self.hidden = gate.shape[0]
        if gate.kind == up.kind:
            self.gate_up = [(Matrix(device, _interleave(gate, up), unit=2), "swiglu")]
        else:
            self.gate_up = [(Matrix(device, up), "store"), (Matrix(device, gate), "silu_mul")]
        self.down = Matrix(device, weights["down"])

    @property
    def nbytes(self) -> int:
        return self.gamma.nbytes + sum(m.nbytes for m, _ in self.gate_up) + self.down.nbytes

    def record(self, recording: Recording, state: Mapping[str, Any], tokens: int) -> None:
        """Append h += down . (silu(gate . norm(h)) * (up . norm(h))) for up to `tokens` tokens.

        state: `step`, the residual stream `h` (tokens, padded E), scratch `hidden` (tokens, padded I).
        """
        for matrix, output in self.gate_up:
            record_linear(
                recording,
                matrix,
                step=state["step"],
                x=state["h"],
                output=output,
                outputs={"y": state["hidden"]},
                tokens=tokens,
                y_stride=state["hidden"].shape[1],
                gamma=self.gamma,
                eps=self.eps,
                label="norm, gate, up, SwiGLU",
            )
        record_linear(
            recording,
            self.down,
            step=state["step"],
            x=state["hidden"],
            output="add",
            outputs={"y": state["h"]},
            tokens=tokens,
            y_stride=state["h"].shape[1],
            label="down projection, residual",
        )


def _interleave(gate: QuantizedTensor, up: QuantizedTensor) -> QuantizedTensor:
    """Rows gate 0, up 0, gate 1, up 1 ...: a team then owns both sides of its products."""
    rows = gate.shape[0]
    return stack_rows([gate, up], np.arange(2 * rows).reshape(2, rows).T.reshape(-1))
