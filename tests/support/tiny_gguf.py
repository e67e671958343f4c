"""A GGUF file of a tiny Llama: bytes as its vocabulary, random float16 weights that a seed decides."""

from pathlib import Path
from typing import Any

import numpy as np

HIDDEN, HEADS, KV_HEADS, INNER, LAYERS, CONTEXT = 32, 4, 2, 64, 2, 128


def write(path: Path, seed: int = 0, wide: int = INNER) -> Path:
    """The file, of some 100 KiB. Another seed is another model in a file of the same size."""
    import gguf
    from tokenizers import pre_tokenizers

    tokens = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "the"]
    writer: Any = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(wide)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
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
        values = random.standard_normal(shape) * HIDDEN**-0.5 + (len(shape) == 1)
        writer.add_tensor(name, values.astype(np.float16 if len(shape) == 2 else np.float32))

    add("token_embd.weight", len(tokens), HIDDEN)
    for layer in range(LAYERS):
        head = HIDDEN // HEADS
        add(f"blk.{layer}.attn_q.weight", HIDDEN, HIDDEN)
        add(f"blk.{layer}.attn_k.weight", KV_HEADS * head, HIDDEN)
        add(f"blk.{layer}.attn_v.weight", KV_HEADS * head, HIDDEN)
        add(f"blk.{layer}.attn_output.weight", HIDDEN, HIDDEN)
        add(f"blk.{layer}.attn_norm.weight", HIDDEN)
        add(f"blk.{layer}.ffn_norm.weight", HIDDEN)
        add(f"blk.{layer}.ffn_gate.weight", wide, HIDDEN)
        add(f"blk.{layer}.ffn_up.weight", wide, HIDDEN)
        add(f"blk.{layer}.ffn_down.weight", HIDDEN, wide)
    add("output_norm.weight", HIDDEN)
    add("output.weight", len(tokens), HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
