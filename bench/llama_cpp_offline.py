"""llama.cpp in one process, one workload, no HTTP: prints a line `RESULT {json}` as offline.py does.

    PEER_PYTHON bench/llama_cpp_offline.py --model FILE.gguf --workload w64 [--parallel 64] [--cache streams]

The peer environment has llama-cpp-python; LLAMA_CPP_LIB_PATH names a folder with another libllama. Sequences
are batched continuously through `llama_decode`, 512 tokens a ubatch, greedy. llama.cpp knows two caches:

- `streams`: every sequence has rows of its own, so attention reads only them; but a ubatch takes the same
  number of tokens from each sequence, and only sequences with consecutive numbers. So a prompt is a call of
  its own, and when nobody waits for a free slot the last sequence moves into the first gap.
- `unified`: one pool, and every token's attention walks over all of it; decode tokens and prompt chunks share
  a ubatch.

The workload `one` answers the first 8 requests of w64 one after another, each alone.
"""

import argparse
import ctypes
import heapq
import json
import os
import resource
import sys
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import llama_cpp
import numpy as np
from workload import WORKLOADS, Item, alone_figures, drive, figures, named, played

STEP_TOKENS = 512
CACHE_TYPES = {"f32": 0, "f16": 1, "q8_0": 8, "bf16": 30}  # enum ggml_type, which the bindings know in part
FLASH = {
    "auto": llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}


@dataclass
class Sequence:
    """A request in a slot: its number there is llama.cpp's sequence id."""

    item: Item
    slot: int
    computed: int = 0  # tokens whose keys and values are in the cache
    made: list[int] = field(default_factory=list)

    @property
    def decoding(self) -> bool:
        """Whether the whole prompt has been computed."""
        return self.computed >= len(self.item.prompt)


Part = tuple[Sequence, int]
"""A sequence and how many of its next tokens to compute."""


