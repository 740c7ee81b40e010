"""A real checkpoint, SmolLM2-135M-Instruct: docs/design/codes.md tells the truth about it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quire.core.config import EngineConfig
from quire.instruments.bench.quality import SETTINGS, ReadingEngine, divergences
from quire.instruments.bench.workload_file import read_workload
from support.smollm2 import smollm2_path

pytestmark = pytest.mark.long

WORKLOAD = Path(__file__).parents[2] / "benchmarks" / "workload_prose_smollm2.jsonl"


@pytest.mark.parametrize(
    ("names", "least_divergence", "most_divergence", "least_agreement"),
    [
        (("bfloat16", "bfloat16"), 0.00002, 0.0005, 0.98),
        (("int8", "bfloat16"), 0.001, 0.007, 0.93),
        (("int4", "bfloat16"), 0.001, 0.007, 0.93),
        (("bfloat16", "int8"), 0.0002, 0.002, 0.97),
    ],
)
def test_narrower_numbers_cost_what_the_documents_say(
    names: tuple[str, str], least_divergence: float, most_divergence: float, least_agreement: float
) -> None:
    """Bounds on both sides: figures that are far too good were once measured on a model that knew its texts."""
    model = smollm2_path()
    prompt = read_workload(str(WORKLOAD), 1).requests[0].prompt_token_ids
    read = []
    for settings in (SETTINGS["float32", "float32"], SETTINGS[names]):
        config = EngineConfig(model=model, skip_tokenizer_init=True, max_num_seqs=1, max_model_len=1024, **settings)
        with ReadingEngine(config) as engine:
            read.append(engine.read(prompt))
    reference, other = read
    assert least_divergence < float(np.mean(divergences(reference, other))) < most_divergence
    assert float(np.mean(reference.argmax(axis=1) == other.argmax(axis=1))) > least_agreement
