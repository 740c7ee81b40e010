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

from quire.compute.gguf.blocks import BLOCK_TYPES
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.source import ModelFolder
from quire.compute.quantized import tensors as quantized_tensors
from quire.compute.quantized.blocks import BLOCKS, HOLDS, blocks_of
from quire.compute.quantized.matrix import Groups
from quire.compute.quantized.methods import quantization_of
from quire.compute.quantized.tensors import QuantizedTensors
from quire.compute.weights.bfloat16 import narrowed
from quire.compute.weights.checkpoint import Checkpoint
from quire.compute.weights.small_floats import E4M3
from quire.core.errors import CheckpointError, InvariantError, ModelError
from support import quantized_models
from support.quantized_models import (
    AWQ,
    BITSANDBYTES,
    FORMS,
    FP8,
    MODELOPT,
    MXFP4,
    NVFP4,
    Quantized,
    Tensor,
    auto_round_settings,
    compressed_settings,
    gguf_blocks,
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


def method_of(settings: object) -> Any:
    """Return the method that settings ask for."""
    return quantization_of(ConfigFile("config.json", {"quantization_config": settings}), ModelFolder(Path("nowhere")))


def widen_e4m3(blocks: Any) -> Any:
    """Return the weights of blocks of E4M3, by the definition."""
    scales = blocks[:, :4].copy().view("<f4").astype(np.float64)
    return (quantized_models.E4M3[blocks[:, 4:]] * scales).astype(np.float32)


def widen_nvfp4(blocks: Any) -> Any:
    """Return the weights of blocks of NVFP4, by the definition."""
    factors = blocks[:, :4].copy().view("<f4")
    scales = np.repeat(quantized_models.E4M3[blocks[:, 4:6]].astype(np.float32) * factors, 16, axis=1)
    codes = np.concatenate([blocks[:, 6:] & 15, blocks[:, 6:] >> 4], axis=1)
    return (2 * quantized_models.E2M1[codes] * scales.astype(np.float64)).astype(np.float32)


WIDEN = {**{block.name: block.widen for block in BLOCK_TYPES.values()}, "E4M3": widen_e4m3, "NVFP4": widen_nvfp4}
TYPES = {  # what a form becomes whose groups are a multiple of 32
    **dict.fromkeys(("gptq", "gptq-one-group", "gptq-v2", "awq", "packed-zeros"), "Q5_0"),
    **dict.fromkeys(("auto-round", "auto-round-gptqmodel", "auto-round-awq"), "Q5_0"),
    **dict.fromkeys(("gptq-8", "packed-8-channels", "int8"), "Q8_0"),
    **dict.fromkeys(("nvfp4", "modelopt-nvfp4"), "NVFP4"),
    "mxfp4": "MXFP4",
    "packed": "Q4_0",
}


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
    assert tensors.block_types.keys() <= {f"{STEM}.weight"}
    for name, kind in tensors.block_types.items():
        blocks = tensors.block_rows(name)
        assert WIDEN[kind](blocks.reshape(-1, BLOCKS[kind][1])).tobytes() == weights.tobytes()
        assert not blocks.flags.writeable
        assert tensors.block_rows(name, rows).tobytes() == blocks[rows].tobytes()
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
        "nvfp4": (NVFP4 if flag else MODELOPT, partial(quantized_models.nvfp4, compressed=flag)),
        "mxfp4": (MXFP4, quantized_models.packed_mxfp4),
        "bitsandbytes": (BITSANDBYTES, partial(quantized_models.bitsandbytes_4, block=2 * bits, nested=flag)),
    }
    name = draw(st.sampled_from(sorted(forms)))
    settings, write = forms[name]
    num_inputs *= 4 if name in ("nvfp4", "mxfp4") else 1 + (bits == 8)
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
def test_every_form_is_read_and_stays_packed_where_blocks_are_exact(form: str, tmp_path: Path) -> None:
    matrix = matrix_of(form)
    folder = written(tmp_path, matrix.tensors, FORMS[form][0])
    require_same(folder, matrix.weights, slice(3, 50))
    assert folder.block_types() == ({f"{STEM}.weight": TYPES[form]} if form in TYPES else {})
    if TYPES.get(form, "NVFP4") != "NVFP4":
        assert folder.tensors().block_rows(f"{STEM}.weight").tobytes() == gguf_blocks(TYPES[form], matrix).tobytes()


