"""`quire bench speculation`: it runs, compares the texts, and says what was foreseen next to what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire import cli


@pytest.mark.parametrize("speculation", ["auto", "guide"])
def test_texts_are_compared_and_the_gain_stands_next_to_the_one_foreseen(
    speculation: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.json"
    line = f"bench speculation guide --speculation {speculation} --workloads json chat --sequences 1 2 --repeat 2"
    assert cli.main([*line.split(), "--output-tokens", "24", "--json", str(out)]) in (cli.DONE, 1)
    header = next(line for line in capsys.readouterr().out.splitlines() if "asked for" in line)
    assert header.index("gain") < header.index("foreseen") < header.index("tokens a step")
    samples = json.loads(out.read_text())["samples"]["Guesses"]
    kinds = [f"{kind} {temperature}" for kind in ("json", "chat") for temperature in ("0", "0.8")]
    assert set(samples) == {f"{kind} {count}" for kind in kinds for count in (1, 2)}
    turns = [turn for turns in samples.values() for turn in turns]
    assert all(turn["num_tokens"] > 0 for turn in turns)
    assert any(turn["num_verified"] for turn in turns)
