"""The runner for Llama-shaped models on a CPU: one call into the kernels is one step.

Takes the weights of the transformers module over, packed for the kernels, and empties the module, so that
they are in memory once. float32 weights that came from a half-precision file are kept in the file's type when
that loses not one bit: the kernels widen what they read, and half as much is read. Rotary tables come from
the module itself, so every fixed scaling of it is right here too.
"""

import ctypes
from collections.abc import Iterator
from ctypes import POINTER, cast
from typing import Any

import numpy as np
import torch

from headway_engine.devices import dtype_name
from headway_engine.fused import native
from headway_engine.fused.packing import Packer, large_pages, mixed, narrowest, stacked
from headway_engine.fused.sampler import KernelPicker
from headway_engine.llama_shape import why_not_llama
from headway_engine.model import LoadedModel
from headway_engine.packed_weights import block_types, drop_weights, plain_weight, same_storage, weight_of
from headway_engine.protocol import Capacity
from headway_engine.sequence import Chunk
from headway_engine.stepping import StepRunner, logit_rows


def why_not_fused(model: LoadedModel) -> str | None:
    """Why the kernels cannot serve this model; None when they can."""
    if model.device.type != "cpu":
        return f"it runs on {model.device.type}"
    if model.dtype not in (torch.float32, torch.bfloat16):
        return f"dtype {model.dtype} has no kernel"
    return why_not_llama(model)


