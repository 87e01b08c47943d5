"""Text to token ids and back: the byte-level BPE that a GGUF file describes, run by the `tokenizers` package."""

import codecs
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from types import ModuleType
from typing import Any

from ..errors import ArgumentError, FormatError, Unsupported
from ..extras import load_extra
from .gguf import ModelFile
from .template import Template

_CONTROL, _USER_DEFINED = 3, 4  # ggml's token types for text that is always one token


def _byte_characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's alphabet): itself where it prints, else from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


_BYTE_OF = {character: byte for byte, character in enumerate(_byte_characters())}


def _words_pattern(digits: str) -> str:
    """How Llama 3 and Qwen 2 split text before merging; they differ only in how many digits may stay together."""
    contraction = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    word = r"[^\r\n\p{L}\p{N}]?\p{L}+"
    punctuation = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
    space = r"\s*[\r\n]+|\s+(?!\S)|\s+"
    return "|".join((contraction, word, digits, punctuation, space))


def _split_words(lib: ModuleType, digits: str) -> list:
    pattern = lib.Regex(_words_pattern(digits))
    return [lib.pre_tokenizers.Split(pattern, "isolated"), lib.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


def _gpt2(lib: ModuleType) -> list:
    return [lib.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]


# tokenizer.ggml.pre -> the steps that cut text into the words within which tokens merge
_SPLITS: dict[str, Callable[[ModuleType], list]] = {
    "gpt-2": _gpt2,
    "smollm": lambda lib: [lib.pre_tokenizers.Digits(individual_digits=True), *_gpt2(lib)],
    "llama-bpe": lambda lib: _split_words(lib, r"\p{N}{1,3}"),
    "qwen2": lambda lib: _split_words(lib, r"\p{N}"),
}


class Tokenizer:
    """A byte-level BPE vocabulary. Make one with `Tokenizer.from_gguf`."""

    vocab_size: int
    bos_id: int | None  # the token that begins a text, where the model has one
    end_ids: frozenset[int]  # tokens after which generation stops: end of text, end of turn
    add_bos: bool  # whether encode puts bos_id first

    def __init__(self, model_file: ModelFile):
        """As `from_gguf`."""
        self._file = model_file
        model = model_file.require("tokenizer.ggml.model", str)
        if model != "gpt2":
            raise Unsupported(f"{model_file.path} has a {model!r} tokenizer, and only 'gpt2' (byte-level BPE) is supported: use another model")
        split = model_file.get("tokenizer.ggml.pre", "default")
        if not isinstance(split, str) or split not in _SPLITS:
            known = ", ".join(_SPLITS)
            raise Unsupported(f"{model_file.path} has a pre-tokenizer of the kind {split!r}, and only {known} are supported: use another model")
        self._tokens = self._list("tokenizer.ggml.tokens", str)
        self.vocab_size = len(self._tokens)
        if not self._tokens:
            raise self._broken("has an empty vocabulary")
        types = self._list("tokenizer.ggml.token_type", int) if model_file.get("tokenizer.ggml.token_type") is not None else [1] * self.vocab_size
        if len(types) != self.vocab_size:
            raise self._broken(f"has {self.vocab_size} tokens but {len(types)} token types")
        self._whole = {index for index, kind in enumerate(types) if kind in (_CONTROL, _USER_DEFINED)}
        self._control = {index for index in self._whole if types[index] == _CONTROL}
        self.bos_id = self._token_id("bos")
        self.end_ids = frozenset(index for index in (self._token_id("eos"), self._token_id("eot")) if index is not None)
        self.add_bos = self._flag("tokenizer.ggml.add_bos_token")
        if self.add_bos and self.bos_id is None:
            raise self._broken("asks for a begin-of-text token but names none")
        self._encoder = self._build(split)

    @classmethod
    def from_gguf(cls, model_file: ModelFile) -> "Tokenizer":
        """The tokenizer that `model_file` describes.

        Unsupported: a tokenizer other than byte-level BPE, an unknown pre-tokenizer, or the `gguf` extra is missing. FormatError: a vocabulary
        that contradicts itself.
        """
        return cls(model_file)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, each in [0, vocab_size).

        Special tokens written in the text, such as <|im_end|>, become that one token. A begin-of-text token comes first only if the model asks
        for one and the text does not begin with it. Bytes that the vocabulary lacks (rare control characters) are left out, as by the model's
        own tokenizer. ArgumentError: text that is not valid Unicode (lone surrogates).
        """
        if not isinstance(text, str):
            raise TypeError(f"the text is a {type(text).__name__}: it must be a str")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ArgumentError(f"the text has a lone surrogate at position {error.start}, which no encoding allows: remove it") from error
        with self._library("encode this text"):
            ids = self._encoder.encode(text, add_special_tokens=False).ids
        if self.add_bos and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, special tokens included; bytes that are not UTF-8 become U+FFFD. ArgumentError: an id outside the vocabulary."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def stream(self) -> "StreamDecoder":
        """A decoder that takes tokens one at a time."""
        return StreamDecoder(self)

    def token_bytes(self, index: int) -> bytes:
        """The bytes of one token, which need not be whole characters. ArgumentError: an id outside the vocabulary."""
        index = operator.index(index)
        if not 0 <= index < self.vocab_size:
            raise ArgumentError(f"token id {index} is outside the vocabulary: ids go from 0 to {self.vocab_size - 1}")
        token = self._tokens[index]
        if index not in self._whole:
            try:
                return bytes([_BYTE_OF[character] for character in token])
            except KeyError:  # not written in the byte alphabet: it stands for itself
                pass
        return token.encode()

    def render_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The prompt for a conversation, by the model's own chat template.

        `messages` hold "role" ("system", "user", "assistant") and "content"; texts, numbers, lists and mappings. `add_generation_prompt` ends the
        prompt where the answer begins. Raises as `Template.render` does; Unsupported: the model has no chat template.
        """
        for message in messages:
            if not isinstance(message, Mapping) or "role" not in message:
                raise ArgumentError(f"a chat message must be a mapping with a role and a content, and this is {message!r}")
        names = {"bos_token": self._token_text("bos"), "eos_token": self._token_text("eos"), "tools": None, "documents": None}
        return self._template.render(messages=[dict(m) for m in messages], add_generation_prompt=add_generation_prompt, **names)

    @cached_property
    def _template(self) -> Template:
        if self._file.get("tokenizer.chat_template") is None:
            raise Unsupported(f"{self._file.path} has no chat template: write the prompt out, or use a model tuned for chat")
        return Template(self._file.require("tokenizer.chat_template", str), str(self._file.path))

    def _build(self, split: str) -> Any:
        lib = load_extra("tokenizers")
        vocab: dict[str, int] = {}
        for index, token in enumerate(self._tokens):
            vocab.setdefault(token, index)
        merges = self._merges(vocab)
        special = [lib.AddedToken(self._tokens[i], special=i in self._control, normalized=False) for i in sorted(self._whole) if self._tokens[i]]
        with self._library("be made"):
            # Llama 3 keeps a word that is a token whole, even where no chain of merges leads to it
            encoder = lib.Tokenizer(lib.models.BPE(vocab=vocab, merges=merges, ignore_merges=split == "llama-bpe"))
            if split == "qwen2":
                encoder.normalizer = lib.normalizers.NFC()
            encoder.pre_tokenizer = lib.pre_tokenizers.Sequence(_SPLITS[split](lib))
            encoder.add_tokens(special)
        return encoder

    @contextmanager
    def _library(self, done: str) -> Iterator[None]:
        """Around calls of the tokenizers package, which fails or panics on vocabularies that nobody thought of; a panic is not even an Exception."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise self._broken(f"has a vocabulary (tokenizer.ggml.tokens, merges) with which no tokenizer can {done} ({error})") from error

    def _merges(self, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
        merges = []
        for rank, line in enumerate(self._list("tokenizer.ggml.merges", str)):
            left, _, right = line.partition(" ")
            if left not in vocab or right not in vocab or left + right not in vocab:  # the library would panic or fail without saying where
                raise self._broken(f"has the merge {line!r} (number {rank}), whose parts or whole are not in its vocabulary")
            merges.append((left, right))
        return merges

    def _broken(self, what: str) -> FormatError:
        return FormatError(f"{self._file.path} {what}: download it again or convert the model anew")

    def _list(self, key: str, kind: type) -> list:
        values = self._file.require(key, list)
        if values and type(values[0]) is not kind:  # a GGUF array has one type
            raise self._broken(f"has {type(values[0]).__name__} values under the metadata key {key} where {kind.__name__} values belong")
        return values

    def _flag(self, key: str) -> bool:
        return self._file.get(key) is not None and self._file.require(key, bool)

    def _token_id(self, role: str) -> int | None:
        key = f"tokenizer.ggml.{role}_token_id"
        if self._file.get(key) is None:
            return None
        index = self._file.require(key, int)
        if not 0 <= index < self.vocab_size:
            raise self._broken(f"names token {index} under the metadata key {key}, outside its {self.vocab_size} tokens")
        return index

    def _token_text(self, role: str) -> str:
        index = self._token_id(role)
        return "" if index is None else self._tokens[index]


class StreamDecoder:
    """Turns tokens into text as they come. What the pushes return and `finish`, joined, equals `Tokenizer.decode` of all ids.

    A character whose bytes are split over tokens is held back until it is whole. Bytes that cannot become a character are written as U+FFFD as
    soon as that is known, so that one bad byte does not hold back what follows.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, index: int) -> str:
        """The characters that token `index` completes, possibly none. ArgumentError: an id outside the vocabulary; nothing is taken then."""
        return self._decoder.decode(self._tokenizer.token_bytes(index))

    def finish(self) -> str:
        """What is still held back, and the decoder is as new."""
        return self._decoder.decode(b"", final=True)
