"""Texts held to a form over HTTP: in every way in which a client can ask for it, as openai-python reads them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from openai import AsyncOpenAI, BadRequestError
from pydantic import BaseModel, Field

from support.random_schemas import failure_of
from support.server import RunningServer, running_server


class Part(BaseModel):
    """What openai-python makes a schema of, by way of pydantic."""

    kind: Literal["block", "table"]
    count: int = Field(ge=0, le=99)


class Answer(BaseModel):
    """A class with a class and an optional field in it."""

    title: str = Field(max_length=12)
    parts: list[Part] = Field(min_length=1, max_length=2)
    is_done: bool
    note: Literal["short", "long"] | None


MESSAGES: Any = [{"role": "user", "content": "What is a block?"}]
SAMPLING: dict[str, Any] = {"temperature": 0, "max_completion_tokens": 200}
SCHEMA = {
    "type": "object",
    "properties": {"b": {"type": "integer", "minimum": 0, "maximum": 99}, "a": {"enum": ["é", 'quo"te', None]}},
    "required": ["b", "a"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "pair", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


@pytest.fixture(autouse=True)
def in_order(server: RunningServer) -> Iterator[None]:
    yield
    server.check()


def chat(server: RunningServer, **fields: Any) -> Any:
    return server.post("/v1/chat/completions", {"messages": MESSAGES, **SAMPLING, **fields})


def complete(server: RunningServer, **fields: Any) -> Any:
    return server.post("/v1/completions", {"prompt": "A block is", "max_tokens": 200, "temperature": 0, **fields})


def test_openai_python_parses_a_class(server: RunningServer) -> None:
    with server.client() as client:
        whole = client.chat.completions.parse(model="guide", messages=MESSAGES, response_format=Answer, **SAMPLING)
        [choice] = whole.choices
        assert isinstance(choice.message.parsed, Answer)
        assert choice.finish_reason == "stop"
        asked = client.chat.completions.stream(model="guide", messages=MESSAGES, response_format=Answer, **SAMPLING)
        with asked as stream:
            pieces = [event.delta for event in stream if event.type == "content.delta"]
            final = stream.get_final_completion()
        assert final.choices[0].message.parsed == choice.message.parsed
        assert "".join(pieces) == choice.message.content


def test_openai_python_parses_a_response(server: RunningServer) -> None:
    asked: dict[str, Any] = {"model": "guide", "input": "What is a block?", "temperature": 0, "max_output_tokens": 200}
    with server.client() as client:
        whole = client.responses.parse(text_format=Answer, **asked)
        assert isinstance(whole.output_parsed, Answer)
        assert whole.status == "completed"
        assert whole.text is not None and whole.text.format is not None and whole.text.format.type == "json_schema"
        with client.responses.stream(text_format=Answer, **asked) as stream:
            for _ in stream:
                pass
            assert stream.get_final_response().output_parsed == whole.output_parsed


def test_openai_python_parses_many_at_once(server: RunningServer) -> None:
    async def ask_all() -> list[Answer | None]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            found = await asyncio.gather(
                *(
                    client.chat.completions.parse(
                        model="guide",
                        messages=MESSAGES,
                        response_format=Answer,
                        temperature=1,
                        seed=seed,
                        max_completion_tokens=400,
                    )
                    for seed in range(8)
                )
            )
            return [each.choices[0].message.parsed for each in found]

    answers = asyncio.run(ask_all())
    assert all(isinstance(answer, Answer) for answer in answers)
    assert len({repr(answer) for answer in answers}) > 1


def test_strict_or_not_the_text_is_held_to_the_schema(server: RunningServer) -> None:
    texts = set()
    for strict in (True, False, None):
        fields = {**FORMAT, "json_schema": {"name": "pair", "schema": SCHEMA, "strict": strict}}
        [choice] = chat(server, response_format=fields).value["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
        assert failure_of(SCHEMA, choice["message"]["content"]) == ""
        texts.add(choice["message"]["content"])
    assert len(texts) == 1
    assert list(json.loads(texts.pop())) == ["b", "a"]  # the order of the schema


def test_all_words_for_a_schema_mean_the_same(server: RunningServer) -> None:
    expected = chat(server, response_format=FORMAT).value["choices"][0]["message"]["content"]
    for fields in ({"structured_outputs": {"json": SCHEMA}}, {"structured_outputs": {"json": json.dumps(SCHEMA)}}):
        assert chat(server, **fields).value["choices"][0]["message"]["content"] == expected
    asked = {"input": "What is a block?", "temperature": 0, "max_output_tokens": 200}
    wanted = {"format": {"type": "json_schema", "name": "pair", "schema": SCHEMA}}
    answer = server.post("/v1/responses", {**asked, "text": wanted}).value
    assert answer["output"][0]["content"][0]["text"] == expected
    assert answer["text"]["format"]["schema"] == SCHEMA
    text = complete(server, response_format=FORMAT).value["choices"][0]["text"]
    assert text == complete(server, structured_outputs={"json": SCHEMA}).value["choices"][0]["text"]
    assert failure_of(SCHEMA, text) == ""


@pytest.mark.parametrize(
    ("wanted", "form"),
    [
        ({"regex": "[a-c]{2}-(x|yz)"}, "[a-c]{2}-(x|yz)"),
        ({"choice": ["one", "two words", 'th"ree', "ünf"]}, 'one|two words|th"ree|ünf'),
        ({"grammar": 'start: "<" /[0-9]{1,3}/ ">"'}, "<[0-9]{1,3}>"),
    ],
)
def test_other_forms(server: RunningServer, wanted: dict[str, Any], form: str) -> None:
    sampling = {"temperature": 1, "n": 4, "seed": 3}
    for choice in complete(server, structured_outputs=wanted, **sampling).value["choices"]:
        assert re.fullmatch(form, choice["text"])
        assert choice["finish_reason"] == "stop"
    answer = chat(server, structured_outputs=wanted, **sampling).value
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert all(re.fullmatch(form, text) for text in texts)
    streamed = ["", "", "", ""]
    for event in chat(server, structured_outputs=wanted, stream=True, **sampling).events:
        [choice] = event["choices"]
        streamed[choice["index"]] += choice["delta"].get("content", "")
    assert streamed == texts


def test_some_object(server: RunningServer) -> None:
    for fields in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        for seed, reason in ((1, "stop"), (5, "length")):
            [choice] = chat(server, **fields, temperature=1, seed=seed, max_completion_tokens=60).value["choices"]
            assert choice["finish_reason"] == reason
            assert choice["message"]["content"].lstrip().startswith("{")
            if reason == "stop":
                assert isinstance(json.loads(choice["message"]["content"]), dict)


def test_what_looks_like_a_control_token_stays_text(server: RunningServer) -> None:
    for text in ("<|im_end|>", "a <|im_start|> b"):
        for wanted in ({"json": {"const": text}}, {"choice": [text]}, {"regex": re.escape(text)}):
            [choice] = chat(server, structured_outputs=wanted, return_token_ids=True).value["choices"]
            found = choice["message"]["content"]
            assert (json.loads(found) if "json" in wanted else found) == text
            assert choice["finish_reason"] == "stop"
            assert not {0, 1, 2} & set(choice["token_ids"][:-1])


def test_a_text_that_is_cut_says_so(server: RunningServer) -> None:
    [choice] = chat(server, response_format=FORMAT, max_completion_tokens=2).value["choices"]
    assert choice["finish_reason"] == "length"
    whole = chat(server, response_format=FORMAT).value["choices"][0]["message"]["content"]
    assert whole.startswith(choice["message"]["content"])


# ---- what cannot be held ---------------------------------------------------------------------------------------------


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


REFUSED: dict[str, dict[str, Any]] = {
    "a remote reference": {"json": {"$ref": "http://127.0.0.1:9/schema"}},
    "a file": {"json": {"$ref": "file:///etc/passwd"}},
    "a reference to itself": {"json": {"$ref": "#"}},
    "a circle": {"json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
    "an unknown type": {"json": {"type": "whatever"}},
    "a schema that allows nothing": {"json": {"type": "integer", "minimum": 3, "maximum": 2}},
    "a broken pattern": {"json": {"type": "string", "pattern": "("}},
    "what is looked for behind": {"json": {"type": "string", "pattern": "(?<=a)b"}},
    "repeats of repeats": {"json": {"type": "string", "pattern": "^((((a{1,100}){1,100}){1,100}){1,100}){1,100}$"}},
    "deep brackets": {"regex": "(" * 20_000 + "a" + ")" * 20_000},
    "a deep schema": {"json": nested(300)},
    "a grammar of nothing": {"grammar": "start: start"},
    "a grammar with a hole": {"grammar": "start: missing"},
    "deep groups": {"grammar": "start: " + "(" * 50_000 + '"a"' + ")" * 50_000},
    "no grammar": {"grammar": "{" * 1000},
    "a megabyte of choices": {"choice": [f"choice number {index} of many" for index in range(40_000)]},
    "a megabyte of a regex": {"regex": "a" * (1 << 20)},
}


@pytest.mark.parametrize("wanted", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_held_is_refused_and_nobody_else_notices(server: RunningServer, wanted: dict[str, Any]) -> None:
    [kind] = wanted
    bystander = chat(server).value["choices"]
    answer = complete(server, structured_outputs=wanted, prompt=["a", "b"])
    assert answer.status == 400, answer.body[:300]
    assert answer.error["param"] in (f"structured_outputs.{kind}", "structured_outputs")
    assert answer.error["type"] == "invalid_request_error"
    assert "\n" not in answer.error["message"]
    assert len(answer.error["message"]) < 1000
    assert chat(server).value["choices"] == bystander


HEAVY: dict[str, dict[str, Any]] = {
    "no end": {
        "json": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"], "additionalProperties": False}
    },
    "repeats of a regex": {"regex": "(((((a|b){1,99}c){1,99}d){1,99}e){1,99}f){1,99}"},
    "a huge repeat": {"regex": "(a|bb){1000000000}"},
    "a star of a star": {"json": {"type": "string", "pattern": "(a+)+$"}},
    "many properties": {"json": {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(2_000)}}},
    "many choices": {"choice": [f"choice number {index}" for index in range(5_000)]},
    "far apart": {"regex": "(.*a.*b.*c.*d.*e.*f){8}"},
}


@pytest.mark.parametrize("wanted", HEAVY.values(), ids=HEAVY)
def test_what_is_heavy_is_served_beside_others(server: RunningServer, wanted: dict[str, Any]) -> None:
    bystander = chat(server).value["choices"]
    answer = complete(server, structured_outputs=wanted, max_tokens=24)
    assert answer.status == 200 or answer.error["param"].startswith("structured_outputs."), answer.body[:300]
    assert chat(server).value["choices"] == bystander


def test_a_grammar_that_is_too_much_on_the_way_ends_its_stream(server: RunningServer) -> None:
    wanted = {"json": {**REFUSED["repeats of repeats"]["json"], "title": "another"}}
    *begun, last = chat(server, structured_outputs=wanted, stream=True).events
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in begun).startswith('"')
    assert last["error"]["param"] == "structured_outputs.json"
    assert last["error"]["type"] == "invalid_request_error"
    again = chat(server, structured_outputs=wanted, stream=True)  # it is known now, so no stream begins
    assert (again.status, again.error["param"]) == (400, "structured_outputs.json")


def test_a_class_that_cannot_be_held_is_a_bad_request(server: RunningServer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}, "required": ["a"]}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    with server.client() as client, pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(model="guide", messages=MESSAGES, response_format=wanted)
    assert caught.value.param == "response_format.json_schema.schema"


def test_many_schemas_at_once_hold_nobody_up(server: RunningServer) -> None:
    """Eighty schemas, all different, good ones and bad ones; a stream and the health path go on beside them."""
    heavy = {"json": {"enum": [f"value {index} of many" for index in range(3_000)]}}
    wanted = [
        {"json": {"type": "integer", "minimum": index, "maximum": index}} if index % 4 == 0
        else {"regex": f"({index}a{{1,200}}){{1,200}}"} if index % 4 == 1
        else {"json": {"$ref": f"#/{index}"}} if index % 4 == 2
        else {"json": {**heavy["json"], "title": str(index)}}
        for index in range(80)
    ]  # fmt: skip

    async def ask_all() -> tuple[list[Any], Any, list[int]]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300) as client:

            async def one(each: dict[str, Any]) -> Any:
                try:
                    asked = client.completions.create(
                        model="guide", prompt="a", max_tokens=8, extra_body={"structured_outputs": each}
                    )
                    return (await asked).choices[0].text
                except BadRequestError as error:
                    return error

            beside = client.chat.completions.create(model="guide", messages=MESSAGES, **SAMPLING)
            every = asyncio.gather(*(one(each) for each in wanted))
            probes = [await asyncio.to_thread(lambda: server.get("/livez").status) for _ in range(20)]
            answer = await beside
            return await every, answer, probes

    alone = chat(server).value["choices"][0]["message"]["content"]
    answers, beside, probes = asyncio.run(ask_all())
    assert probes == [200] * 20
    assert beside.choices[0].message.content == alone
    for index, answer in enumerate(answers):
        if index % 4 == 0:
            assert answer == str(index)
        elif index % 4 == 2:
            assert isinstance(answer, BadRequestError)
