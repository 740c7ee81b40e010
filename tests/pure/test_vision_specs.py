"""Settings of image encoders: published ones are read, and those that quire does not interpret are refused."""

from __future__ import annotations

import copy
import math
import random
from pathlib import Path
from typing import Any

import pytest

from quire.compute.models import TEXT_ONLY, ModelDescription, read_model
from quire.compute.models.parts import NormKind, NormSpec, Part
from quire.compute.models.source import ModelFolder
from quire.compute.models.sublayers import Activation
from quire.compute.models.vision.spec import Average, Join, Matrix, Norm, VisionSpec
from quire.compute.vision.patches import normalised_levels
from quire.compute.vision.weights import own_tensors, vision_bytes
from quire.compute.weights.decoder_weights import expected_tensors
from quire.core.errors import CheckpointError
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
PUBLISHED: dict[str, tuple[dict[str, Any], int, int, int]] = {
    "SmolVLM-256M-Instruct": (SMOLVLM_256M, 512, 64, 256_484_928),
    "llava-1.5-7b-hf": (LLAVA_7B, 336, 576, 7_063_427_072 - 12_598_272),  # without the last layer and norm
}
"""Settings, the size of an image, its rows, and the number of parameters."""


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
    settings, size, num_rows, num_parameters = PUBLISHED[name]
    model = read(tmp_path, settings)
    vision = vision_of(model)
    assert model.notices == ()
    assert vision.num_placeholders(size, size) == num_rows
    shapes = {**expected_tensors(model.spec), **expected_tensors(vision.tower), **own_tensors(vision)}
    assert sum(map(math.prod, shapes.values())) == num_parameters
    assert all(not key.startswith(vision.prefixes) for key in expected_tensors(model.spec))
    assert set(vision.prefixes) == set(model.spec.ignored_prefixes) or vision.prefixes[0].startswith("vision_tower.")
    of_tower = {key: shape for key, shape in shapes.items() if key.startswith(vision.prefixes)}
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


def test_a_folder_without_settings_for_images_is_served_as_text(tmp_path: Path) -> None:
    read(tmp_path, SMOLVLM_256M)
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "processor_config.json").write_text('{"image_seq_len": 64}')
    model = read_model(ModelFolder(tmp_path))
    assert (model.vision, model.notices) == (None, (TEXT_ONLY,))


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another text model": (SMOLVLM_256M, {"text_config__model_type": "mamba"}, "model_type is 'mamba'"),
    "a placeholder outside of the vocabulary": (SMOLVLM_256M, {"image_token_id": 49280}, "image_token_id is 49280"),
    "an odd grid": (SMOLVLM_256M, {"vision_config__image_size": 528}, "image_size is 528"),
    "half a patch": (SMOLVLM_256M, {"vision_config__image_size": 520}, "image_size is 520"),
    "too many patches": (SMOLVLM_256M, {"vision_config__image_size": 4096}, "image_size is 4096"),
    "sizes of two kinds": (SMOLVLM_256M, {"vision_config__image_size": [512, 512]}, "image_size"),
    "four colours": (SMOLVLM_256M, {"vision_config__num_channels": 4}, "num_channels is 4"),
    "heads that do not fit": (SMOLVLM_256M, {"vision_config__num_attention_heads": 7}, "hidden_size is 768"),
    "an unknown activation": (SMOLVLM_256M, {"vision_config__hidden_act": ["gelu"]}, "hidden_act"),
    "another encoder": (LLAVA_7B, {"vision_config__model_type": "dinov2"}, "model_type is 'dinov2'"),
    "several layers": (LLAVA_7B, {"vision_feature_layer": [-2, -5]}, "vision_feature_layer"),
    "no layer": (LLAVA_7B, {"vision_feature_layer": 0}, "from 1 to 24"),
    "the first row": (LLAVA_7B, {"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy is 'full'"),
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


@pytest.mark.parametrize("pixels", [{"image_mean": [0.5]}, {"image_std": [0.5, 0, 0.5]}, {"rescale_factor": -1}])
def test_other_settings_of_pixels_are_refused(pixels: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json.*"):
        read(tmp_path, SMOLVLM_256M, pixels)


@pytest.mark.parametrize("name", SETTINGS)
def test_broken_settings_are_read_or_refused(name: str, tmp_path: Path) -> None:
    outcomes = set()
    for seed in range(200):
        draw = random.Random(seed)
        settings, pixels = copy.deepcopy(SETTINGS[name]), copy.deepcopy(PIXELS)
        if draw.random() < 0.8:
            settings = mutated_json(draw, settings)
        else:
            pixels = mutated_json(draw, pixels)
        try:
            outcomes.add(type(read(tmp_path, settings, pixels).vision))
        except CheckpointError as error:
            outcomes.add(CheckpointError)
            assert str(error).isprintable(), seed
    assert {VisionSpec, CheckpointError} <= outcomes


def test_the_parts_of_an_encoder_fit_together(tmp_path: Path) -> None:
    from dataclasses import replace

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
