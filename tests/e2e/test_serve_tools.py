"""Calls of functions and reasoning over HTTP: every format, whole and streamed, in chat and in responses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from support.server import RunningServer, running_server
from support.tool_models import TEMPLATES, THINKS, write_tool_model

CITIES = ("Paris", "Rome")
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": list(CITIES)}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "It rains.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
MESSAGES: Any = [{"role": "user", "content": "Is it warm?"}]
OPENERS = {
    "hermes": "<tool_call>",
    "llama3": "<|python_tag|>",
    "mistral": "[TOOL_CALLS]",
    "mistral_args": "[TOOL_CALLS]",
    "phi4": "<|tool_call|>",
    "harmony": "<|channel|>",
    "qwen3_coder": "<tool_call>",
    "seed": "<seed:tool_call>",
    "glm45": "<tool_call>",
    "granite": "<|tool_call|>",
    "command": "<|START_ACTION|>",
    "gemma4": "<|tool_call>",
    "lfm2": "<|tool_call_start|>",
}
FORMATS = ("guide", *TEMPLATES)
SOME_FORMATS = [
    name if name in ("guide", "mistral", "harmony", "gemma4") else pytest.param(name, marks=pytest.mark.long)
    for name in FORMATS
]
"""For what does not depend on the format of a call: one without marks, short ids, and two with channels."""


@pytest.fixture(scope="module", params=FORMATS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model: Any = "guide"
    if request.param != "guide":
        model = write_tool_model(tmp_path_factory.mktemp("models") / request.param, TEMPLATES[request.param])
    with running_server(model) as running:
        yield running


@pytest.fixture(scope="module")
def guide() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


def format_of(server: RunningServer) -> str:
    name = server.services.model_names[0]
    return "hermes" if name == "guide" else name


def chat(server: RunningServer, **fields: Any) -> Any:
    wanted = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 300, "temperature": 1, "seed": 1, **fields}
    answer = server.post("/v1/chat/completions", wanted)
    assert answer.status == 200, answer.body
    return answer


def added_up(events: list[Any]) -> list[Any]:
    """The choices that the events of a stream add up to; nothing may be told twice."""
    choices: dict[int, Any] = {}
    for event in events:
        [chunk] = event["choices"]
        message = choices.setdefault(chunk["index"], {"finish_reason": None, "calls": [], "roles": 0})
        delta = chunk["delta"]
        message["roles"] += "role" in delta
        for key in ("content", "reasoning_content"):
            if delta.get(key):
                message[key] = message.get(key, "") + delta[key]
        for part in delta.get("tool_calls", []):
            if "id" in part:
                assert part["index"] == len(message["calls"])
                assert (part["type"], part["function"]["arguments"]) == ("function", "")
                message["calls"].append([part["function"]["name"], ""])
            else:
                assert part.keys() == {"index", "function"}
                assert part["function"].keys() == {"arguments"}
                message["calls"][part["index"]][1] += part["function"]["arguments"]
        if chunk["finish_reason"] is not None:
            assert message["finish_reason"] is None
            message["finish_reason"] = chunk["finish_reason"]
    assert all(each.pop("roles") == 1 for each in choices.values())
    return [choices[index] for index in sorted(choices)]


def told(choice: Any) -> Any:
    """A choice of an answer in one piece, in the form of `added_up`."""
    message = choice["message"]
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", [])]
    found = {"finish_reason": choice["finish_reason"], "calls": calls}
    for key in ("content", "reasoning_content"):
        if message.get(key):
            found[key] = message[key]
    return found


def token_id(server: RunningServer, text: str) -> str:
    [found] = server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).value["tokens"]
    return str(found)


def require_allowed(name: str, arguments: str) -> None:
    value = json.loads(arguments)
    if name == "now":
        assert value == {}
    else:
        assert value.keys() == {"city", "days"}
        assert value["city"] in CITIES
        assert 1 <= value["days"] <= 7


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")], ids=["required", "named"])
def test_a_call_that_must_be(server: RunningServer, choice: Any, reason: str) -> None:
    fields = {"tool_choice": choice, "parallel_tool_calls": False, "n": 2}
    whole = chat(server, **fields).value["choices"]
    for each in whole:
        assert each["finish_reason"] == reason
        assert each["message"]["content"] is None
        [call] = each["message"]["tool_calls"]
        assert call["type"] == "function"
        assert choice == "required" or call["function"]["name"] == "weather"
        require_allowed(call["function"]["name"], call["function"]["arguments"])
        if format_of(server).startswith("mistral"):
            assert len(call["id"]) == 9
            assert call["id"].isalnum()
    assert len({each["message"]["tool_calls"][0]["id"] for each in whole}) == 2
    assert added_up(chat(server, stream=True, **fields).events) == [told(each) for each in whole]


def test_several_calls(server: RunningServer) -> None:
    fields = {"tool_choice": "required", "max_tokens": 200, "logit_bias": {token_id(server, ","): 5}}
    num_calls = []
    for seed in range(12):
        [whole] = chat(server, seed=seed, **fields).value["choices"]
        calls = [call["function"] for call in whole["message"]["tool_calls"]]
        num_calls.append(len(calls))
        for call in calls[:-1] if whole["finish_reason"] == "length" else calls:
            require_allowed(call["name"], call["arguments"])
        assert added_up(chat(server, stream=True, seed=seed, **fields).events) == [told(whole)]
        if len(calls) > 1 or (format_of(server) == "harmony" and len(num_calls) > 2):
            break
    assert (max(num_calls) == 1) is (format_of(server) == "harmony"), "the mark of a call ends an answer of gpt-oss"


def test_a_model_that_may_call(server: RunningServer) -> None:
    """Left to itself a tiny model writes text; where the mark of a call is likely, it is held to the schemas."""
    [plain] = chat(server, max_tokens=20).value["choices"]
    assert plain["message"]["content"] or format_of(server) == "harmony"
    assert added_up(chat(server, max_tokens=20, stream=True).events) == [told(plain)]
    opener = server.post("/tokenize", {"prompt": OPENERS[format_of(server)], "add_special_tokens": False}).value
    if opener["count"] > 1 or format_of(server) == "harmony":
        return  # the guide has no such token, and with harmony every message begins with it
    fields = {"logit_bias": {str(opener["tokens"][0]): 30}, "parallel_tool_calls": False}
    [whole] = chat(server, **fields).value["choices"]
    [call] = whole["message"]["tool_calls"]
    require_allowed(call["function"]["name"], call["function"]["arguments"])
    assert whole["finish_reason"] == "tool_calls"
    assert added_up(chat(server, stream=True, **fields).events) == [told(whole)]


def test_channels_of_harmony(tmp_path: Path) -> None:
    """The grammar requires a header; the first letter of the channel is made likely."""
    with running_server(write_tool_model(tmp_path / "harmony", TEMPLATES["harmony"])) as server:
        for letter, field, other in (("a", "reasoning_content", "content"), ("f", "content", "reasoning_content")):
            likely = {token_id(server, text): 30 for text in ("<|channel|>", letter)}
            fields: Any = {"max_tokens": 40, "logit_bias": likely}
            [whole] = chat(server, **fields).value["choices"]
            assert whole["message"][field]
            assert not whole["message"].get(other)
            assert added_up(chat(server, stream=True, **fields).events) == [told(whole)]
        held: Any = {"tools": None, "structured_outputs": {"choice": ["yes"]}, "max_tokens": 500}
        held["logit_bias"] = likely
        [whole] = chat(server, **held).value["choices"]
        assert whole["message"]["content"] == "yes"
        assert added_up(chat(server, stream=True, **held).events) == [told(whole)]


def test_the_channel_of_gemma(tmp_path: Path) -> None:
    """The mark of the channel is made likely; after a result the template writes it."""
    with running_server(write_tool_model(tmp_path / "gemma4", TEMPLATES["gemma4"])) as server:
        begin, end = (token_id(server, text) for text in ("<|channel>", "<channel|>"))
        call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}
        round_of_call = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}]
        round_of_call.append({"role": "tool", "tool_call_id": "a", "content": "noon"})
        for messages, thinks, likely in (
            (MESSAGES, True, {begin: 30}),
            (round_of_call, True, {}),
            (round_of_call, True, {end: 30}),
            (MESSAGES, False, {begin: 30}),
        ):
            fields: Any = {"messages": messages, "max_tokens": 40, "logit_bias": likely}
            fields["chat_template_kwargs"] = {"enable_thinking": thinks}
            [whole] = chat(server, **fields).value["choices"]
            message = whole["message"]
            assert bool(message.get("reasoning_content")) is (thinks and end not in likely)
            assert "channel" not in json.dumps(message)
            assert added_up(chat(server, stream=True, **fields).events) == [told(whole)]


@pytest.mark.parametrize("server", SOME_FORMATS, indirect=True)
def test_log_probabilities_are_those_of_all_tokens(server: RunningServer) -> None:
    fields = {
        "tool_choice": "required",
        "max_tokens": 100,
        "logprobs": True,
        "top_logprobs": 1,
        "return_token_ids": True,
    }
    value = chat(server, **fields).value
    [choice] = value["choices"]
    entries = choice["logprobs"]["content"]
    assert len(entries) == len(choice["token_ids"]) == value["usage"]["completion_tokens"]
    chunks = [event["choices"][0] for event in chat(server, stream=True, **fields).events]
    assert [entry for chunk in chunks for entry in (chunk["logprobs"] or {"content": []})["content"]] == entries
    assert [token for chunk in chunks for token in chunk.get("token_ids", [])] == choice["token_ids"]


def test_the_round_of_a_call(server: RunningServer) -> None:
    """What was called and what it returned becomes a part of the next prompt."""
    [choice] = chat(server, tool_choice=NAMED).value["choices"]
    [call] = choice["message"]["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "It is 19 degrees."}
    first = chat(server, tool_choice="none", max_tokens=1).value["usage"]["prompt_tokens"]
    messages = [*MESSAGES, choice["message"], result]
    second = chat(server, tool_choice="auto", max_tokens=1, messages=messages).value["usage"]["prompt_tokens"]
    assert second > first + len(call["function"]["arguments"]) // 8
    del result["tool_call_id"]
    answer = server.post("/v1/chat/completions", {"messages": messages, "tools": TOOLS})
    assert (answer.status, answer.error["param"]) == (400, "messages[2].tool_call_id")


@pytest.mark.parametrize("server", ["phi4"], indirect=True)  # whose tools are in the system message
def test_a_prompt_is_counted_and_warmed_as_a_chat_has_it(server: RunningServer) -> None:
    computed = chat(server, max_tokens=1, return_token_ids=True).value["prompt_token_ids"]
    conversation = {"messages": MESSAGES, "tools": TOOLS}
    assert server.post("/tokenize", conversation).value["tokens"] == computed
    [warmed] = server.post("/cache/warm", conversation).value["data"]
    assert warmed["prompt_tokens"] == len(computed)
    assert warmed["cached_tokens_before"] > 0, "it is not the prompt of the chat"


@pytest.mark.parametrize("server", SOME_FORMATS, indirect=True)
def test_a_response_that_calls(server: RunningServer) -> None:
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    fields: Any = {"model": server.services.model_names[0], "input": "Is it warm?"}
    fields |= {"tools": tools, "temperature": 1, "max_output_tokens": 300, "parallel_tool_calls": False}
    fields |= {"tool_choice": {"type": "function", "name": "weather"}, "extra_body": {"seed": 1}}
    with server.client() as client:
        whole = client.responses.create(**fields)
        events = list(client.responses.create(**fields, stream=True))
        [call] = whole.output
        assert call.type == "function_call"
        assert (call.name, call.status, whole.status) == ("weather", "completed", "completed")
        require_allowed(call.name, call.arguments)
        types = [event.type for event in events]
        assert types[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
        assert types[-3:] == [
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert set(types[3:-3]) == {"response.function_call_arguments.delta"}
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert "".join(event.delta for event in events if event.type.endswith("arguments.delta")) == call.arguments
        final: Any = events[-1]
        assert final.response.output[0].arguments == call.arguments
        items: Any = [{"role": "user", "content": "Is it warm?"}, call.to_dict()]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "19 degrees"})
        again = client.responses.create(**{**fields, "input": items, "tool_choice": "none", "max_output_tokens": 4})
        assert again.output[0].type == "message"
        assert again.usage is not None
        assert again.usage.input_tokens > (whole.usage.input_tokens if whole.usage else 0)


def test_functions_of_a_namespace_are_called_by_both_names(guide: RunningServer) -> None:
    """As Codex offers them: names are unique within a namespace only, and a search is offered with every call."""
    weather = {"type": "function", "name": "weather", "parameters": WEATHER}
    tools = [weather, {"type": "namespace", "name": "old", "tools": [weather]}, {"type": "web_search", "size": 1}]
    fields: Any = {"input": "Is it warm?", "tools": tools, "max_output_tokens": 300, "temperature": 0}
    fields |= {"tool_choice": {"type": "function", "name": "old__weather"}, "client_metadata": {"turn": "1"}}
    whole = guide.post("/v1/responses", fields)
    assert whole.status == 200, whole.body
    [call] = whole.value["output"]
    assert (call["type"], call["name"], call["namespace"]) == ("function_call", "weather", "old")
    require_allowed("weather", call["arguments"])
    assert whole.value["tools"] == tools[:2], "the answer has the tools that were offered to the model"
    events = guide.post("/v1/responses", fields | {"stream": True}).events
    told = [event["item"] for event in events if event["type"].startswith("response.output_item")]
    assert [(item["name"], item["namespace"]) for item in told] == [("weather", "old")] * 2
    plain = guide.post("/v1/responses", fields | {"tool_choice": {"type": "function", "name": "weather"}}).value
    assert "namespace" not in plain["output"][0]
    prompts = []
    for name in (call | {"namespace": "old"}, call | {"name": "old__weather", "namespace": None}):
        items = [{"role": "user", "content": "Is it warm?"}, name]
        items.append({"type": "function_call_output", "call_id": call["call_id"], "output": "19 degrees"})
        again = guide.post("/v1/responses", fields | {"input": items, "tool_choice": "none", "max_output_tokens": 8})
        prompts.append((again.value["usage"]["input_tokens"], again.value["output"][0]["content"][0]["text"]))
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "web_search"}], "tools[0].type"),
        ([{"type": "function", "name": "a"}, {"type": "local_shell"}], "tools[1].type"),
        ([{"type": "namespace", "tools": []}], "tools[0].name"),
        ([{"type": "namespace", "name": "a", "tools": [1]}], "tools[0].tools"),
        ([{"type": "namespace", "name": "a", "tools": [{"type": "web_search"}]}], "tools[0].tools[0].type"),
        ([{"type": "namespace", "name": "a", "tools": [{"type": "function", "name": "!"}]}], "tools[0].tools[0].name"),
        (
            [
                {"type": "function", "name": "a__b"},
                {"type": "web_search"},
                {"type": "namespace", "name": "a", "tools": [{"type": "function", "name": "b"}]},
            ],
            "tools[2].tools[0].name",
        ),
    ],
)
def test_tools_of_a_response_that_cannot_be_offered_are_named(guide: RunningServer, tools: Any, param: str) -> None:
    answer = guide.post("/v1/responses", {"input": "Is it warm?", "tools": tools})
    assert (answer.status, answer.error["param"]) == (400, param)


def test_texts_in_a_row_are_one_message_of_a_response(guide: RunningServer) -> None:
    """Codex sends two messages of the developer and two of the user; some templates accept one of each."""
    rows = [("developer", "Be brief."), ("system", "Be kind."), ("user", "Warm."), ("user", "Is it?")]
    items = [{"type": "message", "role": role, "content": text} for role, text in rows]
    same = [
        {"role": "system", "content": "You are.\nBe brief.\nBe kind."},
        {"role": "user", "content": "Warm.\nIs it?"},
    ]
    fields: Any = {"max_output_tokens": 8, "temperature": 0}
    found = guide.post("/v1/responses", fields | {"input": items, "instructions": "You are."}).value
    chat = guide.post("/v1/chat/completions", {"messages": same, "max_tokens": 8, "temperature": 0}).value
    assert found["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert found["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]


def test_a_call_with_all_that_codex_sends(guide: RunningServer) -> None:
    call = {
        "model": "guide",
        "stream": True,
        "input": [
            {
                "type": "message",
                "id": "msg_1",
                "role": "developer",
                "content": [{"type": "input_text", "text": "You."}],
            },
            {"type": "message", "id": "msg_2", "role": "user", "content": [{"type": "input_text", "text": "Look."}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": None},
            {
                "type": "function_call",
                "status": "completed",
                "id": "fc_1",
                "name": "spawn",
                "namespace": "agents",
                "arguments": '{"message": "help"}',
                "call_id": "call_1",
            },
            {"type": "function_call_output", "id": "fco_1", "call_id": "call_1", "output": "Done."},
            {
                "type": "function_call_output",
                "call_id": "call_2",
                "output": [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}],
            },
        ],
        "tools": [
            {
                "type": "function",
                "name": "exec_command",
                "description": "Run it.",
                "strict": False,
                "parameters": {"type": "object", "properties": {"cmd": {"const": "ls"}}, "required": ["cmd"]},
            },
            {
                "type": "namespace",
                "name": "agents",
                "description": "Sub-agents.",
                "tools": [{"type": "function", "name": "spawn", "strict": False, "parameters": {"type": "object"}}],
            },
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a2",
        "client_metadata": {"turn_id": "01a2", "x-codex-turn-metadata": "{}"},
        "max_output_tokens": 200,
        "logit_bias": {token_id(guide, "e"): 2},
        "temperature": 0,
    }
    answer = guide.post("/v1/responses", call)
    assert answer.status == 200, answer.body
    done = [event["item"] for event in answer.events if event["type"] == "response.output_item.done"]
    assert done == answer.events[-1]["response"]["output"]
    [made] = done
    assert (made["type"], made["name"]) in (("function_call", "exec_command"), ("function_call", "spawn"))
    assert answer.events[-1]["response"]["usage"]["input_tokens"] > 0


def test_the_helpers_of_openai_python(guide: RunningServer) -> None:
    fields: Any = {"model": "guide", "messages": MESSAGES, "tools": TOOLS, "temperature": 0, "max_tokens": 200}
    fields |= {"tool_choice": "required", "parallel_tool_calls": False}
    with guide.client() as client:
        whole = client.chat.completions.create(**fields).choices[0]
        state = ChatCompletionStreamState(input_tools=TOOLS)
        for chunk in client.chat.completions.create(**fields, stream=True):
            state.handle_chunk(chunk)
        streamed = state.get_final_completion().choices[0]
        strict: Any = {"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}
        parsed = client.chat.completions.parse(**{**fields, "tools": [strict]}).choices[0]
    assert whole.message.tool_calls is not None
    assert streamed.message.tool_calls is not None
    [call], [again] = whole.message.tool_calls, streamed.message.tool_calls
    assert call.type == again.type == "function"
    assert (again.function.name, again.function.arguments) == (call.function.name, call.function.arguments)
    assert (whole.finish_reason, streamed.finish_reason) == ("tool_calls", "tool_calls")
    assert (whole.message.content, streamed.message.content) == (None, None)
    assert parsed.message.tool_calls is not None
    arguments: Any = parsed.message.tool_calls[0].function.parsed_arguments
    assert arguments["city"] in CITIES


def test_the_example_of_the_page_is_answered_as_it_is_printed(guide: RunningServer) -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/tools.md").read_text(encoding="utf-8")
    example = page.partition("```text\n")[2].partition("```")[0]
    body, _, shown = example.partition(" -d '")[2].partition("}'\n")
    answer = guide.post("/v1/chat/completions", json.loads(body + "}"))
    assert answer.status == 200, answer.body
    expected = re.escape(shown.replace("\n ", "").strip()).replace("…", ".*")
    assert re.fullmatch(expected, answer.body.decode()), answer.body


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
        ({"min_tokens": 1}, "tools"),
        ({"ignore_eos": True}, "tools"),
        ({"use_beam_search": True, "n": 2}, "tools"),
        (
            {
                "tools": [
                    *TOOLS,
                    {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}},
                ]
            },
            "tools[2].function.parameters",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "http://127.0.0.1:1/"}}}]},
            "tools[0].function.parameters",
        ),
    ],
)
def test_what_cannot_be_called_is_named(guide: RunningServer, fields: Any, param: str) -> None:
    answer = guide.post("/v1/chat/completions", {"messages": MESSAGES, "tools": TOOLS, **fields})
    assert answer.status == 400, answer.body
    assert answer.error["param"] == param
    assert "start:" not in answer.error["message"]


def test_a_response_names_its_own_fields(guide: RunningServer) -> None:
    tool = {"type": "function", "name": "f", "parameters": {"properties": {"a": {"type": "what"}}}}
    answer = guide.post("/v1/responses", {"input": "a", "tools": [tool]})
    assert (answer.status, answer.error["param"]) == (400, "tools[0].parameters")


def test_a_template_that_knows_no_tools(tmp_path: Path) -> None:
    template = "{% for message in messages %}" + "{{ message.content }}" + "{% endfor %}"
    with running_server(write_tool_model(tmp_path, template)) as server:
        for choice in (None, "auto", "required", NAMED):
            fields = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice}
            answer = server.post("/v1/chat/completions", fields)
            assert (answer.status, answer.error["param"]) == (400, "tools")
            assert 'set tool_choice to "none"' in answer.error["message"]
        assert chat(server, tool_choice="none", max_tokens=1).value["choices"]
    with running_server(tool_format="none") as server:
        answer = server.post("/v1/chat/completions", {"messages": MESSAGES, "tools": TOOLS})
        assert answer.status == 400
        assert "--tool-format none" in answer.error["message"]


def test_a_template_with_tools_and_calls_of_an_unknown_format(tmp_path: Path) -> None:
    template = "{% for tool in tools %}{{ tool }}{% endfor %}{% for message in messages %}{{ message }}{% endfor %}"
    with running_server(write_tool_model(tmp_path, template)) as server:
        answer = server.post("/v1/chat/completions", {"messages": MESSAGES, "tools": TOOLS})
        assert (answer.status, answer.error["param"]) == (400, "tools")
        for part in ("the chat template of this model shows tools", "hermes, llama3", "--tool-format NAME"):
            assert part in answer.error["message"]
        assert chat(server, tool_choice="none", max_tokens=1).value["choices"]


# ---- reasoning ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A model whose template begins the reasoning, or ends it."""
    with running_server(write_tool_model(tmp_path_factory.mktemp("models") / "thinker", THINKS)) as running:
        yield running


