"""Tiny folders of models that read images, with random weights, and the settings of published ones."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quire.compute.arrays import FloatArray
from quire.compute.models import ModelDescription, read_model
from quire.compute.models.source import ModelFolder
from quire.compute.models.vision.spec import VisionSpec
from quire.compute.vision.weights import own_tensors
from quire.compute.weights.decoder_weights import expected_tensors
from quire.compute.worker.image_queue import ImageEncoder
from quire.core.images import CHANNELS, Image
from support.tiny_checkpoint import write_model_weights

TEXT: dict[str, Any] = {
    **{"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "rms_norm_eps": 1e-5},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
}
EYE: dict[str, Any] = {
    **{"hidden_size": 32, "image_size": 56, "intermediate_size": 48, "num_attention_heads": 2},
    **{"num_hidden_layers": 3, "patch_size": 7},
}
INTERN_EYE: dict[str, Any] = {
    **{**EYE, "model_type": "internvl_vision", "image_size": [56, 56], "patch_size": [7, 7]},
    "layer_scale_init_value": 0.7,
}
PIXELS = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.25]}
QWEN_TOKENS: dict[str, Any] = {
    **{"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8},
    "tie_word_embeddings": False,
}
QWEN3_EYE: dict[str, Any] = {
    **{"depth": 4, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 7, "out_hidden_size": 32},
    **{"spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 9},
}
GLM4V_TOKENS: dict[str, Any] = {
    **{"image_token_id": 5, "video_token_id": 6, "image_start_token_id": 7, "image_end_token_id": 8},
    **{"video_start_token_id": 9, "video_end_token_id": 10, "tie_word_embeddings": False},
}
GLM4V_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
GLM4V_EYE: dict[str, Any] = {
    **{"depth": 3, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "patch_size": 7, "image_size": 28},
    **{"spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32},
}
GEMMA4_TOKENS: dict[str, Any] = {
    **{"image_token_id": 5, "video_token_id": 60, "audio_token_id": 61},
    "audio_config": None,
}
GEMMA4_TEXT: dict[str, Any] = {
    **{**TEXT, "model_type": "gemma4_text", "head_dim": 16, "global_head_dim": 32, "sliding_window": 6},
    **{"vocab_size_per_layer_input": 64, "tie_word_embeddings": True, "final_logit_softcapping": 30.0},
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
}
GEMMA4_EYE: dict[str, Any] = {
    **{"model_type": "gemma4_vision", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4},
    **{"pooling_kernel_size": 3, "position_embedding_size": 840},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "idefics3": {
        **{"architectures": ["Idefics3ForConditionalGeneration"], "image_token_id": 5, "scale_factor": 2},
        **{"text_config": TEXT, "vision_config": EYE},
    },
    "smolvlm": {
        **{"architectures": ["SmolVLMForConditionalGeneration"], "image_token_id": 5, "scale_factor": 4},
        **{"text_config": TEXT, "vision_config": {**EYE, "hidden_size": 48, "num_attention_heads": 3}},
    },
    "llava-clip": {
        **{"architectures": ["LlavaForConditionalGeneration"], "image_token_index": 5, "text_config": TEXT},
        "vision_config": {**EYE, "model_type": "clip_vision_model"},
    },
    "llava-siglip": {
        **{"architectures": ["LlavaForConditionalGeneration"], "image_token_index": 5, "text_config": TEXT},
        **{"vision_feature_layer": -1, "vision_feature_select_strategy": "full", "projector_hidden_act": "relu"},
        "vision_config": {**EYE, "model_type": "siglip_vision_model", "patch_size": 6},
    },
    "llava-pixtral": {
        **{"architectures": ["LlavaForConditionalGeneration"], "image_token_index": 5, "text_config": TEXT},
        **{"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        "vision_config": {**EYE, "model_type": "pixtral", "hidden_act": "silu"},
    },
    "llava-next": {
        **{"architectures": ["LlavaNextForConditionalGeneration"], "image_token_index": 5, "text_config": TEXT},
        "vision_config": {**EYE, "model_type": "clip_vision_model", "patch_size": 14},
        "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]],
    },
    "mistral3": {
        **{"architectures": ["Mistral3ForConditionalGeneration"], "image_token_index": 5, "spatial_merge_size": 2},
        "tie_word_embeddings": False,
        "text_config": {**TEXT, "model_type": "mistral", "sliding_window": None, "head_dim": 16},
        "vision_config": {**EYE, "model_type": "pixtral", "rope_parameters": {"rope_theta": 100.0}},
    },
    "gemma3": {
        **{"architectures": ["Gemma3ForConditionalGeneration"], "image_token_index": 5, "mm_tokens_per_image": 4},
        "text_config": {
            **{**TEXT, "model_type": "gemma3_text", "head_dim": 16, "sliding_window": 24, "num_hidden_layers": 3},
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        "vision_config": {**EYE, "model_type": "siglip_vision_model", "vision_use_head": False},
    },
    "gemma4": {
        **{"architectures": ["Gemma4ForConditionalGeneration"], **GEMMA4_TOKENS},
        "text_config": {
            **{**GEMMA4_TEXT, "num_hidden_layers": 4, "num_kv_shared_layers": 1, "hidden_size_per_layer_input": 16},
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        },
        "vision_config": {**GEMMA4_EYE, "use_clipped_linears": True},
    },
    "gemma4-31b": {
        **{"architectures": ["Gemma4ForConditionalGeneration"], **GEMMA4_TOKENS},
        "text_config": {
            **{**GEMMA4_TEXT, "num_hidden_layers": 2, "use_bidirectional_attention": "vision"},
            **{"layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 0},
        },
        "vision_config": {**GEMMA4_EYE, "num_attention_heads": 4, "head_dim": 8, "standardize": True},
    },
    "gemma4-unified": {
        **{"architectures": ["Gemma4UnifiedForConditionalGeneration"], **GEMMA4_TOKENS},
        "text_config": {
            **{**GEMMA4_TEXT, "model_type": "gemma4_unified_text", "num_key_value_heads": 1, "num_hidden_layers": 3},
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "use_bidirectional_attention": "vision",
        },
        "vision_config": {
            **{"model_type": "gemma4_unified_vision", "mm_embed_dim": 32, "output_proj_dims": 32},
            **{"patch_size": 4, "pooling_kernel_size": 3, "mm_posemb_size": 280},
        },
    },
    "glm4v": {
        **{"architectures": ["Glm4vForConditionalGeneration"], **GLM4V_TOKENS, "vision_config": GLM4V_EYE},
        "text_config": {
            **{**TEXT, "model_type": "glm4v_text", "pad_token_id": 0},
            "rope_parameters": {**GLM4V_ROPE, "mrope_section": [1, 1, 0]},
        },
    },
    "glm4v-moe": {
        **{"architectures": ["Glm4vMoeForConditionalGeneration"], **GLM4V_TOKENS, "vision_config": GLM4V_EYE},
        "text_config": {
            **{**TEXT, "model_type": "glm4v_moe_text", "head_dim": 16, "n_routed_experts": 4, "pad_token_id": 0},
            **{"num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
            "rope_parameters": {**GLM4V_ROPE, "mrope_section": [1, 1, 2]},
        },
    },
    "internvl": {
        **{"architectures": ["InternVLForConditionalGeneration"], "image_token_id": 5, "downsample_ratio": 0.5},
        **{"text_config": {**TEXT, "model_type": "qwen2"}, "tie_word_embeddings": False},
        "vision_config": {**INTERN_EYE, "attention_bias": True},
    },
    "internvl-6b": {
        **{"architectures": ["InternVLForConditionalGeneration"], "image_token_id": 5, "downsample_ratio": 0.25},
        "text_config": {**TEXT, "model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
        "vision_config": {**INTERN_EYE, "norm_type": "rms_norm", "use_qk_norm": True, "num_hidden_layers": 2},
    },
    "lfm2-vl": {
        **{"architectures": ["Lfm2VlForConditionalGeneration"], "image_token_id": 5, "projector_hidden_size": 40},
        "text_config": {
            **{**TEXT, "model_type": "lfm2", "norm_eps": 1e-5, "layer_types": ["conv", "full_attention"]},
            **{"block_auto_adjust_ff_dim": False, "conv_L_cache": 3},
        },
        "vision_config": {**EYE, "model_type": "siglip2_vision_model", "num_patches": 9, "vision_use_head": False},
    },
    "qwen2-vl": {
        **{"architectures": ["Qwen2VLForConditionalGeneration"], **QWEN_TOKENS},
        "text_config": {
            **{**TEXT, "model_type": "qwen2_vl_text", "bos_token_id": 1, "eos_token_id": 2},
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]},
        },
        "vision_config": {
            **{"depth": 3, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 7},
            **{"spatial_merge_size": 2, "temporal_patch_size": 2},
        },
    },
    "qwen2-5-vl": {
        **{"architectures": ["Qwen2_5_VLForConditionalGeneration"], **QWEN_TOKENS},
        "text_config": {
            **{**TEXT, "model_type": "qwen2_5_vl_text", "bos_token_id": 1, "eos_token_id": 2},
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]},
        },
        "vision_config": {
            **{"depth": 4, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 7},
            **{"spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 56, "out_hidden_size": 32},
            "fullatt_block_indexes": [1, 3],
        },
    },
    "qwen3-vl": {
        **{"architectures": ["Qwen3VLForConditionalGeneration"], **QWEN_TOKENS},
        "text_config": {
            **{**TEXT, "model_type": "qwen3_vl_text", "bos_token_id": 1, "eos_token_id": 2, "head_dim": 16},
            "rope_parameters": {
                **{"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]},
                "mrope_interleaved": True,
            },
        },
        "vision_config": {**QWEN3_EYE, "deepstack_visual_indexes": [0, 2]},
    },
    "qwen3-vl-moe": {
        **{"architectures": ["Qwen3VLMoeForConditionalGeneration"], **QWEN_TOKENS},
        "text_config": {
            **{**TEXT, "model_type": "qwen3_vl_moe_text", "bos_token_id": 1, "eos_token_id": 2, "head_dim": 16},
            **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": []},
            "rope_parameters": {
                **{"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]},
                "mrope_interleaved": True,
            },
        },
        "vision_config": {**QWEN3_EYE, "deepstack_visual_indexes": [1]},
    },
    "qwen3-5": {
        **{"architectures": ["Qwen3_5ForConditionalGeneration"], **QWEN_TOKENS},
        "text_config": {
            **{**TEXT, "model_type": "qwen3_5_text", "bos_token_id": 1, "eos_token_id": 2, "head_dim": 32},
            **{"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2},
            **{"linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
            "rope_parameters": {
                **{"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]},
                **{"mrope_interleaved": True, "partial_rotary_factor": 0.25},
            },
        },
        "vision_config": QWEN3_EYE,
    },
}
"""config.json of small models."""

OF_ONE = {"cls_token": 2, "position_embeddings": 1}
"""Tensors that have more dimensions in a file, as for a batch of one image."""

UP_TO_56 = [(56, 56), (28, 42), (14, 56), (42, 14)]
ANY_SIZE = [(56, 56), (28, 42), (14, 140), (126, 98)]
OF_ANY_SIZE = ("glm4v", "glm4v-moe", "lfm2-vl", "qwen2-vl", "qwen2-5-vl", "qwen3-vl", "qwen3-vl-moe", "qwen3-5")
SIZES = {name: ANY_SIZE if name in OF_ANY_SIZE else [(56, 56)] for name in SETTINGS}
IN_CELLS = [(36, 36), (24, 48), (12, 144), (108, 24)]
SIZES |= {"gemma4": IN_CELLS, "gemma4-31b": IN_CELLS, "gemma4-unified": IN_CELLS}
SIZES |= {"llava-next": [(56, 56), (56, 112), (112, 112), (168, 56)]}
SIZES |= {"llava-pixtral": UP_TO_56, "mistral3": UP_TO_56}
"""Height and width of the images for each model."""


def write_settings(folder: Path, settings: Mapping[str, Any], pixels: Mapping[str, Any] | None = None) -> Path:
    """Write the settings of a model and of its images; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "preprocessor_config.json").write_text(json.dumps(PIXELS if pixels is None else pixels))
    return folder


