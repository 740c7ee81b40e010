"""Ollama's interface in detail: what its fields become, and that any stream adds up to the answer of chat."""

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

from quire.core.clock import ManualClock
from quire.core.grammar import Grammar
from quire.core.parameters import Place
from quire.core.sampling_params import PARAMETERS, SamplingParams
from quire.engine.text.chat_template import ChatOptions
from quire.serve.answer_form import AnswerForm
from quire.serve.errors import ApiError, overloaded
from quire.serve.model_names import same_model
from quire.serve.render.chat import ChatAnswer
from quire.serve.render.ollama import OllamaReply
from quire.serve.run.generation import Generation
from quire.serve.run.request import GenerationRequest
from quire.serve.schemas.chat import ChatRequest
from quire.serve.schemas.ollama import (
    OPTION_NAMES,
    REFUSED_OPTIONS,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaOptions,
)
from quire.serve.schemas.parse import parse
from quire.serve.tools.base import Tool, ToolChoice
from quire.serve.tools.hermes import HERMES
from quire.serve.translate.ollama import ollama_chat_request, ollama_generate_request
from quire.serve.translate.ollama_messages import UNASKED, messages_of
from support.answer_scripts import FORMS, PROMPTS, TEXTS, TOKENIZER, script_of
from support.idle_services import DEFAULTS, services
from support.scripted_model import Script, delta, ended, generation_of, model_of, spoken

MESSAGES: Any = [{"role": "user", "content": "Hello"}]


# ---- what fields become ---------------------------------------------------------------------------------------------


def asked(fields: dict[str, Any]) -> GenerationRequest:
    return ollama_chat_request(
        parse(json.dumps({"messages": MESSAGES} | fields).encode(), OllamaChatRequest), services()
    )


def generated(fields: dict[str, Any]) -> GenerationRequest:
    return ollama_generate_request(parse(json.dumps(fields).encode(), OllamaGenerateRequest), services())


def test_the_least_that_a_client_can_say() -> None:
    request = asked({})
    assert request.prompts == [MESSAGES]
    assert (request.sampling, request.chat) == (replace(DEFAULTS, max_tokens=None), ChatOptions(True, None, {}))
    assert (request.form, request.truncation, request.cache_salt, request.priority) == (None, None, None, None)
    assert generated({"prompt": "Hello"}).prompts == [MESSAGES]
    system = {"role": "system", "content": "Be brief."}
    assert generated({"prompt": "Hello", "system": "Be brief."}).prompts == [[system, *MESSAGES]]
    assert generated({"system": "Be brief."}).prompts == []
    for field in ("prompt", "messages"):  # as the engine names what is wrong with a conversation
        assert (request.names[field], generated({"prompt": "a"}).names[field]) == ("messages", "prompt")
    raw = generated({"prompt": "Hello", "raw": True})
    assert (raw.prompts, raw.chat, raw.add_special_tokens) == (["Hello"], None, True)


def test_every_option_is_mapped_refused_or_about_loading() -> None:
    mapped = {"num_predict": 5, "temperature": 0.5, "top_k": 3, "top_p": 0.25, "min_p": 0.125, "seed": 9, "stop": ["a"]}
    mapped |= {"repeat_penalty": 1.5, "presence_penalty": 0.75, "frequency_penalty": -0.5}
    assert mapped.keys() == set(OPTION_NAMES.values())
    sampling = asked({"options": mapped}).sampling
    for ours, theirs in OPTION_NAMES.items():
        assert getattr(sampling, ours) == (("a",) if ours == "stop" else mapped[theirs])
        assert asked({}).names[ours] == f"options.{theirs}"
    changed = {name for name in PARAMETERS if getattr(sampling, name) != getattr(SamplingParams(), name)}
    assert changed == {*OPTION_NAMES, "penalty_window"}
    assert asked({"options": mapped | {"repeat_last_n": 20}}).sampling == replace(sampling, penalty_window=20)
    draws = {name for name, each in PARAMETERS.items() if each.place is Place.DRAW}
    assert draws - {"top_n_sigma"} <= set(OPTION_NAMES), "what Ollama does not have, it does not have"
    rest = set(OllamaOptions.__struct_fields__) - set(OPTION_NAMES.values()) - REFUSED_OPTIONS.keys()
    for name in rest - {"num_ctx", "repeat_last_n"}:
        for value in (1, True, 0.5):
            try:
                assert asked({"options": {name: value}}).sampling == asked({}).sampling
            except ApiError as error:
                assert error.detail.code == "invalid_type"


