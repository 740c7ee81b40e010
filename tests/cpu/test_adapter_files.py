"""Folders of adapters: what is read of them, and what is refused, in one line that names it."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.compute.adapters.folder import read_adapter
from quire.compute.adapters.settings import AdapterSettings
from quire.compute.models.base import DecoderSpec
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.parts import Part, WeightSource
from quire.compute.models.sublayers import Activation
from quire.core.errors import CheckpointError
from support.adapters import PEFT, Tensors, adapter_tensors, write_adapter
from support.spec_models import SPECS

PLAIN = SPECS["plain"]
QUERY = f"{PEFT}model.query.0"


def refusal(folder: Path, tensors: Tensors | None = None, **settings: Any) -> str:
    """Return why an adapter is refused."""
    write_adapter(folder, adapter_tensors(PLAIN) if tensors is None else tensors, settings)
    with pytest.raises(CheckpointError) as caught:
        list(read_adapter(folder, PLAIN, 32).read())
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(folder), "FOLDER")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "IA3"),
        ("bias", "lora_only"),
        ("use_dora", True),
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("alora_invocation_tokens", [1, 2]),
        ("layer_replication", [[0, 4]]),
        ("lora_bias", True),
        ("modules_to_save", ["lm_head"]),
        ("trainable_token_indices", [5]),
        ("megatron_config", {"a": 1}),
        ("init_lora_weights", "pissa_niter_16"),
        ("a_field_of_tomorrow", 3),
        ("r", 0),
        ("r", True),
        ("lora_alpha", "16"),
        ("use_rslora", 1),
        ("rank_pattern", {"(a+)+b": 4}),
        ("rank_pattern", {"a\\": 4}),
        ("rank_pattern", {r"\9": 4}),
        ("rank_pattern", {"q^proj": 4}),
        ("alpha_pattern", {"query": -1}),
    ],
)
def test_a_setting_that_is_not_built_is_refused_by_name(tmp_path: Path, field: str, value: Any) -> None:
    message = refusal(tmp_path, **{field: value})
    assert field in message
    assert "adapter_config.json" in message


def test_settings_without_effect_are_taken(tmp_path: Path) -> None:
    settings = {
        "lora_dropout": 0.1,
        "target_modules": "all-linear",
        "layers_to_transform": [0],
        "init_lora_weights": "gaussian",
        "use_dora": False,
        "modules_to_save": [],
        "megatron_core": "megatron.core",
        "eva_config": {"rho": 2},
        "base_model_name_or_path": "someone/model",
    }
    adapter = read_adapter(write_adapter(tmp_path, adapter_tensors(PLAIN), settings), PLAIN, 32)
    assert (adapter.rank, adapter.base, len(adapter.matrices)) == (4, "someone/model", 14)
    # 16 of rank, as engines compute it: (in + out) of the seven matrices of two layers
    assert adapter.num_bytes() == 2 * 16 * 2 * ((32 + 64) + 2 * (32 + 32) + (64 + 32) + 3 * (32 + 48))


def test_tensors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    good = adapter_tensors(PLAIN)
    wide = np.zeros((4, 99), np.float32)
    a, b = f"{QUERY}.lora_A.weight", f"{QUERY}.lora_B.weight"
    cases: dict[str, tuple[Tensors, str]] = {
        "one": ({name: tensor for name, tensor in good.items() if name != b}, "lora_A alone"),
        "wide": (good | {a: wide}, "[4, 32] for this model"),
        "high": (good | {b: good[b][:, :3].copy()}, "[64, 4] for this model"),
        "twice": (good | {name.replace(".model.model.", ".model."): x for name, x in good.items()}, "each matrix once"),
        "row": (good | {b: np.zeros(64, np.float32)}, "a matrix"),
        "number": (good | {a: np.zeros((), np.float32)}, "a matrix"),
        "embedding": (good | {f"{PEFT}model.embed.lora_embedding_A": wide}, "not of LoRA"),
        "whole": (good | {f"{PEFT}lm_head.weight": wide}, "not of LoRA"),
        "unknown": ({f"{PEFT}model.router.0.lora_{x}.weight": wide for x in "AB"}, "model.router.0"),
        "deep": ({name.replace(".0.", ".7."): tensor for name, tensor in good.items()}, "of the 2 layers"),
        "none": ({}, "no tensors"),
        "nan": (good | {a: np.full_like(good[a], math.nan)}, "NaN or infinity"),
        "infinite": (good | {b: np.full_like(good[b], -math.inf)}, "NaN or infinity"),
    }
    for name, (tensors, expected) in cases.items():
        assert expected in refusal(tmp_path / name, tensors), name
    assert "at most 32, the max_adapter_rank" in refusal(tmp_path / "rank", adapter_tensors(PLAIN, rank=33))
    assert "r" in refusal(tmp_path / "other", r=8)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, adapter_tensors(PLAIN))
    adapter = read_adapter(folder, PLAIN, 32)
    weights = folder / "adapter_model.safetensors"
    whole = weights.read_bytes()
    for cut in (0, 7, 100, len(whole) - 1):
        weights.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError):
            read_adapter(folder, PLAIN, 32)
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="files that have changed"):
        list(adapter.read())
    assert read_adapter(folder, PLAIN, 32).digest != adapter.digest
    weights.rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="a pickle can run any code"):
        read_adapter(folder, PLAIN, 32)
    (folder / "adapter_config.json").write_text("[")
    with pytest.raises(CheckpointError):
        read_adapter(folder, PLAIN, 32)
    with pytest.raises(CheckpointError, match=r"^adapter is '.*; allowed: a folder with adapter_config\.json"):
        read_adapter(tmp_path / "nowhere", PLAIN, 32)


def test_names_by_release_and_a_default_adapter_mean_the_same(tmp_path: Path) -> None:
    good = adapter_tensors(PLAIN)
    expected = read_adapter(write_adapter(tmp_path / "plain", good), PLAIN, 32).read()
    forms = {
        "default": {name.replace(".weight", ".default.weight"): tensor for name, tensor in good.items()},
        "bare": {name.removeprefix(PEFT): tensor for name, tensor in good.items()},
        "nested": {name.replace(".model.model.", ".model.model.language_model."): x for name, x in good.items()},
    }
    matrices = list(expected)
    for name, tensors in forms.items():
        found = list(read_adapter(write_adapter(tmp_path / name, tensors), PLAIN, 32).read())
        assert [(each.layer, each.part, each.scale) for each in found] == [
            (each.layer, each.part, each.scale) for each in matrices
        ]
        assert all(np.array_equal(one.a, other.a) for one, other in zip(found, matrices, strict=True))


def test_fused_matrices_share_a_and_have_their_rows_of_b(tmp_path: Path) -> None:
    spec = SPECS["turns"]
    tensors = adapter_tensors(spec, parts=(Part.QUERY, Part.KEY, Part.VALUE))
    found = list(read_adapter(write_adapter(tmp_path, tensors), spec, 32).read())
    b = tensors[f"{PEFT}model.qkv.0.lora_B.weight"]
    first = {each.part: each for each in found if each.layer == 0}
    assert first.keys() == {Part.QUERY, Part.KEY, Part.VALUE}
    assert all(np.array_equal(each.a, first[Part.KEY].a) for each in first.values())
    assert np.array_equal(first[Part.KEY].b[:, :4], b[[*range(32, 48), *range(96, 112)]])
    assert not first[Part.KEY].b[:, 4:].any()


def test_keys_and_values_of_latents_that_a_file_splits_have_their_rows_of_one_adapter(tmp_path: Path) -> None:
    spec, attention = SPECS["latent"], "model.layers.{layer}.self_attn."
    fused = {
        Part.KEY_UP: WeightSource(f"{attention}kv_b_proj", run=12, period=28),
        Part.VALUE_UP: WeightSource(f"{attention}kv_b_proj", first_row=12, run=16, period=28),
    }
    split = {Part.KEY_UP: WeightSource(f"{attention}k_b_proj"), Part.VALUE_UP: WeightSource(f"{attention}v_b_proj")}
    one, other = (replace(spec, sources={**spec.sources, **sources}) for sources in (fused, split))
    folder = write_adapter(tmp_path, adapter_tensors(one, parts=(Part.KEY_UP, Part.VALUE_UP)))
    for mine, theirs in zip(read_adapter(folder, one, 32).read(), read_adapter(folder, other, 32).read(), strict=True):
        assert (mine.layer, mine.part) == (theirs.layer, theirs.part)
        assert np.array_equal(mine.a, theirs.a) and np.array_equal(mine.b, theirs.b)


def stacked(spec: DecoderSpec, experts: Tensors, rank: int) -> Tensors:
    """Return the adapter of experts as that of two parameters of a module, as PEFT wraps one in the other."""
    assert spec.experts is not None
    tensors, count, size = Tensors(), spec.experts.num_experts, spec.experts.intermediate_size
    takes_turns = spec.mlp.activation is Activation.CLAMPED_SWIGLU
    for layer in (index for index, each in enumerate(spec.layers) if each.sparse):

        def pair(expert: int, name: str, layer: int = layer) -> tuple[Any, Any]:
            stem = f"{PEFT}model.layers.{layer}.mlp.experts.{expert}.{name}"
            return experts[f"{stem}.lora_A.weight"], experts[f"{stem}.lora_B.weight"]

        inputs, outputs = np.zeros((count, 2 * rank, 32)), np.zeros((2 * size, 2 * rank, count))
        for expert in range(count):
            (gate_a, gate_b), (up_a, up_b) = pair(expert, "gate_proj"), pair(expert, "up_proj")
            inputs[expert] = np.concatenate([gate_a, up_a])
            outputs[slice(0, None, 2) if takes_turns else slice(size), :rank, expert] = gate_b
            outputs[slice(1, None, 2) if takes_turns else slice(size, None), rank:, expert] = up_b
        downs = [pair(expert, "down_proj") for expert in range(count)]
        found = {
            ".base_layer.lora_A": inputs.reshape(-1, 32),
            ".base_layer.lora_B": outputs.reshape(2 * size, -1),
            ".lora_A": np.concatenate([a for a, _ in downs]),
            ".lora_B": np.stack([b for _, b in downs], axis=2).reshape(32, -1),
        }
        stem = f"{PEFT}model.layers.{layer}.mlp.experts"
        tensors |= {f"{stem}{name}.weight": np.ascontiguousarray(each, np.float32) for name, each in found.items()}
    return tensors


@pytest.mark.parametrize("name", ["experts", "sinks"])
def test_the_experts_of_a_parameter_are_those_of_single_matrices(name: str, tmp_path: Path) -> None:
    stems = {Part.EXPERT_GATE: "gate_proj", Part.EXPERT_UP: "up_proj", Part.EXPERT_DOWN: "down_proj"}
    sources = {part: WeightSource(f"model.layers.{{layer}}.mlp.experts.{{expert}}.{n}") for part, n in stems.items()}
    spec = replace(SPECS[name], sources={**SPECS[name].sources, **sources})
    singles = adapter_tensors(spec, parts=stems)
    folder = write_adapter(tmp_path / "singles", singles)
    changes = {}
    for each in read_adapter(folder, spec, 32).read():
        changes[each.layer, each.part, each.expert] = each.b.astype(np.float64) @ each.a
    settings = {"target_parameters": ["gate_up_proj", "down_proj"], "rank_pattern": {r".*\.gate_up_proj": 8}}
    tensors = stacked(spec, singles, 4)
    together = write_adapter(
        tmp_path / "stack", tensors, settings | {"r": 4, "lora_alpha": 4, "alpha_pattern": {"gate_up_proj": 8}}
    )
    adapter = read_adapter(together, spec, 32)
    found = list(adapter.read())
    assert {(each.layer, each.part, each.expert) for each in found} == changes.keys() and len(found) == len(changes)
    for each in found:
        change = each.scale * (each.b.astype(np.float64) @ each.a)
        assert np.allclose(change, changes[each.layer, each.part, each.expert], rtol=1e-12, atol=1e-12)
    clash = tensors | singles
    with pytest.raises(CheckpointError, match="each matrix once"):
        read_adapter(write_adapter(tmp_path / "clash", clash, settings | {"r": 4}), spec, 32)
    wrong = tensors | {"base_model.model.model.layers.0.mlp.experts.lora_A.weight": np.zeros((4, 16), np.float32)}
    with pytest.raises(CheckpointError, match="for this model"):
        read_adapter(write_adapter(tmp_path / "wrong", wrong, settings | {"r": 4}), spec, 32)


def test_scales_are_those_of_peft() -> None:
    settings = AdapterSettings.of(
        ConfigFile(
            "here",
            {
                **{"peft_type": "LORA", "r": 16, "lora_alpha": 8, "use_rslora": True},
                "rank_pattern": {"^model.layers.1.q_proj": 4, "k_proj": 64},
                "alpha_pattern": {"layers.1.q_proj": 2},
            },
        )
    )
    assert [settings.rank_of(f"model.layers.{n}.q_proj", 7) for n in (0, 1, 11)] == [16, 4, 16]
    assert settings.scale_of("model.layers.0.q_proj", 16) == 8 / 4
    assert settings.scale_of("model.layers.1.q_proj", 4) == 2 / 2
    assert settings.scale_of("model.layers.9.k_proj", 64) == 8 / 8


@pytest.mark.parametrize(
    "patterns",
    [
        {"proj": 2, "q_proj": 3, "1.q_proj": 4},
        {r"layers\.1\.q_proj$": 4, "q_proj": 3},
        {"q_proj": 3, r"layers\.1\.q_proj$": 4},
        {"^layers.1.q_proj": 4, "^model.layers.1.q_proj": 5},
        {r".*\.q_proj": 4, "q_proj$": 5},
    ],
)
def test_patterns_match_as_expressions_do(patterns: dict[str, int]) -> None:
    """The comparison below is the one of PEFT."""
    fields = {"peft_type": "LORA", "r": 16, "lora_alpha": 8, "rank_pattern": patterns}
    settings = AdapterSettings.of(ConfigFile("here", fields))
    for module in ("model.layers.1.q_proj", "layers.1.q_proj", "model.layers.11.q_proj", "model.k_proj"):
        matching = [rank for pattern, rank in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module)]
        assert settings.rank_of(module, 7) == (matching[0] if matching else 16), module


def test_a_table_of_many_patterns_is_asked_quickly() -> None:
    """Compiled as expressions, they would take seconds for each module."""
    patterns = {f"no_such_module_{number}": 4 for number in range(20_000)} | {"q_proj": 8}
    fields = {"peft_type": "LORA", "r": 16, "lora_alpha": 8, "rank_pattern": patterns}
    settings = AdapterSettings.of(ConfigFile("here", fields))
    assert [settings.rank_of(f"model.layers.{layer}.q_proj", 7) for layer in range(1000)] == [8] * 1000


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=4,
)
PLAIN_FIELDS = {"peft_type": "LORA", "r": 4, "lora_alpha": 4}


@given(st.dictionaries(st.sampled_from([*PLAIN_FIELDS, "bias", "rank_pattern", "alpha_pattern", "x"]), VALUES))
def test_any_settings_are_taken_or_refused_in_a_line(fields: dict[str, object]) -> None:
    with suppress(CheckpointError):
        settings = AdapterSettings.of(ConfigFile("here", PLAIN_FIELDS | fields))
        rank = settings.rank_of("model.layers.0.q_proj", 1)
        assert rank >= 1
        assert settings.scale_of("model.layers.0.q_proj", rank) > 0
