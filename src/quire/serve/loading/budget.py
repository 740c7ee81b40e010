"""The memory of several models: one budget, divided before anything is loaded.

    budget = free memory when the server starts, or max_memory           12 GiB
    share  = budget / min(number of models, models_at_once)               4 GiB with three models or more
    a model takes the fewest shares that fit a useful context             max_model_len, or 8,192 tokens

So a model's size, KV memory and context depend on the settings only, never on which other models are loaded. Models
that take one share each fit together, one per share; a model that takes several shares displaces others. A single model
has one share, the whole budget: the same plan as without this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from quire.core.config import EngineConfig
from quire.core.errors import InvalidConfigError, QuireError
from quire.core.memory_needs import UNKNOWN_FREE_BYTES

if TYPE_CHECKING:
    from quire.engine.factory import EngineBlueprint

USEFUL_CONTEXT: Final = 8192
"""A model gets more than one share if it needs them for a context of this many tokens."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """The plans of all models that can be served within one budget, and the names of the others with the reasons."""

    budget_bytes: int
    blueprints: tuple[EngineBlueprint, ...]
    broken: tuple[tuple[str, str], ...] = ()


def plan_fleet(configs: Sequence[EngineConfig], num_required: int, models_at_once: int) -> Fleet:
    """Return the plans of models with these settings; reads their headers, and allocates no memory.

    The first `num_required` must be possible: raises like `plan_engine`. Any other that fails is listed in `broken`.
    """
    from quire.engine.factory import plan_engine  # imported late, because it imports numpy

    broken: list[tuple[str, str]] = []

    def possible(
        config: EngineConfig, is_required: bool, plan: Callable[[], EngineBlueprint]
    ) -> EngineBlueprint | None:
        try:
            return plan()
        except QuireError as error:
            if is_required:
                raise
            broken.append((config.model, str(error)))
            return None

    each = [
        (index < num_required, possible(config, index < num_required, partial(plan_engine, config)))
        for index, config in enumerate(configs)
    ]
    found = [(is_required, blueprint) for is_required, blueprint in each if blueprint is not None]
    if not found:
        raise InvalidConfigError("model_dir", "a folder of broken models", f"a model that runs; {': '.join(broken[0])}")
    if len(configs) == 1:
        return Fleet(_free_bytes(found[0][1]), (found[0][1],))
    budget_bytes = min(_free_bytes(blueprint) for _, blueprint in found)
    num_shares = min(len(found), models_at_once)
    sized = [
        possible(blueprint.config, is_required, partial(_sized, blueprint, budget_bytes, num_shares))
        for is_required, blueprint in found
    ]
    return Fleet(budget_bytes, tuple(blueprint for blueprint in sized if blueprint is not None), tuple(broken))


def _free_bytes(blueprint: EngineBlueprint) -> int:
    """Return the bytes that a model may take on its device."""
    asked, free = blueprint.config.max_memory, blueprint.report.plan.needs.free_bytes
    free_bytes = UNKNOWN_FREE_BYTES if free is None else free
    return free_bytes if asked is None else min(free_bytes, int(asked))


def _sized(blueprint: EngineBlueprint, budget_bytes: int, num_shares: int) -> EngineBlueprint:
    """Return an engine in the fewest shares that fit a useful context, at most all shares."""
    for count in range(1, num_shares):
        share_bytes = budget_bytes * count // num_shares
        try:
            sized = blueprint.within(share_bytes)
        except InvalidConfigError:
            continue
        plan, wanted = sized.report.plan, blueprint.config.max_model_len or USEFUL_CONTEXT
        if plan.engine_bytes <= share_bytes and plan.max_model_len >= min(wanted, sized.report.context_length):
            return sized
    return blueprint.within(budget_bytes)