class FusedRunner(StepRunner):
    """Steps in one C++ call each. The model's module is emptied: it cannot compute any more."""

    name = "fused"

    def __init__(self, model: LoadedModel, capacity: Capacity, library: ctypes.CDLL, threads: int) -> None:
        super().__init__(model, capacity, KernelPicker(library, threads))
        self._library = native.declare(library)
        self._packer = Packer(self._library)
        stored = stored_type(model)
        short = model.dtype is torch.bfloat16
        self._dense = self._packer.dense(stored, short)
        self._wide = self._packer.dense(model.dtype, short)  # for what `stored` may not hold exactly
        self.weights = "+".join(block_types(model.module)) or dtype_name(stored)
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._logits = torch.empty(0)
        with torch.inference_mode():
            self._c_model = self._take_over(model, capacity, threads)
        self._cache.warm()

    @property
    def embedding_size(self) -> int:
        """See Runner."""
        return int(self._c_model.hidden)

    def _forward(self, chunks: list[Chunk]) -> torch.Tensor:
        """See StepRunner. The logits are good until the next call."""
        return self._forward_hidden(chunks, [])[0]

    def _forward_hidden(self, chunks: list[Chunk], rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        spans = native.spans(
            [(c.start, c.length, c.sequence.block_table) for c in chunks], self._cache.block_tokens
        )
        ids: list[int] = []
        for chunk in chunks:
            ids.extend(chunk.sequence.tokens[chunk.start : chunk.start + chunk.length])
        sampled = logit_rows(chunks)
        vocabulary = self._c_model.vocabulary
        if not all(0 <= token < vocabulary for token in ids):
            raise ValueError(f"a token id is outside the vocabulary of {vocabulary}")
        need = self._library.hw_workspace(self._c_model, spans.tokens)
        if self._workspace.numel() < need:
            self._workspace = large_pages(need)
        if self._logits.numel() < len(sampled) * vocabulary:
            self._logits = torch.empty(len(sampled) * vocabulary)
        # The same memory for every step: new memory would have to be zeroed by the system first.
        logits = self._logits[: len(sampled) * vocabulary].view(len(sampled), vocabulary)
        states = torch.empty((len(rows), self.embedding_size))
        id_array, sampled_array, row_array = (np.array(a, dtype=np.int32) for a in (ids, sampled, rows))
        step = native.CStep(
            tokens=spans.tokens,
            chunks=len(spans.chunks),
            samples=len(sampled),
            pooled=len(rows),
            ids=native.pointer(id_array),
            positions=native.pointer(spans.positions),
            slots=native.pointer(spans.slots),
            chunk=native.pointer(spans.chunks),
            tables=native.pointer(spans.tables),
            sampled=native.pointer(sampled_array),
            pooled_rows=native.pointer(row_array),
            logits=logits.data_ptr(),
            states=states.data_ptr(),
            workspace=self._workspace.data_ptr(),
        )
        if self._library.hw_run(self._c_model, step):
            raise MemoryError("no memory for the step")
        return logits, states

    def _take_over(self, model: LoadedModel, capacity: Capacity, threads: int) -> native.CModel:
        module: Any = model.module
        config, base = model.config, module.model
        tied = same_storage(module.lm_head, base.embed_tokens)
        first = base.layers[0].self_attn
        self._layers = (native.CLayer * len(base.layers))()
        for i, layer in enumerate(base.layers):
            self._layers[i] = self._layer(layer, self._cache.keys[i], self._cache.values[i])
        positions = torch.arange(capacity.max_model_tokens)[None]
        cosines, sines = base.rotary_emb(torch.zeros(1), position_ids=positions)
        half = first.head_dim // 2
        head = self._packer.matrix(weight_of(module.lm_head), self._dense)
        embedding = head if tied else self._packer.matrix(weight_of(base.embed_tokens), self._dense)
        c_model = native.CModel(
            layers=len(base.layers),
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            width=first.head_dim,
            inner=config.intermediate_size,
            vocabulary=head.rows,
            block_tokens=capacity.block_tokens,
            threads=threads,
            short_cache=model.dtype is torch.bfloat16,
            short_sums=model.dtype is torch.bfloat16,
            epsilon=config.rms_norm_eps,
            scale=first.scaling,
            layer=cast(self._layers, POINTER(native.CLayer)),
            head=head,
            embedding=embedding,
            norm=self._packer.floats(base.norm.weight),
            cosines=self._packer.floats(cosines[0, :, :half]),
            sines=self._packer.floats(sines[0, :, :half]),
        )
        drop_weights(module.lm_head, base.embed_tokens)
        return c_model

    def _layer(self, layer: Any, keys: torch.Tensor, values: torch.Tensor) -> native.CLayer:
        attention, mlp = layer.self_attn, layer.mlp
        packer, dense = self._packer, self._dense
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        qkv = [weight_of(p) for p in projections]
        gate, up = weight_of(mlp.gate_proj), weight_of(mlp.up_proj)
        biases = [p.bias for p in projections]
        c_layer = native.CLayer(
            qkv=packer.matrix(stacked(qkv), self._wide if mixed(qkv) else dense),
            o=packer.matrix(weight_of(attention.o_proj), dense),
            gate_up=packer.pair(gate, up, self._wide if mixed((gate, up)) else dense),
            down=packer.matrix(weight_of(mlp.down_proj), dense),
            norm_in=packer.floats(layer.input_layernorm.weight),
            norm_mid=packer.floats(layer.post_attention_layernorm.weight),
            qkv_bias=None if biases[0] is None else packer.floats(torch.cat(biases)),
            o_bias=None if attention.o_proj.bias is None else packer.floats(attention.o_proj.bias),
            query_norm=packer.floats(attention.q_norm.weight) if hasattr(attention, "q_norm") else None,
            key_norm=packer.floats(attention.k_norm.weight) if hasattr(attention, "k_norm") else None,
            keys=keys.data_ptr(),
            values=values.data_ptr(),
        )
        drop_weights(*projections, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        return c_layer


def stored_type(model: LoadedModel) -> torch.dtype:
    """The type that plain matrices of a Llama-shaped model are kept in: its own, or a narrower one."""
    matrices = list(_plain_matrices(model.module))
    return narrowest(matrices) if matrices else model.dtype


def _plain_matrices(module: Any) -> Iterator[torch.Tensor]:
    for layer in module.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
            yield from plain_weight(linear)
        for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
            yield from plain_weight(linear)
    yield from plain_weight(module.lm_head)
    yield from plain_weight(module.model.embed_tokens)
