"""A GGUF file computes what the folder computes that it was made from, for every architecture, to the bit."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from quire import LLM, SamplingParams
from quire.compute.gguf.source import GgufFile
from quire.compute.models import read_model
from quire.compute.models.source import ModelFolder
from quire.compute.weights.checkpoint import Checkpoint
from quire.compute.weights.decoder_weights import expected_tensors
from support.gguf_models import write_gguf

DATA = Path(__file__).parents[1] / "golden" / "data"
CHANGES: dict[str, dict[str, Any]] = {  # what a GGUF file cannot say is as it is there
    "mistral": {"sliding_window": None},
    "qwen3-moe": {"mlp_only_layers": []},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16, "layer_types": None, "num_hidden_layers": 7},
}
FORMS = (
    *("llama", "llama-tied", "llama-2", "llama-linear", "llama-yarn", "llama-longrope", "mistral", "qwen2", "tied"),
    *("qwen3-moe", "gemma2", "gemma3", "phi3", "gpt2"),
)
PROMPT = [(7 * i * i + 3 * i + 5) % 64 for i in range(40)]


def golden(form: str, folder: Path, changes: dict[str, Any] | None = None) -> Path:
    """Write the golden model of a form into a folder, with what a GGUF file can say of it."""
    for file in DATA.glob("*/cases.json"):
        found = json.loads(file.read_text())["forms"].get(form)
        if found and "config" in found:
            folder.mkdir()
            config = found["config"] | CHANGES.get(form, {}) | (changes or {})
            (folder / "config.json").write_text(json.dumps(config))
            shutil.copy(file.parent / found.get("weights", "model.safetensors"), folder / "model.safetensors")
            return _complete(folder)
    raise LookupError(form)


def _complete(folder: Path) -> Path:
    """Leave the tensors in a folder that its settings ask for, as float32; make those up that it lacks."""
    checkpoint, random = Checkpoint.open(folder), np.random.default_rng(0)
    spec = read_model(ModelFolder(folder)).spec
    tensors: dict[str, Any] = {}
    for name, shape in expected_tensors(spec).items():
        stored = name if name in checkpoint.entries else name.removeprefix(spec.optional_prefix)
        known = stored in checkpoint.entries
        tensors[name] = checkpoint.tensor(stored).copy() if known else random.normal(0, 0.1, shape).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_a_file_has_the_architecture_and_the_weights_of_its_folder(form: str, tmp_path: Path) -> None:
    folder = golden(form, tmp_path / "model")
    path = write_gguf(folder, tmp_path / "model.gguf")
    ours, theirs = read_model(GgufFile(path)), read_model(ModelFolder(folder))
    assert ours.spec.layers == theirs.spec.layers
    for part in ("mlp", "experts", "embedding_scale", "logit_soft_cap", "tied_head", "context_length", "vocab_size"):
        assert getattr(ours.spec, part) == getattr(theirs.spec, part)
    assert replace(ours.spec.attention, qk_norm=None) == replace(theirs.spec.attention, qk_norm=None)
    texts = []
    for model in (str(path), str(folder)):
        with LLM(model, backend="native", dtype="float32", kv_memory="4MiB", skip_tokenizer_init=True) as llm:
            sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
            (output,) = llm.generate([PROMPT], sampling, use_tqdm=False)
            texts.append((output.outputs[0].token_ids, str(output.outputs[0].logprobs)))
    assert texts[0] == texts[1]
