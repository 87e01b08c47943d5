"""Picking tokens on the device: what may be drawn and how often, against the float64 reference; and generation in blocks."""

import numpy as np
import pytest

from tests.helpers import dirty_workgroup_memory, poison
from tests.llm.make_gguf import write_llama_gguf
from tests.watch import Calls
from wgattn import ArgumentError, DeviceError, reference
from wgattn.gpu import StepState, Tensor
from wgattn.llm import loop
from wgattn.llm.llama import Llama
from wgattn.llm.loop import DecodeLoop, pack_options
from wgattn.llm.sample import sample

MASS = 1e-5
"""How far the probability that the kernel sums up in float32 may be off: a set may lack or have tokens of so much at its border."""
OPTIONS = [(1.0, 0, 1.0), (0.7, 40, 1.0), (1.0, 0, 0.9), (0.8, 40, 0.95), (1.5, 3, 0.5), (2.0, 0, 0.999), (1.0, 1, 1.0), (0.3, 0, 1e-6), (1.0, 10**9, 0.5)]


class Picker:
    """The two picks over logits of our own."""

    def __init__(self, device, vocab):
        self.device, self.vocab = device, vocab
        self.state = StepState(device, 1)
        self._padded = device.empty((-(-vocab // 4) * 4,))
        self.loop = DecodeLoop(device, [], Tensor(device, (vocab,), np.dtype(np.float32), self._padded.buffer), self.state)

    def set(self, logits):
        tail = poison((self._padded.size,))  # what lies beyond the vocabulary may be anything
        tail[: self.vocab] = logits
        self._padded.write(tail)

    def tokens(self, count=1, options=None, seed=0, position=7):
        """(count,) picked for positions from `position` on, all from the same logits."""
        if options is not None:
            self.device.write(self.loop._options, pack_options(*options, seed))
        pick = self.loop.argmax if options is None else self.loop.sample
        self.state.write(position - 1, [0])
        found = []
        for first in range(position, position + count, 256):
            positions = np.arange(first, min(first + 256, position + count))
            pick.replay(len(positions))
            found.append(self.loop._history.numpy()[positions % 256])
        step = self.device.read(self.state.buffer, np.uint32, self.state.tokens_at + 1)
        assert step[:2].tolist() == [position + count - 1, 1]
        assert step[-1] == found[-1][-1] or (found[-1][-1] == loop._NONE and step[-1] < self.vocab)
        return np.concatenate(found).astype(np.int64)

    def candidates(self, logits):
        """The ids that the last draw was from."""
        keys, border = order_keys(logits), self.loop._kept.numpy()[-1].astype(np.int64)
        ids = np.arange(self.vocab)
        return np.flatnonzero((keys > border[0]) | ((keys == border[0]) & (ids <= border[1])))


def order_keys(values):
    bits = (np.asarray(values, np.float32) + np.float32(0)).view(np.uint32).astype(np.int64)
    return np.where(bits >> 31 == 1, ~bits & 0xFFFFFFFF, bits | 0x80000000)


def threefry(key, counter):
    """Threefry-2x32 of 13 rounds, word by word; counter (..., 2) uint32."""
    mask = np.uint64(0xFFFFFFFF)
    keys = [np.uint64(int(k)) for k in (key[0], key[1], int(key[0]) ^ int(key[1]) ^ 0x1BD11BDA)]
    a, b = ((np.asarray(counter)[..., i].astype(np.uint64) + keys[i]) & mask for i in (0, 1))
    for i in range(13):
        turn = np.uint64((13, 15, 26, 6, 17, 29, 16, 24)[i % 8])
        a = (a + b) & mask
        b = (((b << turn) | (b >> (np.uint64(32) - turn))) & mask) ^ a
        if i % 4 == 3:
            group = i // 4 + 1
            a, b = (a + keys[group % 3]) & mask, (b + keys[(group + 1) % 3] + np.uint64(group)) & mask
    return a, b


def scores(logits, options, seed, position):
    """(vocab,) float64: -inf for what is no candidate, else logit / temperature + Gumbel noise; the largest is drawn."""
    ids, _ = reference.candidates(logits, *options)
    words = pack_options(*options, seed)[4:6]
    high, low = threefry(words, np.stack([np.full(len(ids), position), ids], -1))
    u = (high + (low + 0.5) / 2**32) / 2**32
    found = np.full(len(logits), -np.inf)
    with np.errstate(all="ignore"):
        found[ids] = np.where(logits[ids] == max(logits), 0, (logits[ids].astype(np.float64) - max(logits)) / options[0]) - np.log(-np.log1p(-u))
    return found


def logits_of(kind, vocab, rng):
    """float32 logits of all kinds."""
    x = rng.standard_normal(vocab)
    made = {
        "random": lambda: 3 * x,
        "peaked": lambda: 12 * x,
        "tied": lambda: np.round(2 * x),
        "constant": lambda: np.full(vocab, rng.choice([0.0, -3.5, 1e30])),
        "huge": lambda: 1e38 * np.clip(x, -3, 3),
        "tiny": lambda: 1e-39 * x,
        "zeros": lambda: rng.choice([0.0, -0.0, -1e-45, 1.0], vocab),
        "masked": lambda: np.where((rng.random(vocab) < 0.5) & (x < x.max()), -np.inf, x),
        "infinite": lambda: np.where(np.arange(vocab) % 3 == vocab % 3, np.inf, x),
    }
    return made[kind]().astype(np.float32)


KINDS = ["random", "peaked", "tied", "constant", "huge", "tiny", "zeros", "masked", "infinite"]


@pytest.fixture
def pickers(device):
    made = {}
    return lambda vocab: made.setdefault(vocab, Picker(device, vocab))


# ---- what may be drawn


@pytest.mark.conformance(vocab=[1000])
@pytest.mark.parametrize("vocab", [1, 2, 5, 1000, 49152])
@pytest.mark.parametrize("kind", KINDS)
def test_candidates_are_those_of_the_reference(pickers, rng, kind, vocab):
    picker = pickers(vocab)
    for temperature, top_k, top_p in OPTIONS:
        x = logits_of(kind, vocab, rng)
        picker.set(x)
        dirty_workgroup_memory(picker.device)
        token = int(picker.tokens(1, (temperature, top_k, top_p), seed=3)[0])
        found = picker.candidates(x)
        case = {"kind": kind, "vocab": vocab, "temperature": temperature, "top_k": top_k, "top_p": top_p}
        assert token in found, case
        near = [p if p >= 1 else min(max(p + d, 1e-12), 1.0) for p, d in ((top_p, -MASS), (top_p, MASS))]
        least, most = (reference.candidates(x, temperature, top_k, p) for p in near)
        weight = most[1] > 1e-37
        assert set(least[0][least[1] > 1e-37]) <= set(found), case
        assert set(found) <= set(most[0]), case
        if top_p == 1:
            assert set(most[0][weight]) <= set(found), case
        if token not in least[0]:
            continue
        for seed in range(3):  # and the host's function may draw the same
            assert sample(x, temperature=temperature, top_k=top_k, top_p=top_p, rng=np.random.default_rng(seed)) in most[0]


@pytest.mark.conformance
def test_equals_at_the_border_fall_to_the_lowest_ids(pickers):
    picker = pickers(1000)
    x = np.zeros(1000, np.float32)
    x[[999, 500]] = 1.0
    x[::2] += 0.0
    picker.set(x)
    for k in (1, 2, 3, 5, 64, 257, 999, 1000):
        picker.tokens(1, (1.0, k, 1.0))
        assert picker.candidates(x).tolist() == sorted(reference.candidates(x, top_k=k)[0].tolist())
    for p in (0.001, 0.0031, 0.2507, 0.75031):
        picker.tokens(1, (1.0, 0, p))
        assert picker.candidates(x).tolist() == sorted(reference.candidates(x, top_p=p)[0].tolist())
    picker.tokens(1, (1.0, 100, 0.5013))
    assert picker.candidates(x).tolist() == sorted(reference.candidates(x, 1.0, 100, 0.5013)[0].tolist())


@pytest.mark.parametrize("variant", ["gpu_shape", "checked"])
def test_other_shapes_of_the_kernel_find_the_same(devices, rng, variant):
    """A GPU's workgroups are larger."""
    picker = Picker(devices[variant], 5003)
    for kind in KINDS:
        x = logits_of(kind, 5003, rng)
        picker.set(x)
        for options in OPTIONS:
            picker.tokens(1, options)
            near = [p if p >= 1 else max(p + d, 1e-12) for p, d in ((options[2], -MASS), (options[2], MASS))]
            least, most = (reference.candidates(x, *options[:2], min(p, 1.0)) for p in near)
            found = set(picker.candidates(x))
            assert set(least[0][least[1] > 1e-37]) <= found <= set(most[0]), (kind, options)


# ---- the draw


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ((0, 0), (0, 0), (0x9D1C5EC6, 0x8BD50731)),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0xFD36D048, 0x2D17272C)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xBA3E4725, 0xF27D669E)),
    ],
)
def test_threefry_gives_its_authors_numbers(key, counter, expected):
    assert tuple(int(v) for v in threefry(key, np.array(counter))) == expected


