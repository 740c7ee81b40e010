"""Answers of gpt-oss: messages with headers, read from texts in pieces, and conversations for its template."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.text.chat_template import ChatTemplate, validate_messages, validate_tools
from quire.serve.reader import ReadAnswer
from quire.serve.reasoning import create_reasoning_format
from quire.serve.tools import create_tool_format
from quire.serve.tools.base import Arguments, CallBegun, Event, Reasoning, Text, Thinking, Tool
from quire.serve.tools.harmony import HARMONY, MARKS, MAX_HEADER, REASONING
from support.pieces import cut, parsed

TOOLS = [Tool("add", {}), Tool("get_weather", {})]
AGAIN = "<|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>Rome, then.<|end|>"
FINAL = "<|channel|>final<|message|>19 degrees."
CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'


def events_of(pieces: list[str], tools: list[Tool] = TOOLS) -> list[Event]:
    return parsed(HARMONY.parser(tools), pieces)


def read(text: str, tools: list[Tool] = TOOLS) -> ReadAnswer:
    return ReadAnswer.of(events_of([text], tools))


BITS = st.sampled_from(
    [
        *MARKS,
        *("<|", "<|en", "|>", "<", " ", "\n", "assistant", "analysis", "final", "commentary", " to=functions.add"),
        *(" to=python", " json", "code", '{"a": "', '"}', "{}", "{", "}", '"', "\\", "é", "So.", AGAIN, THOUGHT, FINAL),
        *(CALL, "a" * MAX_HEADER, " " * (MAX_HEADER - 1), "\n" * MAX_HEADER),
    ]
)
TEXTS = st.lists(BITS, max_size=20).map("".join)


@given(data=st.data(), text=TEXTS)
def test_pieces_may_be_cut_anywhere(data: st.DataObject, text: str) -> None:
    assert events_of(cut(data.draw, text)) == events_of(list(text)) == events_of([text])


@given(text=TEXTS)
def test_text_keeps_its_order_and_only_marks_and_headers_are_left_out(text: str) -> None:
    shown = "".join(event.text.replace("\n\n", "") for event in events_of([text]) if not isinstance(event, CallBegun))
    place = 0
    for letter in shown:
        place = text.index(letter, place) + 1
    if not any(mark in text for mark in MARKS) and "to=" not in text and text.strip():
        assert events_of([text]) == [Text(text)]


SAID = st.text(st.characters(exclude_characters="<"), min_size=1).filter(lambda text: text.strip())
ARGUMENTS = st.dictionaries(st.text(), st.text() | st.integers() | st.sampled_from(MARKS), max_size=3)


@given(data=st.data(), thoughts=st.lists(SAID, max_size=2), said=SAID, arguments=ARGUMENTS)
def test_an_answer_comes_back_as_it_was_written(
    data: st.DataObject, thoughts: list[str], said: str, arguments: dict[str, Any]
) -> None:
    before = "".join(f"<|channel|>analysis<|message|>{each}<|end|>{AGAIN}" for each in thoughts)
    spoken = f"<|channel|>commentary<|message|>{said}<|end|>{AGAIN}"
    body = json.dumps(arguments)
    header = data.draw(
        st.sampled_from(
            [
                "<|channel|>commentary to=functions.add <|constrain|>json<|message|>",
                "<|channel|>commentary to=functions.add<|message|>",
                " to=functions.add<|channel|>commentary json<|message|>",
                "<|channel|>analysis to=functions.add code<|message|>",
            ]
        )
    )
    answer = ReadAnswer.of(events_of(cut(data.draw, f"{before}{spoken}{header}{body}<|call|>")))
    assert (answer.reasoning or "") == "\n\n".join(thoughts)
    assert answer.text == said
    assert [(call.name, call.arguments) for call in answer.calls] == [("add", body)]
    final = ReadAnswer.of(events_of(cut(data.draw, f"{before}<|channel|>final<|message|>{said}<|return|>")))
    assert (final.reasoning or "", final.text, final.calls) == ("\n\n".join(thoughts), said, [])


def test_without_tools_the_reasoning_is_separated() -> None:
    parser = REASONING.parser(Thinking.PERHAPS)
    assert parser.push(THOUGHT + AGAIN + FINAL) == [Reasoning("Rome, then."), Text("19 degrees.")]
    assert read(CALL, []).calls == []
    assert read(CALL, []).text == CALL.removesuffix("<|call|>")


def test_a_message_to_anyone_else_is_text() -> None:
    for header in ("commentary to=functions.rm", "analysis to=python code", "commentary to=add"):
        text = f"<|channel|>{header}<|message|>{{}}"
        assert events_of([text]) == [Text(text)]
    for text in ("<|channel|>commentary to=functions.add<|message|>[1]", "<|channel|>a b c<|message|>{}"):
        assert events_of([text]) == [Text(text)]


def test_marks_in_the_strings_of_arguments_are_arguments() -> None:
    quoted = json.dumps({"a": f'<|call|>{AGAIN}<|channel|>analysis<|message|>\\" }} {CALL}'})
    answer = read(f"{THOUGHT}{AGAIN}<|channel|>commentary to=functions.add<|message|>{quoted}<|call|>")
    assert [call.arguments for call in answer.calls] == [quoted]
    assert (answer.reasoning, answer.text) == ("Rome, then.", None)


def test_nothing_in_or_after_a_final_message_is_a_call() -> None:
    for between in ("", "<|end|>", "<|end|>" + AGAIN, "<|return|>" + AGAIN, f"<|end|>{AGAIN}{THOUGHT}{AGAIN}"):
        answer = read(f"{FINAL}{between}{CALL}")
        assert answer.calls == []
        assert (answer.text or "").startswith("19 degrees.")


def test_several_calls_and_calls_that_break_off() -> None:
    text = f"{THOUGHT}{AGAIN}{CALL}{AGAIN} to=functions.get_weather<|channel|>commentary json<|message|>{{}}<|call|>\n"
    answer = read(text)
    assert [(call.name, call.arguments) for call in answer.calls] == [("add", '{"a": 1}'), ("get_weather", "{}")]
    assert answer.text is None
    begins = CALL.index("{")
    for length in range(len("<|channel|>"), len(CALL)):
        short = read(CALL[:length])
        assert short.text is None
        assert [call.arguments for call in short.calls] == (
            [CALL[begins : min(length, begins + 8)]] if length > begins else []
        )


def test_a_header_has_a_limit() -> None:
    text = "<|channel|>" + "a" * 10_000
    assert events_of([text]) == events_of(list(text)) == [Text(text)]


def test_what_begins_like_a_header_is_text() -> None:
    for text in ("", "to=do", " to", "<|chan", "assistant", "19 degrees."):
        assert events_of([text]) == ([Text(text)] if text else [])


# ---- conversations --------------------------------------------------------------------------------------------------

TEMPLATE = """<|start|>system<|message|>Channels.<|end|>
{%- for tool in tools or [] %}{{ "// " + tool.function.description + " " + tool.function.name }}{% endfor %}
{%- set last = namespace(name=none) %}
{%- for message in messages %}
{%- if message.role == 'assistant' and "tool_calls" in message %}
{%- if message.content and message.thinking %}{{ raise_exception("one of them") }}{% endif %}
{%- if message.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{% endif %}
{%- set call = message.tool_calls[0].function %}{% set last.name = call.name %}
{{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" }}
{{- call.arguments | tojson }}<|call|>
{%- elif message.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>
{%- elif message.role == 'tool' %}<|start|>functions.{{ last.name }} to=assistant<|message|>{{ message.content }}<|end|>
{%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""


def rendered(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
    shown, shown_tools = HARMONY.adapt(validate_messages(messages), validate_tools(tools))
    return ChatTemplate(TEMPLATE, {}).render([dict(each) for each in shown], tools=shown_tools and list(shown_tools))  # type: ignore[arg-type]


def call(own_id: str, name: str, arguments: str = "{}") -> dict[str, Any]:
    return {"id": own_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_the_next_prompt_has_the_reasoning_and_each_call_with_its_result() -> None:
    text = rendered(
        [
            {"role": "user", "content": "Q"},
            {
                "role": "assistant",
                "content": "Look:",
                "reasoning_content": "Hm.",
                "tool_calls": [call("1", "add", '{"a": 1}'), call("2", "now")],
            },
            {"role": "tool", "tool_call_id": "1", "content": "one"},
            {"role": "tool", "tool_call_id": "2", "content": "two"},
        ]
    )
    assert text.endswith(
        "<|start|>user<|message|>Q<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>Hm.\n\nLook:<|end|>"
        '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>'
        "<|start|>functions.add to=assistant<|message|>one<|end|>"
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>"
        "<|start|>functions.now to=assistant<|message|>two<|end|>"
        "<|start|>assistant"
    )


def test_calls_without_results_and_results_without_calls_stay_in_order() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": [call("1", "add"), call("2", "now"), call("1", "add")]},
        {"role": "tool", "tool_call_id": "9", "content": "nine"},
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "assistant", "content": "A", "reasoning_content": "B"},
    ]
    shown, _ = HARMONY.adapt(messages, None)
    assert [
        each.get("content") or each["tool_calls"][0]["id"] if each["role"] != "tool" else each["content"]
        for each in shown
    ] == ["1", "one", "2", "1", "nine", "A"]
    assert shown[-1] == {"role": "assistant", "content": "A", "thinking": "B"}
    assert [call["id"] for call in messages[0]["tool_calls"]] == ["1", "2", "1"]


def test_calls_of_later_answers_may_have_the_same_ids() -> None:
    turn = [{"role": "assistant", "tool_calls": [call("0", "add"), call("1", "now")]}]
    turn += [{"role": "tool", "tool_call_id": own_id, "content": "3"} for own_id in "01"]
    once, _ = HARMONY.adapt(turn, None)
    assert [message["role"] for message in once] == ["assistant", "tool"] * 2
    assert HARMONY.adapt([*turn, *turn], None)[0] == [*once, *once]


@given(
    st.lists(
        st.one_of(
            st.lists(st.sampled_from("1234"), min_size=1, max_size=4),  # the calls of a message
            st.sampled_from("1234"),  # the call that a result is of
        ),
        max_size=12,
    )
)
def test_each_call_takes_its_later_results_along(kinds: list[Any]) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": kind, "content": f"{index}"}
        if isinstance(kind, str)
        else {"role": "assistant", "tool_calls": [call(own_id, "add") for own_id in kind]}
        for index, kind in enumerate(kinds)
    ]
    left, expected = list(messages), list[dict[str, Any]]()
    while left:
        first, *left = left
        calls = first.get("tool_calls", [])
        for each in calls[:-1]:
            is_again = [any(later["id"] == each["id"] for later in message.get("tool_calls", [])) for message in left]
            own = left[: is_again.index(True)] if True in is_again else left
            results = [message for message in own if message.get("tool_call_id") == each["id"]]
            expected += [{"role": "assistant", "tool_calls": [each]}, *results]
            left = [message for message in left if message not in results]
        expected.append({"role": "assistant", "tool_calls": calls[-1:]} if calls else first)
    assert list(HARMONY.adapt(messages, None)[0]) == expected


def test_many_calls_are_each_looked_at_a_few_times() -> None:
    num_looks = 0

    class Counted(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            nonlocal num_looks
            num_looks += 1
            return super().get(key, default)

    calls = [call(f"{number}", "add") for number in range(1000)]
    results = [Counted(role="tool", tool_call_id=each["id"], content="x") for each in calls]
    shown, _ = HARMONY.adapt([Counted(role="assistant", tool_calls=calls), *results], None)
    assert len(shown) == 2000
    assert num_looks < 10_000


def test_a_tool_needs_no_description() -> None:
    assert "//  add" in rendered(
        [{"role": "user", "content": "Q"}], [{"type": "function", "function": {"name": "add"}}]
    )


def test_the_template_shows_the_format() -> None:
    assert create_tool_format("auto", TEMPLATE) is HARMONY
    assert create_reasoning_format("auto", TEMPLATE) is REASONING
    assert create_reasoning_format("harmony", "") is REASONING


@pytest.mark.parametrize("begin", ["", THOUGHT + AGAIN])
def test_arguments_arrive_as_they_are_written(begin: str) -> None:
    parser = HARMONY.parser(TOOLS)
    parser.push(begin + CALL[: CALL.index("{")])
    assert parser.push('{"a"') == [CallBegun("add"), Arguments('{"a"')]
    assert parser.push(": 1") == [Arguments(": 1")]
