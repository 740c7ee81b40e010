"""gpt-oss: its stacked experts, as floats and as MXFP4, are the matrices that they stand for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire import LLM, SamplingParams
from quire.compute.models import read_model
from quire.compute.models.source import ModelFolder
from quire.compute.native.backend import NativeBackend
from quire.compute.native.decoder import NativeDecoder
from quire.compute.native.load import load_parts
from quire.core.config import EngineConfig
from quire.core.errors import CheckpointError
from support.quantized_models import Quantized, Tensor, gguf_blocks, write_tensors

HIDDEN, SIZE, NUM_EXPERTS = 64, 32, 16
CONFIG: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": SIZE,
    "vocab_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "sliding_window": 24,
}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
PROMPT = [(7 * i * i + 3 * i + 5) % 128 for i in range(40)]
SAMPLING = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)


def unpacked(blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return what blocks stand for, `[…, 32 × blocks]`, one number after the other."""
    values = [
        (-1.0 if code & 8 else 1.0) * E2M1[code & 7] * 2.0 ** (int(scale) - 127)
        for block, scale in zip(blocks.reshape(-1, 16).tolist(), scales.ravel().tolist(), strict=True)
        for byte in block
        for code in (byte & 15, byte >> 4)
    ]
    return np.array(values, np.float32).reshape(*blocks.shape[:-2], -1)


def plain_tensors(random: np.random.Generator) -> dict[str, Tensor]:
    """Return the tensors of the model except the matrices of its experts."""

    def noise(*shape: int) -> Tensor:
        return "F32", random.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)

    tensors = {"model.embed_tokens.weight": noise(128, HIDDEN), "lm_head.weight": noise(128, HIDDEN)}
    tensors["model.norm.weight"] = "F32", np.ones(HIDDEN, np.float32)
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = "F32", np.ones(HIDDEN, np.float32)
        for name, (out, size) in {"q": (64, HIDDEN), "k": (32, HIDDEN), "v": (32, HIDDEN), "o": (HIDDEN, 64)}.items():
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = noise(out, size)
            tensors[f"{prefix}self_attn.{name}_proj.bias"] = noise(out)
        tensors[f"{prefix}self_attn.sinks"] = "F32", random.standard_normal(4, np.float32)
        tensors[f"{prefix}mlp.router.weight"] = noise(NUM_EXPERTS, HIDDEN)
        tensors[f"{prefix}mlp.router.bias"] = noise(NUM_EXPERTS)
        tensors[f"{prefix}mlp.experts.gate_up_proj_bias"] = noise(NUM_EXPERTS, 2 * SIZE)
        tensors[f"{prefix}mlp.experts.down_proj_bias"] = noise(NUM_EXPERTS, HIDDEN)
    return tensors


