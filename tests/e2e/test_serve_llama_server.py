"""llama-server's own interface: /completion in one piece and as a stream, /props, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from support.server import JSON, RunningServer, running_server

GREEDY = {"temperature": 0, "n_predict": 24}
PROMPT = "A block table is"
GBNF = 'root ::= "{" [0-9]{2} ("," [0-9])* "}" | "none"'


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(settings={"kv_memory": "4MiB"}) as running:
        yield running


def complete(server: RunningServer, **fields: Any) -> dict[str, Any]:
    answer = server.post("/completion", {"prompt": PROMPT, **GREEDY, **fields})
    assert answer.status == 200, answer.body
    value: dict[str, Any] = answer.value
    return value


def test_a_text_is_that_of_a_completion(server: RunningServer) -> None:
    told = complete(server)
    completion = server.post(
        "/v1/completions", {"model": "guide", "prompt": PROMPT, "temperature": 0, "max_tokens": 24}
    ).value
    assert told["content"] == completion["choices"][0]["text"]
    assert (told["stop"], told["stop_type"], told["tokens_predicted"]) == (True, "limit", 24)
    assert told["tokens_evaluated"] == completion["usage"]["prompt_tokens"]
    assert told["timings"]["predicted_n"] == 24 and told["timings"]["predicted_per_second"] > 0
    assert (told["model"], told["tokens"], told["truncated"]) == ("guide", [], False)
    ids = complete(server, return_tokens=True)["tokens"]
    assert len(ids) == 24
    again = server.post("/detokenize", {"tokens": ids}).value["prompt"]
    assert again == told["content"]
    assert complete(server, prompt=server.post("/tokenize", {"prompt": PROMPT}).value["tokens"])["content"] == again
    old_path = server.post("/completions", {"prompt": PROMPT, **GREEDY}).value
    assert old_path["content"] == told["content"]


def test_openais_paths_also_stand_without_v1(server: RunningServer) -> None:
    body = {"model": "guide", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4, "temperature": 0}
    texts = [server.post(f"{root}/chat/completions", body).value["choices"][0]["message"] for root in ("", "/v1")]
    assert texts[0] == texts[1] and texts[0]["content"]
    assert server.get("/models").value == server.get("/v1/models").value


def test_a_stream_is_the_same_text_in_pieces(server: RunningServer) -> None:
    answer = server.post("/completion", {"prompt": PROMPT, **GREEDY, "stream": True})
    events = [json.loads(line[6:]) for line in answer.body.decode().split("\n\n") if line]
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert "".join(event["content"] for event in events) == complete(server)["content"]
    assert sum(len(event["tokens"]) for event in events) == 24
    assert events[-1]["timings"]["predicted_n"] == 24
    assert "stop_type" not in events[0] and events[-1]["stop_type"] == "limit"


def test_why_a_text_ended(server: RunningServer) -> None:
    whole = complete(server)["content"]
    word = whole.split()[3]
    told = complete(server, stop=[word])
    assert (told["stop_type"], told["stopping_word"]) == ("word", word)
    assert told["content"] == whole[: whole.index(word)]
    chat = "<|im_start|>user\nWhat is a block table?<|im_end|>\n<|im_start|>assistant\n"
    ended = complete(server, prompt=chat, n_predict=-1)
    assert (ended["stop_type"], ended["stopping_word"]) == ("eos", "")


def test_a_text_is_held_to_a_grammar_of_llama_cpp(server: RunningServer) -> None:
    allowed = set("{},0123456789")
    for seed in range(4):
        told = complete(server, grammar=GBNF, temperature=2.0, seed=seed, n_predict=40)
        text = told["content"]
        assert text.startswith("none") or set(text) <= allowed
    for path, fields in (
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Which?"}]}),
    ):
        for how in ({"grammar": 'root ::= "yes" | "no"'}, {"structured_outputs": {"grammar": 'root ::= "yes" | "no"'}}):
            answer = server.post(path, {"model": "guide", "max_tokens": 9, **fields, **how})
            choice = answer.value["choices"][0]
            assert (choice.get("text") or choice["message"]["content"]) in ("yes", "no")
    schema = {
        "type": "object",
        "properties": {"size": {"type": "integer"}},
        "required": ["size"],
        "additionalProperties": False,
    }
    told = complete(server, json_schema=schema, n_predict=60)
    assert set(json.loads(told["content"])) == {"size"}


def test_how_likely_tokens_were(server: RunningServer) -> None:
    told = complete(server, n_probs=3, n_predict=4, return_tokens=True)
    entries = told["completion_probabilities"]
    assert [entry["id"] for entry in entries] == told["tokens"]
    for entry in entries:
        assert len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0]["id"] == entry["id"]
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert 0 >= entry["logprob"] >= entry["top_logprobs"][2]["logprob"]


def test_without_tokens_to_predict_only_the_prompt_is_computed(server: RunningServer) -> None:
    prompt = "An editor that begins to write computes what comes before the cursor. " * 4
    told = complete(server, prompt=prompt, n_predict=0, n_probs=1, return_tokens=True)
    assert (told["content"], told["tokens"], told["stop_type"], told["tokens_predicted"]) == ("", [], "limit", 0)
    assert "completion_probabilities" not in told
    [event] = server.post("/completion", {"prompt": prompt, "n_predict": 0, "stream": True}).events
    assert (event["content"], event["tokens"], event["stop"]) == ("", [], True)
    assert event["timings"]["cache_n"] > 0, "the prompt is still in the cache"


def test_penalties_look_at_the_last_tokens(server: RunningServer) -> None:
    whole, usual, short = (
        complete(server, repeat_penalty=1.8, repeat_last_n=n, return_tokens=True)["tokens"] for n in (-1, 64, 2)
    )
    assert complete(server, repeat_penalty=1.8, return_tokens=True)["tokens"] == usual
    same = {"prompt": PROMPT, "model": "guide", "temperature": 0, "max_tokens": 24, "return_token_ids": True}
    for ids, window in ((whole, 0), (usual, 64), (short, 2)):
        fields = same | {"repetition_penalty": 1.8, "penalty_window": window}
        assert server.post("/v1/completions", fields).value["choices"][0]["token_ids"] == ids
    assert whole != short
    assert complete(server, repeat_penalty=1.8, repeat_last_n=0)["content"] == complete(server)["content"]


def test_biases_in_both_forms(server: RunningServer) -> None:
    first = complete(server, n_predict=1, return_tokens=True)["tokens"][0]
    for bias in ([[first, False]], {str(first): -100.0}):
        assert complete(server, n_predict=1, return_tokens=True, logit_bias=bias)["tokens"][0] != first


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": ["a", "b"]}, "prompt is '2 prompts'; allowed: one text, or one list of token ids"),
        ({"mirostat": 2}, "mirostat"),
        ({"typical_p": 0.5}, "typical_p"),
        ({"n_cmpl": 2}, "n_cmpl is not supported: call /v1/completions with n"),
        ({"n_predict": -3}, "n_predict"),
        ({"grammar": "root ::= b"}, "the rule b is not defined"),
        ({"grammar": "root ::= root"}, "grammar is 'root ::= root'; allowed: a grammar that can be compiled: no text"),
        ({"grammar": 'root ::= "a"', "json_schema": {}}, "none, because json_schema is set"),
        ({"logit_bias": [[1]]}, "logit_bias is [1]"),
        ({"logit_bias": [["1", 2.0]]}, "logit_bias"),
        ({"logit_bias": [[1, 10**400]]}, "logit_bias"),
        ({"repeat_last_n": -2}, "repeat_last_n is -2"),
        ({"n_predicted": 5}, "n_predict"),
        ({"model": "other"}, "other"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(server: RunningServer, fields: dict[str, Any], message: str) -> None:
    answer = server.post("/completion", {"prompt": PROMPT, **fields})
    assert answer.status in (400, 404), answer.body
    assert message in answer.error["message"]


def test_what_says_nothing_is_ignored(server: RunningServer) -> None:
    quiet = {"mirostat": 0, "typical_p": 1.0, "cache_prompt": True, "id_slot": -1, "samplers": ["top_k"], "seed": -1}
    quiet |= {"dry_multiplier": 0.0, "xtc_probability": 0, "dynatemp_range": 0, "top_n_sigma": -1, "repeat_penalty": 1}
    quiet |= {"n_cmpl": 1, "n_cache_reuse": 256, "return_progress": True, "sse_ping_interval": -1}
    quiet |= {"stop": [f"never {number}" for number in range(64)]}
    assert complete(server, **quiet, repeat_last_n=64)["content"] == complete(server)["content"]
    assert server.ask("POST", "/completion", json.dumps({"prompt": PROMPT, "n_predict": 2}).encode(), {}).status == 200


def test_props_tell_the_context_and_the_template(server: RunningServer) -> None:
    told = server.get("/props").value
    assert told["default_generation_settings"]["n_ctx"] == 2048
    assert "im_start" in told["chat_template"]
    assert (told["model_alias"], told["modalities"]) == ("guide", {"vision": False, "audio": False})
    assert told["total_slots"] > 0 and told["eos_token"]


@pytest.mark.parametrize(
    "path",
    [
        *("/slots", "/slots/3", "/embedding", "/lora-adapters", "/apply-template"),
        *("/generate", "/generate_stream"),  # of vLLM and text-generation-inference
    ],
)
def test_what_is_not_there_is_named(server: RunningServer, path: str) -> None:
    answer = server.ask("POST", path, b"{}", JSON)
    assert (answer.status, answer.error["code"]) == (501, "unsupported")
    assert "\n" not in answer.error["message"]
