"""Memory of intermediates: the report's numbers are those of buffers that exist, and of the published table; tiles fit."""

from dataclasses import replace

import numpy as np
import pytest

import wgattn
from tests.block.layers import Attention
from wgattn import ArgumentError, CapacityError, Rope, block
from wgattn.attention.split import choose_split, scratch
from wgattn.block.attention_block import ChosenAttention, Geometry
from wgattn.block.memory import MemoryReport, partial_bytes
from wgattn.gpu import Device

MODELS = {  # E, layers, H, KV, D, I
    "Qwen2-0.5B": (896, 24, 14, 2, 64, 4864),
    "Qwen2.5-1.5B": (1536, 28, 12, 2, 128, 8960),
    "Llama-3.2-1B": (2048, 16, 32, 8, 64, 8192),
    "Llama-3.1-8B": (4096, 32, 32, 8, 128, 14336),
}
DECODE = {  # bytes: attention half unfused, fused, fused with 8 splits; layer unfused, fused; ratio of the whole model
    "Qwen2-0.5B": (15_360, 3_584, 33_152, 84_480, 23_040, 103),
    "Qwen2.5-1.5B": (26_624, 6_144, 56_064, 152_576, 41_984, 121),
    "Llama-3.2-1B": (36_864, 8_192, 75_776, 159_744, 40_960, 72),
    "Llama-3.1-8B": (73_728, 16_384, 149_504, 294_912, 73_728, 144),
}
PREFILL = {  # MB at 512 tokens: attention half unfused, with scores, fused; MLP half unfused, fused
    "Qwen2-0.5B": (9.70, 39.1, 1.84, 35.4, 11.8),
    "Llama-3.2-1B": (23.1, 90.2, 4.19, 62.9, 21.0),
    "Llama-3.1-8B": (46.1, 113, 8.39, 113, 37.8),
}
LONG = {"Qwen2-0.5B": (509, 7.34), "Llama-3.2-1B": (1166, 16.8), "Llama-3.1-8B": (1258, 33.6)}  # at 2048 tokens, with scores


def report(name: str, tokens: int = 512, splits: int = 8) -> MemoryReport:
    E, layers, H, KV, D, hidden = MODELS[name]
    return block.memory_report(E, layers, tokens, num_heads=H, num_kv_heads=KV, head_dim=D, intermediate=hidden, splits=splits)


@pytest.mark.parametrize("name", MODELS)
def test_decode_reproduces_the_table(name):
    unfused, fused, split, layer_unfused, layer_fused, model = DECODE[name]
    found = report(name)
    half, parts, layer = (found[f"decode, {what}"] for what in ("attention half", "attention half, 8 splits", "whole layer"))
    assert (half.unfused, half.fused) == (unfused, fused)
    assert 4.2 < half.ratio < 4.6
    assert (parts.unfused, parts.fused) == (unfused, split)
    assert found.partials == split - fused
    assert (layer.unfused, layer.fused) == (layer_unfused, layer_fused)
    assert 3.5 < layer.ratio < 4.1
    assert round(found["decode, attention half, whole model"].ratio) == model


def three_digits(number: float) -> float:
    return float(f"{number:.3g}")


@pytest.mark.parametrize("name", PREFILL)
def test_prefill_reproduces_the_table(name):
    found = report(name)
    half, scores, mlp = (found[f"prefill of 512, {what}"] for what in ("attention half", "attention half with scores", "MLP half"))
    got = (half.unfused, scores.unfused, half.fused, mlp.unfused, mlp.fused)
    assert half.fused == scores.fused
    assert all(abs(g / 1e6 - w) <= 0.006 * w for g, w in zip(got, PREFILL[name], strict=True)), got
    long = report(name, 2048)["prefill of 2048, attention half with scores"]
    assert all(abs(g / 1e6 - w) <= 0.006 * w for g, w in zip((long.unfused, long.fused), LONG[name], strict=True)), long


def test_the_headline_ratios():
    found = report("Qwen2-0.5B")
    assert found["prefill of 512, attention half"].ratio == pytest.approx(5.3, abs=0.05)
    assert found["prefill of 512, attention half with scores"].ratio == pytest.approx(21, abs=0.5)
    assert found["prefill of 512, MLP half"].ratio == pytest.approx(3.0, abs=0.05)


@pytest.mark.parametrize("fused", [True, False])
def test_its_buffers_are_those_that_exist(device: Device, rng, monkeypatch, fused):
    """All float32 buffers that a decode step of both halves makes beside its input and output, counted as they are made."""
    layer, hidden = Attention(64, 4, 2, 16, rope=Rope(dim=16)), 96
    weights = layer.weights(rng)
    mlp = {"norm": np.ones(64), "gate": np.zeros((hidden, 64)), "up": np.zeros((hidden, 64)), "down": np.zeros((64, hidden))}
    made: list[tuple] = []
    allocate = wgattn.block.fused.allocate
    monkeypatch.setattr(wgattn.block.fused, "allocate", lambda d, shapes: (made.extend(shapes.values()), allocate(d, shapes))[1])
    layer.block(weights, fused=fused)
    wgattn.FusedMLP(mlp, fused=fused)
    told = block.memory_report(64, 1, 1, num_heads=4, num_kv_heads=2, head_dim=16, intermediate=hidden)
    assert sorted(made) == sorted(told.buffers["fused" if fused else "unfused"].values())
    row = told["decode, whole layer"]
    assert sum(4 * a * b for a, b in made) == (row.fused if fused else row.unfused - 4 * 64)  # h between the halves is the output of the first


