"""Matrices that bitsandbytes and compressed-tensors have stored, and the weights that they make of them again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.compute.models.source import ModelFolder
from support.quantized_models import BITSANDBYTES, MXFP4, NVFP4

DATA = Path(__file__).parent / "data" / "quantized"
EIGHT = {**BITSANDBYTES, "load_in_4bit": False, "load_in_8bit": True}
CASES = {
    **dict.fromkeys(("nf4", "nf4-nested", "fp4", "fp4-nested"), (BITSANDBYTES, 0)),
    "int8": (EIGHT, 2e-7),  # bitsandbytes rounds twice
    "nvfp4": (NVFP4, 2e-7),  # compressed-tensors divides, quire multiplies by the reciprocal
    "mxfp4": (MXFP4, 0),
}


@pytest.mark.parametrize("name", CASES)
def test_a_matrix_has_the_weights_that_its_quantiser_reads(name: str, tmp_path: Path) -> None:
    settings, tolerance = CASES[name]
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    shutil.copy(DATA / f"{name}.safetensors", tmp_path / "model.safetensors")
    tensors: Any = ModelFolder(tmp_path).tensors()
    np.testing.assert_allclose(tensors.tensor("up.weight"), tensors.tensor("expected"), rtol=tolerance, atol=0)
