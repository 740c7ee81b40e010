"""Writes a GGUF file of a named shape with random weights: python benchmarks/write_gguf.py qwen3-0.6b FILE.gguf.

The weights are bfloat16; llama.cpp's `llama-quantize FILE.gguf OUT.gguf Q4_K_M` makes other types of them. The
vocabulary is made up: the time of a step does not depend on it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from quire.compute.models import read_model
from quire.compute.models.config_file import CONFIG_FILE
from quire.compute.models.source import ModelFolder
from quire.compute.weights.decoder_weights import expected_tensors
from quire.instruments.bench.shapes import CONFIGS, RANDOM_NUMBERS

ARCHITECTURES = {"qwen3": gguf.MODEL_ARCH.QWEN3, "llama": gguf.MODEL_ARCH.LLAMA}
SHAPES = [name for name, config in CONFIGS.items() if config["model_type"] in ARCHITECTURES]


def add_settings(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Add what the config.json of the shape says, in GGUF's words."""
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def add_tokens(writer: gguf.GGUFWriter, count: int) -> None:
    """Add a vocabulary of three tokens that a text can have, and of numbers in brackets."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b", "ab", *(f"<{number}>" for number in range(3, count))])
    writer.add_token_types([1] * count)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(count - 1)


def write(shape: str, path: Path) -> None:
    """Write the file."""
    config: dict[str, Any] = dict(CONFIGS[shape])
    architecture = ARCHITECTURES[config["model_type"]]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")
        tensors = expected_tensors(read_model(ModelFolder(Path(folder))).spec)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    numbers = np.random.default_rng(0).normal(0.0, 0.02, RANDOM_NUMBERS).astype(np.float32)
    halves = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    add_settings(writer, config)
    add_tokens(writer, config["vocab_size"])
    for tensor, dimensions in tensors.items():
        name = names.get_name(tensor, try_suffixes=(".weight",))
        assert name is not None, tensor
        if len(dimensions) == 1:
            writer.add_tensor(name, np.resize(numbers, dimensions))
        else:
            raw = np.resize(halves, dimensions).view(np.uint8)
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> int:
    """Write the file that was asked for."""
    parser = argparse.ArgumentParser(description="Write a GGUF file of a named shape with random weights.")
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    write(options.shape, options.file)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