@pytest.mark.parametrize("form", ["fp8-128", "fp8-tensor", "float8", "float8-tensor"])
def test_floats_of_8_bits_stay_packed_where_each_128_inputs_share_a_scale(form: str, tmp_path: Path) -> None:
    for index, (num_inputs, kind) in enumerate(((256, "E4M3"), (200, ""))):
        matrix = matrix_of(form, 300, num_inputs)
        matrix.tensors["weight"][1][7, 9] = 0x7F  # NaN
        matrix.weights[7, 9] = np.nan
        (tmp_path / f"{index}").mkdir()
        folder = written(tmp_path / f"{index}", matrix.tensors, FORMS[form][0])
        assert folder.block_types() == ({f"{STEM}.weight": kind} if kind else {})
        require_same(folder, matrix.weights, slice(120, 140))
    assert written(tmp_path, matrix_of("fp8", 64, 256).tensors, FP8).block_types() == {}


def scales_of(numbers: Any) -> Any:
    """Return scales for a matrix of 64 outputs with three groups of inputs."""
    return np.resize(np.asarray(numbers), (64, 3))


F16_EDGES = [np.inf, -np.inf, np.nan, 0.0, -0.0, -1.0, 6e-8, 65504.0]
BF16_EDGES = np.array([0x3F80, 0xBF80, 0x0000, 0x8000, 0x7F80, 0xFF80, 0x377F, 0x477F], np.uint16)


@pytest.mark.parametrize(
    ("form", "part", "dtype", "scales", "is_exact"),
    [
        ("packed", "weight_scale", "F16", scales_of(F16_EDGES).astype(np.float16), True),
        ("int8", "weight_scale", "F16", scales_of(F16_EDGES).astype(np.float16)[:, :1], True),
        ("packed", "weight_scale", "BF16", scales_of(BF16_EDGES), True),
        ("packed", "weight_scale", "BF16", scales_of([*BF16_EDGES, np.uint16(0x3681)]), False),  # 2^-18 and 2^-25
        ("packed", "weight_scale", "BF16", scales_of([*BF16_EDGES, np.uint16(0x4780)]), False),  # 65,536
        ("packed", "weight_scale", "F32", scales_of([0.5, 2.0**-24, np.inf]).astype(np.float32), True),
        ("packed", "weight_scale", "F32", scales_of([0.5, 1 + 2.0**-11]).astype(np.float32), False),
        ("packed", "weight_scale", "F32", scales_of([0.5, 1e9]).astype(np.float32), False),
        ("gptq", "scales", "F32", scales_of([0.1]).T.astype(np.float32), False),
        ("gptq", "scales", "BF16", scales_of(BF16_EDGES).T, True),
    ],
)
def test_scales_that_float16_lacks_keep_a_matrix_out_of_blocks(
    form: str, part: str, dtype: str, scales: Any, is_exact: bool, tmp_path: Path
) -> None:
    parts = matrix_of(form).tensors | {part: (dtype, scales)}
    folder = written(tmp_path, parts, FORMS[form][0])
    weights = folder.tensors().tensor(f"{STEM}.weight").copy()
    assert bool(folder.block_types()) == is_exact
    nan = np.isnan(weights)
    if is_exact:
        kind = folder.block_types()[f"{STEM}.weight"]
        with np.errstate(invalid="ignore"):
            widened = WIDEN[kind](folder.tensors().block_rows(f"{STEM}.weight").reshape(-1, BLOCKS[kind][1]))
        widened = widened.reshape(weights.shape)
        assert np.array_equal(np.isnan(widened), nan)
        assert widened[~nan].tobytes() == weights[~nan].tobytes()


