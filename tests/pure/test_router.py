"""The router against a plain model: sets of token prefixes, no hashes, reports that come late, twice or not at all."""

from __future__ import annotations

import random
from array import array
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.errors import InvalidConfigError, InvariantError
from quire.core.request import CacheScope
from quire.memory.cache_journal import CacheNews
from quire.routing import router as routing
from quire.routing.held_blocks import NO_CHANGE, HeldBlocks
from quire.routing.router import LEAST_LOADED, LEAST_WORK, ROUND_ROBIN, Loan, Router

BLOCK = 2
SCOPES = (CacheScope("a"), CacheScope("b", salt="s"), CacheScope("a", adapter="d"))
Prefix = tuple[CacheScope, tuple[int, ...]]


def prefixes(scope: CacheScope, tokens: list[int]) -> list[Prefix]:
    ends = range(BLOCK, len(tokens) - len(tokens) % BLOCK + 1, BLOCK)
    return [(scope, tuple(tokens[:end])) for end in ends]


def make_router(policy: str = LEAST_WORK, num_engines: int = 3) -> Router:
    router = Router(BLOCK, b"one key", policy)
    for index in range(num_engines):
        router.add(index)
    return router


def routed(router: Router, prefix: Prefix) -> bytes:
    """The name of the last block of a prefix."""
    scope, tokens = prefix
    return router.prompt(array("i", tokens), scope).digests[-1]


class PlainEngine:
    """What one engine holds, and its reports. A report of a survey has everything."""

    def __init__(self) -> None:
        self.holds: set[Prefix] = set()
        self.reported: set[Prefix] = set()
        self.seq = self.survey = 0
        self.begins = False
        self.begin()

    def begin(self) -> None:
        self.survey += 1
        self.begins, self.reported = True, set()

    def report(self, router: Router) -> CacheNews:
        added, removed = self.holds - self.reported, self.reported - self.holds
        self.reported, self.seq = set(self.holds), self.seq + 1
        columns = (b"".join(routed(router, prefix) for prefix in some) for some in (added, removed))
        news = CacheNews(self.seq, self.survey, self.begins, *columns)
        self.begins = False
        return news


class PlainRequest:
    def __init__(self, path: list[Prefix], num_tokens: int, known: int) -> None:
        self.path = path
        self.awaited = set(path[known:])
        self.waiting = max(1, num_tokens - BLOCK * known)


class PlainTarget:
    """What the router should know of an engine whose reports all came."""

    def __init__(self) -> None:
        self.holds: set[Prefix] = set()
        self.requests: dict[str, PlainRequest] = {}
        self.is_open = True
        self.last_chosen = 0

    def known(self, path: list[Prefix]) -> int:
        expected = {prefix for request in self.requests.values() for prefix in request.path} | self.holds
        return next((number for number, prefix in enumerate(path) if prefix not in expected), len(path))

    def cost(self, path: list[Prefix], num_tokens: int) -> int:
        own = max(1, num_tokens - BLOCK * self.known(path))
        waiting = sum(request.waiting for request in self.requests.values())
        return own + waiting + routing.REQUEST_WEIGHT * len(self.requests)

    def learn(self, holds: set[Prefix]) -> None:
        for request in self.requests.values():
            computed = request.awaited & (holds - self.holds)
            request.awaited -= computed
            request.waiting -= min(request.waiting, BLOCK * len(computed))
        self.holds = set(holds)


class PlainRouter:
    def __init__(self) -> None:
        self.targets: dict[int, PlainTarget] = {}
        self.num_choices = 0

    def choose(self, name: str, scope: CacheScope, tokens: list[int]) -> int | None:
        self.finished(name)
        path = prefixes(scope, tokens)
        costs = {
            index: (target.cost(path, len(tokens)), target.last_chosen, index)
            for index, target in self.targets.items()
            if target.is_open
        }
        if not costs:
            return None
        index = min(costs, key=lambda each: costs[each])
        target = self.targets[index]
        self.num_choices += 1
        target.last_chosen = self.num_choices
        target.requests[name] = PlainRequest(path, len(tokens), target.known(path))
        return index

    def started(self, name: str) -> None:
        for target in self.targets.values():
            if name in target.requests:
                target.requests[name].waiting = 0
                target.requests[name].awaited = set()

    def finished(self, name: str) -> None:
        for target in self.targets.values():
            target.requests.pop(name, None)


