"""Gemma 3n: four residual streams (AltUp), small matrices next to attention (LAuReL), and inputs for each layer.

Layers change the first stream, and the others follow it (`StreamsSpec`). The last `num_kv_shared_layers` layers attend
to the keys and values of the last layer of their kind before them, and each layer has inputs of its own for each token,
as in the small sizes of Gemma 4. In the first layers, the gates of the MLP are 0 unless they are far above their mean
(`activation_sparsity_pattern`: the share of gates that are 0 if they are distributed normally). The sizes of MLPs may
differ between layers.

The models are published with encoders of images and sound, which no engine runs: only the text model is served.
`altup_coef_clip` concerns training only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist
from types import MappingProxyType
from typing import Final

import numpy as np

from quire.compute.models.base import DecoderSpec, LayerSpec
from quire.compute.models.common import (
    LAYER,
    PREFIX,
    head_dim,
    llama_like,
    mixed_windows,
    num_layers,
    with_head_norms,
    with_stems,
)
from quire.compute.models.config_file import MAX_LENGTH, ConfigFile
from quire.compute.models.gemma2 import STEMS as NORMS
from quire.compute.models.gemma4 import OTHERS, TEXT, gemma4_form, key_owners, unused_keys, with_layer_inputs
from quire.compute.models.multimodal import TIED, below, text_config, with_other_tensors
from quire.compute.models.parts import STREAM_INS, STREAM_OUTS, Part
from quire.compute.models.rope import FULL_BASE, LOCAL_BASE, full_and_sliding_ropes
from quire.compute.models.sublayers import NUM_STREAMS, StreamsSpec

DEFAULTS: Final = MappingProxyType(
    {
        **{"vocab_size": 262_400, "hidden_size": 2048, "intermediate_size": 16_384, "num_hidden_layers": 35},
        **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "tie_word_embeddings": True},
        **{"max_position_embeddings": 32_768, "sliding_window": 512, "final_logit_softcapping": 30.0},
        **{"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144, "num_kv_shared_layers": 15},
        **{"altup_num_inputs": NUM_STREAMS, "altup_active_idx": 0, "laurel_rank": 64},
    }
)
STEMS: Final = MappingProxyType(
    {
        **NORMS,
        **{part: f"{PREFIX}altup_projections.{number}" for number, part in enumerate(STREAM_INS)},
        **{part: f"{PREFIX}altup_unembed_projections.{number}" for number, part in enumerate(STREAM_OUTS)},
        Part.STREAM_NORM: LAYER + "altup.router_norm",
        Part.STREAM_ROUTER: LAYER + "altup.modality_router",
        Part.STREAM_PREDICT: LAYER + "altup.prediction_coefs",
        Part.STREAM_CORRECT: LAYER + "altup.correction_coefs",
        Part.STREAM_SCALE: LAYER + "altup.correct_output_scale",
        Part.LAUREL_IN: LAYER + "laurel.linear_left",
        Part.LAUREL_OUT: LAYER + "laurel.linear_right",
        Part.LAUREL_NORM: LAYER + "laurel.post_laurel_norm",
    }
)
SHARES: Final = "activation_sparsity_pattern"
USUAL_SHARE: Final = 0.95
NUM_SPARSE: Final = 10
"""The layers with the usual share if no setting has it, in models with more layers than that."""


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Gemma 3n model, or of its text model; refuses settings that quire does not interpret."""
    if not config.is_set("text_config"):
        return _text_spec(config.over(DEFAULTS), max_length)
    text = text_config(config.over({TIED: True}))  # files leave it out, as it is the default
    return with_other_tensors(_text_spec(text.over(DEFAULTS), max_length), below(TEXT), OTHERS)


def _text_spec(config: ConfigFile, max_length: int | None) -> DecoderSpec:
    config.refuse("use_bidirectional_attention")
    for field, value in (("altup_num_inputs", NUM_STREAMS), ("altup_active_idx", 0)):
        if config.size(field, low=0) != value:
            raise config.error(field, f"{value}, as in the published models")
    widths = _widths(config, num_layers(config))
    config = ConfigFile(config.where, {**config.fields, "intermediate_size": widths[0]})
    layers = _layers(config, max_length, widths)
    spec = gemma4_form(config, with_stems(with_head_norms(llama_like(config, max_length, layers)), STEMS))
    spec = with_layer_inputs(config, spec, config.size("vocab_size_per_layer_input"))
    streams = StreamsSpec(scales=config.flag("altup_correct_scale", True))
    return replace(
        spec,
        streams=streams,
        laurel_rank=config.size("laurel_rank"),
        ignored_tensors=spec.ignored_tensors | unused_keys(layers) | _unused_scales(streams, len(layers)),
    )


def _layers(config: ConfigFile, max_length: int | None, widths: Sequence[int]) -> list[LayerSpec]:
    window = config.size("sliding_window", high=MAX_LENGTH)
    windows = mixed_windows(config, window, lambda layer: (layer + 1) % 5 != 0)
    base = config.number("rope_local_base_freq", LOCAL_BASE)
    full, near = full_and_sliding_ropes(config, head_dim(config), max_length, base=FULL_BASE, sliding_base=base)
    return [
        LayerSpec(
            window=kept,
            rope=full if kept is None else near,
            keys_of=owner,
            intermediate_size=None if width == widths[0] else width,
            gate_threshold=threshold,
        )
        for kept, owner, width, threshold in zip(
            windows, key_owners(config, windows), widths, _thresholds(config, len(windows)), strict=True
        )
    ]


def _widths(config: ConfigFile, count: int) -> list[int]:
    """Return the size of the MLP of each layer."""
    field = "intermediate_size"
    found = config.fields[field]
    if not isinstance(found, list):
        return [config.size(field)] * count
    if len(found) != count:
        raise config.error(field, f"a size, or one for each of the {count} layers")
    return [ConfigFile(config.where, {field: each}).size(field) for each in found]


def _thresholds(config: ConfigFile, count: int) -> list[float | None]:
    """Return for each layer by how many standard deviations a gate must be above the mean; None: not at all."""
    found: object = config.fields.get(SHARES)
    if found is None:
        num_sparse = NUM_SPARSE if count > NUM_SPARSE else 0
        found = [USUAL_SHARE] * num_sparse + [0] * (count - num_sparse)
    shares = found if isinstance(found, list) else []
    if len(shares) != count or not all(type(share) in (int, float) and 0 <= share < 1 for share in shares):
        raise config.error(SHARES, f"a number from 0 to below 1 for each of the {count} layers")
    return [float(np.float32(NormalDist().inv_cdf(share))) if share else None for share in shares]


def _unused_scales(streams: StreamsSpec, count: int) -> frozenset[str]:
    """Return the names of the tensors for Part.STREAM_SCALE, which checkpoints have even if it is not used."""
    stem = STEMS[Part.STREAM_SCALE] + ".weight"
    return frozenset() if streams.scales else frozenset(stem.format(layer=layer) for layer in range(count))
