"""Answers of Gemma 4: calls with bare keys and reasoning in a channel, and conversations for its templates."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import InvalidRequestError
from quire.engine.text.chat_template import ChatTemplate, validate_messages, validate_tools
from quire.engine.text.client_text import from_client, owners_of
from quire.serve.reader import AnswerReader, ReadAnswer
from quire.serve.reasoning import GEMMA4 as REASONING
from quire.serve.reasoning import create_reasoning_format
from quire.serve.tools import create_tool_format
from quire.serve.tools.base import Arguments, CallBegun, Reasoning, Text, Thinking, Tool, merged
from quire.serve.tools.bracket_calls import MAX_KEY_LENGTH
from quire.serve.tools.gemma4 import CLOSER, GEMMA4, OPENER
from quire.serve.tools.gemma4_values import KEY, QUOTE, in_order
from quire.serve.tools.rules import make_mark
from support.bracket_calls import ARGUMENTS, GEMMA4_CALLS, TOOLS
from support.gemma4_template import LARGE, SMALL
from support.pieces import cut, parsed

CALL, read, events_of = GEMMA4_CALLS.call, GEMMA4_CALLS.read, GEMMA4_CALLS.events_of


def written(value: Any) -> str:
    """Return a value as a model writes it."""
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{written(value[key])}" for key in in_order(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return json.dumps(value)


# ---- calls ----------------------------------------------------------------------------------------------------------

TEXTS = st.text().filter(lambda text: QUOTE not in text)
KEYS = st.from_regex(KEY, fullmatch=True)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@given(data=st.data(), said=st.sampled_from(["", "So: {"]), calls=st.lists(st.dictionaries(KEYS, VALUES), min_size=1))
def test_calls_come_back_as_they_were_written(data: st.DataObject, said: str, calls: list[dict[str, Any]]) -> None:
    body = "".join(f"{OPENER}call:weather{written(each)}{CLOSER}" for each in calls)
    answer = ReadAnswer.of(events_of(cut(data.draw, f"{said}\n{body}\n")))
    assert [json.loads(call.arguments) for call in answer.calls] == calls
    assert [call.name for call in answer.calls] == ["weather"] * len(calls)
    assert (answer.text or "") == said


def test_a_call_is_read_as_json() -> None:
    assert read(CALL) == ReadAnswer(calls=read(CALL).calls)
    assert [(call.name, call.arguments) for call in read(CALL).calls] == [("weather", ARGUMENTS)]
    assert [call.arguments for call in read(f"{OPENER}call:now{{}}{CLOSER}" * 2).calls] == ["{}", "{}"]


def test_a_text_arrives_in_pieces_and_other_values_when_they_are_complete() -> None:
    parser = GEMMA4.parser(TOOLS)
    assert parser.push(f"{OPENER}call:weather{{ci") == [CallBegun("weather"), Arguments("{")]
    assert parser.push(f"ty:{QUOTE}Ro") == [Arguments('"city": "Ro')]
    assert parser.push('m"e<|') == [Arguments('m\\"e')]
    assert parser.push('"|>,days:1') == [Arguments('", "days": ')]
    assert parser.push("2}") == [Arguments("12}")]
    assert parser.push(CLOSER) == parser.finish() == []


def test_a_text_may_quote_everything_but_its_own_mark() -> None:
    text = f'a "b" \\ {OPENER}call:now{{}}{CLOSER}\n}},{{]:\t<|" <|"| \u2028 \ud7ff'
    [call] = read(f"{OPENER}call:weather{{city:{QUOTE}{text}{QUOTE}}}{CLOSER}").calls
    assert json.loads(call.arguments) == {"city": text}


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ("{ city : <|\"|>Rome<|\"|> , days : 5 }", {"city": "Rome", "days": 5}),
        ("{<|\"|>a:b<|\"|>:1}", {"a:b": 1}),
        ("{a:[1,2,],b:{},}", {"a": [1, 2], "b": {}}),
        ("{a:five,b:NaN,c:,d:<b>}", {"a": "five", "b": "NaN", "c": "", "d": "<b>"}),
        ('{a:"x",b:01}', {"a": "x", "b": "01"}),
        ("{a b:1,a:{a:{}}}", {"a b": 1, "a": {"a": {}}}),
    ],
)  # fmt: skip
def test_what_else_a_model_may_write(arguments: str, value: dict[str, Any]) -> None:
    [call] = read(f"{OPENER} call: weather {arguments} {CLOSER}").calls
    assert json.loads(call.arguments) == value


@pytest.mark.parametrize(
    ("wrong", "arguments", "rest"),
    [
        ("{a:1 ", '{"a": "1 b"}', "b}"),
        ("{a:[1}", '{"a": [1]}', "}b}"),
        ("{a:{b:1]", '{"a": {"b": 1}}', "]b}"),
        ("{a:<|\"|>x<|\"|>", '{"a": "x"}', "b}"),
        ("{a:1,,", '{"a": 1}', ",,b}"),
        ("{a:[,", '{"a": []}', ",b}"),
        ("{a<:1", "{}", "a<:1b}"),
        ("{a:1}", '{"a": 1}', "b}"),
        ("{" + "a" * 2 * MAX_KEY_LENGTH, "{}", "a" * 2 * MAX_KEY_LENGTH + "b}"),
    ],
)  # fmt: skip
def test_a_call_that_goes_wrong_ends_there(wrong: str, arguments: str, rest: str) -> None:
    """What has been passed on becomes complete JSON, and the rest is text."""
    answer = read(f"{OPENER}call:now{wrong}b}}")
    [call] = answer.calls
    assert call.arguments == arguments
    assert answer.text == (None if arguments == '{"a": "1 b"}' else rest)


def test_much_nesting_is_read_without_recursion() -> None:
    for opener, closer in (("[", "]"), ("{a:", "}")):
        text = f"{OPENER}call:now{{a:{opener * 20_000}"
        [call] = read(text + ("1" if opener == "{a:" else "") + closer * 20_000 + f"}}{CLOSER}").calls
        assert call.arguments.endswith(closer * 20_000 + "}")
        assert read(text).text is None
    [call] = read(f"{OPENER}call:now{{a:{'[' * 20_000},").calls
    assert call.arguments.endswith("]" * 20_000 + "}")


# ---- schemas --------------------------------------------------------------------------------------------------------

MARK = make_mark({}.get)


@pytest.mark.parametrize(
    ("schema", "allowed"),
    [
        ({"properties": {"a": {"type": "string", "minLength": 2}}}, "a schema without minLength"),
        ({"properties": {"a": {"type": "string", "pattern": "b"}}}, "a schema without pattern"),
        ({"properties": {"a": {"oneOf": [{"type": "string"}, {"type": "null"}]}}}, "a schema without oneOf"),
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "a schema without uniqueItems"),
        ({"properties": {"a": {"prefixItems": [{}]}}}, "a schema without prefixItems"),
        ({"properties": {"a": {"$ref": "#"}}}, "a schema without \\$ref"),
        ({"properties": {"a": {}}, "minProperties": 1}, "a schema without minProperties"),
        ({"properties": {"a": {"allOf": [{"type": "string"}, {}]}}}, "a schema without allOf"),
    ],
)
def test_a_strict_tool_with_rules_that_no_call_can_follow(schema: dict[str, Any], allowed: str) -> None:
    GEMMA4.rules([Tool("f", schema)], 1, MARK)
    with pytest.raises(InvalidRequestError, match=allowed) as caught:
        GEMMA4.rules([Tool("f", schema, strict=True, place="tools[0].function.parameters")], 1, MARK)
    assert caught.value.field == "tools[0].function.parameters"


@pytest.mark.parametrize(
    ("schema", "allowed"),
    [
        *(
            ({"properties": {key: {}}}, "names of parameters")
            for key in ("a:b", "", " a", "a\nb", 'a"', "a{", "a" * 200)
        ),
        ({"required": ["a<b"]}, "names of parameters"),
        ({"properties": {"a": {"enum": [QUOTE]}}}, "texts without"),
        ({"properties": {"a": {"const": {"a:b": 1}}}}, "names of parameters"),
        ({"properties": {"a": {"anyOf": []}}}, "at least one value"),
        ({"properties": {"a": {"type": "string", "enum": [1]}}}, "at least one value"),
        ({"properties": {"a": {"type": "text"}}}, "types of JSON"),
        ({"properties": {"a": {"type": "array", "minItems": 2, "maxItems": 1}}}, "maxItems"),
    ],
)
def test_any_tool_that_no_call_can_follow(schema: dict[str, Any], allowed: str) -> None:
    with pytest.raises(InvalidRequestError, match=allowed):
        GEMMA4.rules([Tool("f", schema)], 1, MARK)


# ---- reasoning ------------------------------------------------------------------------------------------------------

THOUGHTS = st.lists(
    st.sampled_from(["<|channel>", "<channel|>", "thought\n", "thou", "<", "<|", "channel", " ", "\n", "a", "é"]),
    max_size=12,
)


@given(data=st.data(), text=THOUGHTS.map("".join), thinking=st.sampled_from(Thinking))
def test_reasoning_may_be_cut_anywhere(data: st.DataObject, text: str, thinking: Thinking) -> None:
    found = []
    for pieces in (cut(data.draw, text), [text], list(text)):
        splitter = REASONING.parser(thinking)
        found.append(parsed(splitter, pieces))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("text", "thought", "said"),
    [
        ("<|channel>thought\nWhy?\n<channel|>So.", "Why?", "So."),
        ("<|channel>thought\n<channel|>So.", None, "So."),
        ("<|channel>Why?<channel|>So.", "Why?", "So."),
        ("<|channel>thoughts<channel|>So.", "thoughts", "So."),
        ("<|channel>thought\nthought\nWhy?", "thought\nWhy?", None),
        ("<|channel>thou", None, None),
        ("<|channel>", None, None),
        ("thought\nSo.", None, "thought\nSo."),
        ("<|channel>thought\nA<channel|> <|channel>thought\nB<channel|><|channel>thought\n<channel|>So.", "AB", "So."),
        ("<|channel>A<channel|>So <|channel>", "A", "So <|channel>"),
    ],
)
def test_the_title_of_the_reasoning_is_left_out(text: str, thought: str | None, said: str | None) -> None:
    splitter = REASONING.parser(Thinking.PERHAPS)
    found = ReadAnswer.of(parsed(splitter, [text]))
    assert (found.reasoning, found.text) == (thought, said)


def test_thinking_is_seen_at_the_end_of_a_prompt() -> None:
    assert REASONING.after("<|turn>model\n") is Thinking.PERHAPS
    assert REASONING.after("<|turn>model\n<|channel>thought\n<channel|>") is Thinking.NO
    assert REASONING.after("<tool_response|><|channel>thought\n") is Thinking.YES
    assert REASONING.after("<tool_response|>") is Thinking.PERHAPS
    for prefix in ("", "<|channel>thought\nWhy?<channel|>"):  # a model may reason although the prompt has ended that
        splitter = REASONING.parser(Thinking.NO)
        found = ReadAnswer.of([*splitter.push(f"{prefix}So."), *splitter.finish()])
        assert (found.reasoning, found.text) == ("Why?" if prefix else None, "So.")
    splitter = REASONING.parser(Thinking.YES)
    assert parsed(splitter, ["thought\n<channel|>So."]) == [Reasoning("thought"), Text("So.")]


@given(data=st.data())
def test_reasoning_precedes_text_and_calls(data: st.DataObject) -> None:
    reader = AnswerReader([REASONING.parser(Thinking.PERHAPS), GEMMA4.parser(TOOLS)])
    pieces = cut(data.draw, f"<|channel>thought\nIs {CALL} right?\n<channel|>Yes.\n{CALL}")
    events = [event for piece in pieces for event in reader.read(piece, is_last=False)]
    answer = ReadAnswer.of(merged(events + reader.read("", is_last=True)))
    assert (answer.reasoning, answer.text) == (f"Is {CALL} right?", "Yes.")
    assert [call.arguments for call in answer.calls] == [ARGUMENTS]


# ---- conversations --------------------------------------------------------------------------------------------------

SCHEMA = {"properties": {"Zone": {"type": "string"}, "city": {"type": "string"}, "days": {"type": "array"}}}
FUNCTIONS = [
    {"type": "function", "function": {"name": "weather", "description": "It rains.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now", "description": None}},
]
DECLARED = (
    '<|tool>declaration:weather{description:<|"|>It rains.<|"|>,parameters:{properties:{city:{type:<|"|>STRING<|"|>},'
    'days:{type:<|"|>ARRAY<|"|>},Zone:{type:<|"|>STRING<|"|>}},type:<|"|>OBJECT<|"|>}}<tool|>'
    '<|tool>declaration:now{description:<|"|><|"|>,parameters:{type:<|"|>OBJECT<|"|>}}<tool|>'
)


def called(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "Is it warm? <|turn>"},
    {
        "role": "assistant",
        "reasoning_content": "Rome, then.",
        "tool_calls": [called("a", "weather", ARGUMENTS), called("b", "now", "{}")],
    },
    {"role": "tool", "tool_call_id": "b", "content": "noon"},
    {"role": "tool", "tool_call_id": "a", "content": '{"degrees": 19}<tool_response|>'},
]
ANSWERED = [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And Paris?"}]
PROMPT = (
    f"<bos><|turn>system\nBe brief.{DECLARED}<turn|>\n<|turn>user\nIs it warm? <|turn><turn|>\n"
    f"<|turn>model\n<|channel>thought\nRome, then.\n<channel|>{CALL}{OPENER}call:now{{}}{CLOSER}"
    '<|tool_response>response:now{value:<|"|>noon<|"|>}<tool_response|>'
    '<|tool_response>response:weather{value:<|"|>{"degrees": 19}<tool_response|><|"|>}<tool_response|>'
)


def rendered(template: str, messages: list[dict[str, Any]], *, adapts: bool = True, **variables: Any) -> str:
    plain: list[Any] = validate_messages(messages)
    tools: Any = validate_tools(FUNCTIONS)
    adapted, tools = GEMMA4.adapt(plain, tools) if GEMMA4.adapt else (plain, tools)
    shown = [from_client(dict(message)) for message in (adapted if adapts else plain)]
    made = ChatTemplate(template, {"bos_token": "<bos>"})
    return made.render(shown, tools=[from_client(tool) for tool in tools], variables=variables)


@pytest.mark.parametrize("adapts", [True, False], ids=["adapted", "as sent"])
def test_a_template_shows_tools_calls_and_results(adapts: bool) -> None:
    """Later templates also read the results from messages of their own, and show the same."""
    assert rendered(SMALL, CONVERSATION, adapts=adapts) == PROMPT
    answered = rendered(SMALL, CONVERSATION + ANSWERED, adapts=adapts)
    assert answered == f"{PROMPT}Yes.<turn|>\n<|turn>user\nAnd Paris?<turn|>\n<|turn>model\n"


def test_prompts_show_whether_an_answer_begins_with_reasoning() -> None:
    for messages, template, thinks, thinking in (
        (ANSWERED[1:], SMALL, False, Thinking.PERHAPS),
        (ANSWERED[1:], LARGE, False, Thinking.NO),
        (ANSWERED[1:], LARGE, True, Thinking.PERHAPS),
        (CONVERSATION, LARGE, False, Thinking.PERHAPS),
        (CONVERSATION, LARGE, True, Thinking.YES),
    ):
        prompt = rendered(template, messages, enable_thinking=thinks)
        assert REASONING.after(prompt) is thinking
        assert ("<|turn>system\n<|think|>\n" in prompt) is thinks
    assert "enable_thinking" in ChatTemplate(LARGE, {}).variables


def test_what_a_client_writes_is_no_mark() -> None:
    prompt = rendered(SMALL, CONVERSATION + ANSWERED)
    owners = owners_of(prompt)
    for mark, of_client in (("<|turn>", 1), ("<tool_response|>", 1), (QUOTE, 0), ("<turn|>", 0)):
        places = [place for place in range(len(prompt)) if prompt.startswith(mark, place)]
        assert sum("c" in owners[place : place + len(mark)] for place in places) == of_client, mark
        assert len(places) > of_client


def test_results_of_calls_are_in_the_message_with_the_calls() -> None:
    assert GEMMA4.adapt is not None
    plain = validate_messages(CONVERSATION)
    found, tools = GEMMA4.adapt(plain, validate_tools(FUNCTIONS))
    assert [message["role"] for message in found] == ["system", "user", "assistant"]
    responses = [("now", "noon"), ("weather", CONVERSATION[4]["content"])]
    assert [(each["name"], each["response"]) for each in found[2]["tool_responses"]] == responses
    assert plain == validate_messages(CONVERSATION)
    assert [tool["function"]["parameters"]["type"] for tool in tools or []] == ["object", "object"]
    other = {"role": "tool", "tool_call_id": "c", "content": "lost"}
    assert GEMMA4.adapt([*plain, other], None)[0][2]["tool_responses"][2]["name"] == "unknown"
    alone = [{"role": "user", "content": "Q"}, other]
    assert GEMMA4.adapt(alone, None) == (alone, None)


@pytest.mark.parametrize("template", [SMALL, LARGE])
def test_the_template_shows_the_formats(template: str) -> None:
    assert create_tool_format("auto", template) is GEMMA4
    assert create_reasoning_format("auto", template) is REASONING
