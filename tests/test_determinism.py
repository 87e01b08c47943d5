"""The same call on the same device gives the same bits, whatever memory held before; and where bits depend on a choice (README, "The same bits")."""

from collections.abc import Callable

import numpy as np
import pytest

import wgattn
from tests.block.layers import SMALL, rows
from tests.helpers import dirty_workgroup_memory
from tests.llm.make_gguf import write_llama_gguf
from tests.watch import Guard
from wgattn.attention.paths import PORTABLE_PATHS
from wgattn.llm.llama import Llama

REPEATS = 100
SHAPES = ["software", "gpu_shape", pytest.param("gpu_shape_no_subgroup", marks=pytest.mark.slow)]
"""Devices on which kernels add up in different ways; those of GPU shape split long sequences among workgroups."""


def check(device: wgattn.Device, call: Callable[[], list[np.ndarray]], **case: object) -> None:
    """Each repeat gives the bits of the first, in workgroup memory that holds something else."""
    first = None
    for turn in range(REPEATS):
        if turn % 10 == 1:
            dirty_workgroup_memory(device)
        found = [np.ascontiguousarray(a) for a in call()]
        assert all(np.isfinite(a.astype(np.float64)).all() for a in found), case
        first = first or found
        for i, (a, b) in enumerate(zip(found, first, strict=True)):
            assert a.tobytes() == b.tobytes(), f"output {i} of repeat {turn} differs in {(a != b).sum()} of {a.size} values ({case})"


def test_a_difference_is_seen(device):
    """One last bit, at the last repeat."""
    turns = iter(range(REPEATS))

    def call() -> list[np.ndarray]:
        x = np.ones(5, np.float32)
        x[3] += np.float32(2.0**-23) * (next(turns) == REPEATS - 1)
        return [x]

    with pytest.raises(AssertionError, match=f"output 0 of repeat {REPEATS - 1} differs in 1 of 5"):
        check(device, call)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("path", PORTABLE_PATHS)
@pytest.mark.parametrize("variant", SHAPES)
def test_each_path(devices, rng, monkeypatch, variant, path, dtype):
    """Outputs begin as NaN; few queries and so many keys that path split splits them, and many queries."""
    device = devices[variant]
    shapes = [(1, 6, 2, 900), (40, 4, 2, 70)]
    tensors = [[device.tensor(rng.standard_normal((1, heads, n, 16)), dtype) for heads, n in ((H, S), (Hkv, T), (Hkv, T))] for S, H, Hkv, T in shapes]
    mask = rng.random((40, 70)) < 0.7
    Guard(monkeypatch)

    def call() -> list[np.ndarray]:
        found = []
        for (q, k, v), options in zip(tensors, ({}, {"attn_mask": mask, "softcap": 3.0}), strict=True):
            out, lse = wgattn.sdpa(q, k, v, is_causal=True, return_lse=True, path=path, device=device, **options)
            found += [out.numpy(), lse.numpy()]
        return found

    check(device, call, path=path, dtype=dtype, variant=variant)


@pytest.mark.parametrize("kv_dtype", ["f32", "f16"])
@pytest.mark.parametrize("variant", SHAPES)
def test_a_pipeline(devices, rng, variant, kv_dtype):
    device = devices[variant]
    pipe = wgattn.AttentionPipeline(4, 2, 16, kv_dtype=kv_dtype, capacity=600, device=device)
    prompt, token = ([rng.standard_normal((1, S, heads, 16)).astype(np.float32) for heads in (4, 2, 2)] for S in (30, 1))
    behind = [rng.standard_normal((1, 270, heads, 16)).astype(np.float32) for heads in (4, 2, 2)]

    def call() -> list[np.ndarray]:
        pipe.reset()
        found = [pipe.prefill(*prompt), pipe.decode(*token), pipe.prefill(*behind), pipe.decode(*token)]
        return [*found, pipe.cache.k(pipe.length), pipe.cache.v(pipe.length)]

    check(device, call, variant=variant, kv_dtype=kv_dtype)


@pytest.mark.parametrize("arithmetic", ["exact", "int8"])
@pytest.mark.parametrize("variant", SHAPES)
def test_a_layer(devices, rng, variant, arithmetic):
    """Prefill and decode of the attention half, and the MLP for one token and for many."""
    device, layer = devices[variant], SMALL
    E = 64
    weights = {name: wgattn.quantize(rng.standard_normal(shape), "Q8_0") for name, shape in (("gate", (96, E)), ("up", (96, E)), ("down", (E, 96)))}
    mlp = wgattn.FusedMLP({"norm": np.ones(E), **weights}, arithmetic=arithmetic, device=device)
    block = wgattn.FusedAttention(
        {
            "norm": np.ones(E),
            **{name: wgattn.quantize(rng.standard_normal((n * 16, E)), "Q8_0") for name, n in (("wq", 4), ("wk", 2), ("wv", 2))},
            "wo": wgattn.quantize(rng.standard_normal((E, 64)), "Q8_0"),
        },
        **{**layer.sizes, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16},
        rope=wgattn.Rope(1e4, 16),
        arithmetic=arithmetic,
        capacity=40,
        device=device,
    )
    x = rows(rng, 24, E)

    def call() -> list[np.ndarray]:
        block.reset()
        return [block.prefill(x[:20], x[:20]), block.decode(x[20:21]), block.decode(x[21:22]), block.cache.k(), block.cache.v(), mlp(x), mlp(x[:1])]

    check(device, call, variant=variant, arithmetic=arithmetic)


@pytest.mark.parametrize("variant", SHAPES[:2])
def test_a_model(devices, tmp_path, variant):
    """Greedy tokens, and the logits of the step after them."""
    device = devices[variant]
    path = tmp_path / "model.gguf"
    write_llama_gguf(path, layers=2, dim=64, heads=4, kv_heads=2, ffn=96, vocab=300, kinds="Q4_1", seed=3)
    model = Llama.from_gguf(path, capacity=64, device=device)

    def call() -> list[np.ndarray]:
        tokens = list(model.generate([5, 17, 250], 8, stop_ids=()))
        model.reset()
        return [np.array(tokens), model.prefill([5, 17, 250]), model.decode(tokens[0])]

    check(device, call, variant=variant)


# ---- where bits depend on a choice


def test_the_number_of_splits_is_a_choice_and_never_a_matter_of_luck(devices, rng):
    """On a GPU, a recording for longer histories splits the keys among more workgroups: other sums, so other last bits. Which recording serves a step
    depends on its length and on the capacity alone."""
    device = devices["gpu_shape"]
    q, k, v = (rng.standard_normal((1, 200, heads, 16)).astype(np.float32) for heads in (4, 2, 2))
    one = [a[:, :1] for a in (q, k, v)]

    def last(capacity: int) -> np.ndarray:
        pipe = wgattn.AttentionPipeline(4, 2, 16, capacity=capacity, growth=0, device=device)
        pipe.prefill(q, k, v)
        return pipe.decode(*one)

    assert np.array_equal(last(300), last(300))
    assert np.array_equal(last(2000), last(2000))
    np.testing.assert_allclose(last(300), last(2000), rtol=1e-5, atol=1e-6)