def test_a_whole_number_may_have_a_point() -> None:
    sampling = asked({"options": {"num_predict": 5.0, "top_k": 3.0, "num_ctx": 8.0}}).sampling
    assert (sampling.max_tokens, sampling.top_k) == (5, 3)
    assert type(sampling.max_tokens) is int
    with pytest.raises(ApiError, match=r"options: num_ctx is 8.5; allowed: a whole number"):
        asked({"options": {"num_ctx": 8.5}})
    with pytest.raises(ApiError, match=r"options.num_ctx: Expected .* >= 1"):
        asked({"options": {"num_ctx": 0.0}})


def test_a_format_is_a_grammar() -> None:
    assert asked({"format": "json"}).sampling.grammar == Grammar.json_object()
    schema = {"type": "integer"}
    request = generated({"prompt": "a", "format": schema})
    assert (request.sampling.grammar, request.names["grammar"]) == (Grammar.json_schema(schema), "format")
    assert asked({"format": ""}).sampling.grammar is None


def test_a_stream_is_what_comes_where_nothing_is_wanted() -> None:
    for said, streams in (({}, True), ({"stream": None}, True), ({"stream": True}, True), ({"stream": False}, False)):
        for kind in (OllamaChatRequest, OllamaGenerateRequest):
            assert parse(json.dumps(said).encode(), kind).stream is streams


@pytest.mark.parametrize("name", ["a", "a:1b", "o/a", "o/a:1b", "h/o/a:latest"])
def test_names_with_and_without_the_latest_tag(name: str) -> None:
    assert same_model(name, name)
    assert same_model("a", name) == (name == "a") == same_model("a:latest", name)
    assert same_model(name.removesuffix(":latest"), name)


def test_an_answer_of_a_tool_belongs_to_a_call_that_has_none() -> None:
    def call(name: str, **more: Any) -> dict[str, Any]:
        return {"function": {"index": 7, "name": name, "arguments": {"n": 1}}, **more}

    def answer(**more: Any) -> dict[str, Any]:
        return {"role": "tool", "content": "x", **more}

    told = messages_of(
        [
            {"role": "assistant", "content": "", "thinking": "Well", "tool_calls": [call("a"), call("b"), call("a")]},
            *(answer(tool_name=name) for name in ("b", "a", "a", "a")),
            {"role": "assistant", "tool_calls": [call("a", id="mine"), call("b")]},
            answer(),
            answer(tool_name="b"),
            answer(),
            answer(tool_call_id="given"),
        ]
    )
    assert told[0]["reasoning_content"] == "Well"
    assert [each["id"] for each in told[0]["tool_calls"]] == ["call00001", "call00002", "call00003"]
    assert told[0]["tool_calls"][0] == {
        "id": "call00001",
        "type": "function",
        "function": {"name": "a", "arguments": {"n": 1}},
    }
    assert [each["tool_call_id"] for each in told[1:5]] == ["call00002", "call00001", "call00003", UNASKED]
    assert [each["id"] for each in told[5]["tool_calls"]] == ["mine", "call00005"]
    assert [each["tool_call_id"] for each in told[6:]] == ["mine", "call00005", UNASKED, "given"]
    assert [each.get("name") for each in told[1:]] == ["b", "a", "a", "a", None, None, "b", None, None]
    assert all(len(each["id"]) == 9 for each in told[0]["tool_calls"]), "as Mistral's templates want it"


# ---- what comes back ------------------------------------------------------------------------------------------------


def whole_of(generation: Generation, **fields: Any) -> Any:
    async def whole() -> Any:
        results = await generation.collect()
        return json.loads(msgspec.json.encode(OllamaReply(OllamaChatRequest(**fields), generation).whole(results)))

    return asyncio.run(whole())


def lines_of(generation: Generation, **fields: Any) -> list[Any]:
    async def stream() -> list[Any]:
        async with aclosing(OllamaReply(OllamaChatRequest(**fields), generation).events()) as events:
            data = b"".join([each async for each in events]).decode()
        assert data.endswith("\n") and len(data.splitlines()) == data.count("\n"), "a line to every client"
        assert model_of(generation).num_open == generation.services.gate.num_visits == 0
        return [json.loads(line) for line in data.splitlines()]

    return asyncio.run(stream())


