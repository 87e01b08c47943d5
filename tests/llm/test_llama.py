"""The model: golden numbers of the demo model, agreement with the reference on random models, and what a step may and may not do."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.llm.make_gguf import write_llama_gguf
from tests.watch import Calls, Held
from wgattn import ArgumentError, CapacityError, Device, DeviceError, FormatError, ModelNotFound, Unsupported, reference
from wgattn.llm.gguf import ModelFile
from wgattn.llm.llama import Llama, LlamaConfig

GOLDEN = json.loads((Path(__file__).parent.parent / "data" / "smollm2.json").read_text())["cases"]
SMALL = {"layers": 2, "dim": 64, "heads": 4, "kv_heads": 2, "ffn": 96, "vocab": 300}
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    return Llama.from_gguf(smollm2_path, kv_dtype="f32", capacity=512)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("small") / "small.gguf"
    return path, write_llama_gguf(path, **SMALL, kinds="Q4_1", seed=3)


def compare(got, want, tolerance, **case):
    error = np.abs(got - want).max()
    assert error <= tolerance, f"error {error:.3g} > {tolerance:.3g} for {case}"


@pytest.mark.conformance(case=lambda case: case is GOLDEN[0])
@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: c["prompt"][:20])
def test_demo_model_gives_the_golden_logits_and_tokens(smollm2, case):
    assert smollm2.tokenizer.encode(case["prompt"]) == case["ids"]
    assert smollm2.tokenizer.decode(case["ids"]) == case["prompt"]
    smollm2.reset()
    logits = smollm2.prefill(case["ids"])
    compare(logits[::997], np.array(case["logits_every_997"]), 0.02, prompt=case["prompt"])
    assert np.argsort(-logits)[:5].tolist() == [i for i, _ in case["top5"]]
    for step, (token, gap) in enumerate(zip(case["greedy"], case["gap"], strict=True)):  # the golden tokens are fed, so a tie cannot derail the rest
        assert int(np.argmax(logits)) == token or gap <= 0.05, f"step {step}: {int(np.argmax(logits))} instead of {token}, gap {gap}"
        logits = smollm2.decode(token)


def test_generate_streams_the_golden_tokens(smollm2):
    case = GOLDEN[0]
    smollm2.reset()
    assert list(smollm2.generate(case["ids"], len(case["greedy"]), stop_ids=())) == case["greedy"]
    assert smollm2.tokenizer.decode(case["greedy"]) == case["greedy_text"]


def test_f16_cache_stays_close_to_f32(smollm2, smollm2_path):
    half = Llama.from_gguf(smollm2_path, kv_dtype="f16", capacity=64)
    smollm2.reset()
    ids = GOLDEN[2]["ids"]
    a, b = smollm2.prefill(ids), half.prefill(ids)
    assert ((a - b) ** 2).sum() / (a**2).sum() < 1e-5
    assert half.cache_bytes == 30 * 2 * 3 * 64 * 64 * 2


def test_weights_take_no_more_memory_than_the_file(smollm2, smollm2_path):
    in_file = sum(t.nbytes for t in ModelFile(smollm2_path).tensors.values())
    assert smollm2.weight_bytes <= 1.10 * in_file
    assert smollm2.weight_bytes >= 0.99 * in_file


def test_decode_takes_five_dispatches_a_layer(smollm2):
    smollm2.reset()
    assert smollm2.dispatches_per_token <= 5 * smollm2.config.layers + 2 or smollm2.device.profile.kind != "CPU"


@pytest.mark.conformance(shape=bool)
@pytest.mark.parametrize(
    ("kinds", "tied", "shape"),
    [
        *((kind, True, {}) for kind in KINDS),
        ({"default": "Q4_0", "attn_v": "Q8_0", "ffn_down": "Q5_0", "token_embd": "F16"}, True, {}),
        ({"default": "Q4_1", "ffn_gate": "Q8_0", "attn_k": "F32", "output": "Q5_0"}, False, {}),
        ("F16", False, {"heads": 7, "kv_heads": 1, "head_dim": 16, "dim": 80}),
        ("Q8_0", False, {"heads": 6, "kv_heads": 6, "head_dim": 48, "dim": 96, "ffn": 160}),
    ],
    ids=str,
)
def test_logits_equal_the_reference(tmp_path, kinds, tied, shape):
    path = tmp_path / "model.gguf"
    weights = write_llama_gguf(path, **{**SMALL, **shape}, kinds=kinds, tied=tied, seed=5)
    model = Llama.from_gguf(path, kv_dtype="f32", capacity=100)
    ids = np.random.default_rng(7).integers(0, 300, 70).tolist()
    want = reference.llama(weights, ids, model.config)
    tolerance = 2e-4 * np.abs(want).max()
    compare(model.prefill(ids[:67]), want[66], tolerance, kinds=kinds, tied=tied, shape=shape, step="prefill")
    for i in range(67, 70):
        compare(model.decode(ids[i]), want[i], tolerance, kinds=kinds, tied=tied, shape=shape, step=i)


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.5}


@pytest.mark.conformance(shape=lambda shape: shape.get("bias") or shape.get("qk_norm"))
@pytest.mark.parametrize(
    "shape",
    [
        {"arch": "qwen2", "bias": True, "heads": 14, "kv_heads": 2, "dim": 112, "head_dim": 8},
        {"arch": "qwen3", "qk_norm": True, "heads": 8, "kv_heads": 4, "dim": 64, "head_dim": 32},
        {"arch": "llama", "rope_factors": True},
        {"arch": "llama", "metadata": LINEAR},
        {"arch": "qwen2", "metadata": YARN},
        {"arch": "qwen2", "metadata": {"rope.dimension_count": 8}},
    ],
    ids=lambda s: "-".join(map(str, s)) + s["arch"],
)
def test_each_family_equals_the_reference(tmp_path, shape):
    path = tmp_path / "model.gguf"
    weights = write_llama_gguf(path, **{**SMALL, **shape}, kinds="F32", seed=9)
    model = Llama.from_gguf(path, kv_dtype="f32", capacity=100)
    ids = np.random.default_rng(3).integers(0, 300, 90).tolist()
    c, rope = model.config, {"base": model.config.rope_base, "dim": model.config.rope_dim, "interleaved": shape["arch"] == "llama"}
    plain = c.rope_base ** (-np.arange(0, c.rope_dim, 2) / c.rope_dim)
    if shape.get("metadata") is LINEAR:
        rope["frequencies"] = plain / 2.5
    if shape.get("metadata") is YARN:  # from the paper: wavelengths of more than 64 positions are stretched, of less than 2 kept
        pair = [c.rope_dim * np.log(64 / (turns * 2 * np.pi)) / (2 * np.log(c.rope_base)) for turns in (32, 1)]
        low, high = max(np.floor(pair[0]), 0), min(np.ceil(pair[1]), c.rope_dim - 1)
        ramp = np.clip((np.arange(c.rope_dim // 2) - low) / max(high - low, 0.001), 0, 1)
        rope |= {"frequencies": plain / 4 * ramp + plain * (1 - ramp), "magnitude": 0.1 * np.log(4) + 1}
    if shape.get("rope_factors"):
        rope["factors"] = weights["rope_freqs.weight"]
    want = reference.llama(weights, ids, c, rope)
    tolerance = 3e-4 * np.abs(want).max()
    compare(model.prefill(ids[:88]), want[87], tolerance, shape=shape, step="prefill")
    for i in (88, 89):
        compare(model.decode(ids[i]), want[i], tolerance, shape=shape, step=i)


@pytest.mark.parametrize("first", [1, 2, 3, 63, 64, 65, 100, 128])
def test_prefill_in_pieces_equals_prefill_in_one(small, first):
    model = Llama.from_gguf(small[0], kv_dtype="f32", capacity=140)
    ids = np.random.default_rng(first).integers(0, 300, 133).tolist()
    whole = model.prefill(ids)
    model.reset()
    model.prefill(ids[:first])
    compare(model.prefill(ids[first:]), whole, 1e-3, first=first)


def test_prefill_equals_single_decodes(small):
    model = Llama.from_gguf(small[0], kv_dtype="f32", capacity=80)
    ids = np.random.default_rng(1).integers(0, 300, 75).tolist()
    whole = model.prefill(ids)
    model.reset()
    for token in ids:
        last = model.decode(token)
    compare(last, whole, 1e-3)


def test_second_prompt_after_reset_equals_a_fresh_model(small):
    ids = np.random.default_rng(2).integers(0, 300, 50).tolist()
    used = Llama.from_gguf(small[0], capacity=80)
    used.prefill(list(range(75)))
    used.reset()
    fresh = Llama.from_gguf(small[0], capacity=80)
    np.testing.assert_array_equal(used.prefill(ids), fresh.prefill(ids))
    np.testing.assert_array_equal(used.decode(3), fresh.decode(3))


def test_cache_beyond_the_length_is_never_read(small):
    model = Llama.from_gguf(small[0], kv_dtype="f32", capacity=64)
    ids = list(range(20))
    want = [model.prefill(ids), model.decode(9)]
    model.reset()
    for cache in model.caches:
        cache.keys.write(np.full(cache.keys.shape, np.nan))
        cache.values.write(np.full(cache.values.shape, np.nan))
    np.testing.assert_array_equal(model.prefill(ids), want[0])
    np.testing.assert_array_equal(model.decode(9), want[1])


def test_matrices_split_over_bindings_give_the_same_numbers(tmp_path):
    path = tmp_path / "model.gguf"
    weights = write_llama_gguf(path, **{**SMALL, "ffn": 192}, kinds="Q4_1", seed=4)
    tiny_bindings = Device(limits={"max-storage-buffer-binding-size": 9000})
    model = Llama.from_gguf(path, kv_dtype="f32", capacity=16, device=tiny_bindings)
    assert len(model.output.pieces) > 1
    assert len(model.mlp_blocks[0].gate_up[0][0].pieces) > 1
    ids = [5, 299, 0, 150, 7]
    want = reference.llama(weights, ids, model.config)
    compare(model.prefill(ids[:-1]), want[-2], 1e-3 * np.abs(want).max())
    compare(model.decode(ids[-1]), want[-1], 1e-3 * np.abs(want).max())


def test_checked_shaders_give_the_same_numbers(small):
    path, weights = small
    model = Llama.from_gguf(path, kv_dtype="f32", capacity=16, device=Device(checked=True))
    want = reference.llama(weights, [5, 6, 7], model.config)
    compare(model.prefill([5, 6, 7]), want[-1], 1e-3 * np.abs(want).max())


def test_a_decode_step_makes_nothing_and_submits_once(small, monkeypatch):
    model = Llama.from_gguf(small[0], capacity=300)
    model.prefill([1, 2, 3])
    model.decode(4)
    calls = Calls(model.device, monkeypatch)
    for token in range(5, 8):
        calls.check_step(model.decode, token)


def test_two_thousand_steps_leave_objects_and_memory_where_they_were(small):
    model = Llama.from_gguf(small[0], capacity=2200)

    counts = model.device.api.diagnostics.object_counts  # with the bytes of buffers
    model.prefill([1])
    for token in range(150):
        model.decode(token)
    held, before = Held(model.device), counts.get_dict()
    for step in range(2000):
        model.decode(step % 300)
    assert model.length == 2151
    held.check()
    assert counts.get_dict() == before


def test_generate_stops_where_it_should(small):
    model = Llama.from_gguf(small[0], capacity=20)
    tokens = list(model.generate([1, 2, 3], 10, stop_ids=()))
    assert len(tokens) == 10
    model.reset()
    stop = next(t for t in tokens if tokens.index(t) > 0) if len(set(tokens)) > 1 else tokens[0]
    assert list(model.generate([1, 2, 3], 10, stop_ids=[stop])) == tokens[: tokens.index(stop)]
    model.reset()
    assert len(list(model.generate([1, 2, 3], 100, stop_ids=()))) == 18  # the last token needs no room of its own
    model.reset()
    a = list(model.generate([1, 2, 3], 10, temperature=1.5, seed=1, stop_ids=()))
    model.reset()
    assert list(model.generate([1, 2, 3], 10, temperature=1.5, seed=1, stop_ids=())) == a


def test_greedy_blocks_equal_single_steps(small):
    """Tokens that the device feeds to itself are those that the host would choose, and what follows a stop is not there."""
    model = Llama.from_gguf(small[0], kv_dtype="f32", capacity=200)
    logits, singly = model.prefill([7, 8, 9]), []
    for _ in range(120):
        singly.append(int(np.argmax(logits)))
        logits = model.decode(singly[-1])
    model.reset()
    assert list(model.generate([7, 8, 9], 121, stop_ids=()))[:120] == singly
    assert model.length == 123
    np.testing.assert_array_equal(model.decode(5), _after(model, [7, 8, 9, *singly], 5))
    stop = next(t for t in singly[40:] if t not in singly[:40]) if set(singly[40:]) - set(singly[:40]) else None
    if stop is not None:
        model.reset()
        assert list(model.generate([7, 8, 9], 121, stop_ids=[stop])) == singly[: singly.index(stop)]
        assert model.length == 3 + singly.index(stop)
        np.testing.assert_array_equal(model.decode(5), _after(model, [7, 8, 9, *singly[: singly.index(stop)]], 5))


def _after(model, ids, token):
    model.reset()
    model.prefill(ids[:3])
    for t in ids[3:]:
        model.decode(t)
    return model.decode(token)


def test_generate_can_be_left_and_taken_up(small):
    model = Llama.from_gguf(small[0], kv_dtype="f32", capacity=100)
    whole = list(model.generate([1, 2], 30, stop_ids=()))
    model.reset()
    generator = model.generate([1, 2], 30, stop_ids=())
    some = [next(generator) for _ in range(12)]
    generator.close()
    assert some == whole[:12]
    assert model.length == 2 + 11
    assert list(model.generate([some[-1]], 18, stop_ids=())) == whole[12:]
    with pytest.raises(ArgumentError):
        next(model.generate([1], 3, temperature=-1.0, stop_ids=()))


def test_logits_that_are_not_numbers_raise(small):
    model = Llama.from_gguf(small[0], capacity=30)
    generator = model.generate([1, 2], 9, stop_ids=())
    next(generator)
    model.output_gamma.write(np.full(model.output_gamma.shape, np.nan))
    with pytest.raises(DeviceError):
        list(generator)


def test_bad_calls_raise_and_change_nothing(small):
    model = Llama.from_gguf(small[0], capacity=8)
    model.prefill([1, 2, 3])
    for bad, error in (([], ArgumentError), ([300], ArgumentError), ([-1], ArgumentError), ([1] * 6, CapacityError)):
        with pytest.raises(error):
            model.prefill(bad)
        assert model.length == 3
    with pytest.raises(ArgumentError):
        model.decode(300)
    got = model.decode(4)
    model.reset()
    fresh = Llama.from_gguf(small[0], capacity=8)
    fresh.prefill([1, 2, 3])
    np.testing.assert_array_equal(got, fresh.decode(4))
    model.prefill([1] * 8)
    with pytest.raises(CapacityError, match="8 of 8"):
        model.decode(1)


def test_bad_files_and_options_raise(tmp_path, small):
    with pytest.raises(ModelNotFound):
        Llama.from_gguf(tmp_path / "none.gguf")
    with pytest.raises(ArgumentError):
        Llama.from_gguf(small[0], capacity=0)
    with pytest.raises(ArgumentError):
        Llama.from_gguf(small[0], kv_dtype="f8")
    data = small[0].read_bytes()
    for cut in (3, 20, 500, len(data) // 2, len(data) - 1):
        (tmp_path / "cut.gguf").write_bytes(data[:cut])
        with pytest.raises(FormatError):
            Llama.from_gguf(tmp_path / "cut.gguf")
    (tmp_path / "other.gguf").write_bytes(data.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0lxama", 1))
    with pytest.raises(Unsupported, match="lxama"):
        Llama.from_gguf(tmp_path / "other.gguf")
    write_llama_gguf(tmp_path / "kind.gguf", **{**SMALL, "dim": 256}, kinds={"default": "F32", "ffn_up": "TQ2_0"})
    with pytest.raises(Unsupported, match="TQ2_0"):
        Llama.from_gguf(tmp_path / "kind.gguf")
    renamed = data.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight")
    (tmp_path / "renamed.gguf").write_bytes(renamed)
    with pytest.raises(FormatError, match="ffn_up"):
        Llama.from_gguf(tmp_path / "renamed.gguf")


def test_config_refuses_numbers_that_cannot_be(small):
    file = ModelFile(small[0])
    for key, value, error in (
        ("llama.attention.head_count_kv", 3, FormatError),
        ("llama.block_count", 0, FormatError),
        ("llama.attention.head_count_kv", [2, 2], Unsupported),
        ("llama.expert_count", 8, Unsupported),
        ("llama.attention.value_length", 99, Unsupported),
    ):
        before = file.metadata.get(key)
        file.metadata[key] = value
        with pytest.raises(error):
            LlamaConfig.from_file(file)
        file.metadata.pop(key) if before is None else file.metadata.update({key: before})
    assert LlamaConfig.from_file(file).head_dim == 16
