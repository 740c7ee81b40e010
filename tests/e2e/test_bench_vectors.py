"""`quire bench vectors` with tiny sizes: both parts are measured. No time is looked at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire import cli


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
