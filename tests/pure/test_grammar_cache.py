"""GrammarCache: its bytes are those of what it keeps, whoever finds out, puts or drops meanwhile."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.compute.grammar.cache import GrammarCache
from quire.core.errors import InvariantError
from quire.core.grammar import Grammar

GRAMMARS = [Grammar.regex(letter) for letter in "abcdef"]
A, B, C = GRAMMARS[:3]


def cache_of(max_bytes: int = 100) -> GrammarCache[str]:
    """What is known weighs its length, and up to twice that."""
    return GrammarCache(max_bytes, lambda grammar, known: (len(known), 2 * len(known)))


def never(grammar: Grammar) -> str:
    raise AssertionError(f"{grammar.text} is known already")


def test_what_was_found_out_is_kept_and_asked_once() -> None:
    cache = cache_of()
    assert (cache.get(A, lambda grammar: grammar.text * 3), cache.get(A, never)) == ("aaa", "aaa")
    assert (len(cache), cache.num_bytes, cache.knows(A), cache.knows(B)) == (1, 3, True, False)
    assert cache.get(Grammar("regex", "a", owner="other"), lambda _: "theirs") == "theirs"


def test_the_one_used_longest_ago_goes_when_there_is_no_room() -> None:
    cache = cache_of(10)
    for grammar in (A, B, C):
        cache.get(grammar, lambda _: "xxx")
    cache.get(A, never)
    cache.get(GRAMMARS[3], lambda _: "xx")
    assert [grammar in cache for grammar in GRAMMARS[:4]] == [True, False, True, True]
    assert cache.num_bytes == 8
    cache.get(B, lambda _: "x" * 11)
    assert (len(cache), cache.num_bytes) == (0, 0), "what is larger than all room is not kept"
    cache.get(B, lambda _: "x" * 10)
    assert cache.num_bytes == 10


def test_what_grows_is_counted_up_to_its_most() -> None:
    cache = cache_of(10)
    cache.get(A, lambda _: "xxx")
    cache.grow(A, 2)
    assert cache.num_bytes == 5
    cache.grow(A, 100)
    assert cache.num_bytes == 6
    cache.grow(B, 100)
    assert cache.num_bytes == 6
    cache.get(B, lambda _: "xxxx")
    cache.grow(B, 1)
    assert (A in cache, B in cache, cache.num_bytes) == (False, True, 5)
    cache.drop(B)
    cache.drop(B)
    cache.grow(B, 1)
    assert (len(cache), cache.num_bytes) == (0, 0)


def test_what_failed_is_found_out_again() -> None:
    cache = cache_of()
    with pytest.raises(LookupError):
        cache.get(A, lambda grammar: {}[grammar])  # type: ignore[index]
    assert (len(cache), cache.knows(A)) == (0, False)
    assert cache.get(A, lambda _: "now") == "now"


def test_of_those_who_ask_at_once_one_finds_out_and_the_others_wait() -> None:
    cache, begun, may_end, num_asked = cache_of(), threading.Event(), threading.Event(), []

    def find_out(grammar: Grammar) -> str:
        num_asked.append(1)
        begun.set()
        assert may_end.wait(300)
        return "found"

    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(cache.get, A, find_out)
        assert begun.wait(300)
        others = [threads.submit(cache.get, A, find_out) for _ in range(2)]
        assert not cache.knows(A)
        may_end.set()
        assert [each.result(300) for each in (first, *others)] == ["found"] * 3
    assert (len(num_asked), cache.num_bytes) == (1, 5)


def test_what_is_put_meanwhile_stays_and_is_counted_once() -> None:
    """A grammar is condemned by the engine while a request asks for its verdict."""
    cache = cache_of()

    def find_out(grammar: Grammar) -> str:
        cache.put(grammar, "condemned")
        return "it is fine"

    assert cache.get(A, find_out) == "it is fine"
    cache.check()
    assert (cache.get(A, never), cache.num_bytes) == ("condemned", len("condemned"))


def test_what_is_put_meanwhile_stays_where_finding_out_fails() -> None:
    cache = cache_of()

    def find_out(grammar: Grammar) -> str:
        cache.put(grammar, "condemned")
        raise LookupError

    with pytest.raises(LookupError):
        cache.get(A, find_out)
    cache.check()
    assert cache.get(A, never) == "condemned"


def test_what_is_dropped_meanwhile_and_asked_for_again_is_counted_once() -> None:
    cache = cache_of()

    def find_out(grammar: Grammar) -> str:
        cache.drop(grammar)
        assert cache.get(grammar, lambda _: "again") == "again"
        return "too late"

    assert cache.get(A, find_out) == "too late"
    cache.check()
    assert (cache.get(A, never), cache.num_bytes) == ("again", 5)


@given(st.integers(0, 1 << 40))
def test_the_bytes_are_those_of_what_is_kept_after_whatever_was_done(seed: int) -> None:
    rng = random.Random(seed)
    cache = cache_of(rng.randint(1, 30))

    def act(depth: int) -> None:
        grammar, known = rng.choice(GRAMMARS), "x" * rng.randint(1, 12)
        match rng.randrange(4):
            case 0:
                cache.put(grammar, known)
            case 1:
                cache.drop(grammar)
            case 2:
                cache.grow(grammar, rng.randint(0, 9))
            case _ if depth == 0 or cache.knows(grammar):
                cache.get(grammar, lambda _: found_out(known, depth))

    def found_out(known: str, depth: int) -> str:
        for _ in range(rng.randint(0, 2)):  # meanwhile, as other threads would
            act(depth + 1)
        if rng.random() < 0.2:
            raise LookupError
        return known

    for _ in range(25):
        with suppress(LookupError):
            act(0)
        cache.check()
    for grammar in GRAMMARS:
        cache.drop(grammar)
    assert (len(cache), cache.num_bytes) == (0, 0)


def test_a_cache_whose_bytes_are_wrong_is_found_out() -> None:
    cache = cache_of()
    cache.put(A, "xxx")
    cache.num_bytes += 1
    with pytest.raises(InvariantError, match=r"^the bytes counted for grammars are not the sum of the entries$"):
        cache.check()
    cache.num_bytes -= 1
    cache.max_bytes = 2
    with pytest.raises(InvariantError, match=r"^the grammars take more bytes than their limit$"):
        cache.check()
