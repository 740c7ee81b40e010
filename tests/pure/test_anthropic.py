"""Anthropic's interface in detail: what its fields become, and that any stream adds up to the answer in one piece."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import InvalidRequestError
from quire.core.grammar import Grammar
from quire.core.sampling_params import MAX_INT32, SamplingParams
from quire.engine.text.chat_template import ChatOptions, ChatTemplate, validate_messages
from quire.engine.text.tokenizer import Tokenizer
from quire.serve.answer_form import AnswerForm
from quire.serve.errors import ApiError, overloaded
from quire.serve.render.chat import ChatAnswer
from quire.serve.render.messages import MessageReply
from quire.serve.run.generation import Generation
from quire.serve.run.request import GenerationRequest
from quire.serve.schemas.chat import ChatRequest
from quire.serve.schemas.messages import CountTokensRequest, MessagesRequest
from quire.serve.schemas.parse import parse
from quire.serve.translate.message_blocks import ATTRIBUTION
from quire.serve.translate.messages import conversation_of, messages_request
from support.answer_scripts import FORMS, PROMPTS, TEXTS, TOKENIZER, form, script_of
from support.idle_services import DEFAULTS, services
from support.message_events import added_up
from support.scripted_model import delta, ended, generation_of, model_of, spoken
from support.tiny_tokenizer import byte_level
from support.tool_models import TEMPLATES

USER: Any = {"role": "user", "content": "Hello"}
TOOL: Any = {"name": "add", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}


def text(*texts: str) -> list[Any]:
    return [{"type": "text", "text": each} for each in texts]


def call(call_id: str = "c1", **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "add", "input": arguments}


def result(call_id: str = "c1", content: Any = "3", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


def templated(template: str) -> Tokenizer:
    return Tokenizer(byte_level(), templates={"default": ChatTemplate(template, {})})


# ---- what fields become ---------------------------------------------------------------------------------------------


def asked(fields: dict[str, Any], tokenizer: Tokenizer | None = None) -> GenerationRequest:
    body = json.dumps({"messages": [USER], "max_tokens": 5} | fields).encode()
    return messages_request(parse(body, MessagesRequest), services(tokenizer, tool_format="hermes"))


def told(messages: list[Any], **fields: Any) -> Any:
    """The conversation for the template, which its own check accepts."""
    [found] = asked({"messages": messages, **fields}).prompts
    validate_messages(found)
    return found


def refused(fields: dict[str, Any]) -> str:
    with pytest.raises((ApiError, InvalidRequestError)) as caught:
        asked(fields, templated(TEMPLATES["hermes"]))
    return str(caught.value)


def test_the_least_that_a_client_can_say() -> None:
    request = asked({})
    assert request.prompts == [[USER]]
    assert (request.sampling, request.chat) == (replace(DEFAULTS, max_tokens=5), ChatOptions(True, None, {}))
    assert (request.form, request.truncation, request.cache_salt, request.priority) == (None, None, None, None)
    assert request.cuts_output
    for field, name in (("messages", "messages"), ("prompt", "messages"), ("stop", "stop_sequences")):
        assert request.names.get(field, field) == name


def test_sampling_fields_are_those_of_all_endpoints() -> None:
    fields = {"temperature": 0.5, "top_p": 0.25, "top_k": 3, "stop_sequences": ["a", "b"], "seed": 7, "min_p": 0.1}
    sampling = asked(fields).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.25, 3, 7)
    assert (sampling.stop, sampling.min_p) == (("a", "b"), 0.1)
    assert asked({"stop_sequences": []}).sampling.stop == ()
    assert asked({"priority": 3, "cache_salt": "mine"}).priority == 3
    assert refused({"stop": ["a"]}) == "stop is not supported: use stop_sequences"
    assert refused({"truncate_prompt_tokens": 8}).startswith("truncate_prompt_tokens is not supported: max_tokens may")
    for number in (0, -1, MAX_INT32 + 1, "5", None):
        assert refused({"max_tokens": number}).startswith("max_tokens")


def test_a_conversation_is_a_list_of_turns() -> None:
    thought = {"type": "thinking", "thinking": "Well.", "signature": "msg_1"}
    hidden = {"type": "redacted_thinking", "data": "AAAA"}
    messages = [
        {"role": "user", "content": "One"},
        {"role": "user", "content": text("two", "three")},
        {"role": "assistant", "content": [thought, hidden, *text("Four."), call(a=1), call("c2", a=2)]},
        {"role": "user", "content": [*text("six"), result("c2", text("4", "5")), result(content=None)]},
        {"role": "user", "content": "seven"},
        {"role": "assistant", "content": [call("c3")]},
        {"role": "user", "content": [result("c3", "", is_error=True, cache_control={"type": "ephemeral"})]},
        {"role": "system", "content": "eight"},
    ]
    assert told([{"role": "user", "content": []}]) == [{"role": "user", "content": ""}]
    assert told(messages, system="Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One\ntwo\nthree"},
        {
            "role": "assistant",
            "reasoning_content": "Well.",
            "content": "Four.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}},
                {"id": "c2", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}},
            ],
        },
        {"role": "tool", "tool_call_id": "c2", "content": "4\n5"},
        {"role": "tool", "tool_call_id": "c1", "content": ""},
        {"role": "user", "content": "six\nseven"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "c3", "type": "function", "function": {"name": "add", "arguments": {}}}],
        },
        {"role": "tool", "tool_call_id": "c3", "content": ""},
        {"role": "user", "content": "eight"},
    ]


def test_a_block_of_claude_code_that_changes_with_every_call_is_left_out() -> None:
    blocks = text(f"{ATTRIBUTION} cc_version=2.1; cch=36ee5;", "You are an agent.", "Be brief.")
    blocks[2]["cache_control"] = {"type": "ephemeral"}
    assert told([USER], system=blocks)[0] == {"role": "system", "content": "You are an agent.\nBe brief."}
    assert told([USER], system=blocks[:1]) == [USER]
    first = {"role": "system", "content": text("Be kind.")}
    assert told([first, USER]) == [{"role": "system", "content": "Be kind."}, USER]
    assert told([first, USER], system=blocks)[0]["content"] == "You are an agent.\nBe brief.\nBe kind."
    assert told([USER], system=[]) == told([USER], system="") == [USER]


def test_a_tool_that_claude_code_has_found_is_a_text() -> None:
    found = [{"type": "tool_reference", "tool_name": "WebFetch"}, *text("Loaded.")]
    messages = told([USER, answered(call()), said(result(content=found))])
    assert messages[-1] == {
        "role": "tool",
        "tool_call_id": "c1",
        "content": "The tool WebFetch is available.\nLoaded.",
    }


DEEP: Any = 1
for _ in range(70):
    DEEP = {"a": DEEP}


def said(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def answered(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


REFUSED = "is not supported: allowed here: "
BAD_CONVERSATIONS: list[tuple[list[Any], str]] = [
    ([], "messages is []; allowed: at least one message"),
    ([{"content": "a"}], "messages[0].role is None; allowed: one of user, assistant, system"),
    ([{"role": ["user"], "content": "a"}], "messages[0].role is ['user']; allowed"),
    ([{"role": "tool", "content": "a"}], "messages[0].role is 'tool'; allowed"),
    ([{"role": "user"}], "messages[0].content is None; allowed: a text, or a list of content blocks"),
    ([USER, said(7)], "messages[1].content[0] is 7; allowed: a content block"),
    ([said({"type": []})], "messages[0].content[0] is {'type': []}; allowed"),
    ([USER | {"name": "x"}], "messages[0].name is 'x'; allowed: one of content, role"),
    ([said({"type": "text"})], "messages[0].content[0].text is None; allowed: a text"),
    ([said(*text("a"), {"type": "image"})], f"messages[0].content[1].image {REFUSED}text, tool_result"),
    ([said({"type": "thinking", "thinking": "a"})], f"messages[0].content[0].thinking {REFUSED}text, tool_result"),
    ([said({"type": "a b"})], f"messages[0].content[0].type {REFUSED}text, tool_result"),
    ([answered(result()), USER], f"messages[0].content[0].tool_result {REFUSED}text, thinking, redacted_thinking"),
    ([said(text("a")[0] | {"what": 1})], "messages[0].content[0].what is 1; allowed"),
    ([said(result())], "messages[0].content[0].tool_use_id is 'c1'; allowed: the id of a tool_use block"),
    ([answered(call()), USER, answered(), said(result())], "messages[3].content[0].tool_use_id is 'c1'; allowed"),
    ([answered(call()), said(result(), result())], "messages[1].content[1].tool_use_id is 'c1'; allowed"),
    ([answered(call()), said(result() | {"tool_use_id": ["c1"]})], "messages[1].content[0].tool_use_id is ['c1']"),
    ([answered(call()), said(result(content=7))], "messages[1].content[0].content is 7; allowed"),
    ([answered(call()), said(result(content=[7]))], "messages[1].content[0].content[0] is 7; allowed"),
    (
        [answered(call()), said(result(content=[{"type": "image"}]))],
        f"messages[1].content[0].tool_result.content[0].image {REFUSED}text, tool_reference",
    ),
    (
        [answered(call()), said(result(content=[{"type": "tool_reference"}]))],
        "messages[1].content[0].content[0].tool_name is None; allowed",
    ),
    ([answered(call(), call()), USER], "messages[0].content[1].id is 'c1'; allowed: an id that no other call"),
    ([answered(call(a=DEEP)), USER], "messages[0].content[0].input.a"),
    ([answered(call() | {"input": [1]}), USER], "messages[0].content[0].input is [1]; allowed: an object"),
    ([answered(call() | {"name": ""}), USER], "messages[0].content[0].name is ''; allowed"),
    ([answered(call() | {"id": 3}), USER], "messages[0].content[0].id is 3; allowed"),
    ([USER, answered(*text("It is"), call())], "messages[1].content is 'a call without a result'; allowed"),
]
BAD: list[tuple[dict[str, Any], str]] = [
    *(({"messages": messages}, start) for messages, start in BAD_CONVERSATIONS),
    ({"system": [{"type": "image"}]}, f"system[0].image {REFUSED}text"),
    ({"system": 7}, "system: Expected"),
    ({"tools": [{"type": "web_search_20250305"}]}, "tools[0].type is not supported: this server supports only tools"),
    ({"tools": [{"name": "add"}]}, "tools[0].input_schema is None; allowed: a JSON Schema of an object"),
    ({"tools": [TOOL | {"input_schema": {"type": "array"}}]}, "tools[0].input_schema.type is 'array'"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name is 'add'; allowed: a name that no other tool has"),
    ({"tools": [TOOL | {"name": "a b"}]}, "tools[0].name is 'a b'; allowed"),
    ({"tools": [TOOL | {"what": 1}]}, "tools[0].what is 1; allowed"),
    ({"tools": [TOOL] * 129}, "tools is '129 tools'; allowed: at most 128"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "no"}}, "tool_choice.name is 'no'; allowed"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name is None; allowed"),
    ({"tool_choice": {"type": "any"}}, "tool_choice.type is 'any'; allowed: 'auto' or 'none' without tools"),
    ({"tool_choice": {"type": "required"}}, "tool_choice.type: Invalid enum value"),
    ({"tool_choice": "auto"}, "tool_choice: Expected `object | null`"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens: Expected"),
    ({"thinking": {"type": "on"}}, "thinking.type: Invalid enum value"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema is required"),
    ({"output_config": {"format": {"type": "xml", "schema": {}}}}, "output_config.format.type: Invalid enum value"),
    ({"mcp_servers": [{}]}, "mcp_servers is not a field of this request"),
    ({"n": 2}, "n is not supported: only one text is generated"),
]


@pytest.mark.parametrize(("fields", "start"), BAD, ids=[start[:60] for _, start in BAD])
def test_what_is_wrong_has_its_place_in_the_request(fields: dict[str, Any], start: str) -> None:
    assert refused(fields).startswith(start)


def test_fields_for_a_service_change_nothing() -> None:
    service = {
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "cache_control": {"type": "ephemeral"},
        "context_management": {"edits": []},
        "inference_geo": "eu",
        "speed": "fast",
        "thinking": {"type": "enabled", "budget_tokens": 2048, "display": "summarized"},
        "output_config": {"effort": "high"},
    }
    assert asked(service) == asked({})


def test_tools_are_those_of_chat() -> None:
    tokenizer = templated(TEMPLATES["hermes"])
    full = TOOL | {"description": "Adds.", "strict": True, "type": "custom", "cache_control": {"type": "ephemeral"}}
    function = {"name": "add", "description": "Adds.", "parameters": TOOL["input_schema"], "strict": True}
    for choice, mode, num_tools, max_calls in (
        (None, "auto", 1, 32),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", 1, 1),
        ({"type": "any", "disable_parallel_tool_use": False}, "required", 1, 32),
        ({"type": "tool", "name": "add"}, "named", 1, 1),
        ({"type": "none"}, "none", 0, 32),
    ):
        request = asked({"tools": [full], "tool_choice": choice}, tokenizer)
        assert request.chat is not None and request.chat.tools == [{"type": "function", "function": function}]
        if num_tools:
            assert request.form is not None
            found = request.form.choice
            assert (found.mode, len(found.tools), found.max_calls) == (mode, num_tools, max_calls)
            assert found.tools[0].place == "tools[0].input_schema"


def test_reasoning_is_switched_where_the_template_can() -> None:
    switch = "{% if enable_thinking %}</think>{% endif %}"
    for template, thinking, variables in (
        (switch, {"type": "enabled", "budget_tokens": 1024}, {"enable_thinking": True}),
        (switch, {"type": "adaptive"}, {"enable_thinking": True}),
        (switch, {"type": "disabled"}, {"enable_thinking": False}),
        (switch, None, {}),
        ("a", {"type": "enabled"}, {}),
        ("</think>", {"type": "disabled"}, {}),
    ):
        chat = asked({"thinking": thinking}, templated(template)).chat
        assert chat is not None and chat.variables == variables
    for effort, value in (("low", "low"), ("high", "high"), ("xhigh", "high"), ("max", "high")):
        chat = asked({"output_config": {"effort": effort}}, templated("{{ reasoning_effort }}")).chat
        assert chat is not None and chat.variables == {"reasoning_effort": value}
    own = {"thinking": {"type": "enabled"}, "chat_template_kwargs": {"enable_thinking": False}}
    chat = asked(own, templated(switch)).chat
    assert chat is not None and chat.variables == {"enable_thinking": False}


def test_a_format_is_a_grammar() -> None:
    schema = {"type": "integer"}
    request = asked({"output_config": {"format": {"type": "json_schema", "schema": schema}}})
    assert request.sampling.grammar == Grammar.json_schema(schema)
    assert request.names["grammar"] == "output_config.format.schema"
    assert asked({}).names["grammar"] == "tools"


def test_tokens_are_counted_of_the_same_conversation() -> None:
    conversation = {"messages": [USER], "system": "Be brief.", "tools": [TOOL], "tool_choice": {"type": "any"}}
    tokenizer = templated(TEMPLATES["hermes"])
    counted = conversation_of(
        parse(json.dumps(conversation).encode(), CountTokensRequest), services(tokenizer, tool_format="hermes")
    )
    request = asked(conversation, tokenizer)
    assert ([counted.messages], counted.options, counted.form) == (request.prompts, request.chat, request.form)
    for field in ("max_tokens", "temperature", "stream", "stop_sequences"):
        with pytest.raises(ApiError, match=f"{field} is not a field of this request"):
            parse(json.dumps(conversation | {field: 1}).encode(), CountTokensRequest)


# ---- what comes back ------------------------------------------------------------------------------------------------


def reply(generation: Generation, **fields: Any) -> MessageReply:
    return MessageReply(MessagesRequest(**{"messages": [], "max_tokens": 9, **fields}), generation)


def whole_of(generation: Generation, **fields: Any) -> Any:
    async def whole() -> Any:
        return msgspec.to_builtins(reply(generation, **fields).whole(await generation.collect()))

    return asyncio.run(whole())


def events_of(generation: Generation, **fields: Any) -> list[Any]:
    async def stream() -> list[Any]:
        async with aclosing(reply(generation, **fields).events()) as events:
            data = b"".join([each async for each in events]).decode()
        assert model_of(generation).num_open == generation.services.gate.num_visits == 0
        found = []
        for event in data.split("\n\n")[:-1]:
            name, line = event.split("\n")
            assert len(line.splitlines()) == 1
            found.append(json.loads(line.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
        return found

    return asyncio.run(stream())


@given(texts=TEXTS, held=FORMS, prompt=st.sampled_from(sorted(PROMPTS)))
def test_events_add_up_to_the_answer_and_that_is_the_one_of_chat(
    texts: Any, held: AnswerForm | None, prompt: str
) -> None:
    ids = TOKENIZER.encode(PROMPTS[prompt], add_special_tokens=False)

    def make() -> Generation:
        return generation_of([script_of(texts[:1])], SamplingParams(), prompts=[ids], tokenizer=TOKENIZER, form=held)

    whole = whole_of(make())
    assert added_up(events_of(make())) == whole
    assert whole["usage"]["input_tokens"] + whole["usage"]["cache_read_input_tokens"] == len(ids)

    async def chat() -> Any:
        generation = make()
        results = await generation.collect()
        return msgspec.to_builtins(ChatAnswer(ChatRequest(messages=[]), generation).whole(results))

    told = asyncio.run(chat())["choices"][0]["message"]
    content = whole["content"]
    assert "".join(each.get("text", "") for each in content) == (told["content"] or "")
    assert "".join(each.get("thinking", "") for each in content) == told.get("reasoning_content", "")
    calls = [[each["name"], each["input"]] for each in content if each["type"] == "tool_use"]
    functions = [each["function"] for each in told.get("tool_calls", [])]
    assert calls == [[each["name"], json.loads(each["arguments"])] for each in functions if is_whole(each["arguments"])]


def is_whole(arguments: str) -> bool:
    try:
        json.loads(arguments)
    except ValueError:
        return False
    return True


CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("last", "held", "generated", "reason", "sequence"),
    [
        (ended("So."), None, 3, "end_turn", None),
        (ended("So.", reason="length"), None, 9, "max_tokens", None),
        (ended("So.", reason="length"), None, 8, "model_context_window_exceeded", None),
        (ended("So.", stop_reason="END"), None, 3, "stop_sequence", "END"),
        (ended("So.", stop_reason="of the model"), None, 3, "end_turn", None),
        (ended("So.", stop_reason=7), None, 3, "end_turn", None),
        *((ended(CALLED), form(mode), 3, "tool_use", None) for mode in ("auto", "required", "named")),
        (ended(CALLED, stop_reason="END"), form("auto"), 3, "tool_use", None),
        (ended(CALLED, reason="length"), form("auto"), 9, "max_tokens", None),
    ],
)
def test_why_it_ends(last: Any, held: Any, generated: int, reason: str, sequence: str | None) -> None:
    def make() -> Generation:
        return generation_of([[delta(last, generated=generated, cached=2)]], tokenizer=TOKENIZER, form=held)

    whole = whole_of(make(), stop_sequences=["END"])
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
    assert added_up(events_of(make(), stop_sequences=["END"])) == whole
    assert whole["usage"] == {
        "input_tokens": 1,
        "cache_read_input_tokens": 2,
        "cache_creation_input_tokens": 0,
        "output_tokens": generated,
    }


def test_calls_have_ids_of_their_own() -> None:
    whole = whole_of(generation_of([[delta(ended(CALLED * 3))]], tokenizer=TOKENIZER, form=form("auto")))
    assert len({block["id"] for block in whole["content"]}) == 3
    assert {(block["name"], block["input"]["a"]) for block in whole["content"]} == {("add", 1)}


@pytest.mark.parametrize("arguments", ['{"a": ', "", '{"a": ' + "[" * 5000 + "]" * 5000 + "}}\n</tool_call>"])
def test_a_call_that_is_cut_off_or_too_deep_is_left_out(arguments: str) -> None:
    cut = ended('Well. <tool_call>\n{"name": "add", "arguments": ' + arguments, reason="length")
    whole = whole_of(generation_of([[delta(cut, generated=9)]], tokenizer=TOKENIZER, form=form("auto")))
    assert (whole["content"], whole["stop_reason"]) == (text("Well."), "max_tokens")


def test_a_call_that_a_stop_sequence_cuts_off_asks_for_no_result() -> None:
    cut = ended('Well. <tool_call>\n{"name": "add", "arguments": {"a": ', stop_reason="END")

    def make() -> Generation:
        return generation_of([[delta(cut, generated=9)]], tokenizer=TOKENIZER, form=form("auto"))

    whole = whole_of(make(), stop_sequences=["END"])
    assert (whole["content"], whole["stop_reason"], whole["stop_sequence"]) == (text("Well."), "stop_sequence", "END")
    [*_, last, _] = events_of(make(), stop_sequences=["END"])
    assert last["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "END"}


def test_the_model_and_the_id_are_those_of_the_client() -> None:
    make = [[delta(ended("a"))]]
    answer = whole_of(generation_of(make), model="chosen", request_id="mine")
    assert (answer["id"], answer["model"], answer["type"], answer["role"]) == (
        *("msg_mine", "chosen", "message", "assistant"),
    )
    assert whole_of(generation_of(make))["id"] == "msg_7"


def test_what_goes_wrong_on_the_way_is_an_event() -> None:
    generation = generation_of([[delta(spoken("a")), delta(ended(reason="error", error="broken"))]])
    with pytest.raises(ApiError):
        events_of(generation)
    assert reply(generation).failed(overloaded(1)) == (
        b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error",'
        b'"message":"the server is overloaded: its queue is full; try again later"}}\n\n'
    )
