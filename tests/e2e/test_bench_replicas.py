"""`quire bench replicas`: an engine is lost among real streams, whose texts are compared, and two engines are timed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire import cli


def test_streams_of_a_lost_engine_end_with_the_same_texts(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    line = f"bench replicas --only loss --streams 12 --output-tokens 400 --repeat 1 --json {out}"
    assert cli.main(line.split()) == cli.DONE
    samples = json.loads(out.read_text())["samples"]["When an engine is lost"]
    assert set(samples) == {"calm", "killed", "restarted"}
    for turns in samples.values():
        (turn,) = turns
        assert (turn["num_lost"], turn["num_changed"], len(turn["pauses_s"])) == (0, 0, 12)


def test_streams_too_short_to_lose_an_engine_among_them_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    line = "bench replicas --only loss --streams 2 --output-tokens 2 --repeat 1"
    assert cli.main(line.split()) == 1
    assert "streams ended before all had begun: take longer ones (--output-tokens)" in capsys.readouterr().err


def test_one_engine_and_two_run_the_same_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, workload = tmp_path / "run.json", tmp_path / "small.jsonl"
    lines = [{"id": number, "prompt_token_ids": [300 + number] * 20, "max_tokens": 8} for number in range(6)]
    workload.write_text("\n".join(map(json.dumps, lines)))
    line = f"bench replicas --only speed --shape tiny --workload {workload} --limit 4 --repeat 2 --json {out}"
    assert cli.main(line.split()) == cli.DONE
    assert "4 requests of small.jsonl at once over HTTP" in capsys.readouterr().out
    samples = json.loads(out.read_text())["samples"]["Two engines"]
    assert [len(samples[name]) for name in ("one engine", "two engines")] == [2, 2]
    assert all(turn["wall_s"] > 0 for turns in samples.values() for turn in turns)


def test_speed_needs_a_workload(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "replicas", "--only", "speed"]) == cli.MISUSED
    assert "workload" in capsys.readouterr().err
