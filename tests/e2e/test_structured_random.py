"""Random schemas and prompts on random weights, over HTTP: every text that ends is JSON of its schema.

A text that its length has cut is no JSON yet; such texts are counted apart, and have to be few.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from quire.guide import GUIDE_FOLDER
from quire.instruments.http.connection import HttpClient
from support.random_schemas import Schema, SchemaMaker, failure_of
from support.server import RunningServer, running_server
from support.tiny_checkpoint import write_tiny_qwen3
from support.tiny_tokenizer import write_chatml

MAX_TOKENS = 600
AT_ONCE = 48
MAX_CUT_SHARE = 0.02
SETTINGS = {"kv_memory": "64MiB", "num_threads": 1, "max_num_seqs": AT_ONCE, "max_model_len": 2048}
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


@dataclass(frozen=True)
class Text:
    """What came of a case."""

    status: int
    text: str
    is_cut: bool
    error: str = ""


def random_model(folder: Path, *, has_words: bool) -> Path:
    """Write a model of random weights: with the guide's two thousand tokens, or with bytes and a few words."""
    if has_words:
        write_tiny_qwen3(folder, settings={"vocab_size": 2048, "eos_token_id": 2})
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(Path(GUIDE_FOLDER) / name, folder / name)
        return folder
    write_chatml(folder)
    vocabulary = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    [end] = [token["id"] for token in vocabulary["added_tokens"] if token["content"] == "<|im_end|>"]
    return write_tiny_qwen3(folder, settings={"vocab_size": 384, "eos_token_id": end})


@pytest.fixture(scope="module", params=["words", "bytes"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = random_model(tmp_path_factory.mktemp(request.param), has_words=request.param == "words")
    with running_server(folder, SETTINGS, max_queued_sequences=4 * AT_ONCE) as running:
        yield running


def call_of(number: int, schema: Schema, prompt: str) -> tuple[str, dict[str, Any]]:
    """Return a call that holds a text to a schema; cases take turns at the ways to say so."""
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": number}
    messages = [{"role": "user", "content": prompt}]
    named = {"name": f"case-{number}", "schema": schema, "strict": True}
    match number % 4:
        case 0:
            return CHAT, {
                "messages": messages,
                "max_tokens": MAX_TOKENS,
                "response_format": {"type": "json_schema", "json_schema": named},
                **sampling,
            }
        case 1:
            return RESPONSES, {
                "input": prompt,
                "max_output_tokens": MAX_TOKENS,
                "text": {"format": {"type": "json_schema", **named}},
                **sampling,
            }
        case 2:
            return COMPLETIONS, {
                "prompt": prompt,
                "max_tokens": MAX_TOKENS,
                "structured_outputs": {"json": schema},
                **sampling,
            }
    return CHAT, {
        "messages": messages,
        "max_tokens": MAX_TOKENS,
        "structured_outputs": {"json": json.dumps(schema)},
        "stream": True,
        **sampling,
    }


def read_text(path: str, status: int, body: bytes) -> Text:
    if status != 200:
        return Text(status, "", False, json.loads(body)["error"]["message"])
    if path == RESPONSES:
        answer = json.loads(body)
        return Text(status, answer["output"][0]["content"][0]["text"], answer["status"] == "incomplete")
    if not body.startswith(b"data: "):
        [choice] = json.loads(body)["choices"]
        text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
        return Text(status, text, choice["finish_reason"] == "length")
    lines = [line[6:] for line in body.decode().split("\n\n") if line.startswith("data: ") and line != "data: [DONE]"]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    return Text(status, text, choices[-1]["finish_reason"] == "length")


async def ask_all(url: str, calls: list[tuple[str, dict[str, Any]]]) -> list[Text]:
    """Return the texts of all calls, so many of them under way at once."""
    client, left, found = HttpClient(url), iter(enumerate(calls)), dict[int, Text]()

    async def ask() -> None:
        for index, (path, fields) in left:
            pieces: list[bytes] = []
            reply = await client.exchange(client.post_request(path, json.dumps(fields).encode()), pieces.append)
            found[index] = read_text(path, reply.status, b"".join(pieces) or bytes(reply.body))

    await asyncio.gather(*(ask() for _ in range(AT_ONCE)))
    client.close()
    return [found[index] for index in range(len(calls))]


def run_cases(server: RunningServer, seed: int, count: int) -> None:
    """Ask for texts of so many schemas, others for every model and seed; fail unless each is JSON of its own."""
    maker = SchemaMaker(f"{server.services.model_names[0]} {seed}")
    cases = [(maker.schema(), maker.prompt()) for _ in range(count)]
    calls = [call_of(number, schema, prompt) for number, (schema, prompt) in enumerate(cases)]
    texts = asyncio.run(ask_all(server.url, calls))
    wrong = []
    tally = Counter[str]()
    for (schema, _), text in zip(cases, texts, strict=True):
        tally["cut" if text.is_cut else "ended"] += 1
        failure = text.error or ("" if text.is_cut else failure_of(schema, text.text))
        if failure:
            wrong.append(f"{failure}\n    {text.text}\n    {json.dumps(schema, ensure_ascii=False)}")
    print(f"\nseed {seed}: {count} schemas, {tally['ended']} ended, {tally['cut']} cut, {len(wrong)} wrong")
    assert not wrong, f"{len(wrong)} of {count} are wrong:\n" + "\n".join(wrong[:8])
    assert tally["cut"] <= MAX_CUT_SHARE * count
    server.check()


def test_texts_are_json_of_their_schemas(server: RunningServer) -> None:
    run_cases(server, 0, 100)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 11))
def test_texts_of_thousands_of_schemas(server: RunningServer, seed: int) -> None:
    run_cases(server, seed, 500)
