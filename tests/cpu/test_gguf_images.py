"""Image encoders in GGUF files: the rows of the folder from which the files were made, to the bit."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quire.compute.arrays import FloatArray
from quire.compute.gguf.source import GgufFile
from quire.compute.models import ModelDescription, read_model
from quire.compute.models.image_encoders import with_images
from quire.compute.models.source import ModelFolder
from quire.compute.native.backend import NativeBackend
from quire.compute.native.images import NativeProducts, NativeTower
from quire.compute.native.load import NativeSettings, load_parts
from quire.compute.reference.load import load_parts as load_reference
from quire.compute.vision.encoder import TowerEncoder
from quire.core.config import EngineConfig
from support.gguf_projectors import write_pair, write_projector, write_single
from support.vision_models import SETTINGS, SIZES, random_image, vision_of, write_vision_model
from support.vision_models import rows_of as encoder_rows

SINGLES = [
    "gemma3",
    "gemma4",
    "mistral3",
    "qwen2-5-vl",
    "qwen3-vl",
]
NAMES = [name for name in SETTINGS if name not in ("gemma4-unified", "glm4v", "glm4v-moe", "qwen3-vl-moe")]
"""Without those that have no GGUF files here."""


def pair_of(
    tmp_path: Path, name: str, kind: str = "F32", dtype: str = "F32"
) -> tuple[ModelDescription, ModelDescription]:
    """Return the model of a folder, and that of the two files made from it."""
    settings = {key: value for key, value in SETTINGS[name].items() if key != "projector_hidden_act"}
    folder = write_vision_model(tmp_path / "folder", settings, dtype=dtype)
    text, projector = write_pair(folder, tmp_path / "gguf", kind)
    return read_model(ModelFolder(folder)), read_model(GgufFile(text, image_encoder=projector))


def rows_of(name: str, model: ModelDescription, dtype: str = "float32") -> list[FloatArray]:
    encoders = [load_parts(model, NativeSettings(dtype=dtype), num_blocks=1).image_encoder]
    if dtype == "float32":
        encoders.append(load_reference(model, block_size=16, num_blocks=1).image_encoder)
    images = [random_image(vision_of(model), height, width) for height, width in SIZES[name][:2]]
    return [encoder_rows(encoder, image) for encoder in encoders if encoder is not None for image in images]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_those_of_the_folder(tmp_path: Path, name: str, dtype: str) -> None:
    kind = "F32" if dtype == "float32" else "BF16"
    folder, pair = pair_of(tmp_path, name, kind, kind)
    for expected, rows in zip(rows_of(name, folder, dtype), rows_of(name, pair, dtype), strict=True):
        np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_narrower_matrices_are_near(tmp_path: Path, name: str, kind: str) -> None:
    folder, pair = pair_of(tmp_path, name, kind)
    for expected, rows in zip(rows_of(name, folder), rows_of(name, pair), strict=True):
        error = np.abs(rows - expected).mean() / np.abs(expected).mean()
        assert 0 < error < (0.01 if kind == "F16" else 0.1)


def single_of(
    tmp_path: Path, name: str, kind: str, dtype: str | None = None
) -> tuple[ModelDescription, ModelDescription]:
    """Return the model of a folder, and that of the one file that Ollama makes from it, without a mean of pixels."""
    settings = deepcopy(SETTINGS[name])
    if name == "mistral3":
        settings["vision_config"]["hidden_act"] = "silu"  # as in Ollama's code
    folder = write_vision_model(tmp_path / "folder", settings, dtype=dtype or kind)
    (folder / "preprocessor_config.json").write_text("{}")
    single = write_single(folder, tmp_path / "gguf", kind)
    return read_model(ModelFolder(folder)), read_model(with_images(GgufFile(single)))


@pytest.mark.parametrize("name", SINGLES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_a_single_file_are_those_of_the_folder(tmp_path: Path, name: str, dtype: str) -> None:
    folder, single = single_of(tmp_path, name, "F32" if dtype == "float32" else "BF16")
    for expected, rows in zip(rows_of(name, folder, dtype), rows_of(name, single, dtype), strict=True):
        np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
@pytest.mark.parametrize("name", SINGLES)
def test_rows_of_narrower_matrices_in_a_single_file_are_near(tmp_path: Path, name: str, kind: str) -> None:
    folder, single = single_of(tmp_path, name, kind, "F32")
    for expected, rows in zip(rows_of(name, folder), rows_of(name, single), strict=True):
        error = np.abs(rows - expected).mean() / np.abs(expected).mean()
        assert 0 < error < (0.01 if kind == "F16" else 0.1)


def test_settings_are_those_of_the_folder(tmp_path: Path) -> None:
    folder, pair = pair_of(tmp_path, "idefics3")
    assert vision_of(pair).tower == vision_of(folder).tower and vision_of(pair).connector == vision_of(folder).connector
    assert replace(vision_of(pair), prefixes=()) == replace(vision_of(folder), prefixes=())


def test_queries_keys_and_values_of_qwen3_vl_may_be_apart(tmp_path: Path) -> None:
    folder, pair = pair_of(tmp_path, "qwen3-vl")
    encoder = write_projector(tmp_path / "folder", tmp_path / "apart.gguf", splits=True)
    apart = read_model(GgufFile(pair.source.weight_paths()[0], image_encoder=encoder))
    for expected, rows in zip(rows_of("qwen3-vl", folder), rows_of("qwen3-vl", apart), strict=True):
        np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
@pytest.mark.parametrize("name", ["idefics3", "lfm2-vl", "qwen2-5-vl", "qwen3-vl"])
def test_the_memory_of_an_encoder_is_expected(tmp_path: Path, name: str, kind: str) -> None:
    _, pair = pair_of(tmp_path, name, kind)
    config = EngineConfig(dtype="float32").resolved()
    planned, text = (NativeBackend.of(config, each).facts for each in (pair, replace(pair, vision=None)))
    encoder = load_parts(pair, NativeSettings(dtype="float32"), num_blocks=1).image_encoder
    assert isinstance(encoder, TowerEncoder)
    tower, products, weights = encoder._tower, encoder._products, encoder._weights
    assert isinstance(tower, NativeTower)
    assert isinstance(products, NativeProducts)
    around = [each for part in weights.norms.values() for each in (part.weight, part.bias) if each is not None]
    around += [each for each in (weights.positions, weights.first) if each is not None]
    held = tower.decoder.weight_bytes + products.num_bytes + sum(4 * each.size for each in around)
    expected = planned.weight_bytes - text.weight_bytes
    assert expected <= held <= 1.2 * expected  # panels are padded
