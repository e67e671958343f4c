"""An engine whose model is a toy: the real front end, channel, loop and scheduler, and no torch.

The toy continues the alphabet ("abc" is followed by "defgh..."), repeats the last character when it is not a
letter, ends its text after a full stop, and raises on a prompt with a skull (☠) in it: at once, or with
two of them in mid-stream. Its vector of a prompt tells how long it is and where it ends. Run as a program, it
takes the engine's own arguments. FAKE_STEP_S slows its steps; FAKE_LOAD says how loading goes (`ok`, `fail`,
`slow`); FAKE_BROKEN makes every step fail; FAKE_SAYS is what it answers to everything; FAKE_TEMPLATE is its
chat template; FAKE_CONTEXT is the longest it takes.
"""

import asyncio
import json
import math
import os
import shutil
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from headway_engine import __main__ as engine
from headway_engine import config, core_process, logs
from headway_engine.messages import Embeddings, Ready
from headway_engine.model_source import default_cache_dir, resolve
from headway_engine.protocol import Capacity
from headway_engine.scheduler import Scheduler
from headway_engine.sequence import NO_TOKEN, Chunk, Pooling, RequestId, SampledToken, Step, TokenLogprob
from headway_engine.text import Tokeniser

COMMAND = (sys.executable, str(Path(__file__).resolve()))
END = 2  # <|im_end|> of the byte tokenizer
CAPACITY = Capacity(
    max_batch_tokens=2048, max_batch_sequences=64, kv_blocks=512, block_tokens=16, max_model_tokens=1024
)


class Toy:
    """The toy model, as a runner."""

    def __init__(
        self, tokeniser: Tokeniser, step_s: float = 0.0, broken: bool = False, says: str = ""
    ) -> None:
        self._ids = [
            tokeniser.encode(bytes([b]).decode("latin-1"), add_special_tokens=False) for b in range(128)
        ]
        self._byte_of = {ids[0]: b for b, ids in enumerate(self._ids)}
        self._decode = tokeniser.decode
        self._skull = tokeniser.encode("☠", add_special_tokens=False)
        self._step_s = step_s
        self._broken = broken
        self._says = [*tokeniser.encode(says, add_special_tokens=False), END] if says else []

    def run(self, step: Step) -> dict[RequestId, SampledToken]:
        if self._step_s:
            time.sleep(self._step_s)
        if self._broken:
            raise RuntimeError("the device is gone")
        made = {c.sequence.id: self._result(c) for c in step.chunks if self._check(c).samples or c.scored}
        for c in step.chunks:
            if c.pools:
                made[c.sequence.id] = SampledToken(NO_TOKEN, vector=toy_vector(c.sequence.tokens))
        return made

    def _check(self, chunk: Chunk) -> Chunk:
        prompt = chunk.sequence.request.prompt
        in_time = _contains(prompt, self._skull * 2) and chunk.sequence.output_len < 5
        if _contains(prompt, self._skull) and not in_time:
            raise RuntimeError("a poisoned prompt")
        return chunk

    def _result(self, chunk: Chunk) -> SampledToken:
        """What it samples and scores: a token of the prompt has minus its position, and itself as the first
        of the likeliest."""
        out = self._sample(chunk) if chunk.samples else SampledToken(NO_TOKEN)
        tokens, count = chunk.sequence.tokens, chunk.sequence.request.sampling.prompt_logprobs
        scores = tuple(
            TokenLogprob(-float(p + 1), tuple((tokens[p + 1] + i, -p - 1.0 - i) for i in range(count)))
            for p in chunk.scored
        )
        return SampledToken(out.token, out.logprob, scores)

    def _sample(self, chunk: Chunk) -> SampledToken:
        sequence = chunk.sequence
        sampling = sequence.request.sampling
        token = (
            self._says[sequence.output_len % len(self._says)]
            if self._says
            else self.following(sequence.tokens)
        )
        if (
            not self._says
            and token == END
            and (END not in sampling.stop_token_ids or sequence.output_len < sampling.min_tokens)
        ):
            token = self._ids[ord("!")][0]
        if sampling.logprobs < 0:
            return SampledToken(token)
        top = tuple((token + i, -0.5 - i) for i in range(sampling.logprobs))
        return SampledToken(token, TokenLogprob(-0.5, top))

    def following(self, tokens: list[int]) -> int:
        """The one token that may follow."""
        byte = self._byte_of.get(tokens[-1])
        if byte is None:  # part of a character of several bytes: say the whole character again
            return self._again(tokens)
        letter = chr(byte)
        if letter == ".":
            return END
        if letter in "zZ":
            return self._ids[byte - 25][0]
        return self._ids[byte + 1 if letter.isalpha() else byte][0]

    def _again(self, tokens: list[int]) -> int:
        for length in (2, 3, 4):
            for cut in range(length):
                end = len(tokens) - cut
                character = self._decode(tokens[max(0, end - length) : end])
                if len(character) == 1 and character != "\ufffd":
                    return tokens[end - length + cut]
        return tokens[-1]


