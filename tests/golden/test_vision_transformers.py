"""Image encoders against transformers: the rows of an image, and the logits of a prompt with it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire import _native
from quire.compute.backend import WorkerParts
from quire.compute.models import ModelDescription, read_model
from quire.compute.models.source import ModelFolder
from quire.compute.native.load import NativeSettings
from quire.compute.native.load import load_parts as load_native
from quire.compute.reference.load import load_parts as load_reference
from quire.compute.vision.patches import normalised_levels
from quire.compute.worker.image_rows import ImageGrids
from quire.compute.worker.model_runner import StepInputs
from quire.core.images import CHANNELS, Image
from support.vision_models import PIXELS, SETTINGS, SIZES, random_image, vision_of
from support.vision_models import rows_of as encoded

ENGINES = ["reference", *_native.kernel_names()]
BLOCK = 16


def load(model: ModelDescription, engine: str, dtype: str = "float32") -> WorkerParts:
    if engine == "reference":
        return load_reference(model, block_size=BLOCK, num_blocks=64)
    return load_native(model, NativeSettings(dtype=dtype, instruction_set=engine, num_threads=2), num_blocks=64)


def rows_of(parts: WorkerParts, image: Image) -> NDArray[np.float32]:
    assert parts.image_encoder is not None
    return encoded(parts.image_encoder, image)


def saved(name: str, folder: Path) -> tuple[Any, ModelDescription]:
    """Return a small model of transformers, and what quire reads from its folder."""
    from support import transformers_models

    model = transformers_models.small_vision_model(SETTINGS[name])
    transformers_models.save(model, folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PIXELS))
    return model, read_model(ModelFolder(folder))


def normalised(model: ModelDescription, image: Image) -> NDArray[np.float32]:
    """Return the pixels of an image as a processor gives them to a model, `[3, height, width]`."""
    pixels = np.frombuffer(image.pixels, np.uint8).reshape(image.height, image.width, CHANNELS)
    return normalised_levels(vision_of(model))[pixels, np.arange(CHANNELS)].transpose(2, 0, 1)


def assert_close(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> None:
    """|Δ| ≤ 1e-4 × max(1, the largest number), for each number."""
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() <= 1e-4 * max(1.0, float(np.abs(theirs).max()))


@pytest.mark.transformers
@pytest.mark.parametrize("name", SETTINGS)
def test_rows_of_an_image_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    from support import transformers_models

    theirs, model = saved(name, tmp_path)
    engines = {engine: load(model, engine) for engine in ENGINES}
    for seed, (height, width) in enumerate(SIZES[name]):
        image = random_image(vision_of(model), height, width, seed)
        expected = transformers_models.image_rows(theirs, normalised(model, image))
        for parts in engines.values():
            assert_close(rows_of(parts, image), expected)


@pytest.mark.transformers
@pytest.mark.parametrize("name", SETTINGS)
def test_bfloat16_is_as_close_to_float32_as_that_of_transformers(name: str, tmp_path: Path) -> None:
    """The mean difference from float32: at most 1.1 times theirs."""
    from support import transformers_models

    theirs, model = saved(name, tmp_path)
    images = [random_image(vision_of(model), *size, seed) for seed, size in enumerate(SIZES[name] * 4)]
    exact = [transformers_models.image_rows(theirs, normalised(model, image)) for image in images]
    rounded = [transformers_models.image_rows(theirs.bfloat16(), normalised(model, image)) for image in images]
    parts = load(model, ENGINES[-1], "bfloat16")
    ours = [rows_of(parts, image) for image in images]

    def distance(found: list[NDArray[np.float32]]) -> float:
        return float(np.mean([np.abs(rows - right).mean() for rows, right in zip(found, exact, strict=True)]))

    assert distance(ours) <= 1.1 * distance(rounded)


@pytest.mark.transformers
@pytest.mark.parametrize("engine", ["reference", ENGINES[-1]])
@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "llava-next"])
def test_a_prompt_with_an_image_has_the_logits_of_transformers(name: str, engine: str, tmp_path: Path) -> None:
    """Images of LLaVA-NeXT have two parts: test_image_chats_transformers.py has their logits."""
    from support import transformers_models

    theirs, model = saved(name, tmp_path)
    parts, placeholder = load(model, engine), vision_of(model).placeholder
    image = random_image(vision_of(model), *SIZES[name][-1])
    tokens = [3, 9, *[placeholder] * image.num_tokens, 11, 4, 7]
    expected = transformers_models.logits_with_image(theirs, tokens, normalised(model, image))
    given = np.full(len(tokens), -1)
    given[2 : 2 + image.num_tokens] = np.arange(image.num_tokens)
    inputs = whole_step(model, tokens, given, rows_of(parts, image))
    if name in ("gemma3", "gemma4-31b", "gemma4-unified"):  # the tokens of an image attend to one another
        inputs = replace(inputs, ends_seen=np.where(given < 0, 0, 2 + image.num_tokens))
    if (cell := vision_of(model).cell) is not None:
        placed = image.moved_to(2)
        inputs = replace(inputs, coordinates=ImageGrids.of([placed], cell).coordinates(inputs.positions))
    parts.cache.allocate()
    assert_close(np.asarray(parts.runner.run(inputs, parts.cache).logits)[:, : model.spec.vocab_size], expected)


def whole_step(
    model: ModelDescription, tokens: list[int], given: NDArray[np.int64], rows: NDArray[np.float32]
) -> StepInputs:
    """Return the step that computes a text with the logits of each token; each KV group has its own blocks."""
    count, each = len(tokens), np.arange(len(tokens))
    num_blocks, groups = -(-count // BLOCK), range(len(model.spec.kv_cache_spec(BLOCK).groups))
    return StepInputs(
        entries=(0,),
        query_starts=np.array([0, count]),
        token_ids=np.array(tokens),
        positions=each,
        slots=tuple(each + group * num_blocks * BLOCK for group in groups),
        block_tables=tuple(np.arange(group * num_blocks, (group + 1) * num_blocks)[None] for group in groups),
        logit_starts=np.array([0, count]),
        logit_indices=each,
        rows=np.zeros(1, np.int64),
        given=given,
        given_rows=np.ascontiguousarray(rows),
    )
