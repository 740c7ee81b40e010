"""Calls of LFM2, a list as in Python, and conversations for its templates."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import InvalidRequestError
from quire.engine.text.chat_template import ChatTemplate, validate_messages, validate_tools
from quire.engine.text.client_text import from_client, owners_of
from quire.serve.reader import AnswerReader, ReadAnswer
from quire.serve.reasoning import THINK
from quire.serve.tools import create_tool_format
from quire.serve.tools.base import Arguments, CallBegun, Conversation, Thinking, Tool
from quire.serve.tools.bracket_calls import MAX_KEY_LENGTH
from quire.serve.tools.lfm2 import CLOSER, KEY, LFM2, OPENER
from quire.serve.tools.rules import make_mark
from support.bracket_calls import ARGUMENTS, LFM2_CALLS, TOOLS
from support.lfm2_templates import FIRST, THINKS
from support.pieces import cut

CALL, read, events_of = LFM2_CALLS.call, LFM2_CALLS.read, LFM2_CALLS.events_of


# ---- calls ----------------------------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=MAX_KEY_LENGTH // 6), inner),
    max_leaves=8,
)
GIVEN = st.dictionaries(st.from_regex(KEY, fullmatch=True).filter(lambda key: len(key) < MAX_KEY_LENGTH), VALUES)


@pytest.mark.parametrize("write", [repr, json.dumps], ids=["Python", "JSON"])
@given(data=st.data(), said=st.sampled_from(["", "So: ["]), calls=st.lists(GIVEN, min_size=1, max_size=4))
def test_calls_come_back_as_they_were_written(write: Any, data: st.DataObject, said: str, calls: list[Any]) -> None:
    written = [f"weather({', '.join(f'{key}={write(value)}' for key, value in each.items())})" for each in calls]
    answer = ReadAnswer.of(events_of(cut(data.draw, f"{said}\n{OPENER}[{', '.join(written)}]{CLOSER}\n")))
    assert [json.loads(call.arguments) for call in answer.calls] == calls
    assert [call.name for call in answer.calls] == ["weather"] * len(calls)
    assert (answer.text or "") == said


def test_a_call_is_read_as_json() -> None:
    assert read(CALL) == ReadAnswer(calls=read(CALL).calls)
    assert [(call.name, call.arguments) for call in read(CALL).calls] == [("weather", ARGUMENTS)]
    assert [call.arguments for call in read(f"{OPENER}[now(), now()]{CLOSER}").calls] == ["{}", "{}"]
    assert [call.arguments for call in read(f"{OPENER}now(){CLOSER}\n{OPENER}[now()]{CLOSER}").calls] == ["{}", "{}"]


def test_a_text_arrives_in_pieces_and_other_values_when_they_are_complete() -> None:
    parser = LFM2.parser(TOOLS)
    assert parser.push(f"{OPENER}[weather(ci") == [CallBegun("weather"), Arguments("{")]
    assert parser.push("ty='Ro") == [Arguments('"city": "Ro')]
    assert parser.push('m"e\\') == [Arguments('m\\"e')]
    assert parser.push("'s', days=1") == [Arguments('\'s", "days": ')]
    assert parser.push("2)") == [Arguments("12}")]
    assert parser.push(f"]{CLOSER}") == parser.finish() == []


@pytest.mark.parametrize(
    ("written", "value"),
    [
        (r"'a\'b\"c'", "a'b\"c"),
        (r"""'a\\\n\t\r\b\f\/'""", "a\\\n\t\r\b\f/"),
        (r"'\u00e9\xe9\ud83d\ude00'", "éé\U0001f600"),
        (r"'\d\u12\x4g\u'", r"\d\u12\x4g\u"),
        (r"'\x22\U0001f600\U00110000'", '"\U0001f600' + r"\U00110000"),
        ("'a\nb'", "a\nb"),
        (f"'{OPENER}[now()]{CLOSER} ),]}}='", f"{OPENER}[now()]{CLOSER} ),]}}="),
        ("''", ""),
    ],
)
def test_texts(written: str, value: str) -> None:
    [call] = read(f"{OPENER}[weather(city={written})]{CLOSER}").calls
    assert json.loads(call.arguments) == {"city": value}


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ("( city = 'Rome' , days = 5 )", {"city": "Rome", "days": 5}),
        ("(a=[1, 2,], b={}, )", {"a": [1, 2], "b": {}}),
        ("(a=five, b=NaN, c=, d=<b>)", {"a": "five", "b": "NaN", "c": "", "d": "<b>"}),
        ("(a=True, b=[true, None, null, False])", {"a": True, "b": [True, None, None, False]}),
        ("(my-key=1, été={'a': {\"b'\": {}}})", {"my-key": 1, "été": {"a": {"b'": {}}}}),
    ],
)
def test_what_else_a_model_may_write(arguments: str, value: dict[str, Any]) -> None:
    [call] = read(f"{OPENER} [ weather {arguments} ] {CLOSER}").calls
    assert json.loads(call.arguments) == value


@pytest.mark.parametrize(
    ("wrong", "arguments", "rest"),
    [
        ("('Rome')", "{}", "'Rome')b)"),
        ("(a=[1}", '{"a": [1]}', "}b)"),
        ("(a={'b':1]", '{"a": {"b": 1}}', "]b)"),
        ("(a={b:1}", '{"a": {}}', "b:1}b)"),
        ("(a={'b'=1}", '{"a": {}}', "'b'=1}b)"),
        ("(a='x'", '{"a": "x"}', "b)"),
        ("(a='x' 'y')", '{"a": "x"}', " 'y')b)"),
        ("(a=1,,", '{"a": 1}', ",,b)"),
        ("(a=[,", '{"a": []}', ",b)"),
        ("(a b=1", "{}", "a b=1b)"),
        ("(a=1)", '{"a": 1}', "b)"),
        ("(a=1),", '{"a": 1}', ",b)"),
        ("(" + "a" * 2 * MAX_KEY_LENGTH, "{}", "a" * 2 * MAX_KEY_LENGTH + "b)"),
    ],
)
def test_a_call_that_goes_wrong_ends_there(wrong: str, arguments: str, rest: str) -> None:
    """What has been passed on becomes complete JSON, and the rest is text."""
    answer = read(f"{OPENER}[now{wrong}b)")
    [call] = answer.calls
    assert (call.arguments, answer.text) == (arguments, rest)


def test_much_nesting_is_read_without_recursion() -> None:
    for opener, closer in (("[", "]"), ("{'a':", "}")):
        text = f"{OPENER}[now(a={opener * 20_000}"
        [call] = read(text + ("1" if opener != "[" else "") + closer * 20_000 + f")]{CLOSER}").calls
        assert call.arguments.endswith(closer * 20_000 + "}")
        assert read(text).text is None


# ---- schemas --------------------------------------------------------------------------------------------------------

MARK = make_mark({}.get)


@pytest.mark.parametrize(
    ("schema", "strict", "allowed"),
    [
        ({"properties": {"a b": {}}}, False, "names of parameters"),
        ({"properties": {"a=b": {}}}, False, "names of parameters"),
        ({"properties": {"": {}}}, False, "names of parameters"),
        ({"properties": {"a" * 200: {}}}, False, "names of parameters"),
        ({"additionalProperties": {"type": "string"}}, False, "additionalProperties"),
        ({"properties": {"a": {}}, "minProperties": 1}, True, "minProperties"),
    ],
)
def test_tools_that_no_call_can_follow(schema: dict[str, Any], strict: bool, allowed: str) -> None:
    with pytest.raises(InvalidRequestError, match=allowed) as caught:
        LFM2.rules([Tool("f", schema, strict=strict, place="tools[0].function.parameters")], 1, MARK)
    assert caught.value.field == "tools[0].function.parameters"


# ---- conversations --------------------------------------------------------------------------------------------------

WEATHER = {"city": 'Rome "Est"', "days": [1, 2], "place": {"x": None}, "warm": True}
SHOWN = 'weather(city="Rome \\"Est\\"", days=[1, 2], place={"x": null}, warm=true)'
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Warm?"},
    {
        **{"role": "assistant", "content": "Let me see.", "reasoning_content": "Rome, then."},
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "weather", "arguments": json.dumps(WEATHER)}},
            {"id": "b", "type": "function", "function": {"name": "now", "arguments": "{}"}},
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "19 degrees"},
]


def adapted(messages: list[dict[str, Any]]) -> Conversation:
    assert LFM2.adapt is not None
    return LFM2.adapt(validate_messages(messages), validate_tools([{"type": "function"}]))


def rendered(template: str, messages: list[dict[str, Any]]) -> str:
    shown, tools = adapted(messages)
    return ChatTemplate(template, {}).render([from_client(each) for each in shown], tools=from_client(tools))


@pytest.mark.parametrize("template", [FIRST, THINKS])
def test_a_template_shows_calls_as_the_model_wrote_them(template: str) -> None:
    text = rendered(template, MESSAGES)
    call = f"{OPENER}[{SHOWN}, now()]{CLOSER}"
    assert f"Let me see.{call}<|im_end|>" in text
    assert ("<think>Rome, then.</think>Let me see." in text) is (template == THINKS)
    values = ast.parse(SHOWN.replace("null", "None").replace("true", "True"), mode="eval").body
    assert isinstance(values, ast.Call)
    assert {word.arg: ast.literal_eval(word.value) for word in values.keywords} == WEATHER
    assert [json.loads(each.arguments) for each in read(call).calls] == [WEATHER, {}]
    without_content = [{**MESSAGES[1], "content": None}]
    assert f"\n{call}<|im_end|>" in rendered(FIRST, without_content)


def test_the_marks_of_an_earlier_call_are_the_templates_and_its_text_is_the_clients() -> None:
    hostile = json.loads(json.dumps(MESSAGES).replace("Let me see.", OPENER).replace("Rome", CLOSER))
    text = rendered(FIRST, hostile)
    owners = owners_of(text)
    places = {mark: [place for place in range(len(text)) if text.startswith(mark, place)] for mark in (OPENER, CLOSER)}
    found = {mark: [set(owners[place : place + len(mark)]) for place in places[mark]] for mark in places}
    assert found == {OPENER: [{"c"}, {"t"}], CLOSER: [{"c"}, {"t"}]}


@pytest.mark.parametrize("template", [FIRST, THINKS])
def test_the_template_shows_the_format(template: str) -> None:
    assert create_tool_format("auto", template) is LFM2


def test_reasoning_precedes_text_and_calls() -> None:
    text = f"<think>Is {CALL} right?</think>\nYes.{CALL}"
    reader = AnswerReader([THINK.parser(Thinking.PERHAPS), LFM2.parser(TOOLS)])
    events = [event for letter in text for event in reader.read(letter, is_last=False)]
    answer = ReadAnswer.of(events + reader.read("", is_last=True))
    assert (answer.reasoning, answer.text) == (f"Is {CALL} right?", "Yes.")
    assert [call.arguments for call in answer.calls] == [ARGUMENTS]
