"""Calls as tags (Qwen3-Coder, GLM): read from texts in pieces, as the JSON of a schema, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import InvalidRequestError
from quire.engine.text.chat_template import ChatTemplate, validate_messages, validate_tools
from quire.serve.reader import ReadAnswer
from quire.serve.tools.base import Arguments, CallBegun, Event, Text, Tool, merged
from quire.serve.tools.rules import make_mark
from quire.serve.tools.tag_calls import GLM45, MAX_KEY_LENGTH, QWEN3_CODER, SEED, TagFormat
from support.pieces import cut, parsed

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "kind": {"$ref": "#/$defs/kind"},
        "place": {"type": "object", "properties": {"x": {"type": "number"}}},
        "perhaps": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["city"],
    "$defs": {"kind": {"enum": ["rain", "sun"]}},
}
TOOLS = [Tool("weather", SCHEMA), Tool("now", {})]
TEXTS = ("city", "kind")
each_format = pytest.mark.parametrize("tool_format", [QWEN3_CODER, SEED, GLM45], ids=lambda each: each.name)


def written(tool_format: TagFormat, name: str, arguments: dict[str, Any]) -> str:
    """Return a call as a model writes it."""
    shown = {key: value if key in TEXTS else json.dumps(value) for key, value in arguments.items()}
    if tool_format is GLM45:
        body = "".join(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in shown.items())
        return f"<tool_call>{name}{body}</tool_call>"
    if tool_format is SEED:
        body = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in shown.items())
        return f"<seed:tool_call>\n<function={name}>\n{body}</function>\n</seed:tool_call>"
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in shown.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def events_of(tool_format: TagFormat, pieces: list[str]) -> list[Event]:
    return parsed(tool_format.parser(TOOLS), pieces)


def read(tool_format: TagFormat, text: str) -> ReadAnswer:
    return ReadAnswer.of(events_of(tool_format, [text]))


BITS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<function=weather>", "<function=now>", "</function>", "<parameter=city>"),
        *("<parameter=days>", "</parameter>", "\n</parameter>\n", "<arg_key>", "</arg_key>", "<arg_value>", "city"),
        *("</arg_value>", "weather", "now", "days", "<", "</", ">", "=", "\n", " ", '"', "\\", "{", "5", "é", "no"),
        *("<seed:tool_call>", "</seed:tool_call>", written(SEED, "weather", {"city": "Rome"})),
        *(written(QWEN3_CODER, "weather", {"city": "Rome"}), written(GLM45, "weather", {"days": 1})),
        *("<tool_call>weather<arg_key>city</arg_key><arg_value>", "<tool_call>\n<function=weather>\n<parameter=city>"),
    ]
)


@each_format
@given(data=st.data(), text=st.lists(BITS, max_size=16).map("".join))
def test_pieces_may_be_cut_anywhere(tool_format: TagFormat, data: st.DataObject, text: str) -> None:
    found = events_of(tool_format, [text])
    assert events_of(tool_format, cut(data.draw, text)) == events_of(tool_format, list(text)) == found
    if not any(isinstance(event, CallBegun) for event in found):
        assert not any(isinstance(event, Arguments) for event in found)


VALUES = st.fixed_dictionaries(
    {"city": st.text()},
    optional={
        "days": st.integers() | st.text(),
        "kind": st.sampled_from(["rain", "sun"]),
        "place": st.dictionaries(st.text(), st.text() | st.integers(), max_size=2),
        "perhaps": st.none() | st.text(),
        "unknown": st.lists(st.booleans(), max_size=2),
    },
)
ENDS = {QWEN3_CODER.name: "\n</parameter>", SEED.name: "</parameter>", GLM45.name: "</arg_value>"}


@each_format
@given(data=st.data(), said=st.sampled_from(["", "So: "]), calls=st.lists(VALUES, min_size=1, max_size=3))
def test_calls_come_back_as_they_were_written(
    tool_format: TagFormat, data: st.DataObject, said: str, calls: list[dict[str, Any]]
) -> None:
    end = ENDS[tool_format.name]
    calls = [each | {"city": each["city"].replace(end, "")} for each in calls]
    body = "\n".join(written(tool_format, "weather", each) for each in calls)
    if any(end in str(value) or end in json.dumps(value) for each in calls for value in each.values()):
        return
    answer = ReadAnswer.of(events_of(tool_format, cut(data.draw, f"{said}{body}\n")))
    assert [json.loads(call.arguments) for call in answer.calls] == calls
    assert (answer.text or "") == said.rstrip()


@each_format
def test_a_call_without_arguments(tool_format: TagFormat) -> None:
    assert read(tool_format, written(tool_format, "now", {})).calls[0].arguments == "{}"


@each_format
def test_a_text_may_quote_tags_and_need_escapes(tool_format: TagFormat) -> None:
    text = 'a "b" \\ <tool_call> </tool_call>\n<function=now>\n</parameter >\n </arg_valu\n'
    [call] = read(tool_format, written(tool_format, "weather", {"city": text, "days": 2})).calls
    assert json.loads(call.arguments) == {"city": text, "days": 2}


@each_format
def test_a_text_arrives_in_pieces_and_other_values_when_they_are_complete(tool_format: TagFormat) -> None:
    text = written(tool_format, "weather", {"city": "Rome", "days": 12})
    parser, place = tool_format.parser(TOOLS), text.index("Rome") + 2
    assert merged(parser.push(text[:place])) == [CallBegun("weather"), Arguments('{"city": "Ro')]
    rest = text.index("12") + 1
    assert merged(parser.push(text[place:rest])) == [Arguments('me", "days": ')]
    assert merged(parser.push(text[rest:]) + parser.finish()) == [Arguments("12}")]


@each_format
def test_a_value_that_is_not_json_becomes_a_text(tool_format: TagFormat) -> None:
    call = written(tool_format, "weather", {"city": "a", "days": 5})
    for wrong in ("five", "NaN", "[1", "[" * 5000, ""):
        [found] = read(tool_format, call.replace("5", wrong)).calls
        assert json.loads(found.arguments) == {"city": "a", "days": wrong}


@each_format
def test_a_call_that_breaks_off(tool_format: TagFormat) -> None:
    """It is dropped before its first name is complete; after that it is returned as far as it got."""
    text = written(tool_format, "weather", {"city": "Rome"})
    for length in range(len(tool_format.shape.opener), len(text)):
        answer = read(tool_format, text[:length])
        assert answer.text is None
        assert [call.name for call in answer.calls] == (["weather"] if answer.calls else [])
        assert all('{"city": "Rome"}'.startswith(call.arguments) for call in answer.calls)


def test_what_is_no_call_is_text() -> None:
    for text in (
        "<tool_call>\n<function=other>\n</function>\n</tool_call>",
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "<tool_call>\n<function=now>\nno</function>\n</tool_call>",
        f"<tool_call>\n<function=now>\n<parameter={'a' * (MAX_KEY_LENGTH + 1)}>\n1\n</parameter>\n",
        "<tool_call>\n<function=now>\n<parameter=a<b>\n1\n</parameter>\n",
    ):
        assert events_of(QWEN3_CODER, [text]) == [Text(text)]
    for text in ("<tool_call>other</tool_call>", "<tool_call>now<arg_value>1</arg_value></tool_call>"):
        assert events_of(GLM45, [text]) == [Text(text)]
    parsed = read(GLM45, "<tool_call>weather<arg_key>days</arg_key><arg_value>1</arg_value>oops</tool_call>")
    assert [call.arguments for call in parsed.calls] == ['{"days": 1}']
    assert parsed.text == "oops</tool_call>"


def test_glm_4_5_writes_lines() -> None:
    text = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>"
    assert [call.arguments for call in read(GLM45, text).calls] == ['{"city": "Rome"}']


# ---- schemas --------------------------------------------------------------------------------------------------------

MARK = make_mark({}.get)


@each_format
@pytest.mark.parametrize(
    ("schema", "allowed"),
    [
        ({"properties": {"a": {"type": "string", "minLength": 2}}}, "texts without minLength"),
        ({"properties": {"a": {"type": "string", "pattern": "b"}}}, "texts without pattern"),
        ({"properties": {"a": {}}, "additionalProperties": True}, "a schema without additionalProperties"),
        ({"properties": {"a": {}}, "oneOf": []}, "a schema without oneOf"),
    ],
)
def test_a_strict_tool_with_rules_that_no_call_can_follow(
    tool_format: TagFormat, schema: dict[str, Any], allowed: str
) -> None:
    tool_format.rules([Tool("f", schema)], 1, MARK)
    with pytest.raises(InvalidRequestError, match=allowed) as caught:
        tool_format.rules([Tool("f", schema, strict=True, place="tools[0].function.parameters")], 1, MARK)
    assert caught.value.field == "tools[0].function.parameters"


@each_format
@pytest.mark.parametrize(
    ("schema", "allowed"),
    [
        ({"properties": {"a<b": {}}}, "names of parameters"),
        ({"properties": {"": {}}}, "names of parameters"),
        ({"properties": {"a" * 200: {}}}, "names of parameters"),
        ({"required": ["a\nb"]}, "names of parameters"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {}}}, "a schema without \\$ref"),
        ({"properties": {"a": {"enum": ["x\n</parameter>", "</arg_value>"]}}}, "texts without"),
    ],
)
def test_any_tool_that_no_call_can_follow(tool_format: TagFormat, schema: dict[str, Any], allowed: str) -> None:
    with pytest.raises(InvalidRequestError, match=allowed):
        tool_format.rules([Tool("f", schema)], 1, MARK)


# ---- conversations --------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for tool in tools %}{{ tool.function.name }}: {{ tool.function.description | trim }}"
    "{% for name, field in tool.function.parameters.properties | items %} {{ name }}{% endfor %};{% endfor %}"
)


def test_the_template_gets_all_fields_of_tools() -> None:
    tools = [
        {"type": "function", "function": {"name": "now", "description": None}},
        {"type": "function", "function": {"name": "f", "description": "D", "parameters": SCHEMA}},
    ]
    messages = validate_messages([{"role": "user", "content": "Q"}])
    shown, shown_tools = QWEN3_CODER.adapt(messages, validate_tools(tools))
    assert shown is messages
    rendered = ChatTemplate(TEMPLATE, {}).render(messages, tools=[dict(each) for each in shown_tools or []])
    assert rendered == "now: ;f: D city days kind place perhaps;"
    assert QWEN3_CODER.adapt(messages, None) == (messages, None)
