"""A real model from a GGUF file, SmolLM2-135M-Instruct (Q4_1, with a Q8_0 embedding): it answers, chats and calls."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, RequestOutput, SamplingParams, cli
from quire.compute.models import read_model
from quire.compute.models.hub import resolve_model
from support.model_stores import VARIABLES, add_to_ollama
from support.server import running_server
from support.smollm2 import smollm2_path

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
CAPITAL = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
TOPICS = ("the sea", "a small town", "bread", "winter", "a lost key", "music", "the moon", "an old map", "rain", "ink")
NUM_ALONE = 3


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    smollm2_path()
    with LLM("smollm2", kv_memory="64MiB", max_model_len=2048) as llm:
        yield llm


def test_its_name_leads_to_the_file_that_a_package_carries(llm: LLM) -> None:
    model = read_model(resolve_model("smollm2"))
    assert (model.architecture, len(model.spec.layers), model.spec.vocab_size) == ("LlamaForCausalLM", 30, 49152)
    assert model.spec.tied_head and model.eos_token_ids == (0, 2)
    assert llm.report.notices[0] == f"smollm2 is {smollm2_path()}"


def test_it_answers_a_question(llm: LLM) -> None:
    (output,) = llm.chat(CAPITAL, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"


def test_it_answers_in_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    smollm2_path()
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{CAPITAL[0]['content']}\n"))
    sizes = ("--kv-memory", "64MiB", "--max-model-len", "512", "--max-tokens", "24")
    assert cli.main(["chat", "smollm2", "--verbose", "--temperature", "0", *sizes]) == 0
    out, err = capsys.readouterr()
    assert "Paris" in out
    assert "model       smollm2: LlamaForCausalLM, 30 layers, bfloat16" in err


def test_its_chat_template_is_that_of_the_file(llm: LLM) -> None:
    assert llm.tokenizer is not None
    (output,) = llm.chat(CAPITAL, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    expected = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{CAPITAL[0]['content']}<|im_end|>\n"
    ids = output.prompt_token_ids
    assert llm.tokenizer.decode(ids, skip_special_tokens=False) == expected + "<|im_start|>assistant\n"
    assert [ids.count(token) for token in (1, 2)] == [3, 2]  # of <|im_start|> and <|im_end|>, as control tokens


def test_each_of_six_turns_is_computed_once(llm: LLM) -> None:
    turns: list[dict[str, str]] = []
    known: list[int] = []
    llm.reset_prefix_cache()
    for topic in TOPICS[:6]:
        turns.append({"role": "user", "content": f"Tell me something about {topic}, in one sentence."})
        (output,) = llm.chat(turns, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
        shared = common_prefix(known, output.prompt_token_ids)
        assert output.num_cached_tokens == shared // 16 * 16
        assert not known or shared >= len(known) - 24  # no token of a turn before the last answer is computed again
        known = [*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]]
        turns.append({"role": "assistant", "content": output.outputs[0].text})


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    return next(
        (place for place, pair in enumerate(zip(first, second, strict=False)) if len(set(pair)) > 1), len(first)
    )


def test_a_request_gets_the_same_bits_alone_and_in_a_crowd() -> None:
    prompts = [[{"role": "user", "content": f"Write about {topic}."}] for topic in TOPICS[:6]]
    sampling = [
        SamplingParams(temperature=(0.0, 0.8)[place % 2], seed=place, max_tokens=8 + place, ignore_eos=True, logprobs=3)
        for place in range(len(prompts))
    ]
    with LLM(smollm2_path(), kv_memory="64MiB", max_model_len=512, max_num_batched_tokens=64) as llm:
        crowd = llm.chat(prompts, sampling, use_tqdm=False)
    with LLM(smollm2_path(), kv_memory="64MiB", max_model_len=512, enable_prefix_caching=False) as llm:
        for place in range(NUM_ALONE):
            (alone,) = llm.chat(prompts[place], sampling[place], use_tqdm=False)
            assert written(alone) == written(crowd[place])


def written(output: RequestOutput) -> tuple[list[int], str]:
    """Return the tokens of an answer, and the bits of their log-probabilities."""
    return list(output.outputs[0].token_ids), repr(output.outputs[0].logprobs)


def test_in_ollamas_store_it_ends_at_the_strings_that_are_stored_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    add_to_ollama(tmp_path, "registry.ollama.ai/library/tiny/135m", "1", {"stop": ["Paris"], "temperature": 0.0})
    (tmp_path / ".ollama/models/blobs" / f"sha256-{'1' * 64}").symlink_to(smollm2_path())
    with LLM("tiny:135m", kv_memory="64MiB", max_model_len=512) as llm:
        (stopped,) = llm.chat(CAPITAL, use_tqdm=False)
        (whole,) = llm.chat(CAPITAL, SamplingParams(temperature=0.0, max_tokens=24), use_tqdm=False)
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", "Paris")
    assert stopped.outputs[0].text == whole.outputs[0].text.partition("Paris")[0] != whole.outputs[0].text


SETTINGS = {"kv_memory": "64MiB", "max_model_len": 2048}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Return the weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
        },
    },
}


def test_it_calls_a_function_over_http() -> None:
    smollm2_path()
    with running_server("smollm2", SETTINGS, tool_format="hermes") as server, server.client() as client:
        answer = client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "What is the weather like in Paris?"}],
            tools=[WEATHER],
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=64,
        )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.function.name == "weather"
    assert isinstance(json.loads(call.function.arguments)["city"], str)
    assert answer.choices[0].finish_reason == "tool_calls"
