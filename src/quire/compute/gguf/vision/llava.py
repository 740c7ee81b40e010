"""The image encoders of LLaVA 1.5 and of LLaVA-NeXT (1.6), which cuts images into tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from quire.compute.gguf.vision.kind import BICUBIC, FIRST_ROW, NEXT_TO_IMAGES, EncoderFile, Kind, Object
from quire.core.errors import CheckpointError

FEATURE_LAYERS: Final = "feature_layer"
POST_NORM: Final = "v.post_ln.weight"
PINPOINTS, MERGED = "image_grid_pinpoints", "mm_patch_merge_type"
"""Settings of LLaVA-NeXT."""
NEWLINES: Final = ("model.image_newline", "v.image_newline")
"""The row at the end of a line of LLaVA-NeXT, as old and new converters name it."""


def _config(file: EncoderFile) -> Object:
    """Return the settings of LLaVA 1.5; raises for those of LLaVA-NeXT."""
    own = file.settings
    for name in map(own.key, (PINPOINTS, MERGED)):
        if own.file.fields.get(name) not in (None, [], "flat"):
            raise own.file.error(name, f"none, as in LLaVA 1.5, in a file without a tensor {NEWLINES[0]}")
    return _clip(file)


def _next_config(file: EncoderFile) -> Object:
    """Return the settings of LLaVA-NeXT; files have heights and widths of images in one list."""
    own, key = file.settings.file, file.settings.key
    if own.fields.get(key(MERGED)) not in (None, "spatial_unpad"):
        raise own.error(key(MERGED), "'spatial_unpad'")
    return _clip(file) | {PINPOINTS: _sizes(file)}


def _sizes(file: EncoderFile) -> object:
    """Return the heights and widths of a file as pairs; the readers of these settings check them."""
    found = file.settings.file.fields.get(file.settings.key(PINPOINTS))
    return [found[index : index + 2] for index in range(0, len(found), 2)] if isinstance(found, list) else found


def _clip(file: EncoderFile) -> Object:
    """Return the settings of an encoder whose file leaves out the layers that are not used, and the norm after them."""
    own, is_clip = file.settings, FIRST_ROW in file.tensors
    key = own.key(FEATURE_LAYERS)
    layers = own.file.fields.get(key, [file.size("block_count")])
    if not isinstance(layers, list) or len(layers) != 1:
        raise own.file.error(key, "a list of one layer")
    if POST_NORM in file.tensors:
        raise CheckpointError(f"{own.file.where}: tensor {POST_NORM}", "present", "no norm after the layers")
    is_gelu = own.file.flag("clip.use_gelu", False)
    eye = file.tower("gelu" if is_gelu else "quick_gelu" if is_clip else "gelu_pytorch_tanh")
    return {
        "image_token_index": file.token_id,
        "vision_config": eye | {"model_type": "clip_vision_model" if is_clip else "siglip_vision_model"},
        "vision_feature_layer": layers[0],
        "vision_feature_select_strategy": "default" if is_clip else "full",
    }


def _processor(file: EncoderFile) -> Object:
    """Return that images are padded to a square, as LLaVA 1.5 was trained; its copies at Hugging Face cut them."""
    size = file.size("image_size")
    return file.pixels() | {
        "crop_size": {"height": size, "width": size},
        "do_pad": True,
        "image_processor_type": "LlavaImageProcessor",
        "image_token": file.token,
        "patch_size": file.size("patch_size"),
        "resample": BICUBIC,
        "size": {"shortest_edge": size},
    }


def _next_processor(file: EncoderFile) -> Object:
    return _processor(file) | {"image_processor_type": "LlavaNextImageProcessor", PINPOINTS: _sizes(file)}


LLAVA: Final = Kind(
    family="LlavaForConditionalGeneration",
    texts={"llama": "llama", "qwen2": "qwen2"},
    text_names=NEXT_TO_IMAGES,
    tower="vision_tower.vision_model.",
    in_projector={"mm.0": "linear_1", "mm.2": "linear_2"},
    tokens=("<image>", "<unk>", "<|reserved_special_token_0|>"),
    config=_config,
    processor=_processor,
)
LLAVA_NEXT: Final = replace(
    LLAVA,
    family="LlavaNextForConditionalGeneration",
    around=dict.fromkeys(NEWLINES, "image_newline"),
    config=_next_config,
    processor=_next_processor,
)
