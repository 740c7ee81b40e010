"""EngineStats: what an engine has done and is doing, in numbers, for those who watch it from outside."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ModelState(Enum):
    """Where an engine stands, as readiness tells it."""

    STARTING = "starting"
    READY = "ready"
    UNRESPONSIVE = "unresponsive"
    RESTARTING = "restarting"
    FAILED = "failed"
    CLOSED = "closed"

    @property
    def has_engine(self) -> bool:
        """Whether the engine is there, with all that it holds; it may be silent."""
        return self in (ModelState.READY, ModelState.UNRESPONSIVE)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One moment of an engine. Names in `…_total` style only grow while the engine lives; the others come and go.

    `queried_tokens_total` and `hit_tokens_total` are tokens of prompts that were looked up in the prefix cache, and
    those found there. `busy_s_total` is the time spent in steps; `steps_total` counts those that brought a result.

    Of steps that the executor failed, `failed_steps_total` counts all, `memory_failures_total` those for lack of
    memory. `culprits_total` are requests that ended because steps failed with them alone in it,
    `corrupted_requests_total` those whose own numbers went wrong (NaN, for one) while the step went well. Meanwhile
    `num_suspects` counts the requests that are tried apart from the others, and `max_step_tokens` is what a step may
    compute: less than the setting once memory has fallen short.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    num_cached_blocks: int = 0
    num_suspects: int = 0
    max_step_tokens: int = 0
    queried_tokens_total: int = 0
    hit_tokens_total: int = 0
    evictions_total: int = 0
    preemptions_total: int = 0
    steps_total: int = 0
    failed_steps_total: int = 0
    memory_failures_total: int = 0
    culprits_total: int = 0
    corrupted_requests_total: int = 0
    busy_s_total: float = 0.0
    restarts_total: int = 0

    @property
    def kv_usage(self) -> float:
        """Share of KV blocks held by requests.

        >>> EngineStats(num_blocks=8, num_used_blocks=2).kv_usage
        0.25
        """
        return self.num_used_blocks / self.num_blocks if self.num_blocks else 0.0