def test_reasoning_that_does_not_end_is_reasoning(thinker: RunningServer) -> None:
    fields: Any = {"tools": None, "max_tokens": 8, "seed": 5, "logit_bias": {token_id(thinker, "</think>"): -100}}
    [whole] = chat(thinker, **fields).value["choices"]
    assert whole["message"]["content"] is None
    assert whole["message"]["reasoning_content"]
    assert whole["finish_reason"] == "length"
    assert added_up(chat(thinker, stream=True, **fields).events) == [told(whole)]
    fields["chat_template_kwargs"] = {"enable_thinking": False}
    [plain] = chat(thinker, **fields).value["choices"]
    assert plain["message"]["content"]
    assert "reasoning_content" not in plain["message"]


@pytest.mark.parametrize(
    ("begun", "kind"),
    [("<think>Why", "reasoning_content"), ("<think>Why?</think>So", "content"), ("So <", "content")],
)
def test_what_continues_a_message_is_reasoning_if_the_message_ends_within_it(
    thinker: RunningServer, begun: str, kind: str
) -> None:
    bias = {token_id(thinker, "</think>"): -100}
    messages = [*MESSAGES, {"role": "assistant", "content": begun}]
    fields: Any = {"tools": None, "max_tokens": 8, "seed": 5, "logit_bias": bias, "messages": messages}
    [whole] = chat(thinker, continue_final_message=True, **fields).value["choices"]
    assert {name for name in ("content", "reasoning_content") if whole["message"].get(name)} == {kind}
    [streamed] = added_up(chat(thinker, stream=True, continue_final_message=True, **fields).events)
    assert streamed == told(whole)


