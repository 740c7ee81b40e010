"""Answers as clients put them together: a stream, cut anywhere, adds up to the answer in one piece, field by field."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.sampling_params import SamplingParams
from quire.engine.text.detokenizer import IncrementalDetokenizer
from quire.serve.answer_form import AnswerForm
from quire.serve.errors import ApiError, overloaded
from quire.serve.render.answer import Answer, whole_answer
from quire.serve.render.chat import ChatAnswer
from quire.serve.render.completions import CompletionAnswer
from quire.serve.render.logprobs import completion_logprobs
from quire.serve.render.responses import ResponseReply
from quire.serve.run.generation import Generation
from quire.serve.schemas.chat import ChatRequest
from quire.serve.schemas.completions import CompletionRequest
from quire.serve.schemas.responses import ResponseRequest
from quire.serve.tools.base import Arguments, CallBegun, Reasoning, Thinking
from support.answer_scripts import ENDS, FORMS, PIECES, PROMPTS, TEXTS, TOKENIZER, entry, form, script_of
from support.scripted_model import Script, delta, ended, generation_of, model_of, spoken

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}


def as_sent(value: Any) -> Any:
    """Return an answer as a client reads it."""
    return json.loads(msgspec.json.encode(value))


def data_of(stream: bytes) -> Iterator[str]:
    """The data of the events of a stream, each of which is one line to every client."""
    for event in stream.decode().split("\n\n")[:-1]:
        *names, data = event.split("\n")
        assert len(data.splitlines()) == 1
        assert data.startswith("data: ")
        if names:
            assert names == [f"event: {json.loads(data[6:])['type']}"]
        yield data[6:]


def both_ways(render: Callable[[Generation], Answer], make: Callable[[], Generation]) -> tuple[Any, list[Any]]:
    """Return the answer in one piece, and the events of the stream of an equal call, less its end."""

    async def whole() -> Any:
        generation = make()
        results = await generation.collect()
        return as_sent(render(generation).whole(results))

    async def stream() -> list[Any]:
        generation = make()
        async with aclosing(render(generation).events()) as events:
            data = list(data_of(b"".join([each async for each in events])))
        assert model_of(generation).num_open == generation.services.gate.num_visits == 0
        if data[-1] == "[DONE]":
            data.pop()
        return [json.loads(each) for each in data]

    return asyncio.run(whole()), asyncio.run(stream())


def same_but_time(one: Any, other: Any) -> bool:
    return {**one, "created": 0, "created_at": 0} == {**other, "created": 0, "created_at": 0}


# ---- chat -----------------------------------------------------------------------------------------------------------


class ChatClient:
    """What a client makes of the chunks of a stream."""

    def __init__(self) -> None:
        self.choices: dict[int, dict[str, Any]] = {}
        self.usages: list[Any] = []

    def take(self, chunk: dict[str, Any]) -> None:
        self.usages.append(chunk.get("usage", "none"))
        for each in chunk["choices"]:
            self._take_choice(each)

    def _take_choice(self, told: dict[str, Any]) -> None:
        is_new = told["index"] not in self.choices
        choice = self.choices.setdefault(
            told["index"],
            {"index": told["index"], "message": {"role": "assistant", "content": None, "refusal": None}}
            | {"logprobs": None, "finish_reason": None, "stop_reason": None},
        )
        assert choice["finish_reason"] is None, "the text went on after its end"
        message, new = choice["message"], told["delta"]
        assert ("role" in new) == is_new
        for name in ("content", "reasoning_content"):
            if new.get(name) is not None:
                message[name] = (message.get(name) or "") + new[name]
        for call in new.get("tool_calls", []):
            self._take_call(message.setdefault("tool_calls", []), call)
        if told["logprobs"] is not None:
            choice["logprobs"] = choice["logprobs"] or {"content": [], "refusal": None}
            choice["logprobs"]["content"] += told["logprobs"]["content"]
        if "token_ids" in told:
            choice.setdefault("token_ids", []).extend(told["token_ids"])
        choice["finish_reason"] = told["finish_reason"]
        choice["stop_reason"] = told.get("stop_reason")

    @staticmethod
    def _take_call(calls: list[Any], new: dict[str, Any]) -> None:
        if "id" in new:
            assert new["index"] == len(calls)
            function = {"name": new["function"]["name"], "arguments": new["function"]["arguments"]}
            calls.append({"id": new["id"], "type": new["type"], "function": function})
        else:
            assert new["index"] == len(calls) - 1
            assert "name" not in new["function"]
            calls[-1]["function"]["arguments"] += new["function"]["arguments"]


@given(texts=TEXTS, held=FORMS, prompt=st.sampled_from(sorted(PROMPTS)), data=st.data())
def test_the_chunks_of_a_chat_add_up_to_its_answer(texts: Any, held: Any, prompt: str, data: st.DataObject) -> None:
    fields = ChatRequest(
        **CHAT,
        model=data.draw(st.sampled_from([None, "mine"])),
        logprobs=data.draw(st.booleans()),
        top_logprobs=data.draw(st.sampled_from([None, 0, 2])),
        return_token_ids=data.draw(st.booleans()),
        return_tokens_as_token_ids=data.draw(st.booleans()),
        request_id=data.draw(st.sampled_from([None, "chosen"])),
    )
    usage = data.draw(st.sampled_from([(False, False), (True, False), (True, True)]))
    sampling = SamplingParams(n=len(texts))
    ids = TOKENIZER.encode(PROMPTS[prompt])

    def make() -> Generation:
        return generation_of(
            [script_of(texts)], sampling, prompts=[ids], tokenizer=TOKENIZER, form=held, stream_usage=usage
        )

    whole, chunks = both_ways(lambda generation: ChatAnswer(fields, generation), make)
    client = ChatClient()
    for chunk in chunks:
        assert (chunk["id"], chunk["model"]) == (whole["id"], whole["model"])
        assert chunk["object"] == "chat.completion.chunk"
        client.take(chunk)
    assert chunks[0].get("prompt_token_ids") == whole.get("prompt_token_ids")
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])  # a prompt may be long
    if fields.return_token_ids:  # a text without tokens has no chunk that lists them
        for choice in client.choices.values():
            choice.setdefault("token_ids", [])
    if fields.logprobs:
        for choice in client.choices.values():
            choice["logprobs"] = choice["logprobs"] or {"content": [], "refusal": None}
        told = [each for choice in whole["choices"] for each in choice["logprobs"]["content"]]
        assert [len(each["top_logprobs"]) for each in told] == [fields.top_logprobs or 0] * len(told)
        assert [each["bytes"] for each in told] == [
            list(TOKENIZER.token_bytes(token_id)) for pieces, _ in texts for _, ids in pieces for token_id in ids
        ]
    if held is None:
        assert all(each["message"]["content"] is not None for each in client.choices.values())
    assert [client.choices[index] for index in sorted(client.choices)] == whole["choices"]
    assert whole["id"] == ("chatcmpl-chosen" if fields.request_id else "chatcmpl-7")
    require_usage(client.usages, whole["usage"], usage)


def require_usage(usages: list[Any], whole: dict[str, Any], asked: tuple[bool, bool]) -> None:
    """The usage of a stream is told as it was asked for, and its last value is that of the answer in one piece."""
    at_end, always = asked
    if not at_end:
        assert set(usages) <= {"none"}
        return
    assert usages[-1] == whole
    if always:
        assert all(before["completion_tokens"] <= after["completion_tokens"] for before, after in pairwise(usages))
    else:
        assert usages[:-1] == [None] * (len(usages) - 1)


def test_a_call_of_the_function_that_the_client_named_ends_by_stop() -> None:
    called = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    for mode, reason in (("auto", "tool_calls"), ("required", "tool_calls"), ("named", "stop")):
        for end, expected in (("stop", reason), ("length", "length")):
            whole, chunks = both_ways(
                lambda generation: ChatAnswer(ChatRequest(**CHAT), generation),
                lambda mode=mode, end=end: generation_of(
                    [[delta(ended(called, reason=end))]], tokenizer=TOKENIZER, form=form(mode)
                ),
            )
            assert whole["choices"][0]["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == expected


def test_the_ids_of_calls_differ_between_texts_and_places() -> None:
    called = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    script = [delta(ended(called * 2, index=0), ended(called, index=1))]
    whole, chunks = both_ways(
        lambda generation: ChatAnswer(ChatRequest(**CHAT), generation),
        lambda: generation_of([script], SamplingParams(n=2), tokenizer=TOKENIZER, form=form("auto")),
    )
    client = ChatClient()
    for chunk in chunks:
        client.take(chunk)
    assert [client.choices[index] for index in (0, 1)] == whole["choices"]
    ids = [call["id"] for choice in whole["choices"] for call in choice["message"]["tool_calls"]]
    assert len(ids) == len(set(ids)) == 3


def test_what_is_known_of_the_prompt_is_told_where_it_was_asked_for() -> None:
    known: Any = [None, entry(2), entry(3)]
    script = [delta(ended("x", [9], logprobs=[entry(9)]), generated=1, prompt_logprobs=known)]
    rows = {
        str(token_id): {"logprob": each.logprob, "rank": each.rank, "decoded_token": each.decoded_token}
        for token_id, each in entry(2).items()
        if each.rank < 3
    }
    for kind, make in ((ChatRequest, ChatAnswer), (CompletionRequest, CompletionAnswer)):
        required = CHAT if kind is ChatRequest else {"prompt": "a"}
        for asked in (None, 0, 2):
            generation = generation_of([script])
            answer: Any = make(kind(**required, prompt_logprobs=asked), generation)
            whole = as_sent(answer.whole(asyncio.run(generation.collect())))
            told = whole if kind is ChatRequest else whole["choices"][0]
            if asked is None:
                assert "prompt_logprobs" not in told
            else:
                assert [each and len(each) for each in told["prompt_logprobs"]] == [None, *[max(asked, 1)] * 2]
        assert told["prompt_logprobs"][1] == rows


# ---- completions ----------------------------------------------------------------------------------------------------

TOKENS = st.lists(st.integers(0, 255), max_size=8)
PROMPT = (72, 73, 74)


def detokenized(ids: Sequence[int], cuts: Sequence[int]) -> Script:
    """The deltas of tokens that are detokenized as the engine does it, a few at a time; each token has an entry."""
    stream, script, done = IncrementalDetokenizer(TOKENIZER, PROMPT), [], 0
    for place in sorted({*(cut % (len(ids) + 1) for cut in cuts), 0, len(ids)}):
        new, done = list(ids[done:place]), place
        text = stream.append(new) + (stream.finish() if place == len(ids) else "")
        script.append(delta(spoken(text, new, logprobs=[entry(each) for each in new]), generated=place))
    script.append(delta(ended(logprobs=[]), generated=len(ids)))
    first: Any = [None, *map(entry, PROMPT[1:])]
    script[0] = delta(*script[0].outputs, generated=script[0].num_generated_tokens, prompt_logprobs=first)
    return script


def together(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of the chunks of one text."""
    found = {**parts[0]}
    for part in parts[1:]:
        assert found["finish_reason"] is None
        assert "prompt_token_ids" not in part
        found["text"] += part["text"]
        if part["logprobs"] is not None:
            for name, values in part["logprobs"].items():
                found["logprobs"][name] = found["logprobs"][name] + values
        if "token_ids" in part:
            found["token_ids"] = found["token_ids"] + part["token_ids"]
        found |= {name: part[name] for name in ("finish_reason", "stop_reason")}
    return found