@pytest.mark.parametrize("kv_dtype", ["f32", "F16", "q8_0", "Q4_0"])
def test_the_buffers_of_a_prompt_are_those_that_exist(rng, monkeypatch, kv_dtype):
    """A quantised cache takes a copy of the new keys and values, for a prompt and not for a step."""
    layer = Attention(64, 4, 2, 16, rope=Rope(dim=16))
    made: list[tuple] = []
    allocate = wgattn.block.fused.allocate
    monkeypatch.setattr(wgattn.block.fused, "allocate", lambda d, shapes: (made.extend(shapes.values()), allocate(d, shapes))[1])
    half = layer.block(layer.weights(rng), kv_dtype=kv_dtype, capacity=9)
    told = block.memory_report(64, 1, 9, num_heads=4, num_kv_heads=2, head_dim=16, kv_dtype=kv_dtype)
    assert sum(4 * a * b for a, b in made) == told["decode, attention half"].fused == 4 * 64
    made.clear()
    half.prefill(rng.standard_normal((9, 64)))
    copies = 2 * 4 * 9 * 2 * 16 if "q" in kv_dtype.lower() else 0
    assert sum(4 * a * b for a, b in made) == told["prefill of 9, attention half"].fused == 4 * 9 * 64 + copies
    size = block.attention_scratch_size(9, 64, 4, 16, num_kv_heads=2, kv_dtype=kv_dtype)
    assert size - block.attention_scratch_size(9, 64, 4, 16, num_kv_heads=2) == copies


def test_no_scratch_is_made_elsewhere(device: Device, rng, monkeypatch):
    """Every buffer of a decoding block is one of its weights, its cache, its table, its input and output, or in the report."""
    layer = Attention(64, 4, 2, 16, rope=Rope(dim=16))
    weights = layer.weights(rng)
    held = layer.block(weights)  # parameters of kernels are shared with it, as long as it lives
    made: list[int] = []
    make = Device.buffer
    monkeypatch.setattr(Device, "buffer", lambda self, n, *, uniform=False: (made.append(n), make(self, n, uniform=uniform))[1])
    wgattn.FusedAttention(weights, **layer.sizes, rope=layer.rope, capacity=40)
    assert held.length == 0
    matrices = [4 * (64 + 32 + 32) * 64, 4 * 64 * 64]
    cache, table, vector, step = 4 * 2 * 40 * 16, 4 * 40 * 16, 4 * 64, 256 + 256 + 256
    assert sorted(made) == sorted([*matrices, cache, cache, table, vector, vector, vector, step])  # the vectors: norm, queries, output


@pytest.mark.parametrize("splits", [1, 2, 7, 32])
def test_split_partials(device: Device, splits):
    problem = ChosenAttention(device.profile, Geometry(6, 2, 18 * 4, 1e-5), 3, 1000).problem
    shape = replace(choose_split(device.profile, problem), splits=splits)
    assert partial_bytes(6, 72, splits, 3) == sum(t.nbytes for t in scratch(device, problem, shape).values())


def test_defaults_and_refusals():
    found = block.memory_report(2048, 24, 512)
    assert found["decode, attention half"].fused == 8192
    assert found["decode, attention half, whole model"].ratio == pytest.approx(24 * found["decode, attention half"].ratio)
    assert "splits" not in str(found)
    for wrong in ({"hidden": 0}, {"layers": -1}, {"seq_len": 1.5}, {"splits": 0}, {"head_dim": 0.5}):
        with pytest.raises(ArgumentError, match=f"{next(iter(wrong))} is {next(iter(wrong.values()))}"):
            block.memory_report(**{"hidden": 64, "layers": 2, "seq_len": 8, **wrong})


def test_it_can_be_read():
    text = str(report("Qwen2-0.5B"))
    for expected in ("decode, attention half, 8 splits", "33,152", "0.46x", "102.86x", "39,059,456", "E 896, 14/2 heads of 64"):
        assert expected in text, text
    with pytest.raises(StopIteration):
        report("Qwen2-0.5B")["nothing"]


# ---- tiles


@pytest.mark.parametrize("memory", [2048, 16384, 32768, 49152, 1 << 20])
@pytest.mark.parametrize("head_dim", [1, 16, 64, 80, 128, 256, 1000])
def test_tiles_fit_and_the_next_larger_do_not(device: Device, head_dim, memory):
    profile = replace(device.profile, workgroup_memory=memory)
    width = -(-head_dim // 4) * 4 + 1

    def takes(queries: int, keys: int) -> int:
        return 4 * (keys * width + queries * keys)

    if takes(1, 4) > memory:
        with pytest.raises(CapacityError, match=f"heads of {head_dim} fits {memory} bytes"):
            block.optimal_tiles(head_dim, profile)
        return
    queries, keys = block.optimal_tiles(head_dim, profile)
    assert takes(queries, keys) <= memory
    assert (keys, queries) == (64, 32) or takes(queries, 2 * keys) > memory or keys == 64
    assert queries == 32 or takes(2 * queries, 4) > memory


def test_tiles_of_the_portable_device(device: Device):
    """16 KiB: the ladder 32, 16, 8 for heads of 64, 128 and 256."""
    profile = replace(device.profile, workgroup_memory=16384)
    assert [block.optimal_tiles(d, profile) for d in (64, 128, 256)] == [(32, 32), (32, 16), (32, 8)]
    for wrong in (0, -4, 2.5):
        with pytest.raises(ArgumentError, match="head_dim is"):
            block.optimal_tiles(wrong, profile)