def test_calls_come_after_the_reasoning(thinker: RunningServer) -> None:
    fields: Any = {"tool_choice": "required", "parallel_tool_calls": False}
    fields["logit_bias"] = {token_id(thinker, "</think>"): 5}
    with_reasoning = 0
    for seed in range(4):
        [whole] = chat(thinker, seed=seed, **fields).value["choices"]
        assert whole["finish_reason"] == "tool_calls"
        assert whole["message"]["content"] is None
        with_reasoning += bool(whole["message"].get("reasoning_content"))
        [call] = whole["message"]["tool_calls"]
        require_allowed(call["function"]["name"], call["function"]["arguments"])
        assert added_up(chat(thinker, stream=True, seed=seed, **fields).events) == [told(whole)]
    assert with_reasoning


def test_a_format_holds_what_comes_after_the_reasoning(thinker: RunningServer) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}
    fields: Any = {"tools": None, "response_format": form, "logit_bias": {token_id(thinker, "</think>"): 5}}
    with_reasoning = 0
    for seed in range(4):
        [whole] = chat(thinker, seed=seed, **fields).value["choices"]
        require_allowed("weather", whole["message"]["content"])
        with_reasoning += bool(whole["message"].get("reasoning_content"))
        assert added_up(chat(thinker, stream=True, seed=seed, **fields).events) == [told(whole)]
    assert with_reasoning
    [plain] = chat(thinker, chat_template_kwargs={"enable_thinking": False}, **fields).value["choices"]
    require_allowed("weather", plain["message"]["content"])
    assert "reasoning_content" not in plain["message"]


