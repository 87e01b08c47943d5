import json
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.llm.make_gguf import add_tokenizer, byte_tokens, finish, vocabulary, write_llama_gguf
from wgattn.errors import ArgumentError, FormatError, Unsupported
from wgattn.llm.gguf import ModelFile
from wgattn.llm.tokenizer import Tokenizer

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "smollm2.json").read_text(encoding="utf-8"))["cases"]
KIND = gguf.TokenType
BYTE = 3  # the id of byte 0 in make_gguf's vocabulary
KINDS = ("smollm", "gpt-2", "llama-bpe", "qwen2")


@pytest.fixture(scope="module")
def smollm2(smollm2_path) -> Tokenizer:
    return Tokenizer.from_gguf(ModelFile(smollm2_path))


@pytest.fixture
def make(tmp_path):
    """A function that writes a tokenizer into a file and opens it."""

    def build(vocab=None, *, extra=None, **options) -> Tokenizer:
        writer = gguf.GGUFWriter(tmp_path / "tokenizer.gguf", "llama")
        add_tokenizer(writer, *(vocab or vocabulary(262)), **options)
        for key, value in (extra or {}).items():
            writer.add_uint32(key, value)
        finish(writer)
        return Tokenizer.from_gguf(ModelFile(tmp_path / "tokenizer.gguf"))

    return build


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Tokenizer:
    path = tmp_path_factory.mktemp("plain") / "tokenizer.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    add_tokenizer(writer, *vocabulary(262))
    finish(writer)
    return Tokenizer.from_gguf(ModelFile(path))


def alphabet(text: str) -> str:
    """`text` as a byte-level vocabulary spells it."""
    return "".join(byte_tokens()[byte] for byte in text.encode())


def all_merging(text: str) -> tuple[list[str], list[int], list[str]]:
    """A vocabulary in which any two neighbouring pieces of `text` merge, so that each word between splits ends as one token."""
    spelled = alphabet(text)
    pieces = sorted({spelled[i:j] for i in range(len(spelled)) for j in range(i + 2, len(spelled) + 1)}, key=lambda piece: (len(piece), piece))
    tokens, types, _ = vocabulary(259)
    merges = [f"{piece[:cut]} {piece[cut:]}" for piece in pieces for cut in range(1, len(piece))]
    return tokens + pieces, types + [int(KIND.NORMAL)] * len(pieces), merges


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["prompt"][:20])
def test_golden(smollm2, case):
    assert smollm2.encode(case["prompt"]) == case["ids"]
    assert smollm2.decode(case["ids"]) == case["prompt"]
    assert smollm2.decode(case["greedy"]) == case["greedy_text"]


def test_golden_cases_are_there():
    assert len(GOLDEN) == 6


def test_demo_model_properties(smollm2, smollm2_path):
    assert smollm2.vocab_size == 49152
    assert smollm2.bos_id == 1
    assert smollm2.end_ids == {2}
    assert isinstance(smollm2.end_ids, frozenset)
    begin = time.process_time()
    Tokenizer.from_gguf(ModelFile(smollm2_path))
    assert time.process_time() - begin < 2


def test_demo_model_chat(smollm2):
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    prompt = smollm2.render_chat([{"role": "user", "content": "Hi <there> & you"}])
    assert prompt == system + "<|im_start|>user\nHi <there> & you<|im_end|>\n<|im_start|>assistant\n"
    ids = smollm2.encode(prompt)
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 3, 2)
    own_system = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]
    prompt = smollm2.render_chat(own_system, add_generation_prompt=False)
    assert prompt == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"


