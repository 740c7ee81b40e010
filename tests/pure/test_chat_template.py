"""Chat templates: what they may be given, what they may do, and that they render as those of transformers do."""

from __future__ import annotations

from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import CheckpointError, InvalidRequestError
from quire.engine.text.chat_template import (
    MAX_MESSAGES,
    MAX_RENDERED_CHARACTERS,
    ChatTemplate,
    validate_messages,
    validate_tools,
)

USER = {"role": "user", "content": "Hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": [1, "é"]}'}}


def render(source: str, messages: list | None = None, **options) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"}, now=lambda: datetime(2026, 1, 31))
    return template.render(validate_messages(messages or [USER]), **options)


# --- what a template can do --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ eos_token }}|", "<s>|"),
        ("{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}\n", "user\n"),
        (
            "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i > 3 %}{% break %}{% endif %}"
            "{{ i }}{% endfor %}",
            "013",
        ),
        ("{% generation %}{% set x = 1 %}{{ messages[0].content }}{% endgeneration %}{{ x }}", "Hi"),
        ("{{ {'a': '<é>', 'b': [1, none]} | tojson }}", '{"a": "<é>", "b": [1, null]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{{ strftime_now('%d %b %Y') }}", "31 Jan 2026"),
        ("{% set n = namespace(x=1) %}{% set n.x = 2 %}{{ n.x }}{{ dict(a=1).a }}", "21"),
        ("{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}{{ unknown }}", "TrueTrueTrue"),
        ("{{ '=' * 3 }}{{ 2 ** 8 }}{{ 3 * 4 }}", "===25612"),
    ],
)
def test_a_template_can(source, text):
    assert render(source) == text


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.missing.attribute }}", "no attribute"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ (messages | first).update(a=1) }}", "unsafe"),
        ("{% set n = namespace() %}{% set n.__class__ = 1 %}", "cannot hold"),
        ("{{ dict.mro() }}", "mro"),
        ("{% for i in range(1000000000) %}{% endfor %}", "Range too big"),
        ("{{ 'a' * 10**9 }}", "too large"),
        ("{{ 1000000000 * ['a'] }}", "too large"),
        ("{{ 9 ** (9 ** 9) }}", "too large"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% include 'other' %}", "no loader"),
        ("{{ messages | tojson(indent={}) }}", ""),
    ],
)
def test_a_template_cannot_and_says_so_in_one_line(source, said):
    with pytest.raises(InvalidRequestError, match="messages is 'user'") as caught:
        render(source)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_output_is_bounded_while_it_is_written():
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_RENDERED_CHARACTERS} characters"):
        render("{% for i in range(99999) %}{% for j in range(99999) %}{{ 'x' * 999999 }}{% endfor %}{% endfor %}")


def test_what_a_client_wrote_is_not_a_template():
    messages = [{"role": "user", "content": "{{ 1 / 0 }}{% raw %}"}]
    assert render("{{ messages[0].content }}", messages) == messages[0]["content"]


@pytest.mark.parametrize("source", ["{% if %}", "{{", "{% endfor %}", "{% unknown %}", "{% generation %}"])
def test_a_template_that_does_not_compile_is_the_folders_fault(source):
    with pytest.raises(CheckpointError, match=r"models/x.*compiles") as caught:
        ChatTemplate(source, {}, where="models/x")
    assert "\n" not in str(caught.value)


def test_variables_reach_the_template():
    assert (
        render(
            "{{ enable_thinking }}{{ documents[0].a }}", variables={"enable_thinking": False, "documents": [{"a": 1}]}
        )
        == "False1"
    )


@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "bos_token", "raise_exception", "range", "a b", ""]
)
def test_a_variable_takes_no_name_that_is_in_use(name):
    with pytest.raises(InvalidRequestError, match="template_variables"):
        render("x", variables={name: 1})


def test_a_developer_is_the_system_where_the_template_knows_no_developers():
    messages = [{"role": "developer", "content": "Be brief."}]
    assert render("{{ messages[0].role }}", messages) == "system"
    assert render("{{ messages[0].role }}{# developer #}", messages) == "developer"


# --- what a client sends -----------------------------------------------------------------------


def test_parts_are_joined_and_none_is_left_out():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert validate_messages(({"role": "system", "content": parts, "name": None},)) == [
        {"role": "system", "content": "ab"}
    ]


def test_a_tool_call_is_written_as_models_write_it():
    """OpenAI's library sends the arguments before the name; templates that print the object whole would, too."""
    function = {"arguments": "{}", "strict": True, "name": "add"}
    [call] = validate_messages([{"role": "assistant", "tool_calls": [{"function": function}]}])
    assert list(call["tool_calls"][0]["function"].items()) == [("name", "add"), ("arguments", {}), ("strict", True)]
    assert list(function) == ["arguments", "strict", "name"]