class Batcher:
    """Continuous batching over one llama.cpp context."""

    def __init__(self, args: argparse.Namespace, longest: int) -> None:
        threads = len(os.sched_getaffinity(0))
        llama_cpp.llama_backend_init()
        quiet = llama_cpp.llama_log_callback(lambda level, text, _: None)
        self._keep = quiet  # ctypes frees a callback that nobody holds
        if not args.verbose:
            llama_cpp.llama_log_set(quiet, None)
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0
        model_params.use_extra_bufts = not args.no_repack
        self.model = llama_cpp.llama_model_load_from_file(os.fsencode(args.model), model_params)
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {args.model}")
        self.streams = args.cache == "streams"
        self.slots = args.parallel
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = args.parallel * (-(-longest // 256) * 256)
        params.n_batch = max(STEP_TOKENS, longest, args.parallel)
        params.n_ubatch = STEP_TOKENS
        params.n_seq_max = args.parallel
        params.n_threads = params.n_threads_batch = args.threads or threads
        params.kv_unified = not self.streams
        params.flash_attn_type = FLASH[args.flash_attention]
        params.type_k = params.type_v = CACHE_TYPES[args.cache_type]
        params.offload_kqv = False
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise SystemExit("llama.cpp cannot make a context: --verbose tells why")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self._allot(params.n_batch)
        self.reset()

    def reset(self) -> None:
        """Forget every sequence."""
        llama_cpp.llama_memory_clear(self.memory, False)
        self.free = list(range(self.slots))
        self.waiting: deque[Item] = deque()
        self.active: dict[int, Sequence] = {}
        self.finished: dict[int, list[int]] = {}

    def submit(self, item: Item, _: float) -> None:
        """Queue a request."""
        self.waiting.append(item)

    def turn(self, _: float, __: bool) -> list[tuple[int, bool]] | None:
        """Fill free slots, then compute one step."""
        while self.waiting and self.free and (not self.streams or self._room() > 0):
            slot = heapq.heappop(self.free)
            self.active[slot] = Sequence(self.waiting.popleft(), slot)
        if not self.active:
            return None
        tokens = self._streams_step() if self.streams else self._unified_step()
        if self.streams and not self.waiting:
            self._close_gaps()
        return tokens

    def _room(self) -> int:
        """Tokens of the step's budget that are left beside the sequences already in a slot."""
        return STEP_TOKENS - sum(
            1 if s.decoding else len(s.item.prompt) - s.computed for s in self.active.values()
        )

    def _streams_step(self) -> list[tuple[int, bool]]:
        """Each new prompt by itself, then one token of every sequence."""
        tokens = []
        for sequence in [s for s in self.active.values() if not s.decoding]:
            tokens += self._compute([(sequence, len(sequence.item.prompt))])
        parts = [(self.active[slot], 1) for slot in sorted(self.active)]
        return tokens + (self._compute(parts) if parts else [])

    def _unified_step(self) -> list[tuple[int, bool]]:
        """Decode tokens first, then prompt chunks up to the budget."""
        sequences = list(self.active.values())
        parts = [(s, 1) for s in sequences if s.decoding]
        left = STEP_TOKENS - len(parts)
        for sequence in sequences:
            if not sequence.decoding and left > 0:
                chunk = min(left, len(sequence.item.prompt) - sequence.computed)
                parts.append((sequence, chunk))
                left -= chunk
        return self._compute(parts)

    def _close_gaps(self) -> None:
        while self.free and self.active and (last := max(self.active)) > self.free[0]:
            gap = heapq.heappop(self.free)
            llama_cpp.llama_memory_seq_cp(self.memory, last, gap, -1, -1)
            self.active[gap] = self.active.pop(last)
            self.active[gap].slot = gap
            self._release(last)

    def _release(self, slot: int) -> None:
        llama_cpp.llama_memory_seq_rm(self.memory, slot, -1, -1)
        heapq.heappush(self.free, slot)

    def _allot(self, size: int) -> None:
        """The arrays of a batch, once: the pointers in it never change."""
        self._token = np.zeros(size, np.int32)
        self._position = np.zeros(size, np.int32)
        self._sequence = np.zeros(size, np.int32)
        self._wanted = np.zeros(size, np.int8)
        self._count = np.ones(size, np.int32)
        one = ctypes.POINTER(llama_cpp.llama_seq_id)
        self._owners = (one * size)(
            *(ctypes.cast(self._sequence.ctypes.data + i * self._sequence.itemsize, one) for i in range(size))
        )
        self._batch = llama_cpp.llama_batch(
            n_tokens=0,
            token=self._token.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token)),
            embd=None,
            pos=self._position.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_pos)),
            n_seq_id=self._count.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            seq_id=ctypes.cast(self._owners, ctypes.POINTER(one)),
            logits=self._wanted.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def _compute(self, parts: list[Part]) -> list[tuple[int, bool]]:
        """One llama_decode. The requests that got a token, and whether it was the last."""
        used = 0
        wanting = []
        self._wanted[:] = 0
        for sequence, count in parts:
            start, end = sequence.computed, sequence.computed + count
            span = slice(used, used + count)
            self._token[span] = sequence.made[-1:] if sequence.decoding else sequence.item.prompt[start:end]
            self._position[span] = range(start, end)
            self._sequence[span] = sequence.slot
            sequence.computed = end
            used += count
            if sequence.decoding:
                self._wanted[used - 1] = 1
                wanting.append(sequence)
        self._batch.n_tokens = used
        code = llama_cpp.llama_decode(self.context, self._batch)
        if code != 0:
            raise RuntimeError(f"llama_decode: {code}")
        if not wanting:
            return []
        logits = np.ctypeslib.as_array(
            llama_cpp.llama_get_logits(self.context), shape=(len(wanting), self.vocabulary)
        )
        tokens = []
        for sequence, id in zip(wanting, logits.argmax(axis=1).tolist(), strict=True):
            sequence.made.append(id)
            ended = len(sequence.made) == sequence.item.output_tokens
            if ended:
                self.finished[sequence.item.id] = sequence.made
                del self.active[sequence.slot]
                self._release(sequence.slot)
            tokens.append((sequence.item.id, ended))
        return tokens


def main() -> None:
    """Run llama.cpp once."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument("--workload", default="w64", choices=WORKLOADS)
    parser.add_argument("--parallel", type=int, default=64, help="sequences at once")
    parser.add_argument("--cache", default="streams", choices=["streams", "unified"])
    parser.add_argument("--cache-type", default="bf16", choices=CACHE_TYPES, help="of keys and values")
    parser.add_argument("--flash-attention", default="auto", choices=FLASH)
    parser.add_argument("--threads", type=int, default=0, help="0: one for each core of this process")
    parser.add_argument("--no-repack", action="store_true", help="keep weights as they are in the file")
    parser.add_argument("--verbose", action="store_true", help="llama.cpp's own log")
    args = parser.parse_args()
    alone = args.workload == "one"
    items = named(args.workload)
    if alone:
        args.parallel = 1
    batcher = Batcher(args, max(len(item.prompt) + item.output_tokens for item in items))
    drive([Item(i.id, i.prompt, i.output_tokens, 0.0) for i in items[:8]], batcher.submit, batcher.turn)
    batcher.reset()
    wall_s, timings = played(args.workload, items, batcher.submit, batcher.turn)
    runner = f"{Path(args.model).stem}, {args.cache}, {args.parallel} sequences, flash {args.flash_attention}"
    result = {"engine": "llama.cpp", "runner": runner, **figures(items, wall_s, timings)}
    if alone:
        result |= alone_figures(items, timings)
    result["rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
