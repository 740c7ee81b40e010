"""SimExecutor: one more Executor. It computes no model; it takes the time that a model would take.

Time is the injected clock's: collecting a step moves a `ManualClock` forward by what the cost model says, so hours of
traffic run in seconds. Tokens are drawn from a hash of everything before them, so that equal prompts go on equally, and
a token never depends on the batch, the chunks or the cache: another schedule must bring the same tokens.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from quire.core.clock import ManualClock
from quire.core.errors import ExecutionError
from quire.core.step import StepPlan, StepResult

_MULTIPLIER = 6364136223846793005
_INCREMENT = 1442695040888963407
_MASK = (1 << 64) - 1


class StepCost(Protocol):
    """How long a step takes."""

    def step_s(self, plan: StepPlan) -> float:
        """Return the seconds that the plan takes. Does not mutate."""
        ...


@dataclass(frozen=True, slots=True)
class LinearCost:
    """A fixed time per step and per token.

    >>> from quire.core.step import column
    >>> LinearCost(0.01, 0.001).step_s(StepPlan(0, column(0), column(0), column(5), column(1)))
    0.015
    """

    fixed_s: float = 0.02
    per_token_s: float = 0.0002

    def step_s(self, plan: StepPlan) -> float:
        """Return the seconds that the plan takes."""
        return self.fixed_s + self.per_token_s * plan.num_tokens


class SimExecutor:
    """Pretends to compute plans."""

    def __init__(self, vocab_size: int, clock: ManualClock, cost: StepCost | None = None) -> None:
        self._vocab_size = vocab_size
        self._clock = clock
        self._cost = cost or LinearCost()
        self._rows: dict[int, int] = {}  # per row, the hash of all its known tokens
        self._results: deque[tuple[StepResult, float]] = deque()

    def start(self) -> None:
        """There is nothing to get ready."""

    def submit(self, plan: StepPlan) -> None:
        """Take a plan. Mutates."""
        for start in plan.row_starts:
            self._rows[start.row] = hash_tokens(start.tokens, start.branch)
        counts = array("i")
        tokens = array("i")
        for row, samples in zip(plan.rows, plan.samples, strict=True):
            counts.append(samples)
            if samples == 1:
                token = self._draw(self._rows[row])
                tokens.append(token)
                self._rows[row] = extend_hash(self._rows[row], token)
            elif samples:
                tokens.extend(self._draw(self._rows[row] + branch) for branch in range(samples))
                self._rows[row] = extend_hash(self._rows[row], tokens[-samples])
        self._results.append((StepResult(plan.step_id, counts, tokens), self._cost.step_s(plan)))

    def _draw(self, state: int) -> int:
        mixed = (state ^ (state >> 29)) * _MULTIPLIER & _MASK
        return (mixed >> 32) % self._vocab_size

    def collect(self) -> StepResult:
        """Return the oldest result and move the clock past it. Mutates."""
        if not self._results:
            raise ExecutionError("no step is under way")
        result, seconds = self._results.popleft()
        self._clock.advance(seconds)
        return result

    def shutdown(self) -> None:
        """Drop what is under way. Mutates."""
        self._results.clear()


def extend_hash(state: int, token: int) -> int:
    """Return the hash of a sequence grown by a token."""
    return ((state ^ token) * _MULTIPLIER + _INCREMENT) & _MASK


def hash_tokens(tokens: array[int], branch: int) -> int:
    """Return the hash of a whole sequence; siblings of one prompt differ by their branch."""
    state = branch
    for token in tokens:
        state = extend_hash(state, token)
    return state
