"""Request: its states, its counts, its tokens."""

from __future__ import annotations

import itertools
from array import array
from typing import Any

import pytest

from quire.core.errors import InvalidRequestError, InvariantError, RequestStateError
from quire.core.request import TRANSITIONS, CacheScope, Request, RequestGroup, RequestStatus, token_array
from quire.core.sampling_params import SamplingParams

WAITING, RUNNING, PREEMPTED, SWAPPED, FINISHED = RequestStatus
LEGAL = {
    (WAITING, RUNNING),
    (WAITING, FINISHED),
    (RUNNING, PREEMPTED),
    (RUNNING, SWAPPED),
    (RUNNING, FINISHED),
    (PREEMPTED, RUNNING),
    (PREEMPTED, FINISHED),
    (SWAPPED, RUNNING),
    (SWAPPED, PREEMPTED),
    (SWAPPED, FINISHED),
}


# ---- states ---------------------------------------------------------------------------------------------------------


def test_the_table_names_every_state() -> None:
    assert set(TRANSITIONS) == set(RequestStatus)
    assert {(old, new) for old, allowed in TRANSITIONS.items() for new in allowed} == LEGAL


@pytest.mark.parametrize(("old", "new"), list(itertools.product(RequestStatus, repeat=2)), ids=str)
def test_a_state_follows_another_only_if_the_table_says_so(old: RequestStatus, new: RequestStatus) -> None:
    request = Request("r", [1])
    request.status = old
    if (old, new) in LEGAL:
        request.become(new)
        assert (request.status, request.is_finished) == (new, new is FINISHED)
        return
    with pytest.raises(RequestStateError, match=f"request 'r' is {old.value} and cannot become {new.value}"):
        request.become(new)
    assert request.status is old


# ---- counts ---------------------------------------------------------------------------------------------------------


def running(**counts: Any) -> Request:
    """A request of five prompt tokens in the middle of its life."""
    request = Request("r", [1, 2, 3, 4, 5])
    request.max_total_tokens = 9
    request.status = RUNNING
    values: dict[str, Any] = {"row": 0, "num_computed": 3, "num_planned": 4, "backlog": 1}
    for name, value in (values | counts).items():
        setattr(request, name, value)
    return request


def test_a_new_request_has_all_to_do() -> None:
    request = Request("r", [5, 6, 7], priority=2, arrival_s=1.5)
    assert (request.backlog, request.num_computed, request.num_planned, request.num_slots) == (3, 0, 0, 0)
    assert (request.status, request.row, request.priority, request.arrival_s) == (WAITING, -1, 2, 1.5)
    assert (request.num_prompt_tokens, request.num_output_tokens, request.output_token_ids) == (3, 0, [])


def test_output_is_what_follows_the_prompt() -> None:
    request = Request("r", [5, 6])
    request.tokens.extend([7, 8])
    assert (request.num_output_tokens, request.output_token_ids, request.num_prompt_tokens) == (2, [7, 8], 2)


def test_forgotten_progress_is_all_to_be_done_again() -> None:
    request = running(num_slots=8, next_event=4, drafts=array("i", [1]))
    request.tokens.append(6)
    request.forget_progress()
    assert (request.num_computed, request.num_planned, request.num_slots, request.next_event) == (0, 0, 0, 0)
    assert (request.backlog, request.generation, list(request.drafts)) == (6, 1, [])


def test_a_branch_goes_on_from_the_same_point_with_tokens_of_its_own() -> None:
    request = running(num_slots=8, num_cached_tokens=4, num_late_results=1, drafts=array("i", [1]))
    sibling = request.open_branch(2)
    assert (sibling.branch, sibling.row, sibling.num_slots, sibling.num_late_results) == (2, -1, 0, 0)
    assert (sibling.num_computed, sibling.num_planned, sibling.num_cached_tokens) == (3, 4, 4)
    assert (sibling.status, sibling.request_id, list(sibling.drafts)) == (RUNNING, "r", [])
    sibling.tokens.append(9)
    assert list(request.tokens) == [1, 2, 3, 4, 5]


def test_a_branch_has_every_field() -> None:
    sibling = Request("r", [1]).open_branch(1)
    assert all(hasattr(sibling, name) for name in Request.__slots__)


def test_a_group_begins_with_its_leader() -> None:
    leader = Request("r", [1], SamplingParams(n=2, best_of=3, beam_search=True))
    group = RequestGroup(leader)
    assert (group.members, group.num_sequences, group.beam_search, group.opened) == ([leader], 3, True, False)


def test_counts_that_fit_together_are_sound() -> None:
    running().check()
    running(num_computed=4).check()


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"num_computed": 5}, "0 <= num_computed <= num_planned"),
        ({"num_computed": -1}, "0 <= num_computed <= num_planned"),
        ({"row": -1}, "a row is held exactly while running"),
        ({"status": PREEMPTED}, "a row is held exactly while running"),
        ({"num_computed": 6, "num_planned": 6}, "computed tokens are known"),
        ({"max_total_tokens": 4}, "known tokens stay within the maximum"),
        ({"backlog": -1}, "backlog counts the tokens that no plan has taken up"),
        ({"num_computed": 4, "backlog": 2}, "backlog counts the tokens that no plan has taken up"),
    ],
)
def test_check_finds_counts_that_do_not_fit(counts: dict[str, Any], message: str) -> None:
    with pytest.raises(InvariantError, match=f"request 'r': not true that {message}"):
        running(**counts).check()


# ---- tokens ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [[], [0], (1, 2), range(3), {4: "x"}, iter([5]), array("i", [6]), array("h", [7])])
def test_tokens_come_from_anything_that_yields_integers(tokens: Any) -> None:
    expected = [5] if not hasattr(tokens, "__len__") else list(tokens)
    taken = token_array(tokens)
    assert (taken.typecode, taken.tolist()) == ("i", expected)


def test_tokens_are_the_requests_own() -> None:
    given = array("i", [1, 2])
    assert token_array(given) is not given
    request = Request("r", given)
    given.append(3)
    assert list(request.tokens) == [1, 2]


@pytest.mark.parametrize("value", [1.0, "1", None, True, False, b"1", [1], float("nan"), 1j])
def test_anything_but_an_integer_is_no_token(value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        token_array([5, value, value])
    assert (caught.value.field, caught.value.value) == ("prompt[1]", value) or value != value
    assert caught.value.allowed == "a token id (an integer)"


@pytest.mark.parametrize("value", [1 << 31, -(1 << 31) - 1, 1 << 64, 10**5000], ids=["2^31", "-2^31-1", "2^64", "huge"])
def test_an_integer_that_does_not_fit_is_no_token(value: int) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        token_array([(1 << 31) - 1, -(1 << 31), value])
    assert (caught.value.field, caught.value.value) == ("prompt[2]", value)


@pytest.mark.parametrize("value", ["text", b"bytes", bytearray(b"bytes"), 5, None, 1.5], ids=repr)
def test_a_prompt_is_a_list_of_token_ids(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"prompt is .*; allowed: a list of token ids"):
        token_array(value)


def test_a_prompt_of_the_wrong_kind_is_refused_before_there_is_a_request() -> None:
    with pytest.raises(InvalidRequestError, match=r"prompt\[0\] is 0.5"):
        Request("r", [0.5])  # type: ignore[list-item]


def test_scopes_are_values() -> None:
    assert CacheScope("t", "s", ("k",)) == CacheScope("t", "s", ("k",))
    assert hash(CacheScope()) == hash(CacheScope("", "", ()))