@given(
    texts=st.lists(st.tuples(TOKENS, st.lists(st.integers(0, 99), max_size=4)), min_size=1, max_size=3), data=st.data()
)
def test_the_chunks_of_a_completion_add_up_and_offsets_are_places_in_the_text(texts: Any, data: st.DataObject) -> None:
    fields = CompletionRequest(
        prompt="",
        echo=data.draw(st.booleans()),
        logprobs=data.draw(st.sampled_from([None, 0, 2])),
        return_token_ids=data.draw(st.booleans()),
    )
    usage = data.draw(st.sampled_from([(False, False), (True, False), (True, True)]))
    prompts = [PROMPT] * len(texts)

    def make() -> Generation:
        scripts = [detokenized(ids, cuts) for ids, cuts in texts]
        return generation_of(scripts, prompts=prompts, tokenizer=TOKENIZER, stream_usage=usage)

    whole, chunks = both_ways(lambda generation: CompletionAnswer(fields, generation), make)
    parts: dict[int, list[Any]] = {}
    for chunk in chunks:
        assert (chunk["id"], chunk["model"], chunk["object"]) == (whole["id"], whole["model"], "text_completion")
        for choice in chunk["choices"]:
            parts.setdefault(choice["index"], []).append(choice)
    assert [together(parts[index]) for index in range(len(texts))] == whole["choices"]
    require_usage([chunk.get("usage", "none") for chunk in chunks], whole["usage"], usage)
    for (ids, _), choice in zip(texts, whole["choices"], strict=True):
        shown = [*PROMPT, *ids] if fields.echo else ids
        if fields.return_token_ids:
            assert (choice["token_ids"], choice["prompt_token_ids"]) == (ids, list(PROMPT))
        if fields.logprobs is not None:
            require_places(choice, shown)
            tops = choice["logprobs"]["top_logprobs"]
            assert all(top is None or len(top) in (fields.logprobs, fields.logprobs + 1) or not top for top in tops)
            assert [top is None for top in tops] == [fields.echo and not place for place in range(len(shown))]


