"""Writes small GGUF files for the tests: random weights, and a tokenizer that can spell any bytes."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np

SPECIAL = ("<unk>", "<s>", "</s>")  # ids 0, 1, 2; the 256 bytes follow
MERGES = ("t h", "Ġ th", "Ġ a")  # each makes one more token, as far as the vocabulary has room
CHAT_TEMPLATE = """{% for message in messages %}
<s>{{ message['role'] }}
{{ message['content'] }}</s>
{% endfor %}
{% if add_generation_prompt %}
<s>assistant
{% endif %}"""
MATRICES = ("token_embd", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "output")


def byte_tokens() -> list[str]:
    """The token of each byte, in byte order: printable Latin-1 is itself, the rest is numbered from U+0100 on."""
    tokens, unprintable = [], 0x100
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or (byte >= 0xA1 and byte != 0xAD):
            tokens.append(chr(byte))
        else:
            tokens.append(chr(unprintable))
            unprintable += 1
    return tokens


def vocabulary(size: int) -> tuple[list[str], list[int], list[str]]:
    """Tokens, their types, and merges, for `size` >= 259 tokens: specials, bytes, merged tokens, then unused fillers."""
    if size < len(SPECIAL) + 256:
        raise ValueError(f"a vocabulary of {size} cannot hold {len(SPECIAL)} special tokens and 256 bytes")
    merges = MERGES[: size - len(SPECIAL) - 256]
    used = [*SPECIAL, *byte_tokens(), *(merge.replace(" ", "") for merge in merges)]
    kind = gguf.TokenType
    types = [kind.UNKNOWN, kind.CONTROL, kind.CONTROL, *[kind.NORMAL] * (len(used) - len(SPECIAL)), *[kind.UNUSED] * (size - len(used))]
    fillers = [f"<filler_{index}>" for index in range(len(used), size)]
    return used + fillers, [int(t) for t in types], list(merges)


def add_tokenizer(
    writer: gguf.GGUFWriter,
    tokens: Sequence[str],
    types: Sequence[int],
    merges: Sequence[str],
    *,
    pre: str = "smollm",
    model: str = "gpt2",
    bos: int | None = 1,
    eos: int | None = 2,
    add_bos: bool = False,
    template: str | None = CHAT_TEMPLATE,
) -> None:
    """The metadata of a tokenizer, under the keys that llama.cpp reads."""
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if merges:  # the writer refuses empty arrays
        writer.add_token_merges(merges)
    if bos is not None:
        writer.add_bos_token_id(bos)
    if eos is not None:
        writer.add_eos_token_id(eos)
    writer.add_add_bos_token(add_bos)
    writer.add_add_space_prefix(False)
    if template is not None:
        writer.add_chat_template(template)


def finish(writer: gguf.GGUFWriter) -> None:
    """Write all that was added to the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_llama_gguf(
    path: Path,
    *,
    layers: int,
    dim: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocab: int,
    kinds: str | Mapping[str, str] = "F32",
    tied: bool = True,
    rope_base: float = 10000.0,
    head_dim: int | None = None,
    seed: int = 0,
    context: int = 512,
    arch: str = "llama",
    bias: bool = False,
    qk_norm: bool = False,
    rope_factors: bool = False,
    metadata: Mapping[str, str | float | int] | None = None,
) -> dict[str, np.ndarray]:
    """Write a llama-architecture model with random weights and a byte-level tokenizer (vocab >= 259); the same arguments write the same file.

    kinds: the tensor kind of every matrix ("F32", "F16", "Q8_0", "Q4_1", ...: what gguf can quantise to), or a mapping from roles (the names in
    MATRICES) to kinds, where "default" serves the roles left out, and F32 serves without it. Norms are F32.
    head_dim: None means dim // heads. tied: no output.weight; the embedding serves. arch: the architecture that the keys are written for.
    bias: of the Q, K and V projections (K's large, as in Qwen2). qk_norm: weights for it. rope_factors: a rope_freqs.weight tensor, as Llama 3 has.
    metadata: more keys, written under the architecture's prefix.

    Returns what the file holds, dequantised: float32, by GGUF tensor name, in shape (rows, columns) or (dim,).
    """
    rng = np.random.default_rng(seed)
    by_role = {"default": kinds} if isinstance(kinds, str) else dict(kinds)
    if unknown := set(by_role) - {"default", *MATRICES}:
        raise ValueError(f"no such roles: {sorted(unknown)}")
    size = head_dim or dim // heads
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("random llama")
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(context)
    writer.add_embedding_length(dim)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(rope_base)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocab)
    if head_dim is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    for key, value in (metadata or {}).items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(f"{arch}.{key}", value)
    add_tokenizer(writer, *vocabulary(vocab))

    shapes = {"token_embd.weight": (vocab, dim)}
    for layer in range(layers):
        block = {
            "attn_norm": (dim,),
            "attn_q": (heads * size, dim),
            "attn_k": (kv_heads * size, dim),
            "attn_v": (kv_heads * size, dim),
            "attn_output": (dim, heads * size),
            "ffn_norm": (dim,),
            "ffn_gate": (ffn, dim),
            "ffn_up": (ffn, dim),
            "ffn_down": (dim, ffn),
        }
        shapes |= {f"blk.{layer}.{role}.weight": shape for role, shape in block.items()}
        if bias:
            shapes |= {f"blk.{layer}.{role}.bias": block[role][:1] for role in ("attn_q", "attn_k", "attn_v")}
        if qk_norm:
            shapes |= {f"blk.{layer}.{role}.weight": (size,) for role in ("attn_q_norm", "attn_k_norm")}
    shapes["output_norm.weight"] = (dim,)
    if rope_factors:
        shapes["rope_freqs.weight"] = (size // 2,)
    if not tied:
        shapes["output.weight"] = (vocab, dim)

    weights = {}
    for name, shape in shapes.items():
        role = name.split(".")[-2]
        if len(shape) == 2:  # scaled so that activations neither vanish nor grow from layer to layer
            values = rng.standard_normal(shape, dtype=np.float32) * np.float32(1.0 if role == "token_embd" else shape[1] ** -0.5)
            kind = gguf.GGMLQuantizationType[by_role.get(role, by_role.get("default", "F32"))]
        elif name.endswith(".bias"):
            values, kind = (10.0 if role == "attn_k" else 0.5) * rng.standard_normal(shape, dtype=np.float32), gguf.GGMLQuantizationType.F32
        else:
            values, kind = 1 + 0.1 * rng.standard_normal(shape, dtype=np.float32), gguf.GGMLQuantizationType.F32
        raw = gguf.quants.quantize(values, kind)
        writer.add_tensor(name, raw, raw_dtype=kind)
        weights[name] = gguf.quants.dequantize(raw, kind).astype(np.float32)
    finish(writer)
    return weights
