"""The gate: what may wait, who may have how much, and when to come again."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.clock import ManualClock
from quire.core.request import CacheScope
from quire.engine.records.stats import ModelState
from quire.serve.config import ServerConfig
from quire.serve.errors import ApiError
from quire.serve.gate import MAX_RETRY_S, MIN_RETRY_S, Gate, Refusal, Visit
from quire.serve.gate_limits import GateLimits, gate_limits
from quire.serve.tenants import ANYBODY, Tenant
from support.bare_server import FakeModel


class Gated:
    """A gate with the state and the time that a test says."""

    def __init__(
        self,
        max_sequences: int = 8,
        max_tokens: int = 1000,
        max_wait_s: float | None = None,
        *,
        has_tenants: bool = False,
    ) -> None:
        self.clock = ManualClock()
        self.state = ModelState.READY
        limits = GateLimits(max_sequences, max_tokens, max_wait_s, has_tenants, takes_turns=has_tenants)
        self.gate = Gate(self.clock, limits, lambda: self.state)

    def enter(self, num_sequences: int = 1, num_tokens: int = 10, tenant: Tenant = ANYBODY) -> Visit:
        return self.gate.enter(tenant, num_sequences, num_tokens)

    def refusal(self, *arguments: Any, **options: Any) -> ApiError:
        with pytest.raises(ApiError) as caught:
            self.enter(*arguments, **options)
        self.gate.check()
        return caught.value


def tenant(name: str, max_sequences: int | None = None) -> Tenant:
    return Tenant(name, CacheScope(name), max_sequences)


def retry_s(error: ApiError) -> float:
    seconds = int(error.headers["retry-after-ms"]) / 1000
    assert int(error.headers["retry-after"]) >= seconds > int(error.headers["retry-after"]) - 1
    return seconds


def test_the_queue_is_bounded_in_requests() -> None:
    gated = Gated(max_sequences=3)
    visits = [gated.enter() for _ in range(3)]
    error = gated.refusal()
    assert (error.status, error.detail.code) == (503, "server_is_overloaded")
    visits[0].begin()
    visits.append(gated.enter())
    gated.refusal()
    assert gated.gate.refusals[Refusal.QUEUE_FULL] == 2
    assert (gated.gate.num_waiting_sequences, gated.gate.num_visits) == (3, 4)


def test_the_queue_is_bounded_in_tokens() -> None:
    gated = Gated(max_tokens=100)
    with gated.enter(1, 60):
        gated.refusal(1, 41)
        with gated.enter(1, 40):
            gated.refusal(1, 1)
    assert gated.gate.num_waiting_tokens == 0


def test_whoever_finds_nobody_waiting_comes_in() -> None:
    gated = Gated(max_sequences=2, max_tokens=10)
    with gated.enter(100, 10_000) as large:
        gated.refusal(1, 1)
        large.begin()
        with gated.enter(50, 1):
            gated.refusal(1, 1)
            assert gated.gate.num_waiting_sequences == 50
    assert (gated.gate.num_waiting_sequences, gated.gate.num_visits) == (0, 0)


def test_a_call_begins_once_and_leaves_once() -> None:
    gated = Gated()
    with gated.enter(3, 30) as visit:
        assert (gated.gate.num_waiting_sequences, gated.gate.num_waiting_tokens) == (3, 30)
        visit.begin()
        visit.begin()
        assert (gated.gate.num_waiting_sequences, gated.gate.num_sequences) == (0, 3)
        gated.gate.check()
        visit.__exit__(None, None, None)
    visit.begin()
    assert (gated.gate.num_waiting_sequences, gated.gate.num_sequences, gated.gate.num_visits) == (0, 0, 0)
    gated.gate.check()


def test_a_key_has_its_share_and_no_more() -> None:
    gated = Gated()
    alice, bob = tenant("alice", 2), tenant("bob")
    with gated.enter(tenant=alice) as first:
        first.begin()
        with gated.enter(tenant=alice), gated.enter(5, tenant=bob):
            error = gated.refusal(tenant=alice)
            assert (error.status, error.detail.code) == (429, "slow_down")
            assert retry_s(error) >= MIN_RETRY_S
    with gated.enter(6, tenant=alice):  # alone, a call may be larger than the share: it could never come in otherwise
        assert gated.refusal(tenant=alice).status == 429
    assert gated.gate.refusals[Refusal.KEY_LIMIT] == 2


def test_nobody_comes_in_while_the_server_drains_or_the_engine_is_not_there() -> None:
    gated = Gated()
    visit = gated.enter()
    for state in ModelState:
        gated.state = state
        assert gated.gate.is_ready == (state is ModelState.READY)
        if state is not ModelState.READY:
            assert gated.refusal().detail.code == "engine_unavailable"
    gated.state = ModelState.READY
    gated.gate.drain()
    error = gated.refusal()
    assert (error.status, error.detail.code, gated.gate.is_ready) == (503, "server_is_draining", False)
    assert gated.gate.num_visits == 1
    visit.__exit__(None, None, None)
    assert gated.gate.refusals == {Refusal.ENGINE: len(ModelState) - 1, Refusal.DRAINING: 1}


def test_whoever_cannot_come_in_at_all_learns_it_before_any_work() -> None:
    gated = Gated(max_sequences=2, max_tokens=100)
    alice = tenant("alice", 1)
    gated.gate.require_place(alice)
    with gated.enter(tenant=alice):
        with pytest.raises(ApiError) as caught:
            gated.gate.require_place(alice)
        assert caught.value.status == 429
        gated.gate.require_place(ANYBODY)
        with gated.enter(), pytest.raises(ApiError) as caught:
            gated.gate.require_place(ANYBODY)
        assert caught.value.status == 503
    assert gated.gate.refusals == {Refusal.KEY_LIMIT: 1, Refusal.QUEUE_FULL: 1}
    gated.gate.check()


def test_tokens_are_counted_right_once_they_are_known() -> None:
    gated = Gated(max_tokens=100)
    with gated.enter(2, 90) as visit:
        gated.refusal(1, 20)
        visit.correct(30)
        gated.gate.check()
        assert (gated.gate.num_waiting_sequences, gated.gate.num_waiting_tokens) == (2, 30)
        with gated.enter(1, 20) as other:
            other.correct(70)
            assert gated.gate.num_waiting_tokens == 100
            visit.begin()
            visit.correct(500)  # it waits no longer
            assert gated.gate.num_waiting_tokens == 70
            gated.gate.check()
    visit.correct(7)
    assert (gated.gate.num_waiting_tokens, gated.gate.num_visits) == (0, 0)
    gated.gate.check()


# ---- tenants --------------------------------------------------------------------------------------------------------


def fill(gated: Gated, name: str) -> int:
    """Let calls of a tenant in until one is refused; return how many came in."""
    for num_in in range(1000):
        try:
            gated.enter(1, 1, tenant(name))
        except ApiError as error:
            assert (error.status, error.detail.code) == (503, "server_is_overloaded")
            return num_in
    raise AssertionError("nobody was refused")


def test_a_tenant_may_have_waiting_what_is_still_free() -> None:
    gated = Gated(max_sequences=60, has_tenants=True)
    assert [fill(gated, name) for name in "abc"] == [30, 15, 8]
    assert gated.gate.num_waiting_sequences < 60
    gated.gate.check()


def test_the_tokens_of_a_queue_are_shared_as_its_places_are() -> None:
    gated = Gated(max_sequences=1000, max_tokens=100, has_tenants=True)
    alice, bob = tenant("alice"), tenant("bob")
    gated.enter(1, 40, alice)
    assert gated.refusal(1, 21, alice).status == 503
    gated.enter(1, 20, bob)
    gated.enter(1, 20, bob)


def test_a_tenant_with_nothing_waiting_is_let_in_whatever_others_have() -> None:
    gated = Gated(max_sequences=4, max_tokens=50, max_wait_s=1.0, has_tenants=True)
    gated.enter(128, 24_000, tenant("alice"))
    gated.clock.advance(3600.0)  # nothing has begun for an hour
    gated.refusal(1, 1, tenant("alice"))
    with gated.enter(32, 2000, tenant("bob")):
        gated.refusal(1, 1, tenant("bob"))
        with gated.enter(1, 1, tenant("carol")):
            gated.gate.check()
    gated.enter(1, 1, tenant("bob"))


def test_without_keys_all_are_one_tenant_with_the_whole_queue() -> None:
    gated = Gated(max_sequences=6)
    assert fill(gated, "") == 6


def test_where_tenants_take_turns_a_call_waits_for_its_own_not_for_the_whole_queue() -> None:
    gated = Gated(max_sequences=1000, max_wait_s=10.0, has_tenants=True)
    drained(gated, 2.0, 60)
    gated.enter(200, 1, tenant("alice"))
    assert gated.refusal(1, 1, tenant("alice")).status == 503
    gated.enter(1, 1, tenant("bob"))
    gated.enter(1, 1, tenant("bob"))  # two of his own and as many of hers: two seconds


# ---- when to come again ---------------------------------------------------------------------------------------------


def drained(gated: Gated, per_second: float, seconds: float) -> None:
    """Let requests begin at a steady rate, with always one more waiting."""
    for _ in range(round(per_second * seconds)):
        with gated.enter() as visit:
            gated.clock.advance(1 / per_second)
            visit.begin()


@pytest.mark.parametrize("per_second", [0.5, 2.0, 20.0])
def test_half_of_the_queue_will_have_begun(per_second: float) -> None:
    gated = Gated(max_sequences=40)
    drained(gated, per_second, 60)
    for _ in range(40):
        gated.enter(1, 1)
    expected = min(max(20 / per_second, MIN_RETRY_S), MAX_RETRY_S)
    assert retry_s(gated.refusal()) == 2 ** round(math.log2(expected))


def test_an_idle_hour_says_nothing_of_the_rate() -> None:
    gated = Gated(max_sequences=40)
    drained(gated, 10, 60)
    gated.clock.advance(3600)
    for _ in range(40):
        gated.enter(1, 1)
    assert retry_s(gated.refusal()) == 2


def test_a_share_that_is_used_up_tells_nothing_of_the_queue() -> None:
    gated = Gated(max_sequences=40)
    drained(gated, 0.1, 60)
    for _ in range(39):
        gated.enter(1, 1)
    gated.enter(1, 1, tenant("bob", 1))
    error = gated.refusal(1, 1, tenant("bob", 1))
    assert (error.status, retry_s(error)) == (429, MIN_RETRY_S)


def test_an_engine_that_stands_still_lets_clients_wait_longer_and_longer() -> None:
    gated = Gated(max_sequences=1)
    gated.enter()
    told = []
    for _ in range(60):
        told.append(retry_s(gated.refusal()))
        gated.clock.advance(1)
    assert told[0] == MIN_RETRY_S
    assert told == sorted(told)
    assert told[-1] > 10
    fast = Gated(max_sequences=10)
    drained(fast, 10, 60)
    for _ in range(10):
        fast.enter()
    fast.clock.advance(300)
    assert retry_s(fast.refusal()) == MAX_RETRY_S


@pytest.mark.parametrize("per_second", [0.5, 4.0, 20.0])
def test_who_would_wait_too_long_is_turned_away(per_second: float) -> None:
    gated = Gated(max_sequences=10_000, max_tokens=10**6, max_wait_s=10.0)
    drained(gated, per_second, 60)
    num_let_in = 0
    for _ in range(10_000):
        try:
            gated.enter(1, 1)
        except ApiError as error:
            assert (error.status, error.detail.code) == (503, "server_is_overloaded")
            assert "would wait longer than 10 seconds (max_wait_s)" in error.detail.message
            break
        num_let_in += 1
    assert num_let_in == pytest.approx(10 * per_second, rel=0.15)
    assert gated.gate.refusals == {Refusal.WAIT: 1}


def test_nobody_is_turned_away_for_a_wait_that_is_not_known() -> None:
    gated = Gated(max_sequences=1000, max_tokens=10**6, max_wait_s=10.0)
    gated.clock.advance(3600)
    visits = [gated.enter(1, 1) for _ in range(500)]
    gated.clock.advance(0.5)
    visits += [gated.enter(1, 1) for _ in range(200)]
    gated.clock.advance(1.0)
    assert gated.refusal().status == 503
    for visit in visits:
        visit.begin()
    gated.enter(1, 1)
    assert gated.gate.refusals == {Refusal.WAIT: 1}


def test_beside_one_slow_prompt_others_may_wait_until_it_has_taken_too_long() -> None:
    gated = Gated(max_sequences=1000, max_tokens=10**6, max_wait_s=30.0)
    gated.enter(1, 30_000)
    for _ in range(5):
        gated.clock.advance(1)
        gated.enter(1, 10).__exit__(None, None, None)
    gated.clock.advance(60)
    gated.refusal(1, 10)
    assert gated.gate.refusals == {Refusal.WAIT: 1}


def test_a_full_queue_is_told_to_the_log_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    gated = Gated(max_sequences=1)
    gated.enter()
    with caplog.at_level(logging.WARNING, "quire.serve"):
        for _ in range(5):
            gated.refusal()
        gated.clock.advance(20)
        gated.refusal()
    assert [record.getMessage() for record in caplog.records] == [
        "the queue is full: 1 sequences with 10 tokens wait, 1 calls refused",
        "the queue is full: 1 sequences with 10 tokens wait, 5 calls refused",
    ]


# ---- the limits -----------------------------------------------------------------------------------------------------


def test_limits_follow_the_engine_unless_they_are_set() -> None:
    model: Any = FakeModel(max_num_seqs=16, max_num_batched_tokens=64, block_size=32)
    assert gate_limits(ServerConfig(), model, 1) == GateLimits(64, 8 * 64 * 32, 30.0)
    config = ServerConfig(max_queued_sequences=5, max_queued_tokens=7, max_wait_s=None)
    assert gate_limits(config, model, 1) == GateLimits(5, 7)
    several = replace(config, max_queued_tokens=None, replicas="3")
    assert gate_limits(several, model, 1) == GateLimits(5, 8 * 64 * 32, of_each=("max_queued_tokens",))
    in_turn: Any = FakeModel(policy="fair_share")
    limits = gate_limits(config, in_turn, 2)
    assert limits == GateLimits(5, 7, has_tenants=True, takes_turns=True)


# ---- any course of events -------------------------------------------------------------------------------------------

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("enter"), st.sampled_from("ab"), st.integers(1, 5), st.integers(0, 60)),
        st.tuples(st.just("begin"), st.integers(0, 20)),
        st.tuples(st.just("correct"), st.integers(0, 20), st.integers(0, 60)),
        st.tuples(st.just("leave"), st.integers(0, 20)),
        st.tuples(st.just("pass"), st.floats(0, 50)),
        st.tuples(st.just("state"), st.sampled_from(ModelState)),
    ),
    max_size=60,
)


@given(EVENTS, st.booleans())
def test_the_gate_does_what_a_simple_list_does(events: list[tuple[Any, ...]], has_tenants: bool) -> None:
    gated = Gated(max_sequences=6, max_tokens=100, has_tenants=has_tenants)
    tenants = {"a": tenant("a", 4), "b": tenant("b")}
    visits: list[tuple[Visit, str, int, int, list[bool]]] = []
    for kind, *values in events:
        if kind == "enter":
            name, sequences, tokens = values
            waiting = [each for each in visits if each[4][0]]
            own = [each for each in waiting if each[1] == name]
            inside = sum(each[2] for each in visits if each[1] == name)
            counted = waiting + own if has_tenants else waiting  # its own count twice: as much must be free
            expected = 0
            if own and (sum(each[2] for each in counted) + sequences > 6 or sum(e[3] for e in counted) + tokens > 100):
                expected = 503
            if name == "a" and inside and inside + sequences > 4:
                expected = 429
            if gated.state is not ModelState.READY:
                expected = 503
            if expected:
                error = gated.refusal(sequences, tokens, tenants[name])
                assert error.status == expected
                assert MIN_RETRY_S <= retry_s(error) <= MAX_RETRY_S
            else:
                visits.append((gated.enter(sequences, tokens, tenants[name]), name, sequences, tokens, [True]))
        elif kind == "begin" and visits:
            visit = visits[values[0] % len(visits)]
            visit[0].begin()
            visit[4][0] = False
        elif kind == "correct" and visits:
            index, tokens = values[0] % len(visits), values[1]
            visits[index][0].correct(tokens)
            visits[index] = (*visits[index][:3], tokens, visits[index][4])
        elif kind == "leave" and visits:
            visits.pop(values[0] % len(visits))[0].leave()
        elif kind == "pass":
            gated.clock.advance(values[0])
        elif kind == "state":
            gated.state = values[0]
        gated.gate.check()
        assert gated.gate.num_visits == len(visits)
        assert gated.gate.num_sequences == sum(each[2] for each in visits)
        assert gated.gate.num_waiting_tokens == sum(each[3] for each in visits if each[4][0])
        assert gated.gate.num_waiting_sequences <= 6 + 5  # the limit, and one call of each other tenant


def test_limits_grow_and_shrink_with_the_engines_that_are_ready() -> None:
    num_ready = 3
    limits = GateLimits(2, 1000, of_each=("max_queued_sequences",))
    gate = Gate(ManualClock(), limits, lambda: ModelState.READY, lambda: num_ready)
    for _ in range(6):
        gate.enter(ANYBODY, 1, 10)
    with pytest.raises(ApiError):
        gate.enter(ANYBODY, 1, 10)
    num_ready = 4
    gate.enter(ANYBODY, 1, 10)
    num_ready = 0
    assert gate.limits.max_queued_sequences == 2
    gate.check()
