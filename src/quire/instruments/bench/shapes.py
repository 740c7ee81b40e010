"""Shapes: the matrices and heads of a model, without its weights.

A named shape is only a `config.json`, which is enough to measure kernels. To measure whole steps, a checkpoint of that
shape is written, whose weights repeat a few random numbers: the time of a step does not depend on their values.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from quire.cli.engine_options import engine_config
from quire.compute.models import read_model
from quire.compute.models.base import DecoderSpec
from quire.compute.models.config_file import CONFIG_FILE
from quire.compute.models.source import ModelFolder
from quire.compute.models.vision import IMAGE_SETTINGS
from quire.compute.vision.weights import own_tensors
from quire.compute.weights.checkpoint import SINGLE_FILE
from quire.compute.weights.decoder_weights import expected_tensors
from quire.core.config import EngineConfig
from quire.core.errors import InvalidConfigError
from quire.engine.text.tokenizer_files import TOKENIZER_FILE

QWEN3: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40_960,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 151_936,
}
LLAMA3: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131_072,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128_256,
}
TINY: dict[str, object] = QWEN3 | {
    "head_dim": 32,
    "hidden_size": 64,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
QWEN3_5: dict[str, object] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262_144,
    "model_type": "qwen3_5_text",
    "num_attention_heads": 8,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10_000_000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 248_320,
}
GEMMA4: dict[str, object] = {
    "architectures": ["Gemma4ForCausalLM"],
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_size": 1536,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 6144,
    "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
    "max_position_embeddings": 131_072,
    "model_type": "gemma4_text",
    "num_attention_heads": 8,
    "num_hidden_layers": 35,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 20,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_double_wide_mlp": True,
    "vocab_size": 262_144,
}
SMOLVLM: dict[str, object] = {
    "architectures": ["SmolVLMForConditionalGeneration"],
    "image_token_id": 49_190,
    "model_type": "smolvlm",
    "scale_factor": 4,
    "text_config": LLAMA3
    | {
        "head_dim": 64,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "rope_theta": 100_000.0,
        "tie_word_embeddings": False,
        "vocab_size": 49_280,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vision_config": {
        "hidden_size": 768,
        "image_size": 512,
        "intermediate_size": 3072,
        "model_type": "smolvlm_vision",
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "patch_size": 16,
    },
}
IMAGES: dict[str, object] = {
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "Idefics3ImageProcessor",
    "image_std": [0.5, 0.5, 0.5],
}
"""The settings of the processor, for shapes with a `vision_config`."""

CONFIGS = {
    "qwen3-0.6b": QWEN3,
    "llama-3.2-1b": LLAMA3,
    "qwen3.5-0.8b": QWEN3_5,
    "gemma-4-e2b": GEMMA4,
    "smolvlm-256m": SMOLVLM,
    "tiny": TINY,
}

HEAD = "head"
RANDOM_NUMBERS = 1_000_003
"""The period of the random numbers: a prime, so that no two rows of a matrix are equal."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix [outputs, inputs], and the number of matrices of this shape in a step."""

    num_outputs: int
    num_inputs: int
    count: int


@dataclass(frozen=True, slots=True)
class KernelShape:
    """The matrices of a step, the head last, and the heads of attention."""

    name: str
    matrices: dict[str, Matrix]
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, name: str, spec: DecoderSpec) -> KernelShape:
        """Return the shape of a model. Matrices with the same input count as one."""
        if spec.experts is not None:
            raise InvalidConfigError("shape", name, "a model without experts: tokens decide which experts are read")
        if spec.recurrence is not None or any(layer.heads or layer.keys_of is not None for layer in spec.layers):
            raise InvalidConfigError("shape", name, "a model whose layers all have the same matrices")
        attention, hidden, mlp = spec.attention, spec.hidden_size, spec.mlp
        num_layers = len(spec.layers)
        joined = attention.num_heads + 2 * attention.num_kv_heads
        rows = (2 if mlp.gated else 1) * mlp.intermediate_size
        matrices = {
            "query, key, value": Matrix(joined * attention.head_dim, hidden, num_layers),
            "output": Matrix(hidden, attention.num_heads * attention.head_dim, num_layers),
            "gate, up" if mlp.gated else "up": Matrix(rows, hidden, num_layers),
            "down": Matrix(hidden, mlp.intermediate_size, num_layers),
            HEAD: Matrix(spec.vocab_size, spec.embedding_size or hidden, 1),
        }
        return cls(name, matrices, attention.num_heads, attention.num_kv_heads, attention.head_dim)


def kernel_shape(name: str) -> KernelShape:
    """Return a named shape, or the shape of a model folder; reads only its settings."""
    if name not in CONFIGS:
        return KernelShape.of(name, read_model(ModelFolder(Path(name))).spec)
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        _write_config(Path(folder), name)
        return KernelShape.of(name, read_model(ModelFolder(Path(folder))).spec)


@contextmanager
def measured_config(options: argparse.Namespace) -> Iterator[EngineConfig]:
    """Yield the settings of an engine; with `--shape`, for a checkpoint that exists during the context."""
    config = engine_config(options, os.environ)
    if options.shape is None:
        yield config
        return
    if "model" in options:
        raise InvalidConfigError("model", config.model, "none with --shape")
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as parent:
        folder = Path(parent) / options.shape
        write_random_checkpoint(folder, options.shape)
        yield replace(config, model=str(folder))


def write_random_checkpoint(folder: Path, name: str, changes: Mapping[str, object] | None = None) -> None:
    """Write a model folder of a named shape, with some changed settings and random weights in bfloat16."""
    folder.mkdir()
    _write_config(folder, name, changes)
    write_random_weights(folder)


def write_random_weights(folder: Path) -> None:
    """Write weights for the settings of a model folder: random numbers in bfloat16."""
    random = np.random.default_rng(0).normal(0.0, 0.02, RANDOM_NUMBERS).astype("<f4")
    numbers = (random.view("<u4") >> 16).astype("<u2").tobytes()
    header: dict[str, object] = {}
    end = 0
    model = read_model(ModelFolder(folder))
    shapes = expected_tensors(model.spec)
    if model.vision is not None:
        shapes |= expected_tensors(model.vision.tower) | own_tensors(model.vision)
    for tensor, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / SINGLE_FILE).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        while end > 0:
            file.write(numbers[:end])
            end -= len(numbers)


def _write_config(folder: Path, name: str, changes: Mapping[str, object] | None = None) -> None:
    settings = {**CONFIGS[name], **(changes or {})}
    (folder / CONFIG_FILE).write_text(json.dumps(settings), encoding="utf-8")
    if "vision_config" in settings:
        (folder / IMAGE_SETTINGS).write_text(json.dumps(IMAGES), encoding="utf-8")


def write_byte_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer in which every id has a text: the 256 bytes, and words that encoding never produces."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {f"Ġw{index}": index for index in range(len(vocab), vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / TOKENIZER_FILE), pretty=False)
