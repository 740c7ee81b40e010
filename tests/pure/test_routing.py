"""Routers: each prompt goes where the longest of its beginnings went last, unless that replica is drowning."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import InvalidConfigError
from quire.engine import routing
from quire.engine.routing import LEAST_LOADED, PREFIX_AFFINITY, ROUND_ROBIN, LeastLoaded, PrefixAffinity, create_router


def tokens(*values: int) -> array[int]:
    return array("i", values)


def test_an_unknown_router_is_refused_with_those_there_are() -> None:
    assert [create_router(name).choose(tokens(1), [1, 0]) for name in (ROUND_ROBIN, LEAST_LOADED, PREFIX_AFFINITY)] == [
        0,
        1,
        1,
    ]
    with pytest.raises(InvalidConfigError) as caught:
        create_router("random")
    assert str(caught.value) == "router is 'random'; allowed: one of round_robin, least_loaded, prefix_affinity"


@given(st.lists(st.integers(0, 3), min_size=1, max_size=5))
def test_the_first_of_the_least_loaded_is_chosen(loads: list[int]) -> None:
    chosen = LeastLoaded().choose(tokens(1), loads)
    assert loads[chosen] == min(loads)
    assert min(loads) not in loads[:chosen]


class SlowAffinity:
    """Keeps every beginning as a tuple of its tokens."""

    def __init__(self, chunk: int, max_chunks: int, slack: int) -> None:
        self.chunk, self.max_chunks, self.slack = chunk, max_chunks, slack
        self.sent: dict[tuple[int, ...], int] = {}

    def choose(self, prompt: list[int], loads: list[int]) -> int:
        lengths = range(self.chunk, min(len(prompt), self.chunk * self.max_chunks) + 1, self.chunk)
        beginnings = [tuple(prompt[:length]) for length in lengths]
        known = [self.sent[beginning] for beginning in beginnings if beginning in self.sent]
        chosen = loads.index(min(loads))
        if known and loads[known[-1]] - min(loads) <= self.slack:
            chosen = known[-1]
        self.sent |= dict.fromkeys(beginnings, chosen)
        return chosen


@given(st.integers(0, 1 << 40))
def test_choices_are_those_of_a_slow_router_that_keeps_every_beginning(seed: int) -> None:
    rng = random.Random(seed)
    chunk, max_chunks, slack = rng.randint(1, 4), rng.randint(1, 3), rng.randint(0, 3)
    router = PrefixAffinity(chunk_tokens=chunk, max_chunks=max_chunks, slack=slack)
    slow = SlowAffinity(chunk, max_chunks, slack)
    for _ in range(40):
        prompt = [rng.randrange(2) for _ in range(rng.randint(0, 14))]
        loads = [rng.randrange(6) for _ in range(3)]
        assert router.choose(array("i", prompt), loads) == slow.choose(prompt, loads)


def test_a_replica_may_have_sixteen_requests_more_than_another_and_the_beginning_moves_with_the_seventeenth() -> None:
    router, prompt = PrefixAffinity(), tokens(*range(16))
    assert router.choose(prompt, [0, 1]) == 0
    assert router.choose(prompt, [16, 0]) == 0
    assert router.choose(prompt, [17, 0]) == 1
    assert router.choose(prompt, [0, 16]) == 1, "it stays where it moved to"
    assert router.choose(tokens(*range(15)), [1, 0]) == 1, "less than a chunk is no beginning"


def test_no_more_than_the_first_64_chunks_of_16_tokens_count() -> None:
    for num_chunks, goes_where_it_went in ((63, True), (64, False)):
        router, shared = PrefixAffinity(), [7] * num_chunks * 16
        first, other = tokens(*shared, *[1] * 16), tokens(*shared, *[2] * 16)
        assert router.choose(first, [0, 1]) == 0
        assert router.choose(other, [17, 0]) == 1, "what they share has moved"
        assert router.choose(first, [0, 0]) == (0 if goes_where_it_went else 1)


def test_the_beginnings_used_longest_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MAX_BEGINNINGS", 2)
    router = PrefixAffinity(chunk_tokens=1)
    assert [router.choose(tokens(token), [0, 1]) for token in (1, 2, 1, 3)] == [0, 0, 0, 0]
    assert router.choose(tokens(1), [1, 0]) == 0, "it was used after 2"
    assert router.choose(tokens(3), [1, 0]) == 0
    assert router.choose(tokens(2), [1, 0]) == 1