def test_a_format_that_cannot_be_kept_is_named_behind_a_reasoning_too(thinker: RunningServer) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "what"}}}
    answer = thinker.post("/v1/chat/completions", {"messages": MESSAGES, "response_format": form})
    assert (answer.status, answer.error["param"]) == (400, "response_format.json_schema.schema")
    assert '"what"' in answer.error["message"]
    assert "start:" not in answer.error["message"]


def test_a_format_holds_answers_that_call_nothing(thinker: RunningServer) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}
    fields: Any = {"response_format": form, "chat_template_kwargs": {"enable_thinking": False}}
    fields["logit_bias"] = {token_id(thinker, "<tool_call>"): -3}  # else few answers call nothing
    kinds = set()
    for seed in range(12):
        [whole] = chat(thinker, seed=seed, parallel_tool_calls=False, **fields).value["choices"]
        calls = whole["message"].get("tool_calls", [])
        kinds.add(bool(calls))
        if calls:
            require_allowed(calls[0]["function"]["name"], calls[0]["function"]["arguments"])
        else:
            require_allowed("weather", whole["message"]["content"])
        if len(kinds) == 2:
            break
    assert kinds == {True, False}


def test_reasoning_is_an_item_of_a_response(thinker: RunningServer) -> None:
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    fields: Any = {"input": "Is it warm?", "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    fields |= {"temperature": 1, "max_output_tokens": 300, "logit_bias": {token_id(thinker, "</think>"): 5}}
    for seed in range(8):
        whole = thinker.post("/v1/responses", {**fields, "seed": seed}).value
        kinds = [item["type"] for item in whole["output"]]
        if kinds == ["reasoning", "function_call"]:
            break
    assert kinds == ["reasoning", "function_call"]
    events = thinker.post("/v1/responses", {**fields, "seed": seed, "stream": True}).events
    deltas = [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == whole["output"][0]["content"][0]["text"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == kinds
    assert done[1]["arguments"] == whole["output"][1]["arguments"]
    again = thinker.post("/v1/responses", {**fields, "input": [{"role": "user", "content": "a"}, *whole["output"]]})
    assert again.status == 200, again.body


def test_the_marks_stay_in_the_text_where_that_is_wanted(tmp_path: Path) -> None:
    with running_server(write_tool_model(tmp_path, THINKS), reasoning_format="none") as server:
        [whole] = chat(server, tools=None, max_tokens=8).value["choices"]
    assert whole["message"]["content"]
    assert "reasoning_content" not in whole["message"]


def test_clients_may_send_reasoning_back(thinker: RunningServer) -> None:
    cut_off = chat(thinker, tools=None, max_tokens=2).value["choices"][0]["message"]
    assert cut_off["content"] is None and cut_off["reasoning_content"]
    for said in ({"role": "assistant", "content": "Yes.", "reasoning_content": "Why not?"}, cut_off):
        messages = [*MESSAGES, said, *MESSAGES]
        assert chat(thinker, messages=messages, tools=None, max_tokens=1).value["choices"]


def test_openai_errors_are_errors_of_the_client(guide: RunningServer) -> None:
    with guide.client() as client, pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="guide", messages=MESSAGES, tools=[*TOOLS, TOOLS[0]])
    assert caught.value.param == "tools[2].function.name"