@pytest.mark.conformance
@pytest.mark.parametrize("kind", ["random", "tied", "masked"])
def test_each_draw_is_the_largest_of_the_noisy_logits(pickers, rng, kind):
    """Token by token as the formula says, so every invocation's noise is that of its own token."""
    picker, seed = pickers(1000), int(rng.integers(2**63))
    x = logits_of(kind, 1000, rng)
    picker.set(x)
    exact = 0
    for options in ((1.0, 0, 1.0), (3.0, 50, 1.0), (1.5, 0, 0.8)):
        for position, token in zip(range(7, 37), picker.tokens(30, options, seed), strict=True):
            wanted = scores(x, options, seed, position)
            assert wanted[token] >= wanted.max() - 1e-3, (options, position)
            exact += token == wanted.argmax()
    assert exact >= 85


def chi_square(tokens, ids, probabilities):
    """Over the candidates; those too rare to tell are put together."""
    expected, seen = len(tokens) * probabilities, np.bincount(tokens, minlength=max(ids) + 1)[ids]
    assert seen.sum() == len(tokens), "a token that is no candidate"
    rare = expected < 8
    if rare.any():
        expected, seen = (np.append(a[~rare], a[rare].sum()) for a in (expected, seen))
    return float(((seen - expected) ** 2 / np.maximum(expected, 1e-9)).sum()), max(len(expected) - 1, 1)


