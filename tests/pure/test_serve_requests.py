"""Bodies become requests: what is read, what is refused, and under which name."""

from __future__ import annotations

import contextlib
import json
import math
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import InvalidRequestError, RequestTooLargeError
from quire.core.request import Request
from quire.core.sampling_params import MAX_STOP_STRINGS, SamplingParams
from quire.core.validate import ANY_ENGINE, RequestLimits, validate_length, validate_sampling
from quire.engine.outputs import Logprob
from quire.serve import openapi
from quire.serve.errors import ApiError
from quire.serve.render.logprobs import TokenNames, completion_logprobs, content_logprobs, prompt_logprobs, told
from quire.serve.schemas.chat import ChatRequest
from quire.serve.schemas.common import ModelFields
from quire.serve.schemas.completions import CompletionRequest
from quire.serve.schemas.fields import IGNORED, REFUSED
from quire.serve.schemas.parse import parse
from quire.serve.schemas.responses import ResponseRequest
from quire.serve.schemas.sampling import ChoiceFields
from quire.serve.translate.chat import num_logprobs
from quire.serve.translate.completions import prompts_of
from quire.serve.translate.names import renamed
from quire.serve.translate.response_input import NO_IMAGE, messages_of
from quire.serve.translate.responses import num_logprobs as num_response_logprobs
from quire.serve.translate.responses import require_supported
from quire.serve.translate.sampling import (
    PASSED,
    include_usage,
    require_few_choices,
    sampling_of,
    with_penalty_window,
)
from support.idle_services import services

KINDS = [each for each in vars(openapi).values() if isinstance(each, type) and issubclass(each, ModelFields)]


def read(fields: Any, kind: Any = CompletionRequest) -> Any:
    return parse(json.dumps(fields).encode(), kind)


def refusal(body: bytes | dict[str, Any], kind: Any = CompletionRequest) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(body if isinstance(body, bytes) else json.dumps(body).encode(), kind)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_call_bounds_the_name_of_its_model(kind: Any) -> None:
    error = refusal({"model": "m" * 257}, kind)
    assert (error.detail.param, error.detail.code) == ("model", "invalid_type")
    assert "length <= 256" in error.detail.message and len(error.detail.message) < 200
    with contextlib.suppress(ApiError):  # other fields may be required
        assert read({"model": "m" * 256}, kind).model == "m" * 256


# ---- the reader -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "it is empty"),
        (b"  \n", "it is empty"),
        (b"{", "Expecting property name"),
        (b"[]", "a JSON array"),
        (b'"text"', "a JSON string"),
        (b"3", "a JSON number"),
        (b"true", "a JSON boolean"),
        (b"null", "a JSON null"),
        (b'{"prompt": "a"} x', "Extra data"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b'{"prompt": NaN}', "NaN is not JSON"),
        (b'{"prompt": -Infinity}', "-Infinity is not JSON"),
        (b'{"prompt": ' + b"9" * 10_000 + b"}", "must be one JSON object: an integer has more than 4,300 digits"),
        (b'{"prompt": "a\nb"}', "control character"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"prompt":' * 100_000, "nested too deeply"),
    ],
)
def test_what_is_no_json_object_is_refused(body: bytes, words: str) -> None:
    error = refusal(body)
    assert words in error.detail.message
    assert error.detail.code == "invalid_json"


def test_a_key_that_stands_twice_is_named() -> None:
    assert refusal(b'{"prompt": "a", "prompt": "b"}').detail.param == "prompt"
    assert refusal(b'{"prompt": "a", "logit_bias": {"1": 2, "1": 3}}').detail.param == "1"
    assert refusal(b'{"\\ud800": 1, "\\ud800": 2}').detail.param == "\ufffd"


@pytest.mark.parametrize("text", [r"\ud800", r"a\udfffb", r"\u0000", r"\udc00\ud800"])
def test_what_is_no_text_is_refused_wherever_it_stands(text: str) -> None:
    for body in (
        '{"prompt": "%s"}',
        '{"prompt": ["a", "%s"]}',
        '{"prompt": "a", "user": "%s"}',
        '{"prompt": "a", "metadata": {"k": [{"%s": 1}]}}',
    ):
        error = refusal((body % text).encode())
        assert error.detail.code == "invalid_value"
        assert error.detail.param in ("prompt", "user", "metadata")
        json.loads(error.body())
    assert read({"prompt": "\U0001f600"}).prompt == "\U0001f600"  # a whole pair is a character


