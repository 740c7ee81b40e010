"""Image encoders of model families, read from settings only; each module has a function `vision_spec`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.source import ModelSource
from quire.compute.models.vision.spec import VisionSpec
from quire.core.errors import CheckpointError

ENCODERS: Final = MappingProxyType(
    {
        "Gemma3ForConditionalGeneration": "quire.compute.models.vision.gemma3",
        "Gemma4ForConditionalGeneration": "quire.compute.models.vision.gemma4",
        "Gemma4UnifiedForConditionalGeneration": "quire.compute.models.vision.gemma4_unified",
        "Glm4vForConditionalGeneration": "quire.compute.models.vision.glm4v",
        "Glm4vMoeForConditionalGeneration": "quire.compute.models.vision.glm4v",
        "Idefics3ForConditionalGeneration": "quire.compute.models.vision.idefics3",
        "InternVLForConditionalGeneration": "quire.compute.models.vision.internvl",
        "Lfm2VlForConditionalGeneration": "quire.compute.models.vision.lfm2_vl",
        "LlavaForConditionalGeneration": "quire.compute.models.vision.llava",
        "LlavaNextForConditionalGeneration": "quire.compute.models.vision.llava_next",
        "Mistral3ForConditionalGeneration": "quire.compute.models.vision.mistral3",
        "Qwen2VLForConditionalGeneration": "quire.compute.models.vision.qwen2_vl",
        "Qwen2_5_VLForConditionalGeneration": "quire.compute.models.vision.qwen2_5_vl",
        "Qwen3VLForConditionalGeneration": "quire.compute.models.vision.qwen3_vl",
        "Qwen3VLMoeForConditionalGeneration": "quire.compute.models.vision.qwen3_vl",
        "Qwen3_5ForConditionalGeneration": "quire.compute.models.vision.qwen3_vl",
        "Qwen3_5MoeForConditionalGeneration": "quire.compute.models.vision.qwen3_vl",
        "SmolVLMForConditionalGeneration": "quire.compute.models.vision.idefics3",
    }
)
"""The family of a model → the module of its image encoder."""

IMAGE_SETTINGS: Final = "preprocessor_config.json"
PROCESSOR_SETTINGS: Final = "processor_config.json"
IN_PROCESSOR: Final = "image_processor"


def image_settings(source: ModelSource) -> ConfigFile | None:
    """Return the makers' settings for images: a section of all settings for inputs, or else a file of their own."""
    settings = ConfigFile.read(source, PROCESSOR_SETTINGS) if source.has(PROCESSOR_SETTINGS) else None
    if settings is not None and settings.is_set(IN_PROCESSOR):
        return settings.section(IN_PROCESSOR)
    return ConfigFile.read(source, IMAGE_SETTINGS) if source.has(IMAGE_SETTINGS) else None


def read_vision(family: str, config: ConfigFile, source: ModelSource, text: DecoderSpec) -> VisionSpec | None:
    """Return the image encoder of a model; None if its family has none here, or its folder no settings for images."""
    if family not in ENCODERS or not config.is_set("vision_config"):
        return None
    with or_texts_only():
        settings = image_settings(source)
        if settings is None:
            return None
        spec: VisionSpec = import_module(ENCODERS[family]).vision_spec(config, settings, text)
    return spec


@contextmanager
def or_texts_only() -> Iterator[None]:
    """Add to errors about an image encoder how to use the model without it."""
    try:
        yield
    except CheckpointError as error:
        allowed = f"{error.allowed}; with --mmproj none, the model reads texts only"
        raise CheckpointError(error.field, error.value, allowed) from error
