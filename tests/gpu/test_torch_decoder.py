"""The torch decoder: as the reference, and in the batch-invariant mode the same bits whatever happens around a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quire.compute.torch.settings import TorchSettings
from quire.core.step import NO_BLOCK, BlockCopy, BlockMove
from support.reference_runs import ReferenceRun
from support.spec_models import ON_TORCH, SPECS, write_spec_model
from support.step_plans import Work, shuffled
from support.tiny_checkpoint import write_tiny_qwen3
from support.torch_runs import FLOAT32, TorchRun

LENGTH = 150  # three tiles of 64
TOKENS = [(7 * i * i + 3 * i + 5) % 64 for i in range(LENGTH)]
CHUNKS = [1, 1, 9, 3, 48, 1, 1, 1, 1, *[7] * 8, 5, 1, 1, 1, 9]
"""Single tokens at the start, and before and behind the ends of tiles, and chunks that end in a tile and go beyond."""
WINDOWS = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
MODELS = ["full", "windows", *ON_TORCH]
MIXED = ["windows", "experts"]
INVARIANT = replace(FLOAT32, batch_invariant=True)
MACHINES = {
    "float32": INVARIANT,
    "bfloat16": replace(INVARIANT, dtype="bfloat16"),
    "int8": replace(INVARIANT, weights="int8", kv_dtype="int8"),
    "fp8": replace(INVARIANT, dtype="bfloat16", kv_dtype="fp8"),
    "k8v4": replace(INVARIANT, dtype="bfloat16", kv_dtype="k8v4"),
    "int4": replace(INVARIANT, kv_dtype="int4"),
}


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
        self._bits: dict[tuple[str, TorchSettings], bytes] = {}

    def expected(self, model: str) -> np.ndarray:
        if model not in self._expected:
            run = self.reference(model)
            run.prefill(0, TOKENS)
            self._expected[model] = logits_of(run)
        return self._expected[model]

    def reference(self, model: str, *, kv_dtype: str = "float32") -> ReferenceRun:
        return ReferenceRun(self._folder / model, spec=SPECS.get(model), kv_dtype=kv_dtype)

    def run(self, model: str, settings: TorchSettings = FLOAT32, **options: object) -> TorchRun:
        settings = replace(settings, device=self._device)
        return TorchRun(self._folder / model, spec=SPECS.get(model), settings=settings, **options)  # type: ignore[arg-type]

    def bits(self, model: str, settings: TorchSettings) -> bytes:
        """Return the bits of a model's logits, computed alone and in one step."""
        key = model, settings
        if key not in self._bits:
            run = self.run(model, settings)
            run.prefill(0, TOKENS)
            self._bits[key] = run.bits(0, LENGTH)
        return self._bits[key]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, device: str) -> Models:
    return Models(tmp_path_factory.mktemp("models"), device)


def each_case(models: Sequence[str]) -> pytest.MarkDecorator:
    """Every model in float32, and two of them with other numbers."""
    cases = [(model, "float32") for model in models]
    cases += [(model, numbers) for model in models for numbers in MACHINES if model in MIXED and numbers != "float32"]
    return pytest.mark.parametrize(("model", "numbers"), cases)


def logits_of(run: ReferenceRun, row: int = 0) -> np.ndarray:
    return np.stack([run.logits[row, position] for position in range(LENGTH)])


@pytest.mark.parametrize("model", MODELS)
def test_logits_are_those_of_the_reference(model: str, models: Models) -> None:
    expected = models.expected(model)
    run = models.run(model, blocks=shuffled(64))
    run.prefill(0, TOKENS, chunks=[30, 41])
    assert np.abs(logits_of(run) - expected).max() <= 1e-4 * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("model", MODELS)
def test_half_precision_is_near(model: str, dtype: str, models: Models) -> None:
    expected = models.expected(model)
    run = models.run(model, replace(FLOAT32, dtype=dtype))
    run.prefill(0, TOKENS, chunks=[30, 41])
    # These models have random weights and make much of small differences; those of float16 are 8 times smaller.
    assert 0 < np.std(logits_of(run) - expected) <= {"bfloat16": 0.12, "float16": 0.015}[dtype] * np.std(expected)


@pytest.mark.parametrize("model", MODELS)
def test_int8_weights_are_near(model: str, models: Models) -> None:
    expected = models.expected(model)
    run = models.run(model, replace(FLOAT32, weights="int8"))
    run.prefill(0, TOKENS)
    assert 0 < np.std(logits_of(run) - expected) <= 0.12 * np.std(expected)


