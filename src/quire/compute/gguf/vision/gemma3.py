"""The image encoders of Gemma 3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isqrt
from typing import Final

from quire.compute.gguf.header import GgufTensor
from quire.compute.gguf.named_settings import Settings
from quire.compute.gguf.vision.kind import BILINEAR, NEXT_TO_IMAGES, EncoderFile, Kind, Object, OwnEncoder


def _merge(file: EncoderFile) -> int:
    return file.settings.size("projector.scale_factor", 4, high=16)


def _config(file: EncoderFile) -> Object:
    eye = file.tower("gelu_pytorch_tanh") | {"model_type": "siglip_vision_model"}
    return {
        "image_token_index": file.token_id,
        "mm_tokens_per_image": file.rows_per_side(_merge(file)) ** 2,
        "rms_norm_unit_offset": False,  # GGUF files include the 1
        "vision_config": eye,
    }


def _processor(file: EncoderFile) -> Object:
    size = file.size("image_size")
    return file.pixels() | {
        "image_processor_type": "Gemma3ImageProcessor",
        "image_seq_length": file.rows_per_side(_merge(file)) ** 2,
        "image_token": file.token,
        "resample": BILINEAR,
        "size": {"height": size, "width": size},
    }


GEMMA3: Final = Kind(
    family="Gemma3ForConditionalGeneration",
    texts={"gemma3": "gemma3_text"},
    text_names=NEXT_TO_IMAGES,
    tower="vision_tower.vision_model.",
    in_projector={"mm.input_projection.weight": "mm_input_projection_weight", "mm.soft_emb_norm": "mm_soft_emb_norm"},
    output=("mm.input_projection.weight", 1),
    tokens=("<image_soft_token>", "<unused0>"),
    config=_config,
    processor=_processor,
)


def _added(text: Settings, tensors: Mapping[str, GgufTensor]) -> Object:
    """Return how many patches per side become one row, which follows from the rows of an image."""
    key = text.key("mm.tokens_per_image")
    patches = text.size("vision.image_size") // text.size("vision.patch_size")
    side = isqrt(text.size("mm.tokens_per_image", 256))
    if side**2 != text.size("mm.tokens_per_image", 256) or patches < side or patches % side:
        raise text.file.error(key, f"a square, with a root that divides {patches}")
    return {text.key("vision.projector.scale_factor"): patches // side}


GEMMA3_OF_OLLAMA: Final = OwnEncoder(
    replace(
        GEMMA3,
        in_tower={
            **{f"v.{name}": f"embeddings.{name}" for name in ("patch_embedding", "position_embedding")},
            "v.post_layernorm": "post_layernorm",
        },
        in_projector={
            "mm.mm_input_projection.weight": "mm_input_projection_weight",
            "mm.mm_soft_emb_norm": "mm_soft_emb_norm",
        },
        in_layer={
            **{f"attn_{part}": f"self_attn.{part}_proj" for part in "kqv"},
            "attn_output": "self_attn.out_proj",
            **{name: name for name in ("layer_norm1", "layer_norm2", "mlp.fc1", "mlp.fc2")},
        },
        output=("mm.mm_input_projection.weight", 1),
    ),
    _added,
)
