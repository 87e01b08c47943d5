"""Several threads: two devices, one device, one object. What they compute is what they would compute alone, or a call is refused in words."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import wgattn
from tests import child
from tests.helpers import assert_close
from tests.llm.make_gguf import write_llama_gguf
from wgattn import ArgumentError, AttentionPipeline, Device, FusedAttention, FusedMLP, Llama, Rope, reference
from wgattn.gpu import Turn

TINY = {"layers": 2, "dim": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "vocab": 262}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[Any]:
    folder = tmp_path_factory.mktemp("threads")
    for seed, kinds in enumerate(("Q4_0", "Q8_0")):
        write_llama_gguf(folder / f"{seed}.gguf", **TINY, kinds=kinds, seed=seed)
    return [folder / "0.gguf", folder / "1.gguf"]


def at_once(*works: Callable[[], Any]) -> list[Any]:
    """The results of functions that begin together, each in a thread; the first error is raised."""
    start, results, errors = threading.Barrier(len(works)), [None] * len(works), []

    def run(number: int) -> None:
        try:
            start.wait(60)
            results[number] = works[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive(), "a thread hangs"
    for error in errors:
        raise error
    return results


def story(model: Llama, turns: int) -> list[Any]:
    """A bit of everything that a model does."""
    found: list[Any] = []
    for turn in range(turns):
        model.reset()
        found.append(model.prefill(range(turn, turn + 70)))
        found += list(model.generate([turn], 20, stop_ids=()))
        found += list(model.generate([turn + 1], 4, stop_ids=(), temperature=1.0, seed=turn))
        found.append(model.decode(turn))
    return found


@pytest.mark.parametrize("devices_in_use", [1, 2])
def test_two_models_in_two_threads(files, device, devices_in_use):
    """On one device and on two: the same bits and tokens as one after the other."""
    devices = [device, device if devices_in_use == 1 else Device()]
    models = [Llama.from_gguf(path, kv_dtype="f32", capacity=110, device=d) for path, d in zip(files, devices, strict=True)]
    alone = [story(model, 3) for model in models]
    for together in [at_once(*(lambda m=m: story(m, 3) for m in models)) for _ in range(2)]:
        for mine, before in zip(together, alone, strict=True):
            for a, b in zip(mine, before, strict=True):
                np.testing.assert_array_equal(a, b)


def test_models_are_loaded_in_two_threads(files, device):
    wanted = [Llama.from_gguf(path, capacity=20, device=device).prefill([1, 2, 3]) for path in files]
    fresh = Device()
    found = at_once(*(lambda p=path: Llama.from_gguf(p, capacity=20, device=fresh).prefill([1, 2, 3]) for path in files * 2))
    for got, want in zip(found, wanted * 2, strict=True):
        np.testing.assert_array_equal(got, want)


def test_functions_in_many_threads(device, rng):
    """Of a fresh device: kernels, uniforms and the profile are made by whoever comes first."""
    fresh = Device()
    cases = [[rng.standard_normal((1, 2, n, 8)).astype(np.float32) for n in (S, T, T)] for S, T in ((1, 9), (5, 5), (12, 30), (2, 3))]

    def work(case: list[np.ndarray]) -> None:
        for turn in range(15):
            assert_close(wgattn.sdpa(*case, is_causal=True, device=fresh), reference.attention(*case, is_causal=True)[0], max_error=2e-5, turn=turn)
            norm = wgattn.rms_norm(case[0], np.ones(8), device=fresh)
            assert_close(norm, reference.rms_norm(case[0], np.ones(8)), max_error=1e-5)

    at_once(*(lambda c=c: work(c) for c in cases))


def test_a_pipeline_shared_by_threads(device, rng):
    """Every step is whole: the rows stand in some order, each thread's in its own, and each output is attention over what was there before."""
    pipe = AttentionPipeline(2, 1, 4, capacity=3, growth=7, device=device)
    threads, steps = 4, 25
    given = rng.standard_normal((threads, steps, 3, 1, 1, 2, 4)).astype(np.float32)

    def work(number: int) -> list[np.ndarray]:
        outs = []
        for q, k, v in given[number]:
            outs.append(pipe.decode(q, k[:, :, :1], v[:, :, :1]) if number else pipe.prefill(q, k[:, :, :1], v[:, :, :1]))
        return outs

    outs = at_once(*(lambda i=i: work(i) for i in range(threads)))
    assert pipe.length == threads * steps
    keys, values = pipe.cache.k(pipe.length), pipe.cache.v(pipe.length)
    at = {keys[0, row].tobytes(): row for row in range(pipe.length)}
    assert len(at) == pipe.length
    for number in range(threads):
        rows = [at[given[number, step, 1, 0, 0, 0].tobytes()] for step in range(steps)]
        assert rows == sorted(rows)
        for step, row in enumerate(rows):
            q = given[number, step, 0].swapaxes(1, 2)
            wanted, _ = reference.attention(q, keys[None, :, : row + 1], values[None, :, : row + 1])
            assert_close(outs[number][step].swapaxes(1, 2), wanted, max_error=2e-5, thread=number, step=step)