def test_types_are_strict_and_the_field_is_named() -> None:
    for fields, param in (
        ({"n": "2"}, "n"),
        ({"n": True}, "n"),
        ({"n": 1.5}, "n"),
        ({"logprobs": "5"}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": False}, "temperature"),
        ({"stop": 3}, "stop"),
        ({"stop": ["a", 3]}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"logit_bias": {"1": "x"}}, "logit_bias"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream_options": {"more": True}}, "stream_options.more"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": 7}, "cache_salt"),
        ({"cache_salt": "x" * 1025}, "cache_salt"),
        ({"request_id": "x" * 257}, "request_id"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"early_stopping": "maybe"}, "early_stopping"),
        ({"what": 1}, "what"),
    ):
        detail = refusal({"prompt": "a"} | fields).detail
        assert (detail.param or "").partition("[")[0] == param, (fields, detail)
    assert refusal({}).detail.code == "missing_required_parameter"
    assert refusal({"prompt": "a", "what": 1}).detail.code == "unknown_parameter"


def test_null_is_not_given_and_integers_are_numbers() -> None:
    fields = read({"prompt": "a", "n": None, "temperature": 1, "stop": None, "stream_options": None, "suffix": None})
    assert fields.n is None
    assert fields.temperature == 1
    assert refusal({"prompt": None}).detail.param == "prompt"


def test_ignored_fields_change_nothing_and_refused_ones_are_named() -> None:
    plain = read({"prompt": "a"})
    for name in IGNORED:
        assert read({"prompt": "a", name: {"any": ["thing"]}}) == plain
    for kind, required in ((CompletionRequest, "prompt"), (ChatRequest, "messages"), (ResponseRequest, "input")):
        value: Any = [{"role": "user"}] if required == "messages" else "a"
        for name in REFUSED.keys() - set(kind.__struct_encode_fields__):
            error = refusal({required: value, name: {"some": "thing"}}, kind)
            assert (error.detail.param, error.detail.code) == (name, "unsupported_parameter")
            for nothing in (None, *REFUSED[name].nothing):
                assert read({required: value, name: nothing}, kind) == read({required: value}, kind)
    assert not IGNORED & REFUSED.keys()
    assert refusal({"prompt": "a", "add_special_tokens": 3}).detail.param == "add_special_tokens"
    assert refusal({"prompt": "a", "continue_final_message": 0}).detail.code == "unsupported_parameter"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
NAMES = st.sampled_from([*CompletionRequest.__struct_encode_fields__, *IGNORED, *REFUSED, "what"])


@given(st.dictionaries(NAMES, JSON, max_size=5))
def test_every_object_is_read_or_refused(fields: dict[str, Any]) -> None:
    try:
        found = read(fields)
    except ApiError as error:
        assert error.status == 400
        json.loads(error.body())
        return
    try:
        sampling_of(found, SamplingParams())
        prompts_of(found.prompt)
        include_usage(found)
    except (InvalidRequestError, ApiError):
        pass


@given(st.binary(max_size=40))
def test_every_body_is_read_or_refused(body: bytes) -> None:
    with pytest.raises(ApiError):
        parse(body, CompletionRequest)


# ---- sampling -------------------------------------------------------------------------------------------------------


def fields_of(**values: Any) -> ChoiceFields:
    return msgspec.convert(values, ChoiceFields)


def test_fields_take_the_place_of_the_defaults() -> None:
    defaults = SamplingParams(temperature=0.6, top_k=20, top_p=0.95)
    assert sampling_of(fields_of(), defaults) == defaults
    fields = fields_of(
        temperature=0.0,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        seed=7,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.1,
        logit_bias={"7": -100.0, "0": 1},
        stop=["a", "b"],
        stop_token_ids=[3],
        include_stop_str_in_output=True,
        ignore_eos=True,
        min_tokens=2,
        skip_special_tokens=False,
        allowed_token_ids=[1, 2],
        bad_words=["x"],
        n=2,
        best_of=3,
        prompt_logprobs=1,
    )
    found = sampling_of(fields, defaults, max_tokens=5)
    assert found.max_tokens == 5
    assert found.logit_bias == ((0, 1), (7, -100.0))
    assert found.stop == ("a", "b")
    given = {name for name in PASSED if getattr(fields, name) is not None}
    assert len(given) == 19
    for name in given - {"stop", "stop_token_ids", "allowed_token_ids", "bad_words"}:
        assert getattr(found, name) == getattr(fields, name), name