@pytest.mark.parametrize("kv_dtype", ["int8", "k8v4", "int4"])
@pytest.mark.parametrize("model", MODELS)
def test_narrow_kv_is_that_of_the_reference(model: str, kv_dtype: str, models: Models) -> None:
    expected, reference = models.expected(model), models.reference(model, kv_dtype=kv_dtype)
    run = models.run(model, replace(FLOAT32, kv_dtype=kv_dtype))
    for each in (reference, run):
        each.prefill(0, TOKENS, chunks=[30, 41])
    right, ours = logits_of(reference), logits_of(run)
    # A last bit that differs may tip the rounding of a key over; most of the logits agree as floats do.
    assert np.median(np.abs(ours - right)) <= 1e-4 * np.std(right)
    assert np.std(ours - right) <= 0.2 * np.std(right - expected)


@pytest.mark.parametrize("model", MODELS)
def test_fp8_kv_is_near(model: str, models: Models) -> None:
    expected = models.expected(model)
    run = models.run(model, replace(FLOAT32, kv_dtype="fp8"))
    run.prefill(0, TOKENS, chunks=[30, 41])
    assert 0 < np.std(logits_of(run) - expected) <= 0.3 * np.std(expected)


# --- the same bits ---------------------------------------------------------------------------------------------------


@each_case(MODELS)
def test_any_chunks_give_the_same_bits(model: str, numbers: str, models: Models) -> None:
    machine = MACHINES[numbers]
    expected = models.bits(model, machine)
    run = models.run(model, machine)
    run.prefill(0, TOKENS, chunks=CHUNKS if model in SPECS else [1] * (LENGTH - 1))
    assert run.bits(0, LENGTH) == expected


@each_case(MODELS)
def test_a_batch_gives_the_same_bits(model: str, numbers: str, models: Models) -> None:
    machine = MACHINES[numbers]
    run = models.run(model, machine, num_blocks=256, blocks=shuffled(256))
    for row in range(4):
        run.driver.open(row, [(token + row) % 64 for token in TOKENS])
    run.step(Work(1, 0, 70), Work(2, 0, 21))
    # The row stands behind decodes of others, before a chunk of another, or alone.
    run.step(Work(1, 70, 1), Work(2, 21, 1), Work(0, 0, 60), Work(3, 0, 33))
    run.step(Work(2, 22, 1), Work(0, 60, 1), Work(3, 33, 9))
    run.step(Work(0, 61, 50))
    run.step(Work(1, 71, 1), Work(0, 111, LENGTH - 111))
    assert run.bits(0, LENGTH) == models.bits(model, machine)


@pytest.mark.parametrize("block_size", [32, 128])
@each_case(["windows", "caps"])
def test_any_block_size_gives_the_same_bits(model: str, numbers: str, block_size: int, models: Models) -> None:
    machine = MACHINES[numbers]
    run = models.run(model, replace(machine, block_size=block_size), blocks=shuffled(64))
    run.prefill(0, TOKENS)
    assert run.bits(0, LENGTH) == models.bits(model, machine)


@each_case(["full", "windows"])
def test_cached_copied_and_swapped_blocks_give_the_same_bits(model: str, numbers: str, models: Models) -> None:
    machine = MACHINES[numbers]
    run = models.run(model, machine, num_blocks=256, num_host_blocks=32)
    run.driver.open(0, TOKENS)
    run.step(Work(0, 0, 70))
    num_groups = len(run.driver.spec.groups)
    tables = {group: list(run.driver.tables[0, group]) for group in range(num_groups)}
    # Another row takes the first blocks as they are, and goes on with a copy of the last one, which is not full.
    run.driver.open(1, TOKENS)
    copies = []
    for group, blocks in tables.items():
        for index, block in enumerate(blocks[:-1]):
            run.driver.set_block(1, group, index, block)
        copy = next(run.driver.free)
        run.driver.set_block(1, group, len(blocks) - 1, copy)
        copies.append(BlockCopy(blocks[-1], copy))
    run.step(Work(1, 70, 40), copies=copies)
    # Then all its blocks go to the host, and come back elsewhere.
    held = [(group, index, block) for group in tables for index, block in enumerate(run.driver.tables[1, group])]
    moves = [BlockMove(block, host) for host, (_, _, block) in enumerate(held)]
    run.step(Work(0, 70, 1), moves_out=moves)
    back = []
    for host, (group, index, _) in enumerate(held):
        elsewhere = next(run.driver.free)
        run.driver.set_block(1, group, index, elsewhere)
        back.append(BlockMove(elsewhere, host))
    run.step(Work(1, 110, LENGTH - 110), moves_in=back)
    run.logits |= {(1, position): run.logits[0, position] for position in range(70)}
    assert run.bits(1, LENGTH) == models.bits(model, machine)


def test_blocks_behind_a_window_are_not_read(models: Models) -> None:
    run = models.run("windows", INVARIANT)
    run.driver.open(0, TOKENS)
    run.step(Work(0, 0, 100))
    for group, each in enumerate(run.driver.spec.groups):
        if each.window is not None:
            for index in range((100 - each.window) // 16):
                run.driver.set_block(0, group, index, NO_BLOCK)
    run.step(Work(0, 100, LENGTH - 100))
    assert run.bits(0, LENGTH) == models.bits("windows", INVARIANT)
