"""Tokens and pixels of images, compared with the processors of transformers."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from quire.compute.vision.patches import tiles_of
from quire.core.images import Image as PromptImage
from quire.engine.text.prompts import encode_prompt
from support.image_processors import processor
from support.tiny_images import asked_about, file_of, open_tokenizer, picture, write_folder

pytestmark = pytest.mark.transformers
SIZES = [(1, 1), (64, 64), (65, 64), (300, 200), (200, 300), (31, 500), (640, 90), (257, 255), (3, 200), (56, 57)]
REFUSED = {"GLM-4V": [(3, 200)], "Pixtral": [(1, 1)]}
SETTINGS = {
    "SmolVLM": [{}, {"do_image_splitting": False}, {"size": {"longest_edge": 64}}, {"resample": 3}],
    "LLaVA": [
        {},
        {"crop_size": 98, "size": 70},
        {"size": {"shortest_edge": 70}, "crop_size": {"height": 42, "width": 84}},
        {"image_processor_type": "SiglipImageProcessor", "size": {"height": 42, "width": 70}, "do_center_crop": None},
        {"image_processor_type": "LlavaImageProcessor", "do_pad": True},
        {"image_processor_type": "LlavaImageProcessor", "do_pad": True, "image_mean": [0.1, 0.5, 1.0]},
    ],
    "Gemma 3": [{}, {"size": {"height": 30, "width": 30}, "resample": 0}],
    "Gemma 4": [
        {},
        {"max_soft_tokens": 140, "patch_size": 8, "image_processor_type": "Gemma4UnifiedImageProcessor"},
        {"pooling_kernel_size": 2, "resample": 2},
    ],
    "GLM-4V": [{}, {"merge_size": 1, "patch_size": 8, "size": {"shortest_edge": 2000, "longest_edge": 30_000}}],
    "LLaVA-NeXT": [{}, {"size": {"height": 56, "width": 56}, "image_grid_pinpoints": [[112, 112], [224, 56]]}],
    "InternVL": [{}, {"min_patches": 2, "max_patches": 6, "size": {"height": 42, "width": 56}, "resample": 2}],
    "Qwen2-VL": [
        {},
        {"min_pixels": None, "max_pixels": None, "size": {"shortest_edge": 3136, "longest_edge": 90_000}},
        {"patch_size": 16},
        {"merge_size": 1, "patch_size": 8},
    ],
    "Pixtral": [{}, {"size": {"height": 100, "width": 50}}, {"size": {"longest_edge": 2048}}],
}
CASES = [(family, settings) for family in SETTINGS for settings in SETTINGS[family]]


@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize(("family", "settings"), CASES)
def test_tokens_and_pixels_are_those_of_transformers(
    tmp_path: Path, family: str, settings: dict[str, Any], images: int
) -> None:
    write_folder(tmp_path, family, **settings)
    ours, theirs = open_tokenizer(tmp_path), processor(family, tmp_path)
    for size in [size for size in SIZES if size not in REFUSED.get(family, ())]:
        pictures = [picture(*size, seed=seed) for seed in range(images)]
        messages = asked_about(*map(file_of, pictures))
        found = encode_prompt(messages, ours)
        shown = [{"role": "user", "content": [{"type": "image"}] * images + messages[0]["content"][images:]}]
        text = theirs.tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=True)
        options = {} if family not in ("SmolVLM", "Pixtral") else {"do_pad": False}  # others pad the images of a batch
        expected = theirs(
            images=pictures, text=text, do_rescale=False, do_normalize=False, return_tensors=None, **options
        )
        (ids,) = expected["input_ids"]
        assert found.token_ids.tolist() == list(ids), size
        tiles = _tiles(expected["pixel_values"])
        ours_cut = [tile for image in found.images for tile in _cut(image, family)]
        assert len(tiles) == len(ours_cut), size
        for pixels, tile in zip(ours_cut, tiles, strict=True):
            np.testing.assert_array_equal(pixels, np.moveaxis(np.asarray(tile), 0, -1), str(size))


@pytest.mark.parametrize(
    "kind",
    ["RGBA PNG", "LA PNG", "P PNG", "P GIF", "L PNG", "1 PNG", "CMYK JPEG", "L JPEG", "RGB JPEG", "RGBA WEBP"],
)
def test_colours_are_those_of_transformers(kind: str) -> None:
    from transformers.image_transforms import convert_to_rgb

    from quire.engine.images.decoding import decoded, opened

    mode, kind = kind.split()
    image = picture(300, 600, "RGBA")
    data = file_of(image.quantize(16) if mode == "P" else image.convert(mode), kind)
    with Image.open(io.BytesIO(data)) as theirs:
        expected = convert_to_rgb(theirs, return_numpy=True)
    np.testing.assert_array_equal(np.asarray(decoded(opened(data, "image"), "image")), expected)


def _cut(image: PromptImage, family: str) -> list[NDArray[np.uint8]]:
    """Return the pixels of an image; the encoder of LLaVA-NeXT cuts it into tiles."""
    tiles = tiles_of(image, 56) if family == "LLaVA-NeXT" else [image]
    return [np.frombuffer(tile.pixels, np.uint8).reshape(tile.height, tile.width, 3) for tile in tiles]


def _tiles(values: Any) -> list[Any]:
    """Return the tiles of all images, which are nested for some families."""
    return [tile for each in values for tile in (each if np.asarray(each[0]).ndim == 3 else [each])]
