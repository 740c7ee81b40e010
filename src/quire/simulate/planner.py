"""The planner: finds the best settings for requests of given lengths, from sizes and bounds alone.

    block size    the largest that holds nearly as many requests as the best: longer runs of memory, shorter tables
    sequences,    every pair in steps of powers of two, each with the pool that it leaves: the most tokens per second
    tokens        within the objective; of nearly equal ones the smallest product of the two times, then fewest tokens

Larger steps take memory from the pool (activations, logits), so every choice is sized again by the engine's own memory
plan, a `PoolOf` from the caller. The planner decides nothing that needs a simulation; for queues, shared prefixes and
preemptions, use `quire simulate`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from quire.core.errors import QuireError
from quire.core.kv_spec import KVCacheSpec
from quire.simulate.capacity import Concurrency, Occupancy
from quire.simulate.estimate import Estimate, Estimator, Objective
from quire.simulate.lengths import RequestLengths

BUDGETS: Final = tuple(1 << power for power in range(5, 14))
SEQUENCES: Final = (1, 2, 3, *(part << power for power in range(1, 10) for part in (2, 3)))
NEARLY: Final = 0.98
"""The share of the best that is good enough: the bounds are not more exact than this."""


@dataclass(frozen=True, slots=True)
class Pool:
    """The KV memory that some settings leave."""

    spec: KVCacheSpec
    num_blocks: int
    max_model_len: int


class PoolOf(Protocol):
    """Sizes the memory of an engine with given settings."""

    def __call__(self, block_size: int, max_num_seqs: int, max_num_batched_tokens: int) -> Pool | None:
        """Return the pool; None if these settings do not fit."""
        ...


@dataclass(frozen=True, slots=True)
class Choices:
    """The values to choose from; a setting that the user has fixed has only one."""

    block_sizes: tuple[int, ...] = (16, 32, 64, 128)
    sequences: tuple[int, ...] = SEQUENCES
    budgets: tuple[int, ...] = BUDGETS


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Settings, the concurrency of their pool, and their estimate."""

    block_size: int
    max_num_seqs: int
    pool: Pool
    held: Concurrency
    estimate: Estimate


class UnreachableError(QuireError):
    """No settings meet the objective; `nearest` comes closest, None if no settings fit at all."""

    def __init__(self, nearest: Estimate | None) -> None:
        super().__init__("no settings meet the targets")
        self.nearest = nearest


def recommend(
    pool_of: PoolOf, estimator: Estimator, lengths: RequestLengths, choices: Choices, objective: Objective
) -> Recommendation:
    """Return the best settings; raises `UnreachableError` if none meet the objective."""
    block_size = _best_block_size(pool_of, lengths, choices)
    found = list(_candidates(pool_of, estimator, lengths, choices, block_size))
    if not found:
        raise UnreachableError(None)

    def excess(choice: Recommendation) -> float:
        return objective.excess(choice.estimate.ttft_p95_s, choice.estimate.tpot_s)

    kept = [choice for choice in found if excess(choice) <= 1]
    if not kept:
        raise UnreachableError(min(found, key=excess).estimate)
    most = max(choice.estimate.tokens_per_s for choice in kept)
    good = [choice for choice in kept if choice.estimate.tokens_per_s >= NEARLY * most]
    return min(good, key=lambda choice: (_grade(choice.estimate), choice.estimate.budget, choice.max_num_seqs))


def _grade(estimate: Estimate) -> int:
    """Return the grade of an estimate's times, in steps of 5 %; times of one grade count as equal."""
    return round(math.log(estimate.tpot_s * estimate.ttft_p95_s) / math.log(1.05))


def _best_block_size(pool_of: PoolOf, lengths: RequestLengths, choices: Choices) -> int:
    """Return the largest block size that holds nearly as many requests as the best one."""
    held = {}
    for size in choices.block_sizes:
        pool = pool_of(size, min(choices.sequences), max(min(choices.budgets), min(choices.sequences)))
        if pool is not None:
            held[size] = Occupancy.of(pool.spec, lengths).in_pool(pool.num_blocks, pool.max_model_len).average
    most = max(held.values(), default=0.0)
    return max((size for size, average in held.items() if average >= NEARLY * most), default=choices.block_sizes[0])


def _candidates(
    pool_of: PoolOf, estimator: Estimator, lengths: RequestLengths, choices: Choices, block_size: int
) -> Iterator[Recommendation]:
    occupancy: Occupancy | None = None
    for budget in choices.budgets:
        running = 0
        for sequences in (count for count in choices.sequences if count <= budget):  # each needs a token of the budget
            pool = pool_of(block_size, sequences, budget)
            if pool is None:
                continue
            occupancy = occupancy or Occupancy.of(pool.spec, lengths)
            held = occupancy.in_pool(pool.num_blocks, pool.max_model_len)
            running = min(sequences, int(held.average))
            if running:
                yield Recommendation(block_size, sequences, pool, held, estimator.serving(running, budget))
            if held.average < sequences:
                break  # more sequences than the pool holds
        if running and estimator.is_enough(running, budget):
            break
