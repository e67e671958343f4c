"""A GGUF file of a tiny model: bytes as its vocabulary, random weights that a seed decides.

Matrices are float16, or in any type of block: quantized by gguf's own code where it can, random blocks of the
K types, which it only reads.
"""

from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import numpy as np

from support.random_blocks import random_blocks

HIDDEN, HEADS, KV_HEADS, INNER, LAYERS, CONTEXT = 32, 4, 2, 64, 2, 128
WIDE = 256
"""A hidden size that is whole blocks of the K types."""


def write(
    path: Path,
    seed: int = 0,
    wide: int = INNER,
    *,
    architecture: str = "llama",
    hidden: int = HIDDEN,
    tied: bool = False,
    types: Callable[[str], str] = lambda _: "F16",
    without: Container[str] = (),
    said_wide: int = 0,
    rope: dict[str, Any] | None = None,
    rope_freqs: "np.ndarray[Any, Any] | None" = None,
    rope_base: float = 10000.0,
) -> Path:
    """The file, of some 100 KiB. Another seed is another model in a file of the same size.

    `types` says of each matrix, by GGUF's name of it, in which type it is; `without` names tensors that are
    left out; `said_wide` is the inner size that the metadata says, where it is not that of the tensors.
    `rope` is metadata of rotary scaling (type, factor, original_context_length), `rope_freqs` the tensor of
    Llama 3, `rope_base` the base of the frequencies.
    """
    import gguf
    from tokenizers import pre_tokenizers

    tokens = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "the"]
    writer: Any = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(said_wide or wide)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    head = 128 if architecture == "qwen3" else hidden // HEADS  # transformers reads no other for it
    writer.add_rope_dimension_count(head)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_freq_base(rope_base)
    for name, value in (rope or {}).items():
        adds = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
        adds[type(value)](f"{architecture}.rope.scaling.{name}", value)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges(["h e", "t he"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    random = np.random.default_rng(seed)

    def add(name: str, *shape: int) -> None:
        values = random.standard_normal(shape) * hidden**-0.5 + (len(shape) == 1 and "bias" not in name)
        if name in without:
            return
        if len(shape) == 1:
            writer.add_tensor(name, values.astype(np.float32))
            return
        kind = gguf.GGMLQuantizationType[types(name)]
        raw = (
            random_blocks(kind.name, shape[0], shape[1] // 256, seed=int(random.integers(1 << 30)))
            if kind.name.endswith("_K")
            else gguf.quants.quantize(values.astype(np.float32), kind)
        )
        writer.add_tensor(name, raw, raw_dtype=kind)

    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs.astype(np.float32))
    add("token_embd.weight", len(tokens), hidden)
    for layer in range(LAYERS):
        for part, rows in (("q", HEADS * head), ("k", KV_HEADS * head), ("v", KV_HEADS * head)):
            add(f"blk.{layer}.attn_{part}.weight", rows, hidden)
            if architecture == "qwen2":
                add(f"blk.{layer}.attn_{part}.bias", rows)
            if architecture == "qwen3" and part != "v":
                add(f"blk.{layer}.attn_{part}_norm.weight", head)
        add(f"blk.{layer}.attn_output.weight", hidden, HEADS * head)
        add(f"blk.{layer}.attn_norm.weight", hidden)
        add(f"blk.{layer}.ffn_norm.weight", hidden)
        add(f"blk.{layer}.ffn_gate.weight", wide, hidden)
        add(f"blk.{layer}.ffn_up.weight", wide, hidden)
        add(f"blk.{layer}.ffn_down.weight", hidden, wide)
    add("output_norm.weight", hidden)
    if not tied:
        add("output.weight", len(tokens), hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
