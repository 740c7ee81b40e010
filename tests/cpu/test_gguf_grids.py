"""GGUF files with matrices of IQ1 to IQ3, TQ1 and TQ2, whose codes are in a grid or in base three."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from quire.compute.gguf.grid_blocks import GRID_TYPES, GRIDS, _grid
from quire.compute.gguf.source import GgufFile
from quire.compute.models import read_model
from quire.compute.models.source import ModelFolder
from quire.compute.weights.codes import coded_row_bytes
from quire.compute.weights.decoder_weights import expected_tensors
from quire.core.config import EngineConfig
from quire.instruments.bench.quality import ReadingEngine
from support.gguf_answers import PROMPT, answer_of
from support.gguf_models import GgufWriting
from support.random_blocks import blocks_of
from support.tiny_checkpoint import tiny_qwen3_config


def write_pair(folder: Path, kind: str) -> Path:
    """Write a file whose projections are random blocks, and the folder with the weights that they stand for."""
    folder.mkdir()
    config = tiny_qwen3_config(tie=False) | {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 16}
    (folder / "config.json").write_text(json.dumps(config))
    random, tensors, blocks = np.random.default_rng(1), {}, {}
    for name, shape in expected_tensors(read_model(ModelFolder(folder)).spec).items():
        tensors[name] = random.normal(0, 0.1, shape).astype(np.float32)
        if name.endswith("_proj.weight"):
            blocks[name] = kind, blocks_of(kind, *shape)[0]
            numbers = gguf.quants.dequantize(blocks[name][1], gguf.GGMLQuantizationType[kind])
            tensors[name] = np.asarray(numbers, np.float32).reshape(shape)
    save_file(tensors, folder / "model.safetensors")
    writing = GgufWriting(folder, folder.with_suffix(".gguf"), blocks)
    writing.settings()
    vocab_size = writing.config["vocab_size"]
    writing.tokens([f"<{number}>" for number in range(vocab_size)], [1] * vocab_size)
    writing.weights(gguf.GGMLQuantizationType.F32)
    writing.close()
    return folder.with_suffix(".gguf")


def read_logits(model: Path, weights: str) -> NDArray[np.float64]:
    """Return the log-probabilities of all tokens after each token of a prompt."""
    settings: dict[str, Any] = {"dtype": "float32", "kv_memory": "4MiB", "weights": weights}
    with ReadingEngine(EngineConfig(model=str(model), skip_tokenizer_init=True, **settings)) as engine:
        return engine.read(PROMPT)


@pytest.mark.parametrize("kind", GRID_TYPES)
def test_a_file_answers_as_the_weights_that_its_blocks_stand_for(kind: str, tmp_path: Path) -> None:
    path = write_pair(tmp_path / "model", kind)
    source = GgufFile(path)
    assert set(source.block_types().values()) == {GRID_TYPES[kind].kept}
    assert answer_of(path, weights="widened") == answer_of(tmp_path / "model")
    packed, widened = (read_logits(path, weights) for weights in ("auto", "widened"))
    assert 0 < np.std(packed - widened) < 0.05 * np.std(widened)  # packed: rows are rounded


@pytest.mark.parametrize(("kind", "bits"), [("IQ1", 3.5625), ("IQ2", 3.5625), ("IQ3_S", 4.3125), ("TERNARY", 2.5625)])
def test_a_weight_takes_as_many_bits_as_are_documented(kind: str, bits: float) -> None:
    assert 8 * coded_row_bytes(kind, 1024) / 1024 == bits


@pytest.mark.parametrize(("name", "theirs"), [("IQ1", "IQ1_S"), *((name, name) for name in GRIDS if name != "IQ1")])
def test_grids_are_those_of_the_reference(name: str, theirs: str) -> None:
    reference = getattr(gguf.quants, theirs)
    reference.init_grid()
    sizes = _grid(name)[:, None] >> 4 * np.arange(reference.grid_shape[1]) & 15
    assert np.array_equal(np.array(reference.grid_map)[sizes], np.asarray(reference.grid).reshape(sizes.shape))
