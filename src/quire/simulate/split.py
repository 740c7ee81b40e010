"""Split: some replicas compute prompts, the others generate; a link carries the keys and values between them.

    request ──► prompt replica: the prompt, one token ──► link ──► token replica: all other tokens

The prompt replica serves an ordinary request of one token. The token replica gets the request with its first token,
like one that continues after a fault; tokens that were computed elsewhere take no time there, because their keys and
values arrived over the link (`ReceivedCost`). So scheduler, memory and router are the product's on both sides, and the
blocks of a received prompt are published and hit like any others.

A link serves one request after another. Two assumptions are optimistic: writing a block does not slow a step, and a
prompt replica can free a block while it is being sent.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace

from quire.core.request import Request
from quire.core.setting_checks import require_int, require_number
from quire.core.step import StepPlan
from quire.simulate.cost.base import StepCost


@dataclass(frozen=True, slots=True)
class Split:
    """The first `num_prompt_replicas` compute prompts; `s_per_token`: a link's time for the state of a token."""

    num_prompt_replicas: int
    s_per_token: float

    def require_for(self, num_replicas: int) -> None:
        """Raise `InvalidConfigError` unless both sides have a replica."""
        require_int("prompt replicas", self.num_prompt_replicas, 1, num_replicas - 1)
        require_number("seconds per token", self.s_per_token, 0.0, 1.0)


class Links:
    """The links of prompt replicas, with the time at which each becomes free."""

    def __init__(self, split: Split) -> None:
        self._s_per_token = split.s_per_token
        self._free_s = [0.0] * split.num_prompt_replicas

    def send(self, index: int, request: Request, now_s: float) -> float:
        """Send the computed state of a request; return its time of arrival. Mutates."""
        self._free_s[index] = max(self._free_s[index], now_s) + request.num_computed * self._s_per_token
        return self._free_s[index]


class ReceivedCost:
    """The times of `computing` for a replica whose requests began elsewhere.

    When a request gets a row for the first time, all its tokens except the last have been received. After a preemption,
    its tokens are computed.
    """

    def __init__(self, computing: StepCost) -> None:
        self._computing = computing
        self._seen: set[str] = set()
        self._received: dict[int, int] = {}  # by row, the number of received tokens

    def step_s(self, plan: StepPlan) -> float:
        """Return the seconds that the plan takes. Mutates; O(rows)."""
        for start in plan.row_starts:
            is_first = start.request_id not in self._seen
            self._seen.add(start.request_id)
            self._received[start.row] = len(start.tokens) - 1 if is_first else 0
        first = plan.num_decodes
        ends = [self._received[row] for row in plan.rows[first:]]
        if not any(end > start for end, start in zip(ends, plan.starts[first:], strict=True)):
            return self._computing.step_s(plan)
        rows, starts, counts, samples = (column[:first] for column in _columns(plan))
        for end, row, start, count, sampled in zip(ends, *(each[first:] for each in _columns(plan)), strict=True):
            computed = min(count, start + count - end)
            if computed > 0:
                rows.append(row)
                starts.append(start + count - computed)
                counts.append(computed)
                samples.append(sampled)
        left = replace(plan, rows=rows, starts=starts, counts=counts, samples=samples)
        return self._computing.step_s(left) if rows or plan.moves_in or plan.moves_out else 0.0


def _columns(plan: StepPlan) -> tuple[array[int], array[int], array[int], array[int]]:
    return plan.rows, plan.starts, plan.counts, plan.samples
