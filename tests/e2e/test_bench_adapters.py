"""`quire bench adapters` with tiny sizes: every kind of step is measured. No time is looked at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire import cli


def test_each_kind_of_step_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "adapters.json"
    sizes = ["--rows", "3", "--rank", "8", "--prompt", "40", "--repeat", "2", "--kv-memory", "8MiB"]
    assert cli.main(["bench", "adapters", "--shape", "tiny", *sizes, "--json", str(out)]) in (cli.DONE, 1)
    samples = json.loads(out.read_text())["samples"]["Steps with adapters"]
    assert {kind: len(gaps) for kind, gaps in samples["gap_ms"].items()} == {"none": 2, "one": 2, "each": 2}
    assert list(samples["prompt_ms"]) == ["none", "one"]
    assert "3 sequences decode 48 tokens after 256" in capsys.readouterr().out
