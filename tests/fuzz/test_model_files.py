"""GGUF files of strangers: no bytes crash, hang, take memory by a number in the file, or are read as anything but what they say."""

import dataclasses
import errno
import itertools
import math
import re
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import strategies as st

from tests import child
from tests.fuzz.depth import both_depths, explore, refusal
from tests.llm.make_gguf import add_tokenizer, byte_tokens, finish, vocabulary, write_llama_gguf
from wgattn import CapacityError, FormatError, Llama, ModelNotFound, Unsupported, WgattnError, reference
from wgattn.llm import gguf as reading
from wgattn.llm.config import LlamaConfig
from wgattn.llm.gguf import ModelFile
from wgattn.llm.tokenizer import Tokenizer

TINY = {"layers": 1, "dim": 32, "heads": 2, "kv_heads": 1, "ffn": 64, "vocab": 262}
NAME = "stranger.gguf"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("files") / "tiny.gguf"
    write_llama_gguf(path, **TINY, kinds={"default": "F32", "attn_q": "Q8_0", "ffn_down": "Q4_1", "token_embd": "F16"})
    return path


@pytest.fixture(scope="module")
def short(tmp_path_factory) -> bytes:
    """A file of every type of value, with a header that is short enough to try every byte of it."""
    path = tmp_path_factory.mktemp("short") / "short.gguf"
    writer, kind = gguf.GGUFWriter(path, "llama"), gguf.GGUFValueType
    for name, value in (("UINT8", 1), ("INT8", -1), ("UINT16", 2), ("INT16", -2), ("UINT32", 3), ("INT32", -3), ("UINT64", 4), ("INT64", -4)):
        writer.add_key_value(name, value, kind[name])
    writer.add_key_value("FLOAT32", 0.5, kind.FLOAT32)
    writer.add_key_value("FLOAT64", 0.25, kind.FLOAT64)
    writer.add_key_value("BOOL", True, kind.BOOL)
    for key, array in (("texts", ["a", "", "bc"]), ("ints", [1, 2]), ("floats", [0.5]), ("flags", [True, False])):
        writer.add_array(key, array)
    writer.add_tensor("one", np.arange(4, dtype=np.float32).reshape(2, 2))
    writer.add_tensor("two", gguf.quants.quantize(np.ones((2, 32), np.float32), gguf.GGMLQuantizationType.Q8_0), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    finish(writer)
    return path.read_bytes()


def opened(path: Path, raw: bytes) -> ModelFile | None:
    """The file of these bytes; None where it is refused, which must be by one of our errors that names the file."""
    path.write_bytes(raw)
    found: list[ModelFile] = []
    message = refusal(lambda: found.append(ModelFile(path)))
    assert message is None or path.name in message
    return found[0] if found else None


def agrees_with_the_library(file: ModelFile) -> None:
    """What we accept the gguf package reads as well, and alike."""
    theirs = gguf.GGUFReader(file.path)
    fields = {key: field for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert list(file.metadata) == list(fields)
    for key, field in fields.items():
        np.testing.assert_equal(file.metadata[key], field.contents(), err_msg=key)  # equal NaN, too
    assert [(t.name, t.shape, t.kind, t.data.tobytes()) for t in file.tensors.values()] == [
        (t.name, tuple(t.shape.tolist()[::-1]), t.tensor_type.name, t.data.tobytes()) for t in theirs.tensors
    ]


# ---- bytes


def test_cut_anywhere(short, tmp_path):
    """At every byte, of the header and of the data: only the whole file is one."""
    path = tmp_path / NAME
    path.write_bytes(short)
    whole = ModelFile(path)
    end = len(short) - 32 + whole.tensors["two"].nbytes % 32 if whole.tensors["two"].nbytes % 32 else len(short)  # less the padding behind the last tensor

    def read(length: int) -> None:
        reading._check_header(path, short[: min(length, reading._HEADER.size)])
        reading._Reader(path, np.frombuffer(short[:length], np.uint8))

    for length in range(end):
        with pytest.raises(FormatError, match=NAME) as caught:
            read(length)
        assert length < reading._HEADER.size or "cut short" in str(caught.value), length
    read(end)


def test_every_byte_of_a_header_changed(short, tmp_path, rng):
    """To 0, 0xFF, and by one bit: refused, or read as the gguf package reads it."""
    path = tmp_path / NAME
    header = short.index(np.arange(4, dtype=np.float32).tobytes()) - 32
    outcomes = {"refused": 0, "read": 0}
    for offset in range(reading._HEADER.size, header):
        for value in {0x00, 0xFF, short[offset] ^ 1, short[offset] ^ 0x80} - {short[offset]}:
            raw = short[:offset] + bytes([value]) + short[offset + 1 :]
            message = refusal(lambda raw=raw: reading._Reader(path, np.frombuffer(raw, np.uint8)))
            outcomes["read" if message is None else "refused"] += 1
            assert message is None or NAME in message
            if message is None and rng.random() < 0.1:
                path.write_bytes(raw)
                assert refusal(lambda: agrees_with_the_library(ModelFile(path))) in (None, missing_architecture(path))
    assert min(outcomes.values()) > 200, outcomes


def missing_architecture(path: Path) -> str:
    return f"{path} lacks the metadata key general.architecture: get a file made by a current GGUF converter"


SIZES = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 1, 2, 31, 33, 255, 2**16, 2**21, 2**22, 2**31, 2**32, 2**60, 2**63, 2**64 - 1]))
EDIT = st.one_of(
    st.binary(min_size=1, max_size=8),
    SIZES.map(lambda value: struct.pack("<Q", value)),
    st.integers(0, 40).map(lambda value: struct.pack("<I", value)),
    st.floats(width=32).map(lambda value: struct.pack("<f", value)),
)


