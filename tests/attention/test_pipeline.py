"""AttentionPipeline: a growing history, recorded steps, and a state that only successful calls change."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest

import wgattn
from tests.helpers import assert_close, poison
from tests.watch import Calls, Guard, check_refused, forbid_reading, live_objects
from wgattn import AttentionPipeline, reference
from wgattn.attention.paths import PORTABLE_PATHS
from wgattn.errors import ArgumentError, CapacityError, ShapeError, Unsupported
from wgattn.gpu import Device

F32, F16 = np.float32, np.float16


class History:
    """What a pipeline ought to do: keys and values as arrays, and the reference over them."""

    def __init__(self, rng: np.random.Generator, pipe: AttentionPipeline, *, kv_dtype: type = F32, **options: Any):
        self.rng, self.pipe, self.kv_dtype, self.options = rng, pipe, kv_dtype, options
        empty = np.zeros((pipe.batch, 0, pipe.num_kv_heads, pipe.head_dim))
        self.keys, self.values = empty, empty

    def draw(self, S: int, dtype: type = F32) -> list[np.ndarray]:
        """New q, k, v of S positions."""
        p = self.pipe
        return [self.rng.standard_normal((p.batch, S, heads, p.head_dim)).astype(dtype) for heads in (p.num_heads, p.num_kv_heads, p.num_kv_heads)]

    def append(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray | None = None, is_causal: bool = True) -> np.ndarray:
        self.keys = np.concatenate([self.keys, k.astype(self.kv_dtype)], 1)
        self.values = np.concatenate([self.values, v.astype(self.kv_dtype)], 1)
        q, k, v = (a.swapaxes(1, 2) for a in (q, self.keys, self.values))
        return reference.attention(q, k, v, mask, is_causal=is_causal, **self.options)[0].swapaxes(1, 2)

    def check(self, S: int, mask: np.ndarray | None = None, is_causal: bool = True, dtype: type = F32, **case: Any) -> None:
        """Append S positions to both, one by `decode`, more by `prefill`, and compare outputs and state."""
        given = self.draw(S, dtype)
        out = self.pipe.decode(*given) if S == 1 and mask is None and is_causal else self.pipe.prefill(*given, mask, is_causal)
        expected = self.append(*given, mask, is_causal)
        assert out.dtype == dtype
        half = F16 in (dtype, self.kv_dtype)
        assert_close(out, expected, max_error=2e-3 if half else 2e-5, S=S, length=self.pipe.length, **case)
        self.check_state(**case)

    def check_state(self, **case: Any) -> None:
        assert self.pipe.length == self.keys.shape[1], case
        for copy, rows in ((self.pipe.cache.k, self.keys), (self.pipe.cache.v, self.values)):
            held = copy(self.pipe.length).reshape(self.pipe.batch, self.pipe.num_kv_heads, self.pipe.length, self.pipe.head_dim)
            assert np.array_equal(held, rows.swapaxes(1, 2)), case


def small(device: Device, **options: Any) -> AttentionPipeline:
    return AttentionPipeline(4, 2, 8, **{"capacity": 32, "growth": 16, "device": device, **options})


# ---- against the reference


@pytest.mark.conformance(kv_dtype=["f16"], batch=[3])
@pytest.mark.parametrize("kv_dtype", ["f32", "f16"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    ("geometry", "options"),
    [
        ((4, 2, 8), {}),
        ((6, 1, 5), {}),
        ((2, 2, 7), {"window_size": 4}),
        ((4, 2, 8), {"window_size": (3, -1), "softcap": 2.0}),
        ((3, 3, 64), {"scale": 0.05, "softcap": 30.0}),
    ],
)
def test_prefill_and_decode(device, rng, monkeypatch, geometry, options, batch, kv_dtype):
    """In turn, also beyond the capacity; everything begins as NaN, and nothing is written beyond its place."""
    guard = Guard(monkeypatch)
    pipe = AttentionPipeline(*geometry, batch=batch, kv_dtype=kv_dtype, capacity=11, growth=5, device=device, **options)
    history = History(rng, pipe, kv_dtype={"f32": F32, "f16": F16}[kv_dtype], **options)
    case = {"geometry": geometry, "batch": batch, "kv_dtype": kv_dtype, **options}
    for S in (5, 1, 1, 4, 1, 9, 1):
        history.check(S, **case)
    assert pipe.length == 22
    assert (pipe.generation, pipe.capacity) == (3, 26)
    guard.check(**case)


@pytest.mark.parametrize("path", PORTABLE_PATHS)
@pytest.mark.parametrize("batch", [1, 2])
def test_every_path_by_name(device, rng, path, batch):
    pipe = small(device, batch=batch, path=path, window_size=9, softcap=3.0, capacity=10)
    history = History(rng, pipe, window_size=9, softcap=3.0)
    for S in (4, 1, 1, 3, 1, 2, 1):
        history.check(S, path=path, batch=batch)


def test_a_first_prompt_of_one_token(device, rng):
    """By decode or by prefill: neither needs a history."""
    for first in ("decode", "prefill"):
        pipe = small(device)
        history = History(rng, pipe)
        given = history.draw(1)
        assert_close(getattr(pipe, first)(*given), history.append(*given), max_error=1e-6, first=first)
        history.check(1)
        history.check(3)


def test_decoding_over_all_lengths_of_a_recording(devices, rng):
    """A shape for short and one for long histories: the step that crosses over is right, and the next."""
    for variant in ("gpu_shape", "gpu_shape_no_subgroup"):
        pipe = small(devices[variant], capacity=300)
        history = History(rng, pipe)
        history.check(253, variant=variant)
        for _ in range(6):
            history.check(1, variant=variant)


@pytest.mark.parametrize("dtype", [F16, np.float64])
def test_dtypes_of_inputs(device, rng, dtype):
    """float16 and float64 of the host are converted; float64 gives float32."""
    pipe = small(device)
    history = History(rng, pipe)
    for S in (3, 1):
        given = history.draw(S, dtype)
        out = (pipe.decode if S == 1 else pipe.prefill)(*given)
        assert out.dtype == (F16 if dtype == F16 else F32)
        assert_close(out, history.append(*given), max_error=2e-3 if dtype == F16 else 2e-5, S=S, dtype=dtype)


def test_arrays_that_are_not_dense(device, rng):
    pipe, twin = small(device), small(device)
    for S in (3, 1):
        q, k, v = History(rng, pipe).draw(S)
        heads_first = (np.ascontiguousarray(a.swapaxes(1, 2)).swapaxes(1, 2) for a in (q, k, v))
        call = "decode" if S == 1 else "prefill"
        assert np.array_equal(getattr(twin, call)(*heads_first), getattr(pipe, call)(q, k, v))


# ---- masks


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", ["bool", "float32", "float16", "int32"])
def test_masks_with_history(device, rng, kind, is_causal):
    """Of full width; square, for the new keys only; narrower and wider than that; for each sequence or head. A hidden row gives zeros."""
    pipe = small(device, batch=2)
    history = History(rng, pipe)
    history.check(6)
    for shape in ((4, 10), (2, 4, 4, 4), (4, 3), (2, 1, 4, 7), (4, 1, 8), (1, 4, 4, 5)):
        mask = rng.random(shape) < 0.7
        mask[..., -1] = True
        mask = np.where(mask, rng.standard_normal(shape), -np.inf).astype(kind) if kind.startswith("float") else mask.astype(kind)
        history.check(4, mask, is_causal, shape=shape, kind=kind)
        pipe.truncate(6)
        history.keys, history.values = history.keys[:, :6], history.values[:, :6]
    hidden = np.zeros((2, 6 + 2), bool)
    hidden[1] = True
    out = pipe.prefill(*history.draw(2), hidden, is_causal)
    assert not out[:, 0].any()
    assert out[:, 1].all()


def test_a_mask_on_the_device(device, rng):
    pipe, twin = small(device), small(device)
    for S, shape in ((3, (3, 3)), (2, (4, 2, 5))):
        given, mask = History(rng, pipe).draw(S), rng.standard_normal(shape).astype(F32)
        assert np.array_equal(pipe.prefill(*given, device.tensor(mask)), twin.prefill(*given, mask))


def test_prefill_without_causality_sees_all_of_the_prompt(device, rng):
    pipe = small(device)
    history = History(rng, pipe)
    history.check(5, is_causal=False)
    history.check(3, is_causal=False)
    history.check(1)


# ---- growth


def test_growth_keeps_the_contents_and_renews_the_recordings(device, rng):
    pipe = small(device, capacity=4, growth=3)
    history = History(rng, pipe)
    history.check(4)
    assert (pipe.capacity, pipe.generation) == (4, 0)
    before, cache = [recording for _, recording in pipe._decode], pipe.cache
    history.check(1)  # in a decode step
    assert (pipe.capacity, pipe.generation) == (7, 1)
    assert pipe.cache is not cache
    assert not {id(r) for r in before} & {id(r) for _, r in pipe._decode}
    history.check(2)
    assert (pipe.capacity, pipe.generation) == (7, 1)
    history.check(10)  # by several chunks at once
    assert (pipe.capacity, pipe.generation) == (19, 2)
    history.check(1)


def test_no_growth_refuses_what_does_not_fit(device, rng):
    pipe = small(device, capacity=4, growth=0)
    history = History(rng, pipe)
    history.check(3)
    with pytest.raises(CapacityError, match=r"2 positions do not fit: 3 of 4"):
        pipe.prefill(*history.draw(2))
    history.check(1)
    with pytest.raises(CapacityError, match=r"1 positions do not fit: 4 of 4"):
        pipe.decode(*history.draw(1))
    history.check_state()
    assert pipe.generation == 0


def test_a_cache_that_cannot_grow_further_stays_as_it_is(devices, rng):
    """The larger cache does not fit a binding."""
    device = devices["small_binding"]  # 1 MiB
    pipe = AttentionPipeline(4, 2, 64, capacity=1000, growth=2000, device=device)
    history = History(rng, pipe)
    history.check(999)
    with pytest.raises(CapacityError, match="3000 positions"):
        pipe.prefill(*history.draw(2))
    history.check_state()
    history.check(1)
    assert (pipe.capacity, pipe.generation) == (1000, 0)


@pytest.mark.parametrize("call", ["prefill", "decode"])
def test_an_error_anywhere_during_growth_changes_nothing(devices, rng, monkeypatch, call):
    """Each buffer that growing makes is refused once; the next call grows, and is right."""
    device, make = devices["gpu_shape_no_subgroup"], Device.buffer
    for failing in range(100):
        pipe = small(device, capacity=5, growth=300)
        history = History(rng, pipe)
        history.check(5)
        count = 0

        def refuse(self: Device, *args: Any, failing: int = failing, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count > failing:
                raise CapacityError("no memory")
            return make(self, *args, **kwargs)

        given = history.draw(1 if call == "decode" else 2)
        with monkeypatch.context() as patched:
            patched.setattr(Device, "buffer", refuse)
            try:
                out = getattr(pipe, call)(*given)
            except CapacityError:
                out = None
        if out is not None:
            assert_close(out, history.append(*given), max_error=2e-5)
            break
        history.check_state(failing=failing)
        history.check(1, failing=failing)
    assert failing >= 6, "growing makes two caches, a step's input and output, and partial results at least"


# ---- moving about in the history


def test_truncate_and_reset(device, rng):
    pipe = small(device)
    history = History(rng, pipe)
    history.check(8)
    pipe.truncate(8)
    assert pipe.length == 8
    pipe.truncate(3)
    history.keys, history.values = history.keys[:, :3], history.values[:, :3]
    history.check_state()
    history.check(1)
    history.check(4)
    pipe.truncate(0)
    history.keys, history.values = history.keys[:, :0], history.values[:, :0]
    history.check(5)
    pipe.reset()
    assert pipe.length == 0
    assert pipe.capacity == 32
    history.keys, history.values = history.keys[:, :0], history.values[:, :0]
    history.check(1)
    history.check(6)


KEPT = [
    [(0, 10)],
    [(4, 6)],
    [(0, 2), (5, 3)],
    [(1, 1), (3, 2), (9, 1)],
    [(0, 1), (1, 1), (2, 1)],
    [(2, 0), (3, 4)],
    [],
]


@pytest.mark.parametrize("ranges", KEPT)
@pytest.mark.parametrize(("batch", "kv_dtype", "head_dim"), [(1, "f32", 8), (2, "f16", 5)])
def test_keep_moves_what_is_kept_together(device, rng, ranges, batch, kv_dtype, head_dim):
    """Also ranges that overlap where they go. The rest is as if it had never been."""
    pipe = AttentionPipeline(2, 2, head_dim, batch=batch, kv_dtype=kv_dtype, capacity=13, growth=0, device=device)
    history = History(rng, pipe, kv_dtype={"f32": F32, "f16": F16}[kv_dtype])
    history.check(10)
    pipe.keep(ranges)
    rows = [i for begin, count in ranges for i in range(begin, begin + count)]
    history.keys, history.values = history.keys[:, rows], history.values[:, rows]
    history.check_state(ranges=ranges)
    history.check(1, ranges=ranges)
    history.check(2, ranges=ranges)


@pytest.mark.parametrize("ranges", [[(0, 11)], [(10, 1)], [(0, 3), (2, 1)], [(5, 2), (0, 2)], [(-1, 2)], [(3, -1)], [(0, 1), (4, 20)]])
def test_ranges_that_cannot_be_kept(device, rng, ranges):
    pipe = small(device)
    history = History(rng, pipe)
    history.check(10)
    with pytest.raises(ArgumentError, match="Range"):
        pipe.keep(ranges)
    history.check_state()
    history.check(1)


@pytest.mark.parametrize("n", [11, -1, 2.5])
def test_lengths_that_cannot_be_truncated_to(device, rng, n):
    pipe = small(device)
    history = History(rng, pipe)
    history.check(10)
    with pytest.raises(ArgumentError, match="10 positions"):
        pipe.truncate(n)
    history.check_state()


@pytest.mark.parametrize("kv_dtype", ["f32", "f16"])
def test_forks_are_independent(device, rng, kv_dtype):
    """Each goes its own way - grows, is cut, starts again - and the other does not notice."""
    options = {"window_size": 7, "softcap": 5.0, "scale": 0.4}
    pipe = small(device, capacity=8, growth=4, batch=2, kv_dtype=kv_dtype, **options)
    history = History(rng, pipe, kv_dtype={"f32": F32, "f16": F16}[kv_dtype], **options)
    history.check(7)
    twin = pipe.fork()
    other = History(rng, twin, kv_dtype=history.kv_dtype, **options)
    other.keys, other.values = history.keys, history.values
    other.check_state()
    assert twin.device is pipe.device
    assert (twin.capacity, twin.growth) == (pipe.capacity, pipe.growth)
    for step, (first, second) in enumerate(((1, 3), (2, 1), (1, 1))):
        history.check(first, step=step)
        other.check(second, step=step)
        history.check_state(step=step)
    twin.truncate(2)
    other.keys, other.values = other.keys[:, :2], other.values[:, :2]
    pipe.keep([(3, 5)])
    history.keys, history.values = history.keys[:, 3:8], history.values[:, 3:8]
    other.check(1)
    history.check(1)
    twin.reset()
    history.check(3)
    assert twin.length == 0
    assert pipe.fork().fork().length == pipe.length
    assert small(device).fork().length == 0


# ---- steps


def test_the_tail_of_the_cache_may_be_nan(device, rng):
    """Rows beyond the length are never part of a result, whichever group of keys they fall into."""
    for kv_dtype, head_dim in (("f32", 8), ("f16", 8), ("f32", 5)):
        for path in PORTABLE_PATHS:
            pipe = AttentionPipeline(4, 2, head_dim, kv_dtype=kv_dtype, capacity=70, path=path, device=device)
            for store in (pipe.cache.keys, pipe.cache.values):
                store.write(poison(store.shape, store.dtype))
            history = History(rng, pipe, kv_dtype={"f32": F32, "f16": F16}[kv_dtype])
            for S in (3, 1, 30, 1, 1):
                history.check(S, kv_dtype=kv_dtype, head_dim=head_dim, path=path)
            written = np.isfinite(pipe.cache.k(70)).all(-1).sum(1)
            assert (written == pipe.length).all(), "exactly one row a KV head and position is written"


@pytest.mark.parametrize("as_tensors", [False, True])
def test_a_decode_step_makes_nothing_and_submits_once(device, rng, monkeypatch, as_tensors):
    pipe = small(device, batch=2)
    history = History(rng, pipe)
    history.check(3)
    pipe.decode(*history.draw(1))
    steps = [history.draw(1) for _ in range(4)]
    if as_tensors:
        steps = [[device.tensor(a) for a in step] for step in steps]
    calls = Calls(device, monkeypatch)
    for step in steps:
        calls.check_step(pipe.decode, *step)


def test_ten_thousand_steps_leave_no_objects_behind(device, rng):
    pipe = AttentionPipeline(1, 1, 4, capacity=64, growth=0, device=device)
    arrays = History(rng, pipe).draw(1)
    tensors = [device.tensor(a) for a in arrays]

    def run(steps: int) -> None:
        for step in range(steps):
            if pipe.length == 64:
                pipe.truncate(step % 64)
            out = pipe.decode(*(arrays if step % 10 == 0 else tensors))  # arrays wait for their result
        assert_close(out.numpy(), arrays[2], max_error=1e-6)  # the mean of equal values

    run(100)
    before = live_objects()
    run(10_000)
    assert live_objects() == before


def test_two_pipelines_do_not_touch_each_other(device, rng):
    """Different heads, head dims, batches and storage, step by step in turn; and a stateless call between."""
    first = History(rng, small(device, capacity=6, growth=4))
    second = History(rng, AttentionPipeline(9, 3, 20, batch=2, kv_dtype="f16", capacity=5, growth=7, softcap=3.0, device=device), kv_dtype=F16, softcap=3.0)
    for S in (3, 1, 1, 4, 1, 1):
        first.check(S)
        second.check(S)
        q, k, v = rng.standard_normal((3, 1, 4, S + 2, 8)).astype(F32)
        assert_close(wgattn.sdpa(q, k, v, device=device), reference.attention(q, k, v)[0], max_error=2e-5)
        first.check_state()


def test_replays_of_the_same_sequence_are_identical(device, rng):
    """prefill(n) and five steps, twice, and a third time in a new pipeline: the same bits."""
    pipe = small(device, kv_dtype="f16", capacity=12, growth=8)
    history = History(rng, pipe)
    inputs = [history.draw(9), *(history.draw(1) for _ in range(5))]

    def run(p: AttentionPipeline) -> list[np.ndarray]:
        return [p.prefill(*inputs[0]), *(p.decode(*step) for step in inputs[1:])]

    first = run(pipe)
    pipe.reset()
    for again in (run(pipe), run(small(device, kv_dtype="f16", capacity=40))):
        for a, b in zip(first, again, strict=True):
            assert np.array_equal(a, b)


def check_cuts(make: Callable[[], AttentionPipeline], given: Sequence[np.ndarray], all_cuts: Iterable[list[int]], **case: Any) -> None:
    """In one, in parts, in single steps: the caches are equal to the bit, the outputs to the precision of f32."""
    whole, (q, k, v) = make(), given
    T, expected = q.shape[1], whole.prefill(q, k, v)
    for cuts in all_cuts:
        pipe = make()
        parts = np.split(np.arange(T), cuts)
        out = np.concatenate([(pipe.decode if len(p) == 1 else pipe.prefill)(q[:, p], k[:, p], v[:, p]) for p in parts], 1)
        assert_close(out, expected, max_error=2e-6, cuts=cuts, **case)
        assert np.array_equal(pipe.cache.k(T), whole.cache.k(T))
        assert np.array_equal(pipe.cache.v(T), whole.cache.v(T))


@pytest.mark.parametrize("options", [{}, {"window_size": 4}, {"softcap": 2.0}, {"kv_dtype": "f16"}])
def test_however_the_prompt_is_cut_the_result_is_the_same(device, rng, options):
    T = 9
    given = History(rng, small(device)).draw(T)
    check_cuts(lambda: small(device, **options), given, (*([a] for a in range(1, T)), [3, 5], list(range(1, T))), **options)


# ---- tensors


@pytest.mark.parametrize(("head_dim", "dtype"), [(8, F32), (8, F16), (5, F16)])
def test_tensors_give_tensors_and_nothing_is_copied_to_the_host(device, rng, monkeypatch, head_dim, dtype):
    pipe, twin = (AttentionPipeline(4, 2, head_dim, batch=2, capacity=4, growth=4, device=device) for _ in range(2))
    history = History(rng, pipe)
    prompt, mask = history.draw(3, dtype), rng.standard_normal((3, 3)).astype(F32)
    steps = [history.draw(1) for _ in range(3)]
    expected = [twin.prefill(*prompt, mask), *(twin.decode(*step) for step in steps)]
    results = []
    with monkeypatch.context() as forbidden:
        forbid_reading(forbidden)
        results.append(pipe.prefill(*(device.tensor(a) for a in prompt), device.tensor(mask)))
        assert results[0].dtype == dtype
        for step in steps:
            out = pipe.decode(*(device.tensor(a) for a in step))
            copy = device.empty(out.shape)
            encoder = device.gpu.create_command_encoder()
            encoder.copy_buffer_to_buffer(out.buffer, 0, copy.buffer, 0, out.nbytes)
            device.gpu.queue.submit([encoder.finish()])
            results.append(copy)
    assert all(isinstance(r, wgattn.Tensor) for r in results)
    for ours, theirs in zip(results, expected, strict=True):
        assert np.array_equal(ours.numpy(), theirs)


def test_arrays_and_tensors_in_one_call(device, rng):
    pipe, twin = small(device), small(device)
    for S in (3, 1):
        q, k, v = History(rng, pipe).draw(S)
        call = "decode" if S == 1 else "prefill"
        expected = getattr(twin, call)(q, k, v)
        out = getattr(pipe, call)(q, device.tensor(k), v)
        assert isinstance(out, np.ndarray)
        assert np.array_equal(out, expected)
        pipe.truncate(pipe.length - S)
        out = getattr(pipe, call)(device.tensor(q), k, device.tensor(v))
        assert isinstance(out, wgattn.Tensor)
        assert np.array_equal(out.numpy(), expected)


def test_an_output_can_be_the_next_query(device, rng):
    pipe, twin = (AttentionPipeline(2, 2, 8, capacity=8, device=device) for _ in range(2))
    q, k, v = History(rng, pipe).draw(1)
    out, tensor = twin.decode(q, k, v), pipe.decode(device.tensor(q), k, v)
    for _ in range(3):
        out, tensor = twin.decode(out, out, out), pipe.decode(tensor, tensor, tensor)
    assert np.array_equal(tensor.numpy(), out)


# ---- what is refused

Refused = tuple[type[Exception], Callable[[AttentionPipeline, list[np.ndarray], Device], Any]]

BAD_CALLS: dict[str, Refused] = {
    "decode of two positions": (ShapeError, lambda p, a, d: p.decode(*(np.repeat(x, 2, 1) for x in a))),
    "decode of none": (ShapeError, lambda p, a, d: p.decode(*(x[:, :0] for x in a))),
    "prefill of none": (ShapeError, lambda p, a, d: p.prefill(*(x[:, :0] for x in a))),
    "another batch": (ShapeError, lambda p, a, d: p.decode(*(np.repeat(x, 2, 0) for x in a))),
    "another number of heads": (ShapeError, lambda p, a, d: p.decode(a[0][:, :, :2], *a[1:])),
    "another number of KV heads": (ShapeError, lambda p, a, d: p.decode(a[0], a[0], a[0])),
    "another head dim": (ShapeError, lambda p, a, d: p.prefill(*(x[..., :7] for x in a))),
    "heads before positions": (ShapeError, lambda p, a, d: p.prefill(*(x.swapaxes(1, 2) for x in a))),
    "three dimensions": (ShapeError, lambda p, a, d: p.decode(*(x[0] for x in a))),
    "more keys than queries": (ShapeError, lambda p, a, d: p.prefill(a[0], *(np.repeat(x, 2, 1) for x in a[1:]))),
    "fewer values than keys": (ShapeError, lambda p, a, d: p.prefill(*(np.repeat(x, 2, 1) for x in a[:2]), a[2])),
    "integers": (TypeError, lambda p, a, d: p.decode(a[0].astype(int), *a[1:])),
    "complex numbers": (TypeError, lambda p, a, d: p.prefill(*a[:2], a[2].astype(complex))),
    "keys and values of two dtypes": (TypeError, lambda p, a, d: p.prefill(*a[:2], a[2].astype(F16))),
    "a mask wider than history and prompt": (ShapeError, lambda p, a, d: p.prefill(*a, np.zeros((1, 10), F32))),
    "a mask of other queries": (ShapeError, lambda p, a, d: p.prefill(*a, np.zeros((2, 3), F32))),
    "a mask of five dimensions": (ShapeError, lambda p, a, d: p.prefill(*a, np.zeros((1, 1, 1, 1, 3), F32))),
    "a mask that is a number": (ShapeError, lambda p, a, d: p.prefill(*a, np.float32(0))),
    "a mask of complex numbers": (TypeError, lambda p, a, d: p.prefill(*a, np.zeros((1, 3), complex))),
    "a query of another device": (ArgumentError, lambda p, a, d: p.decode(d.tensor(a[0]), *a[1:])),
    "keys of another device": (ArgumentError, lambda p, a, d: p.prefill(a[0], d.tensor(a[1]), a[2])),
    "a mask of another device": (ArgumentError, lambda p, a, d: p.prefill(*a, d.tensor(np.zeros((1, 3))))),
    "a step of f16 tensors": (TypeError, lambda p, a, d: p.decode(*(p.device.tensor(x, F16) for x in a))),
    "more than there is room for": (CapacityError, lambda p, a, d: p.prefill(*(np.repeat(x, 30, 1) for x in a))),
    "truncate beyond the length": (ArgumentError, lambda p, a, d: p.truncate(9)),
    "keep beyond the length": (ArgumentError, lambda p, a, d: p.keep([(0, 2), (7, 2)])),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_call_that_is_refused_changes_nothing(device, devices, rng, monkeypatch, case):
    """No work, and the next step gives the same bits as that of a twin that was never asked."""
    error, call = BAD_CALLS[case]
    other = devices["gpu_shape"]
    assert other.profile
    pipe = small(device, capacity=20, growth=0)
    history = History(rng, pipe)
    history.check(8)
    twin = pipe.fork()
    step = history.draw(1)
    check_refused(monkeypatch, error, lambda devices: call(pipe, step, other), device)
    assert (pipe.length, pipe.capacity, pipe.generation) == (8, 20, 0)
    history.check_state()
    assert np.array_equal(pipe.decode(*step), twin.decode(*step))


@pytest.mark.parametrize(
    ("error", "arguments", "options"),
    [
        (ShapeError, (5, 2, 8), {}),
        (ShapeError, (2, 4, 8), {}),
        (ArgumentError, (0, 1, 8), {}),
        (ArgumentError, (4, 0, 8), {}),
        (ArgumentError, (4, 2, 0), {}),
        (ArgumentError, (4, -2, 8), {}),
        (ArgumentError, (4, 2, 8.5), {}),
        (ArgumentError, (4, 2, float("nan")), {}),
        (ArgumentError, (4, 2, 8), {"capacity": float("inf")}),
        (ArgumentError, (4, 2, 8), {"batch": 0}),
        (ArgumentError, (4, 2, 8), {"capacity": 0}),
        (ArgumentError, (4, 2, 8), {"growth": -1}),
        (ArgumentError, (4, 2, 8), {"kv_dtype": "bf16"}),
        (ArgumentError, (4, 2, 8), {"softcap": -1.0}),
        (ArgumentError, (4, 2, 8), {"softcap": float("nan")}),
        (ArgumentError, (4, 2, 8), {"scale": float("inf")}),
        (ArgumentError, (4, 2, 8), {"window_size": 0}),
        (ArgumentError, (4, 2, 8), {"path": "fused"}),
        (CapacityError, (4, 2, 8), {"capacity": 2**30}),
        (Unsupported, (1, 1, 20_000), {"path": "split", "capacity": 1}),
    ],
)
def test_pipelines_that_cannot_be(device, monkeypatch, error, arguments, options):
    calls = Calls(device, monkeypatch)
    with pytest.raises(error):
        AttentionPipeline(*arguments, device=device, **options)
    assert calls["submit"] == 0


def test_whole_numbers_of_numpy_are_whole_numbers(device, rng):
    pipe = AttentionPipeline(np.int64(4), np.int32(2), np.int64(8), batch=np.int64(1), capacity=np.int64(3), growth=np.int64(2), device=device)
    history = History(rng, pipe)
    history.check(2)
    history.check(3)
    pipe.truncate(np.int64(3))
    assert pipe.length == 3
