"""Quantised matrices: their weights bit for bit, and what is refused before a tensor is mapped."""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.compute.models.config_file import ConfigFile
from quire.compute.models.source import ModelFolder
from quire.compute.quantized import tensors as quantized_tensors
from quire.compute.quantized.fp8 import E4M3
from quire.compute.quantized.methods import quantization_of
from quire.compute.quantized.tensors import QuantizedTensors
from quire.compute.weights.bfloat16 import narrowed
from quire.compute.weights.checkpoint import Checkpoint
from quire.core.errors import CheckpointError, InvariantError, ModelError
from support import quantized_models
from support.quantized_models import (
    AWQ,
    FORMS,
    FP8,
    Quantized,
    Tensor,
    compressed_settings,
    gptq_settings,
    write_tensors,
)

STEM = "model.layers.0.mlp.up_proj"
PACKED = compressed_settings("pack-quantized", num_bits=4, strategy="group", group_size=32)
FLOAT8 = compressed_settings("float-quantized", num_bits=8, type="float", strategy="channel")


def written(folder: Path, tensors: dict[str, Tensor], quantization: object) -> ModelFolder:
    """Write a folder with the parts of one matrix, and a norm."""
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    named = {f"{STEM}.{part}": tensor for part, tensor in tensors.items()}
    write_tensors(folder / "model.safetensors", {**named, "norm.weight": ("F32", np.ones(8, np.float32))})
    return ModelFolder(folder)


def matrix_of(form: str, out: int = 64, num_inputs: int = 96) -> Quantized:
    """Return a random matrix in a form."""
    random = np.random.default_rng(0)
    return FORMS[form][1](random.standard_normal((out, num_inputs), np.float32), random)


def require_same(found: ModelFolder, weights: Any, rows: slice) -> None:
    """Require that a folder shows the weights under their plain name, and nothing of what they are made of."""
    tensors = found.tensors()
    assert isinstance(tensors, QuantizedTensors)
    assert tensors.entries.keys() == {f"{STEM}.weight", "norm.weight"}
    assert tensors.entries[f"{STEM}.weight"].shape == weights.shape
    for name in tensors.entries:
        tensors.require_floats(name)
    assert tensors.tensor(f"{STEM}.weight").tobytes() == weights.tobytes()
    assert tensors.tensor(f"{STEM}.weight", rows).tobytes() == weights[rows].tobytes()
    bits = narrowed(np.ascontiguousarray(weights[rows]).reshape(-1))
    assert tensors.bfloat16_bits(f"{STEM}.weight", rows).tobytes() == bits.tobytes()
    assert tensors.tensor("norm.weight").tolist() == [1.0] * 8
    tensors.release()


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, Any], Any, tuple[int, int], slice]:
    """Draw settings, the writer for them, a shape, and some rows."""
    out, num_inputs = 8 * draw(st.integers(1, 9)), 8 * draw(st.integers(1, 9))
    group, flag = draw(st.sampled_from([-1, 1, 8, 24, 32, 128])), draw(st.booleans())
    bits, ordered = draw(st.sampled_from([4, 8])), draw(st.booleans())
    block = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    scheme = {"num_bits": bits, "strategy": "group", "group_size": group, "symmetric": flag}
    number = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": list(block)}
    v2 = {"checkpoint_format": "gptq_v2" if flag else "gptq"}
    forms: dict[str, tuple[dict[str, Any], Any]] = {
        "gptq": (
            gptq_settings(bits=bits, group_size=group, desc_act=ordered, **v2),
            partial(quantized_models.gptq, bits=bits, group=group, act_order=ordered, v2=flag),
        ),
        "awq": ({**AWQ, "group_size": group}, partial(quantized_models.awq, group=group)),
        "packed": (
            compressed_settings("pack-quantized", **scheme),
            partial(quantized_models.compressed_packed, bits=bits, group=group, symmetric=flag, act_order=ordered),
        ),
        "int8": (
            compressed_settings("int-quantized", **{**scheme, "num_bits": 8}),
            partial(quantized_models.compressed_int8, group=group, symmetric=flag),
        ),
        "float8": (
            compressed_settings("float-quantized", **number),
            partial(quantized_models.compressed_fp8, block=block),
        ),
        "fp8": ({**FP8, "weight_block_size": list(block)}, partial(quantized_models.block_fp8, block=block)),
    }
    settings, write = forms[draw(st.sampled_from(sorted(forms)))]
    start = draw(st.integers(0, out - 1))
    return settings, write, (out, num_inputs), slice(start, draw(st.integers(start + 1, out)))


