"""Room in the front end for the log-probabilities of prompts: one bound for all calls in flight together.

An answer with scores is held until it is whole, and each call's own bound says nothing of how many there are.
What finds no room is refused and told to come back: a line of waiting calls would hold their prompts, and be
a second queue beside the fair one. Knows nothing of what is scored.
"""

from headway_engine.answers import ApiError
from headway_engine.bodies import MAX_SCORES

MOST_IN_FLIGHT = 2 * MAX_SCORES
"""Values of all calls: two of the largest, or hundreds of the usual ones. Each takes 150 to 200 bytes, and a
call's for a moment half as much again, while its answer is written."""

RETRY_AFTER_S = 2.0


class ScoreRoom:
    """How many values the calls in flight may have between them."""

    def __init__(self, most: int = MOST_IN_FLIGHT) -> None:
        self.most = most
        self.taken = 0

    def take(self, values: int) -> bool:
        """Whether there is room for so many. They have it until `give_back`."""
        if values and self.taken and self.taken + values > self.most:
            return False
        self.taken += values
        return True

    def give_back(self, values: int) -> None:
        self.taken -= values

    def refusal(self, values: int) -> ApiError:
        """A 429 in words, for a call that found no room."""
        return ApiError(
            429,
            f"logprobs: the calls in flight have {self.taken} log-probabilities of prompts and this one "
            f"{values}; all of them together may have {self.most}",
            param="logprobs",
            code="scores_full",
            retry_after_s=RETRY_AFTER_S,
        )
