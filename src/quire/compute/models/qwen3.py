"""Qwen3: Llama with an RMS norm on every query and key head, and Qwen2's windows in some layers.

`head_dim` is a separate setting: Qwen3-0.6B has hidden size 1024, 16 heads and head_dim 128, so hidden
size / heads would be wrong.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from quire.compute.models import qwen2
from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import llama_like, rotary_layers, with_head_norms
from quire.compute.models.config_file import ConfigFile

DEFAULTS: Final = MappingProxyType({**qwen2.DEFAULTS, "head_dim": 128})


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Qwen3 model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    return with_head_norms(llama_like(config, max_length, rotary_layers(config, max_length, qwen2.windows(config))))
