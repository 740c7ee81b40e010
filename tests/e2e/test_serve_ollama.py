"""Ollama's interface over HTTP: the texts of /v1 in other words, models from Ollama's store, and what is refused."""

from __future__ import annotations

import json
import random
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from quire.serve.schemas.ollama import REFUSED_OPTIONS
from support.model_stores import VARIABLES, add_to_ollama
from support.server import JSON, RunningServer, running_server
from support.server_thread import Answer
from support.smollm2 import smollm2_path
from support.tool_models import THINKS, WEATHER, write_tool_model

MESSAGES: Any = [{"role": "user", "content": "What is a block table?"}]
GREEDY: Any = {"temperature": 0, "num_predict": 24}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "description": "It rains.", "parameters": WEATHER}}]
FIGURES = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration", "created_at")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(tool_format="hermes") as running:
        yield running


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A model of random weights, whose template begins the reasoning, or ends it."""
    folder = write_tool_model(tmp_path_factory.mktemp("models") / "thinker", THINKS)
    with running_server(folder, served_model_name=("thinker:1b",)) as running:
        yield running


@pytest.fixture(autouse=True)
def in_order(server: RunningServer) -> Iterator[None]:
    yield
    server.check()


def chat(server: RunningServer, **fields: Any) -> Any:
    """An answer in one piece; the lines of its stream add up to it."""
    fields = {"messages": MESSAGES, "options": GREEDY, **fields}
    whole = server.post("/api/chat", {**fields, "stream": False})
    assert whole.status == 200, whole.body
    stream = server.post("/api/chat", fields)
    assert stream.headers["content-type"] == "application/x-ndjson"
    assert added_up(stream.lines) == timeless(whole.value)
    found: Any = whole.value
    return found


def timeless(answer: Any) -> Any:
    """An answer without its times, which are never alike, but are all there."""
    for name in FIGURES[:-1]:
        assert isinstance(answer[name], int) and answer[name] >= (name != "load_duration")
    assert answer["total_duration"] >= max(answer["prompt_eval_duration"], answer["eval_duration"]) - 2
    return {name: value for name, value in answer.items() if name not in FIGURES}


def added_up(lines: list[Any]) -> Any:
    """The answer in one piece that the lines of a stream are."""
    *parts, last = lines
    assert all(part["done"] is False and "done_reason" not in part for part in parts)
    assert last["message"] == {"role": "assistant", "content": ""}
    found: Any = {"role": "assistant", "content": "".join(part["message"]["content"] for part in parts)}
    if thinking := "".join(part["message"].get("thinking", "") for part in parts):
        found["thinking"] = thinking
    if calls := [call for part in parts for call in part["message"].get("tool_calls", [])]:
        found["tool_calls"] = [call | {"id": ""} for call in calls]
    total = timeless(last) | {"message": found}
    if logprobs := [each for part in parts for each in part.get("logprobs", [])]:
        total["logprobs"] = logprobs
    return total


# ---- the texts of /v1 -----------------------------------------------------------------------------------------------


def openai_text(server: RunningServer, **fields: Any) -> tuple[str, str, int, int]:
    answer = server.post("/v1/chat/completions", {"messages": MESSAGES, **fields}).value
    [choice], usage = answer["choices"], answer["usage"]
    return choice["message"]["content"], choice["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"]


def ollama_text(answer: Any) -> tuple[str, str, int, int]:
    return answer["message"]["content"], answer["done_reason"], answer["prompt_eval_count"], answer["eval_count"]


NAMES = {"repetition_penalty": "repeat_penalty", "max_tokens": "num_predict"}


def test_a_last_message_of_the_assistant_is_continued(server: RunningServer) -> None:
    whole = server.post("/api/chat", {"messages": MESSAGES, "stream": False, "options": GREEDY}).value
    text = whole["message"]["content"]
    begun = " ".join(text.split(" ")[:3])
    messages = [*MESSAGES, {"role": "assistant", "content": begun}]
    rest = server.post("/api/chat", {"messages": messages, "stream": False, "options": GREEDY}).value
    assert (begun + rest["message"]["content"]).startswith(text)


def test_options_mean_what_sampling_parameters_mean(server: RunningServer) -> None:
    chance = random.Random(7)
    texts = set()
    for _ in range(24):
        wanted: dict[str, Any] = {"seed": chance.randrange(1 << 31), "temperature": chance.choice([0, 0.7, 1.5])}
        wanted["max_tokens"] = chance.randrange(1, 32)
        for name, values in (
            ("top_k", [0, 5, 40]),
            ("top_p", [0.5, 0.9, 1.0]),
            ("min_p", [0.0, 0.05, 0.3]),
            ("repetition_penalty", [0.9, 1.3]),
            ("presence_penalty", [-1.0, 1.5]),
            ("frequency_penalty", [-0.5, 1.0]),
            ("stop", [["block"], ["a", "e"], " the"]),
        ):
            if chance.random() < 0.5:
                wanted[name] = chance.choice(values)
        options = {NAMES.get(name, name): value for name, value in wanted.items()}
        options["repeat_last_n"], window = chance.choice([(None, 64), (-1, 0), (9, 9)])
        found = ollama_text(chat(server, options=options))
        assert found == openai_text(server, **wanted, penalty_window=window), wanted
        texts.add(found[0])
    assert len(texts) > 12


def test_options_may_be_outside_of_options(server: RunningServer) -> None:
    messages = [{"role": "user", "content": "What is a block?"}]
    outside = {"temperature": 0.7, "top_p": 0.9, "max_output_tokens": 5}
    inside = {"temperature": 0.7, "top_p": 0.9, "num_predict": 5}
    texts = []
    for fields in (
        {"options": {"seed": 3}, **outside},
        {"options": {"seed": 3, **inside}},
        {"options": {"seed": 3, **inside}, "temperature": 0, "max_output_tokens": 9},  # options come first
    ):
        answer = json.loads(server.post("/api/chat", {"messages": messages, "stream": False, **fields}).body)
        texts.append((answer["message"]["content"], answer["eval_count"]))
    assert texts[0] == texts[1] == texts[2]
    assert texts[0][1] == 5
    refused = server.post("/api/chat", {"messages": messages, "top_p": 2})
    assert (refused.status, json.loads(refused.body)["error"]) == (
        400,
        "options.top_p is 2.0; allowed: a number above 0, at most 1",
    )


def test_a_prompt_is_a_conversation_or_raw(server: RunningServer) -> None:
    for fields, messages in (
        ({}, MESSAGES),
        ({"system": "Be brief."}, [{"role": "system", "content": "Be brief."}, *MESSAGES]),
    ):
        asked = {"prompt": MESSAGES[0]["content"], "options": GREEDY, **fields}
        whole = server.post("/api/generate", {**asked, "stream": False}).value
        text, *_ = openai_text(server, messages=messages, temperature=0, max_tokens=24)
        assert whole["response"] == text
        lines = server.post("/api/generate", asked).lines
        assert "".join(line["response"] for line in lines) == text
        assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
        assert timeless(lines[-1]) | {"response": text} == timeless(whole)
    raw = {"prompt": "A block is", "raw": True, "stream": False, "options": GREEDY}
    completion = server.post("/v1/completions", {"prompt": "A block is", "temperature": 0, "max_tokens": 24}).value
    assert server.post("/api/generate", raw).value["response"] == completion["choices"][0]["text"]


def test_log_probabilities_are_those_of_chat(server: RunningServer) -> None:
    answer = chat(server, logprobs=True, top_logprobs=2, options={"temperature": 0, "num_predict": 5})
    same = {"logprobs": True, "top_logprobs": 2, "temperature": 0, "max_tokens": 5}
    [choice] = server.post("/v1/chat/completions", {"messages": MESSAGES, **same}).value["choices"]
    assert answer["logprobs"] == choice["logprobs"]["content"]
    assert len(answer["logprobs"]) == answer["eval_count"] == 5


def test_a_format_holds_the_text(thinker: RunningServer) -> None:
    for seed in range(3):
        options = {"seed": seed, "temperature": 1}
        held = json.loads(chat(thinker, format=WEATHER, think=False, options=options)["message"]["content"])
        assert held.keys() == {"city", "days"} and held["city"] in ("Paris", "Rome") and 1 <= held["days"] <= 7
    fields = {"prompt": "a", "format": "json", "think": False, "options": {"num_predict": 1, "temperature": 0}}
    assert thinker.post("/api/generate", {**fields, "stream": False}).value["response"].startswith("{")


def test_reasoning_is_told_apart_and_can_be_turned_off(thinker: RunningServer) -> None:
    for think in (None, True):
        message = chat(thinker, think=think, options={"seed": 5, "num_predict": 8})["message"]
        assert message["content"] == "" and message["thinking"]
    message = chat(thinker, think=False, options={"seed": 5, "num_predict": 8})["message"]
    assert message["content"] and "thinking" not in message
    generated = {"prompt": "a", "stream": False, "options": {"seed": 5, "num_predict": 8}}
    assert thinker.post("/api/generate", generated).value["thinking"]


def test_reasoning_that_has_no_switch_stays_on(tmp_path: Path) -> None:
    always = THINKS.partition("{% if enable_thinking")[0] + "<think>\n{% endif %}{# </think> #}"
    with running_server(write_tool_model(tmp_path, always)) as server:
        answer = server.post("/api/chat", {"messages": MESSAGES, "think": False})
        assert answer.error == "think is not supported: the chat template of this model cannot turn reasoning off"
        assert chat(server, think=True, options={"seed": 5, "num_predict": 8})["message"]["thinking"]
        assert server.post("/api/chat", {"messages": MESSAGES, "think": "high"}).error.startswith("think is not supp")


def test_reasoning_of_which_only_the_amount_can_be_chosen_takes_true_and_false(tmp_path: Path) -> None:
    efforts = THINKS.partition("{% if enable_thinking")[0] + "{{ reasoning_effort }}<think>\n{% endif %}{# </think> #}"
    with running_server(write_tool_model(tmp_path, efforts)) as server:
        for think in (False, True, "low"):
            assert chat(server, think=think, options={"seed": 5, "num_predict": 8})["message"]["thinking"]


def test_calls_have_an_object_of_arguments_and_are_answered(thinker: RunningServer) -> None:
    fields: Any = {"tools": TOOLS, "format": WEATHER, "think": False}
    for seed in range(40):
        fields["options"] = {"seed": seed, "temperature": 1, "num_predict": 400}
        whole = thinker.post("/api/chat", {"messages": MESSAGES, "stream": False, **fields}).value
        if (calls := whole["message"].get("tool_calls")) and whole["done_reason"] == "stop":
            break
    for index, call in enumerate(calls):
        assert call["function"].keys() == {"index", "name", "arguments"}
        assert (call["function"]["index"], call["function"]["name"]) == (index, "weather")
        assert call["function"]["arguments"].keys() == {"city", "days"}
    assert len({call["id"] for call in calls}) == len(calls)
    whole["message"]["tool_calls"] = [call | {"id": ""} for call in calls]
    assert added_up(thinker.post("/api/chat", {"messages": MESSAGES, **fields}).lines) == timeless(whole)
    plain = {"role": "assistant", "content": "", "tool_calls": [{"function": calls[0]["function"]}]}
    told = [*MESSAGES, plain, {"role": "tool", "tool_name": "weather", "content": "19 degrees"}]
    assert chat(thinker, messages=told, think=False, options={"num_predict": 2, "seed": 1})["eval_count"] == 2


# ---- names, and what there is ---------------------------------------------------------------------------------------


def test_without_a_text_the_model_is_loaded(server: RunningServer) -> None:
    for fields in ({"messages": []}, {}, {"keep_alive": 0}, {"keep_alive": "5m"}, {"messages": None}):
        [line] = server.post("/api/chat", {"model": "guide", **fields}).lines
        assert (line["done"], line["done_reason"], line["eval_count"]) == (True, "load", 0)
    whole = server.post("/api/generate", {"model": "guide", "prompt": "", "stream": False, "keep_alive": -1})
    assert (whole.value["response"], whole.value["done_reason"]) == ("", "load")


@pytest.mark.parametrize(
    ("name", "is_known"),
    [
        ("thinker:1b", True),
        ("thinker", False),
        ("thinker:latest", False),
        ("guide", False),
        ("thinker:1b:latest", True),
    ],
)
def test_a_name_has_a_tag(thinker: RunningServer, name: str, is_known: bool) -> None:
    for path in ("/api/chat", "/api/generate", "/api/show"):
        answer = thinker.post(path, {"model": name})
        assert answer.status == (200 if is_known else 404)
        if not is_known:
            assert answer.error.startswith(f"model '{name}' not found")


@pytest.mark.parametrize("fields", [{"model": ""}, {"name": ""}, {"model": "", "name": ""}])
def test_an_empty_name_is_the_name_of_no_model(server: RunningServer, fields: dict[str, str]) -> None:
    answer = server.post("/api/show", fields)
    assert (answer.status, answer.error.startswith("model '' not found")) == (404, True)


def test_no_tag_is_the_latest(server: RunningServer) -> None:
    for name in ("guide", "guide:latest"):
        answer = server.post("/api/show", {"name": name})
        assert answer.status == 200
        line = server.post("/api/chat", {"model": name, "messages": MESSAGES, "options": GREEDY}).lines[0]
        assert line["model"] == name
        completion = server.post("/v1/chat/completions", {"model": name, "messages": MESSAGES, "max_tokens": 1})
        assert (completion.status, completion.value["model"]) == (200, name)
        assert server.get(f"/v1/models/{name}").value["id"] == name


def test_what_there_is(server: RunningServer, thinker: RunningServer) -> None:
    [listed] = server.get("/api/tags").value["models"]
    assert (listed["name"], listed["model"]) == ("guide:latest", "guide:latest")
    assert listed["size"] == server.llm.report.plan.needs.weight_bytes
    assert len(bytes.fromhex(listed["digest"])) == 32
    assert listed["details"] == {
        "parent_model": "",
        "format": "safetensors",
        "family": "qwen3",
        "families": ["qwen3"],
        "parameter_size": f"{server.llm.report.num_parameters / 1e6:.2f}M",
        "quantization_level": "BF16",
    }
    [loaded] = thinker.get("/api/ps").value["models"]
    assert (loaded["name"], loaded["size_vram"], loaded["context_length"]) == ("thinker:1b", 0, 2048)
    shown = thinker.post("/api/show", {"model": "thinker:1b", "verbose": True}).value
    assert shown["template"] == THINKS
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert shown["model_info"]["general.architecture"] == "qwen3"
    assert shown["model_info"]["qwen3.context_length"] == 2048
    version = tuple(map(int, server.get("/api/version").value["version"].split(".")))
    assert version >= (0, 13, 4), "Codex refuses an older one"


def test_the_root_is_there_for_those_who_look_for_ollama(server: RunningServer) -> None:
    assert server.ask("HEAD", "/", None, {}).status == 200
    assert b"<title>" in server.get("/").body
    with running_server(dashboard=False, served_model_name=("hub:5000/o/m", "o/m:1b")) as bare:
        assert [each["name"] for each in bare.get("/api/tags").value["models"]] == ["hub:5000/o/m:latest", "o/m:1b"]
        assert bare.get("/").body == b"Ollama is running"
        assert bare.ask("HEAD", "/", None, {}).status == 200


# ---- what is refused ------------------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"role": "user", "content": "a", "images": ["AAAA"]}]}, "messages[0].images is not supported"),
    ({"messages": [{"role": "you", "content": "a"}]}, "messages[0].role is 'you'"),
    ({"messages": [{"role": "user"}]}, "messages[0].content is None"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0] is {}"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}] * 33}]}, "messages[0].tool_calls is "),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name is 'a b'"),
    ({"tools": [{"type": "code"}]}, "tools[0].type is not supported"),
    ({"format": "yaml"}, "format is 'yaml'; allowed: \"json\", or a JSON schema"),
    ({"format": {"type": "what"}}, "format is "),
    ({"think": True}, "think is not supported: this model does not reason"),
    ({"think": "very"}, "think: Invalid enum value 'very'"),
    ({"top_logprobs": 3}, "top_logprobs needs logprobs: true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: Expected `int` <= 20"),
    ({"keep_alive": [1]}, "keep_alive: Expected "),
    ({"truncate": True}, "truncate is not supported"),
    ({"shift": True}, "shift is not supported"),
    ({"template": "{{ .Prompt }}"}, "template is not supported: the chat template comes from the model"),
    ({"top_k": 1}, "top_k is not a field of this request; did you mean options.top_k?"),
    ({"messsages": []}, "messsages is not a field of this request; did you mean messages?"),
    ({"prompt": "a"}, "prompt is not a field of this request"),
    ({"stream": "yes"}, "stream: Expected `bool | null`"),
    (
        {"options": {"num_predictt": 3}},
        "options.num_predictt is not a field of this request; did you mean options.num_",
    ),
    ({"options": {"num_predict": -3}}, "options.num_predict is -3"),
    ({"options": {"num_predict": "3"}}, "options.num_predict: Expected `int | float | null`"),
    ({"options": {"temperature": -1}}, "options.temperature is -1"),
    ({"options": {"top_k": -2}}, "options.top_k is -2"),
    ({"options": {"top_p": 1.5}}, "options.top_p is 1.5"),
    ({"options": {"min_p": 2}}, "options.min_p is 2"),
    ({"options": {"seed": -7}}, "options.seed is -7"),
    ({"options": {"stop": [""]}}, "options.stop"),
    ({"options": {"repeat_penalty": 0}}, "options.repeat_penalty is 0"),
    ({"options": {"presence_penalty": 3}}, "options.presence_penalty is 3"),
    ({"options": {"frequency_penalty": 3}}, "options.frequency_penalty is 3"),
    ({"options": {"repeat_last_n": -2}}, "options.repeat_last_n is -2; allowed: a number of tokens, or -1"),
    ({"options": {"num_ctx": 0}}, "options.num_ctx: Expected `int` >= 1"),
    ({"options": {"mirostat": 1}}, "options.mirostat is not supported"),
    ({"options": {"tfs_z": 0.5}}, "options.tfs_z is not supported"),
    ({"options": {"typical_p": 0.7}}, "options.typical_p is not supported"),
    ({"options": {"penalize_newline": False}}, "options.penalize_newline is not supported"),
    ({"options": {"vocab_only": True}}, "options.vocab_only is not supported"),
    ({"options": {"embedding_only": True}}, "options.embedding_only is not supported"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[str(fields)[:60] for fields, _ in REFUSED])
def test_what_would_change_the_text_is_refused_by_name(server: RunningServer, fields: Any, message: str) -> None:
    for stream in (True, False):
        answer = server.post("/api/chat", {"messages": MESSAGES, "stream": stream, **fields})
        assert answer.status == 400, answer.body
        assert answer.headers["content-type"] == "application/json"
        assert answer.value.keys() == {"error"}
        assert answer.error.startswith(message), answer.error
        assert "\n" not in answer.error


def test_every_option_that_is_refused_is_in_the_list() -> None:
    assert {name for fields, _ in REFUSED for name in fields.get("options", {})} >= REFUSED_OPTIONS.keys()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"suffix": "b"}, "suffix is not supported: this model has no tokens"),
        ({"context": [1, 2]}, "context is not supported: send the conversation to /api/chat"),
        ({"images": ["AAAA"]}, "images is not supported"),
        ({"template": "b"}, "template is not supported"),
        (
            {"raw": True, "system": "b"},
            "system is not supported: a raw prompt, or one with a suffix, has no chat template",
        ),
        (
            {"raw": True, "think": True},
            "think is not supported: a raw prompt, or one with a suffix, has no chat template",
        ),
        ({"prompt": "a " * 9000}, "the prompt has "),
        ({"width": 5}, "width is not a field of this request"),
    ],
)
def test_what_a_prompt_cannot_have_is_refused_by_name(server: RunningServer, fields: Any, message: str) -> None:
    answer = server.post("/api/generate", {"prompt": "a", **fields})
    assert answer.status == 400, answer.body
    assert answer.error.startswith(message), answer.error


def test_what_says_nothing_and_what_is_about_loading_changes_nothing(server: RunningServer) -> None:
    nothing: Any = {name: refusal.nothing[0] for name, refusal in REFUSED_OPTIONS.items()}
    nothing |= {"num_ctx": 512, "num_gpu": 99, "main_gpu": 0, "num_thread": 4, "num_batch": 8, "num_keep": 5}
    nothing |= {"use_mmap": False, "use_mlock": True, "numa": False, "low_vram": True, "f16_kv": True}
    nothing |= {"repeat_last_n": 64, "repeat_penalty": 1, "mirostat_tau": 5, "mirostat_eta": 0.1, "logits_all": False}
    plain = chat(server)["message"]
    more = {"format": "", "tools": [], "think": False, "keep_alive": "1h", "truncate": False, "shift": False}
    assert chat(server, options=GREEDY | nothing, **more)["message"] == plain
    assert chat(server, options=GREEDY | dict.fromkeys(nothing))["message"] == plain
    go = {"suffix": "", "system": "", "template": "", "options": GREEDY, "images": [], "context": [], "stream": False}
    answer = server.post("/api/generate", {"prompt": MESSAGES[0]["content"], **go})
    assert answer.value["response"] == plain["content"]


def test_a_context_that_is_not_there_is_refused_unless_the_model_has_none_either(server: RunningServer) -> None:
    chat(server, options=GREEDY | {"num_ctx": 1 << 20})  # cut to the model's own, as Ollama does it
    with running_server(settings={"max_model_len": 128}) as short:
        answer = short.post("/api/chat", {"messages": MESSAGES, "options": {"num_ctx": 129}})
        assert (
            answer.error == "options.num_ctx is 129; allowed: at most 128, the context of this server (--max-model-len)"
        )


def test_seeds_and_limits_that_mean_none(server: RunningServer) -> None:
    options = {"temperature": 0, "seed": -1}
    unlimited, *_ = openai_text(server, temperature=0)
    for num_predict in (-1, -2, 0, None):
        assert chat(server, options=options | {"num_predict": num_predict})["message"]["content"] == unlimited


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/api/embed", 400),
        ("POST", "/api/embeddings", 400),
        *(("POST", f"/api/{name}", 403) for name in ("pull", "push", "create", "copy")),
        ("DELETE", "/api/delete", 403),
        ("POST", "/api/blobs/sha256:00", 403),
        ("POST", "/api/unheard", 404),
        ("GET", "/api/chat", 405),
    ],
)
def test_what_a_server_of_one_model_does_not_do(server: RunningServer, method: str, path: str, status: int) -> None:
    answer = server.ask(method, path, b'{"model": "guide"}', JSON)
    assert answer.status == status
    assert answer.value.keys() == {"error"} and isinstance(answer.error, str)
    assert server.ask("HEAD", "/api/blobs/sha256:00", None, {}).status == 403


# ---- the same limits ------------------------------------------------------------------------------------------------

FORM = {"content-type": "application/x-www-form-urlencoded"}


def test_a_body_that_says_it_is_a_form_is_read_unless_a_browser_sends_it(server: RunningServer) -> None:
    body = json.dumps({"prompt": "a", "options": {"num_predict": 1}}).encode()
    for headers in (FORM, {}, {"content-type": "text/plain"}):
        assert server.ask("POST", "/api/generate", body, headers).status == 200
        for name, value in (
            ("origin", server.url),
            ("origin", "null"),
            ("referer", "http://evil.example/"),
            ("sec-fetch-site", "same-origin"),
        ):
            answer = server.ask("POST", "/api/generate", body, {**headers, name: value})
            assert answer.status in (403, 415) and isinstance(answer.error, str), (name, value)
    assert server.ask("POST", "/v1/completions", body, {"content-type": "text/plain"}).status == 415
    assert server.ask("POST", "/api/generate", body, {"content-encoding": "gzip"}).status == 415


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/api/tags", "/api/show", "/api/pull", "/api/unheard"])
def test_pages_of_other_sites_and_names_of_others_are_refused(server: RunningServer, path: str) -> None:
    for headers, status in (
        ({"origin": "http://evil.example"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"host": "evil.example"}, 421),
    ):
        for method in ("GET", "POST", "OPTIONS"):
            answer = server.ask(method, path, b"{}", {**JSON, **headers})
            assert (answer.status, answer.value.keys()) == (status, {"error"})
            assert isinstance(answer.error, str)
            assert not [name for name in answer.headers if name.startswith("access-control-")]


def test_keys_are_asked_for() -> None:
    with running_server(api_key=("sesame",)) as server:
        for method, path in (
            ("POST", "/api/chat"),
            ("GET", "/api/tags"),
            ("GET", "/api/version"),
            ("POST", "/api/pull"),
        ):
            assert server.ask(method, path, b"{}", JSON).error == (
                "no valid API key; send the header Authorization: Bearer KEY"
            )
        key = {"authorization": "Bearer sesame", **JSON}
        assert server.ask("POST", "/api/chat", b'{"stream": false}', key).value["done_reason"] == "load"


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 200_000,
        b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"format": ' + b'{"a":' * 20_000 + b"1" + b"}" * 20_000 + b"}",
        b'{"messages": [' + b"{}," * 40_000 + b"{}]}",
        b'{"tools": [' + b"{}," * 40_000 + b"{}]}",
        b'{"options": {"stop": [' + b'"a",' * 40_000 + b'"a"]}}',
        b'{"options": {"seed": ' + b"9" * 5000 + b"}}",
        b'{"messages": [{"role": "user", "content": "a", "' + b"x" * 100_000 + b'": 1, "role": "user"}]}',
        b'{"' + b"x" * 100_000 + b'": 1}',
        b'{"options": {"' + b"x" * 100_000 + b'": 1}}',
        b'{"format": "' + b"x" * 100_000 + b'"}',
        b'{"model": "' + b"x" * 100_000 + b'"}',
        b'{"messages": [{"role": "' + b"x" * 100_000 + b'", "content": "a"}]}',
        b'{"messages": "\xff"}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b"",
    ],
)
def test_bodies_that_are_too_deep_too_many_or_none(server: RunningServer, body: bytes) -> None:
    answer = server.ask("POST", "/api/chat", body, JSON)
    assert answer.status in (400, 404)
    assert isinstance(answer.error, str) and len(answer.body) < 1500 and answer.body.count(b"x") < 250


def test_a_body_that_is_too_large(server: RunningServer) -> None:
    for path in ("/api/chat", "/api/generate", "/api/show"):
        answer = server.ask("POST", path, b" " * (9 << 20), JSON)
        assert (answer.status, answer.error.startswith("the body of the request is over the limit")) == (413, True)


def test_many_calls_that_nobody_has_asked_for_take_little_time(server: RunningServer) -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * 32}
    told = [{"role": "user", "content": "a"}, *[call] * 20, *[{"role": "tool", "tool_name": "g", "content": ""}] * 1500]
    answer = server.post("/api/chat", {"messages": told, "options": {"num_predict": 1}})
    assert answer.status == 400 and "maximum context length" in answer.error


def ask_and_leave(server: RunningServer, path: str, fields: dict[str, Any]) -> socket.socket:
    body = json.dumps(fields).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=300)
    connection.sendall(
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    )
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_whoever_leaves_gives_its_blocks_back(thinker: RunningServer, stream: bool) -> None:
    asked = {"messages": MESSAGES, "stream": stream, "format": {"type": "array", "minItems": 900}}
    asked |= {"options": {"temperature": 0}}
    with closing(ask_and_leave(thinker, "/api/chat", asked)) as connection:
        end = time.monotonic() + 300
        while not thinker.llm.engine.scheduler.requests:
            assert time.monotonic() < end
            time.sleep(0.002)
        if stream:
            assert b"200 OK" in connection.recv(4096)
    thinker.check()


def test_tokens_are_counted_as_everywhere(server: RunningServer) -> None:
    metrics = server.services.metrics

    def counts() -> tuple[int, int]:
        return metrics.num_prompt_tokens, metrics.num_generated_tokens

    before = server.call(counts)
    answer = server.post("/api/chat", {"messages": MESSAGES, "stream": False, "options": GREEDY}).value
    after = server.call(counts)
    assert after == (before[0] + answer["prompt_eval_count"], before[1] + answer["eval_count"])


# ---- a model in Ollama's store --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of tiny:135m, which finds SmolLM2 in a store of Ollama that is made here."""
    path, home = smollm2_path(), tmp_path_factory.mktemp("home")
    params = {"temperature": 0.2, "top_p": 0.9, "stop": ["<|im_end|>", "Rome"]}
    add_to_ollama(home, "registry.ollama.ai/library/tiny/135m", "1", params).symlink_to(path)
    with pytest.MonkeyPatch.context() as patched:
        for name in VARIABLES:
            patched.delenv(name, raising=False)
        patched.setenv("HOME", str(home / "nobody"))
        patched.setenv("OLLAMA_MODELS", str(home / ".ollama" / "models"))
        with running_server("tiny:135m", {"kv_memory": "64MiB", "max_model_len": 1024}) as running:
            yield running.url


