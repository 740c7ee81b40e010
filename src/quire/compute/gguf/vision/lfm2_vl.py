"""The image encoders of LFM2-VL."""

from __future__ import annotations

from typing import Final

from quire.compute.gguf.vision.kind import BILINEAR, IN_MODEL, POSITIONS, EncoderFile, Kind, Object, by_pixel


def _config(file: EncoderFile) -> Object:
    eye = file.tower("gelu_pytorch_tanh") | {"model_type": "siglip2_vision_model"}
    return {
        "downsample_factor": file.merge,
        "image_token_id": file.token_id,
        "projector_hidden_size": file.rows("mm.1.weight"),
        "projector_use_layernorm": "mm.input_norm.weight" in file.tensors,
        "vision_config": eye | {"num_patches": file.rows(POSITIONS)},
    }


def _processor(file: EncoderFile) -> Object:
    return file.pixels() | {
        "downsample_factor": file.merge,
        "encoder_patch_size": file.size("patch_size"),
        "image_processor_type": "Lfm2VlImageProcessor",
        "resample": BILINEAR,
    }


LFM2_VL: Final = Kind(
    family="Lfm2VlForConditionalGeneration",
    texts={"lfm2": "lfm2"},
    text_names=IN_MODEL,
    tower="model.vision_tower.vision_model.",
    projector="model.multi_modal_projector.",
    in_projector={"mm.1": "linear_1", "mm.2": "linear_2", "mm.input_norm": "layer_norm"},
    tokens=("<image>",),
    config=_config,
    processor=_processor,
    entry=by_pixel,
)
