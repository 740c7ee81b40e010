"""The reference decoder: right against a dense oracle, and the same bits whatever happens around a row."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from quire.compute.models import read_model
from quire.compute.models.source import ModelFolder
from support.dense_oracle import DenseOracle
from support.reference_runs import ReferenceRun
from support.spec_models import SPECS, write_spec_model
from support.step_plans import chunks_of, shuffled
from support.tiny_checkpoint import tiny_qwen3_config, tiny_qwen3_tensors, write_tiny_qwen3

LENGTH = 150  # three tiles of 64
TOKENS = [(7 * i * i + 3 * i + 5) % 64 for i in range(LENGTH)]
ROWS = [
    [*[1] * 8, 54, *[1] * 7, 57, *[1] * 8],
    *(chunks_of(LENGTH, size) for size in (13, 16, 64, 100)),
    *([1], chunks_of(64, 7), chunks_of(65, 8), chunks_of(17, 3)),
]
"""The chunks of the rows of a batch. The first one decodes near the ends of tiles, at last alone."""
WINDOWS = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
MODELS = ["full", "windows", *SPECS]


def make_run(folder: Path, model: str, **options: object) -> ReferenceRun:
    """Return a run over a tiny Qwen3, or over one of the specs."""
    if model in SPECS:
        write_spec_model(folder, SPECS[model])
        return ReferenceRun(folder, spec=SPECS[model], **options)  # type: ignore[arg-type]
    write_tiny_qwen3(folder, settings=WINDOWS if model == "windows" else {})
    return ReferenceRun(folder, **options)  # type: ignore[arg-type]


@cache
def whole(model: str) -> bytes:
    """Return the logits of all positions, computed alone and in one step."""
    with TemporaryDirectory() as folder:
        run = make_run(Path(folder), model)
        run.prefill(0, TOKENS)
    return run.bits(0, LENGTH)


@pytest.mark.parametrize("model", SPECS)
def test_every_option_of_a_spec_is_as_in_a_dense_float64_model(model: str, tmp_path: Path) -> None:
    run = make_run(tmp_path, model)
    run.prefill(0, TOKENS, chunks=[30, 41])
    tensors = write_spec_model(tmp_path, SPECS[model])
    assert_close(run, DenseOracle(SPECS[model], tensors))


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 149, 150, 1000])
def test_a_sliding_window_is_a_mask_over_dense_attention(window: int, tmp_path: Path) -> None:
    settings = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1}
    write_tiny_qwen3(tmp_path, settings=settings)
    run = ReferenceRun(tmp_path)
    run.prefill(0, TOKENS, chunks=[70])
    tensors = tiny_qwen3_tensors(tiny_qwen3_config(), seed=0)
    assert_close(run, DenseOracle(read_model(ModelFolder(tmp_path)).spec, tensors))


DIGEST = """
import hashlib, sys
from pathlib import Path
from cpu.test_reference_decoder import MODELS, TOKENS, make_run
digest = hashlib.sha256()
for index, model in enumerate(MODELS):
    folder = Path(sys.argv[1]) / model
    folder.mkdir()
    run = make_run(folder, model, weights=("auto", "int8")[index % 2], num_blocks=64)
    run.prefill(0, TOKENS[:70])
    digest.update(run.bits(0, 70))
