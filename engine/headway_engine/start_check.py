"""The check at start: does a way of computing this model give the model's own logits?

The principle: the truth is the model's own forward pass in float32, and only what rounding explains may
differ from it. Three trials, from the cheapest:

- a small copy of the model (`small_copy`) in float32, where rounding explains next to nothing, and small
  faults show;
- the copy in the model's own type, against how far the model's own pass in that type is from the truth: what
  only the kernels of that type do wrong shows best in few layers;
- the whole model in its own type, likewise: every layer's weights and cache.

Knows nothing of what is done about a runner that fails (`paths`).
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

import msgspec
import torch

from headway_engine.check_steps import Rows, compute, texts
from headway_engine.devices import dtype_name
from headway_engine.float32_pass import float32_logits, logits
from headway_engine.logs import fields
from headway_engine.model import LoadedModel
from headway_engine.model_error import ModelError, in_words
from headway_engine.protocol import Capacity
from headway_engine.small_copy import CannotCopy, SmallCopy, small_copy
from headway_engine.stepping import StepRunner

log = logging.getLogger(__name__)

SMALL_TOKENS = 51
"""Tokens of each text that the copy reads: three blocks of 16 and a rest. More where blocks are larger."""

WHOLE_TOKENS = 24
"""Tokens of each text that the whole model reads: past one block of 16, and little to compute."""

COLUMNS = 512
"""Tokens, from all over the vocabulary, whose logits are compared, beside those of the texts."""

SMALL_FLOAT32_WORST = 3e-4
"""Most that a row of the copy in float32 may differ, as a share of the row's length. Good: 4e-7 to 2e-5 (all
architectures, runners and instruction sets of the tests, 30 seeds; SmolLM2: 8e-6). The smallest fault that
must be seen is 1.5e-3: a soft cap at 50 left out of SmolLM2."""

WHOLE_FLOAT32_WORST = 1e-3
"""The same of a whole model in float32, whose many layers add rounding up. Good: 3e-7 to 1e-4."""

ROUGH_WORST = 0.25
"""The same for what cannot be computed in float32 (the code of some quantizations insists on a type): what
rounding does is not known then, and only what is plainly wrong is seen."""


@dataclass(frozen=True, slots=True)
class Times:
    """How many times the error of the model's own pass in half precision an error may be."""

    median: float
    worst: float
    quantile: float = 1.0  # which row counts as the worst, in ours and in the model's own


DENSE = Times(median=1.5, worst=4.0)
"""Good: medians of 0.13 to 1.32 and worst rows of 0.1 to 3.2 in 5,000 trials of tiny models; of SmolLM2 0.13
to 1.1 and 0.1 to 1.6. Kernels that keep sums in float32 are below 1, what rounds as the model's own code does
is at 1, and the smaller a model the more they scatter."""

EXPERTS = Times(median=3.0, worst=8.0, quantile=0.8)
"""The same for a mixture of experts. Rounding sends a token to another expert now and then, in the model's
own pass or in ours, by chance: its row is another one then (errors of 0.2 to 0.6), and later ones see it."""

Build = Callable[[LoadedModel, Capacity], StepRunner]
"""Makes a runner, which may take the weights of the model's module over."""


class Fault(StrEnum):
    """What is wrong with logits."""

    DIFFERENT = "wrong logits"
    NOT_FINITE = "logits not finite"


@dataclass(frozen=True, slots=True)
class Wrong:
    """A trial that was not passed."""

    fault: Fault
    words: str


@dataclass(frozen=True, slots=True)
class Bounds:
    """The largest relative errors of rows that rounding explains."""

    median: float
    worst: float
    quantile: float = 1.0  # which row counts as the worst