def test_written_model_has_a_token_for_every_byte(tmp_path):
    write_llama_gguf(tmp_path / "m.gguf", layers=1, dim=32, heads=1, kv_heads=1, ffn=32, vocab=300)
    tokenizer = Tokenizer.from_gguf(ModelFile(tmp_path / "m.gguf"))
    assert tokenizer.vocab_size == 300
    assert [tokenizer.token_bytes(BYTE + byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert tokenizer.encode("the the") == [259, BYTE + ord("e"), 260, BYTE + ord("e")]
    assert tokenizer.decode(tokenizer.encode("the a\0é🦊")) == "the a\0é🦊"


SPLIT_TEXT = "We'LLs don't 12345!?\n\n  go"
SPLITS = {
    "gpt-2": ["We", "'", "LLs", " don", "'t", " 12345", "!?", "\n\n ", " go"],
    "smollm": ["We", "'", "LLs", " don", "'t", " ", "1", "2", "3", "4", "5", "!?", "\n\n ", " go"],
    "llama-bpe": ["We", "'LL", "s", " don", "'t", " ", "123", "45", "!?\n\n", " ", " go"],
    "qwen2": ["We", "'LL", "s", " don", "'t", " ", "1", "2", "3", "4", "5", "!?\n\n", " ", " go"],
}


@pytest.mark.parametrize("pre", KINDS)
def test_where_text_splits(make, pre):
    tokenizer = make(all_merging(SPLIT_TEXT), pre=pre)
    ids = tokenizer.encode(SPLIT_TEXT)
    assert [tokenizer.decode([index]) for index in ids] == SPLITS[pre]


def test_merges_apply_in_their_order(make):
    tokens, types, _ = vocabulary(259)
    wider = [*tokens, "bc", "ab", "abc"], [*types, *[int(KIND.NORMAL)] * 3]
    assert make((*wider, ["b c", "a b", "a bc"])).encode("abc") == [261]
    assert make((*wider, ["b c", "a b"])).encode("abc") == [BYTE + ord("a"), 259]
    assert make((*wider, ["a b", "b c"])).encode("abc") == [260, BYTE + ord("c")]


def test_llama_keeps_words_of_its_vocabulary_whole(make):
    tokens, types, _ = vocabulary(259)
    vocab = [*tokens, "xyz"], [*types, int(KIND.NORMAL)], []
    with pytest.raises(FormatError, match="merges"):
        make(vocab, pre="llama-bpe")
    vocab = [*tokens, "xyz", "ab"], [*types, *[int(KIND.NORMAL)] * 2], ["a b"]
    assert make(vocab, pre="llama-bpe").encode("xyz") == [259]
    assert make(vocab, pre="qwen2").encode("xyz") == [BYTE + ord(c) for c in "xyz"]


def test_qwen_composes_characters(make):
    decomposed = "cafe\u0301"
    assert make(pre="qwen2").encode(decomposed) == make(pre="qwen2").encode("café")
    assert make(pre="llama-bpe").encode(decomposed) != make(pre="llama-bpe").encode("café")
    tokens, types, merges = vocabulary(262)
    with_special = make(([*tokens, decomposed], [*types, int(KIND.USER_DEFINED)], merges), pre="qwen2")
    assert with_special.encode(decomposed) == [262]  # but special tokens are found first, as written
    assert 262 not in with_special.encode("café")


@pytest.mark.parametrize("pre", KINDS)
def test_special_tokens_are_single_tokens(make, pre):
    tokens, types, merges = vocabulary(262)
    special = ["<|end|>", "<|end|>more", "new tool", "｜ó｜", "<ó>"]
    kinds = [KIND.CONTROL, KIND.CONTROL, KIND.USER_DEFINED, KIND.USER_DEFINED, KIND.USER_DEFINED]
    tokenizer = make(([*tokens, *special], [*types, *map(int, kinds)], merges), pre=pre)
    x = BYTE + ord("x")
    assert tokenizer.encode("x<s>x</s><|end|>x") == [x, 1, x, 2, 262, x]
    assert tokenizer.encode("<|end|>more") == [263]
    assert tokenizer.encode("xnew toolx") == [x, 264, x]
    assert tokenizer.encode("｜ó｜<ó>") == [265, 266]  # written as they are, not in the byte alphabet
    assert tokenizer.decode([x, 1, 265, 266, 264, 263]) == "x<s>｜ó｜<ó>new tool<|end|>more"
    assert 0 not in tokenizer.encode("<unk>")  # of type unknown: not for text
    assert tokenizer.decode(tokenizer.encode("<unk> <|end|")) == "<unk> <|end|"


def test_bos_comes_first_only_where_the_model_asks(make):
    x = BYTE + ord("x")
    assert make().encode("x") == [x]
    asking = make(add_bos=True)
    assert asking.encode("x") == [1, x]
    assert asking.encode("") == [1]
    assert asking.encode("<s>x") == [1, x]  # once
    assert asking.decode([1, x]) == "<s>x"


def test_end_ids(make):
    assert make().end_ids == {2}
    assert make(extra={"tokenizer.ggml.eot_token_id": 0}).end_ids == {0, 2}
    none = make(eos=None, bos=None)
    assert none.end_ids == frozenset()
    assert none.bos_id is None


def test_ids_out_of_range(make):
    tokenizer = make()
    assert tokenizer.vocab_size == 262
    assert tokenizer.decode(np.array([BYTE + ord("x")])) == "x"
    stream = tokenizer.stream()
    for index in (-1, 262, 10**30):
        with pytest.raises(ArgumentError, match="from 0 to 261"):
            tokenizer.decode([5, index])
        with pytest.raises(ArgumentError, match="from 0 to 261"):
            stream.push(index)
    with pytest.raises(TypeError):
        tokenizer.decode([1.5])


def test_lone_surrogates(make):
    with pytest.raises(ArgumentError, match="position 2"):
        make().encode("ab\ud800")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(text=st.text())
@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe"])  # qwen2 composes characters
def test_any_text_survives(make, pre, text):
    tokenizer = make(pre=pre)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    stream = tokenizer.stream()
    assert "".join(map(stream.push, ids)) == text
    assert stream.finish() == ""


def test_stream_holds_split_characters_back(make):
    tokenizer = make()
    stream = tokenizer.stream()
    pushed = [stream.push(BYTE + byte) for byte in "aé🦊b".encode()]
    assert pushed == ["a", "", "é", "", "", "", "🦊", "b"]
    assert stream.finish() == ""


def test_stream_writes_replacements_once_they_are_certain(make):
    tokenizer = make()
    stream = tokenizer.stream()
    ids = [BYTE + byte for byte in (0x61, 0xE6, 0x97)]
    assert [stream.push(index) for index in ids] == ["a", "", ""]
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""

    ids = [BYTE + byte for byte in (0x61, 0xFF, 0x62)]
    assert [stream.push(index) for index in ids] == ["a", "\ufffd", "b"]
    assert stream.finish() == ""
    assert stream.push(BYTE + 0x63) == "c"  # as new


@settings(deadline=None, max_examples=300)
@given(ids=st.lists(st.one_of(st.integers(0, 261), st.sampled_from([BYTE + byte for byte in "é🦊".encode()])), max_size=30))
def test_stream_and_decode_agree(plain, ids):
    stream = plain.stream()
    pushed = "".join(map(stream.push, ids))
    rest = stream.finish()
    assert pushed + rest == plain.decode(ids)
    assert len(rest) <= 1  # only an unfinished character is held back


def test_chat_templates_see_what_they_expect(make):
    template = """{% for m in messages %}
    {%- if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}
    {% if m.role == 'system' %}{% continue %}{% endif %}
[{{ m.role }}]{{ m.content | tojson }}
{% endfor %}
{{ bos_token }}{{ eos_token }}{{ tools is none }}{{ strftime_now('%%') }}{% if add_generation_prompt %}>{% endif %}"""
    tokenizer = make(template=template)
    messages = [{"role": "system", "content": "no"}, {"role": "user", "content": "<é>"}]
    assert tokenizer.render_chat(messages) == '[user]"<é>"\n<s></s>True%>'
    assert tokenizer.render_chat([], add_generation_prompt=False) == "<s></s>True%"
    with pytest.raises(ArgumentError, match="no tools here"):
        tokenizer.render_chat([{"role": "tool", "content": ""}])
    for messages in (["hello"], [{"content": "no role"}]):
        with pytest.raises(ArgumentError, match="role"):
            tokenizer.render_chat(messages)


def test_written_template_trims_blocks(make):
    assert make().render_chat([{"role": "user", "content": "Hi"}]) == "<s>user\nHi</s>\n<s>assistant\n"


def test_chat_templates_run_in_a_sandbox(make):
    for attack in ("{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ ''.__class__.__base__.__subclasses__() }}"):
        with pytest.raises(ArgumentError, match="cannot render"):
            make(template=attack).render_chat([])


def test_no_chat_template(make):
    with pytest.raises(Unsupported, match="no chat template"):
        make(template=None).render_chat([{"role": "user", "content": "Hi"}])
    with pytest.raises(FormatError, match="does not parse"):
        make(template="{% for %}").render_chat([])


def test_unsupported_kinds_are_named(make):
    with pytest.raises(Unsupported, match=r"'tekken'.*smollm.*qwen2"):
        make(pre="tekken")
    with pytest.raises(Unsupported, match=r"'llama'.*gpt2"):
        make(model="llama")


def test_no_tokenizer_in_the_file(tmp_path):
    finish(gguf.GGUFWriter(tmp_path / "bare.gguf", "llama"))
    with pytest.raises(FormatError, match=r"tokenizer\.ggml\.model"):
        Tokenizer.from_gguf(ModelFile(tmp_path / "bare.gguf"))


def test_inconsistent_vocabularies(make):
    tokens, types, merges = vocabulary(262)
    with pytest.raises(FormatError, match="262 tokens but 261 token types"):
        make((tokens, types[:-1], merges))
    for merge in ("q q", "th", "t h e", " t", "t "):
        with pytest.raises(FormatError, match=f"'{merge}' .number 3."):
            make((tokens, types, [*merges, merge]))
    with pytest.raises(FormatError, match=r"bos_token_id.* 262 tokens"):
        make(bos=262)
    with pytest.raises(FormatError, match="begin-of-text"):
        make(bos=None, add_bos=True)
    with pytest.raises(FormatError, match=r"tokenizer\.ggml\.merges"):
        make((tokens, types, [1, 2]))


def test_repeated_tokens_keep_their_ids(make):
    tokens, types, merges = vocabulary(262)
    tokenizer = make(([*tokens, "th"], [*types, int(KIND.NORMAL)], merges))
    assert tokenizer.vocab_size == 263
    assert tokenizer.encode("th") == [259]
    assert tokenizer.decode([259, 262]) == "thth"


@pytest.mark.parametrize("package", ["tokenizers", "jinja2"])
def test_without_the_extra(make, monkeypatch, package):
    tokenizer = make()
    monkeypatch.setitem(sys.modules, package, None)
    use = make if package == "tokenizers" else lambda: tokenizer.render_chat([])
    with pytest.raises(Unsupported, match=r"pip install 'wgattn\[gguf\]'"):
        use()
