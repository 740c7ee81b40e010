"""A real checkpoint, SmolLM2-135M-Instruct: what it says, and that docs/design/codes.md tells the truth about it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.core.config import EngineConfig
from quire.instruments.bench.quality import SETTINGS, ReadingEngine, divergences
from quire.instruments.bench.workload_file import read_workload

pytestmark = pytest.mark.long

WORKLOAD = Path(__file__).parents[2] / "benchmarks" / "workload_prose_smollm2.jsonl"


@pytest.fixture(scope="module")
def folder() -> str:
    folder = os.environ.get("QUIRE_SMOLLM2")
    if folder is None:
        pytest.skip("QUIRE_SMOLLM2 names no model folder: make test-long makes one")
    return folder


def test_it_answers_a_question(folder: str) -> None:
    with LLM(folder, dtype="bfloat16", kv_memory="64MiB") as llm:
        ask = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
        (output,) = llm.chat(ask, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"


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
    folder: str, names: tuple[str, str], least_divergence: float, most_divergence: float, least_agreement: float
) -> None:
    """Bounds on both sides: figures that are far too good were once measured on a model that knew its texts."""
    prompt = read_workload(str(WORKLOAD), 1).requests[0].prompt_token_ids
    read = []
    for settings in (SETTINGS["float32", "float32"], SETTINGS[names]):
        config = EngineConfig(model=folder, skip_tokenizer_init=True, max_num_seqs=1, max_model_len=1024, **settings)
        with ReadingEngine(config) as engine:
            read.append(engine.read(prompt))
    reference, other = read
    assert least_divergence < float(np.mean(divergences(reference, other))) < most_divergence
    assert float(np.mean(reference.argmax(axis=1) == other.argmax(axis=1))) > least_agreement
