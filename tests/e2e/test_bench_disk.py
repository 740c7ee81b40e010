"""`quire bench disk` with tiny sizes: every tier answers, and what is compared is told. No time is looked at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire import cli


def test_each_tier_answers_and_a_full_store_is_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload, out = tmp_path / "workload_two.jsonl", tmp_path / "disk.json"
    request = {"id": 0, "prompt_token_ids": list(range(40)), "max_tokens": 3}
    workload.write_text(json.dumps(request) + "\n" + json.dumps(request | {"id": 1}) + "\n")
    sizes = ["--prefix", "128", "--repeat", "1", "--chats", "2", "--store-size", "256KiB", "--kv-memory", "8MiB"]
    line = ["bench", "disk", "--shape", "tiny", *sizes, "--workload", str(workload), "--json", str(out)]
    assert cli.main(line) in (cli.DONE, 1)
    printed, samples = capsys.readouterr().out, json.loads(out.read_text())["samples"]
    assert list(samples["First token by tier"]["s"]) == ["cold", "device", "page cache", "disk", "killed"]
    assert list(samples["Throughput with a disk"]["tok/s"]) == ["off", "on_hit", "always"]
    assert samples["Chats during a load"]["runs"][0]["disturbed_s"]
    assert "The full store has 256.0 KiB, 30 blocks." in printed
    assert "128 tokens came from there in 1 runs" in printed
