"""Cases of language models: small ones of random weights, and the choice of a token."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .. import reference
from ..attention.kv_format import KV_FORMATS
from ..block.quant import FORMATS
from ..gpu import Device, Recording, StepState, Tensor
from ..llm.config import ARCHITECTURES
from ..llm.llama import Llama
from ..llm.loop import DecodeLoop, pack_options
from .block import QUANTISED_CACHE
from .family import Family, Result, once
from .weights import RandomModel, width_of

_DRAWS = 512
"""Of a case of sampling."""


def _model(device: Device, rng: np.random.Generator, *, arch: str, weights: str, kv_dtype: str, tied: bool) -> Iterator[Result]:
    """Logits of a prompt and of a step; then greedy generation, whose tokens must be those that the reference ranks first."""
    E = width_of(weights)
    sizes = {"block_count": 2, "embedding_length": E, "feed_forward_length": E, "attention.head_count": 4, "attention.head_count_kv": 2}
    file = RandomModel(rng, sizes | {"attention.key_length": E // 4 if E % 128 else 32}, weights, vocab=300, arch=arch, tied=tied)
    model = Llama(file, kv_dtype=kv_dtype, capacity=300, device=device)
    prompt = rng.integers(0, model.config.vocab_size, 21).tolist()
    got = np.stack([model.prefill(prompt[:-1]), model.decode(prompt[-1])])
    model.reset()
    tokens = list(model.generate(prompt, 5, stop_ids=()))
    expected = once(lambda: reference.llama({name: t.dequantize() for name, t in file.tensors.items()}, prompt + tokens[:-1], model.config))
    error = {"f32": 2e-4, "f16": 2e-2, "q8_0": 0.1, "q4_0": 1.0}[kv_dtype]
    close = {"nmse": 2 * QUANTISED_CACHE[kv_dtype]} if kv_dtype in QUANTISED_CACHE else {"absolute": error}
    yield Result("logits", got, lambda: expected()[len(prompt) - 2 : len(prompt)], **close)
    chosen = lambda: expected()[len(prompt) - 1 :][np.arange(len(tokens)), tokens]  # noqa: E731
    yield Result("best logit less that of the token chosen", np.zeros(len(tokens)), lambda: expected()[len(prompt) - 1 :].max(1) - chosen(), error)


def _sampling(device: Device, rng: np.random.Generator, *, vocab: int, options: tuple[float, int, bool]) -> Iterator[Result]:
    """Many draws from the same logits: only of candidates, and each about as often as it should be.

    options: temperature, top_k, and whether top_p leaves but four tokens.
    """
    temperature, top_k, few = options
    logits = rng.standard_normal(vocab).astype(np.float32)
    reached = np.cumsum(reference.candidates(logits, temperature, top_k)[1])
    top_p = float(reached[2:4].mean()) if few else 1.0  # between two sums, so that rounding does not decide what is left
    tail = np.full(-vocab % 4, np.nan, np.float32)
    given = Tensor(device, (vocab,), logits.dtype, device.tensor(np.concatenate([logits, tail])).buffer)
    state, nothing = StepState(device), Recording(device)  # the logits are there, and no step changes them
    state.place(6, 1)
    loop = DecodeLoop(device, [(2**32, nothing)], given, state)
    drawn = list(loop.run(nothing, 7, _DRAWS, lambda length: None, pack_options(temperature, top_k, top_p, int(rng.integers(2**32)))))
    got = np.bincount(np.minimum(drawn, vocab), minlength=vocab + 1) / _DRAWS  # the last: what is no token

    def expected() -> np.ndarray:
        ids, probabilities = reference.candidates(logits, temperature, top_k, top_p)
        whole = np.zeros(vocab + 1)
        whole[ids] = probabilities
        return whole

    yield Result("how often tokens were drawn", got, expected, 3 / _DRAWS**0.5)  # six standard deviations of a fair coin
    yield Result("how often others than candidates were", np.where(expected() > 0, 0, got), lambda: np.zeros(vocab + 1))


MODEL = Family("model", {"arch": tuple(ARCHITECTURES), "weights": tuple(FORMATS), "kv_dtype": tuple(KV_FORMATS), "tied": (True, False)}, _model)
SAMPLING = Family(
    "sampling",
    {"vocab": (7, 3001), "options": ((1.0, 0, False), (0.7, 5, False), (1.5, 0, True), (0.7, 6, True))},
    _sampling,
    numbers=("options",),
)
FAMILIES = (MODEL, SAMPLING)
