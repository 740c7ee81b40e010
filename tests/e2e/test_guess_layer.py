"""A model's own layer that guesses, over whole engines: the same texts to the bit, and the same guesses.

A model whose next token depends on the last one only, with a layer that computes the same function, must guess every
token. With random weights, its guesses depend on every entry of the layer: so a hole in them, or one of another text,
shows as another guess than in an engine that has nothing else to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.core.guesses import Guesses
from support.guess_layers import DEEPSEEK_V3, QWEN3_5, write_guessing_model
from support.guess_runs import WORKLOAD, counts_of, make, run

Known = dict[tuple[int, ...], list[int]]
SCHEDULES: dict[str, dict[str, Any]] = {
    "together": {"max_num_seqs": 5},
    "small_chunks": {"max_num_batched_tokens": 9, "max_num_seqs": 9},
    "steps_ahead": {"max_steps_under_way": 3, "max_num_batched_tokens": 40, "block_size": 32},
    "radix_tree": {"prefix_index": "radix_tree", "num_threads": 1},
}
MODELS: Mapping[str, Mapping[str, object]] = {"qwen3_5": QWEN3_5, "deepseek_v3": DEEPSEEK_V3}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models by name: with random weights, and as `-right` those that are always right."""
    base, found = tmp_path_factory.mktemp("guessing"), {}
    for name, config in MODELS.items():
        for ending, is_right in (("", False), ("-right", True)):
            found[name + ending] = base / (name + ending)
            write_guessing_model(found[name + ending], config, is_always_right=is_right)
    return found


def noted_guesses(llm: LLM) -> Known:
    """Return the guesses that an engine makes from now on, by text; each time the same. Mutates the engine."""
    rows, known = llm.engine._executor._layer, Known()
    follow = rows.follow

    def noted(batch: Any, depths: Mapping[int, int]) -> tuple[dict[int, Guesses], int]:
        guesses, pass_us = follow(batch, depths)
        for row, (_, tokens) in guesses.items():
            before = known.setdefault(tuple(batch.tokens(row)), tokens.tolist())
            assert all(one == other for one, other in zip(before, tokens, strict=False))
        return guesses, pass_us

    rows.follow = noted
    return known


def compare(one: Known, other: Known, least: int) -> None:
    """Assert that two engines guess the same after the same texts, at least this many times."""
    texts = one.keys() & other.keys()
    assert len(texts) >= least
    for text in texts:
        assert all(this == that for this, that in zip(one[text], other[text], strict=False)), text


ALONE: dict[Path, tuple[list[object], Known]] = {}


def alone(folder: Path) -> tuple[list[object], Known]:
    """Return the texts of requests that run alone, without guesses, and the guesses that the layer then makes."""
    if folder not in ALONE:
        settings: dict[str, Any] = {"dtype": "bfloat16", "num_threads": 1, "enable_prefix_caching": False}
        with make(folder, **settings) as llm:
            texts = [text for each in WORKLOAD for text in run(llm, [each])]
        with make(folder, **settings, speculation="mtp") as llm:
            known = noted_guesses(llm)
            assert [text for each in WORKLOAD for text in run(llm, [each])] == texts
        ALONE[folder] = texts, known
    return ALONE[folder]


TEXTS: dict[Path, list[object]] = {}


def texts_of(folder: Path) -> list[object]:
    """Return the texts of requests without guesses, of a model in float32."""
    if folder not in TEXTS:
        with make(folder, dtype="float32") as llm:
            TEXTS[folder] = run(llm, WORKLOAD)
    return TEXTS[folder]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", MODELS)
def test_texts_and_guesses_are_the_same_in_any_schedule(folders: dict[str, Path], name: str, schedule: str) -> None:
    """The second time, from cached prompts."""
    folder = folders[name]
    texts, guesses = alone(folder)
    with make(folder, dtype="bfloat16", speculation="mtp", enable_prefix_caching=False, **SCHEDULES[schedule]) as llm:
        known = noted_guesses(llm)
        assert run(llm, WORKLOAD) == texts
        compare(known, guesses, 15)
    folder = folders[f"{name}-right"]
    texts = texts_of(folder)
    with make(folder, dtype="float32", speculation="mtp", **SCHEDULES[schedule]) as llm:
        for _ in range(2):
            assert run(llm, WORKLOAD) == texts
        num_verified, num_right = counts_of(llm, "mtp")
        assert num_verified == num_right > 50
        assert llm.engine.scheduler.memory.num_looked_up[1] > 0


def test_a_layer_of_random_weights_is_rarely_right(folders: dict[str, Path]) -> None:
    with make(folders["qwen3_5"], dtype="bfloat16", speculation="mtp") as llm:
        assert run(llm, WORKLOAD) == alone(folders["qwen3_5"])[0]
        num_verified, num_right = counts_of(llm, "mtp")
        assert num_verified > 100
        assert num_right < num_verified / 10
