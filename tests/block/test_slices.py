"""Projections that end another dispatch: when they are chosen, what is added to the stream and when, and models of three dispatches a layer."""

from dataclasses import replace

import numpy as np
import pytest

from tests.helpers import dirty_workgroup_memory, not_available, poison
from wgattn import reference
from wgattn.attention.kv_cache import KVCache
from wgattn.block import slices
from wgattn.block.attention_block import AttentionBlock, ChosenAttention, Geometry
from wgattn.block.linear import padded
from wgattn.block.mlp import MlpBlock
from wgattn.block.quant import FORMATS, QuantizedTensor
from wgattn.block.slices import Stream, choose_slice
from wgattn.cases.weights import RandomModel, random_matrix, random_vector
from wgattn.gpu import Device, Recording, StepState
from wgattn.gpu.paper import PROFILES
from wgattn.llm.llama import Llama

GPU = PROFILES["GPU, 32 lanes"]
LAYER = ["norm, QKV, RoPE, KV append", "attention, output projection", "MLP"]


# ---- shapes


@pytest.mark.parametrize("kind", FORMATS)
def test_every_row_has_one_team_and_every_column_one_lane(kind):
    form = FORMATS[kind]
    for rows, columns, each, workgroup in ((576, 1536, 64, 512), (576, 576, 64, 256), (300, 512, 128, 1024), (17, 96, 96, 32)):
        shape = choose_slice(GPU, rows, columns, each, form, 3 if form.quantised else 0, workgroup, 0)
        assert shape.slices * each == columns
        assert each // 16 <= shape.lanes < 2 * max(each // 16, 1)
        teams = workgroup // shape.lanes
        assert shape.batch * shape.batches * teams >= rows > shape.batch * (shape.batches - 1) * teams
        assert shape.batch == 1 or shape.batch * form.chunk_words <= 32, "weights in registers"


def test_a_projection_ends_another_dispatch_only_where_that_can_be_and_pays():
    fits = (576, 1536, 64, FORMATS["Q4_0"], 3, 512, 8192)
    assert choose_slice(GPU, *fits)
    memory = fits[-1] + choose_slice(GPU, *fits).workgroup_bytes
    for lacking in ({"kind": "CPU"}, {"subgroup_size": 0}, {"subgroup_size": 4}, {"max_storage_buffers": 14}, {"workgroup_memory": memory}):
        assert choose_slice(replace(GPU, **lacking), *fits) is None, lacking
    for columns, each in ((1500, 60), (1536, 48), (1560, 64), (4096, 2048)):  # no whole blocks, no whole slices, more lanes than a subgroup has
        assert choose_slice(GPU, 576, columns, each, FORMATS["Q4_0"], 3, 512, 8192) is None, (columns, each)
    assert choose_slice(GPU, 576, 768, 48, FORMATS["F16"], 0, 512, 8192)
    assert choose_slice(GPU, 4096, 1536, 64, FORMATS["Q4_0"], 3, 512, 8192) is None, "sums of 24 x 4096"
    assert slices.pays(576, 1536)
    assert not slices.pays(896, 4864)


def matrices(rng: np.random.Generator, kind: str, **shapes: tuple[int, int]) -> dict[str, QuantizedTensor]:
    return {name: random_matrix(rng, *shape, kind) for name, shape in shapes.items()}


# ---- the stream


@pytest.mark.conformance(count=[1, 9, 24])
@pytest.mark.parametrize("count", [1, 8, 9, 17, 24, 57])
@pytest.mark.parametrize("settles", [True, False])
def test_sums_are_added_once(devices, rng, count, settles):
    """By a dispatch of their own, or by every workgroup of the next projection, of which one keeps the result; in a few groups or in one."""
    device = devices["gpu_shape"]
    E, hidden = 100, 128
    h, sums = rng.standard_normal((1, padded(E))).astype(np.float32), rng.standard_normal((count + 2, padded(E))).astype(np.float32)
    for rows in (h, sums):
        rows[:, E:] = 0
    sums[count:] = np.nan  # memory of a larger count
    stream, left = Stream(device.tensor(h), device.tensor(poison((1, padded(E))))), device.tensor(sums)
    stream._sums = left, count
    weights = {"norm": random_vector(rng, E)} | matrices(rng, "F32", gate=(hidden, E), up=(hidden, E), down=(E, hidden))
    recording, state = Recording(device), StepState(device)
    state.place(0, 1)
    want = (h.astype(np.float64) + sums[:count].astype(np.float64).sum(0))[:, :E]
    if settles:
        assert stream.settle(recording) is stream.settle(recording)
        assert len(recording) == 1
    else:
        scratch = {"step": state.step, "h": stream.tensor, "hidden": device.empty((1, padded(hidden))), "stream": stream}
        MlpBlock(device, weights, 1e-5).record(recording, scratch, 1)
        want = want + reference.mlp(want, {n: w if n == "norm" else w.dequantize() for n, w in weights.items()}, 1e-5)
        stream.settle(recording)
    dirty_workgroup_memory(device)
    recording.replay()
    got = stream.tensor.numpy()
    np.testing.assert_allclose(got[:, :E], want, rtol=1e-5, atol=2e-5)
    assert not got[:, E:].any()


