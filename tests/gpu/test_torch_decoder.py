"""The torch decoder: as the reference, and in the batch-invariant mode the same bits whatever happens around a row."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.compute.torch.settings import TorchSettings
from support.reference_runs import ReferenceRun
from support.spec_models import SPECS, write_spec_model
from support.tiny_checkpoint import write_tiny_qwen3
from support.torch_runs import FLOAT32, TorchRun

LENGTH = 150  # three tiles of 64
TOKENS = [(7 * i * i + 3 * i + 5) % 64 for i in range(LENGTH)]
WINDOWS = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
MODELS = ["full", "windows", *SPECS]
KV_DTYPES = ["float32", "bfloat16", "int8", "fp8"]


class Models:
    """Folders of the models, and the logits that the reference has for each."""

    def __init__(self, folder: Path, device: str) -> None:
        for name in MODELS:
            (folder / name).mkdir()
            if name in SPECS:
                write_spec_model(folder / name, SPECS[name])
            else:
                write_tiny_qwen3(folder / name, settings=WINDOWS if name == "windows" else {})
        self._folder = folder
        self._device = device
        self._expected: dict[str, np.ndarray] = {}

    def expected(self, model: str) -> np.ndarray:
        if model not in self._expected:
            run = ReferenceRun(self._folder / model, spec=SPECS.get(model))
            run.prefill(0, TOKENS)
            self._expected[model] = logits_of(run)
        return self._expected[model]

    def run(self, model: str, settings: TorchSettings = FLOAT32, **options: object) -> TorchRun:
        settings = replace(settings, device=self._device)
        return TorchRun(self._folder / model, spec=SPECS.get(model), settings=settings, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Models(tmp_path_factory.mktemp("models"), device)


def logits_of(run: ReferenceRun, row: int = 0) -> np.ndarray:
    return np.stack([run.logits[row, position] for position in range(LENGTH)])


def shuffled(count: int) -> list[int]:
    blocks = list(range(count))
    random.Random(0).shuffle(blocks)
    return blocks


@pytest.mark.parametrize("model", MODELS)
def test_logits_are_those_of_the_reference(model: str, models: Models) -> None:
    expected = models.expected(model)
    run = models.run(model, blocks=shuffled(64))
    run.prefill(0, TOKENS, chunks=[30, 41])
    assert np.abs(logits_of(run) - expected).max() <= 1e-4 * max(1.0, np.abs(expected).max())