def asked(address: str, path: str, fields: Any = None) -> Answer:
    body = None if fields is None else json.dumps(fields).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{address}{path}", body, dict(JSON)), timeout=300) as response:
        return Answer(response.status, dict(response.headers), response.read())


CAPITAL: Any = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


def test_a_model_of_ollamas_store_is_listed_and_shown(stored: str) -> None:
    [listed] = asked(stored, "/api/tags").value["models"]
    assert listed["name"] == "tiny:135m"
    expected = {"format": "gguf", "family": "llama", "parameter_size": "134.52M", "quantization_level": "Q4_1"}
    assert listed["details"].items() >= expected.items()
    shown = asked(stored, "/api/show", {"model": "tiny:135m"}).value
    assert shown["parameters"].splitlines() == [
        "temperature 0.2",
        "top_p 0.9",
        'stop "<|im_end|>"',
        'stop "Rome"',
    ]
    assert "<|im_start|>" in shown["template"]
    assert shown["model_info"]["llama.context_length"] == 1024
    assert shown["model_info"]["general.parameter_count"] == 134_515_008
    assert shown["capabilities"] == ["completion"]
    assert asked(stored, "/api/ps").value["models"][0]["name"] == "tiny:135m"


def test_it_answers_with_the_words_of_v1(stored: str) -> None:
    wanted = {"model": "tiny:135m", "messages": CAPITAL}
    other = asked(stored, "/v1/chat/completions", {**wanted, "temperature": 0, "max_tokens": 24}).value
    whole = asked(stored, "/api/chat", {**wanted, "stream": False, "options": GREEDY}).value
    assert "Paris" in whole["message"]["content"]
    assert whole["message"]["content"] == other["choices"][0]["message"]["content"]
    assert (whole["done"], whole["done_reason"]) == (True, "stop")
    assert whole["prompt_eval_count"] == other["usage"]["prompt_tokens"]
    assert whole["eval_count"] == other["usage"]["completion_tokens"]
    assert added_up(asked(stored, "/api/chat", {**wanted, "options": GREEDY}).lines) == timeless(whole)
    generated = asked(stored, "/api/generate", {"prompt": CAPITAL[0]["content"], "stream": False, "options": GREEDY})
    assert generated.value["response"] == whole["message"]["content"]


def test_its_stored_defaults_hold_where_a_client_says_nothing(stored: str) -> None:
    wanted = {"model": "tiny:135m", "messages": [{"role": "user", "content": "Name two cities of Italy."}]}
    seed = {"seed": 11}
    for ours, theirs in (({}, {}), ({"stop": []}, {"stop": []})):
        options = {**seed, **ours, "num_predict": 24}
        whole = asked(stored, "/api/chat", {**wanted, "stream": False, "options": options}).value
        other = asked(stored, "/v1/chat/completions", {**wanted, **seed, **theirs, "max_tokens": 24}).value
        assert whole["message"]["content"] == other["choices"][0]["message"]["content"]
    form = {"type": "object", "properties": {"city": {"enum": ["Paris", "Oslo"]}}, "required": ["city"]}
    form["additionalProperties"] = False
    held = asked(stored, "/api/chat", {"messages": CAPITAL, "format": form, "stream": False, "options": GREEDY}).value
    assert json.loads(held["message"]["content"]) == {"city": "Paris"}
