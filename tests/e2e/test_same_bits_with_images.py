"""Prompts with images: the same tokens and log-probabilities, to the bit, whatever happens around a request.

Requests begin alike, some with the same images and some with others behind the same tokens.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.compute.models import read_model
from quire.compute.models.source import ModelFolder
from quire.core.images import Image
from support.image_jobs import run, workload
from support.swaps import lost_where_moved_out, noted_swaps
from support.vision_models import SETTINGS, write_vision_model

LONGEST = 300
WHOLE = ("gemma4-31b", "gemma4-unified", "whole")
"""Models whose images are computed in one step; in those of Gemma 4, windows are shorter than images."""

TWINS = ("glm4v-moe", "internvl-6b")
"""Models with the encoder or the text model of another one here."""


class Model:
    """A tiny model that reads images, its requests, and their texts alone."""

    def __init__(self, name: str, folder: Path, *, are_whole: bool) -> None:
        self.folder = write_vision_model(folder, SETTINGS[name])
        self.jobs = workload(name, read_model(ModelFolder(self.folder)), are_whole=are_whole)
        with self.make(num_threads=1, enable_prefix_caching=False) as llm:
            self.alone = [run(llm, [each])[0] for each in self.jobs]

    def make(self, **settings: Any) -> LLM:
        defaults = {"kv_memory": "8MiB", "max_model_len": LONGEST, "dtype": "bfloat16", "num_threads": 2}
        return LLM(self.folder, skip_tokenizer_init=True, **{**defaults, **settings})


MODELS = [*(name for name in SETTINGS if name not in TWINS), "whole"]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    are_whole = request.param in WHOLE
    name = "smolvlm" if request.param == "whole" else request.param
    return Model(name, tmp_path_factory.mktemp("model"), are_whole=are_whole)


SCHEDULES: dict[str, dict[str, Any]] = {
    "blocks": {"block_size": 64, "prefix_index": "radix_tree"},
    "small_chunks": {"max_num_batched_tokens": 9, "max_num_seqs": 9},
    "steps_ahead": {"max_num_seqs": 3, "max_steps_under_way": 3},
    "guesses": {"speculation": "ngram"},
}


def every_other(*values: str) -> pytest.MarkDecorator:
    """Run a test with every other pair of a model and a value; `make test-long` has the rest."""
    pairs = [
        pytest.param(model, value, marks=[pytest.mark.long] * ((row + column) % 2))
        for row, model in enumerate(MODELS)
        for column, value in enumerate(values)
    ]
    return pytest.mark.parametrize(("model", "value"), pairs, indirect=["model"])


@every_other(*SCHEDULES)
def test_any_schedule_is_as_alone(model: Model, value: str) -> None:
    with model.make(**SCHEDULES[value]) as llm:
        assert run(llm, model.jobs) == model.alone
        again = random.Random(1).sample(range(len(model.jobs)), len(model.jobs))
        assert run(llm, [model.jobs[index] for index in again]) == [model.alone[index] for index in again]
        assert llm.engine.stats().hit_tokens_total > 0


@every_other("recompute", "swap")
def test_preempted_is_as_alone(model: Model, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    swapped = noted_swaps(monkeypatch)
    settings: dict[str, Any] = {}
    if value == "swap":
        lost_where_moved_out(monkeypatch)
        settings = {"swap_space": "4MiB", "enable_prefix_caching": False}
    jobs = [
        (prompt, images, replace(wanted, max_tokens=min(60, LONGEST - len(prompt))))
        for prompt, images, wanted in model.jobs
    ]
    with model.make(kv_memory="100KiB", preemption=value, **settings) as llm:
        texts = run(llm, jobs)
        assert llm.engine.scheduler.num_preemptions > 0
        assert any(swapped) == (value == "swap")
    for (tokens, logprobs), (expected, of_expected) in zip(texts, model.alone, strict=True):
        assert (tokens[: len(expected)], logprobs[: len(expected)]) == (expected, of_expected)


def test_from_the_disk_is_as_alone(model: Model, tmp_path: Path) -> None:
    settings = {"disk_cache": str(tmp_path / "store"), "disk_cache_size": "16MiB"}
    for _ in range(3):
        with model.make(**settings) as llm:
            assert run(llm, model.jobs[:6]) == model.alone[:6]
            num_loaded = llm.engine.stats().disk_hit_tokens_total
    assert num_loaded > 0


def test_other_pixels_behind_the_same_tokens_make_another_text(model: Model) -> None:
    prompt, images, sampling = model.jobs[3]
    shown = replace(images[0], pixels=bytes(len(images[0].pixels)))
    other = replace(images[0], pixels=shown.pixels, digest=Image.of(0, 4, 1, 1, bytes(3)).digest)
    with model.make() as llm:
        first, second = run(llm, [(prompt, images, sampling), (prompt, (other, *images[1:]), sampling)])
    assert first == model.alone[3] != second
