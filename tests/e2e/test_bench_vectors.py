"""`quire bench vectors` with tiny sizes: both parts are measured. No time is looked at."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from quire import cli
from quire.core.errors import InvalidConfigError
from quire.instruments.bench.sentence_peer import paragraphs
from support.tiny_bert import write_tiny_bert


def test_texts_and_a_reranker_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "vectors.json"
    sizes = ["--texts", "4", "--length", "40", "--documents", "3", "--query", "64", "--repeat", "2"]
    memory = ["--kv-memory", "8MiB", "--read-size", "1MiB"]
    assert cli.main(["bench", "vectors", "--shape", "tiny", *sizes, *memory, "--json", str(out)]) in (cli.DONE, 1)
    samples = json.loads(out.read_text())["samples"]
    assert len(samples["Vectors of texts"]["tok/s"]) == len(samples["Vectors of texts"]["%"]) == 2
    assert {kind: len(s) for kind, s in samples["A reranker and the prefix cache"]["s"].items()} == {
        "without": 2,
        "with": 2,
    }
    assert "4 texts of 40 tokens" in capsys.readouterr().out


def test_an_encoder_is_measured_without_a_reranker(tmp_path: Path) -> None:
    """It generates no text to warm up with, and caches no prefix."""
    folder, out = write_tiny_bert(tmp_path / "bert"), tmp_path / "vectors.json"
    sizes = ["--texts", "4", "--length", "40", "--repeat", "2", "--kv-memory", "8MiB", "--read-size", "1MiB"]
    assert cli.main(["bench", "vectors", str(folder), *sizes, "--json", str(out)]) in (cli.DONE, 1)
    assert list(json.loads(out.read_text())["samples"]) == ["Vectors of texts"]


def test_paragraphs_come_from_all_documents_and_each_once(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    long, other = "a" * 50, "b" * 60
    (tmp_path / "one.md").write_text(f"{long}\n\nshort\n \n{other}\n\n{'c' * 3000}\n")
    (tmp_path / "sub" / "two.md").write_text(f"{other}\n\n{'d' * 70}")
    assert paragraphs(tmp_path, 3) == [long, other, "d" * 70]
    assert paragraphs(tmp_path, 2) == [long, other]
    with pytest.raises(InvalidConfigError, match="at most the 3 paragraphs"):
        paragraphs(tmp_path, 4)


def test_an_interpreter_without_the_peer_is_named_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--only", "peer", "--peer-python", sys.executable, "--pooling", "last", "--kv-memory", "8MiB"]
    assert cli.main(["bench", "vectors", "guide", *options, "--peer-texts", "2", "--repeat", "1"]) == cli.FAILED
    assert "No module named 'sentence_transformers'" in capsys.readouterr().err
