"""Seeds of requests that bring none: the same in every version and on every machine, and a tenant's own."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.sampling_params import MAX_SEED
from quire.engine.seeds import SEED_BITS, SeedCounter

LARGEST = (1 << 63) - 1


@pytest.mark.parametrize("seed", [0, 7, LARGEST])
@pytest.mark.parametrize("tenant", ["", "ada", "é\ud800"])
def test_a_seed_is_a_hash_of_the_engines_own_of_its_number_and_of_the_tenant(seed: int, tenant: str) -> None:
    counter = SeedCounter(seed)
    for number in range(3):
        message = seed.to_bytes(8, "little") + number.to_bytes(8, "little") + tenant.encode("utf-8", "surrogatepass")
        digest = int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little")
        assert counter.take(tenant) == digest // 4  # the upper 62 bits


@given(st.lists(st.sampled_from(["", "a", "b"]), max_size=20))
def test_no_tenant_can_count_the_requests_of_others(turns: list[str]) -> None:
    counter = SeedCounter(7)
    found: dict[str, list[int]] = {"": [], "a": [], "b": []}
    for tenant in turns:
        found[tenant].append(counter.take(tenant))
    for tenant, seeds in found.items():
        alone = SeedCounter(7)
        assert seeds == [alone.take(tenant) for _ in seeds]
    everything = [seed for seeds in found.values() for seed in seeds]
    assert len(set(everything)) == len(everything)


def test_a_seed_leaves_room_for_those_of_all_sequences() -> None:
    assert SEED_BITS == 62
    counter = SeedCounter(1)
    seeds = [counter.take() for _ in range(200)]
    assert all(seed >= 0 and seed + (1 << 20) <= MAX_SEED for seed in seeds)
    assert max(seeds) > 1 << 61, "and all of the bits are used"