@pytest.mark.conformance(options=[(0.5, 20, 0.9)])
@pytest.mark.parametrize("options", [(1.0, 0, 1.0), (0.5, 20, 0.9), (2.0, 0, 1.0), (1.0, 7, 1.0), (1.3, 0, 0.8)])
def test_tokens_come_as_often_as_they_should(pickers, options):
    """Over positions, for seeds that are fixed; a quarter of the temperature is noticed."""
    picker = pickers(60)
    x = (1.2 * np.random.default_rng(5).standard_normal(60)).astype(np.float32)
    picker.set(x)
    ids, probabilities = reference.candidates(x, *options)
    for seed in (1, 2):
        tokens = picker.tokens(8192, options, seed)
        found, freedom = chi_square(tokens, ids, probabilities)
        bound = freedom + 5 * np.sqrt(2 * freedom) + 10
        assert found < bound, (seed, found, freedom)
        for other in (0.8, 1.25):
            wrong = reference.candidates(x[ids], options[0] * other)[1][np.argsort(np.argsort(-x[ids], kind="stable"))]
            assert chi_square(tokens, ids, wrong)[0] > bound, "the test cannot tell"
        again = tokens[:-1] * 60 + tokens[1:]  # neighbours have nothing to do with each other
        pairs = (ids[:, None] * 60 + ids).reshape(-1)
        found, freedom = chi_square(again, pairs, np.outer(probabilities, probabilities).reshape(-1))
        assert found < freedom + 5 * np.sqrt(2 * freedom) + 10, ("pairs", seed, found, freedom)


