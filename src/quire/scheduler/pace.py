"""StepPace: limits the prompt tokens of a step, so that generating requests get their next token in time.

Each generating request has one token in every step, so the time between two of its tokens is the time of a step, and
prompts make steps long. The pace measures steps. A step with prompt tokens shows how much time they add to a step
without any, and so how many of them fit into the time that the operator allows:

    limit = tokens of the prompt * (time allowed - step of decodes) / (time of the step - step of decodes)

Only recent steps count, because the cost changes: a prompt token takes more time the longer the text before it is, and
a step of decodes takes more time the more decodes it has. A limit falls at once and at most doubles in a step, because
few tokens predict little about many: while a step waits for memory, its first tokens cost nothing.

The engine passes each new limit to the scheduler as a command. So the scheduler reads no clock, the step log has every
limit, and a replay needs no measurement.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from quire.core.step import StepPlan

SHARE_OF_TIME: Final = 0.8
"""The part of the allowed time that a step is planned to take, because equal steps take unequal times."""

FIRST_LIMIT: Final = 64
UNIT: Final = 16
"""Limits are multiples of this, and not 0: a prompt makes progress even if the allowed time is too short."""

WEIGHT_OF_NEW: Final = 0.25
"""The weight of a new step of decodes in the mean time of such steps."""


class _Submitted(NamedTuple):
    num_prompt_tokens: int
    at_s: float


class StepPace:
    """Turns measured steps into a limit. `allowed_ms`: the allowed time between two tokens of a request."""

    def __init__(self, allowed_ms: float) -> None:
        self._target_s = SHARE_OF_TIME * allowed_ms / 1e3
        self._decodes_s: float | None = None  # of a step without prompts
        self._under_way: deque[_Submitted] = deque()
        self._last_result_s = float("-inf")
        self.limit = FIRST_LIMIT
        """The most prompt tokens of a step, in addition to one token for each request."""

    def note_submitted(self, plan: StepPlan, now_s: float) -> None:
        """Note a step that begins now, or when the steps before it have ended. Mutates."""
        self._under_way.append(_Submitted(plan.num_tokens - len(plan.rows), now_s))

    def note_result(self, now_s: float) -> bool:
        """Note that the oldest step has ended; return whether the limit has changed. Mutates."""
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
        """Return the new limit after a step with this many prompt tokens took this long."""
        decodes_s = self._decodes_s or 0.0
        spare_s, used_s = self._target_s - decodes_s, seconds - decodes_s
        if spare_s <= 0:
            return UNIT
        fitting = 2.0 * num_tokens if used_s <= 0 else min(2.0 * num_tokens, num_tokens * spare_s / used_s)
        if num_tokens < self.limit / 2 and seconds <= self._target_s:
            return self.limit  # the end of a prompt: too few tokens to learn from
        return max(UNIT, int(fitting) // UNIT * UNIT)

    def forget_steps(self) -> None:
        """Forget the steps in flight, because they were lost. Mutates."""
        self._under_way.clear()
