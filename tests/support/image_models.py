"""Complete small models that read images: random weights, a tokenizer, a chat template, settings of the processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from support.tiny_images import VOCAB_SIZE, open_tokenizer, write_folder
from support.vision_models import SETTINGS, write_vision_model

HALF: Final = [0.5, 0.5, 0.5]
TILE: Final = 56  # pixels of the image encoders in SETTINGS
PREPARED: Final[dict[str, tuple[str, dict[str, Any], dict[str, Any]]]] = {
    "smolvlm": (
        "SmolVLM",
        {"size": {"longest_edge": 2 * TILE}, "max_image_size": {"longest_edge": TILE}, "resample": 1},
        {"image_seq_len": 4},
    ),
    "idefics3": (
        "SmolVLM",
        {"size": {"longest_edge": 2 * TILE}, "max_image_size": {"longest_edge": TILE}, "resample": 1},
        {"image_seq_len": 16},
    ),
    "llava-clip": (
        "LLaVA",
        {"size": {"shortest_edge": TILE}, "crop_size": {"height": TILE, "width": TILE}, "resample": 3},
        {"patch_size": 7},
    ),
    "llava-siglip": (
        "LLaVA",
        {
            **{"image_processor_type": "SiglipImageProcessor", "do_center_crop": None, "resample": 3},
            **{"size": {"height": TILE, "width": TILE}, "image_mean": HALF, "image_std": HALF},
        },
        {"patch_size": 6, "vision_feature_select_strategy": "full"},
    ),
    "llava-pixtral": ("Pixtral", {"size": {"longest_edge": TILE}, "patch_size": 7}, {"patch_size": 7}),
    "llava-next": (
        "LLaVA-NeXT",
        {
            **{"size": {"shortest_edge": TILE}, "crop_size": {"height": TILE, "width": TILE}},
            "image_grid_pinpoints": SETTINGS["llava-next"]["image_grid_pinpoints"],
        },
        {"patch_size": 14},
    ),
    "mistral3": (
        "Pixtral",
        {"size": {"longest_edge": TILE}, "patch_size": 7},
        {"patch_size": 7, "spatial_merge_size": 2},
    ),
    "gemma3": ("Gemma 3", {"size": {"height": TILE, "width": TILE}}, {"image_seq_length": 4}),
    "gemma4": ("Gemma 4", {}, {}),
    "gemma4-31b": ("Gemma 4", {}, {}),
    "gemma4-unified": ("Gemma 4", {"image_processor_type": "Gemma4UnifiedImageProcessor"}, {}),
    "glm4v": ("GLM-4V", {"size": {"shortest_edge": 1568, "longest_edge": 2 * TILE**2}, "patch_size": 7}, {}),
    "internvl": (
        *("InternVL", {"size": {"height": TILE, "width": TILE}, "max_patches": 4}),
        {"image_seq_length": 16},
    ),
    "internvl-6b": (
        *("InternVL", {"size": {"height": TILE, "width": TILE}, "max_patches": 4}),
        {"image_seq_length": 4},
    ),
    "lfm2-vl": (
        "LFM2-VL",
        {
            **{"encoder_patch_size": 7, "tile_size": TILE, "min_image_tokens": 4, "max_image_tokens": 16},
            **{"max_tiles": 4},
        },
        {},
    ),
    "qwen2-vl": ("Qwen2-VL", {"min_pixels": 784, "max_pixels": TILE**2, "patch_size": 7}, {}),
    "qwen2-5-vl": ("Qwen2-VL", {"min_pixels": 784, "max_pixels": TILE**2, "patch_size": 7}, {}),
    "qwen3-vl": (
        "Qwen2-VL",
        {"min_pixels": 784, "max_pixels": TILE**2, "patch_size": 7, "image_mean": HALF, "image_std": HALF},
        {},
    ),
    "qwen3-5": (
        "Qwen2-VL",
        {"min_pixels": 784, "max_pixels": TILE**2, "patch_size": 7, "image_mean": HALF, "image_std": HALF},
        {},
    ),
}
"""Model → the family of its prompts, settings for images, settings of the processor."""


def write_image_model(folder: Path, name: str = "smolvlm", *, context: int = 512) -> Path:
    """Write a model that reads images, and return its folder; equal arguments give equal bytes."""
    family, images, processor = PREPARED[name]
    write_folder(folder, family, **images)
    (folder / "processor_config.json").write_text(json.dumps(processor))
    tokenizer = open_tokenizer(folder)
    assert tokenizer.images is not None
    placeholder = tokenizer.id_of(tokenizer.images.placeholder)
    text = {**SETTINGS[name]["text_config"], "vocab_size": VOCAB_SIZE, "max_position_embeddings": context}
    text |= {key: VOCAB_SIZE for key in ("vocab_size_per_layer_input",) if key in text}
    own = {key: placeholder for key in ("image_token_id", "image_token_index") if key in SETTINGS[name]}
    kept = (folder / "preprocessor_config.json").read_text()
    write_vision_model(folder, SETTINGS[name] | {"text_config": text} | own)
    (folder / "preprocessor_config.json").write_text(kept)
    return folder