@pytest.mark.parametrize(
    ("group", "num_inputs", "kind"),
    [(32, 96, "Q4_0"), (64, 96, "Q4_0"), (-1, 96, "Q4_0"), (96, 96, "Q4_0"), (128, 96, "Q4_0"), (48, 96, ""),
     (16, 96, ""), (40, 96, ""), (32, 80, ""), (-1, 40, "")],
)  # fmt: skip
def test_each_block_has_inputs_of_one_group(group: int, num_inputs: int, kind: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    weight = random.standard_normal((16, num_inputs), np.float32)
    matrix = quantized_models.compressed_packed(weight, random, group=group)
    settings = compressed_settings("pack-quantized", num_bits=4, strategy="group", group_size=group)
    folder = written(tmp_path, matrix.tensors, settings)
    require_same(folder, matrix.weights, slice(2, 9))
    assert folder.block_types() == ({f"{STEM}.weight": kind} if kind else {})


def test_inputs_in_another_order_stay_packed_if_32_of_them_keep_together(tmp_path: Path) -> None:
    matrix = matrix_of("gptq")
    for order, exact in (([2, 0, 1], True), ([0, 1, 1], True)):
        matrix.tensors["g_idx"] = ("I32", np.repeat(order, 32).astype(np.int32))
        assert bool(written(tmp_path, matrix.tensors, gptq_settings()).block_types()) == exact
        tensors = written(tmp_path, matrix.tensors, gptq_settings()).tensors()
        blocks = tensors.block_rows(f"{STEM}.weight").reshape(-1, BLOCKS["Q5_0"][1])
        assert WIDEN["Q5_0"](blocks).tobytes() == tensors.tensor(f"{STEM}.weight").tobytes()
    matrix.tensors["g_idx"][1][31] = 2
    assert written(tmp_path, matrix.tensors, gptq_settings()).block_types() == {}


@pytest.mark.parametrize(("zero", "kind"), [(8, "Q4_0"), (7, "Q5_0"), (0, "Q5_0"), (15, "Q5_0")])
@pytest.mark.parametrize("look", [1, 96 * 5, 1 << 24])
def test_one_zero_point_away_from_the_middle_takes_five_bits(
    zero: int, kind: str, look: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized_tensors, "LOOK", look)  # a few rows at a time
    random = np.random.default_rng(0)
    matrix = matrix_of("packed-zeros")
    codes, zeros = random.integers(0, 16, (64, 96)), np.full((64, 3), 8)
    codes[0, :2], zeros[5, 1] = (0, 15), zero
    matrix.tensors["weight_packed"] = ("I32", quantized_models.packed(codes, 4))
    matrix.tensors["weight_zero_point"] = ("I32", quantized_models.packed(zeros.T, 4).T)
    folder = written(tmp_path, matrix.tensors, FORMS["packed-zeros"][0])
    assert folder.block_types() == {f"{STEM}.weight": kind}
    require_same(folder, folder.tensors().tensor(f"{STEM}.weight").copy(), slice(0, 9))


@given(seed=st.integers(0, 99), kind=st.sampled_from(sorted(HOLDS)), chunk=st.sampled_from([1, 64, 1 << 20]))
def test_blocks_hold_every_integer_of_their_type(seed: int, kind: str, chunk: int) -> None:
    random, numbers = np.random.default_rng(seed), HOLDS[kind]
    integers = random.integers(numbers[0], numbers[-1] + 1, (3, 64))
    integers[0, :2] = numbers[0], numbers[-1]
    scales = random.standard_normal((3, 2)).astype(np.float16)
    blocks = blocks_of(kind, integers, Groups(scales, 0, 32, numbers))
    right = integers * np.repeat(scales.astype(np.float32), 32, axis=1)
    assert np.array_equal(WIDEN[kind](blocks.reshape(-1, BLOCKS[kind][1])).reshape(3, 64), right)


def test_what_is_not_on_the_disk_counts_as_widened_and_what_is_broken_too(tmp_path: Path) -> None:
    folder = written(tmp_path, matrix_of("packed").tensors, PACKED)
    (tmp_path / "alone.json").write_text((tmp_path / "config.json").read_text())
    assert ModelFolder(tmp_path, "alone.json").block_types() == {}
    assert folder.block_types() != {}
    (tmp_path / "model.safetensors").unlink()
    assert ModelFolder(tmp_path).block_types() == {}
    parts = matrix_of("gptq-act-order").tensors
    parts["g_idx"][1][5] = 7
    broken = written(tmp_path, parts, FORMS["gptq-act-order"][0])
    assert broken.block_types() == {}
    with pytest.raises(CheckpointError, match="g_idx': range"):
        assert broken.tensors().block_types


def test_an_empty_matrix_costs_nothing_to_look_at(tmp_path: Path) -> None:
    parts = {"weight": ("I8", np.zeros((1 << 40, 0), np.int8)), "weight_scale": ("F16", np.zeros((1 << 40, 0), "f2"))}
    scheme_of = {"num_bits": 8, "strategy": "group", "group_size": 32}
    assert written(tmp_path, parts, compressed_settings("int-quantized", **scheme_of)).block_types() == {}


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


def test_a_matrix_that_is_not_exact_in_blocks_has_none(tmp_path: Path) -> None:
    tensors = written(tmp_path, matrix_of("fp8").tensors, FP8).tensors()
    assert tensors.block_types == {}
    with pytest.raises(InvariantError, match="no blocks are its weights to the bit"):
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


STATE = "weight.quant_state.bitsandbytes__nf4"


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
    ("fp8-tensor", {"weight_scale_inv": f16(2)}, "shape is [2]; allowed: [1]"),
    ("fp8-tensor", {"weight_scale_inv": f16(2, 4)}, "shape is [2, 4]; allowed: 1 dimensions"),
    ("nvfp4", {"weight_global_scale": None}, f"is 'without {STEM}.weight_global_scale'"),
    ("nvfp4", {"weight_global_scale": f16(1)}, "weight_global_scale': dtype is 'F16'; allowed: one of F32"),
    ("nvfp4", {"weight_packed": ("U8", np.zeros((64, 47), np.uint8))}, "shape is [64, 47]; allowed: [64, 48]"),
    ("nvfp4", {"weight_scale": f16(64, 6)}, "weight_scale': dtype is 'F16'; allowed: one of F8_E4M3"),
    ("nvfp4", {"weight": f16(64, 96)}, f"tensor '{STEM}.weight' is 'given twice'"),
    ("modelopt-nvfp4", {"weight": f16(64, 48)}, "weight': dtype is 'F16'; allowed: one of U8"),
    ("mxfp4", {"weight_packed": ("U8", np.zeros((64, 47), np.uint8))}, "shape is [64, 47]; allowed: [64, 48]"),
    ("bitsandbytes-8", {"SCB": ("F32", np.zeros(63, np.float32))}, "SCB': shape is [63]; allowed: [64]"),
    ("bitsandbytes-8", {"weight": f16(64, 96)}, "weight': dtype is 'F16'; allowed: one of I8"),
    ("bitsandbytes-4", {STATE: None}, f"is 'without {STEM}.{STATE}'"),
    (
        "bitsandbytes-4",
        {STATE: ("U8", np.zeros(4097, np.uint8))},
        "'described in 4097 bytes'; allowed: in at most",
    ),
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


def state_of(**changes: object) -> Tensor:
    """Return what describes a matrix of bitsandbytes."""
    state = {"quant_type": "nf4", "blocksize": 32, "dtype": "bfloat16", "shape": [64, 96], **changes}
    return "U8", np.frombuffer(json.dumps(state).encode(), np.uint8)


def u8(*shape: int) -> Tensor:
    return "U8", np.zeros(shape, np.uint8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({STATE: ("U8", np.frombuffer(b"[" * 900, np.uint8))}, f"{STATE}'"),
        ({STATE: ("U8", np.frombuffer(b"nothing\xff", np.uint8))}, f"{STATE}'"),
        ({STATE: state_of(shape=[64])}, "shape is [64]; allowed: two integers from 1"),
        ({STATE: state_of(shape=[0, 96])}, "shape is [0, 96]; allowed: two integers from 1"),
        ({STATE: state_of(shape=[1 << 23, 1 << 23])}, "weight': shape is [3072, 1]; allowed: [35184372088832, 1]"),
        ({STATE: state_of(blocksize=64)}, "is '96 inputs'; allowed: a multiple of 2 and of the 64 that share a scale"),
        ({STATE: state_of(shape=[2048, 3], blocksize=3)}, "is '3 inputs'; allowed: a multiple of 2 and of the 3"),
        ({STATE: state_of(blocksize=0)}, "blocksize is 0; allowed: an integer from 1"),
        ({STATE: state_of(nested_offset="0")}, "nested_offset is '0'; allowed: a number"),
        ({"weight": u8(3071, 1)}, "weight': shape is [3071, 1]; allowed: [3072, 1]"),
        ({"weight": f16(3072, 1)}, "weight': dtype is 'F16'; allowed: one of U8"),
        ({"weight.quant_map": f16(16)}, "weight.quant_map': dtype is 'F16'; allowed: one of F32"),
        ({"weight.absmax": ("F32", np.ones(191, np.float32))}, "weight.absmax': shape is [191]; allowed: [192]"),
        ({"weight.absmax": u8(192)}, "weight.absmax': dtype is 'U8'; allowed: one of F32"),
        (
            {"weight.nested_absmax": ("F32", np.ones(39, np.float32))},
            "weight.absmax': dtype is 'F32'; allowed: one of U8",
        ),
    ],
)
def test_a_matrix_of_bitsandbytes_is_checked_against_what_describes_it(
    changes: dict[str, Tensor], message: str, tmp_path: Path
) -> None:
    folder = written(tmp_path, {**matrix_of("bitsandbytes-4").tensors, **changes}, BITSANDBYTES)
    with pytest.raises(CheckpointError) as refused:
        folder.tensors()
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_numbers_in_the_order_of_a_kernel_are_refused_when_they_are_read(tmp_path: Path) -> None:
    settings = FORMS["bitsandbytes-8"][0]
    parts = {**matrix_of("bitsandbytes-8").tensors, "weight_format": ("U8", np.array(2, np.uint8))}
    with pytest.raises(CheckpointError, match="'stored in the order of a kernel'; allowed: row by row"):
        written(tmp_path, parts, settings).tensors().tensor(f"{STEM}.weight")


