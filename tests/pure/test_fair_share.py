"""Fair share: what is computed for tenants who always have more to ask is the same for each.

Whatever their lengths are, however their requests end, and whatever is computed in vain.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from quire.core.request import CacheScope
from support.control import Control
from support.fairness import ENDS, BusyTenants, Habit
from support.simulation import make_drafter

FAIR = 0.05
"""By how much the share of a tenant may miss the fair one, as a part of that."""


def worst_miss(computed: Counter[str]) -> float:
    """By which part the share of the tenant that has most or least misses the fair one."""
    fair = computed.total() / len(computed)
    return max(abs(tokens - fair) / fair for tenant, tokens in computed.items())


def draw_tenants(seed: int) -> tuple[BusyTenants, int]:
    """Return two or three tenants on an engine of drawn settings, and tokens enough to see their shares."""
    rng = random.Random(seed)
    tenants = [Habit(rng.randint(1, 40), rng.randint(1, 60), ENDS[(seed + i) % len(ENDS)]) for i in range(2 + seed % 2)]
    block_size = rng.choice([1, 3, 16, 64, 1024])
    rows, budget = rng.choice([(2, 8), (3, 12), (4, 64), (8, 16)])
    longest = max(habit.num_prompt_tokens + 2 * habit.num_output_tokens + 40 for habit in tenants)
    accuracy = rng.choice([None, None, 0.0, 0.7])
    busy = BusyTenants(
        tenants,
        block_size=block_size,
        at_once=rng.choice([rows, 2 * rows, 20 * rows]),
        drafter=None if accuracy is None else make_drafter(accuracy, seed, lambda name: ""),
        num_blocks=-(-longest // block_size) * rng.choice([2, 2, 4, 40]),
        num_host_blocks=rng.choice([0, 100]),
        max_num_seqs=rows,
        max_num_batched_tokens=budget,
        max_steps_under_way=rng.choice([1, 2, 3]),
    )
    return busy, 25 * len(tenants) * rows * max(habit.most_tokens for habit in tenants)


@pytest.mark.parametrize("seed", range(28))
def test_each_tenant_has_its_share_of_what_is_computed(seed: int) -> None:
    busy, num_tokens = draw_tenants(seed)
    assert worst_miss(busy.run(num_tokens)) < FAIR, (busy.habits, busy.executor.computed, busy.ended)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(28, 1000))
def test_many_tenants(seed: int) -> None:
    test_each_tenant_has_its_share_of_what_is_computed(seed)


def test_two_and_65_tokens_have_the_same_share() -> None:
    busy = BusyTenants([Habit(2, 2), Habit(2, 65)], block_size=16, at_once=64, num_blocks=512, max_num_seqs=4)
    assert worst_miss(busy.run(8000)) < FAIR


def test_texts_that_end_by_a_stop_string_are_charged() -> None:
    busy = BusyTenants(
        [Habit(8, 10, "stop string"), Habit(8, 10)], block_size=16, at_once=64, num_blocks=512, max_num_seqs=4
    )
    assert worst_miss(busy.run(8000)) < FAIR
    assert abs(busy.ended["a"] - busy.ended["b"]) < FAIR * busy.ended["b"]


@pytest.mark.parametrize("at_once", [3, 4])
def test_who_has_nothing_waiting_for_a_moment_keeps_its_turn(at_once: int) -> None:
    """A client that sends its next request when one has ended has an empty queue between two of them."""
    busy = BusyTenants([Habit(2, 2), Habit(20, 65)], block_size=16, at_once=at_once, num_blocks=512, max_num_seqs=4)
    assert worst_miss(busy.run(8000)) < FAIR


def test_tokens_from_the_cache_are_free_and_those_computed_again_are_not() -> None:
    control = Control(policy="fair_share", num_blocks=12, preemption="recompute", max_num_seqs=2)
    served = control.scheduler._policy._served
    for name, tenant in (("first", "a"), ("again", "a"), ("other", "b")):
        control.add(name, range(12), max_tokens=1, scope=CacheScope(tenant, salt=tenant))
        control.run()
    assert served == {"a": 12 + 1, "b": 13 + 12}, "the second time a computes one token; b begins where a stands"
    control.add("in front", range(20), max_tokens=20, scope=CacheScope("b", salt="b"))
    victim = control.add("yields", range(20), max_tokens=20, scope=CacheScope("a", salt="a"))
    before, charged = control.executor.num_tokens_computed, served.total()
    control.run()
    computed = control.executor.num_tokens_computed - before
    assert victim.num_preemptions
    assert computed > 2 * (20 + 20 - 1) - 12 - 12, "something is computed again"
    assert served.total() - charged == computed
