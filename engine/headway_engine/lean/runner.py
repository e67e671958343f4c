"""The runner for Llama-shaped models on an accelerator: few operations a layer, decode steps as graphs.

A step of decodes alone is a replay where its sizes were recorded; anything else is computed piece by piece
with the same weights and kernels. Runs on any device, so that its promise is tested on a CPU.
"""

import logging

import msgspec
import numpy as np
import torch

from headway_engine.attention import PagedBatch, gather_cap_bytes
from headway_engine.lean.batches import batch_of
from headway_engine.lean.graphs import Bucket, DecodeGraphs, DecodeInputs, DecodeRows, Recorder, buckets
from headway_engine.lean.kernels import GatherKernel, KernelBatch, PagedKernel, send
from headway_engine.lean.llama import LeanLlama
from headway_engine.lean.picker import DevicePicker
from headway_engine.model import LoadedModel
from headway_engine.protocol import Capacity
from headway_engine.sequence import Chunk
from headway_engine.stepping import StepRunner, logit_rows

log = logging.getLogger(__name__)


class LeanRunner(StepRunner):
    """The model's module is emptied: it cannot compute any more."""

    name = "lean"

    def __init__(
        self,
        model: LoadedModel,
        capacity: Capacity,
        kernel: PagedKernel | None = None,
        recorder: Recorder | None = None,
        sizes: list[Bucket] | None = None,
    ) -> None:
        """Without a `kernel`, torch's own attention is used; without a `recorder`, nothing is recorded.
        `sizes` are what is recorded, if not all that the capacity allows."""
        # One block more, which nobody owns: padding rows of graphs write to it.
        roomy = msgspec.structs.replace(capacity, kv_blocks=capacity.kv_blocks + 1)
        super().__init__(model, roomy, DevicePicker())
        self._kernel = kernel
        self._graphs: DecodeGraphs | None = None
        with torch.inference_mode():
            self._llama = LeanLlama(model.module, model.config, capacity.max_model_tokens)
        if recorder is not None:
            with torch.inference_mode():
                self._graphs = self._record(capacity, recorder, sizes)
        self._cache.warm()
        self.name = f"lean, {kernel.name if kernel else 'torch'} attention, {self.graphs} decode graphs"

    @property
    def graphs(self) -> int:
        """Sizes of decode steps that were recorded."""
        return self._graphs.recorded if self._graphs else 0

    @property
    def embedding_size(self) -> int:
        """See Runner."""
        return self._llama.hidden_size

    def _forward_hidden(self, chunks: list[Chunk], rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self._hidden(chunks)
        return self._llama.logits(_pick(hidden, logit_rows(chunks))), _pick(hidden, rows)

    def _forward(self, chunks: list[Chunk]) -> torch.Tensor:
        rows = logit_rows(chunks)
        tokens = sum(chunk.length for chunk in chunks)
        if self._graphs is not None and tokens == len(chunks) and len(rows) > 0:
            logits = self._graphs.replay([self._decode(chunk) for chunk in chunks])
            if logits is not None:
                return logits if len(rows) == tokens else logits[rows]
        hidden = self._hidden(chunks)
        return self._llama.logits(hidden if len(rows) == tokens else _pick(hidden, rows))

    def _hidden(self, chunks: list[Chunk]) -> torch.Tensor:
        """Last hidden states, normed, of every row of the step: [tokens, hidden]."""
        ids: list[int] = []
        places = [np.arange(c.start, c.start + c.length) for c in chunks]
        for chunk in chunks:
            ids.extend(chunk.sequence.tokens[chunk.start : chunk.start + chunk.length])
        self._check_ids(ids)
        sent = send([np.array(ids), np.concatenate(places)], self._model.device)
        return self._llama.hidden(sent[0].long(), sent[1].long(), self._batch(chunks))

    def _decode(self, chunk: Chunk) -> tuple[int, int, list[int]]:
        token = chunk.sequence.tokens[chunk.start]
        self._check_ids([token])
        return token, chunk.start, chunk.sequence.block_table

    def _check_ids(self, ids: list[int]) -> None:
        """A token outside the vocabulary would end the use of the device by this process, not a step."""
        if min(ids) < 0 or max(ids) >= self._llama.vocabulary:
            raise ValueError(f"a token id is outside the vocabulary of {self._llama.vocabulary}")

    def _batch(self, chunks: list[Chunk]) -> PagedBatch:
        return batch_of(chunks, self._cache, self._kernel, self._model.device)

    def _record(self, capacity: Capacity, recorder: Recorder, sizes: list[Bucket] | None) -> DecodeGraphs:
        kernel = self._kernel or GatherKernel()
        size, device = capacity.block_tokens, self._model.device
        widest = -(-capacity.max_model_tokens // size)
        inputs = DecodeInputs(capacity.max_batch_sequences, widest, size, capacity.kv_blocks, device)

        def forward(rows: DecodeRows) -> torch.Tensor:
            batch = KernelBatch(
                self._cache, kernel, rows.row_blocks, rows.row_offsets, rows.decodes, prefills=None
            )
            return self._llama.logits(self._llama.hidden(rows.ids, rows.positions, batch))

        out = torch.empty(
            (capacity.max_batch_sequences, self._llama.vocabulary), dtype=self._model.dtype, device=device
        )
        graphs = DecodeGraphs(inputs, forward, out, whole_width=kernel.reads_padding)
        if sizes is None:
            # What copies whole tables is bounded as it is elsewhere.
            cap = gather_cap_bytes(device) // self._cache.block_bytes if kernel.reads_padding else None
            sizes = buckets(
                capacity.max_batch_sequences, widest, by_width=kernel.reads_padding, most_cells=cap
            )
        graphs.record(recorder, sizes)
        return graphs


def _pick(hidden: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return hidden[send([np.array(rows, dtype=np.int32)], hidden.device)[0].long()]
