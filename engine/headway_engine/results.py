"""What a finished step changed: sequences grow or end, full blocks become findable, and events tell of it.

Knows nothing of how the step was planned or computed, or of what comes next.
"""

from collections.abc import Mapping

from headway_engine.rates import TokenRates
from headway_engine.roster import Roster
from headway_engine.sequence import (
    Event,
    FinishReason,
    Preempted,
    PromptOut,
    RequestId,
    SampledToken,
    Sequence,
    Step,
    TokenLogprob,
    TokenOut,
    VectorOut,
)

SCORES_IN_EVENT = 256
"""Log-probabilities of a prompt that travel in one event: whoever makes text of them can breathe between."""


class Results:
    """Takes the results of steps in, one step after the other."""

    def __init__(self, roster: Roster, rates: TokenRates, most_tokens: int) -> None:
        self._roster = roster
        self._rates = rates
        self._most_tokens = most_tokens  # of prompt and output; a sequence that has so many ends

    def take_in(
        self, step: Step, sampled: Mapping[RequestId, SampledToken], now_s: float
    ) -> tuple[Event, ...]:
        """What happened, in order. A sequence that ended meanwhile has no part in it."""
        roster, rates, pool = self._roster, self._rates, self._roster.pool
        events: list[Event] = [Preempted(sequence_id) for sequence_id in roster.take_preempted()]
        for chunk in step.chunks:
            sequence = chunk.sequence
            if roster.running.get(sequence.id) is not sequence:
                continue
            before, scored = sequence.computed, len(chunk.scored)
            sequence.computed = before + chunk.length
            if before // pool.block_tokens != sequence.computed // pool.block_tokens:
                pool.publish(sequence, before)
            if sequence.id in roster.unannounced:
                events.append(roster.announce(sequence))
            result = sampled.get(sequence.id)
            if scored and result is not None:
                self._tell_scores(sequence, result.scores, events)
            if chunk.samples or (scored and result is None):
                self._append(sequence, result, events)
                if rates.active:
                    rates.spend(sequence.request.tenant, 1, now_s)
            elif chunk.pools:
                self._give_vector(sequence, result, events)
            elif sequence.remaining == 0:
                events.append(roster.finish(sequence, FinishReason.LENGTH))
        return tuple(events)

    def _append(self, sequence: Sequence, sampled: SampledToken | None, events: list[Event]) -> None:
        if sampled is None:
            message = "the step gave no token for this sequence"
            events.append(self._roster.finish(sequence, FinishReason.ERROR, message))
            return
        sequence.tokens.append(sampled.token)
        events.append(TokenOut(sequence.id, sampled.token, sampled.logprob))
        sampling = sequence.request.sampling
        output_len = sequence.output_len
        if sampled.token in sampling.stop_token_ids and output_len >= sampling.min_tokens:
            events.append(self._roster.finish(sequence, FinishReason.STOP))
        elif output_len >= sampling.max_tokens or len(sequence.tokens) >= self._most_tokens:
            events.append(self._roster.finish(sequence, FinishReason.LENGTH))

    def _tell_scores(self, sequence: Sequence, scores: tuple[TokenLogprob, ...], events: list[Event]) -> None:
        sequence.scored += len(scores)
        for first in range(0, len(scores), SCORES_IN_EVENT):
            events.append(PromptOut(sequence.id, scores[first : first + SCORES_IN_EVENT]))

    def _give_vector(self, sequence: Sequence, result: SampledToken | None, events: list[Event]) -> None:
        if result is None or not result.vector:
            message = "the step gave no vector for this sequence"
            events.append(self._roster.finish(sequence, FinishReason.ERROR, message))
            return
        events.append(VectorOut(sequence.id, result.vector))
        events.append(self._roster.finish(sequence, FinishReason.STOP))
