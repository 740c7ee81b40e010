"""Qwen3 against transformers: the logits of every position, and greedy text.

Twice: with transformers where it is installed, and against logits that it gave once
(`scripts/make_goldens.py`), so that every machine compares with it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from support.reference_runs import ReferenceRun

DATA = Path(__file__).parent / "data" / "qwen3"
CASES: dict[str, Any] = json.loads((DATA / "cases.json").read_text())
WINDOWS = {"use_sliding_window": True, "sliding_window": 24}
FORMS: dict[str, dict[str, object]] = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "tied-windows": {"tie_word_embeddings": True, "max_window_layers": 1, **WINDOWS},
    "untied-windows": {"tie_word_embeddings": False, "max_window_layers": 0, **WINDOWS},
    "bias": {"tie_word_embeddings": False, "attention_bias": True},
}


def assert_close(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> None:
    """|Δ| ≤ 1e-4 × max(1, max |logit|), at every position and token."""
    assert np.abs(ours - theirs).max() <= 1e-4 * max(1.0, float(np.abs(theirs).max()))


@pytest.mark.parametrize("name", CASES["forms"])
def test_logits_and_text_are_those_that_transformers_gave(name: str, tmp_path: Path) -> None:
    form = CASES["forms"][name]
    (tmp_path / "config.json").write_text(json.dumps(form["config"]))
    shutil.copy(DATA / "model.safetensors", tmp_path)
    run = ReferenceRun(tmp_path)
    tokens = CASES["tokens"]
    first = run.prefill(0, tokens, chunks=[10, 60])
    assert [first, *run.decode(0, len(tokens), len(form["greedy"]) - 1)] == form["greedy"]
    for position, logits in form["logits"].items():
        assert_close(run.logits[0, int(position)], np.array(logits, np.float32))
    best = [int(run.logits[0, position].argmax()) for position in range(len(tokens))]
    assert best == form["best"]


@pytest.mark.transformers
@pytest.mark.parametrize("name", FORMS)
def test_logits_and_text_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    from support import transformers_models

    model = transformers_models.tiny_qwen3_model(**FORMS[name])
    run = ReferenceRun(transformers_models.save(model, tmp_path))
    tokens = [(7 * i * i + 3 * i) % 128 for i in range(150)]
    first = run.prefill(0, tokens)
    generated = [first, *run.decode(0, len(tokens), 29)]
    known = tokens + generated[:-1]
    ours = np.stack([run.logits[0, position] for position in range(len(known))])
    theirs = transformers_models.all_logits(model, known)
    assert_close(ours, theirs)
    assert np.array_equal(ours.argmax(1), theirs.argmax(1))
    # Each token is the likeliest after those before it, so transformers would have written the same text.
    assert generated == theirs[len(tokens) - 1 :].argmax(1).tolist()