def test_tokens_come_as_often_as_they_should_over_seeds(pickers):
    """One position, seeds one after another."""
    picker = pickers(5)
    x = np.log(np.array([0.4, 0.3, 0.2, 0.08, 0.02], np.float32))
    picker.set(x)
    tokens = np.concatenate([picker.tokens(1, (1.0, 0, 1.0), seed) for seed in range(1000)])
    found, freedom = chi_square(tokens, *reference.candidates(x))
    assert found < freedom + 5 * np.sqrt(2 * freedom) + 10


def test_rare_tokens_are_not_lost(pickers):
    """Many share a probability of 1 / 21; each has a millionth."""
    vocab = 50000
    picker = pickers(vocab)
    x = np.full(vocab, -np.log(vocab) - np.log(20.0), np.float32)
    x[777] = 0.0
    picker.set(x)
    tokens = picker.tokens(1024, (1.0, 0, 1.0), seed=4)
    share = (tokens != 777).mean()
    assert 0.02 < share < 0.09, share
    assert len(set(tokens)) > 0.95 * (tokens != 777).sum()


@pytest.mark.conformance
def test_seeds(pickers):
    picker = pickers(1000)
    picker.set(np.zeros(1000, np.float32))
    runs = {seed: picker.tokens(40, (1.0, 0, 1.0), seed).tolist() for seed in (0, 1, 2**32, 2**64 + 1, 2**100)}
    assert len({tuple(run) for run in runs.values()}) == len(runs)
    assert all(len(set(run)) > 30 for run in runs.values())
    for seed, run in runs.items():
        assert picker.tokens(40, (1.0, 0, 1.0), seed).tolist() == run
    assert picker.tokens(20, (1.0, 0, 1.0), 0, position=27).tolist() == runs[0][20:], "the position decides"
    assert picker.tokens(40, (1.0, 0, 1.0), None).tolist() != picker.tokens(40, (1.0, 0, 1.0), None).tolist()


@pytest.mark.conformance
def test_argmax_takes_the_lowest_of_the_largest(pickers, rng):
    for vocab in (1, 2, 5, 1000):
        picker = pickers(vocab)
        for kind in KINDS:
            x = logits_of(kind, vocab, rng)
            picker.set(x)
            assert picker.tokens()[0] == x.argmax(), (kind, vocab)


@pytest.mark.conformance
@pytest.mark.parametrize("options", [None, (1.0, 0, 1.0), (0.7, 40, 0.9)], ids=str)
def test_one_nan_is_enough(pickers, rng, options):
    picker = pickers(1000)
    for at in (0, 3, 997, 999):
        for word in (0x7FC00000, 0xFFC00000, 0x7F800001):
            x = rng.standard_normal(1000).astype(np.float32)
            x.view(np.uint32)[at] = word
            picker.set(x)
            assert picker.tokens(1, options)[0] == loop._NONE
    picker.set(np.full(1000, -np.inf, np.float32))
    assert picker.tokens(1, options)[0] == loop._NONE
    picker.set(np.zeros(1000, np.float32))
    assert picker.tokens(1, options)[0] < 1000


def test_options_that_cannot_be():
    for bad in ((-1.0, 0, 1.0, 0), (1.0, -1, 1.0, 0), (1.0, 0, 0.0, 0), (np.nan, 0, 1.0, 0), (1.0, 0, 1.0, -1), (1.0, 0, 1.0, "x")):
        with pytest.raises(ArgumentError):
            pack_options(*bad)
    for temperature in (1e-300, 1e300):
        assert np.isfinite(pack_options(temperature, 0, 1.0, 0)[:3].view(np.float32)).all()


# ---- generation

SAMPLED = {"temperature": 4.0, "top_k": 100, "top_p": 0.95, "seed": 5}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("small") / "small.gguf"
    write_llama_gguf(path, layers=2, dim=64, heads=4, kv_heads=2, ffn=96, vocab=300, kinds="Q4_1", seed=3)
    return path


@pytest.fixture
def model(small):
    return Llama.from_gguf(small, kv_dtype="f32", capacity=120)


def generated(model, prompt, count, **options):
    model.reset()
    return list(model.generate(prompt, count, **{"stop_ids": (), **SAMPLED, **options}))


