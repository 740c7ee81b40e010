"""/v1/completions over HTTP: openai-python and bare calls, against what the engine itself returns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.engine.outputs import RequestOutput
from support.server import SETTINGS, RunningServer, running_server

PROMPTS = ["The memory of the engine", "A block is", "Who runs next?"]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "seed": 3}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("guide", **SETTINGS) as opened:
        yield opened


@pytest.fixture(autouse=True)
def in_order(server: RunningServer) -> Iterator[None]:
    yield
    server.check()


def generate(llm: LLM, prompt: Any, **sampling: Any) -> RequestOutput:
    [output] = llm.generate(prompt, SamplingParams(**sampling), use_tqdm=False)
    return output


def test_openai_python_reads_a_completion(server: RunningServer, llm: LLM) -> None:
    expected = generate(llm, PROMPTS[0], temperature=0, max_tokens=12)
    with server.client() as client:
        raw = client.completions.with_raw_response.create(model="guide", prompt=PROMPTS[0], **GREEDY)
        assert raw.headers["x-request-id"].startswith("req-")
        answer = raw.parse()
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason) == (expected.outputs[0].text, expected.outputs[0].finish_reason)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.model == "guide"
    assert answer.usage is not None
    num_prompt, num_generated = len(expected.prompt_token_ids), len(expected.outputs[0].token_ids)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (num_prompt, num_generated)
    assert answer.usage.total_tokens == num_prompt + num_generated
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens is not None


def test_a_stream_has_the_text_of_the_answer(server: RunningServer) -> None:
    with server.client() as client:
        whole = client.completions.create(model="guide", prompt=PROMPTS[1], **GREEDY)
        options: Any = {"include_usage": True}
        stream = client.completions.create(
            model="guide", prompt=PROMPTS[1], stream=True, stream_options=options, **GREEDY
        )
        parts = list(stream)
    *chunks, last = parts
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [whole.choices[0].finish_reason]
    assert not last.choices
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in parts}) == 1


def test_events_of_a_stream_have_their_form(server: RunningServer) -> None:
    fields = {"prompt": PROMPTS[0], "stream": True, **GREEDY}
    answer = server.post("/v1/completions", fields)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.body.endswith(b"\n\ndata: [DONE]\n\n")
    assert all("usage" not in event for event in answer.events)
    counted = server.post("/v1/completions", fields | {"stream_options": {"include_usage": True}}).events
    assert [event["usage"] for event in counted[:-1]] == [None] * (len(counted) - 1)
    options = {"include_usage": True, "continuous_usage_stats": True}
    always = server.post("/v1/completions", fields | {"stream_options": options}).events
    told = [event["usage"]["completion_tokens"] for event in always]
    assert told == sorted(told)
    assert told[-1] == counted[-1]["usage"]["completion_tokens"]
    assert always[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0


def test_prompts_of_all_forms_at_once(server: RunningServer, llm: LLM) -> None:
    expected = [generate(llm, prompt, temperature=0, max_tokens=12) for prompt in PROMPTS]
    ids = [output.prompt_token_ids for output in expected]
    for prompt in (PROMPTS, ids, ids[0]):
        texts = [output.outputs[0].text for output in (expected if prompt is not ids[0] else expected[:1])]
        answer = server.post("/v1/completions", {"model": "guide", "prompt": prompt, **GREEDY}).value
        assert [choice["text"] for choice in answer["choices"]] == texts
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))
        events = server.post("/v1/completions", {"prompt": prompt, "stream": True, **GREEDY}).events
        streamed = ["" for _ in texts]
        for event in events:
            streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
        assert streamed == texts


def test_choices_of_prompts_are_numbered_through(server: RunningServer, llm: LLM) -> None:
    wanted = {"n": 2, "temperature": 1.0, "seed": 5, "max_tokens": 6}
    expected = [output.text for prompt in PROMPTS for output in generate(llm, prompt, **wanted).outputs]
    fields = {"prompt": PROMPTS, **wanted}
    answer = server.post("/v1/completions", fields).value
    assert [choice["text"] for choice in answer["choices"]] == expected
    num_generated = answer["usage"]["completion_tokens"]
    events = server.post("/v1/completions", fields | {"stream": True}).events
    texts = dict.fromkeys(range(6), "")
    for event in events:
        [choice] = event["choices"]
        texts[choice["index"]] += choice["text"]
    assert list(texts.values()) == expected
    ends = [event["choices"][0]["index"] for event in events if event["choices"][0]["finish_reason"]]
    assert sorted(ends) == list(range(6))
    assert num_generated > 6


def test_the_best_of_several_and_beams(server: RunningServer, llm: LLM) -> None:
    sampled = {"n": 2, "best_of": 4, "temperature": 1.0, "seed": 9, "max_tokens": 8}
    searched = {"n": 2, "best_of": 3, "max_tokens": 8}
    for fields, wanted in (
        (sampled, sampled),
        (searched | {"use_beam_search": True}, searched | {"beam_search": True, "temperature": 0}),
    ):
        expected = [output.text for output in generate(llm, PROMPTS[0], **wanted).outputs]
        answer = server.post("/v1/completions", {"prompt": PROMPTS[0], **fields}).value
        assert [choice["text"] for choice in answer["choices"]] == expected
        events = server.post("/v1/completions", {"prompt": PROMPTS[0], "stream": True, **fields}).events
        assert [event["choices"][0]["text"] for event in events] == expected


def test_echo_with_log_probabilities_tells_the_prompt(server: RunningServer, llm: LLM) -> None:
    expected = generate(llm, PROMPTS[0], temperature=0, max_tokens=5, logprobs=2, prompt_logprobs=2)
    fields = {"prompt": PROMPTS[0], "echo": True, "logprobs": 2, "temperature": 0, "max_tokens": 5}
    [choice] = server.post("/v1/completions", fields).value["choices"]
    assert choice["text"] == PROMPTS[0] + expected.outputs[0].text
    told = choice["logprobs"]
    ids = expected.prompt_token_ids + expected.outputs[0].token_ids
    assert [len(column) for column in told.values()] == [len(ids)] * 4
    assert told["token_logprobs"][0] is None
    assert told["top_logprobs"][0] is None
    entries = [*(expected.prompt_logprobs or []), *(expected.outputs[0].logprobs or [])]
    for position, (token_id, entry) in enumerate(zip(ids, entries, strict=True)):
        if entry is not None:
            assert told["token_logprobs"][position] == pytest.approx(entry[token_id].logprob)
            assert told["top_logprobs"][position][told["tokens"][position]] == told["token_logprobs"][position]
            assert 2 <= len(told["top_logprobs"][position]) <= 3
    for offset, after, token in zip(told["text_offset"], told["text_offset"][1:], told["tokens"], strict=False):
        assert choice["text"][offset:after] == token


def test_the_log_likelihood_of_a_prompt(server: RunningServer) -> None:
    """As lm-eval asks: batches of token ids, one token more than it wants, the last column dropped."""
    prompts = [server.post("/tokenize", {"prompt": prompt}).value["tokens"] for prompt in PROMPTS]
    fields = {"prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    answer = server.post("/v1/completions", fields).value
    alone = server.post("/v1/completions", fields | {"max_tokens": 0}).value
    assert alone["usage"]["completion_tokens"] == 0
    for ids, choice, bare in zip(prompts, answer["choices"], alone["choices"], strict=True):
        told = choice["logprobs"]
        assert len(told["tokens"]) == len(ids) + 1
        assert "".join(told["tokens"][:-1]) == bare["text"]
        assert bare["logprobs"] == {name: column[:-1] for name, column in told.items()}
        assert bare["finish_reason"] == "length"
        for tokens, top in zip(told["tokens"][1:], told["top_logprobs"][1:], strict=True):
            assert tokens in top
    streamed = server.post("/v1/completions", fields | {"max_tokens": 0, "stream": True}).events
    choices = sorted((event["choices"][0] for event in streamed), key=lambda choice: choice["index"])
    assert choices == alone["choices"]
    [plain] = server.post("/v1/completions", {"prompt": prompts[0], "echo": True, "max_tokens": 0}).value["choices"]
    assert plain["text"] == alone["choices"][0]["text"]
    assert plain["logprobs"] is None


def test_a_long_answer_is_made_beside_the_event_loop(server: RunningServer) -> None:
    prompt = [(7 * i) % 1900 + 3 for i in range(1000)]
    fields = {"prompt": [prompt, prompt[:-1], prompt[5:]], "echo": True, "logprobs": 3, "max_tokens": 2}
    answer = server.post("/v1/completions", fields | {"max_completion_tokens": 2}).value
    assert [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]] == [1002, 1001, 997]
    assert answer["usage"]["completion_tokens"] == 6


def test_no_likelier_tokens_are_told_where_none_are_wanted(server: RunningServer) -> None:
    [choice] = server.post("/v1/completions", {"prompt": "A", "logprobs": 0, **GREEDY}).value["choices"]
    told = choice["logprobs"]
    assert [list(top) for top in told["top_logprobs"]] == [[token] for token in told["tokens"]]
    fields = {"prompt": "A", "logprobs": 1, "return_tokens_as_token_ids": True, "return_token_ids": True, **GREEDY}
    [named] = server.post("/v1/completions", fields).value["choices"]
    assert named["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in named["token_ids"]]
    assert named["prompt_token_ids"] == server.post("/tokenize", {"prompt": "A"}).value["tokens"]


def test_stop_strings_are_held_back(server: RunningServer) -> None:
    [choice] = server.post("/v1/completions", {"prompt": PROMPTS[0], **GREEDY}).value["choices"]
    text = choice["text"]
    stop = text[4:9]
    fields = {"prompt": PROMPTS[0], "stop": [stop, "never"], **GREEDY}
    [stopped] = server.post("/v1/completions", fields).value["choices"]
    assert stopped["text"] == text[: text.index(stop)]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", stop)
    events = server.post("/v1/completions", fields | {"stream": True}).events
    assert "".join(event["choices"][0]["text"] for event in events) == stopped["text"]
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    included = server.post("/v1/completions", fields | {"include_stop_str_in_output": True}).value["choices"][0]
    assert included["text"] == stopped["text"] + stop


def test_a_prompt_is_cut_where_that_is_asked_for(server: RunningServer) -> None:
    ids = server.post("/tokenize", {"prompt": PROMPTS[0]}).value["tokens"]
    for fields, kept in (
        ({"truncate_prompt_tokens": 2}, ids[-2:]),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, ids[:2]),
        ({"truncate_prompt_tokens": 99}, ids),
        ({"truncate_prompt_tokens": -1}, ids),
    ):
        for prompt in (PROMPTS[0], ids):
            asked = {"prompt": prompt, "return_token_ids": True, "max_tokens": 1, **fields}
            assert server.post("/v1/completions", asked).value["choices"][0]["prompt_token_ids"] == kept


def test_the_id_of_a_client_is_shown_and_nothing_more(server: RunningServer) -> None:
    answer = server.post("/v1/completions", {"prompt": "A", "request_id": "mine", **GREEDY}).value
    assert answer["id"] == "cmpl-mine"


def test_log_probabilities_of_a_prompt_that_no_message_of_the_engine_holds_are_refused(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.core.validate.MAX_PROMPT_LOGPROBS", 100)
    fields = {"prompt": [500] * 20, "max_tokens": 1}
    refused = server.post("/v1/completions", fields | {"prompt_logprobs": 4})
    assert (refused.status, refused.error["param"]) == (400, "prompt_logprobs")
    assert refused.error["message"] == "prompt_logprobs is 4; allowed: at most 3 for a prompt of 20 tokens"
    assert server.post("/v1/completions", fields | {"prompt_logprobs": 3}).status == 200


def test_more_log_probabilities_than_an_answer_may_have_are_refused(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.serve.run.generation.MAX_LOGPROBS_IN_ANSWER", 0)  # but those of one text
    context = server.get("/v1/models").value["data"][0]["max_model_len"]
    chat = {"messages": [{"role": "user", "content": "A"}], "logprobs": True, "top_logprobs": 20}
    refused = server.post("/v1/chat/completions", {**chat, "n": 2}).error
    assert (refused["code"], refused["param"]) == ("invalid_value", "top_logprobs")
    echo = {"prompt": "A", "echo": True, "logprobs": 20, "n": 2, "max_tokens": context - 8}
    assert server.post("/v1/completions", echo).error["param"] == "logprobs"
    assert server.post("/v1/chat/completions", {**chat, "max_tokens": 4, "n": 2}).status == 200


def test_tenants_and_salts_keep_caches_apart() -> None:
    prompt = [(7 * i) % 120 + 3 for i in range(64)]
    with running_server(api_key=("one", "two")) as server:

        def cached(key: str, **fields: Any) -> int:
            with server.client(api_key=key) as client:
                answer = client.completions.create(model="guide", prompt=prompt, max_tokens=1, extra_body=fields)
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            return answer.usage.prompt_tokens_details.cached_tokens or 0

        assert cached("one") == 0
        assert cached("one") > 0
        assert cached("two") == 0
        assert cached("one", cache_salt="a") == 0
        assert cached("one", cache_salt="a") > 0
        assert cached("one", cache_salt="b") == 0
