"""GGUF files with matrices in NVFP4, which have a factor in a tensor of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from quire.compute.gguf.source import GgufFile
from quire.compute.models import read_model
from quire.compute.models.source import ModelFolder
from quire.compute.weights.decoder_weights import expected_tensors
from quire.core.errors import CheckpointError
from support.gguf_answers import answer_of
from support.gguf_models import GgufWriting
from support.tiny_checkpoint import tiny_qwen3_config

EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 64,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
FACTOR = "blk.0.attn_q.scale"
Change = Callable[[dict[str, Any]], None]


def random_matrix(random: np.random.Generator, out: int, num_inputs: int) -> tuple[Any, np.float32, Any]:
    """Return random blocks of llama.cpp, a factor, and the numbers that they stand for."""
    blocks = random.integers(0, 256, (out * num_inputs // 64, 36), np.uint8)
    blocks[:, :4] = random.integers(0x20, 0x40, (len(blocks), 4))  # 1/8 to 15/8
    factor = np.float32(random.uniform(0.01, 0.03))
    halves = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.NVFP4).reshape(-1, 16)
    scales = gguf.quants.NVFP4.ue4m3_to_fp32(blocks[:, :4]).astype(np.float32).reshape(-1)
    codes = np.rint(halves / scales[:, None])
    products = (scales * factor).astype(np.float64)  # rounded before the integers multiply them
    numbers = (codes * products[:, None]).astype(np.float32).reshape(out, num_inputs)
    return blocks.reshape(out, -1), factor, numbers


def write_model(folder: Path, **settings: object) -> Path:
    """Write a model with random weights, whose matrices have a multiple of 64 inputs."""
    folder.mkdir()
    config = tiny_qwen3_config(tie=False) | {"intermediate_size": 128, **settings}
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(1)
    shapes = expected_tensors(read_model(ModelFolder(folder)).spec)
    tensors = {name: random.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_nvfp4(folder: Path, path: Path, change: Change = lambda factors: None) -> Path:
    """Write a model whose projections are random blocks; put what they stand for into its folder."""
    tensors = {name: np.array(each) for name, each in load_file(folder / "model.safetensors").items()}
    random, blocks, factors = np.random.default_rng(0), {}, {}
    for name in sorted(tensors):
        if not name.endswith("_proj.weight"):
            continue
        data, factor, tensors[name] = random_matrix(random, *tensors[name].shape)
        before, _, rest = name.partition(".experts.")
        stacked = f"{before}.experts.{rest.partition('.')[2]}" if rest else name
        blocks.setdefault(stacked, []).append(data)
        factors.setdefault(stacked, []).append(factor)
    save_file(tensors, folder / "model.safetensors")
    given = {name: ("NVFP4", np.stack(each) if ".experts." in name else each[0]) for name, each in blocks.items()}
    writing = GgufWriting(folder, path, given)
    writing.settings()
    vocab_size = writing.config["vocab_size"]
    writing.tokens([f"<{number}>" for number in range(vocab_size)], [1] * vocab_size)
    writing.weights(gguf.GGMLQuantizationType.F32)
    stored = {}
    for name, each in factors.items():
        theirs = writing.names.get_name(name, try_suffixes=(".weight",)).removesuffix(".weight")
        stored[f"{theirs}.scale"] = np.array(each, np.float32)
        stored[f"{theirs}.input_scale"] = np.array(each, np.float32)
    change(stored)
    for name, numbers in stored.items():
        writing.writer.add_tensor(name, numbers)
    writing.close()
    return path


@pytest.mark.parametrize("settings", [{}, EXPERTS])
def test_a_file_has_the_weights_of_its_blocks_times_their_factors(settings: dict[str, Any], tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", **settings)
    path = write_nvfp4(folder, tmp_path / "m.gguf")
    source = GgufFile(path)
    assert set(source.block_types().values()) == {"NVFP4"}
    right = load_file(folder / "model.safetensors")
    for name in source.block_types():
        assert source.tensors().tensor(name).tobytes() == right[name].tobytes()
        assert source.tensors().tensor(name, slice(3, 9)).tobytes() == right[name][3:9].tobytes()
    assert answer_of(path, weights="widened") == answer_of(folder)


def test_a_matrix_without_a_factor_has_one(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    path = write_nvfp4(folder, tmp_path / "m.gguf", lambda factors: factors.clear())
    name = "model.layers.0.self_attn.q_proj.weight"
    right = load_file(folder / "model.safetensors")[name]
    found = GgufFile(path).tensors().tensor(name)
    factor = right[0, np.flatnonzero(found[0])[0]] / found[0, np.flatnonzero(found[0])[0]]
    assert 0.01 <= factor <= 0.03
    np.testing.assert_allclose(found * factor, right, rtol=1e-6)


@pytest.mark.parametrize(
    ("factors", "shown"), [(np.ones(2, np.float32), "F32, \\[2\\]"), (np.ones(1, np.float16), "F16, \\[1\\]")]
)
def test_factors_of_another_shape_or_type_are_refused(factors: Any, shown: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    path = write_nvfp4(folder, tmp_path / "m.gguf", lambda stored: stored.update({FACTOR: factors}))
    with pytest.raises(CheckpointError, match=f"tensor '{FACTOR}' is '{shown}'; allowed: F32, \\[1\\]"):
        GgufFile(path).tensors()


def test_scales_that_packed_blocks_lack_are_refused_by_the_name_of_the_matrix(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    path = write_nvfp4(folder, tmp_path / "m.gguf", lambda stored: stored.update({FACTOR: np.full(1, 300, np.float32)}))
    said = r"m\.gguf: tensor 'blk\.0\.attn_q\.weight' is .*a factor of 256 and more.*; allowed: .*option --weights"
    with pytest.raises(CheckpointError, match=said):
        answer_of(path)
    answer_of(path, weights="widened")