@both_depths
def test_edited_bytes(depth, tiny, tmp_path, device):
    """Refused with the file's name in the message, or right: as the gguf package reads it, and logits as the reference computes them."""
    raw, path = tiny.read_bytes(), tmp_path / NAME
    file = ModelFile(tiny)
    front = len(raw) - sum(tensor.nbytes for tensor in file.tensors.values())
    names = [raw.index(struct.pack("<Q", len(name)) + name.encode()) for name in (*file.tensors, *file.metadata)]
    near = st.tuples(st.sampled_from(names), st.integers(0, 70)).map(sum)  # nearly every byte there steers the reader
    edits = st.lists(st.tuples(st.one_of(near, st.integers(0, front), st.integers(0, len(raw))), EDIT), min_size=1, max_size=4)
    loads = itertools.count()

    def check(edits: list[tuple[int, bytes]], length: int | None) -> None:
        mutated = bytearray(raw)
        for offset, new in edits:
            mutated[offset : offset + len(new)] = new
        tracemalloc.start()
        begin = time.process_time()
        try:
            found = opened(path, bytes(mutated[:length]))
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert time.process_time() - begin < 3
        assert peak < 16 << 20
        if found is not None:
            agrees_with_the_library(found)
            usable(found)
            if depth == "thorough" or next(loads) < 4:
                computes(found, device)

    explore(check, edits, st.one_of(st.none(), st.none(), st.integers(0, len(raw))), depth=depth, quick=150, thorough=6000)


def usable(file: ModelFile) -> None:
    """Its tokenizer and its shape can be made, or the refusal names the file."""
    for make in (lambda: LlamaConfig.from_file(file), lambda: spelled(Tokenizer.from_gguf(file))):
        message = refusal(make)
        assert message is None or file.path.name in message


