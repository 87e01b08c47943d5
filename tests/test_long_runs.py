"""Many steps, and large positions: memory and objects stay, results do not drift, and what is too far is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wgattn
from tests.helpers import assert_close
from tests.llm.make_gguf import write_llama_gguf
from tests.watch import Held
from wgattn import ArgumentError, AttentionPipeline, CapacityError, FusedAttention, Llama, Rope, reference

TINY = {"layers": 1, "dim": 32, "heads": 2, "kv_heads": 1, "ffn": 64, "vocab": 262}
long_and_short = pytest.mark.parametrize("steps", [1500, pytest.param(100_000, marks=pytest.mark.slow)])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[Path, dict[str, np.ndarray]]:
    path = tmp_path_factory.mktemp("long") / "tiny.gguf"
    return path, write_llama_gguf(path, **TINY, kinds="Q8_0", seed=4)


KERNELS = ("total", "ComputePipeline", "BindGroupLayout", "PipelineLayout", "ShaderModule")


# ---- many steps


@long_and_short
def test_a_model_for_many_steps(tiny, device, steps):
    """Sequence after sequence, steps by the host and by the device, each beyond the ring of tokens: at the end as at the beginning."""
    path, weights = tiny
    model = Llama.from_gguf(path, kv_dtype="f32", capacity=600, device=device)
    rng = np.random.default_rng(steps)
    model.warm_up()
    first = [model.prefill([1, 2, 3]), *model.generate([4], 500, stop_ids=()), model.decode(5)]
    held, taken = Held(device), 0
    while taken < steps:
        model.reset()
        model.prefill(rng.integers(0, 262, 70))
        for token in rng.integers(0, 262, 100):
            model.decode(token)
        taken += 100
        if taken % 3:
            for _ in model.generate([1], 400, stop_ids=(), temperature=float(taken % 2), seed=taken):
                taken += 1
        else:
            taken += len(list(model.generate([1], 400, stop_ids=())))
    held.check()
    ids = rng.integers(0, 262, 40).tolist()
    model.reset()
    assert_close(model.prefill(ids), reference.llama(weights, ids, model.config)[-1], max_error=1e-3)
    model.reset()
    again = [model.prefill([1, 2, 3]), *model.generate([4], 500, stop_ids=()), model.decode(5)]
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)


@long_and_short
def test_a_pipeline_that_only_grows(device, rng, steps):
    """One sequence of so many steps, the cache growing under it; a window keeps a step short. The last outputs are those of the reference."""
    window = 20
    pipe = AttentionPipeline(2, 1, 4, kv_dtype="f16", capacity=64, growth=max(64, steps // 25), window_size=window, device=device)
    rows = rng.standard_normal((512, 3, 1, 1, 2, 4)).astype(np.float32)
    tensors = [[device.tensor(a) for a in (q, k[:, :, :1], v[:, :, :1])] for q, k, v in rows]
    for step in range(steps):
        pipe.decode(*tensors[step % 512])
        if step == 100:
            held = Held(device)
    held.check(more_bytes=(32 << 20) + 4 * pipe.cache.nbytes, without=KERNELS)  # a long cache may have one of its own
    assert (pipe.length, pipe.generation) == (steps, -(-(steps - 64) // max(64, steps // 25)))
    for step in range(steps, steps + 3):
        q, k, v = rows[step % 512]
        out = pipe.decode(q, k[:, :, :1], v[:, :, :1])
        seen = [rows[i % 512] for i in range(step + 1 - window, step + 1)]
        keys, values = (np.concatenate([s[j][:, :, :1] for s in seen], 1).astype(np.float16).swapaxes(1, 2) for j in (1, 2))
        wanted, _ = reference.attention(q.swapaxes(1, 2), keys, values)
        assert_close(out.swapaxes(1, 2), wanted, max_error=2e-3, step=step)


@long_and_short
def test_a_pipeline_that_is_kept_short(device, rng, steps):
    """Whenever it is full, the first position and the last ones stay: as chats do that never end."""
    pipe = AttentionPipeline(2, 2, 4, capacity=32, growth=0, device=device)
    keys = values = np.zeros((1, 0, 2, 4), np.float32)
    pipe.decode(*np.ones((3, 1, 1, 2, 4), np.float32))
    pipe.reset()
    held = Held(device)
    for step in range(steps):
        if pipe.length == 32:
            pipe.keep([(0, 1), (20, 12)])
            keys, values = (np.concatenate([a[:, :1], a[:, 20:]], 1) for a in (keys, values))
        q, k, v = rng.standard_normal((3, 1, 1, 2, 4), np.float32)
        out = pipe.decode(q, k, v)
        keys, values = np.concatenate([keys, k], 1), np.concatenate([values, v], 1)
        if step % 97 == 0:
            wanted, _ = reference.attention(*(a.swapaxes(1, 2) for a in (q, keys, values)))
            assert_close(out.swapaxes(1, 2), wanted, max_error=2e-5, step=step)
    np.testing.assert_array_equal(pipe.cache.k(pipe.length), keys[0].swapaxes(0, 1))
    held.check()


@long_and_short
def test_a_block_for_many_steps(device, rng, steps):
    E = 64  # lavapipe (Mesa 22.3) compiles kernels of narrower matrices anew for every dispatch, and keeps all of them
    weights = {"norm": np.ones(E), **{n: 0.3 * rng.standard_normal((s, E)) for n, s in (("wq", E), ("wk", 32), ("wv", 32), ("wo", E))}}
    block = FusedAttention(weights, num_heads=4, num_kv_heads=2, head_dim=16, rope=Rope(dim=16), capacity=200, device=device)
    xs = rng.standard_normal((200, E)).astype(np.float32)
    block.prefill(xs[:3])
    block.decode(xs[:1])
    held = Held(device)
    for step in range(steps):
        if block.length == 200:
            block.truncate(0)
        y = block.decode(xs[block.length : block.length + 1])
        assert np.isfinite(y).all(), step
    held.check()
    block.reset()
    for x in xs[:30]:
        y = block.decode(x[None])
    wanted, _, _ = reference.attention_block(xs[:30], weights, num_heads=4, num_kv_heads=2, head_dim=16, eps=1e-5, rope={"dim": 16})
    assert_close(y, wanted[-1:], max_error=2e-4 * (1 + np.abs(wanted).max()))


# ---- large positions


@pytest.mark.slow
@pytest.mark.parametrize("path", ["auto", "flash", "split"])
def test_positions_around_two_to_the_24th(device, rng, path):
    """Where float32 can no longer tell neighbours apart: a window of four keys sees those four, and the cache ends in words."""
    edge = 1 << 24
    capacity = min(edge + 8, device.profile.max_binding // 8)
    pipe = AttentionPipeline(1, 1, 4, kv_dtype="f16", capacity=capacity, growth=0, window_size=4, path=path, device=device)
    pipe.length = capacity - 16  # as if so many had come; nothing is asked of them
    rows = rng.standard_normal((16, 3, 1, 1, 1, 4)).astype(np.float32)
    outs = [pipe.prefill(*rows[:6].transpose(1, 2, 0, 3, 4, 5)[:, 0].swapaxes(0, 0).reshape(3, 1, 6, 1, 4))] + [pipe.decode(*row) for row in rows[6:]]
    out = np.concatenate(outs, 1)
    assert pipe.length == capacity
    for i in range(3, 16):
        keys, values = (rows[i - 3 : i + 1, j, 0].astype(np.float16).swapaxes(0, 2).reshape(1, 1, 4, 4) for j in (1, 2))
        wanted, _ = reference.attention(rows[i, 0].swapaxes(1, 2), keys, values)
        assert_close(out[:, i : i + 1].swapaxes(1, 2), wanted, max_error=2e-3, position=capacity - 16 + i)
    with pytest.raises(CapacityError, match=f"{capacity} of {capacity}"):
        pipe.decode(*rows[0])


def test_rotation_at_any_position(device, rng):
    """Angles are computed on the host in float64: exact up to the last position that an index can name."""
    positions = np.array([0, 1, 2**24 - 1, 2**24, 2**24 + 1, 2**31 - 1, 2**31, 2**32 - 1], np.int64)
    x = rng.standard_normal((len(positions), 1, 8)).astype(np.float32)
    for base in (10000.0, 500000.0):
        rope = Rope(base=base, dim=8)
        assert_close(wgattn.apply_rope(x, positions, rope, device=device), reference.apply_rope(x, positions, base=base), max_error=2e-6)


FAR = [2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**63, 10**30]


@pytest.mark.parametrize("far", FAR)
def test_capacities_that_no_device_has(tiny, device, far):
    """At once, before memory of that size is asked for; what was there goes on."""
    shape: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "device": device}
    weights = {"norm": np.ones(8), "wq": np.ones((256, 8)), "wk": np.ones((128, 8)), "wv": np.ones((128, 8)), "wo": np.ones((8, 256))}
    refused = (CapacityError, ArgumentError)
    if far * 4 * 64 * 2 > device.profile.max_binding:
        with pytest.raises(refused, match=str(far)):
            AttentionPipeline(*list(shape.values())[:3], capacity=far, device=device)
        with pytest.raises(refused, match=str(far)):
            FusedAttention(weights, **shape, rope=Rope(dim=64), capacity=far)
    pipe = AttentionPipeline(4, 2, 64, capacity=2, growth=far, device=device)
    given = [np.ones((1, 1, heads, 64), np.float32) for heads in (4, 2, 2)]
    for _ in range(2):
        pipe.decode(*given)
    if far * 4 * 64 * 2 > device.profile.max_binding:
        for _ in range(2):
            with pytest.raises(refused, match=str(far + 2)):
                pipe.decode(*given)
        assert (pipe.length, pipe.capacity) == (2, 2)
    pipe.growth = 1
    assert_close(pipe.decode(*given), given[0], max_error=1e-6)
    if far * 16 * 2 > device.profile.max_binding:
        with pytest.raises(refused, match=str(far)):
            Llama.from_gguf(tiny[0], capacity=far, device=device)


def test_calls_of_many_shapes_leave_nothing_behind(device, rng):
    """Each has parameters of its own: their buffers go with the call."""
    pipe = AttentionPipeline(2, 1, 4, capacity=512, device=device)

    def run(first: int, last: int) -> None:
        for n in range(first, last):
            q, k, v = (rng.standard_normal((1, heads, n, 4), np.float32) for heads in (2, 1, 1))
            wgattn.sdpa(q, k, v, device=device)
            wgattn.sdpa(q, k, v, path="gemm", device=device)
            pipe.prefill(*(a.swapaxes(1, 2)[:, : n % 7 + 1] for a in (q, k, v)))

    run(1, 20)
    held = Held(device)
    run(20, 120)
    held.check(without=KERNELS)  # there are tiles for each size
