"""Objects with a sequence, called in any order, several at a time, with refused calls between: against plain models of what they ought to hold."""

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.attention.test_pipeline import BAD_CALLS
from tests.fuzz.depth import both_depths, explore_states, refusal
from tests.helpers import assert_close
from tests.llm.make_gguf import write_llama_gguf
from wgattn import ArgumentError, AttentionPipeline, CapacityError, FusedAttention, Llama, Rope, ShapeError, WgattnError, reference
from wgattn.gpu import Device

SEEDS = st.integers(0, 2**32 - 1)


# ---- AttentionPipeline


class Sequence:
    """A pipeline, and the keys and values that it ought to hold."""

    def __init__(self, pipe: AttentionPipeline, keys: np.ndarray, values: np.ndarray):
        self.pipe, self.keys, self.values = pipe, keys, values

    def cut(self, rows: list[int]) -> None:
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]

    def check(self) -> None:
        length = self.keys.shape[1]
        assert self.pipe.length == length
        assert self.pipe.capacity >= length
        for held, rows in ((self.pipe.cache.k(length), self.keys), (self.pipe.cache.v(length), self.values)):
            np.testing.assert_array_equal(held.reshape(rows.swapaxes(1, 2).shape), rows.swapaxes(1, 2).astype(np.float32))


