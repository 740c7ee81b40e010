"""The settings of each subsystem, as frozen values with their help beside them.

Each constructor takes its own narrow config and nothing else. Flags, environment names and reference pages are
made from the fields (name, default, help), so there is one place to add a setting. Every config checks itself.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from typing import Any

from quire.core.errors import InvalidConfigError


def setting(default: Any, text: str, *, secret: bool = False) -> Any:
    """Declare a field with its help; a secret one is never shown."""
    return dataclasses.field(default=default, repr=not secret, metadata={"help": text})


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """How the KV memory is managed."""

    num_blocks: int = setting(1024, "blocks of KV memory on the device")
    num_host_blocks: int = setting(0, "blocks of KV memory on the host, to swap to; 0: preempt by recompute only")
    prefix_index: str = setting("hash_chain", "how cached prefixes are found: hash_chain, radix_tree or none")
    eviction: str = setting("lru", "which cached block goes first: lru, fifo or priority")
    hash_bits: int = setting(128, "width of the prefix hash; smaller only to provoke collisions in tests")
    hash_key: bytes = setting(b"", "secret key of the prefix hash, at most 64 bytes", secret=True)
    max_cached_blocks_per_tenant: int | None = setting(None, "cached blocks that one tenant may keep; None: no limit")

    def __post_init__(self) -> None:
        _require_int("num_blocks", self.num_blocks, 1, (1 << 31) - 1)
        _require_int("num_host_blocks", self.num_host_blocks, 0, (1 << 31) - 1)
        _require_one_of("prefix_index", self.prefix_index, ("hash_chain", "radix_tree", "none"))
        _require_one_of("eviction", self.eviction, ("lru", "fifo", "priority"))
        _require_int("hash_bits", self.hash_bits, 1, 512)
        if not isinstance(self.hash_key, bytes):
            raise InvalidConfigError("hash_key", self.hash_key, "at most 64 bytes")
        if len(self.hash_key) > 64:
            raise InvalidConfigError("hash_key", f"{len(self.hash_key)} bytes", "at most 64 bytes")
        if self.max_cached_blocks_per_tenant is not None:
            _require_int("max_cached_blocks_per_tenant", self.max_cached_blocks_per_tenant, 0, (1 << 31) - 1)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Who runs next, and how much at a time."""

    max_num_seqs: int = setting(256, "sequences that run at once")
    max_num_batched_tokens: int = setting(2048, "tokens computed in one step, all sequences together")
    max_model_len: int = setting(4096, "tokens of one sequence, prompt and output together")
    policy: str = setting("fcfs", "order of the waiting: fcfs, priority or fair_share")
    priority_ageing_s: float = setting(30.0, "seconds of waiting that make up for one level of priority")
    headroom: float = setting(0.02, "share of the blocks kept free when a request is admitted beside others")
    preemption: str = setting("auto", "how a request yields: recompute, swap, or auto (the cheaper)")
    recompute_tokens_per_s: float = setting(2000.0, "how fast lost tokens are computed again, for auto")
    swap_bytes_per_s: float = setting(4e9, "how fast blocks move to the host or back, for auto")
    max_steps_under_way: int = setting(1, "plans handed to the executor before the first result is awaited")

    def __post_init__(self) -> None:
        _require_int("max_num_seqs", self.max_num_seqs, 1, 1 << 20)
        _require_int("max_num_batched_tokens", self.max_num_batched_tokens, 1, 1 << 30)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidConfigError(
                "max_num_batched_tokens", self.max_num_batched_tokens, f"max_num_seqs ({self.max_num_seqs}) or more"
            )
        _require_int("max_model_len", self.max_model_len, 1, 1 << 30)
        _require_one_of("policy", self.policy, ("fcfs", "priority", "fair_share"))
        _require_number("priority_ageing_s", self.priority_ageing_s, 1e-3, 1e9)
        _require_number("headroom", self.headroom, 0.0, 0.9)
        _require_one_of("preemption", self.preemption, ("recompute", "swap", "auto"))
        _require_number("recompute_tokens_per_s", self.recompute_tokens_per_s, 1e-3, 1e12)
        _require_number("swap_bytes_per_s", self.swap_bytes_per_s, 1.0, 1e15)
        _require_int("max_steps_under_way", self.max_steps_under_way, 1, 16)


def _require_int(field: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidConfigError(field, value, f"an integer from {low} to {high}")


def _require_number(field: str, value: object, low: float, high: float) -> None:
    largest = sys.float_info.max
    if isinstance(value, bool) or not isinstance(value, int | float) or not -largest <= value <= largest:
        raise InvalidConfigError(field, value, "a finite number")
    if not low <= value <= high:
        raise InvalidConfigError(field, value, f"a number from {low:g} to {high:g}")


def _require_one_of(field: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidConfigError(field, value, f"one of {', '.join(allowed)}")
