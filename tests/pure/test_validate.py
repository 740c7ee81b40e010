"""The one check of what comes from outside: every field, every kind of wrong value, and what the message says."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from types import FrameType
from typing import Any

import pytest

from quire.core.errors import InvalidRequestError, QuireError, RequestTooLargeError
from quire.core.grammar import Grammar
from quire.core.parameters import Integer, Number, Parameter
from quire.core.request import CacheScope, Request
from quire.core.sampling_params import MAX_SEED, PARAMETERS, SamplingParams
from quire.core.validate import (
    MAX_EXTRA_KEYS,
    MAX_GRAMMAR_BYTES,
    MAX_NAME_LENGTH,
    MAX_PRIORITY,
    MAX_SALT_LENGTH,
    RequestLimits,
    max_total_tokens,
    validate,
    validate_sampling,
)

LIMITS = RequestLimits(vocab_size=100, max_model_len=64, max_sequence_tokens=64, max_num_seqs=8)
NAN, INFINITY = math.nan, math.inf
LARGEST = (1 << 31) - 1
MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS = 64, 1024

GRAMMAR_KINDS_ALLOWED = "one of the kinds json_schema, regex, lark"
GRAMMAR_BYTES_ALLOWED = "1 to 262144 bytes of text"

SAMPLING_CASES: list[tuple[str, list[Any], str]] = [
    ("n", [0, -1, 9, 1.0, True, "1", None, NAN, INFINITY], "an integer from 1 to 8"),
    ("best_of", [0, -1, 9, 2.0, True, "2", NAN], "an integer from 1 to 8"),
    ("beam_search", [1, 0, None, "yes", 1.0], "True or False"),
    ("length_penalty", [NAN, INFINITY, True, "1", None], "a finite number"),
    ("length_penalty", [-10.5, 11], "a number from -10 to 10"),
    ("early_stopping", [1, 0, None, "yes", 1.0, "Never"], 'True, False or "never"'),
    ("ignore_eos", [1, 0, None, "no", NAN], "True or False"),
    ("temperature", [NAN, INFINITY, -INFINITY, True, "1", None], "a finite number"),
    ("temperature", [-0.1, -1, 1e6 + 1], "a number from 0 to 1e+06"),
    ("top_p", [NAN, INFINITY, True, "1", None], "a finite number"),
    ("top_p", [-0.1, 0, 0.0, 1.0001, 2], "a number above 0, at most 1"),
    ("top_k", [-2, LARGEST + 1, 5.0, True, "5", None, NAN], f"an integer from -1 to {LARGEST}"),
    ("min_p", [NAN, -INFINITY, False, "0", None], "a finite number"),
    ("min_p", [-0.1, 1.1], "a number from 0 to 1"),
    ("seed", [-1, MAX_SEED + 1, 1.0, True, "1", NAN], f"an integer from 0 to {MAX_SEED}"),
    ("max_tokens", [0, -1, LARGEST + 1, 4.0, True, "4", INFINITY], f"an integer from 1 to {LARGEST}"),
    ("min_tokens", [-1, 65, 1.0, True, "1", None, NAN], "an integer from 0 to 64"),
    ("stop_token_ids", [None, {1}, 1, "1", (1,) * (MAX_STOP_TOKEN_IDS + 1)], "a tuple of at most 1024 token ids"),
    ("stop", [None, {"a"}, 1, ("a",) * (MAX_STOP_STRINGS + 1)], "at most 64 strings"),
    ("include_stop_str_in_output", [1, None, "yes"], "True or False"),
    ("skip_special_tokens", [0, None, "no"], "True or False"),
    ("logprobs", [-1, 21, 1.0, True, "5", NAN], "an integer from 0 to 20"),
    ("prompt_logprobs", [-1, 21, 1.0, True, "5", NAN], "an integer from 0 to 20"),
    ("repetition_penalty", [NAN, INFINITY, True, "1", None], "a finite number"),
    ("repetition_penalty", [0, -1.0, 0.001, 100.5], "a number from 0.01 to 100"),
    ("presence_penalty", [NAN, -INFINITY, False, "0", None], "a finite number"),
    ("presence_penalty", [-2.1, 3], "a number from -2 to 2"),
    ("frequency_penalty", [NAN, -INFINITY, False, "0", None], "a finite number"),
    ("frequency_penalty", [-2.1, 3], "a number from -2 to 2"),
    ("logit_bias", [None, {1}, 1, "1", ((1, 0.0),) * 1025], "a number for each of at most 1024 token ids"),
    ("logit_bias", [((1, 0.5), (1, 2.0))], "each token id once"),
    ("bad_words", [None, {"a"}, 1, ("a",) * 129], "at most 128 strings"),
    ("bad_words_ids", [None, {1}, "a", ((1,),) * 257], "at most 256 tuples of token ids"),
    ("allowed_token_ids", [(), {1}, 1, "a", (1,) * 101], "None, or a tuple of 1 to 100 token ids"),
    ("grammar", ["[0-9]+", {"type": "object"}, 1, True, ("regex", "a")], "None, or a Grammar"),
]
# Every number with the range that is declared. What is declared is put before the table above, too.
RANGES = [
    (declared, declared.kind.low, declared.kind.high)
    for declared in PARAMETERS.values()
    if isinstance(declared.kind, Integer | Number)
]
# Fields of which a part is wrong: the field that is named, the value that is shown, and what is allowed.
PART_CASES: list[tuple[dict[str, Any], str, Any, str]] = [
    ({"logit_bias": {100: 1.0}}, "logit_bias", 100, "an integer from 0 to 99"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias", -1, "an integer from 0 to 99"),
    ({"logit_bias": {"5": 1.0}}, "logit_bias", "5", "an integer from 0 to 99"),
    ({"logit_bias": {"5": 1.0, 5: 2.0}}, "logit_bias", "5", "an integer from 0 to 99"),
    ({"logit_bias": {True: 1.0}}, "logit_bias", True, "an integer from 0 to 99"),
    ({"logit_bias": {5: 100.5}}, "logit_bias[5]", 100.5, "a number from -100 to 100"),
    ({"logit_bias": {5: NAN}}, "logit_bias[5]", NAN, "a finite number"),
    ({"logit_bias": {5: "1"}}, "logit_bias[5]", "1", "a finite number"),
    ({"logit_bias": [5]}, "logit_bias", [5], "a number for each of at most 1024 token ids"),
    ({"logit_bias": (5,)}, "logit_bias", 5, "pairs of a token id and a number"),
    ({"logit_bias": ((5, 1.0, 2),)}, "logit_bias", (5, 1.0, 2), "pairs of a token id and a number"),
    ({"bad_words": [""]}, "bad_words", "", "a string of 1 to 256 characters"),
    ({"bad_words": ["a" * 257]}, "bad_words", "a" * 257, "a string of 1 to 256 characters"),
    ({"bad_words": [5]}, "bad_words", 5, "a string of 1 to 256 characters"),
    ({"bad_words_ids": [[]]}, "bad_words_ids", (), "tuples of 1 to 32 token ids"),
    ({"bad_words_ids": [[1] * 33]}, "bad_words_ids", (1,) * 33, "tuples of 1 to 32 token ids"),
    ({"bad_words_ids": [5]}, "bad_words_ids", 5, "tuples of 1 to 32 token ids"),
    ({"bad_words_ids": [[1, 100]]}, "bad_words_ids", 100, "an integer from 0 to 99"),
    ({"bad_words_ids": [["a"]]}, "bad_words_ids", "a", "an integer from 0 to 99"),
    ({"allowed_token_ids": [1, 100]}, "allowed_token_ids", 100, "an integer from 0 to 99"),
    ({"allowed_token_ids": [1.0]}, "allowed_token_ids", 1.0, "an integer from 0 to 99"),
    ({"grammar": Grammar("ebnf", "a")}, "grammar", "ebnf", GRAMMAR_KINDS_ALLOWED),  # type: ignore[arg-type]
    ({"grammar": Grammar(["regex"], "a")}, "grammar", ["regex"], GRAMMAR_KINDS_ALLOWED),  # type: ignore[arg-type]
    ({"grammar": Grammar("regex", b"a")}, "grammar", b"a", "a text"),  # type: ignore[arg-type]
    ({"grammar": Grammar("regex", "")}, "grammar", "0 bytes", GRAMMAR_BYTES_ALLOWED),
    ({"grammar": Grammar("regex", "é" * 131073)}, "grammar", "262146 bytes", GRAMMAR_BYTES_ALLOWED),
    ({"grammar": Grammar("regex", "ab\ud800")}, "grammar", "a lone surrogate at 2", "Unicode text"),
]
HELD = Grammar.regex("a+")
# What a grammar does not stand beside: the tokens that it needs must all be there, and its end must be an end.
BESIDE_A_GRAMMAR: list[tuple[str, Any]] = [
    ("allowed_token_ids", (1, 2)),
    ("bad_words", ("no",)),
    ("bad_words_ids", ((1, 2),)),
    ("min_tokens", 1),
    ("ignore_eos", True),
]
# What leaves no token that may be chosen, whatever the text is.
NO_CHOICE_CASES: list[tuple[dict[str, Any], str]] = [
    ({"bad_words_ids": [[token] for token in range(100)]}, "bad_words_ids"),
    ({"bad_words_ids": [[1, token] for token in range(100)]}, "bad_words_ids"),
    ({"allowed_token_ids": [5, 6], "bad_words_ids": [[5], [1, 6]]}, "allowed_token_ids"),
    ({"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 1}, "allowed_token_ids"),
    ({"allowed_token_ids": [7], "min_tokens": 1}, "allowed_token_ids"),
    ({"stop_token_ids": list(range(100)), "min_tokens": 1}, "min_tokens"),
]
SCOPE_CASES: list[tuple[str, str, list[Any], str]] = [
    ("tenant", "tenant", [None, 1, b"t", True, "t" * (MAX_NAME_LENGTH + 1)], "a string of 0 to 256 characters"),
    ("salt", "cache_salt", [None, 1, b"s", True, "s" * (MAX_SALT_LENGTH + 1)], "a string of 0 to 1024 characters"),
    ("extra_keys", "extra_keys", [None, [], "key", ("k",) * (MAX_EXTRA_KEYS + 1)], "a tuple of at most 16 strings"),
    ("persist", "persist", [None, 1, "yes"], "True or False"),
    ("adapter", "adapter", [None, 1, b"a", True, "a" * (MAX_NAME_LENGTH + 1)], "a string of 0 to 256 characters"),
]
REQUEST_CASES: list[tuple[str, list[Any], str]] = [
    ("request_id", [None, 7, b"r", "", "r" * (MAX_NAME_LENGTH + 1)], "a string of 1 to 256 characters"),
    ("scope", [None, "tenant", {}, ("", "", ())], "a CacheScope"),
    (
        "priority",
        [None, 1.0, True, "1", NAN, MAX_PRIORITY + 1, -MAX_PRIORITY - 1],
        "an integer from -1000000 to 1000000",
    ),
    ("arrival_s", [None, "0", True, NAN, INFINITY, -INFINITY, 10**400], "a finite number"),
    ("sampling", [None, {}, "greedy", 1], "SamplingParams"),
]


def expect_refusal(request: Request, field: str, value: object, allowed: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        validate(request, LIMITS)
    shown = repr(value)
    assert (caught.value.field, caught.value.allowed) == (field, allowed)
    assert caught.value.value is value
    place = "a token id in stop_token_ids" if field == "stop_token_ids" and "integer" in allowed else field
    assert str(caught.value) == f"{place} is {shown if len(shown) <= 80 else shown[:77] + '...'}; allowed: {allowed}"


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [(field, value, allowed) for field, values, allowed in SAMPLING_CASES for value in values],
    ids=lambda value: repr(value)[:24],
)
def test_every_sampling_field_refuses_what_it_does_not_allow(field: str, value: object, allowed: str) -> None:
    sampling = replace(SamplingParams(), **{field: value})
    expect_refusal(Request("r", [1], sampling), field, value, allowed)
    with pytest.raises(InvalidRequestError, match=field):
        validate_sampling(sampling, LIMITS)


@pytest.mark.parametrize(("declared", "low", "high"), RANGES, ids=lambda value: getattr(value, "name", ""))
def test_every_number_has_the_range_that_is_declared(declared: Parameter, low: float, high: float) -> None:
    wide = RequestLimits(1 << 40, LARGEST, LARGEST, 1 << 20)
    neutral = replace(SamplingParams(), best_of=1 << 20 if declared.name == "n" else None)
    if declared.name in ("length_penalty", "early_stopping"):
        neutral = replace(neutral, beam_search=True, temperature=0.0)
    step = 1 if isinstance(declared.kind, Integer) else 0.001
    edges = [high] if isinstance(declared.kind, Number) and declared.kind.is_above else [low, high]
    for value in edges:
        validate_sampling(replace(neutral, **{declared.name: value}), wide)
    outside = [low - step, high + step, "1", True, NAN] + [low] * (len(edges) == 1)
    for value in outside:
        with pytest.raises(InvalidRequestError, match=f"^{declared.name} is "):
            validate_sampling(replace(neutral, **{declared.name: value}), wide)


@pytest.mark.parametrize(
    ("attribute", "field", "value", "allowed"),
    [(attribute, field, value, allowed) for attribute, field, values, allowed in SCOPE_CASES for value in values],
    ids=lambda value: repr(value)[:24],
)
def test_every_scope_field_refuses_what_it_does_not_allow(
    attribute: str, field: str, value: object, allowed: str
) -> None:
    scope = replace(CacheScope(), **{attribute: value})
    expect_refusal(Request("r", [1], scope=scope), field, value, allowed)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [(field, value, allowed) for field, values, allowed in REQUEST_CASES for value in values],
    ids=lambda value: repr(value)[:24],
)
def test_every_request_field_refuses_what_it_does_not_allow(field: str, value: object, allowed: str) -> None:
    request = Request("r", [1])
    setattr(request, field, value)
    expect_refusal(request, field, value, allowed)


def test_the_tables_name_every_field_of_sampling_and_scope() -> None:
    in_table = {case[0] for case in SAMPLING_CASES}
    assert in_table | {declared.name for declared, _, _ in RANGES} == {field.name for field in fields(SamplingParams)}
    assert {case[0] for case in SCOPE_CASES} == {field.name for field in fields(CacheScope)}


@pytest.mark.parametrize("key", [None, 1, b"k", "k" * (MAX_NAME_LENGTH + 1)], ids=lambda key: repr(key)[:24])
def test_each_extra_key_is_a_short_string(key: object) -> None:
    expect_refusal(
        Request("r", [1], scope=CacheScope(extra_keys=("fine", key))),  # type: ignore[arg-type]
        "extra_keys",
        key,
        "a string of 0 to 256 characters",
    )


@pytest.mark.parametrize("token", [-1, 100, 1.0, True, "1", None])
def test_each_stop_token_is_of_the_vocabulary(token: object) -> None:
    sampling = SamplingParams(stop_token_ids=(0, 99, token))  # type: ignore[arg-type]
    expect_refusal(Request("r", [1], sampling), "stop_token_ids", token, "an integer from 0 to 99")


@pytest.mark.parametrize("temperature", [1.0, 1e-9])
def test_beam_search_needs_temperature_zero(temperature: float) -> None:
    sampling = SamplingParams(beam_search=True, temperature=temperature)
    expect_refusal(Request("r", [1], sampling), "temperature", temperature, "0 in a beam search")


def test_the_log_probabilities_of_a_prompt_fit_into_a_message_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.core.validate.MAX_PROMPT_LOGPROBS", 100)
    for num_tokens, most in ((4, 20), (10, 8), (50, 0)):
        validate(Request("r", [1] * num_tokens, SamplingParams(prompt_logprobs=most, max_tokens=1)), LIMITS)
    for num_tokens, asked, allowed in ((10, 9, "at most 8"), (50, 1, "at most 0"), (51, 0, "None")):
        request = Request("r", [1] * num_tokens, SamplingParams(prompt_logprobs=asked, max_tokens=1))
        expect_refusal(request, "prompt_logprobs", asked, f"{allowed} for a prompt of {num_tokens} tokens")
    validate(Request("r", [1] * 51, SamplingParams(max_tokens=1)), LIMITS)


def test_best_of_is_at_least_n() -> None:
    expect_refusal(Request("r", [1], SamplingParams(n=3, best_of=2)), "best_of", 2, "an integer from 3 to 8")


def test_min_tokens_is_at_most_max_tokens() -> None:
    expect_refusal(
        Request("r", [1], SamplingParams(max_tokens=4, min_tokens=5)), "min_tokens", 5, "an integer from 0 to 4"
    )


@pytest.mark.parametrize(("wanted", "field", "value", "allowed"), PART_CASES)
def test_a_part_of_a_field_that_is_wrong_is_shown(wanted: dict[str, Any], field: str, value: Any, allowed: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        validate(Request("r", [1], SamplingParams(**wanted)), LIMITS)
    assert (caught.value.field, caught.value.allowed) == (field, allowed)
    assert caught.value.value == value or value is NAN


@pytest.mark.parametrize(("wanted", "field"), NO_CHOICE_CASES)
def test_what_leaves_no_token_to_choose_is_refused(wanted: dict[str, Any], field: str) -> None:
    limits = replace(LIMITS, eos_token_ids=(7,))
    with pytest.raises(InvalidRequestError, match=f"^{field} is ") as caught:
        validate(Request("r", [1], SamplingParams(**wanted)), limits)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "wanted",
    [
        {"bad_words_ids": [[token] for token in range(99)]},
        {"allowed_token_ids": [7], "min_tokens": 1, "ignore_eos": True},
        {"allowed_token_ids": [5, 6], "bad_words_ids": [[5], [6, 5]]},
        {"stop_token_ids": list(range(100))},
    ],
)
def test_one_token_to_choose_is_enough(wanted: dict[str, Any]) -> None:
    validate(Request("r", [1], SamplingParams(**wanted)), replace(LIMITS, eos_token_ids=(7,)))


@pytest.mark.parametrize(
    ("prompt", "index", "value"), [([100], 0, 100), ([0, 99, -1], 2, -1), ([5, 1 << 30], 1, 1 << 30)]
)
def test_a_token_outside_the_vocabulary_is_named_by_its_index(prompt: list[int], index: int, value: int) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        validate(Request("r", prompt), LIMITS)
    assert str(caught.value) == f"prompt[{index}] is {value}; allowed: a token id from 0 to 99"


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"^prompt is \[\]; allowed: at least one token id$"):
        validate(Request("r", []), LIMITS)


@pytest.mark.parametrize("sign", [1, -1])
def test_an_integer_too_long_to_print_is_refused_like_any_other(sign: int) -> None:
    with pytest.raises(InvalidRequestError, match=r"^n is "):
        validate(Request("r", [1], SamplingParams(n=sign * 10**5000)), LIMITS)


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "arrival_s"])
def test_an_integer_beyond_the_range_of_floats_is_refused_like_any_other(field: str) -> None:
    request = Request("r", [1])
    if field == "arrival_s":
        request.arrival_s = 10**400
    else:
        request.sampling = replace(SamplingParams(), **{field: 10**400})
    with pytest.raises(InvalidRequestError, match=field):
        validate(request, LIMITS)


def test_a_long_value_is_cut_in_the_message_and_kept_in_the_error() -> None:
    name = "x" * 5000
    with pytest.raises(InvalidRequestError) as caught:
        validate(Request(name, [1]), LIMITS)
    assert str(caught.value) == f"request_id is '{'x' * 76}...; allowed: a string of 1 to 256 characters"
    assert caught.value.value == name


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(n=8, best_of=8, temperature=1e6, top_p=1.0, top_k=LARGEST, min_p=1.0, seed=MAX_SEED),
        SamplingParams(temperature=0, top_p=5e-324, top_k=-1, min_p=0, seed=0, max_tokens=1, min_tokens=1),
        SamplingParams(beam_search=True, temperature=0.0, n=1, best_of=8, ignore_eos=True, min_tokens=64),
        SamplingParams(stop_token_ids=(0, 99) * (MAX_STOP_TOKEN_IDS // 2), max_tokens=62, min_tokens=62),
        SamplingParams(temperature=-0.0, grammar=Grammar("regex", "a")),
        SamplingParams(
            repetition_penalty=100, presence_penalty=2, frequency_penalty=-2, prompt_logprobs=20, logprobs=0
        ),
        SamplingParams(repetition_penalty=0.01, logit_bias=dict.fromkeys(range(100), -100), allowed_token_ids=(99,)),
        SamplingParams(bad_words=("a" * 256,) * 128, bad_words_ids=[[0] * 32] * 256),  # type: ignore[arg-type]
        SamplingParams(grammar=Grammar("lark", "é" * (MAX_GRAMMAR_BYTES // 2)), n=8, logprobs=20, stop="END"),
    ],
)
def test_the_most_extreme_values_allowed_pass(sampling: SamplingParams) -> None:
    scope = CacheScope("t" * MAX_NAME_LENGTH, "s" * MAX_SALT_LENGTH, ("k" * MAX_NAME_LENGTH,) * MAX_EXTRA_KEYS)
    for priority, arrival_s in [(MAX_PRIORITY, 1e308), (-MAX_PRIORITY, -1e308)]:
        name = "r" * MAX_NAME_LENGTH
        validate(Request(name, [0, 99], sampling, scope=scope, priority=priority, arrival_s=arrival_s), LIMITS)


CONTEXT = "this model's maximum context length is 64 tokens"
MEMORY = "the KV memory of this engine limits the maximum context length to 41 tokens"


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "sequence_tokens", "message"),
    [
        (65, None, 1000, f"the prompt has 65 tokens; {CONTEXT}. Shorten the prompt."),
        (65, 9, 1000, f"the prompt has 65 tokens; {CONTEXT}. Shorten the prompt."),
        (
            64,
            None,
            1000,
            f"the prompt has 64 tokens; {CONTEXT}, of which 1 must stay free for the output. Shorten the prompt.",
        ),
        (
            60,
            5,
            1000,
            f"the prompt (60 tokens) and max_tokens (5) together are 65 tokens; {CONTEXT}. Shorten the prompt or lower "
            "max_tokens.",
        ),
        (
            1,
            LARGEST,
            1000,
            f"the prompt (1 token) and max_tokens ({LARGEST}) together are {LARGEST + 1} tokens; {CONTEXT}. Shorten "
            "the prompt or lower max_tokens.",
        ),
        (
            42,
            None,
            40,
            f"the prompt has 42 tokens; {MEMORY}. Shorten the prompt, or give the engine more KV memory.",
        ),
        (
            30,
            12,
            40,
            f"the prompt (30 tokens) and max_tokens (12) together are 42 tokens; {MEMORY}. Shorten the prompt or lower "
            "max_tokens, or give the engine more KV memory.",
        ),
    ],
)
def test_a_request_that_never_fits_is_told_the_numbers(
    num_prompt: int, max_tokens: int | None, sequence_tokens: int, message: str
) -> None:
    limits = RequestLimits(100, 64, sequence_tokens, 8)
    with pytest.raises(RequestTooLargeError) as caught:
        validate(Request("r", [1] * num_prompt, SamplingParams(max_tokens=max_tokens)), limits)
    assert str(caught.value) == message
    count, _, reason = message.partition("; ")
    numbers = f"{num_prompt} tokens > {min(63, sequence_tokens)} maximum; {reason}"
    assert caught.value.numbers_first == ("" if "max_tokens" in count else numbers)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "sequence_tokens"),
    [(63, None, 1000), (63, 1, 1000), (1, 63, 1000), (40, None, 40), (40, 1, 40), (30, 11, 40)],
)
def test_a_request_that_just_fits_passes(num_prompt: int, max_tokens: int | None, sequence_tokens: int) -> None:
    limits = RequestLimits(100, 64, sequence_tokens, 8)
    validate(Request("r", [1] * num_prompt, SamplingParams(max_tokens=max_tokens)), limits)


@pytest.mark.parametrize(
    ("max_tokens", "model_len", "sequence_tokens", "total"),
    [
        (None, 64, 1000, 64),
        (None, 64, 40, 41),  # the last token is sampled and never stored
        (None, 64, 63, 64),
        (5, 64, 1000, 15),
        (54, 64, 1000, 64),
        (1000, 64, 40, 41),
    ],
)
def test_max_total_tokens(max_tokens: int | None, model_len: int, sequence_tokens: int, total: int) -> None:
    request = Request("r", [1] * 10, SamplingParams(max_tokens=max_tokens))
    assert max_total_tokens(request, RequestLimits(100, model_len, sequence_tokens, 8)) == total


@pytest.mark.parametrize("prompt", [[1, 2, 3], [1, 2, 100], []])
def test_validate_does_not_mutate(prompt: list[int]) -> None:
    request = Request("r", prompt, SamplingParams(stop_token_ids=(1,)), scope=CacheScope("t"), priority=3)
    before = {name: getattr(request, name) for name in Request.__slots__}
    tokens = array("i", request.tokens)
    with suppress(QuireError):
        validate(request, LIMITS)
    assert {name: getattr(request, name) for name in Request.__slots__} == before
    assert all(getattr(request, name) is value for name, value in before.items())
    assert request.tokens == tokens


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("stop", "END", r"\(\)"),
        ("logprobs", 1, "None"),
        ("repetition_penalty", 1.1, "1.0"),
        ("presence_penalty", 0.5, "0.0"),
        ("frequency_penalty", -0.5, "0.0"),
        ("logit_bias", {3: 1.0}, r"\(\)"),
        ("bad_words", "no", r"\(\)"),
        ("bad_words_ids", [[1]], r"\(\)"),
        ("allowed_token_ids", [1, 2], "None"),
    ],
)
def test_a_search_ranks_and_ends_texts_by_itself(field: str, value: object, allowed: str) -> None:
    search = SamplingParams(temperature=0.0, beam_search=True, n=2)
    validate(Request("r", [1], search), LIMITS)
    with pytest.raises(InvalidRequestError, match=rf"^{field} is .*; allowed: {allowed} in a beam search$"):
        validate(Request("r", [1], replace(search, **{field: value})), LIMITS)  # type: ignore[arg-type]


@pytest.mark.parametrize(("field", "value"), BESIDE_A_GRAMMAR)
def test_a_grammar_stands_alone(field: str, value: object) -> None:
    sampling = replace(SamplingParams(temperature=0.0), **{field: value})  # type: ignore[arg-type]
    validate(Request("r", [1], sampling), LIMITS)
    expect_refusal(
        Request("r", [1], replace(sampling, grammar=HELD)), "grammar", HELD, f"no grammar together with {field}"
    )


def test_a_search_has_no_grammar() -> None:
    sampling = SamplingParams(temperature=0.0, beam_search=True, grammar=HELD)
    expect_refusal(Request("r", [1], sampling), "grammar", HELD, "no grammar in a beam search")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Grammar.choice([]),
        lambda: Grammar.choice(["a", ""]),
        lambda: Grammar.choice("abc"),
        lambda: Grammar.choice(["a", 1]),  # type: ignore[list-item]
        lambda: Grammar.json_schema({"const": {1}}),
        lambda: Grammar.json_schema({"maximum": NAN}),
    ],
)
def test_what_cannot_be_written_as_a_grammar_is_refused(make: Callable[[], Grammar]) -> None:
    with pytest.raises(InvalidRequestError, match=r"^grammar is "):
        make()


@pytest.mark.parametrize(("field", "value"), [("length_penalty", 2.0), ("early_stopping", True)])
def test_the_settings_of_a_search_need_one(field: str, value: object) -> None:
    sampling = replace(SamplingParams(temperature=0.0), **{field: value})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=rf"^{field} is .* outside a beam search$"):
        validate(Request("r", [1], sampling), LIMITS)
    validate(Request("r", [1], replace(sampling, beam_search=True)), LIMITS)


def test_each_beam_needs_a_token_that_does_not_end_it() -> None:
    limits = replace(LIMITS, vocab_size=10, eos_token_ids=(9,))
    search = SamplingParams(temperature=0.0, beam_search=True, n=4, stop_token_ids=(0, 1, 2, 3, 4))
    validate(Request("r", [1], search), limits)
    with pytest.raises(InvalidRequestError, match=r"^best_of is 4; allowed: at most 3 beams: each needs a token"):
        validate(Request("r", [1], replace(search, stop_token_ids=(0, 1, 2, 3, 4, 5))), limits)
    validate(Request("r", [1], replace(search, stop_token_ids=(0, 1, 2, 3, 4, 5), ignore_eos=True)), limits)


def test_a_moment_is_any_finite_number() -> None:
    largest = sys.float_info.max
    for value in (largest, -largest, 0, -1):
        validate(Request("r", [1], arrival_s=value), LIMITS)


def test_a_token_that_the_vocabulary_does_not_have_bans_none_that_it_has() -> None:
    limits = replace(LIMITS, eos_token_ids=(100, -1))
    sampling = SamplingParams(stop_token_ids=tuple(range(99)), min_tokens=1)
    validate(Request("r", [1], sampling), limits)  # 99 is left
    with pytest.raises(InvalidRequestError, match=r"^min_tokens is 1; allowed: a value that leaves at least one token"):
        validate(Request("r", [1], replace(sampling, stop_token_ids=tuple(range(100)))), limits)


@pytest.mark.parametrize(
    ("vocab_size", "beams", "fits"), [(10, 9, True), (10, 10, False), (2, 1, True), (11, 10, True)]
)
def test_beams_and_the_tokens_that_end_them_share_the_vocabulary(vocab_size: int, beams: int, fits: bool) -> None:
    limits = RequestLimits(vocab_size, 64, 64, 16, eos_token_ids=(1,))
    search = SamplingParams(temperature=0.0, beam_search=True, best_of=beams)
    if fits:
        validate_sampling(search, limits)
    else:
        with pytest.raises(InvalidRequestError, match=f"at most {vocab_size - 1} beams: each needs a token"):
            validate_sampling(search, limits)


def test_logprobs_are_at_most_as_many_as_the_vocabulary_has() -> None:
    limits = replace(LIMITS, vocab_size=5)
    for field in ("logprobs", "prompt_logprobs"):
        validate_sampling(replace(SamplingParams(), **{field: 5}), limits)
        with pytest.raises(InvalidRequestError, match=f"^{field} is 6; allowed: an integer from 0 to 5$"):
            validate_sampling(replace(SamplingParams(), **{field: 6}), limits)


def test_a_choice_of_many_tokens_takes_no_more_calls_than_one_of_few() -> None:
    limits, counts = replace(LIMITS, vocab_size=10_000), []

    def note(frame: FrameType, event: str, _: object) -> None:
        counts[-1] += event in ("call", "c_call")

    for count in (2, 10_000):
        sampling = SamplingParams(allowed_token_ids=tuple(range(count)))
        counts.append(0)
        sys.setprofile(note)
        try:
            validate_sampling(sampling, limits)
        finally:
            sys.setprofile(None)
    assert counts[0] == counts[1]
