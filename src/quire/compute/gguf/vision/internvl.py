"""The image encoders of InternVL 3 and 3.5."""

from __future__ import annotations

from typing import Final

from quire.compute.gguf.vision.kind import (
    BICUBIC,
    FIRST_ROW,
    IN_LAYER,
    NEXT_TO_IMAGES,
    POSITIONS,
    EncoderFile,
    Kind,
    Object,
)


def _config(file: EncoderFile) -> Object:
    """Return the settings of InternVL; the tensors of a file tell which norms and biases there are."""
    first = f"{IN_LAYER}0."
    eye = file.tower("gelu") | {
        "attention_bias": first + "attn_q.bias" in file.tensors,
        "norm_type": "layer_norm" if first + "ln1.bias" in file.tensors else "rms_norm",
        "use_qk_norm": first + "attn_q_norm.weight" in file.tensors,
    }
    return {"downsample_ratio": 1 / file.merge, "image_token_id": file.token_id, "vision_config": eye}


def _processor(file: EncoderFile) -> Object:
    size = file.size("image_size")
    return file.pixels() | {
        "image_processor_type": "GotOcr2ImageProcessor",
        "image_seq_length": file.rows_per_side(file.merge) ** 2,
        "max_patches": file.size("preproc_max_tiles", 12),
        "min_patches": file.size("preproc_min_tiles", 1),
        "resample": BICUBIC,
        "size": {"height": size, "width": size},
    }


INTERNVL: Final = Kind(
    family="InternVLForConditionalGeneration",
    texts={
        **{"gpt-oss": "gpt_oss", "internlm2": "llama", "llama": "llama", "qwen2": "qwen2"},
        **{"qwen3": "qwen3", "qwen3moe": "qwen3_moe"},
    },
    text_names=NEXT_TO_IMAGES,
    tower="vision_tower.",
    layers="encoder.layer.",
    in_tower={
        FIRST_ROW: "embeddings.cls_token",
        "v.patch_embd": "embeddings.patch_embeddings.projection",
        POSITIONS: "embeddings.position_embeddings",
    },
    in_projector={"mm.model.mlp.0": "layer_norm", "mm.model.mlp.1": "linear_1", "mm.model.mlp.3": "linear_2"},
    in_layer={
        **{f"attn_{part}": f"attention.{part}_proj" for part in "kqv"},
        **{f"attn_{part}_norm": f"attention.{part}_norm" for part in "kq"},
        **{"attn_out": "attention.projection_layer", "ffn_down": "mlp.fc2", "ffn_up": "mlp.fc1"},
        **{"ln1": "layernorm_before", "ln2": "layernorm_after"},
        **{"ls1.weight": "lambda_1", "ls2.weight": "lambda_2"},
    },
    output=("mm.model.mlp.3.weight", 0),
    tokens=("<IMG_CONTEXT>",),
    config=_config,
    processor=_processor,
)
