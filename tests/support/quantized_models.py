"""Writes folders as the packers of quantised models do, and the weights that they stand for.

Everything is written down plainly, one code after the other, and shares no line with the reader.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.tiny_checkpoint import tiny_qwen3_config, tiny_qwen3_tensors

Tensor = tuple[str, NDArray[Any]]  # the dtype in the file, and the numbers
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # of a word, lowest bits first


@dataclass(frozen=True)
class Quantized:
    """A matrix as a method stores it, by what its names end with, and the weights it stands for.

    `integers` and `scales`: of each weight, where it is an integer times a scale.
    """

    tensors: dict[str, Tensor]
    weights: NDArray[np.float32]
    integers: NDArray[np.int64] | None = None
    scales: NDArray[np.float32] | None = None


Quantize = Callable[[NDArray[np.float32], np.random.Generator], Quantized]


def packed(codes: NDArray[Any], bits: int, columns: tuple[int, ...] | None = None) -> NDArray[np.int32]:
    """Return codes packed along the last dimension, the first of each word in its lowest bits."""
    per_word = 32 // bits
    columns = columns or tuple(range(per_word))
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % per_word))).astype(np.uint64)
    words = np.zeros((len(codes), padded.shape[1] // per_word), np.uint64)
    for place, column in enumerate(columns):
        words |= padded[:, column::per_word] << np.uint64(bits * place)
    return words.astype(np.uint32).view(np.int32)


def standing_for(
    tensors: dict[str, Tensor], codes: NDArray[Any], scales: NDArray[Any], zeros: NDArray[Any], groups: NDArray[Any]
) -> Quantized:
    """Return a matrix that stands for (code - zero point) × scale, each product rounded once."""
    integers, of_inputs = codes - zeros[:, groups], scales.astype(np.float64)[:, groups]
    weights = (integers * of_inputs).astype(np.float32)
    return Quantized(tensors, weights, integers, of_inputs.astype(np.float32))


def gguf_blocks(kind: str, matrix: Quantized) -> NDArray[np.uint8]:
    """Return a matrix as blocks of Q4_0, Q5_0, Q8_0 or MXFP4, one after the other."""
    assert matrix.integers is not None and matrix.scales is not None
    rows = []
    for integers, scales in zip(matrix.integers, matrix.scales, strict=True):
        row = bytearray()
        for start in range(0, len(integers), 32):
            (scale,), numbers = set(scales[start : start + 32].tolist()), integers[start : start + 32].tolist()
            row += bytes([round(np.log2(scale)) + 128]) if kind == "MXFP4" else np.float16(scale).tobytes()
            if kind == "Q8_0":
                row += bytes(number & 255 for number in numbers)
                continue
            twice = (2 * E2M1).tolist()
            n = [twice.index(each) if kind == "MXFP4" else each + {"Q4_0": 8, "Q5_0": 16}[kind] for each in numbers]
            if kind == "Q5_0":
                row += sum((each >> 4) << place for place, each in enumerate(n)).to_bytes(4, "little")
            row += bytes(n[place] & 15 | (n[place + 16] & 15) << 4 for place in range(16))
        rows.append(list(row))
    return np.array(rows, np.uint8)


def rounded(weight: NDArray[Any], groups: NDArray[Any], bits: int, symmetric: bool) -> tuple[Any, Any, Any]:
    """Return the codes of a matrix, and for each output and group its scale (float16) and zero point."""
    out, most = len(weight), (1 << bits) - 1
    shape = out, int(groups.max()) + 1
    scales, zeros = np.ones(shape, np.float16), np.full(shape, 1 << bits - 1)
    for group in range(shape[1]):
        of_group = weight[:, groups == group]
        low, high = np.minimum(of_group.min(1), 0), np.maximum(of_group.max(1), 0)
        if symmetric:
            low, high = -np.maximum(-low, high), np.maximum(-low, high)
        scales[:, group] = np.maximum((high - low) / most, 1e-4)
        if not symmetric:
            zeros[:, group] = np.clip(np.rint(-low / scales[:, group]), 0, most)
    codes = np.rint(weight / scales.astype(np.float32)[:, groups]) + zeros[:, groups]
    return np.clip(codes, 0, most).astype(np.int64), scales, zeros


def in_groups(num_inputs: int, group: int) -> NDArray[np.int64]:
    """Return the group of each input, where groups are consecutive inputs; -1 is one group."""
    return np.arange(num_inputs) // (group if group > 0 else num_inputs)


def gptq(
    weight: NDArray[Any],
    random: np.random.Generator,
    *,
    bits: int = 4,
    group: int = 32,
    act_order: bool = False,
    v2: bool = False,
    symmetric: bool = False,
) -> Quantized:
    groups = in_groups(weight.shape[1], group)
    if act_order:
        groups = groups[random.permutation(len(groups))]
    codes, scales, zeros = rounded(weight, groups, bits, symmetric)
    stored = zeros if v2 else (zeros - 1) % (1 << bits)
    tensors = {
        "qweight": ("I32", packed(codes, bits).T),
        "qzeros": ("I32", packed(stored.T, bits)),
        "scales": ("F16", scales.T),
        "g_idx": ("I32", groups.astype(np.int32)),
    }
    return standing_for(tensors, codes, scales, zeros, groups)


def awq(weight: NDArray[Any], random: np.random.Generator, *, group: int = 32) -> Quantized:
    groups = in_groups(weight.shape[1], group)
    codes, scales, zeros = rounded(weight, groups, 4, False)
    tensors = {
        "qweight": ("I32", packed(codes.T, 4, AWQ_COLUMNS)),
        "qzeros": ("I32", packed(zeros.T, 4, AWQ_COLUMNS)),
        "scales": ("F16", scales.T),
    }
    return standing_for(tensors, codes, scales, zeros, groups)


def compressed_packed(
    weight: NDArray[Any],
    random: np.random.Generator,
    *,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = True,
    act_order: bool = False,
) -> Quantized:
    groups = in_groups(weight.shape[1], group)
    if act_order:
        groups = groups[random.permutation(len(groups))]
    codes, scales, zeros = rounded(weight, groups, bits, symmetric)
    tensors = {
        "weight_packed": ("I32", packed(codes, bits)),
        "weight_scale": ("F16", scales),
        "weight_shape": ("I64", np.array(weight.shape, np.int64)),
    }
    if act_order:
        tensors["weight_g_idx"] = ("I32", groups.astype(np.int32))
    if not symmetric:
        tensors["weight_zero_point"] = ("I32", packed(zeros.T, bits).T)
    return standing_for(tensors, codes, scales, zeros, groups)


def compressed_int8(
    weight: NDArray[Any], random: np.random.Generator, *, group: int = -1, symmetric: bool = True
) -> Quantized:
    groups = in_groups(weight.shape[1], group)
    codes, scales, zeros = rounded(weight, groups, 8, symmetric)
    tensors = {
        "weight": ("I8", (codes - 128).astype(np.int8)),
        "weight_scale": ("F16", scales),
        "input_scale": ("F16", np.ones(1, np.float16)),
    }
    if not symmetric:
        tensors["weight_zero_point"] = ("I8", (zeros - 128).astype(np.int8))
    return standing_for(tensors, codes, scales, zeros, groups)


def e4m3_value(byte: int) -> float:
    """Return the number of a byte, by the definition."""
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return (-1) ** sign * 2.0 ** (max(exponent, 1) - 7) * ((exponent > 0) + mantissa / 8)


E4M3 = np.array([e4m3_value(byte) for byte in range(256)])


def as_e4m3(numbers: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the byte whose number is nearest."""
    usable = [byte for byte in range(256) if not math.isnan(E4M3[byte])]
    order = sorted(usable, key=lambda byte: (E4M3[byte], byte))
    values = E4M3[order]
    middles = (values[1:] + values[:-1]) / 2
    return np.array(order, np.uint8)[np.searchsorted(middles, numbers)]


