"""StepPace: limits the prompt tokens of a step, so that generating requests get their next token in time.

Each generating request has one token in every step, so the time between two of its tokens is the time of a step, and
prompts make steps long. The pace measures steps. A step with prompt tokens shows how much time they add to a step
without any, and so how many of them fit into the time allowed. The operator sets this time; otherwise it is a multiple
of the time of a step of decodes:

    limit = tokens of the prompt * (time allowed - step of decodes) / (time of the step - step of decodes)

Only recent steps count, because the cost changes: a prompt token takes more time the longer the text before it is, and
a step of decodes takes more time the more decodes it has. A limit falls at once and at most doubles in a step, because
few tokens predict little about many: while a step waits for memory, its first tokens cost nothing.

The engine passes each new limit to the scheduler as a command. So the scheduler reads no clock, the step log has every
limit, and a replay needs no measurement.
"""

from __future__ import annotations

from typing import Final

from quire.core.config import SchedulerConfig
from quire.core.step import StepPlan

SHARE_OF_TIME: Final = 0.8
"""The part of the allowed time that a step is planned to take, because equal steps take unequal times."""

FIRST_LIMIT: Final = 64
UNIT: Final = 16
"""Limits are multiples of this, and not 0: a prompt makes progress even if the allowed time is too short."""

LEAST_BESIDE: Final = 128
"""The lowest limit if only a slowdown is set. Smaller chunks would read the weights too often: of many experts, 16
tokens already read more than half."""

WEIGHT_OF_NEW: Final = 0.25
"""The weight of a new step of decodes in the mean time of such steps."""


class StepPace:
    """Turns measured steps into a limit.

    `allowed_ms`: the time allowed between two tokens of a request. If it is None, a step may take `slowdown` times as
    long as a step of decodes.
    """

    def __init__(self, allowed_ms: float | None, slowdown: float = 0.0) -> None:
        self._allowed_s = None if allowed_ms is None else SHARE_OF_TIME * allowed_ms / 1e3
        self._slowdown = slowdown
        self._decodes_s: float | None = None  # of a step without prompts
        self._last_result_s = float("-inf")
        self._least = LEAST_BESIDE if allowed_ms is None else UNIT
        self.limit = max(FIRST_LIMIT, self._least)
        """The most prompt tokens of a step, in addition to one token for each request."""

    @classmethod
    def of(cls, config: SchedulerConfig) -> StepPace | None:
        """Return a pace for these settings; None if they limit nothing."""
        if config.itl_slo_ms is None and not config.max_slowdown:
            return None
        return cls(config.itl_slo_ms, config.max_slowdown)

    def note_result(self, plan: StepPlan, submitted_s: float, now_s: float) -> bool:
        """Note a step that has ended; return whether the limit has changed. Mutates.

        It began when it was submitted, or when the step before it had ended.
        """
        seconds = now_s - max(submitted_s, self._last_result_s)
        self._last_result_s = now_s
        if not plan.rows:
            return False  # it only moved blocks, or waited for the disk
        num_prompt_tokens = plan.num_tokens - len(plan.rows)
        if num_prompt_tokens:
            limit = self._limit_after(num_prompt_tokens, seconds)
        else:
            is_first = self._decodes_s is None
            before = self._decodes_s or seconds
            self._decodes_s = before + WEIGHT_OF_NEW * (seconds - before)
            limit = LEAST_BESIDE if is_first and self._allowed_s is None else self.limit
        changed, self.limit = limit != self.limit, limit
        return changed

    def _limit_after(self, num_tokens: int, seconds: float) -> int:
        """Return the new limit after a step with this many prompt tokens took this long."""
        if self._allowed_s is None:  # before any step of decodes, each step may be longer than the one before
            decodes_s = seconds if self._decodes_s is None else self._decodes_s
            target_s = self._slowdown * decodes_s
        else:
            decodes_s, target_s = self._decodes_s or 0.0, self._allowed_s
        spare_s, used_s = target_s - decodes_s, seconds - decodes_s
        if spare_s <= 0:
            return self._least
        fitting = 2.0 * num_tokens if used_s <= 0 else min(2.0 * num_tokens, num_tokens * spare_s / used_s)
        if num_tokens < self.limit / 2 and seconds <= target_s:
            return self.limit  # the end of a prompt: too few tokens to learn from
        return max(self._least, int(fitting) // UNIT * UNIT)
