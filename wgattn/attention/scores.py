"""What goes into attention's product with the values: scores and probabilities, for those who want to look at them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import ArgumentError, Unsupported
from ..gpu import Recording, Tensor, grid
from . import problem as common
from . import unfused
from .arguments import mask_first, mask_strides
from .functional import Call, on_device, prepare
from .matrices import add_softmax, neutral_options, rounds
from .problem import OPEN, Operands, Problem, Rows

Array = Any

STAGES = ("scaled", "softcap", "masked", "softmax")


def attention_scores(query: Array, key: Array, attn_mask: Array | None = None, *, stage: str = "softmax", **options: Any) -> Array:
    """The scores of attention at one of its stages, (B, H, S, T) float32, computed on the GPU by the kernels of path "unfused".

    Args:
        query, key, attn_mask, options: as in `scaled_dot_product_attention`, without `return_lse` and `path`.
        stage: "scaled": scale * query . key^T of every pair, whoever sees whom. "softcap": the same after the softcap. "masked": with ALiBi and mask
            added, -inf where mask, causal rule, window or key length hide the key. "softmax": the probabilities; rows that see no key are zeros.
            ONNX numbers these stages 0 to 3 (`qk_matmul_output_mode`).

    Raises:
        As `scaled_dot_product_attention`; CapacityError when the scores do not fit a binding of the device.
    """
    if stage not in STAGES:
        raise ArgumentError(f"There is no stage {stage!r}; choose one of {', '.join(STAGES)}.")
    call = prepare(query, key, key, attn_mask, **options)
    p, device = call.problem, call.device
    if stage in ("scaled", "softcap"):
        p = replace(p, mask="none", alibi=False, left=OPEN, right=OPEN, bottom_right=False, lengths="fixed")
    p = replace(p, softcap=0.0 if stage == "scaled" else p.softcap, sinks=p.sinks and stage == "softmax", lse=False)
    missing = unfused.unsupported(device.profile, p)
    if missing:
        raise Unsupported(f"Scores cannot be computed on {device.name}: {missing}")
    out = device.empty((p.batch, p.num_heads, p.queries, p.keys))
    if out.size:
        recording = Recording(device)
        _record(recording, p, _operands(call, p), stage, out)
        recording.replay()
    return out if call.as_tensors else out.numpy()


def _operands(call: Call, p: Problem) -> Operands:
    def given(name: str) -> Tensor:
        return on_device(call.device, call.inputs[name])

    query, keys = (Rows.of(given(name), call.layout) for name in ("query", "keys"))
    operands = Operands(query, keys, keys, query)
    if p.mask != "none":
        mask = call.inputs["mask"]
        operands.mask, operands.mask_strides, operands.mask_first = given("mask"), mask_strides(mask.shape), mask_first(mask.shape, p.keys)
    operands.alibi_slopes = given("alibi_slopes") if p.alibi else None
    operands.sinks = given("sinks") if p.sinks else None
    operands.key_lengths = given("key_lengths") if p.lengths == "each" else None
    return operands


def _record(recording: Recording, p: Problem, operands: Operands, stage: str, out: Tensor) -> None:
    """Append the scores' dispatches, for each round of heads that fits a binding."""
    device, sizes = recording.device, unfused.matrices(p)
    shape = unfused.choose_unfused(device.profile, p)
    options = {**neutral_options(p), "PROBABILITIES": stage == "softmax", "WORKGROUP": 64}
    copy = device.kernel("attention/stage", *common.base_parts(p), "attention/parts/matrices", **options)
    scores = None
    for first, planes in rounds(device.profile, p, sizes):
        scores = scores or device.empty((planes, sizes.rows, sizes.columns), np.float32)
        scratch = {"scores": scores, "matrices": sizes.uniform(device, first, planes), "stage": out}
        unfused.add_scores(recording, p, operands, scratch, planes, shape)
        if stage == "softmax":
            add_softmax(recording, p, operands, scratch, planes, shape.lanes)
        groups = grid(math.ceil(planes * p.queries * p.keys / 64), device.profile.max_workgroups)
        common.add(recording, copy, groups, p, operands, scratch, label=f"attention {stage}")
