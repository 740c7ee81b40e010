"""`quire plan` and `quire simulate` on the built-in guide, and on the settings that are kept here."""

from __future__ import annotations

import json

import pytest

from quire.cli import main

MODELS = {"guide": 1_536, "qwen3-0.6b": 114_688, "llama-3.1-8b": 131_072, "opt-13b": 819_200}
"""Bytes of keys and values of a token, by their published shapes."""
REQUESTS = ["--hardware", "nvidia-a100-40gb", "--prompt-tokens", "60", "--output-tokens", "20"]
BRIEF = ["--rate", "2", "--duration", "10", "--max-model-len", "512", "--kv-memory", "1GiB"]


@pytest.mark.parametrize("model", MODELS)
def test_a_plan_is_made(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", model, *REQUESTS, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["machines"][0]["bytes_per_token"] == MODELS[model]


@pytest.mark.parametrize("model", MODELS)
def test_traffic_is_simulated(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", model, *REQUESTS, *BRIEF, "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    (result,) = report["results"].values()
    assert report["title"].startswith(model)
    assert result["output_tokens"] == 20 * result["num_requests"] > 0
    assert result["replicas"][0]["ledger"]["bytes_per_block"] == 16 * MODELS[model]
