"""ClosedLoop: a fixed number of users, each of whom asks again after the answer.

    user   ──► request ──► answer ── thinks ──► request ──► …

The load follows the engine: it never exceeds the number of users, and a faster engine gets more requests. Thinking
times are exponential; with a mean of 0 the next request is due at once.
"""

from __future__ import annotations

import heapq
import random
from array import array

from quire.core.setting_checks import require_int, require_number
from quire.simulate.workload.drawn import DrawnPrompts
from quire.simulate.workload.offered import OfferedRequest


class ClosedLoop:
    """A `RequestSource` of `num_users` until `duration_s`; requests running at that time still finish."""

    def __init__(
        self, num_users: int, prompts: DrawnPrompts, *, duration_s: float, seed: int, thinking_s: float = 0.0
    ) -> None:
        require_int("num_users", num_users, 1, 1 << 20)
        require_number("thinking_s", thinking_s, 0.0, 1e9)
        self._prompts = prompts
        self._draws = prompts.draw(seed)
        self._rng = random.Random(f"thinking {seed}")
        self._thinking_s = thinking_s
        self._duration_s = duration_s
        self._num_offered = 0
        self._due = [self._later(0.0) for _ in range(num_users)] if thinking_s else [0.0] * num_users
        heapq.heapify(self._due)

    def _later(self, now_s: float) -> float:
        return now_s + (self._rng.expovariate(1.0 / self._thinking_s) if self._thinking_s else 0.0)

    def next_due_s(self) -> float | None:
        """Return when the next request is due; None while all users wait, and at the end."""
        return self._due[0] if self._due and self._due[0] < self._duration_s else None

    def take(self) -> OfferedRequest:
        """Return the next request. Mutates."""
        prompt, output = next(self._draws)
        self._num_offered += 1
        return self._prompts.offer(f"r{self._num_offered - 1}", heapq.heappop(self._due), prompt, output)

    def ended(self, request_id: str, output: array[int], now_s: float) -> None:
        """Schedule the user's next request; a user who was refused leaves. Mutates."""
        if output:
            heapq.heappush(self._due, self._later(now_s))
