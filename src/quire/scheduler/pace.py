"""StepPace: how many tokens of prompts a step may compute, so that nobody who generates waits longer than allowed.

Each request that generates has one token in every step, so the time between two of them is that of a step, and what
makes a step long is the prompts in it. The pace measures steps. One with a prompt tells what the tokens of the prompt
cost beyond a step without any, and so how many fit into the time that the operator named:

    limit = tokens of the prompt * (time allowed - step of decodes) / (time of the step - step of decodes)

Only the last steps count, because the cost changes: a token of a prompt costs more the longer the text before it is,
and a step of decodes more the more there are. A limit falls at once and at most doubles in a step, because few tokens
say little of many: while a step waits for memory, its first tokens cost nothing.

The engine passes each new limit to the scheduler as a command. So the scheduler reads no clock, the step log has every
limit, and a replay needs no measurement.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from quire.core.step import StepPlan

SHARE_OF_TIME: Final = 0.8
"""The part of the time allowed that a step is planned to take, because equal steps take unequal times."""

FIRST_LIMIT: Final = 64
UNIT: Final = 16
"""Limits are multiples of this, and no less: a prompt goes on even if the time allowed is too short for any."""

WEIGHT_OF_NEW: Final = 0.25
"""How much a step of decodes changes what such steps are taken to cost."""


class _Submitted(NamedTuple):
    num_prompt_tokens: int
    at_s: float


class StepPace:
    """Turns measured steps into a limit. `allowed_ms`: the time between two tokens of a request."""

    def __init__(self, allowed_ms: float) -> None:
        self._target_s = SHARE_OF_TIME * allowed_ms / 1e3
        self._decodes_s: float | None = None  # of a step without prompts
        self._under_way: deque[_Submitted] = deque()
        self._last_result_s = float("-inf")
        self.limit = FIRST_LIMIT
        """How many tokens of prompts a step may have, besides one for each request."""

    def note_submitted(self, plan: StepPlan, now_s: float) -> None:
        """A step begins, or will once those before it have ended. Mutates."""
        self._under_way.append(_Submitted(plan.num_tokens - len(plan.rows), now_s))

    def note_result(self, now_s: float) -> bool:
        """The oldest step has ended; return whether the limit is another now. Mutates."""
        submitted = self._under_way.popleft()
        seconds = now_s - max(submitted.at_s, self._last_result_s)
        self._last_result_s = now_s
        if not submitted.num_prompt_tokens:
            before = seconds if self._decodes_s is None else self._decodes_s
            self._decodes_s = before + WEIGHT_OF_NEW * (seconds - before)
            return False
        limit = self._limit_after(submitted.num_prompt_tokens, seconds)
        changed, self.limit = limit != self.limit, limit
        return changed

    def _limit_after(self, num_tokens: int, seconds: float) -> int:
        """Return the limit that a step with this many tokens of prompts calls for."""
        decodes_s = self._decodes_s or 0.0
        spare_s, used_s = self._target_s - decodes_s, seconds - decodes_s
        if spare_s <= 0:
            return UNIT
        fitting = 2.0 * num_tokens if used_s <= 0 else min(2.0 * num_tokens, num_tokens * spare_s / used_s)
        if num_tokens < self.limit / 2 and seconds <= self._target_s:
            return self.limit  # the end of a prompt: too few tokens to tell
        return max(UNIT, int(fitting) // UNIT * UNIT)

    def forget_steps(self) -> None:
        """The steps under way were lost: their times say nothing. Mutates."""
        self._under_way.clear()
