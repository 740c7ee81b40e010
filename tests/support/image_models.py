"""Complete small models that read images: random weights, a tokenizer, a chat template, settings of the processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from support.tiny_images import VOCAB_SIZE, open_tokenizer, write_folder
from support.vision_models import SETTINGS, TEXT, write_vision_model

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
            **{"size": {"height": TILE, "width": TILE}},
        },
        {"patch_size": 7, "vision_feature_select_strategy": "full"},
    ),
}
"""Model → the family of its prompts, settings for images, settings of the processor."""


def write_image_model(folder: Path, name: str = "smolvlm", *, context: int = 512) -> Path:
    """Write a model that reads images, and return its folder; equal arguments give equal bytes."""
    family, images, processor = PREPARED[name]
    write_folder(folder, family, **images)
    (folder / "processor_config.json").write_text(json.dumps(processor))
    placeholder = open_tokenizer(folder).id_of("<image>")
    text = {**TEXT, "vocab_size": VOCAB_SIZE, "max_position_embeddings": context}
    own = {key: placeholder for key in ("image_token_id", "image_token_index") if key in SETTINGS[name]}
    kept = (folder / "preprocessor_config.json").read_text()
    write_vision_model(folder, SETTINGS[name] | {"text_config": text} | own)
    (folder / "preprocessor_config.json").write_text(kept)
    return folder
