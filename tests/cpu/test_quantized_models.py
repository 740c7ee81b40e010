"""A quantised folder answers as the folder does that has the weights it stands for, to the bit."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire import LLM, SamplingParams
from quire.compute.gguf.source import GgufFile
from quire.compute.models import read_model
from quire.compute.models.source import ModelFolder, ModelSource
from quire.compute.native.backend import NativeBackend
from quire.compute.native.decoder import NativeDecoder
from quire.compute.native.load import load_parts
from quire.compute.weights.codes import coded_row_bytes
from quire.compute.weights.decoder_weights import expected_tensors, weight_bytes
from quire.core.config import EngineConfig
from quire.engine.factory import plan_engine
from support.gguf_models import write_gguf
from support.quantized_models import (
    FORMS,
    Quantize,
    Quantized,
    compressed_packed,
    gguf_blocks,
    gptq,
    quantized_matrices,
    write_quantized,
)
from support.spec_models import SPECS

PROMPT = [(7 * i * i + 3 * i + 5) % 128 for i in range(40)]
SAMPLING = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)


def answer_of(model: Path, **settings: str) -> tuple[Sequence[int], str]:
    """Return the tokens that a model writes, and their log-probabilities."""
    with LLM(str(model), kv_memory="4MiB", skip_tokenizer_init=True, **settings) as llm:
        (output,) = llm.generate([PROMPT], SAMPLING, use_tqdm=False)
    return output.outputs[0].token_ids, str(output.outputs[0].logprobs)


@pytest.mark.parametrize("form", FORMS)
def test_a_widened_folder_answers_as_the_weights_it_stands_for(form: str, tmp_path: Path) -> None:
    folder = write_quantized(tmp_path / "model", form)
    settings = {"backend": "native", "dtype": "float32"}
    assert answer_of(folder, weights="widened", **settings) == answer_of(tmp_path / "model-plain", **settings)


def in_blocks(folder: Path, form: str, parts: Mapping[str, Quantize | None] = MappingProxyType({})) -> Path:
    """Write the model of a folder as a GGUF file that has the blocks which the folder stays packed in."""
    config = json.loads((folder / "config.json").read_text())
    matrices = quantized_matrices(form, parts, config)
    types = ModelFolder(folder).block_types()
    blocks = {name: (kind, gguf_blocks(kind, matrices[name])) for name, kind in types.items()}
    return write_gguf(folder.with_name(f"{folder.name}-plain"), folder.with_suffix(".gguf"), blocks=blocks)


def held_bytes(source: ModelSource) -> tuple[int, int]:
    """Return the bytes of the weights of an engine, as they are expected and as it holds them."""
    model = read_model(source)
    backend = NativeBackend.of(EngineConfig(dtype="float32").resolved(), model)
    runner = load_parts(model, replace(backend.settings, num_threads=1), num_blocks=1).runner
    assert isinstance(runner, NativeDecoder)
    return backend.facts.weight_bytes, runner.weight_bytes


PACKED = ("gptq", "gptq-8", "awq", "packed", "packed-zeros", "packed-8-channels", "int8", "mxfp4", "auto-round")


@pytest.mark.parametrize("form", PACKED)
def test_a_packed_folder_answers_as_the_file_that_has_its_blocks(form: str, tmp_path: Path) -> None:
    folder = write_quantized(tmp_path / "model", form)
    file = in_blocks(folder, form)
    settings = {"backend": "native", "dtype": "float32"}
    assert answer_of(folder, **settings) == answer_of(file, **settings)
    expected, held = held_bytes(ModelFolder(folder))
    assert (expected, held) == held_bytes(GgufFile(file))
    assert held == expected < held_bytes(ModelFolder(tmp_path / "model-plain"))[1]


MIXED: Mapping[str, Quantize | None] = {  # queries, keys and values are fused in memory; so are gate and up
    "q_proj": partial(gptq, symmetric=True),
    "v_proj": partial(gptq, act_order=True),
    "gate_proj": None,
    "up_proj": partial(gptq, symmetric=True),
}


def test_parts_of_one_matrix_may_be_of_different_forms(tmp_path: Path) -> None:
    folder = write_quantized(tmp_path / "model", "gptq", MIXED, tie_word_embeddings=False)
    types = ModelFolder(folder).block_types()
    layer = {name.split(".")[-2]: kind for name, kind in types.items() if ".layers.1." in name}
    assert layer == {"q_proj": "Q4_0", "k_proj": "Q5_0", "o_proj": "Q5_0", "up_proj": "Q4_0", "down_proj": "Q5_0"}
    file = in_blocks(folder, "gptq", MIXED)
    for dtype in ("float32", "bfloat16"):
        settings = {"backend": "native", "dtype": dtype}
        assert answer_of(folder, **settings) == answer_of(file, **settings)
    assert held_bytes(ModelFolder(folder)) == held_bytes(GgufFile(file))


def test_a_weight_takes_the_bits_of_its_codes(tmp_path: Path) -> None:
    large = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_hidden_layers": 1}
    five = coded_row_bytes("Q5_0", 32) / 4
    sizes = (("packed", 4.5), ("packed-8-channels", 8.5), ("packed-zeros", five), ("nvfp4", 4.625), ("mxfp4", 4.25))
    for form, bits in sizes:
        folder = write_quantized(tmp_path / form, form, **large)
        model = read_model(ModelFolder(folder))
        matrices = sum(
            prod(shape) for name, shape in expected_tensors(model.spec).items() if name.endswith("_proj.weight")
        )
        rest = weight_bytes(model.spec, "float32") - 4 * matrices
        assert held_bytes(model.source)[1] == rest + matrices * bits / 8


def test_experts_may_be_of_different_types() -> None:
    spec = SPECS["experts"]
    names = [name for name in expected_tensors(spec) if ".experts." in name]
    types = {name: kind for name, kind in zip(names, cycle(("Q4_0", "Q8_0", "")), strict=False) if kind}
    shapes = expected_tensors(spec)
    saved = sum(
        2 * prod(shapes[name]) - shapes[name][0] * coded_row_bytes(types[name], shapes[name][1]) for name in types
    )
    assert weight_bytes(spec, "bfloat16", "auto", types) == weight_bytes(spec, "bfloat16") - saved
    assert weight_bytes(spec, "bfloat16", "widened", types) == weight_bytes(spec, "bfloat16")


def test_the_reference_counts_a_folder_as_widened(tmp_path: Path) -> None:
    folder = write_quantized(tmp_path / "model", "packed")
    plan = plan_engine(EngineConfig(model=str(folder), skip_tokenizer_init=True, backend="reference"))
    assert plan.backend.facts.weight_bytes == weight_bytes(plan.model.spec)
    assert plan.report.notices == ("weights quantised by compressed-tensors, pack-quantized, 4 bits: widened",)


@pytest.mark.parametrize("scale", [np.inf, -np.inf, np.nan])
def test_a_scale_that_is_not_finite_ends_the_request_and_nothing_else(scale: float, tmp_path: Path) -> None:
    def broken(weight: NDArray[Any], random: np.random.Generator) -> Quantized:
        matrix = compressed_packed(weight, random)
        matrix.tensors["weight_scale"][1][:, 0] = scale
        return matrix

    folder = write_quantized(tmp_path / "model", "packed", {"down_proj": broken})
    assert "model.layers.0.mlp.down_proj.weight" in ModelFolder(folder).block_types()
    with LLM(str(folder), kv_memory="4MiB", skip_tokenizer_init=True, backend="native") as llm:
        (output,) = llm.generate([PROMPT], SAMPLING, use_tqdm=False)
    assert output.outputs[0].finish_reason == "error"
    assert output.error is not None and "not finite" in output.error


@pytest.mark.parametrize("form", ["gptq-act-order", "fp8", "bitsandbytes-4-nested"])
@pytest.mark.parametrize(
    "settings",
    [
        {"backend": "reference"},
        {"backend": "native", "dtype": "bfloat16"},
        {"backend": "native", "dtype": "float32", "weights": "int8"},
        {"backend": "native", "dtype": "float32", "weights": "int4"},
    ],
)
def test_it_does_so_on_every_backend_and_with_weights_made_at_load(
    form: str, settings: dict[str, str], tmp_path: Path
) -> None:
    folder = write_quantized(tmp_path / "model", form)
    assert answer_of(folder, **settings) == answer_of(tmp_path / "model-plain", **settings)


@pytest.mark.parametrize(
    ("form", "weights", "notice", "shown"),
    [
        ("gptq-8", "auto", "weights quantised by GPTQ, 8 bits: kept as Q8_0 where that is exact", "Q8_0"),
        ("gptq-8", "widened", "weights quantised by GPTQ, 8 bits: widened", "widened"),
        ("fp8", "auto", "weights quantised by fp8: widened", "auto"),
        ("auto-round", "auto", "weights quantised by AutoRound, 4 bits: kept as Q5_0 where that is exact", "Q5_0"),
        ("bitsandbytes-4", "auto", "weights quantised by bitsandbytes, 4 bits: widened", "auto"),
    ],
)
def test_the_start_says_how_the_weights_are_quantised(
    form: str, weights: str, notice: str, shown: str, tmp_path: Path
) -> None:
    folder = write_quantized(tmp_path / "model", form)
    report = plan_engine(EngineConfig(model=str(folder), skip_tokenizer_init=True, weights=weights)).report
    assert report.notices == (notice,)
    assert report.weights == shown
