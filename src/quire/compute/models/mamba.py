"""State-space layers (Mamba-2), as several families have them next to attention: their settings and tensors.

One matrix computes, one after another, gates, values, keys, queries and steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import MAX_HEAD_DIM, MAX_HEADS, with_stems
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.parts import NormSpec, Part, WeightSource
from quire.compute.models.recurrent import MambaSpec

MAX_FILTER: Final = 64
NO_LIMITS: Final = (None, [0.0, inf], [0.0, {"__float__": "Infinity"}])
DEFAULTS: Final = MappingProxyType(
    {
        **{"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_head": "auto"},
        **{"mamba_d_conv": 4, "mamba_expand": 2},
    }
)
IN_ORDER: Final = (Part.MAMBA_GATE, Part.MAMBA_VALUE, Part.MAMBA_KEY, Part.MAMBA_QUERY, Part.MAMBA_STEP)
STEMS: Final = MappingProxyType(
    {
        Part.MAMBA_FILTER: "conv1d",
        Part.MAMBA_LOG_DECAY: "A_log",
        Part.MAMBA_STEP_OFFSET: "dt_bias",
        Part.MAMBA_SKIP: "D",
        Part.MAMBA_NORM: "norm",
        Part.MAMBA_OUTPUT: "out_proj",
    }
)


def with_mamba(spec: DecoderSpec, rule: MambaSpec, recurrent: Sequence[bool], module: str) -> DecoderSpec:
    """Return the spec with some layers `recurrent`; `module`: the template of the name before those of its tensors."""
    layers = tuple(
        replace(layer, rope=None, recurrent=True) if each else layer
        for layer, each in zip(spec.layers, recurrent, strict=True)
    )
    spec = with_stems(spec, {part: module + name for part, name in STEMS.items()})
    rows, first, parts = {}, 0, rule.parts(spec.hidden_size)
    for part in IN_ORDER:
        rows[part] = WeightSource(module + "in_proj", first_row=first)
        first += parts[part].weight[0]
    return replace(spec, mamba=rule, layers=layers, sources=MappingProxyType({**spec.sources, **rows}))


def require_no_limits(config: ConfigFile) -> None:
    """Raise if steps have limits."""
    if config.fields.get("time_step_limit") not in NO_LIMITS:
        raise config.error("time_step_limit", "null, or 0 to infinity")


def mamba_rule(config: ConfigFile, norm: NormSpec | None) -> MambaSpec:
    """Return the settings of state-space layers; refuses those that quire does not interpret. `norm`: after gates."""
    config = config.over(DEFAULTS)
    config.require("hidden_act", "silu", None)  # also the activation of the filter
    config.refuse("mamba_proj_bias")
    require_no_limits(config)
    heads, width = config.size("mamba_n_heads", high=MAX_HEADS), config.size("hidden_size")
    width = config.size("mamba_d_ssm", width * config.size("mamba_expand", high=MAX_HEAD_DIM))
    if width % heads or width // heads > MAX_HEAD_DIM:
        allowed = (
            f"a divisor of {width}, mamba_expand times hidden_size or mamba_d_ssm, at most {MAX_HEAD_DIM} for each"
        )
        raise config.error("mamba_n_heads", allowed)
    if config.fields["mamba_d_head"] not in ("auto", None, width // heads):
        raise config.error("mamba_d_head", f"auto, or {width // heads}, which fills {width}")
    return MambaSpec(
        num_heads=heads,
        num_groups=config.size("mamba_n_groups", high=MAX_HEADS),
        key_dim=config.size("mamba_d_state", high=MAX_HEAD_DIM),
        value_dim=width // heads,
        filter_width=config.size("mamba_d_conv", high=MAX_FILTER),
        norm=norm,
        filter_bias=config.flag("mamba_conv_bias", True),
    )
