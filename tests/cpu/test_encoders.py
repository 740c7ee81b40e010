"""Attention to later tokens, on both CPU engines: as defined, and with the same bits in any company."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import _native
from quire.compute.models import read_model
from quire.compute.models.distances import biases_by_distance, num_distances
from quire.compute.models.recurrent import ConvolutionSpec
from quire.compute.models.source import ModelFolder
from quire.compute.native.backend import NativeBackend
from quire.compute.native.decoder import NativeDecoder
from quire.compute.native.load import load_parts
from quire.compute.torch.missing import missing
from quire.core.config import EngineConfig
from quire.core.errors import CheckpointError
from support.dense_oracle import DenseOracle
from support.native_runs import FLOAT32, NativeRun
from support.reference_runs import ReferenceRun
from support.spec_models import ENCODERS, RECURRENT, write_spec_model
from support.step_plans import Work
from support.tiny_bert import write_tiny_bert

LENGTHS = (1, 33, 64, 65, 130, 2)
TEXTS = [[(7 * i * i + 3 * i + length) % 64 for i in range(length)] for length in LENGTHS]


def runs(folder: Path, name: str) -> dict[str, ReferenceRun]:
    """Return a run of each engine; those of the compiled core differ in threads and blocks too."""
    found = {"reference": ReferenceRun(folder, spec=ENCODERS[name])}
    for number, kernels in enumerate(_native.kernel_names()):
        settings = replace(FLOAT32, instruction_set=kernels, num_threads=1 + number % 3, max_num_batched_tokens=512)
        found[kernels] = NativeRun(folder, settings=settings, spec=ENCODERS[name], block_size=16 << number % 2)
    return found


@pytest.mark.parametrize("name", ENCODERS)
def test_every_token_reads_the_whole_text(name: str, tmp_path: Path) -> None:
    oracle = DenseOracle(ENCODERS[name], write_spec_model(tmp_path, ENCODERS[name]))
    for engine, run in runs(tmp_path, name).items():
        for row, text in enumerate(TEXTS):
            run.driver.open(row, text)
        run.step(*(Work(row, 0, len(text), 1) for row, text in enumerate(TEXTS)))
        for row, text in enumerate(TEXTS):
            ours = np.stack([run.logits[row, position] for position in range(len(text))])
            assert np.abs(ours - oracle.logits(text)).max() < 2e-4, (engine, len(text))
            run.prefill(10 + row, text)
            assert run.bits(10 + row, len(text)) == run.bits(row, len(text)), (engine, len(text))


def test_a_score_has_the_bias_of_its_bucket_up_to_the_ends_of_the_longest_text() -> None:
    table = np.arange(64, dtype=np.float32).reshape(32, 2)
    (of_first, of_second), length = biases_by_distance(table, 300), 300
    assert of_first.shape == (num_distances(length),)
    assert [of_first[length + distance] / 2 for distance in (-300, -91, -90, -8, -7, -1, 0)] == [15, 15, 14, 8, 7, 1, 0]
    assert [of_first[length + distance] / 2 for distance in (1, 7, 8, 11, 12, 90, 91, 363)] == [
        *(17, 23, 24, 24, 25, 30, 31, 31),
    ]
    np.testing.assert_array_equal(of_second, of_first + 1)


def test_a_decoder_has_no_biases_by_distance() -> None:
    spec = ENCODERS["distances"]
    with pytest.raises(CheckpointError, match="biases by distance is 'in a decoder'; allowed: an encoder"):
        replace(spec, attention=replace(spec.attention, bidirectional=False))


def test_the_memory_of_biases_is_expected(tmp_path: Path) -> None:
    settings: dict[str, object] = {"architectures": ["MPNetModel"], "max_position_embeddings": 98}
    model = read_model(ModelFolder(write_tiny_bert(tmp_path, **settings)))
    backend = NativeBackend.of(EngineConfig(dtype="float32").resolved(), model)
    runner = load_parts(model, replace(backend.settings, num_threads=1), num_blocks=1).runner
    assert isinstance(runner, NativeDecoder)
    assert runner.weight_bytes == backend.facts.weight_bytes


def test_an_encoder_has_plain_heads_and_one_group_of_blocks_and_runs_on_cpus() -> None:
    spec = ENCODERS["near"]
    assert [group.window for group in spec.kv_cache_spec(16).groups] == [None]
    assert missing(spec)
    broken: dict[str, Any] = {"layers": (RECURRENT,), "convolution": ConvolutionSpec(32, 3)}
    with pytest.raises(CheckpointError, match="in an encoder"):
        replace(spec, **broken)
    with pytest.raises(CheckpointError, match="without a shared norm"):
        replace(ENCODERS["modern"], parallel=True, shared_norm=True)