@dataclass(frozen=True, slots=True)
class Trial:
    """Texts, the logits that they should give, and what rounding explains."""

    name: str  # in words, for logs
    ids: torch.Tensor  # [sequences, tokens]
    columns: torch.Tensor  # the tokens whose logits are compared
    truth: torch.Tensor  # [sequences, tokens, columns] float32
    noise: torch.Tensor | None  # [sequences, tokens] error of the model's own pass; None: a bound is known
    most: float  # that bound, or what is allowed without any noise
    times: Times = DENSE
    wide: bool = False  # of the copy in float32, whatever the model's type

    def bounds(self, rows: Rows) -> Bounds:
        """What may differ in these rows."""
        if self.noise is None:
            return Bounds(self.most, self.most)
        noise = self.noise[rows.sequences, rows.positions]
        return Bounds(
            max(self.most, self.times.median * float(noise.median())),
            max(self.most, self.times.worst * float(noise.quantile(self.times.quantile))),
            self.times.quantile,
        )

    def judge(self, rows: Rows) -> tuple[Wrong | None, str]:
        """What is wrong with these rows, and their errors in words."""
        found = rows.logits
        if not bool(torch.isfinite(found).all()):
            return Wrong(Fault.NOT_FINITE, f"{self.name}: its logits are not finite, the model's own are"), ""
        bounds = self.bounds(rows)
        errors = relative_errors(found, self.truth[rows.sequences, rows.positions])
        median, worst = float(errors.median()), float(errors.quantile(bounds.quantile))
        words = f"median {median:.2g} of {bounds.median:.2g}, worst {worst:.2g} of {bounds.worst:.2g}"
        if median <= bounds.median and worst <= bounds.worst:
            return None, words
        why = f"{self.name}: its logits differ from the model's own in float32 by more than rounding explains"
        return Wrong(Fault.DIFFERENT, f"{why} ({words} allowed)"), words