print(digest.hexdigest())
"""
WITHOUT_VECTORS = " ".join(np.__config__.show(mode="dicts")["SIMD Extensions"].get("found", []))
PROCESSORS = {
    "this": {},
    "another to BLAS": {"OPENBLAS_CORETYPE": "Prescott"},
    "an older one to BLAS": {"OPENBLAS_CORETYPE": "Nehalem"},
    "without vectors to numpy": {"NPY_DISABLE_CPU_FEATURES": WITHOUT_VECTORS},
}


def test_bits_are_the_same_on_every_processor(tmp_path: Path) -> None:
    """BLAS and numpy choose their kernels by the processor; no bit may depend on that choice."""
    digests = {}
    for name, settings in PROCESSORS.items():
        (tmp_path / name).mkdir()
        command = [sys.executable, "-c", DIGEST, str(tmp_path / name)]
        environ = os.environ | settings | {"PYTHONPATH": str(Path(__file__).parents[1])}
        digests[name] = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert set(digests.values()) == {digests["this"]}, digests


def assert_close(run: ReferenceRun, oracle: DenseOracle) -> None:
    theirs = oracle.logits(TOKENS)
    ours = np.stack([run.logits[0, position] for position in range(LENGTH)])
    assert np.abs(ours - theirs).max() <= 1e-4 * max(1.0, np.abs(theirs).max())


@pytest.mark.parametrize("model", ["full", "windows"])
def test_whole_and_cut_anywhere_give_the_same_bits(model: str, tmp_path: Path) -> None:
    expected = whole(model)
    run = make_run(tmp_path, model, num_blocks=1200)
    for row, cut in enumerate(cut for cut in range(1, LENGTH) if cut % 16 in (0, 1, 6, 15)):
        run.prefill(row, TOKENS, chunks=[cut])
        assert run.bits(row, LENGTH) == expected, f"cut at {cut}"
        run.driver.release(row)


# Every other pair is left to `make test-long`, as for the compiled decoder.
@pytest.mark.parametrize(
    ("block_size", "model"),
    [
        pytest.param(block_size, model, marks=[pytest.mark.long] * ((row + column) % 2))
        for row, block_size in enumerate([1, 5, 8, 16, 32, 128])
        for column, model in enumerate(MODELS)
    ],
)
def test_block_sizes_and_block_ids_leave_the_bits_alone(block_size: int, model: str, tmp_path: Path) -> None:
    num_blocks = 6 * -(-LENGTH // block_size)  # no model has more groups of layers
    run = make_run(tmp_path, model, block_size=block_size, blocks=shuffled(num_blocks), num_blocks=num_blocks)
    run.prefill(0, TOKENS, chunks=[50, 50])
    assert run.bits(0, LENGTH) == whole(model)


@pytest.mark.parametrize("model", MODELS)
def test_chunks_and_batches_leave_the_bits_alone(model: str, tmp_path: Path) -> None:
    run = make_run(tmp_path, model, blocks=shuffled(400), num_blocks=400)
    run.together(TOKENS, ROWS)
    expected = whole(model)
    for row, chunks in enumerate(ROWS):
        assert run.bits(row, sum(chunks)) == expected[: len(expected) // LENGTH * sum(chunks)], f"chunks {chunks[:2]}"


def test_blocks_behind_a_window_are_not_read(tmp_path: Path) -> None:
    run = make_run(tmp_path, "windows", block_size=8)
    assert [group.window for group in run.driver.spec.groups] == [None, 20, 20]
    run.prefill_behind_windows(0, TOKENS, (40, 1, 60, 30, 19))
    assert run.bits(0, LENGTH) == whole("windows")


def test_slots_that_were_never_written_stay_poisoned_and_unread(tmp_path: Path) -> None:
    run = make_run(tmp_path, "full", blocks=[3, 5], num_blocks=8)
    run.prefill(0, TOKENS[:20])
    assert all(np.isfinite(logits).all() for logits in run.logits.values())
    keys = run.worker.cache.layer(0).keys
    assert np.isfinite(keys[3]).all()
    assert np.isfinite(keys[5, :4]).all()
    assert np.isnan(keys[5, 4:]).all()
    assert np.isnan(np.delete(keys, [3, 5], axis=0)).all()


def test_greedy_text_by_decoding_is_that_of_whole_passes(tmp_path: Path) -> None:
    run = make_run(tmp_path, "windows")
    text = [run.prefill(0, TOKENS[:60])]
    text += run.decode(0, 60, 12)
    for length in range(1, len(text)):
        again = make_run(tmp_path, "windows")
        assert again.prefill(0, TOKENS[:60] + text[:length]) == text[length]


def test_thousands_of_tokens_take_seconds(tmp_path: Path) -> None:
    run = make_run(tmp_path, "full", num_blocks=150)
    run.prefill(0, TOKENS * 14, chunks=[1100])  # 2,100 tokens; the suite's time limit is the check
    assert run.bits(0, LENGTH) == whole("full")
