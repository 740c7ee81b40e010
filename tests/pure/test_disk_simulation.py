"""Whole runs of the control plane over a disk that is slow, fails, hangs and is killed: no token is ever wrong.

Each seed is a scenario of `support.simulation` with a disk of a few slots or many. It is run several times over one
disk, each time with an empty memory, as after a restart.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from support.shadow_disk import DiskChaos, ShadowDisk
from support.simulation import Scenario, Simulation

NUM_SHARDS = 2
SEEDS_PER_SHARD = 20


def run_seed(seed: int, chaos: DiskChaos | None = None) -> Counter[str]:
    """Run a scenario three times over one disk."""
    rng = random.Random(seed + 3)
    scenario = Scenario.draw(seed).with_disk(rng)
    disk = ShadowDisk(seed, chaos or DiskChaos.draw(rng))
    seen = Counter[str]()
    for _ in range(3):
        seen += Simulation(scenario, disk=disk).run()
    return seen


@pytest.mark.parametrize("shard", range(NUM_SHARDS))
def test_no_token_is_wrong_whatever_the_disk_does(shard: int) -> None:
    seen = Counter[str]()
    for seed in range(shard * SEEDS_PER_SHARD, (shard + 1) * SEEDS_PER_SHARD):
        seen += run_seed(seed)
    happened = ("stored", "loaded", "evicted", "given up", "failed", "damaged", "late", "full", "from disk")
    assert [name for name in happened if not seen[name]] == []


@pytest.mark.long
@pytest.mark.parametrize("shard", range(NUM_SHARDS))
def test_no_token_is_wrong_in_many_more_runs(shard: int) -> None:
    for seed in range(10_000 + shard * 1000, 10_000 + (shard + 1) * 1000):
        run_seed(seed)


@pytest.mark.parametrize("chaos", [DiskChaos(hangs=1.0), DiskChaos(undone=1.0), DiskChaos(delay=0.0)])
def test_a_disk_that_never_answers_or_always_fails_delays_requests_and_nothing_else(chaos: DiskChaos) -> None:
    for seed in range(12):
        run_seed(seed, chaos)