def in_blocks(weight: NDArray[Any], block: tuple[int, int], scale_dtype: str = "F32") -> tuple[Any, Any, Any]:
    """Return a matrix as e4m3, the scales of its blocks as they are stored, and the weights it stands for."""
    rows, columns = block[0] or len(weight), block[1] or weight.shape[1]
    grid = -(-len(weight) // rows), -(-weight.shape[1] // columns)
    scales, data = np.zeros(grid, np.float32), np.zeros(weight.shape, np.uint8)
    stands_for = np.zeros(weight.shape, np.float32)
    for row in range(grid[0]):
        for column in range(grid[1]):
            place = slice(row * rows, (row + 1) * rows), slice(column * columns, (column + 1) * columns)
            scale = np.float32(np.abs(weight[place]).max() / 448 + 1e-6)
            if scale_dtype == "BF16":
                scale = (scale.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
            scales[row, column] = scale
            data[place] = as_e4m3(weight[place] / scale)
            stands_for[place] = (E4M3[data[place]] * np.float64(scale)).astype(np.float32)
    stored = (scales.view(np.uint32) >> 16).astype(np.uint16) if scale_dtype == "BF16" else scales
    return data, stored, stands_for


def block_fp8(
    weight: NDArray[Any],
    random: np.random.Generator,
    *,
    block: tuple[int, int] = (40, 24),
    scale_dtype: str = "BF16",
    single: tuple[int, ...] | None = None,
) -> Quantized:
    data, scales, stands_for = in_blocks(weight, block, scale_dtype)
    scales = scales if single is None else scales.reshape(single)
    return Quantized({"weight": ("F8_E4M3", data), "weight_scale_inv": (scale_dtype, scales)}, stands_for)


def compressed_fp8(
    weight: NDArray[Any], random: np.random.Generator, *, block: tuple[int, int] = (1, 0), single: bool = False
) -> Quantized:
    data, scales, stands_for = in_blocks(weight, block)
    scales = scales.reshape(1) if single else scales
    return Quantized({"weight": ("F8_E4M3", data), "weight_scale": ("F32", scales)}, stands_for)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def nearest(numbers: NDArray[Any], values: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the index of the value that is nearest to each number."""
    return np.abs(numbers[..., None] - values).argmin(-1).astype(np.uint8)


def pairs(codes: NDArray[np.uint8], *, upper_first: bool = False) -> NDArray[np.uint8]:
    """Return codes of 4 bits, two in a byte."""
    low, high = codes[..., 0::2], codes[..., 1::2]
    return low << 4 | high if upper_first else low | high << 4


def in_e2m1(weight: NDArray[Any], scales: NDArray[np.float32], size: int) -> tuple[Any, Quantized]:
    """Return a matrix as e2m1 in bytes, and what it stands for; `scales`: of each `size` inputs."""
    of_inputs = np.repeat(scales, size, axis=1).astype(np.float64)
    codes = nearest(weight / np.where(of_inputs, of_inputs, 1), E2M1)
    doubles, halves = (2 * E2M1[codes]).astype(np.int64), (of_inputs / 2).astype(np.float32)
    return pairs(codes), Quantized({}, (E2M1[codes] * of_inputs).astype(np.float32) + 0, doubles, halves)


def nvfp4(weight: NDArray[Any], random: np.random.Generator, *, compressed: bool = False) -> Quantized:
    largest = np.abs(weight.reshape(len(weight), -1, 16)).max(2)
    whole = np.float32(largest.max() / (6 * 448))
    stored = np.float32(1 / whole) if compressed else whole
    scales = as_e4m3(largest / (6 * np.float64(whole)))
    products = E4M3[scales].astype(np.float32) * (np.float32(1) / stored if compressed else stored)
    data, matrix = in_e2m1(weight, products, 16)
    names = ("weight_packed", "weight_global_scale") if compressed else ("weight", "weight_scale_2")
    shape = (1,) if compressed else ()
    tensors = {
        names[0]: ("U8", data),
        "weight_scale": ("F8_E4M3", scales),
        names[1]: ("F32", np.full(shape, stored, np.float32)),
        "input_global_scale" if compressed else "input_scale": ("F32", np.ones(shape, np.float32)),
    }
    return Quantized(tensors, matrix.weights)


def packed_mxfp4(weight: NDArray[Any], random: np.random.Generator) -> Quantized:
    largest = np.abs(weight.reshape(len(weight), -1, 32)).max(2) + 1e-6
    exponents = np.ceil(np.log2(largest / 6)).astype(np.int64)
    data, matrix = in_e2m1(weight, np.ldexp(np.float32(1), exponents), 32)
    tensors = {"weight_packed": ("U8", data), "weight_scale": ("U8", (exponents + 127).astype(np.uint8))}
    return Quantized(tensors, matrix.weights, matrix.integers, matrix.scales)


NF4 = np.sort(np.random.default_rng(4).uniform(-1, 1, 16)).astype(np.float32)
"""Not the numbers of nf4: the file has a table, and readers must use it."""


def bitsandbytes_4(
    weight: NDArray[Any], random: np.random.Generator, *, block: int = 32, nested: bool = False
) -> Quantized:
    out, num_inputs = weight.shape
    scales = np.abs(weight.reshape(-1, block)).max(1).astype(np.float32)
    state: dict[str, object] = {
        "quant_type": "nf4",
        "blocksize": block,
        "dtype": "bfloat16",
        "shape": [out, num_inputs],
    }
    tensors: dict[str, Tensor] = {"weight.absmax": ("F32", scales)}
    if nested:
        mean, outer = np.float32(scales.mean()), 5
        table = np.sort(random.uniform(-1, 1, 256)).astype(np.float32)
        owners = np.arange(len(scales)) // outer
        most = np.array([np.abs(scales[owners == n] - mean).max() + 1e-6 for n in range(owners[-1] + 1)], np.float32)
        codes = nearest((scales - mean) / most[owners], table)
        scales = (table[codes] * most[owners]).astype(np.float32) + mean
        state |= {"nested_blocksize": outer, "nested_dtype": "float32", "nested_offset": float(mean)}
        tensors = {
            "weight.absmax": ("U8", codes),
            "weight.nested_absmax": ("F32", most),
            "weight.nested_quant_map": ("F32", table),
        }
    of_weights = np.repeat(scales, block).reshape(weight.shape).astype(np.float64)
    codes = nearest(weight / np.where(of_weights, of_weights, 1), NF4)
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    tensors |= {
        "weight": ("U8", pairs(codes, upper_first=True).reshape(-1, 1)),
        "weight.quant_map": ("F32", NF4),
        "weight.quant_state.bitsandbytes__nf4": ("U8", text),
    }
    return Quantized(tensors, (NF4[codes] * of_weights).astype(np.float32))


def bitsandbytes_8(weight: NDArray[Any], random: np.random.Generator) -> Quantized:
    most = np.abs(weight).max(1).astype(np.float32)
    scales = most * np.float32(1 / 127)
    codes = np.clip(np.rint(weight / scales[:, None]), -127, 127).astype(np.int8)
    tensors = {"weight": ("I8", codes), "SCB": ("F32", most), "weight_format": ("U8", np.zeros((), np.uint8))}
    return Quantized(tensors, (codes * scales[:, None].astype(np.float64)).astype(np.float32))


def compressed_settings(layout: str, **weights: object) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    groups = {"config_groups": {"group_0": scheme}, "ignore": ["lm_head"], "kv_cache_scheme": None}
    return {"quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed", **groups}


def gptq_settings(**changes: object) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False, **changes}


def auto_round_settings(layout: str | None, **changes: object) -> dict[str, Any]:
    settings = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False, "data_type": "int", **changes}
    return settings | ({} if layout is None else {"packing_format": layout})


BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "model.layers.*.mlp.gate"]}
NVFP4 = compressed_settings("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16)
MXFP4 = compressed_settings("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32)
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [40, 24]}
WHOLE_FP8 = {"quant_method": "fp8", "activation_scheme": "static", "dequantize": False, "weight_block_size": None}
FORMS: Mapping[str, tuple[dict[str, Any], Quantize]] = {
    "gptq": (gptq_settings(), gptq),
    "gptq-8": (gptq_settings(bits=8, sym=True), partial(gptq, bits=8, symmetric=True)),
    "gptq-one-group": (gptq_settings(group_size=-1), partial(gptq, group=-1)),
    "gptq-act-order": (gptq_settings(desc_act=True), partial(gptq, act_order=True)),
    "gptq-v2": (gptq_settings(checkpoint_format="gptq_v2"), partial(gptq, v2=True)),
    "awq": (AWQ, awq),
    "packed": (
        compressed_settings("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32),
        compressed_packed,
    ),
    "packed-zeros": (
        compressed_settings("pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False),
        partial(compressed_packed, symmetric=False),
    ),
    "packed-act-order": (
        compressed_settings("pack-quantized", num_bits=4, strategy="group", group_size=32, actorder="group"),
        partial(compressed_packed, act_order=True),
    ),
    "packed-8-channels": (
        compressed_settings("pack-quantized", num_bits=8, strategy="channel"),
        partial(compressed_packed, bits=8, group=-1),
    ),
    "int8": (compressed_settings("int-quantized", num_bits=8, type="int", strategy="channel"), compressed_int8),
    "int8-zeros": (
        compressed_settings("int-quantized", num_bits=8, strategy="group", group_size=32, symmetric=False),
        partial(compressed_int8, group=32, symmetric=False),
    ),
    "float8": (compressed_settings("float-quantized", num_bits=8, type="float", strategy="channel"), compressed_fp8),
    "float8-tensor": (
        compressed_settings("float-quantized", num_bits=8, type="float", strategy="tensor"),
        partial(compressed_fp8, block=(0, 0), single=True),
    ),
    "float8-blocks": (
        compressed_settings("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[32, 48]),
        partial(compressed_fp8, block=(32, 48)),
    ),
    "fp8": (FP8, block_fp8),
    "fp8-128": ({**FP8, "weight_block_size": [128, 128]}, partial(block_fp8, block=(128, 128))),
    "fp8-tensor": (WHOLE_FP8, partial(block_fp8, block=(0, 0), single=())),
    "fp8-tensor-1": (WHOLE_FP8, partial(block_fp8, block=(0, 0), single=(1,), scale_dtype="F32")),
    "fp8-float-scales": (FP8, partial(block_fp8, scale_dtype="F32")),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, partial(compressed_fp8, block=(1, 0))),
    "modelopt-fp8": (MODELOPT | {"quant_algo": "FP8"}, partial(compressed_fp8, block=(0, 0), single=True)),
    "modelopt-nvfp4": (MODELOPT, nvfp4),
    "nvfp4": (NVFP4, partial(nvfp4, compressed=True)),
    "mxfp4": (MXFP4, packed_mxfp4),
    "auto-round": (auto_round_settings("auto_round:auto_gptq"), gptq),
    "auto-round-gptqmodel": (auto_round_settings("auto_round:gptqmodel"), partial(gptq, v2=True)),
    "auto-round-awq": (auto_round_settings("auto_round:auto_awq"), awq),
    "bitsandbytes-4": (BITSANDBYTES, bitsandbytes_4),
    "bitsandbytes-4-nested": (BITSANDBYTES, partial(bitsandbytes_4, nested=True)),
    "bitsandbytes-8": ({**BITSANDBYTES, "load_in_4bit": False, "load_in_8bit": True}, bitsandbytes_8),
}
"""Every form that quire reads: its quantization_config, and how a matrix becomes one."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file of any dtypes."""
    header: dict[str, object] = {}
    data = bytearray()
    for name, (dtype, numbers) in tensors.items():
        start = len(data)
        data += np.ascontiguousarray(numbers).tobytes()
        header[name] = {"dtype": dtype, "shape": numbers.shape, "data_offsets": [start, len(data)]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def quantized_matrices(form: str, parts: Mapping[str, Quantize | None], config: Any) -> dict[str, Quantized]:
    """Return the projections of a tiny Qwen3 in a form, or as `parts` says of some: None for those left out."""
    random, found = np.random.default_rng(1), {}
    for name, weight in tiny_qwen3_tensors(config, 0).items():
        quantize = parts.get(name.split(".")[-2], FORMS[form][1] if "_proj.weight" in name else None)
        if quantize is not None:
            found[name] = quantize(weight, random)
    return found


def write_quantized(
    folder: Path, form: str, parts: Mapping[str, Quantize | None] = MappingProxyType({}), **settings: Any
) -> Path:
    """Write a tiny Qwen3 with quantised projections, and FOLDER-plain with the weights they stand for.

    A head of its own is bfloat16.
    """
    config = tiny_qwen3_config() | settings
    quantization = FORMS[form][0]
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    matrices = quantized_matrices(form, parts, config)
    for name, weight in tiny_qwen3_tensors(config, 0).items():
        plain[name] = stored[name] = ("F32", weight)
        if name == "lm_head.weight":
            bits = np.ascontiguousarray(weight).view(np.uint32) >> 16
            stored[name] = ("BF16", bits.astype(np.uint16))
            plain[name] = ("F32", (bits << 16).view(np.float32))
        elif name in matrices:
            del stored[name]
            stored |= {name.removesuffix("weight") + part: tensor for part, tensor in matrices[name].tensors.items()}
            plain[name] = ("F32", matrices[name].weights)
    original = folder.with_name(f"{folder.name}-plain")
    for place, tensors, more in ((folder, stored, {"quantization_config": quantization}), (original, plain, {})):
        place.mkdir(parents=True)
        (place / "config.json").write_text(json.dumps(config | more))
        write_tensors(place / "model.safetensors", tensors)
    return folder
