"""The policies by themselves: orders, turns, victims, rows and shares of tokens, against plain models."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given

from quire.core.config import SchedulerConfig
from quire.core.errors import InvalidConfigError
from quire.core.request import CacheScope, Request, RequestGroup
from quire.core.sampling_params import SamplingParams
from quire.scheduler.plan_builder import Chunk, StepRecord
from quire.scheduler.policy import create_policy
from quire.scheduler.policy.fair_share import FairSharePolicy
from quire.scheduler.policy.fcfs import FCFSPolicy
from quire.scheduler.policy.priority import PriorityPolicy


def request(
    serial: int, tenant: str = "", *, length: int = 3, priority: int = 0, arrival_s: float = 0.0, n: int = 1
) -> Request:
    sampling = SamplingParams(n=n)
    made = Request(
        f"{tenant}{serial}", [1] * length, sampling, scope=CacheScope(tenant), priority=priority, arrival_s=arrival_s
    )
    made.serial = serial
    if n > 1:
        made.group = RequestGroup(made)
    return made


def served(**tokens: int) -> FairSharePolicy:
    policy = FairSharePolicy()
    policy._served.update(tokens)
    return policy


def serve(policy: FairSharePolicy, one: Request, num_tokens: int) -> None:
    chunk = Chunk(one, 0, 0, num_tokens, 0, None, 0)  # type: ignore[arg-type]
    policy.charge(StepRecord(0, [], None, [chunk]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "kind"), [("fcfs", FCFSPolicy), ("priority", PriorityPolicy), ("fair_share", FairSharePolicy)]
)
def test_policies_are_made_by_name(name: str, kind: type) -> None:
    assert type(create_policy(SchedulerConfig(policy=name))) is kind


def test_an_unknown_policy_is_refused() -> None:
    config = SchedulerConfig()
    object.__setattr__(config, "policy", "random")
    with pytest.raises(InvalidConfigError, match="policy is 'random'; allowed: fcfs, priority or fair_share"):
        create_policy(config)


def test_first_come_first_served_in_everything() -> None:
    policy = FCFSPolicy()
    requests = [request(serial, priority=9 - serial, arrival_s=9.0 - serial) for serial in range(4)]
    assert sorted(requests[::-1], key=policy.order_key) == requests
    branch = requests[1].open_branch(1)
    assert policy.order_key(requests[1]) < policy.order_key(branch) < policy.order_key(requests[2])
    assert policy.victim(requests) is requests[3]
    assert policy.rows_for(requests[0], 1, requests) == ()
    assert policy.token_shares(requests[0], 10, requests) is None


@given(
    st.lists(st.tuples(st.integers(-5, 5), st.integers(0, 50)), min_size=2, max_size=8),
    st.sampled_from([0.5, 2.0, 8.0]),
)
def test_urgency_and_waiting_make_the_order(asked: list[tuple[int, int]], ageing_s: float) -> None:
    """At any moment: by priority less what waiting makes up for, then by arrival here."""
    policy = PriorityPolicy(ageing_s)
    requests = [
        request(serial, priority=priority, arrival_s=float(arrival)) for serial, (priority, arrival) in enumerate(asked)
    ]
    for now_s in (50.0, 1000.0):
        urgency = {one: one.priority - (now_s - one.arrival_s) / ageing_s for one in requests}
        expected = sorted(requests, key=lambda one: (urgency[one], one.serial))
        assert sorted(requests, key=policy.order_key) == expected
    assert policy.victim(requests) is requests[-1]


# ---- turns of tenants -----------------------------------------------------------------------------------------------


def turns(policy: FairSharePolicy, *waiting: Request) -> list[str]:
    queue = policy.make_queue()
    for one in waiting:
        queue.add(one)
    return [one.request_id for one in queue.in_turn()]


def test_the_tenant_served_least_is_next_and_then_the_other() -> None:
    # Who comes while others wait has no credit, so the one served least comes first.
    waiting = [request(2, "b", length=4), request(3, "b"), request(0, "a", length=4), request(1, "a", length=4)]
    assert turns(served(a=10, b=5), *waiting) == ["b2", "b3", "a0", "a1"]
    assert turns(served(a=10, b=7), *waiting) == ["b2", "a0", "b3", "a1"]
    assert turns(served(a=5, b=5), *waiting) == ["a0", "b2", "a1", "b3"], "alike: by name"


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), min_size=1, max_size=12),
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 30)),
)
def test_turns_are_those_of_a_queue_that_serves_at_once(asked: list[tuple[str, int]], before: dict[str, int]) -> None:
    waiting = [request(serial, tenant, length=length) for serial, (tenant, length) in enumerate(asked)]
    policy = served(**before)
    queue = policy.make_queue()
    for one in waiting:
        queue.add(one)
    counters = dict(policy._served)
    lines = {tenant: [one for one in waiting if one.scope.tenant == tenant] for tenant, _ in asked}
    for one in queue.in_turn():
        tenant = min((name for name in lines if lines[name]), key=lambda name: (counters[name], name))
        assert one is lines[tenant].pop(0)
        counters[tenant] += len(one.tokens)
    assert not any(lines.values())
    assert len(queue) == len(waiting)


def test_a_tenant_that_comes_back_has_earned_nothing() -> None:
    policy = FairSharePolicy()
    queue = policy.make_queue()
    busy, early = request(0, "busy"), request(1, "idle")
    queue.add(busy)
    queue.add(early)
    queue.remove(early)
    serve(policy, busy, 500)
    queue.add(request(2, "idle"))
    assert policy._served["idle"] == 500
    assert len(queue) == 2


def test_a_tenant_that_was_behind_when_it_left_is_as_far_behind_when_it_comes_back() -> None:
    policy = served(busy=30, idle=10)
    queue = policy.make_queue()
    busy, early = request(0, "busy"), request(1, "idle")
    policy_served = policy._served
    queue.add(early)
    queue.add(busy)
    assert policy_served == {"busy": 30, "idle": 10}
    queue.remove(early)  # 20 tokens behind
    serve(policy, busy, 100)
    queue.add(request(2, "idle"))
    assert policy_served == {"busy": 130, "idle": 110}
    queue.remove(busy)
    serve(policy, early, 5)
    queue.add(request(3, "busy"))
    assert policy_served["busy"] == 130, "who is ahead stays so"


def test_being_behind_counts_once() -> None:
    policy = served(busy=30, idle=10)
    queue = policy.make_queue()
    early = request(1, "idle")
    queue.add(early)
    queue.add(request(0, "busy"))
    queue.remove(early)
    policy._served["idle"] = 40
    early = request(2, "idle")
    queue.add(early)
    policy._served["idle"] = 50
    queue.remove(early)
    policy._served["busy"] = 90
    queue.add(request(3, "idle"))
    assert policy._served["idle"] == 90


def test_where_nobody_waits_the_last_to_leave_is_the_measure() -> None:
    policy = served(first=40, last=70)
    queue = policy.make_queue()
    for serial, tenant in enumerate(("first", "last")):
        one = request(serial, tenant)
        queue.add(one)
        queue.remove(one)
    assert len(queue) == 0
    queue.add(request(2, "new"))
    assert policy._served["new"] == 70
    queue.add(request(3, "first"))
    assert policy._served["first"] == 70


def test_each_token_of_a_step_is_charged_to_its_tenant() -> None:
    policy = FairSharePolicy()
    decodes = [request(0, "a"), request(1, "b"), request(2, "a")]
    chunks = [
        Chunk(one, 0, 0, count, 0, None, 0)  # type: ignore[arg-type]
        for one, count in ((request(3, "b"), 7), (request(4, "c"), 2))
    ]
    policy.charge(StepRecord(0, decodes, None, chunks))  # type: ignore[arg-type]
    policy.charge(StepRecord(1, decodes[:1], None, []))  # type: ignore[arg-type]
    assert policy._served == {"a": 3, "b": 8, "c": 2}


# ---- who yields -----------------------------------------------------------------------------------------------------


def test_the_latest_request_of_the_tenant_served_most_yields() -> None:
    candidates = [request(0, "a"), request(1, "b"), request(2, "a"), request(3, "c")]
    assert served(a=9, b=8, c=7).victim(candidates) is candidates[2]
    assert served(a=7, b=8, c=7).victim(candidates) is candidates[1]
    assert served(a=5, b=5, c=5).victim(candidates) is candidates[3]


def rows_for(policy: FairSharePolicy, newcomer: Request, num_rows: int, *running: Request) -> list[str]:
    return [one.request_id for one in policy.rows_for(newcomer, num_rows, running)]


def flood(num_requests: int, tenant: str = "flood", first: int = 0) -> list[Request]:
    return [request(first + serial, tenant) for serial in range(num_requests)]


def test_a_tenant_without_a_row_gets_one_of_a_tenant_with_two() -> None:
    policy = served(flood=50, new=0)
    assert rows_for(policy, request(9, "new"), 1, *flood(4)) == ["flood3"]
    assert rows_for(policy, request(9, "new"), 1, *flood(2)) == ["flood1"]
    assert rows_for(policy, request(9, "new"), 1, *flood(1)) == [], "the last row of a tenant"


def test_a_tenant_with_a_row_gets_more_only_from_one_with_more_than_twice_as_many() -> None:
    policy = served(flood=50, new=0)
    mine = request(8, "new")
    for num_held, expected in ((4, []), (5, ["flood4"]), (6, ["flood5"])):
        assert rows_for(policy, request(9, "new"), 1, *flood(num_held), mine) == expected


def test_nobody_yields_to_a_tenant_that_was_served_more() -> None:
    newcomer = request(9, "new")
    assert rows_for(served(flood=49, new=50), newcomer, 1, *flood(4)) == []
    assert rows_for(served(flood=50, new=50), newcomer, 1, *flood(4)) == ["flood3"], "alike is enough"


def test_all_rows_that_are_needed_or_none() -> None:
    policy = served(flood=50, new=0)
    assert rows_for(policy, request(9, "new", n=3), 3, *flood(6)) == ["flood5", "flood4", "flood3"]
    assert rows_for(policy, request(9, "new", n=3), 2, *flood(6)) == ["flood5", "flood4"]
    assert rows_for(policy, request(9, "new", n=3), 3, *flood(5)) == [], "it may keep three"
    assert rows_for(policy, request(9, "new", n=4), 4, *flood(6)) == []


def test_the_first_in_order_keeps_its_row() -> None:
    policy = served(flood=50, new=0)
    group = request(0, "flood", n=3)
    assert rows_for(policy, request(9, "new"), 1, group) == []
    assert rows_for(policy, request(9, "new"), 1, request(0, "other"), request(1, "flood", n=3)) == []
    assert rows_for(
        policy, request(9, "new"), 1, request(0, "other"), request(1, "flood", n=3), *flood(1, first=2)
    ) == ["flood2"]


def test_beams_yield_together_or_not_at_all() -> None:
    def beams(first: int, num_beams: int) -> list[Request]:
        leader = request(first, "flood")
        leader.sampling = SamplingParams(n=num_beams, beam_search=True, temperature=0.0)
        leader.group = RequestGroup(leader)
        leader.group.members += [leader.open_branch(branch) for branch in range(1, num_beams)]
        leader.group.opened = True
        return leader.group.members

    policy, newcomer = served(flood=50, new=0), request(9, "new")
    front, back = beams(0, 2), beams(1, 3)
    assert list(policy.rows_for(newcomer, 1, [*front, *back])) == [back[0]]
    assert list(policy.rows_for(newcomer, 3, [*front, *back])) == [back[0]]
    assert list(policy.rows_for(newcomer, 4, [*front, *back])) == [], "the first in order never yields"
    assert list(policy.rows_for(newcomer, 1, front)) == []
    assert list(policy.rows_for(newcomer, 1, back)) == [], "the first in order is one of them"


def test_the_tenant_served_most_yields_first() -> None:
    policy = served(a=50, b=60, new=0)
    running = [*flood(3, "a"), *flood(3, "b", 3)]
    assert rows_for(policy, request(9, "new"), 1, *running) == ["b5"]
    assert rows_for(policy, request(9, "new"), 3, *running) == ["b5", "b4", "a2"], "each keeps a row"
    assert rows_for(policy, request(9, "new"), 5, *running) == []
    assert rows_for(policy, request(9, "new", n=2), 2, *running) == ["b5", "a2"]


# ---- shares of tokens -----------------------------------------------------------------------------------------------


def prompts(**lengths: int) -> list[Request]:
    made = []
    for serial, (tenant, length) in enumerate(lengths.items()):
        made.append(request(serial, tenant, length=length))
        made[-1].backlog = length
    return made


def test_prompts_of_one_tenant_share_nothing() -> None:
    policy, (one,) = FairSharePolicy(), prompts(a=50)
    assert policy.token_shares(None, 20, [one]) is None
    assert policy.token_shares(request(5, "a"), 20, [one]) is None
    decode = request(6, "b")
    decode.backlog = 1
    assert policy.token_shares(None, 20, [one, decode]) is None, "a decode wants none"
    assert policy.token_shares(None, 20, []) is None


def test_what_one_does_not_need_goes_to_the_others() -> None:
    policy = FairSharePolicy()
    assert policy.token_shares(None, 30, prompts(a=100, b=100)) == {"a": 15, "b": 15}
    assert policy.token_shares(None, 30, prompts(a=100, b=6)) == {"a": 25, "b": 5}
    assert policy.token_shares(None, 31, prompts(a=100, b=6, c=100)) == {"a": 13, "b": 5, "c": 13}
    assert policy.token_shares(request(9, "new", length=4), 30, prompts(a=100)) == {"a": 26, "new": 4}
    assert policy.token_shares(request(9, "a", length=4), 30, prompts(a=3, b=50)) == {"a": 6, "b": 24}


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(2, 40), min_size=2), st.integers(0, 100))
def test_shares_are_even_and_leave_nothing_that_somebody_wants(lengths: dict[str, int], num_tokens: int) -> None:
    shares = FairSharePolicy().token_shares(None, num_tokens, prompts(**lengths))
    assert shares is not None
    wanted = {tenant: length - 1 for tenant, length in lengths.items()}
    assert shares.total() == min(num_tokens, sum(wanted.values()))
    short = [shares[tenant] for tenant in wanted if shares[tenant] < wanted[tenant]]
    for tenant, tokens in wanted.items():
        assert 0 <= shares[tenant] <= tokens
        assert all(shares[tenant] <= 1 + least for least in short), "nobody has more than who goes short"


def test_a_policy_keeps_its_counters_for_its_queue() -> None:
    policy = FairSharePolicy()
    queue = policy.make_queue()
    for serial, tenant in enumerate("ab"):
        queue.add(request(serial, tenant))
    serve(policy, request(7, "a"), 1)
    assert [one.request_id for one in queue.in_turn()] == ["b1", "a0"]
    assert Counter(one.scope.tenant for one in queue.in_turn()) == {"a": 1, "b": 1}
