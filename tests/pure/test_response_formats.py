"""What clients hold texts to, in whichever words, becomes one grammar; what is wrong is named in their words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.core.errors import InvalidRequestError
from quire.core.grammar import Grammar
from quire.serve.errors import ApiError
from quire.serve.schemas.chat import ChatRequest
from quire.serve.schemas.completions import CompletionRequest
from quire.serve.schemas.parse import parse
from quire.serve.schemas.responses import ResponseRequest
from quire.serve.translate.grammar import held_to, response_held_to

SCHEMA = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {"type": "string"}}, "required": ["z"]}
REQUIRED: dict[Any, dict[str, Any]] = {
    ChatRequest: {"messages": [{"role": "user", "content": "a"}]},
    CompletionRequest: {"prompt": "a"},
    ResponseRequest: {"input": "a"},
}


def read(kind: Any, fields: dict[str, Any]) -> Any:
    return parse(json.dumps({**REQUIRED[kind], **fields}).encode(), kind)


def held(kind: Any, fields: dict[str, Any]) -> tuple[Grammar | None, str]:
    request = read(kind, fields)
    if kind is ResponseRequest:
        found = response_held_to(request.wanted_format)
    else:
        found = held_to(request.response_format, request.structured_outputs)
    return found.grammar, found.field


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_the_words_of_openai(kind: Any) -> None:
    named = {"name": "s", "schema": SCHEMA, "strict": True, "description": "d"}
    for strict in (True, False, None):
        fields = {"response_format": {"type": "json_schema", "json_schema": {**named, "strict": strict}}}
        assert held(kind, fields) == (Grammar.json_schema(SCHEMA), "response_format.json_schema.schema")
    assert held(kind, {"response_format": {"type": "json_object"}}) == (Grammar.json_object(), "response_format")
    without = {"type": "json_schema", "json_schema": {"name": "s"}}
    assert held(kind, {"response_format": without})[0] == Grammar.json_object()
    for nothing in (None, {"type": "text"}):
        assert held(kind, {"response_format": nothing})[0] is None
    assert held(kind, {})[0] is None


def test_the_words_of_responses() -> None:
    named = {"type": "json_schema", "name": "s", "schema": SCHEMA, "strict": False}
    assert held(ResponseRequest, {"text": {"format": named}}) == (Grammar.json_schema(SCHEMA), "text.format.schema")
    found = held(ResponseRequest, {"text": {"format": {"type": "json_object"}, "verbosity": "low"}})
    assert found == (Grammar.json_object(), "text.format")
    for nothing in (None, {}, {"format": None}, {"format": {"type": "text"}}, {"verbosity": "high"}):
        assert held(ResponseRequest, {"text": nothing})[0] is None


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_the_words_of_vllm(kind: Any) -> None:
    for wanted, grammar in (
        ({"json": SCHEMA}, Grammar.json_schema(SCHEMA)),
        ({"json": json.dumps(SCHEMA)}, Grammar.json_schema(SCHEMA)),
        ({"json": {}}, Grammar.json_schema({})),
        ({"regex": "a+"}, Grammar.regex("a+")),
        ({"choice": ["yes", "no"]}, Grammar.choice(["yes", "no"])),
        ({"grammar": 'start: "a"'}, Grammar.lark('start: "a"')),
        ({"json_object": True}, Grammar.json_object()),
        ({"json_object": False, "regex": "b", "json": None}, Grammar.regex("b")),
    ):
        found, field = held(kind, {"structured_outputs": wanted})
        assert found == grammar
        assert field.removeprefix("structured_outputs.") in wanted
        assert held(kind, {"structured_outputs": wanted, "response_format": {"type": "text"}}) == (found, field)


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_the_words_of_llama_server(kind: Any) -> None:
    schema, at_schema = Grammar.json_schema(SCHEMA), "response_format.schema"
    assert held(kind, {"response_format": {"type": "json_schema", "schema": SCHEMA}}) == (schema, at_schema)
    assert held(kind, {"response_format": {"type": "json_object", "schema": SCHEMA}}) == (schema, at_schema)
    assert held(ResponseRequest, {"text": {"format": {"type": "json_object", "schema": SCHEMA}}}) == (
        schema,
        "text.format.schema",
    )


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (
            ChatRequest,
            {"response_format": {"type": "json"}},
            "response_format.type: Invalid value 'json'; allowed: text, json_object, json_schema",
        ),
        (
            ResponseRequest,
            {"text": {"format": {"type": "json"}}},
            "text.format.type: Invalid value 'json'; allowed: text, json_object, json_schema",
        ),
        (
            ChatRequest,
            {"truncation_side": "middle"},
            "truncation_side: Invalid enum value 'middle'; allowed: left, right",
        ),
    ],
)
def test_a_wrong_word_is_answered_with_those_that_are_allowed(kind: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError) as caught:
        held(kind, fields)
    assert caught.value.detail.message == message


def test_properties_keep_their_order() -> None:
    grammar, _ = held(ChatRequest, {"structured_outputs": {"json": SCHEMA}})
    assert grammar is not None
    assert list(json.loads(grammar.text)["properties"]) == ["z", "a"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "poem"}}, "response_format.type"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s"}, "schema": {}}},
            "response_format.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": True}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "[" * 100_000}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": '{"const": NaN}'}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": 'root ::= "a" | ?'}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"guided_json": SCHEMA}, "guided_json"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    for kind in (ChatRequest, CompletionRequest):
        with pytest.raises((ApiError, InvalidRequestError)) as caught:
            held(kind, fields)
        error = caught.value
        assert (error.detail.param if isinstance(error, ApiError) else error.field) == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": "json"}, "text"),
        ({"text": {"colour": "red"}}, "text.colour"),
        ({"text": {"format": "json"}}, "text.format"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_schema", "name": "s"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)
def test_what_is_wrong_of_a_response_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        held(ResponseRequest, fields)
    assert caught.value.detail.param == param


def test_a_schema_that_nests_too_deeply_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5_000):
        deep = {"items": deep}
    request = read(ChatRequest, {"structured_outputs": {"json": {}}})
    with pytest.raises(InvalidRequestError) as caught:
        held_to(None, type(request.structured_outputs)(json=deep))
    assert caught.value.field == "structured_outputs.json"