class Play:
    """Engines, a router and its model; what happens is drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.router, self.model = make_router(num_engines=0), PlainRouter()
        self.engines: dict[int, PlainEngine] = {}
        self.on_the_way: dict[int, deque[CacheNews]] = {}
        self.most_held: dict[int, int] = {}
        self.past: list[Prefix] = [(SCOPES[0], (1, 2))]
        self.num_named = 0
        for index in range(3):
            self.begin(index)

    def begin(self, index: int) -> None:
        """An engine comes, for the first time or again."""
        if index not in self.engines:
            self.router.add(index)
            self.model.targets[index] = PlainTarget()
            self.engines[index], self.on_the_way[index], self.most_held[index] = PlainEngine(), deque(), 0

    def lose(self, index: int) -> None:
        lost = self.router.lose(index)
        target = self.model.targets.pop(index, None)
        assert lost == ([] if target is None else list(target.requests))
        self.engines.pop(index, None)
        late = self.on_the_way.pop(index, deque())
        assert not any(self.router.note(index, news) for news in late), "nobody is asked for a survey"

    def draw_prompt(self) -> tuple[CacheScope, list[int]]:
        scope, tokens = self.rng.choice(self.past)
        kept = tokens[: self.rng.randint(0, len(tokens))]
        own = [self.rng.randrange(3) for _ in range(self.rng.randint(0 if kept else 1, 7))]
        drawn = (scope if self.rng.random() < 0.8 else self.rng.choice(SCOPES)), [*kept, *own]
        self.past = [*self.past, (drawn[0], tuple(drawn[1]))][-20:]
        return drawn

    def some_request(self) -> str:
        return f"r{self.rng.randint(max(1, self.num_named - 8), self.num_named + 1)}"

    def compute_some(self, index: int) -> None:
        """An engine gets and loses blocks, as it likes."""
        engine, target = self.engines[index], self.model.targets[index]
        paths = [request.path for request in target.requests.values()] or [prefixes(*self.draw_prompt())]
        path = self.rng.choice(paths)
        engine.holds |= set(path[: self.rng.randint(0, len(path))])
        for prefix in self.rng.sample(sorted(engine.holds, key=repr), len(engine.holds) // 3):
            if self.rng.random() < 0.5:
                engine.holds.discard(prefix)
        self.most_held[index] = max(self.most_held[index], len(engine.holds))
        self.on_the_way[index].append(engine.report(self.router))

    def deliver_all(self, index: int) -> None:
        """Every report arrives, in its order."""
        reports, engine = self.on_the_way[index], self.engines[index]
        while reports:
            if self.router.note(index, reports.popleft()):
                engine.begin()
                reports.append(engine.report(self.router))
        self.model.targets[index].learn(engine.reported)

    def deliver_badly(self, index: int) -> None:
        """Reports are lost, doubled and swapped."""
        reports = list(self.on_the_way[index])
        reports = [news for news in reports for _ in range(self.rng.choice([0, 1, 1, 1, 2]))]
        if self.rng.random() < 0.3:
            self.rng.shuffle(reports)
        self.on_the_way[index].clear()
        for news in reports:
            if self.router.note(index, news):
                self.engines[index].begin()
                self.on_the_way[index].append(self.engines[index].report(self.router))

    def turn(self, is_lossy: bool) -> None:
        index, kind = self.rng.randrange(3), self.rng.randrange(12)
        if kind < 5:
            self.num_named += 1
            name = self.some_request() if self.rng.random() < 0.1 else f"r{self.num_named}"
            scope, tokens = self.draw_prompt()
            chosen = self.router.choose(name, self.router.prompt(array("i", tokens), scope))
            if is_lossy:
                assert (chosen is None) == (not any(target.is_open for target in self.model.targets.values()))
                self.model.finished(name)
                if chosen is not None:
                    self.model.targets[chosen].requests[name] = PlainRequest(prefixes(scope, tokens), 1, 0)
            else:
                assert chosen == self.model.choose(name, scope, tokens)
        elif kind < 7:
            name = self.some_request()
            self.router.started(name)
            self.model.started(name)
        elif kind < 9:
            name = self.some_request()
            self.router.finished(name)
            self.model.finished(name)
        elif index not in self.engines:
            self.begin(index)
        elif kind < 11:
            self.compute_some(index)
            self.deliver_badly(index) if is_lossy else self.deliver_all(index)
        else:
            self.change(index)
        self.router.check()

    def change(self, index: int) -> None:
        what = self.rng.randrange(3)
        if what == 0:
            self.lose(index)
        elif what == 1:
            self.router.pause(index)
            self.model.targets[index].is_open = False
        else:
            self.router.resume(index)
            self.model.targets[index].is_open = True


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 40))
def test_choices_are_those_of_a_plain_model_that_knows_all_sets(seed: int) -> None:
    play = Play(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "REQUEST_WEIGHT", seed % 4)  # the prompts are short
        for _ in range(150):
            play.turn(is_lossy=False)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 40))
def test_whatever_happens_to_reports_the_router_knows_all_sets_after_the_next_report(seed: int) -> None:
    play = Play(seed)
    for _ in range(100):
        play.turn(is_lossy=True)
        for index, target in play.router._targets.items():
            assert len(target.held) <= play.most_held[index], "more than the engine ever held"
    for index in range(3):
        play.begin(index)
        for _ in range(3):  # a survey that was lost is asked for again at the next report
            play.compute_some(index)
            play.deliver_all(index)
        engine, held = play.engines[index], play.router._targets[index].held
        assert len(held) == len(engine.holds)
        assert all(routed(play.router, prefix) in held for prefix in engine.holds)


def test_nothing_is_kept_of_requests_that_ended_and_engines_that_were_lost() -> None:
    play = Play(7)
    for _ in range(300):
        play.turn(is_lossy=True)
    for number in range(play.num_named + 2):
        play.router.finished(f"r{number}")
        play.model.finished(f"r{number}")
    for target in play.router._targets.values():
        assert not (target.requests or target.num_waiting_tokens or target._expected or target._awaited)
        assert len(target._known) == len(target.held)
    for index in range(3):
        play.lose(index)
    assert not play.router._targets
    assert not play.router._places


# ---- what it is for -------------------------------------------------------------------------------------------------


def test_equal_prefixes_stay_together_until_their_engine_has_more_to_do_than_the_prefix_saves() -> None:
    router = make_router(num_engines=2)
    shared = list(range(4000))
    chosen = []
    for number in range(400):
        chosen.append(router.choose(f"r{number}", router.prompt(array("i", [*shared, number, number]))))
        if number == 0:
            router.started("r0")
    changed = chosen.index(1)
    assert chosen[:changed] == [0] * changed
    work_there = (2 + routing.REQUEST_WEIGHT) * changed
    assert work_there >= len(shared) > work_there - 3 * (2 + routing.REQUEST_WEIGHT)
    assert chosen[changed:].count(0) > 50, "for one request, not for good"


def test_equal_requests_in_the_same_moment_do_not_go_to_the_same_engine() -> None:
    router = make_router(num_engines=3)
    different = [router.prompt(array("i", [n] * 10)) for n in range(6)]
    assert [router.choose(f"r{n}", prompt) for n, prompt in enumerate(different)] == [0, 1, 2, 0, 1, 2]


def test_tenants_with_other_salts_or_adapters_do_not_meet() -> None:
    router = make_router()
    tokens = array("i", range(10))
    places = [router.choose(f"{scope}", router.prompt(tokens, scope)) for scope in SCOPES]
    assert sorted(each for each in places if each is not None) == [0, 1, 2]
    assert router.choose("again", router.prompt(tokens, SCOPES[1])) == places[1]


def test_no_engine_is_chosen_that_is_silent_draining_or_lost() -> None:
    router = make_router()
    prompt = router.prompt(array("i", range(10)))
    assert router.choose("a", prompt) == 0
    router.pause(0)
    assert router.choose("b", prompt) == 1
    assert router.lose(1) == ["b"]
    assert router.choose("b", prompt) == 2
    router.pause(2)
    assert router.choose("c", prompt) is None
    router.pause(1)
    router.resume(0)
    assert router.choose("c", prompt) == 0
    assert list(router.under_way(0)) == ["a", "c"]
    assert list(router.under_way(1)) == []


def test_each_choice_has_a_reason() -> None:
    router = make_router(num_engines=2)
    shared = router.prompt(array("i", range(1000)))
    assert router.routes(0) == router.routes(7) == {"prefix": 0, "load": 0, "new": 0, "only": 0}
    assert router.choose("first", shared) == 0
    router.started("first")
    assert [router.choose(f"next {n}", shared) for n in range(3)] == [0, 0, 0]
    router.choose("busy", router.prompt(array("i", [5000] * 4)))
    assert router.routes(1) == {"prefix": 0, "load": 0, "new": 1, "only": 0}
    short = router.prompt(array("i", range(20)))
    assert router.choose("short", short) == 1, "the other one holds it, and has too much to do"
    assert router.routes(1) == {"prefix": 0, "load": 1, "new": 1, "only": 0}
    router.pause(1)
    router.choose("alone", short)
    assert router.routes(0) == {"prefix": 3, "load": 0, "new": 1, "only": 1}
    router.lose(0)
    router.add(0)
    assert sum(router.routes(0).values()) == 5, "an engine that was started again goes on counting"


def test_the_holder_of_a_prompt_is_who_holds_it_now() -> None:
    router, engines = make_router(), [PlainEngine() for _ in range(3)]
    tokens = [1, 2, 3, 4, 5, 6, 7]
    prompt = router.prompt(array("i", tokens))
    assert router.holder(prompt, [1, 2]) == 1
    router.choose("under way", prompt)
    assert router.holder(prompt, [2, 0]) == 2, "one that is to compute it has nothing yet"
    for engine, num_held in zip(engines, (1, 0, 2), strict=True):
        engine.holds = set(prefixes(CacheScope(), tokens)[:num_held])
    for index, engine in enumerate(engines):
        router.note(index, engine.report(router))
    assert [router.holder(prompt, some) for some in ([0, 1, 2], [0, 1], [1])] == [2, 0, 1]


def test_the_other_policies() -> None:
    prompt = make_router().prompt(array("i", range(10)))
    turns = make_router(ROUND_ROBIN)
    assert [turns.choose(f"r{n}", prompt) for n in range(5)] == [0, 1, 2, 0, 1]
    loaded = make_router(LEAST_LOADED)
    assert [loaded.choose(f"r{n}", prompt) for n in range(3)] == [0, 1, 2]
    loaded.finished("r1")
    assert loaded.choose("r3", prompt) == 1
    with pytest.raises(InvalidConfigError) as caught:
        make_router("random")
    assert str(caught.value) == "router is 'random'; allowed: one of round_robin, least_loaded, least_work"


def test_an_engine_is_added_once() -> None:
    with pytest.raises(InvariantError):
        make_router().add(0)


def test_progress_of_a_long_prompt_is_read_from_its_blocks() -> None:
    router = make_router(num_engines=2)
    long, short = router.prompt(array("i", [7] * 1000)), [array("i", [n] * 300) for n in range(8)]
    assert router.choose("long", long) == 0
    assert router.choose("other", router.prompt(short[0])) == 1
    assert router.choose("more", router.prompt(short[1])) == 1
    router.note(0, CacheNews(1, 1, True, b"".join(long.digests[:450]), b""))
    assert router.choose("next", router.prompt(short[2])) == 0, "100 tokens wait there, and 600 at the other"


def test_a_survey_is_asked_for_once_for_a_gap_and_again_if_it_was_lost() -> None:
    held = HeldBlocks()
    assert held.note(CacheNews(1, 1, True, b"a" * 8, b"")) == ([b"a" * 8], [])
    assert held.note(CacheNews(1, 1, True, b"z" * 8, b"")) == NO_CHANGE, "twice"
    assert held.note(CacheNews(3, 1, False, b"b" * 8, b"")) is None, "the second is missing"
    assert held.note(CacheNews(4, 1, False, b"c" * 8, b"")) == NO_CHANGE, "a survey was asked for"
    assert held.note(CacheNews(2, 1, False, b"d" * 8, b"")) == NO_CHANGE, "late"
    assert b"a" * 8 in held
    assert held.note(CacheNews(6, 2, False, b"e" * 8, b"")) is None, "the beginning of the survey is missing"
    assert held.note(CacheNews(7, 3, True, b"f" * 8, b"")) == ([b"f" * 8], [b"a" * 8])
    assert len(held) == 1
    assert held.note(CacheNews(8, 3, False, b"g" * 8, b"f" * 8)) == ([b"g" * 8], [b"f" * 8])
    assert b"f" * 8 not in held


@given(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4))
def test_another_engine_lends_what_it_holds_and_the_chosen_one_does_not_know(one: int, other: int, own: int) -> None:
    tokens, scope = list(range(2 * BLOCK * 2)), SCOPES[1]
    router = make_router()
    for index, num_blocks in enumerate((one, other, own)):
        engine = PlainEngine()
        engine.holds = set(prefixes(scope, tokens)[:num_blocks])
        router.note(index, engine.report(router))
    for index in (0, 1):
        router.pause(index)
    prompt = router.prompt(array("i", tokens), scope)
    assert router.choose("first", prompt) == 2
    index = max((0, 1), key=(one, other).__getitem__)
    expected = Loan(index, max(one, other), own) if max(one, other) > own else None
    assert router.lender("first", prompt, [0, 1]) == expected
    assert router.lender("first", prompt, []) is None
    router.choose("second", prompt)
    assert router.lender("second", prompt, [0, 1]) is None, "the first one computes it, or waits for it"
