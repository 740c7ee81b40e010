"""GateLimits: how much may wait for the engines of a model, as configured or as suits them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.serve.config import ServerConfig
from quire.serve.model import ServedModel

QUEUED_PER_SEQUENCE = 4
"""Sequences that may wait, for each that may run."""
QUEUED_POOLS = 8
"""Their prompt tokens, in sizes of the KV memory."""


@dataclass(frozen=True, slots=True)
class GateLimits:
    """How much can wait; with `has_tenants`, also per tenant. `takes_turns`: tenants are served in turn.

    `of_each`: names of the limits that hold per engine, and grow with the number of ready engines.

    >>> limits = GateLimits(8, 100, of_each=("max_queued_sequences",)).of(3)
    >>> limits.max_queued_sequences, limits.max_queued_tokens
    (24, 100)
    """

    max_queued_sequences: int
    max_queued_tokens: int
    max_wait_s: float | None = None
    has_tenants: bool = False
    takes_turns: bool = False
    of_each: tuple[str, ...] = ()

    def of(self, num_engines: int) -> GateLimits:
        """Return the limits while this many engines are ready. Pure."""
        grown: Mapping[str, Any] = {name: num_engines * getattr(self, name) for name in self.of_each}
        return replace(self, **grown, of_each=()) if self.of_each else self


def gate_limits(config: ServerConfig, model: ServedModel, num_tenants: int) -> GateLimits:
    """Return the configured limits; a limit that is not set gets a value that suits each engine. Does not mutate."""
    engine, plan = model.config, model.report.plan
    sequences, tokens = config.max_queued_sequences, config.max_queued_tokens
    unset = ("max_queued_sequences", "max_queued_tokens") if config.num_replicas > 1 else ()
    return GateLimits(
        QUEUED_PER_SEQUENCE * engine.max_num_seqs if sequences is None else sequences,
        QUEUED_POOLS * plan.num_blocks * engine.block_size if tokens is None else tokens,
        config.max_wait_s,
        has_tenants=num_tenants > 1,
        takes_turns=engine.policy == "fair_share",
        of_each=tuple(name for name in unset if getattr(config, name) is None),
    )
