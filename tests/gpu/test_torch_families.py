"""The torch decoder against logits that transformers gave, for every family that it runs."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.compute.models import read_model
from quire.compute.models.source import ModelFolder
from support.torch_runs import FLOAT32, TorchRun

DATA = Path(__file__).parent.parent / "golden" / "data" / "families"
CASES: dict[str, Any] = json.loads((DATA / "cases.json").read_text())
NOT_ON_TORCH = (
    "afmoe",
    "bamba",
    "deepseek",
    "falcon-h1",
    "gemma3n",
    "glm4-moe-lite",
    "granite4-h",
    "lfm2",
    "lfm3",
    "minicpm3",
    "mamba2",
    "nemotron-h",
    "olmo-hybrid",
    "qwen3-next",
    "qwen3-5",
    "youtu",
)
FORMS = [name for name in CASES["forms"] if not name.startswith(NOT_ON_TORCH)]


@pytest.mark.parametrize("name", FORMS)
def test_logits_and_text_are_those_that_transformers_gave(name: str, tmp_path: Path, device: str) -> None:
    form, tokens = CASES["forms"][name], CASES["tokens"]
    (tmp_path / "config.json").write_text(json.dumps(form["config"]))
    shutil.copy(DATA / form["weights"], tmp_path / "model.safetensors")
    spec = read_model(ModelFolder(tmp_path), len(tokens)).spec
    run = TorchRun(tmp_path, spec=spec, settings=replace(FLOAT32, device=device))
    text = [run.prefill(0, tokens, chunks=[10, 60])]
    text += run.decode(0, len(tokens), max(len(form["greedy"]) - 1, 0))
    assert text[: len(form["greedy"])] == form["greedy"]
    for position, theirs in form["logits"].items():
        difference = np.abs(run.logits[0, int(position)] - np.array(theirs, np.float32)).max()
        assert difference <= 1e-4 * max(1.0, np.abs(theirs).max())
    assert [int(run.logits[0, position].argmax()) for position in range(len(tokens))] == form["best"]
