"""`quire bench speculation`: it runs, compares the texts, and says what was foreseen next to what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, cli


@pytest.mark.parametrize("speculation", ["auto", "guide"])
def test_texts_are_compared_and_the_gain_stands_next_to_the_one_foreseen(
    speculation: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.json"
    line = f"bench speculation guide --kv-memory 32MiB --speculation {speculation} --workloads json chat"
    sizes = "--sequences 1 2 --repeat 1 --output-tokens 12"
    assert cli.main([*line.split(), *sizes.split(), "--json", str(out)]) in (cli.DONE, 1)
    header = next(line for line in capsys.readouterr().out.splitlines() if "asked for" in line)
    assert header.index("gain") < header.index("foreseen") < header.index("tokens a step")
    samples = json.loads(out.read_text())["samples"]["Guesses"]
    kinds = [f"{kind} {temperature}" for kind in ("json", "chat") for temperature in ("0", "0.8")]
    assert set(samples) == {f"{kind} {count}" for kind in kinds for count in (1, 2)}
    turns = [turn for turns in samples.values() for turn in turns]
    assert all(turn["num_tokens"] > 0 for turn in turns)
    assert any(turn["num_verified"] for turn in turns)


def test_questions_of_a_file_are_asked_once_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    questions, asked = [f"What is question {number}?" for number in range(8)], list[str]()
    chat = LLM.chat

    def noted(llm: LLM, messages: list[list[dict[str, str]]], *arguments: Any, **options: Any) -> Any:
        asked.extend(each[0]["content"] for each in messages)
        return chat(llm, messages, *arguments, **options)

    monkeypatch.setattr(LLM, "chat", noted)
    file = tmp_path / "questions.txt"
    line = (
        f"bench speculation guide --kv-memory 32MiB --workloads chat --sequences 1 --output-tokens 4 --questions {file}"
    )
    file.write_text("\n".join(questions))
    assert cli.main([*line.split(), "--repeat", "3"]) in (cli.DONE, 1)
    assert sorted(asked) == sorted(2 * questions)  # by both engines
    assert cli.main([*line.split(), "--repeat", "4"]) == cli.MISUSED
    assert "allowed: a file of 10 questions or more, not 8: no question is used twice" in capsys.readouterr().err
    file.unlink()
    assert cli.main([*line.split(), "--repeat", "3"]) == cli.MISUSED
    assert "allowed: a UTF-8 text file, one question per line" in capsys.readouterr().err