def toy_vector(tokens: Sequence[int]) -> bytes:
    """Three dimensions of length 1."""
    parts = (1.0, float(len(tokens)), float(tokens[-1]))
    return array("f", (part / math.hypot(*parts) for part in parts)).tobytes()


def _contains(tokens: tuple[int, ...], part: list[int]) -> bool:
    return any(list(tokens[i : i + len(part)]) == part for i in range(len(tokens) - len(part) + 1))


def tokenizer_dir() -> Path:
    """The byte tokenizer of random models, with FAKE_TEMPLATE where there is one."""
    folder = resolve("random://llama?vocab=300", "main", default_cache_dir()).tokenizer_dir
    assert folder is not None
    template = os.environ.get("FAKE_TEMPLATE")
    if template is None:
        return folder
    own = Path(tempfile.mkdtemp(prefix="fake-tokenizer-"))
    shutil.copy(folder / "tokenizer.json", own)
    (own / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return own


def load(settings: config.EngineConfig, progress: Callable[[str], None]) -> core_process.Core:
    """What core_process.load_model does, with the toy."""
    progress("loading a toy")
    match os.environ.get("FAKE_LOAD", "ok"):
        case "fail":
            raise ValueError("the toy is broken")
        case "slow":
            time.sleep(3600)
    folder = tokenizer_dir()
    capacity = msgspec.structs.replace(
        CAPACITY, max_model_tokens=int(os.environ.get("FAKE_CONTEXT", CAPACITY.max_model_tokens))
    )
    limits = core_process.starting_limits(settings, capacity)
    toy = Toy(
        Tokeniser(folder),
        float(os.environ.get("FAKE_STEP_S", "0")),
        "FAKE_BROKEN" in os.environ,
        os.environ.get("FAKE_SAYS", ""),
    )
    ready = Ready(
        capacity=capacity,
        limits=limits,
        model="a toy",
        device="none",
        dtype="none",
        runner="toy",
        tokenizer_dir=str(folder),
        stop_token_ids=(END,),
        grammars=False,  # a toy does not listen
        embeddings=Embeddings(pooling=Pooling.LAST, dimensions=3),
    )
    scheduler = Scheduler(capacity, limits, tenants=core_process.tenant_policy(settings))
    fifo = os.environ.get("FAKE_DISPROOF")  # opening it waits for whoever writes the reason
    disproof = Path(fifo).read_text if fifo else None
    return core_process.Core(scheduler, toy.run, ready, disproof=disproof)


def main(argv: list[str]) -> int:
    if argv[0] == "core":
        return core_process.main(argv[1:], load)
    settings = config.parse(argv)
    logs.configure(settings.log_level, settings.log_format)
    return asyncio.run(engine.serve(settings, argv, (*COMMAND, "core")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
