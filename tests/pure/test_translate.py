"""From fields to the engine's words: each endpoint's request to the last value, and each refusal to the word."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import InvalidRequestError, RequestTooLargeError
from quire.core.grammar import Grammar
from quire.engine.text.chat_template import ChatOptions
from quire.engine.text.prompts import estimated_tokens
from quire.engine.text.tokenizer import Tokenizer
from quire.serve.errors import ApiError, api_error_of
from quire.serve.reasoning import THINK
from quire.serve.run.request import GenerationRequest, RefusedPrompt, Truncation
from quire.serve.schemas.chat import ChatRequest
from quire.serve.schemas.completions import CompletionRequest
from quire.serve.schemas.parse import parse
from quire.serve.schemas.responses import ResponseRequest
from quire.serve.schemas.tokens import TokenizeRequest
from quire.serve.services import Services
from quire.serve.translate.chat import chat_request
from quire.serve.translate.completions import completion_request
from quire.serve.translate.names import named
from quire.serve.translate.response_input import messages_of
from quire.serve.translate.responses import effort_of, response_request
from quire.serve.translate.tokens import require_token_ids, required_tokenizer, text_to_encode
from support.idle_services import DEFAULTS, LIMITS, services
from support.tiny_tokenizer import byte_level

TOKENIZER = Tokenizer(byte_level())
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


TRANSLATE: dict[Any, tuple[Any, dict[str, Any]]] = {
    ChatRequest: (chat_request, {"messages": [{"role": "user", "content": "Hello"}]}),
    CompletionRequest: (completion_request, {"prompt": "Hello"}),
    ResponseRequest: (response_request, {"input": "Hello"}),
}
KINDS = sorted(TRANSLATE, key=lambda kind: kind.__name__)


def asked(kind: Any, fields: dict[str, Any] | None = None, where: Services | None = None) -> GenerationRequest:
    translate, required = TRANSLATE[kind]
    found: GenerationRequest = translate(
        parse(json.dumps(required | (fields or {})).encode(), kind), where or services()
    )
    return found


def refused(kind: Any, fields: dict[str, Any], where: Services | None = None) -> tuple[str | None, str]:
    """The field that is blamed, and the words."""
    with pytest.raises((ApiError, InvalidRequestError)) as caught:
        asked(kind, fields, where)
    answer = api_error_of(caught.value)
    assert answer.status == 400
    return answer.detail.param, answer.detail.message


# ---- whole requests -------------------------------------------------------------------------------------------------


def test_the_least_that_a_client_can_say() -> None:
    messages = [{"role": "user", "content": "Hello"}]
    assert asked(CompletionRequest) == GenerationRequest(
        prompts=["Hello"],
        sampling=replace(DEFAULTS, max_tokens=16),
        names={"beam_search": "use_beam_search", "grammar": "grammar"},
    )
    assert asked(CompletionRequest).num_tokens(100) == estimated_tokens("Hello", 100)
    chat = asked(ChatRequest)
    assert chat.num_tokens(100) == estimated_tokens([messages, None], 100)
    assert chat.num_sequences == 1
    assert chat == GenerationRequest(
        prompts=[messages],
        sampling=replace(DEFAULTS, max_tokens=None),
        names=chat.names,
        chat=ChatOptions(True, None, {}),
    )
    assert chat.names == {
        "prompt": "messages",
        "template_variables": "chat_template_kwargs",
        "logprobs": "top_logprobs",
        "max_tokens": "max_tokens",
        "beam_search": "use_beam_search",
        "grammar": "tools",
    }
    assert asked(ResponseRequest) == replace(
        chat,
        names={
            "prompt": "input",
            "messages": "input",
            "max_tokens": "max_output_tokens",
            "logprobs": "top_logprobs",
            "grammar": "tools",
        },
    )


@pytest.mark.parametrize("kind", KINDS)
def test_what_all_endpoints_share_is_passed_on(kind: Any) -> None:
    fields = {"cache_salt": "mine", "priority": 3, "truncate_prompt_tokens": 7, "truncation_side": "right"}
    found = asked(kind, fields)
    assert (found.cache_salt, found.priority, found.truncation) == ("mine", 3, Truncation(7, keeps_start=True))
    assert asked(kind, {"truncate_prompt_tokens": -1}).truncation == Truncation(None, keeps_start=False)
    assert asked(kind, {"truncate_prompt_tokens": 1}).truncation == Truncation(1, keeps_start=False)
    for length in (0, -2):
        assert refused(kind, {"truncate_prompt_tokens": length}) == (
            "truncate_prompt_tokens",
            f"truncate_prompt_tokens is {length}; allowed: a number of tokens from 1, or -1 for as many as fit",
        )


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_how_many_texts_a_call_takes_room_for(kind: Any) -> None:
    limits = services(max_choices=6)
    assert asked(kind, {"n": 6}, limits).num_sequences == 6
    assert asked(kind, {"n": 2, "best_of": 5}, limits).num_sequences == 5
    assert asked(kind, {"n": 0}, limits).num_sequences == 1  # what n may be is the engine's to say
    allowed = "allowed: at most 6: a request can have 6 texts over all its prompts"
    assert refused(kind, {"n": 7}, limits) == ("n", f"n is 7; {allowed}")
    assert refused(kind, {"n": 2, "best_of": 7}, limits) == ("best_of", f"best_of is 7; {allowed}")


def test_prompts_of_a_batch_share_the_choices() -> None:
    limits = services(max_choices=6)
    found = asked(CompletionRequest, {"prompt": [[1, 2], [3], [4, 5, 6]], "n": 2}, limits)
    assert (found.prompts, found.num_sequences) == ([[1, 2], [3], [4, 5, 6]], 6)
    assert found.num_tokens(100) == sum(estimated_tokens(each, 100) for each in found.prompts)
    assert asked(CompletionRequest, {"prompt": ["a"] * 6}, limits).num_sequences == 6
    assert refused(CompletionRequest, {"prompt": ["a"] * 7}, limits) == (
        "prompt",
        "prompt is '7 prompts'; allowed: at most 6 prompts",
    )
    assert refused(CompletionRequest, {"prompt": ["a"] * 4, "n": 2}, limits) == (
        "n",
        "n is 2; allowed: at most 1: a request can have 6 texts over all its prompts",
    )


def test_an_estimate_never_exceeds_the_context() -> None:
    assert asked(CompletionRequest, {"prompt": "é" * 500}).num_tokens(100) == 100
    assert asked(ChatRequest, {"messages": [{"role": "user", "content": "é" * 500}]}).num_tokens(100) == 100
    assert asked(ResponseRequest, {"input": "é" * 500}).num_tokens(100) == 100


@pytest.mark.parametrize(
    ("fields", "max_tokens", "prompts_only"),
    [
        ({}, 16, False),
        ({"max_tokens": 5}, 5, False),
        ({"max_completion_tokens": 5}, 5, False),
        ({"max_tokens": 5, "max_completion_tokens": 5}, 5, False),
        ({"echo": True}, 16, False),
        ({"echo": True, "max_tokens": 1}, 1, False),
        ({"echo": True, "max_tokens": 0}, 1, True),
        ({"echo": True, "max_completion_tokens": 0}, 1, True),
    ],
)
def test_a_completion_of_no_tokens_returns_its_prompt_alone(
    fields: dict[str, Any], max_tokens: int, prompts_only: bool
) -> None:
    found = asked(CompletionRequest, fields)
    assert (found.sampling.max_tokens, found.prompts_only) == (max_tokens, prompts_only)


def test_lengths_that_cannot_be_are_refused() -> None:
    for fields in ({"max_tokens": 0}, {"max_tokens": 0, "echo": False}, {"max_completion_tokens": 0}):
        assert refused(CompletionRequest, fields) == (
            "max_tokens",
            "max_tokens is 0; allowed: an integer of at least 1, or 0 if echo is true",
        )
    for kind in (ChatRequest, CompletionRequest):
        assert refused(kind, {"max_tokens": 5, "max_completion_tokens": 6}) == (
            "max_tokens",
            "max_tokens is 5; allowed: the same as max_completion_tokens, or not set",
        )


@pytest.mark.parametrize(
    ("fields", "logprobs", "prompt_logprobs"),
    [
        ({}, None, None),
        ({"logprobs": 0}, 0, None),
        ({"logprobs": 3}, 3, None),
        ({"logprobs": 3, "echo": True}, 3, 3),
        ({"logprobs": 0, "echo": True}, 0, 0),
        ({"logprobs": 2, "echo": True, "prompt_logprobs": 5}, 2, 5),
        ({"logprobs": 5, "echo": True, "prompt_logprobs": 2}, 5, 5),
        ({"echo": True}, None, None),
        ({"prompt_logprobs": 4}, None, 4),
    ],
)
def test_log_probabilities_of_a_prompt_that_is_echoed(
    fields: dict[str, Any], logprobs: int | None, prompt_logprobs: int | None
) -> None:
    sampling = asked(CompletionRequest, fields).sampling
    assert (sampling.logprobs, sampling.prompt_logprobs) == (logprobs, prompt_logprobs)


def test_prompt_log_probabilities_do_not_come_in_streams() -> None:
    for kind, words in (
        (ChatRequest, "prompt_logprobs needs stream: false"),
        (CompletionRequest, "prompt_logprobs needs stream: false; in a stream, use echo with logprobs"),
    ):
        assert refused(kind, {"stream": True, "prompt_logprobs": 0}) == ("prompt_logprobs", words)
        assert asked(kind, {"stream": True}).sampling.prompt_logprobs is None
        assert asked(kind, {"prompt_logprobs": 0}).sampling.prompt_logprobs == 0


# ---- what answers are held to ---------------------------------------------------------------------------------------


def test_the_field_that_holds_an_answer_is_blamed_for_its_grammar() -> None:
    formats = {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}}
    for kind in (ChatRequest, CompletionRequest):
        found = asked(kind, formats)
        assert found.sampling.grammar == Grammar.json_schema(SCHEMA)
        assert found.names["grammar"] == "response_format.json_schema.schema"
    text = {"text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}}
    found = asked(ResponseRequest, text)
    assert (found.sampling.grammar, found.names["grammar"]) == (Grammar.json_schema(SCHEMA), "text.format.schema")
    assert asked(ChatRequest, {"max_completion_tokens": 3}).names["max_tokens"] == "max_completion_tokens"


def test_tools_need_a_format_and_reasoning_apart_needs_no_tools() -> None:
    hermes = services(TOKENIZER, tool_format="hermes", reasoning_format="none")
    found = asked(ChatRequest, {"tools": [TOOL]}, hermes)
    assert found.form is not None
    assert found.form.tools is not None
    assert found.form.choice.mode == "auto"
    assert found.form.reasoning is None
    assert found.chat is not None
    assert found.chat.tools == [TOOL]
    assert asked(ChatRequest, {}, hermes).form is None
    assert asked(ChatRequest, {"tools": [TOOL], "tool_choice": "none"}, hermes).form is None
    thinking = asked(ChatRequest, {}, services(TOKENIZER, reasoning_format="think")).form
    assert thinking is not None
    assert (thinking.reasoning, thinking.tools) == (THINK, None)
    for where in (services(TOKENIZER, tool_format="none"), services(None)):
        assert refused(ChatRequest, {"tools": [TOOL]}, where)[0] == "tools"
        assert asked(ChatRequest, {"tools": [TOOL], "tool_choice": "none"}, where).form is None


def test_a_response_that_thinks_or_calls_has_no_log_probabilities() -> None:
    thinking = services(TOKENIZER, reasoning_format="think")
    assert asked(ResponseRequest, {"top_logprobs": 2}).sampling.logprobs == 2
    assert asked(ResponseRequest, {"include": ["message.output_text.logprobs"]}).sampling.logprobs == 0
    assert asked(ResponseRequest, {}, thinking).form is not None
    for fields in ({"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}):
        assert refused(ResponseRequest, fields, thinking) == (
            "top_logprobs",
            "top_logprobs is not supported: log-probabilities are available for plain text, or from "
            "/v1/chat/completions",
        )


@pytest.mark.parametrize(
    ("reasoning", "effort"),
    [(None, None), ({}, None), ({"effort": "low"}, "low"), ({"summary": "auto", "generate_summary": 1}, None)],
)
def test_the_effort_of_reasoning(reasoning: Any, effort: str | None) -> None:
    assert effort_of(ResponseRequest(input="a", reasoning=reasoning)) == effort


def test_an_effort_that_the_template_does_not_know_is_refused_by_the_clients_field() -> None:
    words = "is not supported: the chat template of this model does not use it"
    assert refused(ChatRequest, {"reasoning_effort": "low"}) == ("reasoning_effort", f"reasoning_effort {words}")
    assert refused(ResponseRequest, {"reasoning": {"effort": "low"}}) == (
        "reasoning.effort",
        f"reasoning.effort {words}",
    )
    assert asked(ChatRequest, {"reasoning_effort": "none"}).chat == ChatOptions(True, None, {})
    assert refused(ResponseRequest, {"reasoning": {"budget": 5}})[1] == (
        "reasoning.budget is 5; allowed: effort or summary"
    )
    assert refused(ResponseRequest, {"reasoning": {"effort": 5}})[1] == "reasoning.effort is 5; allowed: a text"
    assert refused(ChatRequest, {"chat_template_kwargs": {"x": 1}})[1] == (
        "chat_template_kwargs is 'x'; allowed: names that the chat template of this model uses: it has none"
    )


@pytest.mark.parametrize("key", ["audio", "function_call", "refusal"])
def test_parts_of_a_message_that_no_template_would_show(key: str) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", key: {"any": 1}}]
    assert refused(ChatRequest, {"messages": messages}) == (
        f"messages[1].{key}",
        f"messages[1].{key} is not supported: this server supports text only",
    )
    assert asked(ChatRequest, {"messages": [{"role": "user", "content": "a", key: None}]}).num_sequences == 1
    assert refused(ChatRequest, {"messages": []}) == ("messages", "messages is []; allowed: at least one message")


# ---- the input of a response ----------------------------------------------------------------------------------------

NAMES = st.sampled_from(["add", "now"])
WORDS = st.text("ab é", min_size=1, max_size=3)
ROLES = ["user", "assistant", "developer", "system"]
ITEMS = st.one_of(
    st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(ROLES), WORDS),
    st.builds(lambda text: {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}, WORDS),
    st.just({"type": "reasoning", "summary": [], "encrypted_content": "x"}),
    st.builds(
        lambda name, text: {"type": "function_call", "name": name, "call_id": "c", "arguments": text},
        NAMES,
        WORDS.map(lambda text: json.dumps({"a": text})),
    ),
    st.builds(lambda text: {"type": "function_call_output", "call_id": "c", "output": text}, WORDS),
)


def spoken_in(item: dict[str, Any]) -> list[tuple[str, str]]:
    """What an item says, as a list of who and what: the same for items and for messages."""
    match item.get("type", "message"):
        case "message":
            return [("system" if item["role"] == "developer" else item["role"], item["content"])]
        case "reasoning":
            return [("thought", "".join(part["text"] for part in item.get("content", [])))]
        case "function_call":
            return [("call", item["name"] + item["arguments"])]
        case _:
            return [("tool", item["output"])]


def spoken_by(message: dict[str, Any]) -> list[tuple[str, str]]:
    """The same of a message: reasoning comes before text, and text before calls."""
    said = []
    if "reasoning_content" in message:
        said.append(("thought", message["reasoning_content"]))
    if message.get("content"):
        role = "system" if message["role"] == "developer" else message["role"]
        said.append((role, message["content"]))
    said += [
        ("call", call["function"]["name"] + call["function"]["arguments"]) for call in message.get("tool_calls", [])
    ]
    return said


@given(st.lists(ITEMS, min_size=1, max_size=7), st.sampled_from([None, "", "Be brief."]))
def test_a_conversation_keeps_every_item_in_its_place(items: list[dict[str, Any]], instructions: str | None) -> None:
    before = json.dumps(items)
    messages = messages_of(ResponseRequest(input=items, instructions=instructions))
    assert json.dumps(items) == before
    said = [each for message in messages for each in spoken_by(message)]
    told = [("system", instructions)] if instructions else []
    for who, what in (each for item in items for each in spoken_in(item)):
        if told and told[-1][0] == who and who in ("user", "system"):
            told[-1] = (who, f"{told[-1][1]}\n{what}")
        else:
            told.append((who, what))
    assert said == told
    for message in messages:
        assert {"content", "tool_calls"} & message.keys(), "a template reads one of the two"
        assert message["role"] in (*ROLES, "tool")
        assert "tool_calls" not in message or message["role"] == "assistant"
    for last, message in pairwise(messages):
        is_call_alone = message.keys() == {"role", "tool_calls"}
        assert not (is_call_alone and last["role"] == "assistant"), "calls belong to what was said before them"


@pytest.mark.parametrize(
    ("item", "param", "words"),
    [
        (
            {"type": "item_reference"},
            "input[0].type",
            "input[0].type is not supported: this server supports items of these types: message, function_call, "
            "function_call_output, reasoning",
        ),
        ({"type": 3}, "input[0].type", "input[0].type is not supported: this server supports items of these types"),
        ({"role": "tool", "content": "a"}, "input[0].role", "'tool'; allowed: user, assistant, system or developer"),
        ({"role": "user", "content": 7}, "input[0].content", "is 7; allowed: a text, or a list of text parts"),
        ({"role": "user", "content": "a", "weight": 3}, "input[0].weight", "allowed: one of content, id, phase, role"),
        (
            {"role": "user", "content": [{"type": "input_image"}]},
            *("input[0].content[0].type", "this server supports text parts only"),
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": 4}]},
            *("input[0].content[0].text", "is 4; allowed: a text"),
        ),
        ({"role": "user", "content": ["a"]}, "input[0].content[0].type", "this server supports text parts only"),
        (
            {"type": "function_call", "call_id": "c", "name": "", "arguments": "{}"},
            *("input[0].name", "is ''; allowed: a text"),
        ),
        (
            {"type": "function_call", "name": "add", "arguments": "{}"},
            *("input[0].call_id", "is None; allowed: a text"),
        ),
        (
            {"type": "function_call", "call_id": "c", "name": "add", "arguments": {}},
            *("input[0].arguments", "is {}; allowed: a JSON object, as text"),
        ),
        (
            {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": '},
            *("input[0].arguments", """is '{"a": '; allowed: a JSON object, as text"""),
        ),
        ({"type": "function_call_output", "output": "a"}, "input[0].call_id", "is None; allowed: a text"),
        ({"type": "function_call_output", "call_id": "c"}, "input[0].output", "is None; allowed: a text, or"),
        ({"type": "reasoning", "content": "a"}, "input[0].content", "is 'a'; allowed: a list of parts"),
        (
            {"type": "reasoning", "content": [{"type": "summary_text", "text": "a"}]},
            *("input[0].content[0].type", "this server supports text parts only"),
        ),
    ],
)
def test_an_item_that_cannot_be_read_is_named(item: dict[str, Any], param: str, words: str) -> None:
    found, message = refused(ResponseRequest, {"input": [item]})
    assert found == param
    assert words in message


# ---- names, and tokens ----------------------------------------------------------------------------------------------


def test_a_refusal_of_the_engine_has_the_clients_name_and_the_place_of_its_prompt() -> None:
    chat, batch = asked(ChatRequest), asked(CompletionRequest)
    for error, request, prompt_index, param in (
        (InvalidRequestError("prompt[4]", -1, "a token id"), batch, 2, "prompt[2][4]"),
        (InvalidRequestError("prompt", "", "at least one token"), chat, None, "messages"),
        (InvalidRequestError("max_tokens", 0, "1"), asked(ResponseRequest), None, "max_output_tokens"),
        (InvalidRequestError("logit_bias[3]", 0, "1"), chat, None, "logit_bias[3]"),
        (InvalidRequestError("beam_search", 0, "1"), batch, None, "use_beam_search"),
        (RequestTooLargeError("prompt", "9 tokens", "at most 8"), batch, 1, "prompt[1]"),
        (RequestTooLargeError("max_tokens", 9, "8"), chat, None, "messages"),
    ):
        assert named(RefusedPrompt(error, prompt_index), request).detail.param == param
    unloaded = named(RefusedPrompt(InvalidRequestError("adapter", "tune", "none")), request)
    assert (unloaded.status, unloaded.detail.param, unloaded.detail.code) == (404, "model", "model_not_found")


def test_a_schema_that_cannot_be_held_to_is_blamed_on_the_function_that_has_it() -> None:
    hermes = services(TOKENIZER, tool_format="hermes")
    request = asked(ChatRequest, {"tools": [TOOL, json.loads(json.dumps(TOOL).replace("add", "now"))]}, hermes)
    assert request.form is not None
    rules = request.form.grammar(None, request.form.thinking([1]))
    assert rules is not None
    lines = rules.text.splitlines()
    number = 1 + next(index for index, line in enumerate(lines) if line.startswith("arguments_1: "))
    error = InvalidRequestError("grammar", rules.text, f"a grammar; at {number}(5): unknown keyword")
    blamed = named(RefusedPrompt(error), request).detail
    assert blamed.param == "tools[1].function.parameters"
    assert blamed.message.endswith("allowed: a schema that a tool call can follow: unknown keyword")
    for words in ("a grammar; at 99999(5): x", "a grammar of fewer items", "a grammar; at 1(5): x"):
        blamed = named(RefusedPrompt(InvalidRequestError("grammar", rules.text, words)), request).detail
        assert blamed.param == "tools"
        assert "['add', 'now']" in blamed.message


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([300], "tokens[0] is 300; allowed: a token id from 0 to 299"),
        ([0, 299, -1], "tokens[2] is -1; allowed: a token id from 0 to 299"),
        ([0] * 101, "tokens is '101 token ids'; allowed: at most 100, the context length"),
    ],
)
def test_tokens_to_decode_are_those_of_the_model(token_ids: list[int], message: str) -> None:
    require_token_ids([0, 299] * 50, LIMITS)
    with pytest.raises(InvalidRequestError) as caught:
        require_token_ids(token_ids, LIMITS)
    assert str(caught.value) == message


def test_what_is_to_be_encoded_is_a_text_or_a_conversation() -> None:
    config = services(TOKENIZER).config
    assert text_to_encode(TokenizeRequest(prompt=""), TOKENIZER, config) == ""
    messages = [{"role": "user", "content": "a"}]
    found = text_to_encode(TokenizeRequest(messages=messages, add_generation_prompt=False), TOKENIZER, config)
    assert found == (messages, ChatOptions(False, None, {}), None)
    for both in (TokenizeRequest(), TokenizeRequest(prompt="a", messages=messages)):
        with pytest.raises(InvalidRequestError, match="either a text or messages, not both"):
            text_to_encode(both, TOKENIZER, config)
    assert required_tokenizer(services(TOKENIZER)) is TOKENIZER
    with pytest.raises(ApiError, match="prompt is not supported: this server has no tokenizer"):
        required_tokenizer(services(None))
