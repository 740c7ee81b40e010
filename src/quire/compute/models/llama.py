"""Llama 2 and 3: RMS norms before each sublayer, rotary positions, a gated MLP, no window.

Llama 2 is Llama 3 with a key-value head for each query head and without scaled positions. `head_dim` is a
separate setting in newer configs (Llama 3.2), else hidden size / heads. A `pretraining_tp` other than 1 splits
matrix products in another order than quire, and no published model needs it.
"""

from __future__ import annotations

from dataclasses import replace

from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import llama_like, rotary_layers
from quire.compute.models.config_file import ConfigFile


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Llama model; refuses settings that quire does not interpret."""
    if config.size("pretraining_tp", 1) != 1:
        raise config.error("pretraining_tp", "1")
    spec = llama_like(config, max_length, rotary_layers(config, max_length))
    return replace(spec, mlp=replace(spec.mlp, bias=config.flag("mlp_bias", False)))
