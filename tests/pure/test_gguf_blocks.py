"""Packed numbers become the float32 numbers of the reference package, bit for bit, whatever the bytes are."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from quire.compute.gguf.blocks import BLOCK_TYPES, BlockType, check_mxfp4

NUM_BLOCKS = 400
SCALES_AT = {  # where float16 numbers are: random bytes would make some of them infinite or no number
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "F16": (0,),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)), "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip


def random_blocks(block: BlockType, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (NUM_BLOCKS, block.num_bytes), np.uint8)
    for at in SCALES_AT.get(block.name, ()):
        scales = random.normal(0, 1, (NUM_BLOCKS, 1)).astype("<f2")
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(NUM_BLOCKS, 2)
    if block.name == "IQ1_M":
        blocks[:, 55] &= 0xBF  # the float16 is in four bytes, its exponent in this one: it is no infinity
    if block.name == "MXFP4":
        blocks[:, 0] %= 250  # larger scales overflow, in the reference with a warning
    if block.name == "NVFP4":
        blocks[:, :4] %= 127  # the reference reads other bytes as if scales had no sign, and one as zero
    if block.name == "F32":
        blocks = random.normal(0, 1, (NUM_BLOCKS, 1)).astype("<f4").view(np.uint8)
    return blocks


@pytest.mark.parametrize("number", BLOCK_TYPES)
def test_every_type_widens_as_the_reference_does(number: int) -> None:
    block = BLOCK_TYPES[number]
    kind = gguf.GGMLQuantizationType(number)
    assert kind.name == block.name
    assert gguf.GGML_QUANT_SIZES[kind] == (block.size, block.num_bytes)
    for seed in range(3):
        blocks = random_blocks(block, seed)
        found = block.widen(blocks)
        assert found.dtype == np.float32 and found.shape == (NUM_BLOCKS, block.size)
        expected = gguf.quants.dequantize(blocks, kind)
        assert found.reshape(-1).tobytes() == np.asarray(expected, np.float32).reshape(-1).tobytes()


def test_scales_of_mxfp4_that_engines_lack_are_refused_unless_all_weights_are_zero() -> None:
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (8, 3 * 17), np.uint8)
    blocks[:, ::17] = random.integers(104, 144, (8, 3))  # 2^-23 to 2^16
    blocks[0, 17:34] = [0, *[0x08] * 16]  # no scale at all, and zeros with a sign
    check_mxfp4(blocks)
    for scale in (103, 144, 255):
        blocks[3, 0] = scale
        with pytest.raises(ValueError, match="scales that do not fit into float16"):
            check_mxfp4(blocks)


def test_a_code_at_either_end_of_its_range_is_right() -> None:
    blocks = np.zeros((2, 18), np.uint8)
    blocks[:, :2] = np.array([0.5], "<f2").view(np.uint8)
    blocks[1, 2:] = 0xF0
    found = BLOCK_TYPES[2].widen(blocks)
    assert found[0].tolist() == [-4.0] * 32
    assert found[1].tolist() == [-4.0] * 16 + [3.5] * 16
