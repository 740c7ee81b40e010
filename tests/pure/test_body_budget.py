"""The budget of bytes: who is refused, with what, and that everything is given back."""

from __future__ import annotations

import random

import pytest

from quire.serve.errors import ApiError
from quire.serve.read.body_budget import FREE_BYTES, BodyBudget, HeldBody

KIB = 1 << 10


def refusal(held: HeldBody, num_bytes: int) -> int:
    with pytest.raises(ApiError) as caught:
        held.take(num_bytes)
    assert caught.value.headers["retry-after"]
    return caught.value.status


def test_a_tenant_has_its_share_and_all_have_the_rest() -> None:
    budget = BodyBudget(100 * KIB, 40 * KIB)
    first, second = budget.open("a"), budget.open("a")
    first.take(FREE_BYTES + 30 * KIB)
    assert refusal(second, FREE_BYTES + 11 * KIB) == 429
    second.take(FREE_BYTES + 10 * KIB)
    assert refusal(second, 1) == 429
    others = [budget.open(name) for name in ("b", "c")]
    others[0].take(FREE_BYTES + 40 * KIB)
    assert refusal(others[1], FREE_BYTES + 20 * KIB + 1) == 503
    others[1].take(FREE_BYTES + 20 * KIB)
    assert (budget.held_bytes, budget.num_refused) == (100 * KIB, 3)
    budget.check()
    budget.open("d").take(FREE_BYTES)  # small bodies cost nothing
    first.release()
    first.release()
    budget.open("d").take(FREE_BYTES + 30 * KIB)
    budget.check()


def test_where_a_share_is_all_of_it_the_server_is_what_is_full() -> None:
    assert refusal(BodyBudget(KIB, KIB).open(""), FREE_BYTES + KIB + 1) == 503


def test_what_is_announced_is_not_held() -> None:
    budget = BodyBudget(10 * KIB, 10 * KIB)
    bodies = [budget.open("") for _ in range(100)]
    for body in bodies:
        body.require(FREE_BYTES + 10 * KIB)
        body.take(FREE_BYTES)
    assert budget.held_bytes == 0
    bodies[0].take(10 * KIB)
    with pytest.raises(ApiError):
        bodies[1].require(1)
    budget.check()


def test_bytes_are_counted_whatever_the_steps() -> None:
    rng = random.Random(7)
    budget, held = BodyBudget(1 << 30, 1 << 30), {}
    for _ in range(3000):
        name = f"t{rng.randrange(5)}"
        body = budget.open(name)
        sizes = [rng.choice([1, 100, FREE_BYTES, 50_000]) for _ in range(rng.randrange(1, 6))]
        for size in sizes:
            body.take(size)
        held[body] = max(0, sum(sizes) - FREE_BYTES)
        if rng.random() < 0.9:
            old = rng.choice(list(held))
            old.release()
            del held[old]
        assert budget.held_bytes == sum(held.values())
    budget.check()
    for body in held:
        body.release()
    assert budget.held_bytes == 0
    budget.check()
