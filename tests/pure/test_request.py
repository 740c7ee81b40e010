"""Request: its states, its tokens, its siblings and its counts."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from quire.core.errors import InvalidRequestError, InvariantError, RequestStateError
from quire.core.logprobs import TokenLogprobs
from quire.core.request import TRANSITIONS, CacheScope, Request, RequestGroup, RequestStatus, token_array
from quire.core.sampling_params import SamplingParams

ALLOWED = {
    "waiting": {"running", "finished"},
    "running": {"preempted", "swapped", "finished"},
    "preempted": {"running", "finished"},
    "swapped": {"running", "preempted", "finished"},
    "finished": set(),
}


def running(prompt: Iterable[int] = (5, 6, 7)) -> Request:
    """A request in the middle of its life: the prompt is computed, one token is generated."""
    request = Request("r", prompt)
    request.max_total_tokens = 64
    request.become(RequestStatus.RUNNING)
    request.row = 2
    request.num_computed = request.num_planned = request.num_prompt_tokens
    request.tokens.append(8)
    request.backlog = 1
    request.num_slots = 16
    request.next_event = 9
    request.check()
    return request


@pytest.mark.parametrize("after", RequestStatus)
@pytest.mark.parametrize("before", RequestStatus)
def test_every_pair_of_states_is_allowed_or_refused(before: RequestStatus, after: RequestStatus) -> None:
    request = Request("name", [1])
    request.status = before
    if after.value in ALLOWED[before.value]:
        request.become(after)
        assert request.status is after
    else:
        with pytest.raises(
            RequestStateError, match=f"^request 'name' is {before.value} and cannot become {after.value}$"
        ):
            request.become(after)
        assert request.status is before
    assert request.is_finished == (request.status is RequestStatus.FINISHED)


def test_the_table_names_every_state() -> None:
    assert set(TRANSITIONS) == set(RequestStatus)


@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        iter,
        lambda tokens: (token for token in tokens),
        lambda tokens: array("i", tokens),
        lambda tokens: array("q", tokens),
    ],
)
def test_token_array_takes_any_iterable_of_integers(make: Callable[[list[int]], Any]) -> None:
    tokens = token_array(make([0, 1, (1 << 31) - 1, -(1 << 31)]))
    assert tokens.typecode == "i"
    assert tokens.tolist() == [0, 1, (1 << 31) - 1, -(1 << 31)]


def test_token_array_copies() -> None:
    given = array("i", [1, 2])
    token_array(given).append(3)
    assert given.tolist() == [1, 2]


def test_token_array_of_nothing_is_empty() -> None:
    assert token_array([]) == array("i")


@pytest.mark.parametrize(
    "prompt", ["text", "", b"bytes", b"", bytearray(b"b"), {1: 2}, {1}, frozenset({1}), None, 7, 2.5]
)
def test_a_prompt_that_is_no_list_is_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Request("r", prompt)
    assert str(caught.value) == f"prompt is {prompt!r}; allowed: a list of token ids"


@pytest.mark.parametrize("value", [2.5, 2.0, True, False, None, "1", b"1", [1], 1j])
def test_a_token_that_is_no_integer_is_named_by_its_index(value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        token_array([1, 2, value, 3, value])
    assert str(caught.value) == f"prompt[2] is {value!r}; allowed: a token id (an integer)"


@pytest.mark.parametrize("value", [1 << 31, -(1 << 31) - 1, 1 << 63, 1 << 64, -(1 << 64)])
def test_a_token_beyond_32_bits_is_named_by_its_index(value: int) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        token_array([0, value, value])
    assert (caught.value.field, caught.value.value) == ("prompt[1]", value)


def test_the_message_for_a_token_far_below_zero_rules_it_out() -> None:
    with pytest.raises(InvalidRequestError, match=r"from 0|0 or more"):
        token_array([-(1 << 31) - 1])


def test_a_token_of_32_bits_is_taken_and_the_first_that_is_longer_is_named() -> None:
    assert token_array([(1 << 31) - 1, -(1 << 31)]).tolist() == [(1 << 31) - 1, -(1 << 31)]
    for value in (1 << 31, -(1 << 31) - 1):
        with pytest.raises(InvalidRequestError) as caught:
            token_array([(1 << 31) - 1, -(1 << 31), value, 1 << 31])
        assert str(caught.value) == f"prompt[2] is {value}; allowed: a token id from 0 to 2147483647"


@pytest.mark.parametrize(
    ("num_prompt", "prompt_logprobs", "num_there", "wanted"),
    [(5, None, 0, 0), (5, 0, 0, 4), (5, 3, 3, 4), (5, 3, 4, 0), (5, 3, 5, 0), (1, 3, 0, 0), (2, 0, 0, 1)],
)
def test_logits_of_the_prompt_are_wanted_until_all_are_reported(
    num_prompt: int, prompt_logprobs: int | None, num_there: int, wanted: int
) -> None:
    request = Request("r", [1] * num_prompt, SamplingParams(prompt_logprobs=prompt_logprobs))
    request.prompt_logprobs += [TokenLogprobs(-0.5, 1, array("i"), array("d"))] * num_there
    assert request.num_prompt_logits_wanted == wanted


def test_a_new_request_is_nobodys_and_has_done_nothing() -> None:
    request = Request("r", [1, 2])
    given = {"request_id", "sampling", "scope", "tokens", "num_prompt_tokens", "backlog", "status", "stop_ids"}
    neutral = {
        "row": -1,
        "group": None,
        "finish_reason": None,
        "cumulative_logprob": None,
        "error": "",
        "waited_s": None,
    }
    neutral |= {"arrival_s": 0.0, "logprobs": [], "prompt_logprobs": [], "drafts": array("i"), "awaits_drafts": False}
    neutral |= {"guesser": "", "pooling": None, "vector": b"", "images": (), "names": None, "awaits_images": False}
    assert {name: getattr(request, name) for name in Request.__slots__ if name not in given} == {
        name: neutral.get(name, 0) for name in Request.__slots__ if name not in given
    }
    assert (request.sampling, request.scope, request.stop_ids) == (SamplingParams(), CacheScope(), frozenset())


def test_a_new_request_has_its_whole_prompt_to_compute() -> None:
    request = Request("r", [5, 6, 7], SamplingParams(seed=1), scope=CacheScope("t"), priority=2, arrival_s=3.5)
    assert (request.backlog, request.num_prompt_tokens, request.num_output_tokens) == (3, 3, 0)
    assert (request.status, request.row, request.num_computed, request.num_planned) == (RequestStatus.WAITING, -1, 0, 0)
    assert (request.sampling.seed, request.scope.tenant, request.priority, request.arrival_s) == (1, "t", 2, 3.5)


def test_output_tokens_are_those_behind_the_prompt() -> None:
    request = running()
    request.tokens.extend([9, 10])
    assert (request.num_output_tokens, request.output_token_ids) == (3, [8, 9, 10])


@pytest.mark.parametrize(
    ("sampling", "num_sequences"),
    [(SamplingParams(), 1), (SamplingParams(n=3), 3), (SamplingParams(n=2, best_of=5), 5)],
)
def test_a_group_begins_with_its_leader(sampling: SamplingParams, num_sequences: int) -> None:
    leader = Request("r", [1], sampling)
    group = RequestGroup(leader)
    assert (group.members, group.num_sequences, group.beam_search, group.opened) == (
        [leader],
        num_sequences,
        False,
        False,
    )


def test_a_branch_starts_where_its_sibling_is() -> None:
    leader = running()
    sibling = leader.open_branch(3)
    assert sibling.branch == 3
    assert sibling.tokens == leader.tokens
    own = {"branch", "tokens", "row", "num_slots", "num_late_results"}
    for name in set(Request.__slots__) - own:
        assert getattr(sibling, name) == getattr(leader, name)
    assert (sibling.row, sibling.num_slots, sibling.num_late_results) == (-1, 0, 0)


def test_a_branch_and_its_sibling_go_their_own_ways() -> None:
    leader = running()
    sibling = leader.open_branch(1)
    sibling.tokens.append(99)
    sibling.num_computed += 1
    sibling.become(RequestStatus.FINISHED)
    assert (leader.tokens.tolist(), leader.num_computed) == ([5, 6, 7, 8], 3)
    assert (leader.status, leader.branch, leader.row) == (RequestStatus.RUNNING, 0, 2)
    leader.tokens.append(50)
    assert sibling.tokens.tolist() == [5, 6, 7, 8, 99]
    report = TokenLogprobs(-0.5, 1, array("i"), array("d"))
    sibling.logprobs.append(report)
    assert (leader.logprobs, sibling.logprobs) == ([], [report])
    sibling.prompt_logprobs.append(report)
    assert leader.prompt_logprobs == [report], "the prompt is that of all of them"


def test_forget_progress_keeps_the_tokens_and_computes_them_again() -> None:
    request = running()
    request.forget_progress()
    assert request.tokens.tolist() == [5, 6, 7, 8]
    assert (request.num_computed, request.num_planned, request.backlog) == (0, 0, 4)
    assert (request.num_slots, request.next_event) == (0, 0)
    assert request.generation == 1
    assert (request.status, request.row, request.num_prompt_tokens) == (RequestStatus.RUNNING, 2, 3)
    request.check()
    request.forget_progress()
    assert request.generation == 2


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"num_computed": -1}, "num_computed <= num_planned"),
        ({"num_computed": 4}, "num_computed <= num_planned"),
        ({"row": -1}, "a row is held exactly while running"),
        ({"status": RequestStatus.PREEMPTED}, "a row is held exactly while running"),
        ({"num_computed": 5, "num_planned": 5}, "computed tokens are known"),
        ({"max_total_tokens": 3}, "known tokens stay within the maximum"),
        ({"backlog": -1}, "backlog counts"),
        ({"backlog": 0}, "backlog counts"),
        ({"backlog": 2}, "backlog counts"),
    ],
)
def test_check_catches_counts_that_do_not_fit(changes: dict[str, Any], fact: str) -> None:
    request = running()
    for name, value in changes.items():
        setattr(request, name, value)
    with pytest.raises(InvariantError, match=f"request 'r': not true that .*{fact}"):
        request.check()


@pytest.mark.parametrize(
    "changes",
    [
        {"num_planned": 4, "backlog": 1},  # a decode under way: the next token is on its way
        {"num_planned": 4, "backlog": 0},  # the next plan waits for the result
        {"status": RequestStatus.FINISHED, "row": -1, "backlog": 0},
        {"status": RequestStatus.SWAPPED, "row": -1},
        {"status": RequestStatus.PREEMPTED, "row": -1, "num_late_results": 1, "backlog": 5},
    ],
)
def test_check_allows_what_may_be(changes: dict[str, Any]) -> None:
    request = running()
    for name, value in changes.items():
        setattr(request, name, value)
    request.check()