def test_a_search_takes_only_stop_strings_from_the_defaults_and_only_with_one_beam() -> None:
    defaults = SamplingParams(temperature=0.6, top_k=20, repetition_penalty=1.1, stop=("<|im_end|>",))
    search = {"use_beam_search": True, "best_of": 4, "length_penalty": 0.5}
    found = sampling_of(fields_of(**search), defaults, max_tokens=5)
    assert found == SamplingParams(beam_search=True, temperature=0, best_of=4, length_penalty=0.5, max_tokens=5)
    assert sampling_of(fields_of(use_beam_search=True), defaults).stop == ("<|im_end|>",)
    assert sampling_of(fields_of(**search, stop=["."]), defaults).stop == (".",)
    assert sampling_of(fields_of(**search, stop=[]), defaults).stop == ()
    assert sampling_of(fields_of(use_beam_search=False), defaults) == defaults


@pytest.mark.parametrize("key", ["", " 1", "01", "+1", "-1", "1_0", "1.0", "x", "\u0661", "9" * 11])
def test_ids_of_biases_are_written_in_one_way(key: str) -> None:
    with pytest.raises(InvalidRequestError, match="logit_bias"):
        sampling_of(fields_of(logit_bias={key: 1.0}), SamplingParams())


def test_as_many_stop_strings_are_allowed_as_the_engine_takes() -> None:
    many = [str(number) for number in range(MAX_STOP_STRINGS)]
    sampling = sampling_of(fields_of(stop=many), SamplingParams())
    assert sampling.stop == tuple(many)
    validate_sampling(sampling, ANY_ENGINE)
    assert f'"maxItems": {MAX_STOP_STRINGS}' in json.dumps(msgspec.json.schema(CompletionRequest))
    with pytest.raises(InvalidRequestError, match=f"allowed: at most {MAX_STOP_STRINGS} strings"):
        validate_sampling(sampling_of(fields_of(stop=[*many, "x"]), SamplingParams()), ANY_ENGINE)


@pytest.mark.parametrize(
    ("defaults", "given", "last_n", "expected"),
    [
        ({}, {}, None, {}),
        ({}, {"repetition_penalty": 1.0}, None, {}),
        ({}, {"repetition_penalty": 1.1}, None, {"repetition_penalty": 1.1, "penalty_window": 64}),
        ({}, {"presence_penalty": 0.5}, None, {"presence_penalty": 0.5, "penalty_window": 64}),
        ({}, {"frequency_penalty": -0.5}, 7, {"frequency_penalty": -0.5, "penalty_window": 7}),
        ({}, {"repetition_penalty": 1.1}, -1, {"repetition_penalty": 1.1}),
        ({}, {"repetition_penalty": 1.1}, 0, {}),
        ({"repetition_penalty": 1.05}, {}, None, {"repetition_penalty": 1.05}),
        ({"repetition_penalty": 1.05}, {}, 20, {"repetition_penalty": 1.05, "penalty_window": 20}),
        ({"repetition_penalty": 1.05}, {}, 0, {}),
        (
            {"repetition_penalty": 1.05},
            {"presence_penalty": 1.0},
            None,
            {"repetition_penalty": 1.05, "presence_penalty": 1.0, "penalty_window": 64},
        ),
        (
            {"repetition_penalty": 1.1, "penalty_window": 9},
            {"repetition_penalty": 1.2},
            None,
            {"repetition_penalty": 1.2, "penalty_window": 9},
        ),
    ],
)
def test_penalties_of_ollama_look_at_the_last_tokens(
    defaults: dict[str, Any], given: dict[str, Any], last_n: int | None, expected: dict[str, Any]
) -> None:
    found = with_penalty_window(given, SamplingParams(**defaults), last_n, "repeat_last_n")
    assert found == SamplingParams(**expected)


