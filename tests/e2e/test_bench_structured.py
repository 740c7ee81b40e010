"""`quire bench structured` against a tiny model, briefly: what it prints and writes. No time is looked at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire import cli
from quire.compute.models.source import ModelFolder
from quire.engine.text.tokenizer import Tokenizer
from quire.instruments.bench.structured import usual_schema
from quire.instruments.bench.wide_tokenizer import END, write_wide_tokenizer
from support.random_schemas import failure_of
from support.tiny_checkpoint import write_tiny_qwen3

VOCAB_SIZE = 1024
SMALL = ("--kv-memory", "8MiB", "--num-threads", "1", "--prompt-tokens", "8", "--output-tokens", "12")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "wide"
    write_tiny_qwen3(folder, settings={"vocab_size": VOCAB_SIZE})
    write_wide_tokenizer(folder, VOCAB_SIZE, max_corpus_characters=20_000)
    return folder


def test_a_model_is_asked_in_turn(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, page = tmp_path / "found.json", tmp_path / "page.md"
    sizes = ("--streams", "3", "--schemas", "2", "--repeat", "2", "--json", str(path), "--markdown", str(page))
    assert cli.main(["bench", "structured", str(model), *SMALL, *sizes]) == 0
    printed = capsys.readouterr().out
    for text in ("cost of a schema at 3 streams, %", "first token, the very first schema, ms", f"{VOCAB_SIZE:,}"):
        assert text in printed
    assert "## Structured output" in page.read_text(encoding="utf-8")
    found = json.loads(path.read_text(encoding="utf-8"))["samples"]["What a schema costs"]
    assert found["very_first_s"] > 0
    assert [len(run["free_first_s"]) for run in found["runs"]] == [2, 2]
    assert all(run["free_s"] > 0 and run["held_s"] > 0 for run in found["runs"])


def test_a_shape_with_few_tokens_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "structured", "--shape", "tiny", *SMALL]) == cli.MISUSED
    assert "one of 512 tokens or more" in capsys.readouterr().err.splitlines()[-1]


def test_a_wide_tokenizer_has_as_many_tokens_as_it_should(model: Path) -> None:
    tokenizer = Tokenizer.open(ModelFolder(model), vocab_size=VOCAB_SIZE)
    texts = [tokenizer.token_text(token_id) for token_id in range(VOCAB_SIZE)]
    assert all(texts[:-1]) and texts[-1] == END
    assert sum(len(text) > 2 for text in texts) > VOCAB_SIZE // 3
    assert json.loads((model / "generation_config.json").read_text())["eos_token_id"] == VOCAB_SIZE - 1
    text = 'def main(): return "é😀"'
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_usual_schema_is_one() -> None:
    record = {
        "order_id": 1,
        "status": "paid",
        "customer": "a",
        "placed_on": "2026-01-02",
        "total": 1.5,
        "is_gift": True,
        "tags": [],
        "address": {"street": "b", "city": "c", "zip": "01234"},
        "note": None,
    }
    text = json.dumps({"order_list": [record], "is_complete": False})
    assert failure_of(usual_schema("order"), text) == ""
    assert "too short" in failure_of(usual_schema("order", 2), text)
