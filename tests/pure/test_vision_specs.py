"""Settings of image encoders: published ones are read, and those that quire does not interpret are refused."""

from __future__ import annotations

import copy
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.compute.models import NO_SETTINGS, TEXT_ONLY, ModelDescription, read_model
from quire.compute.models.parts import NormKind, NormSpec, Part
from quire.compute.models.source import ModelFolder
from quire.compute.models.sublayers import Activation, MLPSpec
from quire.compute.models.vision.spec import Average, Join, Matrix, Norm, VisionSpec
from quire.compute.native.backend import NativeBackend
from quire.compute.reference.backend import ReferenceBackend
from quire.compute.vision.patches import normalised_levels
from quire.compute.vision.weights import own_tensors, vision_bytes
from quire.compute.weights.decoder_weights import expected_tensors
from quire.core.config import EngineConfig
from quire.core.errors import CheckpointError
from quire.engine.images.gemma4 import Gemma4Layout
from quire.engine.images.settings import ProcessorSettings
from support.odd_json import mutated_json
from support.vision_models import PIXELS, SETTINGS, vision_of, write_settings

HALVES = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "rescale_factor": 0.00392156862745098}
SMOLVLM_256M: dict[str, Any] = {
    "architectures": ["Idefics3ForConditionalGeneration"],
    "image_token_id": 49190,
    "model_type": "idefics3",
    "scale_factor": 4,
    "text_config": {
        **{"architectures": ["VLlama3ForCausalLM"], "head_dim": 64, "hidden_size": 576, "intermediate_size": 1536},
        **{"is_llama_config": True, "max_position_embeddings": 8192, "model_type": "llama", "num_attention_heads": 9},
        **{"num_hidden_layers": 30, "num_key_value_heads": 3, "pad_token_id": 2, "rms_norm_eps": 1e-05},
        **{"rope_scaling": None, "rope_theta": 100000, "torch_dtype": "bfloat16", "vocab_size": 49280},
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vision_config": {
        **{"hidden_size": 768, "image_size": 512, "max_image_size": {"longest_edge": 512}, "model_type": "idefics3"},
        **{"num_attention_heads": 12, "patch_size": 16, "size": {"longest_edge": 2048}, "use_base_siglip": True},
    },
    "vocab_size": 49280,
}
SMOLVLM_2B: dict[str, Any] = {
    **SMOLVLM_256M,
    "image_token_id": 49153,
    "scale_factor": 3,
    "text_config": {
        **{"head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 16384},
        **{"model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 24, "num_key_value_heads": 32},
        **{"rms_norm_eps": 1e-05, "rope_theta": 273768.0, "vocab_size": 49155},
    },
    "vision_config": {
        **{"hidden_size": 1152, "image_size": 384, "intermediate_size": 4304, "model_type": "idefics3"},
        **{"num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14},
    },
}
LLAVA_7B: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "ignore_index": -100,
    "image_token_index": 32000,
    "model_type": "llava",
    "pad_token_id": 32001,
    "projector_hidden_act": "gelu",
    "text_config": {
        **{"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096, "model_type": "llama"},
        **{"rms_norm_eps": 1e-05, "torch_dtype": "float16", "vocab_size": 32064},
    },
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vision_config": {
        **{"hidden_size": 1024, "image_size": 336, "intermediate_size": 4096, "model_type": "clip_vision_model"},
        **{"num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768},
    },
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "vocab_size": 32064,
}
LLAVA_1_6_7B: dict[str, Any] = {
    **{**LLAVA_7B, "architectures": ["LlavaNextForConditionalGeneration"], "model_type": "llava_next"},
    "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    "text_config": {
        **{"architectures": ["MistralForCausalLM"], "intermediate_size": 14336, "max_position_embeddings": 32768},
        **{"model_type": "mistral", "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0},
        **{"sliding_window": None, "torch_dtype": "bfloat16", "vocab_size": 32064},
    },
    "use_image_newline_parameter": True,
}
PIXTRAL_12B: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "image_seq_length": 1,
    "image_token_index": 10,
    "projector_hidden_act": "gelu",
    "text_config": {
        **{"hidden_size": 5120, "head_dim": 128, "num_attention_heads": 32, "intermediate_size": 14336},
        **{"max_position_embeddings": 1024000, "model_type": "mistral", "num_hidden_layers": 40},
        **{"num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1e9, "sliding_window": None},
        "vocab_size": 131072,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {
        **{"head_dim": 64, "hidden_act": "silu", "image_size": 1024, "model_type": "pixtral", "patch_size": 16},
        "rope_theta": 10000.0,
    },
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
}
MISTRAL_SMALL_24B: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "image_token_index": 10,
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "text_config": {
        **{"head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 32768},
        **{"max_position_embeddings": 131072, "model_type": "mistral", "num_attention_heads": 32},
        **{"num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1e9},
        **{"sliding_window": None, "vocab_size": 131072},
    },
    "torch_dtype": "bfloat16",
    "vision_config": {
        **{"head_dim": 64, "hidden_act": "silu", "hidden_size": 1024, "image_size": 1540, "intermediate_size": 4096},
        **{"model_type": "pixtral", "num_attention_heads": 16, "num_channels": 3, "num_hidden_layers": 24},
        **{"patch_size": 14, "rope_theta": 10000.0},
    },
    "vision_feature_layer": -1,
}
GEMMA3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "image_token_index": 262144,
    "mm_tokens_per_image": 256,
    "text_config": {
        **{"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34},
        **{"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
        **{"head_dim": 256, "num_key_value_heads": 4},
    },
    "torch_dtype": "bfloat16",
    "vision_config": {
        **{"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model"},
        **{"num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False},
    },
}
GEMMA4 = SETTINGS["gemma4"]
QWEN2_VL_2B: dict[str, Any] = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    **{"image_token_id": 151655, "hidden_act": "silu", "hidden_size": 1536, "intermediate_size": 8960},
    **{"max_position_embeddings": 32768, "max_window_layers": 28, "num_attention_heads": 12},
    **{"num_hidden_layers": 28, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0},
    **{"sliding_window": 32768, "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936},
    "torch_dtype": "bfloat16",
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_config": {
        **{"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3, "hidden_size": 1536},
        **{"patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2},
    },
}
QWEN2_5_VL_3B: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    **{"image_token_id": 151655, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 11008},
    **{"max_position_embeddings": 128000, "max_window_layers": 70, "num_attention_heads": 16},
    **{"num_hidden_layers": 36, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0},
    **{"sliding_window": 32768, "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936},
    "torch_dtype": "bfloat16",
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_config": {
        **{"depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16},
        **{"in_chans": 3, "out_hidden_size": 2048, "patch_size": 14, "spatial_merge_size": 2},
        **{"spatial_patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]},
        **{"tokens_per_second": 2, "temporal_patch_size": 2},
    },
}
QWEN3_VL_2B: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": 151655,
    "text_config": {
        **{"attention_bias": False, "bos_token_id": 151643, "dtype": "bfloat16", "eos_token_id": 151645},
        **{"head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144},
        **{"max_position_embeddings": 262144, "model_type": "qwen3_vl_text", "num_attention_heads": 16},
        **{"num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_theta": 5000000},
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        **{"tie_word_embeddings": True, "vocab_size": 151936},
    },
    "tie_word_embeddings": True,
    "vision_config": {
        **{"deepstack_visual_indexes": [5, 11, 17], "depth": 24, "hidden_act": "gelu_pytorch_tanh"},
        **{"hidden_size": 1024, "in_channels": 3, "intermediate_size": 4096, "num_heads": 16},
        **{"num_position_embeddings": 2304, "out_hidden_size": 2048, "patch_size": 16, "spatial_merge_size": 2},
        "temporal_patch_size": 2,
    },
}
INTERNVL3_1B: dict[str, Any] = {
    "architectures": ["InternVLForConditionalGeneration"],
    **{"downsample_ratio": 0.5, "image_seq_length": 256, "image_token_id": 151667, "model_type": "internvl"},
    **{"projector_hidden_act": "gelu", "vision_feature_layer": -1, "vision_feature_select_strategy": "default"},
    "text_config": {
        **{"architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "hidden_size": 896, "intermediate_size": 4864},
        **{"max_position_embeddings": 32768, "max_window_layers": 21, "model_type": "qwen2"},
        **{"num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06},
        **{"rope_scaling": {"factor": 2.0, "rope_type": "dynamic"}, "rope_theta": 1000000.0, "sliding_window": None},
        **{"tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151674},
    },
    "torch_dtype": "bfloat16",
    "vision_config": {
        **{"attention_bias": True, "hidden_act": "gelu", "hidden_size": 1024, "image_size": [448, 448]},
        **{"intermediate_size": 4096, "layer_norm_eps": 1e-06, "layer_scale_init_value": 0.1},
        **{"model_type": "internvl_vision", "norm_type": "layer_norm", "num_attention_heads": 16, "num_channels": 3},
        **{"num_hidden_layers": 24, "patch_size": [14, 14], "use_absolute_position_embeddings": True},
        **{"use_mask_token": False, "use_mean_pooling": True, "use_qk_norm": False},
    },
}
GLM_4_1V_9B: dict[str, Any] = {
    "architectures": ["Glm4vForConditionalGeneration"],
    **{"image_token_id": 151343, "model_type": "glm4v", "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    "text_config": {
        **{"attention_bias": True, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 13696},
        **{"max_position_embeddings": 65536, "model_type": "glm4v_text", "num_attention_heads": 32},
        **{"num_hidden_layers": 40, "num_key_value_heads": 2, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05},
        **{"rope_scaling": {"type": "default", "mrope_section": [8, 12, 12]}, "rope_theta": 10000.0},
        "vocab_size": 151552,
    },
    "vision_config": {
        **{"attention_bias": False, "depth": 24, "hidden_act": "silu", "hidden_size": 1536, "image_size": 336},
        **{"in_channels": 3, "intermediate_size": 13696, "num_heads": 12, "out_hidden_size": 4096, "patch_size": 14},
        **{"rms_norm_eps": 1e-05, "spatial_merge_size": 2, "temporal_patch_size": 2},
    },
}
LFM2_VL_450M: dict[str, Any] = {
    "architectures": ["Lfm2VlForConditionalGeneration"],
    **{"downsample_factor": 2, "encoder_patch_size": 16, "image_token_index": 396, "max_image_tokens": 256},
    **{"projector_bias": True, "projector_hidden_act": "gelu", "projector_hidden_size": 2560, "tile_size": 512},
    "text_config": {
        **{"block_auto_adjust_ff_dim": True, "block_ff_dim": 6656, "block_ffn_dim_multiplier": 1.0},
        **{"block_multiple_of": 256, "conv_L_cache": 3, "conv_bias": False, "eos_token_id": 7},
        **{"full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 1024, "max_position_embeddings": 128000},
        **{"model_type": "lfm2", "norm_eps": 1e-05, "num_attention_heads": 16, "num_hidden_layers": 16},
        **{"num_key_value_heads": 8, "rope_theta": 1000000.0, "vocab_size": 65536},
    },
    "torch_dtype": "bfloat16",
    "vision_config": {
        **{"hidden_act": "gelu_pytorch_tanh", "hidden_size": 768, "intermediate_size": 3072, "layer_norm_eps": 1e-06},
        **{"model_type": "siglip2_vision_model", "num_attention_heads": 12, "num_channels": 3},
        **{"num_hidden_layers": 12, "num_patches": 256, "patch_size": 16, "vision_use_head": False},
    },
}
PUBLISHED: dict[str, tuple[dict[str, Any], tuple[int, int], int, int]] = {
    "SmolVLM-256M-Instruct": (SMOLVLM_256M, (512, 512), 64, 256_484_928),
    "SmolVLM-Instruct": (SMOLVLM_2B, (384, 384), 81, 2_246_272_880),  # 6 pixels are left out
    "llava-1.5-7b-hf": (LLAVA_7B, (336, 336), 576, 7_063_427_072 - 12_598_272),  # without the last layer and norm
    "llava-v1.6-mistral-7b-hf": (LLAVA_1_6_7B, (1008, 336), 1800, 7_566_747_648 - 12_598_272),
    "pixtral-12b": (PIXTRAL_12B, (1024, 768), 3072, 12_682_739_712),
    "Mistral-Small-3.1-24B": (MISTRAL_SMALL_24B, (1540, 1540), 3025, 24_011_361_280),
    "gemma-3-4b-it": (GEMMA3_4B, (896, 896), 256, 4_300_079_472),
    "Qwen2-VL-2B-Instruct": (QWEN2_VL_2B, (560, 840), 600, 2_208_985_600),
    "Qwen2.5-VL-3B-Instruct": (QWEN2_5_VL_3B, (560, 840), 600, 3_754_622_976),
    "Qwen3-VL-2B-Instruct": (QWEN3_VL_2B, (640, 480), 300, 2_127_532_032),
    "InternVL3-1B-hf": (INTERNVL3_1B, (448, 448), 256, 938_193_024),
    "GLM-4.1V-9B-Thinking": (GLM_4_1V_9B, (560, 840), 600, 10_292_777_472),
    "LFM2-VL-450M": (LFM2_VL_450M, (384, 640), 240, 450_822_656),
}
"""Settings, the height and width of an image, its rows, and the number of parameters."""


def read(folder: Path, settings: dict[str, Any], pixels: dict[str, Any] | None = None) -> ModelDescription:
    return read_model(ModelFolder(write_settings(folder, settings, HALVES if pixels is None else pixels)))


def changed(settings: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return settings with changes; a name with two parts is that of a section and its field."""
    result = copy.deepcopy(settings)
    for name, value in changes.items():
        section, _, field = name.partition("__")
        if field:
            result[section][field] = value
        else:
            result[name] = value
    return result


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_encoder_has_its_rows_and_parameters(name: str, tmp_path: Path) -> None:
    settings, (height, width), num_rows, num_parameters = PUBLISHED[name]
    model = read(tmp_path, settings)
    vision = vision_of(model)
    assert model.notices == ()
    assert vision.num_placeholders(height, width) == num_rows
    shapes = {**expected_tensors(model.spec), **expected_tensors(vision.tower), **own_tensors(vision)}
    assert sum(map(math.prod, shapes.values())) == num_parameters
    assert all(not key.startswith(vision.prefixes) for key in expected_tensors(model.spec))
    assert set(vision.prefixes) == set(model.spec.ignored_prefixes)
    factors = ("lambda_1", "lambda_2")  # multiplied into matrices
    of_tower = {
        key: shape for key, shape in shapes.items() if key.startswith(vision.prefixes) and not key.endswith(factors)
    }
    assert vision_bytes(vision, "float32") == 4 * sum(map(math.prod, of_tower.values()))
    assert vision_bytes(vision, "float32") > vision_bytes(vision, "bfloat16") > vision_bytes(vision, "float32") // 2


def test_smolvlm_joins_squares_of_16_patches(tmp_path: Path) -> None:
    vision = vision_of(read(tmp_path, SMOLVLM_256M))
    assert (vision.placeholder, vision.patches.max_rows, vision.patches.merge) == (49190, 1024, 4)
    assert vision.tower.mlp.activation is Activation.GELU_TANH
    assert vision.connector[0] == Join(16)
    assert vision.patches.matrix.shape == (768, 3, 16, 16)


def test_llava_leaves_out_the_last_layer_and_the_first_row(tmp_path: Path) -> None:
    model = read(tmp_path, LLAVA_7B)
    vision = vision_of(model)
    assert (len(vision.tower.layers), vision.patches.max_rows, vision.patches.num_first) == (23, 577, 1)
    assert vision.tower.mlp.activation is Activation.QUICK_GELU
    assert (model.spec.hidden_size, len(model.spec.layers), model.spec.context_length) == (4096, 32, 4096)
    assert "vision_tower.vision_model.encoder.layers.23." in vision.tower.ignored_prefixes
    shorter = vision.without_optional_prefix()
    assert shorter.patches.matrix.weight == "vision_tower.embeddings.patch_embedding.weight"
    assert shorter.tower.sources[Part.UP].stem == "vision_tower.encoder.layers.{layer}.mlp.fc1"
    assert shorter.connector == vision.connector
    for index, count in ((-1, 24), (3, 3), (24, 24), (-24, 1)):
        assert len(vision_of(read(tmp_path, changed(LLAVA_7B, vision_feature_layer=index))).tower.layers) == count


def test_a_number_of_rows_tells_which_part_of_a_grid_of_tiles_is_left(tmp_path: Path) -> None:
    vision = vision_of(read(tmp_path, LLAVA_1_6_7B))
    assert vision.most_rows == 48 * 49
    assert vision.num_placeholders(672, 672, wanted=24 * 49) == 24 * 49
    assert vision.num_placeholders(672, 672, wanted=24 * 49 + 1) == 48 * 49
    with pytest.raises(CheckpointError, match=r"image tiles is \(5, 1\); allowed: several, of whose parts no two"):
        read(tmp_path, changed(LLAVA_1_6_7B, image_grid_pinpoints=[[5 * 336, 336]]))


def test_memory_bounds_the_images_of_qwen_vl(tmp_path: Path) -> None:
    for pixels, num_patches in (
        ({}, 28 * 28 * 1280 // 196),
        ({"max_pixels": 12_845_056}, 1 << 14),
        ({"size": {"longest_edge": 401_408}}, 2048),
        ({"max_pixels": 1}, 4),
    ):
        assert vision_of(read(tmp_path, QWEN2_VL_2B, pixels)).patches.max_patches == num_patches
    vision = vision_of(read(tmp_path, QWEN2_VL_2B, {"max_pixels": 12_845_056}))
    assert (vision.cell, vision.tower_has_axes, vision.patches.num_numbers) == (28, True, 1176)
    windows = vision_of(read(tmp_path, QWEN2_5_VL_3B))
    assert (windows.patches.window, len(windows.in_windows), windows.in_windows[:8]) == (8, 28, (*range(7), 8))
    assert vision_of(read(tmp_path, LFM2_VL_450M, {"tile_size": 1024})).patches.max_patches == 4096


def test_the_placeholder_has_two_names(tmp_path: Path) -> None:
    for settings in (SMOLVLM_256M, LLAVA_7B, GEMMA3_4B, LFM2_VL_450M, QWEN3_VL_2B):
        plain = {key: value for key, value in settings.items() if not key.startswith("image_token")}
        for name in ("image_token_id", "image_token_index"):
            assert vision_of(read(tmp_path, {**plain, name: 77})).placeholder == 77


def test_pixels_are_normalised_as_the_settings_say(tmp_path: Path) -> None:
    plain = {"do_rescale": False, "do_normalize": False}
    assert normalised_levels(vision_of(read(tmp_path, SMOLVLM_256M, plain)))[:, 1].tolist() == list(range(256))
    levels = normalised_levels(vision_of(read(tmp_path, SMOLVLM_256M, {"image_mean": [0.5, 0.25, 0]})))
    assert (levels[0].tolist(), levels[255].tolist()) == ([-1.0, -0.5, 0.0], [1.0, 1.5, 2.0])
    usual = vision_of(read(tmp_path, LLAVA_7B, {}))
    assert usual.mean == (0.48145466, 0.4578275, 0.40821073)
    (tmp_path / "preprocessor_config.json").rename(tmp_path / "processor_config.json")
    (tmp_path / "processor_config.json").write_text('{"image_processor": {"image_mean": [0.1, 0.2, 0.3]}}')
    assert vision_of(read_model(ModelFolder(tmp_path))).mean == (0.1, 0.2, 0.3)
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0.7, 0.7, 0.7]}')
    assert vision_of(read_model(ModelFolder(tmp_path))).mean == (0.1, 0.2, 0.3), "as in transformers"


def test_a_folder_without_settings_for_images_is_served_as_text(tmp_path: Path) -> None:
    read(tmp_path, SMOLVLM_256M)
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "processor_config.json").write_text('{"image_seq_len": 64}')
    model = read_model(ModelFolder(tmp_path))
    assert (model.vision, model.notices) == (None, (NO_SETTINGS,))


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another text model": (SMOLVLM_256M, {"text_config__model_type": "mamba"}, "model_type is 'mamba'"),
    "a placeholder outside of the vocabulary": (SMOLVLM_256M, {"image_token_id": 49280}, "image_token_id is 49280"),
    "an odd grid": (SMOLVLM_256M, {"vision_config__image_size": 528}, "image_size is 528"),
    "no patch": (SMOLVLM_256M, {"vision_config__image_size": 15}, "image_size is 15"),
    "too many patches": (SMOLVLM_256M, {"vision_config__image_size": 4096}, "image_size is 4096"),
    "sizes of two kinds": (SMOLVLM_256M, {"vision_config__image_size": [512, 512]}, "image_size"),
    "four colours": (SMOLVLM_256M, {"vision_config__num_channels": 4}, "num_channels is 4"),
    "heads that do not fit": (SMOLVLM_256M, {"vision_config__num_attention_heads": 7}, "hidden_size is 768"),
    "an unknown activation": (SMOLVLM_256M, {"vision_config__hidden_act": ["gelu"]}, "hidden_act"),
    "another encoder": (LLAVA_7B, {"vision_config__model_type": "dinov2"}, "model_type is 'dinov2'"),
    "several layers": (LLAVA_7B, {"vision_feature_layer": [-2, -5]}, "vision_feature_layer"),
    "no layer": (LLAVA_7B, {"vision_feature_layer": 0}, "from 1 to 24"),
    "the first row": (LLAVA_7B, {"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy is 'full'"),
    "sizes of tiles in one list": (LLAVA_1_6_7B, {"image_grid_pinpoints": [336, 672]}, "image_grid_pinpoints is"),
    "no sizes of tiles": (LLAVA_1_6_7B, {"image_grid_pinpoints": []}, "image_grid_pinpoints is"),
    "a part of a tile": (LLAVA_1_6_7B, {"image_grid_pinpoints": [[336, 500]]}, "image_grid_pinpoints is"),
    "many tiles": (LLAVA_1_6_7B, {"image_grid_pinpoints": [[3360, 3360]]}, "for up to 64 tiles"),
    "no ends of lines": (
        *(LLAVA_1_6_7B, {"use_image_newline_parameter": False}),
        "use_image_newline_parameter is False",
    ),
    "a tower without tiles": (
        *(LLAVA_1_6_7B, {"vision_config__model_type": "pixtral", "vision_feature_select_strategy": "full"}),
        "model_type is 'pixtral'",
    ),
    "an average of no whole squares": (GEMMA3_4B, {"mm_tokens_per_image": 225}, "mm_tokens_per_image is 225"),
    "an average of another number": (GEMMA3_4B, {"mm_tokens_per_image": 200}, "mm_tokens_per_image is 200"),
    "a tower that is no SigLIP": (GEMMA3_4B, {"vision_config__model_type": "clip"}, "model_type is 'clip'"),
    "a tower of the 12B": (GEMMA4, {"vision_config__model_type": "gemma4_unified_vision"}, "model_type is 'gemma4_uni"),
    "few positions": (GEMMA4, {"vision_config__position_embedding_size": 839}, "position_embedding_size is 839"),
    "halves of odd pairs": (GEMMA4, {"vision_config__head_dim": 18}, "head_dim is 18"),
    "another rotation": (GEMMA4, {"vision_config__rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
    "biases": (GEMMA4, {"vision_config__attention_bias": True}, "attention_bias is True"),
    "a tower that is no Pixtral": (MISTRAL_SMALL_24B, {"vision_config__model_type": "clip"}, "model_type is 'clip'"),
    "wider heads": (MISTRAL_SMALL_24B, {"vision_config__head_dim": 128}, "head_dim is 128"),
    "an image of no patch": (MISTRAL_SMALL_24B, {"vision_config__image_size": 27}, "image_size is 27"),
    "an image of many patches": (MISTRAL_SMALL_24B, {"vision_config__image_size": 4096}, "image_size is 4096"),
    "frequencies without end": (MISTRAL_SMALL_24B, {"vision_config__rope_theta": 1e-45}, "rope_theta is 1e-45"),
    "positions that are no square": (LFM2_VL_450M, {"vision_config__num_patches": 250}, "num_patches is 250"),
    "large tiles": (LFM2_VL_450M, {"tile_size": 4096}, "max_image_tokens is 256"),
    "a tile that is no square": (INTERNVL3_1B, {"vision_config__image_size": [448, 336]}, "image_size is [448, 336]"),
    "three lengths": (INTERNVL3_1B, {"vision_config__patch_size": [14, 14, 14]}, "patch_size is [14, 14, 14]"),
    "a square of no whole patches": (INTERNVL3_1B, {"downsample_ratio": 0.4}, "downsample_ratio is 0.4"),
    "a ratio near to nothing": (INTERNVL3_1B, {"downsample_ratio": 1e-30}, "downsample_ratio is 1e-30"),
    "no positions": (
        *(INTERNVL3_1B, {"vision_config__use_absolute_position_embeddings": False}),
        "use_absolute_position_embeddings is False",
    ),
    "a norm after the layers": (INTERNVL3_1B, {"vision_config__use_mean_pooling": False}, "use_mean_pooling is False"),
    "another norm": (INTERNVL3_1B, {"vision_config__norm_type": "batch_norm"}, "norm_type is 'batch_norm'"),
    "a text model with experts": (
        GLM_4_1V_9B,
        {"text_config__model_type": "glm4v_moe_text"},
        "model_type is 'glm4v_moe",
    ),
    "no sections of GLM": (GLM_4_1V_9B, {"text_config__rope_scaling": None}, "text_config is"),
    "rows of another size": (GLM_4_1V_9B, {"vision_config__out_hidden_size": 2048}, "out_hidden_size is 2048"),
    "a large table of positions": (GLM_4_1V_9B, {"vision_config__image_size": 14 * 129}, "image_size is 1806"),
    "no table of positions": (GLM_4_1V_9B, {"vision_config__image_size": 13}, "image_size is 13"),
    "rotations of one axis": (
        *(GLM_4_1V_9B, {"vision_config__rope_parameters": {"rope_type": "linear"}}),
        "rope_type is 'linear'",
    ),
    "no sections": (QWEN2_VL_2B, {"rope_scaling": None}, "rope_scaling is None"),
    "windows of no whole squares": (
        *(QWEN2_5_VL_3B, {"vision_config__window_size": 84}),
        "window_size is 84",
    ),
    "a whole layer after the last": (
        *(QWEN2_5_VL_3B, {"vision_config__fullatt_block_indexes": [32]}),
        "fullatt_block_indexes is [32]",
    ),
    "a state of the last layer": (
        *(QWEN3_VL_2B, {"vision_config__deepstack_visual_indexes": [5, 23]}),
        r"deepstack_visual_indexes is [5, 23]",
    ),
    "states out of order": (
        *(QWEN3_VL_2B, {"vision_config__deepstack_visual_indexes": [5, 5]}),
        r"deepstack_visual_indexes is [5, 5]",
    ),
    "positions of no square": (
        *(QWEN3_VL_2B, {"vision_config__num_position_embeddings": 2303}),
        "num_position_embeddings is 2303",
    ),
    "an odd head": (QWEN2_VL_2B, {"vision_config__embed_dim": 1248}, "num_heads is 16"),
    "a patch left out": (
        *(LLAVA_7B, {"vision_config__model_type": "siglip_vision_model"}),
        "vision_feature_select_strategy is 'default'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_settings_are_refused(name: str, tmp_path: Path) -> None:
    settings, changes, problem = REFUSED[name]
    with pytest.raises(CheckpointError, match=r"config\.json.*" + problem.replace("[", r"\[")):
        read(tmp_path, changed(settings, **changes))
    if name not in ("another text model", "a text model with experts", "states out of order"):  # of the text model
        assert read_model(ModelFolder(tmp_path), images=False).notices == (TEXT_ONLY,)


@pytest.mark.parametrize("pixels", [{"image_mean": [0.5]}, {"image_std": [0.5, 0, 0.5]}, {"rescale_factor": -1}])
def test_other_settings_of_pixels_are_refused(pixels: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json.*"):
        read(tmp_path, SMOLVLM_256M, pixels)


def test_gemma_4_normalises_pixels_itself(tmp_path: Path) -> None:
    same = {"do_normalize": True, "image_mean": [0.0] * 3, "image_std": [1.0] * 3}
    for pixels in (PIXELS, same):
        levels = normalised_levels(vision_of(read(tmp_path, GEMMA4, pixels)))
        assert levels[0].tolist() == [-1.0] * 3 and levels[255].tolist() == [1.0] * 3
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json: image_std .*the model itself normalises"):
        read(tmp_path, GEMMA4, same | {"image_std": [0.5] * 3})


@pytest.mark.parametrize("name", SETTINGS)
def test_broken_settings_are_read_or_refused(name: str, tmp_path: Path) -> None:
    outcomes, config = set(), EngineConfig().resolved()
    for seed in range(80):
        draw = random.Random(seed)
        settings, pixels = copy.deepcopy(SETTINGS[name]), copy.deepcopy(PIXELS)
        if draw.random() < 0.8:
            settings = mutated_json(draw, settings)
        else:
            pixels = mutated_json(draw, pixels)
        try:
            model = read(tmp_path, settings, pixels)
            outcomes.add(type(model.vision))
            for backend in (NativeBackend, ReferenceBackend):
                assert backend.of(config, model).facts.weight_bytes > 0
        except CheckpointError as error:
            outcomes.add(CheckpointError)
            assert str(error).isprintable(), seed
    assert {VisionSpec, CheckpointError} <= outcomes


def test_an_image_of_gemma_4_has_no_more_patches_than_its_encoder_takes() -> None:
    for kind, num_tokens in (("Gemma4ImageProcessor", 100), ("Gemma4UnifiedImageProcessor", 280)):
        settings = ProcessorSettings("", {"image_processor_type": kind}, max_patches=900)
        assert Gemma4Layout.read(settings).num_tokens == num_tokens


@pytest.mark.parametrize("changes", [{"parallel": True}, {"mlp": MLPSpec(48, Activation.GELU, gated=False)}])
def test_bounds_are_for_plain_layers(changes: dict[str, Any], tmp_path: Path) -> None:
    tower = vision_of(read(tmp_path, GEMMA4)).tower
    assert tower.is_bounded
    with pytest.raises(CheckpointError, match="matrices is 'with bounds'"):
        replace(tower, **changes)


def test_the_parts_of_an_encoder_fit_together(tmp_path: Path) -> None:
    vision = vision_of(read(tmp_path, SMOLVLM_256M))
    norm = Norm("norm", NormSpec(NormKind.RMS, 1e-6), 768)
    assert replace(vision, connector=(norm, *vision.connector)).num_placeholders(512, 512) == 64
    for connector, problem in (
        ((Join(16), norm, vision.connector[1]), "image connector is 768; allowed: 12288"),
        ((Join(4), Matrix.of("matrix", 576, 4 * 768, bias=False)), "image connector is 4; allowed: 4² patches"),
        ((Average(16), vision.connector[1]), "image connector is 12288; allowed: 768"),
    ):
        with pytest.raises(CheckpointError, match=problem):
            replace(vision, connector=connector)
    with pytest.raises(CheckpointError, match="patches"):
        replace(vision, patches=replace(vision.patches, size=8))
    one_way = replace(vision.tower, attention=replace(vision.tower.attention, bidirectional=False))
    with pytest.raises(CheckpointError, match="an encoder without a vocabulary"):
        replace(vision, tower=one_way)