def write_model(folder: Path, *, scales: tuple[int, int] = (121, 125)) -> dict[str, tuple[Any, Any]]:
    """Write a model with MXFP4 experts, and FOLDER-plain with the floats they stand for.

    Returns the blocks and scales of each stacked tensor.
    """
    random = np.random.default_rng(0)
    stored = plain_tensors(random)
    plain, packed = dict(stored), {}
    for layer in range(2):
        for name, (out, size) in {"gate_up_proj": (2 * SIZE, HIDDEN), "down_proj": (HIDDEN, SIZE)}.items():
            stem = f"model.layers.{layer}.mlp.experts.{name}"
            blocks = random.integers(0, 256, (NUM_EXPERTS, out, size // 32, 16), np.uint8)
            shared = random.integers(*scales, blocks.shape[:3], np.uint8, endpoint=True)
            packed[stem] = blocks, shared
            stored |= {f"{stem}_blocks": ("U8", blocks), f"{stem}_scales": ("U8", shared)}
            plain[stem] = "F32", unpacked(blocks, shared).transpose(0, 2, 1)
    quantization = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    for place, tensors, more in (
        (folder, stored, quantization),
        (folder.with_name(f"{folder.name}-plain"), plain, {}),
    ):
        place.mkdir(parents=True)
        (place / "config.json").write_text(json.dumps(CONFIG | more))
        write_tensors(place / "model.safetensors", tensors)
    return packed


def answer_of(model: Path, **settings: str) -> tuple[list[int], str]:
    """Return the tokens that a model writes, and their log-probabilities."""
    with LLM(str(model), kv_memory="4MiB", skip_tokenizer_init=True, dtype="float32", **settings) as llm:
        (output,) = llm.generate([PROMPT], SAMPLING, use_tqdm=False)
    return list(output.outputs[0].token_ids), str(output.outputs[0].logprobs)


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_mxfp4_answers_as_the_floats_it_stands_for(backend: str, tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    given = answer_of(tmp_path / "model", backend=backend, weights="widened")
    assert given == answer_of(tmp_path / "model-plain", backend=backend)


def test_each_expert_has_its_rows_of_the_stack(tmp_path: Path) -> None:
    packed = write_model(tmp_path / "model")
    tensors = ModelFolder(tmp_path / "model").tensors()
    plain = ModelFolder(tmp_path / "model-plain").tensors()
    assert set(tensors.entries) == set(plain.entries)
    for stem, (blocks, scales) in packed.items():
        prefix = stem.rpartition(".")[0]
        turns = ("gate_proj", "up_proj") if "gate_up" in stem else ("down_proj",)
        for expert in range(NUM_EXPERTS):
            for first, part in enumerate(turns):
                exact = unpacked(blocks[expert], scales[expert])[first :: len(turns)]
                name = f"{prefix}.{expert}.{part}.weight"
                for file in (tensors, plain):
                    assert file.entries[name].shape == exact.shape
                    np.testing.assert_array_equal(file.tensor(name), exact)
                    np.testing.assert_array_equal(file.tensor(name, slice(3, 8)), exact[3:8])
                    bits = file.bfloat16_bits(name).astype(np.uint32) << 16
                    np.testing.assert_array_equal(bits.view(np.float32), exact)


def test_mxfp4_stays_packed_to_the_bit(tmp_path: Path) -> None:
    packed = write_model(tmp_path / "model")
    source = ModelFolder(tmp_path / "model")
    types = source.block_types()
    assert set(types.values()) == {"MXFP4"} and len(types) == 2 * NUM_EXPERTS * 3
    blocks, scales = packed["model.layers.1.mlp.experts.gate_up_proj"]
    up, up_scales = blocks[2, 1::2], scales[2, 1::2]
    halves = np.repeat(2.0 ** (up_scales.astype(np.float64) - 128), 32, axis=1)
    exact = unpacked(up, up_scales)
    matrix = Quantized({}, exact, (exact / halves).astype(np.int64), halves.astype(np.float32))
    found = source.tensors().block_rows("model.layers.1.mlp.experts.2.up_proj.weight")
    np.testing.assert_array_equal(found, gguf_blocks("MXFP4", matrix))
    model = read_model(source)
    backend = NativeBackend.of(EngineConfig(dtype="float32").resolved(), model)
    runner = load_parts(model, replace(backend.settings, num_threads=1), num_blocks=1).runner
    assert isinstance(runner, NativeDecoder)
    assert runner.weight_bytes == backend.facts.weight_bytes
    assert answer_of(tmp_path / "model", backend="native")[0]


def test_scales_that_no_float16_holds_are_widened(tmp_path: Path) -> None:
    write_model(tmp_path / "model", scales=(90, 100))
    assert ModelFolder(tmp_path / "model").block_types() == {}
    given = answer_of(tmp_path / "model", backend="native")
    assert given == answer_of(tmp_path / "model-plain", backend="native")


def test_stacks_that_contradict_the_folder_are_refused(tmp_path: Path) -> None:
    bias = "model.layers.0.mlp.experts.down_proj_bias"
    for name, stack, message in (
        ("twice", np.zeros((2, 1), np.float32), r"experts\.1\.down_proj\.bias.*given twice"),
        ("many", np.zeros((10**6, 0), np.float32), "each expert as its own.*at most 786432"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIG))
        alone = {bias.replace("down_proj_bias", "1.down_proj.bias"): ("F32", np.zeros(1, np.float32))}
        write_tensors(folder / "model.safetensors", {bias: ("F32", stack), **alone})
        with pytest.raises(CheckpointError, match=message):
            ModelFolder(folder).tensors()


def test_a_tensor_that_is_missing_is_named_as_the_file_names_it(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tensors = plain_tensors(np.random.default_rng(0))
    write_tensors(folder / "model.safetensors", {name: each for name, each in tensors.items() if "sinks" not in name})
    stacks = r"model\.layers\.0\.mlp\.experts\.down_proj, model\.layers\.0\.mlp\.experts\.gate_up_proj, "
    with pytest.raises(CheckpointError, match=rf"missing: {stacks}model\.layers\.0\.self_attn\.sinks"):
        answer_of(folder, backend="reference")
