"""Section "model": prompts and decode steps of a language model; the demo model where it is installed, else one of random weights in its shape."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from wgattn import reference
from wgattn.attention.kv_format import kv_format
from wgattn.block.quant import QuantizedTensor
from wgattn.cases.weights import RandomModel
from wgattn.errors import ModelNotFound, Unsupported
from wgattn.gpu import Recording
from wgattn.llm.gguf import FileTensor, ModelFile, find_model
from wgattn.llm.llama import Llama

from .records import Bench, Case, Error, Work, arithmetic_of
from .weights import dense

_SHAPE = {"block_count": 30, "embedding_length": 576, "attention.head_count": 9, "attention.head_count_kv": 3, "feed_forward_length": 1536}
_VOCABULARY = 49152
_MOST_CHECKED = 400 << 20
"""Bytes of weights up to which the reference is computed: it takes seconds for the demo model."""
_BOUND = 1e-3
_TOKENS = (1, 5, 9, 100, 200)


# ---- which model


def random_model(sizes: Mapping[str, int] = _SHAPE, vocabulary: int = _VOCABULARY) -> RandomModel:
    """Random weights in Q4_1, in the shape of SmolLM2-135M."""
    return RandomModel(np.random.default_rng(0), sizes, "Q4_1", vocab=vocabulary, name="random-135M.Q4_1")


@dataclass
class Loaded:
    """A model on the device, its file, and what it was compared with."""

    model: Llama
    file: ModelFile
    note: str = ""
    error: Error | None = None
    checked: bool = False

    @property
    def name(self) -> str:
        return self.file.path.name.removesuffix(".gguf")


def load(bench: Bench, capacity: int) -> Loaded:
    """The model that was asked for, warmed up; kept for the next case."""
    if "model" not in bench.kept:
        note = ""
        if bench.model == "random":
            file: ModelFile = random_model()
        else:
            try:
                file = ModelFile(find_model("smollm2" if bench.model == "auto" else bench.model))
            except (ModelNotFound, Unsupported) as error:
                if bench.model != "auto":
                    raise
                file, note = random_model(), f"random weights, because {str(error)[0].lower()}{str(error)[1:]}"
        model = Llama(file, capacity=capacity, device=bench.device)
        model.warm_up()
        bench.kept["model"] = Loaded(model, file, note)
    return bench.kept["model"]


def step_recording(model: Llama, depth: int) -> Recording:
    """What `model.decode` replays at this depth."""
    return model._decoding(depth)


def greedy_recording(model: Llama, depth: int) -> Recording:
    """What greedy generation replays at this depth: the step, and the choice of the next token, which moves the position on."""
    return Recording(model.device, [*model._decoding(depth), *model._loop.argmax])


def prompt_recording(model: Llama) -> Recording:
    """What `model.prefill` replays for a prompt of one chunk."""
    return Recording(model.device, [*model._prefill, *model._head])


def arrange(model: Llama, position: int, tokens: int) -> None:
    """The next replay computes so many tokens from this position on."""
    model._state.write(position, [1] * tokens)


# ---- what people feel, by the wall clock


def greedy_seconds(model: Llama, ids: list[int], count: int) -> float:
    """Of `count` tokens of greedy generation after these, the first one not counted: it comes with the prompt."""
    model.reset()
    stream = model.generate(ids, count + 1, stop_ids=())
    next(stream)
    begin = time.perf_counter()
    for _ in stream:
        pass
    return time.perf_counter() - begin


# ---- cases


def cases(bench: Bench) -> list[Case]:
    """A prompt of one chunk, decode steps over the depth, and greedy generation."""
    depths = (0, 1024) if bench.quick else (0, 1024, 4000)
    capacity = 2048 if bench.quick else 4096
    found = [Case("model", "prompt of one chunk", "prompt", lambda b: prompt(b, capacity), 8.0 if bench.quick else 12.0)]
    for depth in depths:
        found.append(Case("model", f"decode @{depth}", "step", lambda b, d=depth: decode(b, capacity, d), 1.0 if bench.quick else 3.0))
    return [*found, Case("model", "decode from @1", "greedy", lambda b: greedy(b, capacity), 2.0 if bench.quick else 5.0)]


def _facts(loaded: Loaded, tokens: int = 1) -> dict[str, Any]:
    return {"model": loaded.name, "tokens": tokens, "dispatches": loaded.model.dispatches_per_token, "weight_bytes": loaded.model.weight_bytes}


def prompt(bench: Bench, capacity: int) -> Work:
    loaded = load(bench, capacity)
    model, tokens = loaded.model, loaded.model.chunk
    c = model.config
    weights = sum(int(np.prod(t.shape)) for t in loaded.file.tensors.values() if len(t.shape) == 2 and t.name != "token_embd.weight")
    recording = prompt_recording(model)
    flops = 2 * tokens * weights + 2 * c.vocab_size * c.embed_dim + 2 * c.layers * c.num_heads * c.head_dim * tokens * (tokens + 1)
    facts = _facts(loaded, tokens) | {"dispatches": len(recording)}
    note = f"{tokens} tokens" + (f"; {loaded.note}" if loaded.note else "")
    ready = {"check": lambda: error(loaded), "arrange": lambda: arrange(model, 0, tokens)}
    return Work([recording], flops=flops, ceiling=arithmetic_of(recording), note=note, facts=facts, **ready)


def decode(bench: Bench, capacity: int, depth: int) -> Work:
    loaded = load(bench, capacity)
    recording = step_recording(loaded.model, depth)
    moved = _moved(loaded, depth)
    ready = {"check": lambda: error(loaded), "arrange": lambda: arrange(loaded.model, depth, 1)}
    return Work([recording], nbytes=moved, ceiling="copy", working_set=moved, facts=_facts(loaded) | {"dispatches": len(recording)}, **ready)


def greedy(bench: Bench, capacity: int) -> Work:
    loaded = load(bench, capacity)
    count = 8 if bench.device.profile.software else 64
    moved = sum(_moved(loaded, 1 + i) for i in range(count))
    wall = lambda: greedy_seconds(loaded.model, [1], count)  # noqa: E731
    return Work([], nbytes=moved, ceiling="copy", units=count, check=lambda: error(loaded), wall=wall, working_set=_moved(loaded, 1), facts=_facts(loaded))


def _moved(loaded: Loaded, depth: int) -> int:
    """Bytes that a decode step has to read: all weights once (of an embedding that is not the output matrix, one row), and the cache up to here."""
    c, tensors = loaded.model.config, loaded.file.tensors
    embedding = tensors["token_embd.weight"].nbytes if "output.weight" in tensors else 0
    row = kv_format(loaded.model.kv_dtype).row_bytes(c.head_dim)
    return sum(t.nbytes for t in tensors.values()) - embedding + 2 * c.layers * c.num_kv_heads * (depth + 1) * row


class _Weights(Mapping):
    """Weights by GGUF name, dequantised when they are asked for: a model's need not be in memory all at once."""

    def __init__(self, tensors: Mapping[str, FileTensor]):
        self._tensors = tensors

    def __getitem__(self, name: str) -> np.ndarray:
        return self._tensors[name].dequantize()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def error(loaded: Loaded) -> Error | None:
    """Of the logits after a prompt and after one more token; computed once. None for large models, and where gguf is not installed."""
    if loaded.checked:
        return loaded.error
    model, loaded.checked = loaded.model, True
    matrix = loaded.file.tensors["token_embd.weight"]
    if sum(t.nbytes for t in loaded.file.tensors.values()) > _MOST_CHECKED or dense(QuantizedTensor(matrix.data, matrix.shape, matrix.kind), slice(1)) is None:
        return None
    expected = reference.llama(_Weights(loaded.file.tensors), _TOKENS, model.config, model.rope.reference)[-2:]
    model.reset()
    found = np.stack([model.prefill(_TOKENS[:-1]), model.decode(_TOKENS[-1])])
    model.reset()
    loaded.error = Error.of(found, expected, _BOUND)
    return loaded.error