@given(case=cases(), seed=st.integers(0, 99), chunk=st.sampled_from([1, 100, 1 << 20]))
def test_weights_are_those_of_the_definition_to_the_bit(case: Any, seed: int, chunk: int) -> None:
    settings, write, shape, rows = case
    random = np.random.default_rng(seed)
    matrix = write(random.standard_normal(shape, np.float32), random)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantized_tensors, "CHUNK", chunk)
        require_same(written(Path(folder), matrix.tensors, settings), matrix.weights, rows)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read(form: str, tmp_path: Path) -> None:
    matrix = matrix_of(form)
    require_same(written(tmp_path, matrix.tensors, FORMS[form][0]), matrix.weights, slice(3, 50))


def test_every_byte_of_e4m3_is_the_number_of_the_definition() -> None:
    np.testing.assert_array_equal(E4M3.astype(np.float64), quantized_models.E4M3)


def test_a_bias_of_zeros_that_a_packer_of_gptq_added_is_not_shown(tmp_path: Path) -> None:
    matrix = matrix_of("gptq")
    for bias, shown in ((np.zeros(64, np.float16), False), (np.ones(64, np.float16), True)):
        tensors = written(tmp_path, {**matrix.tensors, "bias": ("F16", bias)}, gptq_settings()).tensors()
        assert (f"{STEM}.bias" in tensors.entries) == shown


def test_scales_for_other_kinds_of_kv_memory_are_not_shown(tmp_path: Path) -> None:
    parts = {**matrix_of("fp8").tensors, "k_scale": ("F32", np.ones(1, np.float32))}
    assert written(tmp_path, parts, FP8).tensors().entries.keys() == {f"{STEM}.weight", "norm.weight"}


def test_a_quantised_matrix_has_no_blocks(tmp_path: Path) -> None:
    tensors = written(tmp_path, matrix_of("awq").tensors, AWQ).tensors()
    assert tensors.block_types == {}
    with pytest.raises(InvariantError, match="is widened, not kept in blocks"):
        tensors.block_rows(f"{STEM}.weight")