def pipelines(device: Device, other: Device) -> type[RuleBasedStateMachine]:
    class Pipelines(RuleBasedStateMachine):
        @initialize(
            seed=SEEDS,
            batch=st.sampled_from([1, 1, 2]),
            kv_dtype=st.sampled_from(["f32", "f16", "q8_0", "q4_0"]),
            options=st.sampled_from([{}, {}, {"window_size": 5, "softcap": 4.0}]),
            capacity=st.integers(1, 12),
            growth=st.sampled_from([0, 1, 5, 16]),
        )
        def begin(self, seed, batch, kv_dtype, options, capacity, growth):
            self.rng, self.options, self.kv_dtype = np.random.default_rng(seed), options, kv_dtype
            self.error = 5e-5 if kv_dtype == "f32" else 2e-3
            capacity = capacity if growth else 40
            pipe = AttentionPipeline(4, 2, 8, batch=batch, kv_dtype=kv_dtype, capacity=capacity, growth=growth, device=device, **options)
            empty = np.zeros((batch, 0, 2, 8))
            self.all = [Sequence(pipe, empty, empty)]

        def one(self, index: int) -> Sequence:
            return self.all[index % len(self.all)]

        def draw(self, seq: Sequence, S: int) -> list[np.ndarray]:
            return [self.rng.standard_normal((seq.pipe.batch, S, heads, 8)).astype(np.float32) for heads in (4, 2, 2)]

        def append(self, seq: Sequence, given: list[np.ndarray], mask: np.ndarray | None, causal: bool) -> np.ndarray:
            seq.keys, seq.values = (
                np.concatenate([held, reference.kv_stored(new, self.kv_dtype)], 1) for held, new in ((seq.keys, given[1]), (seq.values, given[2]))
            )
            q, k, v = (a.swapaxes(1, 2) for a in (given[0], seq.keys, seq.values))
            return reference.attention(q, k, v, mask, is_causal=causal, **self.options)[0].swapaxes(1, 2)

        def fits(self, seq: Sequence, S: int) -> bool:
            return bool(seq.pipe.growth) or seq.keys.shape[1] + S <= seq.pipe.capacity

        @rule(index=st.integers(0, 9), S=st.integers(1, 9), causal=st.booleans(), masked=st.booleans(), tensors=st.booleans())
        def prefill(self, index, S, causal, masked, tensors):
            seq = self.one(index)
            given = self.draw(seq, S)
            if not self.fits(seq, S):
                with pytest.raises(CapacityError):
                    seq.pipe.prefill(*given)
                return seq.check()
            mask = self.rng.random((S, seq.keys.shape[1] + S)) < 0.7 if masked else None
            out = seq.pipe.prefill(*([device.tensor(a) for a in given] if tensors else given), mask, causal)
            out = out.numpy() if tensors else out
            assert_close(out, self.append(seq, given, mask, causal), max_error=self.error)
            return seq.check()

        @rule(index=st.integers(0, 9), times=st.integers(1, 4), tensors=st.booleans())
        def decode(self, index, times, tensors):
            seq = self.one(index)
            for _ in range(times):
                given = self.draw(seq, 1)
                if not self.fits(seq, 1):
                    with pytest.raises(CapacityError):
                        seq.pipe.decode(*given)
                    break
                out = seq.pipe.decode(*([device.tensor(a) for a in given] if tensors else given))
                out = out.numpy() if tensors else out
                assert_close(out, self.append(seq, given, None, True), max_error=self.error)
            seq.check()

        @rule(index=st.integers(0, 9), part=st.floats(0, 1))
        def truncate(self, index, part):
            seq = self.one(index)
            n = int(part * seq.keys.shape[1])
            seq.pipe.truncate(n)
            seq.cut(list(range(n)))
            seq.check()

        @rule(index=st.integers(0, 9))
        def reset(self, index):
            seq = self.one(index)
            seq.pipe.reset()
            seq.cut([])
            seq.check()

        @rule(index=st.integers(0, 9), data=st.data())
        def keep(self, index, data):
            seq = self.one(index)
            length = seq.keys.shape[1]
            cuts = sorted(data.draw(st.lists(st.integers(0, length), max_size=6)))
            ranges = [(a, b - a) for a, b in zip(cuts[::2], cuts[1::2], strict=False)]
            seq.pipe.keep(ranges)
            seq.cut([i for begin, count in ranges for i in range(begin, begin + count)])
            seq.check()

        @precondition(lambda self: len(self.all) < 5)
        @rule(index=st.integers(0, 9))
        def fork(self, index):
            seq = self.one(index)
            self.all.append(Sequence(seq.pipe.fork(), seq.keys, seq.values))
            self.all[-1].check()

        @precondition(lambda self: len(self.all) > 1)
        @rule(index=st.integers(0, 9))
        def drop(self, index):
            del self.all[index % len(self.all)]

        @rule(index=st.integers(0, 9), case=st.sampled_from(sorted(BAD_CALLS)))
        def refused(self, index, case):
            """What the test of refused calls tries on a sequence of eight positions; here some of it may be possible."""
            seq = self.one(index)
            if case in ("another batch", "more than there is room for", "truncate beyond the length", "keep beyond the length") or "mask" in case:
                return
            error, call = BAD_CALLS[case]
            before = seq.pipe.capacity, seq.pipe.generation
            with pytest.raises(error):
                call(seq.pipe, self.draw(seq, 1), other)
            assert (seq.pipe.capacity, seq.pipe.generation) == before
            seq.check()

        @rule(index=st.integers(0, 9), beyond=st.integers(1, 5))
        def beyond(self, index, beyond):
            seq = self.one(index)
            length = seq.keys.shape[1]
            with pytest.raises(TypeError):
                seq.pipe.keep([(0.5, 1)])
            for call in (lambda: seq.pipe.truncate(length + beyond), lambda: seq.pipe.keep([(0, length + beyond)]), lambda: seq.pipe.truncate(-beyond)):
                with pytest.raises(ArgumentError):
                    call()
            with pytest.raises(ShapeError):
                seq.pipe.prefill(*self.draw(seq, 2), np.ones((2, length + 2 + beyond), bool))
            seq.check()

        def teardown(self):
            for seq in getattr(self, "all", ()):
                seq.check()

    return Pipelines


@both_depths
def test_pipelines(depth, device, devices):
    explore_states(pipelines(device, devices["checked"]), depth=depth, quick=(15, 15), thorough=(400, 60))


# ---- FusedAttention

E, H, KV, D = 32, 4, 2, 8


