"""Image encoders in GGUF files: the rows of the folder from which the files were made, to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quire.compute.arrays import FloatArray
from quire.compute.gguf.source import GgufFile
from quire.compute.models import ModelDescription, read_model
from quire.compute.models.source import ModelFolder
from quire.compute.native.load import NativeSettings, load_parts
from quire.compute.reference.load import load_parts as load_reference
from support.gguf_projectors import write_pair
from support.vision_models import SETTINGS, random_image, vision_of, write_vision_model
from support.vision_models import rows_of as encoder_rows

NAMES = ["idefics3", "smolvlm", "llava-clip", "llava-siglip"]


def pair_of(
    tmp_path: Path, name: str, kind: str = "F32", dtype: str = "F32"
) -> tuple[ModelDescription, ModelDescription]:
    """Return the model of a folder, and that of the two files made from it."""
    settings = {key: value for key, value in SETTINGS[name].items() if key != "projector_hidden_act"}
    folder = write_vision_model(tmp_path / "folder", settings, dtype=dtype)
    text, projector = write_pair(folder, tmp_path / "gguf", kind)
    return read_model(ModelFolder(folder)), read_model(GgufFile(text, image_encoder=projector))


def rows_of(model: ModelDescription, dtype: str = "float32") -> list[FloatArray]:
    encoders = [load_parts(model, NativeSettings(dtype=dtype), num_blocks=1).image_encoder]
    if dtype == "float32":
        encoders.append(load_reference(model, block_size=16, num_blocks=1).image_encoder)
    image = random_image(vision_of(model), 56, 56)
    return [encoder_rows(encoder, image) for encoder in encoders if encoder is not None]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_those_of_the_folder(tmp_path: Path, name: str, dtype: str) -> None:
    kind = "F32" if dtype == "float32" else "BF16"
    folder, pair = pair_of(tmp_path, name, kind, kind)
    for expected, rows in zip(rows_of(folder, dtype), rows_of(pair, dtype), strict=True):
        np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_narrower_matrices_are_near(tmp_path: Path, name: str, kind: str) -> None:
    folder, pair = pair_of(tmp_path, name, kind)
    for expected, rows in zip(rows_of(folder), rows_of(pair), strict=True):
        error = np.abs(rows - expected).mean() / np.abs(expected).mean()
        assert 0 < error < (0.01 if kind == "F16" else 0.1)


def test_settings_are_those_of_the_folder(tmp_path: Path) -> None:
    folder, pair = pair_of(tmp_path, "idefics3")
    assert vision_of(pair).tower == vision_of(folder).tower and vision_of(pair).connector == vision_of(folder).connector
    assert replace(vision_of(pair), prefixes=()) == replace(vision_of(folder), prefixes=())
