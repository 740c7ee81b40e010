"""fp8 and MXFP4 against torch and transformers, which widen the same blocks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from quire.compute.models.source import ModelFolder
from quire.compute.weights.small_floats import E4M3, HALF_E8M0, TWICE_E2M1
from support.quantized_models import block_fp8, write_tensors


@pytest.mark.transformers
def test_every_byte_of_e4m3_is_what_torch_takes_it_for() -> None:
    import torch

    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(E4M3, theirs)


@pytest.mark.transformers
@pytest.mark.parametrize("block", [(32, 48), None])
def test_blocks_are_widened_as_transformers_widens_them(block: tuple[int, int] | None, tmp_path: Path) -> None:
    import torch
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    random = np.random.default_rng(0)
    numbers, single = random.standard_normal((64, 96), np.float32), () if block is None else None
    matrix = block_fp8(numbers, random, block=block or (0, 0), scale_dtype="F32", single=single)
    write_tensors(tmp_path / "model.safetensors", {f"up.{part}": tensor for part, tensor in matrix.tensors.items()})
    settings = {"quantization_config": {"quant_method": "fp8", "weight_block_size": block}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    data, scales = (torch.from_numpy(matrix.tensors[part][1]) for part in ("weight", "weight_scale_inv"))
    pair = {"weight": [data.view(torch.float8_e4m3fn)], "weight_scale_inv": [scales]}
    theirs = Fp8Dequantize(None).convert(pair, full_layer_name="up.weight")
    (widened,) = theirs.values()
    widened = widened[0] if isinstance(widened, list) else widened
    assert ModelFolder(tmp_path).tensors().tensor("up.weight").tobytes() == widened.float().numpy().tobytes()


@pytest.mark.transformers
def test_mxfp4_is_widened_as_transformers_widens_it() -> None:
    """All codes with all scales that bfloat16 has; 255 is NaN here, and 2 to the power of 128 there."""
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16).repeat(16, axis=1)
    scales = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)[:, :, ::-1].copy()
    scales[scales == 255] = 254
    theirs = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales))[0].T
    codes = np.stack([TWICE_E2M1[blocks[0] & 15], TWICE_E2M1[blocks[0] >> 4]], axis=-1).reshape(16, 16, 32)
    with np.errstate(over="ignore"):
        ours = (codes * HALF_E8M0[scales[0]][..., None]).reshape(16, -1)
    np.testing.assert_array_equal(ours, theirs.float().numpy())
