"""Rotary positions: the frequencies of transformers, from its old and its new settings, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.compute.models.config_file import ConfigFile
from quire.compute.models.rope import SCALINGS, context_length, full_and_sliding_ropes, rope_notices, rope_spec
from quire.core.errors import CheckpointError

DATA = Path(__file__).parent.parent / "golden" / "data" / "rope"
CASES: dict[str, Any] = json.loads((DATA / "cases.json").read_text())
SIZES: dict[str, object] = CASES["sizes"]


def config_of(rope: dict[str, object], **fields: object) -> ConfigFile:
    """Return a config as transformers 5 writes it."""
    return ConfigFile("config.json", {**SIZES, "rope_parameters": rope, **fields})


def old_config_of(rope: dict[str, object]) -> ConfigFile:
    """Return a config as transformers 4 wrote it."""
    scaling = {"type" if name == "rope_type" else name: value for name, value in rope.items() if name != "rope_theta"}
    return ConfigFile("config.json", {**SIZES, "rope_theta": rope["rope_theta"], "rope_scaling": scaling})


@pytest.mark.parametrize("make", [config_of, old_config_of])
@pytest.mark.parametrize("name", CASES["forms"])
def test_frequencies_are_those_of_transformers(name: str, make: Any) -> None:
    form = CASES["forms"][name]
    rope = rope_spec(make(form["rope"]), 32, form["length"])
    assert rope.inverse_frequencies == pytest.approx(form["frequencies"], rel=2e-7)
    assert rope.scale == pytest.approx(form["scale"], rel=1e-7)
    assert rope.rotary_dim == 32


def test_every_scaling_has_a_golden() -> None:
    own = {"su", "divided", "alpha"}  # another name of longrope, what only GGUF files say, and Hunyuan's
    assert {form["rope"]["rope_type"] for form in CASES["forms"].values()} | own == SCALINGS.keys()


def test_divisors_divide_the_plain_frequencies() -> None:
    plain = rope_spec(config_of({"rope_theta": 100.0}), 8)
    divided = rope_spec(config_of({"rope_theta": 100.0, "rope_type": "divided", "divisors": [1, 2.5, 8, 8]}), 8)
    expected = [np.float32(f) / np.float32(d) for f, d in zip(plain.inverse_frequencies, (1, 2.5, 8, 8), strict=True)]
    assert divided.inverse_frequencies == tuple(map(float, expected))
    with pytest.raises(CheckpointError, match=r"divisors is \[2\.0\]; allowed: 4 numbers"):
        rope_spec(config_of({"rope_theta": 100.0, "rope_type": "divided", "divisors": [2.0]}), 8)


def test_part_of_a_head_turns() -> None:
    rope = rope_spec(config_of({"rope_theta": 100.0, "partial_rotary_factor": 0.25}), 32, partial=True)
    assert (rope.rotary_dim, rope.inverse_frequencies) == (8, pytest.approx([1, 100**-0.25, 0.1, 100**-0.75]))
    old = ConfigFile("config.json", {**SIZES, "rope_theta": 100.0, "partial_rotary_factor": 0.25})
    assert rope_spec(old, 32, partial=True) == rope


@pytest.mark.parametrize("place", ["config", "rope_parameters"])
def test_a_family_that_turns_whole_heads_refuses_to_turn_a_part(place: str) -> None:
    """transformers ignores the setting there, other engines do not: no result would be right."""
    part = {"partial_rotary_factor": 0.5}
    config = ConfigFile("config.json", {**SIZES, **part}) if place == "config" else config_of(dict(part))
    with pytest.raises(CheckpointError, match=r"partial_rotary_factor is 0\.5; allowed: 1, because"):
        rope_spec(config, 32)
    whole = {"partial_rotary_factor": 1.0}
    assert rope_spec(config_of(dict(whole)), 32) == rope_spec(config_of({}), 32)


def test_layers_of_each_type_have_their_own() -> None:
    near, far = {"rope_theta": 100.0}, {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0}
    config = config_of({"sliding_attention": near, "full_attention": far})
    assert rope_spec(config, 32, layer_type="sliding_attention") == rope_spec(config_of(dict(near)), 32)
    assert rope_spec(config, 32, layer_type="full_attention") == rope_spec(config_of(dict(far)), 32)
    with pytest.raises(CheckpointError, match="one set of settings for all layers"):
        rope_spec(config, 32)


LONG = CASES["forms"]["longrope-long"]["rope"]


@pytest.mark.parametrize(
    ("rope", "max_length", "length", "notice"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, None, 1024, None),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 4096, 512, None),
        ({"rope_type": "linear", "factor": 4.0}, 4096, 512, None),
        ({"rope_type": "dynamic", "factor": 4.0}, None, 512, "not needed at 512 tokens"),
        ({"rope_type": "dynamic", "factor": 4.0}, 100, 512, "not needed at 100 tokens"),
        ({"rope_type": "dynamic", "factor": 4.0}, 1000, 1000, "stretched for 1000 tokens"),
        ({"rope_type": "dynamic", "factor": 4.0}, 9999, 2048, "stretched for 2048 tokens"),
        ({"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0}, 9999, 512, None),
        (LONG, None, 512, "by its long factors for 512 tokens"),
        (LONG, 128, 512, "by its short factors for 128 tokens"),
        (LONG, 129, 512, "by its long factors for 129 tokens"),
    ],
)
def test_scalings_of_the_current_length_are_frozen_and_say_so(
    rope: dict[str, object], max_length: int | None, length: int, notice: str | None
) -> None:
    config = config_of(rope)
    assert context_length(config, max_length) == length
    notices = rope_notices(config, max_length)
    assert len(notices) == (notice is not None)
    assert all(said.endswith(f"frozen at load, {notice}") for said in notices)


def test_the_first_name_of_longrope_is_understood() -> None:
    assert rope_spec(config_of({**LONG, "rope_type": "su"}), 32) == rope_spec(config_of(LONG), 32)
    assert "by its long factors" in rope_notices(config_of({**LONG, "rope_type": "su"}))[0]


def test_longrope_for_the_original_length_has_no_scale() -> None:
    """MiniCPM3 has the factors of the same length twice, and says no factor between lengths."""
    fields = {name: value for name, value in LONG.items() if name not in ("factor", "attention_factor")}
    rope = rope_spec(config_of({**fields, "original_max_position_embeddings": 512}), 32)
    assert rope.scale == 1.0
    assert rope.inverse_frequencies == rope_spec(config_of(LONG), 32, 128).inverse_frequencies


def test_layers_with_a_window_have_their_own_base_if_their_section_has_none() -> None:
    kinds = {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {"rope_type": "default"}}
    config = config_of(kinds, rope_theta=5000.0)
    full, near = full_and_sliding_ropes(config, 32, None, base=1e6, sliding_base=100.0)
    assert full == rope_spec(config_of({"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0}), 32)
    assert near == rope_spec(config_of({"rope_theta": 100.0}), 32)


def test_alpha_stretches_the_base_whatever_the_length() -> None:
    config = config_of({"rope_type": "alpha", "alpha": 1000.0, "factor": 1.0, "rope_theta": 1e4})
    stretched = rope_spec(config_of({"rope_theta": 1e4 * 1000 ** (32 / 30)}), 32)
    assert [rope_spec(config, 32, length) for length in (None, 100, 9999)] == [stretched] * 3


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "mrope"}, "rope_parameters: rope_type is 'mrope'; allowed: one of default, linear, "),
        ({"rope_type": ["yarn"]}, "rope_type is ['yarn']; allowed: one of"),
        ({"type": "mrope"}, "rope_parameters: type is 'mrope'; allowed: one of default"),
        ({"rope_type": "linear"}, "factor is None; allowed: a number"),
        ({"rope_type": "dynamic", "factor": 1, "alpha": 9}, "alpha is 9; allowed: null, because engines disagree"),
        ({"rope_type": "linear", "factor": 0}, "factor is 0; allowed: a number above 0"),
        ({"rope_type": "yarn"}, "factor is None; allowed: a number"),
        ({"rope_type": "yarn", "factor": 2, "rope_theta": 1}, "rope_theta is 1; allowed: a number above 1"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4}, "high_freq_factor is 4"),
        ({**LONG, "long_factor": [1.0] * 15}, "; allowed: 16 numbers"),
        ({**LONG, "long_factor": "1.0"}, "long_factor is '1.0'; allowed: a list of numbers above 0"),
        ({**LONG, "long_factor": [0.0] * 16}, "allowed: a list of numbers above 0"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5; allowed: a number above 0, at most 1"),
        ({"partial_rotary_factor": 0.1}, "rotary dimensions is 3; allowed: an even number from 2 to 32"),
        ({"rope_type": "dynamic", "factor": 2, "partial_rotary_factor": 0.0625}, "another type for 2 rotary"),
        ({"rope_type": "alpha", "alpha": 2, "partial_rotary_factor": 0.0625}, "another type for 2 rotary"),
        ({"rope_type": "alpha", "alpha": 0}, "alpha is 0; allowed: a number above 0"),
        ({"rope_type": "linear", "rope_theta": 1e-30, "factor": 1e-30}, "finite frequencies"),
    ],
)
def test_settings_that_make_no_sense_are_refused(rope: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        rope_spec(config_of(rope), 32, partial=True)
    assert message in str(refused.value)


@given(
    base=st.floats(2, 1e8),
    pairs=st.integers(1, 64),
    kind=st.sampled_from(["default", "linear", "yarn", "llama3", "dynamic"]),
    factor=st.floats(1, 64),
)
def test_frequencies_are_float32_and_none_turns_faster_than_unscaled(
    base: float, pairs: int, kind: str, factor: float
) -> None:
    rope = {"rope_type": kind, "factor": factor, "rope_theta": base, "original_max_position_embeddings": 128}
    if kind == "dynamic" and pairs == 1:
        return
    head_dim = 2 * pairs
    scaled = rope_spec(config_of({**rope, "low_freq_factor": 1.0, "high_freq_factor": 4.0}), head_dim)
    plain = rope_spec(config_of({"rope_theta": base}), head_dim)
    assert len(scaled.inverse_frequencies) == pairs
    for ours, unscaled in zip(scaled.inverse_frequencies, plain.inverse_frequencies, strict=True):
        assert 0 < ours <= unscaled * (1 + 1e-6)
        assert math.isfinite(ours)