def test_a_tool_call_has_its_arguments_parsed():
    answer = {"role": "tool", "content": "3", "tool_call_id": "1"}
    call, after = validate_messages([{"role": "assistant", "content": None, "tool_calls": [CALL]}, answer])
    assert call["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": [1, "é"]}}
    assert "content" not in call
    assert after == answer
    assert CALL["function"]["arguments"] == '{"a": [1, "é"]}'  # the client's own data stays as it is
    for none in (None, "", {}):
        [call] = validate_messages(
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": none}}]}]
        )
        assert call["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}


@pytest.mark.parametrize("fields", [{}, {"content": None}, {"tool_calls": []}, {"reasoning_content": "Hm."}])
def test_an_answer_without_text_may_be_sent_back(fields):
    [message] = validate_messages([{"role": "assistant", **fields}])
    assert message == {"role": "assistant", "content": "", **{k: v for k, v in fields.items() if k[0] == "r"}}


def with_content(content: object) -> list[object]:
    return [USER, {"role": "user", "content": content}]


def with_call(**fields: object) -> list[object]:
    return [{"role": "assistant", "tool_calls": [{"function": {"name": "f", **fields}}]}]


def nested(depth: int) -> object:
    value: object = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        (None, "messages"),
        ("Hi", "messages"),
        ({"role": "user", "content": "Hi"}, "messages"),
        ([USER] * (MAX_MESSAGES + 1), "messages"),
        (["Hi"], "messages[0]"),
        ([USER, None], "messages[1]"),
        ([{"content": "Hi"}], "messages[0].role"),
        ([{"role": "root", "content": "Hi"}], "messages[0].role"),
        ([{"role": ["user"], "content": "Hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "assistant", "content": 3}], "messages[0].content"),
        (with_content(None), "messages[1].content"),
        (with_content(3), "messages[1].content"),
        (with_content({"type": "text", "text": "a"}), "messages[1].content"),
        (with_content(["a"]), "messages[1].content[0].type"),
        (with_content([{"type": "text", "text": "a"}, {"type": "image_url"}]), "messages[1].content[1].type"),
        (with_content([{"type": "text"}]), "messages[1].content[0].text"),
        (with_content("\ud800"), "messages[1].content"),
        (with_content([{"type": "text", "text": "a\udfff"}]), "messages[1].content[0].text"),
        (with_content(b"bytes"), "messages[1].content"),
        (with_content(float("nan")), "messages[1].content"),
        (with_call(arguments='{"a": Infinity}'), "messages[0].tool_calls[0].function.arguments.a"),
        ([{"role": "user", "content": "Hi", 1: 2}], "messages[0]"),
        ([{"role": "user", "content": "Hi", "\ud800": 2}], "messages[0]"),
        ([{"role": "user", "content": "Hi", "x": nested(100_000)}], None),
        ([{"role": "tool", "content": "3"}], "messages[0].tool_call_id"),
        ([{"role": "tool", "content": "3", "tool_call_id": ""}], "messages[0].tool_call_id"),
        ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [1]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": [{"function": {"arguments": {}}}]}], "messages[0].tool_calls[0]"),
        (with_call(arguments="{"), "messages[0].tool_calls[0].function.arguments"),
        (with_call(arguments="[1]"), "messages[0].tool_calls[0].function.arguments"),
        (with_call(arguments="[" * 200_000), "messages[0].tool_calls[0].function.arguments"),
        (with_call(arguments=7), "messages[0].tool_calls[0].function.arguments"),
    ],
)
def test_bad_messages_are_refused_by_name(messages, field):
    with pytest.raises(InvalidRequestError) as caught:
        validate_messages(messages)
    assert field is None or caught.value.field == field


@pytest.mark.parametrize("tools", ["add", [1], {"type": "function"}, [{"a": b""}]])
def test_bad_tools_are_refused(tools):
    with pytest.raises(InvalidRequestError, match="tools"):
        validate_tools(tools)


def test_no_tools_are_none():
    assert validate_tools([]) is validate_tools(None) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(
            st.sampled_from(["role", "content", "tool_calls", "function", "name", "arguments", "type", "text"]), inner
        )
    ),
    max_leaves=12,
)


@given(messages=JSON)
def test_any_data_is_accepted_or_refused(messages):
    try:
        plain = validate_messages(messages)
    except InvalidRequestError:
        return
    assert all(isinstance(message["role"], str) for message in plain)


def test_a_template_that_looks_at_tools() -> None:
    assert ChatTemplate("{% for tool in tools %}{{ tool }}{% endfor %}", {}).uses_tools
    assert not ChatTemplate("{# tools #}{{ messages }} tools", {}).uses_tools


def test_the_variables_that_a_client_may_set() -> None:
    source = (
        "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
        "{% if enable_thinking is defined and enable_thinking %}{{ effort | default('low') }}{% endif %}"
        "{% set own = namespace(text='') %}{{ own.text }}{{ strftime_now('%Y') }}{{ tools or '' }}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"})
    assert template.variables == {"enable_thinking", "effort"}
    assert ChatTemplate("no variables", {}).variables == frozenset()
