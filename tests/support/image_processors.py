"""The processors of transformers that compute with Pillow, for the folders of `tiny_images`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


class Qwen2VL:
    """The processor of Qwen2-VL without videos, which transformers can make only with torchvision."""

    placeholder = "<|image_pad|>"

    def __init__(self, images: Any, tokenizer: Any) -> None:
        self.images, self.tokenizer = images, tokenizer

    def __call__(self, images: list[Image.Image], text: str, **options: Any) -> dict[str, Any]:
        found = self.images(images, do_rescale=False, do_normalize=False)
        merge, patch, start, tiles = self.images.merge_size, self.images.patch_size, 0, []
        for _, rows, columns in found["image_grid_thw"]:
            text = text.replace(self.placeholder, "<pad>" * (rows * columns // merge**2), 1)
            patches = found["pixel_values"][start : start + rows * columns]
            start += rows * columns
            grid = patches.reshape(rows // merge, columns // merge, merge, merge, 3, 2, patch, patch)
            assert np.array_equal(grid[..., 0, :, :], grid[..., 1, :, :])
            tile = grid[..., 0, :, :].transpose(4, 0, 2, 5, 1, 3, 6)
            tiles.append(tile.reshape(3, rows * patch, columns * patch))
        ids = self.tokenizer([text.replace("<pad>", self.placeholder)])["input_ids"]
        return {"input_ids": ids, "pixel_values": tiles}

    def inputs(self, images: list[Image.Image], text: str) -> dict[str, Any]:
        """Return what the model takes."""
        import torch

        ids = torch.tensor(self(images, text)["input_ids"])
        kinds = (ids == self.tokenizer.convert_tokens_to_ids(self.placeholder)).int()
        return {"input_ids": ids, "mm_token_type_ids": kinds, **self.images(images, return_tensors="pt")}


class Glm4V(Qwen2VL):
    """That of GLM-4V, which has another placeholder, and counts the pixels of two frames."""

    placeholder = "<|image|>"


class Gemma4(Qwen2VL):
    """The processor of Gemma 4 without sound and videos, which transformers can make only with torchvision."""

    def __call__(self, images: list[Image.Image], text: str, **options: Any) -> dict[str, Any]:
        found, patch, tiles = self.images(images, do_rescale=False), self.images.patch_size, []
        for patches, places, count in zip(*map(found.get, self.images.model_input_names), strict=True):
            columns, rows = (int(each) + 1 for each in places.max(axis=0))
            assert count * self.images.pooling_kernel_size**2 == rows * columns
            cut = patches[: rows * columns].reshape(rows, columns, patch, patch, 3)
            tiles.append(cut.transpose(4, 0, 2, 1, 3).reshape(3, rows * patch, columns * patch))
            text = text.replace("<|image|>", f"<|image>{'<pad>' * count}<image|>", 1)
        ids = self.tokenizer([text.replace("<pad>", "<|image|>")])["input_ids"]
        return {"input_ids": ids, "pixel_values": tiles}

    def inputs(self, images: list[Image.Image], text: str) -> dict[str, Any]:
        """Return what the model takes."""
        import torch

        ids = torch.tensor(self(images, text)["input_ids"])
        kinds = (ids == self.tokenizer.convert_tokens_to_ids("<|image|>")).int()
        found = self.images(images, return_tensors="pt")
        found.pop("num_soft_tokens_per_image")
        return {"input_ids": ids, "mm_token_type_ids": kinds, **found}


class InternVL:
    """The processor of InternVL without videos, which transformers can make only with torchvision."""

    def __init__(self, images: Any, tokenizer: Any, tile_tokens: int) -> None:
        self.images, self.tokenizer, self.tile_tokens = images, tokenizer, tile_tokens

    def __call__(self, images: list[Image.Image], text: str, **options: Any) -> dict[str, Any]:
        found = self.images(images, crop_to_patches=True, **options)
        for count in found["num_patches"]:
            text = text.replace("<IMG_CONTEXT>", f"<img>{'<pad>' * self.tile_tokens * int(count)}</img>", 1)
        tensors = options.get("return_tensors")
        ids = self.tokenizer([text.replace("<pad>", "<IMG_CONTEXT>")], return_tensors=tensors)["input_ids"]
        return {"input_ids": ids, "pixel_values": found["pixel_values"]}


def processor(family: str, folder: Path) -> Any:
    """Return the processor of transformers that computes with Pillow."""
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    settings = json.loads((folder / "processor_config.json").read_text())
    images: Any
    if family == "SmolVLM":
        from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

        images = Idefics3ImageProcessorPil.from_pretrained(folder)
        return transformers.Idefics3Processor(images, tokenizer, image_seq_len=settings["image_seq_len"])
    if family == "LLaVA":
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
        from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
        from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

        kinds = {"CLIP": CLIPImageProcessorPil, "Llava": LlavaImageProcessorPil, "Siglip": SiglipImageProcessorPil}
        kind = json.loads((folder / "preprocessor_config.json").read_text())["image_processor_type"]
        images = kinds[kind.removesuffix("ImageProcessor")].from_pretrained(folder)
        patch = settings["patch_size"]
        return transformers.LlavaProcessor(images, tokenizer, patch_size=patch, vision_feature_select_strategy="full")
    if family == "Gemma 3":
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        names = {"boi": "<start_of_image>", "eoi": "<end_of_image>", "image": "<image_soft_token>"}
        for name, text in names.items():
            setattr(tokenizer, f"{name}_token", text)
            setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(text))
        images = Gemma3ImageProcessorPil.from_pretrained(folder)
        return transformers.Gemma3Processor(images, tokenizer, image_seq_length=settings["image_seq_length"])
    if family == "Gemma 4":
        from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

        return Gemma4(Gemma4ImageProcessorPil.from_pretrained(folder), tokenizer)
    if family == "LLaVA-NeXT":
        from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

        images = LlavaNextImageProcessorPil.from_pretrained(folder)
        return transformers.LlavaNextProcessor(
            images,
            tokenizer,
            patch_size=settings["patch_size"],
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        )
    if family == "InternVL":
        from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

        return InternVL(GotOcr2ImageProcessorPil.from_pretrained(folder), tokenizer, settings["image_seq_length"])
    if family in ("GLM-4V", "Qwen2-VL"):
        from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        made = (Glm4V, Glm4vImageProcessorPil) if family == "GLM-4V" else (Qwen2VL, Qwen2VLImageProcessorPil)
        return made[0](made[1].from_pretrained(folder), tokenizer)
    from transformers.models.pixtral import image_processing_pil_pixtral

    # PixtralProcessor takes one function from a module that needs torchvision; another module has it too
    sys.modules.setdefault("transformers.models.pixtral.image_processing_pixtral", image_processing_pil_pixtral)
    images = image_processing_pil_pixtral.PixtralImageProcessorPil.from_pretrained(folder)
    merged = settings.get("spatial_merge_size", 1)
    from transformers.models.pixtral.processing_pixtral import PixtralProcessor

    return PixtralProcessor(images, tokenizer, patch_size=settings["patch_size"], spatial_merge_size=merged)
