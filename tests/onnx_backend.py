"""ONNX operators by wgattn's kernels: an adapter that runs the node tests of the ONNX standard, as the `onnx` package carries them.

It knows three operators: Attention (opset 23 and later), RotaryEmbedding and RMSNormalization. Arrays of bfloat16, which the device does not
store, become float32 on the host, and results become bfloat16 again; float16 stays as it is. All arithmetic is in float32.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from onnx import ModelProto, helper
from onnx.backend.base import Backend, BackendRep
from onnx.backend.test.case import node as node_cases
from onnx.backend.test.case.test_case import TestCase

import wgattn
from wgattn.attention.kv_cache import KVCache
from wgattn.attention.scores import STAGES, attention_scores
from wgattn.gpu import Device, Recording, StepState

Array = np.ndarray
MODULES = {"Attention": "attention", "RotaryEmbedding": "rotaryembedding", "RMSNormalization": "rmsnormalization"}


def operator(case: TestCase) -> str | None:
    """The operator that a case tests, if we have it and the case is not its expansion into other operators."""
    nodes = case.model.graph.node
    return nodes[0].op_type if len(nodes) == 1 and nodes[0].op_type in MODULES and not nodes[0].domain else None


@cache
def cases() -> dict[str, TestCase]:
    """The package's cases for our operators by name. Their inputs are drawn when they are imported: from a seed, so that each run sees the same."""
    state = np.random.get_state()  # noqa: NPY002 - the package draws from NumPy's global generator
    np.random.seed(23)  # noqa: NPY002
    try:
        for module in MODULES.values():
            importlib.import_module(f"{node_cases.__name__}.{module}")
    finally:
        np.random.set_state(state)  # noqa: NPY002
    return {case.name: case for case in node_cases._NodeTestCases if operator(case)}


def opset(case: TestCase) -> int:
    """The version of the standard that a case is written for."""
    return next(o.version for o in case.model.opset_import if not o.domain)


class WgattnBackend(Backend):
    """Models of one node that wgattn has; attention by the path of that name."""

    @classmethod
    def prepare(cls, model: ModelProto, device: Device | None = None, path: str = "auto", **kwargs: Any) -> WgattnModel:
        return WgattnModel(model, device or wgattn.default_device(), path)


