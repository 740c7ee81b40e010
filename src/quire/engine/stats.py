"""EngineStats: what an engine has done and is doing, in numbers, for those who watch it from outside."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One moment of an engine. Names in `num_…_total` style only grow while the engine lives; the others come and go.

    `queried_tokens_total` and `hit_tokens_total` are tokens of prompts that were looked up in the prefix cache, and
    those found there. `busy_s_total` is the time spent in steps.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    num_cached_blocks: int = 0
    queried_tokens_total: int = 0
    hit_tokens_total: int = 0
    evictions_total: int = 0
    preemptions_total: int = 0
    steps_total: int = 0
    failed_steps_total: int = 0
    busy_s_total: float = 0.0

    @property
    def kv_usage(self) -> float:
        """Share of the blocks that requests hold.

        >>> EngineStats(num_blocks=8, num_used_blocks=2).kv_usage
        0.25
        """
        return self.num_used_blocks / self.num_blocks if self.num_blocks else 0.0