def spelled(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the <s>thing</s> 12\n")
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    tokenizer.decode(ids)


def computes(file: ModelFile, device: Any) -> None:
    """The model's logits are those of the reference, where the file makes a model."""
    models: list[Llama] = []
    message = refusal(lambda: models.append(Llama(file, kv_dtype="f32", capacity=8, device=device)))
    if message is not None:
        assert file.path.name in message or "can bind" in message, message
        return
    (model,) = models
    kinds = gguf.GGMLQuantizationType
    weights = {t.name: gguf.quants.dequantize(_raw(t), kinds[t.kind]).astype(np.float32).reshape(t.shape) for t in file.tensors.values()}
    with np.errstate(all="ignore"):
        wanted = reference.llama(weights, [1, 5, 261], model.config, model.rope.reference)[-1]
    got = model.prefill([1, 5, 261])
    if np.isfinite(wanted).all() and np.abs(wanted).max() < 1e30 and max(np.abs(w).max() for w in weights.values()) < 1e3:
        assert np.abs(got - wanted).max() <= 2e-3 * max(np.abs(wanted).max(), 1e-3)


def _raw(tensor: Any) -> np.ndarray:
    return tensor.data.view({"F32": np.float32, "F16": np.float16}.get(tensor.kind, np.uint8))


def test_memory_is_not_taken_by_numbers_of_a_file(tmp_path):
    """In a process that may take 100 MiB more: files of a few bytes that claim to be large, and one that is long but says little."""
    printed = child.check(
        """
import resource, struct, sys
from pathlib import Path
import wgattn
from wgattn.llm.gguf import ModelFile
from wgattn import FormatError
import gguf, tokenizers

path = Path(sys.argv[1])
text = lambda s: struct.pack("<Q", len(s)) + s
head = lambda tensors, keys: struct.pack("<4sIQQ", b"GGUF", 3, tensors, keys)
HUGE = [2**16 - 1, 2**22, 2**31, 2**40, 2**63, 2**64 - 1]
files = [head(n, 0) for n in HUGE] + [head(0, n) for n in HUGE] + [head(1, 1) + struct.pack("<Q", n) for n in HUGE]
files += [head(0, 1) + text(b"k") + struct.pack("<IQ", 8, n) for n in HUGE]
files += [head(0, 1) + text(b"k") + struct.pack("<IIQ", 9, kind, n) for n in HUGE for kind in (0, 5, 7, 8, 9, 12)]
files += [head(0, 1) + text(b"k") + struct.pack("<IIQ", 9, 9, n) + struct.pack("<IQ", 9, 1) * 5000 for n in HUGE]
shape = lambda dims, n: struct.pack("<I", dims) + struct.pack("<Q", n) * min(dims, 9)
files += [head(1, 0) + text(b"t") + shape(dims, n) + struct.pack("<IQ", 0, 0) for n in HUGE for dims in (1, 4, 2**31)]
files += [head(1, 1) + text(b"general.alignment") + struct.pack("<II", 4, 2**31) + text(b"t") + struct.pack("<IQIQ", 1, 4, 0, 0) + bytes(64)]
files += [head(2**16, 2**16) + bytes(8 << 20), head(0, 2**16) + bytes(8 << 20)]
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20), used + (100 << 20)))
for number, raw in enumerate(files):
    path.write_bytes(raw)
    try:
        ModelFile(path)
        sys.exit(f"file {number} was opened: {raw[:80]}")
    except (FormatError, wgattn.Unsupported) as error:
        assert path.name in str(error)
print(len(files), "files")
path.write_bytes(head(0, 0) + bytes(1 << 20))
with path.open("r+b") as file:
    file.truncate(1 << 40)
try:
    ModelFile(path)
except wgattn.CapacityError as error:
    print(error)
""",
        str(tmp_path / NAME),
        timeout=60,
    )
    assert "files" in printed
    assert "cannot be mapped" in printed


# ---- numbers


VALUES: list[Any] = [0, 1, -1, 2, 3, 7, 31, 33, 48, 2**24, 2**31, 2**63, True, False, "", "abc", "none", [], [2], [1, 2], 0.0, -0.5, 0.3, 1e-30, 1e30]
VALUES += [math.nan, math.inf, -math.inf, 2.0]


@both_depths
def test_hyperparameters_that_lie(depth, tiny, device, rng):
    """Every number of the model replaced by what it cannot be, or by what it can: a refusal names file and key, all else is computed right."""
    file = ModelFile(tiny)
    keys = [key for key in file.metadata if key.startswith("llama.")]
    more = ["attention.key_length", "attention.value_length", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"]
    more += ["rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast", "expert_count"]
    keys += [f"llama.{key}" for key in more]
    accepted = []
    for key, value in itertools.product(keys, VALUES):
        for scaling in (None, "linear", "yarn") if "scaling" in key else (None,):
            changes = {"llama.rope.scaling.type": scaling, "llama.rope.scaling.factor": 2.0, "llama.rope.scaling.original_context_length": 64}
            file.metadata = ModelFile(tiny).metadata | (changes if scaling else {}) | {key: value}
            message = refusal(lambda: LlamaConfig.from_file(file))
            if message is None:
                accepted.append(file.metadata)
            else:
                assert "tiny.gguf" in message
                assert re.search(r"llama\.[a-z]|KV heads|mixture", message), f"{key} = {value!r}: {message}"
    assert len(accepted) > 40
    for number in rng.permutation(len(accepted))[: 12 if depth == "quick" else None]:
        file.metadata = accepted[number]
        computes(file, device)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["blk.0.attn_norm.weight", "output_norm.weight", "blk.0.ffn_norm.weight"])
def test_vectors_that_are_no_numbers(tiny, tmp_path, device, name, value):
    raw, tensor = tiny.read_bytes(), ModelFile(tiny).tensors[name]
    at = raw.index(tensor.data.tobytes())
    path = tmp_path / NAME
    path.write_bytes(raw[: at + 8] + struct.pack("<f", value) + raw[at + 12 :])
    with pytest.raises(FormatError, match=rf"{NAME}, tensor {name}: 1 numbers are not finite"):
        Llama.from_gguf(path, device=device)


def test_frequencies_that_cannot_be(tmp_path, device):
    path = tmp_path / NAME
    for wrong in (0.0, -1.0, math.nan):
        write_llama_gguf(path, **TINY, rope_factors=True)
        raw, tensor = path.read_bytes(), ModelFile(path).tensors["rope_freqs.weight"]
        at = raw.index(tensor.data.tobytes())
        path.write_bytes(raw[:at] + struct.pack("<f", wrong) + raw[at + 4 :])
        with pytest.raises(FormatError, match=rf"{NAME}, tensor rope_freqs\.weight: "):
            Llama.from_gguf(path, device=device)


def test_weights_that_are_no_numbers_are_noticed_when_they_count(tiny, tmp_path, device):
    raw, tensor = tiny.read_bytes(), ModelFile(tiny).tensors["blk.0.ffn_up.weight"]
    at = raw.index(tensor.data.tobytes())
    path = tmp_path / NAME
    path.write_bytes(raw[:at] + struct.pack("<f", math.nan) + raw[at + 4 :])
    for options in ({}, {"temperature": 1.0, "seed": 1}):
        model = Llama.from_gguf(path, capacity=16, device=device)
        with pytest.raises(WgattnError, match=r"not numbers|NaN"):
            list(model.generate([1, 2], 4, stop_ids=(), **options))


# ---- vocabularies

TOKENS = st.text(alphabet=st.sampled_from([*byte_tokens()[60:100], "Ġ", "é", "<", ">", "s", "\0", "🦊", "\ud7ff"]), max_size=6)


@both_depths
def test_vocabularies_of_strangers(depth, tmp_path):
    """Tokens, types and merges at random: encoding gives tokens of the vocabulary or our error, never a panic."""
    path = tmp_path / NAME

    def check(tokens: list[str], types: list[int], pairs: list[tuple[int, int, str]], pre: str, text: str, special: tuple) -> None:
        joined = [tokens[a % len(tokens)] + sep + tokens[b % len(tokens)] for a, b, sep in pairs]
        base = [*vocabulary(259)[0][: 259 - len(tokens) % 3], *tokens]
        base += [j.replace(" ", "") for j in joined[::2]]
        kinds = (types * len(base))[: len(base)]
        writer = gguf.GGUFWriter(path, "llama")
        bos, eos, add_bos = special
        add_tokenizer(writer, base, kinds, joined, pre=pre, bos=bos, eos=eos, add_bos=add_bos)
        finish(writer)

        def use() -> None:
            tokenizer = Tokenizer.from_gguf(ModelFile(path))
            ids = tokenizer.encode(text)
            assert all(0 <= i < tokenizer.vocab_size for i in ids)
            assert isinstance(tokenizer.decode(ids), str)

        message = refusal(use)
        assert message is None or NAME in message

    explore(
        check,
        st.lists(TOKENS, min_size=1, max_size=8),
        st.lists(st.integers(-1, 9), min_size=1, max_size=5),
        st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.sampled_from([" ", "  ", ""])), min_size=1, max_size=8),
        st.sampled_from(["smollm", "gpt-2", "llama-bpe", "qwen2"]),
        st.text(max_size=40),
        st.tuples(st.one_of(st.none(), st.integers(0, 270)), st.one_of(st.none(), st.integers(0, 270)), st.booleans()),
        depth=depth,
        quick=120,
        thorough=6000,
    )