@pytest.mark.parametrize("last_n", [-2, 1 << 31])
def test_a_window_that_cannot_be_is_refused_by_the_name_that_the_client_gave(last_n: int) -> None:
    message = rf"options\.repeat_last_n is {last_n}; allowed: a number of tokens, or -1 for the whole text"
    with pytest.raises(InvalidRequestError, match=message):
        with_penalty_window({}, SamplingParams(), last_n, "options.repeat_last_n")


def test_stream_options_need_a_stream() -> None:
    assert include_usage(read({"prompt": "a", "stream": True})) == (False, False)
    options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": True}
    assert include_usage(read({"prompt": "a", "stream": True, "stream_options": options})) == (True, True)
    with pytest.raises(ApiError, match="stream_options"):
        include_usage(read({"prompt": "a", "stream_options": options}))


# ---- prompts and conversations --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ([], "prompt"),
        ([[]], "prompt[0]"),
        (["a", 1], "prompt[0]"),
        ([1, "a"], "prompt[1]"),
        ([1, 2.5], "prompt[1]"),
        ([True], "prompt[0]"),
        ([[1], "a"], "prompt[0]"),
        ([[1], [2, None]], "prompt[1][1]"),
        ([{}], "prompt[0]"),
        ([[[1]]], "prompt[0][0]"),
    ],
)
def test_prompts_that_are_none(prompt: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        prompts_of(prompt)
    assert caught.value.field == field


def test_choices_are_counted_over_all_prompts() -> None:
    few = services(max_choices=8)
    require_few_choices(4, SamplingParams(n=2), few)
    require_few_choices(1, SamplingParams(n=0), few)  # what n may be is for the one who validates
    for num_prompts, sampling, field in (
        (5, SamplingParams(n=2), "n"),
        (1, SamplingParams(n=1_000_000), "n"),
        (1, SamplingParams(best_of=9), "best_of"),
        (9, SamplingParams(), "prompt"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            require_few_choices(num_prompts, sampling, few)
        assert caught.value.field == field


def test_the_limit_that_counts_is_given_first() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        require_few_choices(1, SamplingParams(n=129), services())
    most = services().model.limits.max_num_seqs
    assert most < 128
    assert str(caught.value) == f"n is 129; allowed: at most {most}, the sequences that run at once (--max-num-seqs)"


def test_refusals_of_the_engine_speak_the_words_of_the_request() -> None:
    names = {"prompt": "messages", "max_tokens": "max_completion_tokens"}
    detail = renamed(InvalidRequestError("max_tokens", 0, "an integer from 1"), names).detail
    assert detail.param == "max_completion_tokens"
    assert detail.message == "max_completion_tokens is 0; allowed: an integer from 1"
    large = renamed(RequestTooLargeError("prompt and max_tokens together", 99, "at most 9 tokens"), names, 1).detail
    assert (large.param, large.code) == ("messages[1]", "context_length_exceeded")
    assert "maximum context length" in large.message
    with pytest.raises(RequestTooLargeError) as caught:
        validate_length(Request("r", [1] * 31, SamplingParams(max_tokens=9_000)), RequestLimits(100, 8192, 8192, 8))
    assert renamed(caught.value, names).detail.message == (
        "the prompt (31 tokens) and max_completion_tokens (9000) together are 9031 tokens; this model's maximum "
        "context length is 8192 tokens. Shorten the prompt or lower max_completion_tokens."
    )
    assert renamed(InvalidRequestError("logit_bias[3]", 1, "less"), {}).detail.param == "logit_bias[3]"


def test_top_logprobs_need_logprobs() -> None:
    assert [num_logprobs(*each) for each in ((None, None), (False, None), (True, None), (True, 4))] == [
        None,
        None,
        0,
        4,
    ]
    for logprobs in (None, False):
        with pytest.raises(ApiError) as caught:
            num_logprobs(logprobs, 2)
        assert caught.value.detail.param == "top_logprobs"


def test_items_of_an_input_are_messages_of_text() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}]
    items = [{"type": "message", "role": "user", "content": parts}, {"role": "assistant", "content": "c", "id": "m"}]
    found = messages_of(read({"input": items, "instructions": "d"}, ResponseRequest))
    assert found == [
        {"role": "system", "content": "d"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "c"},
    ]
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    result = {"type": "function_call_output", "call_id": "c", "output": [*parts, image]}
    [told] = messages_of(read({"input": [result]}, ResponseRequest))
    assert told == {"role": "tool", "tool_call_id": "c", "content": f"ab{NO_IMAGE}"}
    for item in (
        {"type": "function_call_output", "output": "x"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_file"}]},
        {"type": "function_call_output", "call_id": "c", "output": [7]},
        {"type": "item_reference", "id": "x"},
        {"role": "tool", "content": "x"},
        {"role": "user"},
        {"role": "user", "content": 7},
        {"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]},
        {"role": "user", "content": [{"type": "input_text"}]},
        {"role": "user", "content": "x", "weight": 3},
        {},
    ):
        with pytest.raises((ApiError, InvalidRequestError)):
            messages_of(read({"input": [item]}, ResponseRequest))
    with pytest.raises(InvalidRequestError):
        messages_of(read({"input": []}, ResponseRequest))


@pytest.mark.parametrize(
    "fields",
    [
        {"truncation": "auto"},
        {"include": ["file_search_call.results"]},
        {"stream_options": {"include_obfuscation": False}},
        {"stream": True, "stream_options": {"include_usage": True}},
    ],
)
def test_settings_of_a_response_that_are_not_supported(fields: dict[str, Any]) -> None:
    with pytest.raises((ApiError, InvalidRequestError)):
        require_supported(read({"input": "a"} | fields, ResponseRequest))


def test_settings_of_a_response_that_are() -> None:
    text = {"format": {"type": "text"}, "verbosity": "low"}
    include = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    fields = {"truncation": "disabled", "text": text, "include": include, "stream": True}
    request = read({"input": "a", "stream_options": {"include_obfuscation": True}} | fields, ResponseRequest)
    require_supported(request)
    assert num_response_logprobs(request) == 0


# ---- log-probabilities ----------------------------------------------------------------------------------------------


def test_json_can_tell_every_log_probability() -> None:
    assert told(-0.25) == -0.25
    for value in (-math.inf, math.nan, -1e308):
        assert told(value) == -9999.0


def test_the_token_itself_and_then_the_likeliest() -> None:
    entry = {5: Logprob(-3.0, 4, "e"), 1: Logprob(-0.1, 1, "a"), 2: Logprob(-1.0, 2, "b"), 3: Logprob(-2.0, 3, "e")}
    names = TokenNames(None)
    old = completion_logprobs([9, 5], [None, entry], [0, 3], 2, names)
    assert old.tokens == ["token_id:9", "token_id:5"]
    assert old.token_logprobs == [None, -3.0]
    assert json.loads(msgspec.json.encode(old.top_logprobs)) == [
        None,
        {"token_id:5": -3.0, "token_id:1": -0.1, "token_id:2": -1.0},
    ]
    assert old.text_offset == [0, 3]
    [new] = content_logprobs([entry], 3, names)
    assert (new.token, new.logprob, new.bytes) == ("token_id:5", -3.0, None)
    assert [each.token for each in new.top_logprobs] == ["token_id:1", "token_id:2", "token_id:3"]
    assert next(content_logprobs([entry], 0, names)).top_logprobs == []
    [first, second] = json.loads(msgspec.json.encode(prompt_logprobs([None, entry], 1)))
    assert first is None
    assert {token_id: each["rank"] for token_id, each in second.items()} == {"5": 4, "1": 1}


# ---- the page -------------------------------------------------------------------------------------------------------


def test_the_page_lists_what_is_ignored_and_what_is_refused() -> None:
    text = (Path(__file__).parents[2] / "docs" / "http.md").read_text(encoding="utf-8")
    _, ignored, rest = re.split("### Ignored|### Refused", text)
    refused, _, _ = rest.partition("## Answers")
    assert set(re.findall("`([a-z_]+)`", ignored)) == IGNORED
    assert set(re.findall("`([a-z_]+)`", refused)) >= REFUSED.keys()
