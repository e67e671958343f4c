"""A Llama-shaped model as few large operations, with the weights of the transformers module.

One step is one row of tokens; whose they are is the batch's business (`attention.PagedBatch`). Rotary tables
come from the module itself, so every fixed scaling of it is right here too. Nothing here looks at a value, so
a graph can hold it. Knows nothing of sequences, of sampling, or of what the device is.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import embedding, linear, rms_norm, silu

from headway_engine.attention import PagedBatch


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights."""

    qkv: torch.Tensor  # [(heads + 2 * kv_heads) * width, hidden]
    qkv_bias: torch.Tensor | None
    o: torch.Tensor
    o_bias: torch.Tensor | None
    gate_up: torch.Tensor  # [2 * inner, hidden]
    down: torch.Tensor
    norm_in: torch.Tensor
    norm_mid: torch.Tensor
    query_norm: torch.Tensor | None  # [width]
    key_norm: torch.Tensor | None


class LeanLlama:
    """The forward pass. The module it is made of is emptied: it cannot compute any more."""

    def __init__(self, module: Any, config: Any, max_positions: int) -> None:
        base = module.model
        first = base.layers[0].self_attn
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._width: int = first.head_dim
        self._scale: float = first.scaling
        self._epsilon: float = config.rms_norm_eps
        self._embedding = base.embed_tokens.weight.detach()
        self._head = module.lm_head.weight.detach()
        self._norm = base.norm.weight.detach()
        positions = torch.arange(max_positions, device=self._norm.device)[None]
        cosines, sines = base.rotary_emb(self._norm, position_ids=positions)
        half = self._width // 2
        self._cosines, self._sines = cosines[0, :, :half].contiguous(), sines[0, :, :half].contiguous()
        self._layers = [_take_over(layer) for layer in base.layers]

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding: token ids are below it."""
        return int(self._embedding.shape[0])

    @property
    def hidden_size(self) -> int:
        """Width of a hidden state."""
        return int(self._embedding.shape[1])

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        """Last hidden states, normed: [tokens, hidden], from ids [tokens] and positions [tokens]."""
        cosines = self._cosines[positions][:, None, :]
        sines = self._sines[positions][:, None, :]
        x = embedding(ids, self._embedding)
        for number, layer in enumerate(self._layers):
            x = x + self._attention(number, layer, self._normed(x, layer.norm_in), cosines, sines, batch)
            gate, up = linear(self._normed(x, layer.norm_mid), layer.gate_up).chunk(2, dim=-1)
            x = x + linear(silu(gate) * up, layer.down)
        return self._normed(x, self._norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, vocabulary] of hidden states [rows, hidden]."""
        return linear(hidden, self._head)

    def _attention(
        self,
        number: int,
        layer: Layer,
        x: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        batch: PagedBatch,
    ) -> torch.Tensor:
        tokens = x.shape[0]
        heads, kv_heads = self._heads, self._kv_heads
        qkv = linear(x, layer.qkv, layer.qkv_bias).view(tokens, heads + 2 * kv_heads, self._width)
        turned, value = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = turned[:, :heads], turned[:, heads:]
            turned = torch.cat(
                (self._normed(query, layer.query_norm), self._normed(key, layer.key_norm)), dim=1
            )
        turned = _rotate(turned, cosines, sines)
        attended = batch.attend(
            number,
            turned[:, :heads].transpose(0, 1)[None],
            turned[:, heads:].transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            self._scale,
        )
        return linear(attended.reshape(tokens, -1), layer.o, layer.o_bias)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight.shape, weight, self._epsilon)


def _rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotary position: the two halves of [tokens, heads, width] are the parts of complex numbers."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cosines - right * sines, right * cosines + left * sines), dim=-1)


def _take_over(layer: Any) -> Layer:
    """A layer's weights, fused; the module's own are given back at once, so that few are there twice."""
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    taken = Layer(
        qkv=torch.cat([p.weight.detach() for p in projections]),
        qkv_bias=None if projections[0].bias is None else torch.cat([p.bias.detach() for p in projections]),
        o=attention.o_proj.weight.detach(),
        o_bias=None if attention.o_proj.bias is None else attention.o_proj.bias.detach(),
        gate_up=torch.cat([mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()]),
        down=mlp.down_proj.weight.detach(),
        norm_in=layer.input_layernorm.weight.detach(),
        norm_mid=layer.post_attention_layernorm.weight.detach(),
        query_norm=attention.q_norm.weight.detach() if hasattr(attention, "q_norm") else None,
        key_norm=attention.k_norm.weight.detach() if hasattr(attention, "k_norm") else None,
    )
    for linear_module in (*projections, mlp.gate_proj, mlp.up_proj):
        linear_module.weight.data = linear_module.weight.data.new_empty(0)
    return taken