@given(texts=TEXTS, held=FORMS, prompt=st.sampled_from(sorted(PROMPTS)), logprobs=st.booleans())
def test_lines_add_up_to_the_answer_and_that_is_the_one_of_chat(
    texts: Any, held: AnswerForm | None, prompt: str, logprobs: bool
) -> None:
    texts = texts[:1]
    ids = TOKENIZER.encode(PROMPTS[prompt], add_special_tokens=False)

    def make() -> Generation:
        return generation_of([script_of(texts)], SamplingParams(), prompts=[ids], tokenizer=TOKENIZER, form=held)

    whole = whole_of(make(), logprobs=logprobs, top_logprobs=1 if logprobs else None)
    *parts, last = lines_of(make(), logprobs=logprobs, top_logprobs=1 if logprobs else None)
    assert last["done"] and not any(part["done"] for part in parts)
    for name in ("done_reason", "prompt_eval_count", "eval_count", "model"):
        assert last[name] == whole[name]
    message = whole["message"]
    assert "".join(part["message"]["content"] for part in parts) == message["content"]
    assert "".join(part["message"].get("thinking", "") for part in parts) == message.get("thinking", "")
    calls = [call for part in parts for call in part["message"].get("tool_calls", [])]
    assert calls == message.get("tool_calls", [])
    assert [call["function"]["index"] for call in calls] == list(range(len(calls)))
    assert [each for part in parts for each in part.get("logprobs", [])] == whole.get("logprobs", [])

    async def chat() -> Any:
        generation = make()
        results = await generation.collect()
        return msgspec.to_builtins(ChatAnswer(ChatRequest(messages=[]), generation).whole(results))

    told = asyncio.run(chat())["choices"][0]["message"]
    assert (told["content"] or "", told.get("reasoning_content", "")) == (
        message["content"],
        message.get("thinking", ""),
    )
    complete = [call for call in told.get("tool_calls", []) if is_object(call["function"]["arguments"])]
    assert [[each["function"]["name"], json.loads(each["function"]["arguments"])] for each in complete] == [
        [each["function"]["name"], each["function"]["arguments"]] for each in calls
    ]


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


FORM = AnswerForm(ToolChoice("auto", (Tool("add", {}),)), HERMES, None, TOKENIZER)


def call_in_pieces(*arguments: str, reason: str = "stop") -> Script:
    begun = spoken('<tool_call>\n{"name": "add", "arguments": ')
    return [delta(begun), *(delta(spoken(each)) for each in arguments), delta(ended(reason=reason), generated=9)]


def test_a_call_is_told_once_it_is_whole() -> None:
    script = call_in_pieces('{"a": ', "1, ", '"b": [2]}', "}\n</tool_call>", "and more")
    lines = lines_of(generation_of([script], tokenizer=TOKENIZER, form=FORM))
    [called] = [line["message"]["tool_calls"] for line in lines if "tool_calls" in line["message"]]
    assert called[0]["function"] == {"index": 0, "name": "add", "arguments": {"a": 1, "b": [2]}}
    assert lines[-1]["done_reason"] == "stop"


@pytest.mark.parametrize("arguments", [('{"a": ', "1"), (), ('{"a": ' + "[" * 5000 + "]" * 5000 + "}}\n</tool_call>",)])
def test_a_call_that_is_cut_off_or_too_deep_is_left_out(arguments: tuple[str, ...]) -> None:
    for told in (
        lines_of(generation_of([call_in_pieces(*arguments, reason="length")], tokenizer=TOKENIZER, form=FORM)),
        [whole_of(generation_of([call_in_pieces(*arguments, reason="length")], tokenizer=TOKENIZER, form=FORM))],
    ):
        assert not any("tool_calls" in line["message"] for line in told)
        assert (told[-1]["done_reason"], told[-1]["eval_count"]) == ("length", 9)


def test_times_run_from_the_arrival_to_the_end_and_are_never_zero() -> None:
    answer = whole_of(generation_of([[delta(spoken("a"), generated=1), delta(ended(), generated=1)]]))
    names = ("total_duration", "prompt_eval_duration", "eval_duration")
    assert [answer[name] for name in names] == [1, 1, 1], "the clock stands still, and clients divide by these"
    assert answer["load_duration"] == 0


def test_the_wait_for_the_first_token_is_the_time_of_the_prompt() -> None:
    clock = ManualClock()
    generation = generation_of([[delta(spoken("a"), generated=1), delta(ended(), generated=1)]], clock=clock)
    clock.advance(2)

    async def last() -> Any:
        lines = []
        async with aclosing(OllamaReply(OllamaChatRequest(), generation).events()) as events:
            async for line in events:
                lines.append(line)
                clock.advance(3)
        return json.loads(lines[-1])

    answer = asyncio.run(last())
    names = ("total_duration", "prompt_eval_duration", "eval_duration")
    assert [answer[name] for name in names] == [5_000_000_000, 2_000_000_000, 3_000_000_000]


def test_what_goes_wrong_on_the_way_is_a_line() -> None:
    generation = generation_of([[delta(spoken("a")), delta(ended(reason="error", error="broken"))]])
    reply = OllamaReply(OllamaChatRequest(), generation)

    async def read() -> None:
        async with aclosing(reply.events()) as events:
            async for _ in events:
                pass

    with pytest.raises(ApiError):
        asyncio.run(read())
    assert reply.failed(overloaded(1)) == (
        b'{"error":"the server is overloaded: its queue is full; try again later"}\n'
    )