def test_a_scale_that_is_not_finite_shows_in_its_weights_without_a_warning(tmp_path: Path) -> None:
    parts = matrix_of("packed").tensors
    parts["weight_scale"][1][2, 1] = np.inf
    weights = written(tmp_path, parts, PACKED).tensors().tensor(f"{STEM}.weight")
    assert {(int(row), int(column) // 32) for row, column in np.argwhere(~np.isfinite(weights))} == {(2, 1)}


def test_a_long_list_and_a_deep_name_are_compared_quickly(tmp_path: Path) -> None:
    tensors = {f"{'a.' * 20_000}{part}": tensor for part, tensor in matrix_of("awq").tensors.items()}
    settings = {**AWQ, "modules_to_not_convert": [f"m{n}" for n in range(50_000)]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    write_tensors(tmp_path / "model.safetensors", tensors)
    assert len(ModelFolder(tmp_path).tensors().entries) == 1


def i32(*shape: int) -> Tensor:
    return "I32", np.zeros(shape, np.int32)


def f16(*shape: int) -> Tensor:
    return "F16", np.zeros(shape, np.float16)


WRONG_PARTS: list[tuple[str, dict[str, Tensor | None], str]] = [
    ("gptq", {"qzeros": None}, f"matrix '{STEM}' is 'without {STEM}.qzeros'; allowed: with every tensor"),
    ("gptq", {"qweight": i32(12, 64, 1)}, "qweight': shape is [12, 64, 1]; allowed: 2 dimensions"),
    ("gptq", {"qweight": ("F32", np.zeros((12, 64), np.float32))}, "dtype is 'F32'"),
    ("gptq", {"qweight": i32(0, 1 << 40)}, "scales': shape is [3, 64]; allowed: [0, 1099511627776], as its settings"),
    ("gptq", {"scales": f16(4, 64)}, "scales': shape is [4, 64]; allowed: [3, 64], as its settings and the other"),
    ("gptq", {"scales": i32(3, 64)}, "scales': dtype is 'I32'; allowed: one of F32, F16, BF16"),
    ("gptq", {"qzeros": i32(3, 9)}, "qzeros': shape is [3, 9]; allowed: [3, 8]"),
    ("gptq", {"g_idx": i32(95)}, "g_idx': shape is [95]; allowed: [96]"),
    ("gptq-act-order", {"g_idx": None}, f"is 'without {STEM}.g_idx'"),
    ("gptq", {"weight": f16(64, 96)}, f"tensor '{STEM}.weight' is 'given twice'; allowed: it or its qweight, not both"),
    ("awq", {"qzeros": i32(3, 9)}, "qzeros': shape is [3, 9]; allowed: [3, 8]"),
    ("awq", {"scales": f16(3, 63)}, "scales': shape is [3, 63]; allowed: [3, 64]"),
    ("packed", {"weight_scale": f16(64, 2)}, "weight_scale': shape is [64, 2]; allowed: [64, 3]"),
    ("packed", {"weight_shape": i32(3)}, "weight_shape': shape is [3]; allowed: [2]"),
    ("packed-zeros", {"weight_zero_point": None}, "without model.layers.0.mlp.up_proj.weight_zero_point"),
    ("packed-zeros", {"weight_zero_point": i32(9, 3)}, "shape is [9, 3]; allowed: [8, 3]"),
    ("packed-act-order", {"weight_g_idx": i32(3)}, "weight_g_idx': shape is [3]; allowed: [96]"),
    ("int8", {"weight": i32(64, 96)}, "weight': dtype is 'I32'; allowed: one of I8"),
    ("int8-zeros", {"weight_zero_point": i32(64, 3)}, "dtype is 'I32'; allowed: one of I8"),
    ("float8", {"weight_scale": f16(1)}, "weight_scale': shape is [1]; allowed: 2 dimensions"),
    ("float8", {"weight": None}, f"is 'without {STEM}.weight'"),
    ("float8-tensor", {"weight_scale": f16(2)}, "weight_scale': shape is [2]; allowed: 2 dimensions"),
    ("fp8", {"weight": f16(64, 96)}, "weight': dtype is 'F16'; allowed: one of F8_E4M3"),
    ("fp8", {"weight_scale_inv": f16(2, 5)}, "shape is [2, 5]; allowed: [2, 4]"),
]


@pytest.mark.parametrize(("form", "changes", "message"), WRONG_PARTS)
def test_parts_that_do_not_agree_are_refused_before_they_are_mapped(
    form: str, changes: dict[str, Tensor | None], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoint, "stored", lambda *arguments: pytest.fail("a tensor was read"))
    parts = {part: tensor for part, tensor in {**matrix_of(form).tensors, **changes}.items() if tensor is not None}
    folder = written(tmp_path, parts, FORMS[form][0])
    with pytest.raises(CheckpointError) as refused:
        folder.tensors()
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("wrong", [-1, 3, 1 << 30])
def test_a_group_that_does_not_exist_is_refused_when_the_matrix_is_read(wrong: int, tmp_path: Path) -> None:
    parts = matrix_of("gptq-act-order").tensors
    parts["g_idx"][1][5] = wrong
    tensors = written(tmp_path, parts, FORMS["gptq-act-order"][0]).tensors()
    with pytest.raises(CheckpointError, match=r"g_idx': range is '.*'; allowed: groups from 0 to 2"):
        tensors.tensor(f"{STEM}.weight")


@pytest.mark.parametrize("listed", [STEM, "model.layers.0.mlp", "model"])
def test_a_matrix_that_is_not_converted_must_not_be_quantised(listed: str, tmp_path: Path) -> None:
    folder = written(tmp_path, matrix_of("awq").tensors, {**AWQ, "modules_to_not_convert": [listed]})
    with pytest.raises(CheckpointError, match="is 'quantised'; allowed: floats: its config says"):
        folder.tensors()
    written(tmp_path, matrix_of("awq").tensors, {**AWQ, "modules_to_not_convert": ["model.layers.0.mlp.up"]}).tensors()


@pytest.mark.parametrize(
    ("settings", "method"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'"),
        ({"quant_method": "mxfp4"}, "'mxfp4'"),
        ({"quant_method": "x" * 1000}, "'xxxxxx"),
        (compressed_settings("nvfp4-pack-quantized"), "compressed-tensors in the format 'nvfp4-pack-quantized'"),
        (compressed_settings("marlin-24"), "compressed-tensors in the format 'marlin-24'"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors in the format None"),
        ({**AWQ, "version": "gemv"}, "AWQ in the layout 'gemv'"),
        ({**AWQ, "version": 4}, "AWQ in the layout 4"),
        ({**AWQ, "format": "llm-awq"}, "AWQ in the layout 'llm-awq'"),
        (gptq_settings(checkpoint_format="marlin"), "GPTQ in the layout 'marlin'"),
        (gptq_settings(checkpoint_format=["gptq"]), "GPTQ in the layout ['gptq']"),
        (gptq_settings(is_marlin_format=True), "GPTQ for Marlin"),
    ],
)
def test_other_methods_are_refused_by_name_in_one_line(settings: dict[str, Any], method: str) -> None:
    with pytest.raises(ModelError) as refused:
        quantization_of(ConfigFile("config.json", {"quantization_config": settings}))
    said = str(refused.value)
    assert f"config.json: quantization_config: weights quantised by {method}" in said
    assert "which quire does not read. Use the model from before it was quantised, with --weights int8" in said
    assert len(said) < 400
    assert "\n" not in said


def scheme(**changes: object) -> dict[str, Any]:
    return compressed_settings("pack-quantized", **{"num_bits": 4, "strategy": "group", "group_size": 32, **changes})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], "quantization_config is []; allowed: an object"),
        ({}, "quant_method is None; allowed: one of awq, compressed-tensors, fp8, gptq"),
        ({"quant_method": ["gptq"]}, "quant_method is ['gptq']; allowed: one of"),
        (gptq_settings(bits=3), "bits is 3; allowed: 4 or 8"),
        (gptq_settings(bits=None), "bits is None; allowed: an integer from 1"),
        (gptq_settings(bits="4"), "bits is '4'; allowed: an integer from 1"),
        (gptq_settings(group_size=0), "group_size is 0; allowed: an integer from 1, or -1 for one group"),
        (gptq_settings(group_size=-2), "group_size is -2; allowed: an integer from -1"),
        (gptq_settings(group_size=1 << 40), "group_size is 1099511627776; allowed: an integer from -1 to 16777215"),
        (gptq_settings(desc_act="yes"), "desc_act is 'yes'; allowed: true or false"),
        (gptq_settings(dynamic={"+:.*": {"bits": 8}}), "dynamic is {'+:.*': {'bits': 8}}; allowed: modules that are"),
        (gptq_settings(modules_to_not_convert=[3]), "modules_to_not_convert is [3]; allowed: a list of strings"),
        ({**AWQ, "bits": 8}, "bits is 8; allowed: 4"),
        ({**AWQ, "zero_point": False}, "zero_point is False; allowed: true"),
        ({**FP8, "fmt": "e5m2"}, "fmt is 'e5m2'; allowed: 'e4m3' or null"),
        ({**FP8, "weight_block_size": None}, "weight_block_size is None; allowed: two integers from 1, such as [128"),
        ({**FP8, "weight_block_size": [0, 128]}, "weight_block_size is [0, 128]; allowed: two integers"),
        ({**FP8, "weight_block_size": [True, 128]}, "weight_block_size is [True, 128]; allowed: two integers"),
        ({**PACKED, "config_groups": {}}, "config_groups is {}; allowed: one group, or several with the same weights"),
        ({**PACKED, "config_groups": {"W4A16": ["Linear"]}}, "W4A16 is ['Linear']; allowed: an object"),
        ({**PACKED, "config_groups": {**PACKED["config_groups"], "b": scheme(num_bits=8)["config_groups"]["group_0"]}},
         "allowed: one group, or several with the same weights"),
        (scheme(num_bits=2), "weights: num_bits is 2; allowed: 4 or 8"),
        (scheme(type="float"), "weights: type is 'float'; allowed: 'int' or null"),
        (scheme(strategy="tensor"), "weights: strategy is 'tensor'; allowed: one of channel, group"),
        (scheme(strategy=[1]), "weights: strategy is [1]; allowed: one of channel, group"),
        (scheme(group_size=0), "weights: group_size is 0; allowed: an integer from 1"),
        ({**FLOAT8, **{"config_groups": {"a": {"weights": {"num_bits": 8, "strategy": "channel"}}}}},
         "weights: type is None; allowed: 'float'"),
        (compressed_settings("float-quantized", type="float", strategy="channel", symmetric=False),
         "weights: symmetric is False; allowed: true"),
        ({**PACKED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "format is 'sparse-24-bitmask'; allowed: 'de"),
        ({**PACKED, "transform_config": {"config_groups": {}}}, "transform_config is {'config_groups': {}}; allowed"),
        ({**PACKED, "ignore": "lm_head"}, "ignore is 'lm_head'; allowed: a list of strings"),
    ],
)  # fmt: skip
def test_settings_that_are_not_understood_are_refused(settings: object, message: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        quantization_of(ConfigFile("config.json", {"quantization_config": settings}))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_modules_that_are_left_out_are_no_change_of_bits() -> None:
    settings = gptq_settings(dynamic={"-:lm_head": {}}, checkpoint_format="gptq_v2")
    assert quantization_of(ConfigFile("config.json", {"quantization_config": settings})) is not None
    assert quantization_of(ConfigFile("config.json", {"quantization_config": None})) is None
