"""Model settings: transformers 4 and 5 say the same model, and what is not understood is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from quire.compute.models import ModelDescription, read_model
from quire.compute.models.base import RopeSpec
from quire.core.errors import CheckpointError
from quire.core.kv_spec import KVGroup
from support.tiny_checkpoint import tiny_qwen3_config

# config.json of Qwen3-0.6B, as it was published with transformers 4.
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 24}


def read(folder: Path, config: Mapping[str, object], generation: object = None) -> ModelDescription:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_model(folder)


def tiny(**changes: object) -> dict[str, object]:
    return tiny_qwen3_config() | changes


def test_qwen3_06b_has_the_published_shape(tmp_path: Path) -> None:
    spec = read(tmp_path, QWEN3_06B).spec
    assert (spec.attention.head_dim, spec.hidden_size // spec.attention.num_heads) == (128, 64)
    assert spec.layers[0].rope == RopeSpec(1_000_000.0, 128)
    assert spec.attention.scale == 128**-0.5
    cache = spec.kv_cache_spec(16, "bfloat16")
    assert cache.groups == (KVGroup(tuple(range(28))),)
    assert cache.bytes_per_token == 28 * 8 * 128 * 2 * 2


def test_transformers_4_and_5_say_the_same_model(tmp_path: Path) -> None:
    newer: dict[str, object] = {
        name: value for name, value in QWEN3_06B.items() if name not in ("rope_theta", "rope_scaling", "torch_dtype")
    }
    newer |= {
        "dtype": "bfloat16",
        "layer_types": ["full_attention"] * 28,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    }
    assert read(tmp_path, newer) == read(tmp_path, QWEN3_06B)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, [None, None, None]),
        ({**WINDOWS, "max_window_layers": 1}, [None, 24, 24]),
        ({**WINDOWS, "max_window_layers": 0}, [24, 24, 24]),
        ({**WINDOWS, "max_window_layers": 28}, [None, None, None]),
        ({"sliding_window": 24, "max_window_layers": 0}, [None, None, None]),
        ({**WINDOWS, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}, [24, None, None]),
    ],
)
def test_windows_are_those_of_the_layers(changes: dict[str, object], windows: list[int | None], tmp_path: Path) -> None:
    spec = read(tmp_path, tiny(**changes)).spec
    assert [layer.window for layer in spec.layers] == windows
    groups = spec.kv_cache_spec(16).groups
    assert {layer: group.window for group in groups for layer in group.layers} == dict(enumerate(windows))


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (7, None, (7,)),
        ([7, 9], None, (7, 9)),
        (None, None, ()),
        (7, {"eos_token_id": [9, 7]}, (9, 7)),
        (7, {"eos_token_id": 9}, (9,)),
        (7, {"top_p": 0.9}, (7,)),
    ],
)
def test_the_tokens_that_end_a_text(
    config: object, generation: object, expected: tuple[int, ...], tmp_path: Path
) -> None:
    assert read(tmp_path, tiny(eos_token_id=config), generation).eos_token_ids == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT7"]}, "architectures is ['GPT7']; allowed: one of Qwen3ForCausalLM first"),
        ({"architectures": []}, "architectures is []; allowed: one of Qwen3ForCausalLM first"),
        ({"architectures": None}, "architectures is None; allowed: a list of strings"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; allowed: 'silu' or null"),
        ({"vocab_size": 0}, "vocab_size is 0; allowed: an integer from 1 to 2147483647"),
        ({"vocab_size": None}, "vocab_size is None; allowed: an integer"),
        ({"hidden_size": "64"}, "hidden_size is '64'; allowed: an integer"),
        ({"hidden_size": True}, "hidden_size is True; allowed: an integer"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; allowed: at most 10000"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4; allowed: a multiple of the 3 kv heads"),
        ({"head_dim": 31}, "rotary dimensions is 31; allowed: an even number from 2 to 31"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'; allowed: a number"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0; allowed: a number above 0"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; allowed: true or false"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters: rope_type is 'yarn'; allowed: 'default' or"),
        ({"rope_parameters": {"rope_theta": 1e400}}, "rope_parameters: rope_theta is inf; allowed: a number above 0"),
        ({"rope_parameters": 3}, "rope_parameters is 3; allowed: an object"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling: type is 'linear'; allowed: 'default'"),
        ({"layer_types": ["full_attention"]}, "allowed: 3 of full_attention, sliding_attention"),
        ({"layer_types": ["linear_attention"] * 3}, "allowed: 3 of full_attention, sliding_attention"),
        ({"layer_types": ["sliding_attention"] * 3}, "sliding_window is None; allowed: a window"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window is 0; allowed: an integer from 1"),
        ({"eos_token_id": 128}, "eos_token_id is 128; allowed: one token id or several, from 0 to 127"),
        ({"eos_token_id": [1, -1]}, "eos_token_id is [1, -1]; allowed: one token id"),
    ],
)
def test_a_setting_that_is_not_understood_is_refused(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as refused:
        read(tmp_path, tiny(**changes))
    assert message in str(refused.value)


def test_a_folder_without_settings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is 'No such file or directory'"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json is 'a JSON list'; allowed: one JSON object"):
        read_model(tmp_path)
