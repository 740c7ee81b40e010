"""Calls of tools, read out of texts that arrive in pieces: any text, any pieces, every format."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from quire.core.errors import InvalidConfigError
from quire.engine.text.chat_template import ChatTemplate
from quire.engine.text.tokenizer import Tokenizer
from quire.serve.reader import AnswerReader, ReadAnswer
from quire.serve.reasoning import COMMAND, THINK, create_reasoning_format
from quire.serve.tools import TOOL_FORMATS, create_tool_format
from quire.serve.tools.base import MAX_NAME_LENGTH, Event, Text, Thinking, Tool, ToolFormat, merged
from quire.serve.tools.json_format import JsonFormat
from support.growth import is_linear
from support.pieces import cut, parsed
from support.tiny_tokenizer import byte_level

JSON_FORMATS = [each for each in TOOL_FORMATS if isinstance(each, JsonFormat)]
"""Formats whose calls are JSON; the others have tests in files of their own."""

NAMES = ("add", "get_weather", "x-1", "mcp__" + "x" * (MAX_NAME_LENGTH - 5))
TOOLS = [Tool(name, {}) for name in NAMES]
TAGS = ("qwen3_coder", "seed", "glm45")
Call = tuple[str, str]


def written(tool_format: ToolFormat, calls: list[Call]) -> str:
    """Calls as a model writes them."""
    key = "parameters" if tool_format.name in ("llama3", "command") else "arguments"
    objects = [f'{{"name": "{name}", "{key}": {text}}}' for name, text in calls]
    match tool_format.name:
        case "hermes":
            return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)
        case "llama3":
            return "; ".join(objects)
        case "mistral":
            return f"[TOOL_CALLS] [{', '.join(objects)}]"
        case "mistral_args":
            return "".join(f"[TOOL_CALLS]{name}[ARGS]{text}" for name, text in calls)
        case "command":
            numbered = ('{"tool_call_id": "0", "tool_name"' + each.removeprefix('{"name"') for each in objects)
            lines = ",\n    ".join(numbered)
            return f"<|START_ACTION|>[\n    {lines}\n]<|END_ACTION|>"
        case "granite":
            return f"<|tool_call|>[{', '.join(objects)}]"
    return f"<|tool_call|>[{', '.join(objects)}]<|/tool_call|>"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.builds(
    lambda value, compact, ascii_only: json.dumps(
        value, ensure_ascii=ascii_only, separators=(",", ":") if compact else None
    ),
    st.dictionaries(st.text(), VALUES, max_size=3),
    st.booleans(),
    st.booleans(),
)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3)
MARKS = [mark for each in TOOL_FORMATS for mark in each.marks]
BITS = st.sampled_from(
    [
        *MARKS,
        *(
            "<",
            "[",
            "{",
            "}",
            "]",
            '"',
            "\\",
            ",",
            ":",
            ";",
            " ",
            "\n",
            "é",
            "no",
            "[]",
            "<tool",
            "<|",
            '"id"',
            '"name"',
            '"tool_name"',
            '"tool_call_id": "0", ',
        ),
        *('"arguments"', '"parameters"', '"add"', "add", '{"name": "add", "arguments": {', "}}\n", ': {"a": 1}'),
    ]
)
TEXTS = st.lists(BITS, max_size=24).map("".join)


def events_of(tool_format: ToolFormat, pieces: list[str]) -> list[Event]:
    return parsed(tool_format.parser(TOOLS), pieces)


@pytest.mark.parametrize("tool_format", TOOL_FORMATS, ids=lambda each: each.name)
@given(data=st.data())
def test_pieces_may_be_cut_anywhere(tool_format: ToolFormat, data: st.DataObject) -> None:
    text = data.draw(TEXTS)
    assert events_of(tool_format, cut(data.draw, text)) == events_of(tool_format, [text])


@pytest.mark.parametrize("tool_format", JSON_FORMATS, ids=lambda each: each.name)
@given(text=TEXTS)
def test_nothing_is_lost(tool_format: ToolFormat, text: str) -> None:
    """The text is what was said and called, in this order, and what stands around calls."""
    text += "!"  # whatever call had begun is none
    answer = ""
    events = events_of(tool_format, list(text))
    for index, event in enumerate(events):
        if isinstance(event, Text):
            answer += re.escape(event.text)
        elif hasattr(event, "name"):
            answer += before_call(tool_format, event.name)
        else:
            is_last = all(hasattr(each, "name") for each in events[index + 1 :])
            answer += re.escape(event.text) + after_call(tool_format, is_last=is_last)
    assert re.fullmatch(answer or r"\s*", text), (answer, text)
    if not any(hasattr(event, "name") for event in events):
        assert events == [Text(text)]


def before_call(tool_format: ToolFormat, name: str) -> str:
    opener = re.escape(tool_format.marks[0])
    if tool_format.name == "mistral_args":
        return rf"\s*{opener}\s*{name}(\[CALL_ID\]\s*[\w-]*)?(\[ARGS\]\s*)?"
    space = {"hermes": opener, "llama3": rf"({opener}|;)?"}.get(tool_format.name, rf"({opener}\s*\[?|,)")
    key = '("tool_call_id"\\s*:\\s*"[\\w-]*"\\s*,\\s*)?"tool_name"' if tool_format.name == "command" else '"name"'
    return rf'\s*{space}\s*\{{\s*{key}\s*:\s*"{name}"\s*,\s*"(arguments|parameters)"\s*:\s*'


def after_call(tool_format: ToolFormat, *, is_last: bool) -> str:
    if tool_format.name == "mistral_args":
        return r"\s*" if is_last else ""
    closers = {"hermes": "</tool_call>", "llama3": "", "mistral": "]", "phi4": "]<|/tool_call|>", "granite": "]"}
    closers["command"] = "]<|END_ACTION|>"
    letters = [re.escape(letter) + ("?" if letter == "]" else "") for letter in closers[tool_format.name]]
    closer = "".join(rf"(\s*{letter}" for letter in letters) + ")?" * len(letters)
    own_id = r'(\s*,\s*"id"\s*:\s*"[\w-]*")?' if tool_format.name == "mistral" else ""
    whole = rf"({own_id}\s*\}}{closer})?"
    return whole + (r"[\s\S]*" if is_last and own_id else r"\s*" if is_last else "")


@pytest.mark.parametrize("tool_format", JSON_FORMATS, ids=lambda each: each.name)
@given(data=st.data(), said=st.sampled_from(["", "Let me see.", "é {"]), calls=CALLS)
def test_calls_come_back_as_they_were_written(
    tool_format: ToolFormat, data: st.DataObject, said: str, calls: list[Call]
) -> None:
    if said and tool_format.name == "llama3":
        said = f"{said}\n<|python_tag|>"
    text = f"{said}\n{written(tool_format, calls)}\n"
    answer = ReadAnswer.of(events_of(tool_format, cut(data.draw, text)))
    assert [(call.name, call.arguments) for call in answer.calls] == calls
    assert answer.text == (said.removesuffix("\n<|python_tag|>") or None)


@pytest.mark.parametrize("tool_format", JSON_FORMATS, ids=lambda each: each.name)
def test_a_call_that_breaks_off(tool_format: ToolFormat) -> None:
    """Once its mark is whole nothing of it is text, however it is cut; from its arguments on it is a call."""
    text = written(tool_format, [("add", '{"a": 12}')])
    begins = text.index('{"a"')
    for length in range(len(text)):
        answer = ReadAnswer.of(events_of(tool_format, [text[:length]]))
        if length <= begins:
            mark = tool_format.marks[0] if tool_format.marks else ""
            is_call = bool(mark) and text[:length].startswith(mark)
            assert (answer.text or "", answer.calls) == ("" if is_call else text[:length], [])
        else:
            assert answer.text is None
            assert [call.arguments for call in answer.calls] == [text[begins : min(length, begins + 9)]]


@pytest.mark.parametrize("tool_format", TOOL_FORMATS, ids=lambda each: each.name)
def test_much_space_is_not_held_back(tool_format: ToolFormat) -> None:
    """A model that writes space without end would otherwise make every token slower than the one before."""
    for text in (" " * 2500, "a" + "\n " * 1250 + "b"):
        parser = tool_format.parser(TOOLS)
        shown = [event.text for letter in text[:2000] for event in parser.push(letter) if isinstance(event, Text)]
        assert len("".join(shown)) > 900
        assert "".join(shown) == text[: len("".join(shown))]
        assert events_of(tool_format, list(text)) == events_of(tool_format, [text]) == [Text(text)]


@pytest.mark.parametrize("tool_format", TOOL_FORMATS, ids=lambda each: each.name)
def test_marks_and_space_take_linear_time(tool_format: ToolFormat) -> None:
    """Also in one piece: a mark may begin a call, and much space may come before its name."""
    opener = tool_format.marks[0]
    for text in (opener, f"{opener} {{", opener + " " * 3000):
        assert is_linear(lambda size, text=text: events_of(tool_format, [text * (size // len(text))]), 24_000)
    if tool_format.name != "harmony":
        held = f"{opener}{' ' * 2500}"
        parser = tool_format.parser(TOOLS)
        shown = [event.text for letter in held for event in parser.push(letter) if isinstance(event, Text)]
        assert len("".join(shown)) > 1200
        assert held.startswith("".join(shown))


def test_what_is_no_call_is_text() -> None:
    hermes = create_tool_format("hermes", "")
    assert hermes is not None
    for text in (
        '<tool_call>\n{"name": "nobody", "arguments": {}}\n</tool_call>',
        '<tool_call>{"name": "add", "arguments": []}</tool_call>',
        '<tool_call>{"arguments": {}, "name": "add"}</tool_call>',
        "<tool_call>add(1)</tool_call>",
        " \n",
    ):
        assert events_of(hermes, [text]) == [Text(text)]
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    again = ReadAnswer.of(events_of(hermes, ["<tool_call> ", call, "\nDone.", " "]))
    assert (again.text, [each.name for each in again.calls]) == ("<tool_call>\nDone. ", ["add"])


def test_llamas_calls_are_bare_only_where_a_text_begins() -> None:
    llama3 = create_tool_format("llama3", "")
    assert llama3 is not None
    call = '{"name": "add", "parameters": {}}'
    assert events_of(llama3, [f"So: {call}"]) == [Text(f"So: {call}")]
    assert [each.name for each in ReadAnswer.of(events_of(llama3, [f"So: <|python_tag|>{call}"])).calls] == ["add"]
    assert events_of(llama3, ['{"city": "Rome"} it is']) == [Text('{"city": "Rome"} it is')]


def test_mistrals_calls_may_have_an_id() -> None:
    mistral = create_tool_format("mistral", "")
    assert mistral is not None
    text = '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abcDEF123"}]'
    answer = ReadAnswer.of(events_of(mistral, [text]))
    assert (answer.text, [call.arguments for call in answer.calls]) == (None, ['{"a": 1}'])


def test_the_newer_calls_of_mistral_may_have_an_id_or_no_mark() -> None:
    named = create_tool_format("mistral_args", "")
    assert named is not None
    for between in ("[ARGS]", "[CALL_ID]abcDEF123[ARGS]", ""):
        answer = ReadAnswer.of(events_of(named, [f'[TOOL_CALLS]add{between}{{"a": 1}}']))
        assert (answer.text, [(call.name, call.arguments) for call in answer.calls]) == (None, [("add", '{"a": 1}')])
    assert events_of(named, ["[TOOL_CALLS]add[CALL_ID]abc"]) == []  # it broke off
    for wrong in ("[TOOL_CALLS]add[CALL]x[ARGS]{}", "[TOOL_CALLS][ARGS]{}"):
        assert events_of(named, [wrong]) == [Text(wrong)]


@pytest.mark.parametrize("name", ["mistral", "phi4", "granite"])
def test_a_call_alone_needs_no_list(name: str) -> None:
    tool_format = create_tool_format(name, "")
    assert tool_format is not None
    opener, *closer = tool_format.marks
    text = f'{opener}{{"name": "add", "arguments": {{"a": 1}}}}{"".join(closer)}'
    answer = ReadAnswer.of(events_of(tool_format, [text]))
    assert (answer.text, [call.arguments for call in answer.calls]) == (None, ['{"a": 1}'])


# ---- reasoning ------------------------------------------------------------------------------------------------------

THOUGHTS = st.lists(st.sampled_from(["<think>", "</think>", "<", "</", "think>", " ", "\n", "a", "é"]), max_size=12)


@given(data=st.data(), text=THOUGHTS.map("".join), thinking=st.sampled_from(Thinking))
def test_reasoning_may_be_cut_anywhere(data: st.DataObject, text: str, thinking: Thinking) -> None:
    splitter = THINK.parser(thinking)
    found = parsed(splitter, cut(data.draw, text))
    assert ReadAnswer.of(found) == expected_reasoning(text, thinking)


def expected_reasoning(text: str, thinking: Thinking) -> ReadAnswer:
    """The same by regular expressions, over the whole text."""
    begin = {Thinking.NO: "(?!)", Thinking.PERHAPS: r"\s*<think>"}.get(thinking, "")
    match = re.fullmatch(rf"{begin}(.*?)(?:</think>(.*))?", text, re.DOTALL)
    if match is None:
        return ReadAnswer(text=text or None)
    thought, answer = match[1].rstrip(" \t\r\n"), (match[2] or "").lstrip(" \t\r\n")
    if thinking is not Thinking.WITHIN:
        thought = thought.lstrip(" \t\r\n")
    return ReadAnswer(reasoning=thought or None, text=answer or None)


@pytest.mark.parametrize(
    ("name", "begin", "end"), [("mistral", "[THINK]", "[/THINK]"), ("seed", "<seed:think>", "</seed:think>")]
)
def test_templates_show_the_marks_of_reasoning(name: str, begin: str, end: str) -> None:
    marks = create_reasoning_format("auto", f"{{{{ system }}}}{begin}Your thoughts{end}Your answer")
    assert marks is not None and marks.name == name
    splitter = marks.parser(marks.after(f"[INST]Q[/INST]{begin}\n"))
    found = ReadAnswer.of(parsed(splitter, [f"Why?\n{end}\nSo."]))
    assert (found.reasoning, found.text) == ("Why?", "So.")
    splitter = marks.parser(marks.after("[INST]Q[/INST]"))
    found = ReadAnswer.of(parsed(splitter, [f"{begin}Why?{end}So."]))
    assert (found.reasoning, found.text) == ("Why?", "So.")


@given(data=st.data(), said=st.text(st.characters(exclude_characters="<|")))
def test_command_marks_reasoning_answer_and_calls(data: st.DataObject, said: str) -> None:
    command, marks = create_tool_format("command", ""), create_reasoning_format("auto", "<|END_THINKING|>")
    assert command is not None and marks is not None
    call = written(command, [("add", '{"a": "<|END_RESPONSE|>"}')])
    for prefix, text in (("", said), ("<|START_RESPONSE|>", said + "<|END_RESPONSE|>"), ("", call)):
        reader = AnswerReader([marks.parser(Thinking.PERHAPS), command.parser(TOOLS)])
        pieces = cut(data.draw, f"<|START_THINKING|>Why?<|END_THINKING|>{prefix}{text}")
        events = [event for piece in pieces for event in reader.read(piece, is_last=False)]
        answer = ReadAnswer.of(merged(events + reader.read("", is_last=True)))
        assert answer.reasoning == "Why?"
        assert answer.calls == [] or text is call
        assert (answer.text or "") == ("" if text is call else said if prefix else said.lstrip(" \t\r\n"))


@pytest.mark.parametrize("name", ["phi4", "granite", "lfm2"])
def test_the_marks_of_a_call_in_the_text_are_the_templates(name: str) -> None:
    """So they become the tokens that the model wrote, and those that a client writes do not."""
    found = create_tool_format(name, "")
    assert found is not None and found.adapt is not None
    library = byte_level()
    library.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in found.marks])
    tokenizer = Tokenizer(library, templates={"default": ChatTemplate("{{ messages[-1].content }}", {})})
    said = "".join(found.marks)
    call = {"function": {"name": "add", "arguments": {"a": said}}}
    shown, _ = found.adapt([{"role": "assistant", "content": said, "tool_calls": [call]}], None)
    ids = tokenizer.encode_chat(shown)
    assert [ids.count(library.token_to_id(mark)) for mark in found.marks] == [1] * len(found.marks)
    assert said in tokenizer.decode(ids, skip_special_tokens=False)


def test_conversations_for_command_and_granite() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "reasoning_content": "R", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    command, granite = create_tool_format("command", ""), create_tool_format("granite", "")
    assert command is not None and granite is not None
    shown, shown_tools = command.adapt(messages, tools)
    assert [message.get("tool_plan") for message in shown] == [None, "R", None]
    assert list((shown_tools or [])[0]["function"].items())[:2] == [("name", "add"), ("description", "")]
    shown, _ = granite.adapt(messages, tools)
    assert shown[1]["content"] == '<|tool_call|>[{"name": "add", "arguments": {"a": 1}}]'
    assert [message["role"] for message in shown] == ["user", "assistant", "tool"]


COMMANDS = st.lists(st.sampled_from([*COMMAND.marks, "<|START_", "RESPONSE|>", "<", "a", " ", "\n" * 700]), max_size=9)


@given(data=st.data(), text=COMMANDS.map("".join), thinking=st.sampled_from(Thinking))
def test_command_may_be_cut_anywhere(data: st.DataObject, text: str, thinking: Thinking) -> None:
    pieces, found = cut(data.draw, text), []
    for each in (pieces, [text], list(text)):
        splitter = COMMAND.parser(thinking)
        found.append(parsed(splitter, each))
    assert found[0] == found[1] == found[2]


def test_reasoning_stands_before_text_and_calls() -> None:
    hermes = create_tool_format("hermes", "")
    assert hermes is not None
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    reader = AnswerReader([THINK.parser(Thinking.PERHAPS), hermes.parser(TOOLS)])
    text = f"<think>\nIs {call} right?\n</think>\n\nYes.\n{call}"
    events = [event for index in range(len(text)) for event in reader.read(text[index], is_last=False)]
    answer = ReadAnswer.of(events + reader.read("", is_last=True))
    assert answer.reasoning == f"Is {call} right?"
    assert answer.text == "Yes."
    assert [(each.name, each.arguments) for each in answer.calls] == [("add", '{"a": 1}')]


def test_thinking_is_seen_at_the_end_of_a_prompt() -> None:
    assert THINK.after("<think>\n") is Thinking.YES
    assert THINK.after("<think>\n\n</think>\n\n") is Thinking.NO
    assert THINK.after("<think>a</think> assistant\n") is THINK.after("") is Thinking.PERHAPS


# ---- which format ---------------------------------------------------------------------------------------------------


def test_settings_name_formats() -> None:
    assert [each.name for each in TOOL_FORMATS] == [
        "hermes",
        "llama3",
        "mistral",
        "mistral_args",
        "phi4",
        "harmony",
        *TAGS,
        *("granite", "command", "gemma4", "lfm2"),
    ]
    for each in TOOL_FORMATS:
        assert create_tool_format(each.name, "") is each
    with pytest.raises(InvalidConfigError, match="hermes, llama3"):
        create_tool_format("perhaps", "")
    with pytest.raises(InvalidConfigError, match="reasoning_format"):
        create_reasoning_format("perhaps", "")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ messages }}", None),
        ('<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>', "hermes"),
        ("<tool_call>\n<function=example_function_name>\n<parameter=a>arguments</parameter>", "qwen3_coder"),
        ("<seed:tool_call>\n<function=example_function_name>\n<parameter=a>arguments</parameter>", "seed"),
        ("<tool_call>{{ name }}<arg_key>{{ key }}</arg_key><arg_value>{{ arguments }}</arg_value>", "glm45"),
        ('{"name": "\' + name + \'", "parameters": \' … ipython', "llama3"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS] {{ arguments }}", "mistral"),
        ("[TOOL_CALLS] + name + [ARGS] + arguments", "mistral_args"),
        ("{% if 'tools' in message %}<|tool|>", "phi4"),
        ("<|start_of_role|> … respond only with <|tool_call|> followed by a JSON list", "granite"),
        ("<|start_of_role|> … message['role'] == 'assistant_tool_call' … <|tool_call|>", None),
        ('<|START_ACTION|>[ {"tool_call_id": "0", "tool_name": …}', "command"),
        ("functions … <|channel|>commentary json<|message|>", "harmony"),
        ("<|tool_call>call:' + name + '{' … <|\"|>", "gemma4"),
        ("<|im_start|>system\nList of tools: <|tool_list_start|>[ … ]<|tool_list_end|>", "lfm2"),
        ("<|im_start|> … List of tools: [ … <|tool_call_start|>[", "lfm2"),
    ],
)
def test_templates_show_formats(template: str, name: str | None) -> None:
    found = create_tool_format("auto", template)
    assert (found.name if found else None) == name
    assert create_tool_format("none", template) is None