@pytest.mark.conformance
def test_generated_tokens_follow_from_the_logits_of_each_step(model):
    tokens = generated(model, [7, 8, 9], 40)
    assert model.length == 42
    model.reset()
    logits = model.prefill([7, 8, 9])
    for position, token in enumerate(tokens, 3):
        wanted = scores(logits, (4.0, 100, 0.95), 5, position)
        assert wanted[token] >= wanted.max() - 2e-3
        logits = model.decode(token)


@pytest.mark.conformance
def test_seeds_of_generation(model):
    hot = {"temperature": 100.0}  # any token, nearly: equal sequences are no chance
    tokens = generated(model, [1, 2], 30, **hot)
    assert generated(model, [1, 2], 30, **hot) == tokens
    assert generated(model, [1, 2], 30, **hot, seed=6) != tokens
    assert generated(model, [1, 2], 30, **hot, seed=None) != generated(model, [1, 2], 30, **hot, seed=None)
    assert generated(model, [1, 2], 30, top_k=1) == generated(model, [1, 2], 30, temperature=0.0)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}], ids=["sampled", "greedy"])
def test_blocks_of_any_size_give_the_same(model, monkeypatch, options):
    tokens = generated(model, [1, 2], 60, **options)
    monkeypatch.setattr(loop, "_BLOCK_SECONDS", 0.0)  # so that they do not grow
    for size in (1, 2, 7, 32):
        model._loop._block = size
        assert generated(model, [1, 2], 60, **options) == tokens
        assert model.length == 61


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}], ids=["sampled", "greedy"])
def test_nothing_is_made_or_written_for_a_token(model, monkeypatch, options):
    """Writes of a call: the prompt's step, and its options. No buffer, bind group or pipeline, and fewer submits than tokens."""
    generated(model, [1, 2], 60, **options)
    calls = Calls(model.device, monkeypatch)
    model._loop._block = 16
    monkeypatch.setattr(loop, "_BLOCK_SECONDS", 0.0)
    generated(model, [1, 2], 60, **options)
    assert calls["write_buffer"] == (1 if options else 2)
    assert calls["submit"] == 1 + 1 + 4  # the prompt, the first token, 59 more in blocks of 16
    assert set(calls) == {"write_buffer", "submit", "create_command_encoder"}


def test_sampling_stops_is_left_and_taken_up(model):
    tokens = generated(model, [1, 2, 3], 40)
    stop = tokens[25]
    at = tokens.index(stop)
    assert generated(model, [1, 2, 3], 40, stop_ids=[stop]) == tokens[:at]
    assert model.length == 3 + at
    model.reset()
    generator = model.generate([1, 2, 3], 40, stop_ids=(), **SAMPLED)
    some = [next(generator) for _ in range(12)]
    generator.close()
    assert (some, model.length) == (tokens[:12], 3 + 11)
    assert list(model.generate([some[-1]], 28, stop_ids=(), **SAMPLED)) == tokens[12:]
    assert len(generated(model, list(range(100)), 1000)) == 21  # the last token needs no room of its own
    assert model.length == 120
    assert generated(model, [4], 0) == []
    assert model.length == 1


def test_a_sequence_changed_in_between(model):
    model.reset()
    generator = model.generate([1, 2], 20, stop_ids=(), **SAMPLED)
    next(generator)
    model.decode(5)
    with pytest.raises(ArgumentError, match="changed"):
        next(generator)
    assert model.length == 3


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}], ids=["sampled", "greedy"])
def test_logits_that_are_not_numbers_leave_the_sequence(model, options):
    gamma = model.output_gamma.numpy()
    model.prefill([1, 2])
    model.output_gamma.write(np.full(gamma.shape, np.nan, np.float32))
    with pytest.raises(DeviceError, match="not numbers"):
        next(model.generate([3, 4], 9, stop_ids=(), **SAMPLED | options))
    assert model.length == 2
    model.output_gamma.write(gamma)
    assert next(model.generate([3, 4], 9, stop_ids=(), **SAMPLED | options)) < 300
    with pytest.raises(ArgumentError, match="seed"):
        next(model.generate([3, 4], 9, **SAMPLED | {"seed": -1}))
