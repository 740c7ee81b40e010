"""Stores of other programs and quantised folders of strangers: every model is found or refused in one line."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from support.hostile_trials import quantised_trial, stores_trial


def run_stores(first: int, count: int, home: Path) -> None:
    seen = Counter[str]()
    for seed in range(first, first + count):
        seen.update(stores_trial(seed, home))
        shutil.rmtree(home)
    # Neither is all refused, nor nothing, and what is not there is not found.
    num_found = sum(
        number for name, number in seen.items() if name.endswith(("ForCausalLM", "ForSequenceClassification", "Model"))
    )
    assert min(seen["refused"], seen["None"], num_found) > count, seen
    assert sum(number for name, number in seen.items() if name.isdecimal()) > count / 4  # files that could be removed


def run_quantised(first: int, count: int, folder: Path) -> None:
    seen = Counter[str]()
    for seed in range(first, first + count):
        seen[quantised_trial(seed, folder)] += 1
        shutil.rmtree(folder)
    assert seen["refused"] > count / 5 and seen["a model"] > count / 40


def test_broken_stores_are_listed_or_refused_in_one_line(tmp_path: Path) -> None:
    run_stores(0, 40, tmp_path / "home")


def test_broken_quantised_folders_are_loaded_or_refused_in_one_line(tmp_path: Path) -> None:
    run_quantised(0, 40, tmp_path / "folder")


@pytest.mark.long
@pytest.mark.parametrize("shard", range(8))
def test_many_broken_stores_and_quantised_folders(shard: int, tmp_path: Path) -> None:
    run_stores(1000 * (shard + 1), 1000, tmp_path / "home")
    run_quantised(1000 * (shard + 1), 1000, tmp_path / "folder")