def test_log_probabilities_of_a_long_prompt_are_written_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def noted(*args: Any) -> Any:
        threads.append(threading.current_thread())
        return completion_logprobs(*args)

    monkeypatch.setattr("quire.serve.render.completions.completion_logprobs", noted)
    for length, streams in itertools.product((20, 2000), (False, True)):
        ids = [7] * length
        known = [None, *map(entry, ids[1:])]
        script = [delta(ended("!", [0], logprobs=[entry(0)]), generated=1, prompt=length, prompt_logprobs=known)]
        fields = CompletionRequest(prompt="", echo=True, logprobs=1, stream=streams)

        async def answer(script: Script = script, ids: list[int] = ids, fields: CompletionRequest = fields) -> None:
            sampling = SamplingParams(logprobs=1, prompt_logprobs=1)
            generation = generation_of([script], sampling, prompts=[ids])
            reply = CompletionAnswer(fields, generation)
            if fields.stream:
                [sent, _] = [each async for each in reply.events()]
            else:
                sent = (await whole_answer(reply, await generation.collect(), generation)).body
            assert sent.count(b"token_id:7") > len(ids)
            model_of(generation).text_pool.close()

        asyncio.run(answer())
        is_beside = threads.pop() is not threading.main_thread()
        assert is_beside == (length == 2000), (length, streams)


