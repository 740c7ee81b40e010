"""The door: every field of a request, every way in which it can be wrong."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest

from quire.core.errors import InvalidRequestError, RequestTooLargeError
from quire.core.request import CacheScope, Request
from quire.core.sampling_params import SamplingParams
from quire.core.validate import (
    MAX_EXTRA_KEYS,
    MAX_NAME_LENGTH,
    MAX_PRIORITY,
    MAX_SALT_LENGTH,
    MAX_SEED,
    MAX_STOP_TOKEN_IDS,
    RequestLimits,
    max_total_tokens,
    validate,
    validate_sampling,
)

LIMITS = RequestLimits(vocab_size=100, max_model_len=64, max_sequence_tokens=48, max_num_seqs=8)
NO_NUMBERS: list[Any] = [None, "1", b"1", [], (1,), {}, True, False, 1j, math.nan, math.inf, -math.inf]
NO_INTEGERS: list[Any] = [*NO_NUMBERS, 1.0, 0.5]
HUGE = [10**400, -(10**400), 10**5000]


def refusal(request: Request, limits: RequestLimits = LIMITS) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        validate(request, limits)
    error = caught.value
    assert str(error).startswith(f"{error.field} is ") and str(error).endswith(f"; allowed: {error.allowed}")
    return error


def request(sampling: SamplingParams | None = None, **arguments: Any) -> Request:
    return Request("r", [1, 2, 3], sampling or SamplingParams(), **arguments)


# ---- sampling -------------------------------------------------------------------------------------------------------

INTEGERS = {
    "n": (1, 8),
    "best_of": (1, 8),
    "top_k": (-1, (1 << 31) - 1),
    "seed": (0, MAX_SEED),
    "max_tokens": (1, 46),
    "min_tokens": (0, 64),
}
NUMBERS = {"temperature": (0.0, 1e6), "top_p": (5e-324, 1.0), "min_p": (0.0, 1.0)}
OPTIONAL = {"best_of", "seed", "max_tokens"}


def test_every_sampling_field_stands_in_these_tests() -> None:
    others = {"beam_search", "ignore_eos", "stop_token_ids"}
    assert {*INTEGERS, *NUMBERS, *others} == {field.name for field in fields(SamplingParams)}


@pytest.mark.parametrize("field", INTEGERS)
def test_integers_are_taken_at_both_ends_of_their_range(field: str) -> None:
    for value in INTEGERS[field]:
        validate(request(SamplingParams(**{field: value})), LIMITS)


@pytest.mark.parametrize("field", INTEGERS)
def test_anything_but_an_integer_is_refused(field: str) -> None:
    low = INTEGERS[field][0]
    for value in [*NO_INTEGERS, *HUGE, low - 1]:
        if value is None and field in OPTIONAL:
            continue
        error = refusal(request(SamplingParams(**{field: value})))
        assert (error.field, error.value is value) == (field, True)
        assert error.allowed.startswith(f"an integer from {low} to ")


@pytest.mark.parametrize("field", ["n", "best_of", "top_k", "seed", "min_tokens"])
def test_integers_above_their_range_are_refused(field: str) -> None:
    high = INTEGERS[field][1]
    error = refusal(request(SamplingParams(**{field: high + 1})))
    assert (error.field, error.value) == (field, high + 1)
    assert error.allowed.endswith(f" to {high}")


@pytest.mark.parametrize("field", NUMBERS)
def test_numbers_are_taken_at_both_ends_of_their_range(field: str) -> None:
    for value in NUMBERS[field]:
        validate(request(SamplingParams(**{field: value})), LIMITS)


@pytest.mark.parametrize("field", NUMBERS)
def test_anything_but_a_finite_number_in_range_is_refused(field: str) -> None:
    low, high = NUMBERS[field]
    for value in [*NO_NUMBERS, *HUGE, math.nextafter(low, -1), math.nextafter(high, math.inf), -1, 10**7]:
        error = refusal(request(SamplingParams(**{field: value})))
        assert (error.field, error.value is value) == (field, True)


def test_numbers_may_be_integers() -> None:
    validate(request(SamplingParams(temperature=2, top_p=1, min_p=0)), LIMITS)


@pytest.mark.parametrize("field", ["beam_search", "ignore_eos"])
@pytest.mark.parametrize("value", [0, 1, None, "True", 1.0])
def test_switches_are_true_or_false(field: str, value: Any) -> None:
    error = refusal(request(SamplingParams(**{field: value})))
    assert (error.field, error.value, error.allowed) == (field, value, "True or False")


def test_fewer_are_generated_than_returned() -> None:
    error = refusal(request(SamplingParams(n=4, best_of=3)))
    assert (error.field, error.allowed) == ("best_of", "an integer from 4 to 8")


def test_beams_are_not_drawn() -> None:
    validate(request(SamplingParams(n=2, beam_search=True, temperature=0)), LIMITS)
    error = refusal(request(SamplingParams(n=2, beam_search=True, temperature=0.5)))
    assert (error.field, error.value) == ("temperature", 0.5)


def test_no_more_tokens_are_required_than_allowed() -> None:
    validate(request(SamplingParams(max_tokens=5, min_tokens=5)), LIMITS)
    error = refusal(request(SamplingParams(max_tokens=5, min_tokens=6)))
    assert (error.field, error.allowed) == ("min_tokens", "an integer from 0 to 5")


def test_stop_tokens_are_of_the_vocabulary() -> None:
    validate(request(SamplingParams(stop_token_ids=(0, 99))), LIMITS)
    validate(request(SamplingParams(stop_token_ids=(5,) * MAX_STOP_TOKEN_IDS)), LIMITS)
    for value in [-1, 100, *NO_INTEGERS]:
        error = refusal(request(SamplingParams(stop_token_ids=(5, value))))
        assert (error.field, error.allowed) == ("stop_token_ids", "an integer from 0 to 99")


@pytest.mark.parametrize("value", [None, [5], {5}, "5", 5, (5,) * (MAX_STOP_TOKEN_IDS + 1)], ids=lambda v: str(v)[:20])
def test_stop_tokens_are_a_tuple_of_some_length(value: Any) -> None:
    error = refusal(request(SamplingParams(stop_token_ids=value)))
    assert (error.field, error.allowed) == ("stop_token_ids", f"a tuple of at most {MAX_STOP_TOKEN_IDS} token ids")


@pytest.mark.parametrize("value", [None, {}, "greedy"])
def test_sampling_is_sampling_params(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="sampling is .*; allowed: SamplingParams"):
        validate_sampling(value, LIMITS)


# ---- who asks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["r", "x" * MAX_NAME_LENGTH, "é\ud800\n"])
def test_a_request_id_is_any_text(value: str) -> None:
    validate(Request(value, [1]), LIMITS)


@pytest.mark.parametrize("value", ["", "x" * (MAX_NAME_LENGTH + 1), None, 7, b"r", ["r"]], ids=lambda v: repr(v)[:20])
def test_a_request_id_is_text_and_not_empty(value: Any) -> None:
    error = refusal(Request(value, [1]))
    assert (error.field, error.value, error.allowed) == ("request_id", value, "a string of 1 to 256 characters")
    assert len(str(error)) < 160, "a long value is cut"


@pytest.mark.parametrize("value", [-MAX_PRIORITY, 0, MAX_PRIORITY])
def test_a_priority_is_an_integer(value: int) -> None:
    validate(request(priority=value), LIMITS)


@pytest.mark.parametrize(
    "value", [MAX_PRIORITY + 1, -MAX_PRIORITY - 1, *NO_INTEGERS, *HUGE], ids=lambda v: repr(type(v))
)
def test_anything_else_is_no_priority(value: Any) -> None:
    error = refusal(request(priority=value))
    assert (error.field, error.value is value) == ("priority", True)


@pytest.mark.parametrize("value", [-1.5, 0, 1e300])
def test_an_arrival_is_a_finite_number(value: float) -> None:
    validate(request(arrival_s=value), LIMITS)


@pytest.mark.parametrize("value", [*NO_NUMBERS, *HUGE], ids=lambda v: repr(type(v)))
def test_anything_else_is_no_arrival(value: Any) -> None:
    error = refusal(request(arrival_s=value))
    assert (error.field, error.value is value, error.allowed) == ("arrival_s", True, "a finite number")


SCOPES = {"tenant": ("tenant", MAX_NAME_LENGTH), "salt": ("cache_salt", MAX_SALT_LENGTH)}


@pytest.mark.parametrize("field", SCOPES)
def test_tenant_and_salt_are_texts(field: str) -> None:
    shown, longest = SCOPES[field]
    for value in ("", "x" * longest):
        validate(request(scope=replace(CacheScope(), **{field: value})), LIMITS)
    for value in ("x" * (longest + 1), None, 5, b"x"):
        error = refusal(request(scope=replace(CacheScope(), **{field: value})))  # type: ignore[arg-type]
        assert (error.field, error.allowed) == (shown, f"a string of 0 to {longest} characters")


@pytest.mark.parametrize("value", [(), ("",), ("x" * MAX_NAME_LENGTH,) * MAX_EXTRA_KEYS], ids=lambda v: str(len(v)))
def test_extra_keys_are_a_few_texts(value: tuple[str, ...]) -> None:
    validate(request(scope=CacheScope(extra_keys=value)), LIMITS)


@pytest.mark.parametrize(
    "value",
    [None, "key", ["key"], (None,), (1,), ("x" * (MAX_NAME_LENGTH + 1),), ("x",) * (MAX_EXTRA_KEYS + 1)],
    ids=lambda v: repr(v)[:20],
)
def test_anything_else_is_no_extra_key(value: Any) -> None:
    assert refusal(request(scope=CacheScope(extra_keys=value))).field == "extra_keys"


@pytest.mark.parametrize("value", [None, "salt", ("", "", ())])
def test_a_scope_is_a_cache_scope(value: Any) -> None:
    error = refusal(request(scope=value))
    assert (error.field, error.allowed) == ("scope", "a CacheScope")


# ---- prompt and length ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [[0], [99], [0, 99] * 20])
def test_a_prompt_is_tokens_of_the_vocabulary(prompt: list[int]) -> None:
    validate(Request("r", prompt), LIMITS)


@pytest.mark.parametrize(("prompt", "index"), [([100], 0), ([1, -1], 1), ([1, 2, (1 << 31) - 1, 100], 2)])
def test_the_first_token_outside_the_vocabulary_is_named(prompt: list[int], index: int) -> None:
    error = refusal(Request("r", prompt))
    assert (error.field, error.value, error.allowed) == (f"prompt[{index}]", prompt[index], "a token id from 0 to 99")


def test_an_empty_prompt_is_refused() -> None:
    assert str(refusal(Request("r", []))) == "prompt is []; allowed: at least one token id"


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "fits"),
    [(40, 9, True), (40, 10, False), (48, None, True), (49, None, False), (48, 1, True), (1, 48, True), (1, 49, False)],
)
def test_the_memory_holds_all_but_the_last_token(num_prompt: int, max_tokens: int | None, fits: bool) -> None:
    subject = Request("r", [1] * num_prompt, SamplingParams(max_tokens=max_tokens))
    if fits:
        return validate(subject, LIMITS)
    error = refusal(subject)
    assert isinstance(error, RequestTooLargeError)
    assert (error.value, "KV memory" in error.allowed) == (num_prompt + (max_tokens or 1), True)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "fits"), [(63, None, True), (64, None, False), (60, 4, True), (60, 5, False)]
)
def test_prompt_and_output_fit_into_the_context(num_prompt: int, max_tokens: int | None, fits: bool) -> None:
    limits = replace(LIMITS, max_sequence_tokens=1000)
    subject = Request("r", [1] * num_prompt, SamplingParams(max_tokens=max_tokens))
    if fits:
        return validate(subject, limits)
    error = refusal(subject, limits)
    assert isinstance(error, RequestTooLargeError)
    assert (error.value, "maximum context length" in error.allowed) == (num_prompt + (max_tokens or 1), True)


@pytest.mark.parametrize(
    ("max_tokens", "max_model_len", "max_sequence_tokens", "total"),
    [(5, 64, 48, 8), (None, 64, 48, 49), (None, 64, 100, 64), (None, 64, 63, 64), (40, 64, 48, 43)],
)
def test_how_long_a_request_may_grow(
    max_tokens: int | None, max_model_len: int, max_sequence_tokens: int, total: int
) -> None:
    limits = RequestLimits(100, max_model_len, max_sequence_tokens, 8)
    assert max_total_tokens(request(SamplingParams(max_tokens=max_tokens)), limits) == total


def test_validating_changes_nothing() -> None:
    subject = request(SamplingParams(n=2))
    before = {name: getattr(subject, name) for name in Request.__slots__}
    validate(subject, LIMITS)
    assert {name: getattr(subject, name) for name in Request.__slots__} == before