class WgattnModel(BackendRep):
    """One node, ready to run."""

    def __init__(self, model: ModelProto, device: Device, path: str):
        (self.node,) = model.graph.node
        self.names = [i.name for i in model.graph.input]
        self.device, self.path = device, path
        self.attributes = {a.name: helper.get_attribute_value(a) for a in self.node.attribute}

    def run(self, inputs: Sequence[Array], **kwargs: Any) -> list[Array]:
        given = dict(zip(self.names, inputs, strict=True))
        arrays = [given.get(name) for name in self.node.input]  # a left-out input has an empty name
        dtype = arrays[0].dtype
        arrays = [a.astype(np.float32) if a is not None and a.dtype == ml_dtypes.bfloat16 else a for a in arrays]
        results = {"Attention": self._attention, "RotaryEmbedding": self._rotary, "RMSNormalization": self._norm}[self.node.op_type](*arrays)
        return [r.astype(dtype) for r, name in zip(results, self.node.output, strict=False) if name]

    # ---- Attention

    def _attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        mask: Array | None = None,
        past_key: Array | None = None,
        past_value: Array | None = None,
        lengths: Array | None = None,
    ) -> list[Array | None]:
        flat = q.ndim == 3
        if flat:
            heads, kv_heads = self.attributes["q_num_heads"], self.attributes["kv_num_heads"]
            q, k, v = (a.reshape(*a.shape[:2], n, -1).swapaxes(1, 2) for a, n in ((q, heads), (k, kv_heads), (v, kv_heads)))
        past = 0 if past_key is None else past_key.shape[2]
        if past_key is not None:
            k, v = self._append(past_key, k, past_value, v)
        q, mask, options, first = self._rule(q, mask, lengths, past, k.shape[2])
        out = self._sdpa(q, k, v, mask, options, flat)[:, :, first:]
        wanted = len(self.node.output) > 3 and self.node.output[3]
        stage = STAGES[self.attributes.get("qk_matmul_output_mode", 0)]
        scores = attention_scores(q, k, mask, stage=stage, **options)[:, :, first:] if wanted else None
        out = out.swapaxes(1, 2).reshape(out.shape[0], out.shape[2], -1) if flat else out
        return [out, k, v, scores]

    def _sdpa(self, q: Array, k: Array, v: Array, mask: Array | None, options: dict[str, Any], flat: bool) -> Array:
        """In the layout that the case's arrays have: (B, S, H * D) is "bshd"."""
        if not flat:
            return wgattn.scaled_dot_product_attention(q, k, v, mask, path=self.path, **options)
        q, k, v = (a.swapaxes(1, 2) for a in (q, k, v))
        return wgattn.scaled_dot_product_attention(q, k, v, mask, layout="bshd", path=self.path, **options).swapaxes(1, 2)

    def _rule(self, q: Array, mask: Array | None, lengths: Array | None, past: int, keys: int) -> tuple[Array, Array | None, dict[str, Any], int]:
        """(queries, mask, options, first query that counts) in our terms.

        ONNX's query i stands at key position i + past, or at i + length - S where lengths are given; its mask belongs to the first keys, and
        hides those beyond its width. Where the past is neither 0 nor T - S, as many queries that nobody wants are put in front instead.
        """
        attributes = self.attributes
        options: dict[str, Any] = {"scale": attributes.get("scale"), "softcap": attributes.get("softcap", 0.0), "device": self.device}
        options["is_causal"] = bool(attributes.get("is_causal", 0))
        window = (attributes.get("left_window_size", -1), attributes.get("right_window_size", -1))
        options["window_size"] = None if window == (-1, -1) else window
        if mask is not None and mask.shape[-1] < keys:
            hidden = False if mask.dtype == bool else -np.inf
            mask = np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, keys - mask.shape[-1])], constant_values=hidden)
        if lengths is not None:
            return q, mask, {**options, "key_lengths": lengths}, 0
        queries = q.shape[2]
        if past and past == keys - queries:
            return q, mask, options, 0
        options["causal_alignment"] = "top_left"
        if not past or not (options["is_causal"] or options["window_size"]):
            return q, mask, options, 0
        q = np.pad(q, [(0, 0), (0, 0), (past, 0), (0, 0)])
        if mask is not None and mask.ndim > 1 and mask.shape[-2] == queries:
            mask = np.pad(mask, [(0, 0)] * (mask.ndim - 2) + [(past, 0), (0, 0)])
        return q, mask, options, past

    def _append(self, past_key: Array, k: Array, past_value: Array, v: Array) -> tuple[Array, Array]:
        """Past and new keys and values, one behind the other, by the kernel that fills the KV cache."""
        if k.shape[3] != v.shape[3]:  # a cache has one head dim: two of them
            return self._append(past_key, k, past_key, k)[0], self._append(past_value, v, past_value, v)[1]
        batch, heads, past, width = past_key.shape
        dtype = {"float16": "f16", "float32": "f32"}[k.dtype.name]
        cache = KVCache(self.device, heads, width, past + k.shape[2], dtype, batch=batch)
        recording = Recording(self.device)
        for position, keys, values in ((0, past_key, past_value), (past, k, v)):
            rows = keys.shape[2]
            state = StepState(self.device)
            state.place(position, rows)
            new = {"keys": self.device.tensor(keys.swapaxes(1, 2)), "values": self.device.tensor(values.swapaxes(1, 2))}
            cache.record_append(recording, step=state.step, **new, rows=rows, dtype=dtype)
        recording.replay()
        shape = (batch, heads, cache.capacity, width)
        return tuple(a(cache.capacity).reshape(shape).astype(k.dtype) for a in (cache.k, cache.v))

    # ---- the others

    def _rotary(self, x: Array, cos: Array, sin: Array, positions: Array | None = None) -> list[Array]:
        shape = x.shape
        x = x.swapaxes(1, 2) if x.ndim == 4 else x.reshape(*shape[:2], self.attributes["num_heads"], -1)
        if positions is None:  # a row of the table for each token
            positions = np.arange(x.shape[0] * x.shape[1]).reshape(x.shape[:2])
            cos, sin = (a.reshape(-1, a.shape[-1]) for a in (cos, sin))
        assert self.attributes.get("rotary_embedding_dim", 0) in (0, 2 * cos.shape[1])
        y = wgattn.apply_rope(x, positions, (cos, sin), interleaved=bool(self.attributes.get("interleaved", 0)), device=self.device)
        return [y.swapaxes(1, 2) if len(shape) == 4 else y.reshape(shape)]

    def _norm(self, x: Array, weight: Array) -> list[Array]:
        axis = self.attributes.get("axis", -1) % x.ndim
        inner = x.shape[axis:]
        weight = np.broadcast_to(weight, inner).reshape(-1)
        y = wgattn.rms_norm(x.reshape(*x.shape[:axis], weight.size), weight, self.attributes.get("epsilon", 1e-5), device=self.device)
        return [y.reshape(x.shape)]