def mixed(*settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a folder with the groups of several."""
    groups = {
        f"group_{index}": {**each["config_groups"]["group_0"], "format": each["format"]}
        for index, each in enumerate(settings)
    }
    return {**settings[0], "format": "mixed-precision", "config_groups": groups}


MIXED_MODELOPT = {
    **MODELOPT,
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {
        "a": {"quant_algo": "FP8"},
        "b": {"quant_algo": "NVFP4", "group_size": 16},
        "c": {"quant_algo": "FP8"},
    },
}


@pytest.mark.parametrize("form", ["nvfp4", "float8", "packed", "int8", "mxfp4", "modelopt-nvfp4", "modelopt-fp8"])
def test_each_matrix_of_a_folder_may_be_in_another_format(form: str, tmp_path: Path) -> None:
    settings = mixed(NVFP4, FLOAT8, PACKED, FORMS["int8"][0], MXFP4)
    matrix = matrix_of(form)
    folder = written(tmp_path, matrix.tensors, MIXED_MODELOPT if "modelopt" in form else settings)
    require_same(folder, matrix.weights, slice(3, 50))
    assert folder.block_types().get(f"{STEM}.weight", "") == TYPES.get(form, "")


def test_a_matrix_in_none_or_several_of_the_formats_of_a_folder_is_refused(tmp_path: Path) -> None:
    eight = compressed_settings("pack-quantized", num_bits=8, strategy="channel")
    four = compressed_settings("pack-quantized", num_bits=4, strategy="channel")
    both = {**matrix_of("nvfp4").tensors, **matrix_of("float8").tensors}
    cases = [
        (matrix_of("packed-8-channels").tensors, mixed(eight, four), "stored so that several formats fit"),
        (matrix_of("int8").tensors, mixed(NVFP4, FLOAT8), "stored in none of the folder's formats"),
        (both, mixed(NVFP4, FLOAT8), "stored in none of the folder's formats"),
    ]
    for parts, settings, message in cases:
        with pytest.raises(CheckpointError, match=message):
            written(tmp_path, parts, settings).tensors()
    assert (
        method_of(mixed(NVFP4, FLOAT8, NVFP4)).name
        == "compressed-tensors, nvfp4-pack-quantized and float-quantized, 8 bits"
    )


def test_settings_of_modelopt_may_be_in_a_file_of_their_own(tmp_path: Path) -> None:
    matrix = matrix_of("modelopt-nvfp4")
    written(tmp_path, matrix.tensors, None)
    own = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(own))
    require_same(ModelFolder(tmp_path), matrix.weights, slice(3, 50))
    own["quantization"] = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(own))
    assert not isinstance(ModelFolder(tmp_path).tensors(), QuantizedTensors)


@pytest.mark.parametrize(
    ("scale", "whole", "is_packed"),
    [(0x7E, 1.0, True), (0x00, -255.0, True), (0x7F, 1.0, False), (0x80, 1.0, False), (0x38, 256.0, False),
     (0x38, np.inf, False), (0x38, np.nan, False)],
)  # fmt: skip
def test_scales_that_blocks_of_nvfp4_lack_keep_a_matrix_out_of_them(
    scale: int, whole: float, is_packed: bool, tmp_path: Path
) -> None:
    parts = matrix_of("modelopt-nvfp4").tensors
    parts["weight_scale"][1][7, 3] = scale
    parts["weight_scale_2"] = ("F32", np.array(whole, np.float32))
    folder = written(tmp_path, parts, MODELOPT)
    weights = folder.tensors().tensor(f"{STEM}.weight")
    assert np.isfinite(weights).all() == (scale != 0x7F and bool(np.isfinite(whole)))
    assert bool(folder.block_types()) == is_packed
    if is_packed:
        blocks = folder.tensors().block_rows(f"{STEM}.weight")
        assert np.array_equal(widen_nvfp4(blocks.reshape(-1, 22)).reshape(weights.shape), weights)


def test_many_modules_and_a_long_list_of_others_are_read_quickly() -> None:
    modules = {f"m{n}": {"quant_algo": ("FP8", "NVFP4")[n % 2], "group_size": 16} for n in range(20_000)}
    settings = {**MIXED_MODELOPT, "quantized_layers": modules, "ignore": [f"n{n}" for n in range(20_000)]}
    assert method_of(settings).name == "ModelOpt, fp8 and NVFP4"
    groups = {f"g{n}": PACKED["config_groups"]["group_0"] for n in range(65)}
    with pytest.raises(CheckpointError, match="allowed: 1 to 64 groups"):
        method_of({**PACKED, "config_groups": groups})


def test_modules_that_auto_round_left_alone_are_floats(tmp_path: Path) -> None:
    kept = {STEM: {"bits": 16, "data_type": "float"}, "same": {"bits": 4, "group_size": 32}}
    settings = auto_round_settings(None, extra_config=kept)
    assert method_of(settings).unconverted == (STEM,)
    with pytest.raises(CheckpointError, match="is 'quantised'; allowed: floats"):
        written(tmp_path, matrix_of("gptq-v2").tensors, settings).tensors()
    for old in ("intel/auto-round", "auto-round"):
        matrix = matrix_of("gptq")
        same = {**auto_round_settings(None), "quant_method": old, "backend": "auto_round:gptq:exllamav2"}
        require_same(written(tmp_path, matrix.tensors, same), matrix.weights, slice(0, 9))


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
        ({"quant_method": "hqq"}, "'hqq'"),
        ({"quant_method": "quark"}, "'quark'"),
        ({**MODELOPT, "quant_algo": "W4A8_AWQ"}, "ModelOpt with the algorithm 'W4A8_AWQ'"),
        ({"quant_method": "modelopt"}, "ModelOpt with the algorithm None"),
        (auto_round_settings("auto_round:fp8"), "AutoRound in the layout 'auto_round:fp8'"),
        (auto_round_settings("auto_gptq"), "AutoRound in the layout 'auto_gptq'"),
        ({"quant_method": "x" * 1000}, "'xxxxxx"),
        (compressed_settings("mixed-precision"), "compressed-tensors in the format 'mixed-precision'"),
        (compressed_settings("marlin-24"), "compressed-tensors in the format 'marlin-24'"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {}}}, "compressed-tensors in the format None"),
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
        method_of(settings)
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
        ({}, "quant_method is None; allowed: one of auto-round, awq, bitsandbytes, compressed-tensors, fbgemm_fp8"),
        ({"quant_method": ["gptq"]}, "quant_method is ['gptq']; allowed: one of"),
        (gptq_settings(bits=3), "bits is 3; allowed: 4 or 8"),
        (gptq_settings(bits=None), "bits is None; allowed: an integer from 1"),
        (gptq_settings(bits="4"), "bits is '4'; allowed: an integer from 1"),
        (gptq_settings(group_size=0), "group_size is 0; allowed: an integer from 1, or -1 for one group"),
        (gptq_settings(group_size=-2), "group_size is -2; allowed: an integer from -1"),
        (gptq_settings(group_size=1 << 40), "group_size is 1099511627776; allowed: an integer from -1 to 16777215"),
        (gptq_settings(desc_act="yes"), "desc_act is 'yes'; allowed: true or false"),
        (gptq_settings(dynamic={"+:.*": {"bits": 8}}), "dynamic is {'+:.*': {'bits': 8}}; allowed: only excluded"),
        (gptq_settings(modules_to_not_convert=[3]), "modules_to_not_convert is [3]; allowed: a list of strings"),
        ({**AWQ, "bits": 8}, "bits is 8; allowed: 4"),
        ({**AWQ, "zero_point": False}, "zero_point is False; allowed: true"),
        ({**FP8, "fmt": "e5m2"}, "fmt is 'e5m2'; allowed: 'e4m3' or 'float8_e4m3fn' or null"),
        ({"quant_method": "fp8"}, "weight_block_size is None; allowed: two integers from 1, such as [128"),
        ({**FP8, "weight_block_size": [0, 128]}, "weight_block_size is [0, 128]; allowed: two integers"),
        ({**FP8, "weight_block_size": [True, 128]}, "weight_block_size is [True, 128]; allowed: two integers"),
        ({**PACKED, "config_groups": {}}, "config_groups is {}; allowed: 1 to 64 groups"),
        ({**PACKED, "config_groups": {"W4A16": ["Linear"]}}, "W4A16 is ['Linear']; allowed: an object"),
        (compressed_settings("nvfp4-pack-quantized", type="float", num_bits=4, group_size=32), "group_size is 32; al"),
        (compressed_settings("mxfp4-pack-quantized", type="int", num_bits=4, group_size=32), "type is 'int'; allowed:"),
        (compressed_settings("mxfp4-pack-quantized", type="float", num_bits=8, group_size=32), "num_bits is 8; allow"),
        ({**MODELOPT, "group_size": 32}, "group_size is 32; allowed: 16"),
        ({**MODELOPT, "quant_algo": "MIXED_PRECISION"}, "quantized_layers is None; allowed: the settings of at least"),
        ({"quant_method": "bitsandbytes"}, "load_in_4bit is None; allowed: true, or load_in_8bit is"),
        ({**BITSANDBYTES, "load_in_4bit": "yes"}, "load_in_4bit is 'yes'; allowed: true or false"),
        (auto_round_settings("auto_round:auto_gptq", bits=2), "bits is 2; allowed: 4 or 8"),
        (auto_round_settings(None, bits=2), "bits is 2; allowed: 4 or 8"),
        (auto_round_settings("auto_round:auto_awq", bits=8), "bits is 8; allowed: 4"),
        (auto_round_settings("auto_round:auto_gptq", data_type="mx_fp"), "data_type is 'mx_fp'; allowed: 'int' or nu"),
        (auto_round_settings("auto_round:auto_gptq", extra_config={"a": {"bits": 8}}), "allowed: only modules that ar"),
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
        method_of(settings)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_modules_that_are_left_out_are_no_change_of_bits() -> None:
    settings = gptq_settings(dynamic={"-:lm_head": {}}, checkpoint_format="gptq_v2")
    assert method_of(settings) is not None
    assert method_of(None) is None
