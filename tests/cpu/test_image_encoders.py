"""Image encoders on both CPU engines: the same rows, the same bits in any company, the memory that was expected."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quire import _native
from quire.compute.arrays import FloatArray
from quire.compute.backend import WorkerParts
from quire.compute.models import ModelDescription, read_model
from quire.compute.models.source import ModelFolder
from quire.compute.native.backend import NativeBackend
from quire.compute.native.images import NativeProducts, NativeTower
from quire.compute.native.load import NativeSettings
from quire.compute.native.load import load_parts as load_native
from quire.compute.reference.load import load_parts as load_reference
from quire.compute.vision.encoder import TowerEncoder
from quire.compute.weights.checkpoint import Checkpoint
from quire.compute.worker.image_queue import ImageWork
from quire.core.config import EngineConfig
from quire.core.errors import CheckpointError, InvariantError
from quire.core.images import Image
from support.pairs import left_out
from support.tiny_checkpoint import write_model_weights
from support.vision_models import SETTINGS, SIZES, random_image, rows_of, vision_of, write_vision_model

FLOAT32 = NativeSettings(dtype="float32")
KERNELS = _native.kernel_names()


def reference(model: ModelDescription) -> TowerEncoder:
    return of(load_reference(model, block_size=16, num_blocks=1).image_encoder)


def native(model: ModelDescription, settings: NativeSettings = FLOAT32) -> TowerEncoder:
    return of(load_native(model, settings, num_blocks=1).image_encoder)


def reference_of_text(folder: Path) -> WorkerParts:
    """Return the parts of a model that is read without its encoder."""
    return load_reference(read_model(ModelFolder(folder), images=False), block_size=16, num_blocks=1)


def of(encoder: object) -> TowerEncoder:
    assert isinstance(encoder, TowerEncoder)
    return encoder


def images(name: str, model: ModelDescription) -> Iterator[Image]:
    for seed, (height, width) in enumerate(SIZES[name]):
        yield random_image(vision_of(model), height, width, seed)


@pytest.mark.parametrize("name", SETTINGS)
def test_all_engines_make_the_same_rows(name: str, tmp_path: Path) -> None:
    model = read_model(ModelFolder(write_vision_model(tmp_path, SETTINGS[name])))
    plain = reference(model)
    assert plain.placeholder == 5
    expected = [rows_of(plain, image) for image in images(name, model)]
    for kernels in KERNELS:
        encoder = native(model, replace(FLOAT32, instruction_set=kernels, num_threads=2))
        for image, rows in zip(images(name, model), expected, strict=True):
            assert rows.shape == (image.num_tokens, model.spec.hidden_size * (1 + model.spec.deep_rows))
            np.testing.assert_allclose(rows_of(encoder, image), rows, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "dtype", "kernels"),
    [
        pytest.param(name, dtype, kernels, marks=left_out((row + column + place) % min(2, len(KERNELS))))
        for row, name in enumerate(SETTINGS)
        for column, dtype in enumerate(("float32", "bfloat16"))
        for place, kernels in enumerate(KERNELS)
    ],
)
def test_an_image_has_the_same_bits_in_any_company(name: str, dtype: str, kernels: str, tmp_path: Path) -> None:
    model = read_model(ModelFolder(write_vision_model(tmp_path, SETTINGS[name])))
    settings = replace(FLOAT32, dtype=dtype, instruction_set=kernels)
    first, other = (native(model, replace(settings, num_threads=count)) for count in (1, 3))
    expected: list[FloatArray] = [rows_of(first, image) for image in images(name, model)]
    for encoder in (first, other):
        rows_of(encoder, random_image(vision_of(model), *SIZES[name][0], seed=99))
        for image, rows in zip(images(name, model), expected, strict=True):
            assert rows_of(encoder, image).tobytes() == rows.tobytes()


@pytest.mark.parametrize("name", SETTINGS)
def test_the_work_can_stop_anywhere(name: str, tmp_path: Path) -> None:
    model = read_model(ModelFolder(write_vision_model(tmp_path, SETTINGS[name])))
    first, other = (random_image(vision_of(model), *SIZES[name][:2][-1], seed=seed) for seed in (1, 2))
    for encoder in (reference(model), native(model)):
        expected = [rows_of(encoder, image).tobytes() for image in (first, other)]
        for num_before in range(len(encoder.spec.tower.layers) + 1):
            work = encoder.begin(first)
            assert all(work.advance(0) is None for _ in range(num_before))
            assert rows_of(encoder, other).tobytes() == expected[1]
            assert finished(work).tobytes() == expected[0]
        one, two, rows = encoder.begin(first), encoder.begin(other), None
        for _ in range(3):  # in turns, neither gets far
            rows = one.advance(0) if rows is None else rows
            two.advance(0)
        assert (finished(one) if rows is None else rows).tobytes() == expected[0]


def finished(work: ImageWork) -> FloatArray:
    """Return the rows of work that goes on in small parts."""
    rows = None
    while rows is None:
        rows = work.advance(0)
    return rows


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_memory_of_an_encoder_is_expected(name: str, dtype: str, tmp_path: Path) -> None:
    model = read_model(ModelFolder(write_vision_model(tmp_path, SETTINGS[name], dtype="BF16")))
    config = EngineConfig(dtype=dtype).resolved()
    with_images, without = (NativeBackend.of(config, each).facts for each in (model, replace(model, vision=None)))
    encoder = native(model, replace(FLOAT32, dtype=dtype))
    tower, products = encoder._tower, encoder._products
    assert tower is None or isinstance(tower, NativeTower)
    assert isinstance(products, NativeProducts)
    weights = encoder._weights
    around = [each for part in weights.norms.values() for each in (part.weight, part.bias) if each is not None]
    around += [each for each in (weights.positions, weights.first, *weights.vectors.values()) if each is not None]
    held = 0 if tower is None else tower.decoder.weight_bytes
    held += products.num_bytes + sum(4 * each.size for each in around)
    expected = with_images.weight_bytes - without.weight_bytes
    assert expected <= held <= 1.2 * expected  # panels are padded
    assert with_images.activation_bytes > without.activation_bytes


@pytest.mark.parametrize("name", SETTINGS)
def test_a_checkpoint_of_another_encoder_is_refused(name: str, tmp_path: Path) -> None:
    model = read_model(ModelFolder(write_vision_model(tmp_path, SETTINGS[name])))
    checkpoint, vision = Checkpoint.open(tmp_path), vision_of(model)
    whole = {key: checkpoint.tensor(key).copy() for key in checkpoint.entries}
    prefix, matrix = vision.prefixes[0], vision.patches.matrix.weight
    inner = [key for key in whole if key.startswith(prefix) and ("fc1.weight" in key or "up_proj" in key)]
    layer = next((key for key in inner if whole[key].ndim), matrix)
    for changed, problem in (
        ({key: each for key, each in whole.items() if key != matrix}, "missing"),
        ({**whole, matrix: whole[matrix][1:]}, "shape"),
        ({**whole, layer: whole[layer][1:]}, "shape" if layer == matrix else "wrong shape"),
        ({**whole, f"{prefix}other.weight": whole[matrix]}, "extra"),
    ):
        write_model_weights(tmp_path, changed)
        broken = read_model(ModelFolder(tmp_path))
        for load in (reference, native):
            with pytest.raises(CheckpointError, match=f"{problem}.*; with --mmproj none, the model reads texts only"):
                load(broken)
        assert reference_of_text(tmp_path).image_encoder is None


@pytest.mark.parametrize("number", [3.0, math.nan])
def test_bounds_out_of_order_are_refused(number: float, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_vision_model(tmp_path, SETTINGS["gemma4"]))
    whole = {key: checkpoint.tensor(key).copy() for key in checkpoint.entries}
    name = "model.vision_tower.encoder.layers.1.mlp.up_proj.output_min"
    write_model_weights(tmp_path, {**whole, name: np.float32(number)})
    broken = read_model(ModelFolder(tmp_path))
    for load in (reference, native):
        with pytest.raises(CheckpointError, match=r"up_proj\.output_min.*allowed: the least and the highest input"):
            load(broken)


def test_an_image_of_another_size_is_a_mistake(tmp_path: Path) -> None:
    model = read_model(ModelFolder(write_vision_model(tmp_path, SETTINGS["idefics3"])))
    image = Image.of(0, 16, 56, 63, bytes(56 * 63 * 3))
    with pytest.raises(InvariantError, match="56 × 63 pixels"):
        rows_of(reference(model), image)
    with pytest.raises(InvariantError, match="42 × 56 pixels"):
        vision_of(model).num_placeholders(42, 56)


def test_a_product_of_rows_is_checked() -> None:
    kernels, team = _native.kernels(_native.kernel_names()[-1]), _native.ThreadTeam(1)
    matrix, rows = np.eye(3, 5, dtype=np.float32), np.arange(10, dtype=np.float32).reshape(2, 5)
    product = _native.RowProduct(kernels, team, matrix, np.ones(3, np.float32))
    output = np.zeros((2, product.output_stride), np.float32)
    product.run(rows, output)
    np.testing.assert_array_equal(output[:, :3], [[1, 2, 3], [6, 7, 8]])
    product.run(-rows, output, "relu")
    np.testing.assert_array_equal(output[:, :3], [[1, 0, 0], [0, 0, 0]])
    for wrong, target in ((rows[:, :4], output), (rows, output[:1]), (rows, output[:, :3])):
        with pytest.raises(ValueError, match="shape of the matrix"):
            product.run(np.ascontiguousarray(wrong), np.ascontiguousarray(target))
    numbers = np.linspace(-2, 2, 16, dtype=np.float32)
    _native.activate(kernels, numbers, "relu")
    assert numbers.tolist() == np.linspace(-2, 2, 16, dtype=np.float32).clip(0).tolist()
    with pytest.raises(ValueError, match="a multiple of the panel width"):
        _native.activate(kernels, numbers[:15].copy(), "relu")
    with pytest.raises(ValueError, match="a number for each output"):
        _native.RowProduct(kernels, team, matrix, np.ones(4, np.float32))
    with pytest.raises(ValueError, match="float32, or of uint16"):
        _native.RowProduct(kernels, team, matrix.astype(np.float64), None)  # type: ignore[arg-type]
