"""Stacked experts without biases: both orders of dimensions give the same matrices, whatever the sizes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire import LLM, SamplingParams
from quire.compute.models import read_model
from quire.compute.models.source import ModelFolder
from quire.compute.weights.checkpoint import Checkpoint
from quire.compute.weights.decoder_weights import WeightReader, expected_tensors
from quire.compute.weights.stacked import unstacked
from quire.core.errors import CheckpointError
from support.quantized_models import write_tensors
from support.tiny_checkpoint import write_model_weights

HIDDEN, NUM_EXPERTS = 32, 5
TEXT: dict[str, Any] = {
    **{"hidden_size": HIDDEN, "intermediate_size": 48, "vocab_size": 64, "num_hidden_layers": 2, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "mlp_only_layers": [0]},
    **{"num_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "norm_topk_prob": True, "tie_word_embeddings": False},
}
PLAIN = {"architectures": ["Qwen3MoeForCausalLM"], **TEXT}
WITH_EYES = {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "text_config": TEXT, "vision_config": {}}
EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")
SIZES = {"three quarters": 24, "half as many": HIDDEN // 2, "as many": HIDDEN}  # outputs of a gate
PROMPT = [(7 * i * i + 3 * i + 5) % 64 for i in range(40)]
SAMPLING = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2)

Tensors = dict[str, NDArray[np.float32]]


def settings(config: dict[str, Any], size: int) -> dict[str, Any]:
    inner = {"moe_intermediate_size": size}
    return config | ({"text_config": config["text_config"] | inner} if "text_config" in config else inner)


def plain_tensors(folder: Path) -> Tensors:
    """Return random tensors for the settings in a folder, one for each matrix of an expert."""
    random = np.random.default_rng(0)
    shapes = expected_tensors(read_model(ModelFolder(folder)).spec)
    return {name: random.standard_normal(shape, np.float32) * shape[-1] ** -0.5 for name, shape in shapes.items()}


def stacked(tensors: Tensors, *, inputs_first: bool) -> Tensors:
    """Return the tensors with all experts of a layer in two tensors."""
    found = [(name, match) for name in tensors if (match := EXPERT.fullmatch(name))]
    result = {name: tensor for name, tensor in tensors.items() if not EXPERT.fullmatch(name)}
    for stem in dict.fromkeys(match[1] for _, match in found):

        def of(part: str, stem: str = stem) -> NDArray[np.float32]:
            return np.stack([tensors[f"{stem}{expert}.{part}_proj.weight"] for expert in range(NUM_EXPERTS)])

        result |= {
            f"{stem}gate_up_proj": np.concatenate([of("gate"), of("up")], axis=1),
            f"{stem}down_proj": of("down"),
        }
        if inputs_first:
            for name in ("gate_up_proj", "down_proj"):
                result[stem + name] = np.ascontiguousarray(result[stem + name].transpose(0, 2, 1))
    return result


def write(folder: Path, config: dict[str, Any], tensors: Tensors | None = None, dtype: str = "F32") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_model_weights(folder, plain_tensors(folder) if tensors is None else tensors, dtype=dtype)
    return folder


def answer_of(folder: Path, dtype: str) -> Any:
    with LLM(str(folder), skip_tokenizer_init=True, dtype=dtype, device="cpu") as llm:
        return llm.generate([PROMPT], SAMPLING, use_tqdm=False)[0].outputs[0]


@pytest.mark.parametrize("config", [PLAIN, WITH_EYES], ids=["plain", "with-eyes"])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_both_orders_are_the_matrices_that_they_stand_for(config: dict[str, Any], size: int, tmp_path: Path) -> None:
    config = settings(config, size)
    alone = write(tmp_path / "alone", config)
    tensors = plain_tensors(alone)
    for inputs_first in (False, True):
        folder = write(tmp_path / f"inputs-first-{inputs_first}", config, stacked(tensors, inputs_first=inputs_first))
        found = unstacked(Checkpoint.open(folder))
        assert found.entries.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert np.array_equal(found.tensor(name), tensor), name
            assert np.array_equal(found.tensor(name, slice(1, 3)), tensor[1:3])


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("inputs_first", [False, True])
def test_a_model_computes_the_same_from_a_stack(inputs_first: bool, dtype: str, tmp_path: Path) -> None:
    config = settings(WITH_EYES, HIDDEN // 2)
    alone = write(tmp_path / "alone", config, dtype=dtype)
    tensors = stacked(plain_tensors(alone), inputs_first=inputs_first)
    eyes = {"model.visual.patch_embed.proj.weight": np.ones((2, 2), np.float32)}
    folder = write(tmp_path / "stacked", config, tensors | eyes, dtype)
    for computed in ("float32", "bfloat16"):
        assert answer_of(folder, computed) == answer_of(alone, computed)


def refusal(folder: Path) -> str:
    model = ModelFolder(folder)
    with pytest.raises(CheckpointError) as refused:
        WeightReader(read_model(model).spec, model.tensors(), "float32")
    return str(refused.value)


STEM = "model.layers.1.mlp.experts."


@pytest.mark.parametrize("inputs_first", [False, True])
@pytest.mark.parametrize("part", ["gate_up_proj", "down_proj"])
def test_stacks_that_do_not_fit_are_named_as_the_file_names_them(
    part: str, inputs_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a short name leaves room for those of the tensors in the error
    config, name = settings(PLAIN, 24), STEM + part
    tensors = stacked(plain_tensors(write(Path("alone"), config)), inputs_first=inputs_first)
    others = {each: tensor for each, tensor in tensors.items() if each != name}
    assert re.search(rf"missing: {name}[;)]", refusal(write(Path("missing"), config, others)))
    longer = np.concatenate([tensors[name]] * 2, axis=1 + inputs_first)
    assert re.search(rf"wrong shape: {STEM}", refusal(write(Path("longer"), config, others | {name: longer})))
    assert re.search(
        rf"missing: {name}[;)]", refusal(write(Path("fewer"), config, others | {name: tensors[name][:-1]}))
    )


def test_a_stack_in_fp8_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = settings(PLAIN, 24)
    tensors = stacked(plain_tensors(write(Path("alone"), config)), inputs_first=False)
    name = f"{STEM}down_proj"
    eighths = {
        name: ("F8_E4M3", np.zeros(tensors[name].shape, np.uint8)),
        f"{name}_scale_inv": ("F32", np.ones(5, np.float32)),
    }
    method = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    for quantization in ({}, {"quantization_config": method}):
        folder = write(Path(f"fp8-{len(quantization)}"), config | quantization, tensors)
        others = {each: ("F32", tensor) for each, tensor in tensors.items()}
        write_tensors(folder / "model.safetensors", others | eighths)
        assert f"missing: {STEM}" in refusal(folder)


def test_a_stack_next_to_single_matrices_is_refused(tmp_path: Path) -> None:
    config = settings(PLAIN, 24)
    tensors = plain_tensors(write(tmp_path / "alone", config))
    both = write(tmp_path / "both", config, tensors | stacked(tensors, inputs_first=False))
    assert "is 'given twice'; allowed: alone or in a stack, not both" in refusal(both)
