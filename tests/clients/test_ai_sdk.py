"""The AI SDK, which chat programs for desktops and browsers are built on, by OpenAI's interface and by Ollama's."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("ai_sdk.mjs")


@pytest.fixture(scope="module")
def found(server: str) -> dict[str, Any]:
    modules = Path(os.environ["QUIRE_NODE_MODULES"])
    script = modules.parent / SCRIPT.name  # a script finds the modules that are in its own folder
    script.write_bytes(SCRIPT.read_bytes())
    done = subprocess.run(["node", script, server], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("interface", ["openai", "ollama"])
def test_answers_streams_and_objects(interface: str, found: dict[str, Any]) -> None:
    answer = found[interface]
    assert answer["text"] and answer["text"] == answer["streamed"]
    assert answer["finish"] == "length"
    assert answer["usage"]["outputTokens"] == 24
    assert 0 <= answer["held"]["count"] <= 99


def test_both_interfaces_say_the_same(found: dict[str, Any]) -> None:
    assert found["openai"]["text"] == found["ollama"]["text"]