def blocks(device: Device, other: Device, weights: dict[str, np.ndarray], made: dict[Any, FusedAttention]) -> type[RuleBasedStateMachine]:
    rope = Rope(base=100.0, dim=D)
    shape = {"num_heads": H, "num_kv_heads": KV, "head_dim": D}

    class Blocks(RuleBasedStateMachine):
        @initialize(seed=SEEDS, first=st.sampled_from([("f32", 20), ("f16", 90)]))
        def begin(self, seed, first):
            """Two blocks of the same weights, used in turn; made once, as recording them takes a while."""
            self.rng = np.random.default_rng(seed)
            self.all = []
            for kv_dtype, capacity in (first, ("f32", 70)):
                key = kv_dtype, capacity
                if key not in made:
                    made[key] = FusedAttention(weights, **shape, rope=rope, kv_dtype=kv_dtype, capacity=capacity, device=device)
                made[key].reset()
                self.all.append([made[key], np.zeros((KV, 0, D)), np.zeros((KV, 0, D))])

        def run(self, index: int, T: int, with_residual: bool, tensors: bool, decode: bool) -> None:
            state = self.all[index % 2]
            block, keys, values = state
            x, residual = self.rng.standard_normal((2, T, E)).astype(np.float32)
            residual = residual if with_residual else None
            if keys.shape[1] + T > block.capacity:
                with pytest.raises(CapacityError):
                    (block.decode if decode else block.prefill)(x, residual)
                return
            arrays = [a if a is None or not tensors else device.tensor(a) for a in (x, residual)]
            y = (block.decode if decode else block.prefill)(*arrays)
            y = y.numpy() if tensors else y
            wanted, state[1], state[2] = reference.attention_block(
                x, weights, **shape, eps=1e-5, rope={"base": 100.0, "dim": D}, past=(keys, values)
            )
            wanted = wanted if residual is None else wanted + residual
            assert_close(y, wanted, max_error=(2e-2 if block.cache.dtype == "f16" else 2e-4) * (1 + np.abs(wanted).max()), T=T)

        @rule(index=st.integers(0, 1), T=st.sampled_from([1, 2, 5, 17, 65]), residual=st.booleans(), tensors=st.booleans())
        def prefill(self, index, T, residual, tensors):
            self.run(index, T, residual, tensors, False)

        @rule(index=st.integers(0, 1), times=st.integers(1, 4), residual=st.booleans(), tensors=st.booleans())
        def decode(self, index, times, residual, tensors):
            for _ in range(times):
                self.run(index, 1, residual, tensors, True)

        @rule(index=st.integers(0, 1), part=st.floats(0, 1))
        def truncate(self, index, part):
            state = self.all[index]
            n = int(part * state[1].shape[1])
            state[0].truncate(n)
            state[1], state[2] = state[1][:, :n], state[2][:, :n]

        @rule(index=st.integers(0, 1))
        def reset(self, index):
            state = self.all[index]
            state[0].reset()
            state[1], state[2] = state[1][:, :0], state[2][:, :0]

        @rule(index=st.integers(0, 1), case=st.integers(0, 6))
        def refused(self, index, case):
            block, x = self.all[index][0], np.ones((1, E), np.float32)
            call, error = [
                (lambda: block.decode(np.ones((2, E), np.float32)), ShapeError),
                (lambda: block.prefill(np.ones((0, E), np.float32)), ShapeError),
                (lambda: block.prefill(np.ones((1, E + 1), np.float32)), ShapeError),
                (lambda: block.prefill(x, np.ones((2, E), np.float32)), ShapeError),
                (lambda: block.decode(x.astype(int)), TypeError),
                (lambda: block.decode(other.tensor(x)), ArgumentError),
                (lambda: block.truncate(block.length + 1), ArgumentError),
            ][case]
            with pytest.raises(error):
                call()

        @invariant()
        def holds_what_it_should(self):
            for block, keys, values in getattr(self, "all", ()):
                assert block.length == keys.shape[1]
                tolerance = 5e-3 if block.cache.dtype == "f16" else 1e-4
                for held, wanted in ((block.cache.k(), keys), (block.cache.v(), values)):
                    assert_close(held, wanted, max_error=tolerance * (1 + np.abs(wanted).max(initial=0)))

    return Blocks


