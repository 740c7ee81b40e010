"""Which models are loaded: the policy alone, on a clock that the test turns."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.clock import ManualClock
from quire.core.errors import InvariantError
from quire.serve.loading.residency import MIN_RESIDENCY_S, Load, Phase, Residency, Unload

KEEP_S = 60.0


class Player:
    """Does what the policy says, at once, and lets calls stay that wait."""

    def __init__(self, budget: int, keep_alive_s: float = KEEP_S, **sizes: int) -> None:
        self.clock = ManualClock(1000.0)
        self.residency = Residency(self.clock, budget, sizes, keep_alive_s)
        self.waiting: list[tuple[str, str]] = []
        self.inside: list[tuple[str, str]] = []
        self.done: list[Load | Unload] = []

    def call(self, name: str, tenant: str = "") -> None:
        """A call comes; it stays at once where it may."""
        if self.residency.admits(name):
            self.residency.begin(name)
            self.inside.append((name, tenant))
        else:
            self.residency.wait(name, tenant)
            self.waiting.append((name, tenant))
        self.play()

    def end(self, name: str, tenant: str = "") -> None:
        self.inside.remove((name, tenant))
        self.residency.end(name)
        self.play()

    def leave(self, name: str, tenant: str = "") -> None:
        self.waiting.remove((name, tenant))
        self.residency.stop_waiting(name, tenant)
        self.play()

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.play()

    def play(self) -> None:
        while True:
            self.grant()
            step = self.residency.next_step()
            self.residency.check()
            if step is None:
                return
            self.done.append(step)
            if isinstance(step, Load):
                self.residency.note_loaded(step.name)
            else:
                self.residency.note_unloaded(step.name)

    def grant(self) -> None:
        for name, tenant in [each for each in self.waiting if self.residency.admits(each[0])]:
            self.waiting.remove((name, tenant))
            self.residency.stop_waiting(name, tenant)
            self.residency.begin(name)
            self.inside.append((name, tenant))

    @property
    def loaded(self) -> list[str]:
        names = self.residency._residents
        return [name for name in names if self.residency.phase(name) is Phase.LOADED]


def test_a_model_is_loaded_for_its_first_call_and_unloaded_after_its_last() -> None:
    player = Player(10, a=4, b=4)
    player.call("a")
    assert player.loaded == ["a"]
    player.pass_time(10 * KEEP_S)
    assert player.loaded == ["a"], "a call is at it"
    player.end("a")
    player.pass_time(KEEP_S - 1)
    assert player.residency.expires_in_s("a") == 1
    assert player.loaded == ["a"]
    player.pass_time(1)
    assert player.done == [Load("a"), Unload("a")]


def test_a_call_renews_the_time_and_keep_alive_changes_it_until_the_model_goes() -> None:
    player = Player(10, a=4)
    player.call("a")
    player.end("a")
    player.pass_time(KEEP_S / 2)
    player.call("a")
    player.end("a")
    player.pass_time(KEEP_S * 0.75)
    assert player.loaded == ["a"]
    player.residency.keep("a", math.inf)
    player.pass_time(1000 * KEEP_S)
    assert player.loaded == ["a"]
    player.residency.keep("a", 0.0)
    player.play()
    assert player.loaded == []
    player.call("a")
    player.end("a")
    assert player.residency.expires_in_s("a") == KEEP_S


def test_the_idle_model_that_was_used_least_recently_makes_room() -> None:
    player = Player(10, a=4, b=4, c=4)
    for name in ("a", "b"):
        player.call(name)
        player.end(name)
        player.pass_time(MIN_RESIDENCY_S)
    player.call("a")
    player.end("a")
    player.call("c")
    assert player.loaded == ["a", "c"]


def test_a_large_model_lets_go_no_more_than_it_needs() -> None:
    player = Player(10, a=2, b=5, c=3, large=5)
    for name in ("a", "b", "c"):
        player.call(name)
        player.end(name)
        player.pass_time(1)
    player.pass_time(MIN_RESIDENCY_S)
    player.call("large")
    assert player.loaded == ["a", "c", "large"], "b alone is enough"


def test_a_busy_model_ends_its_calls_and_admits_no_new_ones() -> None:
    player = Player(10, a=6, b=6)
    player.call("a", "first")
    player.pass_time(MIN_RESIDENCY_S)
    player.call("b")
    player.call("a", "late")
    assert (player.loaded, player.waiting) == (["a"], [("b", ""), ("a", "late")])
    player.end("a", "first")
    assert player.loaded == ["b"]
    assert player.waiting == [("a", "late")]
    player.end("b")
    assert player.loaded == ["b"], "it has just been loaded"
    player.pass_time(MIN_RESIDENCY_S)
    assert player.loaded == ["a"]
    assert player.done == [Load("a"), Unload("a"), Load("b"), Unload("b"), Load("a")]


def test_where_the_one_that_waited_leaves_the_busy_model_admits_calls_again() -> None:
    player = Player(10, a=6, b=6)
    player.call("a")
    player.pass_time(MIN_RESIDENCY_S)
    player.call("b")
    player.call("a", "late")
    player.leave("b")
    assert player.inside == [("a", ""), ("a", "late")]


def test_two_models_that_do_not_fit_together_do_not_push_each_other_out_with_every_call() -> None:
    player = Player(10, a=6, b=6)
    calls = 0
    for _ in range(1000):  # a flood: a call for each, ten times a second
        for name in ("a", "b"):
            if (name, "") not in player.waiting:
                player.call(name)
            while (name, "") in player.inside:
                player.end(name)
                calls += 1
        player.pass_time(0.1)
    num_loads = sum(isinstance(step, Load) for step in player.done)
    assert 0.8 * 100 / MIN_RESIDENCY_S <= num_loads <= 100 / MIN_RESIDENCY_S + 1
    assert calls > 900


def test_tenants_take_turns_at_having_models_loaded() -> None:
    player = Player(1, **dict.fromkeys("abcdefz", 1))
    player.call("a", "greedy")
    for name in "bcdef":
        player.call(name, "greedy")
    player.call("z", "modest")
    player.end("a", "greedy")
    player.pass_time(MIN_RESIDENCY_S)
    assert player.loaded == ["b"], "whose turn it was when the modest one came"
    player.end("b", "greedy")
    player.pass_time(MIN_RESIDENCY_S)
    assert player.loaded == ["z"]


def test_models_are_loaded_in_the_order_of_their_first_calls() -> None:
    player = Player(1, **dict.fromkeys("abcd", 1))
    for name in "adcb":
        player.call(name)
    for name in "adcb":
        player.end(name)
        player.pass_time(MIN_RESIDENCY_S)
    assert [step.name for step in player.done if isinstance(step, Load)] == list("adcb")


def test_a_model_whose_engine_is_lost_is_loaded_again() -> None:
    player = Player(10, a=4)
    player.call("a")
    player.residency.note_lost("a")
    assert not player.residency.admits("a")
    player.call("a", "late")
    player.end("a")
    assert player.done == [Load("a"), Unload("a"), Load("a")]
    assert player.inside == [("a", "late")]


def test_a_model_larger_than_the_budget_is_loaded_alone() -> None:
    player = Player(10, a=4, huge=12)
    player.call("huge")
    assert player.loaded == ["huge"]


def test_what_does_not_follow_is_a_mistake_of_ours() -> None:
    residency = Residency(ManualClock(), 10, {"a": 4}, KEEP_S)
    for wrong in (residency.begin, residency.end, residency.note_loaded, residency.note_unloaded):
        with pytest.raises(InvariantError):
            wrong("a")
    with pytest.raises(InvariantError):
        residency.stop_waiting("a", "")


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["call", "end", "leave", "time", "keep"]),
        st.integers(0, 3),
        st.sampled_from(["", "x"]),
        st.sampled_from([0.5, MIN_RESIDENCY_S, KEEP_S]),
    ),
    max_size=60,
)


@given(ACTIONS, st.lists(st.integers(1, 10), min_size=4, max_size=4), st.sampled_from([0.0, KEEP_S, math.inf]))
def test_every_call_gets_its_turn_and_the_budget_holds(
    actions: list[tuple[str, int, str, float]], sizes: list[int], keep_alive_s: float
) -> None:
    names = "abcd"
    player = Player(10, keep_alive_s, **dict(zip(names, sizes, strict=True)))
    for action, index, tenant, seconds in actions:
        name = names[index]
        match action:
            case "call":
                player.call(name, tenant)
            case "end" if (name, tenant) in player.inside:
                player.end(name, tenant)
            case "leave" if (name, tenant) in player.waiting:
                player.leave(name, tenant)
            case "time":
                player.pass_time(seconds)
            case "keep":
                player.residency.keep(name, seconds)
                player.play()
    for _ in range(200):  # calls end some time, so each that waits has its turn
        if not player.waiting and not player.inside:
            break
        for name, tenant in list(player.inside):
            player.end(name, tenant)
        look_s = player.residency.next_look_s()
        if look_s is not None and look_s < math.inf:
            player.pass_time(max(look_s - player.clock.now(), 0.0))
    assert not player.waiting
    assert not player.inside