def test_texts_of_several_prompts_are_numbered_one_after_another() -> None:
    scripts = [[delta(*(ended(f"{prompt}{index}", index=index) for index in (1, 0)))] for prompt in "ab"]
    whole, chunks = both_ways(
        lambda generation: CompletionAnswer(CompletionRequest(prompt=["", ""]), generation),
        lambda: generation_of(scripts, SamplingParams(n=2)),
    )
    told = {choice["index"]: choice["text"] for chunk in chunks for choice in chunk["choices"]}
    assert told == {choice["index"]: choice["text"] for choice in whole["choices"]}
    assert told == {0: "a0", 1: "a1", 2: "b0", 3: "b1"}


def test_an_echo_shows_special_tokens_that_were_sent_and_gives_no_room_to_those_that_were_not() -> None:
    start = TOKENIZER.id_of("<|im_start|>")
    assert start is not None
    ids = [start, *TOKENIZER.encode("Hi")]
    script = [delta(ended("!", [0], logprobs=[entry(0)]), generated=1, prompt_logprobs=[None, *map(entry, ids[1:])])]
    fields = CompletionRequest(prompt="", echo=True, logprobs=0)
    for text, shown, offsets in (
        (None, "<|im_start|>Hi!", [0, 12, 13, 14]),  # sent as token ids
        ("<|im_start|>Hi", "<|im_start|>Hi!", [0, 12, 13, 14]),
        ("Hi", "Hi!", [0, 0, 1, 2]),  # the tokenizer has put it in front
    ):
        generation = generation_of([script], prompts=[ids], tokenizer=TOKENIZER)
        generation.prompt_texts = [text]
        answer = CompletionAnswer(fields, generation)
        [choice] = answer.whole(asyncio.run(generation.collect())).choices
        assert choice.logprobs is not None
        assert (choice.text, choice.logprobs.text_offset) == (shown, offsets)