def relative_errors(found: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Of rows [..., columns]: the length of the difference over the length of the truth, or a tenth of what
    rows have in general: some tokens (those of padding) have logits of zero."""
    differences: torch.Tensor = torch.linalg.vector_norm(found - truth, dim=-1)
    lengths: torch.Tensor = torch.linalg.vector_norm(truth, dim=-1)
    return differences / torch.maximum(lengths, lengths.median() / 10)


class StartCheck:
    """The trials of one model. Holds logits, and nothing of the model."""

    def __init__(self, model: LoadedModel, capacity: Capacity) -> None:
        """Raises ModelError for a model whose own logits are not finite: that no runner can mend."""
        self._capacity, self._dtype = capacity, model.dtype
        size = capacity.block_tokens
        tokens = min(max(SMALL_TOKENS, size + SMALL_TOKENS // 2), capacity.max_model_tokens)
        self._ids = texts(model, tokens)
        vocabulary = int(model.config.vocab_size)
        spread = range(0, vocabulary, max(1, vocabulary // COLUMNS))
        self._kept = sorted({*spread, *self._ids.flatten().tolist()})
        names = {name for name, _ in model.module.named_modules()}
        experts = any(word in name for name in names for word in ("expert", "router", "moe"))
        self._times = EXPERTS if experts else DENSE
        self._whole = self._whole_trial(model, min(WHOLE_TOKENS, tokens, capacity.kv_blocks // 2 * size))
        self._small: list[Trial] | None = None  # made with the first copy

    def small(self, model: LoadedModel, build: Build, name: str) -> Wrong | None:
        """What is wrong with runners that are built so, seen on a small copy of the model, which is left as
        it is. `name` is for the log."""
        try:
            copy = small_copy(model, self._kept)
        except CannotCopy as error:
            if self._small is None:
                _left_out("a small copy", error)
            self._small = []
            return None
        wide = copy.widened()
        if self._small is None:
            self._small = list(self._small_trials(copy, wide))
        tokens, size = self._ids.shape[1], self._capacity.block_tokens
        capacity = msgspec.structs.replace(
            self._capacity,
            max_batch_tokens=2 * tokens,
            max_batch_sequences=4,  # more than there are, so that recorded decodes have padding rows
            kv_blocks=2 * -(-tokens // size) + 3,
            max_model_tokens=tokens,
        )
        for trial in self._small:
            runner = build((wide if trial.wide else copy).model, capacity)
            if (wrong := _tried(trial, runner, name, capacity.kv_blocks)) is not None:
                return wrong
        return None

    def whole(self, runner: StepRunner, name: str) -> Wrong | None:
        """What is wrong with this runner of the whole model; to be asked before it serves anybody."""
        return None if self._whole is None else _tried(self._whole, runner, name, self._capacity.kv_blocks)

    def _whole_trial(self, model: LoadedModel, tokens: int) -> Trial | None:
        """One text for both sequences: that they are kept apart is seen on the copy. Raises ModelError."""
        ids = self._ids[:1, :tokens]
        columns = torch.tensor(self._kept, device=model.device)
        name = f"the whole model in {dtype_name(model.dtype)}"
        if not tokens:
            _left_out(name, "the cache has no two blocks")
            return None
        own = logits(model.module, ids)
        finite = bool(torch.isfinite(own).all())
        own = own[..., columns]
        if model.dtype is torch.float32 and finite:
            return Trial(name, ids.expand(2, -1), columns, own.expand(2, -1, -1), None, WHOLE_FLOAT32_WORST)
        truth = self._float32(name, lambda: float32_logits(model.module, ids, columns))
        if not finite:
            raise ModelError(_not_finite(model, truth))
        return self._half_trial(name, ids, columns, own, truth)

    def _small_trials(self, copy: SmallCopy, wide: SmallCopy) -> Iterator[Trial]:
        ids = torch.searchsorted(torch.tensor(copy.ids, device=self._ids.device), self._ids)
        columns = torch.arange(len(copy.ids), device=ids.device)
        layers = f"{len(copy.model.layer_shapes)} layers"
        name = f"{layers} in float32"
        truth = self._float32(name, lambda: logits(wide.model.module, ids))
        if truth is not None:
            yield Trial(name, ids, columns, truth, None, SMALL_FLOAT32_WORST, wide=True)
        if self._dtype is not torch.float32:
            name, own = f"{layers} in {dtype_name(self._dtype)}", logits(copy.model.module, ids)
            if bool(torch.isfinite(own).all()):
                yield self._half_trial(name, ids, columns, own, truth)
            else:
                _left_out(name, "without the other layers its numbers overflow")

    def _half_trial(
        self,
        name: str,
        ids: torch.Tensor,
        columns: torch.Tensor,
        own: torch.Tensor,
        truth: torch.Tensor | None,
    ) -> Trial:
        """In half precision. `own` are the logits of the model's own pass, [sequences, tokens, columns]."""
        ids, right = ids.expand(2, -1), (own if truth is None else truth).expand(2, -1, -1)
        if truth is None:
            return Trial(name, ids, columns, right, None, ROUGH_WORST)
        noise = relative_errors(own, truth).expand(2, -1)
        least = torch.finfo(self._dtype).eps / 4
        return Trial(name, ids, columns, right, noise, least, self._times)

    def _float32(self, name: str, work: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - what modelling code raises that insists on its type varies
            _left_out(name, error)
            return None


def _tried(trial: Trial, runner: StepRunner, name: str, blocks: int) -> Wrong | None:
    began_s = time.monotonic()
    wrong, errors = trial.judge(compute(runner, trial.ids, trial.columns, blocks))
    took_s = round(time.monotonic() - began_s, 3)
    errors = errors or "not finite"
    log.info(fields("start-check", path=name, trial=trial.name, errors=errors, seconds=took_s))
    return wrong


def _not_finite(model: LoadedModel, truth: torch.Tensor | None) -> str:
    """Why the model itself gives no numbers, and what to do."""
    which = f"model: {model.description}: its own logits for plain text are not finite"
    if truth is not None and bool(torch.isfinite(truth).all()):
        return f"{which} in {dtype_name(model.dtype)}, and are in float32; set dtype to bfloat16 or float32"
    return f"{which}: its weights are broken; fetch or convert them anew"


def _left_out(what: str, why: Exception | str) -> None:
    reason = in_words(why) if isinstance(why, Exception) else why
    log.warning(fields("start-check-left-out", trial=what, why=reason))