def test_a_panic_of_the_library_is_our_error(tmp_path, monkeypatch):
    """It is no Exception, so that `except Exception` would let it through."""
    writer = gguf.GGUFWriter(tmp_path / NAME, "llama")
    add_tokenizer(writer, *vocabulary(262))
    finish(writer)
    file = ModelFile(tmp_path / NAME)
    monkeypatch.setattr(Tokenizer, "_merges", lambda self, vocab: [("t", "xyz")])  # a merge of something that is no token
    with pytest.raises(FormatError, match=rf"{NAME} has a vocabulary"):
        Tokenizer.from_gguf(file)

    class PanicException(BaseException):
        pass

    monkeypatch.undo()
    tokenizer = Tokenizer.from_gguf(file)
    for error, wanted in ((PanicException("boom"), FormatError), (KeyboardInterrupt(), KeyboardInterrupt), (ValueError("boom"), FormatError)):
        with pytest.raises(wanted), tokenizer._library("do this"):
            raise error


# ---- tensors that are there, are not, or are others


def test_every_tensor_counts(tiny, device):
    """Each one missing, of another shape, or of a type that cannot serve: told by its name, before anything goes to the device."""
    whole = ModelFile(tiny).tensors
    for name, tensor in whole.items():
        matrix = len(tensor.shape) == 2
        other = dataclasses.replace(tensor, shape=(*tensor.shape[:-1], tensor.shape[-1] + 1))
        flat = dataclasses.replace(tensor, shape=(1, *tensor.shape))
        unknown = dataclasses.replace(tensor, kind="IQ2_XXS" if matrix else "BF16")
        for changes in ({name: None}, {name: other}, {name: flat}, {name: unknown}):
            file = ModelFile(tiny)
            file.tensors = {key: changes.get(key, t) for key, t in whole.items() if changes.get(key, t) is not None}
            with pytest.raises((FormatError, Unsupported)) as caught:
                Llama(file, capacity=4, device=device)
            assert "tiny.gguf" in str(caught.value), changes
            assert name in str(caught.value) or name == "token_embd.weight", f"{changes}: {caught.value}"
    file = ModelFile(tiny)
    file.tensors = whole | {"blk.0.attn_sinks.weight": whole["output_norm.weight"]}
    with pytest.raises(Unsupported, match=r"tiny\.gguf has tensors .* blk\.0\.attn_sinks\.weight"):
        Llama(file, capacity=4, device=device)