def require_places(choice: dict[str, Any], token_ids: Sequence[int]) -> None:
    """Each token begins in the text where the text of all tokens before it ends."""
    offsets = choice["logprobs"]["text_offset"]
    assert len(offsets) == len(token_ids)
    assert offsets == sorted(offsets)
    assert not offsets or offsets[0] == 0
    for place, offset in enumerate(offsets):
        before = TOKENIZER.decode(token_ids[:place], skip_special_tokens=False)
        # What is cut within a character is a replacement for now: the text ends before it.
        assert before.rstrip("\ufffd").startswith(choice["text"][:offset].rstrip("\ufffd"))


# ---- responses ------------------------------------------------------------------------------------------------------

GROWING = {
    "response.output_text.delta": ("response.output_text.done", "text"),
    "response.reasoning_text.delta": ("response.reasoning_text.done", "text"),
    "response.function_call_arguments.delta": ("response.function_call_arguments.done", "arguments"),
}


class ResponseClient:
    """A client that holds a stream to the order of its events: what is opened grows, and is closed before the next."""

    def __init__(self, events: Sequence[dict[str, Any]]) -> None:
        self.items: list[Any] = []
        self._open: dict[str, Any] | None = None
        self._grown = ""
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
        for event in events[:2]:
            assert (event["response"]["status"], event["response"]["output"]) == ("in_progress", [])
            assert event["response"]["usage"] is None
        for event in events[2:-1]:
            self._take(event)
        assert self._open is None
        self.last = events[-1]

    def _take(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        assert event["output_index"] == len(self.items)
        if kind == "response.output_item.added":
            assert self._open is None
            self._open, self._grown = event["item"], ""
            assert event["item"]["status"] == "in_progress"
            return
        assert self._open is not None
        assert event.get("item_id", self._open["id"]) == self._open["id"]
        if kind in GROWING:
            self._grown += event["delta"]
        elif kind == "response.output_item.done":
            assert event["item"]["id"] == self._open["id"]
            self.items.append(event["item"])
            self._open = None
        elif kind == "response.content_part.done":
            assert event["part"]["text"] == self._grown
        elif kind != "response.content_part.added":
            name = next(name for done, name in GROWING.values() if done == kind)
            assert event[name] == self._grown


@given(
    text=st.tuples(PIECES, ENDS), held=FORMS, prompt=st.sampled_from(sorted(PROMPTS)), tops=st.sampled_from([None, 2])
)
def test_the_events_of_a_response_are_in_order_and_add_up_to_it(text: Any, held: Any, prompt: str, tops: Any) -> None:
    fields = ResponseRequest(input="a", top_logprobs=tops, instructions="be brief", metadata={"a": "b"})

    def make() -> Generation:
        ids = TOKENIZER.encode(PROMPTS[prompt])
        return generation_of([script_of([text])], prompts=[ids], tokenizer=TOKENIZER, form=held)

    whole, events = both_ways(lambda generation: ResponseReply(fields, generation), make)
    client = ResponseClient(events)
    status = "incomplete" if text[1][0] == "length" else "completed"
    assert client.last["type"] == f"response.{status}"
    assert same_but_time(client.last["response"], whole)
    assert client.items == whole["output"]
    assert [item["status"] for item in client.items] == ["completed"] * (len(client.items) - 1) + [status]
    assert len({item["id"] for item in client.items}) == len(client.items) > 0
    assert (whole["incomplete_details"] is not None) == (status == "incomplete")
    assert whole["usage"]["total_tokens"] == whole["usage"]["input_tokens"] + whole["usage"]["output_tokens"]
    if held is not None:
        require_items(client.items, held, held.thinking(TOKENIZER.encode(PROMPTS[prompt])), text)
    if held is None:
        [item] = client.items
        assert item["content"][0]["text"] == "".join(piece for piece, _ in text[0])
        assert len(item["content"][0]["logprobs"]) == sum(len(ids) for _, ids in text[0])


def require_items(items: Sequence[dict[str, Any]], held: AnswerForm, thinking: Thinking, text: Any) -> None:
    """The items are what a reader of the whole text finds in it: reasoning, messages and calls, in their order."""
    expected: list[tuple[str, str]] = []
    for event in held.reader(thinking).read("".join(piece for piece, _ in text[0]), is_last=True):
        if isinstance(event, CallBegun):
            expected.append((f"call {event.name}", ""))
        elif isinstance(event, Arguments):
            expected[-1] = (expected[-1][0], event.text)
        else:
            expected.append(("reasoning" if isinstance(event, Reasoning) else "message", event.text))
    found = []
    for item in items:
        if item["type"] == "function_call":
            found.append((f"call {item['name']}", item["arguments"]))
        else:
            found.append((item["type"], item["content"][0]["text"]))
    assert found == (expected or [("message", "")])
    ids = [item["call_id"] for item in items if item["type"] == "function_call"]
    assert len(set(ids)) == len(ids)


def test_a_response_tells_what_was_asked_of_it() -> None:
    tools = [{"type": "function", "name": "add", "parameters": {}}]

    def told(**fields: Any) -> Any:
        generation = generation_of([[delta(ended("x", [1], reason="length"), generated=1)]])
        reply = ResponseReply(ResponseRequest(input="a", **fields), generation)
        return as_sent(reply.whole(asyncio.run(generation.collect())))

    plain, full = told(), told(metadata={"a": "b"}, tools=tools, parallel_tool_calls=False, max_output_tokens=1)
    assert (plain["metadata"], plain["tools"], plain["tool_choice"], plain["parallel_tool_calls"]) == (
        {},
        [],
        "none",
        True,
    )
    assert (full["metadata"], full["tools"], full["tool_choice"], full["parallel_tool_calls"]) == (
        {"a": "b"},
        tools,
        "auto",
        False,
    )
    assert told(tools=tools, tool_choice="required")["tool_choice"] == "required"
    assert (plain["max_output_tokens"], full["max_output_tokens"]) == (None, 1)
    assert full["incomplete_details"] == {"reason": "max_output_tokens"}
    assert plain["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 1,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 4,
    }


# ---- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [overloaded(1.5), ApiError(500, "a \u2028 b", code="aborted", param="n")])
def test_a_stream_that_fails_ends_with_the_error_that_its_answer_would_have_been(error: ApiError) -> None:
    generation = generation_of([[delta(ended())]])
    told = json.loads(error.body())["error"]
    for answer in (
        ChatAnswer(ChatRequest(**CHAT), generation),
        CompletionAnswer(CompletionRequest(prompt="a"), generation),
    ):
        [data] = data_of(answer.failed(error))
        assert json.loads(data) == {"error": told}
    [data] = data_of(ResponseReply(ResponseRequest(input="a"), generation).failed(error))
    assert json.loads(data) == {
        "type": "error",
        "sequence_number": 0,
        "error": told,
        **{name: told[name] for name in ("code", "message", "param")},
    }
