"""What a GGUF file says and computes, to be compared with the folder that it was written from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.compute.gguf.header import GgufHeader
from quire.compute.gguf.settings import config_of
from quire.compute.gguf.tensors import GgufTensors
from quire.compute.models import read_model
from quire.compute.models.base import DecoderSpec
from quire.compute.models.source import ModelFolder

PROMPT = [(7 * i * i + 3 * i + 5) % 120 for i in range(40)]
NUM_TOKENS = 6
"""That a model writes."""


def answer_of(model: Path, backend: str = "native", weights: str = "auto") -> tuple[Sequence[int], str]:
    """Return the tokens that a model writes, and their log-probabilities."""
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
    settings: dict[str, Any] = {"dtype": "float32", "weights": weights, "kv_memory": "4MiB"}
    with LLM(str(model), backend=backend, skip_tokenizer_init=True, **settings) as llm:
        (output,) = llm.generate([PROMPT], sampling, use_tqdm=False)
    return output.outputs[0].token_ids, str(output.outputs[0].logprobs)


def spec_of(header: GgufHeader, folder: Path) -> DecoderSpec:
    """Return the spec of the model in a file that has a changed header; writes into a new folder."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of(header, GgufTensors(header).setting)))
    return read_model(ModelFolder(folder)).spec
