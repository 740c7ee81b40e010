"""Tokens and pixels of images, compared with the processors of transformers."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from quire.engine.text.prompts import encode_prompt
from support.tiny_images import asked_about, file_of, open_tokenizer, picture, write_folder

pytestmark = pytest.mark.transformers
SIZES = [(1, 1), (64, 64), (65, 64), (300, 200), (200, 300), (31, 500), (640, 90), (257, 255), (3, 200), (56, 57)]
TOO_SMALL = {"Pixtral": [(1, 1)]}
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
    "Qwen2-VL": [
        {},
        {"min_pixels": None, "max_pixels": None, "size": {"shortest_edge": 3136, "longest_edge": 90_000}},
        {"patch_size": 16},
        {"merge_size": 1, "patch_size": 8},
    ],
    "Pixtral": [{}, {"size": {"height": 100, "width": 50}}, {"size": {"longest_edge": 2048}}],
}
CASES = [(family, settings) for family in SETTINGS for settings in SETTINGS[family]]


class Qwen2VL:
    """The processor of Qwen2-VL without videos, which transformers can make only with torchvision."""

    def __init__(self, images: Any, tokenizer: Any) -> None:
        self.images, self.tokenizer = images, tokenizer

    def __call__(self, images: list[Image.Image], text: str, **options: Any) -> dict[str, Any]:
        found = self.images(images, do_rescale=False, do_normalize=False)
        merge, patch, start, tiles = self.images.merge_size, self.images.patch_size, 0, []
        for _, rows, columns in found["image_grid_thw"]:
            text = text.replace("<|image_pad|>", "<pad>" * (rows * columns // merge**2), 1)
            patches = found["pixel_values"][start : start + rows * columns]
            start += rows * columns
            grid = patches.reshape(rows // merge, columns // merge, merge, merge, 3, 2, patch, patch)
            assert np.array_equal(grid[..., 0, :, :], grid[..., 1, :, :])
            tile = grid[..., 0, :, :].transpose(4, 0, 2, 5, 1, 3, 6)
            tiles.append(tile.reshape(3, rows * patch, columns * patch))
        return {
            "input_ids": self.tokenizer([text.replace("<pad>", "<|image_pad|>")])["input_ids"],
            "pixel_values": tiles,
        }


def processor(family: str, folder: Path) -> Any:
    """Return the processor of transformers that computes with Pillow."""
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    images: Any
    if family == "SmolVLM":
        from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

        images = Idefics3ImageProcessorPil.from_pretrained(folder)
        return transformers.Idefics3Processor(images, tokenizer, image_seq_len=5)
    if family == "LLaVA":
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
        from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
        from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

        kinds = {"CLIP": CLIPImageProcessorPil, "Llava": LlavaImageProcessorPil, "Siglip": SiglipImageProcessorPil}
        kind = json.loads((folder / "preprocessor_config.json").read_text())["image_processor_type"]
        images = kinds[kind.removesuffix("ImageProcessor")].from_pretrained(folder)
        return transformers.LlavaProcessor(images, tokenizer, patch_size=14, vision_feature_select_strategy="full")
    if family == "Gemma 3":
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        names = {"boi": "<start_of_image>", "eoi": "<end_of_image>", "image": "<image_soft_token>"}
        for name, text in names.items():
            setattr(tokenizer, f"{name}_token", text)
            setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(text))
        images = Gemma3ImageProcessorPil.from_pretrained(folder)
        return transformers.Gemma3Processor(images, tokenizer, image_seq_length=20)
    if family == "Qwen2-VL":
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        return Qwen2VL(Qwen2VLImageProcessorPil.from_pretrained(folder), tokenizer)
    from transformers.models.pixtral import image_processing_pil_pixtral

    # PixtralProcessor takes one function from a module that needs torchvision; another module has it too
    sys.modules.setdefault("transformers.models.pixtral.image_processing_pixtral", image_processing_pil_pixtral)
    images = image_processing_pil_pixtral.PixtralImageProcessorPil.from_pretrained(folder)
    merged = json.loads((folder / "processor_config.json").read_text())["spatial_merge_size"]
    from transformers.models.pixtral.processing_pixtral import PixtralProcessor

    return PixtralProcessor(images, tokenizer, patch_size=8, spatial_merge_size=merged)


@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize(("family", "settings"), CASES)
def test_tokens_and_pixels_are_those_of_transformers(
    tmp_path: Path, family: str, settings: dict[str, Any], images: int
) -> None:
    write_folder(tmp_path, family, **settings)
    ours, theirs = open_tokenizer(tmp_path), processor(family, tmp_path)
    for size in [size for size in SIZES if size not in TOO_SMALL.get(family, ())]:
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
        assert len(tiles) == len(found.images), size
        for image, tile in zip(found.images, tiles, strict=True):
            pixels = np.frombuffer(image.pixels, np.uint8).reshape(image.height, image.width, 3)
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


def _tiles(values: Any) -> list[Any]:
    """Return the tiles of all images, which are nested for some families."""
    return [tile for each in values for tile in (each if np.asarray(each[0]).ndim == 3 else [each])]
