"""Attention to later tokens, on both CPU engines: as defined, and with the same bits in any company."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import _native
from quire.compute.models.recurrent import ConvolutionSpec
from quire.compute.torch.missing import missing
from quire.core.errors import CheckpointError
from support.dense_oracle import DenseOracle
from support.native_runs import FLOAT32, NativeRun
from support.reference_runs import ReferenceRun
from support.spec_models import ENCODERS, RECURRENT, write_spec_model
from support.step_plans import Work

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


def test_an_encoder_has_plain_heads_and_one_group_of_blocks_and_runs_on_cpus() -> None:
    spec = ENCODERS["near"]
    assert [group.window for group in spec.kv_cache_spec(16).groups] == [None]
    assert missing(spec)
    broken: dict[str, Any] = {"layers": (RECURRENT,), "convolution": ConvolutionSpec(32, 3)}
    with pytest.raises(CheckpointError, match="in an encoder"):
        replace(spec, **broken)
    with pytest.raises(CheckpointError, match="without a shared norm"):
        replace(ENCODERS["modern"], parallel=True, shared_norm=True)