def test_a_block_and_an_mlp_shared_by_threads(device, rng):
    E = 32
    weights = {"norm": np.ones(E), **{n: 0.3 * rng.standard_normal((s, E)) for n, s in (("wq", 32), ("wk", 16), ("wv", 16), ("wo", E))}}
    block = FusedAttention(weights, num_heads=4, num_kv_heads=2, head_dim=8, rope=Rope(dim=8), capacity=128, device=device)
    mlp_weights = {"norm": np.ones(E), **{n: 0.3 * rng.standard_normal((E, E)) for n in ("gate", "up", "down")}}
    mlp = FusedMLP(mlp_weights, device=device)
    xs = rng.standard_normal((4, 20, 1, E)).astype(np.float32)

    def work(number: int) -> None:
        for x in xs[number]:
            block.decode(x)
            for rows in (x, np.repeat(x, 3, 0)):
                assert_close(mlp(rows), rows + reference.mlp(rows, mlp_weights, 1e-5), max_error=2e-4, thread=number)

    at_once(*(lambda i=i: work(i) for i in range(4)))
    assert block.length == 80
    held = block.cache.v()
    assert len({held[:, row].tobytes() for row in range(80)}) == 80, "a row was written twice, or not at all"


def test_a_model_shared_by_threads(files, device):
    """Calls take turns; of two that generate from one sequence, one is told that the other has changed it."""
    model = Llama.from_gguf(files[0], kv_dtype="f32", capacity=300, device=device)
    at_once(*(lambda i=i: [model.decode(i + n) for n in range(30)] for i in range(3)))
    assert model.length == 90

    def generate() -> int | str:
        try:
            return len(list(model.generate([1], 40, stop_ids=())))
        except ArgumentError as error:
            return str(error)

    model.reset()
    results = at_once(generate, generate, generate)
    assert all(r == 40 or "sequence was changed" in str(r) for r in results), results
    assert 40 in results
    wanted = Llama.from_gguf(files[0], kv_dtype="f32", capacity=300, device=device).prefill([3, 4])
    model.reset()
    np.testing.assert_array_equal(model.prefill([3, 4]), wanted)


def test_forks_and_their_origin_in_threads(device, rng):
    pipe = AttentionPipeline(2, 2, 4, capacity=4, growth=4, device=device)
    prompt = rng.standard_normal((3, 1, 5, 2, 4)).astype(np.float32)
    pipe.prefill(*prompt)
    steps = rng.standard_normal((20, 3, 1, 1, 2, 4)).astype(np.float32)

    def work() -> list[np.ndarray]:
        twin = pipe.fork()
        twin.truncate(5)
        return [twin.decode(*step) for step in steps]

    def origin() -> None:
        for step in steps:
            pipe.decode(*step)

    *forks, _ = at_once(work, work, work, origin)
    for outs in forks[1:]:
        np.testing.assert_array_equal(outs, forks[0])


def test_tensors_are_read_and_written_by_many_threads(device, rng):
    tensors = [device.tensor(np.full(1000, i, np.float32)) for i in range(4)]

    def work(number: int) -> None:
        for turn in range(50):
            value = number * 1000 + turn
            tensors[number].write(np.full(1000, value, np.float32))
            assert (tensors[number].numpy() == value).all()

    at_once(*(lambda i=i: work(i) for i in range(4)))


def test_there_is_one_default_device_for_all_threads():
    code = """
import threading, wgattn
start, found = threading.Barrier(8), []
def work():
    start.wait()
    found.append(wgattn.default_device())
threads = [threading.Thread(target=work) for _ in range(8)]
for t in threads: t.start()
for t in threads: t.join()
print(len(found), len(set(map(id, found))))
"""
    assert child.check(code).split()[-2:] == ["8", "1"]


def test_a_turn_is_taken_and_given_back(device):
    """Also by one thread several times, and when the block raises."""
    pipe = AttentionPipeline(1, 1, 4, device=device)
    seen = []

    def look() -> None:
        seen.append(pipe.turn.acquire(blocking=False))
        if seen[-1]:
            pipe.turn.release()

    def other() -> None:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()

    with Turn(pipe):
        with Turn(pipe):
            other()
        other()
    other()
    with pytest.raises(ValueError), Turn(pipe):
        raise ValueError
    other()
    assert seen == [False, False, True, True]


@pytest.mark.slow
def test_threads_for_long(files, device):
    models = [Llama.from_gguf(path, kv_dtype="f32", capacity=110, device=d) for path in files for d in (device, Device())]
    alone = [story(model, 3) for model in models]
    for _ in range(25):
        for mine, before in zip(at_once(*(lambda m=m: story(m, 3) for m in models)), alone, strict=True):
            for a, b in zip(mine, before, strict=True):
                np.testing.assert_array_equal(a, b)
