"""Cases of language models: small ones of random weights, and the choice of a token."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .. import reference
from ..attention.kv_format import KV_FORMATS
from ..block.quant import FORMATS
from ..gpu import Device
from ..llm.config import ARCHITECTURES
from ..llm.llama import Llama
from .block import QUANTISED_CACHE
from .family import Family, Result, once
from .weights import RandomModel, width_of


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


MODEL = Family("model", {"arch": tuple(ARCHITECTURES), "weights": tuple(FORMATS), "kv_dtype": tuple(KV_FORMATS), "tied": (True, False)}, _model)
FAMILIES = (MODEL,)