@pytest.mark.parametrize(
    ("changes", "error", "what"),
    [
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, Unsupported, "longrope"),
        ({"llama.rope.scaling.type": "linear"}, FormatError, "positive factor"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0}, FormatError, "original_max_position_embeddings"),
        ({"llama.rope.dimension_count": 6}, Unsupported, "rotary dim 6"),
        ({"llama.rope.freq_base": 1e-300, "llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 1e-300}, FormatError, "not finite"),
        ({"tokenizer.ggml.tokens": ["a"] * 261}, FormatError, "261 tokens .* 262 rows"),
        ({"llama.attention.head_count": 4, "llama.attention.head_count_kv": 2}, FormatError, "rope.dimension_count is 16"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow")
def test_what_the_model_asks_for_and_cannot_have(tiny, device, changes, error, what):
    file = ModelFile(tiny)
    file.metadata = file.metadata | changes
    with pytest.raises(error, match=what) as caught:
        Llama(file, capacity=4, device=device)
    assert "tiny.gguf" in str(caught.value)


def test_a_file_that_cannot_be_read(tiny, monkeypatch):
    for number, wanted in ((errno.ENOMEM, CapacityError), (errno.EIO, ModelNotFound)):

        def fail(*args: Any, number: int = number, **kwargs: Any) -> None:
            raise OSError(number, "injected")

        monkeypatch.setattr(np, "memmap", fail)
        with pytest.raises(wanted, match=r"tiny\.gguf cannot be (mapped|read)|model file .*tiny\.gguf cannot be read"):
            ModelFile(tiny)


def test_an_empty_vocabulary(tiny):
    file = ModelFile(tiny)
    file.metadata = file.metadata | {"tokenizer.ggml.tokens": []}
    with pytest.raises(FormatError, match=r"tiny\.gguf has an empty vocabulary"):
        Tokenizer.from_gguf(file)
