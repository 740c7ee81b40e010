"""LoadRates: decides whether loading blocks from the disk is faster than computing them.

Both speeds are measured while the engine runs, and arrive in results, so that the replay of a log decides the same. As
long as one of them is unknown, blocks are loaded: only a load shows how fast loads are.
"""

from __future__ import annotations

from typing import Final

SMOOTHING: Final = 0.3
FEW_TOKENS: Final = 32
"""A step of fewer tokens shows little about the speed of computing a prompt."""
LONGEST_PATIENCE_US: Final = 10_000_000
SHORTEST_PATIENCE_US: Final = 250_000


class LoadRates:
    """Two measured times: to load a block, and to compute a token.

    >>> rates = LoadRates()
    >>> rates.pays(100, 1600)
    True
    >>> rates.note_loads(10, 50_000); rates.note_step(500, 100_000)
    >>> rates.pays(10, 160), rates.pays(10, 1600)
    (False, True)
    """

    def __init__(self) -> None:
        self.block_us: float | None = None
        self.token_us: float | None = None

    def note_loads(self, num_blocks: int, microseconds: int) -> None:
        """Record blocks that were loaded. Mutates."""
        if num_blocks and microseconds > 0:
            self.block_us = smoothed(self.block_us, microseconds / num_blocks)

    def note_step(self, num_tokens: int, microseconds: int) -> None:
        """Record a step that was computed. Mutates."""
        if num_tokens >= FEW_TOKENS and microseconds > 0:
            self.token_us = smoothed(self.token_us, microseconds / num_tokens)

    def pays(self, num_blocks: int, num_tokens: int) -> bool:
        """Return whether to load this many blocks rather than compute their tokens. Does not mutate."""
        if self.block_us is None or self.token_us is None:
            return True
        return num_blocks * self.block_us < num_tokens * self.token_us

    def patience_us(self, num_tokens: int) -> int:
        """Return how long a load may take before it is abandoned: about as long as computing. Does not mutate."""
        if self.token_us is None:
            return LONGEST_PATIENCE_US
        return min(max(round(num_tokens * self.token_us), SHORTEST_PATIENCE_US), LONGEST_PATIENCE_US)


def smoothed(before: float | None, now: float) -> float:
    """Return a moving average after a new measurement; `before` None: it is the first."""
    return now if before is None else before + SMOOTHING * (now - before)
