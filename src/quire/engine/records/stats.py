"""EngineStats: the counters of an engine, for monitoring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Final

from quire.core.kept_block import CacheJob


class ModelState(Enum):
    """The state of an engine, as readiness reports it."""

    UNLOADED = "unloaded"
    STARTING = "starting"
    READY = "ready"
    UNRESPONSIVE = "unresponsive"
    RESTARTING = "restarting"
    FAILED = "failed"
    CLOSED = "closed"

    @property
    def has_engine(self) -> bool:
        """Whether an engine is running, with all its state; it may be silent."""
        return self in (ModelState.READY, ModelState.UNRESPONSIVE)


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """One engine of a model: its state, number of texts, number of restarts, and counters.

    `failure`: why it takes no requests. `routes`: requests that the router sent it, by reason (`quire.routing.router`).
    """

    state: ModelState
    failure: str
    num_texts: int
    restarts_total: int
    routes: dict[str, int]
    engine: EngineStats


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The counters at one moment. Those named `…_total` only grow while the engine runs; the others rise and fall.

    `queried_tokens_total` are the prompt tokens looked up in the prefix cache, `hit_tokens_total` the cache hits.
    `busy_s_total` is the time spent in steps; `steps_total` counts the steps with a result.

    `failed_steps_total` counts steps that failed in the executor, `memory_failures_total` those for lack of memory.
    `culprits_total` counts requests that ended because a step with only them failed; `corrupted_requests_total` those
    whose own values were invalid (such as NaN) in a step that succeeded. `num_suspects` is the number of requests that
    are now retried apart from the others. `max_step_tokens` is the limit of tokens in a step: less than the setting
    after memory has run out. `prompt_limit` is the limit of prompt tokens in a step while other requests generate, as
    `itl_slo_ms` requires; 0: no limit. `drafts_total` counts sequences with guesses to verify, once per step.
    `verified_guesses` and `right_guesses` count all verified guesses, and the right ones, by proposer and place in the
    draft.

    `num_disk_slots` is the capacity of the disk cache in blocks, `num_kept_blocks` the number it holds, and
    `num_landing_blocks` the number being loaded from it. `disk_blocks` counts blocks by outcome: stored, loaded,
    evicted, or the reason why they were not stored or loaded. `disk_is_off`: the disk failed too often. `adapters`: the
    state of each adapter, by digest. `num_host_blocks` is the number of blocks on the host, of which
    `num_cached_host_blocks` hold copies of the prefix cache. `jobs`: the operators' cache jobs, by name.
    `disk_store`: the folder of the disk cache's store.
    `token_us` and `load_us`: the measured time to compute a token and to load a block from disk; 0: not known yet.

    For several engines these are sums, and `replicas` has the counters of each. `continued_total` counts texts that
    continued in another engine because theirs died, `moved_total` those that left a healthy engine, and
    `at_fault_total` requests that ended because three engines had died with them. `fetches` counts the fetches of
    prefixes from other engines by outcome (`quire.engine.replicas.fetches`); `fetched_blocks_total`,
    `fetched_bytes_total` and `fetch_s_total` are totals of the successful ones.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    num_cached_blocks: int = 0
    num_suspects: int = 0
    max_step_tokens: int = 0
    prompt_limit: int = 0
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
    drafts_total: int = 0
    verified_guesses: dict[str, tuple[int, ...]] = field(default_factory=dict)
    right_guesses: dict[str, tuple[int, ...]] = field(default_factory=dict)
    num_host_blocks: int = 0
    num_cached_host_blocks: int = 0
    host_hit_tokens_total: int = 0
    num_disk_slots: int = 0
    num_kept_blocks: int = 0
    num_landing_blocks: int = 0
    disk_is_off: bool = False
    disk_hit_tokens_total: int = 0
    disk_blocks: dict[str, int] = field(default_factory=dict)
    adapters: dict[str, str] = field(default_factory=dict)
    jobs: dict[str, CacheJob] = field(default_factory=dict)
    disk_store: str = ""
    token_us: float = 0.0
    load_us: float = 0.0
    replicas: tuple[ReplicaStats, ...] = ()
    continued_total: int = 0
    moved_total: int = 0
    at_fault_total: int = 0
    fetches: dict[str, int] = field(default_factory=dict)
    fetched_blocks_total: int = 0
    fetched_bytes_total: int = 0
    fetch_s_total: float = 0.0

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks that requests hold.

        >>> EngineStats(num_blocks=8, num_used_blocks=2).kv_usage
        0.25
        """
        return self.num_used_blocks / self.num_blocks if self.num_blocks else 0.0

    @property
    def num_verified_guesses(self) -> int:
        """Guesses that steps have verified, of all proposers."""
        return sum(map(sum, self.verified_guesses.values()))

    @property
    def num_right_guesses(self) -> int:
        """Guesses that were right, of all proposers."""
        return sum(map(sum, self.right_guesses.values()))


LEAST: Final = ("max_step_tokens", "prompt_limit")
OF_ONE_ENGINE: Final = ("jobs", "disk_store", "token_us", "load_us")
"""Counters that make no sense summed over engines."""


def joined_stats(each: Sequence[EngineStats]) -> EngineStats:
    """Return the counters of several engines as those of one: sums, and for limits the minimum. Pure.

    An adapter's state is that of the slowest engine.

    >>> one = EngineStats(num_blocks=8, num_used_blocks=2, max_step_tokens=512, adapters={"a": "ready"})
    >>> joined = joined_stats([one, EngineStats(num_blocks=8, max_step_tokens=64, adapters={"a": "loading"})])
    >>> joined.num_blocks, joined.kv_usage, joined.max_step_tokens, joined.adapters
    (16, 0.125, 64, {'a': 'loading'})
    """
    if len(each) < 2:
        return each[0] if each else EngineStats()
    joined: dict[str, Any] = {}
    for name in (one.name for one in fields(EngineStats) if one.name not in OF_ONE_ENGINE):
        values = [getattr(stats, name) for stats in each]
        if name in LEAST:
            joined[name] = min(values)
        elif name == "adapters":
            known = set(values[0]).intersection(*values)
            states = {digest: {states[digest] for states in values} for digest in known}
            joined[name] = {digest: max(found, key=lambda state: state != "ready") for digest, found in states.items()}
        elif isinstance(values[0], dict):
            joined[name] = _sums(values)
        else:
            joined[name] = any(values) if isinstance(values[0], bool) else sum(values, type(values[0])())
    return EngineStats(**joined)


def _sums(each: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the sums of counts by name; lists are added element by element."""
    total: dict[str, Any] = {}
    for counts in each:
        for name, count in counts.items():
            known = total.get(name)
            if known is None:
                total[name] = count
            elif isinstance(count, tuple):
                total[name] = tuple(map(sum, zip(known, count, strict=True)))
            else:
                total[name] = known + count
    return total