@both_depths
def test_blocks(depth, device, devices, rng):
    shapes = {"wq": (H * D, E), "wk": (KV * D, E), "wv": (KV * D, E), "wo": (E, H * D), "bq": (H * D,), "bk": (KV * D,), "bv": (KV * D,), "bo": (E,)}
    weights = {name: 0.3 * rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    weights |= {"norm": np.ones(E, np.float32)}
    explore_states(blocks(device, devices["checked"], weights, {}), depth=depth, quick=(8, 10), thorough=(200, 50))


# ---- Llama

VOCAB = 262


def models(model: Llama, weights: dict[str, np.ndarray]) -> type[RuleBasedStateMachine]:
    class Models(RuleBasedStateMachine):
        @initialize()
        def begin(self):
            model.reset()
            self.ids: list[int] = []
            self.open: tuple[Any, int, list[int]] | None = None
            """A generator, the state of `changed` when it was last right to go on with it, and the ids that it has given out and not fed."""
            self.changed = 0

        def wanted(self) -> np.ndarray:
            return reference.llama(weights, self.ids, model.config)[-1]

        def check(self, logits: np.ndarray) -> None:
            wanted = self.wanted()
            assert_close(logits, wanted, max_error=5e-4 * np.abs(wanted).max())

        def likeliest(self, token: int) -> None:
            wanted = self.wanted()
            assert wanted[token] >= wanted.max() - 1e-3 * np.abs(wanted).max()

        def fits(self, count: int) -> bool:
            return len(self.ids) + count <= model.capacity

        @rule(ids=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6), repeat=st.sampled_from([1, 1, 1, 12]))
        def prefill(self, ids, repeat):
            ids = ids * repeat
            if not self.fits(len(ids)):
                with pytest.raises(CapacityError):
                    model.prefill(ids)
                return
            self.changed += 1
            self.ids += ids
            self.check(model.prefill(ids))

        @rule(ids=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4))
        def decode(self, ids):
            for token in ids:
                if not self.fits(1):
                    with pytest.raises(CapacityError):
                        model.decode(token)
                    return
                self.changed += 1
                self.ids.append(token)
                self.check(model.decode(token))

        @rule()
        def reset(self):
            model.reset()
            self.changed += 1
            self.ids = []

        @rule(ids=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3), sampled=st.booleans(), seed=st.integers(0, 99))
        def begin_to_generate(self, ids, sampled, seed):
            if not self.fits(len(ids)):
                assert refusal(lambda: next(model.generate(ids, stop_ids=())))
                return
            options = {"temperature": 1.0, "seed": seed} if sampled else {}
            generator = model.generate(ids, 1000, stop_ids=(), **options)
            first = next(generator)
            self.changed += 1
            self.ids += ids
            if not sampled:
                self.likeliest(first)
            self.open = generator, self.changed, [first], sampled

        @precondition(lambda self: self.open is not None)
        @rule(count=st.integers(1, 20))
        def go_on(self, count):
            generator, changed, given, sampled = self.open
            for _ in range(count):
                if changed != self.changed:
                    assert refusal(lambda: next(generator)) == GONE
                    self.open = None
                    return
                found = next(generator, None)
                if found is None:
                    assert len(self.ids) == model.capacity
                    self.open = None
                    return
                self.ids.append(given.pop())
                given.append(found)
                if not sampled and count < 4:
                    self.likeliest(found)

        @precondition(lambda self: self.open is not None)
        @rule()
        def close(self):
            self.open[0].close()
            self.open = None

        @rule(case=st.integers(0, 7))
        def refused(self, case):
            call = [
                lambda: model.prefill([]),
                lambda: model.prefill([1, VOCAB]),
                lambda: model.decode(-1),
                lambda: model.prefill([1] * (model.capacity + 1)),
                lambda: next(model.generate([1], temperature=-1.0)),
                lambda: next(model.generate([VOCAB])),
                lambda: model.prefill([1.5]),
                lambda: model.decode("5"),
            ][case]
            with pytest.raises(WgattnError if case < 6 else TypeError):
                call()

        @invariant()
        def has_its_length(self):
            assert model.length == len(getattr(self, "ids", ()))

    return Models


GONE = "The sequence was changed while tokens were generated from it: finish or drop the generator before."


@both_depths
def test_models(depth, device, tmp_path):
    path = tmp_path / "tiny.gguf"
    weights = write_llama_gguf(path, layers=1, dim=32, heads=2, kv_heads=1, ffn=64, vocab=VOCAB, kinds="Q8_0", seed=6)
    model = Llama.from_gguf(path, kv_dtype="f32", capacity=150, device=device)
    explore_states(models(model, weights), depth=depth, quick=(12, 15), thorough=(400, 50))
