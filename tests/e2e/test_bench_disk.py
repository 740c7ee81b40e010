"""`quire bench disk` with tiny sizes: every tier answers, and what is compared is told. No time is looked at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire import cli
from quire.core.config import EngineConfig
from quire.core.errors import ExecutionError
from quire.instruments.bench.disk_turns import run_turns


def test_each_tier_answers_and_a_full_store_is_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "disk.json"
    sizes = ["--prefix", "128", "--repeat", "1", "--chats", "2", "--store-size", "256KiB", "--kv-memory", "8MiB"]
    line = ["bench", "disk", "--shape", "tiny", *sizes, "--json", str(out)]
    assert cli.main(line) in (cli.DONE, 1)
    printed, samples = capsys.readouterr().out, json.loads(out.read_text())["samples"]
    assert list(samples["First token by tier"]["s"]) == ["cold", "device", "page cache", "disk", "killed"]
    assert samples["Chats during a load"]["runs"][0]["disturbed_s"]
    assert "The full store has 256.0 KiB, 30 blocks." in printed
    assert "128 tokens came from disk in 1 runs" in printed


def test_engines_take_turns_and_one_part_can_be_measured_alone(tmp_path: Path) -> None:
    workload, out = tmp_path / "workload_two.jsonl", tmp_path / "disk.json"
    request = {"prompt_token_ids": list(range(40)), "max_tokens": 3}
    workload.write_text("".join(json.dumps(request | {"id": index}) + "\n" for index in range(4)))
    line = ["bench", "disk", "--shape", "tiny", "--only", "throughput", "--repeat", "2", "--kv-memory", "8MiB"]
    assert cli.main([*line, "--workload", str(workload), "--json", str(out)]) in (cli.DONE, 1)
    samples = json.loads(out.read_text())["samples"]
    assert list(samples) == ["Throughput with a disk"]
    found = samples["Throughput with a disk"]
    assert {write: {name: len(rates) for name, rates in pair.items()} for write, pair in found["tok/s"].items()} == {
        "on_hit": {"off": 2, "on_hit": 2},
        "always": {"off": 2, "always": 2},
    }
    assert found["stored"]["on_hit"] >= 4, "two full blocks of each turn"
    assert found["stored"]["always"] >= 4


def test_a_process_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(ExecutionError, match=r"a process ended with status 1: .*nothing"):
        run_turns({"one": EngineConfig(model="guide")}, str(tmp_path / "nothing"), 0, range(1))
