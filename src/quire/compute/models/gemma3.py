"""Gemma 3: Gemma 2 with norms on heads, and with a window and other positions in five of six layers.

Layers with a window keep the plain positions of a short context; the others have a larger base and any scaling.
transformers 5 has both in `rope_parameters`. transformers 4 has the larger base in `rope_theta`, its scaling in
`rope_scaling`, and the smaller base in `rope_local_base_freq`.

A soft cap on scores is refused: transformers reads this setting but does not use it.

The larger sizes are published with an encoder of images (vision/gemma3.py). The settings of the text model are then in
`text_config`, and its weights are named `language_model.…`.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from quire.compute.models import gemma2
from quire.compute.models.base import DecoderSpec, LayerSpec
from quire.compute.models.common import head_dim, mixed_windows, with_head_norms
from quire.compute.models.config_file import MAX_LENGTH, ConfigFile
from quire.compute.models.multimodal import with_other_tensors
from quire.compute.models.rope import FULL_BASE, LOCAL_BASE, full_and_sliding_ropes

DEFAULTS: Final = MappingProxyType(
    {
        **gemma2.DEFAULTS,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "max_position_embeddings": 131_072,
        "num_attention_heads": 8,
        "sliding_window_pattern": 6,
        "vocab_size": 262_208,
    }
)
TEXT: Final = "language_model."
IMAGES: Final = ("multi_modal_projector.", "vision_tower.")


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Gemma 3 model; refuses settings that quire does not interpret."""
    if not config.is_set("text_config"):
        return _text_spec(config, max_length)
    spec = _text_spec(config.section("text_config"), max_length)
    if config.flag("tie_word_embeddings", spec.tied_head) is not spec.tied_head:
        raise config.error("tie_word_embeddings", "null, or the value in text_config")
    return with_other_tensors(spec, TEXT.__add__, IMAGES)


def _text_spec(config: ConfigFile, max_length: int | None) -> DecoderSpec:
    config = config.over(DEFAULTS)
    config.require("attn_logit_softcapping", None)
    pattern = config.size("sliding_window_pattern")
    windows = mixed_windows(
        config, config.size("sliding_window", high=MAX_LENGTH), lambda layer: (layer + 1) % pattern != 0
    )
    base = config.number("rope_local_base_freq", LOCAL_BASE)
    size = head_dim(config)
    full, local = full_and_sliding_ropes(config, size, max_length, base=FULL_BASE, sliding_base=base)
    layers = [LayerSpec(window, full if window is None else local) for window in windows]
    return with_head_norms(gemma2.gemma_like(config, max_length, layers))