def write_vision_model(folder: Path, settings: Mapping[str, Any], *, dtype: str = "F32", seed: int = 0) -> Path:
    """Write a model with random weights that reads images; equal arguments give equal bytes."""
    model = read_model(ModelFolder(write_settings(folder, settings)))
    vision = vision_of(model)
    shapes = {**expected_tensors(model.spec), **expected_tensors(vision.tower), **own_tensors(vision)}
    draw = np.random.default_rng(seed)
    tensors = {}
    for name, shape in sorted(shapes.items()):
        spread = 0.2 if len(shape) == 1 else 1.5 * float(np.prod(shape[1:])) ** -0.5
        noise = np.asarray(draw.standard_normal(shape, np.float32) * np.float32(spread), np.float32)
        if not shape:  # a bound
            noise = np.asarray((1 + np.abs(noise)) * (-1 if name.endswith("min") else 1), np.float32)
        stored = name.replace("layer_scalar.weight", "layer_scalar")
        noise += np.float32(len(shape) == 1 and name.endswith(("weight", "std_scale")))
        tensors[stored] = noise.reshape((*[1] * OF_ONE.get(name.rpartition(".")[2], 0), *shape))
    write_model_weights(folder, tensors, dtype=dtype)
    return folder


def vision_of(model: ModelDescription) -> VisionSpec:
    """Return the image encoder of a model that has one."""
    assert model.vision is not None
    return model.vision


def random_image(vision: VisionSpec, height: int, width: int, seed: int = 0) -> Image:
    """Return an image of random pixels for a model."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, CHANNELS), dtype=np.uint8)
    return Image.of(0, vision.num_placeholders(height, width), height, width, pixels.tobytes())


def rows_of(encoder: ImageEncoder, image: Image) -> FloatArray:
    """Return the rows of an image, encoded without a pause."""
    work, rows = encoder.begin(image), None
    while rows is None:
        rows = work.advance(math.inf)
    return rows
