"""TenantQuota: what one tenant may leave behind in the cache."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import InvariantError
from quire.memory.block import Block
from quire.memory.quota import TenantQuota


def block_of(tenant: str, number: int) -> Block:
    block = Block(number)
    block.tenant = tenant
    return block


def test_over_the_limit_the_oldest_block_of_the_tenant_goes() -> None:
    quota = TenantQuota(2)
    first, second, third = (block_of("a", number) for number in range(3))
    assert quota.add(first) is None
    assert quota.add(second) is None
    assert quota.add(third) is first
    quota.remove(first)
    quota.check([second, third])


def test_a_tenant_does_not_pay_for_another() -> None:
    quota = TenantQuota(1)
    mine, theirs = block_of("a", 0), block_of("b", 1)
    assert (quota.add(mine), quota.add(theirs)) == (None, None)
    assert quota.add(block_of("b", 2)) is theirs


def test_a_block_that_was_hit_starts_again_as_the_youngest() -> None:
    quota = TenantQuota(2)
    first, second = block_of("a", 0), block_of("a", 1)
    quota.add(first)
    quota.add(second)
    quota.remove(first)
    quota.add(first)
    assert quota.add(block_of("a", 2)) is second


def test_a_tenant_that_may_keep_nothing_gives_up_the_block_itself() -> None:
    quota = TenantQuota(0)
    block = block_of("a", 0)
    assert quota.add(block) is block
    quota.remove(block)
    quota.check([])


def test_only_a_cached_block_can_be_removed() -> None:
    quota = TenantQuota(2)
    quota.add(block_of("a", 0))
    for stranger in (block_of("a", 1), block_of("b", 0)):
        with pytest.raises(KeyError):
            quota.remove(stranger)


def test_check_catches_a_block_that_is_counted_wrongly() -> None:
    quota = TenantQuota(2)
    block = block_of("a", 0)
    quota.add(block)
    quota.check([block])
    for cached in ([], [block, block_of("a", 1)], [block_of("a", 1)]):
        with pytest.raises(InvariantError, match="differs from the cached blocks"):
            quota.check(cached)


def test_check_catches_a_tenant_over_its_limit() -> None:
    quota = TenantQuota(1)
    blocks = [block_of("a", 0), block_of("a", 1)]
    for block in blocks:
        quota.add(block)
    with pytest.raises(InvariantError, match="more cached blocks than its quota"):
        quota.check(blocks)


@given(st.integers(0, 3), st.lists(st.integers(0, 8)))
def test_the_quota_holds_what_a_list_would(limit: int, numbers: list[int]) -> None:
    blocks = [block_of("abc"[number % 3], number) for number in range(9)]
    quota, model = TenantQuota(limit), list[Block]()
    for block in (blocks[number] for number in numbers):
        if block in model:
            quota.remove(block)
            model.remove(block)
        else:
            model.append(block)
            of_tenant = [kept for kept in model if kept.tenant == block.tenant]
            given_up = quota.add(block)
            assert given_up is (of_tenant[0] if len(of_tenant) > limit else None)
            if given_up is not None:
                quota.remove(given_up)
                model.remove(given_up)
        quota.check(model)
