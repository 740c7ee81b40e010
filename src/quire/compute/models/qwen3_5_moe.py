"""Qwen3.5-MoE: Qwen3.5 with experts in each layer, next to an MLP with a weight for every token."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from quire.compute.models import qwen3_next
from quire.compute.models.base import DecoderSpec
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.qwen3_5 import text_spec
from quire.compute.models.qwen3_next import with_experts, with_gated_attention

DEFAULTS: Final = MappingProxyType(
    {**qwen3_next.DEFAULTS, "num_experts": 256, "num_experts_per_tok": 8, "intermediate_size": 512}
)
"""No layer has an MLP of `intermediate_size`, and settings lack it."""


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a model, or of its text model; refuses settings that quire does not interpret."""
    return text_spec(config, DEFAULTS, lambda text: with_experts(with_gated_attention(text, max_length), text))
