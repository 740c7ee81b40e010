"""Prompts at the door: which forms there are, what becomes of each, and how a refusal names the one at fault."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import CheckpointError, InvalidRequestError
from quire.core.sampling_params import MAX_BAD_WORD_TOKENS, SamplingParams
from quire.engine.text.chat_template import ChatOptions
from quire.engine.text.prompts import (
    FORMS,
    HUGGING_FACE_NAMES,
    encode_prompt,
    estimated_tokens,
    split_conversations,
    split_prompts,
    with_bad_words,
    with_options,
)
from quire.engine.text.tokenizer import Tokenizer
from support.tiny_tokenizer import byte_level

TOKENIZER = Tokenizer(byte_level())
MESSAGES = [{"role": "user", "content": "Hi"}]


def refusal(call: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        call()
    return caught.value


# ---- one prompt, or several -----------------------------------------------------------------------------------------

ONE = st.one_of(
    st.text(min_size=1, max_size=5),
    st.lists(st.integers(0, 9), min_size=1, max_size=4),
    st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple),
    st.lists(st.integers(0, 9), min_size=1, max_size=4).map(lambda ids: array("i", ids)),
    st.fixed_dictionaries({"prompt_token_ids": st.lists(st.integers(0, 9), min_size=1, max_size=3)}),
    st.fixed_dictionaries({"prompt": st.text(min_size=1, max_size=3)}),
    st.just(MESSAGES),
)


@given(ONE)
def test_a_prompt_by_itself_is_one_prompt(prompt: Any) -> None:
    assert split_prompts(prompt) == [prompt]


@given(st.lists(ONE, min_size=1, max_size=4).filter(lambda prompts: not isinstance(prompts[0], dict)), st.booleans())
def test_a_list_of_prompts_is_each_of_them(prompts: list[Any], as_tuple: bool) -> None:
    assert split_prompts(tuple(prompts) if as_tuple else prompts) == prompts


@pytest.mark.parametrize("prompts", [b"text", bytearray(b"text"), 7, None, {"a", "b"}, 1.5])
def test_what_is_no_prompt_is_refused_with_the_forms_that_there_are(prompts: Any) -> None:
    error = refusal(lambda: split_prompts(prompts))
    assert (error.field, error.allowed) == ("prompt", FORMS)


def test_nothing_is_no_prompts() -> None:
    assert split_prompts([]) == split_prompts(()) == []


# ---- from a prompt to tokens ----------------------------------------------------------------------------------------


@given(st.text(min_size=1, max_size=20).filter(str.strip))
def test_a_text_has_the_tokens_of_the_tokenizer_and_is_remembered(text: str) -> None:
    for prompt in (text, {"prompt": text}):
        found = encode_prompt(prompt, TOKENIZER)
        assert (found.text, found.token_ids.tolist()) == (text, TOKENIZER.encode(text))


@given(st.lists(st.integers(0, 1 << 30), min_size=1, max_size=8))
def test_token_ids_are_taken_as_they_are_with_or_without_a_tokenizer(ids: list[int]) -> None:
    for prompt in (ids, tuple(ids), array("i", ids), {"prompt_token_ids": ids}):
        for tokenizer in (TOKENIZER, None):
            found = encode_prompt(prompt, tokenizer)
            assert (found.text, found.token_ids.tolist()) == (None, ids)


@pytest.mark.parametrize(
    ("prompt", "field", "allowed"),
    [
        ("", "prompt", "a text of at least one character"),
        ({"prompt": ""}, "prompt", "a text of at least one character"),
        ({"prompt": 7}, "prompt", FORMS),
        ({}, "prompt", FORMS),
        ({"prompt": "a", "prompt_token_ids": [1]}, "prompt", FORMS),
        ({"text": "a"}, "prompt", FORMS),
        (7, "prompt", FORMS),
        ({1, 2}, "prompt", FORMS),
    ],
)
def test_what_is_no_prompt_is_refused(prompt: Any, field: str, allowed: str) -> None:
    error = refusal(lambda: encode_prompt(prompt, TOKENIZER))
    assert (error.field, error.allowed) == (field, allowed)


@pytest.mark.parametrize(("prompt", "what"), [("Hi", "a text"), (MESSAGES, "a conversation")])
def test_an_engine_without_a_tokenizer_takes_token_ids_alone(prompt: Any, what: str) -> None:
    assert str(refusal(lambda: encode_prompt(prompt, None))) == (
        f"prompt is '{what}'; allowed: token ids, because this engine has no tokenizer"
    )


def test_options_of_a_conversation_reach_its_template() -> None:
    asked: list[Any] = []

    def encode_chat(messages: Any, options: ChatOptions, write: Any) -> list[int]:
        asked.append((messages, options, write("rendered")))
        return [1, 2]

    tokenizer: Any = SimpleNamespace(encode_chat=encode_chat, images=None)
    options = ChatOptions(False, [{"name": "add"}], {"enable_thinking": False}, "other", continue_final_message=True)
    for chat in (None, options):
        assert encode_prompt(tuple(MESSAGES), tokenizer, chat).token_ids.tolist() == [1, 2]
    assert asked == [(MESSAGES, ChatOptions(), "rendered"), (MESSAGES, options, "rendered")]


@pytest.mark.parametrize("failure", [ZeroDivisionError("a mistake"), UnicodeError("torn"), RecursionError()])
def test_whatever_a_tokenizer_raises_is_about_the_prompt_that_it_was_given(failure: Exception) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise failure

    tokenizer: Any = SimpleNamespace(encode=fail, encode_chat=fail, images=None)
    for call, field in (
        (lambda: encode_prompt("Hi", tokenizer), "prompt"),
        (lambda: encode_prompt(MESSAGES, tokenizer), "messages"),
        (lambda: with_bad_words(SamplingParams(bad_words=("no",)), tokenizer), "bad_words"),
    ):
        error = refusal(call)
        assert (error.field, error.value) == (field, f"{type(failure).__name__}: {failure}")
        assert error.allowed == "a text that the tokenizer can encode"
        assert error.__cause__ is failure


def test_an_error_of_ours_stays_what_it_is() -> None:
    torn = CheckpointError("tokenizer.json", "torn", "whole")

    def fail(*_: Any, **__: Any) -> Any:
        raise torn

    tokenizer: Any = SimpleNamespace(encode=fail, encode_chat=fail, images=None)
    for call in (
        lambda: encode_prompt("Hi", tokenizer),
        lambda: encode_prompt(MESSAGES, tokenizer),
        lambda: with_bad_words(SamplingParams(bad_words=("no",)), tokenizer),
    ):
        with pytest.raises(CheckpointError) as caught:
            call()
        assert caught.value is torn


# ---- estimates ------------------------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.integers() | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@given(VALUES, st.integers(0, 50))
def test_an_estimate_is_bounded_and_grows_with_the_bound_up_to_the_whole(value: Any, most: int) -> None:
    whole = estimated_tokens(value, 1 << 40)
    assert estimated_tokens(value, most) == min(whole, most)


@given(st.integers(0, 400))
def test_letters_beyond_ascii_count_as_tokens_and_english_as_a_quarter(length: int) -> None:
    assert estimated_tokens("a" * length, 1 << 40) == 1 + length // 4
    assert estimated_tokens("é" * length, 1 << 40) == 1 + length
    assert estimated_tokens([7] * length, 1 << 40) == 1 + length


# ---- options of a call ----------------------------------------------------------------------------------------------


def test_names_of_hugging_face_mean_ours() -> None:
    values = {"max_new_tokens": 7, "min_new_tokens": 2, "num_return_sequences": 3, "stop_strings": ("a",)}
    assert values.keys() == HUGGING_FACE_NAMES.keys()
    assert with_options(SamplingParams(), values) == SamplingParams(max_tokens=7, min_tokens=2, n=3, stop=("a",))
    greedy = with_options(SamplingParams(temperature=0.7), {"do_sample": False})
    assert greedy.temperature == 0.0
    kept = SamplingParams(temperature=0.7)
    assert with_options(kept, {"do_sample": True}) == kept
    assert with_options(kept, {}) is kept


@pytest.mark.parametrize(("name", "value"), [("max_token", 7), ("do_sample", 1), ("do_sample", None), ("beams", 2)])
def test_an_option_that_is_none_is_named(name: str, value: Any) -> None:
    error = refusal(lambda: with_options(SamplingParams(), {name: value}))
    assert (error.field, error.value, error.allowed) == (name, value, "the name of a sampling parameter")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("temprature", "did you mean temperature?"),
        ("n_predict", "quire calls it max_tokens"),
        ("repeat_penalty", "quire calls it repetition_penalty"),
        ("xyzzy", "see quire.SamplingParams"),
    ],
)
def test_an_option_that_is_none_leads_to_the_one_that_was_meant(name: str, hint: str) -> None:
    error = refusal(lambda: with_options(SamplingParams(), {name: 1}))
    assert str(error) == f"{name!r} is not a sampling parameter; {hint}"


# ---- conversations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "messages", ["hi", {"role": "user", "content": "hi"}, ["hi there"], [["hi"]], [[]], [5], 5, None]
)
def test_what_is_no_conversation_is_refused_with_an_example(messages: Any) -> None:
    error = refusal(lambda: split_conversations(messages))
    assert error.field == "messages"
    assert error.allowed == 'a list of messages such as {"role": "user", "content": "Hi"}, or a list of such lists'


def test_conversations_are_split() -> None:
    message = {"role": "user", "content": "hi"}
    assert split_conversations([]) == []
    assert split_conversations([message, message]) == [[message, message]]
    assert split_conversations([[message], (message,)]) == [[message], (message,)]


# ---- bad words ------------------------------------------------------------------------------------------------------


@given(st.lists(st.text("abc é你", min_size=1, max_size=5).filter(str.strip), max_size=4))
def test_a_bad_word_is_banned_as_it_begins_a_text_and_behind_a_space(words: list[str]) -> None:
    known = ((1, 2), (3,))
    found = with_bad_words(SamplingParams(bad_words=tuple(words), bad_words_ids=known), TOKENIZER).bad_words_ids
    expected = set(known)
    for word in words:
        for text in (word.lstrip(), f" {word.lstrip()}"):
            expected.add(tuple(TOKENIZER.encode(text, add_special_tokens=False)))
    assert set(found) == expected
    assert len(found) == len(expected)
    assert found[:2] == known


def test_a_bad_word_has_a_length() -> None:
    longest = "z" * (MAX_BAD_WORD_TOKENS - 1)  # with a space before it, one more
    with_bad_words(SamplingParams(bad_words=(longest,)), TOKENIZER)
    for word, allowed in (
        (longest + "z", f"words of 1 to {MAX_BAD_WORD_TOKENS} tokens"),
        (" \t", "a word that is not only white space"),
        ("", "a word that is not only white space"),
    ):
        sampling = SamplingParams()
        object.__setattr__(sampling, "bad_words", (word,))
        error = refusal(lambda sampling=sampling: with_bad_words(sampling, TOKENIZER))
        assert (error.field, error.value, error.allowed) == ("bad_words", word, allowed)
    error = refusal(lambda: with_bad_words(SamplingParams(bad_words=("no",)), None))
    assert error.allowed == "none, because this engine has no tokenizer; use bad_words_ids"


def test_arrays_of_numbers_are_no_prompts_that_are_misread() -> None:
    for prompt in (np.array([1, 2]), np.int64(3)):
        assert refusal(lambda prompt=prompt: encode_prompt(prompt, None)).allowed == FORMS
