"""What must hold on a real GPU at the size of a real model; `pytest -m gpu`. The reference runs in float64 on the CPU for a minute."""

import numpy as np
import pytest

from tests.llm.make_gguf import write_llama_gguf
from wgattn import reference
from wgattn.llm.llama import Llama


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_135m_shape_gives_the_references_logits_and_greedy_tokens(tmp_path, kind):
    path = tmp_path / "model.gguf"
    weights = write_llama_gguf(
        path, layers=30, dim=576, heads=9, kv_heads=3, ffn=1536, vocab=49152, kinds=kind, tied=False, rope_base=100000.0, seed=11
    )
    model = Llama.from_gguf(path, kv_dtype="f32", capacity=512)
    assert model.device.profile.kind != "CPU", f"{model.device} is not a real GPU"
    ids = np.random.default_rng(0).integers(0, 49152, 300).tolist()
    logits = model.prefill(ids)
    for step in range(12):
        want = reference.llama(weights, ids, model.config)[-1]
        gap = np.diff(np.sort(want)[-2:])[0]
        error = np.abs(logits - want).max()
        assert error < 2e-3 * np.abs(want).max(), f"step {step}: error {error} of {np.abs(want).max()}"
        token = int(np.argmax(want))
        assert int(np.argmax(logits)) == token or gap < 2 * error, f"step {step}: {int(np.argmax(logits))} instead of {token}, gap {gap}"
        ids.append(token)
        logits = model.decode(token)