def test_a_reader_with_little_memory_takes_sums_in_fewer_groups(device):
    h, sums = device.empty((1, 256)), device.empty((40, 256))
    for room, groups in ((1 << 16, 5), (2 * 1024, 2), (100, 1)):
        stream = Stream(h, device.empty((1, 256)))
        stream._sums = sums, 40
        _, options, _ = stream.take(512, room)
        assert options["SUM_GROUPS"] == groups
        assert options["SUMS_EACH"] * groups >= 40
        assert room < 1024 or 16 * groups * options["SUM_WIDTH"] <= room


# ---- layers


def recorded(device: Device, rng: np.random.Generator, depth: int, gate: str = "Q4_0") -> list[str]:
    """What the dispatches of a layer are for, for so many keys at most."""
    E, hidden, geometry = 64, 128, Geometry(2, 1, 64, 1e-5)
    attention = {"norm": random_vector(rng, E)} | matrices(rng, "Q4_0", wq=(128, E), wk=(64, E), wv=(64, E), wo=(E, 128))
    mlp = {"norm": random_vector(rng, E)} | matrices(rng, "Q4_0", up=(hidden, E), down=(E, hidden)) | matrices(rng, gate, gate=(hidden, E))
    recording, h = Recording(device), device.empty((1, E))
    state = {"step": StepState(device).step, "h": h, "stream": Stream(h, device.empty((1, E))), "rope": device.empty((1, 2))}
    state |= {name: device.empty((1, 128)) for name in ("query", "attended", "hidden")}
    chosen, cache = ChosenAttention(device.profile, geometry, 1, depth), KVCache(device, 1, 64, depth, "f32")
    AttentionBlock(device, attention, geometry, None).record(recording, chosen, cache, state, 1)
    MlpBlock(device, mlp, 1e-5).record(recording, state, 1)
    return [d.label for d in recording]


def test_dispatches_of_a_layer(devices, rng):
    """Three; on a CPU five; where keys are split or gate and up are of two kinds, the projection behind has its own."""
    gpu = devices["gpu_shape"]
    assert recorded(gpu, rng, 200) == LAYER
    assert len(recorded(devices["software"], rng, 200)) == 5
    assert recorded(gpu, rng, 2000) == [LAYER[0], "attention", "attention combine", "output projection, residual", LAYER[2]]
    assert recorded(gpu, rng, 200, gate="F16") == [*LAYER[:2], "norm, gate, up, SwiGLU", "norm, gate, up, SwiGLU", "down projection, residual"]


@pytest.mark.conformance(arch=["llama"])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_models_of_three_dispatches_a_layer(devices, rng, arch):
    """Against the reference, across the lengths at which attention takes other shapes; the same tokens as a model that leaves no sums."""
    if devices["gpu_shape"].profile.subgroup_size < 8:
        not_available("subgroups have less than 8 lanes.")
    E = 128
    sizes = {"block_count": 3, "embedding_length": E, "feed_forward_length": 192}
    sizes |= {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 64}
    file = RandomModel(rng, sizes, "Q5_0", vocab=200, arch=arch, tied=True)
    model = Llama(file, kv_dtype="f32", capacity=1100, device=devices["gpu_shape"])
    assert model.dispatches_per_token == 3 * 3 + 3, "embedding, what is left of the sums, logits"
    ids = rng.integers(0, 200, 1030).tolist()
    got, at = [], [0, 1, 2, 255, 256, 257, 1023, 1024, 1025]
    for first, position in zip([-1, *at], at, strict=False):
        if position > first + 1:
            model.prefill(ids[first + 1 : position])
        got.append(model.decode(ids[position]))
    want = reference.llama({name: t.dequantize() for name, t in file.tensors.items()}, ids[: at[-1] + 1], model.config)[at]
    np.testing.assert_allclose(got, want, atol=1e-4)
    model.reset()
    tokens = list(model.generate(ids[:20], 12, stop_ids=()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wgattn.llm.llama.pays", lambda *sizes: False)
        other = Llama(file, kv_dtype="f32", capacity=1100, device=devices["gpu_shape"])
    assert other.dispatches_per_token == 3 * 5 + 2
    logits = reference.llama({name: t.dequantize() for name, t in file.tensors.items()}, ids[:20] + tokens, model.config)[19:-1]
    assert (logits.max(1) - logits[np.arange(12), tokens] < 1e-3).all()
    model.reset()
    np.testing.assert_allclose(other.prefill(ids[:20]), model.prefill(ids[:20]), atol=1e-4)
